//! Adds the tools of a client to an existing configuration, between two marker lines, and removes
//! them.

use std::path::Path;

use toolgate_config::Config;
use toolgate_json::Digest;

use super::client_template;
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
        own: Option<&Config>,
    ) -> Self {
        let config = parse_config(path, text);
        let declares = |tool: &str| {
            config.declares_tool(tool) || own.is_some_and(|own| own.declares_tool(tool))
        };
        let new: Vec<&str> = template_tools(client).filter(|tool| !declares(tool)).collect();
        if new.is_empty() {
            return Self::NothingMissing;
        }
        // A configuration without any client's tools has no `[client]` table. Rule names may be
        // taken.
        let unasked =
            SupportedClient::ALL_WITH_HOOKS.iter().all(|client| !declares(client.shell_tool()));
        let ending = format!("_{}", client.name().replace('-', "_"));
        let ways =
            [(unasked, ""), (unasked, ending.as_str()), (false, ""), (false, ending.as_str())];
        let mut bodies = ways
            .into_iter()
            .map(|(answers, ending)| select_template_parts(client, &new, answers, ending));
        let fit = bodies
            .find(|body| is_usable_by_hook(path, &append_managed_block(client, text, body), own));
        let is_there = text.contains(&start_marker_prefix(client));
        match (new.contains(&client.shell_tool()), fit) {
            (true, Some(body)) if !is_there => {
                Self::Extended(append_managed_block(client, text, &body))
            }
            (true, fit) => Self::ManualShellTool(
                fit.unwrap_or_else(|| select_template_parts(client, &new, unasked, "")),
            ),
            (false, fit) => Self::ManualOtherTools(
                fit.unwrap_or_else(|| select_template_parts(client, &new, false, "")),
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
    own: Option<&Config>,
    others: &[SupportedClient],
) -> Result<Option<String>, String> {
    let begins = start_marker_prefix(client);
    let found = text
        .strip_prefix(&begins)
        .map(|rest| ("", rest))
        .or_else(|| text.split_once(&format!("\n{begins}")));
    let Some((before, rest)) = found else { return Ok(None) };
    let changed = || "it was changed since; remove it by hand".to_owned();
    let (head, rest) = rest.split_once('\n').ok_or_else(changed)?;
    let (body, after) = rest.split_once(&end_marker(client)).ok_or_else(changed)?;
    if format!("{begins}{head}\n") != start_marker(client, body) {
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
    let left = format!("{before}{gap}{after}");
    let (now, then) = (parse_config(path, text), parse_config(path, &left));
    let needs = |other: &&SupportedClient| {
        now.declares_tool(other.shell_tool()) && !then.declares_tool(other.shell_tool())
    };
    if let Some(other) = others.iter().find(needs) {
        return Err(format!("{} needs it too", other.name()));
    }
    if !is_usable_by_hook(path, &left, own) {
        return Err("the rest is not valid without it".to_owned());
    }
    Ok(Some(left))
}

fn parse_config(path: &Path, text: &str) -> Config {
    Config::parse(&path.display().to_string(), text)
}

/// Returns whether a hook can use a configuration: it is valid and has one agent.
fn is_usable_by_hook(path: &Path, text: &str, own: Option<&Config>) -> bool {
    let config = parse_config(path, text);
    let single = config.agent_names().count() == 1;
    let config = match own {
        Some(own) => config.merge_under_user_config(own.clone()),
        None => config,
    };
    single && config.for_client().build_agents(None).is_ok()
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
/// Includes the `[client]` table if `answers` is true.
fn select_template_parts(
    client: SupportedClient,
    new: &[&str],
    answers: bool,
    ending: &str,
) -> String {
    let part = |part: &str| match part.lines().find(|line| line.starts_with('['))? {
        "[client]" => answers.then(|| part.to_owned()),
        "[[policy]]" => restrict_template_rule(part, new, ending),
        header => {
            new.iter().any(|tool| header == format!("[tools.{tool}]")).then(|| part.to_owned())
        }
    };
    let parts: Vec<String> =
        client_template(client).trim_end().split("\n\n").filter_map(part).collect();
    parts.join("\n\n") + "\n"
}

/// Restricts a rule of a template to some tools. Declared tools are judged by the user's own rules.
fn restrict_template_rule(part: &str, new: &[&str], ending: &str) -> Option<String> {
    let tools =
        part.lines().find(|line| line.starts_with("tools = "))?.split('"').skip(1).step_by(2);
    let tools: Vec<String> =
        tools.filter(|tool| new.contains(tool)).map(|tool| format!("\"{tool}\"")).collect();
    let line = |line: &str| match line.split_once(" = ") {
        Some(("name", name)) => format!("name = \"{}{ending}\"", name.trim_matches('"')),
        Some(("tools", _)) => format!("tools = [{}]", tools.join(", ")),
        _ => line.to_owned(),
    };
    (!tools.is_empty()).then(|| part.lines().map(line).collect::<Vec<_>>().join("\n"))
}
