//! The call that must be refused: whoever gets through with it knows that the gate is off.

use std::io;
use std::time::Duration;

use toolgate::config::Rules;
use toolgate::{Agent, Effect, Timestamp, Tool};

use crate::gateway::{Gateway, lock};

/// The agent of the call that must be refused.
pub const CANARY: &str = "toolgate-canary";

impl Gateway {
    /// Makes the call that must be refused.
    pub async fn try_canary(&self) -> Result<(), String> {
        let session = self.gate().session(CANARY, "toolgate", "canary");
        // Never twice the same, or it would be refused for that.
        let answer = session.call("canary", serde_json::json!({"at": Timestamp::now().to_string()})).await;
        let outcome = match answer.outcome.error() {
            Some(error) if error.code == "canary" && answer.gate == toolgate::Gate::Policy => Ok(()),
            Some(error) => Err(format!("a call that a rule must refuse got {} at another gate: {}", error.code, error.message)),
            None => Err("a call that must be refused went through".to_owned()),
        };
        self.0.metrics.canary(outcome.is_ok());
        *lock(&self.0.canary) = Some((Timestamp::now(), outcome.clone()));
        outcome
    }

    pub(crate) async fn watch_canary(&self, every: Duration) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(every) => {}
                () = self.0.stop.cancelled() => return,
            }
            if let Err(why) = self.try_canary().await {
                tracing::error!(why, "the gate does not hold");
            }
        }
    }

    /// Whether calls can be taken: the canary was refused, and not long ago.
    pub(crate) fn ready(&self) -> Result<(), String> {
        if self.0.stop.is_cancelled() {
            return Err("it is ending".to_owned());
        }
        match &*lock(&self.0.canary) {
            None => Err("the canary has not been tried".to_owned()),
            Some((_, Err(why))) => Err(why.clone()),
            Some((at, Ok(()))) if Timestamp::now().duration_since(*at) > toolgate::SignedDuration::from_secs(120) => {
                Err("the canary has not been tried for two minutes".to_owned())
            }
            Some(_) => Ok(()),
        }
    }
}

/// An agent whose only tool a rule refuses: whoever gets through to it knows that the gate is off.
pub(crate) fn canary() -> io::Result<Agent> {
    let tool = Tool::dynamic(
        "canary",
        "Must be refused.",
        serde_json::json!({"type": "object", "properties": {"at": {"type": "string"}}}),
        |_, _| async { Ok(serde_json::json!({"dead": true})) },
    )
    .effect(Effect::Destructive);
    let rules = Rules::parse(
        "(built in)",
        "[[policy]]\nname = \"canary\"\nrule = \"deny\"\ntools = [\"canary\"]\nwhen = \"true\"\ncategory = \"PERMISSION\"\ncode = \"canary\"\nreason = \"This call must be refused.\"\n",
    );
    Agent::builder(CANARY).tool(tool).rules(rules).principals(["toolgate"]).build().map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use toolgate::SignedDuration;
    use toolgate::config::Config;

    use super::*;
    use crate::gateway::Options;

    #[tokio::test(flavor = "multi_thread")]
    async fn who_has_not_tried_the_canary_of_late_is_not_ready() {
        let options = Options {
            store: Arc::new(toolgate::MemoryStore::default()),
            upstreams: crate::Starting::default(),
            patience: Duration::from_secs(5),
            launcher: None,
            built_in: None,
            principal: "ann".to_owned(),
            own: Vec::new(),
        };
        let config = || Ok(Config::parse("toolgate.toml", "[tools.calc]\nkind = \"builtin\"\n"));
        let gateway = Gateway::open(config, options).await.unwrap();
        assert_eq!(gateway.ready(), Ok(()));
        let ago = |seconds: i64| Timestamp::now().checked_sub(SignedDuration::from_secs(seconds)).unwrap();
        for (tried, why) in [
            (Some((ago(60), Ok(()))), None),
            (Some((ago(121), Ok(()))), Some("not been tried for two minutes")),
            (Some((ago(0), Err("it went through".to_owned()))), Some("it went through")),
            (None, Some("has not been tried")),
        ] {
            *lock(&gateway.0.canary) = tried;
            let said = gateway.ready().err();
            assert_eq!(said.is_some(), why.is_some(), "{said:?}");
            assert!(said.unwrap_or_default().contains(why.unwrap_or_default()), "{why:?}");
        }
        gateway.try_canary().await.unwrap();
        assert_eq!(gateway.ready(), Ok(()));
        gateway.end().await;
        assert!(gateway.ready().is_err());
    }
}
