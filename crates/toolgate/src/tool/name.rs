//! Validates tool names, maps foreign names to valid ones, and escapes untrusted text for display.

use std::collections::{BTreeMap, BTreeSet};

use toolgate_json::Digest;

/// Maximum length of a tool name in bytes.
pub const MAX_TOOL_NAME_BYTES: usize = 64;

/// Number of digest digits that make a mapped name unique.
const NAME_DIGEST_DIGITS: usize = 16;

/// Returns true for `^[a-z0-9_-]{1,64}$`.
#[must_use]
pub fn is_tool_name(name: &str) -> bool {
    (1..=MAX_TOOL_NAME_BYTES).contains(&name.len())
        && name.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-'))
}

/// Foreign names mapped to valid tool names.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MappedNames {
    /// Maps each valid name to its foreign name.
    pub names: BTreeMap<String, String>,
    /// Foreign names that collide once mapped, or have no valid character.
    pub excluded: BTreeSet<String>,
}

/// Maps foreign names to valid ones. Names that collide are all excluded, so that none shadows
/// another.
///
/// ```
/// let mapped = toolgate::tool::name::map_foreign_names(["Files.Read", "files_read", "search"]);
/// assert_eq!(mapped.names.keys().collect::<Vec<_>>(), ["search"]);
/// assert_eq!(mapped.excluded.len(), 2);
/// ```
pub fn map_foreign_names<'a>(foreign: impl IntoIterator<Item = &'a str>) -> MappedNames {
    let mut groups: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
    for name in foreign {
        let legal: String = map_characters(name).take(MAX_TOOL_NAME_BYTES).collect();
        groups.entry(legal).or_default().insert(name);
    }
    let mut mapped = MappedNames::default();
    for (legal, names) in groups {
        let meaningful = legal.bytes().any(|b| b.is_ascii_alphanumeric());
        match (names.len(), names.first()) {
            (1, Some(name)) if meaningful => {
                mapped.names.insert(legal, (*name).to_owned());
            }
            _ => mapped.excluded.extend(names.into_iter().map(str::to_owned)),
        }
    }
    mapped
}

/// Maps each character of a foreign name to a valid one.
pub fn map_characters(name: &str) -> impl Iterator<Item = char> {
    name.chars().map(|c| {
        if c.is_ascii_alphanumeric() || c == '_' || c == '-' { c.to_ascii_lowercase() } else { '_' }
    })
}

/// Maps a client's name for its own tool to a toolgate name: lower case.
///
/// A name that is too long or has invalid characters gets a digest of the original as suffix, which
/// keeps similar names different. A name that only looks as if it had such a suffix gets one too.
///
/// ```
/// use toolgate::tool::name::tool_name_from_client;
/// assert_eq!(tool_name_from_client("Bash"), "bash");
/// assert_eq!(tool_name_from_client("mcp__git__Log"), "mcp__git__log");
/// assert!(tool_name_from_client("READ.ALL").starts_with("read_all_"));
/// assert_ne!(tool_name_from_client("READ.ALL"), tool_name_from_client("read all"));
/// ```
#[must_use]
pub fn tool_name_from_client(name: &str) -> String {
    let is_own = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    let is_digest =
        |end: &str| end.len() == NAME_DIGEST_DIGITS && end.bytes().all(|b| b.is_ascii_hexdigit());
    let looks_cut = name.rsplit_once('_').is_some_and(|(_, end)| is_digest(end));
    if name.len() <= MAX_TOOL_NAME_BYTES && name.chars().all(is_own) && !looks_cut {
        return name.to_ascii_lowercase();
    }
    let digest = Digest::of(name.as_bytes()).to_string();
    let head = name
        .chars()
        .take(MAX_TOOL_NAME_BYTES - NAME_DIGEST_DIGITS - 1)
        .map(|c| if is_own(c) { c.to_ascii_lowercase() } else { '_' });
    head.chain(['_']).chain(digest.chars().take(NAME_DIGEST_DIGITS)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_without_valid_characters_are_excluded() {
        assert_eq!(map_foreign_names(["…", "日本"]).names.len(), 0);
        assert!(
            is_tool_name("read-file_2")
                && !is_tool_name("Read")
                && !is_tool_name("")
                && !is_tool_name(&"a".repeat(65))
        );
    }

    #[test]
    fn different_client_names_stay_different() {
        for (name, legal) in [
            ("Bash", "bash"),
            ("NotebookEdit", "notebookedit"),
            ("mcp__a-server__get_Page", "mcp__a-server__get_page"),
        ] {
            assert_eq!(tool_name_from_client(name), legal);
        }
        let (long, longer, forged) =
            ("a".repeat(65), "a".repeat(70), tool_name_from_client("READ.ALL"));
        let others = [
            "READ.ALL",
            "read.all",
            "read all",
            "read\u{2024}all",
            "read_all",
            "…",
            "日本",
            "..",
            "/",
            &long,
            &longer,
            &forged,
        ];
        let mapped: BTreeSet<String> =
            others.iter().map(|name| tool_name_from_client(name)).collect();
        assert_eq!(mapped.len(), others.len(), "{mapped:?}");
        assert!(mapped.iter().all(|name| is_tool_name(name)), "{mapped:?}");
        assert_eq!(tool_name_from_client(""), "");
    }
}
