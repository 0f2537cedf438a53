//! What tools looked like when they were first seen. One that looks otherwise is held back until somebody has accepted it.

mod kept;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use rmcp::model::Tool;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use toolgate::Timestamp;
use toolgate::config::Upstream;
use toolgate::json::Digest;

use super::scan::{Suspicion, scan, words};
use super::shadows::Names;
use kept::{Stamp, Taken};

/// What is known of an upstream's tools.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Known {
    upstream: String,
    tools: BTreeMap<String, Pin>,
    /// What the own upstream has offered by each name when it did so last: this decides what is called. How a tool looks now as the file
    /// has it, others may have found, with another version behind them.
    #[serde(skip)]
    own: HashMap<String, Offered>,
}

/// What the own upstream offers by one name.
#[derive(Debug, Clone)]
struct Offered {
    tool: Tool,
    digest: Digest,
    /// It has offered two by this name: nobody knows which of them is called.
    ambiguous: bool,
}

impl Offered {
    /// Whether it is what was accepted.
    fn is(&self, accepted: Option<Digest>) -> bool {
        !self.ambiguous && accepted == Some(self.digest)
    }
}

/// What is known of one tool.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Pin {
    /// As it was accepted; `None` where it never was.
    accepted: Option<Tool>,
    /// Its digest, once it was asked for.
    #[serde(skip)]
    known_digest: std::sync::OnceLock<Option<Digest>>,
    /// As it looks now, where that is something else, to whoever has found so last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    seen: Option<Tool>,
    /// Why somebody should look at it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    why: Vec<Suspicion>,
    first: Timestamp,
    /// What a person was shown of it last, as a digest: only that can be accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    shown: Option<Digest>,
    /// What a person has accepted of it last, as a digest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    vouched: Option<Digest>,
}

impl Pin {
    /// What was accepted, as a digest.
    fn digest(&self) -> Option<Digest> {
        *self.known_digest.get_or_init(|| self.accepted.as_ref().map(digest))
    }

    /// What is to be kept of a tool that the own upstream offers, where that is something else than what is known of it. With what it has
    /// offered by this name before.
    fn of(known: Option<&Self>, now: &Offered, before: Option<Digest>) -> Option<Self> {
        let Some(pin) = known else {
            let why = scan(&now.tool);
            let is_fine = why.is_empty() && !now.ambiguous;
            let (accepted, seen) = if is_fine { (Some(now.tool.clone()), None) } else { (None, Some(now.tool.clone())) };
            let known_digest = std::sync::OnceLock::new();
            return Some(Self { accepted, known_digest, seen, why, first: Timestamp::now(), shown: None, vouched: None });
        };
        let (seen, is_news) = (pin.seen.as_ref().map(digest), before != Some(now.digest));
        if now.is(pin.digest()) {
            // What was found before it was looked at from here is over, and so is what was found here. What others find meanwhile is not.
            let is_over = seen.is_some() && is_news && (before.is_none() || before == seen);
            return is_over.then(|| Self { seen: None, why: Vec::new(), ..pin.clone() });
        }
        // Of two that find different things, the last is told, and the other once that is settled: neither takes turns with the other.
        let is_told = seen == Some(now.digest) || (seen.is_some() && !is_news);
        (!is_told).then(|| Self { seen: Some(now.tool.clone()), why: scan(&now.tool), ..pin.clone() })
    }
}

/// The most that is kept of one upstream, in tools and in bytes. Nothing is forgotten to make room: what was accepted once could come back
/// as something else.
const MOST_TOOLS: usize = 20_000;
const MOST_BYTES: usize = 96 << 20;

impl Known {
    /// Whether what an upstream offers now can be kept beside all that it has offered before.
    fn has_room_for(&self, tools: &[Tool]) -> bool {
        let long = |tool: &Tool| serde_json::to_vec(tool).map_or(0, |text| text.len());
        let is_new = |tool: &&Tool| {
            let pin = self.tools.get(&*tool.name);
            pin.is_none_or(|pin| pin.accepted.as_ref() != Some(*tool) && pin.seen.as_ref() != Some(*tool))
        };
        // As nearly always.
        if !tools.iter().any(|tool| is_new(&tool)) {
            return true;
        }
        let names = self.tools.len() + tools.iter().filter(|tool| !self.tools.contains_key(&*tool.name)).count();
        let kept: usize = self.tools.values().flat_map(|pin| pin.accepted.iter().chain(&pin.seen)).map(long).sum();
        let more: usize = tools.iter().filter(is_new).map(long).sum();
        names <= MOST_TOOLS && kept + more <= MOST_BYTES
    }

    /// A list by its names. Where two have one name, the one that nobody has accepted.
    fn offered(&self, tools: &[Tool]) -> BTreeMap<String, Offered> {
        let mut offered = BTreeMap::<String, Offered>::new();
        for tool in tools {
            let digest = digest(tool);
            let Some(other) = offered.get_mut(&*tool.name) else {
                offered.insert(tool.name.to_string(), Offered { tool: tool.clone(), digest, ambiguous: false });
                continue;
            };
            if other.digest == digest {
                continue;
            }
            let accepted = self.tools.get(&*tool.name).and_then(Pin::digest);
            if accepted == Some(other.digest) {
                (other.tool, other.digest) = (tool.clone(), digest);
            }
            other.ambiguous = true;
        }
        offered
    }

    /// What the own upstream offers otherwise than it was accepted, and is not told.
    fn untold(&self) -> Vec<Offered> {
        let is_untold = |(name, now): &(&String, &Offered)| Pin::of(self.tools.get(*name), now, Some(now.digest)).is_some();
        self.own.iter().filter(is_untold).map(|(_, now)| now.clone()).collect()
    }

    /// Holds back what speaks of another upstream's tool. Whether there is anything that was not known.
    fn hold_shadows(&mut self, own: &Upstream, names: &Names<'_>) -> bool {
        let mut found = false;
        for pin in self.tools.values_mut() {
            let is_told = pin.why.iter().any(|why| matches!(why, Suspicion::Shadow { .. }));
            // Nobody is asked twice.
            let vouched = |tool: &&Tool| pin.vouched.is_some_and(|vouched| vouched == digest(tool));
            let speaks = |tool: &Tool, since| names.another(own, since, &words(tool));
            // What has changed says it now, however long there was a tool of that name.
            let seen = pin.seen.as_ref().filter(|tool| !is_told && !vouched(tool)).and_then(|tool| speaks(tool, Timestamp::now()));
            // The upstream of another instance may still be as it was accepted, so that is looked at, too.
            let accepted = pin.accepted.as_ref().filter(|tool| !vouched(tool)).and_then(|tool| speaks(tool, pin.first));
            found |= seen.is_some() || accepted.is_some();
            pin.why.extend(seen.map(|tool| Suspicion::Shadow { tool }));
            if let Some(tool) = accepted {
                let accepted = pin.accepted.take();
                pin.known_digest.take();
                // Where there is something else to look at, that comes first.
                if pin.seen.is_none() {
                    pin.seen = accepted;
                    pin.why.push(Suspicion::Shadow { tool });
                }
            }
        }
        found
    }
}

/// The tools of one upstream as they were accepted.
pub struct Pins {
    file: Option<PathBuf>,
    known: Mutex<Known>,
    /// How the file was when it was read.
    stamp: Mutex<Option<Stamp>>,
    /// New tools that would be accepted if they could be written down, and why they cannot be.
    unwritten: Mutex<(String, Vec<Tool>)>,
}

/// A tool that is held back, and why.
#[derive(Debug, Clone, Serialize)]
pub struct Change {
    /// The upstream.
    pub upstream: String,
    /// The tool.
    pub tool: String,
    /// As it was accepted; nothing where it is new.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub before: Option<Value>,
    /// As it looks now.
    pub now: Value,
    /// What is odd about it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub why: Vec<Suspicion>,
}

/// What was accepted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Accepted {
    /// These tools.
    pub tools: Vec<String>,
    /// Tools that nobody was shown as they are now: see [`Pins::show`].
    pub unseen: Vec<String>,
}

fn written(tool: &Tool) -> Value {
    serde_json::to_value(tool).unwrap_or_default()
}

fn changes(known: &Known) -> Vec<Change> {
    let one = |(name, pin): (&String, &Pin)| {
        Some(Change {
            upstream: known.upstream.clone(),
            tool: name.clone(),
            before: pin.accepted.as_ref().map(written),
            now: written(pin.seen.as_ref()?),
            why: pin.why.clone(),
        })
    };
    known.tools.iter().filter_map(one).collect()
}

/// What is held back, as it looks now.
fn held(known: &Known) -> Vec<(String, Tool)> {
    known.tools.iter().filter_map(|(name, pin)| Some((name.clone(), pin.seen.clone()?))).collect()
}

/// Everything about a tool that a model or a client goes by.
pub(super) fn digest(tool: &Tool) -> Digest {
    let mut written = serde_json::to_value(tool).unwrap_or_default();
    if let Some(fields) = written.as_object_mut() {
        fields.retain(|key, _| {
            matches!(key.as_str(), "name" | "title" | "description" | "inputSchema" | "outputSchema" | "annotations" | "_meta")
        });
    }
    Digest::of(&toolgate::json::canonical(&written))
}

impl Pins {
    /// Reads what is known of an upstream. What cannot be read is not begun anew: somebody may have broken it on purpose.
    ///
    /// # Errors
    /// The file is there and cannot be read.
    pub fn open(directory: Option<&Path>, upstream: &Upstream) -> io::Result<Self> {
        let file = directory.map(|directory| directory.join(format!("{}.json", upstream.name)));
        let known = Known { upstream: upstream.name.clone(), ..Known::default() };
        let pins = Self { file, known: Mutex::new(known), stamp: Mutex::default(), unwritten: Mutex::default() };
        pins.read()?;
        Ok(pins)
    }

    /// The file that it is kept in.
    #[must_use]
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Known> {
        if let Err(error) = self.read() {
            tracing::error!(%error, "what tools looked like cannot be read");
        }
        crate::gateway::lock(&self.known)
    }

    /// Takes note of what an upstream offers now. What is new and harmless is accepted once it is written down; what has changed is held
    /// back. Whether the file has something else to tell than before.
    ///
    /// # Errors
    /// It has offered more than anybody keeps.
    pub(super) fn note(&self, tools: &[Tool]) -> Result<bool, String> {
        let turn = self.enter();
        let mut known = self.lock();
        if !known.has_room_for(tools) {
            return Err(format!("since it was first seen it has offered more than {MOST_TOOLS} tools, or {MOST_BYTES} bytes of them"));
        }
        let offered = known.offered(tools);
        let Known { tools: pins, own, .. } = &mut *known;
        // What it offers no more is not forgotten: it is called as it was accepted, or not at all.
        own.retain(|name, _| pins.contains_key(name));
        let with_before = |(name, now): (String, Offered)| {
            let before = own.insert(name, now.clone());
            (now, before.map(|before| before.digest))
        };
        let offered = offered.into_iter().map(with_before).collect();
        Ok(self.take(&mut known, offered, turn))
    }

    /// Tries again to write down what could not be, and tells what another instance has taken for over.
    pub(super) fn note_again(&self) {
        let is_told = self.lock().untold().is_empty();
        if is_told {
            return;
        }
        let turn = self.enter();
        let mut known = self.lock();
        let untold = known.untold();
        let tools: Vec<Tool> = untold.iter().map(|now| now.tool.clone()).collect();
        // Where it has offered too much meanwhile, that is told when it is asked.
        if known.has_room_for(&tools) {
            let as_before = |now: Offered| {
                let digest = now.digest;
                (now, Some(digest))
            };
            self.take(&mut known, untold.into_iter().map(as_before).collect(), turn);
        }
    }

    /// Keeps what the own upstream offers, with what it has offered by the same name before. Whether there is something else to tell.
    fn take(&self, known: &mut Known, offered: Vec<(Offered, Option<Digest>)>, turn: Taken) -> bool {
        let (before, mut fresh) = (held(known), Vec::new());
        for (now, was) in offered {
            let name = now.tool.name.to_string();
            let found = known.tools.get(&name);
            let Some(pin) = Pin::of(found, &now, was) else { continue };
            if found.is_none() {
                fresh.extend(pin.accepted.clone());
            }
            known.tools.insert(name, pin);
        }
        let kept = self.keep(known, turn);
        let mut unwritten = crate::gateway::lock(&self.unwritten);
        *unwritten = match kept {
            Ok(()) => <(String, Vec<Tool>)>::default(),
            // Nobody has ever seen them, then: they are as new the next time.
            Err(why) => {
                fresh.iter().for_each(|tool| drop(known.tools.remove(&*tool.name)));
                (why, fresh)
            }
        };
        held(known) != before
    }

    /// Holds back what speaks of another upstream's tool, though nobody has changed it; of what is held back already, that is said. All of
    /// it is written down at once.
    pub(super) fn hold_shadows(&self, own: &Upstream, names: &Names<'_>) {
        let found = self.lock().hold_shadows(own, names);
        // What is not written down is looked for again after the next start.
        if found {
            let turn = self.enter();
            let mut known = self.lock();
            // Another instance may have written something else meanwhile.
            known.hold_shadows(own, names);
            let _ = self.keep(&known, turn);
        }
    }

    /// The tools as they were accepted; `None` where nothing was ever seen.
    pub(super) fn accepted(&self) -> Option<Vec<Tool>> {
        let known = self.lock();
        (!known.tools.is_empty()).then(|| known.tools.values().filter_map(|pin| pin.accepted.clone()).collect())
    }

    /// The tools that were ever seen, when each was for the first time, and whether one is accepted.
    pub(super) fn seen(&self) -> BTreeMap<String, (Timestamp, bool)> {
        let known = self.lock();
        known.tools.iter().map(|(name, pin)| (name.clone(), (pin.first, pin.accepted.is_some()))).collect()
    }

    /// What a tool looked like when it was accepted.
    pub(super) fn digest_of(&self, tool: &str) -> Option<Digest> {
        self.lock().tools.get(tool).and_then(|pin| pin.accepted.as_ref().map(digest))
    }

    /// Whether a call of a tool says all of itself in its body: some want arguments in headers as well.
    pub(super) fn is_plain(&self, tool: &str) -> bool {
        let known = crate::gateway::lock(&self.known);
        let schema = known.tools.get(tool).and_then(|pin| pin.accepted.as_ref()).map(|tool| &tool.input_schema);
        schema.is_some_and(|schema| !crate::speaks_in_headers(schema))
    }

    /// Whether a tool is now as it was when somebody looked at it: no other one is called in its place. What another instance has found does
    /// not count, as its upstream may be of another version; unless the own one has never said what it has by that name.
    pub(super) fn holds(&self, tool: &str, accepted: Option<Digest>) -> bool {
        let known = crate::gateway::lock(&self.known);
        let Some(pin) = known.tools.get(tool).filter(|pin| accepted.is_some() && pin.digest() == accepted) else { return false };
        known.own.get(tool).map_or(pin.seen.is_none(), |now| now.is(accepted))
    }

    /// The tools that were ever seen, by the names that the upstream has for them.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.lock().tools.keys().cloned().collect()
    }

    /// What is held back: as far as the own upstream was asked, of it; else of whoever was asked last.
    #[must_use]
    pub fn changes(&self) -> Vec<Change> {
        let known = self.lock();
        let unwritten = crate::gateway::lock(&self.unwritten);
        let (why, tools) = &*unwritten;
        // Another instance may have written them down meanwhile.
        let waiting = tools.iter().filter(|tool| !known.tools.contains_key(&*tool.name)).map(|tool| Change {
            upstream: known.upstream.clone(),
            tool: tool.name.to_string(),
            before: None,
            now: written(tool),
            why: vec![Suspicion::Unwritten { why: why.clone() }],
        });
        let is_as_accepted = |tool: &str| known.own.get(tool).is_some_and(|now| now.is(known.tools.get(tool).and_then(Pin::digest)));
        changes(&known).into_iter().filter(|change| !is_as_accepted(&change.tool)).chain(waiting).collect()
    }

    /// Accepts tools as they look now: one, or all. Says which.
    ///
    /// # Errors
    /// It cannot be written down.
    pub fn accept(&self, tool: Option<&str>) -> io::Result<Accepted> {
        let turn = self.enter();
        let mut known = self.lock();
        let (mut next, mut accepted) = (known.clone(), Accepted::default());
        for (name, pin) in next.tools.iter_mut().filter(|(name, _)| tool.is_none_or(|tool| tool == *name)) {
            let Some(seen) = &pin.seen else { continue };
            if pin.shown != Some(digest(seen)) {
                accepted.unseen.push(name.clone());
                continue;
            }
            pin.accepted = pin.seen.take();
            pin.known_digest.take();
            pin.why.clear();
            pin.vouched = pin.shown;
            accepted.tools.push(name.clone());
        }
        self.write(&next, turn)?;
        *known = next;
        Ok(accepted)
    }

    /// What is held back, shown to a person: only what was shown can be accepted.
    ///
    /// # Errors
    /// It cannot be written down.
    pub fn show(&self) -> io::Result<Vec<Change>> {
        let turn = self.enter();
        // What is shown is what is noted as shown, whatever the upstream says meanwhile.
        let mut known = self.lock();
        let changes = changes(&known);
        for pin in known.tools.values_mut() {
            pin.shown = pin.seen.as_ref().map(digest);
        }
        self.write(&known, turn)?;
        Ok(changes)
    }
}
