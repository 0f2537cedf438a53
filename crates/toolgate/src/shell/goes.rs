//! Where a command goes, or sends another one, and what a path names from there.

use std::collections::HashMap;

use super::options::name_and_value;
use super::place::spelled_out;
use super::reach::own_words;
use super::word::{Part, Sure, Word, meet};
use super::{Command, Place, Shell, normal};

/// So many directories are followed; who goes through more may be anywhere.
pub(super) const MOST: usize = 64;
/// So often it is looked where one comes to.
const MOST_STEPS: usize = 16_384;
pub(super) const ANYWHERE: &str = "~+";

impl Shell {
    /// The directories that a command may stand in that begins in one: that, and wherever it goes.
    pub(super) fn wanders(&self, from: &str, home: &str) -> Vec<String> {
        let (mut all, mut steps) = (vec![normal(from)], 0);
        let mut tried: HashMap<&str, usize> = HashMap::new();
        for to in self.commands.iter().flat_map(goes_to) {
            // Where nothing was found since, the same leads nowhere else.
            if tried.insert(to, all.len()) == Some(all.len()) {
                continue;
            }
            steps += all.len();
            let reached: Vec<String> = all.iter().map(|directory| joined(directory, to, home)).collect();
            for directory in reached {
                if !all.contains(&directory) {
                    all.push(directory);
                }
            }
            if all.len() > MOST || steps > MOST_STEPS {
                return vec![ANYWHERE.to_owned()];
            }
        }
        all
    }
}

/// The directories that options of a command send it to, or another one; nothing for one that is not known.
fn sent_to(command: &Command) -> Vec<Option<&str>> {
    const VALUED: &[&str] = &["-C", "-D", "-R", "-T", "-U", "-g", "-h", "-p", "-r", "-t", "-u"];
    let words = command.words.get(1..).unwrap_or_default();
    // Options of these are for another program, up to where that stands.
    let mut leads = matches!(command.program(), Some("doas" | "env" | "runuser" | "su" | "sudo"));
    let logs_in = |text: &str| match (command.program(), text.strip_prefix("--")) {
        (Some("runuser" | "su" | "sudo"), Some(long)) => long.starts_with("lo"),
        (Some("sudo"), None) => text.starts_with('-') && text.contains('i'),
        (Some("runuser" | "su"), None) => text == "-" || (text.starts_with('-') && text.contains('l')),
        _ => false,
    };
    let (mut found, mut before) = (Vec::new(), None);
    for (at, word) in words.iter().enumerate() {
        let behind = std::mem::replace(&mut before, word.text());
        let Some(text) = word.text() else { continue };
        leads = leads && (text.starts_with('-') || text.contains('=') || behind.is_some_and(|option| VALUED.contains(&option)));
        // The home of somebody is as good as any directory.
        if leads && logs_in(text) {
            found.push(Some(ANYWHERE));
        }
        let value = match text.strip_prefix("--") {
            Some(long) => {
                let (name, value) = name_and_value(long);
                let is_like = |option: &str, least: usize| name.len() >= least && option.starts_with(name);
                (is_like("chdir", 1) || is_like("directory", 5) || is_like("work-tree", 5) || name == "cd").then_some(value)
            }
            None => match text.strip_prefix('-').and_then(|flags| flags.split_once(['C', 'D'])) {
                // To most programs these letters are something else.
                Some((before, value)) if leads || (before.is_empty() && (value.is_empty() || value.starts_with(['/', '.', '~']))) => {
                    Some(Some(value).filter(|value| !value.is_empty()))
                }
                _ => None,
            },
        };
        if let Some(value) = value {
            found.push(value.or_else(|| words.get(at + 1).and_then(Word::text)));
        }
    }
    found
}

/// Whether a pattern goes up again behind what it stands for: nobody knows from where.
pub(super) fn is_detour(spelling: &[Part]) -> bool {
    let goes_up = |part: &Part| matches!(part, Part::Text(text) if text.contains("/../") || text.ends_with("/.."));
    spelling.iter().skip(1).any(goes_up)
}

/// Whether a path, as it is written, leads through what a process has open: another way to the same files. A descriptor by itself is
/// mostly a pipe.
pub(super) fn is_led(path: &str) -> bool {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/').filter(|part| !matches!(*part, "" | ".")) {
        match (parts.as_slice(), part) {
            (["dev", "fd" | "stdin" | "stdout" | "stderr", ..], "..") => return true,
            (["dev", "fd", _, ..] | ["dev", "stdin" | "stdout" | "stderr", ..], _) => return true,
            (["proc", _, ..], "cwd" | "fd" | "root") => return true,
            (_, "..") => {
                parts.pop();
            }
            _ => parts.push(part),
        }
    }
    false
}

/// Whether a command has an option that sends it, or another one, to a directory.
pub(super) fn sends(command: &Command) -> bool {
    !sent_to(command).is_empty()
}

/// Where a command goes, or sends another one.
pub(super) fn goes_to(command: &Command) -> Vec<&str> {
    // Where `tar` goes is for its own operands, and looked at with them.
    if command.unlikely || matches!(command.program(), Some("tar" | "bsdtar" | "gtar")) {
        return Vec::new();
    }
    if !matches!(command.program(), Some("cd" | "chdir" | "pushd")) {
        return sent_to(command).into_iter().flatten().collect();
    }
    let words = own_words(command);
    let is_option = |word: &Word| word.text().is_some_and(|text| text.starts_with('-'));
    // `cd`, `cd --` and `cd -P` go home, and `cd -` goes back.
    if words.iter().all(|word| is_option(word) && word.text() != Some("-")) {
        return vec!["~"];
    }
    words.iter().filter(|word| !is_option(word)).filter_map(Word::text).collect()
}

/// A path from a directory, as far as anybody knows where that is.
pub(super) fn joined(directory: &str, path: &str, home: &str) -> String {
    let path = spelled_out(path, home);
    let whole = match path.starts_with('/') {
        true => path,
        false if path.starts_with('~') || !directory.starts_with('/') => return ANYWHERE.to_owned(),
        false => format!("{directory}/{path}"),
    };
    // Whoever goes on from there is somewhere else.
    if is_led(&whole) { "/proc/self/cwd".to_owned() } else { normal(&whole) }
}

impl Place<'_> {
    /// Whether it lies under a directory that is named from another one.
    pub(crate) fn is_searched(&self, from: &str, path: &str) -> Sure {
        let whole = joined(from, path, self.home);
        let odd = !whole.starts_with('/');
        // Another way to the same files, and names that may stand anywhere.
        let other = whole.starts_with("/proc/") && ["/cwd", "/fd", "/root"].iter().any(|part| whole.contains(part));
        if odd || other || self.is_a_name() || self.path.starts_with('*') {
            return Sure::Maybe;
        }
        if whole == "/" || self.is_below(&whole) { Sure::Yes } else { Sure::No }
    }

    /// Whether a word names it, or may name it, from a directory. What is to be left out is left alone.
    pub(super) fn is_named_from(&self, directory: &str, word: &Word) -> bool {
        let under = format!("{}/*", self.path);
        let Some(text) = word.text() else {
            let is_it = |spelling: &Vec<Part>| {
                let is_open = spelling.first() == Some(&Part::Any);
                let spelling = self.spelled_from(directory, spelling);
                !is_open && (is_detour(&spelling) || meet(&spelling, &Word::wanted(&self.path)) || meet(&spelling, &Word::wanted(&under)))
            };
            return word.spellings().iter().any(is_it);
        };
        if text.starts_with("--exclude") {
            return false;
        }
        // It may stand behind an option or a sign, too.
        let glued = text.get(2..).filter(|_| text.starts_with('-'));
        let tails = text.match_indices(['=', ':', '@', ',']).take(16).filter_map(|(at, _)| text.get(at + 1..));
        std::iter::once(text).chain(glued).chain(tails).any(|path| {
            let whole = joined(directory, path, self.home);
            crate::names::glob(&self.path, &whole) || crate::names::glob(&under, &whole)
        })
    }

    /// A spelling of which not all is known, from a directory.
    pub(super) fn spelled_from(&self, directory: &str, spelling: &[Part]) -> Vec<Part> {
        let mut spelling = self.cleaned(spelling);
        let begins = match spelling.first_mut() {
            Some(Part::Text(text)) => std::mem::take(text),
            _ => String::new(),
        };
        let whole = if begins.starts_with(['/', '~']) { begins } else { format!("{directory}/{begins}") };
        if is_led(&whole) {
            return vec![Part::Any];
        }
        if matches!(spelling.as_slice(), [Part::Text(_)]) {
            return vec![Part::Text(normal(&whole))];
        }
        // How the last part goes on is not known.
        let (above, last) = whole.rsplit_once('/').unwrap_or(("", whole.as_str()));
        spelling.insert(0, Part::Text(format!("{}/{last}", normal(above).trim_end_matches('/'))));
        spelling
    }
}
