//! Detects commands that write a file and then execute it; the written code was not checked.

use super::word::{Sure, Word};
use super::{Command, Fed, base, normal};
use crate::nested_command;
use crate::parse::Reader;
use crate::path::derived;
use crate::program::{file_effects, implicit_writes};

/// Maximum number of pieces that are compared. With more, every word may be a piece.
const MOST_PIECES: usize = 16;

impl Reader<'_> {
    /// Records the files that a command writes.
    pub(crate) fn note_what_is_written(&mut self, command: &Command) {
        let writes = ["cp", "mv", "ln", "tee", "install", "curl", "wget", "dd", "sort", "split", "patch", "xxd"];
        let edits = file_effects::changes(command) && command.program() == Some("sed");
        if command.program().is_some_and(|program| writes.contains(&program)) || edits {
            for text in command.words.iter().skip(1).filter_map(Word::text) {
                let path = normal(text.strip_prefix("of=").or_else(|| text.strip_prefix("-o")).unwrap_or(text));
                self.analysis.written_names.insert(base(&path).to_owned());
                self.analysis.written_paths.push(path);
            }
        }
        // This includes decoded files, unpacked files that were written before, and targets of a
        // patch.
        let is_packed = |word: &Word| word.text().is_some_and(|text| self.analysis.written_names.contains(base(&normal(text))));
        let is_told = match command.program() {
            Some("uniq") => true,
            Some("openssl") => command.words.get(1).is_some_and(|verb| matches!(verb.text(), Some("base64" | "enc"))),
            _ => file_effects::repacks(command) && command.words.iter().any(is_packed),
        };
        let told = if is_told { implicit_writes::writes(command) } else { Vec::new() };
        for path in told.iter().filter_map(Word::text).chain(patched(command)).map(normal) {
            self.analysis.written_names.insert(base(&path).to_owned());
            self.analysis.written_paths.push(path);
        }
    }

    /// Doubts a command that runs a file which it has just written.
    pub(crate) fn look_at_what_is_written(&mut self) {
        let written = &self.analysis.written_names;
        let pieces: Vec<Word> = self.analysis.commands.iter().flat_map(pieces).take(MOST_PIECES + 1).collect();
        if written.is_empty() && pieces.is_empty() {
            return;
        }
        let is_piece = |word: &str| pieces.len() > MOST_PIECES || pieces.iter().any(|piece| piece.is_like(word) != Sure::No);
        let for_git =
            self.analysis.written_paths.iter().any(|path| path.contains(".git/") || path.ends_with("gitconfig") || base(path) == "config");
        let for_make = ["Makefile", "makefile", "GNUmakefile"].iter().any(|name| written.contains(*name));
        let is_written = |word: &str| written.contains(base(&normal(word))) || is_piece(&normal(word));
        let runs = |command: &Command| {
            let program = command.words.first().and_then(Word::text).unwrap_or_default();
            let words = || command.words.iter().skip(1).filter_map(Word::text);
            let code = file_effects::runs_code(command)
                || matches!(base(program), "source" | "." | "make" | "gmake")
                || !nested_command::is_known(base(program));
            let module = words().skip_while(|word| *word != "-m").nth(1).is_some_and(|module| written.contains(&format!("{module}.py")));
            (program.contains('/') && is_written(program))
                || (code && (words().any(is_written) || module))
                || (for_make && matches!(base(program), "make" | "gmake"))
                || (for_git && base(program) == "git")
        };
        // These programs read files but do not run them.
        let suspects = self.analysis.commands.iter().filter(|command| !matches!(command.program(), Some("sed" | "awk" | "gawk" | "find")));
        if suspects.clone().any(runs) {
            self.doubt("it runs a file that it has just written");
        }
    }
}

/// Returns the files that a patch in the command changes.
fn patched(command: &Command) -> impl Iterator<Item = &str> {
    let text = match &command.stdin {
        Some(Fed::Text(text)) if file_effects::patches(command) => text.text(),
        _ => None,
    };
    let files = text.unwrap_or_default().lines().filter_map(|line| line.strip_prefix("+++ "));
    files.filter_map(|file| file.split('\t').next()).map(str::trim_end)
}

/// Returns the files that `split` and `csplit` create.
fn pieces(command: &Command) -> Vec<Word> {
    if !matches!(command.program(), Some("csplit" | "split")) {
        return Vec::new();
    }
    let mut found = derived::composed(command);
    // Without a prefix, the names start with `x`.
    if found.is_empty() {
        found.push(Word::known("x").then(&Word::unknown_name()));
    }
    found
}
