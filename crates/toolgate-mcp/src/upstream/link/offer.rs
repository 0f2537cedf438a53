//! What an upstream offers: asked for, held against what was accepted, and held back where it is odd.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rmcp::model::Tool;
use rmcp::service::Peer;
use rmcp::{RoleClient, ServiceError};
use toolgate::config::Remote;

use super::{Link, Offer, Status};
use crate::gateway::lock;
use crate::upstream::listen::pages;
use crate::upstream::shadows::Names;

impl Link {
    /// Asks what it offers.
    pub(super) async fn list(&self, peer: &Peer<RoleClient>) -> Result<(), String> {
        let limit = Duration::from_secs(30);
        let asked = tokio::time::timeout(limit, async {
            let info = peer.peer_info();
            let capabilities = info.as_ref().map(|info| info.capabilities.clone()).unwrap_or_default();
            let said = |error: ServiceError| crate::upstream::plain::question(&error);
            let tools = if capabilities.tools.is_some() {
                listed(pages(|page| peer.list_tools(page), |listed| (listed.tools, listed.next_cursor)).await.map_err(said)?)?
            } else {
                Vec::new()
            };
            // Whoever claims to have prompts and resources and does not, has none.
            let prompts = match capabilities.prompts.is_some() && self.upstream.prompts {
                true => self.shortly(pages(|page| peer.list_prompts(page), |listed| (listed.prompts, listed.next_cursor))).await,
                false => Vec::new(),
            };
            let (mut resources, mut templates) = (Vec::new(), Vec::new());
            if capabilities.resources.is_some() && self.upstream.resources {
                resources = self.shortly(pages(|page| peer.list_resources(page), |listed| (listed.resources, listed.next_cursor))).await;
                let listed = pages(|page| peer.list_resource_templates(page), |listed| (listed.resource_templates, listed.next_cursor));
                templates = self.shortly(listed).await;
            }
            let instructions = info.as_ref().and_then(|info| info.instructions.clone());
            Ok::<_, String>((tools, Offer { tools: Vec::new(), prompts, resources, templates, capabilities, instructions }))
        });
        let (tools, offer) = asked.await.map_err(|_| format!("not within {limit:?}"))??;
        self.pins.note(&tools)?;
        let offer = Arc::new(Offer { tools: self.pins.accepted().unwrap_or_default(), ..offer });
        let before = std::mem::replace(&mut *lock(&self.offer), Arc::clone(&offer));
        if self.told.swap(false, Ordering::Relaxed) || before != offer {
            self.changed.send_modify(|times| *times += 1);
        }
        Ok(())
    }

    /// Asks what it offers. One that answers calls meanwhile may have no time for questions, and one answer may be lost among what a
    /// talkative one says; one that answers nothing, asked twice, is ill.
    pub(super) async fn list_or_work(&self, peer: &Peer<RoleClient>, ill: &str) -> Result<(), String> {
        let before = self.answers.load(Ordering::Relaxed);
        let mut listed = Ok(());
        for _ in 0..2 {
            listed = self.list(peer).await;
            if listed.is_ok() {
                return Ok(());
            }
            if self.answers.load(Ordering::Relaxed) != before {
                // That something has changed is still to be seen.
                if self.told.load(Ordering::Relaxed) {
                    self.relist.notify_one();
                }
                return Ok(());
            }
        }
        listed.map_err(|why| format!("{ill}: {why}"))
    }

    /// What it tells soon; else nothing.
    async fn shortly<T>(&self, listed: impl Future<Output = Result<(Vec<T>, bool), ServiceError>>) -> Vec<T> {
        let (listed, whole) =
            tokio::time::timeout(Duration::from_secs(8), listed).await.ok().and_then(Result::ok).unwrap_or((Vec::new(), true));
        if !whole {
            tracing::warn!(
                upstream = self.upstream.name,
                kept = listed.len(),
                "a list of an upstream has no end; the rest of it is left out"
            );
        }
        listed
    }

    /// It says that its lists have changed.
    pub(crate) fn lists_changed(&self) {
        self.told.store(true, Ordering::Relaxed);
        self.relist.notify_one();
    }

    /// Somebody may have accepted what was held back, or put there what it lacked.
    pub(in crate::upstream) fn look_again(&self) {
        Arc::make_mut(&mut lock(&self.offer)).tools = self.pins.accepted().unwrap_or_default();
        if self.lacks.load(Ordering::Relaxed) && self.upstream.lacks().is_empty() {
            self.retry.notify_one();
        }
    }

    /// Its tools as they were accepted; `None` where it was never seen.
    pub(in crate::upstream) fn remotes(&self) -> Option<Vec<Remote>> {
        let tools = self.pins.accepted().or_else(|| matches!(self.status(), Status::Up { .. }).then(Vec::new))?;
        Some(tools.into_iter().map(remote).collect())
    }

    /// Holds back tools whose words speak of another upstream's tool that was there before them, or came with them.
    pub(in crate::upstream) fn hold_shadows(&self, names: &Names<'_>) {
        self.pins.hold_shadows(&self.upstream, names);
        Arc::make_mut(&mut lock(&self.offer)).tools = self.pins.accepted().unwrap_or_default();
    }
}

/// A tool as rules see it.
pub(in crate::upstream) fn remote(tool: Tool) -> Remote {
    Remote {
        name: tool.name.to_string(),
        description: tool.description.as_deref().or(tool.title.as_deref()).unwrap_or_default().to_owned(),
        input: serde_json::Value::Object((*tool.input_schema).clone()),
        output: tool.output_schema.as_ref().map(|schema| serde_json::Value::Object((**schema).clone())),
    }
}

/// All of a list of tools. Of half of one nobody knows what is missing.
fn listed<T>((listed, whole): (Vec<T>, bool)) -> Result<Vec<T>, String> {
    if whole { Ok(listed) } else { Err("its list of tools has no end".to_owned()) }
}
