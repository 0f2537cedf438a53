//! Runs a script of calls against a gate, and compares the results with the script.
//!
//! A line has one of these forms:
//!
//! ```text
//! ok          alice/s1  lookup_order {"order_id": "A-7"}
//! refund_cap  alice/s1  issue_refund {"order_id": "A-7", "amount_usd": 600}
//! > wait 16m
//! > user alice/s1 Please pay DE02 1203 0000 0000 2020 51.
//! > approve lead
//! ```
//!
//! The first word is `ok` or the code of the denial. `approve` answers the last approval request.

use std::sync::Arc;

use toolgate::{
    Agent, AgentBuildError, ManualClock, MemoryStore, SignedDuration, Timestamp, Toolgate,
};

/// The start time of the scripts.
const SCRIPT_START_TIME: &str = "2026-03-02T09:00:00Z";

/// Builds a gate with this agent, and the clock that the script controls.
pub fn build_gate(
    agent: Agent,
) -> Result<(Toolgate, Arc<ManualClock>), Box<dyn std::error::Error>> {
    let clock = Arc::new(ManualClock::at(SCRIPT_START_TIME.parse::<Timestamp>()?));
    let store = Arc::new(MemoryStore::new().with_clock(clock.clone()));
    Ok((Toolgate::builder().agent(agent).store(store).build()?, clock))
}

/// Runs a script and prints it.
///
/// # Errors
/// The agent cannot be built, or a result differs from the script.
pub async fn run_and_print(
    agent: Result<Agent, AgentBuildError>,
    script: &str,
) -> Result<(), Box<dyn std::error::Error>> {
    let agent = agent.map_err(|error| error.render(false))?;
    let name = agent.name().to_owned();
    let (gate, clock) = build_gate(agent)?;
    let tally = run_script(&gate, &name, &clock, script, |line| println!("{line}")).await;
    println!("\n{} calls allowed, {} refused", tally.allowed, tally.refused);
    if tally.mismatches.is_empty() { Ok(()) } else { Err(tally.mismatches.join("\n").into()) }
}

/// The result of a script.
#[derive(Debug, Default)]
pub struct ScriptResult {
    /// The number of calls that ran.
    pub allowed: usize,
    /// The number of calls that were denied.
    pub refused: usize,
    /// Lines whose result differs from the expected one.
    pub mismatches: Vec<String>,
}

/// Runs a script, and passes each line and its result to `report`.
pub async fn run_script(
    gate: &Toolgate,
    agent: &str,
    clock: &Arc<ManualClock>,
    script: &str,
    mut report: impl FnMut(&str),
) -> ScriptResult {
    let mut tally = ScriptResult::default();
    let mut approval: Option<String> = None;
    for (number, line) in script.lines().enumerate().map(|(n, line)| (n + 1, line.trim())) {
        let mut wrong =
            |problem: String| tally.mismatches.push(format!("line {number}: {line}\n  {problem}"));
        if let Some(comment) = line.strip_prefix('#') {
            report(&format!("\n{}", comment.trim()));
            continue;
        }
        if let Some(directive) = line.strip_prefix('>') {
            let (verb, rest) = directive.trim().split_once(' ').unwrap_or((directive.trim(), ""));
            match verb {
                "wait" => clock.advance(rest.parse::<SignedDuration>().unwrap_or_default()),
                "user" => {
                    let (caller, text) = rest.split_once(' ').unwrap_or((rest, ""));
                    let (principal, session) = caller.split_once('/').unwrap_or((caller, "s"));
                    if let Err(error) =
                        gate.session(agent, principal, session).add_user_text(text).await
                    {
                        wrong(error.to_string());
                    }
                }
                "approve" | "cannot-approve" => {
                    let id = approval.clone().unwrap_or_default();
                    let result = gate.answer_approval(&id, true, rest).await;
                    if result != Ok(verb == "approve") {
                        wrong(format!("answered: {result:?}"));
                    }
                }
                _ => wrong("unknown directive".to_owned()),
            }
            report(&format!("  > {directive}"));
            continue;
        }
        let mut words =
            line.splitn(4, char::is_whitespace).map(str::trim).filter(|word| !word.is_empty());
        let Some(expected) = words.next() else { continue };
        let rest = line.strip_prefix(expected).unwrap_or_default().trim_start();
        let (caller, rest) = rest.split_once(' ').unwrap_or((rest, ""));
        let (tool, arguments) =
            rest.trim_start().split_once(' ').unwrap_or((rest.trim_start(), "{}"));
        let (principal, session) = caller.split_once('/').unwrap_or((caller, "s"));
        let answer = gate.session(agent, principal, session).call(tool, arguments.trim()).await;
        let error = answer.outcome.error();
        if let Some(request) = error.and_then(|error| error.approval.as_ref()) {
            approval = Some(request.id.clone());
        }
        let code = error.map_or("ok", |error| &error.code);
        if code == "ok" {
            tally.allowed += 1
        } else {
            tally.refused += 1
        }
        let details = error.map(|error| {
            let next = error
                .next
                .as_ref()
                .map(|next| format!("\n           next: {} {}", next.tool, next.arguments))
                .unwrap_or_default();
            format!("\n           {}{next}", error.message)
        });
        report(&format!(
            "  {} {tool} {}\n         {code}{}",
            if code == "ok" { "+" } else { "-" },
            arguments.trim(),
            details.clone().unwrap_or_default()
        ));
        if code != expected {
            tally.mismatches.push(format!(
                "line {number}: {line}\n  the result was {code}{}",
                details.unwrap_or_default()
            ));
        }
    }
    tally
}
