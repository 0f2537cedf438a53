//! Reads rules and agents from TOML files.
//!
//! Every rule in a file is a plain type of [`crate::policy`]; the file is only another notation for
//! that type.
//!
//! ```
//! use toolgate::policy::RuleSet;
//! let rules = RuleSet::parse("policy.toml", r#"
//!     [[policy]]
//!     name = "refund_cap"
//!     rule = "deny"
//!     tools = ["issue_refund"]
//!     where = [{ argument = "/amount_usd", above = 500 }]
//!     reason = "Refunds over $500 require human approval."
//! "#);
//! assert!(rules.problems().is_empty());
//! assert_eq!(rules.names().collect::<Vec<_>>(), ["refund_cap"]);
//! ```

pub mod read_file;
mod recorded_rules;
mod rule_kinds;
pub mod rule_table;
pub mod table_reader;
mod typed_values;

pub(crate) use crate::policy::source::recorded_rules::{
    parse_recorded_rules, parse_recorded_tables,
};

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use annotate_snippets::renderer::DecorStyle;
use annotate_snippets::{AnnotationKind, Level, Renderer, Snippet};

use crate::policy::{Diagnostic, Policy, Severity, SourceSpan};

/// Prefix of the names of rules that toolgate itself adds.
pub const BUILT_IN_RULE_PREFIX: &str = "toolgate:";

/// Names the agent, and its only tool, of the self-test call that a gateway must refuse.
///
/// No configuration may declare an agent of this name.
pub const CANARY_AGENT: &str = "toolgate-canary";

/// Names the principal of the self-test call.
///
/// The name is reserved. Pausing a person therefore never stops the self-test.
pub const CANARY_PRINCIPAL: &str = "(canary)";

/// Defines where a policy is attached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PolicyScope {
    Tools(Vec<String>),
    Section(String),
    Prompt,
    Agent,
}

/// A rule and its position in a file.
#[derive(Clone)]
pub struct SourcedRule {
    pub(crate) scope: PolicyScope,
    /// The rule.
    pub policy: Arc<dyn Policy>,
    source: Option<Arc<RuleSource>>,
}

/// The file of a rule, and the byte ranges of its parts.
struct RuleSource {
    file: Arc<str>,
    text: Arc<str>,
    part_spans: BTreeMap<String, Range<usize>>,
}

impl SourcedRule {
    /// Wraps a rule that was written in Rust.
    pub(crate) fn from_code(scope: PolicyScope, policy: Arc<dyn Policy>) -> Self {
        Self { scope, policy, source: None }
    }

    /// Checks whether two rules have the same name, scope, mode and definition.
    fn is_identical(&self, other: &Self) -> bool {
        let (rule, other_rule) = (&self.policy, &other.policy);
        rule.name() == other_rule.name()
            && self.scope == other.scope
            && rule.mode() == other_rule.mode()
            && rule.definition() == other_rule.definition()
    }

    /// Checks whether the file sets a field of this rule.
    pub fn has_field(&self, field: &str) -> bool {
        self.source.as_ref().is_some_and(|source| source.part_spans.contains_key(field))
    }

    pub(crate) const fn is_from_file(&self) -> bool {
        self.source.is_some()
    }

    /// Returns the name and the text of the file.
    pub(crate) fn file(&self) -> Option<(&str, &str)> {
        self.source.as_ref().map(|source| (&*source.file, &*source.text))
    }

    /// Returns the position of a field, or of the closest enclosing part if the field is absent.
    pub fn source_span(&self, field: &str, within: Option<Range<usize>>) -> Option<SourceSpan> {
        let source = self.source.as_ref()?;
        let mut field = field;
        let span = loop {
            match (source.part_spans.get(field), field.rsplit_once('.')) {
                (Some(span), _) => break span.clone(),
                (None, Some((outer, _))) => field = outer,
                (None, None) => break source.part_spans.get("")?.clone(),
            }
        };
        let span =
            within.and_then(|within| map_inner_range(&source.text, &span, within)).unwrap_or(span);
        Some(SourceSpan {
            file: Arc::clone(&source.file),
            text: Arc::clone(&source.text),
            range: span,
        })
    }
}

/// Maps a byte range inside a string value to bytes of the file.
///
/// Returns `None` if the file spells the string with escapes.
fn map_inner_range(text: &str, span: &Range<usize>, within: Range<usize>) -> Option<Range<usize>> {
    let raw = text.get(span.clone())?;
    let quotes = ["\"\"\"\n", "\"\"\"", "'''\n", "'''", "\"", "'"]
        .into_iter()
        .find(|quotes| raw.starts_with(quotes))?;
    if raw.contains('\\') && quotes.starts_with('"') {
        return None;
    }
    let start = span.start + quotes.len();
    let end = (start + within.end).min(span.end.saturating_sub(quotes.trim_end().len()));
    (start + within.start < end).then(|| start + within.start..end)
}

/// The rules of one or more files.
#[derive(Clone, Default)]
pub struct RuleSet {
    policies: Vec<SourcedRule>,
    /// The problems of the files.
    pub problems: Vec<Diagnostic>,
}

impl RuleSet {
    /// Reads rules from the text of a file.
    ///
    /// Problems are collected and reported when an agent is built with these rules.
    #[must_use]
    pub fn parse(file: &str, text: &str) -> Self {
        Self::parse_all([(file, text)])
    }

    /// Reads several files as one.
    ///
    /// Rules keep the order of the files, then the order of the lines.
    pub fn parse_all<'a>(files: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        crate::policy::source::rule_table::read_policy_files(files)
    }

    /// Reads files from disk.
    ///
    /// # Errors
    /// A file cannot be read. The message contains its name.
    pub fn load(paths: impl IntoIterator<Item = impl AsRef<Path>>) -> std::io::Result<Self> {
        let mut files = Vec::new();
        for path in paths {
            let path = path.as_ref();
            let named = |error: std::io::Error| {
                std::io::Error::new(error.kind(), format!("{}: {error}", path.display()))
            };
            files.push((
                path.display().to_string(),
                crate::policy::source::read_file::read_text_file(path).map_err(named)?,
            ));
        }
        Ok(Self::parse_all(files.iter().map(|(name, text)| (name.as_str(), text.as_str()))))
    }

    /// Returns the problems of the files themselves.
    ///
    /// Problems that depend on the tools of an agent are reported when the agent is built.
    #[must_use]
    pub fn problems(&self) -> &[Diagnostic] {
        &self.problems
    }

    /// Iterates over the names of the rules that could be read.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.policies.iter().map(|written| written.policy.name())
    }

    /// Iterates over the rules and their positions.
    pub fn sourced_rules(&self) -> impl Iterator<Item = &SourcedRule> {
        self.policies.iter()
    }

    /// Appends other rules.
    #[must_use]
    pub fn append(mut self, others: Self) -> Self {
        self.policies.extend(others.policies);
        self.problems.extend(others.problems);
        self
    }

    /// Appends the rules that are not yet present, so that one rule in two files counts once.
    pub fn append_new(self, mut others: Self) -> Self {
        let is_known =
            |other: &SourcedRule| self.policies.iter().any(|rule| rule.is_identical(other));
        others.policies.retain(|other| !is_known(other));
        self.append(others)
    }

    pub(crate) fn into_parts(self) -> (Vec<SourcedRule>, Vec<Diagnostic>) {
        (self.policies, self.problems)
    }
}

/// Renders problems for a terminal.
pub fn render_problems(problems: &[Diagnostic], colours: bool) -> String {
    let renderer =
        if colours { Renderer::styled() } else { Renderer::plain() }.decor_style(DecorStyle::Ascii);
    let render = |problem: &Diagnostic| {
        let level = match problem.severity {
            Severity::Error => Level::ERROR,
            Severity::Warning => Level::WARNING,
            Severity::Note => Level::NOTE,
        };
        let title = match &problem.rule {
            Some(rule) => {
                format!("policy `{}`: {}", toolgate_text::escape_for_display(rule), problem.message)
            }
            None => problem.message.clone(),
        };
        let mut group = level.primary_title(title).elements(problem.span.iter().map(|place| {
            Snippet::source(&*place.text)
                .path(&*place.file)
                .annotation(AnnotationKind::Primary.span(place.range.clone()))
        }));
        if let Some(help) = &problem.help {
            group = group.element(Level::HELP.message(help));
        }
        renderer.render(&[group])
    };
    problems.iter().map(render).collect::<Vec<_>>().join("\n\n")
}
