//! Implements `toolgate token`: creates a token for a client of the gateway.

use std::io::{self, Write};
use std::process::ExitCode;

use serde_json::json;
use toolgate::policy::source::CANARY_PRINCIPAL;
use toolgate_json::{Digest, hex};

use crate::command::common::{BOLD, DIM};

/// Create a token for a client of the gateway.
///
/// The token is printed once. The configuration contains only its digest.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  toolgate token ci                           a token for the principal ci\n  toolgate token ci --agents support,billing  only for these agents"
)]
pub(crate) struct Args {
    /// Principal that the token authenticates.
    principal: String,
    /// Agents this token may use [default: all].
    #[arg(long, value_delimiter = ',', value_name = "AGENT")]
    agents: Option<Vec<String>>,
    /// Print one JSON object: {"token", "principal", "sha256", "agents"}.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> io::Result<ExitCode> {
    if args.principal.trim().is_empty() {
        return Err(io::Error::other(
            "the principal is empty; name one, as in `toolgate token ci`",
        ));
    }
    if args.principal == CANARY_PRINCIPAL {
        return Err(io::Error::other(format!(
            "principal name `{CANARY_PRINCIPAL}` is reserved for the self-test"
        )));
    }
    let mut secret = [0; 32];
    getrandom::fill(&mut secret).map_err(io::Error::other)?;
    let token = format!("tg_{}", hex(&secret));
    let digest = Digest::of(token.as_bytes()).to_string();
    let mut out = anstream::stdout().lock();
    if args.json {
        writeln!(
            out,
            "{}",
            json!({"token": token, "principal": args.principal, "sha256": digest, "agents": args.agents})
        )?;
        return Ok(ExitCode::SUCCESS);
    }
    writeln!(out, "{BOLD}{token}{BOLD:#}")?;
    writeln!(
        out,
        "{DIM}the token is not shown again; the client sends it as `Authorization: Bearer TOKEN`. Add this to toolgate.toml:{DIM:#}\n"
    )?;
    writeln!(
        out,
        "[[gateway.tokens]]\nprincipal = {}\nsha256 = \"{digest}\"",
        json!(args.principal)
    )?;
    if let Some(agents) = &args.agents {
        writeln!(out, "agents = {}", json!(agents))?;
    }
    Ok(ExitCode::SUCCESS)
}
