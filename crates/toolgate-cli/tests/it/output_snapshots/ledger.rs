//! Tests the output of verbs that read or change a ledger.

use serde_json::{Value, json};

use super::{CODER_CONFIG, demo_project, json_field_values, send_hook_event, transcript};
use crate::hook::TestProject;

#[test]
fn replay_is_undecidable_if_rule_reads_redacted_argument() {
    let config = "store = \"ledger.db\"\nredact = ['\\d{16}']\n[tools.bash]\nkind = \"client\"\npolicy = \"open\"\n";
    let project = TestProject::with_config(config);
    let command = "pay 1234567890123456";
    send_hook_event(&project, "PreToolUse", command, &json!({}));
    send_hook_event(&project, "PostToolUse", command, &json!({"tool_response": {"stdout": ""}}));
    let (_, stdout, _) = project.run(&["replay", "s1"], "");
    assert!(
        stdout.contains("undecidable: an argument was redacted, and a rule reads all of them"),
        "{stdout}"
    );
}

#[test]
fn export_prune_and_key_rotation_outputs() {
    let other_key = "5f".repeat(32);
    let output = transcript(
        &demo_project(),
        &format!(
            "audit export --out out.jsonl; audit export --tool nothing --out none.jsonl; audit export --out nowhere/out.jsonl; \
             audit prune --older-than 0s --dry-run --json; audit prune; audit key; audit key --rotate; \
             audit prune --older-than 0s; audit prune --json; audit verify; audit verify --key {other_key}"
        ),
    );
    insta::assert_snapshot!(output, @r#"
    $ audit export --out out.jsonl [0]
    31 rows in out.jsonl
    $ audit export --tool nothing --out none.jsonl [0]
    0 rows in none.jsonl
    $ audit export --out nowhere/out.jsonl [2]
    error: nowhere/out.jsonl: No such file or directory (os error 2)
    $ audit prune --older-than 0s --dry-run --json [0]
    {"would_keep":0,"would_prune":31}
    $ audit prune [0]
    deleted 0 rows and 0 sealed records; the remaining rows can still be verified
    $ audit key [0]
    HEX
    $ audit key --rotate [0]
    HEX
    $ audit prune --older-than 0s [0]
    deleted 31 rows and 0 sealed records; the remaining rows can still be verified
    $ audit prune --json [0]
    {"rows":0,"sealed":0}
    $ audit verify [0]
    the ledger is intact: 0 rows of 3 sessions, 0 signatures
    pruned   31 rows before them
    signed   up to row 31 of 31
    key      HEX
             HEX
    anchor   31:HEX
             save it elsewhere: `verify --anchor` detects an older copy of the ledger
    $ audit verify --key HEX [1]
    the ledger is not intact: the record of pruned rows is signed with HEX, which is not a trusted key
    "#);
}

#[test]
fn stats_and_tail_outputs() {
    let project = demo_project();
    let output = transcript(&project, "audit stats");
    // The durations of the gates differ in every run.
    insta::assert_snapshot!(output.split("gate  ").next().unwrap(), @"
    $ audit stats [0]
    31 rows from TIME to TIME
    2 failed, 14 refused, 1 replayed, 14 succeeded
    tool                   calls  refused  failed
    crm_lookup             3      0        1
    escalate_to_human      1      0        0
    identity_verification  3      0        0
    issue_refund           16     12       1
    issue_refund_override  1      1        0
    lookup_order           7      1        0
    refused by     calls
    (validate)     3
    refund_cap     3
    daily_sum      2
    same_customer  2
    (progress)     1
    (resolve)      1
    one_per_order  1
    order_checked  1
    code                calls
    invalid_arguments   3
    refund_cap          3
    daily_refund_sum    2
    not_verified        2
    already_refunded    1
    loop_detected       1
    order_not_checked   1
    system_offline      1
    unknown_tool        1
    upstream_forbidden  1
    ");
    let output = transcript(
        &project,
        "audit tail -n 3; audit tail --decision replayed; audit tail --tool nothing; audit stats --tool nothing; \
         audit stats --tool nothing --json",
    );
    insta::assert_snapshot!(output, @r#"
    $ audit tail -n 3 [0]
    TIME succeeded identity_verification wednesday customer_id=C-2002 CALL
    TIME succeeded lookup_order wednesday order_id=B-2 CALL
    TIME refused   issue_refund wednesday daily_refund_sum · daily_sum customer_id=C-2002 order_id=B-2 CALL
    $ audit tail --decision replayed [0]
    TIME replayed  issue_refund tuesday customer_id=C-2002 order_id=B-1 CALL
    $ audit tail --tool nothing [0]
    no matching rows
    $ audit stats --tool nothing [0]
    no matching rows
    $ audit stats --tool nothing --json [0]
    {"codes":{},"decisions":{},"from":null,"latency":{},"observed":{},"refused_by":{},"rows":0,"to":null,"tools":{}}
    "#);
}

#[test]
fn pending_calls_are_settled_with_name_of_person() {
    let project = TestProject::with_config(CODER_CONFIG);
    for command in ["make", "make install"] {
        send_hook_event(&project, "PreToolUse", command, &json!({}));
        send_hook_event(
            &project,
            "PostToolUseFailure",
            command,
            &json!({"error": "cut off", "is_interrupt": true}),
        );
    }
    let [first, second] =
        json_field_values(&project, &["audit", "settle", "--json"], "call").try_into().unwrap();
    let output = transcript(
        &project,
        &format!(
            "audit settle; audit settle --json; audit settle {first}; audit settle {first} --never; \
             audit settle {first} --happened {{ --by ann; audit settle {first} --happened {{\"exit\":0}} --by ann; \
             audit settle {second} --never --by ann; audit settle {second} --never --by ann --json; audit settle; audit tail -n 2"
        ),
    );
    insta::assert_snapshot!(output, @r#"
    $ audit settle [0]
    bash {"command":"make"}
      TIME session s1 of USER with coder
      toolgate audit settle CALL --happened RESULT --by YOU --store 'HOME/project/ledger.db'
      toolgate audit settle CALL --never --by YOU --store 'HOME/project/ledger.db'
    bash {"command":"make install"}
      TIME session s1 of USER with coder
      toolgate audit settle CALL --happened RESULT --by YOU --store 'HOME/project/ledger.db'
      toolgate audit settle CALL --never --by YOU --store 'HOME/project/ledger.db'
    $ audit settle --json [0]
    {"arguments":{"command":"make"},"at":"MOMENT","call":"CALL","key":{"agent":"coder","principal":"USER","session":"s1"},"tool":"bash"}
    {"arguments":{"command":"make install"},"at":"MOMENT","call":"CALL","key":{"agent":"coder","principal":"USER","session":"s1"},"tool":"bash"}
    $ audit settle CALL [2]
    error: missing outcome: pass `--happened RESULT` or `--never`
    $ audit settle CALL --never [2]
    error: missing `--by NAME`: the ledger records who settled the call
    $ audit settle CALL --happened { --by ann [2]
    error: the result is not valid JSON: EOF while parsing an object at line 1 column 1
    $ audit settle CALL --happened {"exit":0} --by ann [0]
    CALL is settled: it happened. It has no idempotency key and its tool is not `once`, so a repeated call will run
    $ audit settle CALL --never --by ann [0]
    CALL is settled: it never happened. Its reserved limits are released, and it may be made again
    $ audit settle CALL --never --by ann --json [2]
    error: CALL is not pending; list pending calls with `toolgate audit settle`
    $ audit settle [0]
    no pending calls
    $ audit tail -n 2 [0]
    TIME settled   bash s1 it happened · by ann make CALL
    TIME settled   bash s1 it never happened · by ann make install CALL
    "#);
}

#[test]
fn receipt_is_verified_against_ledger_or_key() {
    let project = TestProject::new();
    let store = "--store ledger.db";
    let run =
        |line: &str| project.run(&format!("{line} {store}").split(' ').collect::<Vec<_>>(), "").1;
    run("demo");
    let paid: Value = serde_json::from_str(&run(
        "audit query --tool issue_refund --decision succeeded -n 1 --json",
    ))
    .unwrap();
    let call = paid["row"]["call"].as_str().unwrap();
    let receipt = run(&format!("audit show {call} --receipt"));
    project.write("project/receipt.json", &receipt);
    project.write("project/forged.json", &receipt.replace("succeeded", "refused"));
    project.write("project/junk.json", "{}");
    let key = run("audit key");
    let output = transcript(
        &project,
        &format!(
            "audit show {call} --receipt {store}; audit receipt receipt.json {store}; audit receipt receipt.json --key {}; \
             audit receipt forged.json {store}; audit receipt junk.json {store}; audit receipt none.json {store}; \
             audit receipt receipt.json; audit prune --older-than 0s {store}; audit receipt receipt.json {store}",
            key.trim()
        ),
    );
    insta::assert_snapshot!(output, @r#"
    $ audit show CALL --receipt --store ledger.db [0]
    {"at":"MOMENT","call":"CALL","config":"HEX","decision":"succeeded","hash":"HEX","key":"HEX","seq":17,"signature":"SIGNATURE","tool":"issue_refund"}
    $ audit receipt receipt.json --store ledger.db [0]
    the receipt is valid: `issue_refund` succeeded at TIME, row 17
    its row is in the ledger, unchanged
    $ audit receipt receipt.json --key HEX [0]
    the receipt is valid: `issue_refund` succeeded at TIME, row 17
    $ audit receipt forged.json --store ledger.db [1]
    the receipt is not valid: this ledger did not sign it
    $ audit receipt junk.json --store ledger.db [2]
    error: junk.json: not a receipt: missing field `call`
    $ audit receipt none.json --store ledger.db [2]
    error: none.json: No such file or directory (os error 2)
    $ audit receipt receipt.json [2]
    error: no ledger to check against; pass its public key with `--key`, or the ledger with `--store`
    $ audit prune --older-than 0s --store ledger.db [0]
    deleted 31 rows and 0 sealed records; the remaining rows can still be verified
    $ audit receipt receipt.json --store ledger.db [0]
    the receipt is valid: `issue_refund` succeeded at TIME, row 17
    its row was pruned since
    "#);
}
