//! Defines tools: names, schemas, effects and handlers.

mod command_tool;
pub mod context;
mod failure;
mod handler;
pub mod name;
mod reconcile;
mod settings;
mod spec;
mod template;

use std::collections::BTreeSet;
use std::future::Future;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

pub use crate::tool::command_tool::CommandTool;
pub(crate) use failure::FailureKind;
pub use failure::{Failure, classify_status, strip_reserved_fields};
pub use handler::Handler;
pub use reconcile::ReconcileSpec;
pub use settings::{Effect, ExtraArguments, PollingSettings, RetrySettings, ToolExample};
pub use spec::ToolSpec;
pub use template::{FilledPart, Template};

use self::handler::{DynamicHandler, TypedHandler, UnavailableHandler};
use crate::limits::Cost;
use crate::normalize::NormalizationRule;
use crate::tool::context::ToolContext;
use toolgate_json::Pointer;

/// Declares a tool. An agent checks the declaration when it is built.
///
/// ```
/// use schemars::JsonSchema;
/// use serde::{Deserialize, Serialize};
/// use toolgate::{Effect, Tool, ToolContext};
///
/// #[derive(Deserialize, JsonSchema)]
/// struct Lookup { order_id: String }
/// #[derive(Serialize, JsonSchema)]
/// struct Order { order_id: String, status: String }
///
/// let lookup = |ctx: ToolContext, args: Lookup| async move {
///     ctx.set_message("found it");
///     Ok(Order { order_id: args.order_id, status: "shipped".into() })
/// };
/// let lookup = Tool::typed("lookup_order", "Look up an order by its id.", lookup)
///     .effect(Effect::Read)
///     .entity("order_id", "/order_id");
/// assert_eq!(lookup.spec().name(), "lookup_order");
/// ```
#[derive(Clone)]
pub struct Tool {
    spec: ToolSpec,
    handler: Option<Arc<dyn Handler>>,
    /// The program that runs the tool, if any.
    program: Option<CommandTool>,
}

impl std::fmt::Debug for Tool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tool").field("spec", &self.spec).finish_non_exhaustive()
    }
}

impl Tool {
    /// Creates a tool from an async function between serde types. Both schemas are derived.
    pub fn typed<A, R, F, Fut>(name: &str, description: &str, handler: F) -> Self
    where
        A: DeserializeOwned + JsonSchema + Send + Sync + 'static,
        R: Serialize + JsonSchema + Send + Sync + 'static,
        F: Fn(ToolContext, A) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<R, Failure>> + Send + 'static,
    {
        let mut tool = Self::new_without_schemas(
            name,
            description,
            Some(Arc::new(TypedHandler(handler, PhantomData::<fn(A) -> R>))),
        );
        tool.spec.input = Some(schemars::schema_for!(A).to_value());
        tool.spec.output = Some(
            schemars::generate::SchemaSettings::draft2020_12()
                .for_serialize()
                .into_generator()
                .into_root_schema_for::<R>()
                .to_value(),
        );
        tool
    }

    /// Creates a tool from a JSON Schema and an async function on JSON.
    pub fn dynamic<F, Fut>(name: &str, description: &str, input: Value, handler: F) -> Self
    where
        F: Fn(ToolContext, Value) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Value, Failure>> + Send + 'static,
    {
        let mut tool =
            Self::new_without_schemas(name, description, Some(Arc::new(DynamicHandler(handler))));
        tool.spec.input = Some(input);
        tool
    }

    /// Creates a tool that runs a program.
    pub fn command(name: &str, description: &str, input: Value, program: CommandTool) -> Self {
        let mut tool = Self::with_handler(name, description, input, Arc::new(program.clone()));
        tool.program = Some(program);
        tool
    }

    /// Sets the launcher of the tool's program.
    pub fn with_launcher(self, launcher: &std::path::Path) -> Self {
        match self.program.clone() {
            Some(program) => {
                let program = program.launcher(launcher);
                Self { handler: Some(Arc::new(program.clone())), program: Some(program), ..self }
            }
            None => self,
        }
    }

    /// Creates a tool with its own [`Handler`].
    pub fn with_handler(
        name: &str,
        description: &str,
        input: Value,
        handler: Arc<dyn Handler>,
    ) -> Self {
        let mut tool = Self::new_without_schemas(name, description, Some(handler));
        tool.spec.input = Some(input);
        tool
    }

    /// Creates a tool that the client runs. Toolgate admits and records its calls but never runs
    /// it.
    #[must_use]
    pub fn external(name: &str, description: &str, input: Option<Value>) -> Self {
        let mut tool = Self::new_without_schemas(name, description, None);
        tool.spec.input = input;
        tool
    }

    fn new_without_schemas(
        name: &str,
        description: &str,
        handler: Option<Arc<dyn Handler>>,
    ) -> Self {
        let spec = ToolSpec {
            name: name.into(),
            description: description.to_owned(),
            accepts_overrides: false,
            input: None,
            output: None,
            effect: Effect::default(),
            idempotent: false,
            once: false,
            local: false,
            open: false,
            polling: None,
            retry: RetrySettings::default(),
            timeout: Duration::from_secs(30),
            heartbeat: None,
            extra: ExtraArguments::default(),
            examples: Vec::new(),
            secrets: Vec::new(),
            entities: Vec::new(),
            proves: Vec::new(),
            revokes: Vec::new(),
            reconcile: None,
            untrusted: false,
            keeps: Vec::new(),
            external: handler.is_none(),
            normalize: Vec::new(),
            max_output: None,
            cost: Cost::default(),
            visible_to: None,
            empty_statuses: BTreeSet::new(),
            shell: None,
            veiled: false,
        };
        Self { spec, handler, program: None }
    }

    /// Sets the effect. The default is [`Effect::Destructive`].
    #[must_use]
    pub const fn effect(mut self, effect: Effect) -> Self {
        self.spec.effect = effect;
        self
    }

    /// Declares that a second run changes nothing more, so a run may be retried.
    #[must_use]
    pub const fn idempotent(mut self) -> Self {
        self.spec.idempotent = true;
        self
    }

    /// Declares that equal arguments mean the same action, so a repeated call gets the recorded
    /// result.
    #[must_use]
    pub const fn once(mut self) -> Self {
        self.spec.once = true;
        self
    }

    /// Declares that only the session and its resources change, so a failure is always rolled back.
    #[must_use]
    pub const fn local(mut self) -> Self {
        self.spec.local = true;
        self
    }

    /// Declares that no policy needs to govern the tool. Without this, an ungoverned tool with
    /// effects is a build error.
    #[must_use]
    pub const fn open(mut self) -> Self {
        self.spec.open = true;
        self
    }

    /// Declares that the tool is called repeatedly until something has happened.
    #[must_use]
    pub const fn polling(mut self, interval: Duration, max_unchanged: u32) -> Self {
        self.spec.polling = Some(PollingSettings { interval, max_unchanged });
        self
    }

    /// Sets the retries. A failed run is retried only if that is safe.
    #[must_use]
    pub const fn retry(mut self, times: u32, delay: Duration) -> Self {
        self.spec.retry = RetrySettings { times, delay };
        self
    }

    /// Sets the timeout of a run, including retries. The default is 30 s.
    #[must_use]
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.spec.timeout = timeout;
        self
    }

    /// Sets how often a run must call [`ToolContext::send_heartbeat`].
    #[must_use]
    pub const fn heartbeat(mut self, every: Duration) -> Self {
        self.spec.heartbeat = Some(every);
        self
    }

    /// Sets the treatment of undeclared arguments.
    #[must_use]
    pub const fn extra(mut self, extra: ExtraArguments) -> Self {
        self.spec.extra = extra;
        self
    }

    /// Adds an example call.
    #[must_use]
    pub fn example(mut self, description: &str, input: Value, output: Value) -> Self {
        self.spec.examples.push(ToolExample { description: description.to_owned(), input, output });
        self
    }

    /// Sets the schema of the result.
    #[must_use]
    pub fn output_schema(mut self, schema: Value) -> Self {
        self.spec.output = Some(schema);
        self
    }

    /// Marks a field of the arguments or the result as secret. Errors and the ledger never contain
    /// it.
    #[must_use]
    pub fn secret(mut self, path: impl Into<Pointer>) -> Self {
        self.spec.secrets.push(path.into());
        self
    }

    /// Declares an entity: its name, and the path of its value in the arguments or the result.
    #[must_use]
    pub fn entity(mut self, name: &str, path: impl Into<Pointer>) -> Self {
        self.spec.entities.push((name.into(), path.into()));
        self
    }

    /// Declares a field of the result as evidence.
    #[must_use]
    pub fn proves(mut self, path: impl Into<Pointer>) -> Self {
        self.spec.proves.push(path.into());
        self
    }

    /// Declares that a call revokes all evidence of another tool in this session, as a `logout`
    /// does.
    ///
    /// A call that provably did nothing revokes nothing.
    #[must_use]
    pub fn revokes(mut self, tool: &str) -> Self {
        self.spec.revokes.push((tool.into(), None));
        self
    }

    /// Declares that a call revokes the evidence of another tool about the same entity.
    ///
    /// A call that provably did nothing revokes nothing.
    #[must_use]
    pub fn revokes_about(mut self, tool: &str, entity: &str) -> Self {
        self.spec.revokes.push((tool.into(), Some(entity.into())));
        self
    }

    /// Declares that results contain text of strangers, such as web pages or mail.
    ///
    /// Rules can keep such values out of arguments; see [`crate::policy::Flow`].
    #[must_use]
    pub const fn untrusted(mut self) -> Self {
        self.spec.untrusted = true;
        self
    }

    /// Declares that the tool stores what it writes under this entity, as notes or records do.
    ///
    /// Text that is written after untrusted text was read is untrusted when it is read back. Files
    /// need no declaration.
    #[must_use]
    pub fn keeps(mut self, entity: &str) -> Self {
        self.spec.keeps.push(entity.into());
        self
    }

    /// Adds a rule that normalizes results.
    #[must_use]
    pub fn normalize(mut self, rule: NormalizationRule) -> Self {
        self.spec.normalize.push(rule);
        self
    }

    /// Sets the maximum size of a result in the context, in bytes.
    #[must_use]
    pub const fn max_output(mut self, bytes: usize) -> Self {
        self.spec.max_output = Some(bytes);
        self
    }

    /// Sets the expected cost of a run. It is reserved before the run and settled afterwards.
    #[must_use]
    pub const fn cost(mut self, cost: Cost) -> Self {
        self.spec.cost = cost;
        self
    }

    /// Declares how to find out whether a call with unknown outcome took effect; see
    /// [`crate::Toolgate::reconcile`].
    #[must_use]
    pub fn reconcile(mut self, reconcile: ReconcileSpec) -> Self {
        self.spec.reconcile = Some(reconcile);
        self
    }

    /// Restricts the tool to these principals. For others it does not exist.
    #[must_use]
    pub fn visible_to<'a>(mut self, principals: impl IntoIterator<Item = &'a str>) -> Self {
        self.spec.visible_to = Some(principals.into_iter().map(str::to_owned).collect());
        self
    }

    /// Declares an HTTP status that means an empty result instead of an error.
    #[must_use]
    pub fn empty_on_status(mut self, status: u16) -> Self {
        self.spec.empty_statuses.insert(status);
        self
    }

    /// Declares the argument that contains a shell command.
    ///
    /// Rules see the programs that the command would run, see [`crate::policy::Condition::Runs`].
    #[must_use]
    pub fn shell(mut self, path: impl Into<Pointer>) -> Self {
        self.spec.shell = Some(path.into());
        self
    }

    /// Allows agents to replace the description.
    #[must_use]
    pub const fn accepts_overrides(mut self) -> Self {
        self.spec.accepts_overrides = true;
        self
    }

    /// Returns the declaration so far.
    #[must_use]
    pub const fn spec(&self) -> &ToolSpec {
        &self.spec
    }

    /// Adds the secrets that the schemas mark. Returns false if a schema is too unclear to tell.
    pub fn find_secrets(&mut self) -> bool {
        let schemas = [&self.spec.input, &self.spec.output].into_iter().flatten();
        let (marked, unclear): (Vec<_>, Vec<_>) =
            schemas.map(crate::schema::find_write_only).partition(Result::is_ok);
        self.spec.secrets.extend(marked.into_iter().flatten().flatten());
        self.spec.secrets.sort();
        self.spec.secrets.dedup();
        unclear.is_empty()
    }

    /// Keeps all arguments out of the ledger, because the secret ones are unknown.
    pub const fn hide_all_arguments(mut self) -> Self {
        self.spec.veiled = true;
        self
    }

    /// Creates a declared tool whose handler is set later.
    pub fn declare(name: &str, description: &str, input: Value) -> Self {
        Self::with_handler(name, description, input, Arc::new(UnavailableHandler))
    }

    /// Lets the client run the tool.
    pub fn into_client_run(self) -> Self {
        // Toolgate cannot reconcile calls that the client runs.
        Self {
            spec: ToolSpec { external: true, reconcile: None, ..self.spec },
            handler: None,
            program: None,
        }
    }

    /// Replaces the handler.
    pub fn replace_handler(self, handler: Arc<dyn Handler>) -> Self {
        // A tool that the client runs has no handler.
        if self.spec.external { self } else { Self { handler: Some(handler), ..self } }
    }

    /// Replaces the schemas.
    pub fn with_schemas(mut self, input: Value, output: Option<Value>) -> Self {
        self.spec.input = Some(input);
        self.spec.output = output;
        self
    }

    /// Replaces the description.
    pub fn with_description(mut self, description: &str) -> Self {
        description.clone_into(&mut self.spec.description);
        self
    }

    /// Creates a declared tool that cannot run.
    pub(crate) fn without_handler(spec: ToolSpec) -> Self {
        let handler: Option<Arc<dyn Handler>> =
            if spec.external { None } else { Some(Arc::new(UnavailableHandler)) };
        Self { spec, handler, program: None }
    }

    pub(crate) fn into_parts(self) -> (ToolSpec, Option<Arc<dyn Handler>>) {
        (self.spec, self.handler)
    }
}
