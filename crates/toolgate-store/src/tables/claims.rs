//! Stores claims, and the keys by which a repeated call finds its earlier claim.

use std::sync::Arc;

use jiff::Timestamp;
use rusqlite::{Connection, OptionalExtension, params};
use rust_decimal::Decimal;
use toolgate::limits::{Charge, Cost};
use toolgate::policy::{CounterReading, DedupKeyKind};
use toolgate::store::{
    ClaimOwner, ClaimRecord, ClaimResolution, DedupKey, DeferredClaim, PriorCall,
};
use toolgate::{CallId, Outcome, Row, SessionKey, provenance};
use toolgate_json::Digest;

use crate::error::{DbError, DbResult};
use crate::keys::LedgerKeys;
use crate::state_dir::StateDir;
use crate::tables::counters::{
    ReservedCharge, compute_charge_start, reserve_charge, settle_charge,
};
use crate::tables::inline_claims;
use crate::tables::ledger;
use crate::tables::ledger::{parse_digest, to_nanos};
use crate::tables::provenance::CarrierTable;
use crate::tables::sessions::{SessionHeader, from_nanos};
use crate::transaction::WriteTransaction;

/// A stored claim.
pub(crate) struct StoredClaim {
    pub(crate) call: CallId,
    state: String,
    lease: Timestamp,
    effect: bool,
    pub(crate) intent: ClaimRecord,
    /// Reserved charges.
    charges: Vec<ReservedCharge>,
    /// How much of each counter was used before.
    used: Vec<CounterReading>,
    pub(crate) draft: Option<String>,
    outcome: Option<Vec<u8>>,
}

const CLAIM_COLUMNS: &str = "call, state, lease, effect, intent, charges, draft, outcome, used";

impl StoredClaim {
    fn from_row(row: &rusqlite::Row<'_>) -> DbResult<Self> {
        let (intent, charges): (String, String) = (row.get(4)?, row.get(5)?);
        Ok(Self {
            call: CallId::from_bytes(row.get(0)?),
            state: row.get(1)?,
            lease: from_nanos(row.get(2)?),
            effect: row.get(3)?,
            intent: serde_json::from_str(&intent)?,
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
        intent: ClaimRecord,
        charges: Vec<ReservedCharge>,
        used: Vec<CounterReading>,
        draft: Option<String>,
    ) -> Self {
        let state = "open".to_owned();
        Self {
            call: intent.call,
            state,
            lease: intent.lease,
            effect: intent.effect,
            intent,
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
        insert_claim(sql, &self.intent, session, &charges, &self.used, self.draft.as_deref(), None)
    }

    /// Reads all claims that are open or pending.
    pub(crate) fn read_unsettled(sql: &Connection) -> DbResult<Vec<Self>> {
        let mut unsettled = Self::read_matching(sql, "state <> 'settled'")?;
        unsettled.extend(inline_claims::read_inflight(sql)?);
        unsettled.sort_by_key(|claim| *claim.call.as_bytes());
        Ok(unsettled)
    }

    /// Reads open claims. The query does not read pending claims, of which there may be many.
    fn read_open(sql: &Connection) -> DbResult<Vec<Self>> {
        Self::read_matching(sql, "state <> 'settled' AND state = 'open'")
    }

    fn read_matching(sql: &Connection, wanted: &str) -> DbResult<Vec<Self>> {
        let mut statement =
            sql.prepare_cached(&format!("SELECT {CLAIM_COLUMNS} FROM claims INDEXED BY claims_unsettled WHERE {wanted} ORDER BY call"))?;
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

    /// Returns true if the owner of an open claim is gone.
    ///
    /// The state of a process is known. Any other owner is gone when the lease has expired.
    pub(crate) fn is_abandoned(&self, home: &StateDir, now: Timestamp) -> bool {
        let process_ended = match &self.intent.owner {
            ClaimOwner::Term(term) => home.has_process_ended(term),
            ClaimOwner::ClientSession(_) => None,
        };
        self.state == "open" && process_ended.unwrap_or(now > self.lease)
    }

    pub(crate) fn is_pending(&self, home: &StateDir, now: Timestamp) -> bool {
        self.effect && (self.state == "pending" || self.is_abandoned(home, now))
    }

    fn prior_call(
        &self,
        home: &StateDir,
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
        Ok(match self.is_pending(home, now) {
            true => Some(PriorCall::Pending(self.call)),
            // An abandoned read had no effects.
            false if self.is_abandoned(home, now) => None,
            false => Some(PriorCall::InProgress),
        })
    }
}

/// Returns the place to which an encrypted outcome is bound.
fn outcome_seal_context(call: CallId) -> String {
    format!("outcome {call}")
}

/// Finds an earlier call with one of these keys.
pub(crate) fn find_prior_call(
    sql: &Connection,
    home: &StateDir,
    keys: &LedgerKeys,
    recall: &[DedupKey],
    asked: Digest,
    now: Timestamp,
) -> DbResult<Option<(PriorCall, DedupKeyKind)>> {
    for key in recall {
        let found: Option<(Vec<u8>, [u8; 16])> = sql
            .prepare_cached("SELECT asked, call FROM recalls WHERE principal = ?1 AND agent = ?2 AND tool = ?3 AND key = ?4")?
            .query_row(params![&*key.principal, &*key.agent, &*key.tool, key.key], |row| Ok((row.get(0)?, row.get(1)?)))
            .optional()?;
        let Some((first, call)) = found else { continue };
        // A tool declared `once` is recalled by its arguments, as requested or as changed by
        // hooks. Only a key of the caller can be reused for another request.
        if parse_digest(&first)? != asked && key.kind() == DedupKeyKind::Key {
            return Ok(Some((PriorCall::KeyReused, DedupKeyKind::Key)));
        }
        if let Some(claim) = StoredClaim::find(sql, CallId::from_bytes(call))?
            && let Some(recalled) = claim.prior_call(home, keys, now)?
        {
            return Ok(Some((recalled, key.kind())));
        }
    }
    Ok(None)
}

/// Stores a claim and reserves its charges.
pub(crate) fn store_claim(
    tx: &WriteTransaction<'_>,
    intent: &ClaimRecord,
    draft: Option<&str>,
    charges: &[Charge],
    used: &[Decimal],
    now: Timestamp,
) -> DbResult<()> {
    for (n, (charge, used)) in charges.iter().zip(used).enumerate() {
        reserve_charge(tx.sql, intent.call, n, charge, *used, now)?;
    }
    // A read has no effects to reconcile, so its claim stays in memory.
    if !intent.effect
        && intent.recall.is_empty()
        && intent.pass.is_none()
        && tx.shared.is_own_claim(intent)
    {
        let reserved = charges
            .iter()
            .enumerate()
            .map(|(n, charge)| (n, to_nanos(now), charge.clone()))
            .collect();
        tx.replace_read_charges(intent.call, Some(reserved));
        return Ok(());
    }
    let mut session = SessionHeader::get_or_create(tx.sql, &intent.key)?;
    // The call may kill this process, so count it before it runs.
    if session.count_uncounted_calls(tx, &intent.key) {
        session.save(tx.sql)?;
    }
    let charges: Vec<(usize, i64, &Charge)> =
        charges.iter().enumerate().map(|(n, charge)| (n, to_nanos(now), charge)).collect();
    let reserved: Vec<_> =
        charges.iter().zip(used).map(|((n, at, charge), used)| (*n, *at, *charge, *used)).collect();
    if inline_claims::insert_inflight(tx, intent, draft, &reserved)? {
        return Ok(());
    }
    let pass = intent
        .pass
        .as_ref()
        .map(|(_, pass)| tx.shared.keys().seal(&deferred_seal_context(intent.call), pass))
        .transpose()?;
    for key in &intent.recall {
        tx.sql
            .prepare_cached("INSERT OR REPLACE INTO recalls (principal, agent, tool, key, asked, call) VALUES (?1, ?2, ?3, ?4, ?5, ?6)")?
            .execute(params![
                &*key.principal,
                &*key.agent,
                &*key.tool,
                key.key,
                intent.asked.as_bytes().as_slice(),
                intent.call.as_bytes().as_slice()
            ])?;
    }
    let before: Vec<CounterReading> = reserved
        .iter()
        .map(|(.., charge, used)| (charge.counter.clone(), charge.window, *used))
        .collect();
    insert_claim(tx.sql, intent, session.id, &charges, &before, draft, pass.as_deref())
}

/// Returns the term of the process that owns a claim, or `None` if a client owns it.
fn term_of(intent: &ClaimRecord) -> Option<&str> {
    match &intent.owner {
        ClaimOwner::Term(term) => Some(term),
        ClaimOwner::ClientSession(_) => None,
    }
}

/// Inserts an open claim, with the encrypted state of a deferred call if there is one.
fn insert_claim(
    sql: &Connection,
    intent: &ClaimRecord,
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
        intent.call.as_bytes().as_slice(),
        session,
        term_of(intent),
        to_nanos(intent.lease),
        intent.effect,
        serde_json::to_string(intent)?,
        serde_json::to_string(charges)?,
        draft,
        serde_json::to_string(used)?,
        intent.pass.as_ref().map(|(client, _)| client),
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
    intent: &mut ClaimRecord,
) -> DbResult<()> {
    let seen = intent.seen.take();
    let revokes = intent.is_run_by_client() && !intent.revokes.is_empty();
    if seen.is_some() || revokes {
        let mut session = SessionHeader::get_or_create(tx.sql, &intent.key)?;
        session.count_uncounted_calls(tx, &intent.key);
        if let Some(seen) = seen {
            session.store_provenance(tx.sql, &tx.shared.keys().redaction_key, *seen)?;
        }
        if revokes {
            revoke_claimed(tx, &mut session, intent)?;
        }
        session.save(tx.sql)?;
    }
    if intent.is_run_by_client() { record_carriers(tx, intent) } else { Ok(()) }
}

/// Records the carriers that a call has written to, or may have.
fn record_carriers(tx: &WriteTransaction<'_>, intent: &ClaimRecord) -> DbResult<()> {
    if intent.carriers.is_empty() {
        return Ok(());
    }
    let tainted = SessionHeader::find(tx.sql, &intent.key)?
        .is_some_and(|session| session.provenance_flags.tainted);
    let mut carriers = CarrierTable::new(tx.sql);
    provenance::record_carrier_writes(&intent.carriers, tainted, &mut carriers);
    carriers.finish()
}

fn revoke_claimed(
    tx: &WriteTransaction<'_>,
    session: &mut SessionHeader,
    intent: &ClaimRecord,
) -> DbResult<()> {
    intent
        .revokes
        .iter()
        .try_for_each(|revoked| session.revoke_evidence(tx.sql, &revoked.clone().into_key()))
}

/// Revokes the evidence that a call revokes if it happened. Unknown counts as happened.
pub(crate) fn revoke_evidence_of(tx: &WriteTransaction<'_>, claim: &StoredClaim) -> DbResult<()> {
    if claim.effect && !claim.intent.revokes.is_empty() {
        let mut session = SessionHeader::get_or_create(tx.sql, &claim.intent.key)?;
        revoke_claimed(tx, &mut session, &claim.intent)?;
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
    let unopened =
        || DbError::Message("cannot decrypt a deferred call: another key encrypted it".to_owned());
    let pass =
        tx.shared.keys().unseal(&deferred_seal_context(call), &sealed).ok_or_else(unopened)?;
    tx.sql
        .prepare_cached("UPDATE claims SET pass = NULL WHERE call = ?1")?
        .execute(params![call.as_bytes().as_slice()])?;
    let Some(claim) = StoredClaim::find(tx.sql, call)?.filter(|claim| !claim.is_settled()) else {
        return Ok(None);
    };
    Ok(Some(DeferredClaim {
        counters_before: claim.used.clone(),
        claim: into_intent(claim)?,
        state: pass,
    }))
}

/// Returns the place to which the encrypted state of a deferred call is bound.
pub(crate) fn deferred_seal_context(call: CallId) -> String {
    format!("pass {call}")
}

/// Statements that close the session of a client. They read only open claims and deferred calls.
const EXPIRE_CLIENT_LEASES_SQL: &str = "UPDATE claims INDEXED BY claims_unsettled SET lease = ?2
    WHERE session = ?1 AND state <> 'settled' AND state = 'open' AND term IS NULL";
const DISCARD_DEFERRED_CALLS_SQL: &str =
    "UPDATE claims INDEXED BY claims_kept SET pass = NULL WHERE session = ?1 AND pass IS NOT NULL";

/// Abandons the open calls of a client session that has ended.
pub(crate) fn close_client_session(
    tx: &mut WriteTransaction<'_>,
    key: &SessionKey,
    now: Timestamp,
) -> DbResult<()> {
    let Some(session) = SessionHeader::find(tx.sql, key)? else { return Ok(()) };
    tx.sql
        .prepare_cached(EXPIRE_CLIENT_LEASES_SQL)?
        .execute(params![session.id, to_nanos(now).saturating_sub(1)])?;
    tx.sql.prepare_cached(DISCARD_DEFERRED_CALLS_SQL)?.execute(params![session.id])?;
    sweep_abandoned(tx, now).map(|_| ())
}

/// Ends a claim by the effects of its call.
pub(crate) fn end_claim(
    tx: &WriteTransaction<'_>,
    claim: StoredClaim,
    settle: ClaimResolution,
    spent: Option<Cost>,
    outcome: Option<&Outcome>,
    now: Timestamp,
) -> DbResult<()> {
    let call = claim.call;
    let settle = if claim.effect { settle } else { settle.for_read() };
    if claim.state == "open" && settle != ClaimResolution::Released {
        record_carriers(tx, &claim.intent)?;
    }
    // A reported cost counts even if the outcome is unknown.
    let (known, reserved): (Vec<_>, Vec<_>) = claim.charges.into_iter().partition(|(.., c)| {
        settle != ClaimResolution::Pending || (c.unit.is_known_after_call() && spent.is_some())
    });
    for (n, at, charge) in known {
        let from = if claim.effect { compute_charge_start(at, &charge, now) } else { at };
        settle_charge(tx.sql, call, (n, at, &charge), settle.final_amount(&charge, spent), from)?;
    }
    if settle == ClaimResolution::Pending {
        tx.sql
            .prepare_cached("UPDATE claims SET state = 'pending', charges = ?2 WHERE call = ?1")?
            .execute(params![call.as_bytes().as_slice(), serde_json::to_string(&reserved)?])?;
        return Ok(());
    }
    // Without an effect, the call may run again. Without a recall key, the outcome is not needed.
    match outcome.filter(|_| settle == ClaimResolution::Done && !claim.intent.recall.is_empty()) {
        Some(outcome) => {
            let sealed = tx
                .shared
                .keys()
                .seal(&outcome_seal_context(call), &serde_json::to_vec(outcome)?)?;
            tx.sql
                .prepare_cached(
                    "UPDATE claims SET state = 'settled', charges = '[]', draft = NULL, pass = NULL, outcome = ?2, ended = ?3 WHERE call = ?1",
                )?
                .execute(params![call.as_bytes().as_slice(), sealed, to_nanos(now)])?;
        }
        None => {
            tx.sql
                .prepare_cached("DELETE FROM claims WHERE call = ?1")?
                .execute(params![call.as_bytes().as_slice()])?;
            for key in &claim.intent.recall {
                // Another call may have claimed the same key since.
                tx.sql
                    .prepare_cached("DELETE FROM recalls WHERE principal = ?1 AND agent = ?2 AND tool = ?3 AND key = ?4 AND call = ?5")?
                    .execute(params![&*key.principal, &*key.agent, &*key.tool, key.key, call.as_bytes().as_slice()])?;
            }
        }
    }
    Ok(())
}

/// Sweeps a few expired claims of clients, for processes that make one call each.
pub(crate) fn sweep_client_claims(tx: &mut WriteTransaction<'_>, now: Timestamp) -> DbResult<()> {
    let over: Vec<[u8; 16]> = tx
        .sql
        .prepare_cached(
            "SELECT call FROM claims INDEXED BY claims_unsettled WHERE state <> 'settled' AND state = 'open' AND lease < ?1 AND term IS NULL LIMIT 8",
        )?
        .query_map([to_nanos(now)], |row| row.get(0))?
        .collect::<Result<_, _>>()?;
    let claims: DbResult<Vec<Option<StoredClaim>>> =
        over.into_iter().map(|call| StoredClaim::find(tx.sql, CallId::from_bytes(call))).collect();
    sweep_claims(tx, claims?.into_iter().flatten().collect(), now).map(|_| ())
}

/// Marks abandoned claims as pending and appends their rows. Abandoned reads are released.
pub(crate) fn sweep_abandoned(tx: &mut WriteTransaction<'_>, now: Timestamp) -> DbResult<u64> {
    inline_claims::move_abandoned_to_claims(tx, now)?;
    let open = StoredClaim::read_open(tx.sql)?;
    sweep_claims(tx, open, now)
}

fn sweep_claims(
    tx: &mut WriteTransaction<'_>,
    claims: Vec<StoredClaim>,
    now: Timestamp,
) -> DbResult<u64> {
    let mut swept = 0;
    for claim in claims {
        if !claim.is_abandoned(&tx.shared.state_dir, now) {
            continue;
        }
        swept += 1;
        if let Some(draft) = &claim.draft
            && !ledger::has_row(tx.sql, &claim.call)?
        {
            match serde_json::from_str::<Row>(draft) {
                Ok(mut row) => {
                    // The draft has masked counter names, so copy only the amounts.
                    for ((.., figure), (.., used)) in row.facts.claimed.iter_mut().zip(&claim.used)
                    {
                        *figure = *used;
                    }
                    append_row(tx, &row)?;
                }
                // One unreadable draft must not block the others.
                Err(error) => {
                    tracing::error!(call = %claim.call, %error, "cannot read the draft row of an abandoned call")
                }
            }
        }
        revoke_evidence_of(tx, &claim)?;
        end_claim(tx, claim, ClaimResolution::Pending, None, None, now)?;
    }
    Ok(swept)
}

/// Settles a pending claim, with a row that names the settler.
pub(crate) fn settle_claim(
    tx: &mut WriteTransaction<'_>,
    call: CallId,
    settle: ClaimResolution,
    (outcome, shown): (&Outcome, Outcome),
    by: &str,
    now: Timestamp,
) -> DbResult<bool> {
    sweep_abandoned(tx, now)?;
    let Some(claim) = StoredClaim::find(tx.sql, call)?.filter(|claim| {
        claim.is_pending(&tx.shared.state_dir, now) && settle != ClaimResolution::Pending
    }) else {
        return Ok(false);
    };
    let body: Option<String> = tx
        .sql
        .prepare_cached("SELECT body FROM ledger WHERE call = ?1")?
        .query_row(params![call.as_bytes().as_slice()], |row| row.get(0))
        .optional()?;
    if let Some(body) = body.or_else(|| claim.draft.clone()) {
        let row: Row = serde_json::from_str(&body)?;
        append_row(tx, &row.settlement_row(shown, settle.effects(), by, now))?;
    }
    end_claim(tx, claim, settle, None, Some(outcome), now)?;
    Ok(true)
}

pub(crate) fn append_row(tx: &mut WriteTransaction<'_>, row: &Row) -> DbResult<(u64, Digest)> {
    let mut session = SessionHeader::get_or_create(tx.sql, &row.key)?;
    session.count_uncounted_calls(tx, &row.key);
    let body = ledger::canonical_text(row)?;
    let appended = ledger::append_to_chains(tx, &mut session, row, &body)?;
    session.save(tx.sql)?;
    Ok(appended)
}

/// How many claims, approvals and outputs one transaction prunes, so that other writers get a turn.
const MAX_PRUNED_RECORDS_PER_TRANSACTION: i64 = 5_000;

/// Deletes the outcomes of settled claims that ended before `before`. The claims themselves stay.
///
/// Handles one batch of claims after the id `after`. Returns the number of deleted outcomes and the
/// start of the next batch.
pub(crate) fn prune_outcomes(
    sql: &Connection,
    before: Timestamp,
    after: i64,
) -> DbResult<(u64, Option<i64>)> {
    let last = after.saturating_add(MAX_PRUNED_RECORDS_PER_TRANSACTION);
    let forgotten = sql.execute(
        "UPDATE claims SET outcome = NULL WHERE id > ?2 AND id <= ?3 AND state = 'settled' AND outcome IS NOT NULL AND ended < ?1",
        [to_nanos(before), after, last],
    )?;
    let next: Option<i64> =
        sql.query_row("SELECT min(id) FROM claims WHERE id > ?1", [last], |row| row.get(0))?;
    Ok((forgotten as u64, next.map(|id| id - 1)))
}

/// Deletes a batch of approvals that expired before `before`, and of older outputs.
///
/// Returns the number of deleted rows, 0 if none are left.
pub(crate) fn prune_approvals_and_outputs(sql: &Connection, before: Timestamp) -> DbResult<u64> {
    let approvals = sql.execute(
        "DELETE FROM approvals WHERE n IN (SELECT n FROM approvals WHERE expires < ?1 LIMIT ?2)",
        [to_nanos(before), MAX_PRUNED_RECORDS_PER_TRANSACTION],
    )?;
    let outputs = sql.execute(
        "DELETE FROM outputs WHERE (session, handle) IN (SELECT session, handle FROM outputs WHERE at < ?1 LIMIT ?2)",
        [to_nanos(before), MAX_PRUNED_RECORDS_PER_TRANSACTION],
    )?;
    Ok((approvals + outputs) as u64)
}

/// Converts a claim to an intent.
pub(crate) fn into_intent(claim: StoredClaim) -> DbResult<ClaimRecord> {
    let row = claim.draft.and_then(|draft| serde_json::from_str::<Row>(&draft).ok()).map(Arc::new);
    Ok(ClaimRecord { row, ..claim.intent })
}

#[cfg(test)]
mod tests {
    #[test]
    fn closing_a_client_session_scans_no_table() {
        for statement in [super::EXPIRE_CLIENT_LEASES_SQL, super::DISCARD_DEFERRED_CALLS_SQL] {
            assert_eq!(crate::open::full_scans(statement), Vec::<String>::new());
        }
    }
}
