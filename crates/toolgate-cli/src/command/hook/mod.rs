//! `toolgate hook`: the door for clients that run their tools themselves.

mod answer;
mod compiled;
mod door;
mod event;
mod loud;
pub(crate) mod serve;
mod signals;
mod wire;

use std::ffi::OsString;
use std::io::{IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use answer::{Answer, Rendered};
use door::Door;
pub(crate) use door::open_store;
pub(crate) use event::Client;
use event::{Event, Kind, LONGEST, TOO_LONG};

use crate::place;

/// A client that waits longer may let the call through.
const DEADLINE: Duration = Duration::from_millis(4_500);
/// How long it may take to say that there is no answer.
const GRACE: Duration = Duration::from_millis(300);

/// Answer one hook event of a coding agent: may this tool be used, and what came of it.
///
/// The event is one JSON object on standard input: PreToolUse, PostToolUse, PostToolUseFailure, UserPromptSubmit, SessionStart or
/// SessionEnd; or the plain protocol, {"tool_name", "tool_input"} and after the tool also "tool_result". Whatever happens, the
/// answer is exit code 0 with a JSON object, or exit code 2 with a reason on standard error. What goes wrong is a refusal.
#[derive(clap::Args)]
#[command(
    after_help = "Exit code: 0 with a JSON answer, or 2: refused.\n\nExamples:\n  toolgate init --for claude-code          register it with a client\n  echo '{\"tool_name\": \"bash\", \"tool_input\": {\"command\": \"ls\"}}' | toolgate hook"
)]
pub(crate) struct Args {
    /// The configuration. Without it: the user's own, and that of the project where it is trusted.
    #[arg(long, value_name = "FILE", env = "TOOLGATE_CONFIG")]
    pub(crate) config: Option<PathBuf>,
    /// Who asks.
    #[arg(long, value_enum, default_value = "claude-code")]
    pub(crate) client: Client,
    /// As which agent, where the configuration has several.
    #[arg(long)]
    pub(crate) agent: Option<String>,
    /// The ledger; a flag of every verb of `toolgate`.
    #[arg(skip)]
    pub(crate) store: Option<PathBuf>,
    /// Ask the service that listens here, which may run as another user.
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
    /// Be that service; `--config` says for what, `--socket` where.
    #[arg(long, requires = "socket", requires = "config")]
    pub(crate) serve: bool,
}

impl Args {
    /// Reads the command line where it is a plain one: `hook` and its flags, each with its value.
    pub(crate) fn quickly(mut words: impl Iterator<Item = OsString>) -> Option<Self> {
        words.next().filter(|verb| verb == "hook")?;
        Self::of_flags(words)
    }

    /// Reads flags, each with its value.
    pub(crate) fn of_flags(words: impl Iterator<Item = OsString>) -> Option<Self> {
        let mut words = words.map(|word| word.into_string().ok());
        let config = std::env::var_os("TOOLGATE_CONFIG").filter(|path| !path.is_empty()).map(PathBuf::from);
        let mut args = Self { config, client: Client::ClaudeCode, agent: None, store: None, socket: None, serve: false };
        while let Some(flag) = words.next() {
            let value = words.next()??;
            match flag?.as_str() {
                "--config" => args.config = Some(value.into()),
                "--client" => args.client = clap::ValueEnum::from_str(&value, false).ok()?,
                "--agent" => args.agent = Some(value),
                "--store" => args.store = Some(value.into()),
                "--socket" => args.socket = Some(value.into()),
                _ => return None,
            }
        }
        Some(args)
    }
}

pub(crate) fn run(args: &Args) -> ExitCode {
    signals::outlive_limits();
    // Hooks are not handed what was left open here.
    let _ = toolgate::sandbox::close_inherited();
    let _ = tracing::subscriber::set_global_default(loud::Loud);
    if let Some(path) = &args.store {
        place::name_store(path);
    }
    // Whatever happens, it is a refusal: any other exit code is none to some clients.
    let heard = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| hear(args)));
    let failed = || Rendered::Refused("toolgate failed while it handled this event, so the call is refused".to_owned()).say();
    ExitCode::from(heard.unwrap_or_else(|_| failed()))
}

/// Hears one event, and answers it; gives back the exit code.
fn hear(args: &Args) -> u8 {
    let overdue = match watch() {
        Ok(overdue) => overdue,
        // Without it, somebody who does not answer would be waited for.
        Err(error) => return Rendered::Refused(format!("toolgate could not begin, so the call is refused: {error}")).say(),
    };
    // Whoever sits there does not know that they are waited for.
    if std::io::stdin().is_terminal() {
        let _ = writeln!(std::io::stderr(), "toolgate: waiting for an event of a client, one JSON object; see `toolgate hook --help`");
    }
    let (mut input, mut bytes) = (std::io::stdin().lock(), Vec::new());
    let read = input.by_ref().take(LONGEST + 1).read_to_end(&mut bytes);
    let is_long = bytes.len() as u64 > LONGEST;
    let event = match read {
        Err(error) => Event::glimpsed(&bytes, format!("standard input cannot be read: {error}")),
        Ok(_) if is_long => {
            // Nobody knows when it ends.
            if let Ok(begun) = Event::glimpsed(&bytes, TOO_LONG.to_owned()) {
                forestall(&overdue, &begun, args.client);
            }
            Event::too_long(&bytes, &mut input)
        }
        Ok(_) => Event::heard(&bytes),
    };
    let event = match event {
        Ok(event) => event,
        Err(reason) => return say(&overdue, Rendered::Refused(reason)),
    };
    forestall(&overdue, &event, args.client);
    if args.socket.is_some() {
        let told = match ask(args, &bytes) {
            // Without an answer there is no permission, and no result.
            Rendered::Refused(reason) => Answer::refusal(&event, reason).render(&event, args.client),
            // The service has the beginning of it, and so not the shape of the result.
            Rendered::Told(_) if is_long => Answer::refusal(&event, TOO_LONG).render(&event, args.client),
            told => told,
        };
        return say(&overdue, told);
    }
    let (answer, door) = answer(args, &event);
    let code = say(&overdue, answer.render(&event, args.client));
    // The client has its answer; the next one comes sooner.
    if let Some(door) = door.filter(|_| matches!(event.kind, Kind::Before)) {
        let _ = door.keep(args);
    }
    code
}

/// What a tool gave is not shown by somebody being slow.
fn forestall(overdue: &Mutex<Option<Rendered>>, event: &Event, client: Client) {
    if event.is_over() {
        let late = Answer::withhold(event, "toolgate could not look at this result in time, so it is withheld");
        *lock(overdue) = Some(late.render(event, client));
    }
}

/// Says it, unless time is up: one answer, and from here on its exit code.
fn say(overdue: &Mutex<Option<Rendered>>, rendered: Rendered) -> u8 {
    let mut overdue = lock(overdue);
    let code = rendered.say();
    *overdue = Some(Rendered::Done(code));
    code
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Asks the service.
fn ask(args: &Args, event: &[u8]) -> Rendered {
    let socket = args.socket.as_deref().unwrap_or_else(|| Path::new(""));
    let client = clap::ValueEnum::to_possible_value(&args.client).map(|client| client.get_name().to_owned()).unwrap_or_default();
    match wire::ask(socket, &client, args.agent.as_deref().unwrap_or_default(), event) {
        Ok((0, told)) => {
            serde_json::from_str(&told).map_or_else(|error| Rendered::Refused(wire::silent(socket, &error.into())), Rendered::Told)
        }
        Ok((_, reason)) => Rendered::Refused(reason),
        Err(error) => Rendered::Refused(wire::silent(socket, &error)),
    }
}

/// What is said of an event, whatever happens.
fn answer(args: &Args, event: &Event) -> (Answer, Option<Door>) {
    let door = match Door::open(args, event) {
        Ok(door) => door,
        Err(reason) => return (Answer::refusal(event, format!("toolgate refuses every call: {reason}")), None),
    };
    // Only who starts programs needs all of it.
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let builder = if door.has_hooks() { builder.enable_all() } else { builder.enable_time() };
    let runtime = match builder.build() {
        Ok(runtime) => runtime,
        Err(error) => return (Answer::refusal(event, format!("toolgate could not begin: {error}")), None),
    };
    let answer = runtime.block_on(door.answer(event, args.client, &place::user()));
    (answer, Some(door))
}

/// Nobody waits for longer than a client does: what takes too long is refused.
fn watch() -> std::io::Result<Arc<Mutex<Option<Rendered>>>> {
    let late: Arc<Mutex<Option<Rendered>>> = Arc::default();
    let said = Arc::clone(&late);
    wire::later(DEADLINE, move || {
        // Whoever speaks may speak to somebody who does not read: then the exit code says it.
        let _ = wire::later(GRACE, || std::process::exit(2));
        let refused = || Rendered::Refused("no answer could be found in time, so the call is refused".to_owned());
        // Whoever speaks holds it: nobody speaks twice, or into the other's words.
        let mut said = lock(&said);
        let code = said.take().unwrap_or_else(refused).say();
        std::process::exit(i32::from(code));
    })?;
    Ok(late)
}
