//! Implements `toolgate backtest`: decides recorded calls by a changed configuration.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use jiff::SignedDuration;
use serde_json::json;
use toolgate::{
    Agent, AgentDefinition, Backtest, DecisionChange, ReplayComparison, Row, Timestamp, ToolSpec,
};
use toolgate_config::{Config, FallbackDecision};
use toolgate_json::Digest;
use toolgate_store::{Ledger, LedgerEntry, LedgerReader, RowFilter};

use crate::command::common::{
    BOLD, DIM, GREEN, IgnoreBrokenPipe, RED, YELLOW, format_count, format_time, ledger_path,
    open_ledger, parse_end_time, parse_time, progress_bar, sanitize,
};

/// Test a changed configuration on recorded calls, and list changed decisions.
///
/// Calls run in their recorded order, by their recorded clock. A warm-up runs earlier calls, as
/// far back as a rule looks. Results are the recorded ones; no tool runs. After the first changed
/// effect in a session, later calls might not have come at all: they are marked as counterfactual.
#[derive(clap::Args)]
#[command(
    after_help = "Exit code: 0 if no decision would change, 1 if one would, 2 on an error.\n\nExamples:\n  toolgate backtest --store ledger.db --config policy.toml\n  toolgate backtest --store ledger.db --config policy.toml --since 30d --json"
)]
pub(crate) struct Args {
    /// Configuration to test, or policy files for the recorded tools and limits.
    #[arg(long, value_name = "FILE", required = true)]
    config: Vec<PathBuf>,
    /// Agent, if the ledger has several.
    #[arg(long)]
    agent: Option<String>,
    /// Start of the period: a time, or how long ago.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    since: Option<Timestamp>,
    /// End of the period: a time, or how long ago; a day counts to its end.
    #[arg(long, value_name = "TIME", value_parser = parse_end_time)]
    until: Option<Timestamp>,
    /// Print one JSON object per line.
    #[arg(long)]
    json: bool,
}

#[derive(Default)]
struct BacktestTotals {
    calls: u64,
    same: u64,
    changed: u64,
    counterfactual: u64,
    undecidable: u64,
    circumstance: u64,
    /// Why calls were undecidable.
    undecidable_reasons: BTreeMap<String, u64>,
}

pub(crate) fn run(args: &Args, store: Option<&Path>) -> io::Result<ExitCode> {
    let ledger = open_ledger(store)?;
    let name = resolve_agent_name(&*ledger, args.agent.as_deref(), &args.config)?;
    let candidate = CandidateConfig::load(&args.config, &name)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let totals =
        runtime.block_on(run_backtest(ledger_path(store)?, &*ledger, &name, candidate, args))?;
    let mut out = IgnoreBrokenPipe(anstream::stdout().lock());
    if args.json {
        writeln!(
            out,
            "{}",
            json!({ "summary": { "calls": totals.calls, "same": totals.same, "changed": totals.changed, "counterfactual": totals.counterfactual,
                "undecidable": totals.undecidable, "circumstance": totals.circumstance } })
        )?;
    } else {
        for (why, count) in &totals.undecidable_reasons {
            writeln!(
                out,
                "{YELLOW}{} undecidable{YELLOW:#}: {}",
                format_count(*count, "call"),
                sanitize(why)
            )?;
        }
        let style = if totals.changed == 0 { GREEN } else { RED };
        let mut parts = vec![
            format!("{} would be decided the same", totals.same),
            format!("{style}{} differently{style:#}", totals.changed),
        ];
        if totals.counterfactual > 0 {
            parts.push(format!("{} of these counterfactual", totals.counterfactual));
        }
        if totals.undecidable > 0 {
            parts.push(format!("{} undecidable", totals.undecidable));
        }
        if totals.circumstance > 0 {
            parts.push(format!(
                "{} not decided again (a pause, a lock or a timeout decided)",
                totals.circumstance
            ));
        }
        let gap = if totals.changed > 0 { "\n" } else { "" };
        writeln!(
            out,
            "{gap}{BOLD}{}{BOLD:#}: {}",
            format_count(totals.calls, "call"),
            parts.join(", ")
        )?;
    }
    Ok(if totals.changed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn resolve_agent_name(
    ledger: &dyn LedgerReader,
    requested: Option<&str>,
    files: &[PathBuf],
) -> io::Result<String> {
    if let Some(name) = requested {
        return Ok(name.to_owned());
    }
    let mut names: Vec<String> = ledger
        .sessions(None)
        .map_err(io::Error::other)?
        .into_iter()
        .map(|key| key.agent.to_string())
        .collect();
    names.sort();
    names.dedup();
    names.retain(|name| name != toolgate_mcp::CANARY);
    if names.len() > 1 {
        // Calls of unknown agents have rows, too. Keep only agents with a configuration.
        let mut configured = Vec::new();
        for name in names {
            let configs = ledger.config_digests(&name, None, None).map_err(io::Error::other)?;
            configured
                .extend(configs.iter().any(|config| *config != Digest::default()).then_some(name));
        }
        names = configured;
    }
    // A complete configuration with one agent selects this agent.
    if let [file] = files
        && let config = Config::parse(&file.display().to_string(), &read_file(file)?)
        && config.has_tools()
        && let [only_name] = config.agent_names().collect::<Vec<_>>().as_slice()
        && names.iter().any(|name| name == only_name)
    {
        return Ok((*only_name).to_owned());
    }
    match names.as_slice() {
        [only_name] => Ok(only_name.clone()),
        [] => Err(io::Error::other("the ledger is empty")),
        several => Err(io::Error::other(format!(
            "the ledger has several agents; choose one with `--agent`: {}",
            several.join(", ")
        ))),
    }
}

/// The configuration to test.
enum CandidateConfig {
    /// Policy files and the files they include.
    Rules(Vec<(String, String)>),
    /// An agent with its tools and limits.
    Agent(Box<CandidateAgent>),
}

/// An agent of a complete configuration.
struct CandidateAgent {
    /// The configuration, if it asks for approval of undeclared tools.
    asking_config: Option<Config>,
    definition: AgentDefinition,
}

impl CandidateAgent {
    /// Builds the agent for the tools of a recorded agent.
    ///
    /// If the client runs the tools, undeclared ones need approval.
    fn for_recorded_tools(
        &self,
        recorded: &AgentDefinition,
    ) -> Result<AgentDefinition, CandidateError> {
        let is_run_by_client = recorded.tools().all(ToolSpec::is_run_by_client);
        let Some(config) = self.asking_config.as_ref().filter(|_| is_run_by_client) else {
            return Ok(self.definition.clone());
        };
        let tools: Vec<&str> = recorded.tools().map(ToolSpec::name).collect();
        let agents = config
            .clone()
            .with_undeclared_tools(self.definition.agent(), &tools)
            .for_client()
            .build_agents(None);
        let agents = agents.map_err(|error| {
            CandidateError::InvalidRules(error.render(io::stderr().is_terminal()))
        })?;
        let agent = agents
            .iter()
            .find(|agent| agent.name() == self.definition.agent())
            .ok_or(CandidateError::UnknownAgent)?;
        AgentDefinition::parse(agent.definition()).map_err(|_| CandidateError::UnknownAgent)
    }
}

impl CandidateConfig {
    fn load(files: &[PathBuf], name: &str) -> io::Result<Self> {
        let colours = io::stderr().is_terminal();
        let invalid_config =
            |why: String| io::Error::other(format!("the configuration does not load\n\n{why}"));
        let mut texts = Vec::new();
        for file in files {
            let text = read_file(file)?;
            let config = Config::parse(&file.display().to_string(), &text);
            let included = config.included_files().to_vec();
            let config = if files.len() == 1 {
                toolgate_hook::effective_config::merge_under_user_config(config, file)?
            } else {
                config
            };
            if let Err(error) = config.check() {
                return Err(invalid_config(error.render(colours)));
            }
            if !config.has_only_rules() {
                let problem = match (config.has_tools(), files.len()) {
                    (true, 1) => None,
                    (true, _) => Some("declares tools; pass it alone, or only policy files"),
                    (false, _) => Some(
                        "has more than rules, but no tools; pass a complete configuration, or only rules",
                    ),
                };
                if let Some(why) = problem {
                    return Err(io::Error::other(format!("{} {why}", file.display())));
                }
                let asking_config =
                    (config.client.undeclared == FallbackDecision::Ask).then(|| config.clone());
                // Include the known tools of upstreams.
                let config = toolgate_hook::effective_config::with_pinned_tools(config, file)?;
                let agents = config
                    .build_agents(None)
                    .map_err(|error| invalid_config(error.render(colours)))?;
                let names: Vec<&str> = agents.iter().map(Agent::name).collect();
                let agent = agents.iter().find(|agent| agent.name() == name).ok_or_else(|| {
                    io::Error::other(format!(
                        "{} has no agent `{name}`, which made the recorded calls; it has {}",
                        file.display(),
                        names.join(", ")
                    ))
                })?;
                let definition = AgentDefinition::parse(agent.definition())?;
                return Ok(Self::Agent(Box::new(CandidateAgent { asking_config, definition })));
            }
            texts.push((file.display().to_string(), text));
            for file in included {
                texts.push((file.display().to_string(), read_file(&file)?));
            }
        }
        Ok(Self::Rules(texts))
    }

    fn apply_to(&self, recorded: AgentDefinition) -> Result<AgentDefinition, CandidateError> {
        match self {
            Self::Rules(files) => Ok(recorded.with_policies(files.iter().cloned())),
            Self::Agent(candidate) => candidate
                .for_recorded_tools(&recorded)
                .map(|definition| recorded.with_update(definition)),
        }
    }
}

fn read_file(file: &Path) -> io::Result<String> {
    std::fs::read_to_string(file)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", file.display())))
}

/// Builds an agent as recorded, and with the new configuration.
fn build_agents(
    ledger: &dyn LedgerReader,
    config: Digest,
    candidate: &CandidateConfig,
) -> Result<(Agent, Agent), CandidateError> {
    let text = ledger.definition(config).ok().flatten().ok_or(CandidateError::UnknownAgent)?;
    let definition = AgentDefinition::parse(&text).map_err(|_| CandidateError::UnknownAgent)?;
    let recorded = definition.clone().build().map_err(|_| CandidateError::UnknownAgent)?;
    let tested = candidate
        .apply_to(definition)?
        .build()
        .map_err(|error| CandidateError::InvalidRules(error.render(io::stderr().is_terminal())))?;
    Ok((recorded, tested))
}

/// Returns how far back the recorded and the new rules look; `None` means to the first row.
fn lookback_window(
    ledger: &dyn LedgerReader,
    name: &str,
    candidate: &CandidateConfig,
    args: &Args,
) -> io::Result<Option<SignedDuration>> {
    let mut longest = SignedDuration::ZERO;
    for config in ledger.config_digests(name, args.since, args.until).map_err(io::Error::other)? {
        let Ok((recorded, tested)) = build_agents(ledger, config, candidate) else { continue };
        match (recorded.lookback_window(), tested.lookback_window()) {
            (Some(recorded), Some(tested)) => longest = longest.max(recorded).max(tested),
            _ => return Ok(None),
        }
    }
    Ok(Some(longest))
}

/// Why a configuration cannot be tested.
enum CandidateError {
    UnknownAgent,
    InvalidRules(String),
}

async fn run_backtest(
    path: &Path,
    ledger: &dyn LedgerReader,
    name: &str,
    candidate: CandidateConfig,
    args: &Args,
) -> io::Result<BacktestTotals> {
    // If the rules do not load with the newest recorded configuration, report an error instead of
    // undecidable calls. Rows of rejected calls have no configuration.
    let newest =
        RowFilter { agent: Some(name.to_owned()), newest_first: true, ..RowFilter::default() };
    let mut config = None;
    let mut read_config = |entry: LedgerEntry| {
        config = Some(entry.row.config);
        Ok(entry.row.config == Digest::default())
    };
    ledger.query(&newest, &mut read_config).map_err(io::Error::other)?;
    let config = config
        .ok_or_else(|| io::Error::other(format!("the ledger has no calls of an agent `{name}`")))?;
    match build_agents(ledger, config, &candidate) {
        Ok(_) => {}
        Err(CandidateError::InvalidRules(why)) => {
            return Err(io::Error::other(format!("the configuration does not load\n\n{why}")));
        }
        Err(CandidateError::UnknownAgent) => {
            return Err(io::Error::other(format!(
                "the ledger has no configuration of the agent `{name}`"
            )));
        }
    }
    let from = args.since.unwrap_or(Timestamp::MIN);
    let warm_up_start = lookback_window(ledger, name, &candidate, args)?
        .and_then(|window| from.checked_sub(window).ok());
    let rows = ledger.backtest_places(name, warm_up_start, args.until).map_err(io::Error::other)?;
    let first = RowFilter {
        agent: Some(name.to_owned()),
        since: args.since,
        until: args.until,
        limit: Some(1),
        ..RowFilter::default()
    };
    let Some(first) = ledger.find(&first).map_err(io::Error::other)?.first().map(|entry| entry.seq)
    else {
        return Err(io::Error::other("no calls in this period; check `--since` and `--until`"));
    };
    let replay_ledger = Ledger::open(path).map_err(io::Error::other)?;
    let mut backtest =
        Backtest::new(move |config| match build_agents(&replay_ledger, config, &candidate) {
            Ok(agents) => Ok(agents),
            Err(CandidateError::UnknownAgent) => {
                Err("cannot read the recorded configuration".to_owned())
            }
            Err(CandidateError::InvalidRules(_)) => {
                Err("the new rules do not load with the recorded tools".to_owned())
            }
        });
    let bar = progress_bar(2 * rows.len() as u64, "backtesting");
    let (mut totals, mut out) =
        (BacktestTotals::default(), IgnoreBrokenPipe(anstream::stdout().lock()));
    let fetch = |seq| {
        bar.inc(1);
        ledger
            .find_row(seq)
            .map_err(io::Error::other)?
            .ok_or_else(|| io::Error::other(format!("row {seq} is missing")))
    };
    backtest
        .replay_rows(&rows, first, fetch, |row, change| {
            // Calls before the period are warm-up.
            if row.at < from {
                return Ok(());
            }
            totals.calls += 1;
            match &change.now {
                ReplayComparison::Same => totals.same += 1,
                ReplayComparison::Undecidable(why) => {
                    totals.undecidable += 1;
                    *totals.undecidable_reasons.entry(why.clone()).or_default() += 1;
                }
                ReplayComparison::Circumstance(_) => totals.circumstance += 1,
                ReplayComparison::Differs(_) => {
                    totals.changed += 1;
                    totals.counterfactual += u64::from(change.counterfactual);
                }
            }
            if args.json && change.now != ReplayComparison::Same {
                writeln!(out, "{}", json!(change))?;
            } else if !args.json {
                bar.suspend(|| print_change(&mut out, row, &change))?;
            }
            Ok(())
        })
        .await?;
    bar.finish_and_clear();
    Ok(totals)
}

fn print_change(out: &mut impl Write, row: &Row, change: &DecisionChange) -> io::Result<()> {
    let ReplayComparison::Differs(decision) = &change.now else { return Ok(()) };
    let mark = if change.counterfactual {
        format!(" {YELLOW}counterfactual{YELLOW:#}")
    } else {
        String::new()
    };
    writeln!(
        out,
        "{DIM}{}{DIM:#} {BOLD}{}{BOLD:#} {} {DIM}session {} call {}{DIM:#}{mark}",
        format_time(change.at),
        sanitize(&change.tool),
        super::audit::describe_arguments(row),
        sanitize(&change.key.session),
        change.call
    )?;
    writeln!(out, "  was {}", sanitize(&change.was.to_string()))?;
    let message = match decision {
        toolgate::AdmissionDecision::Refused { message, .. } => format!(": {}", sanitize(message)),
        _ => String::new(),
    };
    writeln!(out, "  now {RED}{}{RED:#}{message}", sanitize(&decision.to_string()))
}
