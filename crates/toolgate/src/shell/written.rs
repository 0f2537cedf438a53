//! What a command writes and then runs, nobody has judged.

use super::read::Reader;
use super::word::Word;
use super::{Command, acts, base, inner, normal};

impl Reader<'_> {
    /// Files that a command writes under a name of its own.
    pub(super) fn note_what_is_written(&mut self, command: &Command) {
        let writes = ["cp", "mv", "ln", "tee", "install", "curl", "wget", "dd", "sort", "split", "patch", "xxd"];
        let edits = acts::changes(command) && command.program() == Some("sed");
        if command.program().is_some_and(|program| writes.contains(&program)) || edits {
            for text in command.words.iter().skip(1).filter_map(Word::text) {
                let path = normal(text.strip_prefix("of=").or_else(|| text.strip_prefix("-o")).unwrap_or(text));
                self.found.written.insert(base(&path).to_owned());
                self.found.written_paths.push(path);
            }
        }
    }

    /// What is written and run at once, nobody has judged.
    pub(super) fn look_at_what_is_written(&mut self) {
        let written = &self.found.written;
        if written.is_empty() {
            return;
        }
        let for_git =
            self.found.written_paths.iter().any(|path| path.contains(".git/") || path.ends_with("gitconfig") || base(path) == "config");
        let for_make = ["Makefile", "makefile", "GNUmakefile"].iter().any(|name| written.contains(*name));
        let is_written = |word: &str| written.contains(base(&normal(word)));
        let runs = |command: &Command| {
            let program = command.words.first().and_then(Word::text).unwrap_or_default();
            let words = || command.words.iter().skip(1).filter_map(Word::text);
            let code =
                acts::runs_code(command) || matches!(base(program), "source" | "." | "make" | "gmake") || !inner::is_known(base(program));
            let module = words().skip_while(|word| *word != "-m").nth(1).is_some_and(|module| written.contains(&format!("{module}.py")));
            (program.contains('/') && is_written(program))
                || (code && (words().any(is_written) || module))
                || (for_make && matches!(base(program), "make" | "gmake"))
                || (for_git && base(program) == "git")
        };
        // `sed` and `find` read files, they do not run them.
        let suspects = self.found.commands.iter().filter(|command| !matches!(command.program(), Some("sed" | "awk" | "gawk" | "find")));
        if suspects.clone().any(runs) {
            self.doubt("it runs what it has only just written");
        }
    }
}
