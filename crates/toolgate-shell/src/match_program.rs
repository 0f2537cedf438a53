//! Matches commands against program patterns such as `git push --force*`.

use crate::nested_command::can_run_match;
use crate::word::{Certainty, ShellWord, WordPart, combine_certainty};

use crate::{ShellAnalysis, ShellCommand, base_name, skip_git_options};

/// Returns whether words are a command that matches the wanted words.
fn match_command(words: &[ShellWord], pattern: &[&str]) -> Certainty {
    let (Some((program, rest)), Some((first, words))) =
        (pattern.split_first(), words.split_first())
    else {
        return Certainty::No;
    };
    // `git-push` is `git push`.
    if *program == "git"
        && let Some(verb) = first.text().map(base_name).and_then(|name| name.strip_prefix("git-"))
    {
        let words: Vec<ShellWord> = [ShellWord::known("git"), ShellWord::known(verb)]
            .into_iter()
            .chain(words.iter().cloned())
            .collect();
        return match_command(&words, pattern);
    }
    let certainty =
        combine_certainty(first.spellings().iter().map(|spelling| match spelling.as_slice() {
            [WordPart::Text(name)] => ShellWord::known(base_name(name)).match_pattern(program),
            [.., WordPart::Text(end)] if end.contains('/') => {
                ShellWord::known(base_name(end)).match_pattern(program)
            }
            _ => Certainty::Maybe,
        }));
    if certainty == Certainty::No {
        return Certainty::No;
    }
    let (flags, rest): (Vec<&str>, Vec<&str>) = rest.iter().partition(|word| is_flag_cluster(word));
    let flags = flags.iter().map(|flags| match_flags(words, flags)).min().unwrap_or(Certainty::Yes);
    // The subcommand of `git` is its first word that is not an option.
    let words = if *program == "git" { skip_git_options(words) } else { words };
    // These subcommands do the same as `git push`.
    let pushes = |word: &ShellWord| matches!(word.text(), Some("send-pack" | "http-push"));
    if *program == "git" && rest.first() == Some(&"push") && words.first().is_some_and(pushes) {
        return certainty.min(flags).min(match_in_order(rest.get(1..).unwrap_or_default(), words));
    }
    let verb = match (rest.first(), words.first()) {
        (Some(verb), Some(word)) if *program == "git" => {
            word.match_pattern(verb).max(if word.can_split && word.is_unknown() {
                Certainty::Maybe
            } else {
                Certainty::No
            })
        }
        (Some(_), None) if *program == "git" => Certainty::No,
        _ => Certainty::Yes,
    };
    certainty.min(flags).min(verb).min(match_in_order(&rest, words))
}

fn match_flags(words: &[ShellWord], pattern: &str) -> Certainty {
    // For `-r$x`, the beginning is known.
    let known_flags = |word: &ShellWord| match word.spellings() {
        [spelling] => match spelling.first() {
            Some(WordPart::Text(text)) => flag_letters(text),
            _ => None,
        },
        _ => None,
    };
    let flags: String = words.iter().filter_map(known_flags).collect::<String>().to_lowercase();
    if pattern.to_lowercase().chars().skip(1).all(|flag| flags.contains(flag)) {
        return Certainty::Yes;
    }
    // File names rarely look like flags.
    let open = |word: &ShellWord| {
        word.is_unknown()
            || (word.text().is_none()
                && word.match_pattern("-*") == Certainty::Maybe
                && !word.is_pattern())
    };
    // A single word cannot be both a flag and its operand.
    let operands =
        words.iter().filter(|word| word.text().is_none_or(|text| !text.starts_with('-'))).count();
    if words.iter().any(|word| open(word) && (word.can_split || operands > 1)) {
        Certainty::Maybe
    } else {
        Certainty::No
    }
}

/// Returns whether a word is a set of flags: `-rf`, but not `--force`, `-delete` or `-`.
fn is_flag_cluster(word: &str) -> bool {
    word.strip_prefix('-').is_some_and(|flags| {
        (1..=3).contains(&flags.len()) && flags.chars().all(char::is_alphabetic)
    })
}

/// Returns the flags of a word: those of `-rf`, and `f` for `--force`.
fn flag_letters(word: &str) -> Option<String> {
    match word.strip_prefix("--") {
        Some(long) => {
            let known = [
                ("recursive", 'r'),
                ("force", 'f'),
                ("delete", 'd'),
                ("all", 'a'),
                ("interactive", 'i'),
                ("hard", 'h'),
            ];
            // Programs accept abbreviated options: `rm --rec`.
            let is_abbreviation =
                |name: &str| long.starts_with(name) || (!long.is_empty() && name.starts_with(long));
            known.iter().find(|(name, _)| is_abbreviation(name)).map(|(_, flag)| flag.to_string())
        }
        None => word.strip_prefix('-').map(str::to_owned),
    }
}

/// Returns whether words follow each other in this order, with others in between.
fn match_in_order(pattern_words: &[&str], words: &[ShellWord]) -> Certainty {
    let least = |level: Certainty| {
        let mut words = words.iter();
        pattern_words
            .iter()
            .all(|pattern_words| words.any(|word| word.match_pattern(pattern_words) >= level))
    };
    if least(Certainty::Yes) {
        Certainty::Yes
    // A word that may expand to several words can be all wanted words.
    } else if least(Certainty::Maybe)
        || words.iter().any(|word| word.can_split && word.is_unknown())
    {
        Certainty::Maybe
    } else {
        Certainty::No
    }
}

impl ShellAnalysis {
    /// Returns whether the command runs a program followed by words in the order of `pattern`.
    ///
    /// A word such as `-rf` is a set of flags.
    pub fn match_program(&self, pattern: &str) -> Certainty {
        let pattern_words: Vec<&str> = pattern.split_whitespace().collect();
        let match_either = |command: &ShellCommand| {
            match_command(&command.words, &pattern_words)
                .max(can_run_match(command, |words| match_command(words, &pattern_words)))
        };
        // A guessed script may not run at all.
        let script = |script: &ShellCommand| {
            match_command(&script.words, &pattern_words).min(if script.is_guessed {
                Certainty::Maybe
            } else {
                Certainty::Yes
            })
        };
        self.commands
            .iter()
            .map(match_either)
            .chain(self.scripts.iter().map(script))
            .max()
            .unwrap_or(Certainty::No)
    }
}
