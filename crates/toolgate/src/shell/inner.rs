//! Programs that run other programs, and languages inside of commands. What is not known to be harmless is not taken for it.

use super::word::{Sure, Word};
use super::{Command, Fed, Shell, base, normal, read};

/// Programs whose words are, from somewhere on, another command.
const WRAPPERS: &[&str] = &[
    "bundle",
    "busybox",
    "builtin",
    "capsh",
    "choom",
    "chroot",
    "chrt",
    "command",
    "dbus-run-session",
    "direnv",
    "doas",
    "docker",
    "entr",
    "env",
    "exec",
    "fakeroot",
    "firejail",
    "flock",
    "hyperfine",
    "i386",
    "ionice",
    "kubectl",
    "ld-linux-x86-64.so.2",
    "linux32",
    "linux64",
    "logsave",
    "ltrace",
    "nice",
    "nix-shell",
    "nohup",
    "npm",
    "npx",
    "nsenter",
    "numactl",
    "parallel",
    "perf",
    "pkexec",
    "pnpm",
    "podman",
    "poetry",
    "prlimit",
    "proxychains",
    "runuser",
    "screen",
    "script",
    "setarch",
    "setpriv",
    "setsid",
    "sg",
    "ssh-agent",
    "start-stop-daemon",
    "stdbuf",
    "strace",
    "su",
    "sudo",
    "systemd-inhibit",
    "systemd-run",
    "taskset",
    "time",
    "timeout",
    "tmux",
    "toybox",
    "unbuffer",
    "unshare",
    "uv",
    "valgrind",
    "watch",
    "xargs",
    "xvfb-run",
    "yarn",
];
const SHELLS: &[&str] = &["sh", "bash", "dash", "zsh", "ksh", "mksh", "ash", "fish", "csh", "tcsh", "rbash", "pwsh"];
/// Languages, and the letters of the flags that are code, or change what the code is.
const LANGUAGES: &[(&str, &str)] = &[
    ("python", "cmix"),
    ("pypy", "cmi"),
    ("perl", "eEMmdxI"),
    ("ruby", "erI"),
    ("node", "epriC"),
    ("nodejs", "epriC"),
    ("bun", "epr"),
    ("deno", "e"),
    ("php", "rBREda"),
    ("lua", "eli"),
    ("luajit", "eli"),
    ("Rscript", "e"),
    ("osascript", "e"),
    ("groovy", "e"),
    ("julia", "eEL"),
    ("guile", "ce"),
    ("tclsh", ""),
    ("expect", "c"),
    ("m4", ""),
    ("dc", ""),
    ("bc", ""),
    ("gdb", ""),
    ("sqlite3", ""),
];
/// Modules of Python that run nothing but what stands in files.
const MODULES: &[&str] = &[
    "pytest",
    "unittest",
    "venv",
    "pip",
    "py_compile",
    "compileall",
    "json.tool",
    "http.server",
    "black",
    "ruff",
    "mypy",
    "flake8",
    "isort",
    "build",
    "tox",
    "coverage",
    "pylint",
    "django",
    "flask",
    "uvicorn",
    "zipfile",
    "tarfile",
    "this",
    "ensurepip",
    "pydoc",
    "site",
    "platform",
];
/// What these do, nobody reads off their words.
const CLOSED: &[&str] = &[
    "alias", "at", "batch", "bind", "compgen", "complete", "coproc", "crontab", "ed", "emacs", "enable", "ex", "fc", "history", "lldb",
    "nvim", "shopt", "socat", "ssh", "telnet", "vi", "vim",
];
/// Flags with which a program runs something that stands in a word.
const RUNNING: &[(&str, &[&str])] = &[
    (
        "tar",
        &[
            "--to-command",
            "--checkpoint-action",
            "-I",
            "--use-compress-program",
            "--rsh-command",
            "-F",
            "--info-script",
            "--new-volume-script",
        ],
    ),
    ("split", &["--filter"]),
    ("zip", &["-TT", "--unzip-command"]),
    ("make", &["--eval", "SHELL=", "MAKEFLAGS="]),
    ("gmake", &["--eval", "SHELL=", "MAKEFLAGS="]),
    ("rsync", &["-e", "--rsh"]),
    ("sort", &["--compress-program"]),
    ("man", &["-P", "--pager", "-H"]),
    ("hash", &["-p"]),
    ("mapfile", &["-C"]),
    ("readarray", &["-C"]),
    ("jobs", &["-x"]),
    (
        "git",
        &[
            "--upload-pack",
            "--receive-pack",
            "--exec",
            "-O",
            "--open-files-in-pager",
            "--extcmd",
            "--config-env",
            "--tree-filter",
            "--index-filter",
            "--msg-filter",
            "--env-filter",
            "--commit-filter",
            "--parent-filter",
            "--tag-name-filter",
            "ext::",
            "-u",
        ],
    ),
];
/// Variables that change what a command does.
const POWERFUL: &[&str] = &[
    "BASH_ALIASES",
    "BASH_CMDS",
    "BASH_ENV",
    "CDPATH",
    "EDITOR",
    "ENV",
    "GIT_ASKPASS",
    "GIT_EDITOR",
    "GIT_EXTERNAL_DIFF",
    "GIT_PAGER",
    "GIT_SEQUENCE_EDITOR",
    "GIT_SSH",
    "GIT_SSH_COMMAND",
    "GLOBIGNORE",
    "HOME",
    "IFS",
    "LD_AUDIT",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "LESSOPEN",
    "MAKEFLAGS",
    "NODE_OPTIONS",
    "PAGER",
    "PERL5DB",
    "PERL5LIB",
    "PERL5OPT",
    "PROMPT_COMMAND",
    "PS4",
    "PWD",
    "PYTHONHOME",
    "PYTHONPATH",
    "PYTHONSTARTUP",
    "RSYNC_RSH",
    "RUBYLIB",
    "RUBYOPT",
    "RUSTC_WRAPPER",
    "SHELL",
    "SSH_ASKPASS",
    "TAR_OPTIONS",
    "VISUAL",
];
/// What a variable of those may be set to.
const HARMLESS: &[&str] = &["", "cat", "true", ":", "less", "/bin/cat", "/bin/true"];
/// Programs that run none of their words.
const PLAIN: &[&str] = &[
    ":",
    "[",
    "ag",
    "apt",
    "apt-get",
    "awk",
    "basename",
    "brew",
    "cargo",
    "cat",
    "cd",
    "chmod",
    "chown",
    "cmake",
    "cmp",
    "comm",
    "cp",
    "curl",
    "cut",
    "date",
    "dd",
    "df",
    "diff",
    "dirname",
    "dnf",
    "du",
    "echo",
    "eval",
    "exit",
    "export",
    "expr",
    "false",
    "fd",
    "file",
    "find",
    "gcc",
    "gh",
    "git",
    "go",
    "grep",
    "egrep",
    "fgrep",
    "head",
    "help",
    "hexdump",
    "hostname",
    "id",
    "info",
    "install",
    "jq",
    "kill",
    "ln",
    "locate",
    "ls",
    "man",
    "md5sum",
    "mkdir",
    "mktemp",
    "mv",
    "nproc",
    "od",
    "patch",
    "pgrep",
    "pip",
    "pip3",
    "pkill",
    "printf",
    "ps",
    "pwd",
    "read",
    "readlink",
    "realpath",
    "return",
    "rg",
    "rm",
    "rmdir",
    "rustc",
    "sed",
    "seq",
    "set",
    "sha256sum",
    "shift",
    "shred",
    "sleep",
    "sort",
    "stat",
    "tail",
    "tar",
    "tee",
    "test",
    "touch",
    "tr",
    "trap",
    "tree",
    "true",
    "type",
    "uname",
    "uniq",
    "unset",
    "unzip",
    "wait",
    "wc",
    "wget",
    "whatis",
    "whereis",
    "which",
    "who",
    "whoami",
    "xxd",
    "yes",
    "yum",
    "zip",
    "make",
    "gmake",
    "rustup",
    "declare",
    "local",
    "source",
    ".",
];

/// So many words behind a wrapper are looked at.
const MOST_WORDS: usize = 64;
/// How deep commands may stand in commands.
pub(super) const DEPTH: usize = 8;

/// Whether setting a variable changes what commands do.
pub(super) fn is_powerful(name: &str, value: Option<&str>) -> bool {
    let powerful = POWERFUL.contains(&name) || name.starts_with("GIT_CONFIG") || name.starts_with("BASH_FUNC");
    if name == "PATH" {
        // A directory of this moment among those that are searched.
        return value.is_none_or(|path| path.split(':').any(|part| !part.starts_with(['/', '~', '$']) || part.starts_with("/tmp")));
    }
    powerful && !value.is_some_and(|value| HARMLESS.contains(&value))
}

/// Whether its words hold code of some language.
pub(super) fn runs_code(command: &Command) -> bool {
    let Some(program) = command.program() else { return true };
    language(program).is_some() || SHELLS.contains(&program) || ["sed", "awk", "gawk", "mawk", "eval", "find"].contains(&program)
}

/// Whether its words are no files, whatever they are.
pub(super) fn names_no_files(command: &Command) -> bool {
    const WORDS: &[&str] = &[
        ":", "[", "basename", "dirname", "echo", "exit", "export", "expr", "false", "kill", "printf", "return", "seq", "shift", "sleep",
        "test", "true", "type", "unset", "wait", "which",
    ];
    command.program().is_some_and(|program| WORDS.contains(&program))
}

/// Whether one of its words is a pattern to look for.
pub(super) fn looks_for(command: &Command) -> bool {
    let given = || {
        command
            .words
            .iter()
            .filter_map(Word::text)
            .any(|word| word.starts_with("-e") || word.starts_with("-f") || word.starts_with("--regexp"))
    };
    command.program().is_some_and(|program| ["grep", "egrep", "fgrep", "rg", "ag"].contains(&program)) && !given()
}

/// Whether it takes away, moves, changes or opens up what it names.
pub(super) fn changes(command: &Command) -> bool {
    const TAKERS: &[&str] = &[
        "bwrap", "chattr", "chgrp", "chmod", "chown", "cp", "dd", "install", "ln", "mount", "mv", "patch", "rm", "rmdir", "rsync",
        "setfacl", "shred", "srm", "tee", "touch", "trash", "truncate", "unlink",
    ];
    let has = |flag: &str| command.words.iter().filter_map(Word::text).any(|word| word.starts_with(flag));
    command.program().is_none_or(|program| {
        TAKERS.contains(&program)
            || (program == "find" && has("-delete"))
            || (program == "sed" && (has("-i") || has("--in-place")))
            || has("-o") && program == "sort"
    })
}

/// Whether it reads whole trees.
pub(super) fn reads_trees(command: &Command) -> bool {
    command.program().is_some_and(|program| ["cp", "grep", "rg", "ag", "tar", "zip", "scp", "rsync", "find", "fd"].contains(&program))
}

/// Whether the files that it works on come from elsewhere.
pub(super) fn is_told_files(command: &Command) -> bool {
    let has = |flag: &str| command.words.iter().filter_map(Word::text).any(|word| word.starts_with(flag));
    command.program().is_some_and(|program| program == "cpio" || (program == "tar" && has("-T")) || (program == "zip" && has("-@")))
        || has("--files-from")
        || has("--files0-from")
}

fn language(program: &str) -> Option<&'static str> {
    // `python3.12` is Python.
    let bare = program.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.' || c == '-');
    LANGUAGES.iter().find(|(name, _)| *name == program || *name == bare).map(|(_, flags)| *flags)
}

/// Whether a program is known to run none of its words, or what it runs is looked at.
pub(super) fn is_known(program: &str) -> bool {
    PLAIN.contains(&program) || WRAPPERS.contains(&program) || SHELLS.contains(&program) || language(program).is_some()
}

/// What else a command runs.
pub(super) fn look_inside(command: &Command, depth: usize) -> Shell {
    look(command, depth, false)
}

/// With `nested`, it stands behind a wrapper that has looked everywhere already.
fn look(command: &Command, depth: usize, nested: bool) -> Shell {
    let mut found = Shell::default();
    let Some((_, rest)) = command.words.split_first() else { return found };
    let Some(program) = command.program() else {
        return Shell::opaque("which program runs is only known when it runs");
    };
    if depth > DEPTH {
        return Shell::opaque("commands stand in commands too deeply");
    }
    if CLOSED.contains(&program) {
        found.opaque.push(format!("`{program}` can run anything"));
    }
    if let Some((_, flags)) = RUNNING.iter().find(|(name, _)| *name == program) {
        let runs = |word: &&str| flags.iter().any(|flag| word.starts_with(flag));
        if rest.iter().filter_map(Word::text).any(|word| runs(&word)) {
            found.opaque.push(format!("`{program}` is told to run something else"));
        }
    }
    if WRAPPERS.contains(&program) && !nested {
        found.add(wrapped(program, rest, command, depth));
    }
    match program {
        "find" | "fd" => found.add(behind_flags(rest, depth)),
        "git" => found.add(git(rest, depth)),
        "eval" | "trap" => found.add(joined(rest, depth)),
        "source" | "." => match rest.first().and_then(Word::text) {
            Some(file) if !is_device(file) && command.fed.is_none() => {}
            Some(_) => found.add(fed(program, command, depth)),
            None => found.opaque.push("which file is read as commands is only known when it runs".to_owned()),
        },
        "awk" | "gawk" | "mawk" | "nawk" => {
            if !is_plain_awk(rest) {
                found.opaque.push(format!("`{program}` has code that can run anything"));
            }
        }
        "sed" | "gsed" => {
            if !super::sed::is_plain(rest) {
                found.opaque.push("`sed` has code that can run or write anything".to_owned());
            }
        }
        "make" | "gmake" => {
            let file = |word: &Word| word.text().is_none_or(|text| text == "-" || text == "-f-" || is_device(text));
            if rest.iter().any(file) {
                found.opaque.push("`make` reads rules that stand nowhere".to_owned());
            }
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

/// A command behind another one: where it begins depends on flags of every wrapper, so it is looked for everywhere.
fn wrapped(program: &str, rest: &[Word], command: &Command, depth: usize) -> Shell {
    let mut found = Shell::default();
    // `command -v` only looks.
    if program == "command" && rest.first().and_then(Word::text).is_some_and(|flag| flag == "-v" || flag == "-V") {
        return found;
    }
    if rest.len() > MOST_WORDS {
        found.opaque.push(format!("there are too many words behind `{program}`"));
    }
    let is_flag = |word: &Word| word.text().is_some_and(|text| text.starts_with('-') || text.contains('='));
    let is_wrapper = |word: &Word| word.text().is_some_and(|text| WRAPPERS.contains(&base(text)));
    let feeds = command.words.iter().any(|word| matches!(word.text().map(base), Some("xargs" | "parallel")));
    let first = rest.iter().find(|word| !is_flag(word));
    if first.is_some_and(|word| word.text().is_none()) {
        found.opaque.push("which program runs is only known when it runs".to_owned());
    }
    // What comes in becomes the program where none stands there.
    let last = rest.iter().rposition(is_wrapper).map_or(rest, |at| rest.get(at + 1..).unwrap_or_default());
    let bare =
        |word: &Word| is_flag(word) || word.text().is_some_and(|text| text.chars().all(|c| c.is_ascii_digit() || ".smhd".contains(c)));
    if feeds && last.iter().all(bare) {
        found.opaque.push("which program runs is only known when it runs".to_owned());
    }
    for at in 0..rest.len().min(MOST_WORDS) {
        let mut inner = Command { words: rest.get(at..).unwrap_or_default().to_vec(), files: Vec::new(), fed: command.fed.clone() };
        if inner.words.first().is_some_and(is_flag) {
            continue;
        }
        if feeds {
            inner.words.push(Word::unknown(true));
            inner.fed = None;
        }
        found.add(deeper(inner, depth, true));
    }
    for word in rest.iter().take(MOST_WORDS) {
        let Some(text) = word.text() else { continue };
        if let Some((name, value)) = text.split_once('=')
            && is_powerful(name, Some(value))
        {
            found.opaque.push(format!("`{name}` changes what commands do"));
        }
        if program == "env" && (text.starts_with("-S") || text.starts_with("--split-string")) {
            found.opaque.push("`env` takes a text apart into a command".to_owned());
        }
        if feeds && text.contains("{}") && text.contains(' ') {
            found.opaque.push("what is run is only known when it runs".to_owned());
        }
        // `-c'…'`, `-qc'…'` and `--command=…` are commands as well.
        let value = text.strip_prefix("--").and_then(|long| long.split_once('=')).map(|(_, value)| value);
        let glued = (2..=4).filter_map(|at| text.get(at..)).filter(|_| text.starts_with('-') && value.is_none());
        let whole = Some(text).filter(|_| !text.starts_with('-'));
        for code in glued.chain(value).chain(whole) {
            if code.contains([' ', ';', '|', '&', '`', '$']) {
                found.add(read::read(code, depth + 1));
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
fn behind_flags(words: &[Word], depth: usize) -> Shell {
    let mut found = Shell::default();
    for (at, word) in words.iter().enumerate() {
        if !matches!(word.text(), Some("-exec" | "-execdir" | "-ok" | "-okdir" | "-x" | "-X" | "--exec" | "--exec-batch")) {
            continue;
        }
        let after = words.get(at + 1..).unwrap_or_default();
        let is_end = |word: &Word| matches!(word.text(), Some(";" | "+"));
        let after = after.split(is_end).next().unwrap_or_default();
        let holds = |word: &Word| word.text().is_some_and(|text| text.contains("{}"));
        let code_of_it = after.iter().any(|word| holds(word) && word.text().is_some_and(|text| text.contains(' ')));
        if after.first().is_none_or(holds) || code_of_it {
            found.opaque.push("which program runs is only known when it runs".to_owned());
        }
        // What is found may be any file.
        let words = after.iter().map(|word| if holds(word) { Word::unknown(false) } else { word.clone() }).collect();
        found.add(deeper(Command { words, ..Command::default() }, depth, false));
    }
    found
}

/// What `git` is told to run.
fn git(words: &[Word], depth: usize) -> Shell {
    let mut found = Shell::default();
    let other = || "`git` is set up to run something else".to_owned();
    let safe = |key: &str| {
        let key = key.to_ascii_lowercase();
        [
            "user.",
            "color.",
            "advice.",
            "commit.gpgsign",
            "init.defaultbranch",
            "pull.rebase",
            "safe.directory",
            "core.quotepath",
            "core.autocrlf",
        ]
        .iter()
        .any(|of| key.starts_with(of))
    };
    let texts: Vec<Option<&str>> = words.iter().map(Word::text).collect();
    for (at, text) in texts.iter().enumerate() {
        let next = texts.get(at + 1).copied().flatten();
        match text.unwrap_or_default() {
            "-c" if !next.is_some_and(safe) => found.opaque.push(other()),
            glued if glued.starts_with("-c") && glued.len() > 2 && !safe(glued.get(2..).unwrap_or_default()) => found.opaque.push(other()),
            "-x" => match next {
                Some(code) => found.add(read::read(code, depth + 1)),
                None => found.opaque.push(other()),
            },
            glued if glued.starts_with("-x") => found.opaque.push(other()),
            "filter-branch" | "difftool" | "mergetool" => found.opaque.push(other()),
            "run" | "foreach" => {
                found.add(joined(words.get(at + 1..).unwrap_or_default(), depth));
            }
            "config" => {
                let plain = texts.get(at + 1..).unwrap_or_default().iter().filter(|word| word.is_none_or(|word| !word.starts_with('-')));
                let (count, key) = (plain.clone().count(), plain.clone().next().copied().flatten());
                if count > 1 && !key.is_some_and(safe) {
                    found.opaque.push(other());
                }
            }
            _ => {}
        }
    }
    found
}

/// Words that are a command when they are put together.
fn joined(words: &[Word], depth: usize) -> Shell {
    let words = match words.split_first() {
        Some((first, rest)) if first.text() == Some("--") => rest,
        _ => words,
    };
    let texts: Option<Vec<&str>> = words.iter().map(Word::text).collect();
    match texts {
        Some(texts) => read::read(&texts.join(" "), depth + 1),
        None => Shell::opaque("what is evaluated is only known when it runs"),
    }
}

/// A file that is somebody's output, and not a file.
fn is_device(path: &str) -> bool {
    let path = normal(path);
    path == "-" || path.starts_with("/dev/") || path.starts_with("/proc/")
}

/// A shell inside of the shell.
fn shell(program: &str, words: &[Word], command: &Command, depth: usize) -> Shell {
    let unknown = || Shell::opaque(format!("what `{program}` runs is only known when it runs"));
    let mut words = words.iter();
    let mut has_code = false;
    while let Some(word) = words.next() {
        let Some(text) = word.text() else { return unknown() };
        match text {
            "--version" | "--help" => return Shell::default(),
            "--command" | "-Command" => has_code = true,
            "--rcfile" | "--init-file" => {
                if words.next().is_none_or(|file| file.text().is_none_or(is_device)) {
                    return unknown();
                }
            }
            "--" => {}
            _ if text.starts_with(['-', '+']) && !text.starts_with("--") => {
                let flags = text.get(1..).unwrap_or_default();
                has_code |= text.starts_with('-') && flags.contains('c');
                // Each of these takes a word.
                for _ in flags.chars().filter(|flag| matches!(flag, 'o' | 'O')) {
                    words.next();
                }
                if flags.contains('s') && !has_code {
                    return fed(program, command, depth);
                }
                // PowerShell has code in many disguises.
                if program == "pwsh" && !has_code {
                    return unknown();
                }
            }
            _ if text.starts_with("--") => {}
            _ if has_code => return read::read(text, depth + 1),
            // A file: what is in it, whoever let it be written has judged.
            _ if is_device(text) || command.fed.is_some() => return fed(program, command, depth),
            _ => return Shell::default(),
        }
    }
    if has_code { unknown() } else { fed(program, command, depth) }
}

/// A shell that reads its commands from somewhere.
fn fed(program: &str, command: &Command, depth: usize) -> Shell {
    match &command.fed {
        Some(Fed::Text(word)) => match word.text() {
            Some(code) => read::read(code, depth + 1),
            None => Shell::opaque(format!("what `{program}` reads is only known when it runs")),
        },
        // Its input may come from whoever started it.
        _ => Shell::opaque(format!("`{program}` reads its commands from elsewhere")),
    }
}

/// Code of another language.
fn code(program: &str, flags: &str, words: &[Word], command: &Command) -> Shell {
    let anything = || Shell::opaque(format!("`{program}` has code that can run anything"));
    if command.fed.is_some() || flags.is_empty() {
        return anything();
    }
    let python = program.starts_with("py");
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let Some(text) = word.text() else { return anything() };
        match text.strip_prefix('-') {
            _ if text == "--version" || text == "--help" || text == "-V" || text == "-v" => return Shell::default(),
            // Modules of Python, where they are known.
            Some(module) if python && module.starts_with('m') => {
                let name = if module.len() > 1 { module.get(1..) } else { words.next().and_then(Word::text) };
                let known = name.is_some_and(|name| MODULES.contains(&name));
                return if known { Shell::default() } else { anything() };
            }
            Some("W" | "X") if python => {
                words.next();
            }
            Some(long) if long.starts_with('-') => {
                let name = long.trim_start_matches('-');
                if ["eval", "print", "import", "require", "loader", "experimental-loader", "command", "run"]
                    .iter()
                    .any(|flag| name.starts_with(flag))
                {
                    return anything();
                }
            }
            Some(short) if short.is_empty() || short.contains(|flag: char| flags.contains(flag)) => return anything(),
            Some(_) => {}
            None if text == "eval" || is_device(text) => return anything(),
            // A file, and what follows is its own.
            None => return Shell::default(),
        }
    }
    // It reads its code from whoever started it.
    anything()
}

/// Whether a text for `awk` runs and writes nothing.
fn is_plain_awk(words: &[Word]) -> bool {
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let Some(text) = word.text() else { return false };
        match text {
            "-F" | "-v" => {
                words.next();
                continue;
            }
            _ if text.starts_with("-F") || text.starts_with("-v") => continue,
            _ if text.starts_with('-') && text.len() > 1 => return false,
            _ => {}
        }
        let writes = text.match_indices('>').any(|(at, _)| {
            let after = text.get(at + 1..).unwrap_or_default().trim_start();
            !after.starts_with(|c: char| c.is_ascii_digit() || c == '=' || c == '-')
        });
        if writes || ["system", "getline", "|", "ARGV", "@"].iter().any(|act| text.contains(act)) {
            return false;
        }
    }
    true
}

/// Whether a command like this stands somewhere behind a program that nobody knows: it may run it.
pub(super) fn may_run(command: &Command, is_it: impl Fn(&[Word]) -> Sure) -> Sure {
    if command.program().is_none_or(is_known) {
        return Sure::No;
    }
    let behind = (1..command.words.len().min(MOST_WORDS)).map(|at| is_it(command.words.get(at..).unwrap_or_default()));
    behind.max().unwrap_or(Sure::No).min(Sure::Maybe)
}
