//! Two gateways with one configuration, each with an upstream of its own.

use serde_json::json;
use toolgate_config::Config;
use toolgate_mcp::{Pins, UpstreamStatus};

use crate::support::{TestGateway, fixture_path, kill_processes_with_number, wait_until};

#[tokio::test(flavor = "multi_thread")]
async fn gateways_with_shared_pins_check_their_own_upstream() {
    let text = |number: u8, more: &str| {
        let program = json!(fixture_path());
        let args = format!("[\"--stdio\", \"--tools\", \"{number}\"{more}]");
        format!(
            "[upstreams.fix]\ncommand = {program}\nargs = {args}\nprefix = \"\"\nundeclared = \"read\"\n"
        )
    };
    let (old, new) = (text(62, ""), text(63, ", \"--version-two\""));
    let one = TestGateway::open(&old).await;
    let other = one.open_with_same_pins(&new).await;
    let mut turn = 0;
    // What both say once each has read what the other has written.
    let mut codes = async || {
        let mut codes = Vec::new();
        for (gate, config) in [(&one, &old), (&other, &new)] {
            gate.reload(config).await.unwrap();
            turn += 1;
            codes.push(
                gate.client()
                    .in_session(&format!("s{turn}"))
                    .call_code("echo", json!({"text": "x"}))
                    .await,
            );
        }
        codes
    };
    let held = |gate: &TestGateway| {
        gate.gateway
            .health()
            .remove(0)
            .held
            .into_iter()
            .map(|change| change.tool)
            .collect::<Vec<_>>()
    };
    assert_eq!(codes().await, ["ok", "definition_changed"]);
    // It is started again, and says again what it has always said.
    kill_processes_with_number(62);
    let health = || one.gateway.health().remove(0);
    wait_until("it is there again", async || {
        health().starts > 1 && matches!(health().status, UpstreamStatus::Up { .. })
    })
    .await;
    assert_eq!(codes().await, ["ok", "definition_changed"]);
    assert_eq!((held(&one), held(&other)), (Vec::<String>::new(), vec!["echo".to_owned()]));
    // Somebody accepts what the other one has.
    let upstream = Config::parse("toolgate.toml", &old).upstreams.remove(0);
    let pins = Pins::open(Some(&one.pins_dir()), &upstream).unwrap();
    assert_eq!(pins.show_quarantined().unwrap().len(), 1);
    assert_eq!(pins.accept(Some("echo")).unwrap().tools, ["echo"]);
    assert_eq!(codes().await, ["definition_changed", "ok"]);
    assert_eq!((held(&one), held(&other)), (vec!["echo".to_owned()], Vec::<String>::new()));
    other.shut_down().await;
    one.shut_down().await;
}
