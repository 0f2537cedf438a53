//! Entry point of `toolgate-hook`: `toolgate hook` as a separate program.
//!
//! A coding agent starts it at every step, and a smaller program starts faster.

#![expect(dead_code, reason = "`toolgate` uses more of the shared modules")]

mod client;
#[path = "command/hook/mod.rs"]
mod hook;
mod place;
mod protected;
mod retention;
mod say;

use std::io::Write;
use std::process::ExitCode;

const HELP: &str = "Answer one hook event of a coding agent, like `toolgate hook`, but faster.

Usage: toolgate-hook [--config <FILE>] [--client <CLIENT>] [--agent <AGENT>]
                     [--store <PATH>] [--socket <PATH>]

Reads the event from standard input. Exit code: 0 with a JSON answer, or 2:
denied. See `toolgate hook --help`.
";

fn main() -> ExitCode {
    // If this process was re-executed as a sandbox helper, this call does not return.
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
        writeln!(std::io::stderr(), "toolgate: invalid command line, so the call is denied; see `toolgate-hook --help`");
    ExitCode::from(2)
}
