//! Who is calling, as which agent, and in which conversation.

use std::collections::BTreeSet;

use http::HeaderValue;
use http::request::Parts;
use rmcp::ErrorData;
use rmcp::model::{ErrorCode, RequestMetaObject};
use toolgate::{Agent, SessionKey, Spec};

use crate::calls::Client;
use crate::gateway::{Gateway, Running};

/// The header that names a conversation.
pub(crate) const SESSION_HEADER: &str = "toolgate-session";
/// The metadata that does.
pub(crate) const SESSION_META: &str = "toolgate/session";

/// Who came in, and what the token says beside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Caller {
    pub(crate) principal: String,
    /// As which agents; all unless said.
    pub(crate) agents: Option<Vec<String>>,
    /// The conversation that the token names.
    pub(crate) session: Option<String>,
    pub(crate) proof: Proof,
}

impl Caller {
    /// Whether it is the same one with the same rights, however that is known: one token may take the place of another.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.principal == other.principal && same_agents(self.agents.as_deref(), other.agents.as_deref()) && self.session == other.session
    }
}

/// Whether the same agents are named, in whatever order.
pub(crate) fn same_agents(one: Option<&[String]>, other: Option<&[String]>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => one.iter().collect::<BTreeSet<_>>() == other.iter().collect::<BTreeSet<_>>(),
        _ => one == other,
    }
}

/// How it is known who came in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Proof {
    /// It is not asked.
    Nothing,
    /// By the token of this digest.
    Token(String),
    /// By the word of this issuer.
    Issuer(String),
}

/// What the address says.
#[derive(Debug, Clone, Default)]
pub(crate) struct Asked {
    pub(crate) agent: Option<String>,
    pub(crate) session: Option<String>,
}

impl Asked {
    /// What the words of an address say, each decoded once; `None` where one cannot be. A separator that is encoded parts nothing: it
    /// belongs to the name, as it does where a header says the name.
    pub(crate) fn of(words: &[&str]) -> Option<Self> {
        let word = |at: usize| words.get(at).map(|word| decoded(word));
        Some(Self {
            agent: match word(0) {
                Some(agent) => Some(agent?),
                None => None,
            },
            session: match word(1) {
                Some(session) => Some(session?),
                None => None,
            },
        })
    }
}

/// A word of an address as it is meant: `%41` and `A` are one letter.
fn decoded(word: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(word.len());
    let mut rest = word.bytes();
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

/// A door that belongs to one process: standard streams.
#[derive(Debug, Clone)]
pub(crate) struct Fixed {
    pub(crate) caller: Caller,
    pub(crate) agent: Option<String>,
    pub(crate) session: String,
}

fn refuse(message: impl Into<String>) -> ErrorData {
    ErrorData::invalid_request(message.into(), None)
}

/// What is said is no good, whoever says it: such a request is not turned away, but not understood.
fn misread(message: impl Into<String>) -> ErrorData {
    ErrorData::invalid_params(message.into(), None)
}

/// Whether it is the request that is no good, and not who makes it.
pub(crate) fn is_misread(error: &ErrorData) -> bool {
    error.code == ErrorCode::INVALID_PARAMS
}

/// Who makes a request, and the agent that it names.
fn who(fixed: Option<&Fixed>, parts: Option<&Parts>) -> Result<(Caller, Option<String>), ErrorData> {
    let caller = match (fixed, parts) {
        (Some(fixed), _) => fixed.caller.clone(),
        (None, Some(parts)) => parts.extensions.get::<Caller>().cloned().ok_or_else(|| refuse("nobody has let this request in"))?,
        (None, None) => return Err(refuse("it is not known who asks")),
    };
    let asked = parts.and_then(|parts| parts.extensions.get::<Asked>()).and_then(|asked| asked.agent.clone());
    Ok((caller, asked.or_else(|| fixed.and_then(|fixed| fixed.agent.clone()))))
}

/// The caller and the agent of a request.
pub(crate) fn caller(running: &Running, fixed: Option<&Fixed>, parts: Option<&Parts>) -> Result<(Caller, String), ErrorData> {
    let (caller, asked) = who(fixed, parts)?;
    agent(running, &caller, asked.as_deref()).map(|agent| (caller, agent)).map_err(refuse)
}

/// Where it is recorded that a caller was turned away. No client can name such a conversation, and what it calls an agent that is not
/// there is not written down.
pub(crate) fn turned_away(running: &Running, caller: &Caller, asked: Option<&str>) -> SessionKey {
    let agent = asked.or_else(|| running.default_agent()).filter(|agent| running.agents.iter().any(|known| known == agent));
    SessionKey::new(agent.unwrap_or("(unknown)"), caller.principal.clone(), "(turned away)")
}

/// The agent that a caller acts as.
pub(crate) fn agent(running: &Running, caller: &Caller, asked: Option<&str>) -> Result<String, String> {
    let may = |agent: &str| {
        caller.agents.as_ref().is_none_or(|agents| agents.iter().any(|named| named == agent))
            && running.gate.agent(agent).is_some_and(|agent| agent.admits(&caller.principal))
    };
    let Some(agent) = asked.or_else(|| running.default_agent()) else {
        // Of those that it may not act as it does not learn.
        let own: Vec<&str> = running.agents.iter().map(String::as_str).filter(|agent| may(agent)).collect();
        return Err(match own.as_slice() {
            [] => format!("`{}` may not act as any agent", caller.principal),
            own => format!("name an agent in the address, as in /mcp/{{agent}}: {}", own.join(", ")),
        });
    };
    // Who may not act as an agent does not learn whether there is one.
    if running.agents.iter().any(|known| known == agent) && may(agent) {
        Ok(agent.to_owned())
    } else {
        Err(format!("`{}` may not act as the agent `{}`", caller.principal, clean(agent)))
    }
}

/// A tool of the agent that a caller acts as, where it sees it.
pub(crate) fn tool<'r>(running: &'r Running, caller: &Caller, asked: Option<&str>, name: &str) -> Option<&'r Spec> {
    running.gate.agent(&agent(running, caller, asked).ok()?)?.tool_for(&caller.principal, name)
}

/// Whether no agent is kept from a caller, and no tool of any. One whose token names agents may not act as those that come later.
pub(crate) fn sees_all(running: &Running, caller: &Caller) -> bool {
    let sees = |agent: &Agent| agent.admits(&caller.principal) && agent.tools_for(&caller.principal).count() == agent.tools().count();
    caller.agents.is_none() && running.agents.iter().filter_map(|name| running.gate.agent(name)).all(sees)
}

fn clean(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(64).collect()
}

/// The conversation of a request for a call; else the one in which it is refused, and why.
pub(crate) fn of_call(
    gateway: &Gateway,
    running: &Running,
    fixed: Option<&Fixed>,
    client: &Client<'_>,
) -> Result<Result<SessionKey, (SessionKey, ErrorData)>, ErrorData> {
    let (caller, asked) = who(fixed, client.parts)?;
    let found = session(gateway, running, fixed, client);
    Ok(found.map_err(|refused| (turned_away(running, &caller, asked.as_deref()), refused)))
}

/// The conversation of a request.
pub(crate) fn session(gateway: &Gateway, running: &Running, fixed: Option<&Fixed>, client: &Client<'_>) -> Result<SessionKey, ErrorData> {
    let (caller, agent) = caller(running, fixed, client.parts)?;
    let parts = client.parts;
    let name = named(&caller, meta(client.meta)?, parts)?;
    let name = match (name, fixed) {
        (Some(name), _) => name,
        (None, Some(fixed)) => fixed.session.clone(),
        (None, None) => match parts.and_then(|parts| parts.headers.get("mcp-session-id")).and_then(|id| id.to_str().ok()) {
            Some(id) => id.to_owned(),
            None => gateway.0.idle.name(&caller.principal, &agent, running.settings.idle, &gateway.0.parked),
        },
    };
    Ok(SessionKey::new(agent, caller.principal, name))
}

/// The conversation that metadata names.
fn meta(meta: &RequestMetaObject) -> Result<Option<&str>, ErrorData> {
    match meta.get(SESSION_META) {
        None => Ok(None),
        Some(serde_json::Value::String(name)) => Ok(Some(name)),
        Some(_) => Err(misread(format!("`{SESSION_META}` must be text"))),
    }
}

/// Whether a conversation can be called so.
pub(crate) fn is_name(session: &str) -> bool {
    !session.is_empty() && session.len() <= 128 && session.chars().all(|c| c.is_ascii_graphic())
}

/// The conversation that somebody names: the token, the metadata, a header, the address. Those who name one must agree.
pub(crate) fn named(caller: &Caller, meta: Option<&str>, parts: Option<&Parts>) -> Result<Option<String>, ErrorData> {
    let mut values = parts.into_iter().flat_map(|parts| parts.headers.get_all(SESSION_HEADER));
    let text =
        |value: &HeaderValue| value.to_str().map(str::to_owned).map_err(|_| misread(format!("the header `{SESSION_HEADER}` is no text")));
    let header = values.next().map(text).transpose()?;
    if values.next().is_some() {
        return Err(misread(format!("the header `{SESSION_HEADER}` is there twice")));
    }
    let path = parts.and_then(|parts| parts.extensions.get::<Asked>()).and_then(|asked| asked.session.as_deref());
    let mut said = [caller.session.as_deref(), meta, header.as_deref(), path].into_iter().flatten();
    let Some(first) = said.next() else { return Ok(None) };
    if said.any(|other| other != first) {
        return Err(refuse("the request names two conversations; name one"));
    }
    if !is_name(first) {
        return Err(misread("the name of a conversation has 1 to 128 letters, digits and signs"));
    }
    Ok(Some(first.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agents_are_the_same_in_whatever_order() {
        let caller = |agents: Option<&[&str]>| Caller {
            principal: "ann".to_owned(),
            agents: agents.map(|names| names.iter().map(|name| (*name).to_owned()).collect()),
            session: None,
            proof: Proof::Nothing,
        };
        let own = caller(Some(&["a", "b"]));
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
            assert_eq!((own.is_same(&other), other.is_same(&own), other.is_same(&other)), (same, same, true), "{agents:?}");
        }
    }

    #[test]
    fn a_name_is_the_same_however_it_is_spelt() {
        for (word, name) in [
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
            assert_eq!(decoded(word).as_deref(), name, "{word}");
        }
        let asked = Asked::of(&["%61", "s%2Ft"]).unwrap();
        assert_eq!((asked.agent.as_deref(), asked.session.as_deref()), (Some("a"), Some("s/t")));
        assert!(Asked::of(&["a", "%"]).is_none() && Asked::of(&[]).is_some_and(|asked| asked.agent.is_none()));
    }
}
