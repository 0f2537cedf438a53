//! A look back when a test has ended: every call in its ledger, decided again on what was recorded,
//! comes out the same. The tests of other crates include this file.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use toolgate::{AdmissionDecision, AgentDefinition, Replay, ReplayComparison};
use toolgate_json::Digest;
use toolgate_store::{Ledger, RowFilter};

/// How many rows are read at once.
const ROWS_PER_PAGE: usize = 1_000;

#[derive(Default)]
struct ReplayCheckReport {
    same: usize,
    changed: Vec<String>,
    /// What replay says it cannot judge: why, and how often.
    undecidable: BTreeMap<String, usize>,
}

/// Fails where a call would be decided otherwise now.
pub(crate) fn assert_replay_unchanged(path: &Path) {
    // A test that fails has its own reason.
    if std::thread::panicking() {
        return;
    }
    let look = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
            .block_on(replay_ledger(path))
    };
    // A test may end inside of a runtime, where no other can be waited for.
    let looked = std::thread::scope(|scope| scope.spawn(look).join());
    let ReplayCheckReport { same, changed: otherwise, undecidable: unjudged } =
        looked.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    println!("{}: {same} calls come out the same, not judged: {unjudged:?}", path.display());
    assert!(
        otherwise.is_empty(),
        "{} is decided otherwise now:\n{}",
        path.display(),
        otherwise.join("\n")
    );
}

async fn replay_ledger(path: &Path) -> ReplayCheckReport {
    let (ledger, mut seen, mut by_config) =
        (Ledger::open(path).unwrap(), ReplayCheckReport::default(), HashMap::new());
    let mut filter =
        RowFilter { after_seq: Some(0), limit: Some(ROWS_PER_PAGE), ..RowFilter::default() };
    loop {
        let page = ledger.find(&filter).unwrap();
        let Some(last) = page.last() else { return seen };
        filter.after_seq = Some(last.seq);
        for entry in &page {
            let row = &entry.row;
            // Each by the configuration that decided it, whatever has been in force since.
            let replay =
                by_config.entry(row.config).or_insert_with(|| build_replay(&ledger, row.config));
            match replay.decide(row).await {
                ReplayComparison::Same => seen.same += 1,
                ReplayComparison::Differs(now) => {
                    seen.changed.push(format!(
                        "row {}: `{}` was {}, now {now}",
                        entry.seq,
                        row.tool,
                        AdmissionDecision::from_row(row)
                    ));
                }
                ReplayComparison::Undecidable(why) | ReplayComparison::Circumstance(why) => {
                    *seen.undecidable.entry(why).or_default() += 1
                }
            }
        }
    }
}

fn build_replay(ledger: &Ledger, config: Digest) -> Replay {
    // Nobody knew the agent; nobody knows it now.
    if config == Digest::default() {
        return Replay::new([]).unwrap();
    }
    // A ledger that this version has written can be read by it.
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
