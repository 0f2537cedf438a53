//! Where sessions, claims, limits, approvals and the ledger live.
//!
//! A store is dumb on purpose: it loads, reserves and commits, each in one transaction, and decides
//! nothing. Every backend behaves like [`MemoryStore`].

mod approval;
mod claim;
mod memory;
mod open;

use std::any::Any;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use rust_decimal::Decimal;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard};

pub use approval::{Approval, ApprovalState};
pub use claim::room_for;
pub(crate) use claim::{over_error, recalled_error};
pub use memory::MemoryStore;

use crate::call::{CallId, SessionKey};
use crate::error::{Effects, ToolError};
use crate::json::Digest;
use crate::ledger::{Recorded, Row};
use crate::limits::{Charge, Over, Spend, Unit};
use crate::outcome::Outcome;
use crate::policy::{Facts, Needs, RecallFact, RecalledBy, Used};
use crate::progress::{Ended, Progress};
use crate::session::{Alter, Changes, Revoked, State};
use crate::tool::Polling;
use crate::values::Seen;

/// The store could not do what was asked; nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct StoreError(pub String);

/// What a kill switch stops.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// An agent.
    Agent(Arc<str>),
    /// A tool, in every agent.
    Tool(Arc<str>),
    /// A principal.
    Principal(Arc<str>),
    /// One session.
    Session(SessionKey),
}

/// What a call is recalled by: its key, or for a tool declared `once` its arguments.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RecallKey {
    /// Who called.
    pub principal: Arc<str>,
    /// As which agent.
    pub agent: Arc<str>,
    /// Which tool.
    pub tool: Arc<str>,
    /// The client's key, or the digest of the arguments.
    pub key: String,
}

impl RecallKey {
    /// Whether it is the client's, or of a tool declared `once`.
    #[must_use]
    pub fn kind(&self) -> RecalledBy {
        if self.key.starts_with("once:") { RecalledBy::Once } else { RecalledBy::Key }
    }
}

/// What is known of an earlier call under the same key.
#[derive(Debug, Clone, PartialEq)]
pub enum Recalled {
    /// It ran; this is what it came to, unless that was so long ago that only the fact is kept.
    Settled(Option<Outcome>),
    /// It is running.
    InProgress,
    /// It may have run; nobody knows.
    Pending(CallId),
    /// It was made with other arguments.
    KeyReused,
}

impl Recalled {
    /// What is written down of it.
    #[must_use]
    pub const fn fact(&self) -> RecallFact {
        match self {
            Self::Settled(Some(_)) => RecallFact::Settled,
            Self::Settled(None) => RecallFact::Forgotten,
            Self::InProgress => RecallFact::InProgress,
            Self::Pending(_) => RecallFact::Pending,
            Self::KeyReused => RecallFact::KeyReused,
        }
    }
}

/// A session held by a call. Dropping it lets the session go.
#[expect(dead_code, reason = "held for its drop")]
pub struct Hold(Guard);

#[expect(dead_code, reason = "held for its drop")]
pub(crate) enum Guard {
    Alone(OwnedRwLockWriteGuard<()>),
    Together(OwnedRwLockReadGuard<()>),
    Other(Box<dyn Any + Send + Sync>),
}

impl Hold {
    /// Anything that lets the session go when it is dropped.
    #[must_use]
    pub fn new(guard: impl Any + Send + Sync) -> Self {
        Self(Guard::Other(Box::new(guard)))
    }

    pub(crate) const fn of(guard: Guard) -> Self {
        Self(guard)
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hold")
    }
}

/// A validated call comes to its session.
#[derive(Debug)]
pub struct Enter<'a> {
    /// The session.
    pub key: &'a SessionKey,
    /// The judged call.
    pub digest: Digest,
    /// What it is recalled by.
    pub recall: &'a [RecallKey],
    /// Whether it counts for progress.
    pub counts: bool,
    /// How it may be polled.
    pub polling: Option<&'a Polling>,
    /// Holds the session first: alone or with other readers, waiting this long. `None` where it is held already.
    pub hold: Option<(bool, Duration)>,
    /// Now.
    pub now: Timestamp,
}

/// What it finds there.
#[derive(Debug)]
pub struct Entered {
    /// Version of the session.
    pub version: u64,
    /// When the session began.
    pub opened: Timestamp,
    /// What it holds: a snapshot, with all its slices; with the rest where [`Store::snapshots_are_complete`].
    pub state: Arc<State>,
    /// How many rows the ledger has.
    pub rows: u64,
    /// An earlier call under the same key.
    pub recalled: Option<Recalled>,
    /// Which kind of key it was.
    pub recalled_by: Option<RecalledBy>,
    /// How often the same call was made.
    pub progress: Progress,
    /// The session, held.
    pub hold: Option<Hold>,
}

/// A durable intent: written before the effect.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Intent {
    /// The call.
    pub call: CallId,
    /// Its session.
    pub key: SessionKey,
    /// Its tool.
    pub tool: Arc<str>,
    /// The judged call.
    pub digest: Digest,
    /// The call as it was asked for, before hooks: what a repetition is compared with.
    pub asked: Digest,
    /// What it will be recalled by.
    pub recall: Vec<RecallKey>,
    /// Who works on it: a process, or a client's session.
    pub owner: Arc<str>,
    /// Until when; afterwards, without an end, it is pending.
    pub lease: Timestamp,
    /// False for a read, which leaves nothing to reconcile.
    pub effect: bool,
    /// What the ledger will say if nobody ever tells more, where the store outlives the process.
    #[serde(skip)]
    pub row: Option<Arc<Row>>,
    /// The pass of a call that a client runs, under the client's name for it. It may hold secrets, and a store must seal it.
    #[serde(skip)]
    pub pass: Option<(String, Vec<u8>)>,
    /// What it writes to, if it happens or may have, by the keys of [`crate::values::Carrying`]: remembered at once where a client runs
    /// it, else when it ends, or when nobody says how.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub carriers: Vec<String>,
    /// What it writes, to be remembered with the intent.
    #[serde(skip)]
    pub seen: Option<Box<Seen>>,
    /// What it takes away, if it happens or may have: at once where a client runs it, else when nobody says how it ended.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub revokes: Vec<Revoked>,
}

impl Intent {
    /// Whether a client runs it: when that is, and how it ends, nobody here sees.
    #[must_use]
    pub fn is_run_by_client(&self) -> bool {
        self.owner.starts_with("client:")
    }
}

/// A pass that was kept, taken out to settle its call: nobody else gets it.
#[derive(Debug, Clone, PartialEq)]
pub struct Taken {
    /// The claim.
    pub intent: Intent,
    /// The pass.
    pub pass: Vec<u8>,
    /// What was used of each counter before it.
    pub used: Vec<Used>,
}

/// Why a claim failed. Nothing was reserved.
#[derive(Debug, Clone, PartialEq)]
pub enum NotClaimed {
    /// A charge has no room.
    Over {
        /// Which one.
        index: usize,
        /// What is used of it.
        over: Over,
        /// What is used of those before it, with what each of them takes.
        used: Vec<Decimal>,
    },
    /// Somebody else was first, under a key of this kind.
    Recalled(Recalled, RecalledBy),
    /// The approval is gone: used, expired or taken back.
    ApprovalGone,
    /// Somebody has pulled the kill switch meanwhile.
    Paused(Target, String),
}

/// How a claim ends: by what happened in the world, not by what the caller was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Settle {
    /// It happened: the charges stand.
    Done,
    /// Nothing happened: the charges are released.
    Released,
    /// Nobody knows: the charges stay reserved until somebody settles it.
    Pending,
}

impl Settle {
    /// How a claim ends after a call that left this behind.
    #[must_use]
    pub const fn by(effects: Effects) -> Self {
        match effects {
            Effects::None | Effects::RolledBack => Self::Released,
            Effects::Done => Self::Done,
            Effects::Unknown => Self::Pending,
        }
    }

    /// How the claim of a read ends: whatever became of it, there is nothing to find out.
    #[must_use]
    pub const fn of_read(self) -> Self {
        match self {
            Self::Pending => Self::Released,
            Self::Done | Self::Released => self,
        }
    }

    /// What a charge comes to in the end: what was reserved, what was really spent, or nothing.
    #[must_use]
    pub fn amount(self, charge: &Charge, spent: Option<Spend>) -> Decimal {
        match (self, charge.unit) {
            (_, Unit::Attempt) => charge.amount,
            (Self::Released, Unit::Fixed) => Decimal::ZERO,
            (_, Unit::Fixed) => charge.amount,
            (Self::Released, _) if spent.is_none() => Decimal::ZERO,
            (_, Unit::Tokens) => spent.map_or(charge.amount, |s| s.tokens.into()),
            (_, Unit::Money) => spent.map_or(charge.amount, |s| s.money),
        }
    }

    /// What a call comes to that turns out never to have happened.
    #[must_use]
    pub fn never_happened() -> Outcome {
        ToolError::of(crate::code::CANCELLED, "it never happened").into()
    }

    /// What it leaves behind.
    #[must_use]
    pub const fn effects(self) -> Effects {
        match self {
            Self::Done => Effects::Done,
            Self::Released => Effects::None,
            Self::Pending => Effects::Unknown,
        }
    }
}

/// The end of a call: everything in one transaction.
#[derive(Debug, Clone)]
pub struct Finish {
    /// The row.
    pub row: Arc<Row>,
    /// Version that the changes were made against.
    pub version: u64,
    /// What changes, after a success.
    pub changes: Option<Changes>,
    /// Evidence that is taken away: after a failure too, if the act may have happened.
    pub revoked: Vec<Revoked>,
    /// Values to remember, whatever happened: the model has read them.
    pub seen: Option<Box<Seen>>,
    /// What is appended to log slices, whatever happened.
    pub logs: Vec<(Arc<str>, Value)>,
    /// How the claim ends, where there is one.
    pub settle: Settle,
    /// What it came to, where it can be recalled. Not redacted beyond what the caller saw.
    pub outcome: Option<Outcome>,
    /// What was really spent, where the tool said so; else what was reserved counts.
    pub spent: Option<Spend>,
    /// Large outputs to keep, by handle.
    pub outputs: Vec<(String, Arc<str>)>,
    /// How it ended, for the next call's progress.
    pub ended: Option<Ended>,
    /// Whether it must survive a power cut, and not only the end of the process: an effect, or the refusal of one.
    pub durable: bool,
}

/// The session had changed in between. Nothing was written, not even the row: finish again without changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conflict;

/// A spooled row that a store can never take in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unfit {
    /// Its call.
    pub call: CallId,
    /// What stands in its way.
    pub why: String,
}

/// A backend.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// Whether the agent, principal, tool or session of a call is paused, and why.
    async fn paused(&self, key: &SessionKey, tool: &Arc<str>) -> Result<Option<(Target, String)>, StoreError>;
    /// Turns a kill switch on, with a reason, or off.
    async fn set_pause(&self, target: Target, reason: Option<String>) -> Result<(), StoreError>;

    /// Holds a session, alone or together with other readers; `None` if it stays held by others for this long.
    async fn hold(&self, key: &SessionKey, alone: bool, wait: Duration) -> Result<Option<Hold>, StoreError>;
    /// Holds the session, then recalls, counts and loads, in one transaction. Opens the session if it
    /// is new; `None` if others hold it for too long, and then nothing is counted.
    async fn enter(&self, enter: Enter<'_>) -> Result<Option<Box<Entered>>, StoreError>;
    /// What [`Store::enter`] would find, changing nothing.
    async fn look(&self, enter: Enter<'_>) -> Result<Box<Entered>, StoreError>;
    /// Whether anything at all may be paused: `false` saves a look.
    fn may_be_paused(&self) -> bool {
        true
    }
    /// Whether the snapshot of a session holds all its evidence and marks, so that only counters must be loaded.
    fn snapshots_are_complete(&self) -> bool {
        false
    }

    /// Loads what policies need into `facts`: evidence and marks at least as new as a snapshot, counters as they are.
    async fn load(&self, key: &SessionKey, needs: &Needs, at: &State, facts: &mut Facts) -> Result<(), StoreError>;
    /// For each of these charges: what is used, or that it does not fit.
    async fn room(&self, charges: &[Charge], now: Timestamp) -> Result<Vec<Result<Decimal, Over>>, StoreError>;
    /// Claims: the intent is durable, every charge reserved and the approval used, or none of it. Says what was used
    /// of each counter before.
    async fn begin(
        &self,
        intent: Box<Intent>,
        charges: &[Charge],
        approval: Option<&str>,
        now: Timestamp,
    ) -> Result<Result<Vec<Decimal>, NotClaimed>, StoreError>;
    /// Ends a call: state, claim, charges and row in one transaction. Where the ledger outlives the process, there is a
    /// receipt for the row.
    async fn finish(&self, finish: Box<Finish>) -> Result<Result<Option<Recorded>, Conflict>, StoreError>;

    /// Takes the newest pass for a tool that is kept under a client's name for a call, if that call is not settled.
    async fn take_pass(&self, key: &SessionKey, client: &str, tool: &str) -> Result<Option<Taken>, StoreError>;
    /// A client's session is over: what it was admitted to and has not reported is pending from here on.
    async fn leave(&self, key: &SessionKey, now: Timestamp) -> Result<(), StoreError>;

    /// A session's version and slices as they stand; with the rest where [`Store::snapshots_are_complete`].
    async fn snapshot(&self, key: &SessionKey) -> Result<(u64, Arc<State>), StoreError>;
    /// The whole of a session's state, however much that is.
    async fn session(&self, key: &SessionKey) -> Result<Option<Arc<State>>, StoreError>;
    /// Changes a session from outside a call.
    async fn alter(&self, key: &SessionKey, alter: Alter) -> Result<(), StoreError>;
    /// Adds to counters outside a call, as the loop does for the model's own tokens.
    async fn spend(&self, charges: &[Charge], now: Timestamp) -> Result<(), StoreError>;

    /// Keeps a request for approval.
    async fn ask(&self, approval: Approval) -> Result<(), StoreError>;
    /// The newest approval for exactly this call.
    async fn approval_for(&self, key: &SessionKey, digest: Digest) -> Result<Option<Approval>, StoreError>;
    /// An approval by name.
    async fn approval(&self, id: &str) -> Result<Option<Approval>, StoreError>;
    /// Answers a waiting approval; false if it is not waiting any more, or is not this person's to answer.
    async fn answer(&self, id: &str, approved: bool, by: &str, now: Timestamp) -> Result<bool, StoreError>;

    /// Claims that nobody knows the end of.
    async fn pending(&self, now: Timestamp) -> Result<Vec<Intent>, StoreError>;
    /// Settles such a claim, and writes a row that says who did; false if there is none of this name. `shown` is the
    /// outcome as it may be written down.
    async fn settle(
        &self,
        call: CallId,
        settle: Settle,
        outcome: Outcome,
        shown: Outcome,
        by: &str,
        now: Timestamp,
    ) -> Result<bool, StoreError>;

    /// A stored output of this session.
    async fn output(&self, key: &SessionKey, handle: &str) -> Result<Option<Arc<str>>, StoreError>;
    /// The rows of a session in order.
    async fn rows(&self, key: &SessionKey) -> Result<Vec<Arc<Row>>, StoreError>;
    /// Whether the ledger says that a call succeeded.
    async fn has_succeeded(&self, call: CallId) -> Result<bool, StoreError>;
    /// Takes in a row that was spooled while the store was away. A row it has already is left alone.
    async fn take_in(&self, row: Arc<Row>) -> Result<(), StoreError>;
    /// Takes in several, in their order: after an error perhaps some of them, which may be given again. Those that it can never
    /// take in, however often they are given, it leaves out and names.
    async fn take_in_all(&self, rows: &[Arc<Row>]) -> Result<Vec<Unfit>, StoreError> {
        for row in rows {
            self.take_in(Arc::clone(row)).await?;
        }
        Ok(Vec::new())
    }

    /// Gets to know an agent's definition, to keep it once, under its digest, with the rows that were decided by it.
    fn introduce(&self, config: Digest, definition: &Arc<str>) {
        let _ = (config, definition);
    }
    /// The key that secrets leave their marks with, so that equal values can be matched after a restart.
    fn redaction_key(&self) -> Option<[u8; 32]> {
        None
    }
    /// Where the store keeps what does not belong into it, where it outlives the process.
    fn home(&self) -> Option<&Path> {
        None
    }
    /// The name under which this process owns claims, where the store can tell whether the process is alive.
    fn owner(&self) -> Option<Arc<str>> {
        None
    }
}
