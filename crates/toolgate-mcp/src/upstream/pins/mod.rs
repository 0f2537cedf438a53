//! Pins tool definitions: a tool that differs from its accepted definition is quarantined until a
//! person accepts it.

mod file;
#[cfg(test)]
mod tests;
mod tool_pin;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use rmcp::model::Tool;
use serde::Serialize;
use serde_json::Value;
use toolgate::Timestamp;
use toolgate_config::UpstreamConfig;
use toolgate_json::Digest;

use crate::upstream::pins::file::{PinFileLockResult, PinFileVersion};
use crate::upstream::pins::tool_pin::{
    MAX_PINNED_BYTES, MAX_PINNED_TOOLS, OfferedDefinition, PinFileContents, ToolPin, tool_digest,
};
use crate::upstream::scan_poisoning::QuarantineReason;
use crate::upstream::scan_shadowing::ToolNameIndex;

/// The pinned tools of one upstream.
pub struct Pins {
    file: Option<PathBuf>,
    contents: Mutex<PinFileContents>,
    /// The state of the file when it was last read.
    file_version: Mutex<Option<PinFileVersion>>,
    /// New tools that could not be stored and are therefore not accepted, and the reason.
    unwritten_tools: Mutex<(String, Vec<Tool>)>,
}

/// A quarantined tool and the reasons.
#[derive(Debug, Clone, Serialize)]
pub struct QuarantinedTool {
    /// The upstream.
    pub upstream: String,
    /// The tool.
    pub tool: String,
    /// The accepted definition; absent if the tool is new.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub before: Option<Value>,
    /// The current definition.
    pub now: Value,
    /// The findings about the tool.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub why: Vec<QuarantineReason>,
}

/// The result of accepting tools.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PinAcceptResult {
    /// The accepted tools.
    pub tools: Vec<String>,
    /// Tools whose current definition was not shown to a person, so they are not accepted.
    pub not_shown: Vec<String>,
}

fn to_json(tool: &Tool) -> Value {
    serde_json::to_value(tool).unwrap_or_default()
}

fn quarantined_tools(contents: &PinFileContents) -> Vec<QuarantinedTool> {
    let to_quarantined = |(name, pin): (&String, &ToolPin)| {
        Some(QuarantinedTool {
            upstream: contents.upstream.clone(),
            tool: name.clone(),
            before: pin.accepted.as_ref().map(to_json),
            now: to_json(pin.seen.as_ref()?),
            why: pin.why.clone(),
        })
    };
    contents.tools.iter().filter_map(to_quarantined).collect()
}

/// Returns the quarantined tools with their current definitions.
fn quarantined_definitions(contents: &PinFileContents) -> Vec<(String, Tool)> {
    contents
        .tools
        .iter()
        .filter_map(|(name, pin)| Some((name.clone(), pin.seen.clone()?)))
        .collect()
}

impl Pins {
    /// Reads the pins of an upstream.
    ///
    /// An unreadable file is an error. It is never replaced, because it may have been damaged on
    /// purpose.
    ///
    /// # Errors
    /// The file exists and cannot be read.
    pub fn open(directory: Option<&Path>, upstream: &UpstreamConfig) -> io::Result<Self> {
        let file = directory.map(|directory| directory.join(format!("{}.json", upstream.name)));
        let contents =
            PinFileContents { upstream: upstream.name.clone(), ..PinFileContents::default() };
        let pins = Self {
            file,
            contents: Mutex::new(contents),
            file_version: Mutex::default(),
            unwritten_tools: Mutex::default(),
        };
        pins.reload()?;
        Ok(pins)
    }

    /// Returns the path of the pin file.
    #[must_use]
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    fn lock_reloaded(&self) -> std::sync::MutexGuard<'_, PinFileContents> {
        if let Err(error) = self.reload() {
            tracing::error!(%error, "cannot read the pin file");
        }
        crate::gateway::lock(&self.contents)
    }

    /// Records what the upstream offers now. Returns whether the set of quarantined tools changed.
    ///
    /// New tools without findings are accepted once they are stored. Changed tools are quarantined.
    ///
    /// # Errors
    /// The upstream has offered more than can be stored.
    pub(super) fn record_offered(&self, tools: &[Tool]) -> Result<bool, String> {
        let file_lock = self.lock_file();
        let mut contents = self.lock_reloaded();
        if !contents.has_room_for(tools) {
            return Err(format!(
                "the upstream has offered more than {MAX_PINNED_TOOLS} tools or {MAX_PINNED_BYTES} bytes of tools since it was pinned"
            ));
        }
        let offered = contents.index_by_name(tools);
        let PinFileContents { tools: pins, own_definitions, .. } = &mut *contents;
        // Keep removed tools: a tool is called as it was accepted or not at all.
        own_definitions.retain(|name, _| pins.contains_key(name));
        let with_previous = |(name, definition): (String, OfferedDefinition)| {
            let previous = own_definitions.insert(name, definition.clone());
            (definition, previous.map(|previous| previous.digest))
        };
        let offered = offered.into_iter().map(with_previous).collect();
        Ok(self.store_offered(&mut contents, offered, file_lock))
    }

    /// Stores tools that could not be stored, and differences that another process resolved.
    pub(super) fn retry_recording(&self) {
        let is_stored = self.lock_reloaded().unstored_differences().is_empty();
        if is_stored {
            return;
        }
        let file_lock = self.lock_file();
        let mut contents = self.lock_reloaded();
        let unstored = contents.unstored_differences();
        let tools: Vec<Tool> = unstored.iter().map(|definition| definition.tool.clone()).collect();
        // If the limits are reached, the next listing reports the error.
        if contents.has_room_for(&tools) {
            let with_digest = |definition: OfferedDefinition| {
                let digest = definition.digest;
                (definition, Some(digest))
            };
            self.store_offered(
                &mut contents,
                unstored.into_iter().map(with_digest).collect(),
                file_lock,
            );
        }
    }

    /// Stores offered definitions, each with the digest that was offered under the name before.
    ///
    /// Returns whether the set of quarantined tools changed.
    fn store_offered(
        &self,
        contents: &mut PinFileContents,
        offered: Vec<(OfferedDefinition, Option<Digest>)>,
        file_lock: PinFileLockResult,
    ) -> bool {
        let (before, mut new_tools) = (quarantined_definitions(contents), Vec::new());
        for (definition, previous) in offered {
            let name = definition.tool.name.to_string();
            let found = contents.tools.get(&name);
            let Some(pin) = ToolPin::next_pin(found, &definition, previous) else { continue };
            if found.is_none() {
                new_tools.extend(pin.accepted.clone());
            }
            contents.tools.insert(name, pin);
        }
        let result = self.write_or_explain(contents, file_lock);
        let mut unwritten = crate::gateway::lock(&self.unwritten_tools);
        *unwritten = match result {
            Ok(()) => <(String, Vec<Tool>)>::default(),
            // The tools count as never seen, so the next listing treats them as new.
            Err(why) => {
                new_tools.iter().for_each(|tool| drop(contents.tools.remove(&*tool.name)));
                (why, new_tools)
            }
        };
        quarantined_definitions(contents) != before
    }

    /// Quarantines tools that mention another upstream's tool, even if the tools did not change.
    ///
    /// Tools that are already quarantined get one more finding. All changes are stored at once.
    pub(super) fn quarantine_shadowing(
        &self,
        upstream: &UpstreamConfig,
        names: &ToolNameIndex<'_>,
    ) {
        let found = self.lock_reloaded().quarantine_shadowing(upstream, names);
        // If storing fails, the check runs again after the next start.
        if found {
            let file_lock = self.lock_file();
            let mut contents = self.lock_reloaded();
            // Another process may have changed the file meanwhile.
            contents.quarantine_shadowing(upstream, names);
            let _ = self.write_or_explain(&contents, file_lock);
        }
    }

    /// Returns the accepted tools; `None` if no tool was ever seen.
    pub(super) fn accepted(&self) -> Option<Vec<Tool>> {
        let contents = self.lock_reloaded();
        (!contents.tools.is_empty())
            .then(|| contents.tools.values().filter_map(|pin| pin.accepted.clone()).collect())
    }

    /// Returns all tools that were ever seen, with the first time and whether one is accepted.
    pub(super) fn first_seen(&self) -> BTreeMap<String, (Timestamp, bool)> {
        let contents = self.lock_reloaded();
        contents
            .tools
            .iter()
            .map(|(name, pin)| (name.clone(), (pin.first, pin.accepted.is_some())))
            .collect()
    }

    /// Returns the digest of the accepted definition of a tool.
    pub(super) fn accepted_digest(&self, tool: &str) -> Option<Digest> {
        self.lock_reloaded().tools.get(tool).and_then(|pin| pin.accepted.as_ref().map(tool_digest))
    }

    /// Returns whether calls of a tool need no `x-mcp-header` arguments in HTTP headers.
    pub(super) fn can_use_fast_path(&self, tool: &str) -> bool {
        let contents = crate::gateway::lock(&self.contents);
        let schema = contents
            .tools
            .get(tool)
            .and_then(|pin| pin.accepted.as_ref())
            .map(|tool| &tool.input_schema);
        schema.is_some_and(|schema| !crate::has_header_arguments(schema))
    }

    /// Returns whether a tool still has the given accepted definition, so it may be called.
    ///
    /// Differences that another process found do not count, because its upstream may have another
    /// version. They count only if the upstream of this process has not listed the tool yet.
    pub(super) fn is_current(&self, tool: &str, accepted: Option<Digest>) -> bool {
        let contents = crate::gateway::lock(&self.contents);
        let Some(pin) = contents
            .tools
            .get(tool)
            .filter(|pin| accepted.is_some() && pin.accepted_digest() == accepted)
        else {
            return false;
        };
        contents
            .own_definitions
            .get(tool)
            .map_or(pin.seen.is_none(), |offered| offered.is_accepted(accepted))
    }

    /// Returns the names of all tools that were ever seen, as the upstream spells them.
    #[must_use]
    pub fn tool_names(&self) -> Vec<String> {
        self.lock_reloaded().tools.keys().cloned().collect()
    }

    /// Returns the quarantined tools.
    ///
    /// If this process has listed its own upstream, that list decides. Otherwise the file does.
    #[must_use]
    pub fn quarantined(&self) -> Vec<QuarantinedTool> {
        let contents = self.lock_reloaded();
        let unwritten = crate::gateway::lock(&self.unwritten_tools);
        let (why, tools) = &*unwritten;
        // Another process may have stored these tools meanwhile.
        let waiting =
            tools.iter().filter(|tool| !contents.tools.contains_key(&*tool.name)).map(|tool| {
                QuarantinedTool {
                    upstream: contents.upstream.clone(),
                    tool: tool.name.to_string(),
                    before: None,
                    now: to_json(tool),
                    why: vec![QuarantineReason::Unwritten { why: why.clone() }],
                }
            });
        let is_as_accepted = |tool: &str| {
            contents.own_definitions.get(tool).is_some_and(|offered| {
                offered.is_accepted(contents.tools.get(tool).and_then(ToolPin::accepted_digest))
            })
        };
        quarantined_tools(&contents)
            .into_iter()
            .filter(|change| !is_as_accepted(&change.tool))
            .chain(waiting)
            .collect()
    }

    /// Accepts the current definition of one tool or of all tools, and returns which.
    ///
    /// # Errors
    /// The pin file cannot be written.
    pub fn accept(&self, tool: Option<&str>) -> io::Result<PinAcceptResult> {
        let file_lock = self.lock_file();
        let mut contents = self.lock_reloaded();
        let (mut next, mut accepted) = (contents.clone(), PinAcceptResult::default());
        for (name, pin) in
            next.tools.iter_mut().filter(|(name, _)| tool.is_none_or(|tool| tool == *name))
        {
            let Some(seen) = &pin.seen else { continue };
            if pin.shown != Some(tool_digest(seen)) {
                accepted.not_shown.push(name.clone());
                continue;
            }
            pin.accepted = pin.seen.take();
            pin.known_digest.take();
            pin.why.clear();
            pin.vouched = pin.shown;
            accepted.tools.push(name.clone());
        }
        self.write(&next, file_lock)?;
        *contents = next;
        Ok(accepted)
    }

    /// Returns the quarantined tools for display. Only definitions that were shown can be accepted.
    ///
    /// # Errors
    /// The pin file cannot be written.
    pub fn show_quarantined(&self) -> io::Result<Vec<QuarantinedTool>> {
        let file_lock = self.lock_file();
        // Hold the lock, so that the recorded definitions are exactly the returned ones.
        let mut contents = self.lock_reloaded();
        let changes = quarantined_tools(&contents);
        for pin in contents.tools.values_mut() {
            pin.shown = pin.seen.as_ref().map(tool_digest);
        }
        self.write(&contents, file_lock)?;
        Ok(changes)
    }
}
