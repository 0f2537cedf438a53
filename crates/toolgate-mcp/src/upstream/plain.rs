//! What went wrong with an upstream, in words for whoever runs it: where it is, and what it did.

use std::error::Error;
use std::io;

use rmcp::ServiceError;
use rmcp::service::ClientInitializeError;
use rmcp::transport::streamable_http_client::StreamableHttpError;

/// Why it could not be connected to.
pub(super) fn hello(error: &ClientInitializeError) -> String {
    match error {
        ClientInitializeError::ConnectionClosed(_) => ENDED.to_owned(),
        ClientInitializeError::TransportError { error, .. } => transport(error, ENDED),
        ClientInitializeError::JsonRpcError(error) => format!("it does not want to talk: {} (code {})", error.message, error.code.0),
        ClientInitializeError::NoCompatibleProtocolVersion { server_supported, .. } => {
            let known: Vec<&str> = server_supported.iter().map(rmcp::model::ProtocolVersion::as_str).collect();
            format!("it only speaks revisions of the protocol that toolgate does not: {}", known.join(", "))
        }
        ClientInitializeError::LegacyFallbackFailed { fallback, .. } => hello(fallback),
        ClientInitializeError::Cancelled => "it was not waited for".to_owned(),
        _ => "it answered the greeting with something else".to_owned(),
    }
}

/// With which status it was turned away, where it was over HTTP.
pub(super) fn status(error: &ClientInitializeError) -> Option<u16> {
    let mut cause: Option<&(dyn Error + 'static)> = match error {
        ClientInitializeError::TransportError { error, .. } => Some(error),
        ClientInitializeError::LegacyFallbackFailed { fallback, .. } => return status(fallback),
        _ => None,
    };
    while let Some(error) = cause {
        if let Some(StreamableHttpError::HttpStatus(error)) = error.downcast_ref::<StreamableHttpError<reqwest::Error>>() {
            return Some(error.status);
        }
        cause = error.source();
    }
    None
}

/// Why it did not answer.
pub(super) fn question(error: &ServiceError) -> String {
    match error {
        ServiceError::McpError(error) => format!("{} (code {})", error.message, error.code.0),
        ServiceError::TransportSend(error) => unsent(error),
        ServiceError::TransportClosed => GONE.to_owned(),
        ServiceError::Timeout { timeout } => format!("not within {timeout:?}"),
        other => other.to_string(),
    }
}

/// Why a request did not get through. Its own words would name the whole address, and in some addresses stands a key.
pub(super) fn unsent(error: &(dyn Error + 'static)) -> String {
    transport(error, GONE)
}

const ENDED: &str = "it ended, or closed its output, before it had said hello";
const GONE: &str = "it has hung up";

/// What happened on the way. The first cause that says something is the one.
fn transport(error: &(dyn Error + 'static), ended: &str) -> String {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<StreamableHttpError<reqwest::Error>>() {
            return http(error);
        }
        if let Some(error) = error.downcast_ref::<reqwest::Error>() {
            return request(error);
        }
        if let Some(error) = error.downcast_ref::<io::Error>() {
            return match error.kind() {
                io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof => ended.to_owned(),
                _ => error.to_string(),
            };
        }
        cause = error.source();
    }
    // Whatever else it is, its own words are the innermost.
    innermost(error).to_string()
}

fn innermost<'e>(mut error: &'e (dyn Error + 'static)) -> &'e (dyn Error + 'static) {
    while let Some(inner) = error.source() {
        error = inner;
    }
    error
}

fn http(error: &StreamableHttpError<reqwest::Error>) -> String {
    let status = |status: u16| match status {
        401 | 403 => {
            format!("it answers with HTTP {status}: it wants credentials, or others (`bearer`, `oauth` or `headers` of the upstream)")
        }
        404 | 405 => format!("it answers with HTTP {status}: there is no MCP at this address; look at the path of `url`"),
        _ => format!("it answers with HTTP {status}"),
    };
    match error {
        StreamableHttpError::Client(error) => request(error),
        StreamableHttpError::HttpStatus(error) => status(error.status),
        StreamableHttpError::SessionExpired => "it does not know its session any more".to_owned(),
        StreamableHttpError::UnexpectedContentType(kind) => {
            format!("it answers with {}, which is no MCP; look at the path of `url`", kind.as_deref().unwrap_or("something"))
        }
        StreamableHttpError::UnexpectedServerResponse(_) => "it answers with something that is no MCP".to_owned(),
        StreamableHttpError::UnexpectedEndOfStream => "it broke off in the middle of its answer".to_owned(),
        other => other.to_string(),
    }
}

fn request(error: &reqwest::Error) -> String {
    let place = error.url().map(|url| url.origin().ascii_serialization()).unwrap_or_default();
    let cause = innermost(error);
    match (error.is_connect(), error.is_timeout()) {
        (_, true) => format!("{place} does not answer in time"),
        (true, _) => format!("{place} cannot be reached: {cause}"),
        _ => format!("the connection to {place} broke: {cause}"),
    }
}
