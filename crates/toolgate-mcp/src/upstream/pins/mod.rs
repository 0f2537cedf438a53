//! Pins tool definitions: a tool that differs from its accepted definition is quarantined until a
//! person accepts it.

mod file;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use rmcp::model::Tool;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use toolgate::Timestamp;
use toolgate_config::UpstreamConfig;
use toolgate_json::Digest;

use crate::upstream::pins::file::{PinFileLockResult, PinFileVersion};
use crate::upstream::scan_poisoning::{QuarantineReason, scan_tool, tool_text};
use crate::upstream::scan_shadowing::ToolNameIndex;

/// The pins of one upstream, as stored in the pin file.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct PinFileContents {
    upstream: String,
    tools: BTreeMap<String, ToolPin>,
    /// The last definition that this process received from its own upstream, by tool name.
    ///
    /// Calls depend on this map. The differing definition in a pin can come from another process,
    /// whose upstream may have another version.
    #[serde(skip)]
    own: HashMap<String, OfferedDefinition>,
}

/// A definition that this process's own upstream offers under one name.
#[derive(Debug, Clone)]
struct OfferedDefinition {
    tool: Tool,
    digest: Digest,
    /// The upstream offers two definitions under this name, so the called one is unknown.
    ambiguous: bool,
}

impl OfferedDefinition {
    /// Returns whether this is the accepted definition.
    fn is_accepted(&self, accepted: Option<Digest>) -> bool {
        !self.ambiguous && accepted == Some(self.digest)
    }
}

/// The pin of one tool.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct ToolPin {
    /// The accepted definition; `None` if the tool was never accepted.
    accepted: Option<Tool>,
    /// The digest of the accepted definition, computed on first use.
    #[serde(skip)]
    known_digest: std::sync::OnceLock<Option<Digest>>,
    /// The differing definition that a process saw last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    seen: Option<Tool>,
    /// Why a person has to review the tool.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    why: Vec<QuarantineReason>,
    first: Timestamp,
    /// The digest of the definition that was last shown to a person. Only this one can be accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    shown: Option<Digest>,
    /// The digest of the definition that a person accepted last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    vouched: Option<Digest>,
}

impl ToolPin {
    /// Returns the digest of the accepted definition.
    fn accepted_digest(&self) -> Option<Digest> {
        *self.known_digest.get_or_init(|| self.accepted.as_ref().map(tool_digest))
    }

    /// Returns the new pin if the offered definition differs from the stored pin.
    ///
    /// `before` is the digest that the own upstream offered under this name before.
    fn next_pin(
        known: Option<&Self>,
        now: &OfferedDefinition,
        before: Option<Digest>,
    ) -> Option<Self> {
        let Some(pin) = known else {
            let why = scan_tool(&now.tool);
            let is_fine = why.is_empty() && !now.ambiguous;
            let (accepted, seen) = if is_fine {
                (Some(now.tool.clone()), None)
            } else {
                (None, Some(now.tool.clone()))
            };
            let known_digest = std::sync::OnceLock::new();
            return Some(Self {
                accepted,
                known_digest,
                seen,
                why,
                first: Timestamp::now(),
                shown: None,
                vouched: None,
            });
        };
        let (seen, is_news) = (pin.seen.as_ref().map(tool_digest), before != Some(now.digest));
        if now.is_accepted(pin.accepted_digest()) {
            // A difference that was stored before this process looked, or that this process found
            // itself, is resolved. A difference that another process finds meanwhile is not.
            let is_over = seen.is_some() && is_news && (before.is_none() || before == seen);
            return is_over.then(|| Self { seen: None, why: Vec::new(), ..pin.clone() });
        }
        // If two processes see different definitions, the stored one stays until it is resolved.
        // Otherwise the two processes would overwrite each other forever.
        let is_told = seen == Some(now.digest) || (seen.is_some() && !is_news);
        (!is_told).then(|| Self {
            seen: Some(now.tool.clone()),
            why: scan_tool(&now.tool),
            ..pin.clone()
        })
    }
}

/// The limits on what is stored for one upstream, in tools and in bytes.
///
/// Pins are never evicted: a tool that was accepted once could come back changed.
const MAX_PINNED_TOOLS: usize = 20_000;
const MAX_PINNED_BYTES: usize = 96 << 20;

impl PinFileContents {
    /// Returns whether the offered tools fit beside all stored pins.
    fn has_room_for(&self, tools: &[Tool]) -> bool {
        let long = |tool: &Tool| serde_json::to_vec(tool).map_or(0, |text| text.len());
        let is_new = |tool: &&Tool| {
            let pin = self.tools.get(&*tool.name);
            pin.is_none_or(|pin| {
                pin.accepted.as_ref() != Some(*tool) && pin.seen.as_ref() != Some(*tool)
            })
        };
        // Fast path: nothing is new.
        if !tools.iter().any(|tool| is_new(&tool)) {
            return true;
        }
        let names = self.tools.len()
            + tools.iter().filter(|tool| !self.tools.contains_key(&*tool.name)).count();
        let kept: usize = self
            .tools
            .values()
            .flat_map(|pin| pin.accepted.iter().chain(&pin.seen))
            .map(long)
            .sum();
        let more: usize = tools.iter().filter(is_new).map(long).sum();
        names <= MAX_PINNED_TOOLS && kept + more <= MAX_PINNED_BYTES
    }

    /// Indexes a list by name. If two tools share a name, the unaccepted definition wins.
    fn index_by_name(&self, tools: &[Tool]) -> BTreeMap<String, OfferedDefinition> {
        let mut offered = BTreeMap::<String, OfferedDefinition>::new();
        for tool in tools {
            let digest = tool_digest(tool);
            let Some(other) = offered.get_mut(&*tool.name) else {
                offered.insert(
                    tool.name.to_string(),
                    OfferedDefinition { tool: tool.clone(), digest, ambiguous: false },
                );
                continue;
            };
            if other.digest == digest {
                continue;
            }
            let accepted = self.tools.get(&*tool.name).and_then(ToolPin::accepted_digest);
            if accepted == Some(other.digest) {
                (other.tool, other.digest) = (tool.clone(), digest);
            }
            other.ambiguous = true;
        }
        offered
    }

    /// Returns the definitions of the own upstream that differ from the accepted ones and are not
    /// stored as such.
    fn unstored_differences(&self) -> Vec<OfferedDefinition> {
        let is_untold = |(name, now): &(&String, &OfferedDefinition)| {
            ToolPin::next_pin(self.tools.get(*name), now, Some(now.digest)).is_some()
        };
        self.own.iter().filter(is_untold).map(|(_, now)| now.clone()).collect()
    }

    /// Quarantines tools that mention another upstream's tool. Returns whether any of it is new.
    fn quarantine_shadowing(&mut self, own: &UpstreamConfig, names: &ToolNameIndex<'_>) -> bool {
        let mut found = false;
        for pin in self.tools.values_mut() {
            let is_told = pin.why.iter().any(|why| matches!(why, QuarantineReason::Shadow { .. }));
            // Do not ask again about a definition that a person accepted.
            let vouched =
                |tool: &&Tool| pin.vouched.is_some_and(|vouched| vouched == tool_digest(tool));
            let speaks =
                |tool: &Tool, since| names.find_foreign_mention(own, since, &tool_text(tool));
            // A changed definition counts as of now, however old the tool name is.
            let seen = pin
                .seen
                .as_ref()
                .filter(|tool| !is_told && !vouched(tool))
                .and_then(|tool| speaks(tool, Timestamp::now()));
            // Check the accepted definition too: the upstream of another process may still offer
            // it.
            let accepted = pin
                .accepted
                .as_ref()
                .filter(|tool| !vouched(tool))
                .and_then(|tool| speaks(tool, pin.first));
            found |= seen.is_some() || accepted.is_some();
            pin.why.extend(seen.map(|tool| QuarantineReason::Shadow { tool }));
            if let Some(tool) = accepted {
                let accepted = pin.accepted.take();
                pin.known_digest.take();
                // A pending change is reviewed first.
                if pin.seen.is_none() {
                    pin.seen = accepted;
                    pin.why.push(QuarantineReason::Shadow { tool });
                }
            }
        }
        found
    }
}

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

fn quarantined_tools(known: &PinFileContents) -> Vec<QuarantinedTool> {
    let one = |(name, pin): (&String, &ToolPin)| {
        Some(QuarantinedTool {
            upstream: known.upstream.clone(),
            tool: name.clone(),
            before: pin.accepted.as_ref().map(to_json),
            now: to_json(pin.seen.as_ref()?),
            why: pin.why.clone(),
        })
    };
    known.tools.iter().filter_map(one).collect()
}

/// Returns the quarantined tools with their current definitions.
fn quarantined_definitions(known: &PinFileContents) -> Vec<(String, Tool)> {
    known.tools.iter().filter_map(|(name, pin)| Some((name.clone(), pin.seen.clone()?))).collect()
}

/// Returns the digest of all parts of a tool that a model or a client depends on.
pub(super) fn tool_digest(tool: &Tool) -> Digest {
    let mut written = serde_json::to_value(tool).unwrap_or_default();
    if let Some(fields) = written.as_object_mut() {
        fields.retain(|key, _| {
            matches!(
                key.as_str(),
                "name"
                    | "title"
                    | "description"
                    | "inputSchema"
                    | "outputSchema"
                    | "annotations"
                    | "_meta"
            )
        });
    }
    Digest::of(&toolgate_json::to_canonical_bytes(&written))
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
        let known =
            PinFileContents { upstream: upstream.name.clone(), ..PinFileContents::default() };
        let pins = Self {
            file,
            contents: Mutex::new(known),
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
        let turn = self.lock_file();
        let mut known = self.lock_reloaded();
        if !known.has_room_for(tools) {
            return Err(format!(
                "the upstream has offered more than {MAX_PINNED_TOOLS} tools or {MAX_PINNED_BYTES} bytes of tools since it was pinned"
            ));
        }
        let offered = known.index_by_name(tools);
        let PinFileContents { tools: pins, own, .. } = &mut *known;
        // Keep removed tools: a tool is called as it was accepted or not at all.
        own.retain(|name, _| pins.contains_key(name));
        let with_before = |(name, now): (String, OfferedDefinition)| {
            let before = own.insert(name, now.clone());
            (now, before.map(|before| before.digest))
        };
        let offered = offered.into_iter().map(with_before).collect();
        Ok(self.store_offered(&mut known, offered, turn))
    }

    /// Stores tools that could not be stored, and differences that another process resolved.
    pub(super) fn retry_recording(&self) {
        let is_told = self.lock_reloaded().unstored_differences().is_empty();
        if is_told {
            return;
        }
        let turn = self.lock_file();
        let mut known = self.lock_reloaded();
        let untold = known.unstored_differences();
        let tools: Vec<Tool> = untold.iter().map(|now| now.tool.clone()).collect();
        // The next listing reports it if there is no room.
        if known.has_room_for(&tools) {
            let as_before = |now: OfferedDefinition| {
                let digest = now.digest;
                (now, Some(digest))
            };
            self.store_offered(&mut known, untold.into_iter().map(as_before).collect(), turn);
        }
    }

    /// Stores offered definitions, each with the digest that was offered under the name before.
    ///
    /// Returns whether the set of quarantined tools changed.
    fn store_offered(
        &self,
        known: &mut PinFileContents,
        offered: Vec<(OfferedDefinition, Option<Digest>)>,
        turn: PinFileLockResult,
    ) -> bool {
        let (before, mut fresh) = (quarantined_definitions(known), Vec::new());
        for (now, was) in offered {
            let name = now.tool.name.to_string();
            let found = known.tools.get(&name);
            let Some(pin) = ToolPin::next_pin(found, &now, was) else { continue };
            if found.is_none() {
                fresh.extend(pin.accepted.clone());
            }
            known.tools.insert(name, pin);
        }
        let kept = self.write_or_explain(known, turn);
        let mut unwritten = crate::gateway::lock(&self.unwritten_tools);
        *unwritten = match kept {
            Ok(()) => <(String, Vec<Tool>)>::default(),
            // The tools count as never seen, so the next listing treats them as new.
            Err(why) => {
                fresh.iter().for_each(|tool| drop(known.tools.remove(&*tool.name)));
                (why, fresh)
            }
        };
        quarantined_definitions(known) != before
    }

    /// Quarantines tools that mention another upstream's tool, even if the tools did not change.
    ///
    /// Tools that are already quarantined get one more finding. All changes are stored at once.
    pub(super) fn quarantine_shadowing(&self, own: &UpstreamConfig, names: &ToolNameIndex<'_>) {
        let found = self.lock_reloaded().quarantine_shadowing(own, names);
        // If storing fails, the check runs again after the next start.
        if found {
            let turn = self.lock_file();
            let mut known = self.lock_reloaded();
            // Another process may have changed the file meanwhile.
            known.quarantine_shadowing(own, names);
            let _ = self.write_or_explain(&known, turn);
        }
    }

    /// Returns the accepted tools; `None` if no tool was ever seen.
    pub(super) fn accepted(&self) -> Option<Vec<Tool>> {
        let known = self.lock_reloaded();
        (!known.tools.is_empty())
            .then(|| known.tools.values().filter_map(|pin| pin.accepted.clone()).collect())
    }

    /// Returns all tools that were ever seen, with the first time and whether one is accepted.
    pub(super) fn first_seen(&self) -> BTreeMap<String, (Timestamp, bool)> {
        let known = self.lock_reloaded();
        known
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
        let known = crate::gateway::lock(&self.contents);
        let schema = known
            .tools
            .get(tool)
            .and_then(|pin| pin.accepted.as_ref())
            .map(|tool| &tool.input_schema);
        schema.is_some_and(|schema| !crate::has_header_arguments(schema))
    }

    /// Returns whether a tool still has the given accepted definition, so it may be called.
    ///
    /// Differences that another process found do not count, because its upstream may have another
    /// version. They count only if the own upstream has not listed the tool yet.
    pub(super) fn is_current(&self, tool: &str, accepted: Option<Digest>) -> bool {
        let known = crate::gateway::lock(&self.contents);
        let Some(pin) = known
            .tools
            .get(tool)
            .filter(|pin| accepted.is_some() && pin.accepted_digest() == accepted)
        else {
            return false;
        };
        known.own.get(tool).map_or(pin.seen.is_none(), |now| now.is_accepted(accepted))
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
        let known = self.lock_reloaded();
        let unwritten = crate::gateway::lock(&self.unwritten_tools);
        let (why, tools) = &*unwritten;
        // Another process may have stored these tools meanwhile.
        let waiting =
            tools.iter().filter(|tool| !known.tools.contains_key(&*tool.name)).map(|tool| {
                QuarantinedTool {
                    upstream: known.upstream.clone(),
                    tool: tool.name.to_string(),
                    before: None,
                    now: to_json(tool),
                    why: vec![QuarantineReason::Unwritten { why: why.clone() }],
                }
            });
        let is_as_accepted = |tool: &str| {
            known.own.get(tool).is_some_and(|now| {
                now.is_accepted(known.tools.get(tool).and_then(ToolPin::accepted_digest))
            })
        };
        quarantined_tools(&known)
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
        let turn = self.lock_file();
        let mut known = self.lock_reloaded();
        let (mut next, mut accepted) = (known.clone(), PinAcceptResult::default());
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
        self.write(&next, turn)?;
        *known = next;
        Ok(accepted)
    }

    /// Returns the quarantined tools for display. Only definitions that were shown can be accepted.
    ///
    /// # Errors
    /// The pin file cannot be written.
    pub fn show_quarantined(&self) -> io::Result<Vec<QuarantinedTool>> {
        let turn = self.lock_file();
        // Hold the lock, so that the recorded definitions are exactly the returned ones.
        let mut known = self.lock_reloaded();
        let changes = quarantined_tools(&known);
        for pin in known.tools.values_mut() {
            pin.shown = pin.seen.as_ref().map(tool_digest);
        }
        self.write(&known, turn)?;
        Ok(changes)
    }
}
