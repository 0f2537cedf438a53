//! Web pages that may talk to the gateway: a browser asks whether they may, and shows them answers that say so.

use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_EXPOSE_HEADERS,
    ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS, ACCESS_CONTROL_REQUEST_METHOD, HeaderName, ORIGIN, VARY,
};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode};

use super::{Answer, Http, body};

/// What a page may do.
const METHODS: &str = "GET, POST, DELETE";
/// What it may say in headers, beside arguments that a tool wants there.
const HEADERS: &str = "content-type, authorization, accept, last-event-id, mcp-protocol-version, mcp-session-id, mcp-method, mcp-name, \
    toolgate-session, traceparent, tracestate";
/// The beginning of headers with arguments.
const ARGUMENT: &str = "mcp-param-";
/// What it may read of the headers of an answer.
const TOLD: &str = "mcp-session-id, www-authenticate, retry-after";
/// How long a browser may remember that, in seconds.
const AGE: u64 = 600;

impl Http {
    /// Whether pages from there may talk to this.
    pub(super) fn admits(&self, origin: &HeaderValue) -> bool {
        let of = |text: &str| url::Url::parse(text).ok().map(|url| url.origin()).filter(url::Origin::is_tuple);
        let origin = origin.to_str().ok().and_then(of);
        origin.is_some() && self.mcp.config.allowed_origins.iter().any(|known| of(known) == origin)
    }

    /// Where the page comes from that makes a request, if it may.
    pub(super) fn page(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let mut origins = headers.get_all(ORIGIN).iter();
        let origin = origins.next().filter(|origin| self.admits(origin))?;
        origins.next().is_none().then(|| origin.clone())
    }
}

/// Shows an answer to the page that asked, and to no other: who comes with a token says so itself, no cookie counts here.
pub(super) fn show(answer: &mut Answer, page: HeaderValue) {
    let headers = answer.headers_mut();
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, page);
    headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(TOLD));
    headers.append(VARY, HeaderValue::from_static("Origin"));
}

/// The answer to a browser that asks what a page may do, which it does without a token. That the page may do anything at all was looked
/// at before.
pub(super) fn preflight(parts: &Parts) -> Option<Answer> {
    let asks = parts.method == Method::OPTIONS && parts.headers.contains_key(ORIGIN);
    if !asks || !parts.headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD) {
        return None;
    }
    let mut allowed = HEADERS.to_owned();
    for wanted in parts.headers.get_all(ACCESS_CONTROL_REQUEST_HEADERS).iter().filter_map(|wanted| wanted.to_str().ok()) {
        for name in wanted.split(',').filter_map(|name| HeaderName::from_bytes(name.trim().as_bytes()).ok()) {
            if name.as_str().starts_with(ARGUMENT) {
                allowed.push_str(", ");
                allowed.push_str(name.as_str());
            }
        }
    }
    let mut answer = Response::new(body(""));
    *answer.status_mut() = StatusCode::NO_CONTENT;
    let headers = answer.headers_mut();
    headers.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static(METHODS));
    headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, allowed.parse().unwrap_or(HeaderValue::from_static(HEADERS)));
    headers.insert(ACCESS_CONTROL_MAX_AGE, AGE.into());
    Some(answer)
}
