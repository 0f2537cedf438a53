//! Implements the client side of the 2024-11-05 transport: one event stream, and a URL for posts.

use std::collections::HashMap;
use std::time::Duration;

use futures_util::StreamExt;
use reqwest::header::{ACCEPT, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use reqwest::{Client, Url};
use rmcp::RoleClient;
use rmcp::model::{ClientJsonRpcMessage, ServerJsonRpcMessage};
use rmcp::transport::Transport;
use tokio::sync::mpsc;

/// The timeout for the `endpoint` event.
const ENDPOINT_EVENT_TIMEOUT: Duration = Duration::from_secs(15);

pub(crate) struct SseTransport {
    client: Client,
    post: Url,
    headers: HeaderMap,
    incoming: mpsc::Receiver<ServerJsonRpcMessage>,
    listener: tokio::task::JoinHandle<()>,
}

/// Why a message could not be sent.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SseError {
    /// The server responded with this status, and a retry delay in milliseconds if given.
    #[error("the server answered with status {0}")]
    Status(u16, Option<u64>),
    /// The connection could not be opened.
    #[error("cannot connect: {0}")]
    NotConnected(String),
    /// The message may have arrived.
    #[error("{0}")]
    Unknown(String),
}

impl SseTransport {
    pub(crate) async fn open(
        client: Client,
        url: &str,
        custom: HashMap<HeaderName, HeaderValue>,
        token: Option<String>,
    ) -> Result<Self, String> {
        let base: Url =
            url.parse().map_err(|error| format!("`url` is not a valid URL: {error}"))?;
        let mut headers: HeaderMap = custom.into_iter().collect();
        if let Some(token) = token {
            let mut value = HeaderValue::from_str(&format!("Bearer {token}"))
                .map_err(|_| "the token is not a valid header value".to_owned())?;
            value.set_sensitive(true);
            headers.insert(reqwest::header::AUTHORIZATION, value);
        }
        let request =
            client.get(base.clone()).headers(headers.clone()).header(ACCEPT, "text/event-stream");
        let answer = request
            .send()
            .await
            .map_err(|error| format!("cannot connect: {}", error.without_url()))?;
        if !answer.status().is_success() {
            return Err(format!("the server answered with status {}", answer.status().as_u16()));
        }
        let mut events =
            crate::upstream::transport::bounded_http::bounded_events(answer.bytes_stream());
        let endpoint = async {
            while let Some(Ok(event)) = events.next().await {
                if event.event.as_deref() == Some("endpoint") {
                    return event.data;
                }
            }
            None
        };
        let address = tokio::time::timeout(ENDPOINT_EVENT_TIMEOUT, endpoint)
            .await
            .ok()
            .flatten()
            .ok_or("the server sent no `endpoint` event")?;
        let post = base
            .join(address.trim())
            .map_err(|error| format!("the `endpoint` event has an invalid URL: {error}"))?;
        // Never send credentials to another origin.
        if post.origin() != base.origin() {
            return Err("the `endpoint` event names another origin".to_owned());
        }
        let (sender, incoming) = mpsc::channel(64);
        let listener = tokio::spawn(async move {
            while let Some(Ok(event)) = events.next().await {
                let message = event
                    .data
                    .filter(|_| event.event.as_deref().is_none_or(|kind| kind == "message"));
                let Some(message) = message.and_then(|text| serde_json::from_str(&text).ok())
                else {
                    continue;
                };
                if sender.send(message).await.is_err() {
                    return;
                }
            }
        });
        Ok(Self { client, post, headers, incoming, listener })
    }
}

impl Transport<RoleClient> for SseTransport {
    type Error = SseError;

    fn send(
        &mut self,
        item: ClientJsonRpcMessage,
    ) -> impl Future<Output = Result<(), SseError>> + Send + 'static {
        let body = serde_json::to_vec(&item);
        let request = self
            .client
            .post(self.post.clone())
            .headers(self.headers.clone())
            .header(CONTENT_TYPE, "application/json");
        async move {
            let body = body.map_err(|error| SseError::Unknown(error.to_string()))?;
            let answer = request.body(body).send().await.map_err(|error| {
                let (is_connect, reason) = (error.is_connect(), error.without_url().to_string());
                if is_connect { SseError::NotConnected(reason) } else { SseError::Unknown(reason) }
            })?;
            match answer.status().is_success() {
                true => Ok(()),
                false => Err(SseError::Status(
                    answer.status().as_u16(),
                    crate::http_tool::retry_after_ms(answer.headers()),
                )),
            }
        }
    }

    async fn receive(&mut self) -> Option<ServerJsonRpcMessage> {
        self.incoming.recv().await
    }

    async fn close(&mut self) -> Result<(), SseError> {
        self.listener.abort();
        Ok(())
    }
}

impl Drop for SseTransport {
    fn drop(&mut self) {
        self.listener.abort();
    }
}
