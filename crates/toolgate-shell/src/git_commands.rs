//! Analyzes the commands that options and subcommands of `git` run.

use crate::nested_command::analyze_joined_words;
use crate::nesting_budget::NestingBudget;
use crate::program::options::{known_prefix, split_name_value};
use crate::program::tables::{
    FILE_CHANGING_GIT_SUBCOMMANDS, HARMLESS_GIT_SETTINGS, HARMLESS_VARIABLE_VALUES,
};
use crate::word::ShellWord;
use crate::{ShellAnalysis, parse, skip_git_options};

/// Subcommands of `git` that write files to the work tree, in addition to those that remove files.
const WORK_TREE_SUBCOMMANDS: &[&str] =
    &["am", "cherry-pick", "merge", "pull", "read-tree", "rebase", "revert", "switch"];

/// Analyzes the commands that options and subcommands of `git` run.
pub(crate) fn analyze_git(words: &[ShellWord], depth: NestingBudget<'_>) -> ShellAnalysis {
    let mut found = ShellAnalysis::default();
    let other = || "`git` is configured to run another program".to_owned();
    let is_safe_setting = |setting: &str| {
        let (key, value) = split_name_value(setting);
        let key = key.to_ascii_lowercase();
        let is_display_setting =
            ["color.", "advice."].iter().any(|of| key.starts_with(of)) && !key.contains('/');
        HARMLESS_GIT_SETTINGS.contains(&key.as_str())
            || is_display_setting
            || (key == "core.pager"
                && value.is_some_and(|value| HARMLESS_VARIABLE_VALUES.contains(&value)))
    };
    let texts: Vec<Option<&str>> = words.iter().map(ShellWord::text).collect();
    let verb_at = words.len() - skip_git_options(words).len();
    let verb = texts.get(verb_at).copied().flatten();
    let can_be_verb = |verbs: &[&str]| verb.is_none_or(|verb| verbs.contains(&verb));
    // These options select the files of another repository, or another directory for its own files.
    let selects_repository =
        |word: &&str| word.starts_with("--work-tree") || word.starts_with("--git-dir");
    let changes_files = FILE_CHANGING_GIT_SUBCOMMANDS
        .iter()
        .chain(WORK_TREE_SUBCOMMANDS)
        .any(|verb| can_be_verb(&[*verb]));
    if changes_files
        && verb_at < words.len()
        && texts.iter().take(verb_at).flatten().any(selects_repository)
    {
        found.opaque_reasons.push(other());
    }
    // `git` copies the template directory, which may contain hooks.
    let is_template = |word: &ShellWord| {
        let (name, _) = split_name_value(known_prefix(word).0);
        name.len() > 2 && "--template".starts_with(name)
    };
    if can_be_verb(&["clone", "init"]) && words.iter().any(is_template) {
        found.opaque_reasons.push(other());
    }
    for (at, text) in texts.iter().enumerate() {
        let next = texts.get(at + 1).copied().flatten();
        let text = text.unwrap_or_default();
        // The result is the first letter of a cluster that takes a value.
        let valued_flag = |letters: &str| {
            let flags =
                text.strip_prefix('-').filter(|flags| !flags.starts_with('-') && at > verb_at)?;
            flags.chars().find(|flag| letters.contains(*flag))
        };
        let accepts_setting = at < verb_at || can_be_verb(&["clone"]);
        match text {
            "--config" if !next.is_some_and(is_safe_setting) => found.opaque_reasons.push(other()),
            "-c" if accepts_setting && !next.is_some_and(is_safe_setting) => {
                found.opaque_reasons.push(other())
            }
            long if long.starts_with("--config=")
                && !is_safe_setting(long.get(9..).unwrap_or_default()) =>
            {
                found.opaque_reasons.push(other())
            }
            glued
                if accepts_setting
                    && glued.starts_with("-c")
                    && glued.len() > 2
                    && !is_safe_setting(glued.get(2..).unwrap_or_default()) =>
            {
                found.opaque_reasons.push(other())
            }
            cluster
                if can_be_verb(&["clone"])
                    && matches!(valued_flag("bcjou"), Some('c' | 'u'))
                    && !cluster.starts_with("-c") =>
            {
                found.opaque_reasons.push(other())
            }
            _ if can_be_verb(&["grep"]) && valued_flag("ABCOefm") == Some('O') => {
                found.opaque_reasons.push(other())
            }
            "-x" if can_be_verb(&["difftool", "rebase"]) => match next {
                Some(code) => found.merge(parse::analyze_text(code, depth.nested())),
                None => found.opaque_reasons.push(other()),
            },
            _ if can_be_verb(&["difftool", "rebase"]) && valued_flag("CSXsx") == Some('x') => {
                found.opaque_reasons.push(other())
            }
            "filter-branch" | "difftool" | "mergetool" | "for-each-repo" | "remote-ext"
            | "remote-fd" | "shell" => found.opaque_reasons.push(other()),
            "bisect" | "submodule" | "rebase"
                if words.get(at + 1).is_some_and(|next| next.text().is_none()) =>
            {
                found.opaque_reasons.push(other())
            }
            "run" | "foreach" => {
                found.merge(analyze_joined_words(words.get(at + 1..).unwrap_or_default(), depth));
                break;
            }
            "config" => {
                // Ask in three cases: another file is used, a comment or old value may look like a
                // key, or a section is renamed.
                let is_value = |word: &str| {
                    let (name, _) = split_name_value(word);
                    name.len() > 2 && "--value".starts_with(name)
                };
                let is_odd = |word: &&str| {
                    ["-f", "--fil", "--com", "--ren"].iter().any(|option| word.starts_with(option))
                };
                if texts.iter().flatten().any(|word| is_odd(word) || is_value(word)) {
                    found.opaque_reasons.push(other());
                }
                let plain = texts
                    .get(at + 1..)
                    .unwrap_or_default()
                    .iter()
                    .filter(|word| word.is_none_or(|word| !word.starts_with('-')));
                // Newer versions of `git config` have subcommands.
                let is_verb =
                    |word: &Option<&str>| matches!(word, Some("get" | "list" | "set" | "unset"));
                let plain =
                    plain.clone().skip(usize::from(plain.clone().next().is_some_and(is_verb)));
                let (count, key) = (plain.clone().count(), plain.clone().next().copied().flatten());
                if count > 1 && !key.is_some_and(is_safe_setting) {
                    found.opaque_reasons.push(other());
                }
            }
            _ => {}
        }
    }
    found
}
