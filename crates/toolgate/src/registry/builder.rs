//! An agent as it is put together, and checked as a whole.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ahash::HashMap;
use serde_json::json;

use super::checks::{check_examples, check_shell, check_words, watched};
use super::{Agent, BuildError, Registered, Section};
use crate::config::{Rules, Scope, Written};
use crate::error::Dialect;
use crate::hook::Hook;
use crate::json::{Bounds, Digest, Pointer, canonical, digest_of};
use crate::limits::Limits;
use crate::names::shown;
use crate::policy::{Attached, Level, Mode, Policy, Problem, Severity, analyse};
use crate::resource::{FileSystem, Resources};
use crate::schema::Schema;
use crate::tool::{Effect, Extra, Handler, Spec, Tool};

/// An agent as it is put together.
pub struct AgentBuilder {
    pub(super) name: Arc<str>,
    pub(super) tools: Vec<(Option<String>, Tool)>,
    pub(super) policies: Vec<Written>,
    /// What is wrong with policy files and resources.
    pub(super) unreadable: Vec<Problem>,
    pub(super) hooks: Vec<Arc<dyn Hook>>,
    pub(super) overrides: BTreeMap<String, String>,
    pub(super) principals: Option<BTreeSet<String>>,
    pub(super) limits: Limits,
    pub(super) bounds: Bounds,
    pub(super) max_output: usize,
    pub(super) dialect: Dialect,
    pub(super) resources: Resources,
    /// It was built before, and looked over then.
    pub(super) known: bool,
}

impl AgentBuilder {
    /// Adds a tool.
    #[must_use]
    pub fn tool(mut self, tool: Tool) -> Self {
        self.tools.push((None, tool));
        self
    }

    /// Adds tools.
    #[must_use]
    pub fn tools(mut self, tools: impl IntoIterator<Item = Tool>) -> Self {
        self.tools.extend(tools.into_iter().map(|tool| (None, tool)));
        self
    }

    /// Adds a section with its tools and policies.
    #[must_use]
    pub fn section(mut self, section: Section) -> Self {
        let name = section.name;
        self.tools.extend(section.tools.into_iter().map(|tool| (Some(name.clone()), tool)));
        self.policies.extend(section.policies.into_iter().map(|policy| Written::in_code(Scope::Section(name.clone()), policy)));
        self
    }

    /// Adds a policy for the whole agent.
    #[must_use]
    pub fn policy(mut self, policy: impl Policy + 'static) -> Self {
        self.policies.push(Written::in_code(Scope::Agent, Arc::new(policy)));
        self
    }

    /// Adds the rules of policy files. What is wrong with them is said when the agent is built, all at once.
    #[must_use]
    pub fn rules(mut self, rules: Rules) -> Self {
        let (policies, problems) = rules.into_parts();
        self.policies.extend(policies);
        self.unreadable.extend(problems);
        self
    }

    /// Adds a policy for everything in the prompt.
    #[must_use]
    pub fn prompt_policy(mut self, policy: impl Policy + 'static) -> Self {
        self.policies.push(Written::in_code(Scope::Prompt, Arc::new(policy)));
        self
    }

    /// Adds a policy for one tool.
    #[must_use]
    pub fn tool_policy(mut self, tool: &str, policy: impl Policy + 'static) -> Self {
        self.policies.push(Written::in_code(Scope::Tools(vec![tool.to_owned()]), Arc::new(policy)));
        self
    }

    /// Adds a hook. Hooks run in the order they were added.
    #[must_use]
    pub fn hook(mut self, hook: impl Hook + 'static) -> Self {
        self.hooks.push(Arc::new(hook));
        self
    }

    /// Replaces the description of a tool that accepts it.
    #[must_use]
    pub fn describe(mut self, tool: &str, description: &str) -> Self {
        self.overrides.insert(tool.to_owned(), description.to_owned());
        self
    }

    /// Only these principals may act as this agent. Without it, everyone the embedding program lets in.
    #[must_use]
    pub fn principals<'a>(mut self, principals: impl IntoIterator<Item = &'a str>) -> Self {
        self.principals = Some(principals.into_iter().map(str::to_owned).collect());
        self
    }

    /// Sets budgets and rates.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Sets the bounds of arguments.
    #[must_use]
    pub const fn bounds(mut self, bounds: Bounds) -> Self {
        self.bounds = bounds;
        self
    }

    /// How errors are written for its model: in the standard dialect unless said. Programs and the ledger always read the standard one.
    #[must_use]
    pub const fn dialect(mut self, dialect: Dialect) -> Self {
        self.dialect = dialect;
        self
    }

    /// The largest result that goes into the context, in bytes: 64 KiB unless said.
    #[must_use]
    pub const fn max_output(mut self, bytes: usize) -> Self {
        self.max_output = bytes;
        self
    }

    /// Gives handlers something to ask for by type, with [`Ctx::resource`](crate::Ctx::resource). Give the thing itself, not an
    /// [`Arc`] of it: it is put into one here, and what is given as `Arc<Db>` is found as `Arc<Db>` and not as `Db`. Two of one type
    /// are a build error.
    #[must_use]
    pub fn resource<T: Any + Send + Sync>(mut self, thing: T) -> Self {
        if self.resources.insert(Arc::new(thing)).is_some() {
            let kind = std::any::type_name::<T>();
            let problem = Problem::new(format!("two resources are of the type `{kind}`, and handlers ask for one by its type"));
            self.unreadable.push(problem.help("give each a type of its own"));
        }
        self
    }

    /// Gives handlers a file system that rolls back with the call.
    #[must_use]
    pub fn files(self, files: impl FileSystem + 'static) -> Self {
        self.shared_files(Arc::new(files))
    }

    pub(crate) fn shared_files(mut self, files: Arc<dyn FileSystem>) -> Self {
        self.resources.set_files(files);
        self
    }

    /// Checks everything and builds the agent.
    ///
    /// # Errors
    /// Everything that is wrong, all at once.
    pub fn build(mut self) -> Result<Agent, BuildError> {
        let mut problems = std::mem::take(&mut self.unreadable);
        let mut tools = HashMap::default();
        let mut order = Vec::new();
        let mut sections = HashMap::default();
        self.tools.iter_mut().for_each(|(_, tool)| _ = tool.find_secrets());
        self.check_limits(&mut problems);
        self.check_attachments(&mut problems);
        self.check_hooks(&mut problems);
        self.check_revocations(&mut problems);
        self.check_reconciliations(&mut problems);
        for (section, tool) in std::mem::take(&mut self.tools) {
            let (mut spec, handler) = tool.into_parts();
            if tools.contains_key(&spec.name) {
                problems.push(Problem::new(format!("two tools are called `{}`", shown(&spec.name))));
                continue;
            }
            if let Some(description) = self.overrides.remove(spec.name()) {
                if spec.accepts_overrides {
                    spec.description = description;
                } else {
                    problems.push(Problem::new(format!("`{}` does not accept another description", spec.name)));
                }
            }
            let name = Arc::clone(&spec.name);
            order.push(Arc::clone(&name));
            sections.insert(Arc::clone(&name), section.clone());
            match self.register(spec, handler, section.as_deref()) {
                Ok(registered) => {
                    tools.insert(name, Arc::new(registered));
                }
                Err(wrong) => problems.extend(wrong.into_iter().map(|problem| self.placed(problem))),
            }
        }
        problems.extend(
            self.overrides
                .keys()
                .map(|tool| Problem::new(format!("a description is given for `{}`, which is no tool of this agent", shown(tool)))),
        );
        let governed: Vec<_> =
            order.iter().filter_map(|name| tools.get(name)).map(|t: &Arc<Registered>| (&t.spec, t.governed_by.as_slice())).collect();
        // What broken rules come to together is anybody's guess.
        if !self.known && problems.iter().all(|problem| problem.severity != Severity::Error) {
            problems.extend(analyse(&governed).into_iter().map(|problem| self.placed(problem)));
        }
        let (problems, warnings): (Vec<_>, Vec<_>) = problems.into_iter().partition(|problem| problem.severity == Severity::Error);
        if !problems.is_empty() {
            return Err(BuildError { agent: self.name.to_string(), problems: problems.into_iter().chain(warnings).collect() });
        }
        let placed = |name: &Arc<str>| Some((sections.get(name).cloned().flatten(), Arc::clone(tools.get(name)?)));
        let written: Vec<(Option<String>, Arc<Registered>)> = order.iter().filter_map(placed).collect();
        let definition = match self.known {
            true => String::new(),
            false => {
                let definition = serde_json::to_value(self.definition(&written)).unwrap_or_default();
                String::from_utf8(canonical(&definition)).unwrap_or_default()
            }
        };
        let config = Digest::of(definition.as_bytes());
        Ok(Agent {
            name: self.name,
            tools,
            order,
            principals: self.principals,
            limits: self.limits,
            bounds: self.bounds,
            max_output: self.max_output,
            dialect: self.dialect,
            resources: Arc::new(self.resources),
            config,
            definition: definition.into(),
            watched: watched(&self.policies),
            rules: self.policies.into_iter().map(|written| written.policy).collect(),
            warnings,
        })
    }

    /// A problem at its place in a policy file, where its rule comes from one.
    fn placed(&self, mut problem: Problem) -> Problem {
        let written = self.policies.iter().find(|written| Some(written.policy.name()) == problem.rule.as_deref());
        problem.place = written.and_then(|written| written.place(&problem.field, problem.within.clone())).or(problem.place);
        problem
    }

    fn register(&self, mut spec: Spec, handler: Option<Arc<dyn Handler>>, section: Option<&str>) -> Result<Registered, Vec<Problem>> {
        let mut problems = check_words(&spec);
        let compile = |schema: Option<&serde_json::Value>, what: &str, extra, secrets: &[Pointer], problems: &mut Vec<String>| {
            let compiled = Schema::compile(schema?, extra, secrets);
            compiled.map_err(|e| problems.push(format!("{what} schema of `{}`: {e}", shown(&spec.name)))).ok()
        };
        let input = compile(spec.input.as_ref(), "input", spec.extra, &spec.secrets, &mut problems);
        // A secret that is echoed is a secret still.
        let known = input.as_ref().map_or(spec.secrets.as_slice(), Schema::secrets);
        let output = compile(spec.output.as_ref(), "output", Extra::Pass, known, &mut problems);
        if spec.input.is_none() && handler.is_some() {
            problems.push(format!("`{}` has a handler and no input schema", shown(&spec.name)));
        }
        let examples = check_examples(&spec, input.as_ref(), output.as_ref());
        let applies = |scope: &Scope| match scope {
            Scope::Tools(tools) => tools.iter().any(|tool| *tool == *spec.name).then_some(Level::Tool),
            Scope::Section(name) => (section == Some(name)).then_some(Level::Section),
            Scope::Prompt => Some(Level::Prompt),
            Scope::Agent => Some(Level::Agent),
        };
        let mut governed_by: Vec<Attached> = self
            .policies
            .iter()
            .filter(|written| written.policy.governs(&spec))
            .filter_map(|written| applies(&written.scope).map(|level| Attached { level, policy: Arc::clone(&written.policy) }))
            .collect();
        // Closest first, then in the order of declaration.
        governed_by.sort_by_key(|attached| attached.level);
        let heard_by = self
            .policies
            .iter()
            .filter(|w| w.policy.hears_all() || (applies(&w.scope).is_some() && w.policy.governs(&spec)))
            .map(|written| Arc::clone(&written.policy))
            .collect();
        let mut problems: Vec<Problem> = problems.into_iter().map(Problem::new).chain(check_shell(&spec)).chain(examples).collect();
        // A rule that only observes governs nothing.
        // What toolgate protects of its own says nothing about the tool.
        let counts = |policy: &dyn Policy| policy.mode() == Mode::Enforce && !policy.name().starts_with(crate::config::BUILT_IN);
        let is_governed = governed_by.iter().any(|attached| counts(&*attached.policy));
        if spec.effect != Effect::Read && !spec.open && !is_governed {
            let problem = Problem::at("mode", format!("`{}` has effects and no enforced policy governs it", shown(&spec.name)));
            let problem = problem.help("attach one, declare it `.effect(Effect::Read)`, or say `.open()`");
            let own = |attached: &&Attached| !attached.policy.name().starts_with(crate::config::BUILT_IN);
            problems.push(match governed_by.iter().find(own) {
                Some(observing) => problem.of(observing.policy.name()),
                None => problem,
            });
        }
        if !problems.is_empty() {
            return Err(problems);
        }
        let mut secrets: Vec<Pointer> =
            input.iter().chain(&output).flat_map(|s| s.secrets().iter().cloned()).chain(spec.secrets.iter().cloned()).collect();
        secrets.sort();
        secrets.dedup();
        spec.secrets.clone_from(&secrets);
        if spec.veiled {
            secrets = vec![Pointer::default()];
        }
        let declares = |path: &Pointer| match path.split_last() {
            Some((place, name)) => spec.input.is_none() || crate::schema::declares(&spec, &place, name),
            None => true,
        };
        let declares_entity = spec.entities.iter().map(|(_, path)| declares(path)).collect();
        let hooks = self.hooks.iter().filter(|hook| hook.matches(spec.name())).cloned().collect();
        let policies: Vec<String> = governed_by.iter().map(|a| a.policy.definition()).collect();
        let definition = digest_of(&json!({
            "name": spec.name, "description": spec.description, "input": spec.input, "output": spec.output, "effect": spec.effect,
            "once": spec.once, "idempotent": spec.idempotent, "policies": policies,
        }));
        Ok(Registered {
            spec,
            handler,
            input: input.map(Arc::new),
            output,
            secrets,
            declares_entity,
            governed_by,
            heard_by,
            hooks,
            definition,
        })
    }
}
