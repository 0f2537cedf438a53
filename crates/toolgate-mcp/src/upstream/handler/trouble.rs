//! Classifies transport and protocol errors of an upstream as `Failure`s.

use rmcp::model::ErrorCode;
use rmcp::transport::streamable_http_client::StreamableHttpError;
use rmcp::{ErrorData, ServiceError};
use serde_json::json;
use toolgate::{Effects, Failure};

use super::RemoteTool;
use crate::bounded::{LONGEST, TOO_LONG};
use crate::sse::SseError;
use crate::upstream::link::{Fault, Standing, is_modern};
use crate::upstream::plain::unsent;
use crate::upstream::straight::Broken;

/// The retry delay after a connection is replaced, in milliseconds. Reconnecting usually takes
/// less.
const ANEW: u64 = 500;
/// The retry delay while the revision of an upstream is checked, in milliseconds.
///
/// The delay exceeds what toolgate waits by itself, so the caller has to retry.
const LOOKED_AT: u64 = 1_500;

impl RemoteTool {
    /// Classifies an error of the fast path.
    pub(super) fn broken(&self, broken: Broken, standing: &Standing) -> Failure {
        let (name, link, generation) = (&self.link.upstream.name, &self.link, standing.generation);
        let tell = |why: &str| tracing::warn!(upstream = name, why = link.upstream.without_secrets(why), "upstream call failed");
        let unheard = |why: &str| {
            link.failed(generation, Fault::Broken);
            tell(why);
            Failure::transient("upstream_unavailable", format!("cannot reach the upstream `{name}`"))
        };
        match broken {
            Broken::Refused(error) => {
                link.answered();
                self.protocol_error(&error)
            }
            // A request that was rejected or could not connect was not executed.
            Broken::Nobody(why) => unheard(&why).effects(Effects::None),
            Broken::Status(401, _) if self.link.may_renew() => self.renewed(generation),
            // A rejected call does not count against the upstream: other calls may succeed.
            Broken::Status(status, wait) => {
                tell(&format!("the server answered HTTP {status}"));
                self.turned_away(status, wait, standing)
            }
            Broken::Failing(status, wait) => {
                link.failed(generation, Fault::Broken);
                tell(&format!("the server answered HTTP {status}"));
                self.failing(status, wait)
            }
            Broken::Unclear(why) => unheard(&why),
            Broken::TooLong => self.too_long(),
            Broken::Unread(why) => {
                link.answered();
                self.unread(&why)
            }
        }
    }

    /// Handles a request that was rejected by its HTTP status.
    ///
    /// The request was not executed, and is not retried before `wait` is over.
    fn turned_away(&self, status: u16, wait: Option<u64>, standing: &Standing) -> Failure {
        if is_strange(status) && is_modern(&standing.peer) && self.link.may_be_another(standing.generation) {
            let message = format!(
                "the upstream `{}` no longer accepts requests of its protocol revision; it is being checked",
                self.link.upstream.name
            );
            return Failure::transient("upstream_unavailable", message).effects(Effects::None).retry_after_ms(LOOKED_AT);
        }
        let failure = Failure::http(status, "").effects(Effects::None);
        match wait {
            Some(ms) => failure.retry_after_ms(ms),
            None => failure,
        }
    }

    /// Handles a status that does not say whether the request was executed.
    ///
    /// The request is not retried before `wait` is over.
    fn failing(&self, status: u16, wait: Option<u64>) -> Failure {
        let message = format!("the upstream `{}` answered with status {status}", self.link.upstream.name);
        let failure = Failure::transient("upstream_unavailable", message);
        match wait {
            Some(ms) => failure.retry_after_ms(ms),
            None => failure,
        }
    }

    /// Reconnects with a new access token.
    fn renewed(&self, generation: u64) -> Failure {
        self.link.lost(generation);
        let message = format!("the upstream `{}` rejected its access token; a new one is being fetched", self.link.upstream.name);
        Failure::transient("upstream_unavailable", message).effects(Effects::None).retry_after_ms(ANEW)
    }

    /// Handles a response that exceeds the size limit. The upstream did respond.
    fn too_long(&self) -> Failure {
        self.link.answered();
        let name = &self.link.upstream.name;
        Failure::business("invalid_result", format!("the response of the upstream `{name}` exceeds {LONGEST} bytes"))
    }

    fn unread(&self, why: &str) -> Failure {
        let name = &self.link.upstream.name;
        tracing::warn!(upstream = name, why = self.link.upstream.without_secrets(why), "upstream sent an invalid response");
        Failure::business("upstream_rejected", format!("the upstream `{name}` sent a response that is not valid MCP"))
    }

    /// Classifies an error of rmcp.
    pub(super) fn understand(&self, error: ServiceError, sent: bool, standing: &Standing) -> Failure {
        let (name, generation) = (&self.link.upstream.name, standing.generation);
        let effects = |failure: Failure| if sent { failure } else { failure.effects(Effects::None) };
        match error {
            ServiceError::McpError(error) if error.code == TOO_LONG => self.too_long(),
            ServiceError::McpError(error) => {
                self.link.answered();
                self.protocol_error(&error)
            }
            ServiceError::TransportSend(why) => {
                let trouble = Trouble::of(&why);
                if matches!(trouble, Trouble::Status(401, _)) && self.link.may_renew() {
                    return self.renewed(generation);
                }
                if matches!(trouble, Trouble::Unread) {
                    self.link.answered();
                    return self.unread(&unsent(&why));
                }
                tracing::warn!(upstream = name, why = self.link.upstream.without_secrets(&unsent(&why)), "upstream call failed");
                match trouble {
                    Trouble::Lost => self.link.lost(generation),
                    // A rejected call does not count against the upstream: other calls may succeed.
                    Trouble::Status(..) => {}
                    _ => self.link.failed(generation, Fault::Broken),
                }
                let failure = match trouble {
                    Trouble::Status(status, wait) => self.turned_away(status, wait, standing),
                    Trouble::Failing(status, wait) => self.failing(status, wait),
                    Trouble::Lost => {
                        Failure::transient("upstream_unavailable", format!("the upstream `{name}` no longer knows its session"))
                            .retry_after_ms(ANEW)
                    }
                    _ => Failure::transient("upstream_unavailable", format!("cannot reach the upstream `{name}`")),
                };
                // A request that was rejected or could not connect was not executed.
                if matches!(trouble, Trouble::Unclear | Trouble::Failing(..)) { failure } else { failure.effects(Effects::None) }
            }
            ServiceError::TransportClosed => {
                // Over HTTP every response has its own stream, so only this call failed.
                if !self.link.has_one_stream() {
                    self.link.failed(generation, Fault::Broken);
                }
                let message = format!("the upstream `{name}` closed the connection during the call");
                effects(Failure::transient("upstream_unavailable", message).retry_after_ms(ANEW))
            }
            ServiceError::Timeout { .. } | ServiceError::Cancelled { .. } => {
                self.link.failed(generation, Fault::Late);
                effects(Failure::transient("upstream_unavailable", format!("the upstream `{name}` did not respond in time")))
            }
            other => {
                self.link.answered();
                self.unread(&other.to_string())
            }
        }
    }

    fn protocol_error(&self, error: &ErrorData) -> Failure {
        let name = &self.link.upstream.name;
        let said = json!({"code": error.code.0, "message": error.message, "data": error.data});
        let message = |what: &str| format!("the upstream `{name}` {what}");
        // The upstream responded, so the call is over and its effects are done.
        let failure = match error.code {
            ErrorCode::INVALID_PARAMS => Failure::validation("upstream_invalid", message("rejected the request parameters")),
            ErrorCode::METHOD_NOT_FOUND => Failure::validation("upstream_invalid", message("does not know this tool")),
            ErrorCode::INVALID_REQUEST | ErrorCode::PARSE_ERROR => {
                Failure::validation("upstream_invalid", message("could not parse the request"))
            }
            ErrorCode::MISSING_REQUIRED_CLIENT_CAPABILITY => {
                Failure::business("tool_failed", message("needs a capability that the client does not declare"))
            }
            _ => Failure::business("tool_failed", message("reported a failure")),
        };
        let failure = self.by_pattern(&error.message).unwrap_or_else(|| failure.effects(Effects::Done));
        failure.upstream(self.link.upstream.said_without_secrets(said))
    }

    /// Classifies an error text by the configured patterns.
    pub(super) fn by_pattern(&self, said: &str) -> Option<Failure> {
        let pattern = self.link.upstream.errors.iter().find(|pattern| pattern.matches.is_match(said))?;
        let message = format!("the upstream `{}` reported a failure", self.link.upstream.name);
        Some(Failure::new(pattern.category, pattern.code.clone(), message).effects(pattern.effects))
    }
}

/// Returns whether a status can mean that the upstream no longer supports revision 2026-07-28.
pub(in crate::upstream) const fn is_strange(status: u16) -> bool {
    matches!(status, 400 | 404 | 405 | 406)
}

/// Why a request failed in the transport.
#[derive(Clone, Copy)]
pub(in crate::upstream) enum Trouble {
    /// The server no longer knows the session.
    Lost,
    /// The connection could not be opened.
    Nobody,
    /// The server rejected the request with a status, and a retry delay in milliseconds if given.
    Status(u16, Option<u64>),
    /// The response is not valid.
    Unread,
    /// The status does not say whether the request was executed. The second field is the retry
    /// delay.
    Failing(u16, Option<u64>),
    /// The request may have been executed.
    Unclear,
}

impl Trouble {
    pub(in crate::upstream) fn of(error: &(dyn std::error::Error + 'static)) -> Self {
        // A 4xx status other than 408 means that the request was rejected.
        let by_status = |status: u16, wait: Option<u64>| match status {
            400..500 if status != 408 => Self::Status(status, wait),
            _ => Self::Failing(status, wait),
        };
        let mut cause = Some(error);
        while let Some(error) = cause {
            match error.downcast_ref::<StreamableHttpError<reqwest::Error>>() {
                Some(StreamableHttpError::SessionExpired) => return Self::Lost,
                Some(StreamableHttpError::HttpStatus(error)) => {
                    return by_status(error.status, error.retry_after.as_deref().and_then(crate::http::wait_ms));
                }
                Some(StreamableHttpError::UnexpectedServerResponse(_) | StreamableHttpError::UnexpectedContentType(_)) => {
                    return Self::Unread;
                }
                _ => {}
            }
            match error.downcast_ref::<SseError>() {
                // In this transport, the URL for posts identifies the session.
                Some(SseError::Status(404, _)) => return Self::Lost,
                Some(SseError::Status(status, wait)) => return by_status(*status, *wait),
                Some(SseError::Nobody(_)) => return Self::Nobody,
                _ => {}
            }
            if error.downcast_ref::<reqwest::Error>().is_some_and(reqwest::Error::is_connect) {
                return Self::Nobody;
            }
            cause = error.source();
        }
        Self::Unclear
    }
}
