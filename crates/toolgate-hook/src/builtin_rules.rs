//! Builds the rules that protect toolgate's own files from agents, at every entry point.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::json;
use toolgate::{Effect, ToolSpec};

use crate::effective_config;
use crate::effective_config::{EffectiveConfig, UserStateDir};

/// Paths that an agent must not access, and the links on the way to them.
pub struct ProtectedPaths {
    /// Paths that agents must not read.
    unreadable: Vec<String>,
    /// Paths that agents must not change.
    unchangeable: Vec<String>,
    /// Working directory of the agent.
    project: String,
    /// Path components and links on the way to the protected paths.
    links: SymlinkSnapshot,
}

/// Path components on the way to some paths, each with its target if it is a symbolic link.
///
/// While these are unchanged, the paths lead to the same files.
#[derive(Clone, Default, Serialize, Deserialize)]
pub(crate) struct SymlinkSnapshot(BTreeMap<String, Option<String>>);

impl SymlinkSnapshot {
    /// Records each component of a path, and follows symbolic links.
    fn record(&mut self, path: &Path) {
        let mut pending = vec![path.to_owned()];
        // Linux follows at most 40 links. The limit also ends a link that leads under itself.
        for _ in 0..=40 {
            let Some(current) = pending.pop() else { break };
            for step in current.ancestors() {
                let Some(parent) = step.parent() else { break };
                let name = step.display().to_string();
                // If a component is recorded, all components above it are recorded too.
                if self.0.contains_key(&name) {
                    break;
                }
                let target = std::fs::read_link(step).ok();
                pending.extend(target.iter().map(|target| parent.join(target)));
                self.0.insert(name, target.map(|target| target.display().to_string()));
            }
        }
    }

    /// Returns whether every component is unchanged.
    pub(crate) fn is_current(&self) -> bool {
        let mut missing: Option<&str> = None;
        self.0.iter().all(|(path, was)| {
            // The map is sorted, so the entries below a missing component follow it and need no
            // lookup.
            if missing.is_some_and(|missing| Path::new(path).starts_with(missing)) {
                return was.is_none();
            }
            let target = std::fs::read_link(path);
            if target.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound) {
                missing = Some(path);
            }
            target.ok().map(|target| target.display().to_string()) == *was
        })
    }
}

/// Commands that decide for a person, disable toolgate, act as the gate, or read the state of every
/// project.
const PROTECTED_COMMANDS: [&str; 17] = [
    "toolgate approvals approve",
    "toolgate approvals deny",
    "toolgate audit",
    "toolgate backtest",
    "toolgate eject",
    "toolgate explain",
    "toolgate hook",
    "toolgate-hook",
    "toolgate init",
    "toolgate lint --fix",
    "toolgate pause",
    "toolgate replay",
    "toolgate resume",
    "toolgate serve",
    "toolgate token",
    "toolgate trust",
    "toolgate upstream accept",
];

/// Parts of the names of tools that search the content of all files under a directory.
const SEARCH_TOOL_NAME_PARTS: [&str; 5] =
    ["grep", "find_in_files", "search_file_content", "search_for_pattern", "search_in_files"];

/// Names of the argument that holds the directory of such a tool.
const SEARCH_DIRECTORY_ARGUMENTS: [&str; 6] =
    ["path", "paths", "dir_path", "directory", "relative_path", "root"];

impl ProtectedPaths {
    /// Collects the protected paths of a configuration, for an agent that works in a project.
    pub fn collect(found: &EffectiveConfig, state: &UserStateDir, project: &Path) -> Self {
        let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let to_text = |path: PathBuf| path.display().to_string();
        // Links are recorded before they are followed, so that a later change is detected.
        let mut links = SymlinkSnapshot::default();
        links.record(&found.store);
        let mut unreadable = vec![to_text(state.path().to_owned())];
        // The files next to a ledger are next to the link and next to its target.
        for store in
            [found.store.clone()].into_iter().chain(resolve_existing(&found.store)).map(to_text)
        {
            unreadable
                .extend(["", "-wal", "-shm", ".state"].map(|suffix| format!("{store}{suffix}")));
        }
        // A missing file is protected too, because creating it would override an existing one.
        let examined = found.examined_files.iter().map(|(file, _)| file).chain(&found.files);
        let mut unchangeable: Vec<String> = examined.map(|file| to_text(absolute(file))).collect();
        unchangeable.extend(effective_config::user_config_path().map(to_text));
        if let Ok(program) = std::env::current_exe() {
            // The hook programs are in the directory of this program.
            unchangeable.extend(
                crate::client_hooks::TOOLGATE_PROGRAMS
                    .iter()
                    .map(|name| to_text(program.with_file_name(name))),
            );
            unchangeable.push(to_text(program));
        }
        for client in crate::client_hooks::SupportedClient::ALL {
            unchangeable.extend(client.settings_file(Some(project)).ok().map(to_text));
            unchangeable.extend(client.settings_file(None).ok().map(to_text));
        }
        for home in [project.to_owned()].into_iter().chain(effective_config::home_dir()) {
            unchangeable.extend(
                [".claude/settings.local.json", ".codex/config.toml"]
                    .iter()
                    .map(|file| to_text(home.join(file))),
            );
        }
        unchangeable.sort();
        unreadable.iter().chain(&unchangeable).for_each(|path| links.record(Path::new(path)));
        for paths in [&mut unreadable, &mut unchangeable] {
            // The target of a link is the same file under another name.
            let resolved: Vec<String> = paths
                .iter()
                .filter_map(|path| resolve_existing(Path::new(path)))
                .map(to_text)
                .collect();
            paths.extend(resolved);
            let mut seen = HashSet::new();
            paths.retain(|path| seen.insert(path.clone()));
        }
        Self { unreadable, unchangeable, project: to_text(project.to_owned()), links }
    }

    /// Returns all protected paths, for components that give files to agents.
    pub fn paths(&self) -> impl Iterator<Item = PathBuf> {
        self.unreadable.iter().chain(&self.unchangeable).map(PathBuf::from)
    }

    pub(crate) const fn links(&self) -> &SymlinkSnapshot {
        &self.links
    }

    /// Renders the rules as a policy file, so that they are recorded, replayed and explained like
    /// others.
    ///
    /// A tool that may not be about files matches a path only if the argument is a whole path.
    /// Paths directly in `working_dir` also match by name.
    pub fn render_rules(&self, tools: &[&ToolSpec], working_dir: Option<&Path>) -> String {
        let list = |names: &[&str]| json!(names).to_string();
        let all: Vec<&str> = tools.iter().map(|tool| tool.name()).collect();
        let changing: Vec<&str> = tools
            .iter()
            .filter(|tool| tool.effect() != Effect::Read)
            .map(|tool| tool.name())
            .collect();
        let mut text = String::new();
        let mut rule = |name: &str, code: &str, tools: &[&str], condition: &str, reason: &str| {
            if !tools.is_empty() {
                text.push_str(&format!(
                    "[[policy]]\nname = \"toolgate:{name}\"\nrule = \"deny\"\ntools = {}\nwhere = [{{ {condition} }}]\ncategory = \"PERMISSION\"\ncode = \"own_{code}\"\nreason = {}\n\n",
                    list(tools),
                    json!(reason)
                ));
            }
        };
        let is_in_working_dir = |path: &&String| {
            working_dir.is_none_or(|working_dir| Path::new(path).parent() == Some(working_dir))
        };
        for (name, paths, tools, reason) in [
            ("state", &self.unreadable, &all, "Agents must not access toolgate's own state."),
            (
                "files",
                &self.unchangeable,
                &changing,
                "Agents must not change the files that control them.",
            ),
        ] {
            // Reading a directory tree changes nothing in it. The search rules below protect the
            // state.
            let (inside, outside): (Vec<&String>, Vec<&String>) =
                paths.iter().partition(is_in_working_dir);
            if !inside.is_empty() {
                rule(
                    name,
                    name,
                    tools,
                    &format!("touches = {}, lenient = true, recursive = false", json!(inside)),
                    reason,
                );
            }
            if !outside.is_empty() {
                rule(
                    &format!("{name}:elsewhere"),
                    name,
                    tools,
                    &format!(
                        "touches = {}, lenient = true, recursive = false, qualified = true",
                        json!(outside)
                    ),
                    reason,
                );
            }
        }
        for (tool, argument, advice) in tools.iter().copied().filter_map(search_tool_argument) {
            let condition = format!(
                "argument = {}, touches = {}, lenient = true, from = {}",
                json!(argument),
                json!(self.unreadable),
                json!(self.project)
            );
            let reason = format!(
                "This would read toolgate's own state, which agents must not access. {advice}"
            );
            rule(&format!("search:{tool}"), "state", &[tool], &condition, &reason);
        }
        for tool in tools {
            if let Some(command) = tool.shell_argument() {
                let name = format!("verbs:{}", tool.name());
                let condition = format!(
                    "argument = {}, runs = {}",
                    json!(command.to_string()),
                    list(&PROTECTED_COMMANDS)
                );
                rule(
                    &name,
                    &name,
                    &[tool.name()],
                    &condition,
                    "Agents must not run this command; ask the user to run it in a terminal.",
                );
            }
        }
        text
    }
}

/// Resolves the existing part of a path, and returns `None` for a device.
///
/// A device is shared: a user without settings may have linked them to `/dev/null`.
fn resolve_existing(path: &Path) -> Option<PathBuf> {
    let (existing, rest) = path.ancestors().find_map(|ancestor| {
        Some((ancestor.canonicalize().ok()?, path.strip_prefix(ancestor).ok()?))
    })?;
    match rest.as_os_str().is_empty() {
        true => (existing.is_file() || existing.is_dir()).then_some(existing),
        false => Some(existing.join(rest)),
    }
}

/// Returns the name of a tool that reads a directory tree, its argument, and a suggestion.
fn search_tool_argument(tool: &ToolSpec) -> Option<(&str, String, &'static str)> {
    if let Some(command) = tool.shell_argument() {
        return Some((
            tool.name(),
            command.to_string(),
            "Name a directory that does not contain it, or exclude it with `--exclude-dir`.",
        ));
    }
    let argument = match tool.input_schema() {
        None => "path",
        Some(schema) => SEARCH_DIRECTORY_ARGUMENTS
            .into_iter()
            .find(|name| schema.pointer(&format!("/properties/{name}")).is_some())?,
    };
    let is_search_tool = SEARCH_TOOL_NAME_PARTS.iter().any(|part| tool.name().contains(part));
    is_search_tool.then(|| {
        (tool.name(), format!("/{argument}"), "Search a directory that does not contain it.")
    })
}
