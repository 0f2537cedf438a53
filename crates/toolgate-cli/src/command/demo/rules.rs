//! The desk's rules, written in Rust against the policy trait.

use serde_json::{Value, json};
use toolgate::json::{Pointer, decimal_of};
use toolgate::limits::{Charge, Unit};
use toolgate::policy::{Ask, Fault, Needs, Policy, Terms, Verdict};
use toolgate::session::EvidenceKey;
use toolgate::{AgentBuilder, Category, Decimal, FieldError, NextStep, SignedDuration, Spec, ToolError};

/// Whether the rules are in force. Without them the books show what would leak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Enforced {
    Yes,
    #[cfg_attr(not(test), expect(dead_code, reason = "only a test runs the desk without its rules"))]
    No,
}

pub(super) fn attach(agent: AgentBuilder) -> AgentBuilder {
    agent.policy(RefundCap).policy(SameCustomer).policy(OwnOrder).policy(DailySum).policy(OnePerOrder)
}

const CAP: i64 = 500;

fn governs(tool: &Spec) -> bool {
    tool.name() == "issue_refund"
}

fn argument<'a>(ask: &Ask<'a>, name: &str) -> Result<&'a Value, Fault> {
    ask.argument(&Pointer::from(name)).ok_or_else(|| Fault::new(format!("there is no `{name}`")))
}

fn amount(ask: &Ask<'_>) -> Result<Decimal, Fault> {
    decimal_of(argument(ask, "amount_usd")?).ok_or_else(|| Fault::new("the amount is no exact number"))
}

fn business(code: &'static str, message: impl Into<String>) -> ToolError {
    ToolError::new(Category::Business, code, message)
}

/// An id as people write it.
fn name(id: &Value) -> &str {
    id.as_str().unwrap_or("?")
}

/// What a rule that only a person can bend says.
fn for_a_person(ask: &Ask<'_>, code: &'static str, message: String) -> ToolError {
    let mut error = business(code, message);
    error.redirect_tool = Some("escalate_to_human".to_owned());
    let order = argument(ask, "order_id").cloned().unwrap_or_default();
    error.next = Some(NextStep { tool: "escalate_to_human".to_owned(), arguments: json!({ "order_id": order }) });
    error
}

/// Nothing over $500.
struct RefundCap;

impl Policy for RefundCap {
    fn name(&self) -> &str {
        "refund_cap"
    }
    fn governs(&self, tool: &Spec) -> bool {
        governs(tool)
    }
    fn check(&self, ask: &Ask<'_>) -> Result<Verdict, Fault> {
        let amount = amount(ask)?;
        if amount <= CAP.into() {
            return Ok(Verdict::allow());
        }
        let mut error = for_a_person(ask, "refund_cap", "Refunds over $500 require human approval.".to_owned());
        error.errors.push(FieldError {
            path: "/amount_usd".into(),
            expected: "at most 500".into(),
            got: amount.to_string(),
            did_you_mean: None,
        });
        Ok(Verdict::deny(error))
    }
}

/// The customer who is paid must be the one who was verified, in the last quarter of an hour.
struct SameCustomer;

impl SameCustomer {
    fn key(ask: &Ask<'_>) -> Result<EvidenceKey, Fault> {
        Ok(EvidenceKey::tool("identity_verification").about("customer_id", argument(ask, "customer_id")?))
    }
}

impl Policy for SameCustomer {
    fn name(&self) -> &str {
        "same_customer"
    }
    fn governs(&self, tool: &Spec) -> bool {
        governs(tool)
    }
    fn needs(&self, ask: &Ask<'_>, needs: &mut Needs) {
        needs.evidence.extend(Self::key(ask));
    }
    fn check(&self, ask: &Ask<'_>) -> Result<Verdict, Fault> {
        let fresh = SignedDuration::from_mins(15);
        let proof = ask.evidence(&Self::key(ask)?)?;
        if proof.is_some_and(|p| p.fields.get("/verified") == Some(&Value::Bool(true)) && ask.facts.now.duration_since(p.at) <= fresh) {
            return Ok(Verdict::allow());
        }
        let customer = argument(ask, "customer_id")?;
        let mut error =
            business("not_verified", format!("Customer {} has not been verified in the last 15 minutes of this session.", name(customer)));
        error.next = Some(NextStep { tool: "identity_verification".to_owned(), arguments: json!({ "customer_id": customer }) });
        Ok(Verdict::deny(error))
    }
}

/// The order must be looked up, and be that customer's.
struct OwnOrder;

impl OwnOrder {
    fn key(ask: &Ask<'_>) -> Result<EvidenceKey, Fault> {
        Ok(EvidenceKey::tool("lookup_order").about("order_id", argument(ask, "order_id")?))
    }
}

impl Policy for OwnOrder {
    fn name(&self) -> &str {
        "own_order"
    }
    fn governs(&self, tool: &Spec) -> bool {
        governs(tool)
    }
    fn needs(&self, ask: &Ask<'_>, needs: &mut Needs) {
        needs.evidence.extend(Self::key(ask));
    }
    fn check(&self, ask: &Ask<'_>) -> Result<Verdict, Fault> {
        let order = argument(ask, "order_id")?;
        match ask.evidence(&Self::key(ask)?)? {
            Some(proof) if proof.fields.get("/customer_id") == Some(argument(ask, "customer_id")?) => Ok(Verdict::allow()),
            Some(_) => {
                Ok(Verdict::deny(for_a_person(ask, "not_their_order", format!("Order {} is not an order of this customer.", name(order)))))
            }
            None => {
                let mut error = business("order_not_checked", format!("Look up order {} before you refund it.", name(order)));
                error.next = Some(NextStep { tool: "lookup_order".to_owned(), arguments: json!({ "order_id": order }) });
                Ok(Verdict::deny(error))
            }
        }
    }
}

/// A limit that is reserved when the call is claimed, and holds over sessions.
fn reserve(
    ask: &Ask<'_>,
    counter: String,
    amount: Decimal,
    cap: i64,
    window: Option<SignedDuration>,
    code: &'static str,
    message: String,
) -> Verdict {
    let charge = Charge { counter, amount, cap: cap.into(), window, unit: Unit::Fixed };
    Verdict::Allow(Terms { charges: vec![(charge, for_a_person(ask, code, message))], ..Terms::default() })
}

/// Two refunds of 499 do not slip under the cap.
struct DailySum;

impl Policy for DailySum {
    fn name(&self) -> &str {
        "daily_sum"
    }
    fn governs(&self, tool: &Spec) -> bool {
        governs(tool)
    }
    fn check(&self, ask: &Ask<'_>) -> Result<Verdict, Fault> {
        let customer = argument(ask, "customer_id")?;
        let message = format!("Refunds of customer {} may sum to at most $500 in 24 hours.", name(customer));
        Ok(reserve(
            ask,
            format!("refunds/{customer}"),
            amount(ask)?,
            CAP,
            Some(SignedDuration::from_hours(24)),
            "daily_refund_sum",
            message,
        ))
    }
}

/// An order is paid back once.
struct OnePerOrder;

impl Policy for OnePerOrder {
    fn name(&self) -> &str {
        "one_per_order"
    }
    fn governs(&self, tool: &Spec) -> bool {
        governs(tool)
    }
    fn check(&self, ask: &Ask<'_>) -> Result<Verdict, Fault> {
        let order = argument(ask, "order_id")?;
        Ok(reserve(
            ask,
            format!("order/{order}"),
            Decimal::ONE,
            1,
            None,
            "already_refunded",
            format!("Order {} has been refunded already.", name(order)),
        ))
    }
}
