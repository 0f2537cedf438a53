//! Detects commands that write a file and then execute it; the written code was not checked.

use super::word::{Certainty, ShellWord};
use super::{ShellCommand, StdinSource, base_name, normalize_path};
use crate::nested_command;
use crate::parse::SyntaxAnalyzer;
use crate::path::derived;
use crate::program::{file_effects, implicit_writes};

/// Maximum number of pieces that are compared. With more, every word may be a piece.
const MAX_SPLIT_FILES: usize = 16;

impl SyntaxAnalyzer<'_> {
    /// Records the files that a command writes.
    pub(crate) fn record_written_files(&mut self, command: &ShellCommand) {
        let writes = [
            "cp", "mv", "ln", "tee", "install", "curl", "wget", "dd", "sort", "split", "patch",
            "xxd",
        ];
        let edits = file_effects::is_file_change(command) && command.program() == Some("sed");
        if command.program().is_some_and(|program| writes.contains(&program)) || edits {
            for text in command.words.iter().skip(1).filter_map(ShellWord::text) {
                let path = normalize_path(
                    text.strip_prefix("of=").or_else(|| text.strip_prefix("-o")).unwrap_or(text),
                );
                self.analysis.written_names.insert(base_name(&path).to_owned());
                self.analysis.written_paths.push(path);
            }
        }
        // This includes decoded files, unpacked files that were written before, and targets of a
        // patch.
        let is_packed = |word: &ShellWord| {
            word.text().is_some_and(|text| {
                self.analysis.written_names.contains(base_name(&normalize_path(text)))
            })
        };
        let is_checked = match command.program() {
            Some("uniq") => true,
            Some("openssl") => command
                .words
                .get(1)
                .is_some_and(|verb| matches!(verb.text(), Some("base64" | "enc"))),
            _ => {
                file_effects::is_in_place_compression(command)
                    && command.words.iter().any(is_packed)
            }
        };
        let files = if is_checked {
            implicit_writes::implicitly_written_files(command)
        } else {
            Vec::new()
        };
        for path in files
            .iter()
            .filter_map(ShellWord::text)
            .chain(patched_files(command))
            .map(normalize_path)
        {
            self.analysis.written_names.insert(base_name(&path).to_owned());
            self.analysis.written_paths.push(path);
        }
    }

    /// Doubts a command that runs a file which it has just written.
    pub(crate) fn check_executed_files(&mut self) {
        let written = &self.analysis.written_names;
        let pieces: Vec<ShellWord> = self
            .analysis
            .commands
            .iter()
            .flat_map(split_output_files)
            .take(MAX_SPLIT_FILES + 1)
            .collect();
        if written.is_empty() && pieces.is_empty() {
            return;
        }
        let is_piece = |word: &str| {
            pieces.len() > MAX_SPLIT_FILES
                || pieces.iter().any(|piece| piece.match_pattern(word) != Certainty::No)
        };
        let for_git = self.analysis.written_paths.iter().any(|path| {
            path.contains(".git/") || path.ends_with("gitconfig") || base_name(path) == "config"
        });
        let for_make =
            ["Makefile", "makefile", "GNUmakefile"].iter().any(|name| written.contains(*name));
        let is_written = |word: &str| {
            written.contains(base_name(&normalize_path(word))) || is_piece(&normalize_path(word))
        };
        let runs = |command: &ShellCommand| {
            let program = command.words.first().and_then(ShellWord::text).unwrap_or_default();
            let words = || command.words.iter().skip(1).filter_map(ShellWord::text);
            let code = file_effects::runs_code(command)
                || matches!(base_name(program), "source" | "." | "make" | "gmake")
                || !nested_command::is_known_program(base_name(program));
            let module = words()
                .skip_while(|word| *word != "-m")
                .nth(1)
                .is_some_and(|module| written.contains(&format!("{module}.py")));
            (program.contains('/') && is_written(program))
                || (code && (words().any(is_written) || module))
                || (for_make && matches!(base_name(program), "make" | "gmake"))
                || (for_git && base_name(program) == "git")
        };
        // These programs read files but do not run them.
        let candidates =
            self.analysis.commands.iter().filter(|command| {
                !matches!(command.program(), Some("sed" | "awk" | "gawk" | "find"))
            });
        if candidates.clone().any(runs) {
            self.add_doubt("it runs a file that it has just written");
        }
    }
}

/// Returns the files that a patch in the command changes.
fn patched_files(command: &ShellCommand) -> impl Iterator<Item = &str> {
    let text = match &command.stdin {
        Some(StdinSource::Text(text)) if file_effects::is_patch_program(command) => text.text(),
        _ => None,
    };
    let files = text.unwrap_or_default().lines().filter_map(|line| line.strip_prefix("+++ "));
    files.filter_map(|file| file.split('\t').next()).map(str::trim_end)
}

/// Returns the files that `split` and `csplit` create.
fn split_output_files(command: &ShellCommand) -> Vec<ShellWord> {
    if !matches!(command.program(), Some("csplit" | "split")) {
        return Vec::new();
    }
    let mut found = derived::derived_files(command);
    // Without a prefix, the names start with `x`.
    if found.is_empty() {
        found.push(ShellWord::known("x").append(&ShellWord::unknown_name()));
    }
    found
}
