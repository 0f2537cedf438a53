//! What a shell command would run, as far as that can be told without running it.
//!
//! A command is parsed, not searched: programs are found behind quotes, substitutions, `env`, `xargs`, `find -exec`, `eval` and
//! `sh -c`. What only the running shell knows is *opaque*, and a rule that looks at it asks a person.

mod acts;
mod inner;
mod known;
mod options;
mod reach;
mod read;
mod sed;
mod stands;
mod text;
mod word;
mod words;
mod written;

use std::collections::HashSet;
use std::path::Path;

pub(crate) use word::Sure;
use word::{Part, Word, meet, sum};

/// One program with its words, and the files that it is redirected to or from.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Command {
    pub(crate) words: Vec<Word>,
    pub(crate) files: Vec<Word>,
    /// It reads what another command writes, or a text that stands here.
    pub(crate) fed: Option<Fed>,
    /// The directory that it is sure to stand in.
    pub(crate) stands: Option<Word>,
    /// It is only looked at because it stands behind a program that runs others.
    pub(crate) unlikely: bool,
}

/// What a command reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fed {
    Text(Word),
    /// What another command writes.
    Piped,
    Unknown,
}

/// So many commands are looked at.
const MOST: usize = 4_096;
/// So many letters of words are compared of which only a part is known; who writes more may mean anything.
const MOST_LETTERS: usize = 1_024;

/// What a shell command would do.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Shell {
    pub(crate) commands: Vec<Command>,
    /// What cannot be told, and why.
    pub(crate) opaque: Vec<String>,
    /// The names of files that are written, and their paths.
    pub(crate) written: HashSet<String>,
    pub(crate) written_paths: Vec<String>,
    /// What variables are set to, as it is written: a word that is not known may come to it.
    pub(crate) kept: Vec<String>,
}

impl Shell {
    /// Reads a command.
    pub(crate) fn read(text: &str) -> Self {
        let left = inner::Depth::budget();
        read::read(text, inner::Depth::top(&left))
    }

    fn opaque(why: impl Into<String>) -> Self {
        Self { opaque: vec![why.into()], ..Self::default() }
    }

    fn add(&mut self, other: Self) {
        if self.commands.len() + other.commands.len() > MOST {
            if self.opaque.is_empty() {
                self.opaque.push("there are too many commands in it".to_owned());
            }
            return;
        }
        self.commands.extend(other.commands);
        self.opaque.extend(other.opaque);
        self.written.extend(other.written);
        self.written_paths.extend(other.written_paths);
        self.kept.extend(other.kept);
    }

    /// The first reason why not all can be told.
    pub(crate) fn doubt(&self) -> Option<&str> {
        self.opaque.first().map(String::as_str)
    }

    /// Whether it runs something like this: a program, then words in their order. `-rf` is a set of flags.
    pub(crate) fn runs(&self, pattern: &str) -> Sure {
        let wanted: Vec<&str> = pattern.split_whitespace().collect();
        let one = |command: &Command| is(&command.words, &wanted).max(inner::may_run(command, |words| is(words, &wanted)));
        self.commands.iter().map(one).max().unwrap_or(Sure::No)
    }

    /// Whether one of these files is named anywhere. Who is lenient lets words pass that only the running shell knows, unless
    /// something is changed by them. Where it is not said in which directory the command begins, trees that are only read count if
    /// they are asked for.
    pub(crate) fn touches(&self, places: &[Place<'_>], lenient: bool, trees: bool, from: Option<&str>) -> Sure {
        let letters = |command: &Command| {
            let words: &[Word] = if acts::names_no_files(command) { &[] } else { &command.words };
            words.iter().chain(&command.files).map(Word::open_letters).sum::<usize>()
        };
        if self.commands.iter().map(letters).sum::<usize>() > MOST_LETTERS {
            return self.without_patterns().touches(places, lenient, trees, from).max(Sure::Maybe);
        }
        let goes = |command: &Command| matches!(command.program(), Some("cd" | "pushd" | "popd") | None) || reach::sends(command);
        let moves = self.commands.iter().any(goes);
        let wanders = from.zip(places.first()).map(|(from, place)| self.wanders(from, place.home));
        let feeds = self.commands.iter().any(|command| matches!(command.program(), Some("xargs" | "parallel")));
        // Behind a wrapper, who knows which word is the program.
        let wraps = self.commands.iter().any(|command| command.program().is_some_and(|program| known::WRAPPERS.contains(&program)));
        let one = |command: &Command, place: &Place<'_>| {
            let words = command.words.get(1..).unwrap_or_default();
            // Where `git` stands is not what it changes.
            let given = if command.program() == Some("git") { without_options(words) } else { words };
            let changes = acts::changes(command) && !command.unlikely;
            let is_here = |word: &Word| from.is_some_and(|from| place.is_named_from(from, word));
            let known = |word: &Word, sure: Sure| match sure {
                // A pattern of file names is about files that are here.
                Sure::Maybe if !word.is_unknown() && place.is_elsewhere(word) && !changes && !moves && !is_here(word) => Sure::No,
                Sure::Maybe if lenient && word.is_unknown() && !changes => Sure::No,
                // Many files have the same name; but where it begins, the one that is meant may be the place.
                Sure::Yes if lenient && place.is_only_called_like(word) && !changes && !moves && !is_here(word) => {
                    let is_open = place.has_a_rare_name() && !wraps && !acts::leaves_alone(command);
                    if is_open { Sure::Maybe } else { Sure::No }
                }
                sure => sure,
            };
            let looked_for = acts::looks_for(command)
                .then(|| words.iter().position(|word| word.text().is_none_or(|text| !text.starts_with('-'))))
                .flatten();
            let named = words.iter().enumerate().filter(|(at, _)| !acts::names_no_files(command) && Some(*at) != looked_for);
            let named = named.filter(|(_, word)| !reach::is_no_file(command, word));
            let named = named.map(|(_, word)| known(word, place.is_named_by(word))).max().unwrap_or(Sure::No);
            let specs = if changes { reach::pathspecs(command) } else { Vec::new() };
            let named = named.max(specs.iter().map(|word| place.is_named_by(word)).max().unwrap_or(Sure::No));
            let files = command.files.iter().map(|word| place.is_named_by(word)).max().unwrap_or(Sure::No);
            let best = |of: bool, f: &dyn Fn(&Word) -> Sure| if of { words.iter().map(f).max().unwrap_or(Sure::No) } else { Sure::No };
            let hidden = best(acts::runs_code(command), &|word| known(word, place.is_within(word)));
            let reads = acts::reads_trees(command);
            let read = match &wanders {
                Some(wanders) => place.is_read_by(command, wanders, feeds, lenient),
                None if !trees => Sure::No,
                None if moves && !lenient => best(reads, &|word| place.lies_right_under(word).max(place.lies_under(word))),
                None => best(reads, &|word| place.lies_right_under(word)),
            };
            let stands = command.stands();
            let written = reach::writes(command).iter().map(|file| place.is_named_by(&reach::from(file, stands))).max();
            // What is unpacked may be anything.
            let filled = reach::fills(command).iter().map(|to| place.lies_under(&reach::from(to, stands)).min(Sure::Maybe)).max();
            let reached = read.max(written.unwrap_or(Sure::No)).max(filled.unwrap_or(Sure::No));
            // What is put into a directory is called by its name there.
            let mut put = reach::puts_here(command);
            let given = if put.is_empty() { given } else { given.split_last().map_or(given, |(_, sources)| sources) };
            put.extend(reach::links_here(command));
            let at_it = |file: &Word| {
                let is_here = file.text().is_none_or(|text| text.starts_with("./") || text.starts_with("../"));
                let file = reach::from(file, stands);
                place.is_named_by(&file).max(place.lies_under(&file)).min(if is_here { Sure::Maybe } else { Sure::Yes })
            };
            let put = put.iter().map(at_it).max().unwrap_or(Sure::No);
            let clears = changes && !reach::only_stages(command);
            let above = if clears { given.iter().map(|word| place.lies_under_given(word, stands)).max() } else { None };
            let patched = match &command.fed {
                Some(Fed::Text(text)) if acts::patches(command) => place.is_within(text).max(place.is_patched_by(text)),
                Some(Fed::Piped | Fed::Unknown) if acts::patches(command) && !lenient => Sure::Maybe,
                _ => Sure::No,
            };
            let told = if acts::is_told_files(command) && !lenient { Sure::Maybe } else { Sure::No };
            named.max(files).max(hidden).max(above.unwrap_or(Sure::No)).max(put).max(reached).max(patched).max(told)
        };
        let kept = if lenient { self.handed_on() } else { Vec::new() };
        let may_be_it = |place: &Place<'_>| kept.iter().map(|text| place.is_within(text).min(Sure::Maybe)).max().unwrap_or(Sure::No);
        let each = |place: &Place<'_>| {
            let named = self.commands.iter().map(|command| one(command, place)).max().unwrap_or(Sure::No);
            named.max(may_be_it(place))
        };
        places.iter().map(each).max().unwrap_or(Sure::No)
    }

    /// The same, with nothing known of words of which not all is known.
    fn without_patterns(&self) -> Self {
        let plain = |word: &Word| if word.text().is_some() { word.clone() } else { Word::unknown(word.splits) };
        let mut same = self.clone();
        for command in &mut same.commands {
            command.words = command.words.iter().map(plain).collect();
            command.files = command.files.iter().map(plain).collect();
        }
        same
    }

    /// The paths in variables, and in what `xargs` and its like are given, that a word may come to which is not known.
    fn handed_on(&self) -> Vec<Word> {
        let is_open = |word: &Word| word.text().is_none() && !word.is_pattern();
        let opens = |command: &Command| !acts::names_no_files(command) && command.words.iter().skip(1).any(is_open);
        if !self.commands.iter().any(opens) {
            return Vec::new();
        }
        let fed = |command: &Command| match (command.program(), &command.fed) {
            (Some("mapfile" | "parallel" | "read" | "readarray" | "xargs"), Some(Fed::Text(text))) => text.text().map(str::to_owned),
            _ => None,
        };
        let texts = self.kept.iter().cloned().chain(self.commands.iter().filter_map(fed)).filter(|text| text.contains('/'));
        texts.map(|text| Word::known(text.replace("${HOME}", "~").replace("$HOME", "~"))).collect()
    }

    /// Whether all of its words are known, and all that says which files it is about.
    pub(crate) fn is_spelled_out(&self) -> bool {
        let told = |command: &Command| acts::is_told_files(command) || (acts::patches(command) && command.fed.is_some());
        let known = |command: &Command| command.words.iter().chain(&command.files).all(|word| word.text().is_some());
        self.commands.iter().all(|command| known(command) && !told(command))
    }

    /// Whether one of its words may be a path from the home directory.
    pub(crate) fn names_home(&self) -> bool {
        let from_home = |word: &Word| word.spellings().iter().flatten().any(|part| matches!(part, Part::Text(text) if text.contains('~')));
        let is_fed = |command: &Command| matches!(&command.fed, Some(Fed::Text(text)) if from_home(text));
        // A bare `cd` goes there.
        let goes = |command: &Command| reach::goes_to(command).contains(&"~");
        let is_kept = || self.kept.iter().any(|text| text.contains('~') || text.contains("HOME"));
        let is_there = |command: &Command| command.words.iter().chain(&command.files).any(from_home) || is_fed(command) || goes(command);
        is_kept() || self.commands.iter().any(is_there)
    }
}

/// The last part of a program's path: what it is called.
pub(crate) fn base(name: &str) -> &str {
    name.rsplit('/').next().unwrap_or(name)
}

impl Command {
    /// What its program is called, where that is known.
    pub(crate) fn program(&self) -> Option<&str> {
        self.words.first().and_then(Word::text).map(base)
    }

    /// The directory that it is sure to work in. Options of `git` itself may send it elsewhere.
    pub(crate) fn stands(&self) -> Option<&Word> {
        let words = self.words.get(1..).unwrap_or_default();
        self.stands.as_ref().filter(|_| self.program() != Some("git") || without_options(words).len() == words.len())
    }
}

/// Whether words are a command like this.
fn is(words: &[Word], wanted: &[&str]) -> Sure {
    let (Some((program, rest)), Some((first, words))) = (wanted.split_first(), words.split_first()) else { return Sure::No };
    // `git-push` is `git push`.
    if *program == "git"
        && let Some(verb) = first.text().map(base).and_then(|name| name.strip_prefix("git-"))
    {
        let words: Vec<Word> = [Word::known("git"), Word::known(verb)].into_iter().chain(words.iter().cloned()).collect();
        return is(&words, wanted);
    }
    let called = sum(first.spellings().iter().map(|spelling| match spelling.as_slice() {
        [Part::Text(name)] => Word::known(base(name)).is_like(program),
        [.., Part::Text(end)] if end.contains('/') => Word::known(base(end)).is_like(program),
        _ => Sure::Maybe,
    }));
    if called == Sure::No {
        return Sure::No;
    }
    let (flags, rest): (Vec<&str>, Vec<&str>) = rest.iter().partition(|word| is_flags(word));
    let flags = flags.iter().map(|flags| has_flags(words, flags)).min().unwrap_or(Sure::Yes);
    // What `git` does is its first word that is no option.
    let words = if *program == "git" { without_options(words) } else { words };
    // Other words for the same thing.
    let pushes = |word: &Word| matches!(word.text(), Some("send-pack" | "http-push"));
    if *program == "git" && rest.first() == Some(&"push") && words.first().is_some_and(pushes) {
        return called.min(flags).min(follow(rest.get(1..).unwrap_or_default(), words));
    }
    let verb = match (rest.first(), words.first()) {
        (Some(verb), Some(word)) if *program == "git" => {
            word.is_like(verb).max(if word.splits && word.is_unknown() { Sure::Maybe } else { Sure::No })
        }
        (Some(_), None) if *program == "git" => Sure::No,
        _ => Sure::Yes,
    };
    called.min(flags).min(verb).min(follow(&rest, words))
}

/// What `git` is told behind its own options.
fn without_options(words: &[Word]) -> &[Word] {
    let mut rest = words;
    while let Some((first, more)) = rest.split_first() {
        match first.text() {
            Some("-C" | "-c" | "--git-dir" | "--work-tree" | "--namespace" | "--super-prefix" | "--attr-source" | "--shallow-file") => {
                // What may be no word at all may be in front of what is done.
                if more.first().is_some_and(|value| value.splits && value.text().is_none()) {
                    return more;
                }
                rest = more.get(1..).unwrap_or_default();
            }
            Some(text) if text.starts_with('-') => rest = more,
            _ => break,
        }
    }
    rest
}

fn has_flags(words: &[Word], wanted: &str) -> Sure {
    // Of `-r$x` the beginning is known.
    let begins = |word: &Word| match word.spellings() {
        [spelling] => match spelling.first() {
            Some(Part::Text(text)) => flags_of(text),
            _ => None,
        },
        _ => None,
    };
    let given: String = words.iter().filter_map(begins).collect::<String>().to_lowercase();
    if wanted.to_lowercase().chars().skip(1).all(|flag| given.contains(flag)) {
        return Sure::Yes;
    }
    // Files are seldom called like flags.
    let open = |word: &Word| word.is_unknown() || (word.text().is_none() && word.is_like("-*") == Sure::Maybe && !word.is_pattern());
    // A single word cannot be a flag and what it is about.
    let operands = words.iter().filter(|word| word.text().is_none_or(|text| !text.starts_with('-'))).count();
    if words.iter().any(|word| open(word) && (word.splits || operands > 1)) { Sure::Maybe } else { Sure::No }
}

/// `-rf`, and not `--force`, `-delete` or `-`.
fn is_flags(word: &str) -> bool {
    word.strip_prefix('-').is_some_and(|flags| (1..=3).contains(&flags.len()) && flags.chars().all(char::is_alphabetic))
}

/// The flags of a word: those of `-rf`, and `f` of `--force`.
fn flags_of(word: &str) -> Option<String> {
    match word.strip_prefix("--") {
        Some(long) => {
            let known = [("recursive", 'r'), ("force", 'f'), ("delete", 'd'), ("all", 'a'), ("interactive", 'i'), ("hard", 'h')];
            known.iter().find(|(name, _)| long.starts_with(name)).map(|(_, flag)| flag.to_string())
        }
        None => word.strip_prefix('-').map(str::to_owned),
    }
}

/// Whether words come one after another, with others in between.
fn follow(wanted: &[&str], words: &[Word]) -> Sure {
    let least = |level: Sure| {
        let mut words = words.iter();
        wanted.iter().all(|wanted| words.any(|word| word.is_like(wanted) >= level))
    };
    if least(Sure::Yes) {
        Sure::Yes
    // A word that may come to several can be all that is wanted.
    } else if least(Sure::Maybe) || words.iter().any(|word| word.splits && word.is_unknown()) {
        Sure::Maybe
    } else {
        Sure::No
    }
}

/// A file or directory that a rule speaks of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place<'h> {
    path: String,
    /// What `~` stands for, in the place and in what may name it.
    home: &'h str,
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

    fn is_a_name(&self) -> bool {
        !self.path.contains('/')
    }

    /// Whether a text is a path to it.
    pub(crate) fn is(&self, path: &str) -> Sure {
        self.is_spelled(&[Part::Text(path.to_owned())])
    }

    fn is_named_by(&self, word: &Word) -> Sure {
        sum(word.spellings().iter().map(|spelling| self.is_spelled(spelling)))
    }

    /// `of=path`, `--file=path`, `@path`, `host:path` name it as well.
    fn is_spelled(&self, spelling: &[Part]) -> Sure {
        let mut best = self.is_path(spelling);
        if let [Part::Text(text), rest @ ..] = spelling {
            if text.matches(['=', ':', '@', ',']).count() > 16 {
                return best.max(Sure::Maybe);
            }
            // `-o.env` names it, too.
            if text.starts_with('-') && !text.starts_with("--") {
                let tail: Vec<Part> =
                    std::iter::once(Part::Text(text.get(2..).unwrap_or_default().to_owned())).chain(rest.iter().cloned()).collect();
                best = best.max(self.is_path(&tail));
            }
            for (at, _) in text.match_indices(['=', ':', '@', ',']) {
                let tail = text.get(at + 1..).unwrap_or_default();
                let tail: Vec<Part> = std::iter::once(Part::Text(tail.to_owned())).chain(rest.iter().cloned()).collect();
                best = best.max(self.is_path(&tail));
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
        if reach::is_detour(spelling) || matches!(spelling.first(), Some(Part::Text(text)) if is_odd(text)) {
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
            None if reach::is_led(&written) => return Sure::Maybe,
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
    fn is_within(&self, word: &Word) -> Sure {
        let tokens = |text: &str| {
            let is_path = |c: char| c.is_alphanumeric() || "_./~-*".contains(c);
            text.split(|c: char| !is_path(c)).filter(|token| !token.is_empty()).map(|token| self.is(token)).max().unwrap_or(Sure::No)
        };
        sum(word.spellings().iter().map(|spelling| match spelling.as_slice() {
            [Part::Text(text)] => tokens(text),
            // Names of files are no code.
            _ if word.is_pattern() => Sure::No,
            _ => Sure::Maybe,
        }))
    }

    /// Whether it is a path, and a text has nothing in common with it but the last part.
    pub(crate) fn is_only_called(&self, text: &str) -> bool {
        self.is_only_called_like(&Word::known(text))
    }

    /// Whether it is a path, and a word has nothing in common with it but the last part.
    fn is_only_called_like(&self, word: &Word) -> bool {
        let path = word.text().map(|text| normal(&self.spelled_out(text)));
        let Some(path) = path.filter(|path| !path.starts_with('/')) else { return false };
        let parent = self.path.rsplit('/').nth(1).unwrap_or_default();
        !self.is_a_name() && !path.split('/').any(|part| part == parent)
    }

    /// Whether few other files are called like it: it has an ending, and stands in no hidden directory.
    fn has_a_rare_name(&self) -> bool {
        let mut parts = self.path.rsplit('/');
        parts.next().is_some_and(|name| name.contains('.')) && parts.next().is_some_and(|parent| !parent.starts_with('.'))
    }

    /// Whether it is a path, and a word is a pattern from wherever one is, and not from further up.
    fn is_elsewhere(&self, word: &Word) -> bool {
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
        let begins_so =
            || long_ends(&self.path).any(|end| meet(&rest, &Word::wanted(end)) || meet(&rest, &Word::wanted(&format!("{end}/*"))));
        spelling.first() == Some(&Part::Any) && (spelling.iter().skip(1).any(one) || begins_so())
    }

    /// Whether it lies under a directory that a word names with its whole path.
    fn lies_right_under(&self, word: &Word) -> Sure {
        let Some(text) = word.text() else { return Sure::No };
        let glued = text.get(2..).filter(|_| text.starts_with('-')).unwrap_or_default();
        let value = text.split_once('=').map(|(_, value)| value).unwrap_or_default();
        let named = [text, glued, value].into_iter().filter(|path| self.spelled_out(path).starts_with('/'));
        named.map(|path| self.lies_under(&Word::known(path))).max().unwrap_or(Sure::No)
    }

    /// Whether it lies somewhere under what a word names.
    fn lies_under(&self, word: &Word) -> Sure {
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
        if reach::is_led(&self.spelled_out(text)) {
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
    fn may_end_so(&self, spelling: &[Part]) -> bool {
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
    fn is_below(&self, directory: &str) -> bool {
        let mut place = self.path.split('/').filter(|part| !part.is_empty());
        let mut given = directory.split('/').filter(|part| !part.is_empty());
        self.path.starts_with('/')
            && given.all(|part| place.next().is_some_and(|pattern| crate::names::glob(pattern, part)))
            && place.next().is_some()
    }

    /// A spelling whose beginning is a path without detours.
    fn cleaned(&self, spelling: &[Part]) -> Vec<Part> {
        match spelling {
            [Part::Text(text), rest @ ..] => {
                let mut text = self.spelled_out(text);
                while text.contains("//") || text.contains("/./") {
                    text = text.replace("//", "/").replace("/./", "/");
                }
                let text = text.strip_prefix("./").unwrap_or(&text).to_owned();
                std::iter::once(Part::Text(text)).chain(rest.iter().cloned()).collect()
            }
            other => other.to_vec(),
        }
    }
}

/// How a path ends, with at least two of its parts.
fn long_ends(path: &str) -> impl Iterator<Item = &str> {
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
fn spelled_out(path: &str, home: &str) -> String {
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
