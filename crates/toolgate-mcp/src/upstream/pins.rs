//! What tools looked like when they were first seen. One that looks otherwise is held back until somebody has accepted it.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
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

/// What is known of an upstream's tools.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Known {
    upstream: String,
    tools: BTreeMap<String, Pin>,
}

/// What is known of one tool.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Pin {
    /// As it was accepted; `None` where it never was.
    accepted: Option<Tool>,
    /// Its digest, once it was asked for.
    #[serde(skip)]
    known_digest: std::sync::OnceLock<Option<Digest>>,
    /// As it looks now, where that is something else.
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
}

/// No two drafts have one name.
static DRAFTS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

/// The tools of one upstream as they were accepted.
pub struct Pins {
    file: Option<PathBuf>,
    known: Mutex<Known>,
    /// How the file was when it was read.
    stamp: Mutex<Option<(std::time::SystemTime, u64)>>,
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
        let known = Known { upstream: upstream.name.clone(), tools: BTreeMap::new() };
        let pins = Self { file, known: Mutex::new(known), stamp: Mutex::default(), unwritten: Mutex::default() };
        pins.read()?;
        Ok(pins)
    }

    /// The file that it is kept in.
    #[must_use]
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// Reads the file, where somebody else has written it since.
    fn read(&self) -> io::Result<()> {
        let Some(path) = &self.file else { return Ok(()) };
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        let now = std::fs::metadata(path).ok().and_then(|file| Some((file.modified().ok()?, file.len())));
        // Always in this order: what is known, then how the file was.
        let mut known = crate::gateway::lock(&self.known);
        let mut stamp = crate::gateway::lock(&self.stamp);
        if now.is_none() || *stamp == now {
            return Ok(());
        }
        let text = std::fs::read(path).map_err(named)?;
        let spoiled = |error| named(io::Error::other(format!("it is spoiled ({error}); remove it to see all tools anew")));
        *known = serde_json::from_slice(&text).map_err(spoiled)?;
        *stamp = now;
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Known> {
        if let Err(error) = self.read() {
            tracing::error!(%error, "what tools looked like cannot be read");
        }
        crate::gateway::lock(&self.known)
    }

    /// Takes note of what an upstream offers now. What is new and harmless is accepted once it is written down; what has changed is held
    /// back. Whether that is something else than before.
    ///
    /// # Errors
    /// It has offered more than anybody keeps.
    pub(super) fn note(&self, tools: &[Tool]) -> Result<bool, String> {
        let mut known = self.lock();
        let before = held(&known);
        if !known.has_room_for(tools) {
            return Err(format!("since it was first seen it has offered more than {MOST_TOOLS} tools, or {MOST_BYTES} bytes of them"));
        }
        let mut fresh = Vec::new();
        for tool in tools {
            let name = tool.name.to_string();
            let found = known.tools.get(&name);
            let same = |other: &Option<Tool>| other.as_ref().is_some_and(|other| digest(other) == digest(tool));
            let pin = match found {
                Some(pin) if same(&pin.accepted) => Pin { seen: None, why: Vec::new(), ..pin.clone() },
                Some(pin) if same(&pin.seen) => continue,
                Some(pin) => Pin { seen: Some(tool.clone()), why: scan(tool), ..pin.clone() },
                None => {
                    let why = scan(tool);
                    let (accepted, seen) = if why.is_empty() { (Some(tool.clone()), None) } else { (None, Some(tool.clone())) };
                    fresh.extend(accepted.clone());
                    Pin {
                        accepted,
                        seen,
                        why,
                        first: Timestamp::now(),
                        shown: None,
                        known_digest: std::sync::OnceLock::new(),
                        vouched: None,
                    }
                }
            };
            known.tools.insert(name, pin);
        }
        let kept = self.keep(&known);
        let mut unwritten = crate::gateway::lock(&self.unwritten);
        *unwritten = match kept {
            Ok(()) => <(String, Vec<Tool>)>::default(),
            // Nobody has ever seen them, then: they are as new the next time.
            Err(why) => {
                fresh.iter().for_each(|tool| drop(known.tools.remove(&*tool.name)));
                (why, fresh)
            }
        };
        Ok(held(&known) != before)
    }

    /// Tries again to write down what could not be.
    pub(super) fn note_again(&self) {
        let waiting = crate::gateway::lock(&self.unwritten).1.clone();
        // Where it has offered too much meanwhile, that is told when it is asked.
        if !waiting.is_empty() {
            let _ = self.note(&waiting);
        }
    }

    /// Holds back what speaks of another upstream's tool, though nobody has changed it; of what is held back already, that is said. All of
    /// it is written down at once.
    pub(super) fn hold_shadows(&self, own: &Upstream, names: &Names<'_>) {
        let (mut known, mut found) = (self.lock(), false);
        for pin in known.tools.values_mut() {
            let now = pin.seen.as_ref().or(pin.accepted.as_ref());
            // Nobody is asked twice.
            let is_vouched = pin.vouched.is_some() && pin.vouched == now.map(digest);
            if is_vouched || pin.why.iter().any(|why| matches!(why, Suspicion::Shadow { .. })) {
                continue;
            }
            // What has changed says it now, however long there was a tool of that name.
            let since = if pin.seen.is_some() { Timestamp::now() } else { pin.first };
            let shadowed = now.and_then(|tool| names.another(own, since, &words(tool)));
            let Some(tool) = shadowed else { continue };
            pin.why.push(Suspicion::Shadow { tool });
            if pin.seen.is_none() {
                pin.seen = pin.accepted.take();
                pin.known_digest.take();
            }
            found = true;
        }
        // What is not written down is looked for again after the next start.
        if found {
            let _ = self.keep(&known);
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

    /// Whether a tool is now as it was when somebody looked at it: no other one is called in its place.
    pub(super) fn holds(&self, tool: &str, accepted: Option<Digest>) -> bool {
        let known = crate::gateway::lock(&self.known);
        known.tools.get(tool).is_some_and(|pin| {
            let own = *pin.known_digest.get_or_init(|| pin.accepted.as_ref().map(digest));
            pin.seen.is_none() && accepted.is_some() && own == accepted
        })
    }

    /// The tools that were ever seen, by the names that the upstream has for them.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.lock().tools.keys().cloned().collect()
    }

    /// What is held back.
    #[must_use]
    pub fn changes(&self) -> Vec<Change> {
        let known = self.lock();
        let unwritten = crate::gateway::lock(&self.unwritten);
        let (why, tools) = &*unwritten;
        let waiting = tools.iter().map(|tool| Change {
            upstream: known.upstream.clone(),
            tool: tool.name.to_string(),
            before: None,
            now: written(tool),
            why: vec![Suspicion::Unwritten { why: why.clone() }],
        });
        changes(&known).into_iter().chain(waiting).collect()
    }

    /// Accepts tools as they look now: one, or all. Says which.
    ///
    /// # Errors
    /// It cannot be written down.
    pub fn accept(&self, tool: Option<&str>) -> io::Result<Accepted> {
        let mut known = self.lock();
        let mut accepted = Accepted::default();
        for (name, pin) in known.tools.iter_mut().filter(|(name, _)| tool.is_none_or(|tool| tool == *name)) {
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
        self.write(&known)?;
        Ok(accepted)
    }

    /// What is held back, shown to a person: only what was shown can be accepted.
    ///
    /// # Errors
    /// It cannot be written down.
    pub fn show(&self) -> io::Result<Vec<Change>> {
        // What is shown is what is noted as shown, whatever the upstream says meanwhile.
        let mut known = self.lock();
        let changes = changes(&known);
        for pin in known.tools.values_mut() {
            pin.shown = pin.seen.as_ref().map(digest);
        }
        self.write(&known)?;
        Ok(changes)
    }

    /// Writes it down; else says why that cannot be done.
    fn keep(&self, known: &Known) -> Result<(), String> {
        self.write(known).map_err(|error| {
            let file = self.file.as_deref().unwrap_or(Path::new("")).display();
            tracing::error!(%error, %file, "what tools look like cannot be written down");
            format!("{file}: {error}")
        })
    }

    fn write(&self, known: &Known) -> io::Result<()> {
        let Some(path) = &self.file else { return Ok(()) };
        let text = serde_json::to_vec_pretty(known)?;
        if std::fs::read(path).is_ok_and(|before| before == text) {
            return Ok(());
        }
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent)?;
        }
        let draft =
            path.with_extension(format!("new-{}-{}", std::process::id(), DRAFTS.fetch_add(1, std::sync::atomic::Ordering::Relaxed)));
        let written = (|| {
            let mut file = std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&draft)?;
            file.write_all(&text)?;
            file.sync_all()?;
            std::fs::rename(&draft, path)
        })();
        // It is tried again and again: what was begun each time would fill the disk.
        written.inspect_err(|_| drop(std::fs::remove_file(&draft)))?;
        *crate::gateway::lock(&self.stamp) = std::fs::metadata(path).ok().and_then(|file| Some((file.modified().ok()?, file.len())));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Else anything could stand in its place after the next start.
    #[test]
    fn what_is_new_is_accepted_once_it_is_written_down() {
        let home = tempfile::tempdir().unwrap();
        let place = home.path().join("pins");
        let upstream = toolgate::config::Config::parse("toolgate.toml", "[upstreams.a]\ncommand = \"a\"\n").upstreams.remove(0);
        let tool = |name: &str, description: &str| -> Tool {
            serde_json::from_value(json!({"name": name, "description": description, "inputSchema": {"type": "object"}})).unwrap()
        };
        let names = |pins: &Pins| pins.accepted().unwrap_or_default().iter().map(|tool| tool.name.to_string()).collect::<Vec<_>>();
        let pins = Pins::open(Some(&place), &upstream).unwrap();
        pins.note(&[tool("old", "Is there.")]).unwrap();
        // No directory can be made where there is a file.
        let aside = home.path().join("aside");
        std::fs::rename(&place, &aside).unwrap();
        std::fs::write(&place, "").unwrap();
        let offered = [tool("old", "Is there."), tool("new", "Has come.")];
        for _ in 0..2 {
            pins.note(&offered).unwrap();
            assert_eq!(names(&pins), ["old"]);
            let changes = pins.changes();
            let [Change { tool, before: None, why, .. }] = &changes[..] else { panic!("{changes:?}") };
            assert!(tool == "new" && matches!(&why[..], [Suspicion::Unwritten { why }] if why.contains("a.json")), "{why:?}");
            assert!(!pins.holds("new", pins.digest_of("new")) && pins.holds("old", pins.digest_of("old")));
        }
        // What has changed is held back for that.
        pins.note(&[tool("old", "Is another one."), tool("new", "Has come.")]).unwrap();
        assert!(!pins.holds("old", pins.digest_of("old")));
        pins.note(&offered).unwrap();
        std::fs::remove_file(&place).unwrap();
        std::fs::rename(&aside, &place).unwrap();
        pins.note_again();
        assert!(pins.changes().is_empty());
        // As it is for whoever opens them next.
        for pins in [pins, Pins::open(Some(&place), &upstream).unwrap()] {
            assert_eq!(names(&pins), ["new", "old"]);
            pins.note(&[tool("new", "Is another one.")]).unwrap();
            assert_eq!(pins.changes().len(), 1);
            pins.note(&offered).unwrap();
        }
    }

    /// Whatever a model or a client goes by.
    #[test]
    fn each_part_of_a_tool_that_is_another_alone_is_held_back() {
        let first = json!({
            "name": "look",
            "title": "Look",
            "description": "Looks.",
            "inputSchema": {"type": "object", "properties": {"a": {"type": "string", "description": "Where."}}},
            "outputSchema": {"type": "object", "properties": {"b": {"type": "string"}}},
            "annotations": {"title": "Look", "readOnlyHint": true},
            "_meta": {"k": {"l": 1}},
        });
        let upstream = toolgate::config::Config::parse("toolgate.toml", "[upstreams.a]\ncommand = \"a\"\n").upstreams.remove(0);
        let tool = |written: &Value| -> Tool { serde_json::from_value(written.clone()).unwrap() };
        for (part, other) in [
            ("title", json!("Look here")),
            ("title", Value::Null),
            ("description", json!("Looks further.")),
            ("description", Value::Null),
            ("inputSchema", json!({"type": "object", "properties": {"a": {"type": "string", "description": "Who."}}})),
            ("inputSchema", json!({"type": "object", "properties": {"a": {"type": "string", "description": "Where."}}, "required": ["a"]})),
            ("inputSchema", json!({"type": "object"})),
            ("outputSchema", json!({"type": "object", "properties": {"b": {"type": "number"}}})),
            ("outputSchema", Value::Null),
            ("annotations", json!({"title": "Look", "readOnlyHint": false})),
            ("annotations", json!({"title": "Look", "readOnlyHint": true, "destructiveHint": false})),
            ("annotations", json!({"title": "Look here", "readOnlyHint": true})),
            ("annotations", Value::Null),
            ("_meta", json!({"k": {"l": 2}})),
            ("_meta", Value::Null),
        ] {
            let mut second = first.clone();
            let fields = second.as_object_mut().unwrap();
            fields.insert(part.to_owned(), other.clone());
            fields.retain(|_, value| !value.is_null());
            let pins = Pins::open(None, &upstream).unwrap();
            pins.note(&[tool(&first)]).unwrap();
            let accepted = pins.digest_of("look");
            assert!(pins.changes().is_empty() && pins.holds("look", accepted), "{part}");
            pins.note(&[tool(&second)]).unwrap();
            let changes = pins.changes();
            let [Change { before, now, .. }] = &changes[..] else { panic!("{part}: {other}") };
            assert_eq!((before.as_ref(), now), (Some(&first), &second), "{part}");
            // Neither is called, and what is offered is what was accepted.
            assert!(!pins.holds("look", accepted) && !pins.holds("look", Some(digest(&tool(&second)))), "{part}: {other}");
            assert_eq!(pins.accepted(), Some(vec![tool(&first)]), "{part}: {other}");
            pins.note(&[tool(&first)]).unwrap();
            assert!(pins.changes().is_empty() && pins.holds("look", accepted), "{part}: {other}");
        }
    }
}
