//! Defines the five tools of the demo desk with the public API of the library.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use toolgate::normalize::NormalizationRule;
use toolgate::{
    Agent, AgentBuildError, CallEffects, Clock, Decimal, Effect, Failure, Tool, ToolContext,
};

use crate::command::demo::accounts::{DeskPayment, SharedDeskAccounts};
use crate::command::demo::policy;
use crate::command::demo::policy::RuleEnforcement;

pub(crate) fn build_agent(
    name: &str,
    accounts: &SharedDeskAccounts,
    enforcement: RuleEnforcement,
) -> Result<Agent, AgentBuildError> {
    let refund = issue_refund(accounts);
    let agent = Agent::builder(name)
        .tool(identity_verification(accounts))
        .tool(crm_lookup())
        .tool(lookup_order(accounts))
        .tool(escalate_to_human(accounts));
    match enforcement {
        RuleEnforcement::Yes => policy::attach_rules(agent.tool(refund.once())).build(),
        RuleEnforcement::No => agent.tool(refund.open()).build(),
    }
}

/// Returns a clock that reads the time from the accounts.
pub(crate) fn accounts_clock(accounts: &SharedDeskAccounts) -> Arc<dyn Clock> {
    struct DeskClock(SharedDeskAccounts);
    impl fmt::Debug for DeskClock {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("DeskClock")
        }
    }
    impl Clock for DeskClock {
        fn now(&self) -> toolgate::Timestamp {
            toolgate::Timestamp::from_second(self.0.lock().now).unwrap_or_default()
        }
    }
    Arc::new(DeskClock(accounts.clone()))
}

#[derive(Deserialize, JsonSchema)]
struct Customer {
    /// Such as C-1001.
    #[schemars(regex(pattern = r"^C-[0-9]{4}$"))]
    customer_id: String,
}

#[derive(Serialize, JsonSchema)]
struct VerificationResult {
    customer_id: String,
    verified: bool,
}

fn identity_verification(accounts: &SharedDeskAccounts) -> Tool {
    let accounts = accounts.clone();
    Tool::typed(
        "identity_verification",
        "Verify that a customer exists and is active.\n\
         Use it first, before anything else that concerns the customer.\n\
         Edge cases: a customer who is not active is verified = false, which is an answer and no error.\n\
         Must come before lookup_order and issue_refund.",
        move |ctx: ToolContext, args: Customer| {
            let accounts = accounts.clone();
            async move {
                let mut accounts = accounts.lock();
                let verified = accounts.active.contains(args.customer_id.as_str());
                if verified {
                    let now = accounts.now;
                    accounts.verified.push((args.customer_id.clone(), ctx.key().session.to_string(), now));
                }
                Ok(VerificationResult { customer_id: args.customer_id, verified })
            }
        },
    )
    .effect(Effect::Read)
    .entity("customer_id", "/customer_id")
    .proves("/verified")
}

/// Builds a tool over a third-party service that returns HTTP statuses and Unix times.
fn crm_lookup() -> Tool {
    Tool::dynamic(
        "crm_lookup",
        "Look up a customer record in the CRM.\n\
         Use it for the name and the date of the contract.\n\
         Edge cases: a customer whom the CRM does not know is an empty answer; a locked record is an error.\n\
         Needs no other tool first.",
        json!({"type": "object", "properties": {"customer_id": {"type": "string"}}, "required": ["customer_id"]}),
        |_: ToolContext, args: Value| async move {
            match args.get("customer_id").and_then(Value::as_str) {
                Some("C-1001") => Ok(json!({"customer_id": "C-1001", "name": "Ada Byron", "created_at_unix": 1_700_000_000, "tier": 2})),
                Some("C-9999") => Err(Failure::http(403, "record is locked")),
                _ => Err(Failure::http(404, "no such customer")),
            }
        },
    )
    .effect(Effect::Read)
    .empty_on_status(404)
    .normalize(NormalizationRule::rename("/created_at_unix", "created_at"))
    .normalize(NormalizationRule::timestamp("/created_at"))
    .normalize(NormalizationRule::codes("/tier", [("1", "STANDARD"), ("2", "GOLD")]))
}

#[derive(Deserialize, JsonSchema)]
struct OrderId {
    /// Such as A-7.
    order_id: String,
}

#[derive(Serialize, JsonSchema)]
struct DeskOrder {
    order_id: String,
    /// Absent if the order does not exist.
    customer_id: Option<String>,
}

fn lookup_order(accounts: &SharedDeskAccounts) -> Tool {
    let accounts = accounts.clone();
    Tool::typed(
        "lookup_order",
        "Look up whose order it is.\n\
         Use it before you refund an order.\n\
         Edge cases: an order that does not exist has no customer_id, which is an answer and no error.\n\
         Must come before issue_refund, after identity_verification.",
        move |ctx: ToolContext, args: OrderId| {
            let accounts = accounts.clone();
            async move {
                let mut accounts = accounts.lock();
                accounts.looked_up.push((args.order_id.clone(), ctx.key().session.to_string()));
                let customer_id = accounts.orders.get(args.order_id.as_str()).map(|c| (*c).to_owned());
                Ok(DeskOrder { order_id: args.order_id, customer_id })
            }
        },
    )
    .effect(Effect::Read)
    .entity("order_id", "/order_id")
    .proves("/customer_id")
}

#[derive(Deserialize, JsonSchema)]
struct Refund {
    customer_id: String,
    order_id: String,
    /// In dollars; exact.
    #[schemars(with = "f64", range(min = 0.01))]
    amount_usd: Value,
    /// Reason in the words of the model. No rule reads this argument.
    #[serde(default)]
    note: String,
}

#[derive(Serialize, JsonSchema)]
struct RefundConfirmation {
    refund_id: String,
}

fn issue_refund(accounts: &SharedDeskAccounts) -> Tool {
    let accounts = accounts.clone();
    Tool::typed(
        "issue_refund",
        "Pay an order back to its customer, up to $500 a customer and day.\n\
         Use it when a verified customer is owed a refund.\n\
         Edge cases: the same refund twice is paid once; when the payment system is offline, try again.\n\
         Comes after identity_verification and lookup_order.",
        move |ctx: ToolContext, args: Refund| {
            let accounts = accounts.clone();
            async move {
                let amount: Decimal = toolgate_json::decimal_of(&args.amount_usd)
                    .ok_or_else(|| Failure::validation("bad_amount", "the amount is not a number"))?;
                let mut accounts = accounts.lock();
                if accounts.offline > 0 {
                    accounts.offline -= 1;
                    return Err(Failure::transient("system_offline", "The refund system is temporarily offline.")
                        .effects(CallEffects::None)
                        .retry_after_ms(20_000));
                }
                let at = accounts.now;
                let _ = args.note;
                accounts.payments.push(DeskPayment {
                    session: ctx.key().session.to_string(),
                    customer: args.customer_id,
                    order: args.order_id,
                    amount,
                    at,
                });
                Ok(RefundConfirmation { refund_id: format!("R-{}", accounts.payments.len()) })
            }
        },
    )
    .effect(Effect::Destructive)
    .entity("customer_id", "/customer_id")
    .entity("order_id", "/order_id")
    // The demonstration shows a retry by the model, so the runtime must not retry.
    .retry(0, Duration::ZERO)
}

#[derive(Deserialize, JsonSchema)]
struct Escalation {
    order_id: String,
    /// Information for the person.
    reason: String,
}

#[derive(Serialize, JsonSchema)]
struct EscalationTicket {
    ticket: String,
}

fn escalate_to_human(accounts: &SharedDeskAccounts) -> Tool {
    let accounts = accounts.clone();
    Tool::typed(
        "escalate_to_human",
        "Hand a case to a person.\n\
         Use it when a rule refuses what the customer is asking for.\n\
         Edge cases: a person answers within a day.\n\
         Needs no other tool first.",
        move |_: ToolContext, args: Escalation| {
            let accounts = accounts.clone();
            async move {
                let mut accounts = accounts.lock();
                accounts.escalations.push(format!("{}: {}", args.order_id, args.reason));
                Ok(EscalationTicket { ticket: format!("T-{}", accounts.escalations.len()) })
            }
        },
    )
    .effect(Effect::Write)
    .entity("order_id", "/order_id")
    .open()
}
