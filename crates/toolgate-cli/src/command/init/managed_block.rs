//! Adds the tools of a client to an existing configuration, between two marker lines, and removes
//! them.

use std::path::Path;

use toolgate_config::Config;
use toolgate_json::Digest;

use super::template::client_template;
use toolgate_hook::client_hooks::SupportedClient;

/// Returns the tools that the template of a client declares.
pub(crate) fn template_tools(client: SupportedClient) -> impl Iterator<Item = &'static str> {
    client_template(client)
        .lines()
        .filter_map(|line| line.strip_prefix("[tools.")?.strip_suffix(']'))
}

/// The tools of a client that a configuration does not declare.
pub(crate) enum MissingTools {
    NothingMissing,
    /// The shell tool is missing. Contains the whole configuration with the tools added.
    Extended(String),
    /// The shell tool is missing, and the user must add this text: the configuration cannot be
    /// extended automatically.
    ManualShellTool(String),
    /// The shell tool is declared, and others are not, perhaps intentionally. Contains their
    /// declarations.
    ManualOtherTools(String),
}

impl MissingTools {
    /// Determines what a configuration lacks, together with the user's own.
    pub(crate) fn determine(
        client: SupportedClient,
        path: &Path,
        text: &str,
        user_config: Option<&Config>,
    ) -> Self {
        let config = parse_config(path, text);
        let declares = |tool: &str| {
            config.declares_tool(tool)
                || user_config.is_some_and(|user_config| user_config.declares_tool(tool))
        };
        let missing: Vec<&str> = template_tools(client).filter(|tool| !declares(tool)).collect();
        if missing.is_empty() {
            return Self::NothingMissing;
        }
        // A configuration without any client's tools has no `[client]` table. Rule names may be
        // taken.
        let has_no_client_tools =
            SupportedClient::ALL_WITH_HOOKS.iter().all(|client| !declares(client.shell_tool()));
        let suffix = format!("_{}", client.name().replace('-', "_"));
        let variants = [
            (has_no_client_tools, ""),
            (has_no_client_tools, suffix.as_str()),
            (false, ""),
            (false, suffix.as_str()),
        ];
        let mut bodies = variants.into_iter().map(|(has_client_table, suffix)| {
            select_template_parts(client, &missing, has_client_table, suffix)
        });
        let usable = bodies.find(|body| {
            is_usable_by_hook(path, &append_managed_block(client, text, body), user_config)
        });
        let has_block = text.contains(&start_marker_prefix(client));
        match (missing.contains(&client.shell_tool()), usable) {
            (true, Some(body)) if !has_block => {
                Self::Extended(append_managed_block(client, text, &body))
            }
            (true, usable) => Self::ManualShellTool(usable.unwrap_or_else(|| {
                select_template_parts(client, &missing, has_no_client_tools, "")
            })),
            (false, usable) => Self::ManualOtherTools(
                usable.unwrap_or_else(|| select_template_parts(client, &missing, false, "")),
            ),
        }
    }
}

/// Returns a configuration without what was added for a client; `None` if nothing was added.
///
/// # Errors
///
/// The reason why the added part must stay, for example because another client needs it.
pub(crate) fn remove_managed_block(
    client: SupportedClient,
    path: &Path,
    text: &str,
    user_config: Option<&Config>,
    others: &[SupportedClient],
) -> Result<Option<String>, String> {
    let start = start_marker_prefix(client);
    let found = text
        .strip_prefix(&start)
        .map(|rest| ("", rest))
        .or_else(|| text.split_once(&format!("\n{start}")));
    let Some((before, rest)) = found else { return Ok(None) };
    let changed = || "it was changed since; remove it by hand".to_owned();
    let (head, rest) = rest.split_once('\n').ok_or_else(changed)?;
    let (body, after) = rest.split_once(&end_marker(client)).ok_or_else(changed)?;
    if format!("{start}{head}\n") != start_marker(client, body) {
        return Err(changed());
    }
    // A key without a table header belongs to the table before it, and would move to another table.
    let next = after.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with('#'));
    if next.is_some_and(|line| !line.starts_with('[')) {
        return Err(changed());
    }
    // Restore a missing final line break.
    let gap =
        if before.is_empty() || before.ends_with('\n') || after.is_empty() { "" } else { "\n" };
    let remaining = format!("{before}{gap}{after}");
    let (with_block, without_block) = (parse_config(path, text), parse_config(path, &remaining));
    let needs = |other: &&SupportedClient| {
        with_block.declares_tool(other.shell_tool())
            && !without_block.declares_tool(other.shell_tool())
    };
    if let Some(other) = others.iter().find(needs) {
        return Err(format!("{} needs it too", other.name()));
    }
    if !is_usable_by_hook(path, &remaining, user_config) {
        return Err("the rest is not valid without it".to_owned());
    }
    Ok(Some(remaining))
}

fn parse_config(path: &Path, text: &str) -> Config {
    Config::parse(&path.display().to_string(), text)
}

/// Returns whether a hook can use a configuration: it is valid and has one agent.
fn is_usable_by_hook(path: &Path, text: &str, user_config: Option<&Config>) -> bool {
    let config = parse_config(path, text);
    let has_one_agent = config.agent_names().count() == 1;
    let config = match user_config {
        Some(user_config) => config.merge_under_user_config(user_config.clone()),
        None => config,
    };
    has_one_agent && config.for_client().build_agents(None).is_ok()
}

/// Returns the start of the marker line before the added part.
fn start_marker_prefix(client: SupportedClient) -> String {
    format!("# Added by `toolgate init --for {}` (", client.name())
}

/// Returns the marker line before the added part. Its digest shows whether the part was changed.
fn start_marker(client: SupportedClient, body: &str) -> String {
    let digest: String = Digest::of(body.as_bytes()).to_string().chars().take(16).collect();
    format!(
        "{}{digest}). As it is, `toolgate eject` takes it out again.\n",
        start_marker_prefix(client)
    )
}

/// Returns the marker line after the added part.
fn end_marker(client: SupportedClient) -> String {
    format!("# Up to here it was added by `toolgate init --for {}`.\n", client.name())
}

/// Appends a part with its marker lines to a configuration.
fn append_managed_block(client: SupportedClient, text: &str, body: &str) -> String {
    // An empty line shows that the line before it had a line break.
    let gap = if text.is_empty() { "" } else { "\n" };
    format!("{text}{gap}{}{body}{}", start_marker(client, body), end_marker(client))
}

/// Returns the tables and rules of some tools from a template, with a suffix for rule names.
///
/// Includes the `[client]` table if `has_client_table` is true.
fn select_template_parts(
    client: SupportedClient,
    missing: &[&str],
    has_client_table: bool,
    suffix: &str,
) -> String {
    let part = |part: &str| match part.lines().find(|line| line.starts_with('['))? {
        "[client]" => has_client_table.then(|| part.to_owned()),
        "[[policy]]" => restrict_template_rule(part, missing, suffix),
        header => {
            missing.iter().any(|tool| header == format!("[tools.{tool}]")).then(|| part.to_owned())
        }
    };
    let parts: Vec<String> =
        client_template(client).trim_end().split("\n\n").filter_map(part).collect();
    parts.join("\n\n") + "\n"
}

/// Restricts a rule of a template to some tools. Declared tools are judged by the user's own rules.
fn restrict_template_rule(part: &str, missing: &[&str], suffix: &str) -> Option<String> {
    let tools =
        part.lines().find(|line| line.starts_with("tools = "))?.split('"').skip(1).step_by(2);
    let tools: Vec<String> =
        tools.filter(|tool| missing.contains(tool)).map(|tool| format!("\"{tool}\"")).collect();
    let line = |line: &str| match line.split_once(" = ") {
        Some(("name", name)) => format!("name = \"{}{suffix}\"", name.trim_matches('"')),
        Some(("tools", _)) => format!("tools = [{}]", tools.join(", ")),
        _ => line.to_owned(),
    };
    (!tools.is_empty()).then(|| part.lines().map(line).collect::<Vec<_>>().join("\n"))
}
