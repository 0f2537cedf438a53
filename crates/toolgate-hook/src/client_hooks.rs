//! Edits the settings files of clients: adds, finds and removes the hooks of toolgate.

use std::io;
use std::path::{Path, PathBuf};

use jsonc_parser::ParseOptions;
use jsonc_parser::cst::{CstInputValue, CstObject, CstRootNode};
use serde_json::Value;

/// Programs that are installed in one directory.
pub(crate) const TOOLGATE_PROGRAMS: [&str; 2] = ["toolgate", "toolgate-hook"];

/// A client that `toolgate init` can configure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum SupportedClient {
    /// Claude Code, through hooks.
    ClaudeCode,
    /// Codex, through hooks.
    Codex,
    /// Cursor, through hooks.
    Cursor,
    /// Claude Desktop, as an MCP server.
    ClaudeDesktop,
    /// VS Code, through hooks.
    Vscode,
}

impl SupportedClient {
    pub(crate) const ALL: [Self; 5] =
        [Self::ClaudeCode, Self::Codex, Self::Cursor, Self::ClaudeDesktop, Self::Vscode];
    /// Clients that support hooks.
    pub const ALL_WITH_HOOKS: [Self; 4] =
        [Self::ClaudeCode, Self::Codex, Self::Cursor, Self::Vscode];

    /// Returns the name of the client on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ClaudeCode => "claude-code",
            Self::Codex => "codex",
            Self::Cursor => "cursor",
            Self::ClaudeDesktop => "claude-desktop",
            Self::Vscode => "vscode",
        }
    }

    /// Returns the settings file with the hooks or servers of a project, or of the user.
    pub fn settings_file(self, project: Option<&Path>) -> io::Result<PathBuf> {
        let home = || {
            crate::effective_config::home_dir().ok_or_else(|| io::Error::other("no home directory"))
        };
        let dir_from_variable = |variable: &str, default_dir: &str| match std::env::var_os(variable)
            .filter(|path| !path.is_empty())
        {
            Some(path) => Ok(PathBuf::from(path)),
            None => home().map(|home| home.join(default_dir)),
        };
        Ok(match (self, project) {
            (Self::ClaudeCode, Some(project)) => project.join(".claude/settings.json"),
            (Self::ClaudeCode, None) => {
                dir_from_variable("CLAUDE_CONFIG_DIR", ".claude")?.join("settings.json")
            }
            (Self::Codex, Some(project)) => project.join(".codex/hooks.json"),
            (Self::Codex, None) => dir_from_variable("CODEX_HOME", ".codex")?.join("hooks.json"),
            (Self::Cursor, Some(project)) => project.join(".cursor/hooks.json"),
            (Self::Cursor, None) => home()?.join(".cursor/hooks.json"),
            (Self::Vscode, Some(project)) => project.join(".github/hooks/toolgate.json"),
            (Self::Vscode, None) => home()?.join(".copilot/hooks/toolgate.json"),
            // Claude Desktop has one file for all projects.
            (Self::ClaudeDesktop, _) => {
                let default_dir = if cfg!(target_os = "macos") {
                    "Library/Application Support"
                } else {
                    ".config"
                };
                let base = if cfg!(target_os = "macos") {
                    home()?.join(default_dir)
                } else {
                    dir_from_variable("XDG_CONFIG_HOME", default_dir)?
                };
                base.join("Claude/claude_desktop_config.json")
            }
        })
    }

    const fn hook_events(self) -> &'static [&'static str] {
        match self {
            Self::ClaudeCode => {
                &["PreToolUse", "PostToolUse", "PostToolUseFailure", "SessionStart", "SessionEnd"]
            }
            Self::Codex => &["PreToolUse", "PostToolUse", "SessionStart", "SessionEnd"],
            Self::Cursor => {
                &["preToolUse", "postToolUse", "postToolUseFailure", "sessionStart", "sessionEnd"]
            }
            Self::Vscode => &["PreToolUse", "PostToolUse", "SessionStart"],
            Self::ClaudeDesktop => &[],
        }
    }

    /// Returns the name in toolgate of the client's shell tool.
    pub const fn shell_tool(self) -> &'static str {
        match self {
            Self::ClaudeCode | Self::Codex | Self::ClaudeDesktop => "bash",
            Self::Cursor => "shell",
            Self::Vscode => "run_in_terminal",
        }
    }

    /// Returns the Claude Code settings files of the project and the user that can disable all
    /// hooks.
    pub fn hook_disabling_files(project: &Path) -> Vec<PathBuf> {
        let settings =
            [Self::ClaudeCode.settings_file(Some(project)), Self::ClaudeCode.settings_file(None)];
        settings
            .into_iter()
            .flatten()
            .chain([project.join(".claude/settings.local.json")])
            .collect()
    }

    /// Returns the managed settings files of Claude Code, which override users and projects.
    ///
    /// A later file overrides the earlier ones.
    pub fn managed_settings_files() -> Vec<PathBuf> {
        let configured =
            std::env::var_os("TOOLGATE_MANAGED_SETTINGS").filter(|path| !path.is_empty());
        let directory = configured.map_or_else(|| PathBuf::from("/etc/claude-code"), PathBuf::from);
        let is_part = |path: &PathBuf| {
            let name = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
            name.ends_with(".json") && !name.starts_with('.')
        };
        let parts =
            std::fs::read_dir(directory.join("managed-settings.d")).into_iter().flatten().flatten();
        let mut files: Vec<PathBuf> = parts.map(|part| part.path()).filter(is_part).collect();
        files.sort();
        files.insert(0, directory.join("managed-settings.json"));
        files
    }

    /// Returns the name of the event that precedes a tool call.
    pub const fn before_tool_event(self) -> &'static str {
        if matches!(self, Self::Cursor) { "preToolUse" } else { "PreToolUse" }
    }

    /// Returns how the client starts the hook: a program with arguments, or one shell command line.
    fn hook_command(self, program: &str) -> (String, Option<Vec<&'static str>>) {
        let words: &[&str] =
            if is_hook_program(program) { &["--client"] } else { &["hook", "--client"] };
        match self {
            Self::ClaudeCode => {
                (program.to_owned(), Some(words.iter().copied().chain([self.name()]).collect()))
            }
            _ => (format!("{} {} {}", shell_quote(program), words.join(" "), self.name()), None),
        }
    }

    fn hook_entry(self, program: &str) -> CstInputValue {
        let text = |text: &str| CstInputValue::String(text.to_owned());
        let pair = |key: &str, value: CstInputValue| (key.to_owned(), value);
        let (command, words) = self.hook_command(program);
        let mut entry = vec![pair("command", text(&command))];
        entry.extend(words.map(|words| {
            pair("args", CstInputValue::Array(words.into_iter().map(text).collect()))
        }));
        entry.push(pair("timeout", CstInputValue::Number("10".to_owned())));
        match self {
            Self::Cursor => entry.push(pair("failClosed", CstInputValue::Bool(true))),
            _ => entry.insert(0, pair("type", text("command"))),
        }
        if self == Self::ClaudeCode {
            entry.push(pair("onFailure", text("block")));
        }
        CstInputValue::Object(entry)
    }

    /// Returns whether an entry starts the hook exactly as `init` would write it.
    pub fn is_entry_as_written(self, entry: &Value, program: &str) -> bool {
        let (command, words) = self.hook_command(program);
        entry.get("command") == Some(&command.into())
            && entry.get("args") == words.map(Value::from).as_ref()
    }

    /// Returns the file with the hooks of toolgate added and everything else unchanged.
    pub fn with_hooks(self, text: &str, program: &str) -> Result<String, String> {
        let root = parse_settings(text)?;
        let root_object = root
            .object_value_or_create()
            .ok_or("not a JSON object; replace it with `{}` or move it away")?;
        remove_hook_entries(&root_object);
        if self == Self::Cursor && root_object.get("version").is_none() {
            root_object.append("version", CstInputValue::Number("1".to_owned()));
        }
        let hooks =
            root_object.object_value_or_create("hooks").ok_or("`hooks` is not an object")?;
        for event in self.hook_events() {
            let list = hooks
                .array_value_or_create(event)
                .ok_or_else(|| format!("`hooks.{event}` is not a list"))?;
            list.ensure_multiline();
            let entry = self.hook_entry(program);
            list.append(match self {
                Self::ClaudeCode | Self::Codex => CstInputValue::Object(vec![
                    ("matcher".to_owned(), CstInputValue::String("*".to_owned())),
                    ("hooks".to_owned(), CstInputValue::Array(vec![entry])),
                ]),
                _ => entry,
            });
        }
        Ok(serialize_settings(&root, text))
    }

    /// Returns the file without the hooks of toolgate.
    pub fn without_hooks(text: &str) -> Result<String, String> {
        let root = parse_settings(text)?;
        if let Some(root_object) = root.object_value() {
            remove_hook_entries(&root_object);
        }
        Ok(serialize_settings(&root, text))
    }

    /// Returns why the client ignores the whole file, including all of its hooks.
    ///
    /// Claude Code and Codex ignore a file that is not strict JSON. Claude Code also ignores a file
    /// with a malformed hook entry of any program.
    pub fn ignored_file_reason(self, text: &str) -> Option<String> {
        if !matches!(self, Self::ClaudeCode | Self::Codex) {
            return None;
        }
        let file: Value = match serde_json::from_str(text.trim_start_matches('\u{feff}')) {
            Ok(file) => file,
            Err(error) => {
                return Some(format!("comments and trailing commas are not allowed: {error}"));
            }
        };
        let hooks =
            file.get("hooks").and_then(Value::as_object).filter(|_| self == Self::ClaudeCode);
        for (event, groups) in hooks.into_iter().flatten() {
            for (index, group) in groups.as_array().into_iter().flatten().enumerate() {
                if !group.get("hooks").is_some_and(Value::is_array) {
                    return Some(format!("`hooks.{event}[{index}]` has no list of `hooks`"));
                }
                if group.get("matcher").is_some_and(|matcher| !matcher.is_string()) {
                    return Some(format!(
                        "`hooks.{event}[{index}]` has a `matcher` that is not a string"
                    ));
                }
            }
        }
        None
    }

    /// Returns the hook entries of toolgate: event, program, and the entry as written.
    pub fn find_hook_entries(text: &str) -> Result<Vec<(String, String, Value)>, String> {
        let file = parse_settings_json(text)?;
        let mut found = Vec::new();
        for (event, list) in file.get("hooks").and_then(Value::as_object).into_iter().flatten() {
            for item in list.as_array().into_iter().flatten() {
                let entries = item
                    .get("hooks")
                    .and_then(Value::as_array)
                    .map_or_else(|| vec![item], |inner| inner.iter().collect());
                for entry in entries {
                    if let Some(program) = toolgate_program_of(entry) {
                        // The matcher of the group applies to each entry in it.
                        let mut entry = entry.clone();
                        if let (Some(matcher), Some(entry)) =
                            (item.get("matcher"), entry.as_object_mut())
                        {
                            entry.insert("matcher".to_owned(), matcher.clone());
                        }
                        found.push((event.clone(), program, entry));
                    }
                }
            }
        }
        Ok(found)
    }
}

/// Parses a settings file, which may contain comments.
pub fn parse_settings(text: &str) -> Result<CstRootNode, String> {
    let text = text.trim_start_matches('\u{feff}');
    let text = if text.trim().is_empty() { "{}" } else { text };
    let root = CstRootNode::parse(text, &JSONC_PARSE_OPTIONS).map_err(|error| error.to_string())?;
    let Some(root_object) = root.object_value() else { return Ok(root) };
    if duplicate_keys(&root_object).iter().any(|name| name == "hooks") {
        return Err("duplicate key `hooks`; merge the two".to_owned());
    }
    match root_object
        .object_value("hooks")
        .and_then(|hooks| duplicate_keys(&hooks).into_iter().next())
    {
        Some(event) => Err(format!("duplicate key `hooks.{event}`; merge the two")),
        None => Ok(root),
    }
}

/// JSON with comments and trailing commas, which some clients accept. No client accepts more.
const JSONC_PARSE_OPTIONS: ParseOptions = ParseOptions {
    allow_comments: true,
    allow_trailing_commas: true,
    allow_loose_object_property_names: false,
    allow_missing_commas: false,
    allow_single_quoted_strings: false,
    allow_hexadecimal_numbers: false,
    allow_unary_plus_numbers: false,
    allow_bare_decimal_point_numbers: false,
    allow_non_finite_numbers: false,
    allow_extended_string_escapes: false,
};

/// Returns the duplicate keys of an object.
///
/// Some programs read the first of two values and some the last.
fn duplicate_keys(object: &CstObject) -> Vec<String> {
    let names: Vec<String> =
        object.properties().iter().filter_map(|property| property.decoded_name()).collect();
    names
        .iter()
        .enumerate()
        .filter(|(index, name)| names.iter().take(*index).any(|earlier| earlier == *name))
        .map(|(_, name)| name.clone())
        .collect()
}

/// Returns whether a settings file has no content that the user would miss.
pub fn is_settings_file_empty(text: &str) -> bool {
    let is_negligible = |(key, value): (&String, &Value)| match key.as_str() {
        "version" => *value == 1,
        "mcpServers" => value.as_object().is_some_and(serde_json::Map::is_empty),
        _ => false,
    };
    let has_no_content =
        |file: &Value| file.as_object().is_some_and(|file| file.iter().all(is_negligible));
    !text.contains("//")
        && !text.contains("/*")
        && parse_settings_json(text).is_ok_and(|file| has_no_content(&file))
}

/// Parses a settings file as JSON without its comments.
pub fn parse_settings_json(text: &str) -> Result<Value, String> {
    Ok(parse_settings(text)?.to_serde_value().unwrap_or_default())
}

/// Serializes a file, and keeps its byte order mark and its final line break or lack of one.
pub fn serialize_settings(root: &CstRootNode, before: &str) -> String {
    let text = root.to_string();
    let marks: String = before.chars().take_while(|character| *character == '\u{feff}').collect();
    let is_new = before.trim_start_matches('\u{feff}').trim().is_empty();
    let end = if is_new && !text.ends_with('\n') { "\n" } else { "" };
    format!("{marks}{text}{end}")
}

/// Returns whether a program is one of the two that only answer hooks.
pub fn is_hook_program(program: &str) -> bool {
    Path::new(program).file_name().is_some_and(|name| name == "toolgate-hook")
}

/// Returns the program that clients start for hooks: `toolgate-hook` if it is next to this program.
pub fn find_hook_program() -> io::Result<PathBuf> {
    let current = std::env::current_exe()?;
    let hook_program = current.with_file_name("toolgate-hook");
    Ok(if hook_program.is_file() { hook_program } else { current })
}

/// Returns the program of a hook entry if it is toolgate.
fn toolgate_program_of(entry: &Value) -> Option<String> {
    let command = entry.get("command")?.as_str()?;
    let args = entry.get("args").and_then(Value::as_array);
    let program = match args {
        Some(_) => command.to_owned(),
        None => match command.strip_prefix('\'') {
            Some(rest) => rest.split('\'').next()?.to_owned(),
            None => command.split_whitespace().next()?.to_owned(),
        },
    };
    if is_hook_program(&program) {
        return Some(program);
    }
    let has_hook_argument = match args {
        Some(args) => args.first().and_then(Value::as_str) == Some("hook"),
        None => {
            let after_program = command
                .strip_prefix('\'')
                .map_or(command.split_once(char::is_whitespace), |rest| rest.split_once('\''))
                .map(|(_, rest)| rest);
            after_program.and_then(|rest| rest.split_whitespace().next()) == Some("hook")
        }
    };
    let is_toolgate = Path::new(&program).file_name().is_some_and(|name| name == "toolgate");
    (is_toolgate && has_hook_argument).then_some(program)
}

/// Removes the entries of toolgate, and the groups and lists that become empty.
fn remove_hook_entries(root_object: &CstObject) {
    let Some(hooks) = root_object.object_value("hooks") else { return };
    for event in hooks.properties() {
        let Some(list) = event.array_value() else { continue };
        let before = list.elements().len();
        for item in list.elements() {
            let Some(group) = item.as_object() else { continue };
            match group.array_value("hooks") {
                Some(inner) => {
                    let entry_count = inner.elements().len();
                    for entry in inner.elements() {
                        if entry.to_serde_value().as_ref().and_then(toolgate_program_of).is_some() {
                            entry.remove();
                        }
                    }
                    if entry_count > 0 && inner.elements().is_empty() {
                        group.remove();
                    }
                }
                None if item.to_serde_value().as_ref().and_then(toolgate_program_of).is_some() => {
                    group.remove()
                }
                None => {}
            }
        }
        if before > 0 && list.elements().is_empty() {
            event.remove();
        }
    }
    if hooks.properties().is_empty()
        && let Some(hooks) = root_object.get("hooks")
    {
        hooks.remove();
    }
}

/// Quotes a path for the shell.
pub fn shell_quote(path: &str) -> String {
    format!("'{}'", path.replace('\'', r"'\''"))
}
