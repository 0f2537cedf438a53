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
    let mut fixed: Vec<String> = Vec::new();
    let path = toolgate_hook::effective_config::config_path_or_default(args.config.as_ref())?;
    let mut findings = collect_findings(&path, store)?;
    if args.fix {
        // One fix may reveal another problem.
        for _ in 0..16 {
            let applied = apply_fixes(&findings)?;
            if applied.is_empty() {
                break;
            }
            fixed.extend(applied);
            findings = collect_findings(&path, store)?;
        }
    }
    let mut out = IgnoreBrokenPipe(anstream::stdout().lock());
    match args.format {
        LintFormat::Text => print_text(&mut out, &findings, &fixed)?,
        LintFormat::Json => writeln!(
            out,
            "{}",
            json!({"findings": findings.iter().map(finding_to_json).collect::<Vec<_>>(), "mended": fixed.len()})
        )?,
        LintFormat::Github => findings
            .iter()
            .try_for_each(|finding| writeln!(out, "{}", github_annotation(finding)))?,
        LintFormat::Sarif => writeln!(out, "{:#}", to_sarif(&findings))?,
    }
    let has_errors = findings.iter().any(|finding| finding.problem.severity == Severity::Error);
    Ok(if has_errors { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Returns all findings of a configuration.
fn collect_findings(path: &Path, store: Option<&Path>) -> io::Result<Vec<LintFinding>> {
    let usage = store.map(count_usage).transpose()?;
    let config = effective_config::with_pinned_tools(Config::load(path)?, path)?;
    let is_allowed = |code: &str, of: Option<&String>| {
        config.is_finding_allowed(code, of.map_or("", String::as_str))
    };
    let mut findings = config.lint(usage.as_ref());
    // A problem with its own lint code keeps that code. Any other problem is `load` or `dead_rule`.
    let to_finding = |problem: Diagnostic, default_code: &'static str| {
        let code = problem.lint_code.unwrap_or(default_code);
        if code != "load" && is_allowed(code, problem.rule.as_ref()) {
            None
        } else {
            Some(LintFinding::from_problem(code, problem))
        }
    };
    let loaded = effective_config::with_pinned_tools(Config::load(path)?, path)?.build_agents(None);
    match loaded {
        Err(error) => findings
            .splice(
                0..0,
                error.problems.into_iter().filter_map(|problem| to_finding(problem, "load")),
            )
            .for_each(drop),
        Ok(agents) => {
            let warnings = agents.iter().flat_map(|agent| agent.warnings().iter().cloned());
            findings.extend(warnings.filter_map(|problem| to_finding(problem, "dead_rule")));
            findings.sort_by_cached_key(|finding| finding.problem.sort_key());
        }
    }
    Ok(findings)
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
fn apply_fixes(findings: &[LintFinding]) -> io::Result<Vec<String>> {
    let mut files: BTreeMap<String, Vec<LintFix<'_>>> = BTreeMap::new();
    for finding in findings {
        if let (Some(location), Some((span, text))) = (&finding.problem.span, &finding.fix) {
            files.entry(location.file.to_string()).or_default().push((
                span.clone(),
                text,
                location.line_column().0,
            ));
        }
    }
    let mut fixed = Vec::new();
    for (path, mut fixes) in files {
        let mut text = fs::read_to_string(&path)?;
        let mut descriptions = Vec::new();
        // Apply the last fix first, so that earlier spans stay valid.
        fixes.sort_by_key(|(span, ..)| std::cmp::Reverse(span.start));
        fixes.dedup_by(|a, b| a.0.start == b.0.start);
        for (span, new, line) in fixes {
            if let Some(old) = text.get(span.clone()).map(str::to_owned) {
                text.replace_range(span, new);
                descriptions.push(format!("{path}:{line}: {old} -> {new}"));
            }
        }
        super::init::write_atomically(Path::new(&path), &text)?;
        fixed.extend(descriptions.into_iter().rev());
    }
    Ok(fixed)
}

fn print_text(out: &mut impl Write, findings: &[LintFinding], fixed: &[String]) -> io::Result<()> {
    if !fixed.is_empty() {
        writeln!(out, "{GREEN}fixed{GREEN:#} {}", format_count(fixed.len() as u64, "problem"))?;
        for description in fixed {
            writeln!(out, "  {}", sanitize(description))?;
        }
        writeln!(out)?;
    }
    for finding in findings {
        let mut problem = finding.problem.clone();
        problem.message = format!("{} [{}]", problem.message, finding.code);
        let rendered = ConfigError { problems: vec![problem] }.render(io::stdout().is_terminal());
        writeln!(out, "{rendered}\n")?;
    }
    if findings.is_empty() {
        return writeln!(out, "no findings");
    }
    let errors =
        findings.iter().filter(|finding| finding.problem.severity == Severity::Error).count()
            as u64;
    let notes =
        findings.iter().filter(|finding| finding.problem.severity == Severity::Note).count() as u64;
    let warnings = findings.len() as u64 - errors - notes;
    let notes_text =
        if notes > 0 { format!(", {}", format_count(notes, "note")) } else { String::new() };
    let fixable = findings.iter().filter(|finding| finding.fix.is_some()).count();
    let hint = if fixable > 0 { "; `--fix` fixes some" } else { "" };
    writeln!(
        out,
        "{BOLD}{}, {}{notes_text}{BOLD:#}{hint}",
        format_count(errors, "error"),
        format_count(warnings, "warning")
    )
}

/// Returns the line and column of a byte, counted from 1.
fn line_and_column(location: &SourceSpan, offset: usize) -> (usize, usize) {
    let before = location.text.get(..offset).unwrap_or(&location.text);
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
    let location = problem.span.as_ref().map(|location| {
        let ((line, column), (end_line, end_column)) = (line_and_column(location, location.range.start), line_and_column(location, location.range.end));
        json!({"file": &*location.file, "line": line, "column": column, "endLine": end_line, "endColumn": end_column})
    });
    let fix = finding.fix.as_ref().map(|(_, text)| text);
    json!({
        "code": finding.code, "severity": severity_name(problem.severity), "message": problem.message, "help": problem.help, "rule": problem.rule,
        "place": location, "fix": fix,
    })
}

fn github_annotation(finding: &LintFinding) -> String {
    let problem = &finding.problem;
    let escape = |text: &str| text.replace('%', "%25").replace('\r', "%0D").replace('\n', "%0A");
    let location = problem.span.as_ref().map_or_else(String::new, |location| {
        let (line, column) = line_and_column(location, location.range.start);
        format!(
            "file={},line={line},col={column},",
            escape(&location.file).replace(':', "%3A").replace(',', "%2C")
        )
    });
    let help = problem.help.as_ref().map(|help| format!("\n{help}")).unwrap_or_default();
    // GitHub calls a note `notice`.
    let level =
        if problem.severity == Severity::Note { "notice" } else { severity_name(problem.severity) };
    format!(
        "::{level} {location}title={}::{}",
        finding.code,
        escape(&format!("{}{help}", problem.message))
    )
}

/// Converts a path to a URI: relative to the current directory if possible, else absolute.
fn file_uri(file: &str) -> String {
    let absolute = std::path::absolute(file).unwrap_or_else(|_| PathBuf::from(file));
    let has_parent_dir = absolute.components().any(|part| part == Component::ParentDir);
    let absolute =
        if has_parent_dir { fs::canonicalize(&absolute).unwrap_or(absolute) } else { absolute };
    let directory = std::env::current_dir().unwrap_or_default();
    let (scheme, path) = match absolute.strip_prefix(&directory) {
        Ok(relative) => ("", relative),
        Err(_) => ("file://", absolute.as_path()),
    };
    let encoded = path.as_os_str().as_encoded_bytes().iter().map(|byte| match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
            char::from(*byte).to_string()
        }
        _ => format!("%{byte:02X}"),
    });
    format!("{scheme}{}", encoded.collect::<String>())
}

fn to_sarif(findings: &[LintFinding]) -> Value {
    let result = |finding: &LintFinding| {
        let problem = &finding.problem;
        let location = problem.span.as_ref().map(|span| {
            let ((line, column), (end_line, end_column)) =
                (line_and_column(span, span.range.start), line_and_column(span, span.range.end));
            json!({"physicalLocation": {
                "artifactLocation": {"uri": file_uri(&span.file)},
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
            "results": findings.iter().map(result).collect::<Vec<_>>(),
        }],
    })
}
