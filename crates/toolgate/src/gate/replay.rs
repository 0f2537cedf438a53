//! Looking back: the same gates in the same order, on what was recorded. No tool is run, and no hook is asked.

mod backtest;
mod stage;
mod why;

use std::fmt;
use std::sync::Arc;

use serde::Serialize;

use super::pass::{Admitted, Passed};
use super::trail::Trail;
use super::{Toolgate, ToolgateBuilder};
use crate::call::{Arguments, Call};
use crate::clock::ManualClock;
use crate::code;
use crate::ledger::{Decision, Gate, Row};
use crate::policy::{RecalledBy, Watch};
use crate::redact::{is_marked, is_redacted};
use crate::registry::Agent;
use crate::session::Revoked;
use stage::Stage;

pub use backtest::{Backtest, Change, Place as BacktestPlace};

/// What was decided about a call before any tool ran.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ruling {
    /// It was let through.
    Admitted,
    /// It got the outcome of an earlier call.
    Replayed,
    /// It was refused.
    Refused {
        /// The gate that refused it.
        gate: Gate,
        /// The rule or hook, where one did.
        rule: Option<String>,
        /// The code of the refusal.
        code: String,
        /// What the model was told.
        message: String,
    },
}

impl Ruling {
    /// What was decided about a recorded call.
    #[must_use]
    pub fn of(row: &Row) -> Self {
        match (row.decision, row.outcome.error()) {
            (Decision::Replayed, _) => Self::Replayed,
            // What stopped behind the claim was let through before; a report of what nobody had let in was not.
            (Decision::Refused, Some(error)) if row.gate < Gate::Run || !row.is_a_call() => {
                Self::Refused { gate: row.gate, rule: row.rule.clone(), code: error.code.to_string(), message: error.message.clone() }
            }
            _ => Self::Admitted,
        }
    }

    /// Whether two come to the same: gate, rule and code. Words may be others.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            // Whether a person has not answered, or no, or too late, is the person's word.
            (Self::Refused { gate: Gate::Approval, .. }, Self::Refused { gate: Gate::Approval, .. }) => true,
            (Self::Refused { gate, rule, code, .. }, Self::Refused { gate: g, rule: r, code: c, .. }) => (gate, rule, code) == (g, r, c),
            (a, b) => a == b,
        }
    }
}

impl fmt::Display for Ruling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Admitted => f.write_str("let through"),
            Self::Replayed => f.write_str("answered from the record"),
            Self::Refused { gate, rule: Some(rule), code, .. } => write!(f, "refused at {gate} by `{rule}` ({code})"),
            Self::Refused { gate, code, .. } => write!(f, "refused at {gate} ({code})"),
        }
    }
}

/// What a second look at a decision comes to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Compared {
    /// The same.
    Same,
    /// Something else.
    Differs(Ruling),
    /// Nobody can say, because what it hung on is not known any more.
    Undecidable(String),
    /// It hung on the moment and not on what is written down: taken as it is.
    Circumstance(String),
}

/// Decides recorded calls again, each on the facts that it was decided on.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use toolgate::policy::{Condition, Deny};
/// use toolgate::{Agent, Compared, Effect, Replay, Tool, Toolgate};
///
/// let agent = |cap: i64| {
///     let schema = serde_json::json!({"type": "object", "properties": {"amount": {"type": "number"}}});
///     let pay = Tool::dynamic("pay", "Pays.", schema, |_, _| async { Ok(serde_json::json!({"paid": true})) }).effect(Effect::Write);
///     Agent::builder("desk").tool(pay).policy(Deny::new("cap", ["pay"]).when("/amount", Condition::Above(cap.into()))).build()
/// };
/// let session = Toolgate::builder().agent(agent(500)?).build()?.session("desk", "alice", "s");
/// session.call("pay", serde_json::json!({"amount": 300})).await;
/// let row = session.rows().await?.remove(0);
///
/// assert_eq!(Replay::new([agent(500)?])?.decide(&row).await, Compared::Same);
/// assert!(matches!(Replay::new([agent(200)?])?.decide(&row).await, Compared::Differs(_)));
/// # Ok(()) }
/// ```
pub struct Replay(Theatre);

impl Replay {
    /// Looks back with these agents. Their tools and hooks are never run.
    ///
    /// # Errors
    /// The machine gives no random numbers.
    pub fn new(agents: impl IntoIterator<Item = Agent>) -> std::io::Result<Self> {
        Theatre::new(agents.into_iter().map(Arc::new), Arc::new(Stage::on_facts())).map(Self)
    }

    /// Looks back with the agents of a runtime.
    ///
    /// # Errors
    /// The machine gives no random numbers.
    pub fn of(gate: &Toolgate) -> std::io::Result<Self> {
        Theatre::new(gate.0.agents.values().cloned(), Arc::new(Stage::on_facts())).map(Self)
    }

    /// Decides a recorded call again.
    pub async fn decide(&self, row: &Row) -> Compared {
        if !row.is_a_call() {
            return Compared::Circumstance("it asked for nothing: it tells what became of something".to_owned());
        }
        let was = Ruling::of(row);
        if let Some(why) = circumstance(&was, row) {
            return Compared::Circumstance(why);
        }
        let _one = self.0.one.lock().await;
        match self.0.judge(row, Vec::new()).await {
            Judged::Unknown(why, _) => Compared::Undecidable(why),
            Judged::Decided(now, _) if was.is_same(&now) => Compared::Same,
            Judged::Decided(now, _) => Compared::Differs(now),
        }
    }
}

/// A recorded call, judged again.
enum Judged {
    Decided(Ruling, Option<Open>),
    Unknown(String, Option<Open>),
}

/// A call that was let through and has not ended.
type Open = (Box<Passed>, Box<Trail>);

/// A runtime that only looks back.
struct Theatre {
    gate: Toolgate,
    stage: Arc<Stage>,
    clock: Arc<ManualClock>,
    /// One call at a time is on stage.
    one: tokio::sync::Mutex<()>,
}

/// A call that was stopped before its arguments were read.
const UNREAD: &str = "it was stopped before its arguments were read, and they are not kept";

/// What hung on the moment: who else was there, how long it took, what the machine could do, what a person had said.
const CIRCUMSTANCES: [&str; 9] = [
    code::BUSY,
    code::CANCELLED,
    code::DEADLINE_EXCEEDED,
    code::STORE_UNAVAILABLE,
    code::INTERNAL_FAULT,
    code::PAYLOAD_TOO_LARGE,
    code::IN_PROGRESS,
    code::CONFLICT,
    code::APPROVAL_DENIED,
];

impl Theatre {
    fn new(agents: impl Iterator<Item = Arc<Agent>>, stage: Arc<Stage>) -> std::io::Result<Self> {
        let clock = Arc::new(ManualClock::at(jiff::Timestamp::UNIX_EPOCH));
        let mut builder: ToolgateBuilder = Toolgate::builder().store(stage.clone()).clock(clock.clone());
        builder.agents = agents.map(|agent| (Arc::clone(&agent.name), Arc::new(agent.on_stage(&stage)))).collect();
        Ok(Self { gate: builder.build()?, stage, clock, one: tokio::sync::Mutex::new(()) })
    }

    /// A recorded call comes on stage, by the clock it came by.
    fn bring(&self, row: &Row) -> (Call, Box<Trail>, Watch) {
        self.clock.set(row.at);
        let watch = Watch::on();
        self.stage.set(row, &watch);
        let mut call = Call::new(row.key.clone(), row.tool.to_string(), Arguments::Value((*row.arguments).clone()));
        (call.turn, call.turned_away, call.misread) = (row.turn, row.facts.turned_away.clone(), row.facts.misread);
        // What was known by a key came with one, and what was paused at the claim had something to claim. Which key it was does not
        // matter: what was known under it is in the row.
        let keyed = row.facts.recalled_by == Some(RecalledBy::Key) || (row.gate == Gate::Claim && row.facts.paused.is_some());
        call.idempotency_key = keyed.then(|| row.call.to_string());
        let mut trail = Trail::unseen(&self.gate, &call, Some(row.call));
        trail.facts.watch = watch.clone();
        // Whoever ran it then.
        trail.apart = row.facts.reported && Ruling::of(row) == Ruling::Admitted;
        // `~` is what it was then; of rows that do not tell, what it is here.
        trail.facts.home.clone_from(&row.facts.home);
        (call, trail, watch)
    }

    /// Whether there may be a tool here that a call has named, where its name was redacted.
    fn may_know(&self, row: &Row) -> bool {
        let agent = self.gate.agent(&row.key.agent).filter(|_| is_marked(&row.tool));
        agent.is_some_and(|agent| agent.tools.keys().any(|name| may_be(&row.tool, name)))
    }

    /// Takes a recorded call through the gates before the tool: of a plan, without what those before it take away.
    async fn judge(&self, row: &Row, taken: Vec<Revoked>) -> Judged {
        let (call, mut trail, watch) = self.bring(row);
        // What could not be read was not kept, and neither was how large it was; nor was what nobody came to read.
        let unread = row.arguments.is_null() && row.digest.is_none();
        if unread && row.gate == Gate::Validate {
            return Judged::Unknown("the arguments could not be read then, and are not kept".to_owned(), None);
        }
        // What a rule in Rust looks at, only it knows.
        let tool = self.gate.agent(&row.key.agent).and_then(|agent| agent.tools.get(&row.tool));
        let opaque = tool.and_then(|tool| tool.governed_by.iter().find(|attached| attached.policy.definition() == attached.policy.name()));
        if let Some(rule) = opaque.filter(|_| is_redacted(&row.arguments)) {
            return Judged::Unknown(format!("an argument was redacted, and the rule `{}` may look at it", rule.policy.name()), None);
        }
        let planned = self.stage.without(&row.key, taken).await;
        let admitted = Box::pin(self.gate.admit_call(&call, &mut trail, planned.as_ref())).await;
        if unread {
            watch.unknown(|| UNREAD.to_owned());
        }
        let ruling = match admitted {
            Ok(Admitted::Pass(mut passed)) => {
                passed.hold = None;
                return match watch.told() {
                    Some(why) => Judged::Unknown(why, Some((passed, trail))),
                    None => Judged::Decided(Ruling::Admitted, Some((passed, trail))),
                };
            }
            Ok(Admitted::Replay(_)) => Ruling::Replayed,
            Err(stop) => {
                let gate = stop.gate.unwrap_or_else(|| trail.gate());
                if gate == Gate::Resolve && self.may_know(row) {
                    return Judged::Unknown("something of the tool's name was redacted, and there is one that it may be".to_owned(), None);
                }
                if gate == Gate::Validate && unread {
                    return Judged::Unknown(UNREAD.to_owned(), None);
                }
                if gate == Gate::Validate && is_redacted(&row.arguments) {
                    return Judged::Unknown("an argument was redacted, and may be what does not fit".to_owned(), None);
                }
                Ruling::Refused { gate, rule: trail.rule.take(), code: stop.error.code.to_string(), message: stop.error.message }
            }
        };
        match watch.told() {
            // What stopped before it got to what is not known, stopped.
            Some(why) if !matches!(&ruling, Ruling::Refused { gate, .. } if *gate < Gate::Recall) => Judged::Unknown(why, None),
            _ => Judged::Decided(ruling, None),
        }
    }
}

/// Whether a name of which something was redacted may be this one.
fn may_be(marked: &str, name: &str) -> bool {
    let (before, after) = (marked.split("[redacted ").next().unwrap_or_default(), marked.rsplit(']').next().unwrap_or_default());
    name.len() > before.len() + after.len() && name.starts_with(before) && name.ends_with(after)
}

/// Where a refusal hung on the moment, that it did.
fn circumstance(was: &Ruling, row: &Row) -> Option<String> {
    let Ruling::Refused { code, gate, rule, .. } = was else { return None };
    // A session has only so much time: that can be told from the record.
    let wall = code == code::DEADLINE_EXCEEDED && *gate == Gate::Limits && row.facts.opened.is_some() && !row.facts.late;
    // An approval that was named is looked at before the arguments are.
    let named = *gate == Gate::Approval && row.digest.is_none();
    // A rule gives its refusals any code that it likes.
    let ruled = rule.is_some() && matches!(gate, Gate::Recall | Gate::Policy | Gate::Claim);
    let moment = (CIRCUMSTANCES.contains(&code.as_str()) && !ruled) || *gate == Gate::Hooks || named;
    (moment && !wall).then(|| {
        if named { "it named an approval, and hung on a person's word".to_owned() } else { format!("`{code}` hung on the moment") }
    })
}
