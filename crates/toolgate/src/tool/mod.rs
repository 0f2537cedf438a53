//! Tools: what they are called, what they take and give, what they do to the world, and how they run.

mod command;
mod failure;
mod handler;
mod reconcile;
mod spec;
mod template;

use std::collections::BTreeSet;
use std::future::Future;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use command::CommandTool;
pub(crate) use failure::Kind;
pub use failure::{Failure, classify_status, without_contract};
pub use handler::Handler;
pub use reconcile::Reconcile;
pub use spec::Spec;
pub use template::{Filled, Template};

use self::handler::{Dynamic, Nothing, Typed};
use crate::context::Ctx;
use crate::json::Pointer;
use crate::limits::Spend;
use crate::normalize::Rule;

/// What a tool does to the world.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Effect {
    /// It changes nothing.
    Read,
    /// It changes something that can be changed back.
    Write,
    /// It cannot be taken back. What is undeclared is this.
    #[default]
    Destructive,
}

/// A tool that is called again and again until something has happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Polling {
    /// Shortest time between two identical polls.
    pub interval: Duration,
    /// How often in a row the result may stay the same.
    pub max_unchanged: u32,
}

/// How a failed run is tried again, where that is safe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Retry {
    /// Most runs after the first.
    pub times: u32,
    /// Wait before the second run; it doubles each time.
    pub delay: Duration,
}

impl Default for Retry {
    fn default() -> Self {
        Self { times: 2, delay: Duration::from_millis(100) }
    }
}

/// What happens to arguments that the schema does not know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Extra {
    /// The call is refused.
    #[default]
    Refuse,
    /// They are taken out before the call is judged.
    Drop,
    /// The schema says what it says.
    Pass,
}

/// A worked call, shown to the model and checked against the schemas.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Example {
    /// At most 200 characters.
    pub description: String,
    /// Arguments.
    pub input: Value,
    /// Result.
    pub output: Value,
}

/// A tool, as it is built up. An agent checks it when it is built itself.
///
/// ```
/// use schemars::JsonSchema;
/// use serde::{Deserialize, Serialize};
/// use toolgate::{Ctx, Effect, Tool};
///
/// #[derive(Deserialize, JsonSchema)]
/// struct Lookup { order_id: String }
/// #[derive(Serialize, JsonSchema)]
/// struct Order { order_id: String, status: String }
///
/// let lookup = Tool::typed("lookup_order", "Look up an order by its id.", |ctx: Ctx, args: Lookup| async move {
///     ctx.say("found it");
///     Ok(Order { order_id: args.order_id, status: "shipped".into() })
/// })
/// .effect(Effect::Read)
/// .entity("order_id", "/order_id");
/// assert_eq!(lookup.spec().name(), "lookup_order");
/// ```
#[derive(Clone)]
pub struct Tool {
    spec: Spec,
    handler: Option<Arc<dyn Handler>>,
    /// The program behind it, where there is one.
    program: Option<CommandTool>,
}

impl std::fmt::Debug for Tool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tool").field("spec", &self.spec).finish_non_exhaustive()
    }
}

impl Tool {
    /// A tool from an async function of a serde type to a serde type. Both schemas are derived.
    pub fn typed<A, R, F, Fut>(name: &str, description: &str, handler: F) -> Self
    where
        A: DeserializeOwned + JsonSchema + Send + Sync + 'static,
        R: Serialize + JsonSchema + Send + Sync + 'static,
        F: Fn(Ctx, A) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<R, Failure>> + Send + 'static,
    {
        let mut tool = Self::bare(name, description, Some(Arc::new(Typed(handler, PhantomData::<fn(A) -> R>))));
        tool.spec.input = Some(schemars::schema_for!(A).to_value());
        tool.spec.output = Some(
            schemars::generate::SchemaSettings::draft2020_12().for_serialize().into_generator().into_root_schema_for::<R>().to_value(),
        );
        tool
    }

    /// A tool from a JSON Schema and an async function over JSON.
    pub fn dynamic<F, Fut>(name: &str, description: &str, input: Value, handler: F) -> Self
    where
        F: Fn(Ctx, Value) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Value, Failure>> + Send + 'static,
    {
        let mut tool = Self::bare(name, description, Some(Arc::new(Dynamic(handler))));
        tool.spec.input = Some(input);
        tool
    }

    /// A tool with a program behind it.
    pub(crate) fn command(name: &str, description: &str, input: Value, program: CommandTool) -> Self {
        let mut tool = Self::with_handler(name, description, input, Arc::new(program.clone()));
        tool.program = Some(program);
        tool
    }

    /// The same tool, with another way into the room of its program.
    pub(crate) fn launched_by(self, launcher: &std::path::Path) -> Self {
        match self.program.clone() {
            Some(program) => {
                let program = program.launcher(launcher);
                Self { handler: Some(Arc::new(program.clone())), program: Some(program), ..self }
            }
            None => self,
        }
    }

    /// A tool with a [`Handler`] of its own making.
    pub fn with_handler(name: &str, description: &str, input: Value, handler: Arc<dyn Handler>) -> Self {
        let mut tool = Self::bare(name, description, Some(handler));
        tool.spec.input = Some(input);
        tool
    }

    /// A tool that the client runs itself: it is admitted and reported, never run here.
    #[must_use]
    pub fn external(name: &str, description: &str, input: Option<Value>) -> Self {
        let mut tool = Self::bare(name, description, None);
        tool.spec.input = input;
        tool
    }

    fn bare(name: &str, description: &str, handler: Option<Arc<dyn Handler>>) -> Self {
        let spec = Spec {
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
            retry: Retry::default(),
            timeout: Duration::from_secs(30),
            heartbeat: None,
            extra: Extra::default(),
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
            cost: Spend::default(),
            visible_to: None,
            empty_statuses: BTreeSet::new(),
            shell: None,
            veiled: false,
        };
        Self { spec, handler, program: None }
    }

    /// What it does to the world. Undeclared, it is destructive.
    #[must_use]
    pub const fn effect(mut self, effect: Effect) -> Self {
        self.spec.effect = effect;
        self
    }

    /// A second run changes nothing more: it may be retried.
    #[must_use]
    pub const fn idempotent(mut self) -> Self {
        self.spec.idempotent = true;
        self
    }

    /// The same arguments are the same act: a repetition gets the recorded result.
    #[must_use]
    pub const fn once(mut self) -> Self {
        self.spec.once = true;
        self
    }

    /// It acts on nothing but the session and its resources, so a failure is always undone.
    #[must_use]
    pub const fn local(mut self) -> Self {
        self.spec.local = true;
        self
    }

    /// It has effects, and no policy need govern it. Said out loud, because silence is a build error.
    #[must_use]
    pub const fn open(mut self) -> Self {
        self.spec.open = true;
        self
    }

    /// It is called again and again until something has happened.
    #[must_use]
    pub const fn polling(mut self, interval: Duration, max_unchanged: u32) -> Self {
        self.spec.polling = Some(Polling { interval, max_unchanged });
        self
    }

    /// How often it is retried, where that is safe.
    #[must_use]
    pub const fn retry(mut self, times: u32, delay: Duration) -> Self {
        self.spec.retry = Retry { times, delay };
        self
    }

    /// How long a run may take, retries included: 30 s unless said.
    #[must_use]
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.spec.timeout = timeout;
        self
    }

    /// How often a run must call [`Ctx::beat`].
    #[must_use]
    pub const fn heartbeat(mut self, every: Duration) -> Self {
        self.spec.heartbeat = Some(every);
        self
    }

    /// What happens to unknown arguments.
    #[must_use]
    pub const fn extra(mut self, extra: Extra) -> Self {
        self.spec.extra = extra;
        self
    }

    /// Adds a worked call.
    #[must_use]
    pub fn example(mut self, description: &str, input: Value, output: Value) -> Self {
        self.spec.examples.push(Example { description: description.to_owned(), input, output });
        self
    }

    /// Sets the schema of the result.
    #[must_use]
    pub fn output_schema(mut self, schema: Value) -> Self {
        self.spec.output = Some(schema);
        self
    }

    /// Marks a field of arguments or result as secret: never in an error, never in the ledger.
    #[must_use]
    pub fn secret(mut self, path: impl Into<Pointer>) -> Self {
        self.spec.secrets.push(path.into());
        self
    }

    /// Says which entity a call is about: a name, and where its value stands in the arguments or the result.
    #[must_use]
    pub fn entity(mut self, name: &str, path: impl Into<Pointer>) -> Self {
        self.spec.entities.push((name.into(), path.into()));
        self
    }

    /// Says which field of the result becomes evidence.
    #[must_use]
    pub fn proves(mut self, path: impl Into<Pointer>) -> Self {
        self.spec.proves.push(path.into());
        self
    }

    /// A call takes away all that another tool has proved in this session, as a `logout` does, unless it provably did nothing.
    #[must_use]
    pub fn revokes(mut self, tool: &str) -> Self {
        self.spec.revokes.push((tool.into(), None));
        self
    }

    /// A call takes away what another tool has proved about the same entity, unless it provably did nothing.
    #[must_use]
    pub fn revokes_about(mut self, tool: &str, entity: &str) -> Self {
        self.spec.revokes.push((tool.into(), Some(entity.into())));
        self
    }

    /// Its results hold what strangers wrote: a web page, a mail. Rules can keep values from them out of arguments; see
    /// [`crate::policy::Flow`].
    #[must_use]
    pub const fn untrusted(mut self) -> Self {
        self.spec.untrusted = true;
        self
    }

    /// What it writes under this entity comes back in results about it, as with a note or a record. Written after
    /// something untrusted was seen, it is untrusted when it is read back. Files are known without being declared.
    #[must_use]
    pub fn keeps(mut self, entity: &str) -> Self {
        self.spec.keeps.push(entity.into());
        self
    }

    /// Adds a rule that brings results into a stable shape.
    #[must_use]
    pub fn normalize(mut self, rule: Rule) -> Self {
        self.spec.normalize.push(rule);
        self
    }

    /// The largest result that goes into the context, in bytes.
    #[must_use]
    pub const fn max_output(mut self, bytes: usize) -> Self {
        self.spec.max_output = Some(bytes);
        self
    }

    /// What a run is expected to cost: reserved before it, settled after it.
    #[must_use]
    pub const fn cost(mut self, cost: Spend) -> Self {
        self.spec.cost = cost;
        self
    }

    /// Says how it is found out whether a call took effect of which nobody knows; see [`crate::Toolgate::reconcile`].
    #[must_use]
    pub fn reconcile(mut self, reconcile: Reconcile) -> Self {
        self.spec.reconcile = Some(reconcile);
        self
    }

    /// Only these principals see it; for others it does not exist.
    #[must_use]
    pub fn visible_to<'a>(mut self, principals: impl IntoIterator<Item = &'a str>) -> Self {
        self.spec.visible_to = Some(principals.into_iter().map(str::to_owned).collect());
        self
    }

    /// An HTTP status that means "nothing found", which is an answer and not an error.
    #[must_use]
    pub fn empty_on(mut self, status: u16) -> Self {
        self.spec.empty_statuses.insert(status);
        self
    }

    /// Says where a shell command stands in the arguments: rules see what it would run, see
    /// [`crate::policy::Condition::Runs`].
    #[must_use]
    pub fn shell(mut self, path: impl Into<Pointer>) -> Self {
        self.spec.shell = Some(path.into());
        self
    }

    /// Lets agents replace the description.
    #[must_use]
    pub const fn accepts_overrides(mut self) -> Self {
        self.spec.accepts_overrides = true;
        self
    }

    /// What is declared so far.
    #[must_use]
    pub const fn spec(&self) -> &Spec {
        &self.spec
    }

    /// Takes in what the schemas mark as secret, so that everybody knows who looks at the tool. Whether that can be told.
    pub(crate) fn find_secrets(&mut self) -> bool {
        let schemas = [&self.spec.input, &self.spec.output].into_iter().flatten();
        let (marked, unclear): (Vec<_>, Vec<_>) = schemas.map(crate::schema::write_only).partition(Result::is_ok);
        self.spec.secrets.extend(marked.into_iter().flatten().flatten());
        self.spec.secrets.sort();
        self.spec.secrets.dedup();
        unclear.is_empty()
    }

    /// The same tool, of whose arguments nothing is written down: what is secret among them nobody can tell.
    pub(crate) const fn veiled(mut self) -> Self {
        self.spec.veiled = true;
        self
    }

    /// A tool that is declared, and that something is to be put behind.
    pub(crate) fn declared(name: &str, description: &str, input: Value) -> Self {
        Self::with_handler(name, description, input, Arc::new(Nothing))
    }

    /// The same tool, run by the client.
    pub(crate) fn run_by_client(self) -> Self {
        // Nobody here can ask what became of it.
        Self { spec: Spec { external: true, reconcile: None, ..self.spec }, handler: None, program: None }
    }

    /// The same tool with other code behind it.
    pub(crate) fn handled_by(self, handler: Arc<dyn Handler>) -> Self {
        // One that the client runs stays the client's.
        if self.spec.external { self } else { Self { handler: Some(handler), ..self } }
    }

    /// The same tool with other schemas.
    pub(crate) fn with_schemas(mut self, input: Value, output: Option<Value>) -> Self {
        self.spec.input = Some(input);
        self.spec.output = output;
        self
    }

    /// The same tool with another description.
    pub(crate) fn description(mut self, description: &str) -> Self {
        description.clone_into(&mut self.spec.description);
        self
    }

    /// A tool as it is declared, with nothing behind it.
    pub(crate) fn without_handler(spec: Spec) -> Self {
        let handler: Option<Arc<dyn Handler>> = if spec.external { None } else { Some(Arc::new(Nothing)) };
        Self { spec, handler, program: None }
    }

    pub(crate) fn into_parts(self) -> (Spec, Option<Arc<dyn Handler>>) {
        (self.spec, self.handler)
    }
}
