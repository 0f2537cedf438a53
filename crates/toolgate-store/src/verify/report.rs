//! Defines the inputs and results of a ledger verification.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;
use toolgate::{CallId, SessionKey};
use toolgate_json::Digest;

use crate::error::DbError;

/// A position in the ledger with its chain value, saved outside of the ledger: `1040:9f3a…`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LedgerAnchor {
    /// The row.
    pub seq: u64,
    /// The chain value at that row.
    pub chain: Digest,
}

impl fmt::Display for LedgerAnchor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.seq, self.chain)
    }
}

impl Serialize for LedgerAnchor {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for LedgerAnchor {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            "not an anchor: expected a row number, a colon and 64 hexadecimal digits, as `toolgate audit verify` prints it".to_owned()
        };
        let (seq, chain) = text.trim().split_once(':').ok_or_else(wrong)?;
        let chain = serde_json::from_value(chain.into()).map_err(|_| wrong())?;
        Ok(Self { seq: seq.parse().map_err(|_| wrong())?, chain })
    }
}

/// Initial trust of a verification.
#[derive(Debug, Clone, Default)]
pub struct TrustRoots {
    /// An anchor that was saved outside of the ledger.
    pub anchor: Option<LedgerAnchor>,
    /// A current or earlier public key of the ledger. Default: the keys in the state directory.
    pub key: Option<String>,
}

/// Result of a successful verification.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct VerificationReport {
    /// Number of rows that were checked.
    pub rows: u64,
    /// Number of sessions of these rows.
    pub sessions: u64,
    /// Number of rows that were pruned before them.
    pub pruned: u64,
    /// Number of signatures that were checked.
    pub checkpoints: u64,
    /// The last signed row. Later rows can still be removed without a trace.
    pub signed_to: u64,
    /// The end of the ledger. Saved elsewhere and passed as `--anchor`, it detects an older copy.
    pub anchor: LedgerAnchor,
    /// The trusted keys: the initial ones, and those that they vouch for.
    pub keys: Vec<String>,
}

/// The first problem that a verification found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, thiserror::Error)]
pub struct VerifyError {
    /// The row.
    pub seq: Option<u64>,
    /// Its call.
    pub call: Option<CallId>,
    /// Its session.
    pub session: Option<SessionKey>,
    /// Description of the problem.
    pub what: String,
    /// Whether the ledger could not be checked: it cannot be read, or a key or anchor is missing.
    pub unchecked: bool,
}

impl fmt::Display for VerifyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(seq) = self.seq {
            write!(f, "row {seq}")?;
            if let Some(call) = self.call {
                write!(f, " (call {call})")?;
            }
            if let Some(key) = &self.session {
                write!(
                    f,
                    " of session `{}` of `{}` with `{}`",
                    key.session, key.principal, key.agent
                )?;
            }
            f.write_str(": ")?;
        }
        f.write_str(&self.what)
    }
}

impl VerifyError {
    pub(crate) fn new(what: impl Into<String>) -> Self {
        Self { seq: None, call: None, session: None, what: what.into(), unchecked: false }
    }

    pub(crate) fn unchecked(what: impl Into<String>) -> Self {
        Self { unchecked: true, ..Self::new(what) }
    }

    pub(crate) fn at_row(seq: u64, what: impl Into<String>) -> Self {
        Self { seq: Some(seq), ..Self::new(what) }
    }
}

impl From<DbError> for VerifyError {
    fn from(fault: DbError) -> Self {
        Self { unchecked: fault.is_unreadable(), ..Self::new(fault.to_string()) }
    }
}

impl From<rusqlite::Error> for VerifyError {
    fn from(error: rusqlite::Error) -> Self {
        DbError::from(error).into()
    }
}
