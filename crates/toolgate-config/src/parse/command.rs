//! Reads the programs of hooks and command tools, and their secrets.

use std::path::PathBuf;

use crate::config::ConfigReader;
use toolgate::hook::CommandHook;
use toolgate::policy::Diagnostic;
use toolgate::policy::source::table_reader::TomlTable;

impl ConfigReader<'_> {
    /// Resolves a program. A program with a path is part of the configuration's files.
    pub(crate) fn resolve_program(&self, program: &str) -> PathBuf {
        if !program.contains('/') {
            return program.into();
        }
        let path = self.base_dir.join(program);
        self.included_files.borrow_mut().push(path.clone());
        path
    }

    /// Records files among the arguments, such as a script. Relative paths may start from the
    /// working directory or from this file.
    pub(crate) fn record_files_in_args(&self, words: &[&str]) {
        let places = words.iter().flat_map(|word| [PathBuf::from(word), self.base_dir.join(word)]);
        self.referenced_files
            .borrow_mut()
            .program_args
            .extend(places.filter(|place| place.is_file()));
    }

    /// Reads a hook: a program that runs before tools, after them, or both.
    pub(crate) fn read_hook(&self, table: &TomlTable<'_>) -> Option<CommandHook> {
        let (name, program) = (table.text("name"), table.text("command"));
        for (key, example) in
            [("name", "name = \"refund_policy\""), ("command", "command = \"./refund-policy\"")]
        {
            if !table.has_key(key) {
                table.report(
                    key,
                    Diagnostic::new(format!("a hook needs a `{key}`"))
                        .with_help(format!("like `{example}`")),
                );
            }
        }
        // A program with a path is relative to this file; any other is searched in `PATH`.
        let program = program.map(|program| self.resolve_program(program));
        let mut hook = CommandHook::new(name.unwrap_or_default(), program.unwrap_or_default());
        let words = table.names("args").unwrap_or_default();
        self.record_files_in_args(&words);
        hook = words.into_iter().fold(hook, CommandHook::arg);
        hook = table
            .names("inherit_env")
            .unwrap_or_default()
            .into_iter()
            .fold(hook, |hook, name| hook.inherit(name));
        if let Some(env) = table.table("env") {
            for name in env.keys() {
                if let Some((value, hidden)) = self.read_secret(&env, &name) {
                    hook =
                        hidden.into_iter().fold(hook.env(&name, value), CommandHook::redact_value);
                }
            }
        }
        if let Some(tools) = table.names("tools") {
            hook = hook.tools(&tools.join("|"));
        }
        if let Some(timeout) = table.positive_std_duration("timeout") {
            hook = hook.timeout(timeout);
        }
        match table.keyword(
            "when",
            &[("before", (true, false)), ("after", (false, true)), ("both", (true, true))],
        ) {
            Some((true, true)) => hook = hook.before().after(),
            Some((false, _)) => hook = hook.after(),
            _ => hook = hook.before(),
        }
        table.reject_unknown_keys("a hook");
        (name.is_some() && table.has_key("command")).then_some(hook)
    }
}
