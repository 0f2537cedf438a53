//! Rows that were spooled while the store was away come into the ledger.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{Stop, Toolgate};
use crate::json::Digest;
use crate::ledger::Row;
use crate::store::StoreError;

/// How many rows are handed to the store at once.
const TAKEN_AT_ONCE: usize = 256;

impl Toolgate {
    /// Rows that wait for the store go in before a call is judged. It may hang on what they take away: as long as they cannot, no call
    /// is let through.
    pub(super) async fn take_in_spooled(&self) -> Result<(), Stop> {
        if self.0.spool.is_waiting() {
            Box::pin(self.recover()).await?;
        }
        Ok(())
    }

    /// The store is there: rows that wait for it can go in, unless somebody is at it.
    pub(super) async fn take_in_meanwhile(&self) {
        if self.0.spool.is_waiting()
            && let Ok(mut last) = self.0.spool.taking.try_lock()
            && let Err(error) = Box::pin(self.take_turn(&mut last)).await
        {
            tracing::warn!(%error, "spooled rows could not be taken in yet");
        }
    }

    /// Brings rows that were spooled while the store was away into the ledger, and says how many. Also happens by
    /// itself after the next call that the store records. A row that the store can never take in is put aside in a file.
    ///
    /// # Errors
    /// What still stands in the way; the rows stay where they are.
    pub async fn recover(&self) -> Result<usize, StoreError> {
        let spool = &self.0.spool;
        let came = spool.tries.load(Ordering::SeqCst);
        // Whoever comes beside another waits until its rows are in.
        let mut last = spool.taking.lock().await;
        // What has begun since, and failed, speaks for those who came before it: they do not try one after the other.
        if let Some((began, error)) = &*last
            && *began > came
        {
            return Err(error.clone());
        }
        self.take_turn(&mut last).await
    }

    async fn take_turn(&self, last: &mut Option<(u64, StoreError)>) -> Result<usize, StoreError> {
        let began = self.0.spool.tries.fetch_add(1, Ordering::SeqCst) + 1;
        let recovered = self.take_in_all().await;
        *last = recovered.as_ref().err().map(|error| (began, error.clone()));
        recovered
    }

    async fn take_in_all(&self) -> Result<usize, StoreError> {
        // One tells whether the store is back: as long as it is away, nobody reads all that waits for it.
        if let Some((first, before)) = self.0.spool.first() {
            self.introduce_those_of(std::slice::from_ref(&first));
            self.0.store.take_in_all(std::slice::from_ref(&first)).await?;
            self.0.spool.has_stored(before + 1);
        }
        let failed = |error: io::Error| StoreError(format!("{}: {error}", self.0.spool.path().display()));
        let taken = self.0.spool.take().map_err(failed)?;
        self.introduce_those_of(&taken.rows);
        // Whoever waits for it does not wait for the disk once a row.
        let mut unfit = Vec::new();
        for (n, rows) in taken.rows.chunks(TAKEN_AT_ONCE).enumerate() {
            unfit.extend(self.0.store.take_in_all(rows).await?);
            self.0.spool.has_stored(n * TAKEN_AT_ONCE + rows.len());
        }
        // One that never goes in keeps no other out.
        self.0.spool.put_aside(&taken, &unfit).and_then(|()| self.0.spool.taken(&taken)).map_err(failed)?;
        // What was in memory is in; what stands in files may take away more.
        if let Some(error) = taken.unread {
            return Err(failed(error));
        }
        if let Err(error) = self.0.spool.sweep() {
            tracing::debug!(%error, "definitions that no spooled row waits for stay for now");
        }
        Ok(taken.rows.len().saturating_sub(unfit.len()))
    }

    /// What others have left may have been decided by what is not in force here: the store gets to know that, too.
    fn introduce_those_of(&self, rows: &[Arc<Row>]) {
        let own = |config: &Digest| self.0.agents.values().any(|agent| agent.config == *config && !agent.definition.is_empty());
        let others: BTreeSet<Digest> = rows.iter().map(|row| row.config).filter(|config| !own(config)).collect();
        for config in others {
            if let Some(definition) = self.0.spool.definition(config) {
                self.0.store.introduce(config, &definition);
            }
        }
    }
}
