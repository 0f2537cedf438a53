//! What goes wrong between here and an upstream, as the gate is told.

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

/// After how many milliseconds one that is connected to anew is there, if all goes well.
const ANEW: u64 = 500;
/// After how many one has been looked at. It is longer than anybody waits here: what was turned away is left to whoever asked for it.
const LOOKED_AT: u64 = 1_500;

impl RemoteTool {
    /// What went wrong on the straight way.
    pub(super) fn broken(&self, broken: Broken, standing: &Standing) -> Failure {
        let (name, link, generation) = (&self.link.upstream.name, &self.link, standing.generation);
        let tell = |why: &str| tracing::warn!(upstream = name, why = link.upstream.without_secrets(why), "a call did not get through");
        let unheard = |why: &str| {
            link.failed(generation, Fault::Broken);
            tell(why);
            Failure::transient("upstream_unavailable", format!("the upstream `{name}` cannot be reached"))
        };
        match broken {
            Broken::Refused(error) => {
                link.answered();
                self.protocol_error(&error)
            }
            // A request that was refused at the door, or that found nobody, was not carried out.
            Broken::Nobody(why) => unheard(&why).effects(Effects::None),
            Broken::Status(401, _) if self.link.may_renew() => self.renewed(generation),
            // One whose call it turns away does not keep all others from it.
            Broken::Status(status, wait) => {
                tell(&format!("it answers with HTTP {status}"));
                self.turned_away(status, wait, standing)
            }
            Broken::Failing(status, wait) => {
                link.failed(generation, Fault::Broken);
                tell(&format!("it answers with HTTP {status}"));
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

    /// A request that was refused at the door, by a status alone: it was not carried out, and is not repeated before its time.
    fn turned_away(&self, status: u16, wait: Option<u64>, standing: &Standing) -> Failure {
        if is_strange(status) && is_modern(&standing.peer) && self.link.may_be_another(standing.generation) {
            let message = format!(
                "the upstream `{}` does not understand requests of its revision any more; it is looked at anew",
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

    /// Something answers there, and does not say whether the request was carried out. It is not repeated before its time either.
    fn failing(&self, status: u16, wait: Option<u64>) -> Failure {
        let message = format!("the upstream `{}` answered with status {status}", self.link.upstream.name);
        let failure = Failure::transient("upstream_unavailable", message);
        match wait {
            Some(ms) => failure.retry_after_ms(ms),
            None => failure,
        }
    }

    /// It is connected to anew, with a new token.
    fn renewed(&self, generation: u64) -> Failure {
        self.link.lost(generation);
        let message = format!("the upstream `{}` does not take its token any more; another one is fetched", self.link.upstream.name);
        Failure::transient("upstream_unavailable", message).effects(Effects::None).retry_after_ms(ANEW)
    }

    /// It has answered, and nobody has read that to its end.
    fn too_long(&self) -> Failure {
        self.link.answered();
        let name = &self.link.upstream.name;
        Failure::business("invalid_result", format!("the answer of the upstream `{name}` is longer than {LONGEST} bytes"))
    }

    fn unread(&self, why: &str) -> Failure {
        let name = &self.link.upstream.name;
        tracing::warn!(upstream = name, why = self.link.upstream.without_secrets(why), "an upstream answered something else");
        Failure::business("upstream_rejected", format!("the upstream `{name}` answered something that cannot be understood"))
    }

    /// What went wrong between here and there.
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
                tracing::warn!(upstream = name, why = self.link.upstream.without_secrets(&unsent(&why)), "a call did not get through");
                match trouble {
                    Trouble::Lost => self.link.lost(generation),
                    // One whose call it turns away does not keep all others from it.
                    Trouble::Status(..) => {}
                    _ => self.link.failed(generation, Fault::Broken),
                }
                let failure = match trouble {
                    Trouble::Status(status, wait) => self.turned_away(status, wait, standing),
                    Trouble::Failing(status, wait) => self.failing(status, wait),
                    Trouble::Lost => {
                        Failure::transient("upstream_unavailable", format!("the upstream `{name}` does not know its session any more"))
                            .retry_after_ms(ANEW)
                    }
                    _ => Failure::transient("upstream_unavailable", format!("the upstream `{name}` cannot be reached")),
                };
                // A request that was refused at the door, or that found nobody, was not carried out.
                if matches!(trouble, Trouble::Unclear | Trouble::Failing(..)) { failure } else { failure.effects(Effects::None) }
            }
            ServiceError::TransportClosed => {
                // Each answer over HTTP comes by itself, and breaks off by itself.
                if !self.link.has_one_stream() {
                    self.link.failed(generation, Fault::Broken);
                }
                let message = format!("the upstream `{name}` hung up in the middle of the call");
                effects(Failure::transient("upstream_unavailable", message).retry_after_ms(ANEW))
            }
            ServiceError::Timeout { .. } | ServiceError::Cancelled { .. } => {
                self.link.failed(generation, Fault::Late);
                effects(Failure::transient("upstream_unavailable", format!("the upstream `{name}` did not answer")))
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
        // It has answered, so it is over; what it did before, it did.
        let failure = match error.code {
            ErrorCode::INVALID_PARAMS => Failure::validation("upstream_invalid", message("could not make sense of the request")),
            ErrorCode::METHOD_NOT_FOUND => Failure::validation("upstream_invalid", message("does not know this tool")),
            ErrorCode::INVALID_REQUEST | ErrorCode::PARSE_ERROR => {
                Failure::validation("upstream_invalid", message("could not read the request"))
            }
            ErrorCode::MISSING_REQUIRED_CLIENT_CAPABILITY => {
                Failure::business("tool_failed", message("needs something that the client has not said it can do"))
            }
            _ => Failure::business("tool_failed", message("reported a failure")),
        };
        let failure = self.by_pattern(&error.message).unwrap_or_else(|| failure.effects(Effects::Done));
        failure.upstream(self.link.upstream.said_without_secrets(said))
    }

    /// What its words mean, where somebody has said so.
    pub(super) fn by_pattern(&self, said: &str) -> Option<Failure> {
        let pattern = self.link.upstream.errors.iter().find(|pattern| pattern.matches.is_match(said))?;
        let message = format!("the upstream `{}` reported a failure", self.link.upstream.name);
        Some(Failure::new(pattern.category, pattern.code.clone(), message).effects(pattern.effects))
    }
}

/// Whether an upstream of 2026-07-28 may turn a request away so because it is of an earlier revision by now.
pub(in crate::upstream) const fn is_strange(status: u16) -> bool {
    matches!(status, 400 | 404 | 405 | 406)
}

/// Why a request did not get through.
#[derive(Clone, Copy)]
pub(in crate::upstream) enum Trouble {
    /// Its session is not known there any more.
    Lost,
    /// Nobody was there.
    Nobody,
    /// It was turned away, and is to wait for so many milliseconds, where that is said.
    Status(u16, Option<u64>),
    /// It has answered, and nobody understands it.
    Unread,
    /// It has answered with a status that does not say whether it was heard, and is to wait as long, where that is said.
    Failing(u16, Option<u64>),
    /// It may have been heard.
    Unclear,
}

impl Trouble {
    pub(in crate::upstream) fn of(error: &(dyn std::error::Error + 'static)) -> Self {
        // Refused at the door, or not.
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
                // Where it wants its posts is the address of a session.
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
