//! Implements CORS: which web pages may send requests and read responses.

use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, HeaderName, ORIGIN, VARY,
};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode};

use super::{HttpResponse, HttpServer, full_body};

/// Methods that a page may use.
const ALLOWED_METHODS: &str = "GET, POST, DELETE";
/// Headers that a page may send, besides arguments of tools.
const ALLOWED_HEADERS: &str = "content-type, authorization, accept, last-event-id, mcp-protocol-version, mcp-session-id, mcp-method, mcp-name, \
    toolgate-session, traceparent, tracestate";
/// Prefix of headers with arguments of tools.
const ARGUMENT_HEADER_PREFIX: &str = "mcp-param-";
/// Response headers that a page may read.
const EXPOSED_HEADERS: &str = "mcp-session-id, www-authenticate, retry-after";
/// How long a browser may cache a preflight response, in seconds.
const MAX_PREFLIGHT_AGE_SECONDS: u64 = 600;

impl HttpServer {
    /// Returns whether pages of an origin may send requests.
    pub(crate) fn is_allowed_origin(&self, origin: &HeaderValue) -> bool {
        let parse_origin = |text: &str| {
            url::Url::parse(text).ok().map(|url| url.origin()).filter(url::Origin::is_tuple)
        };
        let origin = origin.to_str().ok().and_then(parse_origin);
        origin.is_some()
            && self.mcp.config.allowed_origins.iter().any(|known| parse_origin(known) == origin)
    }

    /// Returns the origin of the page that sent a request, if it is allowed.
    pub(crate) fn allowed_origin(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let mut origins = headers.get_all(ORIGIN).iter();
        let origin = origins.next().filter(|origin| self.is_allowed_origin(origin))?;
        origins.next().is_none().then(|| origin.clone())
    }
}

/// Permits the page that sent the request to read the response.
///
/// Credentials are not permitted: pages send tokens explicitly, and cookies are not used.
pub(crate) fn add_cors_headers(answer: &mut HttpResponse, page: HeaderValue) {
    let headers = answer.headers_mut();
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, page);
    headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(EXPOSED_HEADERS));
    headers.append(VARY, HeaderValue::from_static("Origin"));
}

/// Answers a preflight request, which has no token. Its origin was checked before.
pub(crate) fn preflight_response(parts: &Parts) -> Option<HttpResponse> {
    let is_options_with_origin =
        parts.method == Method::OPTIONS && parts.headers.contains_key(ORIGIN);
    if !is_options_with_origin || !parts.headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD) {
        return None;
    }
    let mut allowed = ALLOWED_HEADERS.to_owned();
    for requested in parts
        .headers
        .get_all(ACCESS_CONTROL_REQUEST_HEADERS)
        .iter()
        .filter_map(|requested| requested.to_str().ok())
    {
        for name in requested
            .split(',')
            .filter_map(|name| HeaderName::from_bytes(name.trim().as_bytes()).ok())
        {
            if name.as_str().starts_with(ARGUMENT_HEADER_PREFIX) {
                allowed.push_str(", ");
                allowed.push_str(name.as_str());
            }
        }
    }
    let mut answer = Response::new(full_body(""));
    *answer.status_mut() = StatusCode::NO_CONTENT;
    let headers = answer.headers_mut();
    headers.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static(ALLOWED_METHODS));
    headers.insert(
        ACCESS_CONTROL_ALLOW_HEADERS,
        allowed.parse().unwrap_or(HeaderValue::from_static(ALLOWED_HEADERS)),
    );
    headers.insert(ACCESS_CONTROL_MAX_AGE, MAX_PREFLIGHT_AGE_SECONDS.into());
    Some(answer)
}
