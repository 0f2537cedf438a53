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
use crate::call::outcome::{CallOutput, Outcome, PromptSignal};
use crate::ledger::row::{Decision, Gate, Row};
use crate::policy::{
    ApprovalFact, CounterReading, DecisionFacts, FileFact, HookFact, ObservedVerdict,
    ReadBeforeWrite,
};
use crate::session::state::{Evidence, EvidenceKey};
use toolgate_json::Pointer;

impl Redactor {
    /// Redacts a row.
    pub(crate) fn redact_row(&self, row: Row) -> Row {
        if self.patterns.is_empty() {
            return row;
        }
        // Before the tool runs, only hooks supply error codes of their own.
        let ruled =
            row.decision == Decision::Refused && row.gate < Gate::Run && row.gate != Gate::Hooks;
        Row {
            arguments: Arc::new(self.scrub_value(Arc::unwrap_or_clone(row.arguments))),
            entities: self.scrub_entities(row.entities),
            client_id: row.client_id.map(|text| self.scrub_owned(text)),
            stop_reason: row.stop_reason.map(|text| self.scrub_owned(text)),
            outcome: self.scrub_outcome(row.outcome, ruled),
            facts: Box::new(self.scrub_facts(*row.facts)),
            ..row
        }
    }

    /// Redacts an outcome. If its secrets are unknown, the whole value is replaced by a mark.
    pub(crate) fn redact_outcome(&self, outcome: Outcome, secrets: Option<&[Pointer]>) -> Outcome {
        let outcome = match outcome {
            Outcome::Success(output) => {
                let value = secrets.map_or_else(
                    || self.mark(&output.value),
                    |secrets| self.redact(&output.value, secrets),
                );
                Outcome::Success(CallOutput { value, ..output })
            }
            other => other,
        };
        if self.patterns.is_empty() { outcome } else { self.scrub_outcome(outcome, false) }
    }

    fn scrub_owned(&self, text: String) -> String {
        match self.scrub_text(&text) {
            Cow::Owned(clean) => clean,
            Cow::Borrowed(_) => text,
        }
    }

    fn scrub_value(&self, mut value: Value) -> Value {
        self.scrub(&mut value);
        value
    }

    fn scrub_entities(&self, entities: Vec<(Arc<str>, Value)>) -> Vec<(Arc<str>, Value)> {
        entities.into_iter().map(|(name, value)| (name, self.scrub_value(value))).collect()
    }

    /// Redacts an outcome. The code of a rule comes from the configuration and identifies the
    /// denial, so it is kept.
    fn scrub_outcome(&self, outcome: Outcome, ruled: bool) -> Outcome {
        match outcome {
            Outcome::Success(output) => Outcome::Success(CallOutput {
                message: output.message.map(|text| self.scrub_owned(text)),
                value: self.scrub_value(output.value),
                ..output
            }),
            Outcome::Error(error) => Outcome::Error(Box::new(self.scrub_error(*error, ruled))),
            Outcome::Signal(PromptSignal::ExpandSection { section, reason }) => {
                Outcome::Signal(PromptSignal::ExpandSection {
                    section: self.scrub_owned(section),
                    reason: self.scrub_owned(reason),
                })
            }
            Outcome::Signal(PromptSignal::Abort { reason }) => {
                Outcome::Signal(PromptSignal::Abort { reason: self.scrub_owned(reason) })
            }
        }
    }

    fn scrub_error(&self, mut error: ToolError, ruled: bool) -> ToolError {
        let field = |field: FieldError| FieldError {
            path: self.scrub_owned(field.path),
            expected: self.scrub_owned(field.expected),
            got: self.scrub_owned(field.got),
            did_you_mean: field.did_you_mean.map(|text| self.scrub_owned(text)),
        };
        error.code = match error.code {
            Cow::Owned(code) if !ruled => self.scrub_owned(code).into(),
            code => code,
        };
        error.message = self.scrub_owned(error.message);
        error.errors = error.errors.into_iter().map(field).collect();
        error.redirect_tool = error.redirect_tool.map(|text| self.scrub_owned(text));
        error.next = error
            .next
            .map(|next| NextStep { tool: next.tool, arguments: self.scrub_value(next.arguments) });
        error.upstream = error.upstream.map(|value| self.scrub_value(value));
        error
    }

    /// Redacts facts. Lists every field, so that a new field needs a decision about redaction.
    fn scrub_facts(&self, facts: DecisionFacts) -> DecisionFacts {
        let DecisionFacts {
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
        DecisionFacts {
            evidence: evidence
                .into_iter()
                .map(|(key, proof)| {
                    (self.scrub_evidence_key(key), proof.map(|proof| self.scrub_evidence(&proof)))
                })
                .collect(),
            counters: self.scrub_counters(counters),
            marks: marks
                .into_iter()
                .map(|(name, mark)| self.scrub_policy_mark(name, mark))
                .collect(),
            files: self.scrub_map(files, |fact| match fact {
                FileFact::Unreadable(reason) => FileFact::Unreadable(self.scrub_owned(reason)),
                FileFact::Absent | FileFact::Present(_) => fact,
            }),
            origins: self.scrub_map(origins, |known| known),
            home: home.map(|text| self.scrub_owned(text)),
            hooks: hooks
                .into_iter()
                .map(|fact| HookFact {
                    no_redirect: fact.no_redirect.map(|text| self.scrub_owned(text)),
                    ..fact
                })
                .collect(),
            observed: observed
                .into_iter()
                .map(|fact| ObservedVerdict { message: self.scrub_owned(fact.message), ..fact })
                .collect(),
            turned_away: turned_away.map(|text| self.scrub_owned(text)),
            paused: paused.map(|(target, reason)| (target, self.scrub_owned(reason))),
            ran: ran.map(|value| self.scrub_value(value)),
            approval: approval.map(|fact| ApprovalFact {
                answered_by: fact.answered_by.map(|text| self.scrub_owned(text)),
                ..fact
            }),
            claimed: self.scrub_counters(claimed),
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

    fn scrub_evidence_key(&self, key: EvidenceKey) -> EvidenceKey {
        EvidenceKey {
            entity: key.entity.map(|(name, value)| (name, self.scrub_text(&value).into())),
            ..key
        }
    }

    fn scrub_evidence(&self, proof: &Evidence) -> Arc<Evidence> {
        let Evidence { tool, entities, fields, at, origin, stamp } = proof.clone();
        Arc::new(Evidence {
            entities: self.scrub_entities(entities),
            fields: self.scrub_value(fields),
            tool,
            at,
            origin,
            stamp,
        })
    }

    /// Redacts the mark of a policy. The mark of a file is a digest and needs no redaction.
    fn scrub_policy_mark(&self, name: String, mark: Option<Value>) -> (String, Option<Value>) {
        let of_file =
            mark.as_ref().is_some_and(|value| ReadBeforeWrite::is_read_mark(&name, value));
        let mark = if of_file { mark } else { mark.map(|value| self.scrub_value(value)) };
        (self.scrub_owned(name), mark)
    }

    /// Redacts the keys and values of a map.
    fn scrub_map<V>(
        &self,
        map: BTreeMap<String, V>,
        scrub_value: impl Fn(V) -> V,
    ) -> BTreeMap<String, V> {
        map.into_iter().map(|(name, value)| (self.scrub_owned(name), scrub_value(value))).collect()
    }

    /// Redacts counters. A limit may count an argument, so a secret amount is replaced by a mark.
    fn scrub_counters(&self, used: Vec<CounterReading>) -> Vec<CounterReading> {
        let scrub = |(counter, window, amount): CounterReading| match self
            .scrub_text(&amount.to_string())
        {
            Cow::Owned(mark) => (mark, window, Decimal::ZERO),
            Cow::Borrowed(_) => (self.scrub_owned(counter), window, amount),
        };
        used.into_iter().map(scrub).collect()
    }
}
