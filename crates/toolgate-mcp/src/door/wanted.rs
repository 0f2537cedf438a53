//! What clients want of upstreams beside calls: prompts, resources and completions.

use std::pin::pin;
use std::sync::Arc;

use rmcp::RoleServer;
use rmcp::model::{ClientRequest, ErrorData, ServerResult};
use rmcp::service::RequestContext;
use tokio::sync::mpsc;

use super::{Door, passed};
use crate::calls::{Client, WORDS, poll};
use crate::upstream::Link;

impl Door {
    /// What an upstream is asked for a client, until the client takes it back: where nobody waits for it, the upstream is told. What it says
    /// meanwhile the client hears, and is asked nothing. Whoever waits for this boxes it: the library keeps room for the largest request
    /// with every session.
    pub(super) async fn wanted(
        &self,
        link: &Arc<Link>,
        request: ClientRequest,
        context: &RequestContext<RoleServer>,
    ) -> Result<ServerResult, ErrorData> {
        // In this order: what is counted when it ends has its time.
        let _counted = self.gateway.count();
        if self.gateway.0.stop.is_cancelled() {
            return Err(ErrorData::internal_error("this is ending", None));
        }
        let peer = link.peer().ok_or_else(|| ErrorData::internal_error("the upstream is away", None))?;
        let client = Client::of(context);
        let (line, mut heard) = mpsc::channel(WORDS);
        let mut asked = pin!(link.asked(link.ask(peer, request, line, self.level(&client))));
        let cancelled = || ErrorData::invalid_request("the request was cancelled", None);
        // Its time goes on while the client is told something, however long that takes.
        let mut telling = None;
        let answer = loop {
            let busy = telling.is_some();
            tokio::select! {
                biased;
                () = context.ct.cancelled() => return Err(cancelled()),
                answer = &mut asked => break answer,
                () = poll(&mut telling), if busy => telling = None,
                Some(said) = heard.recv(), if !busy => telling = Some(Box::pin(self.hear(said, &client))),
            }
        };
        // What was said in the same breath as the answer was said before it.
        let told = async {
            if let Some(telling) = telling {
                telling.await;
            }
            while let Ok(said) = heard.try_recv() {
                self.hear(said, &client).await;
            }
        };
        tokio::select! {
            () = context.ct.cancelled() => return Err(cancelled()),
            () = told => {}
        }
        answer.map_err(passed)
    }
}
