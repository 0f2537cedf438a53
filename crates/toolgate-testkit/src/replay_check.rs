//! Decides every call in the ledger of a test again when the test has ended.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use toolgate::{AdmissionDecision, AgentDefinition, Replay, ReplayComparison};
use toolgate_json::Digest;
use toolgate_store::{Ledger, RowFilter};

/// Number of rows that are read at once.
const ROWS_PER_PAGE: usize = 1_000;

#[derive(Default)]
struct ReplayCheckReport {
    same: usize,
    changed: Vec<String>,
    /// The reasons why calls cannot be decided again, and how often.
    undecidable: BTreeMap<String, usize>,
}

/// Fails if a call in the ledger would be decided differently now.
///
/// # Panics
/// A decision differs, or the ledger cannot be read.
pub fn assert_replay_unchanged(path: &Path) {
    // A failed test has its own message.
    if std::thread::panicking() {
        return;
    }
    let check = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
            .block_on(replay_ledger(path))
    };
    // A test may end inside of a runtime, which cannot wait for another one.
    let report = std::thread::scope(|scope| scope.spawn(check).join());
    let ReplayCheckReport { same, changed, undecidable } =
        report.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    println!("{}: {same} calls are decided the same, undecidable: {undecidable:?}", path.display());
    let changes = changed.join("\n");
    assert!(changed.is_empty(), "{} is decided differently now:\n{changes}", path.display());
}

async fn replay_ledger(path: &Path) -> ReplayCheckReport {
    let (ledger, mut report, mut by_config) =
        (Ledger::open(path).unwrap(), ReplayCheckReport::default(), HashMap::new());
    let mut filter =
        RowFilter { after_seq: Some(0), limit: Some(ROWS_PER_PAGE), ..RowFilter::default() };
    loop {
        let page = ledger.find(&filter).unwrap();
        let Some(last) = page.last() else { return report };
        filter.after_seq = Some(last.seq);
        for entry in &page {
            let row = &entry.row;
            // The configuration that decided the call may not be the current one.
            let replay =
                by_config.entry(row.config).or_insert_with(|| build_replay(&ledger, row.config));
            match replay.decide(row).await {
                ReplayComparison::Same => report.same += 1,
                ReplayComparison::Differs(now) => {
                    report.changed.push(format!(
                        "row {}: `{}` was {}, now {now}",
                        entry.seq,
                        row.tool,
                        AdmissionDecision::from_row(row)
                    ));
                }
                ReplayComparison::Undecidable(why) | ReplayComparison::Circumstance(why) => {
                    *report.undecidable.entry(why).or_default() += 1
                }
            }
        }
    }
}

fn build_replay(ledger: &Ledger, config: Digest) -> Replay {
    // The agent of the call was unknown.
    if config == Digest::default() {
        return Replay::new([]).unwrap();
    }
    let text = ledger
        .definition(config)
        .unwrap()
        .unwrap_or_else(|| panic!("the configuration {config} is not in the ledger"));
    let agent = AgentDefinition::parse(&text)
        .unwrap()
        .build()
        .unwrap_or_else(|error| panic!("{}", error.render(false)));
    Replay::new([agent]).unwrap()
}
