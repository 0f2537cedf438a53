//! Gates 13 and 14: the commit or rollback, and the row. Every call ends here.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use jiff::SignedDuration;
use rust_decimal::Decimal;

use super::conceal::Secrets;
use super::pass::Passed;
use super::run::{Failed, Ran, rolled_back, weigh};
use super::trail::Trail;
use super::{Stop, Toolgate, seen};
use crate::call::CallId;
use crate::code;
use crate::context::Txn;
use crate::error::{Effects, ToolError};
use crate::event::Event;
use crate::json;
use crate::ledger::{Decision, Gate, Latency, Recorded, Row};
use crate::limits::Charge;
use crate::names::shown;
use crate::outcome::{Answer, Outcome};
use crate::policy::{Ask, Facts};
use crate::progress::Ended;
use crate::registry::Registered;
use crate::session::{Changes, Revoked};
use crate::store::{Conflict, Finish, Intent, Settle, StoreError};
use crate::tool::Effect;
use crate::values::{Carrier, Seen};

/// How a call ends.
struct End {
    outcome: Outcome,
    gate: Gate,
    decision: Decision,
    effects: Effects,
    settle: Settle,
    changes: Option<Changes>,
    outputs: Vec<(String, Arc<str>)>,
    /// The result before it was cut, where somebody wants to know.
    whole: Option<serde_json::Value>,
    /// What a poll came to.
    result: Option<json::Digest>,
}

/// What is known of a call whose tool is not there any more.
pub(super) struct Blind {
    pub(super) error: ToolError,
    /// Its client says that it was made.
    pub(super) ran: bool,
    /// With other arguments than it was admitted with, or nobody knows with which.
    pub(super) is_other: bool,
    pub(super) seen: Option<Box<Seen>>,
}

impl End {
    fn failed(error: ToolError, gate: Gate) -> Self {
        let effects = error.effects;
        // A poll that keeps failing in the same way is not getting anywhere either.
        let result = (!error.retryable).then(|| json::Digest::of(error.code.as_bytes()));
        Self {
            outcome: error.into(),
            gate,
            decision: Decision::Failed,
            effects,
            settle: Settle::by(effects),
            changes: None,
            outputs: Vec::new(),
            whole: None,
            result,
        }
    }

    /// Something could not be rolled back: nobody knows what is left.
    fn unclean(mut self) -> Self {
        self.make_unclean();
        self
    }

    fn make_unclean(&mut self) {
        self.effects = Effects::Unknown;
        self.settle = Settle::Pending;
        if let Outcome::Error(error) = &mut self.outcome {
            **error = (**error).clone().with_effects(Effects::Unknown);
            error.retry_after_ms = None;
        }
    }

    /// A row that was not written, for a call that ended otherwise.
    fn rewrite(&self, row: &Row) -> Row {
        let mut outcome = self.outcome.clone();
        if let Outcome::Error(error) = &mut outcome {
            error.call_id = Some(row.call);
        }
        Row { outcome, gate: self.gate, decision: self.decision, effects: self.effects, ..row.clone() }
    }
}

impl Toolgate {
    /// A call that was let through ends.
    pub(super) async fn settle(&self, passed: Box<Passed>, ran: Ran, mut trail: Box<Trail>) -> Answer {
        let Ran { result, mut txn, empty, unclean, begun } = ran;
        let tool = passed.permit.tool();
        let end = match result {
            Ok(value) => {
                trail.at(Gate::Shape);
                match self.shape(value, empty, &passed, &mut txn, &mut trail).await {
                    Ok(shaped) => End {
                        outcome: Outcome::Success(shaped.output),
                        gate: Gate::Run,
                        decision: Decision::Succeeded,
                        effects: if tool.spec.effect == Effect::Read { Effects::None } else { Effects::Done },
                        settle: Settle::Done,
                        changes: Some(shaped.changes),
                        outputs: shaped.stored.into_iter().collect(),
                        whole: shaped.whole,
                        result: shaped.digest,
                    },
                    Err(error) => End::failed(error.with_effects(passed.effects_of_run()), Gate::Shape),
                }
            }
            Err(failure) => match weigh(failure, &passed) {
                Failed::Error(mut error) => {
                    Secrets::among(passed.permit.arguments().value(), tool).conceal(&mut error);
                    // What a tool says of others nobody has checked, either: the failure stands.
                    let to = error.redirect_tool.clone();
                    let error = Box::pin(self.signposted(*error, &passed.agent, &passed.key)).await;
                    if let Some(to) = to.filter(|_| error.redirect_tool.is_none()) {
                        tracing::warn!(tool = tool.spec.name(), to = %shown(&to), "a tool redirects to one that this caller cannot use");
                    }
                    End::failed(error, Gate::Run)
                }
                // A tool that asks for something first has not done anything yet.
                Failed::Signal(mut signal) => {
                    Secrets::among(passed.permit.arguments().value(), tool).conceal_reason(&mut signal);
                    End {
                        outcome: Outcome::Signal(signal),
                        gate: Gate::Run,
                        decision: Decision::Signalled,
                        effects: Effects::None,
                        settle: Settle::Released,
                        changes: None,
                        outputs: Vec::new(),
                        whole: None,
                        result: None,
                    }
                }
            },
        };
        trail.at(Gate::Settle);
        let end = if unclean { end.unclean() } else { end };
        let end = if begun { end } else { End { decision: Decision::Refused, ..end } };
        Box::pin(self.commit(passed, end, txn, trail)).await
    }

    /// State and record in one transaction. A success that cannot be committed is a failure, and is recorded as one.
    fn commit(&self, mut passed: Box<Passed>, mut end: End, mut txn: Txn, mut trail: Box<Trail>) -> impl Future<Output = Answer> {
        let kept = end.changes.is_some();
        if !kept {
            self.undo(&passed, &mut end, &mut txn, trail.id, &trail.facts);
        }
        trail.spent = txn.spent;
        trail.at(Gate::Record);
        let row = self.row(&end, &mut trail);
        let finish = self.finish(&row, &trail, &mut end, &passed, &mut txn);
        // Nobody looks at the snapshot any more: the store can change the session in place.
        passed.state = None;
        // An `async fn` would hold its arguments twice.
        async move {
            match self.0.store.finish(finish).await {
                Ok(Ok(receipt)) => {
                    if kept {
                        self.keep_files(&mut txn, &trail);
                        self.publish_own(&txn, &trail);
                    }
                    self.take_in_meanwhile().await;
                    self.tell(end, row, receipt, &trail)
                }
                // Somebody was faster. What happened is recorded all the same, and nothing of it is kept.
                Ok(Err(Conflict)) => Box::pin(self.lost_race(passed, row, txn, trail)).await,
                Err(error) if kept => {
                    let heard = unrecorded(&error, passed.effects_of_run());
                    let mut end = End::failed(heard, Gate::Record);
                    self.undo(&passed, &mut end, &mut txn, trail.id, &row.facts);
                    let row = Arc::new(end.rewrite(&row));
                    self.spooled(end, row, &error, &trail)
                }
                Err(error) => self.spooled(end, row, &error, &trail),
            }
        }
    }

    async fn lost_race(&self, passed: Box<Passed>, row: Arc<Row>, mut txn: Txn, trail: Box<Trail>) -> Answer {
        let error = ToolError::of(code::CONFLICT, "another call changed this session first, so nothing of this one was kept");
        let mut end = End::failed(again_after(100, error.with_effects(passed.effects_of_run())), Gate::Settle);
        self.undo(&passed, &mut end, &mut txn, trail.id, &row.facts);
        let row = Arc::new(end.rewrite(&row));
        let finish = self.finish(&row, &trail, &mut end, &passed, &mut txn);
        self.record(finish, end, row, &trail).await
    }

    /// Records an end that can be in conflict with nobody.
    async fn record(&self, finish: Box<Finish>, end: End, row: Arc<Row>, trail: &Trail) -> Answer {
        match self.0.store.finish(finish).await {
            Ok(receipt) => {
                self.take_in_meanwhile().await;
                self.tell(end, row, receipt.ok().flatten(), trail)
            }
            Err(error) => self.spooled(end, row, &error, trail),
        }
    }

    fn finish(&self, row: &Arc<Row>, trail: &Trail, end: &mut End, passed: &Passed, txn: &mut Txn) -> Box<Finish> {
        let polled = passed.permit.tool().spec.polling.is_some().then_some(end.result).flatten();
        Box::new(Finish {
            ended: self.ended(row, trail.asked, polled),
            row: Arc::clone(row),
            version: passed.version,
            changes: end.changes.take(),
            revoked: self.revoked(passed, end, trail),
            seen: seen::seen(passed, (&end.outcome, end.whole.as_ref()), end.settle, txn),
            // A race may be lost, and logs survive that.
            logs: txn.logs.clone(),
            settle: end.settle,
            outcome: passed.recallable.then(|| end.outcome.clone()),
            spent: txn.spent,
            outputs: std::mem::take(&mut end.outputs),
            durable: passed.permit.tool().spec.effect != Effect::Read,
        })
    }

    /// What a call takes away, if it happened or may have: evidence that may not hold any more does not hold. It goes by what the
    /// call is about, and not by its row, in which patterns are redacted.
    fn revoked(&self, passed: &Passed, end: &End, trail: &Trail) -> Vec<Revoked> {
        if end.settle == Settle::Released {
            return Vec::new();
        }
        let tool = passed.permit.tool();
        let mut revoked = tool.takes_away(&trail.arguments, end.outcome.success().map(|output| &output.value));
        // What a client has proved, it has proved since it took away what there was.
        if passed.reported && end.outcome.success().is_some() {
            revoked.retain(|revoked| revoked.tool != tool.spec.name);
        }
        if let Some(seen::Otherwise { ran, .. }) = &passed.ran {
            let ran = ran.as_ref().map(|ran| self.0.redactor.redact_shared(Arc::new(ran.clone()), &tool.secrets)).unwrap_or_default();
            revoked.extend(tool.takes_away(&ran, None));
        }
        revoked
    }

    /// A call that was not let through ends.
    pub(super) async fn refuse(&self, stop: Stop, trail: Box<Trail>) -> Answer {
        self.refuse_with(stop, None, Vec::new(), trail).await
    }

    /// The same, where it may have written something and taken evidence away all the same.
    pub(super) async fn refuse_with(&self, stop: Stop, seen: Option<Box<Seen>>, revoked: Vec<Revoked>, trail: Box<Trail>) -> Answer {
        let gate = stop.gate.unwrap_or_else(|| trail.gate());
        let end = End { decision: Decision::Refused, ..End::failed(*stop.error, gate) };
        self.conclude(end, seen, revoked, false, trail).await
    }

    /// A call that was let through ends, of which nobody knows any more what it was.
    pub(super) async fn end_blindly(&self, blind: Blind, intent: &Intent, trail: Box<Trail>) -> Answer {
        let mut end = End::failed(blind.error, Gate::Run);
        // A read counts as well, where it was made.
        if blind.ran {
            end.settle = Settle::Done;
        }
        let mut revoked = if end.settle == Settle::Released { Vec::new() } else { intent.revokes.clone() };
        // What it was about then, nobody can tell.
        if blind.is_other {
            revoked.iter_mut().for_each(|revoked| revoked.about = None);
        }
        // A read may be made again, and then it is known what comes of it.
        self.conclude(end, blind.seen, revoked, intent.effect && !intent.recall.is_empty(), trail).await
    }

    /// A call that was made before ends with what it came to then.
    pub(super) async fn replay(&self, mut outcome: Outcome, trail: Box<Trail>) -> Answer {
        match &mut outcome {
            Outcome::Success(output) => output.replayed = true,
            Outcome::Error(error) => {
                error.replayed = true;
                // Whoever made it is not sent back to it: it would only be told again.
                error.next = error.next.take().filter(|next| *next.tool != *trail.tool || next.arguments != *trail.arguments);
            }
            Outcome::Signal(_) => {}
        }
        let effects = outcome.error().map_or(Effects::None, |error| error.effects);
        // Perhaps another session heard it first: this one hears it now.
        let agent = self.0.agents.get(&trail.key.agent).filter(|agent| agent.watched.is_some());
        let files = agent.is_some_and(|agent| agent.resources.files().is_some());
        let seen = agent.and_then(|agent| agent.tools.get(&trail.tool)).map(|tool| {
            let entities = tool.spec.entities.iter().flat_map(|(name, path)| Carrier::entities(name, path.all(&trail.arguments)));
            let mut seen = Seen::new(&trail.key.agent);
            seen.read_from(entities);
            // Which files it was read from then, nobody knows any more.
            seen.read_from(files.then_some(Carrier::SomeFile));
            seen.distrust(&seen::said(&outcome, None), tool.spec.untrusted);
            Box::new(seen)
        });
        let end = End {
            outcome,
            gate: Gate::Recall,
            decision: Decision::Replayed,
            effects,
            settle: Settle::Released,
            changes: None,
            outputs: Vec::new(),
            whole: None,
            result: None,
        };
        self.conclude(end, seen, Vec::new(), false, trail).await
    }

    /// Records an end that changes nothing here. A later call may want to know what one came to that is `recallable`.
    async fn conclude(&self, end: End, seen: Option<Box<Seen>>, revoked: Vec<Revoked>, recallable: bool, mut trail: Box<Trail>) -> Answer {
        trail.at(Gate::Record);
        let row = self.row(&end, &mut trail);
        // A poll that keeps being refused is not getting anywhere; that it loops is no result of its own.
        let polls = end.gate != Gate::Progress && self.registered(&trail).is_some_and(|tool| tool.spec.polling.is_some());
        let finish = Box::new(Finish {
            ended: if end.decision == Decision::Replayed { None } else { self.ended(&row, trail.asked, end.result.filter(|_| polls)) },
            row: Arc::clone(&row),
            version: 0,
            changes: None,
            revoked,
            seen,
            logs: Vec::new(),
            settle: end.settle,
            outcome: recallable.then(|| end.outcome.clone()),
            spent: None,
            outputs: Vec::new(),
            durable: self.registered(&trail).is_none_or(|tool| tool.spec.effect != Effect::Read),
        });
        self.record(finish, end, row, &trail).await
    }

    /// A failed call leaves nothing behind, and those who let it pass hear of it.
    fn undo(&self, passed: &Passed, end: &mut End, txn: &mut Txn, call: CallId, facts: &Facts) {
        if !rolled_back(txn) {
            end.make_unclean();
        }
        let tool = passed.permit.tool();
        if let Outcome::Error(error) = &end.outcome {
            let ask = Ask::new(call, &passed.key, &tool.spec, passed.permit.arguments(), facts);
            for policy in &tool.heard_by {
                if catch_unwind(AssertUnwindSafe(|| policy.on_rollback(&ask, error))).is_err() {
                    tracing::error!(policy = policy.name(), "a policy panicked when it heard of a rollback");
                }
            }
        }
    }

    fn keep_files(&self, txn: &mut Txn, trail: &Trail) {
        if let Some(Err(error)) = txn.files.take().map(|mut files| files.commit()) {
            tracing::error!(call = %trail.id, %error, "a file's undo entry could not be removed");
        }
    }

    fn publish_own(&self, txn: &Txn, trail: &Trail) {
        for (name, payload) in &txn.events {
            self.publish(&Event::Published { call: trail.id, key: trail.key.clone(), name: Arc::clone(name), payload: payload.clone() });
        }
    }

    fn ended(&self, row: &Row, asked: Option<json::Digest>, result: Option<json::Digest>) -> Option<Ended> {
        let retry_from = row.outcome.error().filter(|error| error.retryable).map(|error| {
            let wait = SignedDuration::from_millis(i64::try_from(error.retry_after_ms.unwrap_or(0)).unwrap_or(i64::MAX));
            self.now().checked_add(wait).unwrap_or(jiff::Timestamp::MAX)
        });
        asked.map(|digest| Ended { digest, retry_from, result })
    }

    /// The row as it will stand in the ledger: no secret in it.
    fn row(&self, end: &End, trail: &mut Trail) -> Arc<Row> {
        let mut outcome = end.outcome.clone();
        match &mut outcome {
            Outcome::Error(error) => error.call_id = Some(trail.id),
            // A replayed result was redacted when it was shaped.
            Outcome::Success(_) | Outcome::Signal(_) => {}
        }
        let facts = std::mem::take(&mut trail.facts);
        let row = Row {
            rule: trail.rule.take(),
            retries: trail.retries,
            spent: trail.spent,
            ..self.plain_row(outcome, (end.decision, end.gate, end.effects), facts, trail)
        };
        let mut row = self.0.redactor.row(row);
        // How long it takes to be written, no row can tell.
        row.latency = trail.latency();
        Arc::new(row)
    }

    /// The row of a call that nobody hears of any more. What is used of each counter, the store will tell.
    pub(super) fn draft(&self, effect: bool, charges: &[Charge], trail: &Trail) -> Arc<Row> {
        let (effects, so) = if effect { (Effects::Unknown, "it may have taken effect") } else { (Effects::None, "it only reads") };
        let message = format!("nobody ever said how this call ended: its process is gone, or its time was up; {so}");
        let error = ToolError::of(code::ABANDONED, message).with_effects(effects);
        let end = (Decision::Failed, Gate::Run, effects);
        let mut facts = trail.facts.clone();
        facts.claimed = charges.iter().map(|charge| (charge.counter.clone(), charge.window, Decimal::ZERO)).collect();
        Arc::new(self.0.redactor.row(self.plain_row(error.into(), end, facts, trail)))
    }

    /// What every row of a call says.
    fn plain_row(&self, outcome: Outcome, (decision, gate, effects): (Decision, Gate, Effects), facts: Box<Facts>, trail: &Trail) -> Row {
        Row {
            call: trail.id,
            client_id: trail.client_id.clone(),
            at: trail.started,
            key: trail.key.clone(),
            turn: trail.turn,
            stop_reason: trail.stop_reason.clone(),
            tool: Arc::clone(&trail.tool),
            arguments: Arc::clone(&trail.arguments),
            entities: self.entities(&outcome, trail),
            digest: trail.digest,
            decision,
            gate,
            rule: None,
            facts,
            outcome,
            effects,
            latency: Latency::default(),
            retries: 0,
            spent: None,
            config: trail.config,
            settles: None,
        }
    }

    fn registered(&self, trail: &Trail) -> Option<&Arc<Registered>> {
        self.0.agents.get(&trail.key.agent)?.tools.get(&trail.tool)
    }

    /// What the call is about: as it says itself, else as its result says.
    fn entities(&self, outcome: &Outcome, trail: &Trail) -> Vec<(Arc<str>, serde_json::Value)> {
        let Some(tool) = self.registered(trail) else { return trail.about.clone() };
        entities(tool, &trail.arguments, outcome.success().map(|output| &output.value))
    }

    /// The store could not take the row: it waits in a file, and the caller hears so.
    fn spooled(&self, end: End, row: Arc<Row>, error: &StoreError, trail: &Trail) -> Answer {
        if let Err(spool) = self.0.spool.put(&row) {
            tracing::error!(%spool, path = %self.0.spool.path().display(), row = %serde_json::to_string(&*row).unwrap_or_default(), "a row could be neither stored nor spooled; it is kept in memory until the store takes it");
        }
        if let Some(agent) = self.0.agents.get(&row.key.agent).filter(|agent| agent.config == row.config)
            && let Err(error) = self.0.spool.keep(agent.config, &agent.definition)
        {
            tracing::warn!(%error, "the definition that a spooled row was decided by could not be kept beside it");
        }
        let heard = unrecorded(error, end.effects);
        let end = End { outcome: heard.into(), gate: Gate::Record, ..end };
        self.tell(end, row, None, trail)
    }

    fn tell(&self, mut end: End, row: Arc<Row>, recorded: Option<Recorded>, trail: &Trail) -> Answer {
        let rule = row.rule.clone();
        trail.span.record("toolgate.gate", end.gate.name());
        trail.span.record("toolgate.decision", end.decision.name());
        if let Outcome::Error(error) = &mut end.outcome {
            error.call_id = Some(trail.id);
            // As the row has it, in which no pattern finds anything; what could not be recorded has a code of toolgate's own.
            let code = row.code().filter(|_| end.gate != Gate::Record).unwrap_or(&error.code);
            trail.span.record("error.type", code);
            trail.span.record("otel.status_code", "ERROR");
        }
        self.publish(&Event::ToolInvoked(row));
        Answer { call: trail.id, gate: end.gate, rule, outcome: end.outcome, recorded }
    }
}

/// What a call of a tool is about, by its arguments, or else by its result.
pub(super) fn entities(
    tool: &Registered,
    arguments: &serde_json::Value,
    result: Option<&serde_json::Value>,
) -> Vec<(Arc<str>, serde_json::Value)> {
    let about = |(name, path): &(Arc<str>, json::Pointer)| {
        let found = path.get(arguments).filter(|value| !value.is_null()).or_else(|| result.and_then(|value| path.get(value)));
        found.filter(|value| !value.is_null()).map(|value| (Arc::clone(name), json::plain(value.clone())))
    };
    tool.spec.entities.iter().filter_map(about).collect()
}

fn unrecorded(error: &StoreError, effects: Effects) -> ToolError {
    tracing::error!(%error, "the store could not record a call");
    again_after(1_000, ToolError::of(code::STORE_UNAVAILABLE, "the store could not record the call").with_effects(effects))
}

/// Says when to try again, where the same call may be tried again at all.
fn again_after(ms: u64, error: ToolError) -> ToolError {
    if error.retryable { error.retry_after_ms(ms) } else { error }
}
