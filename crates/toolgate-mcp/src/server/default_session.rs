//! Assigns sessions to clients that name none.
//!
//! A session lasts until it had no request and no running call for a while.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use toolgate::SessionKey;

use crate::gateway::lock;
use crate::server::suspended_calls::{SUSPENDED_CALL_TTL, SuspendedCalls};

/// Prefix of generated session names.
const DEFAULT_SESSION_PREFIX: &str = "idle-";
/// Number of sessions from which on expired ones are removed.
const MAX_SESSIONS_BEFORE_CLEANUP: usize = 10_000;

/// Generated sessions, by principal and agent.
#[derive(Default)]
pub(crate) struct DefaultSessions(Mutex<HashMap<(String, String), Arc<DefaultSession>>>);

struct DefaultSession {
    name: String,
    /// Time of the last request, or of the end of the last call.
    last_used: Mutex<Instant>,
}

/// Keeps a session alive while a call is running.
pub(crate) struct DefaultSessionGuard(Arc<DefaultSession>);

impl Drop for DefaultSessionGuard {
    fn drop(&mut self) {
        self.0.touch();
    }
}

impl DefaultSession {
    fn start() -> Arc<Self> {
        let name =
            format!("{DEFAULT_SESSION_PREFIX}{}", toolgate::Timestamp::now().as_millisecond());
        Arc::new(Self { name, last_used: Mutex::new(Instant::now()) })
    }

    fn touch(&self) {
        *lock(&self.last_used) = Instant::now();
    }

    /// Returns whether the session has expired.
    ///
    /// A running call holds a reference, and updates the time before it releases it.
    fn is_expired(self: &Arc<Self>, idle: Duration) -> bool {
        Arc::strong_count(self) == 1 && lock(&self.last_used).elapsed() >= idle
    }
}

impl DefaultSessions {
    /// Returns the session of a principal and agent, and starts a new one if it has expired.
    pub(crate) fn session_name(
        &self,
        principal: &str,
        agent: &str,
        idle: Duration,
        suspended: &SuspendedCalls,
    ) -> String {
        let mut sessions = lock(&self.0);
        if sessions.len() > MAX_SESSIONS_BEFORE_CLEANUP {
            // A suspended call may still need its session.
            sessions.retain(|_, session| !session.is_expired(idle.max(SUSPENDED_CALL_TTL)));
        }
        let session = sessions
            .entry((principal.to_owned(), agent.to_owned()))
            .or_insert_with(DefaultSession::start);
        // A client that answers a question returns to the session of its suspended call.
        if session.is_expired(idle)
            && !suspended.has_suspended_in(&SessionKey::new(
                agent,
                principal,
                session.name.as_str(),
            ))
        {
            *session = DefaultSession::start();
        }
        session.touch();
        session.name.clone()
    }

    /// Keeps a session alive for a call, if it is a generated one.
    pub(crate) fn use_session(&self, key: &SessionKey) -> Option<DefaultSessionGuard> {
        if !key.session.starts_with(DEFAULT_SESSION_PREFIX) {
            return None;
        }
        let sessions = lock(&self.0);
        let session = sessions.get(&(key.principal.to_string(), key.agent.to_string()))?;
        (*session.name == *key.session).then(|| DefaultSessionGuard(Arc::clone(session)))
    }
}
