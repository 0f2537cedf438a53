//! Determines directories that a command fills with files, or clears of files that no word names.

use crate::program::file_effects::is_in_place_compression;
use crate::program::implicit_writes::{
    certain_arguments, current_directory, is_archive_module, is_pip, last_local_operand,
    url_file_name, writer_syntax,
};
use crate::program::options::{self, BASE_SYNTAX, FillCondition, OptionStyle, ProgramSyntax};
use crate::word::ShellWord;
use crate::{ShellAnalysis, ShellCommand, skip_git_options};

/// Returns the directories that a command fills with files, or clears of files that no word names.
pub(crate) fn filled_directories(command: &ShellCommand) -> Vec<ShellWord> {
    let (Some(program), words) = (command.program(), certain_arguments(command)) else {
        return Vec::new();
    };
    if program == "git" {
        return git_filled_directories(skip_git_options(words));
    }
    if program.starts_with("python") || program.starts_with("pypy") {
        return module_unpack_directories(words);
    }
    if is_in_place_compression(command) {
        return unpack_directories(words);
    }
    let Some(shape) = writer_syntax(program) else { return cleared_directories(program, words) };
    let parsed = options::parse_options(words, shape);
    let fills = match shape.fills_when {
        FillCondition::Never => false,
        FillCondition::Always => !parsed.operands.is_empty(),
        // An unknown first word may contain one of the options.
        FillCondition::WithOption(flags) => {
            parsed.has(flags)
                || (shape.style == OptionStyle::DashlessCluster
                    && words.first().is_some_and(|word| word.text().is_none()))
        }
        FillCondition::WithSubcommand(verbs) => {
            let max_operands = match program {
                "gh" => 2,
                _ if shape.style == OptionStyle::OneWordEach => 1,
                _ => parsed.operands.len(),
            };
            parsed
                .operands
                .iter()
                .take(max_operands)
                .any(|verb| verb.text().is_none_or(|verb| verbs.contains(&verb)))
        }
    };
    // A second dash revokes an option of `unzip`.
    let is_prevented = parsed.has_certainly(shape.no_fill_options)
        && (program != "unzip" || parsed.count_without_value("") == 0);
    if !fills || is_prevented {
        return cleared_directories(program, words);
    }
    let mut directories = parsed.values(shape.output_directory_options);
    let last = last_local_operand(&parsed).filter(|_| shape.has_directory_operand);
    // In these cases the last operand must be the directory.
    let names_directory = last.as_ref().is_some_and(|to| match program {
        "cpio" => parsed.has(&["-p", "--pass-through"]) && !parsed.has(&["-i", "--extract"]),
        "pax" => parsed.has(&["-w"]),
        _ => parsed.operands.len() > 2 && to.text().is_some_and(|text| text.ends_with('/')),
    });
    if program.ends_with("rar") {
        let glued = words
            .iter()
            .filter_map(ShellWord::text)
            .filter_map(|text| text.strip_prefix("-op").or_else(|| text.strip_prefix("-OP")));
        directories.extend(glued.map(ShellWord::known));
    }
    if shape.fills_current_directory && directories.is_empty() && !names_directory {
        directories.push(current_directory());
    }
    directories.extend(last);
    if parsed.has(shape.fill_anywhere_options) {
        directories.push(ShellWord::known("/"));
    }
    directories
}

/// Returns the directories of files that are unpacked under a stored name or without their suffix.
fn unpack_directories(words: &[ShellWord]) -> Vec<ShellWord> {
    let is_name_option = |text: &str| match text.strip_prefix("--") {
        Some(long) => {
            let long = long.split('=').next().unwrap_or_default();
            long.len() > 1 && ["name", "suffix"].iter().any(|name| name.starts_with(long))
        }
        None => text.strip_prefix('-').is_some_and(|flags| flags.contains(['N', 'S'])),
    };
    if !words.iter().filter_map(ShellWord::text).any(is_name_option) {
        return Vec::new();
    }
    let directory = |word: &ShellWord| match word.text() {
        Some(text) if text.starts_with('-') => None,
        Some(text) => {
            Some(text.rsplit_once('/').map_or_else(current_directory, |(directory, _)| {
                ShellWord::known(format!("{directory}/"))
            }))
        }
        None => Some(current_directory()),
    };
    words.iter().filter_map(directory).collect()
}

/// Returns the directories that `find -delete` or `cargo clean` clears.
///
/// Without a directory, `find` starts in the current one.
fn cleared_directories(program: &str, words: &[ShellWord]) -> Vec<ShellWord> {
    if program == "cargo" && words.iter().any(|word| word.text() == Some("clean")) {
        return options::parse_options(
            words,
            &ProgramSyntax { long_with_value: &["target-dir"], ..BASE_SYNTAX },
        )
        .values(&["--target-dir"]);
    }
    let deletes = program == "find" && words.iter().any(|word| word.text() == Some("-delete"));
    if deletes && find_start_directories(words).is_empty() {
        vec![current_directory()]
    } else {
        Vec::new()
    }
}

/// Returns the directories in which `find` starts.
pub(crate) fn find_start_directories(words: &[ShellWord]) -> Vec<ShellWord> {
    let is_way = |word: &&ShellWord| matches!(word.text(), Some("-H" | "-L" | "-P"));
    let is_place =
        |word: &&ShellWord| word.text().is_none_or(|text| !text.starts_with(['-', '(', '!']));
    words.iter().skip_while(is_way).take_while(is_place).cloned().collect()
}

/// Returns the directories that `git` fills or clears, given the words after its own options.
fn git_filled_directories(words: &[ShellWord]) -> Vec<ShellWord> {
    const GIT_SYNTAX: ProgramSyntax = ProgramSyntax {
        short_with_value: "bcejo",
        long_with_value: &[
            "branch",
            "config",
            "depth",
            "directory",
            "exclude",
            "filter",
            "jobs",
            "origin",
            "prefix",
            "reference",
        ],
        ..BASE_SYNTAX
    };
    let Some((verb, rest)) = words.split_first() else { return Vec::new() };
    let parsed = options::parse_options(rest, &GIT_SYNTAX);
    // A copy has the name of its source, unless another name is given.
    let copies = |operands: &[ShellWord]| -> Vec<ShellWord> {
        let named = operands.get(1..).unwrap_or_default().last().cloned();
        let called = operands
            .first()
            .map(url_file_name)
            .filter(|word| !word.is_unknown() && word.text() != Some(""));
        named.or(called).into_iter().collect()
    };
    let operands = parsed.operands.as_slice();
    match (verb.text().unwrap_or_default(), operands) {
        ("clone", operands) => copies(operands),
        ("submodule", [add, operands @ ..]) if add.text() == Some("add") => copies(operands),
        ("worktree", [add, to, ..]) if add.text() == Some("add") => vec![to.clone()],
        ("clean", []) if !parsed.has(&["-n", "--dry-run"]) || parsed.has(&["--no-dry-run"]) => {
            vec![current_directory()]
        }
        ("stash", [verb, ..]) if matches!(verb.text(), Some("list" | "show")) => Vec::new(),
        ("stash", _) if parsed.has(&["-a", "-u", "--all", "--include-untracked"]) => {
            vec![current_directory()]
        }
        ("sparse-checkout", [verb, ..]) if verb.text() != Some("list") => vec![current_directory()],
        ("apply" | "am", _) => parsed.values(&["--directory"]),
        ("checkout-index", _) => parsed.values(&["--prefix"]),
        _ => Vec::new(),
    }
}

/// Returns the directories into which Python modules unpack files.
pub(crate) fn module_unpack_directories(words: &[ShellWord]) -> Vec<ShellWord> {
    const UNPACK_MODULE_SYNTAX: ProgramSyntax =
        ProgramSyntax { short_with_value: "e", long_with_value: &["extract"], ..BASE_SYNTAX };
    if let Some(pip_words) = words.iter().position(is_pip).and_then(|at| words.get(at + 1..)) {
        let words =
            std::iter::once(ShellWord::known("pip")).chain(pip_words.iter().cloned()).collect();
        return filled_directories(&ShellCommand { words, ..ShellCommand::default() });
    }
    let rest = words
        .iter()
        .position(is_archive_module)
        .and_then(|at| words.get(at + 1..))
        .unwrap_or_default();
    if !rest
        .iter()
        .filter_map(ShellWord::text)
        .any(|word| word.starts_with("-e") || word.starts_with("--e"))
    {
        return Vec::new();
    }
    let parsed = options::parse_options(rest, &UNPACK_MODULE_SYNTAX);
    // The archive is the value of the option, or the operand before the directory.
    let has_archive_option = !parsed.values(&["-e", "--e", "--extract"]).is_empty();
    let mut directories: Vec<ShellWord> =
        parsed.operands.into_iter().skip(usize::from(!has_archive_option)).collect();
    if directories.is_empty() {
        directories.push(current_directory());
    }
    directories
}

impl ShellAnalysis {
    /// Returns whether the command fills or clears a directory.
    pub fn has_filled_directory(&self) -> bool {
        self.commands.iter().any(|command| !filled_directories(command).is_empty())
    }
}
