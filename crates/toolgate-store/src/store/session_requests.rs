//! Opens and inspects the sessions of calls.

use std::sync::Arc;

use jiff::Timestamp;
use rusqlite::Connection;
use toolgate::policy::DedupKeyKind;
use toolgate::store::{
    DedupKey, PriorCall, SessionRequest, SessionSnapshot, Store as _, StoreError,
};
use toolgate::{PollingSettings, SessionKey};
use toolgate_json::Digest;

use super::SqliteStore;
use crate::error::DbResult;
use crate::tables::claim_settlement;
use crate::tables::claims;
use crate::tables::ledger;
use crate::tables::sessions::SessionHeader;
use crate::transaction::{SharedStoreState, UncountedCall, lock_unpoisoned, read_transaction};

/// How many calls of a session may be counted in memory before they are stored.
const MAX_UNCOUNTED_CALLS: usize = 64;

/// Owned copy of a session request, for the writer thread.
struct OwnedSessionRequest {
    key: SessionKey,
    digest: Digest,
    dedup_keys: Vec<DedupKey>,
    counts_repetition: bool,
    polling: Option<PollingSettings>,
    now: Timestamp,
}

impl OwnedSessionRequest {
    fn from_request(request: &SessionRequest<'_>, now: Timestamp) -> Self {
        Self {
            key: request.key.clone(),
            digest: request.digest,
            dedup_keys: request.dedup_keys.to_vec(),
            counts_repetition: request.counts_repetition,
            polling: request.polling.copied(),
            now,
        }
    }

    fn uncounted_call(&self) -> Option<UncountedCall> {
        self.counts_repetition.then_some(UncountedCall {
            digest: self.digest,
            at: self.now,
            polling: self.polling,
        })
    }

    fn find_prior_call(
        &self,
        sql: &Connection,
        shared: &SharedStoreState,
    ) -> DbResult<Option<(PriorCall, DedupKeyKind)>> {
        if self.dedup_keys.is_empty() {
            return Ok(None);
        }
        claims::find_prior_call(
            sql,
            &shared.state_dir,
            &shared.keys(),
            &self.dedup_keys,
            self.digest,
            self.now,
        )
    }
}

impl SqliteStore {
    /// Leases the session if requested, finds earlier calls, counts the call and loads the state.
    ///
    /// Returns `None` if the lease timed out.
    pub(super) async fn lease_and_open(
        &self,
        request: SessionRequest<'_>,
    ) -> Result<Option<Box<SessionSnapshot>>, StoreError> {
        let locked = match request.lease {
            Some(lease) => match self.acquire_session_lock(request.key, lease).await? {
                Some(guard) => Some((lease, guard)),
                None => return Ok(None),
            },
            None => None,
        };
        let now = self.now();
        let owned = OwnedSessionRequest::from_request(&request, now);
        // A long-lived process sweeps when it opens the ledger. A process that makes one call
        // sweeps a little each time.
        let sweeps = self.writer.is_inline();
        // Opening a known session writes nothing, unless many calls are counted in memory only.
        let read_known = |sql: &Connection,
                          shared: &SharedStoreState,
                          head: ledger::LedgerHead|
         -> DbResult<_> {
            let call = owned.uncounted_call();
            let Some((session, started_at, uncounted)) =
                SessionHeader::find_opened(sql, shared, &owned.key, call)?
            else {
                return Ok(None);
            };
            if uncounted.len() > MAX_UNCOUNTED_CALLS {
                return Ok(None);
            }
            let slices = session.read_raw_slices(sql)?;
            if call.is_some() {
                lock_unpoisoned(&shared.uncounted_calls).insert(owned.key.clone(), uncounted);
            }
            Ok(Some((session, started_at, slices, head.seq, None)))
        };
        let known = match sweeps || !owned.dedup_keys.is_empty() {
            true => None,
            false => self
                .writer
                .try_read_consistent(read_known)
                .map_err(|fault| self.with_path(&fault.into()))?,
        };
        let (session, started_at, slices, row_count, prior_call) = match known {
            Some(known) => known,
            None => {
                let opened = self.write(false, move |tx| {
                    if sweeps {
                        claim_settlement::sweep_client_claims(tx, owned.now)?;
                    }
                    let prior_call = owned.find_prior_call(tx.sql, tx.shared)?;
                    let call = owned
                        .uncounted_call()
                        .filter(|_| !matches!(prior_call, Some((PriorCall::Settled(_), _))));
                    let (session, started_at) =
                        SessionHeader::open_for_call(tx, &owned.key, call, owned.now)?;
                    let slices = session.read_raw_slices(tx.sql)?;
                    Ok((session, started_at, slices, tx.head.seq, prior_call))
                });
                opened.await?
            }
        };
        // Parse outside of the writer thread.
        let state =
            Arc::new(session.build_state(slices).map_err(|fault| self.with_path(&fault.into()))?);
        let (version, repetitions) = (session.version, session.progress);
        let (prior_call, dedup_key_kind) = prior_call.unzip();
        Ok(Some(Box::new(SessionSnapshot {
            version,
            started_at,
            state,
            row_count,
            prior_call,
            dedup_key_kind,
            repetitions,
            lease: locked.map(|(lease, guard)| self.register_lease(request.key, lease, guard)),
            now,
        })))
    }

    /// Returns the result of [`SqliteStore::lease_and_open`] without any change.
    pub(super) async fn read_snapshot(
        &self,
        request: SessionRequest<'_>,
    ) -> Result<Box<SessionSnapshot>, StoreError> {
        let now = self.now();
        let owned = OwnedSessionRequest::from_request(&request, now);
        self.read(move |sql, shared| {
            read_transaction(sql, |sql| {
                let (prior_call, dedup_key_kind) = owned.find_prior_call(sql, shared)?.unzip();
                let session = SessionHeader::find(sql, &owned.key)?;
                let mut repetitions =
                    session.as_ref().map(|session| session.progress).unwrap_or_default();
                if owned.counts_repetition {
                    repetitions.count_call(owned.digest, owned.now, owned.polling.as_ref());
                }
                Ok(Box::new(SessionSnapshot {
                    version: session.as_ref().map_or(0, |session| session.version),
                    started_at: session
                        .as_ref()
                        .and_then(|session| session.opened_at)
                        .unwrap_or(owned.now),
                    state: Arc::new(
                        session
                            .map(|session| session.read_slices(sql))
                            .transpose()?
                            .unwrap_or_default(),
                    ),
                    row_count: ledger::read_head(sql)?.seq,
                    prior_call,
                    dedup_key_kind,
                    repetitions,
                    lease: None,
                    now,
                }))
            })
        })
        .await
    }
}
