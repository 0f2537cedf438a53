//! Compares the analysis with Bash itself on random commands.
//!
//! Everything that Bash runs, reads or writes must be detected or doubted. The test runs commands
//! that pass a rule on the program `zap` and the file `secret`. They have access to harmless
//! programs only. If the test runs as root, they run as the user `nobody`.

use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::{Certainty, PathPattern, ShellAnalysis};

/// Typical commands, which are mutated.
const SEED_COMMANDS: &[&str] = &[
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
    "cat 'sec'* \"secr\"?t; x=sec; cat $x*",
    "cat secret; x=$(<secret); echo \"$x\"",
    "read x < secret; echo $x",
    "mapfile -t a < secret; echo \"${a[0]}\"",
    "while read l; do echo $l; done < secret",
    "cat 'sec'ret \"$(echo secret)\" s\\ecret",
    "cat {a,secret} s?cret",
    "echo \"${x:-a\"b\"c}\" '${x}' \"`echo \\`zap\\``\"",
    "[[ abc =~ ^(a|b)c$ ]] && zap; [[ x == [a-z]* ]]",
    "[[ $x =~ \"a b\" || ( a < b && -e secret ) ]]; echo $?",
    "case \"$x\" in (a*|'b c') echo;; [!x]) zap;& *) : ;;& esac",
    "cat <<A <<B\n$(zap)\nA\nb\nB\nzap",
    "cat <<E\"O\"F\n$(zap)\nEOF\necho",
    "x=$(cat <<E\nzap\nE\n); echo \"$x\"",
    "f() { zap; } > secret 2>&1; f",
    "if [ -n \"$x\" ]; then echo; elif ! zap; then :; else echo; fi",
    "for ((i=0; i<2; i++)); do zap; done",
    "for x; do zap; done; for x in; do :; done",
    "((x++)) || let 'y = 1 << 2'; echo $[1+1]",
    "a[0]=zap; a+=(b); ${a[0]} x; declare -a b=([1]=zap); ${b[1]}",
    "declare -A m=([k]=zap); ${m[k]}; echo ${!m[@]}",
    "x=\"a'b\"; y='c\"d'; echo \"$x\" '$y' \\; zap",
    "echo ${x#*zap} ${x%%z*} ${x/zap/b} ${x^^} ${x:0:1} ${x:?zap}",
    "exec 3> secret; echo a >&3; exec {fd}<secret; cat <&$fd",
    "echo a >&2 2>&1 &>> secret",
    "{ echo; zap; } & { :; }; wait $!",
    "time -p zap; ! ! zap",
    "x=a y=b; z=\"$x\"$y zap",
    "echo \"$((1+(2*3)))\" $(( (1) )) $((x?zap:1))",
    "echo $(echo $(echo `zap`)) $( (zap) ) $({ zap; })",
    "cat <<'E' | cat\n`zap`\nE\n",
    "printf '%s' \"$(printf zap)\"; $(printf zap)",
    "set -- a zap; shift; \"$@\"; $1",
    "IFS=z; x=azap; echo $x; unset IFS",
    "echo \\# zap; echo a#zap; echo '#' zap #zap",
    "echo -e 'a\\nzap' | cat -",
    "cd . && zap; (cd ..; zap)",
    "local x=zap; export y=zap z; readonly w=zap; $w",
    "x='$(zap)'; eval echo $x; echo \"$x\"",
    "alias a=zap; a; unalias a",
    "source secret; . ./secret",
    "sh < secret; sh -s <<< zap; sh -c \"$(cat secret)\"",
    "xargs zap < /dev/null; echo zap | xargs env",
    "echo 'a\nb' \"c\nd\" e\nzap",
    "while :; do zap; break; done; until :; do zap; done",
    "function zip() (zap); zip; function a { zap; } >secret; a",
    "coproc A { zap; }; wait; select x in; do :; done",
    "trap zap EXIT; trap - EXIT; trap 'echo zap' DEBUG",
    "test zap -nt secret; [ -f secret ] && echo; type zap; command -v zap; hash zap",
    "echo ~zap ~/zap $HOME/zap ./zap ../desk/secret",
];

/// Texts that are inserted into commands.
#[rustfmt::skip]
const MUTATION_TEXTS: &[&str] = &[
    " ", " ", "\n", "\n", "\t", "\r", "\\\n", "\\", "'", "\"", "`", "$", ";", ";;", "&", "&&", "|", "||", "|&", "(", ")", "((", "))", "{", "}",
    "{ ", "; }", "[", "]", "[[ ", " ]]", "[ ", " ]", "$(", "$((", "${", "${x", "$x", "$'", "$\"", "<", ">", ">>", "<<", "<<<", "<<E\n", "\nE\n",
    "<<'E'\n", "<<-E\n", "<<\\E\n", "<(", ">(", "2>", ">&", "<&", "&>", ">|", "<>", "#", " #", "!", " ! ", "=", "+=", "x=", "x=zap ", "a=(", "-",
    "--", "*", "?", "~", ",", "..", ":", "@", "%", "^", "+", "0", "1", "a", "E", "zap", " zap", "zap ", "\nzap\n", ";zap;", "'zap'", "\\zap", "z\\ap",
    "secret", "> secret", ">secret ", "if ", "then ", "fi", "; fi", "else ", "for x in ", "do ", "; done", "while ", "case a in ", "a) ", ";; esac",
    "esac", "function ", "time ", "coproc ", "eval ", "command ", "env ", "echo ", "true ", ": ", "cat ", "sh -c ", "let ", "declare ", "export ",
    "unset x ", "printf -v x ", "read x ", "test ", "{a,zap}", "${x:=zap}", "${!x}", "$((x))", "x[1]=", "$[", "$@", "\"$@\"", "$1", "set -- zap; ",
    "\u{a0}", "\u{b}", "é", "&>>", "{fd}>", " < secret", "$(<secret)", "cat secret", "sec", "\"${x-", "}\"", "'\"'", "\"'\"", "\\`", "\\\"", "\\$",
    "$(cat <<E\n", "\nE\n)", "=~ ", "(a|b)", " in ", ";&", "*) ", "a[0]=", "a+=(", "${a[", "]}", "<<\"E\"\n", "\n\tE\n", "<<- E\n", "elif ",
];

/// Returns the number of random commands.
fn fuzz_rounds() -> usize {
    let rounds = std::env::var("TOOLGATE_BASH").ok().and_then(|count| count.parse().ok());
    rounds.unwrap_or(if std::env::var_os("TOOLGATE_SOAK").is_some() { 300_000 } else { 5_000 })
}

struct CommandFuzzer(u64);

impl CommandFuzzer {
    fn next_below(&mut self, most: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % most.max(1)
    }

    fn pick<'t>(&mut self, all: &[&'t str]) -> &'t str {
        all[self.next_below(all.len())]
    }

    /// Creates a random command.
    fn random_command(&mut self) -> String {
        let mut text: Vec<char> = self.pick(SEED_COMMANDS).chars().collect();
        if self.next_below(4) == 0 {
            text.extend(
                self.pick(&["\n", "; ", " && ", " | "])
                    .chars()
                    .chain(self.pick(SEED_COMMANDS).chars()),
            );
        }
        for _ in 0..1 + self.next_below(5) {
            let at = self.next_below(text.len() + 1);
            let end = (at + 1 + self.next_below(6)).min(text.len());
            match self.next_below(6) {
                0 => drop(text.drain(at..end)),
                1 => {
                    let repeated: Vec<char> = text[at..end].to_vec();
                    let to = self.next_below(text.len() + 1);
                    text.splice(to..to, repeated);
                }
                _ => drop(text.splice(at..at, self.pick(MUTATION_TEXTS).chars())),
            }
        }
        text.into_iter().collect()
    }
}

/// The content of the file `secret`, which occurs nowhere else.
const SECRET_CONTENT: &str = "S3CR3T";

/// The user ID for commands if the test runs as root.
const NOBODY_USER_ID: u32 = 65_534;

/// A directory with one file and a few programs, where commands run.
struct BashTestbed {
    home: tempfile::TempDir,
    bash: PathBuf,
    is_root: bool,
}

/// Records whether a command ran the program, and whether it read or changed the file.
#[derive(Debug, PartialEq, Eq)]
struct BashRunEffects {
    has_run_program: bool,
    has_touched_file: bool,
}

impl BashTestbed {
    fn new() -> Self {
        let home = tempfile::tempdir().unwrap();
        let programs = home.path().join("programs");
        std::fs::create_dir(&programs).unwrap();
        let found = |name: &str| {
            ["/usr/bin", "/bin"]
                .iter()
                .map(|place| Path::new(place).join(name))
                .find(|path| path.exists())
                .unwrap()
        };
        for name in ["cat", "env", "true", "false", "xargs", "sleep"] {
            symlink(found(name), programs.join(name)).unwrap();
        }
        let bash = found("bash");
        symlink(&bash, programs.join("sh")).unwrap();
        let zap = programs.join("zap");
        std::fs::write(
            &zap,
            format!("#!/bin/sh\n: > '{}'\n", home.path().join("zapped").display()),
        )
        .unwrap();
        std::fs::set_permissions(&zap, std::fs::Permissions::from_mode(0o755)).unwrap();
        let testbed = Self { home, bash, is_root: rustix::process::geteuid().is_root() };
        testbed.chown_to_nobody(testbed.home.path());
        testbed.reset_working_directory();
        testbed
    }

    fn chown_to_nobody(&self, path: &Path) {
        if self.is_root {
            chown(path, Some(NOBODY_USER_ID), Some(NOBODY_USER_ID)).unwrap();
        }
    }

    /// Recreates the working directory, even if processes still use the last one.
    fn reset_working_directory(&self) {
        let directory = self.home.path().join("desk");
        for _ in 0..100 {
            let _ = std::fs::remove_dir_all(&directory);
            if std::fs::create_dir(&directory).is_ok() {
                break;
            }
        }
        std::fs::write(directory.join("secret"), SECRET_CONTENT).unwrap();
        self.chown_to_nobody(&directory);
        self.chown_to_nobody(&directory.join("secret"));
    }

    fn run(&self, text: &str) -> BashRunEffects {
        let (program_mark, directory, output_path) = (
            self.home.path().join("zapped"),
            self.home.path().join("desk"),
            self.home.path().join("said"),
        );
        let _ = std::fs::remove_file(&output_path);
        let out = std::fs::File::create(&output_path).unwrap();
        let mut command = Command::new(&self.bash);
        command.args(["--norc", "--noprofile", "-c", text]).env_clear().current_dir(&directory);
        command
            .env("PATH", self.home.path().join("programs"))
            .env("HOME", &directory)
            .env("FUNCNEST", "4");
        command.stdin(Stdio::null()).stderr(out.try_clone().unwrap()).stdout(out).process_group(0);
        if self.is_root {
            command.uid(NOBODY_USER_ID).gid(NOBODY_USER_ID);
        }
        let mut child = command.spawn().unwrap();
        let group = rustix::process::Pid::from_child(&child);
        let start = Instant::now();
        while child.try_wait().unwrap().is_none() && start.elapsed() < Duration::from_secs(2) {
            std::thread::sleep(Duration::from_micros(300));
        }
        // Background processes get little time.
        if text.contains('&')
            || text.contains("coproc")
            || text.contains(">(")
            || text.contains("<(")
        {
            std::thread::sleep(Duration::from_millis(5));
        }
        // Kill the process group until it is empty, or only zombies remain.
        for _ in 0..20 {
            let is_left =
                rustix::process::kill_process_group(group, rustix::process::Signal::KILL).is_ok();
            child.wait().unwrap();
            if !is_left {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let effects = BashRunEffects {
            has_run_program: std::fs::remove_file(program_mark).is_ok(),
            has_touched_file: std::fs::read_to_string(directory.join("secret")).ok().as_deref()
                != Some(SECRET_CONTENT)
                || std::fs::read(output_path)
                    .unwrap()
                    .windows(SECRET_CONTENT.len())
                    .any(|part| part == SECRET_CONTENT.as_bytes()),
        };
        if effects.has_touched_file || std::fs::read_dir(&directory).unwrap().count() != 1 {
            self.reset_working_directory();
        }
        effects
    }
}

/// Returns the commands that pass although they should not, and the number that passed.
fn find_undetected_commands(
    testbed: &BashTestbed,
    seed: u64,
    rounds: usize,
) -> (Vec<String>, usize) {
    let (mut fuzzer, mut leaks, mut tried) = (CommandFuzzer(seed.max(1)), Vec::new(), 0);
    // Check that the test detects the effects.
    assert_eq!(
        testbed.run("zap; echo a > secret"),
        BashRunEffects { has_run_program: true, has_touched_file: true }
    );
    assert_eq!(
        testbed.run("cat secret"),
        BashRunEffects { has_run_program: false, has_touched_file: true }
    );
    assert_eq!(
        testbed.run("echo zap secret; : > other"),
        BashRunEffects { has_run_program: false, has_touched_file: false }
    );
    for _ in 0..rounds {
        let text = fuzzer.random_command();
        let shell = ShellAnalysis::analyze(&text);
        if shell.first_opaque_reason().is_some() {
            continue;
        }
        let runs = text.contains('z') && shell.match_program("zap") == Certainty::No;
        let touches = text.contains("se")
            && shell.match_paths(&[PathPattern::new("secret", "/home/ann")], false, true, None)
                == Certainty::No;
        if runs || touches {
            tried += 1;
            // Run the command twice, because a background process of an earlier command may cause
            // the effect.
            let is_leak = |effects: BashRunEffects| {
                (effects.has_run_program && runs) || (effects.has_touched_file && touches)
            };
            if is_leak(testbed.run(&text)) && is_leak(testbed.run(&text)) {
                leaks.push(text);
            }
        }
    }
    assert!(testbed.run("zap").has_run_program, "the test environment is damaged");
    (leaks, tried)
}

#[test]
fn effects_of_bash_are_detected_or_doubted() {
    let seed: u64 = std::env::var("TOOLGATE_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or(0x9e37_79b9_7f4a_7c15);
    let (half, testbeds) = (fuzz_rounds() / 2, [BashTestbed::new(), BashTestbed::new()]);
    let (first, second) = std::thread::scope(|threads| {
        let first = threads.spawn(|| find_undetected_commands(&testbeds[0], seed, half));
        (find_undetected_commands(&testbeds[1], !seed, half), first.join().unwrap())
    });
    let (found, tried) = ([first.0, second.0].concat(), first.1 + second.1);
    println!("{tried} of {} commands passed and were run", fuzz_rounds());
    assert!(tried > fuzz_rounds() / 100, "too few commands pass: {tried}");
    assert!(
        found.is_empty(),
        "{} commands pass but should not: {:#?}",
        found.len(),
        &found[..found.len().min(40)]
    );
}
