//! Moves spooled rows into the ledger when the store is available again.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::ledger::row::Row;
use crate::pipeline::Toolgate;
use crate::pipeline::rejection::Rejection;
use crate::store::StoreError;
use toolgate_json::Digest;

/// Maximum number of spooled rows in one store transaction.
const MAX_ROWS_PER_TRANSACTION: usize = 256;

impl Toolgate {
    /// Appends spooled rows before a call is checked.
    ///
    /// A spooled row may revoke evidence that the call relies on. While the rows cannot be
    /// appended, no call is admitted.
    pub(crate) async fn flush_spool(&self) -> Result<(), Rejection> {
        if self.0.spool.has_waiting_rows() {
            Box::pin(self.recover_spool()).await?;
        }
        Ok(())
    }

    /// Appends spooled rows after a successful commit, unless another task is doing so.
    pub(crate) async fn try_flush_spool(&self) {
        if self.0.spool.has_waiting_rows()
            && let Ok(mut last) = self.0.spool.drain_lock.try_lock()
            && let Err(error) = Box::pin(self.flush_with_lock(&mut last)).await
        {
            tracing::warn!(%error, "cannot append spooled rows yet");
        }
    }

    /// Appends spooled rows to the ledger and returns their number.
    ///
    /// This also happens automatically after the next recorded call. A row that the store can never
    /// accept is moved to a separate file.
    ///
    /// # Errors
    /// The store is still unavailable, or the spool cannot be read. The rows stay in the spool.
    pub async fn recover_spool(&self) -> Result<usize, StoreError> {
        let spool = &self.0.spool;
        let attempts_before = spool.drain_attempts.load(Ordering::SeqCst);
        // A concurrent task waits until the rows are appended.
        let mut last = spool.drain_lock.lock().await;
        // An attempt that started later and failed also answers for the tasks that waited for it.
        // Otherwise each waiting task would retry in turn.
        if let Some((began, error)) = &*last
            && *began > attempts_before
        {
            return Err(error.clone());
        }
        self.flush_with_lock(&mut last).await
    }

    async fn flush_with_lock(
        &self,
        last: &mut Option<(u64, StoreError)>,
    ) -> Result<usize, StoreError> {
        let began = self.0.spool.drain_attempts.fetch_add(1, Ordering::SeqCst) + 1;
        let recovered = self.flush_all_rows().await;
        *last = recovered.as_ref().err().map(|error| (began, error.clone()));
        recovered
    }

    async fn flush_all_rows(&self) -> Result<usize, StoreError> {
        // Try a single row first. While the store is unavailable, the spool is not read in full.
        if let Some((first, before)) = self.0.spool.first_unstored_row() {
            self.register_definitions_of(std::slice::from_ref(&first));
            self.0.store.append_all_spooled(std::slice::from_ref(&first)).await?;
            self.0.spool.record_stored_rows(before + 1);
        }
        let failed = |error: io::Error| {
            StoreError::unavailable(format!("{}: {error}", self.0.spool.path().display()))
        };
        let spooled = self.0.spool.read_rows().map_err(failed)?;
        self.register_definitions_of(&spooled.rows);
        // One transaction for many rows, so that waiting calls do not wait for one disk sync per
        // row.
        let mut rejected = Vec::new();
        for (n, rows) in spooled.rows.chunks(MAX_ROWS_PER_TRANSACTION).enumerate() {
            rejected.extend(self.0.store.append_all_spooled(rows).await?);
            self.0.spool.record_stored_rows(n * MAX_ROWS_PER_TRANSACTION + rows.len());
        }
        // A row that the store can never accept must not block the others.
        self.0
            .spool
            .save_rejected_rows(&spooled, &rejected)
            .and_then(|()| self.0.spool.remove_stored_rows(&spooled))
            .map_err(failed)?;
        // The rows in memory are appended, but unread files may contain further revocations.
        if let Some(error) = spooled.read_error {
            return Err(failed(error));
        }
        if let Err(error) = self.0.spool.delete_unused_definitions() {
            tracing::debug!(%error, "cannot delete unused agent definitions in the spool");
        }
        Ok(spooled.rows.len().saturating_sub(rejected.len()))
    }

    /// Rows of other processes may refer to other configurations. Register their definitions too.
    fn register_definitions_of(&self, rows: &[Arc<Row>]) {
        let is_own = |config: &Digest| {
            self.0
                .agents
                .values()
                .any(|agent| agent.definition_digest == *config && !agent.definition.is_empty())
        };
        let others: BTreeSet<Digest> =
            rows.iter().map(|row| row.config).filter(|config| !is_own(config)).collect();
        for config in others {
            if let Some(definition) = self.0.spool.load_definition(config) {
                self.0.store.register_definition(config, &definition);
            }
        }
    }
}
