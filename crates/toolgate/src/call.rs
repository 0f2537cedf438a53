//! What a door hands to the gate.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::json::Digest;
use crate::shell::Shell;

/// How many letters are written down of why a request cannot be understood.
const REASON: usize = 300;

/// A call's name in the ledger. Sorts by time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CallId(Uuid);

impl CallId {
    pub(crate) fn fresh() -> Self {
        Self(Uuid::now_v7())
    }

    /// The 16 bytes of its name.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 16] {
        self.0.as_bytes()
    }

    /// A name from its 16 bytes.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(Uuid::from_bytes(bytes))
    }
}

impl std::str::FromStr for CallId {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Uuid::parse_str(text).map(Self).map_err(|_| format!("`{}` is not the name of a call", crate::names::shown(text)))
    }
}

impl fmt::Display for CallId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// Which conversation a call belongs to: a session is of one principal and one agent.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SessionKey {
    /// The agent that the client acts as.
    pub agent: Arc<str>,
    /// Who is calling.
    pub principal: Arc<str>,
    /// The conversation.
    pub session: Arc<str>,
}

impl SessionKey {
    /// A key from its three parts.
    pub fn new(agent: impl Into<Arc<str>>, principal: impl Into<Arc<str>>, session: impl Into<Arc<str>>) -> Self {
        Self { agent: agent.into(), principal: principal.into(), session: session.into() }
    }
}

/// Arguments as they came: text that nobody has parsed yet, or a value.
#[derive(Debug, Clone)]
pub enum Arguments {
    /// JSON text. The strict way: duplicate keys and exact digits are only visible here.
    Text(Vec<u8>),
    /// A value that the caller built.
    Value(Value),
}

/// A document that nests without end would exhaust the stack when it is dropped; taken apart, it does not.
impl Drop for Arguments {
    fn drop(&mut self) {
        if let Self::Value(value) = self
            && crate::json::is_deep(value)
        {
            crate::json::dismantle(value.take());
        }
    }
}

impl From<Value> for Arguments {
    fn from(value: Value) -> Self {
        Self::Value(value)
    }
}

impl From<&str> for Arguments {
    fn from(text: &str) -> Self {
        Self::Text(text.as_bytes().to_vec())
    }
}

impl From<String> for Arguments {
    fn from(text: String) -> Self {
        Self::Text(text.into_bytes())
    }
}

impl From<Vec<u8>> for Arguments {
    fn from(text: Vec<u8>) -> Self {
        Self::Text(text)
    }
}

/// One proposed tool call.
///
/// ```
/// use toolgate::{Call, SessionKey};
/// let key = SessionKey::new("support", "alice", "conversation-1");
/// let call = Call::new(key, "lookup_order", r#"{"order_id": "A-7"}"#).turn(3).idempotency_key("req-81");
/// assert_eq!(call.tool, "lookup_order");
/// ```
#[derive(Debug, Clone)]
pub struct Call {
    /// Whose conversation.
    pub key: SessionKey,
    /// The tool that the model named.
    pub tool: String,
    /// What the model sent.
    pub arguments: Arguments,
    /// The model's turn.
    pub turn: Option<u64>,
    /// What the client calls this call.
    pub client_id: Option<String>,
    /// Two calls with the same key are one.
    pub idempotency_key: Option<String>,
    /// An approval to use: its stored arguments run, not those given here.
    pub approval: Option<String>,
    /// How long the caller will wait.
    pub within: Option<Duration>,
    /// Why the model stopped to make this call.
    pub stop_reason: Option<String>,
    /// Cancels the call from outside.
    pub cancel: Option<CancellationToken>,
    /// The client can ask its own user, where a rule wants a person and names nobody.
    pub client_asks: bool,
    /// What a door and the handlers behind it share. No gate looks at it; that it is there says that tools are run here, and not by a client.
    pub carried: Option<Carried>,
    /// What its door has against it.
    pub turned_away: Option<String>,
    /// That is: the request that it came in cannot be understood.
    pub misread: bool,
}

/// Something that travels with a call from its door to the handler, past the gates; see [`Call::carrying`].
#[derive(Clone)]
pub struct Carried(pub(crate) Arc<dyn std::any::Any + Send + Sync>);

impl fmt::Debug for Carried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Carried")
    }
}

impl Call {
    /// A call with nothing but its arguments.
    pub fn new(key: SessionKey, tool: impl Into<String>, arguments: impl Into<Arguments>) -> Self {
        Self {
            key,
            tool: tool.into(),
            arguments: arguments.into(),
            turn: None,
            client_id: None,
            idempotency_key: None,
            approval: None,
            within: None,
            stop_reason: None,
            cancel: None,
            client_asks: false,
            carried: None,
            turned_away: None,
            misread: false,
        }
    }

    /// Says which turn of the model it belongs to.
    #[must_use]
    pub const fn turn(mut self, turn: u64) -> Self {
        self.turn = Some(turn);
        self
    }

    /// Says why the model stopped to make it.
    #[must_use]
    pub fn stop_reason(mut self, reason: impl Into<String>) -> Self {
        self.stop_reason = Some(reason.into());
        self
    }

    /// Makes the call one with every other of the same key, tool, agent and principal.
    #[must_use]
    pub fn idempotency_key(mut self, key: impl Into<String>) -> Self {
        self.idempotency_key = Some(key.into());
        self
    }

    /// Says what its door has against it, which only the door can know: whose token it is, say. The first gate refuses it with these
    /// words, and it has its row as any other.
    #[must_use]
    pub fn turned_away(mut self, why: impl Into<String>) -> Self {
        self.turned_away = Some(why.into());
        self
    }

    /// Says why its door cannot understand the request that it came in. The first gate refuses it with these words, as one that
    /// was [turned away](Self::turned_away), but as something to put right.
    #[must_use]
    pub fn misread(mut self, why: impl Into<String>) -> Self {
        self.misread = true;
        // It may quote what the client sent.
        self.turned_away(why.into().chars().take(REASON).collect::<String>())
    }

    /// Uses an approval.
    #[must_use]
    pub fn approval(mut self, id: impl Into<String>) -> Self {
        self.approval = Some(id.into());
        self
    }

    /// Bounds how long the caller will wait.
    #[must_use]
    pub const fn within(mut self, limit: Duration) -> Self {
        self.within = Some(limit);
        self
    }

    /// Says what the client calls it.
    #[must_use]
    pub fn client_id(mut self, id: impl Into<String>) -> Self {
        self.client_id = Some(id.into());
        self
    }

    /// Says that the client can ask its own user, where a rule wants a person and names nobody; see
    /// [`crate::Toolgate::admit_kept`].
    #[must_use]
    pub const fn client_asks(mut self) -> Self {
        self.client_asks = true;
        self
    }

    /// Gives the handler something of the door's own, which [`crate::Ctx::carried`] finds by its type. It decides nothing and is
    /// not recorded.
    #[must_use]
    pub fn carrying<T: std::any::Any + Send + Sync>(mut self, thing: Arc<T>) -> Self {
        self.carried = Some(Carried(thing));
        self
    }

    /// Lets a token cancel the call.
    #[must_use]
    pub fn cancelled_by(mut self, token: CancellationToken) -> Self {
        self.cancel = Some(token);
        self
    }
}

/// Arguments that were judged. What runs is exactly this.
#[derive(Debug, Clone)]
pub struct Judged {
    value: Arc<Value>,
    bytes: Vec<u8>,
    digest: Digest,
    /// What a shell command among them would run; read once.
    shell: OnceLock<Arc<(String, Arc<Shell>)>>,
}

impl Judged {
    /// Fixes arguments for a tool: from here on they have one spelling and one digest.
    pub(crate) fn new(tool: &str, value: Value) -> Self {
        let bytes = crate::json::canonical(&value);
        let digest = Digest::of_parts([tool.as_bytes(), &bytes]);
        Self { value: Arc::new(value), bytes, digest, shell: OnceLock::new() }
    }

    /// With a digest that no secret among the arguments can be guessed from.
    pub(crate) fn with_digest(mut self, keyed: impl FnOnce(Digest) -> Digest) -> Self {
        self.digest = keyed(self.digest);
        self
    }

    /// The arguments.
    #[must_use]
    pub fn value(&self) -> &Value {
        &self.value
    }

    /// What the shell command among them would run.
    pub(crate) fn shell(&self, command: &str) -> Arc<Shell> {
        let (text, shell) = &**self.shell.get_or_init(|| Arc::new((command.to_owned(), Arc::new(Shell::read(command)))));
        if text == command { Arc::clone(shell) } else { Arc::new(Shell::read(command)) }
    }

    /// The arguments, shared.
    pub(crate) fn shared(&self) -> Arc<Value> {
        Arc::clone(&self.value)
    }

    /// The arguments as canonical JSON: what is forwarded.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Keyed digest of the tool's name and the canonical arguments.
    #[must_use]
    pub const fn digest(&self) -> Digest {
        self.digest
    }
}
