//! Defines the reads of a ledger for audit, replay, backtest, lint and doctor, for any store.

use jiff::Timestamp;
use toolgate::store::{Approval, ClaimRecord, PauseTarget, StoreError};
use toolgate::{BacktestPlace, CallId, Receipt, Row, SessionKey};
use toolgate_json::Digest;

use crate::reader::{Ledger, LedgerEntry, RowFilter};
use crate::stats::LedgerStats;
use crate::verify::report::{TrustRoots, VerificationReport, VerifyError};

/// Reads a ledger. Other processes may write to it meanwhile.
pub trait LedgerReader {
    /// Calls `f` with each row that matches, until `f` returns `false`.
    ///
    /// # Errors
    /// The rows cannot be read, or `f` returns an error.
    fn query(
        &self,
        filter: &RowFilter,
        f: &mut dyn FnMut(LedgerEntry) -> Result<bool, StoreError>,
    ) -> Result<(), StoreError>;
    /// Returns all rows that match.
    ///
    /// # Errors
    /// The rows cannot be read.
    fn find(&self, filter: &RowFilter) -> Result<Vec<LedgerEntry>, StoreError>;
    /// Counts the rows that match.
    ///
    /// # Errors
    /// The rows cannot be counted.
    fn count(&self, filter: &RowFilter) -> Result<u64, StoreError>;
    /// Returns the row of a call, unless it was pruned, and the rows that settle the call.
    ///
    /// # Errors
    /// The rows cannot be read.
    fn rows_of_call(&self, call: CallId) -> Result<Vec<LedgerEntry>, StoreError>;
    /// Returns at most 5 calls whose ids begin or end with these hexadecimal digits.
    ///
    /// # Errors
    /// The rows cannot be read.
    fn find_calls(&self, part: &str) -> Result<Vec<CallId>, StoreError>;
    /// Returns the names of entities in the ledger.
    ///
    /// # Errors
    /// The entities cannot be read.
    fn entity_names(&self) -> Result<Vec<String>, StoreError>;
    /// Returns the sessions with this name, or all sessions.
    ///
    /// # Errors
    /// The sessions cannot be read.
    fn sessions(&self, name: Option<&str>) -> Result<Vec<SessionKey>, StoreError>;
    /// Counts the sessions of each agent, and for each of its tools the sessions that used it.
    ///
    /// # Errors
    /// The ledger cannot be read.
    fn sessions_by_tool(&self) -> Result<Vec<(String, Option<String>, u64)>, StoreError>;
    /// Returns the positions of an agent's rows in a period.
    ///
    /// # Errors
    /// The rows cannot be read.
    fn backtest_places(
        &self,
        agent: &str,
        since: Option<Timestamp>,
        until: Option<Timestamp>,
    ) -> Result<Vec<BacktestPlace>, StoreError>;
    /// Returns the digests of the configurations that decided an agent's calls in a period.
    ///
    /// # Errors
    /// The rows cannot be read.
    fn config_digests(
        &self,
        agent: &str,
        since: Option<Timestamp>,
        until: Option<Timestamp>,
    ) -> Result<Vec<Digest>, StoreError>;
    /// Returns the row with a sequence number.
    ///
    /// # Errors
    /// The row cannot be read.
    fn find_row(&self, seq: u64) -> Result<Option<Row>, StoreError>;
    /// Returns the sequence number of the last pruned row, or 0.
    ///
    /// # Errors
    /// The ledger cannot be read.
    fn last_pruned_seq(&self) -> Result<u64, StoreError>;
    /// Returns the sequence number of the last row, or 0.
    ///
    /// # Errors
    /// The ledger cannot be read.
    fn last_seq(&self) -> Result<u64, StoreError>;
    /// Checks whether the row of a receipt is unchanged. Returns `None` if the row is missing.
    ///
    /// # Errors
    /// The row cannot be read.
    fn check_receipt_row(&self, receipt: &Receipt) -> Result<Option<bool>, StoreError>;
    /// Creates a signed receipt for a row.
    ///
    /// The whole ledger must verify and the row must be signed already. Otherwise a user could
    /// insert a row and get a signature for it.
    ///
    /// # Errors
    /// The ledger does not verify, the row is not signed yet, or the key is missing.
    fn sign_receipt(&self, entry: &LedgerEntry) -> Result<Receipt, StoreError>;
    /// Returns the public key of this ledger.
    ///
    /// # Errors
    /// The key cannot be read, or the state directory does not have it.
    fn public_key(&self) -> Result<String, StoreError>;
    /// Returns the approvals that wait for an answer, oldest first.
    ///
    /// # Errors
    /// The approvals cannot be read.
    fn waiting_approvals(&self, now: Timestamp) -> Result<Vec<Approval>, StoreError>;
    /// Returns the ids of all stored approvals, oldest first, including answered and expired ones.
    ///
    /// # Errors
    /// The approvals cannot be read.
    fn approval_ids(&self) -> Result<Vec<String>, StoreError>;
    /// Returns the definition of an agent by its digest in rows.
    ///
    /// # Errors
    /// The definition cannot be read.
    fn definition(&self, config: Digest) -> Result<Option<String>, StoreError>;
    /// Returns the pending claims: calls with effects whose outcome is unknown.
    ///
    /// # Errors
    /// The claims cannot be read.
    fn pending_claims(&self, now: Timestamp) -> Result<Vec<ClaimRecord>, StoreError>;
    /// Returns the paused targets with their reasons.
    ///
    /// # Errors
    /// The table cannot be read.
    fn paused_targets(&self) -> Result<Vec<(PauseTarget, String)>, StoreError>;
    /// Returns true if this agent, tool, principal or session occurs in the ledger.
    ///
    /// # Errors
    /// The ledger cannot be read.
    fn has_target(&self, target: &PauseTarget) -> Result<bool, StoreError>;
    /// Checks every row, every link, every signature, and the high-water mark.
    ///
    /// Calls `progress` after every thousandth row.
    ///
    /// # Errors
    /// The first problem.
    fn verify(
        &self,
        trust: &TrustRoots,
        progress: &mut dyn FnMut(u64),
    ) -> Result<VerificationReport, VerifyError>;
    /// Returns the last pruned row, if rows were pruned after the call id was created.
    ///
    /// The row of the call may be one of the pruned rows.
    ///
    /// # Errors
    /// The ledger cannot be read.
    fn pruned_since(&self, call: CallId) -> Result<Option<u64>, StoreError>;
    /// Computes statistics over the rows that match `filter`.
    ///
    /// # Errors
    /// The rows cannot be read.
    fn compute_stats(&self, filter: &RowFilter) -> Result<LedgerStats, StoreError>;
}

impl LedgerReader for Ledger {
    fn query(
        &self,
        filter: &RowFilter,
        f: &mut dyn FnMut(LedgerEntry) -> Result<bool, StoreError>,
    ) -> Result<(), StoreError> {
        Ledger::query(self, filter, f)
    }

    fn find(&self, filter: &RowFilter) -> Result<Vec<LedgerEntry>, StoreError> {
        Ledger::find(self, filter)
    }

    fn count(&self, filter: &RowFilter) -> Result<u64, StoreError> {
        Ledger::count(self, filter)
    }

    fn rows_of_call(&self, call: CallId) -> Result<Vec<LedgerEntry>, StoreError> {
        Ledger::rows_of_call(self, call)
    }

    fn find_calls(&self, part: &str) -> Result<Vec<CallId>, StoreError> {
        Ledger::find_calls(self, part)
    }

    fn entity_names(&self) -> Result<Vec<String>, StoreError> {
        Ledger::entity_names(self)
    }

    fn sessions(&self, name: Option<&str>) -> Result<Vec<SessionKey>, StoreError> {
        Ledger::sessions(self, name)
    }

    fn sessions_by_tool(&self) -> Result<Vec<(String, Option<String>, u64)>, StoreError> {
        Ledger::sessions_by_tool(self)
    }

    fn backtest_places(
        &self,
        agent: &str,
        since: Option<Timestamp>,
        until: Option<Timestamp>,
    ) -> Result<Vec<BacktestPlace>, StoreError> {
        Ledger::backtest_places(self, agent, since, until)
    }

    fn config_digests(
        &self,
        agent: &str,
        since: Option<Timestamp>,
        until: Option<Timestamp>,
    ) -> Result<Vec<Digest>, StoreError> {
        Ledger::config_digests(self, agent, since, until)
    }

    fn find_row(&self, seq: u64) -> Result<Option<Row>, StoreError> {
        Ledger::find_row(self, seq)
    }

    fn last_pruned_seq(&self) -> Result<u64, StoreError> {
        Ledger::last_pruned_seq(self)
    }

    fn last_seq(&self) -> Result<u64, StoreError> {
        Ledger::last_seq(self)
    }

    fn check_receipt_row(&self, receipt: &Receipt) -> Result<Option<bool>, StoreError> {
        Ledger::check_receipt_row(self, receipt)
    }

    fn sign_receipt(&self, entry: &LedgerEntry) -> Result<Receipt, StoreError> {
        Ledger::sign_receipt(self, entry)
    }

    fn public_key(&self) -> Result<String, StoreError> {
        Ledger::public_key(self)
    }

    fn waiting_approvals(&self, now: Timestamp) -> Result<Vec<Approval>, StoreError> {
        Ledger::waiting_approvals(self, now)
    }

    fn approval_ids(&self) -> Result<Vec<String>, StoreError> {
        Ledger::approval_ids(self)
    }

    fn definition(&self, config: Digest) -> Result<Option<String>, StoreError> {
        Ledger::definition(self, config)
    }

    fn pending_claims(&self, now: Timestamp) -> Result<Vec<ClaimRecord>, StoreError> {
        Ledger::pending_claims(self, now)
    }

    fn paused_targets(&self) -> Result<Vec<(PauseTarget, String)>, StoreError> {
        Ledger::paused_targets(self)
    }

    fn has_target(&self, target: &PauseTarget) -> Result<bool, StoreError> {
        Ledger::has_target(self, target)
    }

    fn verify(
        &self,
        trust: &TrustRoots,
        progress: &mut dyn FnMut(u64),
    ) -> Result<VerificationReport, VerifyError> {
        Ledger::verify(self, trust, progress)
    }

    fn pruned_since(&self, call: CallId) -> Result<Option<u64>, StoreError> {
        Ledger::pruned_since(self, call)
    }

    fn compute_stats(&self, filter: &RowFilter) -> Result<LedgerStats, StoreError> {
        Ledger::compute_stats(self, filter)
    }
}
