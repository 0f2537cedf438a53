//! The toolgate command line.

mod client;
mod command;
mod place;
mod protected;
mod retention;
mod say;
mod servers;
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

/// A call allocates a few hundred times, on whichever thread: with an allocator that locks for it, a busy gateway makes two thirds of
/// the calls.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// A deterministic gate for the tool calls of AI agents.
#[derive(Parser)]
#[command(name = "toolgate", version, propagate_version = true, arg_required_else_help = true)]
#[command(
    after_help = "Examples:\n  toolgate demo                             watch a refund desk hold\n  toolgate demo --store ledger.db           the same, and keep its ledger\n  toolgate check --config toolgate.toml     what would become of calls\n  toolgate audit query --store ledger.db    what happened\n  toolgate explain CALL --store ledger.db   why it was let through or not\n  toolgate audit verify --store ledger.db   whether anybody has changed it since\n  toolgate init --for claude-code           put it before a coding agent\n  toolgate doctor                           is the gate really on?\n  toolgate completions bash                 > /etc/bash_completion.d/toolgate\n\nExit codes: 0 done; 1 something was found (a difference, a failed test, an ill gate); 2 it could not be done. Of `hook` alone, 2 also says that a call is refused."
)]
struct Cli {
    /// The SQLite file that holds the ledger. Verbs that look into one use, without it, the `store` of your own toolgate.toml, else of
    /// the project's, here or further up, else your own ledger.
    #[arg(long, global = true, value_name = "PATH", env = "TOOLGATE_STORE", help_heading = "Everywhere")]
    store: Option<PathBuf>,
    /// Tell more of what goes on, on standard error.
    #[arg(short, long, global = true, action = clap::ArgAction::Count, help_heading = "Everywhere")]
    verbose: u8,
    /// Tell nothing on standard error but warnings and errors.
    #[arg(short, long, global = true, conflicts_with = "verbose", help_heading = "Everywhere")]
    quiet: bool,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    Demo(command::demo::Args),
    Audit(command::audit::Args),
    Approvals(command::approvals::Args),
    Check(command::check::Args),
    Explain(command::explain::Args),
    Init(command::init::InitArgs),
    Eject(command::init::EjectArgs),
    Trust(command::init::TrustArgs),
    Doctor(command::doctor::Args),
    Hook(command::hook::Args),
    Lint(command::lint::Args),
    Pause(command::pause::PauseArgs),
    Resume(command::pause::ResumeArgs),
    Replay(command::replay::Args),
    Serve(command::serve::Args),
    Token(command::token::Args),
    Upstream(command::upstream::Args),
    Backtest(command::backtest::Args),
    /// Print a JSON Schema of toolgate.toml, for editors.
    #[command(after_help = "Examples:\n  toolgate schema > toolgate.schema.json")]
    Schema,
    /// Write the manual pages into a directory.
    #[command(after_help = "Examples:\n  toolgate man /usr/local/share/man/man1")]
    Man {
        /// Where to.
        directory: PathBuf,
    },
    /// Print completions for a shell.
    #[command(after_help = "Examples:\n  toolgate completions zsh > ~/.zfunc/_toolgate")]
    Completions {
        /// Which shell.
        shell: clap_complete::Shell,
    },
}

fn main() -> ExitCode {
    // Perhaps it is only the way into the room of another program.
    toolgate::sandbox::enter_if_asked();
    // A coding agent waits for this one at every step: what the whole command line needs is left out.
    if let Some(args) = command::hook::Args::quickly(std::env::args_os().skip(1)) {
        return command::hook::run(&args);
    }
    let cli = Cli::try_parse().unwrap_or_else(|error| hinted(error).exit());
    QUIET.store(cli.quiet, Ordering::Relaxed);
    let telling = Telling { verbose: cli.verbose > 0, asks: matches!(cli.verb, Verb::Upstream(_) | Verb::Doctor(_)) };
    // Who serves reads first whom else to tell.
    if !matches!(cli.verb, Verb::Serve(_)) {
        telling.begin(None);
    }
    match run(cli, telling) {
        Ok(code) => code,
        // Whoever reads us has read enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            say::say(&format!("error: {error}"));
            ExitCode::from(2)
        }
    }
}

/// An error of the command line, with what was meant where a word stands in the wrong place: a verb without the one that it is part
/// of, or a value without its flag.
fn hinted(mut error: clap::Error) -> clap::Error {
    let word = |kind: ContextKind| match error.get(kind) {
        Some(ContextValue::String(word)) => word.clone(),
        _ => String::new(),
    };
    let command = Cli::command();
    let meant: Vec<String> = match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let word = word(ContextKind::InvalidSubcommand);
            let verbs = command.get_subcommands().filter(|verb| verb.find_subcommand(&word).is_some());
            verbs.map(|verb| format!("`toolgate {} {word}`", verb.get_name())).collect()
        }
        ErrorKind::UnknownArgument => {
            let word = word(ContextKind::InvalidArg);
            let verb = std::env::args_os().skip(1).find_map(|word| command.find_subcommand(word));
            let takes = |arg: &&clap::Arg| {
                arg.get_action().takes_values() && arg.get_possible_values().iter().any(|value| value.matches(&word, false))
            };
            let flags = verb.into_iter().flat_map(|verb| verb.get_arguments()).filter(takes).filter_map(clap::Arg::get_long);
            flags.map(|flag| format!("`--{flag} {word}`")).collect()
        }
        _ => Vec::new(),
    };
    if !meant.is_empty() {
        // What is merely like it is not what was meant.
        error.remove(ContextKind::SuggestedSubcommand);
        let tip = format!("you may mean {}", meant.join(" or "));
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    }
    error
}

/// Nobody wants to hear what only may be of interest.
static QUIET: AtomicBool = AtomicBool::new(false);

pub(crate) fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// Tells a person something on standard error that is no warning.
pub(crate) fn note(text: &str) {
    if !is_quiet() {
        say::say(text);
    }
}

/// How much is told.
#[derive(Clone, Copy)]
pub(crate) struct Telling {
    verbose: bool,
    /// How upstreams are is what is asked: the answer says so.
    asks: bool,
}

impl Telling {
    /// What the library has to say goes to standard error from here on; spans of calls also to a collector.
    pub(crate) fn begin(self, telemetry: Option<&telemetry::Telemetry>) {
        let level = if self.verbose { tracing::Level::TRACE } else { tracing::Level::WARN };
        // Libraries beneath it may print whole messages: of them, only warnings are heard, and of those that print addresses nothing.
        let heard = Targets::new()
            .with_default(tracing::Level::WARN)
            .with_target("toolgate", level)
            .with_target("rmcp", tracing::level_filters::LevelFilter::OFF)
            .with_target("opentelemetry", tracing::level_filters::LevelFilter::OFF);
        let heard =
            if self.asks && !self.verbose { heard.with_target("toolgate_mcp::upstream::link", tracing::Level::ERROR) } else { heard };
        let said = tracing_subscriber::fmt::layer().with_writer(io::stderr).with_ansi(false).without_time().with_target(false);
        // Somebody else listens already, and that is fine.
        let _ =
            tracing_subscriber::registry().with(telemetry.and_then(telemetry::Telemetry::layer)).with(said.with_filter(heard)).try_init();
    }
}

fn run(cli: Cli, telling: Telling) -> io::Result<ExitCode> {
    if let Some(path) = &cli.store {
        place::name_store(path);
    }
    // The demonstration is kept only where that is asked for.
    let store = match (cli.store, &cli.verb) {
        (
            None,
            Verb::Demo(_)
            | Verb::Check(_)
            | Verb::Lint(_)
            | Verb::Hook(_)
            | Verb::Init(_)
            | Verb::Eject(_)
            | Verb::Trust(_)
            | Verb::Doctor(_)
            | Verb::Serve(_)
            | Verb::Token(_)
            | Verb::Upstream(_)
            | Verb::Schema
            | Verb::Man { .. }
            | Verb::Completions { .. },
        ) => None,
        (None, Verb::Audit(args)) if args.is_offline() => None,
        (None, Verb::Explain(args)) if args.is_offline() => None,
        (None, _) => place::store_of(&place::project()?)?,
        (given, _) => given,
    };
    let store = store.as_deref();
    match cli.verb {
        Verb::Demo(args) => command::demo::run(&args, store),
        Verb::Approvals(args) => command::approvals::run(&args, store),
        Verb::Audit(args) => command::audit::run(args, store),
        Verb::Check(args) => command::check::run(&args),
        Verb::Explain(args) => command::explain::run(&args, store),
        Verb::Init(args) => command::init::init(&args, store),
        Verb::Eject(args) => command::init::eject(&args),
        Verb::Trust(args) => command::init::trust(&args),
        Verb::Doctor(args) => command::doctor::run(&args),
        Verb::Hook(args) if args.serve => Ok(command::hook::serve::run(&args)),
        Verb::Hook(args) => Ok(command::hook::run(&args)),
        Verb::Lint(args) => command::lint::run(&args, store),
        Verb::Pause(args) => command::pause::pause(&args, store),
        Verb::Resume(args) => command::pause::resume(&args, store),
        Verb::Replay(args) => command::replay::run(&args, store),
        Verb::Serve(args) => command::serve::run(&args, store, telling),
        Verb::Token(args) => command::token::run(&args),
        Verb::Upstream(args) => command::upstream::run(&args),
        Verb::Backtest(args) => command::backtest::run(&args, store),
        Verb::Schema => {
            writeln!(io::stdout().lock(), "{:#}", toolgate::config::schema())?;
            Ok(ExitCode::SUCCESS)
        }
        Verb::Man { directory } => {
            let made = std::fs::create_dir_all(&directory).and_then(|()| clap_mangen::generate_to(Cli::command(), &directory));
            made.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", directory.display())))?;
            Ok(ExitCode::SUCCESS)
        }
        Verb::Completions { shell } => {
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "toolgate", &mut text);
            io::stdout().lock().write_all(&text)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}
