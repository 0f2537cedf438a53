//! Conversations of those who name none: each is the same one until nothing was said, and nothing was under way, for a while.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use toolgate::SessionKey;

use crate::gateway::lock;
use crate::parked::{LIFE, Parked};

/// What their names begin with.
const NAMED: &str = "idle-";
/// From how many on those in which nothing is said any more are forgotten.
const MANY: usize = 10_000;

/// The conversations, by principal and agent.
#[derive(Default)]
pub(crate) struct Idle(Mutex<HashMap<(String, String), Arc<Talk>>>);

struct Talk {
    name: String,
    /// When something was said last, or was over.
    last: Mutex<Instant>,
}

/// A call of a conversation that is under way, for as long as it is.
pub(crate) struct Busy(Arc<Talk>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.touch();
    }
}

impl Talk {
    fn fresh() -> Arc<Self> {
        let name = format!("{NAMED}{}", toolgate::Timestamp::now().as_millisecond());
        Arc::new(Self { name, last: Mutex::new(Instant::now()) })
    }

    fn touch(&self) {
        *lock(&self.last) = Instant::now();
    }

    /// Whether it is over. Who is at a call holds it, and touches it before letting it go.
    fn is_over(self: &Arc<Self>, idle: Duration) -> bool {
        Arc::strong_count(self) == 1 && lock(&self.last).elapsed() >= idle
    }
}

impl Idle {
    /// The conversation that a principal has as an agent, in which something is said now.
    pub(crate) fn name(&self, principal: &str, agent: &str, idle: Duration, parked: &Parked) -> String {
        let mut talks = lock(&self.0);
        if talks.len() > MANY {
            // Also of those who are waited for.
            talks.retain(|_, talk| !talk.is_over(idle.max(LIFE)));
        }
        let talk = talks.entry((principal.to_owned(), agent.to_owned())).or_insert_with(Talk::fresh);
        // Who was asked something comes back to where that was.
        if talk.is_over(idle) && !parked.waits_in(&SessionKey::new(agent, principal, talk.name.as_str())) {
            *talk = Talk::fresh();
        }
        talk.touch();
        talk.name.clone()
    }

    /// A call begins; where its conversation is one of these, that is not over before the call is.
    pub(crate) fn busy(&self, key: &SessionKey) -> Option<Busy> {
        if !key.session.starts_with(NAMED) {
            return None;
        }
        let talks = lock(&self.0);
        let talk = talks.get(&(key.principal.to_string(), key.agent.to_string()))?;
        (*talk.name == *key.session).then(|| Busy(Arc::clone(talk)))
    }
}
