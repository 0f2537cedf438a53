//! Tests that a test fails if the replay of its calls gives another decision.

use serde_json::json;

use crate::support::TestGateway;

#[tokio::test(flavor = "multi_thread")]
#[should_panic(expected = "`calc` was admitted, now refused at policy by `short`")]
async fn changed_decision_fails_replay_check() {
    let gate = TestGateway::open(
        "[tools.calc]\nkind = \"builtin\"\n\
         [[policy]]\nname = \"short\"\nrule = \"deny\"\ntools = [\"calc\"]\nwhen = 'size(input.expression) > 50'\nreason = \"Too long.\"\n",
    )
    .await;
    assert_eq!(gate.client().call_code("calc", json!({"expression": "1 + 1"})).await, "ok");
    let sql = rusqlite::Connection::open(gate.ledger_path()).unwrap();
    sql.busy_timeout(std::time::Duration::from_secs(5)).unwrap();
    assert_eq!(
        sql.execute(
            "UPDATE configs SET body = replace(body, '> 50', '> 1') WHERE body LIKE '%> 50%'",
            []
        )
        .unwrap(),
        1
    );
    drop(sql);
    gate.shut_down().await;
}
