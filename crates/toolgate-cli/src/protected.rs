//! What an agent must not touch, whichever door it comes through.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::json;
use toolgate::{Effect, Spec};

use crate::place::{self, InForce, State};

/// What an agent must not touch: whoever judges it.
pub(crate) struct Protected {
    /// Not even to read.
    secret: Vec<String>,
    /// Not to change.
    fixed: Vec<String>,
    /// Where an agent begins.
    project: String,
    /// What stands on the ways to all that.
    links: Links,
}

/// What stands on the ways to some places, and where it leads if it is a link: while that stays the same, the places are where they
/// were.
#[derive(Clone, Default, Serialize, Deserialize)]
pub(crate) struct Links(BTreeMap<String, Option<String>>);

impl Links {
    /// Looks at all that stands on the way to a place, and where links lead on the ways there.
    fn follow(&mut self, place: &Path) {
        let mut ways = vec![place.to_owned()];
        // As many links as the system follows: one that leads under itself would go on.
        for _ in 0..=40 {
            let Some(way) = ways.pop() else { break };
            for step in way.ancestors() {
                let Some(above) = step.parent() else { break };
                let name = step.display().to_string();
                // What is above it was looked at with it.
                if self.0.contains_key(&name) {
                    break;
                }
                let leads = std::fs::read_link(step).ok();
                ways.extend(leads.iter().map(|leads| above.join(leads)));
                self.0.insert(name, leads.map(|leads| leads.display().to_string()));
            }
        }
    }

    /// Whether all of it is as it was.
    pub(crate) fn hold(&self) -> bool {
        let mut missing: Option<&str> = None;
        self.0.iter().all(|(path, was)| {
            // What stands under something that is not there is not looked for: it comes after it.
            if missing.is_some_and(|missing| Path::new(path).starts_with(missing)) {
                return was.is_none();
            }
            let leads = std::fs::read_link(path);
            if leads.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound) {
                missing = Some(path);
            }
            leads.ok().map(|leads| leads.display().to_string()) == *was
        })
    }
}

/// Verbs that answer for a person, switch toolgate off, pass for it, or look into what it knows of every project.
const VERBS: [&str; 18] = [
    "toolgate approvals approve",
    "toolgate approvals deny",
    "toolgate audit",
    "toolgate backtest",
    "toolgate eject",
    "toolgate explain",
    "toolgate hook",
    "toolgate-hook",
    "toolgate-ask",
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

/// Tools that show what stands in all the files under a directory, by a part of their name.
const SEARCHES: [&str; 5] = ["grep", "find_in_files", "search_file_content", "search_for_pattern", "search_in_files"];

/// What such tools call that directory.
const SEARCHED: [&str; 6] = ["path", "paths", "dir_path", "directory", "relative_path", "root"];

impl Protected {
    /// Of what holds, for an agent that begins in a project.
    pub(crate) fn of(found: &InForce, state: &State, project: &Path) -> Self {
        let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let shown = |path: PathBuf| path.display().to_string();
        // Looked at before anybody follows them: what changes meanwhile is seen the next time.
        let mut links = Links::default();
        links.follow(&found.store);
        let mut secret = vec![shown(state.path().to_owned())];
        // What stands beside a ledger stands beside it wherever a link leads.
        for store in [found.store.clone()].into_iter().chain(leads_to(&found.store)).map(shown) {
            secret.extend(["", "-wal", "-shm", ".state"].map(|end| format!("{store}{end}")));
        }
        // A file that is not there yet would hide one that is.
        let looked_at = found.looked_at.iter().map(|(file, _)| file).chain(&found.files);
        let mut fixed: Vec<String> = looked_at.map(|file| shown(absolute(file))).collect();
        fixed.extend(place::own().map(shown));
        if let Ok(program) = std::env::current_exe() {
            // The small programs stand beside the large one.
            fixed.extend(crate::client::PROGRAMS.iter().map(|name| shown(program.with_file_name(name))));
            fixed.push(shown(program));
        }
        for client in crate::client::Client::ALL {
            fixed.extend(client.file(Some(project)).ok().map(shown));
            fixed.extend(client.file(None).ok().map(shown));
        }
        for home in [project.to_owned()].into_iter().chain(place::home()) {
            fixed.extend([".claude/settings.local.json", ".codex/config.toml"].iter().map(|file| shown(home.join(file))));
        }
        fixed.sort();
        secret.iter().chain(&fixed).for_each(|place| links.follow(Path::new(place)));
        for places in [&mut secret, &mut fixed] {
            // What a link leads to is the same by that name.
            let there: Vec<String> = places.iter().filter_map(|place| leads_to(Path::new(place))).map(shown).collect();
            places.extend(there);
            let mut known = HashSet::new();
            places.retain(|place| known.insert(place.clone()));
        }
        Self { secret, fixed, project: shown(project.to_owned()), links }
    }

    /// All of it, for who gives agents files.
    pub(crate) fn places(&self) -> impl Iterator<Item = PathBuf> {
        self.secret.iter().chain(&self.fixed).map(PathBuf::from)
    }

    pub(crate) const fn links(&self) -> &Links {
        &self.links
    }

    /// The rules, as a policy file: recorded, replayed and explained like any other. Tools that need not be about files at all name one
    /// only by a path that says where it is, but for those that stand `here`.
    pub(crate) fn rules(&self, tools: &[&Spec], here: Option<&Path>) -> String {
        let list = |names: &[&str]| json!(names).to_string();
        let all: Vec<&str> = tools.iter().map(|tool| tool.name()).collect();
        let changing: Vec<&str> = tools.iter().filter(|tool| tool.effect() != Effect::Read).map(|tool| tool.name()).collect();
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
        let is_here = |place: &&String| here.is_none_or(|here| Path::new(place).parent() == Some(here));
        for (name, places, tools, reason) in [
            ("state", &self.secret, &all, "toolgate's own state is not for agents."),
            ("files", &self.fixed, &changing, "What decides about an agent is not the agent's to change."),
        ] {
            // What only reads a tree changes nothing in it; of the state, the rules about searches tell.
            let (near, far): (Vec<&String>, Vec<&String>) = places.iter().partition(is_here);
            if !near.is_empty() {
                rule(name, name, tools, &format!("touches = {}, lenient = true, trees = false", json!(near)), reason);
            }
            if !far.is_empty() {
                rule(
                    &format!("{name}:elsewhere"),
                    name,
                    tools,
                    &format!("touches = {}, lenient = true, trees = false, whole = true", json!(far)),
                    reason,
                );
            }
        }
        for (tool, argument, instead) in tools.iter().copied().filter_map(searched) {
            let condition =
                format!("argument = {}, touches = {}, lenient = true, from = {}", json!(argument), json!(self.secret), json!(self.project));
            let reason = format!("toolgate's own state lies under what this would read, and it is not for agents. {instead}");
            rule(&format!("search:{tool}"), "state", &[tool], &condition, &reason);
        }
        for tool in tools {
            if let Some(command) = tool.shell_argument() {
                let name = format!("verbs:{}", tool.name());
                let condition = format!("argument = {}, runs = {}", json!(command.to_string()), list(&VERBS));
                rule(
                    &name,
                    &name,
                    &[tool.name()],
                    &condition,
                    "This answers for a person, or is not for agents; ask the user to run it in a terminal.",
                );
            }
        }
        text
    }
}

/// Where a path leads, as far as there is something. A device is everybody's: who has no settings may have linked them to one.
fn leads_to(path: &Path) -> Option<PathBuf> {
    let (there, rest) = path.ancestors().find_map(|above| Some((above.canonicalize().ok()?, path.strip_prefix(above).ok()?)))?;
    match rest.as_os_str().is_empty() {
        true => (there.is_file() || there.is_dir()).then_some(there),
        false => Some(there.join(rest)),
    }
}

/// A tool that reads all under a directory, which of its arguments says so, and what to do instead.
fn searched(tool: &Spec) -> Option<(&str, String, &'static str)> {
    if let Some(command) = tool.shell_argument() {
        return Some((tool.name(), command.to_string(), "Name a directory that does not hold it, or leave it out with `--exclude-dir`."));
    }
    let argument = match tool.input_schema() {
        None => "path",
        Some(schema) => SEARCHED.into_iter().find(|name| schema.pointer(&format!("/properties/{name}")).is_some())?,
    };
    let searches = SEARCHES.iter().any(|part| tool.name().contains(part));
    searches.then(|| (tool.name(), format!("/{argument}"), "Search a directory that does not hold it."))
}
