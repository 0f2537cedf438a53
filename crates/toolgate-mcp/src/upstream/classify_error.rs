//! Classifies transport and protocol errors of an upstream as `Failure`s.

use rmcp::model::ErrorCode;
use rmcp::transport::streamable_http_client::StreamableHttpError;
use rmcp::{ErrorData, ServiceError};
use serde_json::json;
use toolgate::{CallEffects, Failure};

use crate::upstream::error_text::describe_send_error;
use crate::upstream::remote_tool::RemoteToolHandler;
use crate::upstream::supervisor::{ActiveConnection, UpstreamFailure, is_modern};
use crate::upstream::transport::bounded_http::{MAX_RESPONSE_BYTES, RESPONSE_TOO_LONG_CODE};
use crate::upstream::transport::direct_http::DirectCallError;
use crate::upstream::transport::legacy_sse::SseError;

/// The retry delay after a connection is replaced, in milliseconds. Reconnecting usually takes
/// less.
const RECONNECT_RETRY_DELAY_MS: u64 = 500;
/// The retry delay while the revision of an upstream is checked, in milliseconds.
///
/// The delay exceeds what toolgate waits by itself, so the caller has to retry.
const REVISION_CHECK_RETRY_DELAY_MS: u64 = 1_500;

impl RemoteToolHandler {
    /// Classifies an error of the fast path.
    pub(crate) fn classify_direct_error(
        &self,
        call_error: DirectCallError,
        connection: &ActiveConnection,
    ) -> Failure {
        let (name, supervisor, generation) =
            (&self.supervisor.upstream.name, &self.supervisor, connection.generation);
        let log = |why: &str| {
            tracing::warn!(
                upstream = name,
                why = supervisor.upstream.redact_secrets(why),
                "upstream call failed"
            )
        };
        let unreachable = |why: &str| {
            supervisor.on_failure(generation, UpstreamFailure::Disconnected);
            log(why);
            Failure::transient(
                "upstream_unavailable",
                format!("cannot reach the upstream `{name}`"),
            )
        };
        match call_error {
            DirectCallError::JsonRpc(error) => {
                supervisor.on_response();
                self.classify_jsonrpc_error(&error)
            }
            // A request that was rejected or could not connect was not executed.
            DirectCallError::NotConnected(why) => unreachable(&why).effects(CallEffects::None),
            DirectCallError::Rejected(401, _) if self.supervisor.can_renew_token() => {
                self.reconnect_with_new_token(generation)
            }
            // A rejected call does not count against the upstream: other calls may succeed.
            DirectCallError::Rejected(status, wait) => {
                log(&format!("the server answered HTTP {status}"));
                self.rejected_failure(status, wait, connection)
            }
            DirectCallError::ServerError(status, wait) => {
                supervisor.on_failure(generation, UpstreamFailure::Disconnected);
                log(&format!("the server answered HTTP {status}"));
                self.server_error_failure(status, wait)
            }
            DirectCallError::Unknown(why) => unreachable(&why),
            DirectCallError::TooLong => self.too_long_failure(),
            DirectCallError::InvalidResponse(why) => {
                supervisor.on_response();
                self.invalid_response_failure(&why)
            }
        }
    }

    /// Handles a request that was rejected by its HTTP status.
    ///
    /// The request was not executed, and is not retried before `wait` is over.
    fn rejected_failure(
        &self,
        status: u16,
        wait: Option<u64>,
        connection: &ActiveConnection,
    ) -> Failure {
        if is_revision_mismatch(status)
            && is_modern(&connection.peer)
            && self.supervisor.suspect_revision(connection.generation)
        {
            let message = format!(
                "the upstream `{}` no longer accepts requests of its protocol revision; it is being checked",
                self.supervisor.upstream.name
            );
            return Failure::transient("upstream_unavailable", message)
                .effects(CallEffects::None)
                .retry_after_ms(REVISION_CHECK_RETRY_DELAY_MS);
        }
        let failure = Failure::http(status, "").effects(CallEffects::None);
        match wait {
            Some(ms) => failure.retry_after_ms(ms),
            None => failure,
        }
    }

    /// Handles a status that does not say whether the request was executed.
    ///
    /// The request is not retried before `wait` is over.
    fn server_error_failure(&self, status: u16, wait: Option<u64>) -> Failure {
        let message = format!(
            "the upstream `{}` answered with status {status}",
            self.supervisor.upstream.name
        );
        let failure = Failure::transient("upstream_unavailable", message);
        match wait {
            Some(ms) => failure.retry_after_ms(ms),
            None => failure,
        }
    }

    /// Reconnects with a new access token.
    fn reconnect_with_new_token(&self, generation: u64) -> Failure {
        self.supervisor.report_session_lost(generation);
        let message = format!(
            "the upstream `{}` rejected its access token; a new one is being fetched",
            self.supervisor.upstream.name
        );
        Failure::transient("upstream_unavailable", message)
            .effects(CallEffects::None)
            .retry_after_ms(RECONNECT_RETRY_DELAY_MS)
    }

    /// Handles a response that exceeds the size limit. The upstream did respond.
    fn too_long_failure(&self) -> Failure {
        self.supervisor.on_response();
        let name = &self.supervisor.upstream.name;
        Failure::business(
            "invalid_result",
            format!("the response of the upstream `{name}` exceeds {MAX_RESPONSE_BYTES} bytes"),
        )
    }

    fn invalid_response_failure(&self, why: &str) -> Failure {
        let name = &self.supervisor.upstream.name;
        tracing::warn!(
            upstream = name,
            why = self.supervisor.upstream.redact_secrets(why),
            "upstream sent an invalid response"
        );
        Failure::business(
            "upstream_rejected",
            format!("the upstream `{name}` sent a response that is not valid MCP"),
        )
    }

    /// Classifies an error of rmcp.
    pub(crate) fn classify_rmcp_error(
        &self,
        error: ServiceError,
        was_sent: bool,
        connection: &ActiveConnection,
    ) -> Failure {
        let (name, generation) = (&self.supervisor.upstream.name, connection.generation);
        let with_effects =
            |failure: Failure| if was_sent { failure } else { failure.effects(CallEffects::None) };
        match error {
            ServiceError::McpError(error) if error.code == RESPONSE_TOO_LONG_CODE => {
                self.too_long_failure()
            }
            ServiceError::McpError(error) => {
                self.supervisor.on_response();
                self.classify_jsonrpc_error(&error)
            }
            ServiceError::TransportSend(why) => {
                let kind = TransportErrorKind::classify(&why);
                if matches!(kind, TransportErrorKind::Rejected(401, _))
                    && self.supervisor.can_renew_token()
                {
                    return self.reconnect_with_new_token(generation);
                }
                if matches!(kind, TransportErrorKind::InvalidResponse) {
                    self.supervisor.on_response();
                    return self.invalid_response_failure(&describe_send_error(&why));
                }
                tracing::warn!(
                    upstream = name,
                    why = self.supervisor.upstream.redact_secrets(&describe_send_error(&why)),
                    "upstream call failed"
                );
                match kind {
                    TransportErrorKind::SessionLost => {
                        self.supervisor.report_session_lost(generation)
                    }
                    // A rejected call does not count against the upstream: other calls may succeed.
                    TransportErrorKind::Rejected(..) => {}
                    _ => self.supervisor.on_failure(generation, UpstreamFailure::Disconnected),
                }
                let failure = match kind {
                    TransportErrorKind::Rejected(status, wait) => {
                        self.rejected_failure(status, wait, connection)
                    }
                    TransportErrorKind::ServerError(status, wait) => {
                        self.server_error_failure(status, wait)
                    }
                    TransportErrorKind::SessionLost => Failure::transient(
                        "upstream_unavailable",
                        format!("the upstream `{name}` no longer knows its session"),
                    )
                    .retry_after_ms(RECONNECT_RETRY_DELAY_MS),
                    _ => Failure::transient(
                        "upstream_unavailable",
                        format!("cannot reach the upstream `{name}`"),
                    ),
                };
                // A request that was rejected or could not connect was not executed.
                if matches!(kind, TransportErrorKind::Unknown | TransportErrorKind::ServerError(..))
                {
                    failure
                } else {
                    failure.effects(CallEffects::None)
                }
            }
            ServiceError::TransportClosed => {
                // Over HTTP every response has its own stream, so only this call failed.
                if !self.supervisor.has_one_stream() {
                    self.supervisor.on_failure(generation, UpstreamFailure::Disconnected);
                }
                let message =
                    format!("the upstream `{name}` closed the connection during the call");
                with_effects(
                    Failure::transient("upstream_unavailable", message)
                        .retry_after_ms(RECONNECT_RETRY_DELAY_MS),
                )
            }
            ServiceError::Timeout { .. } | ServiceError::Cancelled { .. } => {
                self.supervisor.on_failure(generation, UpstreamFailure::Timeout);
                with_effects(Failure::transient(
                    "upstream_unavailable",
                    format!("the upstream `{name}` did not respond in time"),
                ))
            }
            other => {
                self.supervisor.on_response();
                self.invalid_response_failure(&other.to_string())
            }
        }
    }

    fn classify_jsonrpc_error(&self, error: &ErrorData) -> Failure {
        let name = &self.supervisor.upstream.name;
        let upstream_error =
            json!({"code": error.code.0, "message": error.message, "data": error.data});
        let message = |problem: &str| format!("the upstream `{name}` {problem}");
        // The upstream responded, so the call is over and its effects are done.
        let failure = match error.code {
            ErrorCode::INVALID_PARAMS => {
                Failure::validation("upstream_invalid", message("rejected the request parameters"))
            }
            ErrorCode::METHOD_NOT_FOUND => {
                Failure::validation("upstream_invalid", message("does not know this tool"))
            }
            ErrorCode::INVALID_REQUEST | ErrorCode::PARSE_ERROR => {
                Failure::validation("upstream_invalid", message("could not parse the request"))
            }
            ErrorCode::MISSING_REQUIRED_CLIENT_CAPABILITY => Failure::business(
                "tool_failed",
                message("needs a capability that the client does not declare"),
            ),
            _ => Failure::business("tool_failed", message("reported a failure")),
        };
        let failure = self
            .match_error_pattern(&error.message)
            .unwrap_or_else(|| failure.effects(CallEffects::Done));
        failure.upstream(self.supervisor.upstream.redact_value(upstream_error))
    }

    /// Classifies an error text by the configured patterns.
    pub(crate) fn match_error_pattern(&self, text: &str) -> Option<Failure> {
        let pattern = self
            .supervisor
            .upstream
            .errors
            .iter()
            .find(|pattern| pattern.matches.is_match(text))?;
        let message =
            format!("the upstream `{}` reported a failure", self.supervisor.upstream.name);
        Some(Failure::new(pattern.category, pattern.code.clone(), message).effects(pattern.effects))
    }
}

/// Returns whether a status can mean that the upstream no longer supports revision 2026-07-28.
pub(crate) const fn is_revision_mismatch(status: u16) -> bool {
    matches!(status, 400 | 404 | 405 | 406)
}

/// Why a request failed in the transport.
#[derive(Clone, Copy)]
pub(crate) enum TransportErrorKind {
    /// The server no longer knows the session.
    SessionLost,
    /// The connection could not be opened.
    NotConnected,
    /// The server rejected the request with a status, and a retry delay in milliseconds if given.
    Rejected(u16, Option<u64>),
    /// The response is not valid.
    InvalidResponse,
    /// The status does not say whether the request was executed. The second field is the retry
    /// delay.
    ServerError(u16, Option<u64>),
    /// The request may have been executed.
    Unknown,
}

impl TransportErrorKind {
    pub(crate) fn classify(error: &(dyn std::error::Error + 'static)) -> Self {
        // A 4xx status other than 408 means that the request was rejected.
        let by_status = |status: u16, wait: Option<u64>| match status {
            400..500 if status != 408 => Self::Rejected(status, wait),
            _ => Self::ServerError(status, wait),
        };
        let mut cause = Some(error);
        while let Some(error) = cause {
            match error.downcast_ref::<StreamableHttpError<reqwest::Error>>() {
                Some(StreamableHttpError::SessionExpired) => return Self::SessionLost,
                Some(StreamableHttpError::HttpStatus(error)) => {
                    return by_status(
                        error.status,
                        error
                            .retry_after
                            .as_deref()
                            .and_then(crate::http_tool::parse_retry_after_ms),
                    );
                }
                Some(
                    StreamableHttpError::UnexpectedServerResponse(_)
                    | StreamableHttpError::UnexpectedContentType(_),
                ) => {
                    return Self::InvalidResponse;
                }
                _ => {}
            }
            match error.downcast_ref::<SseError>() {
                // In this transport, the URL for posts identifies the session.
                Some(SseError::Status(404, _)) => return Self::SessionLost,
                Some(SseError::Status(status, wait)) => return by_status(*status, *wait),
                Some(SseError::NotConnected(_)) => return Self::NotConnected,
                _ => {}
            }
            if error.downcast_ref::<reqwest::Error>().is_some_and(reqwest::Error::is_connect) {
                return Self::NotConnected;
            }
            cause = error.source();
        }
        Self::Unknown
    }
}
