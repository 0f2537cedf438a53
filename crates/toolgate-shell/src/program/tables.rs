//! Lists known programs, options and variables.

use super::options::{BASE_SYNTAX, FillCondition, OptionStyle, ProgramSyntax};

/// Wrappers: programs whose words contain, from some position on, another command.
#[rustfmt::skip]
pub(crate) const WRAPPER_PROGRAMS: &[&str] = &[
    "bundle", "busybox", "builtin", "capsh", "choom", "chroot", "chrt", "command", "dbus-run-session", "direnv", "doas", "docker", "entr", "env",
    "exec", "fakeroot", "firejail", "flock", "hyperfine", "i386", "ionice", "kubectl", "ld-linux-x86-64.so.2", "linux32", "linux64", "logsave",
    "ltrace", "nice", "nix-shell", "nohup", "npm", "npx", "nsenter", "numactl", "parallel", "perf", "pkexec", "pnpm", "podman", "poetry", "prlimit",
    "proxychains", "runuser", "rustup", "screen", "script", "setarch", "setpriv", "setsid", "sg", "ssh-agent", "start-stop-daemon", "stdbuf",
    "strace", "su", "sudo", "systemd-inhibit", "systemd-run", "taskset", "time", "timeout", "tmux", "toybox", "unbuffer", "unshare", "uv",
    "valgrind", "watch", "xargs", "xvfb-run", "yarn",
];
/// Wrappers that run their command in the current directory.
#[rustfmt::skip]
pub(crate) const SAME_DIRECTORY_WRAPPERS: &[&str] = &[
    "busybox", "command", "env", "exec", "ionice", "nice", "nohup", "setsid", "stdbuf", "sudo", "time", "timeout", "toybox", "xargs",
];
/// Package managers. Their operands may be packages that have the name of a program.
#[rustfmt::skip]
pub(crate) const PACKAGE_MANAGERS: &[&str] = &[
    "bundle", "npm", "pnpm", "poetry", "uv", "yarn",
];
#[rustfmt::skip]
pub(crate) const SHELL_PROGRAMS: &[&str] = &[
    "sh", "bash", "dash", "zsh", "ksh", "mksh", "ash", "fish", "csh", "tcsh", "rbash", "pwsh",
];
/// Options of shells that do not change the meaning of words.
#[rustfmt::skip]
pub(crate) const HARMLESS_SHELL_OPTIONS: &[&str] = &[
    "allexport", "errexit", "errtrace", "functrace", "noclobber", "noexec", "nounset", "physical", "pipefail", "verbose", "xtrace",
];
/// Modules of Python that only run code in files.
#[rustfmt::skip]
pub(crate) const KNOWN_PYTHON_MODULES: &[&str] = &[
    "pytest", "unittest", "venv", "pip", "py_compile", "compileall", "json.tool", "http.server", "black", "ruff", "mypy", "flake8", "isort",
    "build", "tox", "coverage", "pylint", "django", "flask", "uvicorn", "zipfile", "tarfile", "this", "ensurepip", "pydoc", "site", "platform",
    "alembic", "celery", "gunicorn", "mkdocs", "pyright", "sphinx", "twine", "virtualenv",
];
/// Reserved words that the grammar parses as programs in some positions: `! ! rm x`.
#[rustfmt::skip]
pub(crate) const RESERVED_WORDS: &[&str] = &[
    "!", "[[", "]]", "case", "coproc", "do", "done", "elif", "else", "esac", "fi", "for", "function", "if", "in", "select", "then", "until", "while",
    "{", "}",
];
/// Programs whose effect cannot be determined from their words.
#[rustfmt::skip]
pub(crate) const OPAQUE_PROGRAMS: &[&str] = &[
    "alias", "at", "batch", "bind", "claude", "cmd.exe", "codex", "compgen", "complete", "coproc", "crontab", "cursor-agent", "ed", "emacs",
    "emulate", "enable", "ex", "fc", "gemini", "history", "lldb", "nvim", "powershell", "powershell.exe", "pwsh.exe", "setopt", "shopt", "socat",
    "ssh", "telnet", "unsetopt", "vi", "vim", "wsl", "wsl.exe", "zmodload",
];
/// Variables that change what a command does.
#[rustfmt::skip]
pub(crate) const BEHAVIOUR_VARIABLES: &[&str] = &[
    "BASHOPTS", "BASH_ALIASES", "BASH_CMDS", "BASH_ENV", "CDPATH", "EDITOR", "ENV", "GIT_ASKPASS", "GIT_DIR", "GIT_EDITOR", "GIT_EXEC_PATH", "GIT_EXTERNAL_DIFF",
    "GIT_PAGER", "GIT_SEQUENCE_EDITOR", "GIT_SSH", "GIT_SSH_COMMAND", "GIT_TEMPLATE_DIR", "GIT_WORK_TREE", "GLOBIGNORE", "GNUMAKEFLAGS", "HOME", "IFS",
    "LD_AUDIT", "LD_LIBRARY_PATH", "LD_PRELOAD", "LESSOPEN", "MAKEFILES", "MAKEFLAGS", "NODE_OPTIONS", "PAGER", "PERL5DB", "PERL5LIB", "PERL5OPT",
    "PROMPT_COMMAND", "PS0", "PS1", "PS2", "PS4", "PWD", "PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "RSYNC_RSH", "RUBYLIB", "RUBYOPT", "RUSTC_WRAPPER", "SHELL", "SHELLOPTS",
    "SIMPLE_BACKUP_SUFFIX", "SSH_ASKPASS", "TAR_OPTIONS", "UNZIP", "UNZIPOPT", "VISUAL",
];
/// Harmless values of such variables.
#[rustfmt::skip]
pub(crate) const HARMLESS_VARIABLE_VALUES: &[&str] = &[
    "", "cat", "true", ":", "less", "/bin/cat", "/bin/true",
];
/// Variables that name a browser which a program starts.
#[rustfmt::skip]
pub(crate) const BROWSER_VARIABLES: &[&str] = &[
    "BROWSER", "DEFAULT_BROWSER", "GH_BROWSER", "R_BROWSER", "WEB_BROWSER", "WWW_BROWSER",
];
/// Programs that run none of their words.
#[rustfmt::skip]
pub(crate) const SIMPLE_PROGRAMS: &[&str] = &[
    ":", "[", "ag", "apt", "apt-get", "awk", "basename", "brew", "cargo", "cat", "cd", "chmod", "chown", "cmake", "cmp", "comm", "cp", "csplit", "curl",
    "cut", "date", "dd", "df", "diff", "dirname", "dnf", "du", "echo", "eval", "exit", "export", "expr", "false", "fd", "file", "find", "gcc", "gh",
    "git", "go", "grep", "egrep", "fgrep", "head", "help", "hexdump", "hostname", "id", "info", "install", "jq", "kill", "ln", "locate", "ls",
    "man", "md5sum", "mkdir", "mktemp", "mv", "nproc", "od", "patch", "pgrep", "pip", "pip3", "pkill", "printf", "ps", "pwd", "read", "readlink",
    "realpath", "return", "rg", "rm", "rmdir", "rustc", "sed", "seq", "set", "sha256sum", "shift", "shred", "sleep", "sort", "split", "stat", "tail", "tar",
    "tee", "test", "touch", "tr", "trap", "tree", "true", "type", "uname", "uniq", "unset", "unzip", "wait", "wc", "wget", "whatis", "whereis",
    "which", "who", "whoami", "xxd", "yes", "yum", "zip", "make", "gmake", "rustup", "declare", "local", "source", ".",
];
/// Interpreters with two sets of option letters.
///
/// The first set contains or changes code. The second set takes a value that is not code.
#[rustfmt::skip]
pub(crate) const INTERPRETERS: &[(&str, &str, &str)] = &[
    ("python", "cmix", "WX"), ("pypy", "cmi", "WX"), ("perl", "eEMmdxI", ""), ("ruby", "erI", "CEX"), ("node", "epriC", ""), ("nodejs", "epriC", ""),
    ("bun", "epr", "c"), ("deno", "e", "c"), ("php", "rBREda", "ctz"), ("lua", "eli", ""), ("luajit", "eli", "j"), ("Rscript", "e", ""),
    ("osascript", "e", "ls"), ("groovy", "e", "cp"), ("julia", "eEL", "CHJpt"), ("guile", "ce", "CLlx"), ("tclsh", "", ""), ("expect", "c", ""),
    ("m4", "", ""), ("dc", "", ""), ("bc", "", ""), ("gdb", "", ""), ("sqlite3", "", ""),
];
/// Long options of interpreters that take no value and contain no code.
#[rustfmt::skip]
pub(crate) const INTERPRETER_FLAGS: &[&str] = &[
    "--enable-source-maps", "--experimental-strip-types", "--experimental-vm-modules", "--inspect", "--inspect-brk", "--no-deprecation",
    "--no-warnings", "--quiet", "--test", "--trace-warnings", "--verbose", "--watch",
];
/// Options with which a program runs code or a program in a word.
#[rustfmt::skip]
pub(crate) const CODE_RUNNING_OPTIONS: &[(&str, &[&str])] = &[
    ("tar", &["--to-command", "--checkpoint-action", "-I", "--use-compress-program", "--rsh-command", "-F", "--info-script", "--new-volume-script"]),
    ("split", &["--filter"]),
    ("zip", &["-TT", "--unzip-command"]),
    ("make", &["--eval", "-E"]),
    ("gmake", &["--eval", "-E"]),
    ("gcc", &["-wrapper"]),
    ("install", &["--strip-program"]),
    ("rg", &["--pre"]),
    ("ag", &["--pager"]),
    ("go", &["-exec", "-toolexec", "--exec", "--toolexec"]),
    ("cmake", &["-E", "-P"]),
    ("apt", &["-o"]),
    ("apt-get", &["-o"]),
    ("cargo", &["--config"]),
    ("rustc", &["-C"]),
    ("rsync", &["-e", "--rsh"]),
    ("sort", &["--compress-program"]),
    ("man", &["-P", "--pager", "-H"]),
    ("hash", &["-p"]),
    ("npm", &["--browser", "--editor", "--git=", "--script-shell", "--viewer"]),
    ("pip", &["--editor"]),
    ("pip3", &["--editor"]),
    ("pnpm", &["--script-shell"]),
    ("yarn", &["--script-shell"]),
    ("mapfile", &["-C"]),
    ("readarray", &["-C"]),
    ("jobs", &["-x"]),
    ("bb", &["-e", "--eval"]),
    ("deno", &["--eval"]),
    ("elixir", &["-e", "--eval", "--rpc-eval"]),
    ("erl", &["-eval"]),
    ("iex", &["-e", "--eval", "--rpc-eval"]),
    ("kotlin", &["-e"]),
    ("octave", &["--eval"]),
    ("R", &["-e"]),
    ("racket", &["-e", "--eval"]),
    ("rake", &["-e", "-E", "-p", "--execute"]),
    ("sbcl", &["--eval"]),
    ("scala", &["-e"]),
    ("ts-node", &["-e", "--eval", "-p", "--print"]),
    ("tsx", &["-e", "--eval", "-p", "--print"]),
    ("git", &["--upload-pack", "--receive-pack", "--exec", "--open-files-in-pager", "--extcmd", "--config-env", "--tree-filter", "--index-filter", "--msg-filter", "--env-filter", "--commit-filter", "--parent-filter", "--tag-name-filter", "ext::"]),
];
/// Signs, in lower case, with which a database client runs another program.
#[rustfmt::skip]
pub(crate) const DATABASE_CLIENT_ESCAPES: &[(&str, &[&str])] = &[
    ("psql", &["\\!", "`", "|", "program"]), ("mysql", &["\\!", "\\p", "pager", "system"]), ("mariadb", &["\\!", "\\p", "pager", "system"]),
];
/// Settings of `git` that run nothing.
#[rustfmt::skip]
pub(crate) const HARMLESS_GIT_SETTINGS: &[&str] = &[
    "user.name", "user.email", "commit.gpgsign", "init.defaultbranch", "pull.rebase", "core.quotepath", "core.autocrlf", "core.filemode",
];
/// Programs that remove, move or change their operands, or change permissions.
#[rustfmt::skip]
pub(crate) const OPERAND_CHANGING_PROGRAMS: &[&str] = &[
    "bwrap", "chattr", "chgrp", "chmod", "chown", "cp", "dd", "del-cli", "dos2unix", "fallocate", "gio", "install", "link", "ln", "mac2unix",
    "mmv", "mount", "mv", "patch", "prename", "rename", "rimraf", "rm", "rmdir", "rsync", "sd", "setfacl", "shred", "sponge", "srm", "tee", "touch",
    "trash", "trash-put", "truncate", "unix2dos", "unlink",
];
/// Subcommands of `git` that change or remove files.
#[rustfmt::skip]
pub(crate) const FILE_CHANGING_GIT_SUBCOMMANDS: &[&str] = &[
    "apply", "bundle", "checkout", "checkout-index", "clean", "fast-export", "fast-import", "index-pack", "interpret-trailers", "mailinfo",
    "merge-file", "mv", "reset", "restore", "rm", "stash", "subtree",
];
/// Programs that replace the named file by a compressed or decompressed one.
#[rustfmt::skip]
pub(crate) const IN_PLACE_COMPRESSORS: &[&str] = &[
    "brotli", "bunzip2", "bzip2", "compress", "gunzip", "gzip", "lbzip2", "lz4", "lzip", "lzma", "pbzip2", "pigz", "plzip", "uncompress",
    "unlz4", "unlzma", "unpigz", "unxz", "unzstd", "xz", "zstd",
];
#[rustfmt::skip]
pub(crate) const COMPRESSED_SUFFIXES: &[&str] = &[
    "-gz", "-z", ".br", ".bz", ".bz2", ".gz", ".lz", ".lz4", ".lzma", ".xz", ".Z", ".z", ".zst", "_z",
];
/// Programs that write files which no word names, or only one behind an option.
#[rustfmt::skip]
pub(crate) const WRITER_PROGRAMS: &[ProgramSyntax] = &[
    ProgramSyntax {
        programs: &["tar", "bsdtar", "gtar"], style: OptionStyle::DashlessCluster, short_with_value: "bCfFgHIKLNTVX",
        long_with_value: &[
            "add-file", "after-date", "blocking-factor", "directory", "exclude", "exclude-from", "exclude-ignore", "exclude-ignore-recursive",
            "exclude-tag", "exclude-tag-all", "exclude-tag-under", "file", "files-from", "format", "group", "group-map", "index-file", "label", "level",
            "listed-incremental", "mode", "mtime", "newer", "newer-mtime", "owner", "owner-map", "pax-option", "quoting-style", "record-size", "sort",
            "starting-file", "strip-components", "suffix", "tape-length", "transform", "use-compress-program", "volno-file", "warning", "xform",
        ],
        output_file_options: &["--index-file", "--volno-file"],
        output_directory_options: &["-C", "--directory", "--cd", "--one-top-level"], fills_when: FillCondition::WithOption(&["-x", "--extract", "--get"]),
        no_fill_options: &["-O", "--to-stdout"], fill_anywhere_options: &["-P", "--absolute-names", "--absolute-paths"], fills_current_directory: true, ..BASE_SYNTAX
    },
    ProgramSyntax {
        programs: &["unzip"], style: OptionStyle::BeforeOperands, short_with_value: "dP", output_directory_options: &["-d"], fills_when: FillCondition::Always,
        no_fill_options: &["-c", "-l", "-p", "-t", "-v", "-z", "-Z"], fill_anywhere_options: &["-:"], fills_current_directory: true, ..BASE_SYNTAX
    },
    ProgramSyntax {
        programs: &["7z", "7za", "7zr", "7zz"], style: OptionStyle::OneWordEach, short_with_value: "oO", output_directory_options: &["-o", "-O"],
        fills_when: FillCondition::WithSubcommand(&["e", "x", "E", "X"]), no_fill_options: &["-so"], fill_anywhere_options: &["-spf", "-spf2", "-SPF", "-SPF2"], fills_current_directory: true, ..BASE_SYNTAX
    },
    ProgramSyntax { programs: &["rar", "unrar"], style: OptionStyle::OneWordEach, fills_when: FillCondition::WithSubcommand(&["e", "x", "E", "X"]), fills_current_directory: true, has_directory_operand: true, ..BASE_SYNTAX },
    ProgramSyntax {
        programs: &["jar"], style: OptionStyle::DashlessCluster, short_with_value: "fme", long_with_value: &["dir", "file"], output_directory_options: &["-C", "--dir"],
        fills_when: FillCondition::WithOption(&["-x", "--extract"]), fill_anywhere_options: &["-P"], fills_current_directory: true, ..BASE_SYNTAX
    },
    ProgramSyntax { programs: &["ar"], style: OptionStyle::DashlessCluster, long_with_value: &["output"], output_directory_options: &["--output"], fills_when: FillCondition::WithOption(&["-x"]), fills_current_directory: true, ..BASE_SYNTAX },
    ProgramSyntax {
        programs: &["cpio"], short_with_value: "CDEFHIMORW", long_with_value: &["block-size", "directory", "file", "format", "io-size", "message", "owner", "pattern-file", "warning"],
        output_directory_options: &["-D", "--directory"],
        fills_when: FillCondition::WithOption(&["-i", "-p", "--extract", "--pass-through"]), no_fill_options: &["-t", "--list", "--to-stdout"], fill_anywhere_options: &["-i", "--extract"],
        fills_current_directory: true, has_directory_operand: true, ..BASE_SYNTAX
    },
    ProgramSyntax { programs: &["pax"], short_with_value: "Bbfopsx", fills_when: FillCondition::WithOption(&["-r"]), fills_current_directory: true, has_directory_operand: true, ..BASE_SYNTAX },
    ProgramSyntax {
        programs: &["dpkg", "dpkg-deb"], has_directory_operand: true,
        fills_when: FillCondition::WithOption(&["-e", "-R", "-x", "-X", "--control", "--extract", "--raw-extract", "--vextract"]), ..BASE_SYNTAX
    },
    ProgramSyntax { programs: &["unsquashfs"], style: OptionStyle::OneWordEach, long_with_value: &["d", "dest"], output_directory_options: &["-d", "-dest"], fills_when: FillCondition::Always, ..BASE_SYNTAX },
    ProgramSyntax {
        programs: &["pip", "pip3"], short_with_value: "cdert", long_with_value: &["dest", "log", "prefix", "report", "root", "target"], output_file_options: &["--log", "--report"],
        output_directory_options: &["-d", "-t", "--dest", "--prefix", "--root", "--target"], fills_when: FillCondition::WithSubcommand(&["download", "install", "wheel"]), ..BASE_SYNTAX
    },
    ProgramSyntax { programs: &["scp", "sftp"], short_with_value: "BDFJPRSXbcilo", fills_when: FillCondition::Always, has_directory_operand: true, ..BASE_SYNTAX },
    ProgramSyntax {
        programs: &["wget"], short_with_value: "ABDIOPQRTUXaeilotw",
        long_with_value: &[
            "append-output", "body-data", "directory-prefix", "header", "input-file", "load-cookies", "output-document", "output-file", "password",
            "post-data", "post-file", "referer", "save-cookies", "timeout", "tries", "user", "user-agent", "wait",
        ],
        output_file_options: &["-O", "-a", "-o", "--append-output", "--output-document", "--output-file", "--save-cookies"],
        output_directory_options: &["-P", "--directory-prefix"],
        fills_when: FillCondition::WithOption(&["-i", "-m", "-r", "--content-disposition", "--input-file", "--mirror", "--recursive", "--trust-server-names"]),
        fills_current_directory: true, ..BASE_SYNTAX
    },
    ProgramSyntax {
        programs: &["curl"], short_with_value: "ACDEFHKPQTUXYbcdemortuwxyz",
        long_with_value: &[
            "alt-svc", "cacert", "cert", "config", "connect-timeout", "cookie", "cookie-jar", "data", "data-binary", "data-raw", "data-urlencode",
            "dump-header", "etag-save", "form", "header", "hsts", "json", "key", "libcurl", "max-time", "output", "output-dir", "proxy", "range",
            "referer", "request", "resolve", "retry", "stderr", "trace", "trace-ascii", "upload-file", "url", "user", "user-agent", "write-out",
        ],
        output_file_options: &[
            "-D", "-c", "--alt-svc", "--cookie-jar", "--dump-header", "--etag-save", "--hsts", "--libcurl", "--stderr", "--trace", "--trace-ascii",
        ],
        output_directory_options: &["--output-dir"], fills_when: FillCondition::WithOption(&["-J", "--remote-header-name"]), fills_current_directory: true, ..BASE_SYNTAX
    },
    ProgramSyntax {
        programs: &["aria2c"], short_with_value: "Mdijklosx", long_with_value: &["dir", "input-file", "log", "out"], output_file_options: &["-l", "--log"],
        output_directory_options: &["-d", "--dir"], fills_when: FillCondition::WithOption(&["-M", "-i", "--input-file", "--metalink-file"]), fills_current_directory: true, ..BASE_SYNTAX
    },
    ProgramSyntax {
        programs: &["find"], style: OptionStyle::OneWordEach, long_with_value: &["fls", "fprint", "fprint0", "fprintf"],
        output_file_options: &["-fls", "-fprint", "-fprint0", "-fprintf"], ..BASE_SYNTAX
    },
    ProgramSyntax {
        programs: &["sort"], short_with_value: "STkot",
        long_with_value: &[
            "batch-size", "buffer-size", "compress-program", "field-separator", "files0-from", "key", "output", "parallel", "random-source", "sort",
            "temporary-directory",
        ],
        output_file_options: &["-o", "--output"], ..BASE_SYNTAX
    },
    ProgramSyntax { programs: &["uniq"], short_with_value: "fsw", long_with_value: &["check-chars", "skip-chars", "skip-fields"], ..BASE_SYNTAX },
    ProgramSyntax {
        programs: &["xxd"], style: OptionStyle::OneWordEach,
        long_with_value: &["R", "c", "cols", "g", "group", "groupsize", "l", "len", "n", "name", "o", "s", "seek", "skip"], ..BASE_SYNTAX
    },
    ProgramSyntax {
        programs: &["script"], short_with_value: "BEIOTcmot",
        long_with_value: &["command", "echo", "log-in", "log-io", "log-out", "log-timing", "logging-format", "output-limit"],
        output_file_options: &["-B", "-I", "-O", "-T", "-t", "--log-in", "--log-io", "--log-out", "--log-timing", "--timing"], ..BASE_SYNTAX
    },
    ProgramSyntax { programs: &["logsave"], ..BASE_SYNTAX },
    ProgramSyntax {
        programs: &["go"], style: OptionStyle::OneWordEach,
        long_with_value: &["blockprofile", "coverprofile", "cpuprofile", "memprofile", "mutexprofile", "o", "out", "output", "trace"],
        output_file_options: &[
            "-blockprofile", "-coverprofile", "-cpuprofile", "-memprofile", "-mutexprofile", "-o", "-out", "-output", "-trace", "--blockprofile",
            "--coverprofile", "--cpuprofile", "--memprofile", "--mutexprofile", "--o", "--out", "--output", "--trace",
        ], ..BASE_SYNTAX
    },
    ProgramSyntax {
        programs: &["gh"], short_with_value: "ABDFHORabnpt", long_with_value: &["archive", "body", "dir", "name", "notes", "output", "pattern", "repo", "title"],
        output_file_options: &["-O", "--output"], output_directory_options: &["-D", "--dir"], fills_when: FillCondition::WithSubcommand(&["download"]),
        no_fill_options: &["-O", "--output"], fills_current_directory: true, ..BASE_SYNTAX
    },
    ProgramSyntax { programs: &["openssl"], style: OptionStyle::OneWordEach, long_with_value: &["out", "keyout"], output_file_options: &["-out", "-keyout"], ..BASE_SYNTAX },
];
/// Programs that search files for a pattern, directly or recursively.
#[rustfmt::skip]
pub(crate) const SEARCH_PROGRAMS: &[ProgramSyntax] = &[
    ProgramSyntax {
        programs: &["grep", "egrep", "fgrep", "rgrep"], short_with_value: "ABCDdefm",
        long_with_value: &[
            "after-context", "before-context", "binary-files", "context", "devices", "directories", "exclude", "exclude-dir", "exclude-from", "file",
            "group-separator", "include", "label", "max-count", "regexp",
        ], ..BASE_SYNTAX
    },
    ProgramSyntax {
        programs: &["rg"], short_with_value: "ABCEMTdefgjmrt",
        long_with_value: &[
            "after-context", "before-context", "color", "colors", "context", "context-separator", "dfa-size-limit", "encoding", "engine",
            "field-context-separator", "field-match-separator", "file", "glob", "hostname-bin", "hyperlink-format", "iglob", "ignore-file",
            "max-columns", "max-count", "max-depth", "max-filesize", "path-separator", "pre", "pre-glob", "regex-size-limit", "regexp", "replace",
            "sort", "sortr", "threads", "type", "type-add", "type-not",
        ], ..BASE_SYNTAX
    },
    ProgramSyntax { programs: &["ack", "ag", "ug", "ugrep"], ..BASE_SYNTAX },
];
