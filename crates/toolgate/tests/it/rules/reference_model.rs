//! Defines the meaning of each rule as a search over the whole history.
//!
//! The model is slow and simple. The rule engine must agree with the model.

use jiff::{SignedDuration, Timestamp};
use rust_decimal::Decimal;

/// Describes a call that was admitted and succeeded.
#[derive(Debug, Clone)]
pub(crate) struct PastCall {
    pub(crate) tool: &'static str,
    pub(crate) principal: usize,
    pub(crate) session: usize,
    pub(crate) entity: u8,
    pub(crate) amount: i64,
    pub(crate) currency: u8,
    /// Value of the proved field `/ok`.
    pub(crate) ok: bool,
    pub(crate) at: Timestamp,
}

/// Selects the owner of a limit.
#[derive(Debug, Clone, Copy)]
pub(crate) enum LimitScope {
    Session,
    Principal,
    Entity,
}

/// Describes a rule about the tools `act` and `other`.
#[derive(Debug, Clone)]
pub(crate) enum RuleModel {
    Require {
        any_of: Vec<&'static str>,
        same: bool,
        ok: bool,
        within: Option<i64>,
    },
    DenyAbove(i64),
    DenyEntity(u8),
    AskBelow(i64),
    Calls {
        max: u64,
        scope: LimitScope,
        window: Option<i64>,
    },
    Sum {
        max: i64,
        scope: LimitScope,
        window: Option<i64>,
        by_currency: bool,
    },
    After(&'static str),
    /// CEL condition: the amount is above the first value, or the entity equals the second.
    When(i64, u8),
    /// Denies values in `to` that come from `page` and not from `contacts`. If `strict` is set,
    /// only values from `contacts` are allowed.
    Flow {
        strict: bool,
    },
    /// Limits the calls per owner that `check` proved, or else per entity.
    OwnerCalls {
        max: u64,
        window: Option<i64>,
    },
    /// An observed rule.
    Observed(Box<RuleModel>),
}

/// Returns the code of the expected denial, or `None` if the call is allowed.
pub(crate) fn expected_denial(
    rules: &[(String, RuleModel)],
    history: &[PastCall],
    call: &PastCall,
) -> Option<String> {
    // Denials come first, then approvals, then limits; each group has the order of the rules.
    let first = |level_of: fn(&RuleModel) -> u8, level: u8| {
        rules
            .iter()
            .filter(|(_, m)| level_of(m) == level)
            .find(|(_, m)| is_denied_by(m, history, call))
            .map(|(name, _)| name.clone())
    };
    let level = |m: &RuleModel| match m {
        RuleModel::AskBelow(_) => 1,
        RuleModel::Calls { .. } | RuleModel::Sum { .. } | RuleModel::OwnerCalls { .. } => 2,
        _ => 0,
    };
    first(level, 0)
        .or_else(|| first(level, 1).map(|_| "approval_required".to_owned()))
        .or_else(|| first(level, 2))
}

/// Finds the latest success of a tool in the session, unless the evidence was revoked.
///
/// `logout` revokes all evidence of `proof`; `forget` revokes the evidence of `check` about its
/// entity.
fn latest_success<'h>(
    history: &'h [PastCall],
    in_session: &dyn Fn(&&PastCall) -> bool,
    tool: &str,
    matches: impl Fn(&PastCall) -> bool,
) -> Option<&'h PastCall> {
    let (index, found) = history
        .iter()
        .enumerate()
        .rev()
        .find(|(_, p)| in_session(p) && p.tool == tool && matches(p))?;
    let later = || history.iter().skip(index + 1).filter(in_session);
    let revoked = match tool {
        "proof" => later().any(|p| p.tool == "logout"),
        _ => later().any(|p| p.tool == "forget" && p.entity == found.entity),
    };
    (!revoked).then_some(found)
}

/// Returns the owner of the limit of a call: the owner that `check` proved, or the entity.
fn limit_owner(history: &[PastCall], call: &PastCall) -> (bool, u8) {
    let in_session = |p: &&PastCall| p.principal == call.principal && p.session == call.session;
    let proof = latest_success(history, &in_session, "check", |p| p.entity == call.entity);
    proof.map_or((false, call.entity), |p| (true, p.entity % 2))
}

/// Returns whether `page` and whether `contacts` returned a value in this session before the model
/// wrote it.
fn value_sources(history: &[PastCall], call: &PastCall) -> (bool, bool) {
    let (mut by_page, mut by_contacts, mut written) = (false, false, false);
    for p in history.iter().filter(|p| {
        p.principal == call.principal && p.session == call.session && p.entity == call.entity
    }) {
        match p.tool {
            "page" => by_page = true,
            "contacts" => by_contacts |= !written,
            "act" | "other" => written |= !by_contacts,
            _ => {}
        }
    }
    (by_page, by_contacts)
}

fn is_denied_by(rule: &RuleModel, history: &[PastCall], call: &PastCall) -> bool {
    let in_session = |p: &&PastCall| p.principal == call.principal && p.session == call.session;
    let in_window = |p: &&PastCall, window: Option<i64>| {
        window.is_none_or(|w| call.at.duration_since(p.at) < SignedDuration::from_secs(w))
    };
    let in_scope = |p: &&PastCall, scope: LimitScope| match scope {
        LimitScope::Session => in_session(p),
        LimitScope::Principal => p.principal == call.principal,
        LimitScope::Entity => p.entity == call.entity,
    };
    let governed = |p: &&PastCall| p.tool == "act" || p.tool == "other";
    match rule {
        RuleModel::Require { any_of, same, ok, within } => !any_of.iter().any(|tool| {
            // Only the latest success counts, about the same entity if the rule requires it.
            let latest =
                latest_success(history, &in_session, tool, |p| !same || p.entity == call.entity);
            latest.is_some_and(|p| {
                (!ok || p.ok)
                    && within.is_none_or(|w| {
                        call.at.duration_since(p.at) <= SignedDuration::from_secs(w)
                    })
            })
        }),
        RuleModel::DenyAbove(limit) => call.amount > *limit,
        RuleModel::DenyEntity(entity) => call.entity == *entity,
        RuleModel::AskBelow(limit) => call.amount < *limit,
        RuleModel::Calls { max, scope, window } => {
            let count = history
                .iter()
                .filter(|p| governed(p) && in_scope(p, *scope) && in_window(p, *window))
                .count();
            count as u64 + 1 > *max
        }
        RuleModel::Sum { max, scope, window, by_currency } => {
            let same_currency = |p: &&PastCall| !by_currency || p.currency == call.currency;
            let sum: i64 = history
                .iter()
                .filter(|p| {
                    governed(p) && in_scope(p, *scope) && in_window(p, *window) && same_currency(p)
                })
                .map(|p| p.amount)
                .sum();
            Decimal::from(sum + call.amount) > Decimal::from(*max)
        }
        RuleModel::When(limit, entity) => call.amount > *limit || call.entity == *entity,
        RuleModel::Flow { strict } => {
            let (by_page, by_contacts) = value_sources(history, call);
            !by_contacts && (*strict || by_page)
        }
        RuleModel::OwnerCalls { max, window } => {
            let owner = limit_owner(history, call);
            let counted =
                history.iter().enumerate().filter(|(_, p)| governed(p) && in_window(p, *window));
            let count = counted
                .filter(|(index, p)| {
                    history.get(..*index).is_some_and(|before| limit_owner(before, p) == owner)
                })
                .count();
            count as u64 + 1 > *max
        }
        RuleModel::Observed(_) => false,
        RuleModel::After(tool) => latest_success(history, &in_session, tool, |_| true).is_none(),
    }
}
