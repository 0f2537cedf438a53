#![doc = include_str!("../README.md")]

pub mod builtin_rules;
pub mod client_hooks;
mod config_cache;
pub mod effective_config;
mod evaluate;
pub mod event;
mod ignore_limit_signals;
mod protocol;
mod response;
pub mod retention;
pub mod service;
pub mod stderr;
mod stderr_subscriber;

pub use ignore_limit_signals::block_limit_signals;

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::evaluate::HookGate;
pub use crate::evaluate::open_store;
use crate::response::{HookReply, RenderedReply};
pub use event::HookClient;
use event::{EVENT_TOO_LARGE, HookEvent, HookEventKind, MAX_EVENT_BYTES};
use rustix::event::{PollFd, PollFlags, Timespec};

/// Time to answer an event. A client may stop waiting after this and allow the call.
const EVENT_TIMEOUT: Duration = Duration::from_millis(4_500);
/// Time to write the answer that says that the deadline was exceeded.
const DENIAL_WRITE_TIMEOUT: Duration = Duration::from_millis(300);

/// Answer one hook event of a coding agent.
///
/// Reads one JSON object from standard input: PreToolUse, PostToolUse, PostToolUseFailure,
/// UserPromptSubmit, SessionStart or SessionEnd. The plain protocol is {"tool_name", "tool_input"},
/// and after the tool also "tool_result".
///
/// Writes a JSON object with exit code 0, or a reason to standard error with exit code 2. An error
/// is a denial.
#[derive(clap::Args, Clone)]
#[command(
    after_help = "Exit code: 0 with a JSON answer, or 2: denied.\n\nExamples:\n  toolgate init --for claude-code          register the hook with a client\n  echo '{\"tool_name\": \"bash\", \"tool_input\": {\"command\": \"ls\"}}' | toolgate hook"
)]
pub struct Args {
    /// Configuration [default: the user's own, and that of a trusted project].
    #[arg(long, value_name = "FILE", env = "TOOLGATE_CONFIG", value_parser = path_parser())]
    pub config: Option<PathBuf>,
    /// Client that sends the event.
    #[arg(long, value_enum, default_value = "claude-code")]
    pub client: HookClient,
    /// Agent to act as, if the configuration has several.
    #[arg(long)]
    pub agent: Option<String>,
    /// SQLite file of the ledger, from the global flag of `toolgate`.
    #[arg(skip)]
    pub store: Option<PathBuf>,
    /// Ask the service at this socket, which may run as another user.
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Run as the service for `--config`, at `--socket`.
    #[arg(long, requires = "socket", requires = "config")]
    pub serve: bool,
}

/// Parses a path that may be empty: an empty environment variable counts as not set.
#[must_use]
pub fn path_parser() -> impl clap::builder::TypedValueParser<Value = PathBuf> {
    clap::builder::TypedValueParser::map(clap::builder::OsStringValueParser::new(), PathBuf::from)
}

/// Returns a path unless it is empty.
#[must_use]
pub fn non_empty_path(path: Option<PathBuf>) -> Option<PathBuf> {
    path.filter(|path| !path.as_os_str().is_empty())
}

/// Returns whether words are the flags of a hook.
pub fn can_parse_flags<'w>(words: impl Iterator<Item = &'w str>) -> bool {
    #[derive(clap::Parser)]
    struct HookFlags {
        #[command(flatten)]
        hook: Args,
        #[arg(long)]
        _store: Option<PathBuf>,
    }
    // A service answers no event, so a client that starts one gets no decision.
    <HookFlags as clap::Parser>::try_parse_from(std::iter::once("toolgate-hook").chain(words))
        .is_ok_and(|flags| !flags.hook.serve)
}

/// Handles one event from standard input.
pub fn run(args: &Args) -> ExitCode {
    crate::ignore_limit_signals::block_limit_signals();
    // Programs that run as hooks must not inherit open files of the caller.
    let _ = toolgate_process::sandbox::close_inherited_files();
    let _ = tracing::subscriber::set_global_default(crate::stderr_subscriber::StderrSubscriber);
    if let Some(path) = &args.store {
        effective_config::set_command_line_store(path);
    }
    // A panic must be a denial: some clients treat any other exit code as permission.
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| handle_one_event(args)));
    let deny = || {
        RenderedReply::Denied(
            "toolgate failed while handling this event, so the call is denied".to_owned(),
        )
        .write()
    };
    ExitCode::from(outcome.unwrap_or_else(|_| deny()))
}

/// Reads one event, answers it, and returns the exit code.
fn handle_one_event(args: &Args) -> u8 {
    let responder =
        DeadlineResponder { deadline: Instant::now() + EVENT_TIMEOUT, reply: Arc::default() };
    // A user at a terminal needs to know that input is expected.
    if std::io::stdin().is_terminal() {
        let _ = writeln!(
            std::io::stderr(),
            "toolgate: waiting for one JSON event on standard input; see `toolgate hook --help`"
        );
    }
    let mut bytes = Vec::new();
    let read = responder.read_stdin(&mut bytes);
    let is_long = bytes.len() as u64 > MAX_EVENT_BYTES;
    let event = match read {
        Err(error) => HookEvent::recover(&bytes, format!("cannot read standard input: {error}")),
        Ok(()) if is_long => {
            // The rest of the event may take any time, so the deadline is prepared first.
            if let Ok(head_event) = HookEvent::recover(&bytes, EVENT_TOO_LARGE.to_owned()) {
                responder.prepare_withholding(&head_event, args.client);
            }
            if let Err(denial) = responder.start_watchdog() {
                return denial.write();
            }
            HookEvent::read_oversized(&bytes, &mut std::io::stdin().lock())
        }
        Ok(()) => HookEvent::parse(&bytes),
    };
    let event = match event {
        Ok(event) => event,
        Err(reason) => return responder.write_reply(RenderedReply::Denied(reason)),
    };
    responder.prepare_withholding(&event, args.client);
    if let Err(denial) = responder.start_watchdog() {
        return denial.write();
    }
    if let Some(socket) = &args.socket {
        let reply = match ask_service(args, socket, &bytes) {
            // Without an answer of the service, the call is denied or the result is withheld.
            RenderedReply::Denied(reason) => {
                HookReply::gate_error(&event, reason).render(&event, args.client)
            }
            // The service has only the beginning of the event, and does not know the shape of the
            // result.
            RenderedReply::Json(_) if is_long => {
                HookReply::gate_error(&event, EVENT_TOO_LARGE).render(&event, args.client)
            }
            reply => reply,
        };
        return responder.write_reply(reply);
    }
    let (answer, gate) = decide_locally(args, &event);
    let code = responder.write_reply(answer.render(&event, args.client));
    // The client has its answer. The cache makes the next one faster.
    if let Some(gate) = gate.filter(|_| matches!(event.kind, HookEventKind::BeforeTool)) {
        let _ = gate.write_cache(args);
    }
    code
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Asks the service.
fn ask_service(args: &Args, socket: &Path, event: &[u8]) -> RenderedReply {
    match crate::protocol::ask_service(
        socket,
        &client_name(args.client),
        args.agent.as_deref().unwrap_or_default(),
        event,
    ) {
        Ok(response) => parse_reply(response, socket),
        Err(error) => RenderedReply::Denied(crate::protocol::no_response_message(socket, &error)),
    }
}

/// Returns the command-line name of a client.
fn client_name(client: HookClient) -> String {
    clap::ValueEnum::to_possible_value(&client)
        .map(|client| client.get_name().to_owned())
        .unwrap_or_default()
}

/// Converts the response of another process.
fn parse_reply((code, text): (u8, String), socket: &Path) -> RenderedReply {
    match code {
        0 => serde_json::from_str(&text).map_or_else(
            |error| {
                RenderedReply::Denied(crate::protocol::no_response_message(socket, &error.into()))
            },
            RenderedReply::Json,
        ),
        _ => RenderedReply::Denied(text),
    }
}

/// Decides about an event in this process.
fn decide_locally(args: &Args, event: &HookEvent) -> (HookReply, Option<HookGate>) {
    let gate = match HookGate::open(args, event) {
        Ok(gate) => gate,
        Err(reason) => {
            return (
                HookReply::gate_error(event, format!("toolgate denies every call: {reason}")),
                None,
            );
        }
    };
    // Only hooks that start programs need the I/O driver.
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let builder = if gate.has_hooks() { builder.enable_all() } else { builder.enable_time() };
    let runtime = match builder.build() {
        Ok(runtime) => runtime,
        Err(error) => {
            return (HookReply::gate_error(event, format!("toolgate cannot start: {error}")), None);
        }
    };
    let answer = runtime.block_on(gate.handle_event(
        event,
        args.client,
        &effective_config::local_user_name(),
    ));
    (answer, Some(gate))
}

/// Denies the call when the client's own hook timeout is about to expire.
struct DeadlineResponder {
    deadline: Instant,
    /// Answer to give when the deadline expires, or the exit code after an answer was written.
    reply: Arc<Mutex<Option<RenderedReply>>>,
}

impl DeadlineResponder {
    fn time_left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Reads standard input until its end, the size limit, or the deadline.
    fn read_stdin(&self, bytes: &mut Vec<u8>) -> io::Result<()> {
        let input = std::io::stdin();
        let mut buffer = [0; 16 << 10];
        while bytes.len() as u64 <= MAX_EVENT_BYTES {
            let wait = Timespec::try_from(self.time_left()).map_err(io::Error::other)?;
            let mut poll_fds = [PollFd::new(&input, PollFlags::IN)];
            let read = match rustix::event::poll(&mut poll_fds, Some(&wait)) {
                Ok(0) => {
                    return Err(io::Error::new(
                        io::ErrorKind::TimedOut,
                        "the event did not arrive in time",
                    ));
                }
                Ok(_) => rustix::io::read(&input, &mut buffer),
                Err(error) => Err(error),
            };
            match read {
                Ok(0) => break,
                Ok(length) => bytes.extend_from_slice(buffer.get(..length).unwrap_or_default()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Prepares an answer that withholds the result if the deadline expires.
    fn prepare_withholding(&self, event: &HookEvent, client: HookClient) {
        if event.is_after_run() {
            let withheld = HookReply::withhold(
                event,
                "toolgate could not check this result in time, so it is withheld",
            );
            *lock(&self.reply) = Some(withheld.render(event, client));
        }
    }

    /// Writes the answer, unless the deadline has expired.
    fn write_reply(&self, rendered: RenderedReply) -> u8 {
        let mut reply = lock(&self.reply);
        let code = rendered.write();
        *reply = Some(RenderedReply::AlreadyWritten(code));
        code
    }

    /// Starts a thread that denies the call when the deadline expires.
    fn start_watchdog(&self) -> Result<(), RenderedReply> {
        let reply = Arc::clone(&self.reply);
        let started = crate::protocol::run_after(self.time_left(), move || {
            // Writing may block if the client does not read. Then only the exit code denies the
            // call.
            let _ = crate::protocol::run_after(DENIAL_WRITE_TIMEOUT, || std::process::exit(2));
            let denial = || {
                RenderedReply::Denied(
                    "no decision was reached in time, so the call is denied".to_owned(),
                )
            };
            // The lock is held while writing, so that only one answer is written.
            let mut reply = lock(&reply);
            let code = reply.take().unwrap_or_else(denial).write();
            std::process::exit(i32::from(code));
        });
        started.map_err(|error| {
            RenderedReply::Denied(format!("toolgate cannot start, so the call is denied: {error}"))
        })
    }
}
