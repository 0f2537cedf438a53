//! `read_before_write`: nobody overwrites what they have not seen.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Ask, Done, Fault, FileFact, Needs, Observation, Policy, Terms, Verdict};
use crate::code;
use crate::error::{NextStep, ToolError};
use crate::json::{Digest, Pointer};
use crate::resource::{Expect, normal_path};
use crate::session::Change;
use crate::tool::Spec;

/// An existing file must have been read in this session, and be unchanged since, before a guarded
/// tool writes it; a new one is created exclusively. What was read is known from the file system
/// itself, whichever tool read it, and compared again when the file is opened.
#[derive(Debug, Clone)]
pub struct ReadBeforeWrite {
    guarded: BTreeMap<Arc<str>, Pointer>,
    read_tool: Arc<str>,
}

impl Default for ReadBeforeWrite {
    /// Guards `write_file` at `/path`.
    fn default() -> Self {
        Self { guarded: BTreeMap::new(), read_tool: "read_file".into() }.guard("write_file", "/path")
    }
}

impl ReadBeforeWrite {
    /// Guards one more tool that writes the file named by this argument.
    #[must_use]
    pub fn guard(mut self, tool: &str, path: impl Into<Pointer>) -> Self {
        self.guarded.insert(tool.into(), path.into());
        self
    }

    fn path(&self, ask: &Ask<'_>) -> Option<String> {
        let pointer = self.guarded.get(ask.tool.name())?;
        ask.argument(pointer)?.as_str().map(|path| normal_path(path).unwrap_or_else(|_| path.to_owned()))
    }

    fn deny(&self, code: &'static str, message: String, path: &str) -> Verdict {
        let mut error = ToolError::of(code, message);
        error.next = Some(NextStep { tool: self.read_tool.to_string(), arguments: serde_json::json!({ "path": path }) });
        Verdict::deny(error)
    }
}

fn mark(path: &str) -> String {
    format!("read_before_write/{path}")
}

impl Policy for ReadBeforeWrite {
    fn name(&self) -> &str {
        "read_before_write"
    }

    fn governs(&self, tool: &Spec) -> bool {
        self.guarded.contains_key(tool.name())
    }

    fn hears_all(&self) -> bool {
        // Whichever tool reads a file, it has been read.
        true
    }

    fn needs(&self, ask: &Ask<'_>, needs: &mut Needs) {
        if let Some(path) = self.path(ask) {
            needs.marks.push(mark(&path));
            needs.files.push(path);
        }
    }

    fn check(&self, ask: &Ask<'_>) -> Result<Verdict, Fault> {
        let path = self.path(ask).ok_or_else(|| Fault::new(format!("`{}` was called without the path it writes", ask.tool.name())))?;
        let seen: Option<Digest> = ask.mark(&mark(&path))?.and_then(|seen| serde_json::from_value(seen.clone()).ok());
        let expects = match (ask.file(&path)?, seen) {
            (FileFact::Absent, _) => Expect::Absent(path),
            (FileFact::Unreadable(why), _) => return Err(Fault::new(format!("`{path}` cannot be looked at: {why}"))),
            (FileFact::Present(_), None) => {
                return Ok(self.deny(
                    code::READ_BEFORE_WRITE,
                    format!("`{path}` exists and has not been read in this session; read it before you overwrite it"),
                    &path,
                ));
            }
            (FileFact::Present(now), Some(seen)) if *now != seen => {
                return Ok(self.deny(
                    code::STALE_READ,
                    format!("`{path}` has changed since it was read; read it again before you overwrite it"),
                    &path,
                ));
            }
            (FileFact::Present(now), Some(_)) => Expect::Unchanged(path, *now),
        };
        Ok(Verdict::Allow(Terms { expects: vec![expects], ..Terms::default() }))
    }

    fn on_result(&self, done: &Done<'_>) -> Result<Vec<Change>, Fault> {
        let remember = |path: &str, digest: Option<&Digest>| (Arc::from(mark(path)), digest.map(|d| d.to_string().into()));
        Ok(done
            .observed
            .iter()
            .map(|seen| match seen {
                Observation::Read(path, digest) | Observation::Wrote(path, digest) => remember(path, Some(digest)),
                Observation::Removed(path) => remember(path, None),
            })
            .collect())
    }
}
