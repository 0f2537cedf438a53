//! Determines files that a command writes or removes although its words do not name them.
//!
//! Such files are unpacked, checked out or downloaded.

use super::options::{self, BASE_SYNTAX, ParsedOptions, ProgramSyntax, known_prefix};
use crate::program::file_effects::{is_in_place_compression, names_no_files};
use crate::program::filled_directories::filled_directories;
use crate::program::implicit_reads::is_search_program;
use crate::program::tables::{COMPRESSED_SUFFIXES, WRITER_PROGRAMS};
use crate::word::{ShellWord, WordPart};
use crate::{ShellCommand, base_name, skip_git_options};

pub(crate) fn writer_syntax(program: &str) -> Option<&'static ProgramSyntax> {
    WRITER_PROGRAMS.iter().find(|shape| shape.programs.contains(&program))
}

/// Returns the words after the program, or none if the program is unlikely to run.
pub(crate) fn certain_arguments(command: &ShellCommand) -> &[ShellWord] {
    command.words.get(1..).filter(|_| !command.is_unlikely).unwrap_or_default()
}

pub(crate) fn current_directory() -> ShellWord {
    ShellWord::known(".")
}

/// Returns the last operand, unless it is on another machine.
pub(super) fn last_local_operand(parsed: &ParsedOptions) -> Option<ShellWord> {
    let is_far = |word: &ShellWord| match word.text() {
        Some(text) => text.split('/').next().is_some_and(|host| host.contains(':')),
        None => word
            .spellings()
            .iter()
            .flatten()
            .any(|part| matches!(part, WordPart::Text(text) if text.contains(':'))),
    };
    parsed.operands.last().filter(|word| !is_far(word)).cloned()
}

/// Returns the pathspecs of `git`, in which `*` matches any text; a file of pathspecs is unknown.
pub(crate) fn git_pathspecs(command: &ShellCommand) -> Vec<ShellWord> {
    let words =
        command.words.get(1..).filter(|_| command.program() == Some("git")).unwrap_or_default();
    let pathspec = |word: &ShellWord| {
        let text = word.text()?;
        if text.starts_with("--pathspec-from") {
            return Some(ShellWord::unknown(false));
        }
        let (first, last) = (text.find(['*', '?', '['])?, text.rfind(['*', '?', ']'])?);
        let around = (text.get(..first)?, text.get(last + 1..)?);
        (!text.starts_with('-')).then(|| {
            ShellWord::known(around.0)
                .append(&ShellWord::unknown(false))
                .append(&ShellWord::known(around.1))
        })
    };
    words.iter().filter_map(pathspec).collect()
}

/// Returns whether `git` only changes the index and no file.
pub(crate) fn is_index_only_change(command: &ShellCommand) -> bool {
    let words = command
        .words
        .get(1..)
        .filter(|_| command.program() == Some("git"))
        .map(skip_git_options)
        .unwrap_or_default();
    let Some((_, rest)) = words.split_first().filter(|(verb, _)| verb.text() == Some("restore"))
    else {
        return false;
    };
    let parsed = options::parse_options(
        rest,
        &ProgramSyntax {
            short_with_value: "s",
            long_with_value: &["source", "pathspec-from-file"],
            ..BASE_SYNTAX
        },
    );
    rest.iter().all(|word| word.text().is_some())
        && parsed.has(&["-S", "--staged"])
        && !parsed.has(&["-W", "--worktree"])
}

/// Returns the files that `cp` or a similar program creates in a directory.
///
/// The result is empty unless the target must be a directory and all source names are known.
pub(crate) fn created_files(command: &ShellCommand) -> Vec<ShellWord> {
    // These options take no directory.
    let is_plain = |flags: &str| flags.chars().all(|flag| "fimnpsuv".contains(flag));
    let texts: Option<Vec<&str>> = certain_arguments(command).iter().map(ShellWord::text).collect();
    let (Some("cp" | "mv" | "ln" | "install"), Some(texts)) = (command.program(), texts) else {
        return Vec::new();
    };
    // If the target does not exist, `mv` renames the source to it.
    let is_directory = |to: &str| {
        matches!(to, "." | "./" | ".." | "../" | "~" | "~/")
            || (to.ends_with('/') && command.program() != Some("mv"))
    };
    let Some((to, rest)) = texts.split_last().filter(|(to, _)| is_directory(to)) else {
        return Vec::new();
    };
    let (flags, sources): (Vec<&str>, Vec<&str>) =
        rest.iter().copied().partition(|text| text.starts_with('-'));
    let names: Vec<&str> =
        sources.iter().map(|source| base_name(source.trim_end_matches('/'))).collect();
    let is_open = names.iter().any(|name| matches!(*name, "" | "." | ".."));
    if is_open || !flags.iter().all(|flags| flags.strip_prefix('-').is_some_and(is_plain)) {
        return Vec::new();
    }
    names.iter().map(|name| ShellWord::known(format!("{to}/{name}"))).collect()
}

/// Returns the link that `ln` creates in the current directory if only its target is given.
pub(crate) fn created_link(command: &ShellCommand) -> Option<ShellWord> {
    const LN_SYNTAX: ProgramSyntax = ProgramSyntax {
        short_with_value: "St",
        long_with_value: &["suffix", "target-directory"],
        ..BASE_SYNTAX
    };
    if command.program() != Some("ln") {
        return None;
    }
    let parsed = options::parse_options(certain_arguments(command), &LN_SYNTAX);
    let [to] = parsed.operands.as_slice() else { return None };
    if parsed.has(&["-t", "--target-directory"]) {
        return None;
    }
    Some(to.text().map_or_else(
        || url_file_name(to),
        |path| ShellWord::known(format!("./{}", base_name(path.trim_end_matches('/')))),
    ))
}

/// Returns whether a word is a Python module that packs and unpacks archives.
pub(crate) fn is_archive_module(word: &ShellWord) -> bool {
    matches!(word.text(), Some("tarfile" | "zipfile" | "-mtarfile" | "-mzipfile"))
}

/// Returns whether a word is the Python module `pip`.
pub(super) fn is_pip(word: &ShellWord) -> bool {
    matches!(word.text(), Some("pip" | "-mpip"))
}

/// Returns the files that a command writes if an option, a URL or another file determines the name.
pub(crate) fn implicitly_written_files(command: &ShellCommand) -> Vec<ShellWord> {
    let (Some(program), words) = (command.program(), certain_arguments(command)) else {
        return Vec::new();
    };
    if is_in_place_compression(command) {
        let packed = |text: &str| {
            COMPRESSED_SUFFIXES.iter().find_map(|end| text.strip_suffix(*end)).map(ShellWord::known)
        };
        return words.iter().filter_map(ShellWord::text).filter_map(packed).collect();
    }
    if program.starts_with("python") {
        return module_output_files(words);
    }
    let Some(shape) = writer_syntax(program) else {
        // For these programs, the value of `-o` is not a file.
        let lists = is_search_program(program)
            || names_no_files(command)
            || ["ls", "ps", "zgrep", "zegrep", "zfgrep"].contains(&program);
        let verb = || skip_git_options(words).first().and_then(ShellWord::text);
        let short = program != "git" || matches!(verb(), Some("archive" | "format-patch"));
        return if lists { Vec::new() } else { known_output_files(words, short) };
    };
    let parsed = options::parse_options(words, shape);
    let mut files = parsed.values(shape.output_file_options);
    // These names are relative to the directory that an option names.
    let (mut names, by_address) = match program {
        "curl" => (
            parsed.values(&["-o", "--output"]),
            parsed.has(&["-O", "--remote-name", "--remote-name-all"]),
        ),
        "aria2c" => (parsed.values(&["-o", "--out"]), !parsed.has(&["-o", "--out"])),
        "wget" => (Vec::new(), !parsed.has(&["-O", "--output-document"])),
        _ => (Vec::new(), false),
    };
    if by_address {
        names.extend(parsed.operands.iter().map(url_file_name).filter(|name| !name.is_unknown()));
    }
    // `#1` is a part of the URL, `%2e` is a dot, and `{a,b}` and `[1-9]` stand for several names.
    let is_expanded = |name: &ShellWord| {
        name.text().is_some_and(|text| text.contains(['#', '%', '{', '}', '[', ']']))
    };
    let directory = parsed.values(shape.output_directory_options).pop();
    files.extend(names.iter().map(|name| {
        if is_expanded(name) {
            ShellWord::unknown(false)
        } else {
            relative_to_start(name, directory.as_ref())
        }
    }));
    // `--write-out` may write to files.
    if program == "curl" {
        let formats = parsed.values(&["-w", "--write-out"]);
        files.extend(
            formats
                .iter()
                .filter_map(ShellWord::text)
                .flat_map(|text| text.split("%output{").skip(1))
                .map(curl_output_file),
        );
    }
    match program {
        // A new archive is written like every other file.
        "tar" | "bsdtar" | "gtar" | "jar"
            if filled_directories(command).is_empty() || is_archive_creation(program, &parsed) =>
        {
            files.extend(
                parsed.values(&["-f", "--file"]).into_iter().filter(|word| word.text().is_some()),
            );
        }
        // `curl` expands these as patterns.
        "curl" if parsed.operands.iter().chain(&parsed.values(&["--url"])).any(is_multiple_url) => {
            files.push(ShellWord::unknown(false))
        }
        "curl"
            if parsed
                .values(CURL_UPLOAD_OPTIONS)
                .iter()
                .filter_map(ShellWord::text)
                .any(|text| text.contains(['{', '['])) =>
        {
            files.push(ShellWord::unknown(false))
        }
        "scp" | "sftp" => files.extend(last_local_operand(&parsed)),
        "uniq" | "xxd" => files.extend(parsed.operands.get(1).cloned()),
        // These programs write the output of another program to the file.
        "script" | "logsave" => files.extend(parsed.operands.first().cloned()),
        _ => {}
    }
    files
}

/// Returns the file of `%output{FILE}`, given the text after the brace.
fn curl_output_file(text: &str) -> ShellWord {
    let (name, _) = text.split_once('}').unwrap_or((text, ""));
    ShellWord::known(name.strip_prefix(">>").unwrap_or(name))
}

/// Returns the files that a Python module writes: output files and archives.
fn module_output_files(words: &[ShellWord]) -> Vec<ShellWord> {
    const PACK_MODULE_SYNTAX: ProgramSyntax =
        ProgramSyntax { short_with_value: "c", long_with_value: &["create"], ..BASE_SYNTAX };
    let words_after = |is_module: &dyn Fn(&ShellWord) -> bool| {
        words.iter().position(is_module).and_then(|at| words.get(at + 1..))
    };
    if let Some(module_words) =
        words_after(&|word| matches!(word.text(), Some("json.tool" | "-mjson.tool")))
    {
        return options::parse_options(
            module_words,
            &ProgramSyntax { long_with_value: &["indent"], ..BASE_SYNTAX },
        )
        .operands
        .into_iter()
        .skip(1)
        .collect();
    }
    if let Some(module_words) = words_after(&is_archive_module) {
        let parsed = options::parse_options(module_words, &PACK_MODULE_SYNTAX);
        // A long option that is cut to one letter takes no value.
        let abbreviated = parsed.operands.first().filter(|_| parsed.has_exactly("--c")).cloned();
        return parsed
            .values(&["-c", "--create"])
            .into_iter()
            .chain(abbreviated)
            .chain(known_output_files(words, true))
            .collect();
    }
    let mut files = known_output_files(words, true);
    if let Some(pip_words) = words_after(&is_pip) {
        let words =
            std::iter::once(ShellWord::known("pip")).chain(pip_words.iter().cloned()).collect();
        files.extend(implicitly_written_files(&ShellCommand { words, ..ShellCommand::default() }));
    }
    files
}

/// Returns whether a `file:` URL expands to several files.
fn is_multiple_url(address: &ShellWord) -> bool {
    let is_file = |text: &str| {
        text.trim_start().get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case("file:"))
    };
    address.text().is_some_and(|text| is_file(text) && text.contains(['{', '[']))
}

/// Options with which `curl` uploads a file.
const CURL_UPLOAD_OPTIONS: &[&str] = &["-T", "--upload-file"];

/// Returns the files that `curl` uploads, parsed as `curl` does: `-sTFILE`, `-F
/// 'x=@"FILE";type=y'`.
pub(crate) fn uploaded_files(command: &ShellCommand) -> Vec<ShellWord> {
    let Some(shape) =
        command.program().filter(|program| *program == "curl").and_then(writer_syntax)
    else {
        return Vec::new();
    };
    let parsed = options::parse_options(certain_arguments(command), shape);
    let mut files = parsed.values(CURL_UPLOAD_OPTIONS);
    let forms = parsed.values(&["-F", "--form"]);
    let values = forms
        .iter()
        .filter_map(ShellWord::text)
        .filter_map(|form| form.split_once('='))
        .map(|(_, value)| value);
    let names = values
        .flat_map(|value| value.split(['"', ',', ';', '<', '=', '@']))
        .map(str::trim)
        .filter(|name| !name.is_empty());
    files.extend(names.map(ShellWord::known));
    files
}

/// Returns the known values of options that usually name an output file, with or without `-o`.
fn known_output_files(words: &[ShellWord], short: bool) -> Vec<ShellWord> {
    all_output_files(words, short)
        .into_iter()
        .filter(|value| value.text().is_some() || value.is_pattern())
        .collect()
}

fn all_output_files(words: &[ShellWord], short: bool) -> Vec<ShellWord> {
    #[rustfmt::skip]
    const OUTPUT_FILE_OPTIONS: &[&str] = &[
        "-MF", "-out", "--index-output", "--junit-xml", "--junitxml", "--out", "--outfile", "--output", "--output-file",
    ];
    let is_cut = |option: &str| {
        option.strip_prefix("--").is_some_and(|name| !name.is_empty() && "output".starts_with(name))
    };
    let is_long = |option: &str| OUTPUT_FILE_OPTIONS.contains(&option) || is_cut(option);
    let separate = words.windows(2).filter_map(|pair| match pair {
        [option, value]
            if option.text().is_some_and(|option| is_long(option) || (short && option == "-o")) =>
        {
            Some(value.clone())
        }
        _ => None,
    });
    let glued = words.iter().filter_map(|word| {
        let text = known_prefix(word).0;
        let option = match text.split_once('=') {
            Some((option, _)) if is_long(option) => text.get(..=option.len())?,
            _ => ["-o", "-MF"].into_iter().find(|option| short && text.starts_with(*option))?,
        };
        word.strip_known_prefix(option).filter(|value| value.text() != Some(""))
    });
    separate.chain(glued).collect()
}

/// Returns the output files of `git` or a compiler whose names only the running shell knows.
pub(crate) fn unknown_output_files(command: &ShellCommand) -> Vec<ShellWord> {
    const COMPILERS: &[&str] = &["as", "c++", "cc", "clang", "clang++", "cpp", "g++", "gcc", "ld"];
    let (Some(program), words) = (command.program(), certain_arguments(command)) else {
        return Vec::new();
    };
    // `x86_64-linux-gnu-gcc-13` is a compiler.
    let bare = program
        .trim_end_matches(|c: char| c.is_ascii_digit() || c == '.' || c == '-')
        .rsplit('-')
        .next()
        .unwrap_or_default();
    let compiles = COMPILERS.contains(&bare);
    let files =
        if compiles || program == "git" { all_output_files(words, compiles) } else { Vec::new() };
    files.into_iter().filter(|file| file.text().is_none() && !file.is_pattern()).collect()
}

/// Returns the name of the file that a URL or path leads to.
pub(super) fn url_file_name(address: &ShellWord) -> ShellWord {
    if let Some(text) = address.text() {
        let path = text.split(['?', '#']).next().unwrap_or_default().trim_end_matches('/');
        let name = path.rsplit(['/', ':']).next().unwrap_or_default();
        return ShellWord::known(name.strip_suffix(".git").unwrap_or(name));
    }
    let [spelling] = address.spellings() else { return ShellWord::unknown(false) };
    let last = spelling
        .iter()
        .rposition(|part| matches!(part, WordPart::Text(text) if text.contains('/')))
        .unwrap_or(0);
    let name =
        spelling.iter().enumerate().skip(last).fold(ShellWord::empty(), |name, (at, part)| {
            match part {
                WordPart::Text(text) => name.append(&ShellWord::known(if at == last {
                    base_name(text)
                } else {
                    text.as_str()
                })),
                _ => name.append(&ShellWord::unknown_name()),
            }
        });
    let is_known = name.spellings().iter().flatten().any(|part| matches!(part, WordPart::Text(_)));
    if is_known { name } else { ShellWord::unknown(false) }
}

/// Returns a word as a path relative to the initial directory.
pub(crate) fn relative_to_start(word: &ShellWord, directory: Option<&ShellWord>) -> ShellWord {
    let Some(directory) = directory else { return word.clone() };
    match (directory.text(), word.text()) {
        (_, Some(path)) if path.starts_with(['/', '~']) => word.clone(),
        (Some(start), Some(path)) => ShellWord::known(format!("{start}/{path}")),
        (None, Some(_)) => ShellWord::unknown(false),
        (_, None) => word.clone(),
    }
}

/// Returns whether an archive is created or extended, regardless of other options.
pub(crate) fn is_archive_creation(program: &str, parsed: &ParsedOptions) -> bool {
    (program.ends_with("tar") || program == "jar")
        && parsed.has(&["-c", "-r", "-u", "--append", "--create", "--update"])
}
