//! Stores claims, and the keys by which a repeated call finds its earlier claim.

use std::sync::Arc;

use jiff::Timestamp;
use rusqlite::{Connection, OptionalExtension, params};
use rust_decimal::Decimal;
use toolgate::limits::Charge;
use toolgate::policy::{CounterReading, DedupKeyKind};
use toolgate::store::{ClaimOwner, ClaimRecord, DedupKey, DeferredClaim, PriorCall};
use toolgate::{CallId, Row, SessionKey, provenance};
use toolgate_json::Digest;

use crate::error::{DbError, DbResult};
use crate::keys::LedgerKeys;
use crate::state_dir::StateDir;
use crate::tables::counters::{ReservedCharge, reserve_charge};
use crate::tables::inline_claims;
use crate::tables::ledger::{parse_digest, to_nanos};
use crate::tables::provenance::CarrierTable;
use crate::tables::sessions::{SessionHeader, from_nanos};
use crate::transaction::WriteTransaction;

/// A stored claim.
pub(crate) struct StoredClaim {
    pub(crate) call: CallId,
    pub(super) state: String,
    lease: Timestamp,
    pub(super) effect: bool,
    pub(crate) record: ClaimRecord,
    /// Reserved charges.
    pub(super) charges: Vec<ReservedCharge>,
    /// How much of each counter was used before.
    pub(super) used: Vec<CounterReading>,
    pub(crate) draft: Option<String>,
    outcome: Option<Vec<u8>>,
}

const CLAIM_COLUMNS: &str = "call, state, lease, effect, intent, charges, draft, outcome, used";

impl StoredClaim {
    fn from_row(row: &rusqlite::Row<'_>) -> DbResult<Self> {
        let (record, charges): (String, String) = (row.get(4)?, row.get(5)?);
        Ok(Self {
            call: CallId::from_bytes(row.get(0)?),
            state: row.get(1)?,
            lease: from_nanos(row.get(2)?),
            effect: row.get(3)?,
            record: serde_json::from_str(&record)?,
            charges: serde_json::from_str(&charges)?,
            draft: row.get(6)?,
            outcome: row.get(7)?,
            used: serde_json::from_str(&row.get::<_, String>(8)?)?,
        })
    }

    pub(crate) fn find(sql: &Connection, call: CallId) -> DbResult<Option<Self>> {
        let mut statement =
            sql.prepare_cached(&format!("SELECT {CLAIM_COLUMNS} FROM claims WHERE call = ?1"))?;
        let mut rows = statement.query(params![call.as_bytes().as_slice()])?;
        rows.next()?.map(Self::from_row).transpose()
    }

    /// Creates an open claim.
    pub(crate) fn new_open(
        record: ClaimRecord,
        charges: Vec<ReservedCharge>,
        used: Vec<CounterReading>,
        draft: Option<String>,
    ) -> Self {
        let state = "open".to_owned();
        Self {
            call: record.call,
            state,
            lease: record.lease,
            effect: record.effect,
            record,
            charges,
            used,
            draft,
            outcome: None,
        }
    }

    /// Inserts an open claim.
    pub(crate) fn insert(&self, sql: &Connection, session: i64) -> DbResult<()> {
        let charges: Vec<_> =
            self.charges.iter().map(|(n, at, charge)| (*n, *at, charge)).collect();
        insert_claim(sql, &self.record, session, &charges, &self.used, self.draft.as_deref(), None)
    }

    /// Reads all claims that are open or pending.
    pub(crate) fn read_unsettled(sql: &Connection) -> DbResult<Vec<Self>> {
        let mut unsettled = Self::read_matching(sql, "state <> 'settled'")?;
        unsettled.extend(inline_claims::read_inflight(sql)?);
        unsettled.sort_by_key(|claim| *claim.call.as_bytes());
        Ok(unsettled)
    }

    /// Reads open claims. The query does not read pending claims, of which there may be many.
    pub(super) fn read_open(sql: &Connection) -> DbResult<Vec<Self>> {
        Self::read_matching(sql, "state <> 'settled' AND state = 'open'")
    }

    fn read_matching(sql: &Connection, condition: &str) -> DbResult<Vec<Self>> {
        let mut statement =
            sql.prepare_cached(&format!("SELECT {CLAIM_COLUMNS} FROM claims INDEXED BY claims_unsettled WHERE {condition} ORDER BY call"))?;
        let mut rows = statement.query([])?;
        let mut found = Vec::new();
        while let Some(row) = rows.next()? {
            found.push(Self::from_row(row)?);
        }
        Ok(found)
    }

    pub(crate) fn is_settled(&self) -> bool {
        self.state == "settled"
    }

    /// Returns true if the owner of an open claim has ended.
    ///
    /// The state of a process is known. Any other owner has ended when the lease has expired.
    pub(crate) fn is_abandoned(&self, state_dir: &StateDir, now: Timestamp) -> bool {
        let process_ended = match &self.record.owner {
            ClaimOwner::Term(term) => state_dir.has_process_ended(term),
            ClaimOwner::ClientSession(_) => None,
        };
        self.state == "open" && process_ended.unwrap_or(now > self.lease)
    }

    pub(crate) fn is_pending(&self, state_dir: &StateDir, now: Timestamp) -> bool {
        self.effect && (self.state == "pending" || self.is_abandoned(state_dir, now))
    }

    fn prior_call(
        &self,
        state_dir: &StateDir,
        keys: &LedgerKeys,
        now: Timestamp,
    ) -> DbResult<Option<PriorCall>> {
        if self.is_settled() {
            let outcome = self
                .outcome
                .as_ref()
                .and_then(|sealed| keys.unseal(&outcome_seal_context(self.call), sealed));
            return Ok(Some(PriorCall::Settled(
                outcome.map(|text| serde_json::from_slice(&text)).transpose()?,
            )));
        }
        Ok(match self.is_pending(state_dir, now) {
            true => Some(PriorCall::Pending(self.call)),
            // An abandoned read had no effects.
            false if self.is_abandoned(state_dir, now) => None,
            false => Some(PriorCall::InProgress),
        })
    }
}

/// Returns the place to which an encrypted outcome is bound.
pub(super) fn outcome_seal_context(call: CallId) -> String {
    format!("outcome {call}")
}

/// Finds an earlier call with one of these keys.
pub(crate) fn find_prior_call(
    sql: &Connection,
    state_dir: &StateDir,
    keys: &LedgerKeys,
    recall: &[DedupKey],
    digest: Digest,
    now: Timestamp,
) -> DbResult<Option<(PriorCall, DedupKeyKind)>> {
    for key in recall {
        let found: Option<(Vec<u8>, [u8; 16])> = sql
            .prepare_cached("SELECT asked, call FROM recalls WHERE principal = ?1 AND agent = ?2 AND tool = ?3 AND key = ?4")?
            .query_row(params![&*key.principal, &*key.agent, &*key.tool, key.key], |row| Ok((row.get(0)?, row.get(1)?)))
            .optional()?;
        let Some((first_digest, call)) = found else { continue };
        // A tool declared `once` is recalled by its arguments, as requested or as changed by
        // hooks. Only a key of the caller can be reused for another request.
        if parse_digest(&first_digest)? != digest && key.kind() == DedupKeyKind::Key {
            return Ok(Some((PriorCall::KeyReused, DedupKeyKind::Key)));
        }
        if let Some(claim) = StoredClaim::find(sql, CallId::from_bytes(call))?
            && let Some(prior_call) = claim.prior_call(state_dir, keys, now)?
        {
            return Ok(Some((prior_call, key.kind())));
        }
    }
    Ok(None)
}

/// Stores a claim and reserves its charges.
pub(crate) fn store_claim(
    tx: &WriteTransaction<'_>,
    record: &ClaimRecord,
    draft: Option<&str>,
    charges: &[Charge],
    used: &[Decimal],
    now: Timestamp,
) -> DbResult<()> {
    for (n, (charge, used)) in charges.iter().zip(used).enumerate() {
        reserve_charge(tx.sql, record.call, n, charge, *used, now)?;
    }
    // A read has no effects to reconcile, so its claim stays in memory.
    if !record.effect
        && record.recall.is_empty()
        && record.pass.is_none()
        && tx.shared.is_own_claim(record)
    {
        let reserved = charges
            .iter()
            .enumerate()
            .map(|(n, charge)| (n, to_nanos(now), charge.clone()))
            .collect();
        tx.replace_read_charges(record.call, Some(reserved));
        return Ok(());
    }
    let mut session = SessionHeader::get_or_create(tx.sql, &record.key)?;
    // The call may kill this process, so count it before it runs.
    if session.count_uncounted_calls(tx, &record.key) {
        session.save(tx.sql)?;
    }
    let charges: Vec<(usize, i64, &Charge)> =
        charges.iter().enumerate().map(|(n, charge)| (n, to_nanos(now), charge)).collect();
    let reserved: Vec<_> =
        charges.iter().zip(used).map(|((n, at, charge), used)| (*n, *at, *charge, *used)).collect();
    if inline_claims::insert_inflight(tx, record, draft, &reserved)? {
        return Ok(());
    }
    let pass = record
        .pass
        .as_ref()
        .map(|(_, pass)| tx.shared.keys().seal(&deferred_seal_context(record.call), pass))
        .transpose()?;
    for key in &record.recall {
        tx.sql
            .prepare_cached("INSERT OR REPLACE INTO recalls (principal, agent, tool, key, asked, call) VALUES (?1, ?2, ?3, ?4, ?5, ?6)")?
            .execute(params![
                &*key.principal,
                &*key.agent,
                &*key.tool,
                key.key,
                record.asked.as_bytes().as_slice(),
                record.call.as_bytes().as_slice()
            ])?;
    }
    let used_before: Vec<CounterReading> = reserved
        .iter()
        .map(|(.., charge, used)| (charge.counter.clone(), charge.window, *used))
        .collect();
    insert_claim(tx.sql, record, session.id, &charges, &used_before, draft, pass.as_deref())
}

/// Returns the term of the process that owns a claim, or `None` if a client owns it.
fn term_of(record: &ClaimRecord) -> Option<&str> {
    match &record.owner {
        ClaimOwner::Term(term) => Some(term),
        ClaimOwner::ClientSession(_) => None,
    }
}

/// Inserts an open claim, with the encrypted state of a deferred call if there is one.
fn insert_claim(
    sql: &Connection,
    record: &ClaimRecord,
    session: i64,
    charges: &[(usize, i64, &Charge)],
    used: &[CounterReading],
    draft: Option<&str>,
    pass: Option<&[u8]>,
) -> DbResult<()> {
    sql.prepare_cached(
        "INSERT INTO claims (call, session, state, term, lease, effect, intent, charges, draft, used, client, pass) VALUES (?1, ?2, 'open', ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)",
    )?
    .execute(params![
        record.call.as_bytes().as_slice(),
        session,
        term_of(record),
        to_nanos(record.lease),
        record.effect,
        serde_json::to_string(record)?,
        serde_json::to_string(charges)?,
        draft,
        serde_json::to_string(used)?,
        record.pass.as_ref().map(|(client, _)| client),
        pass,
    ])?;
    Ok(())
}

/// Stores the changes that take effect when a call is claimed, before its outcome is known.
///
/// These are the provenance of its arguments and, for a deferred call, its revocations and
/// carriers: the client may run the call at any time from here on.
pub(crate) fn apply_claim_effects(
    tx: &WriteTransaction<'_>,
    record: &mut ClaimRecord,
) -> DbResult<()> {
    let provenance_update = record.seen.take();
    let has_revocations = record.is_run_by_client() && !record.revokes.is_empty();
    if provenance_update.is_some() || has_revocations {
        let mut session = SessionHeader::get_or_create(tx.sql, &record.key)?;
        session.count_uncounted_calls(tx, &record.key);
        if let Some(update) = provenance_update {
            session.store_provenance(tx.sql, &tx.shared.keys().redaction_key, *update)?;
        }
        if has_revocations {
            revoke_claimed(tx, &mut session, record)?;
        }
        session.save(tx.sql)?;
    }
    if record.is_run_by_client() { record_carriers(tx, record) } else { Ok(()) }
}

/// Records the carriers that a call has written to, or may have.
pub(super) fn record_carriers(tx: &WriteTransaction<'_>, record: &ClaimRecord) -> DbResult<()> {
    if record.carriers.is_empty() {
        return Ok(());
    }
    let tainted = SessionHeader::find(tx.sql, &record.key)?
        .is_some_and(|session| session.provenance_flags.tainted);
    let mut carriers = CarrierTable::new(tx.sql);
    provenance::record_carrier_writes(&record.carriers, tainted, &mut carriers);
    carriers.finish()
}

fn revoke_claimed(
    tx: &WriteTransaction<'_>,
    session: &mut SessionHeader,
    record: &ClaimRecord,
) -> DbResult<()> {
    record
        .revokes
        .iter()
        .try_for_each(|revoked| session.revoke_evidence(tx.sql, &revoked.clone().into_key()))
}

/// Revokes the evidence that a call revokes if it happened. Unknown counts as happened.
pub(crate) fn revoke_evidence_of(tx: &WriteTransaction<'_>, claim: &StoredClaim) -> DbResult<()> {
    if claim.effect && !claim.record.revokes.is_empty() {
        let mut session = SessionHeader::get_or_create(tx.sql, &claim.record.key)?;
        revoke_claimed(tx, &mut session, &claim.record)?;
        session.save(tx.sql)?;
    }
    Ok(())
}

/// Takes the newest deferred call for a tool by the client's name for the call.
pub(crate) fn take_deferred(
    tx: &WriteTransaction<'_>,
    key: &SessionKey,
    client: &str,
    tool: &str,
) -> DbResult<Option<DeferredClaim>> {
    let Some(session) = SessionHeader::find(tx.sql, key)? else { return Ok(None) };
    let found: Option<([u8; 16], Vec<u8>)> = tx
        .sql
        .prepare_cached(
            "SELECT call, pass FROM claims INDEXED BY claims_kept
             WHERE session = ?1 AND client = ?2 AND pass IS NOT NULL AND json_extract(intent, '$.tool') = ?3 ORDER BY call DESC LIMIT 1",
        )?
        .query_row(params![session.id, client, tool], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    let Some((call, sealed)) = found else { return Ok(None) };
    let call = CallId::from_bytes(call);
    let decrypt_error =
        || DbError::Message("cannot decrypt a deferred call: another key encrypted it".to_owned());
    let pass =
        tx.shared.keys().unseal(&deferred_seal_context(call), &sealed).ok_or_else(decrypt_error)?;
    tx.sql
        .prepare_cached("UPDATE claims SET pass = NULL WHERE call = ?1")?
        .execute(params![call.as_bytes().as_slice()])?;
    let Some(claim) = StoredClaim::find(tx.sql, call)?.filter(|claim| !claim.is_settled()) else {
        return Ok(None);
    };
    Ok(Some(DeferredClaim {
        counters_before: claim.used.clone(),
        claim: into_record(claim)?,
        state: pass,
    }))
}

/// Returns the place to which the encrypted state of a deferred call is bound.
pub(crate) fn deferred_seal_context(call: CallId) -> String {
    format!("pass {call}")
}

/// Returns the claim record of a stored claim, with its draft row.
pub(crate) fn into_record(claim: StoredClaim) -> DbResult<ClaimRecord> {
    let row = claim.draft.and_then(|draft| serde_json::from_str::<Row>(&draft).ok()).map(Arc::new);
    Ok(ClaimRecord { row, ..claim.record })
}
