//! What is known of programs. Nobody needs to read it to understand the rest.

/// Programs whose words are, from somewhere on, another command.
#[rustfmt::skip]
pub(super) const WRAPPERS: &[&str] = &[
    "bundle", "busybox", "builtin", "capsh", "choom", "chroot", "chrt", "command", "dbus-run-session", "direnv", "doas", "docker", "entr", "env",
    "exec", "fakeroot", "firejail", "flock", "hyperfine", "i386", "ionice", "kubectl", "ld-linux-x86-64.so.2", "linux32", "linux64", "logsave",
    "ltrace", "nice", "nix-shell", "nohup", "npm", "npx", "nsenter", "numactl", "parallel", "perf", "pkexec", "pnpm", "podman", "poetry", "prlimit",
    "proxychains", "runuser", "rustup", "screen", "script", "setarch", "setpriv", "setsid", "sg", "ssh-agent", "start-stop-daemon", "stdbuf",
    "strace", "su", "sudo", "systemd-inhibit", "systemd-run", "taskset", "time", "timeout", "tmux", "toybox", "unbuffer", "unshare", "uv",
    "valgrind", "watch", "xargs", "xvfb-run", "yarn",
];
#[rustfmt::skip]
pub(super) const SHELLS: &[&str] = &[
    "sh", "bash", "dash", "zsh", "ksh", "mksh", "ash", "fish", "csh", "tcsh", "rbash", "pwsh",
];
/// Modules of Python that run nothing but what stands in files.
#[rustfmt::skip]
pub(super) const MODULES: &[&str] = &[
    "pytest", "unittest", "venv", "pip", "py_compile", "compileall", "json.tool", "http.server", "black", "ruff", "mypy", "flake8", "isort",
    "build", "tox", "coverage", "pylint", "django", "flask", "uvicorn", "zipfile", "tarfile", "this", "ensurepip", "pydoc", "site", "platform",
];
/// What these do, nobody reads off their words.
#[rustfmt::skip]
pub(super) const CLOSED: &[&str] = &[
    "alias", "at", "batch", "bind", "compgen", "complete", "coproc", "crontab", "ed", "emacs", "enable", "ex", "fc", "history", "lldb", "nvim",
    "shopt", "socat", "ssh", "telnet", "vi", "vim",
];
/// Variables that change what a command does.
#[rustfmt::skip]
pub(super) const POWERFUL: &[&str] = &[
    "BASH_ALIASES", "BASH_CMDS", "BASH_ENV", "CDPATH", "EDITOR", "ENV", "GIT_ASKPASS", "GIT_EDITOR", "GIT_EXTERNAL_DIFF", "GIT_PAGER",
    "GIT_SEQUENCE_EDITOR", "GIT_SSH", "GIT_SSH_COMMAND", "GLOBIGNORE", "HOME", "IFS", "LD_AUDIT", "LD_LIBRARY_PATH", "LD_PRELOAD", "LESSOPEN",
    "MAKEFLAGS", "NODE_OPTIONS", "PAGER", "PERL5DB", "PERL5LIB", "PERL5OPT", "PROMPT_COMMAND", "PS4", "PWD", "PYTHONHOME", "PYTHONPATH",
    "PYTHONSTARTUP", "RSYNC_RSH", "RUBYLIB", "RUBYOPT", "RUSTC_WRAPPER", "SHELL", "SSH_ASKPASS", "TAR_OPTIONS", "VISUAL",
];
/// What a variable of those may be set to.
#[rustfmt::skip]
pub(super) const HARMLESS: &[&str] = &[
    "", "cat", "true", ":", "less", "/bin/cat", "/bin/true",
];
/// Programs that run none of their words.
#[rustfmt::skip]
pub(super) const PLAIN: &[&str] = &[
    ":", "[", "ag", "apt", "apt-get", "awk", "basename", "brew", "cargo", "cat", "cd", "chmod", "chown", "cmake", "cmp", "comm", "cp", "curl",
    "cut", "date", "dd", "df", "diff", "dirname", "dnf", "du", "echo", "eval", "exit", "export", "expr", "false", "fd", "file", "find", "gcc", "gh",
    "git", "go", "grep", "egrep", "fgrep", "head", "help", "hexdump", "hostname", "id", "info", "install", "jq", "kill", "ln", "locate", "ls",
    "man", "md5sum", "mkdir", "mktemp", "mv", "nproc", "od", "patch", "pgrep", "pip", "pip3", "pkill", "printf", "ps", "pwd", "read", "readlink",
    "realpath", "return", "rg", "rm", "rmdir", "rustc", "sed", "seq", "set", "sha256sum", "shift", "shred", "sleep", "sort", "stat", "tail", "tar",
    "tee", "test", "touch", "tr", "trap", "tree", "true", "type", "uname", "uniq", "unset", "unzip", "wait", "wc", "wget", "whatis", "whereis",
    "which", "who", "whoami", "xxd", "yes", "yum", "zip", "make", "gmake", "rustup", "declare", "local", "source", ".",
];
/// Languages, and the letters of the flags that are code, or change what the code is.
#[rustfmt::skip]
pub(super) const LANGUAGES: &[(&str, &str)] = &[
    ("python", "cmix"), ("pypy", "cmi"), ("perl", "eEMmdxI"), ("ruby", "erI"), ("node", "epriC"), ("nodejs", "epriC"), ("bun", "epr"),
    ("deno", "e"), ("php", "rBREda"), ("lua", "eli"), ("luajit", "eli"), ("Rscript", "e"), ("osascript", "e"), ("groovy", "e"), ("julia", "eEL"),
    ("guile", "ce"), ("tclsh", ""), ("expect", "c"), ("m4", ""), ("dc", ""), ("bc", ""), ("gdb", ""), ("sqlite3", ""),
];
/// Flags with which a program runs something that stands in a word.
#[rustfmt::skip]
pub(super) const RUNNING: &[(&str, &[&str])] = &[
    ("tar", &["--to-command", "--checkpoint-action", "-I", "--use-compress-program", "--rsh-command", "-F", "--info-script", "--new-volume-script"]),
    ("split", &["--filter"]),
    ("zip", &["-TT", "--unzip-command"]),
    ("make", &["--eval", "-E", "SHELL=", "MAKEFLAGS="]),
    ("gmake", &["--eval", "-E", "SHELL=", "MAKEFLAGS="]),
    ("gcc", &["-wrapper"]),
    ("install", &["--strip-program"]),
    ("rg", &["--pre"]),
    ("ag", &["--pager"]),
    ("go", &["-exec", "-toolexec"]),
    ("cmake", &["-E", "-P"]),
    ("apt", &["-o"]),
    ("apt-get", &["-o"]),
    ("cargo", &["--config"]),
    ("rustc", &["-C"]),
    ("rsync", &["-e", "--rsh"]),
    ("sort", &["--compress-program"]),
    ("man", &["-P", "--pager", "-H"]),
    ("hash", &["-p"]),
    ("mapfile", &["-C"]),
    ("readarray", &["-C"]),
    ("jobs", &["-x"]),
    ("git", &["--upload-pack", "--receive-pack", "--exec", "-O", "--open-files-in-pager", "--extcmd", "--config-env", "--tree-filter", "--index-filter", "--msg-filter", "--env-filter", "--commit-filter", "--parent-filter", "--tag-name-filter", "ext::"]),
];
/// Settings of `git` that run nothing.
#[rustfmt::skip]
pub(super) const SETTINGS: &[&str] = &[
    "user.name", "user.email", "commit.gpgsign", "init.defaultbranch", "pull.rebase", "core.quotepath", "core.autocrlf", "core.filemode",
];
