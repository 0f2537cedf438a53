//! Detects tool shadowing: a tool whose description mentions a tool of another upstream can
//! influence how models use that tool.

#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use toolgate::Timestamp;
use toolgate_config::{Config, UndeclaredToolPolicy, UpstreamConfig};

use super::pins::Pins;

/// Tools first seen within this time count as simultaneous: their order is chance.
const SIMULTANEOUS_WINDOW: Duration = Duration::from_secs(60);

/// The limits on names to search for, in bytes and in words. They let one pass over a text find the
/// names of any number of tools.
const MAX_TOOL_NAME_BYTES: usize = 128;
const MAX_TOOL_NAME_WORDS: usize = 8;

/// Indexes the tool names of all upstreams by lower-case name.
pub(crate) struct ToolNameIndex<'a>(HashMap<String, Vec<IndexedToolName<'a>>>);

/// A tool that is known by a name.
struct IndexedToolName<'a> {
    upstream: &'a str,
    /// The original spelling.
    name: String,
    first_seen: Timestamp,
    /// Whether the tool is accepted. Mentioning an unaccepted tool is harmless.
    accepted: bool,
    scope: ToolNameScope,
}

/// How widely a tool is known by a name. The most widely known tool owns the name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum ToolNameScope {
    /// Only the upstream uses the name.
    UpstreamOnly,
    /// Models see the name, unless a table gives the name to another tool.
    Undeclared,
    /// A table gives the name to the tool, and models see it.
    Declared,
}

impl<'a> ToolNameIndex<'a> {
    pub(crate) fn build(
        config: &Config,
        all: impl IntoIterator<Item = (&'a UpstreamConfig, &'a Pins)>,
    ) -> Self {
        let mut names = Self(HashMap::new());
        for (upstream, pins) in all {
            let known_tools = pins.first_seen();
            for (tool, (first, accepted)) in &known_tools {
                let offered = *accepted && upstream.undeclared != UndeclaredToolPolicy::Deny;
                let scope =
                    if offered { ToolNameScope::Undeclared } else { ToolNameScope::UpstreamOnly };
                let exposed_name = upstream.default_tool_name(tool);
                let legal_names = toolgate::tool::name::map_foreign_names([exposed_name.as_str()])
                    .names
                    .into_keys();
                let exposed_names = legal_names.chain([exposed_name]).map(|name| (name, scope));
                for (name, scope) in
                    exposed_names.chain([(tool.clone(), ToolNameScope::UpstreamOnly)])
                {
                    names.add(IndexedToolName {
                        upstream: &upstream.name,
                        name,
                        first_seen: *first,
                        accepted: *accepted,
                        scope,
                    });
                }
            }
            for (name, tools) in config.declared_tools_of(&upstream.name) {
                let is_accepted =
                    |tool: &&String| known_tools.get(*tool).is_some_and(|(_, accepted)| *accepted);
                let tool_name = tools.iter().find(is_accepted).or_else(|| tools.first());
                // A tool that was never listed does not own a name yet.
                let Some((first, accepted)) = tool_name.and_then(|tool| known_tools.get(tool))
                else {
                    continue;
                };
                let (name, scope) = (name.to_owned(), ToolNameScope::Declared);
                names.add(IndexedToolName {
                    upstream: &upstream.name,
                    name,
                    first_seen: *first,
                    accepted: *accepted,
                    scope,
                });
            }
        }
        names
    }

    fn add(&mut self, entry: IndexedToolName<'a>) {
        let bare_name = entry.name.trim_matches(|c: char| !is_name_char(c));
        // Skip common words: they would match ordinary text.
        let is_distinctive = (6..=MAX_TOOL_NAME_BYTES).contains(&bare_name.len())
            && bare_name.contains(['_', '-', '.']);
        if !is_distinctive
            || bare_name.split(|c: char| !is_name_char(c)).count() > MAX_TOOL_NAME_WORDS
        {
            return;
        }
        let entries = self.0.entry(bare_name.to_ascii_lowercase()).or_default();
        let is_same = |other: &&mut IndexedToolName<'_>| {
            (other.upstream, other.scope, other.accepted)
                == (entry.upstream, entry.scope, entry.accepted)
        };
        match entries.iter_mut().find(is_same) {
            Some(other) => other.first_seen = other.first_seen.min(entry.first_seen),
            None => entries.push(entry),
        }
    }

    /// Returns the first tool of another upstream that a text mentions.
    ///
    /// Tools that appeared clearly later than the text do not count.
    pub(crate) fn find_foreign_mention(
        &self,
        upstream: &UpstreamConfig,
        since: Timestamp,
        text: &str,
    ) -> Option<String> {
        let text = text.to_ascii_lowercase();
        // The starts of the last words: a name may consist of several, such as `mail.send`.
        let (mut word_starts, mut is_in_word) = (VecDeque::new(), false);
        // The appended space ends the last word.
        for (at, c) in text.char_indices().chain([(text.len(), ' ')]) {
            match (is_name_char(c), is_in_word) {
                (true, false) => {
                    word_starts.truncate(MAX_TOOL_NAME_WORDS - 1);
                    word_starts.push_front(at);
                }
                (false, true) => {
                    let mut candidates = word_starts
                        .iter()
                        .rev()
                        .filter(|from| at - **from <= MAX_TOOL_NAME_BYTES)
                        .filter_map(|from| text.get(*from..at));
                    if let Some(found) =
                        candidates.find_map(|name| self.find_foreign_tool(upstream, since, name))
                    {
                        return Some(found.to_owned());
                    }
                }
                _ => {}
            }
            is_in_word = is_name_char(c);
        }
        None
    }

    fn find_foreign_tool(
        &self,
        upstream: &UpstreamConfig,
        since: Timestamp,
        name: &str,
    ) -> Option<&str> {
        let entries = self.0.get(name)?;
        // The text may mean the upstream's own tool of that name, unless models know another tool
        // by that name. Quarantined own tools count too: of two equal servers, one may have fewer
        // accepted tools.
        let own_scope = entries
            .iter()
            .filter(|entry| entry.upstream == upstream.name)
            .map(|entry| entry.scope)
            .max();
        let is_foreign = |entry: &&IndexedToolName<'_>| {
            let earliest =
                entry.first_seen.checked_sub(SIMULTANEOUS_WINDOW).unwrap_or(entry.first_seen);
            entry.upstream != upstream.name
                && entry.accepted
                && Some(entry.scope) > own_scope
                && since >= earliest
        };
        entries.iter().find(is_foreign).map(|entry| entry.name.as_str())
    }
}

/// Returns whether a character can be part of a word in a name.
fn is_name_char(c: char) -> bool {
    c.is_alphanumeric() || c == '_' || c == '-'
}

/// Quarantines tools that mention another upstream's tool, without connecting to upstreams.
///
/// Tools that are already quarantined get one more finding. With `only`, checks the tools of this
/// upstream against the names of the others.
pub fn quarantine_shadowing_tools(
    config: &Config,
    all: &[(&UpstreamConfig, Pins)],
    only: Option<&str>,
) {
    let names = ToolNameIndex::build(config, all.iter().map(|(upstream, pins)| (*upstream, pins)));
    let selected = all.iter().filter(|(upstream, _)| only.is_none_or(|only| only == upstream.name));
    selected.for_each(|(upstream, pins)| pins.quarantine_shadowing(upstream, &names));
}
