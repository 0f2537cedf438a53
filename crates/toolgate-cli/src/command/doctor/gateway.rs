//! Checks the gateway and its upstreams.

use std::io;
use std::time::Duration;

use toolgate_mcp::{Gateway, GatewayOptions, UpstreamOptions, UpstreamStatus};

use super::{Args, DoctorFindings, FindingState};
use crate::command::common::format_count;
use crate::command::serve::{ServedConfigSource, config_pins_dir};
use toolgate_hook::effective_config;
use toolgate_hook::effective_config::UserStateDir;

/// Starts the gateway, and checks that its upstreams answer and that it refuses the canary.
pub(super) fn check_gateway(args: &Args, findings: &mut DoctorFindings) -> io::Result<()> {
    let source = ServedConfigSource::new(args.config.clone(), None)?;
    let program = std::env::current_exe()?;
    let in_force = source.find()?;
    let upstream_options = UpstreamOptions {
        pin_dir: Some(config_pins_dir(&UserStateDir::open()?, &in_force)),
        launcher: Some(program.clone()),
    };
    // In memory, so that the check leaves no rows.
    let options = GatewayOptions {
        built_in_rules: None,
        store: std::sync::Arc::new(toolgate::MemoryStore::default()),
        upstreams: upstream_options,
        upstream_start_timeout: Duration::from_secs(15),
        launcher: Some(program),
        principal: effective_config::local_user_name(),
        own_paths: toolgate_hook::builtin_rules::ProtectedPaths::collect(
            &in_force,
            &UserStateDir::open()?,
            &effective_config::project_dir()?,
        )
        .paths()
        .collect(),
    };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let opened = Gateway::open(move || Ok(source.find()?.config), options).await;
        match opened {
            Err(error) => findings.add("gateway", FindingState::Ill, error.to_string()),
            Ok(gateway) => {
                findings.add(
                    "canary",
                    FindingState::Well,
                    "a call that must be refused was refused",
                );
                for upstream in gateway.health() {
                    match &upstream.status {
                        UpstreamStatus::Up { .. } if upstream.held.is_empty() => findings.add(
                            "upstream",
                            FindingState::Well,
                            format!(
                                "{}: {}",
                                upstream.name,
                                format_count(upstream.tools as u64, "tool")
                            ),
                        ),
                        UpstreamStatus::Up { .. } => {
                            let quarantined = format_count(upstream.held.len() as u64, "tool");
                            let (health, why) = match (
                                upstream.pin_write_error(),
                                upstream.unusable_tools().count(),
                            ) {
                                (Some(why), _) => (
                                    FindingState::Ill,
                                    format!(": new definitions cannot be stored: {why}"),
                                ),
                                (None, 0) => (
                                    FindingState::Note,
                                    "; review with `toolgate upstream diff`".to_owned(),
                                ),
                                (None, unusable_count) => {
                                    let reasons = upstream.unusable_tools().map(|(tool, why)| {
                                        format!("\n{tool} does not fit the configuration: {why}")
                                    });
                                    let rest = if unusable_count < upstream.held.len() {
                                        "; review with `toolgate upstream diff`"
                                    } else {
                                        ""
                                    };
                                    (
                                        FindingState::Note,
                                        format!("{rest}{}", reasons.collect::<String>()),
                                    )
                                }
                            };
                            findings.add(
                                "upstream",
                                health,
                                format!("{}: {quarantined} quarantined{why}", upstream.name),
                            );
                        }
                        UpstreamStatus::Starting => findings.add(
                            "upstream",
                            FindingState::Ill,
                            format!("{}: no answer", upstream.name),
                        ),
                        UpstreamStatus::Down { why, .. } => findings.add(
                            "upstream",
                            FindingState::Ill,
                            format!("{}: {why}", upstream.name),
                        ),
                    }
                }
                gateway.shut_down().await;
            }
        }
    });
    Ok(())
}
