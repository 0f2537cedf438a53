//! How this place is called by those who need a token for it (RFC 9728).

use http::StatusCode;
use http::header::{HOST, WWW_AUTHENTICATE};
use http::request::Parts;
use serde_json::json;
use toolgate::config::Jwt;
use url::Url;

use super::{Answer, json_answer, refusal};
use crate::auth::NotLetIn;
use crate::gateway::Running;

/// Where an issuer's metadata of a place stands, before the path of that.
const METADATA: &str = "/.well-known/oauth-protected-resource";

/// What clients know this place as.
struct Place {
    /// Scheme, host and port.
    origin: String,
    /// The path that stands for `/mcp`, without an end.
    path: String,
    /// What it is as a whole.
    named: String,
}

impl Place {
    /// The address that is said; else the audience, where that is one; else that by which the client calls.
    fn of(running: &Running, jwt: &Jwt, parts: &Parts) -> Self {
        let address = |text: &str| Url::parse(text).ok().filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
        let parted = |url: &Url| (url.origin().ascii_serialization(), url.path().trim_end_matches('/').to_owned());
        if let Some((said, url)) = jwt.resource.as_ref().and_then(|said| Some((said, address(said)?))) {
            let (origin, path) = parted(&url);
            return Self { origin, path, named: said.clone() };
        }
        if let Some(url) = address(&jwt.audience) {
            let (origin, path) = parted(&url);
            // An audience may be any name. Only one that ends so is the whole address.
            let path = if path.ends_with("/mcp") { path } else { "/mcp".to_owned() };
            return Self { origin, path, named: jwt.audience.clone() };
        }
        let origin = called(running, parts);
        Self { named: format!("{origin}/mcp"), origin, path: "/mcp".to_owned() }
    }
}

/// Scheme and host by which the client calls.
fn called(running: &Running, parts: &Parts) -> String {
    let host = parts.headers.get(HOST).and_then(|host| host.to_str().ok()).unwrap_or("localhost");
    format!("{}://{host}", if running.settings.tls.is_some() { "https" } else { "http" })
}

/// What follows `/mcp` in an address, `""` or `/{agent}` or `/{agent}/{session}`, where it can stand in one as it is. Which agents there
/// are nobody learns by it.
fn behind(words: &[&str]) -> Option<String> {
    let plain = |word: &&str| word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._~%!$&'()*+,;=:@".contains(&byte));
    (words.len() <= 2 && words.iter().all(plain)).then(|| words.iter().map(|word| format!("/{word}")).collect())
}

/// Who signs tokens for a place that is called so; the words are those of its path.
pub(super) fn metadata(running: &Running, parts: &Parts, words: &[&str]) -> Answer {
    let Some(jwt) = &running.settings.jwt else {
        return *refusal(StatusCode::NOT_FOUND, "no token of anybody else is taken here", None);
    };
    let place = Place::of(running, jwt, parts);
    let own: Vec<&str> = place.path.split('/').filter(|word| !word.is_empty()).collect();
    if !words.is_empty() && words.strip_prefix(own.as_slice()).and_then(behind).is_none() {
        return *refusal(StatusCode::NOT_FOUND, "there is nothing of that name", None);
    }
    // One token is for all that stands below it: clients ask their issuer for one by this very name.
    let about = json!({"resource": place.named, "authorization_servers": [jwt.issuer], "bearer_methods_supported": ["header"],
        "resource_name": "toolgate", "resource_documentation": format!("{}/openapi.json", place.origin)});
    json_answer(StatusCode::OK, &about)
}

/// What somebody hears who is not let in, at an address with these words.
pub(super) fn challenge(running: &Running, parts: &Parts, words: &[&str], why: NotLetIn) -> Box<Answer> {
    let (said, error) = match why {
        NotLetIn::Missing => ("a token is needed", ""),
        NotLetIn::Invalid(why) => (why, ", error=\"invalid_token\""),
    };
    let mut answer = refusal(StatusCode::UNAUTHORIZED, said, None);
    let named = running.settings.jwt.as_ref().map(|jwt| {
        let place = Place::of(running, jwt, parts);
        let rest = words.strip_prefix(&["mcp"]).and_then(behind).unwrap_or_default();
        format!(" resource_metadata=\"{}{METADATA}{}{rest}\"{error}", place.origin, place.path)
    });
    if let Ok(value) = format!("Bearer{}", named.unwrap_or_default()).parse() {
        answer.headers_mut().insert(WWW_AUTHENTICATE, value);
    }
    answer
}
