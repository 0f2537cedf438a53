//! Redacts the data of callers, tools and upstreams in one ledger row by patterns.
//!
//! Toolgate's own data is never redacted: times, digests and call ids are needed to repeat the
//! decision.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use rust_decimal::Decimal;
use serde_json::Value;

use super::Redactor;
use crate::call::error::{FieldError, NextStep, ToolError};
use crate::call::outcome::{Outcome, Output, Signal};
use crate::ledger::row::{Decision, Gate, Row};
use crate::policy::{ApprovalFact, Facts, FileFact, HookFact, Observed, ReadBeforeWrite, Used};
use crate::session::state::{Evidence, EvidenceKey};
use toolgate_json::Pointer;

impl Redactor {
    /// Redacts a row.
    pub(crate) fn row(&self, row: Row) -> Row {
        if self.patterns.is_empty() {
            return row;
        }
        // Before the tool runs, only hooks supply error codes of their own.
        let ruled = row.decision == Decision::Refused && row.gate < Gate::Run && row.gate != Gate::Hooks;
        Row {
            arguments: Arc::new(self.value(Arc::unwrap_or_clone(row.arguments))),
            entities: self.entities(row.entities),
            client_id: row.client_id.map(|text| self.clean(text)),
            stop_reason: row.stop_reason.map(|text| self.clean(text)),
            outcome: self.told(row.outcome, ruled),
            facts: Box::new(self.facts(*row.facts)),
            ..row
        }
    }

    /// Redacts an outcome. If its secrets are unknown, the whole value is replaced by a mark.
    pub(crate) fn outcome(&self, outcome: Outcome, secrets: Option<&[Pointer]>) -> Outcome {
        let outcome = match outcome {
            Outcome::Success(output) => {
                let value = secrets.map_or_else(|| self.mark(&output.value), |secrets| self.redact(&output.value, secrets));
                Outcome::Success(Output { value, ..output })
            }
            other => other,
        };
        if self.patterns.is_empty() { outcome } else { self.told(outcome, false) }
    }

    fn clean(&self, text: String) -> String {
        match self.scrub_text(&text) {
            Cow::Owned(clean) => clean,
            Cow::Borrowed(_) => text,
        }
    }

    fn value(&self, mut value: Value) -> Value {
        self.scrub(&mut value);
        value
    }

    fn entities(&self, entities: Vec<(Arc<str>, Value)>) -> Vec<(Arc<str>, Value)> {
        entities.into_iter().map(|(name, value)| (name, self.value(value))).collect()
    }

    /// Redacts an outcome. The code of a rule comes from the configuration and identifies the
    /// denial, so it is kept.
    fn told(&self, outcome: Outcome, ruled: bool) -> Outcome {
        match outcome {
            Outcome::Success(output) => {
                Outcome::Success(Output { message: output.message.map(|text| self.clean(text)), value: self.value(output.value), ..output })
            }
            Outcome::Error(error) => Outcome::Error(Box::new(self.error(*error, ruled))),
            Outcome::Signal(Signal::ExpandSection { section, reason }) => {
                Outcome::Signal(Signal::ExpandSection { section: self.clean(section), reason: self.clean(reason) })
            }
            Outcome::Signal(Signal::Abort { reason }) => Outcome::Signal(Signal::Abort { reason: self.clean(reason) }),
        }
    }

    fn error(&self, mut error: ToolError, ruled: bool) -> ToolError {
        let field = |field: FieldError| FieldError {
            path: self.clean(field.path),
            expected: self.clean(field.expected),
            got: self.clean(field.got),
            did_you_mean: field.did_you_mean.map(|text| self.clean(text)),
        };
        error.code = match error.code {
            Cow::Owned(theirs) if !ruled => self.clean(theirs).into(),
            own => own,
        };
        error.message = self.clean(error.message);
        error.errors = error.errors.into_iter().map(field).collect();
        error.redirect_tool = error.redirect_tool.map(|text| self.clean(text));
        error.next = error.next.map(|next| NextStep { tool: next.tool, arguments: self.value(next.arguments) });
        error.upstream = error.upstream.map(|value| self.value(value));
        error
    }

    /// Redacts facts. Lists every field, so that a new field needs a decision about redaction.
    fn facts(&self, facts: Facts) -> Facts {
        let Facts {
            now,
            evidence,
            counters,
            marks,
            files,
            origins,
            home,
            hooks,
            observed,
            turned_away,
            misread,
            paused,
            late,
            after,
            opened,
            reported,
            ran,
            recalled,
            recalled_by,
            progress,
            budget,
            approval,
            claimed,
            watch,
        } = facts;
        Facts {
            evidence: evidence.into_iter().map(|(key, proof)| (self.evidence_key(key), proof.map(|proof| self.proof(&proof)))).collect(),
            counters: self.used(counters),
            marks: marks.into_iter().map(|(name, mark)| self.remembered(name, mark)).collect(),
            files: self.named(files, |fact| match fact {
                FileFact::Unreadable(why) => FileFact::Unreadable(self.clean(why)),
                FileFact::Absent | FileFact::Present(_) => fact,
            }),
            origins: self.named(origins, |known| known),
            home: home.map(|text| self.clean(text)),
            hooks: hooks.into_iter().map(|fact| HookFact { no_redirect: fact.no_redirect.map(|text| self.clean(text)), ..fact }).collect(),
            observed: observed.into_iter().map(|fact| Observed { message: self.clean(fact.message), ..fact }).collect(),
            turned_away: turned_away.map(|text| self.clean(text)),
            paused: paused.map(|(target, why)| (target, self.clean(why))),
            ran: ran.map(|value| self.value(value)),
            approval: approval.map(|fact| ApprovalFact { answered_by: fact.answered_by.map(|text| self.clean(text)), ..fact }),
            claimed: self.used(claimed),
            now,
            misread,
            late,
            after,
            opened,
            reported,
            recalled,
            recalled_by,
            progress,
            budget,
            watch,
        }
    }

    fn evidence_key(&self, key: EvidenceKey) -> EvidenceKey {
        EvidenceKey { entity: key.entity.map(|(name, value)| (name, self.scrub_text(&value).into())), ..key }
    }

    fn proof(&self, proof: &Evidence) -> Arc<Evidence> {
        let Evidence { tool, entities, fields, at, origin, stamp } = proof.clone();
        Arc::new(Evidence { entities: self.entities(entities), fields: self.value(fields), tool, at, origin, stamp })
    }

    /// Redacts the mark of a policy. The mark of a file is a digest and needs no redaction.
    fn remembered(&self, name: String, mark: Option<Value>) -> (String, Option<Value>) {
        let of_file = mark.as_ref().is_some_and(|value| ReadBeforeWrite::remembers(&name, value));
        let mark = if of_file { mark } else { mark.map(|value| self.value(value)) };
        (self.clean(name), mark)
    }

    /// Redacts the keys and values of a map.
    fn named<V>(&self, map: BTreeMap<String, V>, one: impl Fn(V) -> V) -> BTreeMap<String, V> {
        map.into_iter().map(|(name, value)| (self.clean(name), one(value))).collect()
    }

    /// Redacts counters. A limit may count an argument, so a secret amount is replaced by a mark.
    fn used(&self, used: Vec<Used>) -> Vec<Used> {
        let one = |(counter, window, amount): Used| match self.scrub_text(&amount.to_string()) {
            Cow::Owned(mark) => (mark, window, Decimal::ZERO),
            Cow::Borrowed(_) => (self.clean(counter), window, amount),
        };
        used.into_iter().map(one).collect()
    }
}
