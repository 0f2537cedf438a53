//! What a check of the ledger starts from, and what it comes to.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;
use toolgate::json::Digest;
use toolgate::{CallId, SessionKey};

use crate::fault::Fault;

/// A place in the ledger that somebody noted down elsewhere: `1040:9f3a…`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Anchor {
    /// The row.
    pub seq: u64,
    /// The chain at that row.
    pub chain: Digest,
}

impl fmt::Display for Anchor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.seq, self.chain)
    }
}

impl Serialize for Anchor {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for Anchor {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || "an anchor is the number of a row, a colon and 64 hexadecimal digits, as `toolgate audit verify` prints it".to_owned();
        let (seq, chain) = text.trim().split_once(':').ok_or_else(wrong)?;
        let chain = serde_json::from_value(chain.into()).map_err(|_| wrong())?;
        Ok(Self { seq: seq.parse().map_err(|_| wrong())?, chain })
    }
}

/// What is believed from the beginning.
#[derive(Debug, Clone, Default)]
pub struct Trust {
    /// A place that was noted down elsewhere.
    pub anchor: Option<Anchor>,
    /// The public key of the ledger, or one that it had before; without it, the one beside the ledger.
    pub key: Option<String>,
}

/// A ledger that holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Verified {
    /// How many rows were looked at.
    pub rows: u64,
    /// Of how many sessions.
    pub sessions: u64,
    /// How many rows were pruned before them.
    pub pruned: u64,
    /// How many signatures were checked.
    pub checkpoints: u64,
    /// The last row that is signed. What is behind it can still be cut off without a trace.
    pub signed_to: u64,
    /// Where the ledger ends: note it down elsewhere, and `--anchor` will find whether this ledger was put back.
    pub anchor: Anchor,
    /// The keys that are believed: those to begin with, and those that they vouch for.
    pub keys: Vec<String>,
}

/// The first thing that is wrong with a ledger.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, thiserror::Error)]
pub struct Flaw {
    /// The row.
    pub seq: Option<u64>,
    /// Its call.
    pub call: Option<CallId>,
    /// Its session.
    pub session: Option<SessionKey>,
    /// What is wrong.
    pub what: String,
    /// Whether it could not even be checked, because it cannot be read, or something to check it with is missing.
    pub unchecked: bool,
}

impl fmt::Display for Flaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(seq) = self.seq {
            write!(f, "row {seq}")?;
            if let Some(call) = self.call {
                write!(f, " (call {call})")?;
            }
            if let Some(key) = &self.session {
                write!(f, " of session `{}` of `{}` with `{}`", key.session, key.principal, key.agent)?;
            }
            f.write_str(": ")?;
        }
        f.write_str(&self.what)
    }
}

impl Flaw {
    pub(crate) fn of(what: impl Into<String>) -> Self {
        Self { seq: None, call: None, session: None, what: what.into(), unchecked: false }
    }

    pub(crate) fn unchecked(what: impl Into<String>) -> Self {
        Self { unchecked: true, ..Self::of(what) }
    }

    pub(crate) fn at(seq: u64, what: impl Into<String>) -> Self {
        Self { seq: Some(seq), ..Self::of(what) }
    }
}

impl From<Fault> for Flaw {
    fn from(fault: Fault) -> Self {
        Self { unchecked: fault.is_unread(), ..Self::of(fault.to_string()) }
    }
}

impl From<rusqlite::Error> for Flaw {
    fn from(error: rusqlite::Error) -> Self {
        Fault::from(error).into()
    }
}
