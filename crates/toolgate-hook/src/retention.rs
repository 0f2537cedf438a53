//! Prunes ledger rows that are older than `retention`, while a server runs.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use toolgate::store::StoreError;
use toolgate::{SignedDuration, Timestamp};
use toolgate_store::{Ledger, RowFilter, SqliteStore};

use crate::stderr::print_stderr;

/// Interval between two prunings.
const PRUNE_INTERVAL: Duration = Duration::from_secs(24 * 60 * 60);

/// Prunes a ledger at once and then every day, and reports what was removed.
///
/// The retention is read again before each run.
pub fn prune_daily(
    store: Arc<SqliteStore>,
    retention: impl Fn() -> Option<SignedDuration>,
    report: impl Fn(&str),
) -> impl Future<Output = ()> {
    // The time is determined before this process writes a row with its own clock.
    let (first_time, started) = (ledger_time(store.path()), Instant::now());
    async move {
        let mut ticks = tokio::time::interval(PRUNE_INTERVAL);
        loop {
            ticks.tick().await;
            // Monotonic time counts too, even if no row was written meanwhile.
            let elapsed_time = SignedDuration::try_from(started.elapsed()).ok();
            let elapsed_time = first_time
                .zip(elapsed_time)
                .and_then(|(first_time, elapsed_time)| first_time.checked_add(elapsed_time).ok());
            let now = elapsed_time
                .or_else(|| ledger_time(store.path()))
                .map(|now| now.min(Timestamp::now()));
            // If the subtraction underflows, no row can be that old.
            let Some(before) =
                retention().zip(now).and_then(|(retention, now)| now.checked_sub(retention).ok())
            else {
                continue;
            };
            match store.prune(before, before).await {
                Ok(pruned) if pruned.rows == 0 && pruned.sealed == 0 => {}
                Ok(pruned) => report(&format!(
                    "removed {} and {} from before {} (`retention`)",
                    format_count(pruned.rows, "row"),
                    format_count(pruned.sealed, "sealed record"),
                    format_time(before)
                )),
                Err(error) => report_prune_error(&error),
            }
        }
    }
}

/// Returns the current time, but at most a day after the newest row of the ledger.
///
/// Without this limit, a clock that is ahead would remove all rows.
fn ledger_time(store: &Path) -> Option<Timestamp> {
    let last = RowFilter { limit: Some(1), newest_first: true, ..RowFilter::default() };
    let rows = Ledger::open(store)
        .and_then(|ledger| ledger.find(&last))
        .inspect_err(report_prune_error)
        .ok()?;
    let newest = rows.first()?.row.at;
    Some(
        newest
            .checked_add(SignedDuration::from_hours(24))
            .unwrap_or(Timestamp::MAX)
            .min(Timestamp::now()),
    )
}

fn report_prune_error(error: &StoreError) {
    print_stderr(&format!("error: cannot remove rows older than `retention`: {error}"));
}

/// Describes the retention of a ledger, or warns if there is none and the ledger has old rows.
pub fn describe_retention(store: &Path, retention: Option<SignedDuration>) -> Option<String> {
    if let Some(retention) = retention {
        let days = u64::try_from(retention.as_hours() / 24).unwrap_or_default();
        return Some(format!("`toolgate serve` removes rows after {}", format_count(days, "day")));
    }
    let first = RowFilter { limit: Some(1), ..RowFilter::default() };
    let oldest = Ledger::open(store).and_then(|ledger| ledger.find(&first)).ok()?.first()?.row.at;
    let is_old = Timestamp::now().duration_since(oldest) > SignedDuration::from_hours(24 * 90);
    is_old.then(|| format!("the oldest row is from {}; set `retention` or run `toolgate audit prune` to remove rows", format_time(oldest)))
}

fn format_time(at: Timestamp) -> String {
    at.strftime("%Y-%m-%d %H:%M:%SZ").to_string()
}

fn format_count(count: u64, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}
