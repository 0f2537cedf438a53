//! `toolgate check`: calls against a configuration, without running anything and without touching live state.

use std::collections::BTreeSet;
use std::io::{self, BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use toolgate::config::{Config, ConfigError, Otherwise, PolicyTest, TestCall, read_tests};
use toolgate::policy::Problem;
use toolgate::{Agent, Answer, Ctx, Effects, Explanation, Failure, Gate, Handler, Judged, Permit, ToolError, Toolgate};

use super::ledger::{BOLD, DIM, GREEN, RED, Unheard, YELLOW, clean, counted};
use crate::place::{self, InForce, State};
use crate::protected::Protected;

/// Try calls against a configuration: what would become of each, and why. No tool runs, and nothing live is touched.
///
/// Calls are given as words, in files, or on standard input, one JSON object a line: {"tool", "arguments", "session"?, "principal"?,
/// "agent"?, "result"?}. They are one history: limits and repetition count from one to the next. A `result` is taken as what the tool
/// returned, so that evidence builds up; a call without one is taken to have happened and to have proved nothing.
#[derive(clap::Args)]
#[command(
    after_help = "Exit code: 0 if every line was a call, whatever became of it, or all tests passed; 1 if a test failed; 2 if the configuration does not load, a line is no call, or there is no call or test at all.\n\nExamples:\n  toolgate check '{\"tool\": \"issue_refund\", \"arguments\": {\"amount\": 600}}'\n  toolgate check --config toolgate.toml --explain calls.jsonl\n  toolgate check --config toolgate.toml --json < calls.jsonl\n  toolgate check --config toolgate.toml --tests tests.toml"
)]
pub(crate) struct Args {
    /// Calls, each a JSON object, or files of calls; standard input unless said.
    #[arg(value_name = "CALL|FILE", conflicts_with = "tests")]
    calls: Vec<String>,
    /// The configuration alone; without it, all that a call meets here.
    #[arg(long, value_name = "FILE", env = "TOOLGATE_CONFIG")]
    config: Option<PathBuf>,
    /// One JSON object a line: {"decision", "gate", "rule", "error"}.
    #[arg(long)]
    json: bool,
    /// Every gate and every rule, with the values that decide.
    #[arg(long)]
    explain: bool,
    /// Run the tests of a file instead: given these calls, what becomes of this one? Again for several files.
    #[arg(long, value_name = "FILE", conflicts_with = "explain")]
    tests: Vec<PathBuf>,
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

/// The agents of a configuration, with a script behind them and nothing that came before.
pub(super) struct Desk {
    gate: Toolgate,
    script: Arc<Script>,
    names: Vec<String>,
    /// Agents and tools that their clients run.
    external: Vec<(String, String)>,
    /// Rules that could decide.
    rules: Vec<String>,
    /// What would be in force here, where that is asked.
    in_force: Option<Arc<(InForce, State)>>,
}

impl Desk {
    /// A configuration by itself.
    fn open(config: Option<&PathBuf>) -> io::Result<Self> {
        let path = place::here(config)?;
        Self::of(place::with_known(Config::load(&path)?, &path)?)
    }

    /// The configuration that is given; else all that a call meets here.
    pub(super) fn open_here(config: Option<&PathBuf>) -> io::Result<Self> {
        if config.is_some() {
            return Self::open(config);
        }
        // Without a home there is nothing of the user's own, and no state.
        let Ok(state) = State::unopened() else { return Self::open(None) };
        let found = InForce::tried(&state)?;
        Self::with_built_in(Arc::new((found, state)), None)
    }

    /// With the rules that are built in, and perhaps a tool of an agent that no file declares.
    fn with_built_in(in_force: Arc<(InForce, State)>, undeclared: Option<(&str, &str)>) -> io::Result<Self> {
        let (found, state) = &*in_force;
        // What does not load is told as it stands.
        if found.config.sound().is_err() {
            return Self::of(found.config.clone());
        }
        // Who tries it may stand further down in the project than its agent.
        let here = place::project()?;
        let project = place::of_project(&here).and_then(|file| Some(file.parent()?.to_owned())).unwrap_or(here);
        let protected = Protected::of(found, state, &project);
        let config = match undeclared {
            Some((agent, tool)) => found.config.clone().with_undeclared(agent, &[tool]),
            None => found.config.clone(),
        };
        // As the door would have it that the tools are behind: a hook, or the gateway.
        let config = config.with_policies("(built in)", |tools| {
            let is_served = tools.iter().any(|tool| !tool.is_run_by_client());
            protected.rules(tools, is_served.then_some(project.as_path()))
        });
        let desk = Self::of(config)?;
        Ok(Self { in_force: Some(in_force), ..desk })
    }

    /// The desk for a tool that no file declares, where a person is asked about such.
    fn for_undeclared(&self, agent: &str, tool: &str) -> io::Result<Option<Self>> {
        let lacks = !tool.is_empty() && self.gate.agent(agent).is_some_and(|agent| agent.tools().all(|spec| spec.name() != tool));
        match &self.in_force {
            Some(here) if lacks && here.0.config.client.undeclared == Otherwise::Ask => {
                Self::with_built_in(Arc::clone(here), Some((agent, tool))).map(Some)
            }
            _ => Ok(None),
        }
    }

    fn of(config: Config) -> io::Result<Self> {
        let script = Arc::new(Script::default());
        let handler: Arc<dyn Handler> = script.clone();
        let agents = config.agents(Some(&handler)).map_err(|error| {
            let problems = error.render(io::stderr().is_terminal());
            io::Error::other(format!("the configuration does not load\n\n{problems}"))
        })?;
        let names: Vec<String> = agents.iter().map(|agent| agent.name().to_owned()).collect();
        let rules = agents.iter().flat_map(|agent| agent.enforced_rules().map(str::to_owned)).collect();
        let run_by_client = |agent: &Agent| {
            let name = agent.name().to_owned();
            agent.tools().filter(|tool| tool.is_run_by_client()).map(|tool| (name.clone(), tool.name().to_owned())).collect::<Vec<_>>()
        };
        let external = agents.iter().flat_map(run_by_client).collect();
        let gate = agents.into_iter().fold(Toolgate::builder(), toolgate::ToolgateBuilder::agent).build()?;
        Ok(Self { gate, script, names, external, rules, in_force: None })
    }

    /// The agent that a call is for.
    fn agent(&self, wanted: Option<&String>) -> Result<String, String> {
        match (wanted, self.names.as_slice()) {
            (Some(agent), _) => Ok(agent.clone()),
            (None, [one]) => Ok(one.clone()),
            (None, several) => Err(format!("the configuration has several agents; say which `agent`: {}", several.join(", "))),
        }
    }

    async fn decide(&self, agent: &str, tried: &Tried) -> Answer {
        let by_client = self.external.iter().any(|(of, tool)| *of == agent && *tool == tried.tool);
        decide(&self.gate, &self.script, agent, tried, by_client).await
    }
}

pub(crate) fn run(args: &Args) -> io::Result<ExitCode> {
    if !args.tests.is_empty() {
        return run_tests(args);
    }
    let desk = Desk::open_here(args.config.as_ref())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (mut out, mut is_empty) = (anstream::stdout().lock(), true);
    for given in calls(args) {
        let (place, line) = given?;
        if !line.trim().is_empty() {
            is_empty = false;
            tell(&mut out, &desk, &runtime, (place.as_str(), line.as_str()), args.explain, args.json)?;
        }
    }
    if is_empty {
        return Err(io::Error::other("no call is given, so nothing was checked; one is like {\"tool\": \"…\", \"arguments\": {…}}"));
    }
    Ok(ExitCode::SUCCESS)
}

/// Tries a call that stands somewhere, and says what becomes of it; also why, where that is wanted.
pub(super) fn tell(
    out: &mut impl Write,
    desk: &Desk,
    runtime: &Runtime,
    (place, line): (&str, &str),
    explains: bool,
    json: bool,
) -> io::Result<()> {
    let placed = |why: String| io::Error::other(format!("{place}: {why}"));
    let tried = read(line).map_err(placed)?;
    let agent = desk.agent(tried.agent.as_ref()).map_err(placed)?;
    let undeclared = desk.for_undeclared(&agent, &tried.tool)?;
    let desk = undeclared.as_ref().unwrap_or(desk);
    let explained = if explains { Some(runtime.block_on(explain(&desk.gate, &agent, &tried))) } else { None };
    let answer = runtime.block_on(desk.decide(&agent, &tried));
    let verdict = verdict(&answer);
    if json {
        let mut told = json!(verdict);
        if let (Some(explained), Some(told)) = (explained, told.as_object_mut()) {
            told.insert("explanation".to_owned(), json!(explained));
        }
        return writeln!(out, "{told}");
    }
    show(out, &tried, &answer, &verdict)?;
    match explained {
        Some(explained) => steps(out, &explained),
        None => Ok(()),
    }
}

/// Gates and rules, under what they came to.
pub(super) fn steps(out: &mut impl Write, why: &Explanation) -> io::Result<()> {
    let mut text = String::new();
    for line in why.steps().lines() {
        let line = format!("    {}", clean(line));
        text.push_str(line.trim_end());
        text.push('\n');
    }
    writeln!(out, "{DIM}{text}{DIM:#}")
}

/// The calls that are given, and where each stands.
fn calls(args: &Args) -> Box<dyn Iterator<Item = io::Result<(String, String)>> + '_> {
    fn numbered<'l>(
        lines: impl Iterator<Item = io::Result<String>> + 'l,
        of: String,
    ) -> Box<dyn Iterator<Item = io::Result<(String, String)>> + 'l> {
        Box::new(lines.enumerate().map(move |(number, line)| -> io::Result<(String, String)> {
            let place = format!("{of}line {}", number + 1);
            let line = line.map_err(|error| io::Error::new(error.kind(), format!("{place}: {error}")))?;
            // Some programs begin a file with a mark.
            Ok((place, if number == 0 { line.trim_start_matches('\u{feff}').to_owned() } else { line }))
        }))
    }
    if args.calls.is_empty() {
        // Whoever sits there does not know that they are waited for.
        if io::stdin().is_terminal() {
            crate::note("type calls, one a line, like {\"tool\": \"…\", \"arguments\": {…}}; Ctrl-D ends them");
        }
        return numbered(io::stdin().lock().lines(), String::new());
    }
    let one = |given: &String| {
        if given.trim_start().starts_with('{') {
            return numbered(std::iter::once(Ok(given.clone())), String::new());
        }
        match std::fs::File::open(given) {
            Ok(file) if !Path::new(given).is_dir() => numbered(io::BufReader::new(file).lines(), format!("{given}, ")),
            Ok(_) => Box::new(std::iter::once(Err(io::Error::other(format!("{given}: it is a directory; name a file"))))),
            Err(error) => Box::new(std::iter::once(Err(io::Error::new(error.kind(), format!("{given}: {error}"))))),
        }
    };
    Box::new(args.calls.iter().flat_map(one))
}

/// A line as it is written: arguments stay the text they are, so that two keys of one name are seen.
fn read(line: &str) -> Result<Tried, String> {
    let mut tried: Tried = serde_json::from_str(line).map_err(|e| {
        let how = if e.is_eof() { "write one object a line, like" } else { "like" };
        format!("this is no call: {e}; {how} {{\"tool\": \"…\", \"arguments\": {{…}}}}")
    })?;
    // As a client may call it.
    if !toolgate::names::is_tool_name(&tried.tool) {
        tried.tool = toolgate::names::of_client(&tried.tool);
    }
    Ok(tried)
}

impl Tried {
    fn arguments(&self) -> String {
        self.arguments.as_ref().map_or_else(|| "{}".to_owned(), |text| text.get().to_owned())
    }

    fn session(&self, gate: &Toolgate, agent: &str) -> toolgate::Session {
        gate.session(agent, self.principal.as_deref().unwrap_or("anybody"), self.session.as_deref().unwrap_or("check"))
    }
}

async fn explain(gate: &Toolgate, agent: &str, tried: &Tried) -> Explanation {
    tried.session(gate, agent).explain(&tried.tool, tried.arguments()).await
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
#[derive(serde::Serialize)]
struct Verdict<'a> {
    decision: &'static str,
    gate: Gate,
    rule: Option<&'a str>,
    error: Option<&'a ToolError>,
}

fn verdict(answer: &Answer) -> Verdict<'_> {
    let error = answer.outcome.error().filter(|_| answer.gate < Gate::Run);
    let decision = match error {
        None => "allow",
        Some(error) if error.approval.is_some() => "ask",
        Some(_) => "deny",
    };
    Verdict { decision, gate: answer.gate, rule: answer.rule.as_deref().filter(|_| error.is_some()), error }
}

fn show(out: &mut impl Write, tried: &Tried, answer: &Answer, verdict: &Verdict<'_>) -> io::Result<()> {
    let (style, word) = match verdict.decision {
        "allow" => (GREEN, "allow"),
        "ask" => (YELLOW, "ask"),
        _ => (RED, "deny"),
    };
    let rule = verdict.rule.map(|rule| format!(" · {}", clean(rule))).unwrap_or_default();
    let place = if word == "allow" { String::new() } else { format!(" {DIM}at{DIM:#} {}{rule}", answer.gate) };
    writeln!(out, "{style}{word:<5}{style:#} {BOLD}{}{BOLD:#} {}{place}", clean(&tried.tool), clean(&tried.arguments()))?;
    if let Some(error) = answer.outcome.error().filter(|_| word != "allow") {
        told(out, error)?;
    }
    // A result that does not fit is worth a word: in earnest it would be withheld.
    if let Some(error) = answer.outcome.error().filter(|error| word == "allow" && error.code != UNSAID) {
        writeln!(out, "      {YELLOW}its result{YELLOW:#} {}: {}", error.code, clean(&error.message))?;
    }
    Ok(())
}

/// What is wrong, and what to do next.
pub(super) fn told(out: &mut impl Write, error: &ToolError) -> io::Result<()> {
    writeln!(out, "      {} {}: {}", error.category, error.code, clean(&error.message))?;
    match &error.next {
        Some(next) => writeln!(out, "      {DIM}next{DIM:#} {} {}", next.tool, clean(&next.arguments.to_string())),
        None => Ok(()),
    }
}

/// What a test came to.
fn failure(test: &PolicyTest, answer: &Answer) -> Option<String> {
    let told = verdict(answer);
    let (decision, rule, code) = (told.decision, told.rule, told.error.map(|error| &*error.code));
    let expect = &test.expect;
    let differs = decision != expect.decision
        || expect.rule.as_deref().is_some_and(|wanted| Some(wanted) != rule)
        || expect.code.as_deref().is_some_and(|wanted| Some(wanted) != code);
    let by = |rule: Option<&str>, code: Option<&str>| match (rule, code) {
        (Some(rule), Some(code)) => format!(" by `{rule}` ({code})"),
        (Some(rule), None) => format!(" by `{rule}`"),
        (None, Some(code)) => format!(" ({code})"),
        (None, None) => String::new(),
    };
    let wanted = format!("{}{}", expect.decision, by(expect.rule.as_deref(), expect.code.as_deref()));
    if differs {
        return Some(format!("expected {wanted}, and it is {}{}", decision, by(rule, code)));
    }
    // A call that is misspelt is refused whatever the rules say.
    let error = told.error.filter(|_| told.gate <= Gate::Validate && expect.code.is_none())?;
    Some(format!(
        "it is refused before any rule is asked: {}: {}; if that is meant, say `code = \"{}\"`",
        error.code,
        error.message.trim_end_matches('.'),
        error.code
    ))
}

/// What is wrong with a call that was to come first.
fn given_otherwise(number: usize, call: &TestCall, answer: &Answer) -> Option<String> {
    let error = answer.outcome.error();
    let why = error.map(|error| format!("{}: {}", error.code, error.message.trim_end_matches('.'))).unwrap_or_default();
    match (verdict(answer).decision == "allow", call.refused) {
        (true, true) => Some(format!("call {number} of `given` is let through, and says `refused = true`")),
        (false, false) => Some(format!("call {number} of `given` is refused: {why}; if that is meant, say `refused = true` there")),
        // Such a result proves nothing, in earnest neither.
        (true, false) if call.result.is_some() && error.is_some() => {
            Some(format!("the result of call {number} of `given` does not count: {why}"))
        }
        _ => None,
    }
}

impl From<&TestCall> for Tried {
    fn from(call: &TestCall) -> Self {
        Self {
            tool: call.tool.clone(),
            arguments: serde_json::value::to_raw_value(&call.arguments).ok(),
            session: call.session.clone(),
            principal: call.principal.clone(),
            agent: call.agent.clone(),
            result: call.result.clone(),
        }
    }
}

/// Each test begins anew: nothing that another did counts.
fn run_tests(args: &Args) -> io::Result<ExitCode> {
    let colours = io::stdout().is_terminal();
    let (mut passed, mut failed, mut spoke) = (0_u64, 0_u64, BTreeSet::new());
    let mut rules: BTreeSet<String> = BTreeSet::new();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut out = Unheard(anstream::stdout().lock());
    for path in &args.tests {
        let text = std::fs::read_to_string(path).map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))?;
        let tests = read_tests(&path.display().to_string(), &text).map_err(|error| {
            io::Error::other(format!(
                "the tests cannot be read

{}",
                error.render(io::stderr().is_terminal())
            ))
        })?;
        for test in &tests {
            let desk = Desk::open(args.config.as_ref())?;
            rules.extend(desk.rules.iter().cloned());
            let (mut last, mut broken) = (None, None);
            for (number, call) in test.given.iter().chain([&test.call]).enumerate() {
                let agent = desk.agent(call.agent.as_ref()).map_err(|why| io::Error::other(format!("test `{}`: {why}", test.name)))?;
                let answer = runtime.block_on(desk.decide(&agent, &Tried::from(call)));
                let told = verdict(&answer);
                spoke.extend(told.rule.map(str::to_owned));
                // A test that stands on something else than it says would hold for the wrong reason.
                if number < test.given.len() {
                    broken = broken.or_else(|| given_otherwise(number + 1, call, &answer));
                }
                last = Some(answer);
            }
            let Some(why) = broken.or_else(|| last.as_ref().and_then(|answer| failure(test, answer))) else {
                passed += 1;
                continue;
            };
            failed += 1;
            if args.json {
                writeln!(out, "{}", json!({ "test": test.name, "failed": why, "file": &*test.place.file }))?;
            } else {
                let problem = Problem { place: Some(test.place.clone()), ..Problem::new(format!("test `{}`: {why}", test.name)) };
                writeln!(out, "{}\n", ConfigError { problems: vec![problem] }.render(colours))?;
            }
        }
    }
    if passed + failed == 0 {
        return Err(io::Error::other("there is no test in it, so nothing was checked; one begins with `[[test]]`"));
    }
    let silent: Vec<&String> = rules.difference(&spoke).collect();
    if args.json {
        writeln!(out, "{}", json!({ "summary": { "passed": passed, "failed": failed, "rules": rules.len(), "never_spoke": silent } }))?;
    } else {
        let style = if failed == 0 { GREEN } else { RED };
        writeln!(
            out,
            "{style}{} passed, {failed} failed{style:#}; {} of {} refused or asked at least once",
            counted(passed, "test"),
            rules.len() - silent.len(),
            counted(rules.len() as u64, "rule")
        )?;
        if !silent.is_empty() {
            writeln!(out, "{YELLOW}never heard{YELLOW:#}: {}", silent.iter().map(|rule| clean(rule)).collect::<Vec<_>>().join(", "))?;
        }
    }
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
