//! Runs the canary: a call that a rule must deny. If it passes, the rules are not in force.

use std::io;
use std::time::{Duration, Instant};

use toolgate::policy::source::{CANARY_PRINCIPAL, RuleSet};
use toolgate::{Agent, Effect, Timestamp, Tool, Toolgate};

use crate::gateway::{Gateway, lock};

/// Name of the canary agent and of its tool.
pub const CANARY: &str = toolgate::policy::source::CANARY_AGENT;

/// Maximum age of the last canary run while the gateway is ready.
const MAX_CANARY_AGE: Duration = Duration::from_secs(120);

/// Makes the canary call, and returns why if the rule did not refuse it.
async fn check_canary_denied(gate: &Toolgate) -> Result<(), String> {
    let session = gate.session(CANARY, CANARY_PRINCIPAL, "canary");
    // The timestamp makes each call different: a repeated call would be denied as a loop.
    let answer =
        session.call(CANARY, serde_json::json!({"at": Timestamp::now().to_string()})).await;
    match answer.outcome.error() {
        Some(error) if error.code == "canary" && answer.gate == toolgate::Gate::Policy => Ok(()),
        Some(error) => Err(format!(
            "the canary call failed with `{}` at another gate: {}",
            error.code, error.message
        )),
        None => Err("the canary call was not denied".to_owned()),
    }
}

impl Gateway {
    /// Makes the canary call, and fails unless the canary rule denies it.
    pub async fn run_canary(&self) -> Result<(), String> {
        let outcome = check_canary_denied(&self.runtime()).await;
        self.record_canary(outcome.clone());
        outcome
    }

    fn record_canary(&self, outcome: Result<(), String>) {
        self.0.metrics.record_canary(outcome.is_ok());
        *lock(&self.0.canary_result) = Some((Instant::now(), outcome));
    }

    pub(crate) async fn run_canary_periodically(&self, interval: Duration) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(interval) => {}
                () = self.0.stop.cancelled() => return,
            }
            if let Err(why) = self.run_canary().await {
                tracing::error!(why, "the canary check failed");
            }
        }
    }

    /// Checks that the gateway accepts calls: the canary was denied recently.
    pub(crate) fn check_ready(&self) -> Result<(), String> {
        self.check_ready_at(Instant::now())
    }

    /// Checks readiness at a point of the monotonic clock.
    fn check_ready_at(&self, now: Instant) -> Result<(), String> {
        if self.0.stop.is_cancelled() {
            return Err("the gateway is shutting down".to_owned());
        }
        match &*lock(&self.0.canary_result) {
            None => Err("the canary has not run".to_owned()),
            Some((_, Err(why))) => Err(why.clone()),
            Some((at, Ok(()))) if now.saturating_duration_since(*at) > MAX_CANARY_AGE => {
                Err("the canary has not run for two minutes".to_owned())
            }
            Some(_) => Ok(()),
        }
    }
}

/// Builds the canary agent, whose only tool a rule denies.
///
/// Its names are reserved, so that a pause of another agent, tool or principal does not affect it.
pub(crate) fn build_canary_agent() -> io::Result<Agent> {
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
        .rules(RuleSet::parse("(built in)", &rules))
        .principals([CANARY_PRINCIPAL])
        .build()
        .map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use toolgate::PolicyEngine;
    use toolgate::policy::{Policy, PolicyError, PolicyInput, Verdict};
    use toolgate::store::PauseTarget;
    use toolgate_config::Config;

    use super::*;
    use crate::gateway::GatewayOptions;

    async fn open(principal: &str) -> io::Result<Gateway> {
        open_on(Arc::new(toolgate::MemoryStore::default()), principal).await
    }

    async fn open_on(store: Arc<toolgate::MemoryStore>, principal: &str) -> io::Result<Gateway> {
        let options = GatewayOptions {
            store,
            upstreams: crate::UpstreamOptions::default(),
            upstream_start_timeout: Duration::from_secs(5),
            launcher: None,
            built_in_rules: None,
            principal: principal.to_owned(),
            own_paths: Vec::new(),
        };
        Gateway::open(
            || Ok(Config::parse("toolgate.toml", "[tools.calc]\nkind = \"builtin\"\n")),
            options,
        )
        .await
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn gateway_without_recent_canary_is_not_ready() {
        let gateway = open("ann").await.unwrap();
        assert_eq!(gateway.check_ready(), Ok(()));
        let at = Instant::now();
        let after = |seconds: u64| at + Duration::from_secs(seconds);
        for (result, now, expected) in [
            (Some((at, Ok(()))), after(60), None),
            (Some((at, Ok(()))), after(121), Some("not run for two minutes")),
            (Some((at, Err("it went through".to_owned()))), at, Some("it went through")),
            (None, at, Some("has not run")),
        ] {
            *lock(&gateway.0.canary_result) = result;
            let error = gateway.check_ready_at(now).err();
            assert_eq!(error.is_some(), expected.is_some(), "{error:?}");
            assert!(
                error.unwrap_or_default().contains(expected.unwrap_or_default()),
                "{expected:?}"
            );
        }
        gateway.run_canary().await.unwrap();
        assert_eq!(gateway.check_ready(), Ok(()));
        gateway.shut_down().await;
        assert!(gateway.check_ready().is_err());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn unrelated_pause_does_not_affect_canary() {
        let gateway = open("ann").await.unwrap();
        let gate = gateway.runtime();
        for (target, is_denied) in [
            (PauseTarget::Principal("toolgate".into()), true),
            (PauseTarget::Principal("ann".into()), true),
            (PauseTarget::Agent("default".into()), true),
            (PauseTarget::Tool("canary".into()), true),
            // While the canary itself is paused, the check fails.
            (PauseTarget::Agent(CANARY.into()), false),
            (PauseTarget::Tool(CANARY.into()), false),
            (PauseTarget::Principal(CANARY_PRINCIPAL.into()), false),
        ] {
            gate.pause(target.clone(), "an incident").await.unwrap();
            let result = gateway.run_canary().await;
            assert_eq!(
                (result.is_ok(), gateway.check_ready()),
                (is_denied, result.clone()),
                "{target:?}"
            );
            assert!(
                result.is_ok()
                    || result.unwrap_err().contains("paused by an operator: an incident"),
                "{target:?}"
            );
            gate.unpause(target).await.unwrap();
        }
        gateway.run_canary().await.unwrap();
        gateway.shut_down().await;
        assert!(
            open(CANARY_PRINCIPAL)
                .await
                .is_err_and(|error| error.to_string().contains("reserved for the self-test"))
        );
    }

    struct AllowAllTestEngine;

    impl PolicyEngine for AllowAllTestEngine {
        fn check(&self, _: &dyn Policy, _: &PolicyInput<'_>) -> Result<Verdict, PolicyError> {
            Ok(Verdict::allow())
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn canary_fails_if_rules_are_not_enforced() {
        let enforcing = Toolgate::builder().agent(build_canary_agent().unwrap()).build().unwrap();
        assert_eq!(check_canary_denied(&enforcing).await, Ok(()));
        let permissive = Toolgate::builder()
            .agent(build_canary_agent().unwrap())
            .policy_engine(AllowAllTestEngine)
            .build()
            .unwrap();
        let outcome = check_canary_denied(&permissive).await;
        assert!(outcome.is_err());
        let gateway = open("ann").await.unwrap();
        gateway.record_canary(outcome);
        assert!(gateway.check_ready().is_err());
        gateway.shut_down().await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn gateway_does_not_open_if_the_canary_fails() {
        let store = Arc::new(toolgate::MemoryStore::default());
        let tools = Toolgate::builder().store(store.clone()).build().unwrap();
        tools.pause(PauseTarget::Agent(CANARY.into()), "an incident").await.unwrap();
        assert!(open_on(store, "ann").await.is_err());
    }
}
