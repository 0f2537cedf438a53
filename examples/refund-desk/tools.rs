//! Defines the tools of a refund desk, with sample orders.

use serde_json::{Value, json};
use toolgate::policy::source::RuleSet;
use toolgate::{Agent, AgentBuildError, Effect, Tool};

/// Order, customer, amount paid.
const ORDERS: [(&str, &str, &str); 7] = [
    ("A-1", "C-1", "120.00"),
    ("A-2", "C-1", "80.50"),
    ("A-3", "C-1", "900.00"),
    ("B-1", "C-2", "499.00"),
    ("B-2", "C-2", "499.00"),
    ("B-3", "C-2", "30.00"),
    ("D-1", "C-4", "50.00"),
];

fn text(name: &str) -> Value {
    json!({"type": "object", "properties": {name: {"type": "string"}}, "required": [name]})
}

/// Builds the agent with its rules.
pub(crate) fn agent() -> Result<Agent, AgentBuildError> {
    Agent::builder("refund-desk")
        .tool(
            Tool::dynamic(
                "verify_customer",
                "Verify that a customer exists and is active.",
                text("customer_id"),
                |_, args: Value| async move { Ok(json!({"active": matches!(args["customer_id"].as_str(), Some("C-1" | "C-2"))})) },
            )
            .effect(Effect::Read)
            .entity("customer_id", "/customer_id")
            .proves("/active"),
        )
        .tool(
            Tool::dynamic("lookup_order", "Look up an order.", text("order_id"), |_, args: Value| async move {
                let found = ORDERS.iter().find(|(order, ..)| args["order_id"] == *order);
                Ok(found.map_or(
                    json!({"found": false}),
                    |(order, customer, paid)| json!({"order_id": order, "customer_id": customer, "paid_usd": paid}),
                ))
            })
            .effect(Effect::Read)
            .entity("order_id", "/order_id")
            .proves("/customer_id")
            .proves("/paid_usd"),
        )
        .tool(Tool::dynamic(
            "issue_refund",
            "Refund an order to its customer.",
            json!({"type": "object", "required": ["order_id", "customer_id", "amount_usd"], "properties": {
                "order_id": {"type": "string"}, "customer_id": {"type": "string"}, "amount_usd": {"type": "number"},
            }}),
            |_, args: Value| async move { Ok(json!({"refunded": args["amount_usd"]})) },
        ))
        .tool(Tool::dynamic(
            "escalate_to_human",
            "Hand a request over to a person.",
            json!({"type": "object", "required": ["order_id"], "properties": {"order_id": {"type": "string"}, "why": {"type": "string"}}}),
            |_, _| async { Ok(json!({"ticket": "T-1"})) },
        ))
        .tool(
            Tool::dynamic(
                "end_case",
                "End the case; the customer must be verified again.",
                json!({"type": "object", "properties": {}}),
                |_, _| async { Ok(json!({"ended": true})) },
            )
            .effect(Effect::Write)
            .open()
            .revokes("verify_customer"),
        )
        .rules(RuleSet::parse("refund-desk/policy.toml", include_str!("policy.toml")))
        .build()
}
