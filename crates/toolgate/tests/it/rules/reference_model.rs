//! What each rule means, said as plainly as can be: every question is answered by going through the
//! whole history again. Slow, and obviously right. The rule engine must never differ from it.

use jiff::{SignedDuration, Timestamp};
use rust_decimal::Decimal;

/// A call that was let through and succeeded.
#[derive(Debug, Clone)]
pub(crate) struct PastCall {
    pub(crate) tool: &'static str,
    pub(crate) principal: usize,
    pub(crate) session: usize,
    pub(crate) entity: u8,
    pub(crate) amount: i64,
    pub(crate) currency: u8,
    /// What the tool proved.
    pub(crate) ok: bool,
    pub(crate) at: Timestamp,
}

/// Whose limit.
#[derive(Debug, Clone, Copy)]
pub(crate) enum LimitScope {
    Session,
    Principal,
    Entity,
}

/// A rule about the tools `act` and `other`.
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
        most: u64,
        whose: LimitScope,
        window: Option<i64>,
    },
    Sum {
        most: i64,
        whose: LimitScope,
        window: Option<i64>,
        by_currency: bool,
    },
    After(&'static str),
    /// In CEL: the amount is above this, or the entity is that one.
    When(i64, u8),
    /// What `page` brought in stays out of `to`, unless `contacts` says it as well; strictly: only
    /// what `contacts` says.
    Flow {
        strict: bool,
    },
    /// At most so many calls for an owner, who is known from `check`; else for the entity.
    OwnerCalls {
        most: u64,
        window: Option<i64>,
    },
    /// A rule on trial.
    Observed(Box<RuleModel>),
}

/// What becomes of a call: `None` is yes.
pub(crate) fn expected_denial(
    rules: &[(String, RuleModel)],
    history: &[PastCall],
    call: &PastCall,
) -> Option<String> {
    // Denials first, then questions, then limits: each in the order of the rules.
    let first = |wanted: fn(&RuleModel) -> u8, level: u8| {
        rules
            .iter()
            .filter(|(_, m)| wanted(m) == level)
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

/// The latest success of a tool in the session, unless it was taken away since: `logout` takes away
/// all that `proof` proved, `forget` what `check` proved about its entity.
fn latest_success<'h>(
    history: &'h [PastCall],
    in_session: &dyn Fn(&&PastCall) -> bool,
    tool: &str,
    wanted: impl Fn(&PastCall) -> bool,
) -> Option<&'h PastCall> {
    let (index, found) = history
        .iter()
        .enumerate()
        .rev()
        .find(|(_, p)| in_session(p) && p.tool == tool && wanted(p))?;
    let later = || history.iter().skip(index + 1).filter(in_session);
    let revoked = match tool {
        "proof" => later().any(|p| p.tool == "logout"),
        _ => later().any(|p| p.tool == "forget" && p.entity == found.entity),
    };
    (!revoked).then_some(found)
}

/// Whose limit a call counts against: the owner that `check` had named by then, or the entity.
fn limit_owner(history: &[PastCall], call: &PastCall) -> (bool, u8) {
    let in_session = |p: &&PastCall| p.principal == call.principal && p.session == call.session;
    let proof = latest_success(history, &in_session, "check", |p| p.entity == call.entity);
    proof.map_or((false, call.entity), |p| (true, p.entity % 2))
}

/// Whether `page` has said a value in this session, and whether `contacts` has, before the model
/// had written it.
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
    let of = |p: &&PastCall, whose: LimitScope| match whose {
        LimitScope::Session => in_session(p),
        LimitScope::Principal => p.principal == call.principal,
        LimitScope::Entity => p.entity == call.entity,
    };
    let governed = |p: &&PastCall| p.tool == "act" || p.tool == "other";
    match rule {
        RuleModel::Require { any_of, same, ok, within } => !any_of.iter().any(|tool| {
            // The latest success of the tool, about the same entity where the rule says so, is what
            // counts.
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
        RuleModel::Calls { most, whose, window } => {
            let made = history
                .iter()
                .filter(|p| governed(p) && of(p, *whose) && in_window(p, *window))
                .count();
            made as u64 + 1 > *most
        }
        RuleModel::Sum { most, whose, window, by_currency } => {
            let same_currency = |p: &&PastCall| !by_currency || p.currency == call.currency;
            let sum: i64 = history
                .iter()
                .filter(|p| {
                    governed(p) && of(p, *whose) && in_window(p, *window) && same_currency(p)
                })
                .map(|p| p.amount)
                .sum();
            Decimal::from(sum + call.amount) > Decimal::from(*most)
        }
        RuleModel::When(limit, entity) => call.amount > *limit || call.entity == *entity,
        RuleModel::Flow { strict } => {
            let (by_page, by_contacts) = value_sources(history, call);
            !by_contacts && (*strict || by_page)
        }
        RuleModel::OwnerCalls { most, window } => {
            let whose = limit_owner(history, call);
            let counted =
                history.iter().enumerate().filter(|(_, p)| governed(p) && in_window(p, *window));
            let made = counted
                .filter(|(index, p)| {
                    history.get(..*index).is_some_and(|before| limit_owner(before, p) == whose)
                })
                .count();
            made as u64 + 1 > *most
        }
        RuleModel::Observed(_) => false,
        RuleModel::After(tool) => latest_success(history, &in_session, tool, |_| true).is_none(),
    }
}
