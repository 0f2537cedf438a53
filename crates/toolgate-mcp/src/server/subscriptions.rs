//! Handles subscriptions: what a client may listen to, and how it is notified.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rmcp::model::*;
use rmcp::service::{RequestContext, SubscriptionContext};
use rmcp::{ErrorData, RoleServer};
use serde::Deserialize as _;
use serde_json::Value;

use crate::gateway::ActiveConfig;
use crate::resources::{ChangeListener, MAX_SUBSCRIPTIONS_PER_CLIENT, ResourceLocation};
use crate::server::handler::{McpServer, pause_error};
use crate::server::identity;
use crate::server::identity::Caller;
use crate::server::parse_message::ParsedMessage;
use crate::server::tool_call::CallClient;

impl McpServer {
    /// Creates the listener for a lasting session or for this request.
    ///
    /// A pause that stops calls also stops listeners.
    pub(crate) async fn create_listener(
        &self,
        running: &ActiveConfig,
        context: &RequestContext<RoleServer>,
        lasting: bool,
    ) -> Result<Arc<ChangeListener>, ErrorData> {
        let key = identity::resolve_session(
            &self.gateway,
            running,
            self.stdio_identity.as_ref(),
            &CallClient::from_context(context),
        )?;
        let (caller, agent) = identity::resolve_caller(
            running,
            self.stdio_identity.as_ref(),
            context.extensions.get(),
        )?;
        match running.runtime.paused_error(&key).await {
            None => Ok(Arc::new(ChangeListener {
                caller,
                agent,
                key,
                is_local: self.stdio_identity.is_some(),
                has_session: lasting,
            })),
            Some(error) => Err(pause_error(&error)),
        }
    }

    /// Returns the supported part of a subscription filter.
    ///
    /// These are the lists that the agent has, and resources whose upstreams support subscriptions.
    pub(crate) fn supported_subset(
        &self,
        running: &ActiveConfig,
        caller: &Caller,
        agent: &str,
        requested: &SubscriptionFilter,
    ) -> SubscriptionFilter {
        let mut lists = SubscriptionFilter::new();
        lists.tools_list_changed = requested.tools_list_changed;
        lists.prompts_list_changed = requested.prompts_list_changed;
        lists.resources_list_changed = requested.resources_list_changed;
        let mut accepted =
            lists.supported_by(&self.server_config(running, Some(agent)).capabilities);
        let mut seen = HashSet::new();
        let each = requested
            .resource_subscriptions
            .iter()
            .flatten()
            .filter(|address| seen.insert(address.as_str()));
        let room =
            self.gateway.remaining_subscriptions(running, caller, self.stdio_identity.is_some());
        let found = ResourceLocation::resolve_all(
            running,
            agent,
            each.take(MAX_SUBSCRIPTIONS_PER_CLIENT.min(room)),
        )
        .into_iter()
        .flatten();
        let fitting = self.gateway.filter_by_limits(
            running,
            caller,
            self.stdio_identity.is_some(),
            found.filter(ResourceLocation::can_subscribe),
        );
        let addresses: Vec<String> = fitting.into_iter().map(|location| location.address).collect();
        accepted.resource_subscriptions = (!addresses.is_empty()).then_some(addresses);
        accepted
    }

    /// Removes unsupported entries from a `subscriptions/listen` request.
    ///
    /// The library acknowledges the request without knowing its caller. Returns whether the message
    /// was rewritten.
    pub(crate) fn filter_subscriptions(
        &self,
        running: &ActiveConfig,
        caller: &Caller,
        agent: Option<&str>,
        message: &mut ParsedMessage,
    ) -> bool {
        if message.value.get("method").and_then(Value::as_str) != Some("subscriptions/listen") {
            return false;
        }
        let Some(requested) = message.value.pointer_mut("/params/notifications") else {
            return false;
        };
        // The library rejects a malformed filter.
        let Ok(filter) = SubscriptionFilter::deserialize(&*requested) else { return false };
        let accepted = match identity::resolve_agent(running, caller, agent) {
            Ok(agent) => self.supported_subset(running, caller, &agent, &filter),
            Err(_) => SubscriptionFilter::new(),
        };
        *requested = serde_json::to_value(accepted).unwrap_or_default();
        message.text = message.value.to_string().into();
        true
    }

    /// Notifies a client of changes until it stops listening.
    pub(crate) async fn stream_changes(
        &self,
        context: SubscriptionContext,
    ) -> Result<(), ErrorData> {
        let running = self.gateway.active_config();
        let mut changes = self.gateway.0.changes.subscribe();
        let mut updates = running.upstreams.resource_updates().subscribe();
        let listener = self.create_listener(&running, context.request_context(), false).await?;
        // When this handler is dropped at the end of the stream, it ends the subscriptions.
        let stream_handler = Self::new(self.gateway.clone(), None);
        let mut locations = Vec::new();
        for found in ResourceLocation::resolve_all(
            &running,
            &listener.agent,
            context.accepted().resource_subscriptions.iter().flatten(),
        ) {
            locations.push(found?);
            stream_handler.has_subscriptions.store(true, Ordering::Relaxed);
        }
        drop(running);
        let mut subscribing = std::pin::pin!(async {
            for location in &locations {
                self.gateway
                    .subscribe(location, stream_handler.connection_id, &listener, None)
                    .await?;
            }
            Ok::<_, ErrorData>(())
        });
        let mut subscribed = false;
        loop {
            tokio::select! {
                // If an upstream refuses an acknowledged subscription, the stream ends with its
                // error.
                result = &mut subscribing, if !subscribed => {
                    result?;
                    subscribed = true;
                }
                () = context.cancelled() => return Ok(()),
                () = self.gateway.0.stop.cancelled() => return Ok(()),
                () = self.disconnected.cancelled() => return Ok(()),
                changed = changes.changed() => {
                    if changed.is_err() {
                        return Ok(());
                    }
                    let running = self.gateway.active_config();
                    if !listener.is_admitted(&running) {
                        return Err(ErrorData::invalid_request("access to the subscription was withdrawn", None));
                    }
                    if let Some(error) = running.runtime.paused_error(&listener.key).await {
                        return Err(pause_error(&error));
                    }
                    let sink = context.sink();
                    let _ = sink.notify_tool_list_changed().await;
                    let _ = sink.notify_prompt_list_changed().await;
                    let _ = sink.notify_resource_list_changed().await;
                }
                update = updates.recv() => {
                    let update = match update {
                        Ok(key) => Some(key),
                        // Some updates were lost, so any resource may have changed.
                        Err(tokio::sync::broadcast::error::RecvError::Lagged(_)) => None,
                        Err(tokio::sync::broadcast::error::RecvError::Closed) => return Ok(()),
                    };
                    // Skips updates of other resources, and resources that the caller may not see
                    // any more.
                    let is_meant = |location: &&ResourceLocation| update.as_ref().is_none_or(|(upstream, uri)| location.link.upstream.name == *upstream && location.uri == *uri);
                    for location in locations.iter().filter(is_meant) {
                        let running = self.gateway.active_config();
                        if listener.can_see(&running, &location.link.upstream.name) {
                            if let Some(error) = running.runtime.paused_error(&listener.key).await {
                                return Err(pause_error(&error));
                            }
                            let _ = context.sink().notify_resource_updated(location.address.clone()).await;
                        }
                    }
                }
            }
        }
    }
}
