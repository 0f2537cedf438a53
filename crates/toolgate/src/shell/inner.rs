//! Programs that run other programs, and languages inside of commands.

use super::word::{Sure, Word};
use super::{Command, Fed, Shell, read};

/// Programs whose words are, from somewhere on, another command.
const WRAPPERS: &[&str] = &[
    "busybox",
    "builtin",
    "chroot",
    "chrt",
    "command",
    "doas",
    "docker",
    "env",
    "exec",
    "flock",
    "fakeroot",
    "firejail",
    "ionice",
    "kubectl",
    "ltrace",
    "nice",
    "nohup",
    "nsenter",
    "parallel",
    "pkexec",
    "podman",
    "proxychains",
    "runuser",
    "screen",
    "script",
    "setpriv",
    "setsid",
    "stdbuf",
    "strace",
    "su",
    "sudo",
    "systemd-run",
    "taskset",
    "time",
    "timeout",
    "tmux",
    "toybox",
    "unshare",
    "watch",
    "xargs",
    "xvfb-run",
];
const SHELLS: &[&str] = &["sh", "bash", "dash", "zsh", "ksh", "mksh", "ash", "fish", "csh", "tcsh", "rbash", "pwsh"];
/// Languages, and the flags behind which their code stands.
const LANGUAGES: &[(&str, &[&str])] = &[
    ("python", &["c"]),
    ("pypy", &["c"]),
    ("perl", &["e", "E"]),
    ("ruby", &["e"]),
    ("node", &["e", "p", "eval", "print"]),
    ("nodejs", &["e", "p", "eval", "print"]),
    ("bun", &["e", "p", "eval", "print"]),
    ("deno", &["eval"]),
    ("php", &["r", "B", "R", "E"]),
    ("lua", &["e"]),
    ("luajit", &["e"]),
    ("Rscript", &["e"]),
    ("osascript", &["e"]),
    ("groovy", &["e"]),
    ("julia", &["e", "E"]),
    ("guile", &["c"]),
    ("tclsh", &[]),
    ("expect", &["c"]),
];
/// What these do, nobody reads off their words.
const CLOSED: &[(&str, &str)] = &[
    ("alias", "an alias changes what words mean"),
    ("at", "it runs commands later"),
    ("batch", "it runs commands later"),
    ("crontab", "it runs commands later"),
    ("enable", "it changes what words mean"),
    ("ssh", "it runs commands elsewhere"),
    ("socat", "it can run anything"),
    ("gdb", "it can run anything"),
    ("vi", "an editor can run anything"),
    ("vim", "an editor can run anything"),
    ("nvim", "an editor can run anything"),
    ("ex", "an editor can run anything"),
    ("ed", "an editor can run anything"),
    ("emacs", "an editor can run anything"),
];
/// Variables that change what a command does.
pub(super) const POWERFUL: &[&str] = &[
    "BASH_ENV",
    "ENV",
    "GIT_EDITOR",
    "GIT_EXTERNAL_DIFF",
    "GIT_PAGER",
    "GIT_SSH",
    "GIT_SSH_COMMAND",
    "IFS",
    "LD_AUDIT",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "NODE_OPTIONS",
    "PAGER",
    "PERL5OPT",
    "PROMPT_COMMAND",
    "PYTHONSTARTUP",
    "RUBYOPT",
];

/// So many words behind a wrapper are looked at.
const MOST_WORDS: usize = 64;
/// How deep commands may stand in commands.
pub(super) const DEPTH: usize = 8;

/// Whether its words hold code of some language.
pub(super) fn runs_code(command: &Command) -> bool {
    let Some(program) = command.program() else { return true };
    language(program).is_some() || SHELLS.contains(&program) || ["sed", "awk", "gawk", "mawk", "eval", "find", "tclsh"].contains(&program)
}

/// Whether its words are no files, whatever they are.
pub(super) fn names_no_files(command: &Command) -> bool {
    const WORDS: &[&str] = &[
        ":", "basename", "date", "dirname", "echo", "exit", "export", "expr", "false", "jobs", "kill", "printf", "return", "seq", "shift",
        "sleep", "true", "type", "unset", "wait", "which",
    ];
    command.program().is_some_and(|program| WORDS.contains(&program))
}

/// Whether it takes away, moves or opens up what it names.
pub(super) fn takes_away(command: &Command) -> bool {
    const TAKERS: &[&str] = &[
        "rm", "mv", "rmdir", "unlink", "shred", "truncate", "chmod", "chown", "chgrp", "chattr", "setfacl", "rsync", "trash", "srm", "ln",
        "mount", "bwrap",
    ];
    let deletes = || command.words.iter().any(|word| word.text() == Some("-delete"));
    command.program().is_none_or(|program| TAKERS.contains(&program) || (program == "find" && deletes()))
}

fn language(program: &str) -> Option<&'static [&'static str]> {
    // `python3.12` is Python.
    let bare = program.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.' || c == '-');
    LANGUAGES.iter().find(|(name, _)| *name == program || *name == bare).map(|(_, flags)| *flags)
}

/// What else a command runs.
pub(super) fn look_inside(command: &Command, depth: usize) -> Shell {
    look(command, depth, false)
}

/// With `nested`, it stands behind a wrapper that has looked everywhere already.
fn look(command: &Command, depth: usize, nested: bool) -> Shell {
    let mut found = Shell::default();
    let Some((first, rest)) = command.words.split_first() else { return found };
    let Some(program) = command.program() else {
        found.opaque.push(if first.is_unknown() || first.text().is_none() {
            "which program runs is only known when it runs".to_owned()
        } else {
            "a program has no name".to_owned()
        });
        return found;
    };
    if depth > DEPTH {
        return Shell::opaque("commands stand in commands too deeply");
    }
    if let Some((_, why)) = CLOSED.iter().find(|(name, _)| *name == program) {
        found.opaque.push(format!("`{program}`: {why}"));
    }
    let from = |words: &[Word]| Command { words: words.to_vec(), files: Vec::new(), fed: command.fed.clone() };
    if WRAPPERS.contains(&program) && !nested {
        let feeds = |word: &Word| matches!(word.text(), Some("xargs" | "parallel"));
        let fed_words = command.words.iter().any(feeds);
        // Where the inner command begins depends on flags of every one of them: it is looked for everywhere.
        if rest.len() > MOST_WORDS {
            found.opaque.push(format!("there are too many words behind `{program}`"));
        }
        for at in 0..rest.len().min(MOST_WORDS) {
            let mut inner = from(rest.get(at..).unwrap_or_default());
            if inner.words.first().and_then(Word::text).is_some_and(|word| word.starts_with('-') || word.contains('=')) {
                continue;
            }
            if fed_words {
                inner.words.push(Word::unknown(true));
                inner.fed = None;
            }
            found.add(deeper(inner, depth, true));
        }
        for word in rest.iter().take(MOST_WORDS) {
            if let Some(code) = word.text().filter(|text| text.contains([' ', ';', '|', '&', '`', '$'])) {
                found.add(read::read(code, depth + 1));
            }
        }
    }
    match program {
        "find" | "fd" | "git" => found.add(behind_flags(program, rest, depth)),
        "eval" | "trap" => found.add(joined(rest, depth)),
        "source" | "." => {
            if rest.first().is_none_or(|file| file.text().is_none()) {
                found.opaque.push("which file is read as commands is only known when it runs".to_owned());
            }
        }
        "hash" if rest.iter().any(|word| word.text() == Some("-p")) => found.opaque.push("`hash -p` changes what words mean".to_owned()),
        "awk" | "gawk" | "mawk" | "nawk" => {
            let acts = |word: &Word| word.text().is_none_or(|code| ["system", "getline", "|", ">"].iter().any(|act| code.contains(act)));
            if rest.iter().any(acts) {
                found.opaque.push(format!("`{program}` has code that can run anything"));
            }
        }
        "sed" | "gsed" => {
            if rest.iter().any(|word| word.text().is_none_or(sed_acts)) {
                found.opaque.push("`sed` has code that can run or write anything".to_owned());
            }
        }
        "make" | "gmake"
            if rest.iter().any(|word| word.text().is_some_and(|word| word == "-f-" || word == "-" || word.starts_with("SHELL="))) =>
        {
            found.opaque.push("`make` reads rules that stand nowhere".to_owned());
        }
        _ if SHELLS.contains(&program) => found.add(shell(program, rest, command, depth)),
        _ => {
            if let Some(flags) = language(program) {
                found.add(code(program, flags, rest, command));
            }
        }
    }
    found
}

/// A command inside another one. Where it is only a guess that it is one, a word that is no program's name says nothing.
fn deeper(command: Command, depth: usize, guessed: bool) -> Shell {
    if guessed && command.program().is_none() {
        return Shell::default();
    }
    let mut found = look(&command, depth + 1, guessed);
    found.commands.insert(0, command);
    found
}

/// Commands behind `-exec` and its like.
fn behind_flags(program: &str, words: &[Word], depth: usize) -> Shell {
    let mut found = Shell::default();
    for (at, word) in words.iter().enumerate() {
        let after = words.get(at + 1..).unwrap_or_default();
        let next = after.first();
        match (program, word.text().unwrap_or_default()) {
            ("find", "-exec" | "-execdir" | "-ok" | "-okdir") | ("fd", "-x" | "-X" | "--exec" | "--exec-batch") => {
                let mut inner = Command { words: after.to_vec(), ..Command::default() };
                inner.words.push(Word::unknown(true));
                found.add(deeper(inner, depth, false));
            }
            ("git", "run" | "foreach") => found.add(deeper(Command { words: after.to_vec(), ..Command::default() }, depth, true)),
            ("git", "-x" | "--exec" | "--upload-pack" | "--receive-pack") => match next.and_then(Word::text) {
                Some(code) => found.add(read::read(code, depth + 1)),
                None => found.opaque.push("`git` runs something that is only known when it runs".to_owned()),
            },
            ("git", text)
                if ["alias.", "core.", "diff.", "filter.", "credential.", "pager.", "sequence.", "merge."]
                    .iter()
                    .any(|of| text.starts_with(of)) =>
            {
                found.opaque.push("`git` is set up to run something else".to_owned());
            }
            ("git", text) if text.starts_with("--exec=") || text.starts_with("--config-env") || text.starts_with("ext::") => {
                found.opaque.push("`git` is set up to run something else".to_owned());
            }
            _ => {}
        }
    }
    found
}

/// Words that are a command when they are put together.
fn joined(words: &[Word], depth: usize) -> Shell {
    let texts: Option<Vec<&str>> = words.iter().map(Word::text).collect();
    match texts {
        Some(texts) => read::read(&texts.join(" "), depth + 1),
        None => Shell::opaque("what is evaluated is only known when it runs"),
    }
}

/// A shell inside of the shell.
fn shell(program: &str, words: &[Word], command: &Command, depth: usize) -> Shell {
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let Some(text) = word.text() else { return Shell::opaque(format!("what `{program}` runs is only known when it runs")) };
        let has_code = text.strip_prefix(['-', '+']).is_some_and(|flags| !flags.starts_with('-') && flags.contains('c'));
        if has_code || text == "--command" || text == "-Command" {
            let code = words.find(|word| word.text().is_none_or(|text| !text.starts_with('-')));
            return match code.and_then(Word::text) {
                Some(code) => read::read(code, depth + 1),
                None => Shell::opaque(format!("what `{program}` runs is only known when it runs")),
            };
        }
        if ["-o", "+o", "-O", "+O", "--rcfile", "--init-file"].contains(&text) {
            words.next();
        } else if text == "-s" {
            break;
        } else if !text.starts_with(['-', '+']) {
            // A file: what is in it, whoever let it be written has judged.
            let piped = text.starts_with("/dev/") || text.starts_with("/proc/");
            return if piped { fed(program, command, depth) } else { Shell::default() };
        }
    }
    fed(program, command, depth)
}

/// A shell that reads its commands from somewhere.
fn fed(program: &str, command: &Command, depth: usize) -> Shell {
    match &command.fed {
        Some(Fed::Text(word)) => match word.text() {
            Some(code) => read::read(code, depth + 1),
            None => Shell::opaque(format!("what `{program}` reads is only known when it runs")),
        },
        Some(Fed::Unknown) => Shell::opaque(format!("`{program}` reads its commands from elsewhere")),
        None if command.files.is_empty() => Shell::default(),
        None => Shell::opaque(format!("`{program}` reads its commands from elsewhere")),
    }
}

/// Code of another language.
fn code(program: &str, flags: &[&str], words: &[Word], command: &Command) -> Shell {
    let is_code = |text: &str| {
        let Some(bare) = text.strip_prefix('-') else { return flags.contains(&text) && text.len() > 1 };
        match bare.strip_prefix('-') {
            Some(long) => flags.iter().any(|flag| flag.len() > 1 && long.starts_with(flag)),
            None => flags.iter().any(|flag| flag.len() == 1 && bare.contains(flag)),
        }
    };
    let inline =
        words.iter().any(|word| word.is_like("-*") >= Sure::Maybe && word.text().is_none_or(is_code) || word.text().is_some_and(is_code));
    let script = words.iter().any(|word| word.text().is_none_or(|text| !text.starts_with('-')));
    if inline || !script || flags.is_empty() || words.iter().any(|word| word.text() == Some("-")) {
        let unfed = command.fed.is_none() && command.files.is_empty();
        // `python --version` runs nothing.
        if inline || !unfed || words.iter().any(|word| word.text() == Some("-")) {
            return Shell::opaque(format!("`{program}` has code that can run anything"));
        }
    }
    Shell::default()
}

/// Whether a text for `sed` may run or write something: the commands `e`, `w` and `r`, or such a flag behind `s///`.
fn sed_acts(text: &str) -> bool {
    if text.starts_with('-') {
        return false;
    }
    let flags_behind = text.rsplit(['/', '|', '#', ',', '@']).next().unwrap_or_default();
    let substitutes = text.trim_start_matches(|c: char| c.is_ascii_digit() || ",$ ".contains(c)).starts_with('s');
    (substitutes && flags_behind.trim_end_matches(';').chars().any(|flag| flag == 'e' || flag == 'w'))
        || text.split([';', '\n', '{', '}']).any(|part| {
            let part = part.trim_start().trim_start_matches(|c: char| c.is_ascii_digit() || ",$! ".contains(c));
            ["e ", "w ", "W "].iter().any(|act| part.starts_with(act)) || part == "e"
        })
}
