//! `toolgate check`: calls against a configuration, without running anything and without touching live state.

use std::io::{self, BufRead, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use serde::Deserialize;
use serde_json::{Value, json};
use toolgate::config::{Behind, Config};
use toolgate::{Agent, Answer, Ctx, Effects, Failure, Gate, Handler, Judged, Permit, Toolgate};

use super::ledger::{BOLD, DIM, GREEN, RED, YELLOW, clean};

/// Try calls against a configuration: what would become of each, and why. No tool runs, and nothing live is touched.
///
/// Calls are read from standard input, one JSON object a line: {"tool", "arguments", "session"?, "principal"?, "agent"?,
/// "result"?}. They are one history: limits and repetition count from one to the next. A `result` is taken as what the tool
/// returned, so that evidence builds up; a call without one is taken to have happened and to have proved nothing.
#[derive(clap::Args)]
#[command(
    after_help = "Exit code: 0 if every line was a call, whatever became of it; 2 if the configuration does not load or a line is no call.\n\nExamples:\n  echo '{\"tool\": \"issue_refund\", \"arguments\": {\"amount\": 600}}' | toolgate check --config toolgate.toml\n  toolgate check --config toolgate.toml --json < calls.jsonl\n  toolgate check --config toolgate.toml --explain < calls.jsonl"
)]
pub(crate) struct Args {
    /// The configuration.
    #[arg(long, value_name = "FILE", default_value = "toolgate.toml")]
    config: PathBuf,
    /// One JSON object a line: {"decision", "gate", "rule", "error"}.
    #[arg(long)]
    json: bool,
    /// Every gate and every rule, with the values that decide.
    #[arg(long)]
    explain: bool,
}

/// One call to try.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tried {
    tool: String,
    #[serde(default)]
    arguments: Option<Box<serde_json::value::RawValue>>,
    #[serde(default)]
    session: Option<String>,
    #[serde(default)]
    principal: Option<String>,
    #[serde(default)]
    agent: Option<String>,
    #[serde(default, deserialize_with = "given")]
    result: Option<Value>,
}

/// A result that is `null` was given all the same.
fn given<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(Some)
}

/// Gives what the line says that the tool gave.
#[derive(Default)]
struct Script(Mutex<Option<Value>>);

#[async_trait]
impl Handler for Script {
    async fn run(&self, _: &Permit, _: Ctx, _: &Judged) -> Result<Value, Failure> {
        let result = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        result.ok_or_else(unsaid)
    }
}

/// Nobody said what came of it: it happened, and proved nothing.
fn unsaid() -> Failure {
    Failure::business(UNSAID, "the line says no result").effects(Effects::Done)
}

const UNSAID: &str = "no_result_given";

pub(crate) fn run(args: &Args) -> io::Result<ExitCode> {
    let script = Arc::new(Script::default());
    let agents = load(args, &script)?;
    let names: Vec<String> = agents.iter().map(|agent| agent.name().to_owned()).collect();
    let external: Vec<(String, String)> = agents
        .iter()
        .flat_map(|agent| {
            agent.tools().filter(|tool| tool.is_run_by_client()).map(|tool| (agent.name().to_owned(), tool.name().to_owned()))
        })
        .collect();
    let gate = agents.into_iter().fold(Toolgate::builder(), toolgate::ToolgateBuilder::agent).build()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut out = anstream::stdout().lock();
    for (number, line) in io::stdin().lock().lines().enumerate() {
        let line = line?;
        if line.trim().is_empty() {
            continue;
        }
        let tried = read(&line).map_err(|why| io::Error::other(format!("line {}: {why}", number + 1)))?;
        let agent = match (&tried.agent, names.as_slice()) {
            (Some(agent), _) => agent.clone(),
            (None, [one]) => one.clone(),
            (None, several) => {
                let several = several.join(", ");
                return Err(io::Error::other(format!(
                    "line {}: the configuration has several agents; say which `agent`: {several}",
                    number + 1
                )));
            }
        };
        let by_client = external.iter().any(|(of, tool)| *of == agent && *tool == tried.tool);
        let explained = if args.explain { Some(runtime.block_on(explain(&gate, &agent, &tried))) } else { None };
        let answer = runtime.block_on(decide(&gate, &script, &agent, &tried, by_client));
        let verdict = verdict(&answer);
        if args.json {
            writeln!(out, "{verdict}")?;
        } else {
            show(&mut out, &tried, &answer, &verdict)?;
        }
        if let Some(explained) = explained {
            let text: String = explained.lines().map(|line| format!("    {}\n", clean(line))).collect();
            writeln!(out, "{DIM}{text}{DIM:#}")?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn load(args: &Args, script: &Arc<Script>) -> io::Result<Vec<Agent>> {
    let config = Config::load(&args.config)?;
    let handler: Arc<dyn Handler> = script.clone();
    config.agents(&Behind::Script(handler)).map_err(|error| {
        let problems = error.render(io::stderr().is_terminal());
        io::Error::other(format!("the configuration does not load\n\n{problems}"))
    })
}

/// A line as it is written: arguments stay the text they are, so that two keys of one name are seen.
fn read(line: &str) -> Result<Tried, String> {
    serde_json::from_str(line).map_err(|e| format!("this is no call: {e}; like {{\"tool\": \"…\", \"arguments\": {{…}}}}"))
}

impl Tried {
    fn arguments(&self) -> String {
        self.arguments.as_ref().map_or_else(|| "{}".to_owned(), |text| text.get().to_owned())
    }

    fn session(&self, gate: &Toolgate, agent: &str) -> toolgate::Session {
        gate.session(agent, self.principal.as_deref().unwrap_or("anybody"), self.session.as_deref().unwrap_or("check"))
    }
}

async fn explain(gate: &Toolgate, agent: &str, tried: &Tried) -> String {
    tried.session(gate, agent).explain(&tried.tool, tried.arguments()).await.to_string()
}

async fn decide(gate: &Toolgate, script: &Script, agent: &str, tried: &Tried, by_client: bool) -> Answer {
    let session = tried.session(gate, agent);
    if by_client {
        return match session.admit(&tried.tool, tried.arguments()).await {
            Ok(pass) => pass.report(tried.result.clone().ok_or_else(unsaid)).await,
            Err(answer) => answer,
        };
    }
    *script.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = tried.result.clone();
    session.call(&tried.tool, tried.arguments()).await
}

/// What was decided: whatever came after the tool had been let through is no decision.
fn verdict(answer: &Answer) -> Value {
    let refused = answer.outcome.error().filter(|_| answer.gate < Gate::Run);
    let decision = match refused {
        None => "allow",
        Some(error) if error.approval.is_some() => "ask",
        Some(_) => "deny",
    };
    let rule = refused.and_then(|_| answer.rule.clone());
    json!({ "decision": decision, "gate": answer.gate, "rule": rule, "error": refused })
}

fn show(out: &mut impl Write, tried: &Tried, answer: &Answer, verdict: &Value) -> io::Result<()> {
    let (style, word) = match verdict["decision"].as_str() {
        Some("allow") => (GREEN, "allow"),
        Some("ask") => (YELLOW, "ask"),
        _ => (RED, "deny"),
    };
    let rule = verdict["rule"].as_str().map(|rule| format!(" · {}", clean(rule))).unwrap_or_default();
    let place = if word == "allow" { String::new() } else { format!(" {DIM}at{DIM:#} {}{rule}", answer.gate) };
    writeln!(out, "{style}{word:<5}{style:#} {BOLD}{}{BOLD:#} {}{place}", clean(&tried.tool), clean(&tried.arguments()))?;
    if let Some(error) = answer.outcome.error().filter(|_| word != "allow") {
        writeln!(out, "      {} {}: {}", error.category, error.code, clean(&error.message))?;
        if let Some(next) = &error.next {
            writeln!(out, "      {DIM}next{DIM:#} {} {}", next.tool, clean(&next.arguments.to_string()))?;
        }
    }
    // A result that does not fit is worth a word: in earnest it would be withheld.
    if let Some(error) = answer.outcome.error().filter(|error| word == "allow" && error.code != UNSAID) {
        writeln!(out, "      {YELLOW}its result{YELLOW:#} {}: {}", error.code, clean(&error.message))?;
    }
    Ok(())
}
