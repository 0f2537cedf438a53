//! `toolgate hook`: the door for clients that run their tools themselves.

mod answer;
mod compiled;
mod door;
mod event;
mod loud;
pub(crate) mod serve;
mod signals;
mod stay;
mod wire;

use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use answer::{Answer, Rendered};
use door::Door;
pub(crate) use door::open_store;
pub(crate) use event::Client;
use event::{Event, Kind, LONGEST, TOO_LONG};
use rustix::event::{PollFd, PollFlags, Timespec};
use stay::Asked;

use crate::place;

/// A client that waits longer may let the call through.
const DEADLINE: Duration = Duration::from_millis(4_500);
/// So much is said without anybody having to read it.
const SHORT: usize = 4 << 10;
/// How long it may take to say that there is no answer.
const GRACE: Duration = Duration::from_millis(300);

/// Answer one hook event of a coding agent: may this tool be used, and what came of it.
///
/// The event is one JSON object on standard input: PreToolUse, PostToolUse, PostToolUseFailure, UserPromptSubmit, SessionStart or
/// SessionEnd; or the plain protocol, {"tool_name", "tool_input"} and after the tool also "tool_result". Whatever happens, the
/// answer is exit code 0 with a JSON object, or exit code 2 with a reason on standard error. What goes wrong is a refusal.
#[derive(clap::Args, Clone)]
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
    /// Stay, and answer the hooks of open sessions; a hook that hears of a new session starts it so.
    #[arg(long, hide = true, conflicts_with = "socket")]
    pub(crate) stay: bool,
    /// The session that it stays for first.
    #[arg(long, hide = true, requires = "stay")]
    pub(crate) session: Option<String>,
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
        let mut args =
            Self { config, client: Client::ClaudeCode, agent: None, store: None, socket: None, serve: false, stay: false, session: None };
        while let Some(flag) = words.next() {
            let flag = flag?;
            if flag == "--stay" {
                args.stay = true;
                continue;
            }
            let value = words.next()??;
            match flag.as_str() {
                "--config" => args.config = Some(value.into()),
                "--client" => args.client = clap::ValueEnum::from_str(&value, false).ok()?,
                "--agent" => args.agent = Some(value),
                "--store" => args.store = Some(value.into()),
                "--socket" => args.socket = Some(value.into()),
                "--session" => args.session = Some(value),
                _ => return None,
            }
        }
        Some(args)
    }
}

pub(crate) fn run(args: &Args) -> ExitCode {
    if args.stay {
        return stay::run(args);
    }
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
    let late = Late { until: Instant::now() + DEADLINE, said: Arc::default() };
    // Whoever sits there does not know that they are waited for.
    if std::io::stdin().is_terminal() {
        let _ = writeln!(std::io::stderr(), "toolgate: waiting for an event of a client, one JSON object; see `toolgate hook --help`");
    }
    let mut bytes = Vec::new();
    let read = late.read(&mut bytes);
    let is_long = bytes.len() as u64 > LONGEST;
    let event = match read {
        Err(error) => Event::glimpsed(&bytes, format!("standard input cannot be read: {error}")),
        Ok(()) if is_long => {
            // Nobody knows when it ends.
            if let Ok(begun) = Event::glimpsed(&bytes, TOO_LONG.to_owned()) {
                late.forestall(&begun, args.client);
            }
            if let Err(refused) = late.watch() {
                return refused.say();
            }
            Event::too_long(&bytes, &mut std::io::stdin().lock())
        }
        Ok(()) => Event::heard(&bytes),
    };
    let event = match event {
        Ok(event) => event,
        Err(reason) => return late.say(Rendered::Refused(reason)),
    };
    late.forestall(&event, args.client);
    let asked = match &args.socket {
        None if is_long => Asked::Alone,
        None => stay::ask(args, &bytes, late.left()),
        Some(socket) => match late.watch() {
            Ok(()) => Asked::Told(ask(args, socket, &bytes)),
            Err(refused) => Asked::Told(refused),
        },
    };
    let is_nobody_there = matches!(asked, Asked::Nobody);
    if let Asked::Told(told) = asked {
        let told = match told {
            // Without an answer there is no permission, and no result.
            Rendered::Refused(reason) => Answer::refusal(&event, reason).render(&event, args.client),
            // The service has the beginning of it, and so not the shape of the result.
            Rendered::Told(_) if is_long => Answer::refusal(&event, TOO_LONG).render(&event, args.client),
            told => told,
        };
        // Who does not read what is long is not waited for.
        if matches!(&told, Rendered::Told(told) if told.to_string().len() > SHORT)
            && let Err(refused) = late.watch()
        {
            return refused.say();
        }
        return late.say(told);
    }
    if let Err(refused) = late.watch() {
        return refused.say();
    }
    let (answer, door) = answer(args, &event);
    let code = late.say(answer.render(&event, args.client));
    // Where nobody can stay, the next hook does all by itself as well.
    if is_nobody_there && matches!(event.kind, Kind::Begins) && door.is_some() {
        let _ = stay::begin(args, &event.session);
    }
    // The client has its answer; the next one comes sooner.
    if let Some(door) = door.filter(|_| matches!(event.kind, Kind::Before)) {
        let _ = door.keep(args);
    }
    code
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Asks the service.
fn ask(args: &Args, socket: &Path, event: &[u8]) -> Rendered {
    match wire::ask(socket, &named(args.client), args.agent.as_deref().unwrap_or_default(), event) {
        Ok(said) => rendered(said, socket),
        Err(error) => Rendered::Refused(wire::silent(socket, &error)),
    }
}

/// A client, as it is called on the command line.
fn named(client: Client) -> String {
    clap::ValueEnum::to_possible_value(&client).map(|client| client.get_name().to_owned()).unwrap_or_default()
}

/// What was heard from another process.
fn rendered((code, told): (u8, String), socket: &Path) -> Rendered {
    match code {
        0 => serde_json::from_str(&told).map_or_else(|error| Rendered::Refused(wire::silent(socket, &error.into())), Rendered::Told),
        _ => Rendered::Refused(told),
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
struct Late {
    until: Instant,
    /// What is said when time is up; and from the moment that something was said, that it was.
    said: Arc<Mutex<Option<Rendered>>>,
}

impl Late {
    fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    /// Reads standard input to its end, or until it is too long, or time is up.
    fn read(&self, bytes: &mut Vec<u8>) -> io::Result<()> {
        let input = std::io::stdin();
        let mut piece = [0; 16 << 10];
        while bytes.len() as u64 <= LONGEST {
            let wait = Timespec::try_from(self.left()).map_err(io::Error::other)?;
            let mut wanted = [PollFd::new(&input, PollFlags::IN)];
            let read = match rustix::event::poll(&mut wanted, Some(&wait)) {
                Ok(0) => return Err(io::Error::new(io::ErrorKind::TimedOut, "the event did not come in time")),
                Ok(_) => rustix::io::read(&input, &mut piece),
                Err(error) => Err(error),
            };
            match read {
                Ok(0) => break,
                Ok(length) => bytes.extend_from_slice(piece.get(..length).unwrap_or_default()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// What a tool gave is not shown by somebody being slow.
    fn forestall(&self, event: &Event, client: Client) {
        if event.is_over() {
            let late = Answer::withhold(event, "toolgate could not look at this result in time, so it is withheld");
            *lock(&self.said) = Some(late.render(event, client));
        }
    }

    /// Says it, unless time is up: one answer, and from here on its exit code.
    fn say(&self, rendered: Rendered) -> u8 {
        let mut said = lock(&self.said);
        let code = rendered.say();
        *said = Some(Rendered::Done(code));
        code
    }

    /// Has somebody say so when time is up. Without that, somebody who does not answer would be waited for.
    fn watch(&self) -> Result<(), Rendered> {
        let said = Arc::clone(&self.said);
        let watched = wire::later(self.left(), move || {
            // Whoever speaks may speak to somebody who does not read: then the exit code says it.
            let _ = wire::later(GRACE, || std::process::exit(2));
            let refused = || Rendered::Refused("no answer could be found in time, so the call is refused".to_owned());
            // Whoever speaks holds it: nobody speaks twice, or into the other's words.
            let mut said = lock(&said);
            let code = said.take().unwrap_or_else(refused).say();
            std::process::exit(i32::from(code));
        });
        watched.map_err(|error| Rendered::Refused(format!("toolgate could not begin, so the call is refused: {error}")))
    }
}
