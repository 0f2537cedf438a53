//! Determines the caller, the agent and the session of a request.

use std::collections::BTreeSet;

use http::HeaderValue;
use http::request::Parts;
use rmcp::ErrorData;
use rmcp::model::{ErrorCode, RequestMetaObject};
use toolgate::{Agent, SessionKey, ToolSpec};

use crate::gateway::{ActiveConfig, Gateway};
use crate::server::tool_call::CallClient;

/// HTTP header that names the session.
pub(crate) const SESSION_HEADER: &str = "toolgate-session";
/// Metadata key that names the session.
pub(crate) const SESSION_META: &str = "toolgate/session";

/// An authenticated caller, with the restrictions of its token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Caller {
    pub(crate) principal: String,
    /// Agents that the caller may act as; `None` means all.
    pub(crate) agents: Option<Vec<String>>,
    /// Session that the token prescribes.
    pub(crate) session: Option<String>,
    pub(crate) auth_method: AuthMethod,
}

impl Caller {
    /// Returns whether both are one principal with the same rights, whichever tokens they used.
    pub(crate) fn has_same_rights(&self, other: &Self) -> bool {
        self.principal == other.principal
            && is_same_agents(self.agents.as_deref(), other.agents.as_deref())
            && self.session == other.session
    }
}

/// Returns whether both name the same agents, in any order.
pub(crate) fn is_same_agents(first: Option<&[String]>, second: Option<&[String]>) -> bool {
    match (first, second) {
        (Some(first), Some(second)) => {
            first.iter().collect::<BTreeSet<_>>() == second.iter().collect::<BTreeSet<_>>()
        }
        _ => first == second,
    }
}

/// How a caller was authenticated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AuthMethod {
    /// No token is required.
    Anonymous,
    /// By the token with this digest.
    Token(String),
    /// By a token of this issuer.
    Issuer(String),
}

/// Agent and session that the URL path names.
#[derive(Debug, Clone, Default)]
pub(crate) struct PathSelector {
    pub(crate) agent: Option<String>,
    pub(crate) session: Option<String>,
}

impl PathSelector {
    /// Decodes the segments of a URL path, each once; `None` if one is invalid.
    ///
    /// An encoded separator belongs to the name, as in a header.
    pub(crate) fn from_segments(segments: &[&str]) -> Option<Self> {
        let segment = |at: usize| segments.get(at).map(|segment| percent_decode(segment));
        Some(Self {
            agent: match segment(0) {
                Some(agent) => Some(agent?),
                None => None,
            },
            session: match segment(1) {
                Some(session) => Some(session?),
                None => None,
            },
        })
    }
}

/// Decodes a segment of a URL path: `%41` and `A` are the same.
fn percent_decode(segment: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(segment.len());
    let mut rest = segment.bytes();
    while let Some(byte) = rest.next() {
        let byte = match byte {
            b'%' => {
                let mut digit = || rest.next().and_then(|digit| char::from(digit).to_digit(16));
                u8::try_from(digit()? * 16 + digit()?).ok()?
            }
            plain => plain,
        };
        bytes.push(byte);
    }
    String::from_utf8(bytes).ok()
}

/// Identity of the client on standard streams, which the process fixes.
#[derive(Debug, Clone)]
pub(crate) struct StdioIdentity {
    pub(crate) caller: Caller,
    pub(crate) agent: Option<String>,
    pub(crate) session: String,
}

fn forbidden_error(message: impl Into<String>) -> ErrorData {
    ErrorData::invalid_request(message.into(), None)
}

/// Builds the error for an invalid request, independent of the caller.
fn invalid_error(message: impl Into<String>) -> ErrorData {
    ErrorData::invalid_params(message.into(), None)
}

/// Returns whether the request is invalid, rather than forbidden for the caller.
pub(crate) fn is_invalid_error(error: &ErrorData) -> bool {
    error.code == ErrorCode::INVALID_PARAMS
}

/// Returns the caller of a request and the agent that it names.
fn caller_and_named_agent(
    fixed: Option<&StdioIdentity>,
    parts: Option<&Parts>,
) -> Result<(Caller, Option<String>), ErrorData> {
    let caller = match (fixed, parts) {
        (Some(fixed), _) => fixed.caller.clone(),
        (None, Some(parts)) => parts
            .extensions
            .get::<Caller>()
            .cloned()
            .ok_or_else(|| forbidden_error("the request is not authenticated"))?,
        (None, None) => return Err(forbidden_error("unknown caller")),
    };
    let named_agent = parts
        .and_then(|parts| parts.extensions.get::<PathSelector>())
        .and_then(|selector| selector.agent.clone());
    Ok((caller, named_agent.or_else(|| fixed.and_then(|fixed| fixed.agent.clone()))))
}

/// Returns the caller and the agent of a request.
pub(crate) fn resolve_caller(
    running: &ActiveConfig,
    fixed: Option<&StdioIdentity>,
    parts: Option<&Parts>,
) -> Result<(Caller, String), ErrorData> {
    let (caller, named_agent) = caller_and_named_agent(fixed, parts)?;
    resolve_agent(running, &caller, named_agent.as_deref())
        .map(|agent| (caller, agent))
        .map_err(forbidden_error)
}

/// Returns the session in which a rejected request is recorded.
///
/// Clients cannot name this session. The name of an unknown agent is not recorded.
pub(crate) fn rejection_session(
    running: &ActiveConfig,
    caller: &Caller,
    named_agent: Option<&str>,
) -> SessionKey {
    let agent = named_agent
        .or_else(|| running.default_agent())
        .filter(|agent| running.agents.iter().any(|known| known == agent));
    SessionKey::new(agent.unwrap_or("(unknown)"), caller.principal.clone(), "(turned away)")
}

/// Returns the agent that a caller acts as.
pub(crate) fn resolve_agent(
    running: &ActiveConfig,
    caller: &Caller,
    named_agent: Option<&str>,
) -> Result<String, String> {
    let may = |agent: &str| {
        caller.agents.as_ref().is_none_or(|agents| agents.iter().any(|named| named == agent))
            && running
                .runtime
                .agent(agent)
                .is_some_and(|agent| agent.can_be_used_by(&caller.principal))
    };
    let Some(agent) = named_agent.or_else(|| running.default_agent()) else {
        // The error does not reveal agents that the caller may not act as.
        let allowed: Vec<&str> =
            running.agents.iter().map(String::as_str).filter(|agent| may(agent)).collect();
        return Err(match allowed.as_slice() {
            [] => format!("`{}` may not act as any agent", caller.principal),
            allowed => {
                format!("name an agent in the URL, as in /mcp/{{agent}}: {}", allowed.join(", "))
            }
        });
    };
    // The error does not reveal whether the agent exists.
    if running.agents.iter().any(|known| known == agent) && may(agent) {
        Ok(agent.to_owned())
    } else {
        Err(format!("`{}` may not act as the agent `{}`", caller.principal, printable_name(agent)))
    }
}

/// Returns a tool of the agent that a caller acts as, if the caller may see it.
pub(crate) fn find_visible_tool<'r>(
    running: &'r ActiveConfig,
    caller: &Caller,
    named_agent: Option<&str>,
    name: &str,
) -> Option<&'r ToolSpec> {
    running
        .runtime
        .agent(&resolve_agent(running, caller, named_agent).ok()?)?
        .tool_for(&caller.principal, name)
}

/// Returns whether a caller may act as all agents and see all their tools.
///
/// A token that names agents excludes agents that are added later.
pub(crate) fn can_see_all(running: &ActiveConfig, caller: &Caller) -> bool {
    let sees = |agent: &Agent| {
        agent.can_be_used_by(&caller.principal)
            && agent.tools_for(&caller.principal).count() == agent.tools().count()
    };
    caller.agents.is_none()
        && running.agents.iter().filter_map(|name| running.runtime.agent(name)).all(sees)
}

fn printable_name(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(64).collect()
}

/// Returns the session of a call request, or the session for its rejection and the reason.
pub(crate) fn resolve_call_session(
    gateway: &Gateway,
    running: &ActiveConfig,
    fixed: Option<&StdioIdentity>,
    client: &CallClient<'_>,
) -> Result<Result<SessionKey, (SessionKey, ErrorData)>, ErrorData> {
    let (caller, named_agent) = caller_and_named_agent(fixed, client.parts)?;
    let found = resolve_session(gateway, running, fixed, client);
    Ok(found
        .map_err(|refused| (rejection_session(running, &caller, named_agent.as_deref()), refused)))
}

/// Returns the session of a request.
pub(crate) fn resolve_session(
    gateway: &Gateway,
    running: &ActiveConfig,
    fixed: Option<&StdioIdentity>,
    client: &CallClient<'_>,
) -> Result<SessionKey, ErrorData> {
    let (caller, agent) = resolve_caller(running, fixed, client.parts)?;
    let parts = client.parts;
    let name = resolve_session_name(&caller, session_from_meta(client.meta)?, parts)?;
    let name = match (name, fixed) {
        (Some(name), _) => name,
        (None, Some(fixed)) => fixed.session.clone(),
        (None, None) => match parts
            .and_then(|parts| parts.headers.get("mcp-session-id"))
            .and_then(|id| id.to_str().ok())
        {
            Some(id) => id.to_owned(),
            None => gateway.0.default_sessions.session_name(
                &caller.principal,
                &agent,
                running.settings.session_idle_timeout,
                &gateway.0.suspended,
            ),
        },
    };
    Ok(SessionKey::new(agent, caller.principal, name))
}

/// Returns the session that metadata names.
fn session_from_meta(meta: &RequestMetaObject) -> Result<Option<&str>, ErrorData> {
    match meta.get(SESSION_META) {
        None => Ok(None),
        Some(serde_json::Value::String(name)) => Ok(Some(name)),
        Some(_) => Err(invalid_error(format!("`{SESSION_META}` must be text"))),
    }
}

/// Returns whether a session name is valid.
pub(crate) fn is_session_name(session: &str) -> bool {
    !session.is_empty() && session.len() <= 128 && session.chars().all(|c| c.is_ascii_graphic())
}

/// Returns the session that the token, metadata, a header or the URL names. All must agree.
pub(crate) fn resolve_session_name(
    caller: &Caller,
    meta: Option<&str>,
    parts: Option<&Parts>,
) -> Result<Option<String>, ErrorData> {
    let mut values = parts.into_iter().flat_map(|parts| parts.headers.get_all(SESSION_HEADER));
    let text = |value: &HeaderValue| {
        value
            .to_str()
            .map(str::to_owned)
            .map_err(|_| invalid_error(format!("the header `{SESSION_HEADER}` is not valid text")))
    };
    let header = values.next().map(text).transpose()?;
    if values.next().is_some() {
        return Err(invalid_error(format!("the header `{SESSION_HEADER}` occurs twice")));
    }
    let path = parts
        .and_then(|parts| parts.extensions.get::<PathSelector>())
        .and_then(|selector| selector.session.as_deref());
    let mut names =
        [caller.session.as_deref(), meta, header.as_deref(), path].into_iter().flatten();
    let Some(first) = names.next() else { return Ok(None) };
    if names.any(|other| other != first) {
        return Err(forbidden_error("the request names two sessions; name one"));
    }
    if !is_session_name(first) {
        return Err(invalid_error(
            "a session name must have 1 to 128 ASCII letters, digits or punctuation characters",
        ));
    }
    Ok(Some(first.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agents_are_equal_in_any_order() {
        let caller = |agents: Option<&[&str]>| Caller {
            principal: "ann".to_owned(),
            agents: agents.map(|names| names.iter().map(|name| (*name).to_owned()).collect()),
            session: None,
            auth_method: AuthMethod::Anonymous,
        };
        let base = caller(Some(&["a", "b"]));
        for (agents, same) in [
            (Some(&["a", "b"][..]), true),
            (Some(&["b", "a"][..]), true),
            (Some(&["b", "a", "b"][..]), true),
            (Some(&["a"][..]), false),
            (Some(&["a", "b", "c"][..]), false),
            (Some(&[][..]), false),
            (None, false),
        ] {
            let other = caller(agents);
            assert_eq!(
                (
                    base.has_same_rights(&other),
                    other.has_same_rights(&base),
                    other.has_same_rights(&other)
                ),
                (same, same, true),
                "{agents:?}"
            );
        }
    }

    #[test]
    fn path_segments_are_decoded_once() {
        for (segment, name) in [
            ("plain", Some("plain")),
            ("%70%6Cai%6e", Some("plain")),
            ("a%2Fb", Some("a/b")),
            ("a%252Fb", Some("a%2Fb")),
            ("%2E%2e", Some("..")),
            ("a+b", Some("a+b")),
            ("%C3%A4", Some("ä")),
            ("%", None),
            ("%4", None),
            ("%zz", None),
            ("%-1", None),
            ("%+1", None),
            ("%C3", None),
            ("%ff", None),
        ] {
            assert_eq!(percent_decode(segment).as_deref(), name, "{segment}");
        }
        let selector = PathSelector::from_segments(&["%61", "s%2Ft"]).unwrap();
        assert_eq!(
            (selector.agent.as_deref(), selector.session.as_deref()),
            (Some("a"), Some("s/t"))
        );
        assert!(
            PathSelector::from_segments(&["a", "%"]).is_none()
                && PathSelector::from_segments(&[])
                    .is_some_and(|selector| selector.agent.is_none())
        );
    }
}
