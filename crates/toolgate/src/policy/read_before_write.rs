//! Implements `read_before_write`: a file must be read before a tool overwrites it.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Value, json};

use super::definition;
use super::{
    Diagnostic, FactRequest, FileAccess, FileFact, Obligations, Policy, PolicyError, PolicyInput,
    Prerequisite, RuleCheck, Severity, StaticSummary, SuccessfulCall, Verdict,
};
use crate::call::error::ToolError;
use crate::call::error_code;
use crate::diagnostic::{ToolNames, check_lookup_key, check_single_value, check_tool_name};
use crate::files::{FileExpectation, normalize_path};
use crate::session::state::NamedChange;
use crate::tool::ToolSpec;
use toolgate_json::{Digest, Pointer};

/// Denies a write to an existing file that this session has not read, or that changed since.
///
/// A new file is created exclusively. The file system reports which files were read, so every tool
/// that reads counts. The content is compared again when the file is opened.
#[derive(Debug, Clone)]
pub struct ReadBeforeWrite {
    name: String,
    guarded_tools: BTreeMap<Arc<str>, Pointer>,
    read_tool: Arc<str>,
}

impl Default for ReadBeforeWrite {
    /// Guards `write_file` at `/path`.
    fn default() -> Self {
        Self::new("read_before_write").guard("write_file", "/path")
    }
}

impl ReadBeforeWrite {
    /// Creates a rule that guards no tool yet.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            guarded_tools: BTreeMap::new(),
            read_tool: "read_file".into(),
        }
    }

    /// Sets the tool that a denial suggests for reading; it takes a `path` [default: `read_file`].
    #[must_use]
    pub fn read_with(mut self, tool: &str) -> Self {
        self.read_tool = tool.into();
        self
    }

    /// Guards one more tool, which writes the file that this argument names.
    #[must_use]
    pub fn guard(mut self, tool: &str, path: impl Into<Pointer>) -> Self {
        self.guarded_tools.insert(tool.into(), path.into());
        self
    }

    /// Returns whether this mark holds the digest of a file that was read.
    pub(crate) fn is_read_mark(name: &str, mark: &Value) -> bool {
        name.starts_with(&self::mark_name(""))
            && serde_json::from_value::<Digest>(mark.clone()).is_ok()
    }

    fn guarded_path(&self, input: &PolicyInput<'_>) -> Option<String> {
        let pointer = self.guarded_tools.get(input.tool.name())?;
        input
            .argument(pointer)?
            .as_str()
            .map(|path| normalize_path(path).unwrap_or_else(|_| path.to_owned()))
    }
}

fn mark_name(path: &str) -> String {
    format!("read_before_write/{path}")
}

impl Policy for ReadBeforeWrite {
    fn name(&self) -> &str {
        &self.name
    }

    fn governs(&self, tool: &ToolSpec) -> bool {
        self.guarded_tools.contains_key(tool.name())
    }

    fn problems(&self, tools: &[&ToolSpec]) -> Vec<Diagnostic> {
        let mut problems = Vec::new();
        if self.guarded_tools.is_empty() {
            problems.push(
                Diagnostic::at_field("guard", "the rule guards no tool, so it never applies")
                    .with_help("name at least one"),
            );
        }
        for (tool, path) in &self.guarded_tools {
            let field = format!("guard.{tool}");
            problems.extend(check_tool_name(&field, tool, tools));
            problems.extend(check_single_value(&field, path));
            let governed: Vec<&ToolSpec> =
                tools.iter().copied().filter(|spec| **tool == *spec.name()).collect();
            problems.extend(check_lookup_key(&field, path, &governed));
            problems.extend(
                ToolNames::new([&**tool])
                    .check_arguments(tools, [(field.clone(), path)].into_iter()),
            );
        }
        // A denial suggests this tool to the model, so it must exist and take a path.
        let reader = tools.iter().find(|tool| *self.read_tool == *tool.name());
        match reader {
            None => problems.extend(
                check_tool_name("read_tool", &self.read_tool, tools)
                    .map(|problem| Diagnostic { severity: Severity::Warning, ..problem }),
            ),
            Some(tool) => problems.extend(ToolNames::new([tool.name()]).check_arguments(
                tools,
                [("read_tool".to_owned(), &Pointer::from("/path"))].into_iter(),
            )),
        }
        problems
    }

    fn static_summary(&self, _: &ToolSpec) -> StaticSummary<'_> {
        StaticSummary { needs_files: true, ..StaticSummary::default() }
    }

    fn definition(&self) -> String {
        let guarded: Value =
            self.guarded_tools.iter().map(|(tool, path)| json!([tool, path.to_string()])).collect();
        let parts = json!({ "name": self.name, "guarded": guarded, "read_tool": self.read_tool });
        definition::definition("read_before_write", &parts)
    }

    fn observes_all_tools(&self) -> bool {
        // Any tool of the agent may read the file.
        true
    }

    fn request_facts(&self, input: &PolicyInput<'_>, needs: &mut FactRequest) {
        if let Some(path) = self.guarded_path(input) {
            needs.marks.push(mark_name(&path));
            needs.files.push(path);
        }
    }

    fn check(&self, input: &PolicyInput<'_>) -> Result<Verdict, PolicyError> {
        let path = self.guarded_path(input).ok_or_else(|| {
            PolicyError::new(format!("the call of `{}` has no path to write", input.tool.name()))
        })?;
        let seen: Option<Digest> = input
            .mark(&mark_name(&path))?
            .and_then(|seen| serde_json::from_value(seen.clone()).ok());
        let deny = |code, message| Ok(Verdict::deny(ToolError::from_code(code, message)));
        input.record_check(|| RuleCheck {
            what: format!("`{path}` was read in this session and is unchanged, or is new"),
            found: match (input.file(&path), seen.is_some()) {
                (Ok(FileFact::Absent), _) => "new file".to_owned(),
                (Ok(FileFact::Present(_)), false) => "exists, but was not read".to_owned(),
                (Ok(FileFact::Present(now)), true) => {
                    if seen == Some(*now) { "read, unchanged" } else { "read, but changed since" }
                        .to_owned()
                }
                (Ok(FileFact::Unreadable(reason)), _) => reason.clone(),
                (Err(fault), _) => fault.to_string(),
            },
            holds: matches!(input.file(&path), Ok(FileFact::Absent))
                || matches!(input.file(&path), Ok(FileFact::Present(now)) if seen == Some(*now)),
        });
        let expectation = match (input.file(&path)?, seen) {
            (FileFact::Absent, _) => FileExpectation::Absent(path),
            (FileFact::Unreadable(reason), _) => {
                return Err(PolicyError::new(format!("cannot read `{path}`: {reason}")));
            }
            (FileFact::Present(_), None) => {
                return deny(
                    error_code::READ_BEFORE_WRITE,
                    format!(
                        "`{path}` exists and has not been read in this session; read it before you overwrite it"
                    ),
                );
            }
            (FileFact::Present(now), Some(seen)) if *now != seen => {
                return deny(
                    error_code::STALE_READ,
                    format!(
                        "`{path}` has changed since it was read; read it again before you overwrite it"
                    ),
                );
            }
            (FileFact::Present(now), Some(_)) => FileExpectation::Unchanged(path, *now),
        };
        Ok(Verdict::Allow(Obligations {
            file_expectations: vec![expectation],
            ..Obligations::default()
        }))
    }

    fn suggest_prerequisites(&self, input: &PolicyInput<'_>) -> Option<Vec<Prerequisite>> {
        let path = self.guarded_path(input)?;
        let Ok(FileFact::Present(now)) = input.file(&path) else { return None };
        let arguments = [("path".to_owned(), Value::String(path.clone()))].into_iter().collect();
        let marks = vec![(Arc::from(mark_name(&path)), Some(now.to_string().into()))];
        Some(vec![Prerequisite {
            tool: Arc::clone(&self.read_tool),
            arguments,
            marks,
            ..Prerequisite::default()
        }])
    }

    fn on_result(&self, done: &SuccessfulCall<'_>) -> Result<Vec<NamedChange>, PolicyError> {
        let remember = |path: &str, digest: Option<&Digest>| {
            (Arc::from(mark_name(path)), digest.map(|d| d.to_string().into()))
        };
        Ok(done
            .file_accesses
            .iter()
            .filter_map(|seen| match seen {
                FileAccess::Read(path, digest) | FileAccess::Wrote(path, digest) => {
                    Some(remember(path, Some(digest)))
                }
                FileAccess::Removed(path) => Some(remember(path, None)),
                FileAccess::Listed(_) => None,
            })
            .collect())
    }
}
