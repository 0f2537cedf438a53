//! `toolgate-ask`: asks the service that `toolgate hook --serve` is, and starts as fast as a program can.

#[path = "command/hook/signals.rs"]
mod signals;
#[path = "command/hook/wire.rs"]
mod wire;

use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

const HELP: &str = "Ask the service that `toolgate hook --serve` is.

Usage: toolgate-ask --socket <PATH> [--client <CLIENT>] [--agent <AGENT>]

The event is read from standard input, as by `toolgate hook`. Exit code: 0 with
a JSON answer, or 2: refused.
";

fn main() -> ExitCode {
    signals::outlive_limits();
    // A client that waits for longer may let the call through.
    let watched = wire::later(Duration::from_millis(4_500), || {
        // Where nobody reads that, the exit code says it.
        let _ = wire::later(Duration::from_millis(300), || std::process::exit(2));
        let _ = writeln!(std::io::stderr(), "toolgate: no answer could be found in time, so the call is refused");
        std::process::exit(2);
    });
    let answer = watched.map_err(|error| format!("no answer could be waited for, so the call is refused: {error}")).and_then(|()| answer());
    match answer {
        Ok((0, told)) if says_nothing(&told) || !wire::is_unheard() => match std::io::stdout().write_all(told.as_bytes()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => refused(&format!("standard output cannot be written, so the call is refused: {error}")),
        },
        Ok((0, _)) => refused(wire::UNHEARD),
        Ok((_, reason)) | Err(reason) => refused(reason.trim_end()),
    }
}

fn refused(why: &str) -> ExitCode {
    let _ = writeln!(std::io::stderr(), "toolgate: {why}");
    ExitCode::from(2)
}

/// Whether it is all the same who hears it: words for a person, or a plain yes.
fn says_nothing(told: &str) -> bool {
    !told.starts_with('{') || ["{}", r#"{"decision":"allow"}"#, r#"{"permission":"allow"}"#].contains(&told.trim_end())
}

fn answer() -> Result<(u8, String), String> {
    let (mut socket, mut client, mut agent) = (None, "claude-code".to_owned(), String::new());
    let mut words = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned());
    while let Some(word) = words.next() {
        if word == "--help" || word == "-h" {
            return Ok((0, HELP.to_owned()));
        }
        if word == "--version" || word == "-V" {
            return Ok((0, format!("toolgate-ask {}\n", env!("CARGO_PKG_VERSION"))));
        }
        let value = words.next().ok_or_else(|| format!("`{word}` wants a value; see `toolgate-ask --help`"))?;
        match word.as_str() {
            "--socket" => socket = Some(PathBuf::from(value)),
            "--client" => client = value,
            "--agent" => agent = value,
            _ => return Err(format!("there is no `{word}`; see `toolgate-ask --help`")),
        }
    }
    let socket = socket.ok_or("say where the service listens, with `--socket`")?;
    let mut event = Vec::new();
    // One byte more tells that it is too long.
    let read = std::io::stdin().lock().take((32 << 20) + 1).read_to_end(&mut event);
    read.map_err(|error| format!("standard input cannot be read: {error}"))?;
    wire::ask(&socket, &client, &agent, &event).map_err(|error| wire::silent(&socket, &error))
}
