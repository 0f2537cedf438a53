//! A test whose calls would be decided otherwise now fails when it ends.

use serde_json::json;

use crate::support::Gate;

#[tokio::test(flavor = "multi_thread")]
#[should_panic(expected = "`calc` was admitted, now refused at policy by `short`")]
async fn a_call_that_would_be_decided_otherwise_is_noticed_when_its_test_ends() {
    let gate = Gate::open(
        "[tools.calc]\nkind = \"builtin\"\n\
         [[policy]]\nname = \"short\"\nrule = \"deny\"\ntools = [\"calc\"]\nwhen = 'size(input.expression) > 50'\nreason = \"Too long.\"\n",
    )
    .await;
    assert_eq!(gate.client().code("calc", json!({"expression": "1 + 1"})).await, "ok");
    let sql = rusqlite::Connection::open(gate.ledger()).unwrap();
    sql.busy_timeout(std::time::Duration::from_secs(5)).unwrap();
    assert_eq!(sql.execute("UPDATE configs SET body = replace(body, '> 50', '> 1') WHERE body LIKE '%> 50%'", []).unwrap(), 1);
    drop(sql);
    gate.end().await;
}
