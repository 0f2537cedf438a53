//! `toolgate hook`: the door for clients that run their tools themselves.

mod answer;
mod door;
mod event;

use std::io::Read;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use answer::{Answer, Rendered};
use door::Door;
pub(crate) use door::open_store;
pub(crate) use event::Client;
use event::Event;

/// Longer events are not read.
const LONGEST: u64 = 32 << 20;
/// A client that waits longer may let the call through.
const DEADLINE: Duration = Duration::from_millis(4_500);

/// Answer one hook event of a coding agent: may this tool be used, and what came of it.
///
/// The event is one JSON object on standard input: PreToolUse, PostToolUse, PostToolUseFailure, UserPromptSubmit, SessionStart or
/// SessionEnd; or the plain protocol, {"tool_name", "tool_input"} and after the tool also "tool_result". Whatever happens, the
/// answer is exit code 0 with a JSON object, or exit code 2 with a reason on standard error. What goes wrong is a refusal.
#[derive(clap::Args)]
#[command(
    after_help = "Exit code: 0 with a JSON answer, or 2: refused.\n\nExamples:\n  toolgate init --for claude-code          register it with a client\n  echo '{\"tool_name\": \"bash\", \"tool_input\": {\"command\": \"ls\"}}' | toolgate hook --config toolgate.toml"
)]
pub(crate) struct Args {
    /// The configuration. Without it: the user's own, and that of the project where it is trusted.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Who asks.
    #[arg(long, value_enum, default_value = "claude-code")]
    pub(crate) client: Client,
    /// As which agent, where the configuration has several.
    #[arg(long)]
    pub(crate) agent: Option<String>,
}

pub(crate) fn run(args: &Args) -> ExitCode {
    watch();
    let mut text = String::new();
    let read = std::io::stdin().lock().take(LONGEST + 1).read_to_string(&mut text);
    let event = match read {
        Err(error) => Err(format!("standard input cannot be read: {error}")),
        Ok(length) if length as u64 > LONGEST => Err("the event is too large to be read".to_owned()),
        Ok(_) => Event::read(&text),
    };
    match event {
        Err(reason) => Rendered::Refused(reason).say(),
        Ok(event) => answer(args, &event).render(&event, args.client).say(),
    }
}

/// What is said of an event, whatever happens.
fn answer(args: &Args, event: &Event) -> Answer {
    let door = match Door::open(args) {
        Ok(door) => door,
        Err(reason) => return Answer::deny(format!("toolgate is not in force: {reason}")),
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return Answer::deny(format!("toolgate could not begin: {error}")),
    };
    runtime.block_on(door.answer(event))
}

/// Nobody waits for longer than a client does: what takes too long is refused.
fn watch() {
    let watchdog = std::thread::Builder::new().stack_size(64 << 10).spawn(|| {
        std::thread::sleep(DEADLINE);
        let _ = Rendered::Refused("no answer could be found in time, so the call is refused".to_owned()).say();
        std::process::exit(2);
    });
    // Without it the deadlines inside hold.
    drop(watchdog);
}
