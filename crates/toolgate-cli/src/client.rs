//! The files in which clients keep their hooks: how toolgate is written into them, found there, and taken out again.

use std::io;
use std::path::{Path, PathBuf};

use jsonc_parser::ParseOptions;
use jsonc_parser::cst::{CstInputValue, CstObject, CstRootNode};
use serde_json::Value;

/// What is installed, one beside the other.
pub(crate) const PROGRAMS: [&str; 3] = ["toolgate", "toolgate-hook", "toolgate-ask"];

/// A client that can be given toolgate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Client {
    /// Claude Code, with hooks.
    ClaudeCode,
    /// Codex, with hooks.
    Codex,
    /// Cursor, with hooks.
    Cursor,
    /// Claude Desktop, as a server.
    ClaudeDesktop,
    /// VS Code, with hooks.
    Vscode,
}

impl Client {
    pub(crate) const ALL: [Self; 5] = [Self::ClaudeCode, Self::Codex, Self::Cursor, Self::ClaudeDesktop, Self::Vscode];
    /// Those that have hooks.
    pub(crate) const HOOKED: [Self; 4] = [Self::ClaudeCode, Self::Codex, Self::Cursor, Self::Vscode];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::ClaudeCode => "claude-code",
            Self::Codex => "codex",
            Self::Cursor => "cursor",
            Self::ClaudeDesktop => "claude-desktop",
            Self::Vscode => "vscode",
        }
    }

    /// The file that holds its hooks, or its servers: of a project, or of the user.
    pub(crate) fn file(self, project: Option<&Path>) -> io::Result<PathBuf> {
        let home = || crate::place::home().ok_or_else(|| io::Error::other("there is no home directory"));
        let moved = |variable: &str, usual: &str| match std::env::var_os(variable).filter(|path| !path.is_empty()) {
            Some(path) => Ok(PathBuf::from(path)),
            None => home().map(|home| home.join(usual)),
        };
        Ok(match (self, project) {
            (Self::ClaudeCode, Some(project)) => project.join(".claude/settings.json"),
            (Self::ClaudeCode, None) => moved("CLAUDE_CONFIG_DIR", ".claude")?.join("settings.json"),
            (Self::Codex, Some(project)) => project.join(".codex/hooks.json"),
            (Self::Codex, None) => moved("CODEX_HOME", ".codex")?.join("hooks.json"),
            (Self::Cursor, Some(project)) => project.join(".cursor/hooks.json"),
            (Self::Cursor, None) => home()?.join(".cursor/hooks.json"),
            (Self::Vscode, Some(project)) => project.join(".github/hooks/toolgate.json"),
            (Self::Vscode, None) => home()?.join(".copilot/hooks/toolgate.json"),
            // It has one file, whatever one works on.
            (Self::ClaudeDesktop, _) => {
                let usual = if cfg!(target_os = "macos") { "Library/Application Support" } else { ".config" };
                let base = if cfg!(target_os = "macos") { home()?.join(usual) } else { moved("XDG_CONFIG_HOME", usual)? };
                base.join("Claude/claude_desktop_config.json")
            }
        })
    }

    const fn events(self) -> &'static [&'static str] {
        match self {
            Self::ClaudeCode => &["PreToolUse", "PostToolUse", "PostToolUseFailure", "SessionStart", "SessionEnd"],
            Self::Codex => &["PreToolUse", "PostToolUse", "SessionStart", "SessionEnd"],
            Self::Cursor => &["preToolUse", "postToolUse", "postToolUseFailure", "sessionStart", "sessionEnd"],
            Self::Vscode => &["PreToolUse", "PostToolUse", "SessionStart"],
            Self::ClaudeDesktop => &[],
        }
    }

    /// The tool that it runs commands with, as toolgate names it.
    pub(crate) const fn shell_tool(self) -> &'static str {
        match self {
            Self::ClaudeCode | Self::Codex | Self::ClaudeDesktop => "bash",
            Self::Cursor => "shell",
            Self::Vscode => "run_in_terminal",
        }
    }

    /// Files of a project and its user in which all hooks can be switched off.
    pub(crate) fn settings(project: &Path) -> Vec<PathBuf> {
        let own = [Self::ClaudeCode.file(Some(project)), Self::ClaudeCode.file(None)];
        own.into_iter().flatten().chain([project.join(".claude/settings.local.json")]).collect()
    }

    /// What an administrator has Claude Code do, whatever users and projects say. A later file counts for more than those before it.
    pub(crate) fn managed() -> Vec<PathBuf> {
        let named = std::env::var_os("TOOLGATE_MANAGED_SETTINGS").filter(|path| !path.is_empty());
        let directory = named.map_or_else(|| PathBuf::from("/etc/claude-code"), PathBuf::from);
        let is_part = |path: &PathBuf| {
            let name = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
            name.ends_with(".json") && !name.starts_with('.')
        };
        let parts = std::fs::read_dir(directory.join("managed-settings.d")).into_iter().flatten().flatten();
        let mut files: Vec<PathBuf> = parts.map(|part| part.path()).filter(is_part).collect();
        files.sort();
        files.insert(0, directory.join("managed-settings.json"));
        files
    }

    /// The event that comes before a tool.
    pub(crate) const fn before(self) -> &'static str {
        if matches!(self, Self::Cursor) { "preToolUse" } else { "PreToolUse" }
    }

    /// How the hook is started: a program and its words, or a line for the shell.
    fn start(self, program: &str) -> (String, Option<Vec<&'static str>>) {
        let words: &[&str] = if is_hook(program) { &["--client"] } else { &["hook", "--client"] };
        match self {
            Self::ClaudeCode => (program.to_owned(), Some(words.iter().copied().chain([self.name()]).collect())),
            _ => (format!("{} {} {}", quoted(program), words.join(" "), self.name()), None),
        }
    }

    fn entry(self, program: &str) -> CstInputValue {
        let text = |text: &str| CstInputValue::String(text.to_owned());
        let pair = |key: &str, value: CstInputValue| (key.to_owned(), value);
        let (command, words) = self.start(program);
        let mut entry = vec![pair("command", text(&command))];
        entry.extend(words.map(|words| pair("args", CstInputValue::Array(words.into_iter().map(text).collect()))));
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

    /// Whether an entry is started as `init` writes it.
    pub(crate) fn writes(self, entry: &Value, program: &str) -> bool {
        let (command, words) = self.start(program);
        entry.get("command") == Some(&command.into()) && entry.get("args") == words.map(Value::from).as_ref()
    }

    /// The file with toolgate in it, and everything else as it was.
    pub(crate) fn with_hooks(self, text: &str, program: &str) -> Result<String, String> {
        let root = parse(text)?;
        let top = root.object_value_or_create().ok_or("it is no JSON object; make it one, like `{}`, or move it away")?;
        remove(&top);
        if self == Self::Cursor && top.get("version").is_none() {
            top.append("version", CstInputValue::Number("1".to_owned()));
        }
        let hooks = top.object_value_or_create("hooks").ok_or("its `hooks` are no object")?;
        for event in self.events() {
            let list = hooks.array_value_or_create(event).ok_or_else(|| format!("its `hooks.{event}` is no list"))?;
            list.ensure_multiline();
            let entry = self.entry(program);
            list.append(match self {
                Self::ClaudeCode | Self::Codex => CstInputValue::Object(vec![
                    ("matcher".to_owned(), CstInputValue::String("*".to_owned())),
                    ("hooks".to_owned(), CstInputValue::Array(vec![entry])),
                ]),
                _ => entry,
            });
        }
        Ok(ended(&root, text))
    }

    /// The file without toolgate.
    pub(crate) fn without_hooks(text: &str) -> Result<String, String> {
        let root = parse(text)?;
        if let Some(top) = root.object_value() {
            remove(&top);
        }
        Ok(ended(&root, text))
    }

    /// Why a client leaves a whole file aside, and all hooks in it: it is not as strict as the client reads it, or has an entry that the
    /// client does not understand, whoever wrote that.
    pub(crate) fn leaves_aside(self, text: &str) -> Option<String> {
        if !matches!(self, Self::ClaudeCode | Self::Codex) {
            return None;
        }
        let file: Value = match serde_json::from_str(text.trim_start_matches('\u{feff}')) {
            Ok(file) => file,
            Err(error) => return Some(format!("it may hold no comments and no commas at an end: {error}")),
        };
        let hooks = file.get("hooks").and_then(Value::as_object).filter(|_| self == Self::ClaudeCode);
        for (event, groups) in hooks.into_iter().flatten() {
            for (at, group) in groups.as_array().into_iter().flatten().enumerate() {
                if !group.get("hooks").is_some_and(Value::is_array) {
                    return Some(format!("`hooks.{event}[{at}]` has no list of `hooks`"));
                }
                if group.get("matcher").is_some_and(|matcher| !matcher.is_string()) {
                    return Some(format!("`hooks.{event}[{at}]` has a `matcher` that is no text"));
                }
            }
        }
        None
    }

    /// The entries of toolgate in a file: for each event, the program that is started and the entry as it stands.
    pub(crate) fn registered(text: &str) -> Result<Vec<(String, String, Value)>, String> {
        let file = json(text)?;
        let mut found = Vec::new();
        for (event, list) in file.get("hooks").and_then(Value::as_object).into_iter().flatten() {
            for item in list.as_array().into_iter().flatten() {
                let entries = item.get("hooks").and_then(Value::as_array).map_or_else(|| vec![item], |inner| inner.iter().collect());
                for entry in entries {
                    if let Some(program) = program(entry) {
                        // What the group says holds for its entries.
                        let mut entry = entry.clone();
                        if let (Some(matcher), Some(entry)) = (item.get("matcher"), entry.as_object_mut()) {
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

pub(crate) fn parse(text: &str) -> Result<CstRootNode, String> {
    let text = text.trim_start_matches('\u{feff}');
    let text = if text.trim().is_empty() { "{}" } else { text };
    let root = CstRootNode::parse(text, &WITH_COMMENTS).map_err(|error| error.to_string())?;
    let Some(top) = root.object_value() else { return Ok(root) };
    if twice(&top).iter().any(|name| name == "hooks") {
        return Err("it has two `hooks`; make them one".to_owned());
    }
    match top.object_value("hooks").and_then(|hooks| twice(&hooks).into_iter().next()) {
        Some(event) => Err(format!("it has two `hooks.{event}`; make them one")),
        None => Ok(root),
    }
}

/// What clients read: JSON, some of them with comments and commas at an end, and none with more than that.
const WITH_COMMENTS: ParseOptions = ParseOptions {
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

/// Names that stand twice in an object: of two, some programs read the first and some the last.
fn twice(object: &CstObject) -> Vec<String> {
    let names: Vec<String> = object.properties().iter().filter_map(|property| property.decoded_name()).collect();
    names
        .iter()
        .enumerate()
        .filter(|(at, name)| names.iter().take(*at).any(|before| before == *name))
        .map(|(_, name)| name.clone())
        .collect()
}

/// Whether nothing is in a file of settings that somebody would miss.
pub(crate) fn says_nothing(text: &str) -> bool {
    let nothing = |(key, value): (&String, &Value)| match key.as_str() {
        "version" => *value == 1,
        "mcpServers" => value.as_object().is_some_and(serde_json::Map::is_empty),
        _ => false,
    };
    let empty = |file: &Value| file.as_object().is_some_and(|file| file.iter().all(nothing));
    !text.contains("//") && !text.contains("/*") && json(text).is_ok_and(|file| empty(&file))
}

/// What a file of settings says; comments are for people.
pub(crate) fn json(text: &str) -> Result<Value, String> {
    Ok(parse(text)?.to_serde_value().unwrap_or_default())
}

/// A file as it is written again: with the mark at its beginning that it had, and a line break at its end unless it had none.
pub(crate) fn ended(root: &CstRootNode, before: &str) -> String {
    let written = root.to_string();
    let marks: String = before.chars().take_while(|sign| *sign == '\u{feff}').collect();
    let is_new = before.trim_start_matches('\u{feff}').trim().is_empty();
    let end = if is_new && !written.ends_with('\n') { "\n" } else { "" };
    format!("{marks}{written}{end}")
}

/// Whether a program is one that is only there for hooks.
pub(crate) fn is_hook(program: &str) -> bool {
    Path::new(program).file_name().is_some_and(|name| name == "toolgate-hook" || name == "toolgate-ask")
}

/// The program that clients start for hooks: the small one, where it stands beside this one.
pub(crate) fn hook_program() -> io::Result<PathBuf> {
    let own = std::env::current_exe()?;
    let small = own.with_file_name("toolgate-hook");
    Ok(if small.is_file() { small } else { own })
}

/// The program of an entry, if it is toolgate.
fn program(entry: &Value) -> Option<String> {
    let command = entry.get("command")?.as_str()?;
    let args = entry.get("args").and_then(Value::as_array);
    let program = match args {
        Some(_) => command.to_owned(),
        None => match command.strip_prefix('\'') {
            Some(rest) => rest.split('\'').next()?.to_owned(),
            None => command.split_whitespace().next()?.to_owned(),
        },
    };
    if is_hook(&program) {
        return Some(program);
    }
    let hooks = match args {
        Some(args) => args.first().and_then(Value::as_str) == Some("hook"),
        None => {
            let behind = command
                .strip_prefix('\'')
                .map_or(command.split_once(char::is_whitespace), |rest| rest.split_once('\''))
                .map(|(_, rest)| rest);
            behind.and_then(|rest| rest.split_whitespace().next()) == Some("hook")
        }
    };
    let named = Path::new(&program).file_name().is_some_and(|name| name == "toolgate");
    (named && hooks).then_some(program)
}

/// Takes toolgate's own entries out, and what is empty without them.
fn remove(top: &CstObject) {
    let Some(hooks) = top.object_value("hooks") else { return };
    for event in hooks.properties() {
        let Some(list) = event.array_value() else { continue };
        let before = list.elements().len();
        for item in list.elements() {
            let Some(group) = item.as_object() else { continue };
            match group.array_value("hooks") {
                Some(inner) => {
                    let had = inner.elements().len();
                    for entry in inner.elements() {
                        if entry.to_serde_value().as_ref().and_then(program).is_some() {
                            entry.remove();
                        }
                    }
                    if had > 0 && inner.elements().is_empty() {
                        group.remove();
                    }
                }
                None if item.to_serde_value().as_ref().and_then(program).is_some() => group.remove(),
                None => {}
            }
        }
        if before > 0 && list.elements().is_empty() {
            event.remove();
        }
    }
    if hooks.properties().is_empty()
        && let Some(hooks) = top.get("hooks")
    {
        hooks.remove();
    }
}

/// A path as a shell takes it.
pub(crate) fn quoted(path: &str) -> String {
    format!("'{}'", path.replace('\'', r"'\''"))
}
