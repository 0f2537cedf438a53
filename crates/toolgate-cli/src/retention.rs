//! Rows that were kept for as long as the configuration says go, while somebody serves.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use toolgate::store::StoreError;
use toolgate::{SignedDuration, Timestamp};
use toolgate_store::{Filter, Ledger, SqliteStore};

use crate::say::say;

/// How often it is looked for rows that may go.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Takes out of a ledger what is older than it is to be kept, at once and every day from then on. How long that is, is asked each time;
/// what has gone is told.
pub(crate) fn keep(store: Arc<SqliteStore>, kept: impl Fn() -> Option<SignedDuration>, tell: impl Fn(&str)) -> impl Future<Output = ()> {
    // Before anybody writes a row by the clock of this start.
    let (began, begun) = (borne_out(store.path()), Instant::now());
    async move {
        let mut days = tokio::time::interval(DAY);
        loop {
            days.tick().await;
            // Time that was waited for has passed, also where nobody wrote anything.
            let waited = SignedDuration::try_from(begun.elapsed()).ok();
            let waited = began.zip(waited).and_then(|(began, waited)| began.checked_add(waited).ok());
            let now = waited.or_else(|| borne_out(store.path())).map(|now| now.min(Timestamp::now()));
            // Longer ago than there was time, there was nothing.
            let Some(before) = kept().zip(now).and_then(|(kept, now)| now.checked_sub(kept).ok()) else { continue };
            match store.prune(before, before).await {
                Ok(gone) if gone.rows == 0 && gone.sealed == 0 => {}
                Ok(gone) => tell(&format!(
                    "{} and {} from before {} are gone, as `retention` says",
                    counted(gone.rows, "row"),
                    counted(gone.sealed, "sealed record"),
                    time(before)
                )),
                Err(error) => still_there(&error),
            }
        }
    }
}

/// What time it is, as far as a ledger bears it out: at most a day after its newest row. A clock that is ahead would let all rows go.
fn borne_out(store: &Path) -> Option<Timestamp> {
    let last = Filter { most: Some(1), newest_first: true, ..Filter::default() };
    let rows = Ledger::open(store).and_then(|ledger| ledger.find(&last)).inspect_err(still_there).ok()?;
    let newest = rows.first()?.row.at;
    Some(newest.checked_add(SignedDuration::from_hours(24)).unwrap_or(Timestamp::MAX).min(Timestamp::now()))
}

fn still_there(error: &StoreError) {
    say(&format!("error: rows that `retention` lets go are still there: {error}"));
}

/// What a person should know of how long rows are kept: where somebody has said so, and where they have become old.
pub(crate) fn told(store: &Path, kept: Option<SignedDuration>) -> Option<String> {
    if let Some(kept) = kept {
        let days = u64::try_from(kept.as_hours() / 24).unwrap_or_default();
        return Some(format!("rows go after {}, while somebody serves", counted(days, "day")));
    }
    let first = Filter { most: Some(1), ..Filter::default() };
    let oldest = Ledger::open(store).and_then(|ledger| ledger.find(&first)).ok()?.first()?.row.at;
    let is_old = Timestamp::now().duration_since(oldest) > SignedDuration::from_hours(24 * 90);
    is_old.then(|| format!("the oldest row is of {}; rows go by `retention`, or by `toolgate audit prune`", time(oldest)))
}

fn time(at: Timestamp) -> String {
    at.strftime("%Y-%m-%d %H:%M:%SZ").to_string()
}

fn counted(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}
