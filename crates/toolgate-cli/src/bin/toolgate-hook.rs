//! Runs `toolgate hook` as the separate program `toolgate-hook`.
//!
//! A coding agent starts this program at every step, and a small program starts faster.

use std::process::ExitCode;

use clap::Parser;

/// Answer one hook event of a coding agent, like `toolgate hook`, but start faster.
#[derive(Parser)]
#[command(name = "toolgate-hook", version)]
struct HookCli {
    #[command(flatten)]
    hook: toolgate_hook::Args,
    /// SQLite file of the ledger.
    #[arg(long, value_name = "PATH", env = "TOOLGATE_STORE", value_parser = toolgate_hook::path_parser())]
    store: Option<std::path::PathBuf>,
}

fn main() -> ExitCode {
    // First, because a signal would end the hook, and clients treat that as permission.
    toolgate_hook::block_limit_signals();
    // If this process was re-executed as a sandbox helper, this call does not return.
    toolgate_process::sandbox::run_as_helper_if_requested();
    match HookCli::try_parse() {
        Ok(HookCli { hook, .. }) if hook.serve => {
            toolgate_hook::stderr::print_stderr("start the service with `toolgate hook --serve`");
            ExitCode::from(2)
        }
        Ok(HookCli { hook, store }) => {
            let (store, config) = (
                toolgate_hook::non_empty_path(store),
                toolgate_hook::non_empty_path(hook.config.clone()),
            );
            toolgate_hook::run(&toolgate_hook::Args { store, config, ..hook })
        }
        // An invalid command line must deny the call. Exit code 2 denies; other codes may allow.
        Err(error) => match error.print() {
            Ok(()) => ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2)),
            Err(_) => ExitCode::from(2),
        },
    }
}
