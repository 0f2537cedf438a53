//! `toolgate token`: a token for a client of the gateway.

use std::io::{self, Write};
use std::process::ExitCode;

use serde_json::json;
use toolgate::config::CANARY_PRINCIPAL;
use toolgate::json::{Digest, hex};

use super::ledger::{BOLD, DIM};

/// Make a token for a client of the gateway. It is shown once; what is kept of it is its digest.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  toolgate token ci                           a token for who is called ci here\n  toolgate token ci --agents support,billing  and may act as these two"
)]
pub(crate) struct Args {
    /// Who comes with it.
    principal: String,
    /// As which agents; all unless said.
    #[arg(long, value_delimiter = ',', value_name = "AGENT")]
    agents: Option<Vec<String>>,
    /// One JSON object: {"token", "principal", "sha256", "agents"}.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> io::Result<ExitCode> {
    if args.principal.trim().is_empty() {
        return Err(io::Error::other("say who comes with it, as in `toolgate token ci`"));
    }
    if args.principal == CANARY_PRINCIPAL {
        return Err(io::Error::other(format!("nobody is called `{CANARY_PRINCIPAL}` but who tries for a gateway whether it holds")));
    }
    let mut secret = [0; 32];
    getrandom::fill(&mut secret).map_err(io::Error::other)?;
    let token = format!("tg_{}", hex(&secret));
    let digest = Digest::of(token.as_bytes()).to_string();
    let mut out = anstream::stdout().lock();
    if args.json {
        writeln!(out, "{}", json!({"token": token, "principal": args.principal, "sha256": digest, "agents": args.agents}))?;
        return Ok(ExitCode::SUCCESS);
    }
    writeln!(out, "{BOLD}{token}{BOLD:#}")?;
    writeln!(
        out,
        "{DIM}it is not shown again; its client sends it as the header `Authorization: Bearer TOKEN`. This goes into toolgate.toml:{DIM:#}\n"
    )?;
    writeln!(out, "[[gateway.tokens]]\nprincipal = {}\nsha256 = \"{digest}\"", json!(args.principal))?;
    if let Some(agents) = &args.agents {
        writeln!(out, "agents = {}", json!(agents))?;
    }
    Ok(ExitCode::SUCCESS)
}
