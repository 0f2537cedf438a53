//! Builds an agent and checks it as a whole.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ahash::HashMap;
use serde_json::json;

use super::{Agent, AgentBuildError, PromptSection, ToolEntry};
use crate::agent::validate::{check_examples, check_shell, check_spec, tracked_sources};
use crate::call::error::ErrorDialect;
use crate::files::{FileSystem, Resources};
use crate::hook::Hook;
use crate::limits::Limits;
use crate::policy::source::{PolicyScope, RuleSet, SourcedRule};
use crate::policy::{
    AttachedPolicy, Diagnostic, DiagnosticKind, EnforcementMode, Policy, PolicyLevel, Severity,
    analyze_rules,
};
use crate::schema::CompiledSchema;
use crate::tool::{Effect, ExtraArguments, Handler, Tool, ToolSpec};
use toolgate_json::{Digest, JsonBounds, Pointer, digest_of, to_canonical_bytes};
use toolgate_text::escape_for_display;

/// Builds an [`Agent`].
pub struct AgentBuilder {
    pub(crate) name: Arc<str>,
    pub(crate) tools: Vec<(Option<String>, Tool)>,
    pub(crate) policies: Vec<SourcedRule>,
    /// Problems of policy files and resources.
    pub(crate) input_problems: Vec<Diagnostic>,
    pub(crate) hooks: Vec<Arc<dyn Hook>>,
    pub(crate) description_overrides: BTreeMap<String, String>,
    pub(crate) principals: Option<BTreeSet<String>>,
    pub(crate) limits: Limits,
    pub(crate) bounds: JsonBounds,
    pub(crate) max_output: usize,
    pub(crate) dialect: ErrorDialect,
    pub(crate) resources: Resources,
    /// Whether the agent was built and checked before.
    pub(crate) is_prechecked: bool,
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
    pub fn section(mut self, section: PromptSection) -> Self {
        let name = section.name;
        self.tools.extend(section.tools.into_iter().map(|tool| (Some(name.clone()), tool)));
        self.policies.extend(
            section
                .policies
                .into_iter()
                .map(|policy| SourcedRule::from_code(PolicyScope::Section(name.clone()), policy)),
        );
        self
    }

    /// Adds a policy for the whole agent.
    #[must_use]
    pub fn policy(mut self, policy: impl Policy + 'static) -> Self {
        self.policies.push(SourcedRule::from_code(PolicyScope::Agent, Arc::new(policy)));
        self
    }

    /// Adds the rules of policy files. Their problems are reported when the agent is built.
    #[must_use]
    pub fn rules(mut self, rules: RuleSet) -> Self {
        let (policies, problems) = rules.into_parts();
        self.policies.extend(policies);
        self.input_problems.extend(problems);
        self
    }

    /// Adds a policy for the whole prompt.
    #[must_use]
    pub fn prompt_policy(mut self, policy: impl Policy + 'static) -> Self {
        self.policies.push(SourcedRule::from_code(PolicyScope::Prompt, Arc::new(policy)));
        self
    }

    /// Adds a policy for one tool.
    #[must_use]
    pub fn tool_policy(mut self, tool: &str, policy: impl Policy + 'static) -> Self {
        self.policies.push(SourcedRule::from_code(
            PolicyScope::Tools(vec![tool.to_owned()]),
            Arc::new(policy),
        ));
        self
    }

    /// Adds a hook. Hooks run in the order they were added.
    #[must_use]
    pub fn hook(mut self, hook: impl Hook + 'static) -> Self {
        self.hooks.push(Arc::new(hook));
        self
    }

    /// Replaces the description of a tool that accepts overrides.
    #[must_use]
    pub fn describe(mut self, tool: &str, description: &str) -> Self {
        self.description_overrides.insert(tool.to_owned(), description.to_owned());
        self
    }

    /// Restricts the agent to these principals. By default, every authenticated principal may use
    /// it.
    #[must_use]
    pub fn principals<'a>(mut self, principals: impl IntoIterator<Item = &'a str>) -> Self {
        self.principals = Some(principals.into_iter().map(str::to_owned).collect());
        self
    }

    /// Sets budgets and rate limits.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Sets the bounds of arguments.
    #[must_use]
    pub const fn bounds(mut self, bounds: JsonBounds) -> Self {
        self.bounds = bounds;
        self
    }

    /// Sets the dialect of errors for the model. The default is [`ErrorDialect::Standard`].
    ///
    /// Programs and the ledger always use the standard dialect.
    #[must_use]
    pub const fn dialect(mut self, dialect: ErrorDialect) -> Self {
        self.dialect = dialect;
        self
    }

    /// Sets the maximum size of a result in the context, in bytes. The default is 64 KiB.
    #[must_use]
    pub const fn max_output(mut self, bytes: usize) -> Self {
        self.max_output = bytes;
        self
    }

    /// Adds a resource that handlers find by its type, with
    /// [`ToolContext::resource`](crate::ToolContext::resource).
    ///
    /// Pass the value itself. It is put into an [`Arc`] here, so a value of type `Arc<Db>` is found
    /// as `Arc<Db>`, not as `Db`. Two resources of one type are a build error.
    #[must_use]
    pub fn resource<T: Any + Send + Sync>(mut self, thing: T) -> Self {
        if self.resources.insert(Arc::new(thing)).is_some() {
            let kind = std::any::type_name::<T>();
            let problem = Diagnostic::new(format!(
                "two resources have the type `{kind}`, but handlers find a resource by its type"
            ));
            self.input_problems.push(problem.with_help("wrap one of them in its own type"));
        }
        self
    }

    /// Adds a file system that rolls back with the call.
    #[must_use]
    pub fn files(self, files: impl FileSystem + 'static) -> Self {
        self.shared_files(Arc::new(files))
    }

    /// Sets the file system of the agent, which may be shared with others.
    pub fn shared_files(mut self, files: Arc<dyn FileSystem>) -> Self {
        self.resources.set_files(files);
        self
    }

    /// Checks and builds the agent.
    ///
    /// # Errors
    /// All problems of the agent.
    pub fn build(mut self) -> Result<Agent, AgentBuildError> {
        let mut problems = std::mem::take(&mut self.input_problems);
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
                problems.push(
                    Diagnostic::new(format!(
                        "two tools have the name `{}`",
                        escape_for_display(&spec.name)
                    ))
                    .with_subject(spec.name()),
                );
                continue;
            }
            if let Some(description) = self.description_overrides.remove(spec.name()) {
                if spec.accepts_overrides {
                    spec.description = description;
                } else {
                    problems.push(
                        Diagnostic::new(format!(
                            "`{}` does not accept another description",
                            spec.name
                        ))
                        .with_subject(spec.name()),
                    );
                }
            }
            let name = Arc::clone(&spec.name);
            order.push(Arc::clone(&name));
            sections.insert(Arc::clone(&name), section.clone());
            match self.register(spec, handler, section.as_deref()) {
                Ok(registered) => {
                    tools.insert(name, Arc::new(registered));
                }
                Err(found) => {
                    problems.extend(found.into_iter().map(|problem| self.with_source_span(problem)))
                }
            }
        }
        problems.extend(self.description_overrides.keys().map(|tool| {
            Diagnostic::new(format!(
                "a description is set for `{}`, which is not a tool of this agent",
                escape_for_display(tool)
            ))
        }));
        let governed: Vec<_> = order
            .iter()
            .filter_map(|name| tools.get(name))
            .map(|t: &Arc<ToolEntry>| (&t.spec, t.governed_by.as_slice()))
            .collect();
        // Analysing invalid rules would report misleading problems.
        if !self.is_prechecked && problems.iter().all(|problem| problem.severity != Severity::Error)
        {
            problems.extend(
                analyze_rules(&governed).into_iter().map(|problem| self.with_source_span(problem)),
            );
        }
        let (problems, warnings): (Vec<_>, Vec<_>) =
            problems.into_iter().partition(|problem| problem.severity == Severity::Error);
        if !problems.is_empty() {
            return Err(AgentBuildError {
                agent: self.name.to_string(),
                problems: problems.into_iter().chain(warnings).collect(),
            });
        }
        let entry_of = |name: &Arc<str>| {
            Some((sections.get(name).cloned().flatten(), Arc::clone(tools.get(name)?)))
        };
        let entries: Vec<(Option<String>, Arc<ToolEntry>)> =
            order.iter().filter_map(entry_of).collect();
        let definition = match self.is_prechecked {
            true => String::new(),
            false => {
                let definition =
                    serde_json::to_value(self.definition(&entries)).unwrap_or_default();
                String::from_utf8(to_canonical_bytes(&definition)).unwrap_or_default()
            }
        };
        let config = Digest::of(definition.as_bytes());
        Ok(Agent {
            name: self.name,
            tools,
            tool_order: order,
            principals: self.principals,
            limits: self.limits,
            bounds: self.bounds,
            max_output: self.max_output,
            dialect: self.dialect,
            resources: Arc::new(self.resources),
            definition_digest: config,
            definition: definition.into(),
            tracked_sources: tracked_sources(&self.policies),
            rules: self.policies.into_iter().map(|rule| rule.policy).collect(),
            warnings,
        })
    }

    /// Sets the position of a problem if its rule comes from a file.
    fn with_source_span(&self, mut problem: Diagnostic) -> Diagnostic {
        let rule =
            self.policies.iter().find(|rule| Some(rule.policy.name()) == problem.rule.as_deref());
        problem.span = rule
            .and_then(|rule| rule.source_span(&problem.field, problem.field_range.clone()))
            .or(problem.span);
        problem
    }

    fn register(
        &self,
        mut spec: ToolSpec,
        handler: Option<Arc<dyn Handler>>,
        section: Option<&str>,
    ) -> Result<ToolEntry, Vec<Diagnostic>> {
        let mut problems = check_spec(&spec);
        let compile = |schema: Option<&serde_json::Value>,
                       what: &str,
                       extra,
                       secrets: &[Pointer],
                       problems: &mut Vec<Diagnostic>| {
            let compiled = CompiledSchema::compile(schema?, extra, secrets);
            let invalid = |e| {
                Diagnostic::new(format!(
                    "{what} schema of `{}`: {e}",
                    escape_for_display(&spec.name)
                ))
                .with_kind(DiagnosticKind::InvalidSchema)
            };
            compiled.map_err(|e| problems.push(invalid(e))).ok()
        };
        let input = compile(spec.input.as_ref(), "input", spec.extra, &spec.secrets, &mut problems);
        // A secret argument stays secret if the result repeats it.
        let known = input.as_ref().map_or(spec.secrets.as_slice(), CompiledSchema::secrets);
        let output =
            compile(spec.output.as_ref(), "output", ExtraArguments::Pass, known, &mut problems);
        if spec.input.is_none() && handler.is_some() {
            problems.push(Diagnostic::new(format!(
                "`{}` has a handler but no input schema",
                escape_for_display(&spec.name)
            )));
        }
        let examples = check_examples(&spec, input.as_ref(), output.as_ref());
        let applies = |scope: &PolicyScope| match scope {
            PolicyScope::Tools(tools) => {
                tools.iter().any(|tool| *tool == *spec.name).then_some(PolicyLevel::Tool)
            }
            PolicyScope::Section(name) => (section == Some(name)).then_some(PolicyLevel::Section),
            PolicyScope::Prompt => Some(PolicyLevel::Prompt),
            PolicyScope::Agent => Some(PolicyLevel::Agent),
        };
        let mut governed_by: Vec<AttachedPolicy> = self
            .policies
            .iter()
            .filter(|rule| rule.policy.governs(&spec))
            .filter_map(|rule| {
                applies(&rule.scope)
                    .map(|level| AttachedPolicy { level, policy: Arc::clone(&rule.policy) })
            })
            .collect();
        // Narrowest scope first, then in order of declaration.
        governed_by.sort_by_key(|attached| attached.level);
        let observers = self
            .policies
            .iter()
            .filter(|w| {
                w.policy.observes_all_tools()
                    || (applies(&w.scope).is_some() && w.policy.governs(&spec))
            })
            .map(|rule| Arc::clone(&rule.policy))
            .collect();
        let checked = problems.into_iter().chain(check_shell(&spec)).chain(examples);
        let mut problems: Vec<Diagnostic> =
            checked.map(|problem| problem.with_subject(spec.name())).collect();
        // Observing rules govern nothing, and the built-in rules protect toolgate, not this tool.
        let counts = |policy: &dyn Policy| {
            policy.mode() == EnforcementMode::Enforce
                && !policy.name().starts_with(crate::policy::source::BUILT_IN_RULE_PREFIX)
        };
        let is_governed = governed_by.iter().any(|attached| counts(&*attached.policy));
        if spec.effect != Effect::Read && !spec.open && !is_governed {
            let problem = Diagnostic::at_field(
                "mode",
                format!(
                    "`{}` has effects, but no enforced policy governs it",
                    escape_for_display(&spec.name)
                ),
            )
            .with_subject(spec.name())
            .with_kind(DiagnosticKind::Ungoverned);
            let problem = problem
                .with_help("attach a policy, declare `.effect(Effect::Read)`, or call `.open()`");
            let is_own = |attached: &&AttachedPolicy| {
                !attached.policy.name().starts_with(crate::policy::source::BUILT_IN_RULE_PREFIX)
            };
            problems.push(match governed_by.iter().find(is_own) {
                Some(observing) => problem.with_rule(observing.policy.name()),
                None => problem,
            });
        }
        if !problems.is_empty() {
            return Err(problems);
        }
        let mut secrets: Vec<Pointer> = input
            .iter()
            .chain(&output)
            .flat_map(|s| s.secrets().iter().cloned())
            .chain(spec.secrets.iter().cloned())
            .collect();
        secrets.sort();
        secrets.dedup();
        spec.secrets.clone_from(&secrets);
        if spec.veiled {
            secrets = vec![Pointer::default()];
        }
        let declares = |path: &Pointer| match path.split_last() {
            Some((parent, name)) => {
                spec.input.is_none() || crate::schema::has_declared_member(&spec, &parent, name)
            }
            None => true,
        };
        let declares_entity = spec.entities.iter().map(|(_, path)| declares(path)).collect();
        let hooks = self.hooks.iter().filter(|hook| hook.matches(spec.name())).cloned().collect();
        let policies: Vec<String> = governed_by.iter().map(|a| a.policy.definition()).collect();
        let definition = digest_of(&json!({
            "name": spec.name, "description": spec.description, "input": spec.input, "output": spec.output, "effect": spec.effect,
            "once": spec.once, "idempotent": spec.idempotent, "policies": policies,
        }));
        Ok(ToolEntry {
            spec,
            handler,
            input: input.map(Arc::new),
            output,
            secrets,
            is_entity_declared: declares_entity,
            governed_by,
            observers,
            hooks,
            definition_digest: definition,
        })
    }
}
