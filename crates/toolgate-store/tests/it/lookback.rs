//! A look back when a test has ended: every call in its ledger, decided again on what was recorded, comes out the same.
//! The tests of other crates include this file.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use toolgate::{Compared, Definition, Replay, Ruling};
use toolgate_json::Digest;
use toolgate_store::{Filter, Ledger};

/// How many rows are read at once.
const PAGE: usize = 1_000;

#[derive(Default)]
struct Seen {
    same: usize,
    otherwise: Vec<String>,
    /// What replay says it cannot judge: why, and how often.
    unjudged: BTreeMap<String, usize>,
}

/// Fails where a call would be decided otherwise now.
pub(crate) fn decided_alike(path: &Path) {
    // A test that fails has its own reason.
    if std::thread::panicking() {
        return;
    }
    let look = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(look_back(path));
    // A test may end inside of a runtime, where no other can be waited for.
    let looked = std::thread::scope(|scope| scope.spawn(look).join());
    let Seen { same, otherwise, unjudged } = looked.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    println!("{}: {same} calls come out the same, not judged: {unjudged:?}", path.display());
    assert!(otherwise.is_empty(), "{} is decided otherwise now:\n{}", path.display(), otherwise.join("\n"));
}

async fn look_back(path: &Path) -> Seen {
    let (ledger, mut seen, mut by_config) = (Ledger::open(path).unwrap(), Seen::default(), HashMap::new());
    let mut filter = Filter { after_seq: Some(0), limit: Some(PAGE), ..Filter::default() };
    loop {
        let page = ledger.find(&filter).unwrap();
        let Some(last) = page.last() else { return seen };
        filter.after_seq = Some(last.seq);
        for entry in &page {
            let row = &entry.row;
            // Each by the configuration that decided it, whatever has been in force since.
            let replay = by_config.entry(row.config).or_insert_with(|| replay_of(&ledger, row.config));
            match replay.decide(row).await {
                Compared::Same => seen.same += 1,
                Compared::Differs(now) => {
                    seen.otherwise.push(format!("row {}: `{}` was {}, now {now}", entry.seq, row.tool, Ruling::of_row(row)));
                }
                Compared::Undecidable(why) | Compared::Circumstance(why) => *seen.unjudged.entry(why).or_default() += 1,
            }
        }
    }
}

fn replay_of(ledger: &Ledger, config: Digest) -> Replay {
    // Nobody knew the agent; nobody knows it now.
    if config == Digest::default() {
        return Replay::new([]).unwrap();
    }
    // A ledger that this version has written can be read by it.
    let text = ledger.definition(config).unwrap().unwrap_or_else(|| panic!("the configuration {config} is not in the ledger"));
    let agent = Definition::parse(&text).unwrap().build().unwrap_or_else(|error| panic!("{}", error.render(false)));
    Replay::new([agent]).unwrap()
}
