//! Defines the input of a call: ids, session key and arguments.

pub mod error;
pub mod error_code;
pub(crate) mod event;
pub(crate) mod outcome;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use toolgate_json::Digest;
use toolgate_shell::ShellAnalysis;

/// Maximum recorded length of the reason why a request cannot be parsed.
const MAX_REASON_CHARS: usize = 300;

/// Id of a call in the ledger. Ids sort by time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CallId(Uuid);

impl CallId {
    pub(crate) fn generate() -> Self {
        Self(Uuid::now_v7())
    }

    /// Returns the 16 bytes of the id.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 16] {
        self.0.as_bytes()
    }

    /// Creates an id from its 16 bytes.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(Uuid::from_bytes(bytes))
    }
}

impl std::str::FromStr for CallId {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Uuid::parse_str(text)
            .map(Self)
            .map_err(|_| format!("`{}` is not a call id", toolgate_text::escape_for_display(text)))
    }
}

impl fmt::Display for CallId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// Identifies the session of a call. A session belongs to one principal and one agent.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SessionKey {
    /// The agent that the client acts as.
    pub agent: Arc<str>,
    /// The principal that makes the call.
    pub principal: Arc<str>,
    /// The session of the principal.
    pub session: Arc<str>,
}

impl SessionKey {
    /// Creates a key from its three parts.
    pub fn new(
        agent: impl Into<Arc<str>>,
        principal: impl Into<Arc<str>>,
        session: impl Into<Arc<str>>,
    ) -> Self {
        Self { agent: agent.into(), principal: principal.into(), session: session.into() }
    }
}

/// Arguments as received: unparsed text or a value.
#[derive(Debug, Clone)]
pub enum Arguments {
    /// JSON text. Only text allows strict checks for duplicate keys and exact digits.
    Text(Vec<u8>),
    /// A value that the caller built.
    Value(Value),
}

/// Dropping a deeply nested document recursively would overflow the stack, so this takes it apart
/// first.
impl Drop for Arguments {
    fn drop(&mut self) {
        if let Self::Value(value) = self
            && toolgate_json::is_nested_too_deeply(value)
        {
            toolgate_json::drop_iteratively(value.take());
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
/// let call = Call::new(key, "lookup_order", r#"{"order_id": "A-7"}"#)
///     .turn(3)
///     .idempotency_key("req-81");
/// assert_eq!(call.tool, "lookup_order");
/// ```
#[derive(Debug, Clone)]
pub struct Call {
    /// The session of the call.
    pub key: SessionKey,
    /// The tool that the model named.
    pub tool: String,
    /// The arguments that the model sent.
    pub arguments: Arguments,
    /// The model's turn.
    pub turn: Option<u64>,
    /// The client's own id for the call.
    pub client_id: Option<String>,
    /// Idempotency key. Two calls with the same key count as one call.
    pub idempotency_key: Option<String>,
    /// An approval to use. Its stored arguments run, not the ones given here.
    pub approval: Option<String>,
    /// How long the caller waits.
    pub timeout: Option<Duration>,
    /// Why the model stopped to make this call.
    pub stop_reason: Option<String>,
    /// Cancels the call from outside.
    pub cancel: Option<CancellationToken>,
    /// The client can ask its own user if a rule asks for approval and names no approver.
    pub can_ask_user: bool,
    /// A value that the entry point shares with the handlers.
    ///
    /// Gates do not read the value. Its presence tells them that tools run here and not at a
    /// client.
    pub extension: Option<CallExtension>,
    /// Why the entry point rejects the call.
    pub transport_rejection: Option<String>,
    /// The entry point rejects the call because it cannot parse the request.
    pub is_unparsable: bool,
}

/// A value that the entry point passes to the handler; see [`Call::with_extension`].
#[derive(Clone)]
pub struct CallExtension(pub(crate) Arc<dyn std::any::Any + Send + Sync>);

impl fmt::Debug for CallExtension {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Carried")
    }
}

impl Call {
    /// Creates a call with arguments and no options.
    pub fn new(key: SessionKey, tool: impl Into<String>, arguments: impl Into<Arguments>) -> Self {
        Self {
            key,
            tool: tool.into(),
            arguments: arguments.into(),
            turn: None,
            client_id: None,
            idempotency_key: None,
            approval: None,
            timeout: None,
            stop_reason: None,
            cancel: None,
            can_ask_user: false,
            extension: None,
            transport_rejection: None,
            is_unparsable: false,
        }
    }

    /// Sets the model's turn.
    #[must_use]
    pub const fn turn(mut self, turn: u64) -> Self {
        self.turn = Some(turn);
        self
    }

    /// Sets why the model stopped to make this call.
    #[must_use]
    pub fn stop_reason(mut self, reason: impl Into<String>) -> Self {
        self.stop_reason = Some(reason.into());
        self
    }

    /// Sets the idempotency key. Calls with the same key, tool, agent and principal count as one
    /// call.
    #[must_use]
    pub fn idempotency_key(mut self, key: impl Into<String>) -> Self {
        self.idempotency_key = Some(key.into());
        self
    }

    /// Marks the call as rejected by the entry point, for example because of its token.
    ///
    /// The first gate rejects the call with this message, and the call gets a ledger row.
    #[must_use]
    pub fn with_transport_rejection(mut self, why: impl Into<String>) -> Self {
        self.transport_rejection = Some(why.into());
        self
    }

    /// Marks the call as rejected because the entry point cannot parse the request.
    ///
    /// Unlike [`with_transport_rejection`](Self::with_transport_rejection), the client can correct
    /// this error.
    #[must_use]
    pub fn with_parse_error(mut self, why: impl Into<String>) -> Self {
        self.is_unparsable = true;
        // The reason may quote client data of any length.
        self.with_transport_rejection(why.into().chars().take(MAX_REASON_CHARS).collect::<String>())
    }

    /// Sets the approval to use.
    #[must_use]
    pub fn approval(mut self, id: impl Into<String>) -> Self {
        self.approval = Some(id.into());
        self
    }

    /// Sets how long the caller waits.
    #[must_use]
    pub const fn timeout(mut self, limit: Duration) -> Self {
        self.timeout = Some(limit);
        self
    }

    /// Sets the client's own id for the call.
    #[must_use]
    pub fn client_id(mut self, id: impl Into<String>) -> Self {
        self.client_id = Some(id.into());
        self
    }

    /// Declares that the client can ask its own user if a rule asks for approval and names no
    /// approver; see [`crate::Toolgate::admit`].
    #[must_use]
    pub const fn allow_user_prompt(mut self) -> Self {
        self.can_ask_user = true;
        self
    }

    /// Attaches a value of the entry point for the handler, which [`crate::ToolContext::extension`]
    /// finds by type.
    ///
    /// The value has no influence on decisions and is not recorded.
    #[must_use]
    pub fn with_extension<T: std::any::Any + Send + Sync>(mut self, thing: Arc<T>) -> Self {
        self.extension = Some(CallExtension(thing));
        self
    }

    /// Sets a token that cancels the call.
    #[must_use]
    pub fn cancelled_by(mut self, token: CancellationToken) -> Self {
        self.cancel = Some(token);
        self
    }
}

/// Validated arguments with canonical bytes and digest. The tool runs with exactly these.
#[derive(Debug, Clone)]
pub struct CheckedArguments {
    value: Arc<Value>,
    bytes: Vec<u8>,
    digest: Digest,
    /// The parsed shell command among the arguments, if any.
    shell: OnceLock<Arc<(String, Arc<ShellAnalysis>)>>,
}

impl CheckedArguments {
    /// Canonicalizes arguments for a tool and computes their digest.
    pub(crate) fn new(tool: &str, value: Value) -> Self {
        let bytes = toolgate_json::to_canonical_bytes(&value);
        let digest = Digest::of_parts([tool.as_bytes(), &bytes]);
        Self { value: Arc::new(value), bytes, digest, shell: OnceLock::new() }
    }

    /// Replaces the digest with a keyed one, from which secrets cannot be guessed.
    pub(crate) fn with_digest(mut self, keyed: impl FnOnce(Digest) -> Digest) -> Self {
        self.digest = keyed(self.digest);
        self
    }

    /// Returns the arguments.
    #[must_use]
    pub fn value(&self) -> &Value {
        &self.value
    }

    /// Returns the parsed shell command.
    pub(crate) fn shell(&self, command: &str) -> Arc<ShellAnalysis> {
        let (text, shell) = &**self.shell.get_or_init(|| {
            Arc::new((command.to_owned(), Arc::new(ShellAnalysis::analyze(command))))
        });
        if text == command { Arc::clone(shell) } else { Arc::new(ShellAnalysis::analyze(command)) }
    }

    /// Returns the shared arguments.
    pub(crate) fn shared_value(&self) -> Arc<Value> {
        Arc::clone(&self.value)
    }

    /// Returns the arguments as canonical JSON, which is what toolgate forwards.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the keyed digest of the tool's name and the canonical arguments.
    #[must_use]
    pub const fn digest(&self) -> Digest {
        self.digest
    }
}
