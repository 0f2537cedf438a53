//! Runs the toolgate command line.

mod client_mcp_servers;
mod command;
mod telemetry;

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Parser, Subcommand};
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// A call allocates a few hundred times, on several threads. With an allocator that takes a lock, a
/// busy gateway reaches two thirds of the throughput.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// A deterministic gate for the tool calls of AI agents.
#[derive(Parser)]
#[command(name = "toolgate", version, propagate_version = true, arg_required_else_help = true)]
#[command(
    after_help = "Examples:\n  toolgate demo                            run a refund desk with a script\n  toolgate demo --store ledger.db          the same, and keep the ledger\n  toolgate check --config toolgate.toml    decide calls without running tools\n  toolgate audit query --store ledger.db   show recorded calls\n  toolgate explain CALL --store ledger.db  show the reason for a decision\n  toolgate audit verify --store ledger.db  check the ledger for tampering\n  toolgate init --for claude-code          register hooks with a coding agent\n  toolgate doctor                          check that the gate is active\n  toolgate completions bash                > /etc/bash_completion.d/toolgate\n\nExit codes: 0 success; 1 a finding (a difference, a failed test, an unhealthy gate); 2 an error. `hook` also exits with 2 if it denies a call."
)]
struct Cli {
    /// SQLite file of the ledger [default: `store` of toolgate.toml, else your own].
    #[arg(
        long,
        global = true,
        value_name = "PATH",
        env = "TOOLGATE_STORE",
        value_parser = toolgate_hook::path_parser(),
        help_heading = "Everywhere"
    )]
    store: Option<PathBuf>,
    /// Increase log verbosity (repeatable).
    #[arg(short, long, global = true, action = clap::ArgAction::Count, help_heading = "Everywhere")]
    verbose: u8,
    /// Print only warnings and errors on standard error.
    #[arg(short, long, global = true, conflicts_with = "verbose", help_heading = "Everywhere")]
    quiet: bool,
    #[command(subcommand)]
    verb: CliCommand,
}

#[derive(Subcommand)]
enum CliCommand {
    Demo(command::demo::Args),
    Audit(command::audit::Args),
    Approvals(command::approvals::Args),
    Check(command::check::Args),
    Explain(command::explain::Args),
    Init(command::init::InitArgs),
    Eject(command::init::EjectArgs),
    Trust(command::init::TrustArgs),
    Doctor(command::doctor::Args),
    Hook(toolgate_hook::Args),
    Lint(command::lint::Args),
    Pause(command::pause::PauseArgs),
    Resume(command::pause::ResumeArgs),
    Replay(command::replay::Args),
    Serve(command::serve::Args),
    Token(command::token::Args),
    Upstream(command::upstream::Args),
    Backtest(command::backtest::Args),
    /// Print a JSON Schema of toolgate.toml for editors.
    #[command(after_help = "Examples:\n  toolgate schema > toolgate.schema.json")]
    Schema,
    /// Write the manual pages into a directory.
    #[command(after_help = "Examples:\n  toolgate man /usr/local/share/man/man1")]
    Man {
        /// Directory to write to.
        directory: PathBuf,
    },
    /// Print completions for a shell.
    #[command(after_help = "Examples:\n  toolgate completions zsh > ~/.zfunc/_toolgate")]
    Completions {
        /// Shell to generate completions for.
        shell: clap_complete::Shell,
    },
}

fn main() -> ExitCode {
    // If this process was re-executed as a sandbox helper, this call does not return.
    toolgate_process::sandbox::run_as_helper_if_requested();
    // Before anything is printed: a signal would end the hook, and clients take that for
    // permission.
    if std::env::args_os().any(|word| word == "hook") {
        toolgate_hook::block_limit_signals();
    }
    let mut cli = Cli::try_parse().unwrap_or_else(|error| with_suggestion(error).exit());
    cli.store = toolgate_hook::non_empty_path(cli.store);
    QUIET.store(cli.quiet, Ordering::Relaxed);
    let log_config = LogConfig {
        verbose: cli.verbose > 0,
        reports_upstreams: matches!(cli.verb, CliCommand::Upstream(_) | CliCommand::Doctor(_)),
    };
    // `serve` reads the configuration first, because it may name an OTLP collector.
    // A hook prints errors only, because clients show its standard error to the model.
    let is_one_hook = matches!(&cli.verb, CliCommand::Hook(args) if !args.serve);
    if !is_one_hook && !matches!(cli.verb, CliCommand::Serve(_)) {
        log_config.install(None);
    }
    match run(cli, log_config) {
        Ok(code) => code,
        // The reader closed the pipe, for example `head`.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            toolgate_hook::stderr::print_stderr(&format!("error: {error}"));
            ExitCode::from(2)
        }
    }
}

/// Adds a suggestion to a command-line error for a misplaced word.
///
/// The word is a sub-command without its parent command, or a value without its flag.
fn with_suggestion(mut error: clap::Error) -> clap::Error {
    let word = |kind: ContextKind| match error.get(kind) {
        Some(ContextValue::String(word)) => word.clone(),
        _ => String::new(),
    };
    let command = Cli::command();
    let suggestions: Vec<String> = match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let word = word(ContextKind::InvalidSubcommand);
            let verbs =
                command.get_subcommands().filter(|verb| verb.find_subcommand(&word).is_some());
            verbs.map(|verb| format!("`toolgate {} {word}`", verb.get_name())).collect()
        }
        ErrorKind::UnknownArgument => {
            let word = word(ContextKind::InvalidArg);
            let verb = std::env::args_os().skip(1).find_map(|word| command.find_subcommand(word));
            let takes = |arg: &&clap::Arg| {
                arg.get_action().takes_values()
                    && arg.get_possible_values().iter().any(|value| value.matches(&word, false))
            };
            let flags = verb
                .into_iter()
                .flat_map(|verb| verb.get_arguments())
                .filter(takes)
                .filter_map(clap::Arg::get_long);
            flags.map(|flag| format!("`--{flag} {word}`")).collect()
        }
        _ => Vec::new(),
    };
    if !suggestions.is_empty() {
        // The exact match is better than clap's similarity suggestion.
        error.remove(ContextKind::SuggestedSubcommand);
        let tip = format!("did you mean {}?", suggestions.join(" or "));
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    }
    error
}

/// Whether `--quiet` was given.
static QUIET: AtomicBool = AtomicBool::new(false);

pub(crate) fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// Prints a note to standard error unless `--quiet` was given.
pub(crate) fn print_note(text: &str) {
    if !is_quiet() {
        toolgate_hook::stderr::print_stderr(text);
    }
}

/// Which log messages are printed.
#[derive(Clone, Copy)]
pub(crate) struct LogConfig {
    verbose: bool,
    /// Whether the command reports the state of upstreams in its output.
    reports_upstreams: bool,
}

impl LogConfig {
    /// Sends log messages to standard error, and spans of calls to the collector if there is one.
    pub(crate) fn install(self, telemetry: Option<&telemetry::Telemetry>) {
        let level = if self.verbose { tracing::Level::TRACE } else { tracing::Level::WARN };
        // Libraries may log whole messages, so only their warnings are printed. `rmcp` and
        // `opentelemetry` also log addresses, so they are silenced.
        let filter = Targets::new()
            .with_default(tracing::Level::WARN)
            .with_target("toolgate", level)
            .with_target("rmcp", tracing::level_filters::LevelFilter::OFF)
            .with_target("opentelemetry", tracing::level_filters::LevelFilter::OFF);
        let filter = if self.reports_upstreams && !self.verbose {
            filter.with_target("toolgate_mcp::upstream::supervisor", tracing::Level::ERROR)
        } else {
            filter
        };
        let fmt_layer = tracing_subscriber::fmt::layer()
            .with_writer(io::stderr)
            .with_ansi(false)
            .without_time()
            .with_target(false);
        // A subscriber may already be installed, for example by a test.
        let _ = tracing_subscriber::registry()
            .with(telemetry.and_then(telemetry::Telemetry::layer))
            .with(fmt_layer.with_filter(filter))
            .try_init();
    }
}

fn run(cli: Cli, log_config: LogConfig) -> io::Result<ExitCode> {
    if let Some(path) = &cli.store {
        toolgate_hook::effective_config::set_command_line_store(path);
    }
    // These commands take a ledger only from `--store`, or find their own.
    let store = match (cli.store, &cli.verb) {
        (
            None,
            CliCommand::Demo(_)
            | CliCommand::Check(_)
            | CliCommand::Lint(_)
            | CliCommand::Hook(_)
            | CliCommand::Init(_)
            | CliCommand::Eject(_)
            | CliCommand::Trust(_)
            | CliCommand::Doctor(_)
            | CliCommand::Serve(_)
            | CliCommand::Token(_)
            | CliCommand::Upstream(_)
            | CliCommand::Schema
            | CliCommand::Man { .. }
            | CliCommand::Completions { .. },
        ) => None,
        (None, CliCommand::Audit(args)) if args.is_offline() => None,
        (None, CliCommand::Explain(args)) if args.is_offline() => None,
        (None, _) => toolgate_hook::effective_config::find_store_for_reading(
            &toolgate_hook::effective_config::project_dir()?,
        )?,
        (store, _) => store,
    };
    let store = store.as_deref();
    match cli.verb {
        CliCommand::Demo(args) => command::demo::run(&args, store),
        CliCommand::Approvals(args) => command::approvals::run(&args, store),
        CliCommand::Audit(args) => command::audit::run(args, store),
        CliCommand::Check(args) => command::check::run(&args),
        CliCommand::Explain(args) => command::explain::run(&args, store),
        CliCommand::Init(args) => command::init::init(&args, store),
        CliCommand::Eject(args) => command::init::eject(&args),
        CliCommand::Trust(args) => command::init::trust(&args),
        CliCommand::Doctor(args) => command::doctor::run(&args),
        CliCommand::Hook(args) if args.serve => Ok(toolgate_hook::service::run(&args)),
        CliCommand::Hook(args) => {
            let config = toolgate_hook::non_empty_path(args.config.clone());
            Ok(toolgate_hook::run(&toolgate_hook::Args { config, ..args }))
        }
        CliCommand::Lint(args) => command::lint::run(&args, store),
        CliCommand::Pause(args) => command::pause::pause(&args, store),
        CliCommand::Resume(args) => command::pause::resume(&args, store),
        CliCommand::Replay(args) => command::replay::run(&args, store),
        CliCommand::Serve(args) => command::serve::run(&args, store, log_config),
        CliCommand::Token(args) => command::token::run(&args),
        CliCommand::Upstream(args) => command::upstream::run(&args),
        CliCommand::Backtest(args) => command::backtest::run(&args, store),
        CliCommand::Schema => {
            writeln!(io::stdout().lock(), "{:#}", toolgate_config::config_schema())?;
            Ok(ExitCode::SUCCESS)
        }
        CliCommand::Man { directory } => {
            let result = std::fs::create_dir_all(&directory)
                .and_then(|()| clap_mangen::generate_to(Cli::command(), &directory));
            result.map_err(|error| {
                io::Error::new(error.kind(), format!("{}: {error}", directory.display()))
            })?;
            Ok(ExitCode::SUCCESS)
        }
        CliCommand::Completions { shell } => {
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "toolgate", &mut text);
            io::stdout().lock().write_all(&text)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}
