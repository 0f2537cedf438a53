//! Entry point of `toolgate-hook`: `toolgate hook` as a separate program.
//!
//! A coding agent starts it at every step, and a smaller program starts faster.

use std::process::ExitCode;

use clap::Parser;

/// Answer one hook event of a coding agent, like `toolgate hook`, but start faster.
#[derive(Parser)]
#[command(name = "toolgate-hook", version)]
struct HookCli {
    #[command(flatten)]
    hook: toolgate_hook::Args,
    /// SQLite file of the ledger.
    #[arg(long, value_name = "PATH", env = "TOOLGATE_STORE")]
    store: Option<std::path::PathBuf>,
}

fn main() -> ExitCode {
    // Before anything is printed: a signal would end the hook, and clients take that for permission.
    toolgate_hook::block_limit_signals();
    // If this process was re-executed as a sandbox helper, this call does not return.
    toolgate_process::sandbox::run_as_helper_if_requested();
    match HookCli::try_parse() {
        Ok(HookCli { hook, store }) => toolgate_hook::run(&toolgate_hook::Args { store, ..hook }),
        // An invalid command line must deny the call, and exit code 2 does. Other codes may allow
        // it.
        Err(error) => match error.print() {
            Ok(()) => ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2)),
            Err(_) => ExitCode::from(2),
        },
    }
}
