//! Describes connection errors for operators: the address and what happened.

use std::error::Error;
use std::io;

use rmcp::ServiceError;
use rmcp::service::ClientInitializeError;
use rmcp::transport::streamable_http_client::StreamableHttpError;

/// Describes why the handshake failed.
pub(crate) fn describe_handshake_error(error: &ClientInitializeError) -> String {
    match error {
        ClientInitializeError::ConnectionClosed(_) => HANDSHAKE_CLOSED_MESSAGE.to_owned(),
        ClientInitializeError::TransportError { error, .. } => {
            describe_transport_error(error, HANDSHAKE_CLOSED_MESSAGE)
        }
        ClientInitializeError::JsonRpcError(error) => {
            format!("the server rejected the handshake: {} (code {})", error.message, error.code.0)
        }
        ClientInitializeError::NoCompatibleProtocolVersion { server_supported, .. } => {
            let known: Vec<&str> =
                server_supported.iter().map(rmcp::model::ProtocolVersion::as_str).collect();
            format!(
                "the server supports only protocol revisions that toolgate does not support: {}",
                known.join(", ")
            )
        }
        ClientInitializeError::LegacyFallbackFailed { fallback, .. } => {
            describe_handshake_error(fallback)
        }
        ClientInitializeError::Cancelled => "the handshake was cancelled".to_owned(),
        _ => "the server sent an unexpected response to the handshake".to_owned(),
    }
}

/// Returns the HTTP status of a rejected handshake.
pub(crate) fn handshake_status(error: &ClientInitializeError) -> Option<u16> {
    let mut cause: Option<&(dyn Error + 'static)> = match error {
        ClientInitializeError::TransportError { error, .. } => Some(error),
        ClientInitializeError::LegacyFallbackFailed { fallback, .. } => {
            return handshake_status(fallback);
        }
        _ => None,
    };
    while let Some(error) = cause {
        if let Some(StreamableHttpError::HttpStatus(error)) =
            error.downcast_ref::<StreamableHttpError<reqwest::Error>>()
        {
            return Some(error.status);
        }
        cause = error.source();
    }
    None
}

/// Describes why a request got no result.
pub(crate) fn describe_request_error(error: &ServiceError) -> String {
    match error {
        ServiceError::McpError(error) => format!("{} (code {})", error.message, error.code.0),
        ServiceError::TransportSend(error) => describe_send_error(error),
        ServiceError::TransportClosed => CONNECTION_CLOSED_MESSAGE.to_owned(),
        ServiceError::Timeout { timeout } => format!("no response within {timeout:?}"),
        other => other.to_string(),
    }
}

/// Describes why a request could not be sent.
///
/// The library's own text would contain the whole URL, which may contain a key.
pub(crate) fn describe_send_error(error: &(dyn Error + 'static)) -> String {
    describe_transport_error(error, CONNECTION_CLOSED_MESSAGE)
}

const HANDSHAKE_CLOSED_MESSAGE: &str =
    "the server exited or closed its output before the handshake was complete";
const CONNECTION_CLOSED_MESSAGE: &str = "the server closed the connection";

/// Describes the first cause that is understood.
fn describe_transport_error(error: &(dyn Error + 'static), closed_message: &str) -> String {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<StreamableHttpError<reqwest::Error>>() {
            return describe_http_error(error);
        }
        if let Some(error) = error.downcast_ref::<reqwest::Error>() {
            return describe_reqwest_error(error);
        }
        if let Some(error) = error.downcast_ref::<io::Error>() {
            return match error.kind() {
                io::ErrorKind::BrokenPipe
                | io::ErrorKind::ConnectionReset
                | io::ErrorKind::UnexpectedEof => closed_message.to_owned(),
                _ => error.to_string(),
            };
        }
        cause = error.source();
    }
    // For unknown errors, the innermost cause is the most specific.
    innermost_cause(error).to_string()
}

fn innermost_cause<'e>(mut error: &'e (dyn Error + 'static)) -> &'e (dyn Error + 'static) {
    while let Some(inner) = error.source() {
        error = inner;
    }
    error
}

fn describe_http_error(error: &StreamableHttpError<reqwest::Error>) -> String {
    let status = |status: u16| match status {
        401 | 403 => {
            format!(
                "the server answered HTTP {status}: credentials are missing or wrong; set `bearer`, `oauth` or `headers` of the upstream"
            )
        }
        404 | 405 => format!(
            "the server answered HTTP {status}: no MCP endpoint at this address; check the path of `url`"
        ),
        _ => format!("the server answered HTTP {status}"),
    };
    match error {
        StreamableHttpError::Client(error) => describe_reqwest_error(error),
        StreamableHttpError::HttpStatus(error) => status(error.status),
        StreamableHttpError::SessionExpired => "the server no longer knows the session".to_owned(),
        StreamableHttpError::UnexpectedContentType(kind) => {
            format!(
                "the server answered with {}, not with MCP; check the path of `url`",
                kind.as_deref().unwrap_or("no content type")
            )
        }
        StreamableHttpError::UnexpectedServerResponse(_) => {
            "the server answered with an invalid MCP message".to_owned()
        }
        StreamableHttpError::UnexpectedEndOfStream => "the response ended early".to_owned(),
        other => other.to_string(),
    }
}

fn describe_reqwest_error(error: &reqwest::Error) -> String {
    let origin = error.url().map(|url| url.origin().ascii_serialization()).unwrap_or_default();
    let cause = innermost_cause(error);
    match (error.is_connect(), error.is_timeout()) {
        (_, true) => format!("{origin} did not respond in time"),
        (true, _) => format!("cannot reach {origin}: {cause}"),
        _ => format!("the connection to {origin} failed: {cause}"),
    }
}
