//! Implements `toolgate lint`: finds mistakes and unclear text in a configuration.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, IsTerminal, Write};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::process::ExitCode;

use serde_json::{Value, json};
use toolgate::policy::{Diagnostic, Severity, SourceSpan};
use toolgate_config::{Config, ConfigError, LINTS, LintFinding, ToolUsage};
use toolgate_store::Ledger;

use crate::command::common::{BOLD, GREEN, IgnoreBrokenPipe, format_count, sanitize};
use toolgate_hook::effective_config;

/// Find mistakes in a configuration, and descriptions that a model may misread.
///
/// To allow a finding, add an entry to the configuration:
/// lint = [{ allow = "CODE", of = "NAME", reason = "…" }].
#[derive(clap::Args)]
#[command(
    after_help = "Exit code: 0 without errors (warnings are allowed), 1 with errors, 2 if the configuration cannot be read.\n\nExamples:\n  toolgate lint\n  toolgate lint --fix                      fix misspelt names\n  toolgate lint --store ledger.db          also find tools that are rarely used\n  toolgate lint --format github            as annotations of a pull request"
)]
pub(crate) struct Args {
    /// Configuration file [default: that of the project here].
    #[arg(long, value_name = "FILE", env = "TOOLGATE_CONFIG")]
    config: Option<PathBuf>,
    /// Fix misspelt names.
    #[arg(long)]
    fix: bool,
    /// Output format.
    #[arg(long, value_enum, default_value = "text")]
    format: LintFormat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum LintFormat {
    /// For people.
    Text,
    /// One JSON object.
    Json,
    /// Annotations of GitHub Actions.
    Github,
    /// SARIF 2.1.0, for code scanning.
    Sarif,
}

pub(crate) fn run(args: &Args, store: Option<&Path>) -> io::Result<ExitCode> {
    let mut mended: Vec<String> = Vec::new();
    let path = toolgate_hook::effective_config::config_path_or_default(args.config.as_ref())?;
    let mut found = collect_findings(&path, store)?;
    if args.fix {
        // One fix may reveal another problem.
        for _ in 0..16 {
            let now = apply_fixes(&found)?;
            if now.is_empty() {
                break;
            }
            mended.extend(now);
            found = collect_findings(&path, store)?;
        }
    }
    let mut out = IgnoreBrokenPipe(anstream::stdout().lock());
    match args.format {
        LintFormat::Text => print_text(&mut out, &found, &mended)?,
        LintFormat::Json => writeln!(
            out,
            "{}",
            json!({"findings": found.iter().map(finding_to_json).collect::<Vec<_>>(), "mended": mended.len()})
        )?,
        LintFormat::Github => {
            found.iter().try_for_each(|finding| writeln!(out, "{}", github_annotation(finding)))?
        }
        LintFormat::Sarif => writeln!(out, "{:#}", to_sarif(&found))?,
    }
    let wrong = found.iter().any(|finding| finding.problem.severity == Severity::Error);
    Ok(if wrong { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Returns all findings of a configuration.
fn collect_findings(path: &Path, store: Option<&Path>) -> io::Result<Vec<LintFinding>> {
    let usage = store.map(count_usage).transpose()?;
    let config = effective_config::with_pinned_tools(Config::load(path)?, path)?;
    let left = |code: &str, of: Option<&String>| {
        config.is_finding_allowed(code, of.map_or("", String::as_str))
    };
    let mut found = config.lint(usage.as_ref());
    // A problem with its own lint code keeps that code. Any other problem is `load` or `dead_rule`.
    let told = |problem: Diagnostic, otherwise: &'static str| {
        let code = problem.lint_code.unwrap_or(otherwise);
        if code != "load" && left(code, problem.rule.as_ref()) {
            None
        } else {
            Some(LintFinding::from_problem(code, problem))
        }
    };
    let loaded = effective_config::with_pinned_tools(Config::load(path)?, path)?.build_agents(None);
    match loaded {
        Err(error) => found
            .splice(0..0, error.problems.into_iter().filter_map(|problem| told(problem, "load")))
            .for_each(drop),
        Ok(agents) => {
            let warnings = agents.iter().flat_map(|agent| agent.warnings().iter().cloned());
            found.extend(warnings.filter_map(|problem| told(problem, "dead_rule")));
            found.sort_by_cached_key(|finding| finding.problem.sort_key());
        }
    }
    Ok(found)
}

/// Counts the sessions in which each tool was used.
fn count_usage(store: &Path) -> io::Result<ToolUsage> {
    let ledger = Ledger::open(store).map_err(io::Error::other)?;
    let mut usage = ToolUsage::default();
    for (agent, tool, sessions) in ledger.sessions_by_tool().map_err(io::Error::other)? {
        match tool {
            Some(tool) => usage.tools.insert((agent, tool), sessions),
            None => usage.sessions.insert(agent, sessions),
        };
    }
    Ok(usage)
}

/// A fix: the span to replace, its replacement and its line number.
type LintFix<'f> = (Range<usize>, &'f str, usize);

/// Applies the fixes of all findings to their files. Returns a description of each fix.
fn apply_fixes(found: &[LintFinding]) -> io::Result<Vec<String>> {
    let mut files: BTreeMap<String, Vec<LintFix<'_>>> = BTreeMap::new();
    for finding in found {
        if let (Some(place), Some((span, text))) = (&finding.problem.span, &finding.fix) {
            files.entry(place.file.to_string()).or_default().push((
                span.clone(),
                text,
                place.line_column().0,
            ));
        }
    }
    let mut mended = Vec::new();
    for (path, mut fixes) in files {
        let mut text = fs::read_to_string(&path)?;
        let mut told = Vec::new();
        // Apply the last fix first, so that earlier spans stay valid.
        fixes.sort_by_key(|(span, ..)| std::cmp::Reverse(span.start));
        fixes.dedup_by(|a, b| a.0.start == b.0.start);
        for (span, new, line) in fixes {
            if let Some(old) = text.get(span.clone()).map(str::to_owned) {
                text.replace_range(span, new);
                told.push(format!("{path}:{line}: {old} -> {new}"));
            }
        }
        super::init::write_atomically(Path::new(&path), &text)?;
        mended.extend(told.into_iter().rev());
    }
    Ok(mended)
}

fn print_text(out: &mut impl Write, found: &[LintFinding], mended: &[String]) -> io::Result<()> {
    if !mended.is_empty() {
        writeln!(out, "{GREEN}fixed{GREEN:#} {}", format_count(mended.len() as u64, "problem"))?;
        for one in mended {
            writeln!(out, "  {}", sanitize(one))?;
        }
        writeln!(out)?;
    }
    for finding in found {
        let mut problem = finding.problem.clone();
        problem.message = format!("{} [{}]", problem.message, finding.code);
        let rendered = ConfigError { problems: vec![problem] }.render(io::stdout().is_terminal());
        writeln!(out, "{rendered}\n")?;
    }
    if found.is_empty() {
        return writeln!(out, "no findings");
    }
    let errors =
        found.iter().filter(|finding| finding.problem.severity == Severity::Error).count() as u64;
    let notes =
        found.iter().filter(|finding| finding.problem.severity == Severity::Note).count() as u64;
    let warnings = found.len() as u64 - errors - notes;
    let noted =
        if notes > 0 { format!(", {}", format_count(notes, "note")) } else { String::new() };
    let mendable = found.iter().filter(|finding| finding.fix.is_some()).count();
    let hint = if mendable > 0 { "; `--fix` fixes some" } else { "" };
    writeln!(
        out,
        "{BOLD}{}, {}{noted}{BOLD:#}{hint}",
        format_count(errors, "error"),
        format_count(warnings, "warning")
    )
}

/// Returns the line and column of a byte, counted from 1.
fn line_and_column(place: &SourceSpan, at: usize) -> (usize, usize) {
    let before = place.text.get(..at).unwrap_or(&place.text);
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
    (line, column)
}

const fn severity_name(severity: Severity) -> &'static str {
    match severity {
        Severity::Error => "error",
        Severity::Warning => "warning",
        Severity::Note => "note",
    }
}

fn finding_to_json(finding: &LintFinding) -> Value {
    let problem = &finding.problem;
    let place = problem.span.as_ref().map(|place| {
        let ((line, column), (end_line, end_column)) = (line_and_column(place, place.range.start), line_and_column(place, place.range.end));
        json!({"file": &*place.file, "line": line, "column": column, "endLine": end_line, "endColumn": end_column})
    });
    let fix = finding.fix.as_ref().map(|(_, text)| text);
    json!({
        "code": finding.code, "severity": severity_name(problem.severity), "message": problem.message, "help": problem.help, "rule": problem.rule,
        "place": place, "fix": fix,
    })
}

fn github_annotation(finding: &LintFinding) -> String {
    let problem = &finding.problem;
    let escape = |text: &str| text.replace('%', "%25").replace('\r', "%0D").replace('\n', "%0A");
    let place = problem.span.as_ref().map_or_else(String::new, |place| {
        let (line, column) = line_and_column(place, place.range.start);
        format!(
            "file={},line={line},col={column},",
            escape(&place.file).replace(':', "%3A").replace(',', "%2C")
        )
    });
    let help = problem.help.as_ref().map(|help| format!("\n{help}")).unwrap_or_default();
    // GitHub calls a note `notice`.
    let level =
        if problem.severity == Severity::Note { "notice" } else { severity_name(problem.severity) };
    format!(
        "::{level} {place}title={}::{}",
        finding.code,
        escape(&format!("{}{help}", problem.message))
    )
}

/// Converts a path to a URI: relative to the current directory if possible, else absolute.
fn file_uri(file: &str) -> String {
    let whole = std::path::absolute(file).unwrap_or_else(|_| PathBuf::from(file));
    let leads_up = whole.components().any(|part| part == Component::ParentDir);
    let whole = if leads_up { fs::canonicalize(&whole).unwrap_or(whole) } else { whole };
    let here = std::env::current_dir().unwrap_or_default();
    let (scheme, path) = match whole.strip_prefix(&here) {
        Ok(below) => ("", below),
        Err(_) => ("file://", whole.as_path()),
    };
    let encoded = path.as_os_str().as_encoded_bytes().iter().map(|byte| match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
            char::from(*byte).to_string()
        }
        _ => format!("%{byte:02X}"),
    });
    format!("{scheme}{}", encoded.collect::<String>())
}

fn to_sarif(found: &[LintFinding]) -> Value {
    let result = |finding: &LintFinding| {
        let problem = &finding.problem;
        let location = problem.span.as_ref().map(|place| {
            let ((line, column), (end_line, end_column)) =
                (line_and_column(place, place.range.start), line_and_column(place, place.range.end));
            json!({"physicalLocation": {
                "artifactLocation": {"uri": file_uri(&place.file)},
                "region": {"startLine": line, "startColumn": column, "endLine": end_line, "endColumn": end_column},
            }})
        });
        let help = problem.help.as_ref().map(|help| format!(" ({help})")).unwrap_or_default();
        json!({
            "ruleId": finding.code, "level": severity_name(problem.severity), "message": {"text": format!("{}{help}", problem.message)},
            "locations": location.into_iter().collect::<Vec<_>>(),
        })
    };
    let rules: Vec<Value> = LINTS
        .iter()
        .map(|(code, why)| json!({"id": code, "shortDescription": {"text": why}}))
        .collect();
    json!({
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0",
        "runs": [{
            "tool": {"driver": {"name": "toolgate", "version": env!("CARGO_PKG_VERSION"), "rules": rules}},
            "results": found.iter().map(result).collect::<Vec<_>>(),
        }],
    })
}
