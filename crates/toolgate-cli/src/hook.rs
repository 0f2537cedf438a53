//! `toolgate-hook`: `toolgate hook` as a program of its own. A coding agent waits for it at every step, and a program starts the sooner
//! the smaller it is.

#![expect(dead_code, reason = "`toolgate` does more with what they share")]

mod client;
#[path = "command/hook/mod.rs"]
mod hook;
mod place;
mod protected;
mod retention;
mod say;

use std::io::Write;
use std::process::ExitCode;

const HELP: &str = "Answer one hook event of a coding agent, as `toolgate hook` does, but sooner.

Usage: toolgate-hook [--config <FILE>] [--client <CLIENT>] [--agent <AGENT>]
                     [--store <PATH>] [--socket <PATH>]

The event is read from standard input. Exit code: 0 with a JSON answer, or 2:
refused. See `toolgate hook --help`.
";

fn main() -> ExitCode {
    // Perhaps it is only the way into the room of another program.
    toolgate::sandbox::enter_if_asked();
    let words = || std::env::args_os().skip(1);
    if let Some(args) = hook::Args::of_flags(words()) {
        return hook::run(&args);
    }
    if words().any(|word| word == "--help" || word == "-h") {
        let _ = std::io::stdout().write_all(HELP.as_bytes());
        return ExitCode::SUCCESS;
    }
    if words().any(|word| word == "--version" || word == "-V") {
        let _ = writeln!(std::io::stdout(), "toolgate-hook {}", env!("CARGO_PKG_VERSION"));
        return ExitCode::SUCCESS;
    }
    let _ =
        writeln!(std::io::stderr(), "toolgate: the command line cannot be understood, so the call is refused; see `toolgate-hook --help`");
    ExitCode::from(2)
}
