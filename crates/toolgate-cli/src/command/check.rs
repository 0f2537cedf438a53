//! Implements `toolgate check`: decides calls by a configuration, without running a tool.

mod policy_tests;

use std::io::{self, BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use toolgate::{
    Agent, Answer, CallEffects, CheckedArguments, Explanation, Failure, Gate, Handler, Permit,
    ToolContext, ToolError, Toolgate,
};
use toolgate_config::{Config, FallbackDecision};

use crate::command::common::{BOLD, DIM, GREEN, RED, YELLOW, sanitize};
use toolgate_hook::builtin_rules::ProtectedPaths;
use toolgate_hook::effective_config;
use toolgate_hook::effective_config::{EffectiveConfig, UserStateDir};

/// Decide calls by a configuration, without running a tool.
///
/// Pass calls as arguments, in files or on standard input, one JSON object per line: {"tool",
/// "arguments", "session"?, "principal"?, "agent"?, "result"?}. The calls are one history: limits
/// and repetitions count across them. A `result` counts as the tool's result, so it can produce
/// evidence. A call without one counts as done, without evidence. No live state changes.
#[derive(clap::Args)]
#[command(
    after_help = "Exit code: 0 if every line is a call, allowed or not, or all tests pass; 1 if a test fails; 2 if the configuration does not load, a line is not a call, or there are no calls and no tests.\n\nExamples:\n  toolgate check '{\"tool\": \"issue_refund\", \"arguments\": {\"amount\": 600}}'\n  toolgate check --config toolgate.toml --explain calls.jsonl\n  toolgate check --config toolgate.toml --json < calls.jsonl\n  toolgate check --config toolgate.toml --tests tests.toml"
)]
pub(crate) struct Args {
    /// Calls as JSON objects, or files with calls [default: standard input].
    #[arg(value_name = "CALL|FILE", conflicts_with = "tests")]
    calls: Vec<String>,
    /// Configuration file [default: what is in force here].
    #[arg(long, value_name = "FILE", env = "TOOLGATE_CONFIG")]
    config: Option<PathBuf>,
    /// Print one JSON object per line: {"decision", "gate", "rule", "error"}.
    #[arg(long)]
    json: bool,
    /// Print every gate and every rule, with the values that decide.
    #[arg(long)]
    explain: bool,
    /// Run the tests in a file instead of calls (repeatable).
    #[arg(long, value_name = "FILE", conflicts_with = "explain")]
    tests: Vec<PathBuf>,
}

/// A call to decide.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CallToCheck {
    tool: String,
    #[serde(default)]
    arguments: Option<Box<serde_json::value::RawValue>>,
    #[serde(default)]
    session: Option<String>,
    #[serde(default)]
    principal: Option<String>,
    #[serde(default)]
    agent: Option<String>,
    #[serde(default, deserialize_with = "deserialize_present_result")]
    result: Option<Value>,
}

/// Deserializes a given result. `null` is a result, too.
fn deserialize_present_result<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(Some)
}

/// Tool handler that returns the `result` of the line.
#[derive(Default)]
struct ScriptedHandler(Mutex<Option<Value>>);

#[async_trait]
impl Handler for ScriptedHandler {
    async fn run(
        &self,
        _: &Permit,
        _: ToolContext,
        _: &CheckedArguments,
    ) -> Result<Value, Failure> {
        let result = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        result.ok_or_else(no_result_failure)
    }
}

/// Returns the failure for a call without `result`: the call is done, and produces no evidence.
fn no_result_failure() -> Failure {
    Failure::business(NO_RESULT_CODE, "the line has no `result`").effects(CallEffects::Done)
}

const NO_RESULT_CODE: &str = "no_result_given";

/// The agents of a configuration, with scripted results and an empty history.
pub(super) struct CheckHarness {
    gate: Toolgate,
    script: Arc<ScriptedHandler>,
    names: Vec<String>,
    /// Agents and their tools that clients run.
    client_tools: Vec<(String, String)>,
    /// Enforced rules.
    rules: Vec<String>,
    /// The configuration in force here, if no file was given.
    in_force: Option<Arc<(EffectiveConfig, UserStateDir)>>,
}

impl CheckHarness {
    /// Opens a configuration file by itself.
    fn open(config: Option<&PathBuf>) -> io::Result<Self> {
        let path = effective_config::config_path_or_default(config)?;
        Self::from_config(effective_config::with_pinned_tools(Config::load(&path)?, &path)?)
    }

    /// Opens the given configuration, or what is in force here.
    pub(super) fn open_effective(config: Option<&PathBuf>) -> io::Result<Self> {
        if config.is_some() {
            return Self::open(config);
        }
        // Without a home directory, the user has no configuration and no state.
        let Ok(state) = UserStateDir::without_opening() else { return Self::open(None) };
        let effective = EffectiveConfig::load_untrusted(&state)?;
        Self::open_with_built_in_rules(Arc::new((effective, state)), None)
    }

    /// Opens the configuration in force with the built-in rules and the given undeclared tool.
    fn open_with_built_in_rules(
        in_force: Arc<(EffectiveConfig, UserStateDir)>,
        undeclared: Option<(&str, &str)>,
    ) -> io::Result<Self> {
        let (effective, state) = &*in_force;
        // Report a configuration that does not load without changing it.
        if effective.config.check().is_err() {
            return Self::from_config(effective.config.clone());
        }
        // The user may be in a subdirectory of the project.
        let directory = effective_config::project_dir()?;
        let project = effective_config::find_project_config(&directory)
            .and_then(|file| Some(file.parent()?.to_owned()))
            .unwrap_or(directory);
        let protected = ProtectedPaths::collect(effective, state, &project);
        let config = match undeclared {
            Some((agent, tool)) => effective.config.clone().with_undeclared_tools(agent, &[tool]),
            None => effective.config.clone(),
        };
        // Use the built-in rules of the entry point for these tools: a hook, or the gateway.
        let config = config.with_policies("(built in)", |tools| {
            let is_served = tools.iter().any(|tool| !tool.is_run_by_client());
            protected.render_rules(tools, is_served.then_some(project.as_path()))
        });
        let harness = Self::from_config(config)?;
        Ok(Self { in_force: Some(in_force), ..harness })
    }

    /// Returns a harness with an undeclared tool, if the configuration asks about such tools.
    fn with_undeclared_tool(&self, agent: &str, tool: &str) -> io::Result<Option<Self>> {
        let is_undeclared = !tool.is_empty()
            && self
                .gate
                .agent(agent)
                .is_some_and(|agent| agent.tools().all(|spec| spec.name() != tool));
        match &self.in_force {
            Some(in_force)
                if is_undeclared
                    && in_force.0.config.client.undeclared == FallbackDecision::Ask =>
            {
                Self::open_with_built_in_rules(Arc::clone(in_force), Some((agent, tool))).map(Some)
            }
            _ => Ok(None),
        }
    }

    fn from_config(config: Config) -> io::Result<Self> {
        let script = Arc::new(ScriptedHandler::default());
        let handler: Arc<dyn Handler> = script.clone();
        let agents = config.build_agents(Some(&handler)).map_err(|error| {
            let problems = error.render(io::stderr().is_terminal());
            io::Error::other(format!("the configuration does not load\n\n{problems}"))
        })?;
        let names: Vec<String> = agents.iter().map(|agent| agent.name().to_owned()).collect();
        let rules =
            agents.iter().flat_map(|agent| agent.enforced_rules().map(str::to_owned)).collect();
        let run_by_client = |agent: &Agent| {
            let name = agent.name().to_owned();
            agent
                .tools()
                .filter(|tool| tool.is_run_by_client())
                .map(|tool| (name.clone(), tool.name().to_owned()))
                .collect::<Vec<_>>()
        };
        let client_tools = agents.iter().flat_map(run_by_client).collect();
        let gate = agents
            .into_iter()
            .fold(Toolgate::builder(), toolgate::ToolgateBuilder::agent)
            .build()?;
        Ok(Self { gate, script, names, client_tools, rules, in_force: None })
    }

    /// Returns the agent of a call.
    fn resolve_agent(&self, requested: Option<&String>) -> Result<String, String> {
        match (requested, self.names.as_slice()) {
            (Some(agent), _) => Ok(agent.clone()),
            (None, [only_name]) => Ok(only_name.clone()),
            (None, several) => Err(format!(
                "the configuration has several agents; set `agent` to one of {}",
                several.join(", ")
            )),
        }
    }

    async fn decide(&self, agent: &str, call: &CallToCheck) -> Answer {
        let is_run_by_client =
            self.client_tools.iter().any(|(owner, tool)| *owner == agent && *tool == call.tool);
        decide(&self.gate, &self.script, agent, call, is_run_by_client).await
    }
}

pub(crate) fn run(args: &Args) -> io::Result<ExitCode> {
    if !args.tests.is_empty() {
        return policy_tests::run_tests(args);
    }
    let harness = CheckHarness::open_effective(args.config.as_ref())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (mut out, mut is_empty) = (anstream::stdout().lock(), true);
    for numbered_line in read_calls(args) {
        let (place, line) = numbered_line?;
        if !line.trim().is_empty() {
            is_empty = false;
            print_decision(
                &mut out,
                &harness,
                &runtime,
                (place.as_str(), line.as_str()),
                args.explain,
                args.json,
            )?;
        }
    }
    if is_empty {
        return Err(io::Error::other(
            "no calls given, so nothing was checked; a call is like {\"tool\": \"…\", \"arguments\": {…}}",
        ));
    }
    Ok(ExitCode::SUCCESS)
}

/// Decides a call and prints the decision, with an explanation if `explains` is true.
pub(super) fn print_decision(
    out: &mut impl Write,
    harness: &CheckHarness,
    runtime: &Runtime,
    (place, line): (&str, &str),
    explains: bool,
    json: bool,
) -> io::Result<()> {
    let with_place = |why: String| io::Error::other(format!("{place}: {why}"));
    let call = parse_call(line).map_err(with_place)?;
    let agent = harness.resolve_agent(call.agent.as_ref()).map_err(with_place)?;
    let undeclared = harness.with_undeclared_tool(&agent, &call.tool)?;
    let harness = undeclared.as_ref().unwrap_or(harness);
    let explained =
        if explains { Some(runtime.block_on(explain(&harness.gate, &agent, &call))) } else { None };
    let answer = runtime.block_on(harness.decide(&agent, &call));
    let verdict = decision_of(&answer);
    if json {
        let mut output = json!(verdict);
        if let (Some(explained), Some(output)) = (explained, output.as_object_mut()) {
            output.insert("explanation".to_owned(), json!(explained));
        }
        return writeln!(out, "{output}");
    }
    print_check(out, &call, &answer, &verdict)?;
    match explained {
        Some(explained) => print_steps(out, &explained),
        None => Ok(()),
    }
}

/// Prints the results of gates and rules.
pub(super) fn print_steps(out: &mut impl Write, explanation: &Explanation) -> io::Result<()> {
    let mut text = String::new();
    for line in explanation.format_steps().lines() {
        let line = format!("    {}", sanitize(line));
        text.push_str(line.trim_end());
        text.push('\n');
    }
    writeln!(out, "{DIM}{text}{DIM:#}")
}

/// Returns the given calls with their positions.
fn read_calls(args: &Args) -> Box<dyn Iterator<Item = io::Result<(String, String)>> + '_> {
    fn number_lines<'l>(
        lines: impl Iterator<Item = io::Result<String>> + 'l,
        prefix: String,
    ) -> Box<dyn Iterator<Item = io::Result<(String, String)>> + 'l> {
        Box::new(lines.enumerate().map(move |(number, line)| -> io::Result<(String, String)> {
            let place = format!("{prefix}line {}", number + 1);
            let line =
                line.map_err(|error| io::Error::new(error.kind(), format!("{place}: {error}")))?;
            // Some programs begin a file with a byte order mark.
            Ok((
                place,
                if number == 0 { line.trim_start_matches('\u{feff}').to_owned() } else { line },
            ))
        }))
    }
    if args.calls.is_empty() {
        // Otherwise the user does not see that the command waits for input.
        if io::stdin().is_terminal() {
            crate::print_note(
                "type one call per line, like {\"tool\": \"…\", \"arguments\": {…}}; end with Ctrl-D",
            );
        }
        return number_lines(io::stdin().lock().lines(), String::new());
    }
    let open_argument = |argument: &String| {
        if argument.trim_start().starts_with('{') {
            return number_lines(std::iter::once(Ok(argument.clone())), String::new());
        }
        match std::fs::File::open(argument) {
            Ok(file) if !Path::new(argument).is_dir() => {
                number_lines(io::BufReader::new(file).lines(), format!("{argument}, "))
            }
            Ok(_) => Box::new(std::iter::once(Err(io::Error::other(format!(
                "{argument}: is a directory; name a file"
            ))))),
            Err(error) => Box::new(std::iter::once(Err(io::Error::new(
                error.kind(),
                format!("{argument}: {error}"),
            )))),
        }
    };
    Box::new(args.calls.iter().flat_map(open_argument))
}

/// Parses a line. Arguments stay text, so that the pipeline detects duplicate keys.
fn parse_call(line: &str) -> Result<CallToCheck, String> {
    let mut call: CallToCheck = serde_json::from_str(line).map_err(|e| {
        let hint = if e.is_eof() { "write one object per line, like" } else { "like" };
        format!("not a call: {e}; {hint} {{\"tool\": \"…\", \"arguments\": {{…}}}}")
    })?;
    // The name may be a client's name for the tool.
    if !toolgate::tool::name::is_tool_name(&call.tool) {
        call.tool = toolgate::tool::name::tool_name_from_client(&call.tool);
    }
    Ok(call)
}

impl CallToCheck {
    fn arguments(&self) -> String {
        self.arguments.as_ref().map_or_else(|| "{}".to_owned(), |text| text.get().to_owned())
    }

    fn session(&self, gate: &Toolgate, agent: &str) -> toolgate::Session {
        gate.session(
            agent,
            self.principal.as_deref().unwrap_or("anybody"),
            self.session.as_deref().unwrap_or("check"),
        )
    }
}

async fn explain(gate: &Toolgate, agent: &str, call: &CallToCheck) -> Explanation {
    call.session(gate, agent).explain(&call.tool, call.arguments()).await
}

async fn decide(
    gate: &Toolgate,
    script: &ScriptedHandler,
    agent: &str,
    call: &CallToCheck,
    is_run_by_client: bool,
) -> Answer {
    let session = call.session(gate, agent);
    if is_run_by_client {
        return match session.admit(&call.tool, call.arguments()).await {
            Ok(deferred) => {
                session.report(&deferred, call.result.clone().ok_or_else(no_result_failure)).await
            }
            Err(answer) => answer,
        };
    }
    *script.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = call.result.clone();
    session.call(&call.tool, call.arguments()).await
}

/// The decision about a call. An error after the tool was allowed does not count.
#[derive(serde::Serialize)]
struct CheckDecision<'a> {
    decision: &'static str,
    gate: Gate,
    rule: Option<&'a str>,
    error: Option<&'a ToolError>,
}

fn decision_of(answer: &Answer) -> CheckDecision<'_> {
    let error = answer.outcome.error().filter(|_| answer.gate < Gate::Run);
    let decision = match error {
        None => "allow",
        Some(error) if error.approval.is_some() => "ask",
        Some(_) => "deny",
    };
    CheckDecision {
        decision,
        gate: answer.gate,
        rule: answer.rule.as_deref().filter(|_| error.is_some()),
        error,
    }
}

fn print_check(
    out: &mut impl Write,
    call: &CallToCheck,
    answer: &Answer,
    decision: &CheckDecision<'_>,
) -> io::Result<()> {
    let (style, word) = match decision.decision {
        "allow" => (GREEN, "allow"),
        "ask" => (YELLOW, "ask"),
        _ => (RED, "deny"),
    };
    let rule = decision.rule.map(|rule| format!(" · {}", sanitize(rule))).unwrap_or_default();
    let gate_text = if word == "allow" {
        String::new()
    } else {
        format!(" {DIM}at{DIM:#} {}{rule}", answer.gate)
    };
    writeln!(
        out,
        "{style}{word:<5}{style:#} {BOLD}{}{BOLD:#} {}{gate_text}",
        sanitize(&call.tool),
        sanitize(&call.arguments())
    )?;
    if let Some(error) = answer.outcome.error().filter(|_| word != "allow") {
        print_error(out, error)?;
    }
    // Report a result that does not match the schema: in a real call it would be withheld.
    if let Some(error) =
        answer.outcome.error().filter(|error| word == "allow" && error.code != NO_RESULT_CODE)
    {
        writeln!(
            out,
            "      {YELLOW}its result{YELLOW:#} {}: {}",
            error.code,
            sanitize(&error.message)
        )?;
    }
    Ok(())
}

/// Prints an error and the next step.
pub(super) fn print_error(out: &mut impl Write, error: &ToolError) -> io::Result<()> {
    writeln!(out, "      {} {}: {}", error.category, error.code, sanitize(&error.message))?;
    match &error.next {
        Some(next) => writeln!(
            out,
            "      {DIM}next{DIM:#} {} {}",
            next.tool,
            sanitize(&next.arguments.to_string())
        ),
        None => Ok(()),
    }
}
