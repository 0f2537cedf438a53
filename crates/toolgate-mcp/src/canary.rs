//! The call that must be refused: whoever gets through with it knows that the gate is off.

use std::io;
use std::time::{Duration, Instant};

use toolgate::config::{CANARY_PRINCIPAL, Rules};
use toolgate::{Agent, Effect, Timestamp, Tool};

use crate::gateway::{Gateway, lock};

/// The agent of the call that must be refused, and its tool.
pub const CANARY: &str = toolgate::config::CANARY;

/// How old the last try may be.
const OLDEST: Duration = Duration::from_secs(120);

impl Gateway {
    /// Makes the call that must be refused.
    pub async fn try_canary(&self) -> Result<(), String> {
        let session = self.gate().session(CANARY, CANARY_PRINCIPAL, "canary");
        // Never twice the same, or it would be refused for that.
        let answer = session.call(CANARY, serde_json::json!({"at": Timestamp::now().to_string()})).await;
        let outcome = match answer.outcome.error() {
            Some(error) if error.code == "canary" && answer.gate == toolgate::Gate::Policy => Ok(()),
            Some(error) => Err(format!("a call that a rule must refuse got {} at another gate: {}", error.code, error.message)),
            None => Err("a call that must be refused went through".to_owned()),
        };
        self.0.metrics.canary(outcome.is_ok());
        *lock(&self.0.canary) = Some((Instant::now(), outcome.clone()));
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
        self.ready_at(Instant::now())
    }

    /// By a clock that nobody sets.
    fn ready_at(&self, now: Instant) -> Result<(), String> {
        if self.0.stop.is_cancelled() {
            return Err("it is ending".to_owned());
        }
        match &*lock(&self.0.canary) {
            None => Err("the canary has not been tried".to_owned()),
            Some((_, Err(why))) => Err(why.clone()),
            Some((at, Ok(()))) if now.saturating_duration_since(*at) > OLDEST => {
                Err("the canary has not been tried for two minutes".to_owned())
            }
            Some(_) => Ok(()),
        }
    }
}

/// An agent whose only tool a rule refuses: whoever gets through to it knows that the gate is off. No other agent, tool or principal that
/// there can be is called as they are, so that who stops one of those does not stop this.
pub(crate) fn canary() -> io::Result<Agent> {
    let tool = Tool::dynamic(
        CANARY,
        "Must be refused.",
        serde_json::json!({"type": "object", "properties": {"at": {"type": "string"}}}),
        |_, _| async { Ok(serde_json::json!({"dead": true})) },
    )
    .effect(Effect::Destructive);
    let rules = format!(
        "[[policy]]\nname = \"canary\"\nrule = \"deny\"\ntools = [\"{CANARY}\"]\nwhen = \"true\"\ncategory = \"PERMISSION\"\ncode = \"canary\"\nreason = \"This call must be refused.\"\n"
    );
    Agent::builder(CANARY)
        .tool(tool)
        .rules(Rules::parse("(built in)", &rules))
        .principals([CANARY_PRINCIPAL])
        .build()
        .map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use toolgate::config::Config;
    use toolgate::store::Target;

    use super::*;
    use crate::gateway::Options;

    async fn open(principal: &str) -> io::Result<Gateway> {
        let options = Options {
            store: Arc::new(toolgate::MemoryStore::default()),
            upstreams: crate::Starting::default(),
            patience: Duration::from_secs(5),
            launcher: None,
            built_in: None,
            principal: principal.to_owned(),
            own: Vec::new(),
        };
        Gateway::open(|| Ok(Config::parse("toolgate.toml", "[tools.calc]\nkind = \"builtin\"\n")), options).await
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn who_has_not_tried_the_canary_of_late_is_not_ready() {
        let gateway = open("ann").await.unwrap();
        assert_eq!(gateway.ready(), Ok(()));
        let at = Instant::now();
        let after = |seconds: u64| at + Duration::from_secs(seconds);
        for (tried, now, why) in [
            (Some((at, Ok(()))), after(60), None),
            (Some((at, Ok(()))), after(121), Some("not been tried for two minutes")),
            (Some((at, Err("it went through".to_owned()))), at, Some("it went through")),
            (None, at, Some("has not been tried")),
        ] {
            *lock(&gateway.0.canary) = tried;
            let said = gateway.ready_at(now).err();
            assert_eq!(said.is_some(), why.is_some(), "{said:?}");
            assert!(said.unwrap_or_default().contains(why.unwrap_or_default()), "{why:?}");
        }
        gateway.try_canary().await.unwrap();
        assert_eq!(gateway.ready(), Ok(()));
        gateway.end().await;
        assert!(gateway.ready().is_err());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn who_is_paused_does_not_keep_the_canary_from_being_tried() {
        let gateway = open("ann").await.unwrap();
        let gate = gateway.gate();
        for (target, is_tried) in [
            (Target::Principal("toolgate".into()), true),
            (Target::Principal("ann".into()), true),
            (Target::Agent("default".into()), true),
            (Target::Tool("canary".into()), true),
            // Nobody knows whether the gate holds while the canary itself is paused.
            (Target::Agent(CANARY.into()), false),
            (Target::Tool(CANARY.into()), false),
            (Target::Principal(CANARY_PRINCIPAL.into()), false),
        ] {
            gate.pause(target.clone(), "an incident").await.unwrap();
            let tried = gateway.try_canary().await;
            assert_eq!((tried.is_ok(), gateway.ready()), (is_tried, tried.clone()), "{target:?}");
            assert!(tried.is_ok() || tried.unwrap_err().contains("paused by an operator: an incident"), "{target:?}");
            gate.unpause(target).await.unwrap();
        }
        gateway.try_canary().await.unwrap();
        gateway.end().await;
        assert!(open(CANARY_PRINCIPAL).await.is_err_and(|error| error.to_string().contains("nobody is called `(canary)`")));
    }
}
