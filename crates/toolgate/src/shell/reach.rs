//! Files that a command reaches and no word of it names: those that it unpacks, and those in a tree that it reads as a whole.

use std::collections::HashMap;

use super::acts::{names_no_files, repacks};
use super::inner::runs_another;
use super::known::{PACKED, SEARCHERS, WRITERS};
use super::options::{self, BASE, Given, Shape, Style, When};
use super::word::{Part, Sure, Word, meet, sum};
use super::{Command, Fed, Place, Shell, base, long_ends, normal, spelled_out, without_options};

/// So many directories are followed; who goes through more may be anywhere.
const MOST: usize = 64;
/// So often it is looked where one comes to.
const MOST_STEPS: usize = 16_384;
const ANYWHERE: &str = "~+";
/// What is longer may be anything.
const LONGEST: usize = 4_096;

fn writer(program: &str) -> Option<&'static Shape> {
    WRITERS.iter().find(|shape| shape.programs.contains(&program))
}

/// What a program is given; nothing where it only may be one.
fn own_words(command: &Command) -> &[Word] {
    command.words.get(1..).filter(|_| !command.unlikely).unwrap_or_default()
}

fn here() -> Word {
    Word::known(".")
}

/// The directories that a command fills with files, or clears of files, that no word names.
pub(super) fn fills(command: &Command) -> Vec<Word> {
    let (Some(program), words) = (command.program(), own_words(command)) else { return Vec::new() };
    if program == "git" {
        return checked_out(without_options(words));
    }
    if program.starts_with("python") || program.starts_with("pypy") {
        return by_module(words);
    }
    if repacks(command) {
        return renamed(words);
    }
    let Some(shape) = writer(program) else { return cleared(program, words) };
    let given = options::read(words, shape);
    let does = match shape.when {
        When::Never => false,
        When::Always => !given.operands.is_empty(),
        // What is not known may be what makes it do so.
        When::Flags(flags) => given.has(flags) || (shape.style == Style::Bundle && words.first().is_some_and(|word| word.text().is_none())),
        When::Verbs(verbs) => {
            let most = if shape.style == Style::Single { 1 } else { given.operands.len() };
            given.operands.iter().take(most).any(|verb| verb.text().is_none_or(|verb| verbs.contains(&verb)))
        }
    };
    // What `unzip` is told behind another `-`, it is told no more.
    let is_spared = given.is_sure_of(shape.spared) && (program != "unzip" || given.bare("") == 0);
    if !does || is_spared {
        return cleared(program, words);
    }
    let mut directories = given.values(shape.directories);
    let last = last(&given).filter(|_| shape.last);
    // Where the last operand can be nothing but the directory.
    let told = last.as_ref().is_some_and(|to| match program {
        "cpio" => given.has(&["-p", "--pass-through"]) && !given.has(&["-i", "--extract"]),
        "pax" => given.has(&["-w"]),
        _ => given.operands.len() > 2 && to.text().is_some_and(|text| text.ends_with('/')),
    });
    if program.ends_with("rar") {
        let glued = words.iter().filter_map(Word::text).filter_map(|text| text.strip_prefix("-op").or_else(|| text.strip_prefix("-OP")));
        directories.extend(glued.map(Word::known));
    }
    if shape.here && directories.is_empty() && !told {
        directories.push(here());
    }
    directories.extend(last);
    if given.has(shape.anywhere) {
        directories.push(Word::known("/"));
    }
    directories
}

/// The directories in which something is unpacked under a name that stands in it, or under one without an ending of its own.
fn renamed(words: &[Word]) -> Vec<Word> {
    let is_told = |text: &str| match text.strip_prefix("--") {
        Some(long) => {
            let long = long.split('=').next().unwrap_or_default();
            long.len() > 1 && ["name", "suffix"].iter().any(|name| name.starts_with(long))
        }
        None => text.strip_prefix('-').is_some_and(|flags| flags.contains(['N', 'S'])),
    };
    if !words.iter().filter_map(Word::text).any(is_told) {
        return Vec::new();
    }
    let directory = |word: &Word| match word.text() {
        Some(text) if text.starts_with('-') => None,
        Some(text) => Some(text.rsplit_once('/').map_or_else(here, |(directory, _)| Word::known(format!("{directory}/")))),
        None => Some(here()),
    };
    words.iter().filter_map(directory).collect()
}

/// `find` without a directory looks in this one.
fn cleared(program: &str, words: &[Word]) -> Vec<Word> {
    let deletes = program == "find" && words.iter().any(|word| word.text() == Some("-delete"));
    if deletes && starts(words).is_empty() { vec![here()] } else { Vec::new() }
}

/// Where `find` is told to begin.
fn starts(words: &[Word]) -> Vec<Word> {
    let is_way = |word: &&Word| matches!(word.text(), Some("-H" | "-L" | "-P"));
    let is_place = |word: &&Word| word.text().is_none_or(|text| !text.starts_with(['-', '(', '!']));
    words.iter().skip_while(is_way).take_while(is_place).cloned().collect()
}

/// The last operand, unless it is on another machine.
fn last(given: &Given) -> Option<Word> {
    let is_far = |word: &Word| match word.text() {
        Some(text) => text.split('/').next().is_some_and(|host| host.contains(':')),
        None => word.spellings().iter().flatten().any(|part| matches!(part, Part::Text(text) if text.contains(':'))),
    };
    given.operands.last().filter(|word| !is_far(word)).cloned()
}

/// Directories that `git` fills or clears, behind its own options.
fn checked_out(words: &[Word]) -> Vec<Word> {
    const GIT: Shape = Shape {
        short: "bcejo",
        long: &["branch", "config", "depth", "directory", "exclude", "filter", "jobs", "origin", "prefix", "reference"],
        ..BASE
    };
    let Some((verb, rest)) = words.split_first() else { return Vec::new() };
    let given = options::read(rest, &GIT);
    // A copy is called like what it is a copy of, unless it is given a name.
    let copies = |operands: &[Word]| -> Vec<Word> {
        let named = operands.get(1..).unwrap_or_default().last().cloned();
        let called = operands.first().map(called).filter(|word| !word.is_unknown() && word.text() != Some(""));
        named.or(called).into_iter().collect()
    };
    let operands = given.operands.as_slice();
    match (verb.text().unwrap_or_default(), operands) {
        ("clone", operands) => copies(operands),
        ("submodule", [add, operands @ ..]) if add.text() == Some("add") => copies(operands),
        ("worktree", [add, to, ..]) if add.text() == Some("add") => vec![to.clone()],
        ("clean", []) if !given.has(&["-n", "--dry-run"]) || given.has(&["--no-dry-run"]) => vec![here()],
        ("stash", [act, ..]) if matches!(act.text(), Some("list" | "show")) => Vec::new(),
        ("stash", _) if given.has(&["-a", "-u", "--all", "--include-untracked"]) => vec![here()],
        ("sparse-checkout", [act, ..]) if act.text() != Some("list") => vec![here()],
        ("apply" | "am", _) => given.values(&["--directory"]),
        ("checkout-index", _) => given.values(&["--prefix"]),
        _ => Vec::new(),
    }
}

/// Patterns that `git` reads itself, in which `*` is any text; and a list of them, of which nothing is known.
pub(super) fn pathspecs(command: &Command) -> Vec<Word> {
    let words = command.words.get(1..).filter(|_| command.program() == Some("git")).unwrap_or_default();
    let one = |word: &Word| {
        let text = word.text()?;
        if text.starts_with("--pathspec-from") {
            return Some(Word::unknown(false));
        }
        let (first, last) = (text.find(['*', '?', '['])?, text.rfind(['*', '?', ']'])?);
        let around = (text.get(..first)?, text.get(last + 1..)?);
        (!text.starts_with('-')).then(|| Word::known(around.0).then(&Word::unknown(false)).then(&Word::known(around.1)))
    };
    words.iter().filter_map(one).collect()
}

/// Whether `git` changes only what is to be committed, and no file.
pub(super) fn only_stages(command: &Command) -> bool {
    let words = command.words.get(1..).filter(|_| command.program() == Some("git")).map(without_options).unwrap_or_default();
    let Some((_, rest)) = words.split_first().filter(|(verb, _)| verb.text() == Some("restore")) else { return false };
    let given = options::read(rest, &Shape { short: "s", long: &["source", "pathspec-from-file"], ..BASE });
    rest.iter().all(|word| word.text().is_some()) && given.has(&["-S", "--staged"]) && !given.has(&["-W", "--worktree"])
}

/// What `cp` and its like put into what can only be a directory, where every file is called by its name: all of it, or nothing.
pub(super) fn puts_here(command: &Command) -> Vec<Word> {
    // These take no directories, and name none.
    let is_plain = |flags: &str| flags.chars().all(|flag| "fimnpsuv".contains(flag));
    let texts: Option<Vec<&str>> = own_words(command).iter().map(Word::text).collect();
    let (Some("cp" | "mv" | "ln" | "install"), Some(texts)) = (command.program(), texts) else { return Vec::new() };
    // Where there is none, `mv` makes one of what it moves.
    let is_there =
        |to: &str| matches!(to, "." | "./" | ".." | "../" | "~" | "~/") || (to.ends_with('/') && command.program() != Some("mv"));
    let Some((to, rest)) = texts.split_last().filter(|(to, _)| is_there(to)) else { return Vec::new() };
    let (flags, sources): (Vec<&str>, Vec<&str>) = rest.iter().copied().partition(|text| text.starts_with('-'));
    let names: Vec<&str> = sources.iter().map(|source| base(source.trim_end_matches('/'))).collect();
    let is_open = names.iter().any(|name| matches!(*name, "" | "." | ".."));
    if is_open || !flags.iter().all(|flags| flags.strip_prefix('-').is_some_and(is_plain)) {
        return Vec::new();
    }
    names.iter().map(|name| Word::known(format!("{to}/{name}"))).collect()
}

/// What `ln` makes here where it is told of nothing but what that leads to: it is called the same.
pub(super) fn links_here(command: &Command) -> Option<Word> {
    const LN: Shape = Shape { short: "St", long: &["suffix", "target-directory"], ..BASE };
    if command.program() != Some("ln") {
        return None;
    }
    let given = options::read(own_words(command), &LN);
    let [to] = given.operands.as_slice() else { return None };
    if given.has(&["-t", "--target-directory"]) {
        return None;
    }
    Some(to.text().map_or_else(|| called(to), |path| Word::known(format!("./{}", base(path.trim_end_matches('/'))))))
}

/// Directories that modules of Python unpack into.
fn by_module(words: &[Word]) -> Vec<Word> {
    const MODULE: Shape = Shape { short: "e", long: &["extract"], ..BASE };
    let is_pip = |word: &Word| matches!(word.text(), Some("pip" | "-mpip"));
    if let Some(behind) = words.iter().position(is_pip).and_then(|at| words.get(at + 1..)) {
        let words = std::iter::once(Word::known("pip")).chain(behind.iter().cloned()).collect();
        return fills(&Command { words, ..Command::default() });
    }
    let is_module = |word: &Word| matches!(word.text(), Some("tarfile" | "zipfile" | "-mtarfile" | "-mzipfile"));
    let rest = words.iter().position(is_module).and_then(|at| words.get(at + 1..)).unwrap_or_default();
    if !rest.iter().filter_map(Word::text).any(|word| word.starts_with("-e") || word.starts_with("--e")) {
        return Vec::new();
    }
    let given = options::read(rest, &MODULE);
    // The archive stands behind the option, or before the directory.
    let named = !given.values(&["-e", "--e", "--extract"]).is_empty();
    let mut directories: Vec<Word> = given.operands.into_iter().skip(usize::from(!named)).collect();
    if directories.is_empty() {
        directories.push(here());
    }
    directories
}

/// The files that a command writes, where an option, an address or another file says what they are called.
pub(super) fn writes(command: &Command) -> Vec<Word> {
    let (Some(program), words) = (command.program(), own_words(command)) else { return Vec::new() };
    if repacks(command) {
        let packed = |text: &str| PACKED.iter().find_map(|end| text.strip_suffix(*end)).map(Word::known);
        return words.iter().filter_map(Word::text).filter_map(packed).collect();
    }
    if program.starts_with("python") {
        return rewritten(words);
    }
    let Some(shape) = writer(program) else {
        // What `-o` is to these is no file.
        let lists = is_search(program) || names_no_files(command) || ["ls", "ps", "zgrep", "zegrep", "zfgrep"].contains(&program);
        let verb = || without_options(words).first().and_then(Word::text);
        let short = program != "git" || matches!(verb(), Some("archive" | "format-patch"));
        return if lists { Vec::new() } else { outputs(words, short) };
    };
    let given = options::read(words, shape);
    let mut files = given.values(shape.files);
    // What it is called in the directory that an option names.
    let (mut names, by_address) = match program {
        "curl" => (given.values(&["-o", "--output"]), given.has(&["-O", "--remote-name", "--remote-name-all"])),
        "aria2c" => (given.values(&["-o", "--out"]), !given.has(&["-o", "--out"])),
        "wget" => (Vec::new(), !given.has(&["-O", "--output-document"])),
        _ => (Vec::new(), false),
    };
    if by_address {
        names.extend(given.operands.iter().map(called).filter(|name| !name.is_unknown()));
    }
    // `#1` is a part of the address, `%2e` a dot, and `{a,b}` and `[1-9]` are several names.
    let odd = |name: &Word| name.text().is_some_and(|text| text.contains(['#', '%', '{', '}', '[', ']']));
    let directory = given.values(shape.directories).pop();
    files.extend(names.iter().map(|name| if odd(name) { Word::unknown(false) } else { from(name, directory.as_ref()) }));
    match program {
        // An archive that is made is a file like any other.
        "tar" | "bsdtar" | "gtar" | "jar" if fills(command).is_empty() || packs(program, &given) => {
            files.extend(given.values(&["-f", "--file"]).into_iter().filter(|word| word.text().is_some()));
        }
        // It reads these as patterns.
        "curl" if given.operands.iter().chain(&given.values(&["--url"])).any(is_several) => files.push(Word::unknown(false)),
        "scp" | "sftp" => files.extend(last(&given)),
        "uniq" | "xxd" => files.extend(given.operands.get(1).cloned()),
        _ => {}
    }
    files
}

/// What a module of Python writes: `json.tool` its second file.
fn rewritten(words: &[Word]) -> Vec<Word> {
    let is_it = |word: &Word| matches!(word.text(), Some("json.tool" | "-mjson.tool"));
    let Some(behind) = words.iter().position(is_it).and_then(|at| words.get(at + 1..)) else { return outputs(words, true) };
    options::read(behind, &Shape { long: &["indent"], ..BASE }).operands.into_iter().skip(1).collect()
}

/// Whether an address is that of several files here.
fn is_several(address: &Word) -> bool {
    let is_file = |text: &str| text.trim_start().get(..5).is_some_and(|begins| begins.eq_ignore_ascii_case("file:"));
    address.text().is_some_and(|text| is_file(text) && text.contains(['{', '[']))
}

/// What stands behind an option that mostly names what is written; `-o` among them, or not.
fn outputs(words: &[Word], short: bool) -> Vec<Word> {
    const OPTIONS: &[&str] = &["-out", "--out", "--outfile", "--output", "--output-file"];
    let is_one = |option: &str| OPTIONS.contains(&option) || (short && option == "-o");
    let behind = words.windows(2).filter_map(|pair| match pair {
        [option, value] if option.text().is_some_and(is_one) => Some(value.clone()),
        _ => None,
    });
    let glued = words.iter().filter_map(Word::text).filter_map(|text| {
        let value = |option: &&str| text.strip_prefix(*option)?.strip_prefix('=');
        let glued = || text.strip_prefix("-o").filter(|_| short);
        OPTIONS.iter().find_map(value).or_else(glued).filter(|value| !value.is_empty()).map(Word::known)
    });
    behind.chain(glued).filter(|value| value.text().is_some() || value.is_pattern()).collect()
}

/// What something is called that an address leads to.
fn called(address: &Word) -> Word {
    if let Some(text) = address.text() {
        let path = text.split(['?', '#']).next().unwrap_or_default().trim_end_matches('/');
        let name = path.rsplit(['/', ':']).next().unwrap_or_default();
        return Word::known(name.strip_suffix(".git").unwrap_or(name));
    }
    let [spelling] = address.spellings() else { return Word::unknown(false) };
    let last = spelling.iter().rposition(|part| matches!(part, Part::Text(text) if text.contains('/'))).unwrap_or(0);
    let name = spelling.iter().enumerate().skip(last).fold(Word::empty(), |name, (at, part)| match part {
        Part::Text(text) => name.then(&Word::known(if at == last { base(text) } else { text.as_str() })),
        _ => name.then(&Word::name()),
    });
    let is_told = name.spellings().iter().flatten().any(|part| matches!(part, Part::Text(_)));
    if is_told { name } else { Word::unknown(false) }
}

/// A word, as it is named from where the command stands.
pub(super) fn from(word: &Word, stands: Option<&Word>) -> Word {
    let Some(stands) = stands else { return word.clone() };
    match (stands.text(), word.text()) {
        (_, Some(path)) if path.starts_with(['/', '~']) => word.clone(),
        (Some(directory), Some(path)) => Word::known(format!("{directory}/{path}")),
        (None, Some(_)) => Word::unknown(false),
        (_, None) => word.clone(),
    }
}

/// A word, and what is glued to an option in it. What is to be left out is left alone.
fn with_values(word: &Word) -> Vec<Word> {
    let text = word.text().filter(|text| text.starts_with('-') && !text.starts_with("--exclude")).unwrap_or_default();
    let value = if text.starts_with("--") { text.split_once('=').map(|(_, value)| value) } else { text.get(2..) };
    std::iter::once(word.clone()).chain(value.filter(|value| !value.is_empty()).map(Word::known)).collect()
}

/// Whether a word only says which files a search looks at, or is a pattern for what shows no more than names.
pub(super) fn is_no_file(command: &Command, word: &Word) -> bool {
    const CHOOSING: &[&str] = &["--exclude=", "--exclude-dir="];
    // One that is named by its own name is a file that is read.
    let is_pattern = word.text().is_none_or(|text| text.contains(['*', '?', '[']));
    let is_one = |text: &str| CHOOSING.iter().any(|option| text.starts_with(*option)) || (is_pattern && text.starts_with("--include="));
    let begins = |spelling: &Vec<Part>| matches!(spelling.first(), Some(Part::Text(text)) if is_one(text));
    // What falls into several words may be more than a value.
    let falls_apart = word.splits && word.text().is_none() && !word.is_pattern();
    let named = word.spellings().len() > 1 && word.spellings().iter().all(|spelling| matches!(spelling.as_slice(), [Part::Text(_)]));
    let chooses = command.program().is_some_and(is_search) && !falls_apart && !named && word.spellings().iter().all(begins);
    chooses || (matches!(command.program(), Some("du" | "ls" | "stat")) && word.text().is_none() && word.is_pattern())
}

fn is_search(program: &str) -> bool {
    SEARCHERS.iter().any(|shape| shape.programs.contains(&program))
}

/// What a command reads as a whole.
#[derive(Default)]
struct Trees {
    roots: Vec<Word>,
    /// Not all of what lies there is read, as far as can be told.
    some: bool,
    /// Names of directories, and of files, that are left out.
    without: (Vec<Word>, Vec<Word>),
}

/// Whether an archive is made or added to, whatever else its options seem to say.
fn packs(program: &str, given: &Given) -> bool {
    (program.ends_with("tar") || program == "jar") && given.has(&["-c", "-r", "-u", "--append", "--create", "--update"])
}

/// The trees that a command reads as a whole. With `feeds`, what is found becomes words of another command.
fn trees(command: &Command, feeds: bool) -> Trees {
    let (Some(program), words) = (command.program().filter(|_| !command.unlikely), own_words(command)) else { return Trees::default() };
    if let Some(shape) = SEARCHERS.iter().find(|shape| shape.programs.contains(&program)) {
        // Only a pipe, and a text that stands here, are sure to be read instead.
        return searched(program, options::read(words, shape), matches!(command.fed, Some(Fed::Piped | Fed::Text(_))));
    }
    match program {
        "tar" | "bsdtar" | "gtar" | "jar" | "7z" | "7za" | "7zr" | "7zz" | "pax" => {
            let given = options::read(words, writer(program).unwrap_or(&BASE));
            if !fills(command).is_empty() && !packs(program, &given) {
                return Trees::default();
            }
            let directories = given.values(&["-C", "--directory", "--cd"]);
            // A directory is for what stands behind it.
            let goes = |(at, word): &(usize, &Word)| {
                let short = |text: &str| (*at == 0 || text.starts_with('-')) && !text.starts_with("--") && text.contains('C');
                word.text().is_some_and(|text| text.starts_with("--d") || text.starts_with("--cd") || short(text))
            };
            let before: Vec<&Word> = words.iter().enumerate().take_while(|word| !goes(word)).map(|(_, word)| word).collect();
            let within = |word: &Word| -> Vec<Word> {
                let own = directories.is_empty() || before.contains(&word);
                directories.iter().map(|to| from(word, Some(to))).chain(own.then(|| word.clone())).collect()
            };
            // What `--exclude` leaves out hangs on where it stands, and on other options.
            let added = given.values(&["--add-file"]);
            if directories.len() > 1 && directories.len() * (given.operands.len() + added.len()) > MOST * MOST {
                return Trees { roots: vec![Word::known(ANYWHERE)], ..Trees::default() };
            }
            Trees { roots: given.operands.iter().chain(&added).flat_map(within).collect(), ..Trees::default() }
        }
        "zip" | "diff" => {
            const BOTH: Shape = Shape { long: &["from-file", "to-file"], ..BASE };
            let given = options::read(words, &BOTH);
            let also = given.values(&["--from-file", "--to-file"]);
            Trees { roots: given.operands.into_iter().chain(also).collect(), ..Trees::default() }
        }
        "git" => Trees { roots: compared(without_options(words)), ..Trees::default() },
        "scp" | "sftp" => {
            let mut roots = options::read(words, writer(program).unwrap_or(&BASE)).operands;
            roots.pop();
            Trees { roots, ..Trees::default() }
        }
        "find" | "fd" | "fdfind" if feeds || words.iter().any(runs_another) => {
            let mut roots = if program == "find" { starts(words) } else { options::read(words, &BASE).operands };
            if roots.is_empty() || program != "find" {
                roots.push(here());
            }
            Trees { roots, some: true, ..Trees::default() }
        }
        _ if program.starts_with("python") && by_module(words).is_empty() => {
            let packs = |word: &Word| matches!(word.text(), Some("tarfile" | "zipfile" | "-mtarfile" | "-mzipfile"));
            Trees { roots: if words.iter().any(packs) { words.to_vec() } else { Vec::new() }, ..Trees::default() }
        }
        _ => Trees::default(),
    }
}

/// What `git` reads that is not its own.
fn compared(words: &[Word]) -> Vec<Word> {
    let Some((verb, rest)) = words.split_first() else { return Vec::new() };
    let given = options::read(rest, &BASE);
    let is_told = given.has(&["--no-index"]);
    let is_outside = |word: &Word| word.text().is_some_and(|text| text.starts_with(['/', '~']) || text.starts_with(".."));
    match verb.text() {
        Some("grep") if is_told => given.operands.into_iter().chain([here()]).collect(),
        Some("diff") if is_told => given.operands,
        // Of two files, one of which is not in the repository, it need not be told.
        Some("diff") if given.operands.len() > 1 => given.operands.into_iter().filter(is_outside).collect(),
        _ => Vec::new(),
    }
}

fn searched(program: &str, given: Given, is_fed: bool) -> Trees {
    const DEEP: &[&str] = &["-d", "-r", "-R", "--dereference-recursive", "--directories", "--recursive"];
    if ["ack", "ag", "ug", "ugrep"].contains(&program) {
        return Trees { roots: searched_somehow(given, is_fed), ..Trees::default() };
    }
    let deep = !["grep", "egrep", "fgrep"].contains(&program) || given.has(DEEP);
    let has_pattern = given.has(&["-e", "-f", "--file", "--regexp"]);
    // Names alone are no secret.
    if !deep || given.has_just("--files") || (given.operands.is_empty() && !has_pattern) {
        return Trees::default();
    }
    let without = if program.ends_with("grep") {
        // Of one that is to be left out and looked at, who knows.
        let files = if given.has(&["--include"]) { Vec::new() } else { given.values(&["--exclude"]) };
        (given.values(&["--exclude-dir"]), files)
    } else {
        (Vec::new(), Vec::new())
    };
    let mut roots: Vec<Word> = given.operands.into_iter().skip(usize::from(!has_pattern)).collect();
    // `grep -r` looks in the directory, whatever it is fed.
    if roots.is_empty() && (!is_fed || program != "rg") {
        roots.push(here());
    }
    Trees { roots, some: false, without }
}

/// Each of these has other options with a value: every operand may be what is searched, and the pattern another one.
fn searched_somehow(given: Given, is_fed: bool) -> Vec<Word> {
    let most = 1 + given.bare("ABCDGJKMNOWdefgmpt");
    let has_pattern = given.has(&["-e", "-f", "--file", "--match", "--regexp"]);
    let reads = is_fed && !given.has(&["--nofilter"]);
    let mut roots = given.operands;
    if !reads && roots.len() <= most && (has_pattern || !roots.is_empty()) {
        roots.push(here());
    }
    roots
}

impl Shell {
    /// Whether it fills or clears a directory.
    pub(crate) fn unpacks(&self) -> bool {
        self.commands.iter().any(|command| !fills(command).is_empty())
    }

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
                let (name, value) = long.split_once('=').map_or((long, None), |(name, value)| (name, Some(value)));
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
fn joined(directory: &str, path: &str, home: &str) -> String {
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
    fn spelled_from(&self, directory: &str, spelling: &[Part]) -> Vec<Part> {
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

    /// Whether a command reads it with a whole tree, from one of these directories.
    pub(super) fn is_read_by(&self, command: &Command, wanders: &[String], feeds: bool, lenient: bool) -> Sure {
        let trees = trees(command, feeds);
        if trees.roots.is_empty() {
            return Sure::No;
        }
        let stands = command.stands().and_then(Word::text).map(|path| {
            let mut all: Vec<String> = wanders.iter().map(|directory| joined(directory, path, self.home)).collect();
            all.sort();
            all.dedup();
            all
        });
        let from = stands.as_deref().unwrap_or(wanders);
        let one = |root: &Word| match root.text() {
            Some(path) => {
                let read = |from: &String| match self.is_searched(from, path) {
                    Sure::Yes if self.is_left_out(&joined(from, path, self.home), &trees.without) => Sure::No,
                    sure => sure,
                };
                let read = from.iter().map(read);
                // Of many directories, who knows in which it is.
                if from.len() > 2 { sum(read) } else { read.max().unwrap_or(Sure::No) }
            }
            None if root.is_unknown() && lenient => Sure::No,
            None if root.is_unknown() || from.len() > 8 || from.iter().any(|from| self.may_lie_under(from, root)) => Sure::Maybe,
            None => Sure::No,
        };
        let sure = trees.roots.iter().map(one).max().unwrap_or(Sure::No);
        if trees.some { sure.min(Sure::Maybe) } else { sure }
    }

    /// Whether a word of which not all is known may be it, or a directory above it.
    fn may_lie_under(&self, from: &str, word: &Word) -> bool {
        let ends = self.path.match_indices('/').map(|(at, _)| at).chain([self.path.len()]);
        let above: Vec<&str> = ends.filter_map(|end| self.path.get(..end)).filter(|path| !path.is_empty()).collect();
        word.spellings().iter().any(|spelling| {
            let long = |part: &Part| if let Part::Text(text) = part { text.len() } else { 1 };
            let is_whole = matches!(self.cleaned(spelling).first(), Some(Part::Text(text)) if text.starts_with(['/', '~']));
            // From somewhere that nobody knows it may be anything.
            if spelling.iter().map(long).sum::<usize>() > LONGEST || !(is_whole || from.starts_with('/')) {
                return true;
            }
            // How it begins nobody knows: it may go on as one of them ends.
            if let [Part::Any, rest @ ..] = spelling.as_slice() {
                let rest = self.cleaned(rest);
                let is_last = |path: &str| matches!(rest.as_slice(), [Part::Text(text)] if text.trim_matches('/') == base(path));
                let is_end = |end: &str| meet(&rest, &Word::wanted(end)) || meet(&rest, &Word::wanted(&format!("{end}/")));
                if above.iter().any(|path| is_last(path) || long_ends(path).any(is_end)) {
                    return true;
                }
            }
            let spelling = self.spelled_from(from, spelling);
            (!spelling.contains(&Part::Any) && is_detour(&spelling))
                || above.iter().any(|path| meet(&spelling, &Word::wanted(path)) || meet(&spelling, &Word::wanted(&format!("{path}/"))))
        })
    }

    /// Whether a search under a directory leaves it out: a directory on the way to it, or whatever is called like it.
    fn is_left_out(&self, directory: &str, (directories, files): &(Vec<Word>, Vec<Word>)) -> bool {
        let way = self.path.strip_prefix(directory).unwrap_or_default();
        let like = |names: &[Word], part: &str| {
            let mut plain = names.iter().filter_map(Word::text).filter(|name| !name.contains(['?', '[', '/', '\\']));
            plain.any(|name| crate::names::glob(name, part))
        };
        let mut parts = way.split('/').filter(|part| !part.is_empty()).rev();
        let last = parts.next().is_some_and(|part| like(directories, part) && like(files, part));
        last || parts.any(|part| like(directories, part))
    }
}
