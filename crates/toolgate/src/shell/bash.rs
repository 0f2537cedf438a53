//! The reader beside Bash itself: whatever Bash runs, the reader has seen, or doubts. Commands are made up at random; those that pass a
//! rule on the program `zap` and the file `secret` are run, in a place where no other programs are to be had than harmless ones.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{Place, Shell, Sure};

/// Commands as people write them, in which something is changed.
const SEEDS: &[&str] = &[
    "zap",
    "echo ok; zap a",
    "x=zap; $x -rf d",
    "a=z; b=ap; $a$b",
    "if true; then zap; fi",
    "for f in a b; do zap \"$f\"; done",
    "while false; do :; done; zap",
    "case a in a) zap;; b|c) :;; esac",
    "f() { zap; }; f",
    "echo \"$(zap)\" `zap`",
    "(zap) & wait",
    "{ zap; } 2>&1 | cat",
    "cat <<E\n$(zap)\nE\necho b",
    "cat <<'E'\nzap\nE\nzap",
    "cat <<-E\n\tzap\n\tE\n: # zap",
    "cat <<< \"$(zap)\"",
    "[ a = b ] || zap",
    "[[ a == b && -n x ]] || zap",
    "(( x = 1 + 2 )) && zap",
    "echo $(( 1 + $(zap; echo 2) ))",
    "x=(a b zap); \"${x[2]}\"",
    "echo ${x:-$(zap)} ${#x} ${x//a/b}",
    "echo 'zap' \"zap\" # zap",
    "echo $'a\\'b' zap; echo $\"zap\"",
    "env zap; command zap; exec zap",
    "eval 'zap'; sh -c 'zap'",
    "printf '%s\\n' zap | xargs echo",
    "! zap; time zap",
    "zap > secret 2>/dev/null < /dev/null",
    "echo a > secret; echo b >> secret",
    "echo a >| secret; cat < a <> secret",
    "true && echo a &> secret || echo b",
    "echo a {zap,b} ~ *.txt",
    "x=1 y=\"a b\" zap",
    "function g { echo; zap; }; g",
    "select i in a; do zap; break; done <<< 1",
    "until zap; do :; done",
    "echo a \\\n  b; z\\\nap",
    "coproc zap; wait",
    "trap 'zap' EXIT",
    "echo \"a ${x-\"$(zap)\"} b\"",
    "diff <(zap) <(echo a)",
    "x='a[$(zap)]'; echo $((x))",
    "test -n \"$x\" -a zap = zap && echo a",
    "while read l; do echo \"$l\"; done <<E\nzap\nE",
    "echo a;zap&&echo b|cat",
];

/// What is put in between.
const PIECES: &[&str] = &[
    " ",
    " ",
    "\n",
    "\n",
    "\t",
    "\r",
    "\\\n",
    "\\",
    "'",
    "\"",
    "`",
    "$",
    ";",
    ";;",
    "&",
    "&&",
    "|",
    "||",
    "|&",
    "(",
    ")",
    "((",
    "))",
    "{",
    "}",
    "{ ",
    "; }",
    "[",
    "]",
    "[[ ",
    " ]]",
    "[ ",
    " ]",
    "$(",
    "$((",
    "${",
    "${x",
    "$x",
    "$'",
    "$\"",
    "<",
    ">",
    ">>",
    "<<",
    "<<<",
    "<<E\n",
    "\nE\n",
    "<<'E'\n",
    "<<-E\n",
    "<<\\E\n",
    "<(",
    ">(",
    "2>",
    ">&",
    "<&",
    "&>",
    ">|",
    "<>",
    "#",
    " #",
    "!",
    " ! ",
    "=",
    "+=",
    "x=",
    "x=zap ",
    "a=(",
    "-",
    "--",
    "*",
    "?",
    "~",
    ",",
    "..",
    ":",
    "@",
    "%",
    "^",
    "+",
    "0",
    "1",
    "a",
    "E",
    "zap",
    " zap",
    "zap ",
    "\nzap\n",
    ";zap;",
    "'zap'",
    "\\zap",
    "z\\ap",
    "secret",
    "> secret",
    ">secret ",
    "if ",
    "then ",
    "fi",
    "; fi",
    "else ",
    "for x in ",
    "do ",
    "; done",
    "while ",
    "case a in ",
    "a) ",
    ";; esac",
    "esac",
    "function ",
    "time ",
    "coproc ",
    "eval ",
    "command ",
    "env ",
    "echo ",
    "true ",
    ": ",
    "cat ",
    "sh -c ",
    "let ",
    "declare ",
    "export ",
    "unset x ",
    "printf -v x ",
    "read x ",
    "test ",
    "{a,zap}",
    "${x:=zap}",
    "${!x}",
    "$((x))",
    "x[1]=",
    "$[",
    "$@",
    "\"$@\"",
    "$1",
    "set -- zap; ",
    "\u{a0}",
    "\u{b}",
    "é",
];

/// How many are made up.
fn rounds() -> usize {
    let wanted = std::env::var("TOOLGATE_BASH").ok().and_then(|count| count.parse().ok());
    wanted.unwrap_or(if std::env::var_os("TOOLGATE_SOAK").is_some() { 1_000_000 } else { 5_000 })
}

struct Chance(u64);

impl Chance {
    fn next(&mut self, most: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % most.max(1)
    }

    fn of<'t>(&mut self, all: &[&'t str]) -> &'t str {
        all[self.next(all.len())]
    }

    /// A command that nobody has thought of.
    fn command(&mut self) -> String {
        let mut text: Vec<char> = self.of(SEEDS).chars().collect();
        if self.next(4) == 0 {
            text.extend(self.of(&["\n", "; ", " && ", " | "]).chars().chain(self.of(SEEDS).chars()));
        }
        for _ in 0..1 + self.next(5) {
            let at = self.next(text.len() + 1);
            let end = (at + 1 + self.next(6)).min(text.len());
            match self.next(6) {
                0 => drop(text.drain(at..end)),
                1 => {
                    let again: Vec<char> = text[at..end].to_vec();
                    let to = self.next(text.len() + 1);
                    text.splice(to..to, again);
                }
                _ => drop(text.splice(at..at, self.of(PIECES).chars())),
            }
        }
        text.into_iter().collect()
    }
}

/// Where commands are run: a directory with nothing in it, and the few programs that there are.
struct Ground {
    home: tempfile::TempDir,
    bash: PathBuf,
}

impl Ground {
    fn new() -> Self {
        let home = tempfile::tempdir().unwrap();
        let (programs, desk) = (home.path().join("programs"), home.path().join("desk"));
        std::fs::create_dir(&programs).unwrap();
        std::fs::create_dir(desk).unwrap();
        let found = |name: &str| ["/usr/bin", "/bin"].iter().map(|place| Path::new(place).join(name)).find(|path| path.exists()).unwrap();
        for name in ["cat", "env", "true", "false", "xargs", "sleep"] {
            symlink(found(name), programs.join(name)).unwrap();
        }
        let bash = found("bash");
        symlink(&bash, programs.join("sh")).unwrap();
        let zap = programs.join("zap");
        std::fs::write(&zap, format!("#!/bin/sh\n: > {}\n", home.path().join("zapped").display())).unwrap();
        std::fs::set_permissions(&zap, std::fs::Permissions::from_mode(0o755)).unwrap();
        Self { home, bash }
    }

    /// Whether a command runs the program, and whether it writes the file.
    fn run(&self, text: &str) -> (bool, bool) {
        let (zapped, desk) = (self.home.path().join("zapped"), self.home.path().join("desk"));
        let mut command = Command::new("/usr/bin/timeout");
        command.args(["--kill-after=1", "2"]).arg(&self.bash).args(["--norc", "--noprofile", "-c", text]).env_clear();
        command.env("PATH", self.home.path().join("programs")).env("HOME", &desk).env("FUNCNEST", "4").current_dir(&desk);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
        let mut child = command.spawn().unwrap();
        let group = rustix::process::Pid::from_child(&child);
        child.wait().unwrap();
        // What it has left behind in the background is not waited for long.
        std::thread::sleep(std::time::Duration::from_millis(if text.contains('&') || text.contains("coproc") { 5 } else { 0 }));
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        let ran = zapped.exists();
        let _ = std::fs::remove_file(zapped);
        let written = desk.join("secret").exists();
        if std::fs::read_dir(&desk).unwrap().next().is_some() {
            std::fs::remove_dir_all(&desk).unwrap();
            std::fs::create_dir(&desk).unwrap();
        }
        (ran, written)
    }
}

#[test]
fn whatever_bash_runs_or_writes_was_seen_or_doubted() {
    let (ground, mut leaks, mut tried) = (Ground::new(), Vec::new(), 0);
    // The test itself can see something.
    assert_eq!(ground.run("zap > secret"), (true, true));
    assert_eq!(ground.run("echo zap; cat secret"), (false, false));
    let seed = std::env::var("TOOLGATE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0x9e37_79b9_7f4a_7c15);
    let mut chance = Chance(seed);
    for _ in 0..rounds() {
        let text = chance.command();
        if text.contains('\0') {
            continue;
        }
        let shell = Shell::read(&text);
        if shell.doubt().is_some() {
            continue;
        }
        let runs = shell.runs("zap") == Sure::No;
        let touches = shell.touches(&[Place::new("secret", "/home/ann")], false, true, None) == Sure::No;
        if (runs && text.contains('z')) || (touches && text.contains("secret")) {
            tried += 1;
            let (ran, written) = ground.run(&text);
            if (ran && runs) || (written && touches) {
                leaks.push(text);
            }
        }
    }
    println!("{tried} of {} passed and were run", rounds());
    assert!(tried > rounds() / 100, "hardly any pass: {tried}");
    assert!(leaks.is_empty(), "{} pass, and should not: {:#?}", leaks.len(), &leaks[..leaks.len().min(40)]);
}
