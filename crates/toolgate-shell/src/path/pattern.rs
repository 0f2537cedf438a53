//! Matches words of a command against the path pattern of a rule.

use std::path::Path;

use crate::base_name;
use crate::path::working_dir;
use crate::word;
use crate::word::{Certainty, ShellWord, WordPart, can_intersect, combine_certainty};

/// A pattern for a file or directory in a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathPattern<'h> {
    pub(crate) path: String,
    /// The directory that `~` means, both in the pattern and in the words.
    pub(crate) home: &'h str,
}

impl<'h> PathPattern<'h> {
    /// Creates a pattern from a path or a name.
    ///
    /// A path is absolute or starts at the home directory, and includes everything under it. A name
    /// matches in every directory. `*` matches any text.
    pub fn new(pattern: &str, home: &'h str) -> Self {
        let path = expand_home_path(pattern.trim_end_matches('/'), home);
        // A relative path may start in any directory.
        let is_relative = path.contains('/') && !path.starts_with(['/', '~', '*']);
        Self {
            path: if is_relative { format!("*/{}", path.trim_start_matches("./")) } else { path },
            home,
        }
    }

    /// Expands `~` in a path.
    pub(super) fn expand_home(&self, path: &str) -> String {
        expand_home_path(path, self.home)
    }

    pub(crate) fn is_bare_name(&self) -> bool {
        !self.path.contains('/')
    }

    /// Returns whether a text is a path to this place.
    pub fn match_text(&self, path: &str) -> Certainty {
        self.match_spelling(&[WordPart::Text(path.to_owned())])
    }

    pub(crate) fn match_word(&self, word: &ShellWord) -> Certainty {
        combine_certainty(word.spellings().iter().map(|spelling| self.match_spelling(spelling)))
    }

    /// Compares a spelling, including paths in `of=path`, `--file=path`, `@path`, `host:path` and
    /// `path:/there`.
    fn match_spelling(&self, spelling: &[WordPart]) -> Certainty {
        let mut best = self.match_path_spelling(spelling);
        if let [WordPart::Text(text), rest @ ..] = spelling {
            if text.matches(['=', ':', '@', ',']).count() > 16 {
                // To limit the work, not every sign is tried as the start of a path. A path between
                // two signs, or one that may be in the text, is enough.
                let pieces =
                    text.split(['=', ':', '@', ',']).filter(|piece| piece.contains(['/', '~']));
                let named =
                    pieces.map(|piece| self.match_known_path(piece)).max().unwrap_or(Certainty::No);
                let is_open = !rest.is_empty() || self.can_occur_in(text);
                return best.max(named).max(if is_open { Certainty::Maybe } else { Certainty::No });
            }
            // `-o.env` names the path, too.
            if text.starts_with('-') && !text.starts_with("--") {
                best = best.max(self.match_path_spelling(&prefix_spelling(
                    text.get(2..).unwrap_or_default(),
                    rest,
                )));
                // `-uo.env` names the path, too. Without a directory, the match may be the end of
                // another name.
                if let Some(path) = path_after_letters(text) {
                    let named = self.match_path_spelling(&prefix_spelling(path, rest));
                    best = best.max(if path.contains('/') {
                        named
                    } else {
                        named.min(Certainty::Maybe)
                    });
                }
            }
            for (at, _) in text.match_indices(['=', ':', '@', ',']) {
                best = best.max(self.match_path_spelling(&prefix_spelling(
                    text.get(at + 1..).unwrap_or_default(),
                    rest,
                )));
            }
            // `-v path:/there` and `--mount=src=path,dst=/there` name the path before a sign. If a
            // space follows the sign, the text is prose.
            let is_prose = |at: usize| {
                text.get(at + 1..).is_some_and(|rest| rest.starts_with(char::is_whitespace))
            };
            let signs =
                text.match_indices(['=', ':', ',']).map(|(at, _)| at).filter(|at| !is_prose(*at));
            let pieces = signs.filter_map(|at| text.get(..at)?.rsplit(['=', ':', '@', ',']).next());
            for piece in pieces.filter(|piece| piece.contains(['/', '~'])) {
                let glued = piece.get(2..).filter(|_| piece.starts_with('-'));
                best = best.max(self.match_known_path(glued.unwrap_or(piece)));
            }
        }
        best
    }

    fn match_path_spelling(&self, spelling: &[WordPart]) -> Certainty {
        if let [WordPart::Text(text)] = spelling {
            return self.match_known_path(text);
        }
        let spelling = &self.clean_spelling(spelling)[..];
        // A path that goes up and then down is compared by its remainder.
        let can_match =
            |pattern: &str| can_intersect(spelling, &ShellWord::parse_rule_pattern(pattern));
        let is_indirect = |text: &str| {
            text.starts_with("/proc/")
                || (text.starts_with('/') && (can_match("/proc/*/*") || can_match("/dev/fd/*")))
        };
        let is_unresolved =
            |text: &str| text.trim_start_matches("../").contains("/../") || is_indirect(text);
        if working_dir::has_unknown_parent(spelling)
            || matches!(spelling.first(), Some(WordPart::Text(text)) if is_unresolved(text))
        {
            return Certainty::Maybe;
        }
        if matches!(spelling.first(), Some(WordPart::Text(text)) if text.contains("/../"))
            && self.can_be_parent(spelling)
        {
            return Certainty::Maybe;
        }
        // An unknown word may be any path. A partly known word may be every path that fits its
        // parts.
        let matches = if self.is_bare_name() {
            let name = &self.path;
            [name.clone(), format!("*/{name}"), format!("{name}/*"), format!("*/{name}/*")]
                .iter()
                .any(|pattern| can_match(pattern))
        } else {
            let relative = !matches!(spelling.first(), Some(WordPart::Text(text)) if text.starts_with(['/', '~']));
            let name = base_name(&self.path);
            let can_match_name = || {
                let names = [
                    name.to_owned(),
                    format!("*/{name}"),
                    format!("{name}/*"),
                    format!("*/{name}/*"),
                ];
                names.iter().any(|pattern| can_match(pattern))
            };
            // A file pattern starts in the current directory, while an unknown part may contain any
            // path.
            let from_here = || {
                if spelling.contains(&WordPart::AnyText) {
                    can_match_name()
                } else {
                    self.can_start_suffix(spelling)
                }
            };
            can_match(&self.path)
                || can_match(&format!("{}/*", self.path))
                || (relative && from_here())
        };
        if matches { Certainty::Maybe } else { Certainty::No }
    }

    fn match_known_path(&self, text: &str) -> Certainty {
        // A path with `/../` may have gone through a symbolic link.
        let is_other_home = text.starts_with('~') && !text.starts_with("~/") && text != "~";
        let detour = text.rfind("/../").and_then(|at| text.get(at + 4..)).or_else(|| {
            if is_other_home { text.split_once('/').map(|(_, rest)| rest) } else { None }
        });
        if let Some(tail) = detour
            && self.match_known_path(tail) == Certainty::Yes
        {
            return Certainty::Maybe.max(if is_other_home {
                Certainty::Maybe
            } else {
                self.match_direct_path(text)
            });
        }
        self.match_direct_path(text)
    }

    fn match_direct_path(&self, text: &str) -> Certainty {
        let written = self.expand_home(text);
        let path = normalize_path(&written);
        // `/proc` is another way to the same files.
        let path = match path.strip_prefix("/proc/").and_then(|rest| rest.split_once("/root/")) {
            Some((_, rest)) => format!("/{rest}"),
            None if path.starts_with("/proc/")
                && ["/cwd", "/fd/", "/root"].iter().any(|part| path.contains(part)) =>
            {
                return Certainty::Maybe;
            }
            None if working_dir::is_process_path(&written) => return Certainty::Maybe,
            None => path,
        };
        let parts: Vec<&str> = path.split('/').collect();
        let matches_part = |name: &str, pattern: &str| toolgate_text::matches_glob(pattern, name);
        if self.is_bare_name() {
            return if parts.iter().any(|part| matches_part(part, &self.path)) {
                Certainty::Yes
            } else {
                Certainty::No
            };
        }
        if path.starts_with('/') {
            let under =
                matches_part(&path, &self.path) || matches_part(&path, &format!("{}/*", self.path));
            return if under { Certainty::Yes } else { Certainty::No };
        }
        // From an unknown directory, the path starts like the end of the pattern.
        let given_parts: Vec<&str> = parts
            .into_iter()
            .skip_while(|part| *part == "..")
            .filter(|part| !part.is_empty())
            .collect();
        let place: Vec<&str> = self.path.split('/').filter(|part| !part.is_empty()).collect();
        let ends_at = |most: usize| {
            let end = place.get(place.len() - most..).unwrap_or_default();
            given_parts.len() >= end.len()
                && end.iter().zip(&given_parts).all(|(pattern, part)| matches_part(part, pattern))
        };
        if (1..=place.len()).any(ends_at) { Certainty::Yes } else { Certainty::No }
    }

    /// Returns whether a text of code contains a path to this place.
    pub(crate) fn match_in_code(&self, word: &ShellWord) -> Certainty {
        combine_certainty(word.spellings().iter().map(|spelling| match spelling.as_slice() {
            [WordPart::Text(text)] => {
                split_paths(text).map(|path| self.match_text(path)).max().unwrap_or(Certainty::No)
            }
            // A pattern for file names is not code.
            _ if word.is_pattern() => Certainty::No,
            _ => Certainty::Maybe,
        }))
    }

    /// Returns whether a text may contain a path to this place.
    fn can_occur_in(&self, text: &str) -> bool {
        // `*` in the pattern also matches characters that separate paths in a text.
        let is_apart =
            |part: &str| part.trim_matches('*').contains('*') || split_paths(part).ne([part]);
        self.path.split('/').filter(|part| !part.is_empty()).any(is_apart)
            || split_paths(text).any(|path| self.match_text(path) != Certainty::No)
    }

    /// Returns whether only the last part of a text is like that of this path.
    pub fn has_only_same_name(&self, text: &str) -> bool {
        self.has_only_same_name_as_word(&ShellWord::known(text))
    }

    /// Returns whether only the last part of a word is like that of this path.
    pub(crate) fn has_only_same_name_as_word(&self, word: &ShellWord) -> bool {
        let path = word.text().map(|text| normalize_path(&self.expand_home(text)));
        let Some(path) = path.filter(|path| !path.starts_with('/')) else { return false };
        let parent = self.path.rsplit('/').nth(1).unwrap_or_default();
        // The parent may follow a sign or a short option.
        let is_parent =
            |part: &str| part == parent || (part.starts_with('-') && part.get(2..) == Some(parent));
        !self.is_bare_name() && !path.split(['/', '=', ':', '@', ',']).any(is_parent)
    }

    /// Returns whether few other files share the name: it has an extension, and the parent
    /// directory is not hidden.
    pub(crate) fn has_rare_name(&self) -> bool {
        let mut parts = self.path.rsplit('/');
        parts.next().is_some_and(|name| name.contains('.'))
            && parts.next().is_some_and(|parent| !parent.starts_with('.'))
    }

    /// Returns whether a word is a pattern that is relative to the current directory and cannot
    /// match this path.
    pub(crate) fn is_unrelated_pattern(&self, word: &ShellWord) -> bool {
        let has_parent_step = |part: &WordPart| matches!(part, WordPart::Text(text) if text.split('/').any(|part| part == ".."));
        let from_here = |spelling: &word::WordSpelling| {
            let is_whole = matches!(spelling.first(), Some(WordPart::Text(text)) if text.starts_with(['/', '~']));
            // If the start is unknown, `..` in the rest has no meaning.
            let steps_up_later = !spelling.contains(&WordPart::AnyText)
                && spelling.iter().skip(1).any(has_parent_step);
            let steps_up_first =
                spelling.first().is_some_and(has_parent_step) && self.can_start_suffix(spelling);
            !is_whole && !steps_up_first && !steps_up_later && !self.can_continue_as(spelling)
        };
        !self.is_bare_name() && word.spellings().iter().all(from_here)
    }

    /// Returns whether a spelling with an unknown beginning continues like this path.
    ///
    /// The rest goes through the path, or contains at least its last two parts.
    fn can_continue_as(&self, spelling: &[WordPart]) -> bool {
        let parts: Vec<&str> = self.path.split('/').collect();
        let Some((last, above)) = parts.split_last() else { return false };
        let rest = self.clean_spelling(spelling.get(1..).unwrap_or_default());
        let continues = |part: &WordPart| {
            let WordPart::Text(text) = part else { return false };
            let text_parts: Vec<&str> = text.split('/').filter(|part| !part.is_empty()).collect();
            let through = text_parts.split_last().is_some_and(|(_, above)| above.contains(last));
            through || text_parts.windows(2).any(|pair| matches!(pair, [before, name] if name == last && Some(before) == above.last()))
        };
        // The unknown part is inside of this place.
        let leads_inside = |pair: &[WordPart]| matches!(pair, [WordPart::Text(text), _] if text.ends_with('/') && base_name(text.trim_end_matches('/')) == *last);
        let can_start = || {
            multi_part_suffixes(&self.path).any(|end| {
                can_intersect(&rest, &ShellWord::parse_rule_pattern(end))
                    || can_intersect(&rest, &ShellWord::parse_rule_pattern(&format!("{end}/*")))
            })
        };
        spelling.first() == Some(&WordPart::AnyText)
            && (spelling.iter().skip(1).any(continues)
                || spelling.windows(2).any(leads_inside)
                || can_start())
    }

    /// Returns whether a patch changes this path. The first part of a path in a patch is usually a
    /// prefix.
    pub(crate) fn match_patch(&self, patch: &ShellWord) -> Certainty {
        let named = |line: &str| {
            let path = line
                .strip_prefix("+++ ")
                .or_else(|| line.strip_prefix("--- "))?
                .split('\t')
                .next()?;
            path.split_once('/').map(|(_, path)| self.match_text(path.trim_end()))
        };
        patch.text().unwrap_or_default().lines().filter_map(named).max().unwrap_or(Certainty::No)
    }

    /// Returns whether a spelling, relative to an unknown directory, may start like an ending of
    /// this path.
    pub(crate) fn can_start_suffix(&self, spelling: &[WordPart]) -> bool {
        let spelling_parts = self.strip_parent_steps(spelling);
        let can_be =
            |path: &str| can_intersect(&spelling_parts, &ShellWord::parse_rule_pattern(path));
        let steps_up = matches!(spelling_parts.first(), Some(WordPart::Text(text)) if text.split('/').any(|part| part == ".."));
        let mut suffixes =
            self.path.match_indices('/').filter_map(|(at, _)| self.path.get(at + 1..));
        steps_up || suffixes.any(|end| can_be(end) || can_be(&format!("{end}/*")))
    }

    /// Returns a spelling without leading `..` or a leading home directory of another user.
    pub(super) fn strip_parent_steps(&self, spelling: &[WordPart]) -> Vec<WordPart> {
        let mut parts = self.clean_spelling(spelling);
        if let Some(WordPart::Text(text)) = parts.first_mut() {
            let rest = match text.strip_prefix('~') {
                Some(home) => home.split_once('/').map_or("", |(_, rest)| rest).to_owned(),
                None => text.trim_start_matches("../").to_owned(),
            };
            *text = rest;
        }
        parts
    }

    /// Returns a spelling whose beginning has no `//`, `/./` and `./`.
    pub(crate) fn clean_spelling(&self, spelling: &[WordPart]) -> Vec<WordPart> {
        match spelling {
            [WordPart::Text(text), rest @ ..] => {
                let mut text = self.expand_home(text);
                while text.contains("//") || text.contains("/./") {
                    text = text.replace("//", "/").replace("/./", "/");
                }
                prefix_spelling(text.strip_prefix("./").unwrap_or(&text), rest)
            }
            other => other.to_vec(),
        }
    }
}

/// Splits a text of code into parts that may be paths.
pub(crate) fn split_paths(text: &str) -> impl Iterator<Item = &str> {
    let is_path = |c: char| c.is_alphanumeric() || "_./~-*".contains(c);
    text.split(move |c: char| !is_path(c)).filter(|token| !token.is_empty())
}

/// Returns a spelling that begins with a text.
fn prefix_spelling(text: &str, rest: &[WordPart]) -> Vec<WordPart> {
    std::iter::once(WordPart::Text(text.to_owned())).chain(rest.iter().cloned()).collect()
}

/// Returns a possible path after several letters of one option: `.env` of `-uo.env`.
pub(super) fn path_after_letters(text: &str) -> Option<&str> {
    let at = text.find(['.', '/', '~']).filter(|at| (3..=5).contains(at))?;
    let are_letters = |flags: &str| flags.bytes().all(|flag| flag.is_ascii_alphanumeric());
    text.get(at..).filter(|_| text.get(1..at).is_some_and(are_letters))
}

/// Returns the endings of a path that have at least two parts.
pub(crate) fn multi_part_suffixes(path: &str) -> impl Iterator<Item = &str> {
    path.match_indices('/')
        .filter_map(move |(at, _)| path.get(at..))
        .filter(|end| end.matches('/').count() > 1)
}

/// Expands `~` in a path. `$HOME` is read as `~`.
pub(crate) fn expand_home_path(path: &str, home: &str) -> String {
    match path.strip_prefix('~') {
        Some("") if home.is_empty() => "/".to_owned(),
        Some(rest) if rest.is_empty() || rest.starts_with('/') => format!("{home}{rest}"),
        _ => path.to_owned(),
    }
}

/// Removes `.`, `..` and doubled slashes from a path.
///
/// Symbolic links are not resolved, because their targets have names of their own.
pub fn normalize_path(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." if parts.last().is_some_and(|last| *last != "..") => {
                parts.pop();
            }
            ".." if path.starts_with('/') => {}
            part => parts.push(part),
        }
    }
    let joined = parts.join("/");
    if Path::new(path).is_absolute() { format!("/{joined}") } else { joined }
}

/// Returns whether a path is an input or output device and not a file.
pub(crate) fn is_device(path: &str) -> bool {
    let path = normalize_path(path);
    path == "-" || path.starts_with("/dev/") || path.starts_with("/proc/") || has_device_name(&path)
}

/// Returns whether a relative path looks like a device: `../../dev/stdin`, or `stdin` and `fd/0`
/// after a `cd`.
fn has_device_name(path: &str) -> bool {
    let name = base_name(path);
    let above = path.rsplit_once('/').map(|(above, _)| base_name(above));
    let is_number = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit());
    matches!(name, "stdin" | "tty")
        || (is_number && above.is_none_or(|above| matches!(above, "" | "." | ".." | "fd")))
}
