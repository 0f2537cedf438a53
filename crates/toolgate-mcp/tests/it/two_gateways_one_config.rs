//! Tests two gateways that share pins, each with its own upstream.

use serde_json::json;
use toolgate_config::Config;
use toolgate_mcp::{Pins, UpstreamStatus};

use crate::support::{TestGateway, fixture_path, kill_processes_with_number, wait_until};

#[tokio::test(flavor = "multi_thread")]
async fn gateways_with_shared_pins_check_their_own_upstream() {
    let text = |number: u8, extra: &str| {
        let program = json!(fixture_path());
        let args = format!("[\"--stdio\", \"--tools\", \"{number}\"{extra}]");
        format!(
            "[upstreams.fix]\ncommand = {program}\nargs = {args}\nprefix = \"\"\nundeclared = \"read\"\n"
        )
    };
    let (old, new) = (text(62, ""), text(63, ", \"--version-two\""));
    let first = TestGateway::open(&old).await;
    let second = first.open_with_same_pins(&new).await;
    let mut turn = 0;
    // Returns the codes of both gateways after each has read the pins of the other.
    let mut codes = async || {
        let mut codes = Vec::new();
        for (gate, config) in [(&first, &old), (&second, &new)] {
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
    let quarantined = |gate: &TestGateway| {
        gate.gateway
            .health()
            .remove(0)
            .held
            .into_iter()
            .map(|change| change.tool)
            .collect::<Vec<_>>()
    };
    assert_eq!(codes().await, ["ok", "definition_changed"]);
    // The upstream restarts with unchanged tools.
    kill_processes_with_number(62);
    let health = || first.gateway.health().remove(0);
    wait_until("the upstream is up again", async || {
        health().starts > 1 && matches!(health().status, UpstreamStatus::Up { .. })
    })
    .await;
    assert_eq!(codes().await, ["ok", "definition_changed"]);
    assert_eq!(
        (quarantined(&first), quarantined(&second)),
        (Vec::<String>::new(), vec!["echo".to_owned()])
    );
    // A person accepts the definition of the other upstream.
    let upstream = Config::parse("toolgate.toml", &old).upstreams.remove(0);
    let pins = Pins::open(Some(&first.pins_dir()), &upstream).unwrap();
    assert_eq!(pins.show_quarantined().unwrap().len(), 1);
    assert_eq!(pins.accept(Some("echo")).unwrap().tools, ["echo"]);
    assert_eq!(codes().await, ["definition_changed", "ok"]);
    assert_eq!(
        (quarantined(&first), quarantined(&second)),
        (vec!["echo".to_owned()], Vec::<String>::new())
    );
    second.shut_down().await;
    first.shut_down().await;
}
