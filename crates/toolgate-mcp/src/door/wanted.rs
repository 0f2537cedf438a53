//! What clients want of upstreams beside calls: prompts, resources and completions.

use std::pin::pin;
use std::sync::Arc;

use rmcp::RoleServer;
use rmcp::model::{ClientRequest, ErrorData, ServerResult};
use rmcp::service::RequestContext;
use tokio::sync::mpsc;

use super::{Door, passed};
use crate::calls::{Client, WORDS};
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
        let peer = link.peer().ok_or_else(|| ErrorData::internal_error("the upstream is away", None))?;
        let client = Client::of(context);
        let (line, mut heard) = mpsc::channel(WORDS);
        let mut asked = pin!(link.asked(link.ask(peer, request, line)));
        loop {
            tokio::select! {
                biased;
                () = context.ct.cancelled() => return Err(ErrorData::invalid_request("the request was cancelled", None)),
                Some(said) = heard.recv() => self.hear(said, &client).await,
                answer = &mut asked => {
                    // What was said in the same breath as the answer was said before it.
                    while let Ok(said) = heard.try_recv() {
                        self.hear(said, &client).await;
                    }
                    return answer.map_err(passed);
                }
            }
        }
    }
}
