//! Serves the metadata of a protected resource (RFC 9728), for clients that need a token.

use http::StatusCode;
use http::header::{HOST, WWW_AUTHENTICATE};
use http::request::Parts;
use serde_json::json;
use toolgate_config::JwtConfig;
use url::Url;

use super::{HttpResponse, error_response, json_response};
use crate::gateway::ActiveConfig;
use crate::server::auth::AuthError;

/// Path prefix of the metadata document.
const METADATA_PATH_PREFIX: &str = "/.well-known/oauth-protected-resource";

/// Public addresses of this gateway.
struct ProtectedResource {
    /// Scheme, host and port.
    origin: String,
    /// Public path of `/mcp`, without a slash at the end.
    path: String,
    /// Identifier of the resource.
    identifier: String,
}

impl ProtectedResource {
    /// Uses the configured resource, else the audience if it is a URL, else the address of the
    /// request.
    fn from_config(running: &ActiveConfig, jwt: &JwtConfig, parts: &Parts) -> Self {
        let address = |text: &str| {
            Url::parse(text)
                .ok()
                .filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host())
        };
        let split = |url: &Url| {
            (url.origin().ascii_serialization(), url.path().trim_end_matches('/').to_owned())
        };
        if let Some((identifier, url)) =
            jwt.resource.as_ref().and_then(|identifier| Some((identifier, address(identifier)?)))
        {
            let (origin, path) = split(&url);
            return Self { origin, path, identifier: identifier.clone() };
        }
        if let Some(url) = address(&jwt.audience) {
            let (origin, path) = split(&url);
            // An audience may be any URL. Only one that ends with `/mcp` is the whole address.
            let path = if path.ends_with("/mcp") { path } else { "/mcp".to_owned() };
            return Self { origin, path, identifier: jwt.audience.clone() };
        }
        let origin = request_origin(running, parts);
        Self { identifier: format!("{origin}/mcp"), origin, path: "/mcp".to_owned() }
    }
}

/// Returns scheme and host of a request.
fn request_origin(running: &ActiveConfig, parts: &Parts) -> String {
    let host = parts.headers.get(HOST).and_then(|host| host.to_str().ok()).unwrap_or("localhost");
    format!("{}://{host}", if running.settings.tls.is_some() { "https" } else { "http" })
}

/// Returns the rest of a path after `/mcp`, if it needs no encoding.
///
/// This is `""`, `/{agent}` or `/{agent}/{session}`. It does not reveal which agents exist.
fn path_after_mcp(segments: &[&str]) -> Option<String> {
    let plain = |segment: &&str| {
        segment
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-._~%!$&'()*+,;=:@".contains(&byte))
    };
    (segments.len() <= 2 && segments.iter().all(plain))
        .then(|| segments.iter().map(|segment| format!("/{segment}")).collect())
}

/// Serves the metadata document for the path with these segments.
pub(crate) fn metadata_response(
    running: &ActiveConfig,
    parts: &Parts,
    segments: &[&str],
) -> HttpResponse {
    let Some(jwt) = &running.settings.jwt else {
        return *error_response(StatusCode::NOT_FOUND, "no token issuer is configured", None);
    };
    let resource = ProtectedResource::from_config(running, jwt, parts);
    let own_segments: Vec<&str> =
        resource.path.split('/').filter(|segment| !segment.is_empty()).collect();
    if !segments.is_empty()
        && segments.strip_prefix(own_segments.as_slice()).and_then(path_after_mcp).is_none()
    {
        return *error_response(StatusCode::NOT_FOUND, "unknown resource", None);
    }
    // One token is valid for all agents. Clients request it from the issuer by this identifier.
    let metadata = json!({"resource": resource.identifier, "authorization_servers": [jwt.issuer], "bearer_methods_supported": ["header"],
        "resource_name": "toolgate", "resource_documentation": format!("{}/openapi.json", resource.origin)});
    json_response(StatusCode::OK, &metadata)
}

/// Builds the response to an unauthenticated request for the path with these segments.
pub(crate) fn unauthorized_response(
    running: &ActiveConfig,
    parts: &Parts,
    segments: &[&str],
    why: AuthError,
) -> Box<HttpResponse> {
    let (message, error) = match why {
        AuthError::Missing => ("a token is required", ""),
        AuthError::Invalid(why) => (why, ", error=\"invalid_token\""),
    };
    let mut answer = error_response(StatusCode::UNAUTHORIZED, message, None);
    let named = running.settings.jwt.as_ref().map(|jwt| {
        let resource = ProtectedResource::from_config(running, jwt, parts);
        let rest = segments.strip_prefix(&["mcp"]).and_then(path_after_mcp).unwrap_or_default();
        format!(
            " resource_metadata=\"{}{METADATA_PATH_PREFIX}{}{rest}\"{error}",
            resource.origin, resource.path
        )
    });
    if let Ok(value) = format!("Bearer{}", named.unwrap_or_default()).parse() {
        answer.headers_mut().insert(WWW_AUTHENTICATE, value);
    }
    answer
}
