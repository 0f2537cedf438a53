//! The toolgate command line.

mod command;

use std::io;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

/// A deterministic gate for the tool calls of AI agents.
#[derive(Parser)]
#[command(name = "toolgate", version, propagate_version = true, arg_required_else_help = true)]
#[command(
    after_help = "Examples:\n  toolgate demo              see the refund desk hold against a model that tries to break out\n  toolgate demo --json       the same for a program to read, one JSON object a line\n  toolgate completions bash  > /etc/bash_completion.d/toolgate"
)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    Demo(command::demo::Args),
    /// Print completions for a shell.
    #[command(after_help = "Examples:\n  toolgate completions zsh > ~/.zfunc/_toolgate")]
    Completions {
        /// Which shell.
        shell: clap_complete::Shell,
    },
}

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(code) => code,
        // Whoever reads us has read enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            anstream::eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(cli: Cli) -> io::Result<ExitCode> {
    match cli.verb {
        Verb::Demo(args) => command::demo::run(&args),
        Verb::Completions { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "toolgate", &mut io::stdout());
            Ok(ExitCode::SUCCESS)
        }
    }
}
