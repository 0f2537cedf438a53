//! `toolgate-ask`: asks the service that `toolgate hook --serve` is, and starts as fast as a program can.

#[path = "command/hook/signals.rs"]
mod signals;
#[path = "command/hook/wire.rs"]
mod wire;

use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;

const HELP: &str = "Ask the service that `toolgate hook --serve` is.

Usage: toolgate-ask --socket <PATH> [--client <CLIENT>] [--agent <AGENT>]

The event is read from standard input, as by `toolgate hook`. Exit code: 0 with
a JSON answer, or 2: refused.
";

fn main() -> ExitCode {
    signals::outlive_limits();
    // A client that waits for longer may let the call through.
    let _ = std::thread::Builder::new().stack_size(64 << 10).spawn(|| {
        std::thread::sleep(std::time::Duration::from_millis(4_500));
        let _ = writeln!(std::io::stderr(), "toolgate: no answer could be found in time, so the call is refused");
        std::process::exit(2);
    });
    match answer() {
        Ok((0, told)) if std::io::stdout().write_all(told.as_bytes()).is_ok() => ExitCode::SUCCESS,
        Ok((_, reason)) | Err(reason) => {
            let _ = writeln!(std::io::stderr(), "toolgate: {}", reason.trim_end());
            ExitCode::from(2)
        }
    }
}

fn answer() -> Result<(u8, String), String> {
    let (mut socket, mut client, mut agent) = (None, "claude-code".to_owned(), String::new());
    let mut words = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned());
    while let Some(word) = words.next() {
        if word == "--help" || word == "-h" {
            return Ok((0, HELP.to_owned()));
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
    std::io::stdin().lock().take(32 << 20).read_to_end(&mut event).map_err(|error| format!("standard input cannot be read: {error}"))?;
    wire::ask(&socket, &client, &agent, &event).map_err(|error| wire::silent(&socket, &error))
}
