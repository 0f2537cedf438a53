//! Runs toolgate in a temporary home directory.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use assert_cmd::Command;
use assert_cmd::cargo::CommandCargoExt;
use regex::Regex;
use serde_json::Value;

use super::hook_event;

/// A temporary home directory with a project.
pub(crate) struct TestProject {
    directory: tempfile::TempDir,
}

impl TestProject {
    pub(crate) fn new() -> Self {
        let project = Self { directory: tempfile::tempdir().unwrap() };
        std::fs::create_dir_all(project.path("project")).unwrap();
        project
    }

    pub(crate) fn with_config(config: &str) -> Self {
        let project = Self::new();
        project.write("project/toolgate.toml", config);
        project
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    /// Writes an executable file.
    pub(crate) fn write_script(&self, name: &str, text: &str) {
        self.write(name, text);
        std::fs::set_permissions(self.path(name), std::fs::Permissions::from_mode(0o755)).unwrap();
    }

    pub(crate) fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }

    pub(crate) fn set_environment(&self, command: &mut std::process::Command) {
        command
            .current_dir(self.path("project"))
            .env_clear()
            .env("HOME", self.path(""))
            .env("PATH", "/usr/bin:/bin");
    }

    pub(crate) fn run(&self, args: &[&str], input: &str) -> (i32, String, String) {
        self.run_with(&[], args, input)
    }

    pub(crate) fn run_with(
        &self,
        variables: &[(&str, &str)],
        args: &[&str],
        input: &str,
    ) -> (i32, String, String) {
        let mut command = std::process::Command::cargo_bin("toolgate").unwrap();
        self.set_environment(&mut command);
        command.envs(variables.iter().copied());
        let output = Command::from_std(command).args(args).write_stdin(input).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
    }

    /// Returns the exit code and output of a verb with masked ids, times and paths.
    pub(crate) fn masked_output(&self, args: &[&str], input: &str) -> String {
        let (code, stdout, stderr) = self.run(args, input);
        let text = format!("exit {code}\n{stdout}{stderr}")
            .replace(self.directory.path().to_str().unwrap(), "HOME");
        let mask = |pattern: &str, to: &str, text: &str| {
            Regex::new(pattern).unwrap().replace_all(text, to).into_owned()
        };
        let text =
            mask("[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "CALL", &text);
        let text = mask("[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:]{8}Z", "TIME", &text);
        let text = mask(r"[^ \x22']*/toolgate(-hook)?(['\x22 ,])", "TOOLGATE$1$2", &text);
        mask(r"in [0-9.]+(µs|ms|s)\b", "in LENGTH", &text)
    }

    /// Sends an event, and returns the answer.
    pub(super) fn run_hook(&self, event: &Value) -> Value {
        self.run_hook_with(&["hook", "--config", "toolgate.toml"], event)
    }

    pub(crate) fn run_hook_with(&self, args: &[&str], event: &Value) -> Value {
        let (code, stdout, stderr) = self.run(args, &event.to_string());
        assert_eq!((code, stderr.as_str()), (0, ""), "{event}");
        serde_json::from_str(&stdout).unwrap()
    }

    pub(crate) fn pre_tool_use(&self, id: &str, tool: &str, input: Value) -> Value {
        self.run_hook(&hook_event("PreToolUse", id, tool, input))
    }

    pub(super) fn exported_rows(&self) -> Vec<Value> {
        let (_, stdout, stderr) = self.run(&["audit", "export", "--store", "ledger.db"], "");
        assert_eq!(stderr, "");
        stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    pub(super) fn recorded_outcomes(&self) -> Vec<(String, String)> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let row = |row: &Value| {
            (text(&row["row"]["decision"]), text(&row["row"]["outcome"]["error"]["code"]))
        };
        let plain = |row: &Value| (text(&row["decision"]), text(&row["outcome"]["error"]["code"]));
        self.exported_rows()
            .iter()
            .map(|line| if line["row"].is_object() { row(line) } else { plain(line) })
            .collect()
    }
}
