//! Decides how an offered tool definition changes the stored pin of the tool.

use std::collections::{BTreeMap, HashMap};

use rmcp::model::Tool;
use serde::{Deserialize, Serialize};
use toolgate::Timestamp;
use toolgate_config::UpstreamConfig;
use toolgate_json::Digest;

use crate::upstream::scan_poisoning::{QuarantineReason, scan_tool, tool_text};
use crate::upstream::scan_shadowing::ToolNameIndex;

/// The pins of one upstream, as stored in the pin file.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct PinFileContents {
    pub(super) upstream: String,
    pub(super) tools: BTreeMap<String, ToolPin>,
    /// The last definition that this process received from its own upstream, by tool name.
    ///
    /// Calls depend on this map. The differing definition in a pin can come from another process,
    /// whose upstream may have another version.
    #[serde(skip)]
    pub(super) own_definitions: HashMap<String, OfferedDefinition>,
}

/// A definition that this process's own upstream offers under one name.
#[derive(Debug, Clone)]
pub(super) struct OfferedDefinition {
    pub(super) tool: Tool,
    pub(super) digest: Digest,
    /// The upstream offers two definitions under this name, so the called one is unknown.
    pub(super) ambiguous: bool,
}

impl OfferedDefinition {
    /// Returns whether this is the accepted definition.
    pub(super) fn is_accepted(&self, accepted: Option<Digest>) -> bool {
        !self.ambiguous && accepted == Some(self.digest)
    }
}

/// The pin of one tool.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct ToolPin {
    /// The accepted definition; `None` if the tool was never accepted.
    pub(super) accepted: Option<Tool>,
    /// The digest of the accepted definition, computed on first use.
    #[serde(skip)]
    pub(super) known_digest: std::sync::OnceLock<Option<Digest>>,
    /// The differing definition that a process saw last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) seen: Option<Tool>,
    /// Why a person has to review the tool.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) why: Vec<QuarantineReason>,
    pub(super) first: Timestamp,
    /// The digest of the definition that was last shown to a person. Only this one can be accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) shown: Option<Digest>,
    /// The digest of the definition that a person accepted last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) vouched: Option<Digest>,
}

impl ToolPin {
    /// Returns the digest of the accepted definition.
    pub(super) fn accepted_digest(&self) -> Option<Digest> {
        *self.known_digest.get_or_init(|| self.accepted.as_ref().map(tool_digest))
    }

    /// Returns the new pin if the offered definition differs from the stored pin.
    ///
    /// `previous` is the digest that the upstream of this process offered under this name before.
    pub(super) fn next_pin(
        stored: Option<&Self>,
        offered: &OfferedDefinition,
        previous: Option<Digest>,
    ) -> Option<Self> {
        let Some(pin) = stored else {
            let why = scan_tool(&offered.tool);
            let is_acceptable = why.is_empty() && !offered.ambiguous;
            let (accepted, seen) = if is_acceptable {
                (Some(offered.tool.clone()), None)
            } else {
                (None, Some(offered.tool.clone()))
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
        let (seen, is_new_offer) =
            (pin.seen.as_ref().map(tool_digest), previous != Some(offered.digest));
        if offered.is_accepted(pin.accepted_digest()) {
            // A difference that was stored before this process looked, or that this process found
            // itself, is resolved. A difference that another process finds meanwhile is not.
            let is_resolved =
                seen.is_some() && is_new_offer && (previous.is_none() || previous == seen);
            return is_resolved.then(|| Self { seen: None, why: Vec::new(), ..pin.clone() });
        }
        // If two processes see different definitions, the stored one stays until it is resolved.
        // Otherwise the two processes would overwrite each other forever.
        let is_stored = seen == Some(offered.digest) || (seen.is_some() && !is_new_offer);
        (!is_stored).then(|| Self {
            seen: Some(offered.tool.clone()),
            why: scan_tool(&offered.tool),
            ..pin.clone()
        })
    }
}

/// The limits on what is stored for one upstream, in tools and in bytes.
///
/// Pins are never evicted: a tool that was accepted once could come back changed.
pub(super) const MAX_PINNED_TOOLS: usize = 20_000;
pub(super) const MAX_PINNED_BYTES: usize = 96 << 20;

impl PinFileContents {
    /// Returns whether the offered tools fit beside all stored pins.
    pub(super) fn has_room_for(&self, tools: &[Tool]) -> bool {
        let json_len = |tool: &Tool| serde_json::to_vec(tool).map_or(0, |text| text.len());
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
        let name_count = self.tools.len()
            + tools.iter().filter(|tool| !self.tools.contains_key(&*tool.name)).count();
        let stored_bytes: usize = self
            .tools
            .values()
            .flat_map(|pin| pin.accepted.iter().chain(&pin.seen))
            .map(json_len)
            .sum();
        let new_bytes: usize = tools.iter().filter(is_new).map(json_len).sum();
        name_count <= MAX_PINNED_TOOLS && stored_bytes + new_bytes <= MAX_PINNED_BYTES
    }

    /// Indexes a list by name. If two tools share a name, the unaccepted definition wins.
    pub(super) fn index_by_name(&self, tools: &[Tool]) -> BTreeMap<String, OfferedDefinition> {
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

    /// Returns the differing definitions of the upstream of this process that are not stored yet.
    pub(super) fn unstored_differences(&self) -> Vec<OfferedDefinition> {
        let is_unstored = |(name, offered): &(&String, &OfferedDefinition)| {
            ToolPin::next_pin(self.tools.get(*name), offered, Some(offered.digest)).is_some()
        };
        self.own_definitions
            .iter()
            .filter(is_unstored)
            .map(|(_, offered)| offered.clone())
            .collect()
    }

    /// Quarantines tools that mention another upstream's tool. Returns whether any of it is new.
    pub(super) fn quarantine_shadowing(
        &mut self,
        upstream: &UpstreamConfig,
        names: &ToolNameIndex<'_>,
    ) -> bool {
        let mut found = false;
        for pin in self.tools.values_mut() {
            let has_finding =
                pin.why.iter().any(|why| matches!(why, QuarantineReason::Shadow { .. }));
            // Do not ask again about a definition that a person accepted.
            let is_vouched =
                |tool: &&Tool| pin.vouched.is_some_and(|digest| digest == tool_digest(tool));
            let find_mention =
                |tool: &Tool, since| names.find_foreign_mention(upstream, since, &tool_text(tool));
            // A changed definition counts as of now, however old the tool name is.
            let seen = pin
                .seen
                .as_ref()
                .filter(|tool| !has_finding && !is_vouched(tool))
                .and_then(|tool| find_mention(tool, Timestamp::now()));
            // Check the accepted definition too: the upstream of another process may still offer
            // it.
            let accepted = pin
                .accepted
                .as_ref()
                .filter(|tool| !is_vouched(tool))
                .and_then(|tool| find_mention(tool, pin.first));
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
