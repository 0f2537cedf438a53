//! Sends progress and log messages of an upstream to the client of a call.

use rmcp::model::*;

use crate::gateway::lock;
use crate::mcp_convert;
use crate::server::elicitation::decline_question;
use crate::server::handler::McpServer;
use crate::server::tool_call::CallClient;
use crate::upstream::UpstreamEvent;

impl McpServer {
    /// Returns the lowest log level that a client wants, or `None` for no log messages.
    ///
    /// A client of 2026-07-28 or later gets log messages only if its request asks for them.
    pub(crate) fn log_level(&self, client: &CallClient<'_>) -> Option<LoggingLevel> {
        match client.is_modern {
            true => client.meta.log_level(),
            false => Some(lock(&self.level).unwrap_or(LoggingLevel::Info)),
        }
    }

    /// Delivers a notification of an upstream, and declines a question.
    pub(crate) async fn deliver_event(&self, event: UpstreamEvent, client: &CallClient<'_>) {
        match event {
            UpstreamEvent::Progress(progress) => self.send_progress(progress, client).await,
            UpstreamEvent::Log(message) => self.send_log(message, client).await,
            question => decline_question(question),
        }
    }

    pub(super) async fn send_progress(
        &self,
        mut progress: ProgressNotificationParam,
        client: &CallClient<'_>,
    ) {
        if let Some(token) = client.meta.get_progress_token() {
            progress.progress_token = token;
            progress.meta = progress.meta.map(mcp_convert::strip_notification_meta);
            client.notify(ProgressNotification::new(progress).into()).await;
        }
    }

    pub(super) async fn send_log(
        &self,
        mut message: LoggingMessageNotificationParam,
        client: &CallClient<'_>,
    ) {
        if self
            .log_level(client)
            .is_some_and(|minimum| level_rank(message.level) >= level_rank(minimum))
        {
            message.meta = message.meta.map(mcp_convert::strip_notification_meta);
            client.notify(LoggingMessageNotification::new(message).into()).await;
        }
    }
}

const fn level_rank(level: LoggingLevel) -> u8 {
    match level {
        LoggingLevel::Debug => 0,
        LoggingLevel::Info => 1,
        LoggingLevel::Notice => 2,
        LoggingLevel::Warning => 3,
        LoggingLevel::Error => 4,
        LoggingLevel::Critical => 5,
        LoggingLevel::Alert => 6,
        LoggingLevel::Emergency => 7,
    }
}
