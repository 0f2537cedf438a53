//! Checks HTTP requests before they are handled: headers, rate limits, and size and time of bodies.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, HOST, ORIGIN, TRANSFER_ENCODING};
use http::request::Parts;
use http::{Method, StatusCode};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;

use super::{HttpResponse, HttpServer, REQUEST_READ_TIMEOUT, RequestTimes, error_response};
use crate::gateway::{ActiveConfig, lock};
use crate::server::http::admission::ArrivingBytes;
use crate::server::identity::Caller;

/// Message for an exceeded rate limit.
const RATE_LIMITED_MESSAGE: &str = "rate limit exceeded";

impl HttpServer {
    /// Rejects requests whose headers are invalid or not allowed.
    pub(super) fn check_headers(&self, parts: &Parts) -> Result<(), Box<HttpResponse>> {
        let once = |name: &http::HeaderName| parts.headers.get_all(name).iter().count() <= 1;
        // hyper rejects two different `Content-Length` headers, and ignores them beside chunked
        // encoding.
        if !once(&HOST) || !once(&TRANSFER_ENCODING) || !once(&ORIGIN) || !once(&CONTENT_TYPE) {
            return Err(error_response(StatusCode::BAD_REQUEST, "duplicate header", None));
        }
        // Bodies are not decompressed.
        if parts.headers.contains_key(CONTENT_ENCODING) {
            return Err(error_response(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "compressed requests are not supported",
                None,
            ));
        }
        let allowed = &self.mcp.config.allowed_hosts;
        let host = parts
            .headers
            .get(HOST)
            .and_then(|host| host.to_str().ok())
            .or_else(|| parts.uri.authority().map(http::uri::Authority::as_str));
        let host = host.and_then(|host| host.parse::<http::uri::Authority>().ok());
        let known = host.as_ref().is_some_and(|host| {
            let name = host.host().trim_matches(['[', ']']);
            allowed.iter().any(|known| {
                known.eq_ignore_ascii_case(name) || known.eq_ignore_ascii_case(host.as_str())
            })
        });
        if !known {
            return Err(error_response(
                StatusCode::FORBIDDEN,
                "unknown `Host` header; add it to `hosts` in `[gateway]`",
                None,
            ));
        }
        if parts.headers.get(ORIGIN).is_some_and(|origin| !self.is_allowed_origin(origin)) {
            return Err(error_response(
                StatusCode::FORBIDDEN,
                "origin not allowed; add it to `origins` in `[gateway]`",
                None,
            ));
        }
        Ok(())
    }

    /// Counts a request against the rate limit of a caller.
    pub(super) fn check_rate_limit(
        &self,
        running: &ActiveConfig,
        caller: &Caller,
    ) -> Result<(), Box<HttpResponse>> {
        let Some(rate) = running.settings.rate else { return Ok(()) };
        let mut rates = lock(&self.request_times);
        let now = Instant::now();
        if rates.len() > 10_000 {
            rates.retain(|_, times| {
                times.back().is_some_and(|last| now.duration_since(*last) < rate.per)
            });
        }
        let times = recent_requests(&mut rates, &caller.principal, rate.per, now);
        if times.len() >= rate.calls as usize {
            let wait = times
                .front()
                .map_or(rate.per, |first| rate.per.saturating_sub(now.duration_since(*first)));
            return Err(error_response(
                StatusCode::TOO_MANY_REQUESTS,
                RATE_LIMITED_MESSAGE,
                Some(wait.as_secs() + 1),
            ));
        }
        times.push_back(now);
        Ok(())
    }

    /// Reads the body of a request, within limits for size and time.
    pub(super) async fn read_body(
        &self,
        running: &ActiveConfig,
        parts: &Parts,
        body: Incoming,
    ) -> Result<Bytes, Box<HttpResponse>> {
        if parts.method != Method::POST {
            return Ok(Bytes::new());
        }
        let max_bytes = running.settings.max_request_bytes;
        let mut arriving = ArrivingBytes::new(&self.arriving_bytes);
        let mut body = Limited::new(body, max_bytes);
        let collect = async {
            let mut bytes = Vec::new();
            while let Some(frame) = body.frame().await {
                let frame = frame.map_err(|error| match error.is::<LengthLimitError>() {
                    true => error_response(
                        StatusCode::PAYLOAD_TOO_LARGE,
                        &format!("the request is larger than {max_bytes} bytes"),
                        None,
                    ),
                    false => error_response(
                        StatusCode::BAD_REQUEST,
                        "the request body is incomplete",
                        None,
                    ),
                })?;
                if let Ok(chunk) = frame.into_data() {
                    if !arriving.try_add(chunk.len()) {
                        return Err(error_response(
                            StatusCode::SERVICE_UNAVAILABLE,
                            "too many bytes of requests are arriving",
                            Some(1),
                        ));
                    }
                    bytes.extend_from_slice(&chunk);
                }
            }
            Ok(Bytes::from(bytes))
        };
        let collected = tokio::time::timeout(REQUEST_READ_TIMEOUT, collect).await;
        collected.map_err(|_| {
            error_response(
                StatusCode::REQUEST_TIMEOUT,
                "the request body took too long to arrive",
                None,
            )
        })?
    }
}

/// Returns the times of the requests of a principal that still count.
fn recent_requests<'r>(
    rates: &'r mut RequestTimes,
    principal: &str,
    per: Duration,
    now: Instant,
) -> &'r mut VecDeque<Instant> {
    let times = rates.entry(principal.to_owned()).or_default();
    while times.front().is_some_and(|first| now.duration_since(*first) >= per) {
        times.pop_front();
    }
    times
}
