//! The desk's rules.

use serde_json::json;
use toolgate::policy::{Condition, Deny, Limit, Per, Require};
use toolgate::{AgentBuilder, SignedDuration};

/// Whether the rules are in force. Without them the books show what would leak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Enforced {
    Yes,
    #[cfg_attr(not(test), expect(dead_code, reason = "only a test runs the desk without its rules"))]
    No,
}

pub(super) fn attach(agent: AgentBuilder) -> AgentBuilder {
    let refund = ["issue_refund"];
    agent
        .policy(
            Deny::new("refund_cap", refund)
                .when("/amount_usd", Condition::Above(500.into()))
                .reason("Refunds over $500 require human approval.")
                .redirect("escalate_to_human"),
        )
        .policy(
            Require::new("same_customer", refund, ["identity_verification"])
                .same("customer_id", "/customer_id")
                .field("/verified", json!(true))
                .within(SignedDuration::from_mins(15))
                .code("not_verified")
                .reason("This customer has not been verified in the last 15 minutes of this session."),
        )
        .policy(
            Require::new("order_checked", refund, ["lookup_order"])
                .same("order_id", "/order_id")
                .code("order_not_checked")
                .reason("Look up the order before you refund it."),
        )
        .policy(
            Require::new("own_order", refund, ["lookup_order"])
                .same("order_id", "/order_id")
                .field_is_argument("/customer_id", "/customer_id")
                .code("not_their_order")
                .reason("The order is not an order of this customer.")
                .redirect("escalate_to_human"),
        )
        .policy(
            Limit::sum("daily_sum", refund, "/amount_usd", 500.into())
                .per(Per::Entity("/customer_id".into()))
                .within(SignedDuration::from_hours(24))
                .code("daily_refund_sum")
                .reason("Refunds of one customer may sum to at most $500 in 24 hours.")
                .redirect("escalate_to_human"),
        )
        .policy(
            Limit::calls("one_per_order", refund, 1)
                .per(Per::Entity("/order_id".into()))
                .code("already_refunded")
                .reason("This order has been refunded already.")
                .redirect("escalate_to_human"),
        )
}
