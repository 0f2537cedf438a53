//! The store in one SQLite file.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use rusqlite::{Connection, OptionalExtension, params};
use rust_decimal::Decimal;
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};
use tokio::time::Instant;
use toolgate::json::Digest;
use toolgate::limits::{Charge, Over};
use toolgate::policy::{Facts, Needs};
use toolgate::session::{Alter, State};
use toolgate::store::{
    Approval, ApprovalState, Conflict, Enter, Entered, Finish, Hold, Intent, NotClaimed, Recalled, Settle, Store, StoreError, Target,
};
use toolgate::{CallId, Outcome, Receipt, Row, SessionKey};

use crate::claims::{self, Claim};
use crate::fault::{Done, Fault};
use crate::home::{Holding, Home};
use crate::keys::Keys;
use crate::ledger::{self, nanos};
use crate::open;
use crate::session::{self, Session};
use crate::writer::{Shared, Tx, Writer, lock};

/// A store that outlives its process, in one SQLite file. What does not belong into the file stands in a directory beside
/// it, `<file>.state`: the keys, the mark of how far the ledger had come, and rows that could not be written.
pub struct SqliteStore {
    path: PathBuf,
    shared: Arc<Shared>,
    /// Before the writer: whoever closes the database last puts it in order, and only the writer can.
    readers: Mutex<Vec<Connection>>,
    writer: Writer,
    locks: Mutex<HashMap<SessionKey, Arc<Own>>>,
    /// Says without a look that nothing was paused when this process last looked.
    any_paused: AtomicBool,
    paused_seen: Mutex<Option<Instant>>,
}

/// What was taken out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gone {
    /// Rows of the ledger.
    pub rows: u64,
    /// Recorded outcomes, approvals and large outputs.
    pub sealed: u64,
}

impl std::fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SqliteStore").field("path", &self.path).finish_non_exhaustive()
    }
}

impl SqliteStore {
    /// Opens a ledger, or begins one.
    ///
    /// # Errors
    /// What stands in the way: the file is no ledger, is damaged, is older than it should be, or cannot be written to.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        let path = path.as_ref();
        Self::open_beside(path, &Home::beside(path))
    }

    /// Opens a ledger whose keys and mark stand elsewhere than beside it.
    ///
    /// # Errors
    /// As for [`SqliteStore::open`].
    pub fn open_beside(path: impl AsRef<Path>, state: &Path) -> Result<Self, StoreError> {
        let path = path.as_ref();
        let open = || -> Done<Self> {
            let there = |error: std::io::Error| Fault::Said(format!("{}: {error}", state.display()));
            let _door = Home::door(state).map_err(there)?;
            let sql = open::writing(path)?;
            let home = Home::enter(state).map_err(there)?;
            let (id, keys) = open::acquaint(&sql, &home)?;
            open::is_newest(&sql, &home, &id)?;
            let shared = Arc::new(Shared { home, keys: Mutex::new(Arc::new(keys)), id, definitions: Mutex::default() });
            let unsigned = crate::writer::sweep(&sql, &shared, Timestamp::now())?;
            shared.home.tidy().map_err(there)?;
            Ok(Self {
                path: path.to_owned(),
                writer: Writer::start(sql, Arc::clone(&shared), unsigned)?,
                shared,
                readers: Mutex::default(),
                locks: Mutex::default(),
                any_paused: AtomicBool::new(true),
                paused_seen: Mutex::default(),
            })
        };
        open().map_err(|fault| StoreError(format!("the ledger {}: {fault}", path.display())))
    }

    /// The key that this ledger signs with, in hexadecimal digits: give it to whoever shall check receipts.
    #[must_use]
    pub fn public_key(&self) -> Arc<str> {
        Arc::clone(self.shared.keys().public())
    }

    /// How many transactions this process has written: whatever waits goes into one.
    #[must_use]
    pub fn transactions(&self) -> u64 {
        self.writer.count.load(Ordering::Relaxed)
    }

    /// Signs with a new key from here on. The old key signs the new one, so that what it signed is still believed.
    ///
    /// # Errors
    /// It cannot be made or written down.
    pub async fn rotate_key(&self) -> Result<Arc<str>, StoreError> {
        let new = Arc::new(Keys::with_new_signing_key(&self.shared.home.keys()).map_err(|e| self.named(&StoreError(e.to_string())))?);
        let next = Arc::clone(&new);
        self.write(true, move |tx| ledger::rotate(tx, Timestamp::now(), &next).map(|_| ())).await?;
        let public = Arc::clone(new.public());
        *lock(&self.shared.keys) = new;
        Ok(public)
    }

    /// Takes rows out of the ledger that are older than one moment, and recorded outcomes, approvals and large outputs
    /// that are older than another. Chains still hold afterwards; claims, limits, evidence and sessions are never touched.
    ///
    /// # Errors
    /// The store cannot do it, or not all of it: rows go a few thousand at a time.
    pub async fn prune(&self, rows_before: Timestamp, sealed_before: Timestamp) -> Result<Gone, StoreError> {
        let mut gone = Gone { rows: 0, sealed: self.write(true, move |tx| claims::forget(tx.sql, sealed_before)).await? };
        loop {
            let rows = self.write(true, move |tx| ledger::prune(tx, rows_before, Timestamp::now())).await?;
            if rows == 0 {
                return Ok(gone);
            }
            gone.rows += rows;
        }
    }

    /// Marks claims as pending whose owners are gone, and writes their rows. Happens by itself when a store is opened, and
    /// when somebody asks for pending claims. Says how many there were.
    ///
    /// # Errors
    /// The store cannot do it.
    pub async fn sweep(&self, now: Timestamp) -> Result<u64, StoreError> {
        self.write(true, move |tx| claims::sweep(tx, now)).await
    }

    async fn write<T: Send + 'static>(
        &self,
        durable: bool,
        f: impl FnOnce(&mut Tx<'_>) -> Done<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.writer.write(durable, f).await.map_err(|error| self.named(&error))
    }

    async fn read<T: Send + 'static>(
        self: &Self,
        f: impl FnOnce(&Connection, &Shared) -> Done<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let sql = lock(&self.readers).pop();
        let (path, shared) = (self.path.clone(), Arc::clone(&self.shared));
        let work = move || -> Done<(Connection, T)> {
            let sql = match sql {
                Some(sql) => sql,
                None => open::reading(&path)?,
            };
            let found = f(&sql, &shared)?;
            Ok((sql, found))
        };
        let done = tokio::task::spawn_blocking(work).await.map_err(|error| StoreError(error.to_string()))?;
        let (sql, found) = done.map_err(|fault| self.named(&fault.into()))?;
        let mut readers = lock(&self.readers);
        if readers.len() < 8 {
            readers.push(sql);
        }
        Ok(found)
    }

    fn named(&self, error: &StoreError) -> StoreError {
        StoreError(format!("the ledger {}: {error}", self.path.display()))
    }

    fn keys(&self) -> Arc<Keys> {
        self.shared.keys()
    }

    /// Holds a session against other calls of this process, then against other processes.
    async fn acquire(&self, key: &SessionKey, alone: bool, wait: Duration) -> Result<Option<Hold>, StoreError> {
        let until = Instant::now().checked_add(wait);
        let own = Arc::clone(lock(&self.locks).entry(key.clone()).or_default());
        let calls = Arc::clone(&own.calls);
        let guard = async { if alone { Guard::Alone(calls.write_owned().await) } else { Guard::Together(calls.read_owned().await) } };
        let Ok(guard) = tokio::time::timeout(wait, guard).await else { return Ok(None) };
        loop {
            let held = Held::take(Arc::clone(&own), Arc::clone(&self.shared), key, alone);
            match held.map_err(|error| self.named(&StoreError(format!("a session could not be held: {error}"))))? {
                Some(held) => return Ok(Some(Hold::new((held, guard)))),
                None if until.is_none_or(|until| Instant::now() < until) => tokio::time::sleep(Duration::from_millis(5)).await,
                None => return Ok(None),
            }
        }
    }

    /// Locks that nobody uses any more are let go, so that their number follows that of live sessions.
    fn tidy_locks(&self) {
        let mut locks = lock(&self.locks);
        if locks.len() > 1_024 && locks.len().is_power_of_two() {
            locks.retain(|_, own| Arc::strong_count(own) > 1);
        }
    }
}

#[expect(dead_code, reason = "held for its drop")]
enum Guard {
    Alone(OwnedRwLockWriteGuard<()>),
    Together(OwnedRwLockReadGuard<()>),
}

/// A session as the calls of this process hold it.
#[derive(Default)]
struct Own {
    calls: Arc<RwLock<()>>,
    /// How many calls hold it against other processes.
    held: Mutex<usize>,
}

/// A session that is held against other processes: by the first call that holds it, until the last one lets go.
struct Held {
    own: Arc<Own>,
    shared: Arc<Shared>,
    key: SessionKey,
}

impl Held {
    fn take(own: Arc<Own>, shared: Arc<Shared>, key: &SessionKey, alone: bool) -> std::io::Result<Option<Self>> {
        let mut held = lock(&own.held);
        if *held == 0 && !shared.home.hold(key, if alone { Holding::Alone } else { Holding::Together })? {
            return Ok(None);
        }
        *held += 1;
        drop(held);
        Ok(Some(Self { own, shared, key: key.clone() }))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut held = lock(&self.own.held);
        *held -= 1;
        if *held == 0
            && let Err(error) = self.shared.home.hold(&self.key, Holding::Not)
        {
            tracing::error!(%error, "a session could not be let go");
        }
    }
}

/// What a call brings to its session, on its way to the thread that writes.
struct Entering {
    key: SessionKey,
    digest: Digest,
    recall: Vec<toolgate::store::RecallKey>,
    counts: bool,
    polling: Option<toolgate::Polling>,
    now: Timestamp,
}

impl Entering {
    fn of(enter: &Enter<'_>) -> Self {
        Self {
            key: enter.key.clone(),
            digest: enter.digest,
            recall: enter.recall.to_vec(),
            counts: enter.counts,
            polling: enter.polling.copied(),
            now: enter.now,
        }
    }

    fn recalled(&self, sql: &Connection, shared: &Shared) -> Done<Option<Recalled>> {
        if self.recall.is_empty() {
            return Ok(None);
        }
        claims::recall(sql, &shared.home, &shared.keys(), &self.recall, self.digest, self.now)
    }
}

fn paused(sql: &Connection, key: &SessionKey, tool: &Arc<str>) -> Done<Option<(Target, String)>> {
    let targets = [
        Target::Agent(Arc::clone(&key.agent)),
        Target::Principal(Arc::clone(&key.principal)),
        Target::Tool(Arc::clone(tool)),
        Target::Session(key.clone()),
    ];
    for target in targets {
        let why: Option<String> = sql
            .prepare_cached("SELECT reason FROM paused WHERE target = ?1")?
            .query_row([ledger::text(&target)?], |row| row.get(0))
            .optional()?;
        if let Some(why) = why {
            return Ok(Some((target, why)));
        }
    }
    Ok(None)
}

fn approval(shared: &Shared, body: &str, sealed: &[u8]) -> Done<Approval> {
    let approval: Approval = serde_json::from_str(body)?;
    let opened = shared.keys().unseal(&format!("approval {}", approval.id), sealed);
    let opened = opened.ok_or_else(|| Fault::Said("an approval was sealed with another key".to_owned()))?;
    Ok(Approval { arguments: serde_json::from_slice(&opened)?, ..approval })
}

fn find_approval(sql: &Connection, shared: &Shared, id: &str) -> Done<Option<Approval>> {
    let read = |row: &rusqlite::Row<'_>| Ok((row.get::<_, String>(0)?, row.get::<_, Vec<u8>>(1)?));
    let found = sql.prepare_cached("SELECT body, arguments FROM approvals WHERE id = ?1")?.query_row([id], read).optional()?;
    found.map(|(body, sealed)| approval(shared, &body, &sealed)).transpose()
}

fn save_approval(sql: &Connection, approval: &Approval) -> Done<()> {
    sql.prepare_cached("UPDATE approvals SET body = ?2 WHERE id = ?1")?.execute(params![approval.id, serde_json::to_string(approval)?])?;
    Ok(())
}

#[async_trait]
impl Store for SqliteStore {
    async fn paused(&self, key: &SessionKey, tool: &Arc<str>) -> Result<Option<(Target, String)>, StoreError> {
        let (key, tool) = (key.clone(), Arc::clone(tool));
        let (found, any) =
            self.read(move |sql, _| Ok((paused(sql, &key, &tool)?, sql.prepare_cached("SELECT 1 FROM paused")?.exists([])?))).await?;
        self.any_paused.store(any, Ordering::SeqCst);
        *lock(&self.paused_seen) = Some(Instant::now());
        Ok(found)
    }

    async fn set_pause(&self, target: Target, reason: Option<String>) -> Result<(), StoreError> {
        self.write(true, move |tx| {
            let target = ledger::text(&target)?;
            match reason {
                Some(reason) => tx.sql.execute("INSERT OR REPLACE INTO paused (target, reason) VALUES (?1, ?2)", [target, reason])?,
                None => tx.sql.execute("DELETE FROM paused WHERE target = ?1", [target])?,
            };
            Ok(())
        })
        .await?;
        self.any_paused.store(true, Ordering::SeqCst);
        Ok(())
    }

    /// Another process may pull the switch: it is looked at again after a moment. A call with effects is looked at once
    /// more when it is claimed.
    fn may_be_paused(&self) -> bool {
        let fresh = lock(&self.paused_seen).is_some_and(|seen| seen.elapsed() < Duration::from_millis(50));
        self.any_paused.load(Ordering::SeqCst) || !fresh
    }

    async fn hold(&self, key: &SessionKey, alone: bool, wait: Duration) -> Result<Option<Hold>, StoreError> {
        self.acquire(key, alone, wait).await
    }

    async fn enter(&self, enter: Enter<'_>) -> Result<Option<Box<Entered>>, StoreError> {
        self.tidy_locks();
        let hold = match enter.hold {
            Some((alone, wait)) => match self.acquire(enter.key, alone, wait).await? {
                Some(hold) => Some(hold),
                None => return Ok(None),
            },
            None => None,
        };
        let entering = Entering::of(&enter);
        let entered = self.write(false, move |tx| {
            let recalled = entering.recalled(tx.sql, tx.shared)?;
            let mut session = Session::find_or_make(tx.sql, &entering.key)?;
            let opened = *session.opened.get_or_insert(entering.now);
            if entering.counts && !matches!(recalled, Some(Recalled::Settled(_))) {
                session.progress.count(entering.digest, entering.now, entering.polling.as_ref());
            }
            session.save(tx.sql)?;
            let slices = session.raw_slices(tx.sql)?;
            Ok((session, opened, slices, tx.tip.seq, recalled))
        });
        let (session, opened, slices, rows, recalled) = entered.await?;
        // Read outside of the thread that writes.
        let state = Arc::new(session.state_of(slices).map_err(|fault| self.named(&fault.into()))?);
        let (version, progress) = (session.version, session.progress);
        Ok(Some(Box::new(Entered { version, opened, state, rows, recalled, progress, hold })))
    }

    async fn look(&self, enter: Enter<'_>) -> Result<Box<Entered>, StoreError> {
        let entering = Entering::of(&enter);
        self.read(move |sql, shared| {
            let recalled = entering.recalled(sql, shared)?;
            let session = Session::find(sql, &entering.key)?;
            let mut progress = session.as_ref().map(|session| session.progress).unwrap_or_default();
            if entering.counts {
                progress.count(entering.digest, entering.now, entering.polling.as_ref());
            }
            Ok(Box::new(Entered {
                version: session.as_ref().map_or(0, |session| session.version),
                opened: session.as_ref().and_then(|session| session.opened).unwrap_or(entering.now),
                state: Arc::new(session.map(|session| session.slices(sql)).transpose()?.unwrap_or_default()),
                rows: ledger::tip(sql)?.seq,
                recalled,
                progress,
                hold: None,
            }))
        })
        .await
    }

    async fn load(&self, key: &SessionKey, needs: &Needs, _: &State, facts: &mut Facts) -> Result<(), StoreError> {
        let (key, needs, mut found) = (key.clone(), needs.clone(), std::mem::take(facts));
        *facts = self
            .read(move |sql, shared| {
                // All of it as of one moment.
                sql.execute_batch("BEGIN")?;
                let loaded = (|| -> Done<()> {
                    for (counter, window) in &needs.counters {
                        let used = claims::used(sql, counter, *window, found.now)?;
                        found.counters.push((counter.clone(), *window, used));
                    }
                    session::load(sql, &shared.keys().redact, &key, &needs, &mut found)
                })();
                sql.execute_batch("COMMIT")?;
                loaded?;
                Ok(found)
            })
            .await?;
        Ok(())
    }

    async fn room(&self, charges: &[Charge], now: Timestamp) -> Result<Vec<Result<Decimal, Over>>, StoreError> {
        if charges.is_empty() {
            return Ok(Vec::new());
        }
        let charges = charges.to_vec();
        self.read(move |sql, _| charges.iter().map(|charge| claims::fits(sql, charge, now)).collect()).await
    }

    async fn begin(
        &self,
        intent: Box<Intent>,
        charges: &[Charge],
        approval: Option<&str>,
        now: Timestamp,
    ) -> Result<Result<Vec<Decimal>, NotClaimed>, StoreError> {
        let (charges, approval) = (charges.to_vec(), approval.map(str::to_owned));
        let draft = intent.row.as_ref().map(|row| ledger::text(&**row)).transpose().map_err(StoreError::from)?;
        self.write(intent.effect, move |tx| {
            if let Some((target, why)) = paused(tx.sql, &intent.key, &intent.tool)? {
                return Ok(Err(NotClaimed::Paused(target, why)));
            }
            let recalled = claims::recall(tx.sql, &tx.shared.home, &tx.shared.keys(), &intent.recall, intent.asked, now)?;
            if let Some(recalled) = recalled {
                return Ok(Err(NotClaimed::Recalled(recalled)));
            }
            if let Some((index, over)) = claims::over(tx.sql, &charges, now)? {
                return Ok(Err(NotClaimed::Over(index, over)));
            }
            if let Some(id) = approval {
                match find_approval(tx.sql, tx.shared, &id)? {
                    Some(a)
                        if a.state == ApprovalState::Approved && a.digest == intent.digest && a.key == intent.key && now <= a.expires =>
                    {
                        save_approval(tx.sql, &Approval { state: ApprovalState::Used, ..a })?;
                    }
                    _ => return Ok(Err(NotClaimed::ApprovalGone)),
                }
            }
            if let Some(row) = &intent.row {
                ledger::keep_config(tx, row.config)?;
            }
            claims::claim(tx, &intent, draft.as_deref(), &charges, now).map(Ok)
        })
        .await
    }

    async fn finish(&self, finish: Box<Finish>) -> Result<Result<Option<Receipt>, Conflict>, StoreError> {
        let body = ledger::text(&*finish.row).map_err(StoreError::from)?;
        let keys = self.keys();
        let outputs: Result<Vec<_>, _> =
            finish.outputs.iter().map(|(handle, text)| keys.seal(&format!("output {handle}"), text.as_bytes())).collect();
        let outputs = outputs.map_err(|error| self.named(&StoreError(error.to_string())))?;
        let written = self.write(finish.durable, move |tx| end(tx, *finish, &body, outputs)).await?;
        let Ok((row, seq, hash)) = written else { return Ok(Err(Conflict)) };
        Ok(Ok(self.receipt(&row, seq, hash)))
    }

    async fn snapshot(&self, key: &SessionKey) -> Result<(u64, Arc<State>), StoreError> {
        let key = key.clone();
        self.read(move |sql, _| {
            let Some(session) = Session::find(sql, &key)? else { return Ok((0, Arc::default())) };
            Ok((session.version, Arc::new(session.slices(sql)?)))
        })
        .await
    }

    async fn session(&self, key: &SessionKey) -> Result<Option<Arc<State>>, StoreError> {
        let key = key.clone();
        self.read(move |sql, _| Session::find(sql, &key)?.map(|session| session.whole(sql).map(Arc::new)).transpose()).await
    }

    async fn alter(&self, key: &SessionKey, alter: Alter) -> Result<(), StoreError> {
        let key = key.clone();
        self.write(false, move |tx| {
            let mut session = Session::find_or_make(tx.sql, &key)?;
            session.alter(tx.sql, &tx.shared.keys().redact, alter)?;
            session.save(tx.sql)
        })
        .await
    }

    async fn spend(&self, charges: &[Charge], now: Timestamp) -> Result<(), StoreError> {
        let charges = charges.to_vec();
        self.write(false, move |tx| {
            let call = CallId::from_bytes(crate::keys::random()?);
            for (n, charge) in charges.iter().enumerate() {
                claims::reserve(tx.sql, call, n, charge, now)?;
            }
            Ok(())
        })
        .await
    }

    async fn ask(&self, approval: Approval) -> Result<(), StoreError> {
        let arguments = serde_json::to_vec(&approval.arguments).map_err(|e| StoreError(e.to_string()))?;
        let sealed = self.keys().seal(&format!("approval {}", approval.id), &arguments).map_err(|e| StoreError(e.to_string()))?;
        self.write(true, move |tx| {
            let session = Session::find_or_make(tx.sql, &approval.key)?;
            tx.sql
                .prepare_cached("INSERT INTO approvals (id, session, digest, expires, body, arguments) VALUES (?1, ?2, ?3, ?4, ?5, ?6)")?
                .execute(params![
                    approval.id,
                    session.id,
                    approval.digest.as_bytes().as_slice(),
                    nanos(approval.expires),
                    serde_json::to_string(&approval)?,
                    sealed
                ])?;
            Ok(())
        })
        .await
    }

    async fn approval_for(&self, key: &SessionKey, digest: Digest) -> Result<Option<Approval>, StoreError> {
        let key = key.clone();
        self.read(move |sql, shared| {
            let Some(session) = Session::find(sql, &key)? else { return Ok(None) };
            let read = |row: &rusqlite::Row<'_>| Ok((row.get::<_, String>(0)?, row.get::<_, Vec<u8>>(1)?));
            let found = sql
                .prepare_cached("SELECT body, arguments FROM approvals WHERE session = ?1 AND digest = ?2 ORDER BY n DESC LIMIT 1")?
                .query_row(params![session.id, digest.as_bytes().as_slice()], read)
                .optional()?;
            found.map(|(body, sealed)| approval(shared, &body, &sealed)).transpose()
        })
        .await
    }

    async fn approval(&self, id: &str) -> Result<Option<Approval>, StoreError> {
        let id = id.to_owned();
        self.read(move |sql, shared| find_approval(sql, shared, &id)).await
    }

    async fn answer(&self, id: &str, approved: bool, by: &str, now: Timestamp) -> Result<bool, StoreError> {
        let (id, by) = (id.to_owned(), by.to_owned());
        self.write(true, move |tx| {
            let waiting = find_approval(tx.sql, tx.shared, &id)?
                .filter(|a| a.state == ApprovalState::Waiting && now <= a.expires && a.may_be_answered_by(&by));
            let Some(approval) = waiting else { return Ok(false) };
            let state = if approved { ApprovalState::Approved } else { ApprovalState::Denied };
            save_approval(tx.sql, &Approval { state, answered_by: Some(by), ..approval })?;
            Ok(true)
        })
        .await
    }

    async fn pending(&self, now: Timestamp) -> Result<Vec<Intent>, StoreError> {
        self.write(true, move |tx| {
            claims::sweep(tx, now)?;
            let unsettled = Claim::unsettled(tx.sql)?;
            unsettled.into_iter().filter(|claim| claim.is_pending(&tx.shared.home, now)).map(claims::shown).collect()
        })
        .await
    }

    async fn settle(
        &self,
        call: CallId,
        settle: Settle,
        outcome: Outcome,
        shown: Outcome,
        by: &str,
        now: Timestamp,
    ) -> Result<bool, StoreError> {
        let by = by.to_owned();
        self.write(true, move |tx| claims::settle(tx, call, settle, (&outcome, shown), &by, now)).await
    }

    async fn output(&self, key: &SessionKey, handle: &str) -> Result<Option<Arc<str>>, StoreError> {
        let (key, handle) = (key.clone(), handle.to_owned());
        self.read(move |sql, shared| {
            let Some(session) = Session::find(sql, &key)? else { return Ok(None) };
            let sealed: Option<Vec<u8>> = sql
                .prepare_cached("SELECT text FROM outputs WHERE session = ?1 AND handle = ?2")?
                .query_row(params![session.id, handle], |row| row.get(0))
                .optional()?;
            let text = sealed.and_then(|sealed| shared.keys().unseal(&format!("output {handle}"), &sealed));
            Ok(text.and_then(|text| String::from_utf8(text).ok()).map(Into::into))
        })
        .await
    }

    async fn rows(&self, key: &SessionKey) -> Result<Vec<Arc<Row>>, StoreError> {
        let key = key.clone();
        self.read(move |sql, _| {
            let Some(session) = Session::find(sql, &key)? else { return Ok(Vec::new()) };
            let mut statement = sql.prepare_cached("SELECT body FROM ledger WHERE session = ?1 ORDER BY n")?;
            let mut rows = statement.query([session.id])?;
            let mut found = Vec::new();
            while let Some(row) = rows.next()? {
                found.push(Arc::new(serde_json::from_str(row.get_ref(0)?.as_str().unwrap_or_default())?));
            }
            Ok(found)
        })
        .await
    }

    async fn take_in(&self, row: Arc<Row>) -> Result<(), StoreError> {
        let body = ledger::text(&*row).map_err(StoreError::from)?;
        self.write(true, move |tx| {
            let claim = Claim::find(tx.sql, row.call)?.filter(|claim| !claim.is_settled());
            if ledger::has(tx.sql, &row.call)? {
                // It was given up meanwhile, and this is how it really ended.
                if let Some(claim) = claim.filter(|_| row.effects != toolgate::Effects::Unknown) {
                    let late = row.settled(row.outcome.clone(), row.effects, "a report that came late", row.at);
                    claims::append_settlement(tx, &late)?;
                    claims::end(tx, claim, Settle::by(row.effects), row.spent, Some(&row.outcome), row.at)?;
                }
                return Ok(());
            }
            if let Some(claim) = claim {
                claims::end(tx, claim, Settle::by(row.effects), row.spent, Some(&row.outcome), row.at)?;
            }
            let mut session = Session::find_or_make(tx.sql, &row.key)?;
            ledger::append(tx, &mut session, &row, &body)?;
            session.save(tx.sql)
        })
        .await
    }

    fn introduce(&self, config: Digest, definition: &Arc<str>) {
        lock(&self.shared.definitions).push((config, Arc::clone(definition)));
        self.writer.post(move |tx| ledger::keep_config(tx, config));
    }

    fn redaction_key(&self) -> Option<[u8; 32]> {
        Some(self.keys().redact)
    }

    fn home(&self) -> Option<&Path> {
        Some(self.shared.home.path())
    }

    fn owner(&self) -> Option<Arc<str>> {
        self.shared.home.owner().map(Arc::clone)
    }
}

impl SqliteStore {
    fn receipt(&self, row: &Row, seq: u64, hash: Digest) -> Option<Receipt> {
        let keys = self.keys();
        let mut receipt = Receipt {
            call: row.call,
            at: row.at,
            tool: Arc::clone(&row.tool),
            decision: row.decision,
            config: row.config,
            seq,
            hash,
            key: Arc::clone(keys.public()),
            signature: String::new(),
        };
        receipt.signature = keys.sign(&receipt.statement().ok()?);
        Some(receipt)
    }
}

/// The end of a call: state, claim, charges and row.
fn end(tx: &mut Tx<'_>, finish: Finish, body: &str, outputs: Vec<Vec<u8>>) -> Done<Result<(Arc<Row>, u64, Digest), Conflict>> {
    let row = &finish.row;
    let now = row.at;
    let mut session = Session::find_or_make(tx.sql, &row.key)?;
    if finish.changes.as_ref().is_some_and(|changes| changes.needs_version()) && session.version != finish.version {
        return Ok(Err(Conflict));
    }
    if !finish.logs.is_empty() {
        session.append(tx.sql, finish.logs)?;
    }
    for revoked in finish.revoked {
        session.revoke(tx.sql, &revoked.key())?;
    }
    if let Some(changes) = finish.changes {
        session.apply(tx.sql, changes)?;
    }
    if let Some(ended) = &finish.ended {
        session.progress.ended(ended);
    }
    if let Some(seen) = finish.seen {
        session.see(tx.sql, &tx.shared.keys().redact, *seen)?;
    }
    for ((handle, _), sealed) in finish.outputs.iter().zip(outputs) {
        tx.sql.prepare_cached("INSERT OR REPLACE INTO outputs (session, handle, at, text) VALUES (?1, ?2, ?3, ?4)")?.execute(params![
            session.id,
            handle,
            nanos(now),
            sealed
        ])?;
    }
    let claim = Claim::find(tx.sql, row.call)?.filter(|claim| !claim.is_settled());
    // It was given up and written down as such; now it comes to an end after all.
    let (row, (seq, hash)) = if ledger::has(tx.sql, &row.call)? {
        let late = row.settled(row.outcome.clone(), row.effects, "a report that came late", now);
        let body = ledger::text(&late)?;
        let appended = ledger::append(tx, &mut session, &late, &body)?;
        (Arc::new(late), appended)
    } else {
        (Arc::clone(row), ledger::append(tx, &mut session, row, body)?)
    };
    session.save(tx.sql)?;
    if let Some(claim) = claim {
        claims::end(tx, claim, finish.settle, finish.spent, finish.outcome.as_ref(), now)?;
    }
    Ok(Ok((row, seq, hash)))
}
