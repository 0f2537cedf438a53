//! Agents out of what a file says.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use super::fit::{Fitting, Sources};
use super::{Config, Declared, Entry};
use crate::config::{Unfit, Written};
use crate::policy::{Mode, Place, Problem, Severity};
use crate::registry::{Agent, Section};
use crate::resource::{FileSystem, Sight};
use crate::tool::Handler;

/// What is wrong with a configuration, all at once.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the configuration does not load:{}", .problems.iter().map(|p| format!("\n  - {p}")).collect::<String>())]
pub struct ConfigError {
    /// What is wrong.
    pub problems: Vec<Problem>,
}

impl ConfigError {
    /// The problems as a person reads them, with the lines they stand in.
    #[must_use]
    pub fn render(&self, colours: bool) -> String {
        crate::config::render(&self.problems, colours)
    }
}

impl Config {
    /// With the program that leads command tools into their rooms, and into hooks: one that calls [`crate::sandbox::enter_if_asked`], as
    /// `toolgate` does. Unless said, the running program leads into rooms, and nothing into hooks.
    #[must_use]
    pub fn launcher(mut self, program: impl Into<PathBuf>) -> Self {
        let program = program.into();
        for declared in &mut self.agents {
            declared.tools =
                std::mem::take(&mut declared.tools).into_iter().map(|entry| entry.with(|tool| tool.launched_by(&program))).collect();
            declared.hooks = std::mem::take(&mut declared.hooks).into_iter().map(|hook| hook.launcher(&program)).collect();
        }
        self
    }

    /// Builds all agents. With a script, that is behind every tool that the client does not run, to try a configuration
    /// without running anything; without it, built-in tools run, and the rest can only be declared so far.
    ///
    /// # Errors
    /// Everything that is wrong, all at once.
    pub fn agents(self, script: Option<&Arc<dyn Handler>>) -> Result<Vec<Agent>, ConfigError> {
        self.fitted(script).map(|(agents, _)| agents)
    }

    /// The same, and the tools of upstreams that are not called. Where tools really run, what an upstream says of a tool is no reason not
    /// to build an agent: what does not fit is held back, and the rest is built.
    ///
    /// # Errors
    /// Everything that is wrong with the file itself, all at once.
    pub fn fitted(self, script: Option<&Arc<dyn Handler>>) -> Result<(Vec<Agent>, Vec<Unfit>), ConfigError> {
        let (mut problems, mut built, mut unfit) = (self.problems, Vec::new(), self.offered.unfit.clone());
        let whole = problems.iter().all(|problem| problem.severity != Severity::Error);
        let (upstreams, exposed, offered) = (&self.upstreams, &self.exposed, &self.offered);
        let sources = Sources { upstreams, exposed, offered, whole: &self.whole, single: self.agents.len() == 1 };
        for declared in self.agents {
            let fitted = match whole && !self.upstreams.is_empty() {
                true => Fitting::new(declared, &sources).build(script),
                false => declared.build(script, &BTreeSet::new(), whole).map(|agent| (agent, Vec::new())),
            };
            match fitted {
                Ok((agent, more)) => {
                    built.push(agent);
                    unfit.extend(more);
                }
                Err(wrong) => problems.extend(wrong),
            }
        }
        if problems.iter().any(|problem| problem.severity == Severity::Error) {
            problems.sort_by_cached_key(Problem::order);
            return Err(ConfigError { problems });
        }
        Ok((built, unfit))
    }
}

impl Declared {
    /// Builds it. The script is behind every tool but those that are refused. Unless the whole file could be read, what governs what is
    /// anybody's guess.
    pub(super) fn build(self, script: Option<&Arc<dyn Handler>>, refused: &BTreeSet<String>, whole: bool) -> Result<Agent, Vec<Problem>> {
        let mut problems = without_files(&self);
        let places: Vec<(String, Place)> =
            self.tools.iter().map(|entry| (entry.tool.spec().name().to_owned(), entry.place.clone())).chain(self.hook_places).collect();
        let mut builder = Agent::builder(self.name.as_str()).rules(self.rules).limits(self.limits);
        if let Some(principals) = &self.principals {
            builder = builder.principals(principals.iter().map(String::as_str));
        }
        if let Some(bytes) = self.max_output {
            builder = builder.max_output(bytes);
        }
        builder = builder.dialect(self.dialect.unwrap_or_default());
        // What is not open can be looked at, unless it is not there at all. What a client calls by the same path is another file: a
        // rule that looks at files has nothing to look at there, and refuses.
        let root = self.files.as_ref().filter(|_| !self.for_client).map(|(root, _)| root);
        let seen = || Some(Arc::new(Sight::of(root?).ok()?) as Arc<dyn FileSystem>);
        if let Some(files) = self.opened.clone().or_else(seen) {
            builder = builder.shared_files(files);
        }
        if script.is_none() {
            builder = self.hooks.into_iter().fold(builder, |builder, hook| builder.hook(hook));
        }
        for Entry { tool, section, .. } in self.tools {
            let tool = match script.filter(|_| !refused.contains(tool.spec().name())) {
                Some(script) => tool.handled_by(Arc::clone(script)),
                None => tool,
            };
            builder = match section {
                Some(section) => builder.section(Section::new(section).tool(tool)),
                None => builder.tool(tool),
            };
        }
        match builder.build() {
            Ok(agent) if problems.is_empty() => return Ok(agent),
            Ok(_) => {}
            Err(error) => {
                let known = error.problems.into_iter().filter(|problem| whole || problem.field != UNGOVERNED);
                problems.extend(known.map(|problem| placed(problem, &places)));
            }
        }
        Err(problems)
    }
}

/// Rules that look at files where there are none, or at others than a tool works on: what they govern would always be refused, or let
/// through because of what stands elsewhere. Where a client runs all tools, such rules refuse.
fn without_files(declared: &Declared) -> Vec<Problem> {
    if declared.files.is_some() && declared.for_client {
        return Vec::new();
    }
    let told = |written: &Written| {
        let enforced = written.policy.mode() == Mode::Enforce || declared.files.is_some();
        let looks = |entry: &&Entry| {
            let (spec, works) = (entry.tool.spec(), declared.files.is_some() && entry.on_files);
            enforced && !works && written.policy.governs(spec) && written.policy.outline(spec).files
        };
        let name = declared.tools.iter().find(looks)?.tool.spec().name();
        let (message, help) = match declared.files {
            None => (
                format!("`{name}` can never be called: the rule looks at files, and there is no file system to ask here"),
                "say which directory it is about: `files = \"workspace\"`; for tools of clients, `require` the tool that reads, with the `same` path",
            ),
            Some(_) => (
                format!("the rule looks at the agent's files, and `{name}` works on others: it is not built in"),
                "`require` the tool that reads, with the `same` path",
            ),
        };
        let problem = Problem::at("rule", message).of(written.policy.name()).help(help);
        Some(Problem { place: written.place("rule", None), ..problem })
    };
    declared.rules.written().filter_map(told).collect()
}

/// A problem that speaks of a tool stands where the tool is declared.
fn placed(problem: Problem, places: &[(String, Place)]) -> Problem {
    if problem.place.is_some() {
        return problem;
    }
    // Of several that it names, it is about the first.
    let named = places.iter().filter_map(|(name, place)| Some((problem.message.find(&format!("`{name}`"))?, place)));
    let place = named.min_by_key(|(at, _)| *at).map(|(_, place)| place.clone());
    let help = [
        ("schema of", "a JSON Schema, written as TOML: `{ type = \"object\", properties = { id = { type = \"string\" } } }`"),
        ("declares no such entity", "say where it stands: `entities = { name = \"/path\" }`"),
        ("is meant for no tool", "name tools of this agent in `tools`, or take the hook out"),
        ("takes away", "name a tool of this agent in `revokes`, or take it out"),
        ("is secret, and is not kept", "fill `arguments` of `reconcile` with what is no secret"),
        ("is reconciled with", "name a tool of this agent in `reconcile` that only reads, and that toolgate runs"),
    ];
    let known = help.iter().find(|(words, _)| problem.message.contains(words) && problem.help.is_none());
    let problem = known.map_or_else(|| problem.clone(), |(_, help)| problem.clone().help(*help));
    match problem.field.as_str() {
        UNGOVERNED => Problem { place, ..problem.help("write a rule for it, or say `effect = \"read\"` or `policy = \"open\"`") },
        _ => Problem { place, ..problem },
    }
}

/// The part of a rule that would have to say something else, where a tool is governed by none.
const UNGOVERNED: &str = "mode";
