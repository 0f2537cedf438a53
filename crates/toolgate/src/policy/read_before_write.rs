//! Implements `read_before_write`: a file must be read before a tool overwrites it.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Value, json};

use super::definition;
use super::{Ask, Done, Fault, FileFact, Needs, Note, Observation, Outline, Policy, Problem, Remedy, Severity, Terms, Verdict};
use crate::call::error::ToolError;
use crate::call::error_code;
use crate::diagnostic::{ToolNames, not_one, secret_key, unknown_tool};
use crate::files::{Expect, normal_path};
use crate::session::state::Change;
use crate::tool::Spec;
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
        Self { name: name.to_owned(), guarded_tools: BTreeMap::new(), read_tool: "read_file".into() }
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
    pub(crate) fn remembers(name: &str, mark: &Value) -> bool {
        name.starts_with(&self::mark("")) && serde_json::from_value::<Digest>(mark.clone()).is_ok()
    }

    fn path(&self, ask: &Ask<'_>) -> Option<String> {
        let pointer = self.guarded_tools.get(ask.tool.name())?;
        ask.argument(pointer)?.as_str().map(|path| normal_path(path).unwrap_or_else(|_| path.to_owned()))
    }
}

fn mark(path: &str) -> String {
    format!("read_before_write/{path}")
}

impl Policy for ReadBeforeWrite {
    fn name(&self) -> &str {
        &self.name
    }

    fn governs(&self, tool: &Spec) -> bool {
        self.guarded_tools.contains_key(tool.name())
    }

    fn problems(&self, tools: &[&Spec]) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.guarded_tools.is_empty() {
            problems.push(Problem::at("guard", "the rule guards no tool, so it never applies").help("name at least one"));
        }
        for (tool, path) in &self.guarded_tools {
            let field = format!("guard.{tool}");
            problems.extend(unknown_tool(&field, tool, tools));
            problems.extend(not_one(&field, path));
            let own: Vec<&Spec> = tools.iter().copied().filter(|spec| **tool == *spec.name()).collect();
            problems.extend(secret_key(&field, path, &own));
            problems.extend(ToolNames::of([&**tool]).unknown_arguments(tools, [(field.clone(), path)].into_iter()));
        }
        // A denial suggests this tool to the model, so it must exist and take a path.
        let reader = tools.iter().find(|tool| *self.read_tool == *tool.name());
        match reader {
            None => problems.extend(
                unknown_tool("read_tool", &self.read_tool, tools).map(|problem| Problem { severity: Severity::Warning, ..problem }),
            ),
            Some(tool) => problems.extend(
                ToolNames::of([tool.name()]).unknown_arguments(tools, [("read_tool".to_owned(), &Pointer::from("/path"))].into_iter()),
            ),
        }
        problems
    }

    fn outline(&self, _: &Spec) -> Outline<'_> {
        Outline { needs_files: true, ..Outline::default() }
    }

    fn definition(&self) -> String {
        let guarded: Value = self.guarded_tools.iter().map(|(tool, path)| json!([tool, path.to_string()])).collect();
        let parts = json!({ "name": self.name, "guarded": guarded, "read_tool": self.read_tool });
        definition::definition("read_before_write", &parts)
    }

    fn hears_all(&self) -> bool {
        // Any tool of the agent may read the file.
        true
    }

    fn needs(&self, ask: &Ask<'_>, needs: &mut Needs) {
        if let Some(path) = self.path(ask) {
            needs.marks.push(mark(&path));
            needs.files.push(path);
        }
    }

    fn check(&self, ask: &Ask<'_>) -> Result<Verdict, Fault> {
        let path = self.path(ask).ok_or_else(|| Fault::new(format!("the call of `{}` has no path to write", ask.tool.name())))?;
        let seen: Option<Digest> = ask.mark(&mark(&path))?.and_then(|seen| serde_json::from_value(seen.clone()).ok());
        let deny = |code, message| Ok(Verdict::deny(ToolError::of(code, message)));
        ask.note(|| Note {
            what: format!("`{path}` was read in this session and is unchanged, or is new"),
            found: match (ask.file(&path), seen.is_some()) {
                (Ok(FileFact::Absent), _) => "new file".to_owned(),
                (Ok(FileFact::Present(_)), false) => "exists, but was not read".to_owned(),
                (Ok(FileFact::Present(now)), true) => {
                    if seen == Some(*now) { "read, unchanged" } else { "read, but changed since" }.to_owned()
                }
                (Ok(FileFact::Unreadable(why)), _) => why.clone(),
                (Err(fault), _) => fault.to_string(),
            },
            holds: matches!(ask.file(&path), Ok(FileFact::Absent))
                || matches!(ask.file(&path), Ok(FileFact::Present(now)) if seen == Some(*now)),
        });
        let expects = match (ask.file(&path)?, seen) {
            (FileFact::Absent, _) => Expect::Absent(path),
            (FileFact::Unreadable(why), _) => return Err(Fault::new(format!("cannot read `{path}`: {why}"))),
            (FileFact::Present(_), None) => {
                return deny(
                    error_code::READ_BEFORE_WRITE,
                    format!("`{path}` exists and has not been read in this session; read it before you overwrite it"),
                );
            }
            (FileFact::Present(now), Some(seen)) if *now != seen => {
                return deny(
                    error_code::STALE_READ,
                    format!("`{path}` has changed since it was read; read it again before you overwrite it"),
                );
            }
            (FileFact::Present(now), Some(_)) => Expect::Unchanged(path, *now),
        };
        Ok(Verdict::Allow(Terms { file_expectations: vec![expects], ..Terms::default() }))
    }

    fn remedies(&self, ask: &Ask<'_>) -> Option<Vec<Remedy>> {
        let path = self.path(ask)?;
        let Ok(FileFact::Present(now)) = ask.file(&path) else { return None };
        let arguments = [("path".to_owned(), Value::String(path.clone()))].into_iter().collect();
        let marks = vec![(Arc::from(mark(&path)), Some(now.to_string().into()))];
        Some(vec![Remedy { tool: Arc::clone(&self.read_tool), arguments, marks, ..Remedy::default() }])
    }

    fn on_result(&self, done: &Done<'_>) -> Result<Vec<Change>, Fault> {
        let remember = |path: &str, digest: Option<&Digest>| (Arc::from(mark(path)), digest.map(|d| d.to_string().into()));
        Ok(done
            .file_accesses
            .iter()
            .filter_map(|seen| match seen {
                Observation::Read(path, digest) | Observation::Wrote(path, digest) => Some(remember(path, Some(digest))),
                Observation::Removed(path) => Some(remember(path, None)),
                Observation::Listed(_) => None,
            })
            .collect())
    }
}
