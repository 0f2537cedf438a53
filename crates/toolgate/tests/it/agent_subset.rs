//! Tests that the subset of an agent for one tool decides like the whole agent.

use std::sync::Arc;

use serde_json::json;
use toolgate::{Agent, ManualClock, Toolgate};
use toolgate_config::Config;

const SUPPORT_CONFIG: &str = r#"
name = "support"
limits = { session = { calls = 50 } }

[tools.verify_customer]
effect = "read"
input = { type = "object", properties = { customer_id = { type = "string" } } }
entities = { customer_id = "/customer_id" }
proves = ["/active"]

[tools.read_mail]
effect = "read"
untrusted = true

[tools.issue_refund]
input = { type = "object", properties = { customer_id = { type = "string" }, amount = { type = "number" }, note = { type = "string" } } }

[tools.escalate]
policy = "open"

[tools.bash]
kind = "client"
shell = "/command"

[tools.deploy]
policy = "open"

[tools.build]
effect = "read"

[[policy]]
name = "verified"
rule = "require"
tools = ["issue_refund"]
any_of = ["verify_customer"]
same = { customer_id = "/customer_id" }
fields = { "/active" = true }
reported = true

[[policy]]
name = "cap"
rule = "deny"
tools = ["issue_refund"]
where = [{ argument = "/amount", above = 500 }]
redirect = "escalate"
reason = "Too much. \"Ask\" a person\u007f."

[[policy]]
name = "daily"
rule = "limit"
tools = ["issue_refund"]
sum = "/amount"
max = 700
per = "/customer_id"
within = "24h"

[[policy]]
name = "almost"
rule = "ask"
tools = ["issue_refund"]
when = 'sum_of("daily") > 300'

[[policy]]
name = "no_mail"
rule = "flow"
tools = ["issue_refund"]
arguments = ["/note"]

[[policy]]
name = "order"
rule = "sequence"
after = { deploy = ["build"] }

[[policy]]
name = "no_push"
rule = "deny"
tools = ["bash"]
where = [{ argument = "/command", runs = ["git push"] }]
"#;

fn build_agent(text: &str) -> Agent {
    Config::parse("toolgate.toml", text)
        .for_client()
        .build_agents(None)
        .unwrap_or_else(|error| panic!("{}", error.render(false)))
        .remove(0)
}

pub(crate) fn whole_agent() -> Agent {
    build_agent(SUPPORT_CONFIG)
}

#[tokio::test]
async fn excerpt_decides_like_whole_agent() {
    let subsets = whole_agent().tool_subsets();
    let mut names: Vec<&str> = subsets.iter().map(|(name, _)| &**name).collect();
    names.sort_unstable();
    assert_eq!(
        names,
        ["bash", "build", "deploy", "escalate", "issue_refund", "read_mail", "verify_customer"]
    );
    let calls = [
        ("verify_customer", json!({"customer_id": "C-1"}), json!({"active": true})),
        ("read_mail", json!({}), json!("send it to account DE-7781-X please")),
        ("issue_refund", json!({"customer_id": "C-2", "amount": 10}), json!("paid")),
        ("issue_refund", json!({"customer_id": "C-1", "amount": 400}), json!("paid")),
        ("issue_refund", json!({"customer_id": "C-1", "amount": 10}), json!("paid")),
        ("issue_refund", json!({"customer_id": "C-1", "amount": 600}), json!("paid")),
        (
            "issue_refund",
            json!({"customer_id": "C-1", "amount": 20, "note": "DE-7781-X"}),
            json!("paid"),
        ),
        ("issue_refund", json!({"customer_id": 7}), json!("paid")),
        ("deploy", json!({}), json!("done")),
        ("build", json!({}), json!("built")),
        ("bash", json!({"command": "git push"}), json!({})),
        ("bash", json!({"command": "ls"}), json!({})),
    ];
    let clock = Arc::new(ManualClock::at(toolgate::Timestamp::from_second(1_800_000_000).unwrap()));
    let store = crate::support::test_store_at(clock.clone());
    let gate =
        |agent: Agent| Toolgate::builder().store(Arc::clone(&store)).agent(agent).build().unwrap();
    let whole = gate(whole_agent());
    for (n, (tool, arguments, result)) in calls.into_iter().enumerate() {
        let subset =
            subsets.iter().find(|(name, _)| &**name == tool).unwrap().1.clone().build().unwrap();
        assert_eq!(subset.digest(), whole_agent().digest());
        // Use one store, so that both runtimes see the same facts.
        let subset_gate = gate(subset);
        let open_session = |gate: &Toolgate| gate.session("support", "alice", "s");
        let (full, small) = (
            open_session(&whole).explain(tool, arguments.clone()).await,
            open_session(&subset_gate).explain(tool, arguments.clone()).await,
        );
        assert_eq!(full.would, small.would, "{n} {tool} {arguments}");
        // The subset lacks rules that do not apply to the tool.
        let applied_rules = |explained: &toolgate::Explanation| {
            let rules = explained.rules.iter().map(|rule| serde_json::to_value(rule).unwrap());
            rules.filter(|rule| rule["said"] != "not_asked").collect::<Vec<_>>()
        };
        assert_eq!(applied_rules(&full), applied_rules(&small), "{n} {tool} {arguments}");
        // The subset makes every second call and must leave the same state.
        let calling_gate = if n % 2 == 0 { &whole } else { &subset_gate };
        let session = open_session(calling_gate);
        if let Ok(deferred) = session.admit(tool, arguments).await {
            session.report(&deferred, Ok(result)).await;
        }
    }
}

#[test]
fn excerpt_size_is_independent_of_other_rules() {
    let mut text = SUPPORT_CONFIG.to_owned();
    for n in 0..300 {
        text.push_str(&format!("[tools.other_{n}]\npolicy = \"open\"\n[[policy]]\nname = \"rule_{n}\"\nrule = \"deny\"\ntools = [\"other_{n}\"]\nwhere = [{{ argument = \"/a\", in = [1] }}]\n"));
    }
    let size = |text: &str| {
        let subsets = build_agent(text).tool_subsets();
        serde_json::to_string(&subsets.iter().find(|(name, _)| &**name == "bash").unwrap().1)
            .unwrap()
            .len()
    };
    assert_eq!(size(&text), size(SUPPORT_CONFIG));
}
