//! A file or directory that a rule speaks of, and whether words name it, or a directory above it.

use std::path::Path;

use super::reach::from;
use super::word::{self, Part, Sure, Word, meet, sum};
use super::{base, goes};

/// A file or directory that a rule speaks of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place<'h> {
    pub(super) path: String,
    /// What `~` stands for, in the place and in what may name it.
    pub(super) home: &'h str,
}

impl<'h> Place<'h> {
    /// A path, absolute or from the home directory, with all that lies under it; or a name, wherever it stands. `*` is any text.
    pub(crate) fn new(pattern: &str, home: &'h str) -> Self {
        let path = spelled_out(pattern.trim_end_matches('/'), home);
        // A path from somewhere may be from anywhere.
        let somewhere = path.contains('/') && !path.starts_with(['/', '~', '*']);
        Self { path: if somewhere { format!("*/{}", path.trim_start_matches("./")) } else { path }, home }
    }

    /// A path that may name it, without `~`.
    fn spelled_out(&self, path: &str) -> String {
        spelled_out(path, self.home)
    }

    pub(super) fn is_a_name(&self) -> bool {
        !self.path.contains('/')
    }

    /// Whether a text is a path to it.
    pub(crate) fn is(&self, path: &str) -> Sure {
        self.is_spelled(&[Part::Text(path.to_owned())])
    }

    pub(super) fn is_named_by(&self, word: &Word) -> Sure {
        sum(word.spellings().iter().map(|spelling| self.is_spelled(spelling)))
    }

    /// `of=path`, `--file=path`, `@path`, `host:path`, `path:/there` name it as well.
    fn is_spelled(&self, spelling: &[Part]) -> Sure {
        let mut best = self.is_path(spelling);
        if let [Part::Text(text), rest @ ..] = spelling {
            if text.matches(['=', ':', '@', ',']).count() > 16 {
                // It is not tried from each of them: it is enough that it stands between two, or may stand somewhere in the text.
                let pieces = text.split(['=', ':', '@', ',']).filter(|piece| piece.contains(['/', '~']));
                let named = pieces.map(|piece| self.is_known_path(piece)).max().unwrap_or(Sure::No);
                let is_open = !rest.is_empty() || self.may_stand_in(text);
                return best.max(named).max(if is_open { Sure::Maybe } else { Sure::No });
            }
            // `-o.env` names it, too.
            if text.starts_with('-') && !text.starts_with("--") {
                best = best.max(self.is_path(&begun_with(text.get(2..).unwrap_or_default(), rest)));
                // `-uo.env`, too; but what is no path may be how a name ends.
                if let Some(path) = behind_letters(text) {
                    let named = self.is_path(&begun_with(path, rest));
                    best = best.max(if path.contains('/') { named } else { named.min(Sure::Maybe) });
                }
            }
            for (at, _) in text.match_indices(['=', ':', '@', ',']) {
                best = best.max(self.is_path(&begun_with(text.get(at + 1..).unwrap_or_default(), rest)));
            }
            // So do `-v path:/there` and `--mount=src=path,dst=/there`, where a sign follows; with a space behind that, it is prose.
            let is_prose = |at: usize| text.get(at + 1..).is_some_and(|rest| rest.starts_with(char::is_whitespace));
            let signs = text.match_indices(['=', ':', ',']).map(|(at, _)| at).filter(|at| !is_prose(*at));
            let pieces = signs.filter_map(|at| text.get(..at)?.rsplit(['=', ':', '@', ',']).next());
            for piece in pieces.filter(|piece| piece.contains(['/', '~'])) {
                let glued = piece.get(2..).filter(|_| piece.starts_with('-'));
                best = best.max(self.is_known_path(glued.unwrap_or(piece)));
            }
        }
        best
    }

    fn is_path(&self, spelling: &[Part]) -> Sure {
        if let [Part::Text(text)] = spelling {
            return self.is_known_path(text);
        }
        let spelling = &self.cleaned(spelling)[..];
        // What goes up first and then down is named by the rest of it.
        let wanted = |pattern: &str| meet(spelling, &Word::wanted(pattern));
        let is_led = |text: &str| text.starts_with("/proc/") || (text.starts_with('/') && (wanted("/proc/*/*") || wanted("/dev/fd/*")));
        let is_odd = |text: &str| text.trim_start_matches("../").contains("/../") || is_led(text);
        if goes::is_detour(spelling) || matches!(spelling.first(), Some(Part::Text(text)) if is_odd(text)) {
            return Sure::Maybe;
        }
        if matches!(spelling.first(), Some(Part::Text(text)) if text.contains("/../")) && self.may_be_above(spelling) {
            return Sure::Maybe;
        }
        // Something unknown may be anything; something with a beginning or an end may be what fits both.
        let here = if self.is_a_name() {
            let name = &self.path;
            [name.clone(), format!("*/{name}"), format!("{name}/*"), format!("*/{name}/*")].iter().any(|pattern| wanted(pattern))
        } else {
            let relative = !matches!(spelling.first(), Some(Part::Text(text)) if text.starts_with(['/', '~']));
            let name = base(&self.path);
            let somewhere = || {
                let names = [name.to_owned(), format!("*/{name}"), format!("{name}/*"), format!("*/{name}/*")];
                names.iter().any(|pattern| wanted(pattern))
            };
            // A pattern of file names begins with how it ends; what is not known may go anywhere.
            let from_here = || if spelling.contains(&Part::Any) { somewhere() } else { self.may_end_so(spelling) };
            wanted(&self.path) || wanted(&format!("{}/*", self.path)) || (relative && from_here())
        };
        if here { Sure::Maybe } else { Sure::No }
    }

    fn is_known_path(&self, text: &str) -> Sure {
        // What goes up again may have gone through a link.
        let odd = text.starts_with('~') && !text.starts_with("~/") && text != "~";
        let detour = text
            .rfind("/../")
            .and_then(|at| text.get(at + 4..))
            .or_else(|| if odd { text.split_once('/').map(|(_, rest)| rest) } else { None });
        if let Some(tail) = detour
            && self.is_known_path(tail) == Sure::Yes
        {
            return Sure::Maybe.max(if odd { Sure::Maybe } else { self.is_straight_path(text) });
        }
        self.is_straight_path(text)
    }

    fn is_straight_path(&self, text: &str) -> Sure {
        let written = self.spelled_out(text);
        let path = normal(&written);
        // Another way to the same files.
        let path = match path.strip_prefix("/proc/").and_then(|rest| rest.split_once("/root/")) {
            Some((_, rest)) => format!("/{rest}"),
            None if path.starts_with("/proc/") && ["/cwd", "/fd/", "/root"].iter().any(|part| path.contains(part)) => return Sure::Maybe,
            None if goes::is_led(&written) => return Sure::Maybe,
            None => path,
        };
        let parts: Vec<&str> = path.split('/').collect();
        let like = |name: &str, pattern: &str| crate::names::glob(pattern, name);
        if self.is_a_name() {
            return if parts.iter().any(|part| like(part, &self.path)) { Sure::Yes } else { Sure::No };
        }
        if path.starts_with('/') {
            let under = like(&path, &self.path) || like(&path, &format!("{}/*", self.path));
            return if under { Sure::Yes } else { Sure::No };
        }
        // From a directory that nobody knows here: it begins with how the place ends.
        let given: Vec<&str> = parts.into_iter().skip_while(|part| *part == "..").filter(|part| !part.is_empty()).collect();
        let place: Vec<&str> = self.path.split('/').filter(|part| !part.is_empty()).collect();
        let ends = |most: usize| {
            let end = place.get(place.len() - most..).unwrap_or_default();
            given.len() >= end.len() && end.iter().zip(&given).all(|(pattern, part)| like(part, pattern))
        };
        if (1..=place.len()).any(ends) { Sure::Yes } else { Sure::No }
    }

    /// Whether a text of code has a path to it somewhere.
    pub(super) fn is_within(&self, word: &Word) -> Sure {
        sum(word.spellings().iter().map(|spelling| match spelling.as_slice() {
            [Part::Text(text)] => paths_of(text).map(|path| self.is(path)).max().unwrap_or(Sure::No),
            // Names of files are no code.
            _ if word.is_pattern() => Sure::No,
            _ => Sure::Maybe,
        }))
    }

    /// Whether a text may have a path to it somewhere.
    fn may_stand_in(&self, text: &str) -> bool {
        // Other letters than those of paths, which `*` stands for as well, take it apart.
        let is_apart = |part: &str| part.trim_matches('*').contains('*') || paths_of(part).ne([part]);
        self.path.split('/').filter(|part| !part.is_empty()).any(is_apart) || paths_of(text).any(|path| self.is(path) != Sure::No)
    }

    /// Whether a text has the path of a directory above it somewhere.
    pub(super) fn has_a_way_in(&self, word: &Word) -> bool {
        let mut paths = paths_of(word.text().unwrap_or_default()).filter(|path| path.contains(['/', '~']));
        paths.any(|path| self.lies_under(&Word::known(path)) != Sure::No)
    }

    /// Whether it is a path, and a text has nothing in common with it but the last part.
    pub(crate) fn is_only_called(&self, text: &str) -> bool {
        self.is_only_called_like(&Word::known(text))
    }

    /// Whether it is a path, and a word has nothing in common with it but the last part.
    pub(super) fn is_only_called_like(&self, word: &Word) -> bool {
        let path = word.text().map(|text| normal(&self.spelled_out(text)));
        let Some(path) = path.filter(|path| !path.starts_with('/')) else { return false };
        let parent = self.path.rsplit('/').nth(1).unwrap_or_default();
        // It may stand behind a sign or a short option, too.
        let is_parent = |part: &str| part == parent || (part.starts_with('-') && part.get(2..) == Some(parent));
        !self.is_a_name() && !path.split(['/', '=', ':', '@', ',']).any(is_parent)
    }

    /// Whether few other files are called like it: it has an ending, and stands in no hidden directory.
    pub(super) fn has_a_rare_name(&self) -> bool {
        let mut parts = self.path.rsplit('/');
        parts.next().is_some_and(|name| name.contains('.')) && parts.next().is_some_and(|parent| !parent.starts_with('.'))
    }

    /// Whether it is a path, and a word is a pattern from wherever one is, and not from further up.
    pub(super) fn is_elsewhere(&self, word: &Word) -> bool {
        let goes_up = |part: &Part| matches!(part, Part::Text(text) if text.split('/').any(|part| part == ".."));
        let from_here = |spelling: &word::Spelling| {
            let is_whole = matches!(spelling.first(), Some(Part::Text(text)) if text.starts_with(['/', '~']));
            // Where nobody knows from where, that says nothing.
            let again = !spelling.contains(&Part::Any) && spelling.iter().skip(1).any(goes_up);
            let up = spelling.first().is_some_and(goes_up) && self.may_end_so(spelling);
            !is_whole && !up && !again && !self.goes_on(spelling)
        };
        !self.is_a_name() && word.spellings().iter().all(from_here)
    }

    /// Whether a spelling of which nobody knows how it begins goes on as it does: through it, or with at least its last two parts.
    fn goes_on(&self, spelling: &[Part]) -> bool {
        let own: Vec<&str> = self.path.split('/').collect();
        let Some((last, above)) = own.split_last() else { return false };
        let rest = self.cleaned(spelling.get(1..).unwrap_or_default());
        let one = |part: &Part| {
            let Part::Text(text) = part else { return false };
            let given: Vec<&str> = text.split('/').filter(|part| !part.is_empty()).collect();
            let through = given.split_last().is_some_and(|(_, above)| above.contains(last));
            through || given.windows(2).any(|pair| matches!(pair, [before, name] if name == last && Some(before) == above.last()))
        };
        // What is not known stands in it.
        let goes_in =
            |pair: &[Part]| matches!(pair, [Part::Text(text), _] if text.ends_with('/') && base(text.trim_end_matches('/')) == *last);
        let begins_so =
            || long_ends(&self.path).any(|end| meet(&rest, &Word::wanted(end)) || meet(&rest, &Word::wanted(&format!("{end}/*"))));
        spelling.first() == Some(&Part::Any) && (spelling.iter().skip(1).any(one) || spelling.windows(2).any(goes_in) || begins_so())
    }

    /// Whether it lies under a directory that a word names with its whole path.
    pub(super) fn lies_right_under(&self, word: &Word) -> Sure {
        let Some(text) = word.text() else { return Sure::No };
        let glued = text.get(2..).filter(|_| text.starts_with('-')).unwrap_or_default();
        let value = text.split_once('=').map(|(_, value)| value).unwrap_or_default();
        let named = [text, glued, value].into_iter().filter(|path| self.spelled_out(path).starts_with('/'));
        named.map(|path| self.lies_under(&Word::known(path))).max().unwrap_or(Sure::No)
    }

    /// Whether it lies somewhere under what a word names.
    pub(super) fn lies_under(&self, word: &Word) -> Sure {
        let parts: Vec<&str> = self.path.split('/').filter(|part| !part.is_empty()).collect();
        let Some(text) = word.text() else {
            // The directory that it is in, by a pattern.
            let parent = parts.iter().rev().nth(1).copied().unwrap_or_default();
            let near = !parent.is_empty() && word.spellings().iter().any(|spelling| meet(&self.cleaned(spelling), &Word::wanted(parent)));
            let above = |spelling: &word::Spelling| match spelling.as_slice() {
                [Part::Text(text)] => self.lies_under(&Word::known(text.as_str())) != Sure::No,
                spelling => self.may_be_above(spelling),
            };
            let near = near || word.spellings().iter().any(above);
            return self.is_named_by(word).max(if near { Sure::Maybe } else { Sure::No });
        };
        if goes::is_led(&self.spelled_out(text)) {
            return self.is_named_by(word).max(Sure::Maybe);
        }
        // The home of somebody else, a directory of this moment, and what `git` takes for a whole repository.
        if self.spelled_out(text).starts_with('~') || [":/", ":(", ":!", ":^"].iter().any(|sign| text.starts_with(sign)) {
            return Sure::Maybe;
        }
        let path = normal(&self.spelled_out(text));
        match path.as_str() {
            // Here may be anywhere.
            "" | "." | ".." | "*" => return Sure::Maybe,
            "/" => return Sure::Yes,
            path if path.starts_with('/') => return if self.is_below(path) { Sure::Yes } else { Sure::No },
            _ => {}
        }
        // From a directory that nobody knows here: it ends like one of those above.
        let given: Vec<&str> = path.split('/').skip_while(|part| *part == "..").collect();
        if given.is_empty() {
            return Sure::Maybe;
        }
        let ends = |above: usize| parts.get(..parts.len().saturating_sub(above)).is_some_and(|above| above.ends_with(&given));
        match (1..parts.len()).find(|above| ends(*above)) {
            // Many directories are called `bin`.
            Some(1) if given.len() > 1 || path.starts_with('.') => Sure::Yes,
            Some(_) => Sure::Maybe,
            None => Sure::No,
        }
    }

    /// Whether it lies somewhere under what a word names that is changed, or under what is glued to an option in it.
    pub(super) fn lies_under_given(&self, word: &Word, stands: Option<&Word>) -> Sure {
        let is_here = |word: &Word| matches!(word.text(), Some("." | "./"));
        let under = |word: &Word| match word.text() {
            // Nothing is no directory.
            Some("") => Sure::No,
            _ => self.lies_under(&if is_here(word) { from(word, stands) } else { word.clone() }),
        };
        with_values(word).iter().map(under).max().unwrap_or(Sure::No)
    }

    /// Whether a patch is about it: the first part of a path in one is mostly not meant.
    pub(super) fn is_patched_by(&self, patch: &Word) -> Sure {
        let named = |line: &str| {
            let path = line.strip_prefix("+++ ").or_else(|| line.strip_prefix("--- "))?.split('\t').next()?;
            path.split_once('/').map(|(_, path)| self.is(path.trim_end()))
        };
        patch.text().unwrap_or_default().lines().filter_map(named).max().unwrap_or(Sure::No)
    }

    /// Whether a spelling may be a directory above it: by its whole path, or, from a directory that nobody knows here, by how that ends.
    fn may_be_above(&self, spelling: &[Part]) -> bool {
        let mut given = self.gone_up(spelling);
        if let Some(Part::Text(text)) = given.last_mut() {
            while text.ends_with('/') || text.ends_with("/.") {
                text.pop();
            }
        }
        let is_whole = matches!(given.first(), Some(Part::Text(text)) if text.starts_with('/'));
        let mut above = self.path.match_indices('/').filter_map(|(at, _)| self.path.get(..at)).filter(|above| !above.is_empty());
        let may_be = |path: &str| meet(&given, &Word::wanted(path));
        let ends_so = |above: &str| {
            let mut ends = above.match_indices('/').filter_map(|(at, _)| above.get(at + 1..)).filter(|end| !end.starts_with('*'));
            ends.any(may_be)
        };
        above.any(|above| if is_whole { above.starts_with('/') && may_be(above) } else { ends_so(above) })
    }

    /// Whether a spelling, from a directory that nobody knows here, may begin with how it ends.
    pub(super) fn may_end_so(&self, spelling: &[Part]) -> bool {
        let given = self.gone_up(spelling);
        let may_be = |path: &str| meet(&given, &Word::wanted(path));
        let goes_up = matches!(given.first(), Some(Part::Text(text)) if text.split('/').any(|part| part == ".."));
        let mut ends = self.path.match_indices('/').filter_map(|(at, _)| self.path.get(at + 1..));
        goes_up || ends.any(|end| may_be(end) || may_be(&format!("{end}/*")))
    }

    /// What a spelling names behind the `..` that it begins with, or behind somebody's home.
    fn gone_up(&self, spelling: &[Part]) -> Vec<Part> {
        let mut given = self.cleaned(spelling);
        if let Some(Part::Text(text)) = given.first_mut() {
            let rest = match text.strip_prefix('~') {
                Some(home) => home.split_once('/').map_or("", |(_, rest)| rest).to_owned(),
                None => text.trim_start_matches("../").to_owned(),
            };
            *text = rest;
        }
        given
    }

    /// Whether it is a path that leads through a directory; `*` in it is any text, but no `/`.
    pub(super) fn is_below(&self, directory: &str) -> bool {
        let mut place = self.path.split('/').filter(|part| !part.is_empty());
        let mut given = directory.split('/').filter(|part| !part.is_empty());
        self.path.starts_with('/')
            && given.all(|part| place.next().is_some_and(|pattern| crate::names::glob(pattern, part)))
            && place.next().is_some()
    }

    /// A spelling whose beginning is a path without detours.
    pub(super) fn cleaned(&self, spelling: &[Part]) -> Vec<Part> {
        match spelling {
            [Part::Text(text), rest @ ..] => {
                let mut text = self.spelled_out(text);
                while text.contains("//") || text.contains("/./") {
                    text = text.replace("//", "/").replace("/./", "/");
                }
                begun_with(text.strip_prefix("./").unwrap_or(&text), rest)
            }
            other => other.to_vec(),
        }
    }
}

/// What may be paths in a text of code.
pub(super) fn paths_of(text: &str) -> impl Iterator<Item = &str> {
    let is_path = |c: char| c.is_alphanumeric() || "_./~-*".contains(c);
    text.split(move |c: char| !is_path(c)).filter(|token| !token.is_empty())
}

/// A spelling that begins with a text.
fn begun_with(text: &str, rest: &[Part]) -> Vec<Part> {
    std::iter::once(Part::Text(text.to_owned())).chain(rest.iter().cloned()).collect()
}

/// A word, and what is glued to an option in it. What is to be left out is left alone.
fn with_values(word: &Word) -> Vec<Word> {
    let text = word.text().filter(|text| text.starts_with('-') && !text.starts_with("--exclude")).unwrap_or_default();
    let value = if text.starts_with("--") { text.split_once('=').map(|(_, value)| value) } else { text.get(2..) };
    let values = value.filter(|value| !value.is_empty()).into_iter().chain(behind_letters(text));
    std::iter::once(word.clone()).chain(values.map(Word::known)).collect()
}

/// What looks like a path behind several letters of one option: `.env` of `-uo.env`.
fn behind_letters(text: &str) -> Option<&str> {
    let at = text.find(['.', '/', '~']).filter(|at| (3..=5).contains(at))?;
    let are_letters = |flags: &str| flags.bytes().all(|flag| flag.is_ascii_alphanumeric());
    text.get(at..).filter(|_| text.get(1..at).is_some_and(are_letters))
}

/// How a path ends, with at least two of its parts.
pub(super) fn long_ends(path: &str) -> impl Iterator<Item = &str> {
    path.match_indices('/').filter_map(move |(at, _)| path.get(at..)).filter(|end| end.matches('/').count() > 1)
}

/// The home directory of whoever runs this, without a slash at its end; `~` where there is none.
pub(crate) fn home() -> String {
    match crate::home::home() {
        Some(home) => normal(&home.display().to_string()).trim_end_matches('/').to_owned(),
        None => "~".to_owned(),
    }
}

/// A path with `~`, which `$HOME` is read as, spelled out.
pub(super) fn spelled_out(path: &str, home: &str) -> String {
    match path.strip_prefix('~') {
        Some("") if home.is_empty() => "/".to_owned(),
        Some(rest) if rest.is_empty() || rest.starts_with('/') => format!("{home}{rest}"),
        _ => path.to_owned(),
    }
}

/// A path without `.`, `..` and doubled slashes. Links are nobody's business here: what they lead to has a name of its own.
pub(crate) fn normal(path: &str) -> String {
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

/// A file that is somebody's output, and not a file.
pub(super) fn is_device(path: &str) -> bool {
    let path = normal(path);
    path == "-" || path.starts_with("/dev/") || path.starts_with("/proc/") || is_called_like_device(&path)
}

/// Whether a path that begins nobody knows where is called like one: `../../dev/stdin`, or `stdin` and `fd/0` behind a `cd`.
fn is_called_like_device(path: &str) -> bool {
    let name = base(path);
    let above = path.rsplit_once('/').map(|(above, _)| base(above));
    let is_number = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit());
    matches!(name, "stdin" | "tty") || (is_number && above.is_none_or(|above| matches!(above, "" | "." | ".." | "fd")))
}
