//! Finds the texts of an argument that may name files.

use std::borrow::Cow;

use serde_json::Value;
use toolgate_json::Pointer;
use toolgate_shell::normalize_path;

/// Returns whether a text can be a path to a place or into it.
///
/// The text contains the name of the place, or goes through `/proc/` or home.
pub(super) fn can_name_place(text: &str, place: &str) -> bool {
    let name = place.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    place.contains('*')
        || name.starts_with('~')
        || text.contains("/proc/")
        || text.contains('~')
        || text.contains(name)
}

/// The longest text that is read as a path, in bytes.
const MAX_PATH_BYTES: usize = 4_096;

/// Names of arguments that hold the content of a file or a search text, in lower case without `_`.
#[rustfmt::skip]
const CONTENT_ARGUMENT_NAMES: &[&str] = &[
    "body", "code", "codeedit", "content", "contents", "filetext", "inserttext", "message", "newsource", "newstr", "newstring", "newtext", "oldstr",
    "oldstring", "oldtext", "replacement", "text",
];

/// Names of arguments that select a file, in the same spelling.
const FILE_ARGUMENT_NAMES: &[&str] = &["filepath", "notebookpath", "path", "targetfile"];

/// Returns whether the name of an argument is in the list, ignoring case, `_` and `-`.
fn is_listed_name(name: &str, names: &[&str]) -> bool {
    names.contains(&name.replace(['_', '-'], "").to_ascii_lowercase().as_str())
}

/// Whether a text is the content of a file rather than the name of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ContentLikelihood {
    No,
    /// The name of the argument suggests content.
    Likely,
    /// In addition, another argument selects the file.
    Certain,
}

impl ContentLikelihood {
    /// Classifies the text at a path below the argument that the rule names.
    pub(super) fn classify(at: &Pointer, named: &Pointer, has_file_argument: bool) -> Self {
        let inside = at.parts().get(named.parts().len()..).unwrap_or_default();
        let name = inside.iter().rev().find(|part| part.parse::<usize>().is_err());
        match name.is_some_and(|name| is_listed_name(name, CONTENT_ARGUMENT_NAMES)) {
            false => Self::No,
            true if has_file_argument => Self::Certain,
            true => Self::Likely,
        }
    }
}

/// Returns the paths that a text names.
///
/// These are the text itself if it is one line, the text without outer spaces and detours (as a
/// tool may normalize it), and the files that a patch changes. The content of a file whose name is
/// in another argument names no other file, except in patch headers.
pub(super) fn candidate_paths(
    text: &str,
    contents: ContentLikelihood,
) -> impl Iterator<Item = Cow<'_, str>> {
    let whole_text = Some(text).filter(|text| {
        contents != ContentLikelihood::Certain
            && text.len() <= MAX_PATH_BYTES
            && !text.contains('\n')
    });
    let has_detour = text.len() > MAX_PATH_BYTES
        || text.trim() != text
        || ["//", "/./", "/../"].iter().any(|detour| text.contains(detour));
    // A text of several lines can be a path only if it starts with `/` or `~`.
    let is_path = |path: &String| {
        path.len() <= MAX_PATH_BYTES && (!path.contains('\n') || path.starts_with(['/', '~']))
    };
    let plain = (has_detour && contents == ContentLikelihood::No)
        .then(|| normalize_path(text.trim()))
        .filter(is_path);
    let header = |line: &'_ str| -> Option<std::ops::Range<usize>> {
        let marks = [
            "*** Update File:",
            "*** Add File:",
            "*** Delete File:",
            "*** Move to:",
            "+++ ",
            "--- ",
            "rename to ",
            "rename from ",
            "copy to ",
        ];
        let mark = marks.iter().find(|mark| line.starts_with(**mark))?;
        Some(mark.len()..line.len())
    };
    let named = text
        .lines()
        .filter(|_| text.contains('\n'))
        .filter_map(move |line| line.get(header(line)?))
        .map(|path| {
            let path = path.split('\t').next().unwrap_or(path).trim();
            path.strip_prefix("a/").or_else(|| path.strip_prefix("b/")).unwrap_or(path)
        });
    whole_text.into_iter().chain(named).map(Cow::Borrowed).chain(plain.map(Cow::<str>::Owned))
}

/// Visits every text in a value, with its path and whether an argument beside or above it selects
/// a file.
pub(super) fn visit_texts(
    value: &Value,
    at: &mut Pointer,
    has_file_argument: bool,
    visit: &mut impl FnMut(&Pointer, &str, bool),
) {
    match value {
        Value::String(text) => visit(at, text, has_file_argument),
        Value::Array(items) => {
            for (n, item) in items.iter().enumerate() {
                at.push(n.to_string());
                visit_texts(item, at, has_file_argument, visit);
                at.pop();
            }
        }
        Value::Object(fields) => {
            let has_file_argument = has_file_argument
                || fields.iter().any(|(name, field)| {
                    field.as_str().is_some_and(|path| !path.is_empty())
                        && is_listed_name(name, FILE_ARGUMENT_NAMES)
                });
            for (name, field) in fields {
                at.push(name.clone());
                visit_texts(field, at, has_file_argument, visit);
                at.pop();
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}
