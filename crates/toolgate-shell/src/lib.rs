#![doc = include_str!("../README.md")]

#[cfg(test)]
mod differential_tests;
mod env_vars;
mod nested_command;
mod parse;
mod path;
mod program;
mod word;
mod wrapper;
mod write_then_run;

use std::collections::HashSet;

pub use crate::path::pattern::{Place, normal};
pub use word::Sure;
use word::{Part, Word, sum};

/// Describes one program with its words and the files of its redirections.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Command {
    pub(crate) words: Vec<Word>,
    pub(crate) redirect_files: Vec<Word>,
    /// Where its standard input comes from, if that is a pipe, a file or text in the command.
    pub(crate) stdin: Option<Fed>,
    /// The directory that it certainly runs in.
    pub(crate) working_directory: Option<Word>,
    /// The command is only considered because it follows a program that runs other programs.
    pub(crate) is_unlikely: bool,
    /// The start of the command is a guess, so its words also belong to another command.
    pub(crate) is_guessed: bool,
    /// The first word is probably not a program, so the program's effect on files proves nothing.
    pub(crate) is_vague: bool,
}

/// Describes what a command reads from its standard input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fed {
    Text(Word),
    /// The output of another command.
    Pipe,
    Unknown,
}

/// Maximum number of commands that are analyzed.
const MOST: usize = 4_096;
/// Maximum number of bytes in partly known words; a longer command may mean anything.
const MOST_LETTERS: usize = 1_024;
/// Maximum number of bytes including guessed commands, whose words are compared repeatedly.
const MOST_GUESSED: usize = 8 * MOST_LETTERS;

/// Holds what a shell command would run and write.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Shell {
    pub(crate) commands: Vec<Command>,
    /// The reasons why parts of the command cannot be analyzed.
    pub(crate) opaque_reasons: Vec<String>,
    /// The names of the files that are written. The next field has their paths.
    pub(crate) written_names: HashSet<String>,
    pub(crate) written_paths: Vec<String>,
    /// Files with commands or code that are read and run. Their content was checked when it was
    /// written.
    pub(crate) scripts: Vec<Command>,
    /// The values of variables, as written and as expanded. An unknown word may expand to one of
    /// them.
    pub(crate) variable_values: Vec<String>,
}

impl Shell {
    /// Parses and analyzes a command.
    pub fn read(text: &str) -> Self {
        let left = crate::nested_command::Depth::budget();
        crate::parse::read(text, crate::nested_command::Depth::top(&left))
    }

    fn opaque(why: impl Into<String>) -> Self {
        Self { opaque_reasons: vec![why.into()], ..Self::default() }
    }

    fn add(&mut self, other: Self) {
        if self.commands.len() + other.commands.len() > MOST {
            if self.opaque_reasons.is_empty() {
                self.opaque_reasons.push("it contains too many commands".to_owned());
            }
            return;
        }
        self.commands.extend(other.commands);
        self.opaque_reasons.extend(other.opaque_reasons);
        self.written_names.extend(other.written_names);
        self.written_paths.extend(other.written_paths);
        self.scripts.extend(other.scripts);
        self.variable_values.extend(other.variable_values);
    }

    /// Returns the first reason why a part of the command cannot be analyzed.
    pub fn doubt(&self) -> Option<&str> {
        self.opaque_reasons.first().map(String::as_str)
    }

    /// Returns whether the command runs a program followed by words in the order of `pattern`.
    ///
    /// A word such as `-rf` is a set of flags.
    pub fn runs(&self, pattern: &str) -> Sure {
        let wanted: Vec<&str> = pattern.split_whitespace().collect();
        let one = |command: &Command| is(&command.words, &wanted).max(crate::nested_command::may_run(command, |words| is(words, &wanted)));
        // A guessed script may not run at all.
        let script = |script: &Command| is(&script.words, &wanted).min(if script.is_guessed { Sure::Maybe } else { Sure::Yes });
        self.commands.iter().map(one).chain(self.scripts.iter().map(script)).max().unwrap_or(Sure::No)
    }

    /// Returns whether the command names one of these files.
    ///
    /// With `lenient`, words that only the running shell knows are ignored, unless the command
    /// changes something. If `from` is absent, trees that are only read count if `trees` is set.
    pub fn touches(&self, places: &[Place<'_>], lenient: bool, trees: bool, from: Option<&str>) -> Sure {
        let letters = |command: &Command| {
            let words: &[Word] = if crate::program::file_effects::names_no_files(command) { &[] } else { &command.words };
            words.iter().chain(&command.redirect_files).map(Word::open_letters).sum::<usize>()
        };
        let written = self.commands.iter().filter(|command| !command.is_guessed).map(letters).sum::<usize>();
        if written > MOST_LETTERS || self.commands.iter().map(letters).sum::<usize>() > MOST_GUESSED {
            return self.without_patterns().touches(places, lenient, trees, from).max(Sure::Maybe);
        }
        let goes = |command: &Command| {
            matches!(command.program(), Some("cd" | "pushd" | "popd") | None) || crate::path::working_dir::sends(command)
        };
        let moves = self.commands.iter().any(goes);
        let wanders = from.zip(places.first()).map(|(from, place)| self.wanders(from, place.home));
        let feeds = self.commands.iter().any(|command| matches!(command.program(), Some("xargs" | "parallel")));
        let kept = self.handed_on();
        let ways = crate::word::partial::ways(&kept);
        let guessed: Vec<Command> = self.commands.iter().flat_map(crate::nested_command::may_change).collect();
        let one = |command: &Command, place: &Place<'_>, is_led_to: bool| {
            let words = command.words.get(1..).unwrap_or_default();
            // The directory that `git -C` names is not what `git` changes.
            let given = if command.program() == Some("git") { without_options(words) } else { words };
            let changes = crate::program::file_effects::changes(command) && !command.is_unlikely;
            let is_here = |word: &Word| from.is_some_and(|from| place.is_named_from(from, word));
            let known = |word: &Word, sure: Sure| match sure {
                // A file pattern matches files in the current directory. A word that starts with an
                // unknown part may continue to the place.
                Sure::Maybe
                    if !word.is_unknown()
                        && place.is_elsewhere(word)
                        && !changes
                        && !moves
                        && !is_here(word)
                        && !place.is_led_on(&ways, word) =>
                {
                    Sure::No
                }
                Sure::Maybe if lenient && word.is_unknown() && !changes => Sure::No,
                Sure::Maybe if lenient && word.is_unknown_path() && !changes && !is_led_to => Sure::No,
                // Many files share a name, but relative to `from` the word may mean the place.
                Sure::Yes if lenient && place.is_only_called_like(word) && !changes && !moves && !is_here(word) => {
                    let is_open = place.has_a_rare_name()
                        && !command.is_vague
                        && !command.is_unlikely
                        && !crate::program::file_effects::leaves_alone(command);
                    if is_open { Sure::Maybe } else { Sure::No }
                }
                sure => sure,
            };
            let spared = crate::program::file_effects::spared(command);
            let named = words
                .iter()
                .enumerate()
                .filter(|(at, _)| !crate::program::file_effects::names_no_files(command) && spared.binary_search(at).is_err());
            let named = named.filter(|(_, word)| !crate::program::implicit_reads::is_no_file(command, word));
            let sent = crate::program::implicit_writes::sent(command);
            let named = named.map(|(_, word)| word).chain(&sent);
            let named = named.map(|word| known(word, place.is_named_by(word))).max().unwrap_or(Sure::No);
            let specs = if changes { crate::program::implicit_writes::pathspecs(command) } else { Vec::new() };
            let named = named.max(specs.iter().map(|word| place.is_named_by(word)).max().unwrap_or(Sure::No));
            let files = command.redirect_files.iter().map(|word| place.is_named_by(word)).max().unwrap_or(Sure::No);
            let best = |of: bool, f: &dyn Fn(&Word) -> Sure| if of { words.iter().map(f).max().unwrap_or(Sure::No) } else { Sure::No };
            let hidden = best(crate::program::file_effects::runs_code(command), &|word| known(word, place.is_within(word)));
            let reads = crate::program::file_effects::reads_trees(command);
            let read = match &wanders {
                Some(wanders) => place.is_read_by(command, wanders, feeds, lenient),
                None if !trees => Sure::No,
                None if moves && !lenient => best(reads, &|word| place.lies_right_under(word).max(place.lies_under(word))),
                None => best(reads, &|word| place.lies_right_under(word)),
            };
            let stands = command.stands();
            let mut written = crate::program::implicit_writes::writes(command);
            written.extend(crate::path::derived::composed(command));
            let written = written.iter().map(|file| place.is_named_by(&crate::program::implicit_writes::from(file, stands))).max();
            let is_open = crate::program::implicit_writes::may_write(command).iter().any(|file| place.may_be(file));
            let written = written.unwrap_or(Sure::No).max(if is_open { Sure::Maybe } else { Sure::No });
            // An unpacked archive may contain any file.
            let filled = crate::program::implicit_writes::fills(command)
                .iter()
                .map(|to| place.lies_under(&crate::program::implicit_writes::from(to, stands)).min(Sure::Maybe))
                .max();
            let reached = read.max(written).max(filled.unwrap_or(Sure::No));
            // A file that is put into a directory keeps its name there.
            let mut put = crate::program::implicit_writes::puts_here(command);
            let given = if put.is_empty() { given } else { given.split_last().map_or(given, |(_, sources)| sources) };
            put.extend(crate::program::implicit_writes::links_here(command));
            let at_it = |file: &Word| {
                let is_here = file.text().is_none_or(|text| text.starts_with("./") || text.starts_with("../"));
                let file = crate::program::implicit_writes::from(file, stands);
                place.is_named_by(&file).max(place.lies_under(&file)).min(if is_here { Sure::Maybe } else { Sure::Yes })
            };
            let put = put.iter().map(at_it).max().unwrap_or(Sure::No);
            let clears = changes && !crate::program::implicit_writes::only_stages(command);
            let above = if clears { given.iter().map(|word| place.lies_under_given(word, stands)).max() } else { None };
            let patched = match &command.stdin {
                Some(Fed::Text(text)) if crate::program::file_effects::patches(command) => {
                    place.is_within(text).max(place.is_patched_by(text))
                }
                Some(Fed::Pipe | Fed::Unknown) if crate::program::file_effects::patches(command) && !lenient => Sure::Maybe,
                _ => Sure::No,
            };
            let told = if crate::program::file_effects::is_told_files(command) && !lenient { Sure::Maybe } else { Sure::No };
            named.max(files).max(hidden).max(above.unwrap_or(Sure::No)).max(put).max(reached).max(patched).max(told)
        };
        // Without `lenient`, every unknown word is in doubt, whatever it expands to.
        let handed: &[Word] = if lenient { &kept } else { &[] };
        let may_be_it = |place: &Place<'_>| handed.iter().map(|text| place.is_within(text).min(Sure::Maybe)).max().unwrap_or(Sure::No);
        let each = |place: &Place<'_>| {
            let is_led_to = handed.iter().any(|text| place.has_a_way_in(text));
            let named = self.commands.iter().map(|command| one(command, place, is_led_to)).max().unwrap_or(Sure::No);
            let guessed = guessed.iter().map(|command| one(command, place, is_led_to).min(Sure::Maybe)).max().unwrap_or(Sure::No);
            named.max(guessed).max(may_be_it(place))
        };
        places.iter().map(each).max().unwrap_or(Sure::No)
    }

    /// Returns a copy in which every partly known word is entirely unknown.
    fn without_patterns(&self) -> Self {
        let plain = |word: &Word| if word.text().is_some() { word.clone() } else { Word::unknown(word.can_split) };
        let mut same = self.clone();
        for command in &mut same.commands {
            command.words = command.words.iter().map(plain).collect();
            command.redirect_files = command.redirect_files.iter().map(plain).collect();
        }
        same
    }

    /// Collects the paths that an unknown word may expand to.
    ///
    /// They come from variables, from the input of `xargs` and similar programs, and from words
    /// that are only printed.
    fn handed_on(&self) -> Vec<Word> {
        let is_open = |word: &Word| word.text().is_none() && !word.is_pattern();
        let opens = |command: &Command| !crate::program::file_effects::names_no_files(command) && command.words.iter().skip(1).any(is_open);
        if !self.commands.iter().any(opens) {
            return Vec::new();
        }
        let fed = |command: &Command| match (command.program(), &command.stdin) {
            (Some("mapfile" | "parallel" | "read" | "readarray" | "xargs"), Some(Fed::Text(text))) => text.text().map(str::to_owned),
            _ => None,
        };
        let is_way = |text: &String| text.contains(['/', '~']) || text.contains("HOME");
        let kept = self.variable_values.iter().cloned().chain(self.commands.iter().filter_map(fed)).filter(is_way);
        let kept = kept.map(|text| text.replace("${HOME}", "~").replace("$HOME", "~"));
        // Text for people contains names and slashes that are not paths.
        let is_path = |text: &&str| *text == "~" || (text.contains('/') && text.chars().any(|letter| letter != '/'));
        let said = self
            .commands
            .iter()
            .filter(|command| crate::program::file_effects::names_no_files(command))
            .flat_map(|command| command.words.iter().skip(1));
        let said = said.flat_map(|word| word.texts()).flat_map(crate::path::pattern::paths_of).filter(is_path).map(str::to_owned);
        let mut all = HashSet::new();
        kept.chain(said).filter(|text| all.insert(text.clone())).map(Word::known).collect()
    }

    /// Returns whether all words are known, and they alone determine the affected files.
    pub fn is_spelled_out(&self) -> bool {
        let told = |command: &Command| {
            crate::program::file_effects::is_told_files(command)
                || (crate::program::file_effects::patches(command) && command.stdin.is_some())
        };
        let known = |command: &Command| command.words.iter().chain(&command.redirect_files).all(|word| word.text().is_some());
        self.commands.iter().all(|command| known(command) && !told(command))
    }

    /// Returns whether a word may be a path from the home directory.
    pub fn names_home(&self) -> bool {
        let from_home = |word: &Word| word.spellings().iter().flatten().any(|part| matches!(part, Part::Text(text) if text.contains('~')));
        let is_fed = |command: &Command| matches!(&command.stdin, Some(Fed::Text(text)) if from_home(text));
        // `cd` without arguments goes to the home directory.
        let goes = |command: &Command| crate::path::working_dir::goes_to(command).contains(&"~");
        let is_kept = || self.variable_values.iter().any(|text| text.contains('~') || text.contains("HOME"));
        let is_there =
            |command: &Command| command.words.iter().chain(&command.redirect_files).any(from_home) || is_fed(command) || goes(command);
        is_kept() || self.commands.iter().any(is_there)
    }
}

/// Returns the last part of a program's path, which is its name.
pub(crate) fn base(name: &str) -> &str {
    name.rsplit('/').next().unwrap_or(name)
}

impl Command {
    /// Returns the name of the program, if it is known.
    pub(crate) fn program(&self) -> Option<&str> {
        self.words.first().and_then(Word::text).map(base)
    }

    /// Returns the directory that the command certainly works in.
    ///
    /// Options of `git` itself may select another directory.
    pub(crate) fn stands(&self) -> Option<&Word> {
        let words = self.words.get(1..).unwrap_or_default();
        self.working_directory.as_ref().filter(|_| self.program() != Some("git") || without_options(words).len() == words.len())
    }
}

/// Returns whether words are a command that matches the wanted words.
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
    // The subcommand of `git` is its first word that is not an option.
    let words = if *program == "git" { without_options(words) } else { words };
    // These subcommands do the same as `git push`.
    let pushes = |word: &Word| matches!(word.text(), Some("send-pack" | "http-push"));
    if *program == "git" && rest.first() == Some(&"push") && words.first().is_some_and(pushes) {
        return called.min(flags).min(follow(rest.get(1..).unwrap_or_default(), words));
    }
    let verb = match (rest.first(), words.first()) {
        (Some(verb), Some(word)) if *program == "git" => {
            word.is_like(verb).max(if word.can_split && word.is_unknown() { Sure::Maybe } else { Sure::No })
        }
        (Some(_), None) if *program == "git" => Sure::No,
        _ => Sure::Yes,
    };
    called.min(flags).min(verb).min(follow(&rest, words))
}

/// Returns the words of `git` after its own options.
fn without_options(words: &[Word]) -> &[Word] {
    let mut rest = words;
    while let Some((first, more)) = rest.split_first() {
        match first.text() {
            Some("-C" | "-c" | "--git-dir" | "--work-tree" | "--namespace" | "--super-prefix" | "--attr-source" | "--shallow-file") => {
                // A word that may expand to nothing can shift the option's value to the subcommand.
                if more.first().is_some_and(|value| value.can_split && value.text().is_none()) {
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
    // For `-r$x`, the beginning is known.
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
    // File names rarely look like flags.
    let open = |word: &Word| word.is_unknown() || (word.text().is_none() && word.is_like("-*") == Sure::Maybe && !word.is_pattern());
    // A single word cannot be both a flag and its operand.
    let operands = words.iter().filter(|word| word.text().is_none_or(|text| !text.starts_with('-'))).count();
    if words.iter().any(|word| open(word) && (word.can_split || operands > 1)) { Sure::Maybe } else { Sure::No }
}

/// Returns whether a word is a set of flags: `-rf`, but not `--force`, `-delete` or `-`.
fn is_flags(word: &str) -> bool {
    word.strip_prefix('-').is_some_and(|flags| (1..=3).contains(&flags.len()) && flags.chars().all(char::is_alphabetic))
}

/// Returns the flags of a word: those of `-rf`, and `f` for `--force`.
fn flags_of(word: &str) -> Option<String> {
    match word.strip_prefix("--") {
        Some(long) => {
            let known = [("recursive", 'r'), ("force", 'f'), ("delete", 'd'), ("all", 'a'), ("interactive", 'i'), ("hard", 'h')];
            // Programs accept abbreviated options: `rm --rec`.
            let is_one = |name: &str| long.starts_with(name) || (!long.is_empty() && name.starts_with(long));
            known.iter().find(|(name, _)| is_one(name)).map(|(_, flag)| flag.to_string())
        }
        None => word.strip_prefix('-').map(str::to_owned),
    }
}

/// Returns whether words follow each other in this order, with others in between.
fn follow(wanted: &[&str], words: &[Word]) -> Sure {
    let least = |level: Sure| {
        let mut words = words.iter();
        wanted.iter().all(|wanted| words.any(|word| word.is_like(wanted) >= level))
    };
    if least(Sure::Yes) {
        Sure::Yes
    // A word that may expand to several words can be all wanted words.
    } else if least(Sure::Maybe) || words.iter().any(|word| word.can_split && word.is_unknown()) {
        Sure::Maybe
    } else {
        Sure::No
    }
}
