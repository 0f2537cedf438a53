//! What a client needs of a configuration that is there already: found, added at its end between two marks, and taken out again.

use std::path::Path;

use toolgate::config::Config;
use toolgate::json::Digest;

use super::template_of;
use crate::client::Client;

/// The tools of a client, as its template declares them.
pub(in crate::command) fn tools(client: Client) -> impl Iterator<Item = &'static str> {
    template_of(client).lines().filter_map(|line| line.strip_prefix("[tools.")?.strip_suffix(']'))
}

/// What a configuration lacks of a client's tools.
pub(super) enum Lack {
    Nothing,
    /// The client cannot run a command: here is the whole text, with its tools.
    Added(String),
    /// The same, and a person has to add this: what stands there leaves no place for it.
    Unfit(String),
    /// It declares how the client runs commands, and leaves out others, on purpose perhaps: this would declare them.
    Others(String),
}

impl Lack {
    /// Looks at a configuration, beside which the user's own may hold.
    pub(super) fn of(client: Client, path: &Path, text: &str, own: Option<&Config>) -> Self {
        let config = parse(path, text);
        let declares = |tool: &str| config.declares(tool) || own.is_some_and(|own| own.declares(tool));
        let new: Vec<&str> = tools(client).filter(|tool| !declares(tool)).collect();
        if new.is_empty() {
            return Self::Nothing;
        }
        // Where no client has worked so far, nobody has said how one is answered; and names of rules may be taken.
        let unasked = Client::HOOKED.iter().all(|client| !declares(client.shell_tool()));
        let ending = format!("_{}", client.name().replace('-', "_"));
        let ways = [(unasked, ""), (unasked, ending.as_str()), (false, ""), (false, ending.as_str())];
        let mut bodies = ways.into_iter().map(|(answers, ending)| needed(client, &new, answers, ending));
        let fit = bodies.find(|body| loads(path, &with(client, text, body), own));
        let is_there = text.contains(&beginning(client));
        match (new.contains(&client.shell_tool()), fit) {
            (true, Some(body)) if !is_there => Self::Added(with(client, text, &body)),
            (true, fit) => Self::Unfit(fit.unwrap_or_else(|| needed(client, &new, unasked, ""))),
            (false, fit) => Self::Others(fit.unwrap_or_else(|| needed(client, &new, false, ""))),
        }
    }
}

/// A configuration without what was added for a client; `None` where nothing was. Where that stays, for other clients perhaps, why.
pub(super) fn without(client: Client, path: &Path, text: &str, own: Option<&Config>, others: &[Client]) -> Result<Option<String>, String> {
    let begins = beginning(client);
    let found = text.strip_prefix(&begins).map(|rest| ("", rest)).or_else(|| text.split_once(&format!("\n{begins}")));
    let Some((before, rest)) = found else { return Ok(None) };
    let changed = || "it was changed since; take out yourself what is not wanted any more".to_owned();
    let (head, rest) = rest.split_once('\n').ok_or_else(changed)?;
    let (body, after) = rest.split_once(&end(client)).ok_or_else(changed)?;
    if format!("{begins}{head}\n") != begin(client, body) {
        return Err(changed());
    }
    // What says nothing of its own table is said of the one before it, and would be of another.
    let next = after.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with('#'));
    if next.is_some_and(|line| !line.starts_with('[')) {
        return Err(changed());
    }
    // What had no line break at its end has none again.
    let gap = if before.is_empty() || before.ends_with('\n') || after.is_empty() { "" } else { "\n" };
    let left = format!("{before}{gap}{after}");
    let (now, then) = (parse(path, text), parse(path, &left));
    let needs = |other: &&Client| now.declares(other.shell_tool()) && !then.declares(other.shell_tool());
    if let Some(other) = others.iter().find(needs) {
        return Err(format!("{} needs it, too", other.name()));
    }
    if !loads(path, &left, own) {
        return Err("the rest does not load without it".to_owned());
    }
    Ok(Some(left))
}

fn parse(path: &Path, text: &str) -> Config {
    Config::parse(&path.display().to_string(), text)
}

/// Whether a hook could work with a configuration: it loads, and has one agent.
fn loads(path: &Path, text: &str, own: Option<&Config>) -> bool {
    let config = parse(path, text);
    let single = config.names().count() == 1;
    let config = match own {
        Some(own) => config.under(own.clone()),
        None => config,
    };
    single && config.for_client().agents(None).is_ok()
}

/// How the line begins that stands before what was added for a client.
fn beginning(client: Client) -> String {
    format!("# Added by `toolgate init --for {}` (", client.name())
}

/// The line that stands before it: it tells whether somebody has changed what follows.
fn begin(client: Client, body: &str) -> String {
    let digest: String = Digest::of(body.as_bytes()).to_string().chars().take(16).collect();
    format!("{}{digest}). As it is, `toolgate eject` takes it out again.\n", beginning(client))
}

/// The line that stands after it.
fn end(client: Client) -> String {
    format!("# Up to here it was added by `toolgate init --for {}`.\n", client.name())
}

/// A configuration with something at its end.
fn with(client: Client, text: &str, body: &str) -> String {
    // An empty line before it says that the line before that one was ended.
    let gap = if text.is_empty() { "" } else { "\n" };
    format!("{text}{gap}{}{body}{}", begin(client, body), end(client))
}

/// What a template says of some of its tools: their tables, and the rules about them. Names of rules have an ending, perhaps; how a
/// client is answered is said where that is wanted.
fn needed(client: Client, new: &[&str], answers: bool, ending: &str) -> String {
    let part = |part: &str| match part.lines().find(|line| line.starts_with('['))? {
        "[client]" => answers.then(|| part.to_owned()),
        "[[policy]]" => rule(part, new, ending),
        header => new.iter().any(|tool| header == format!("[tools.{tool}]")).then(|| part.to_owned()),
    };
    let parts: Vec<String> = template_of(client).trim_end().split("\n\n").filter_map(part).collect();
    parts.join("\n\n") + "\n"
}

/// A rule of a template, for some of the tools that it is about: what others have declared is theirs to judge.
fn rule(part: &str, new: &[&str], ending: &str) -> Option<String> {
    let tools = part.lines().find(|line| line.starts_with("tools = "))?.split('"').skip(1).step_by(2);
    let tools: Vec<String> = tools.filter(|tool| new.contains(tool)).map(|tool| format!("\"{tool}\"")).collect();
    let line = |line: &str| match line.split_once(" = ") {
        Some(("name", name)) => format!("name = \"{}{ending}\"", name.trim_matches('"')),
        Some(("tools", _)) => format!("tools = [{}]", tools.join(", ")),
        _ => line.to_owned(),
    };
    (!tools.is_empty()).then(|| part.lines().map(line).collect::<Vec<_>>().join("\n"))
}
