//! Authenticates HTTP requests by static tokens, known by digest, and by signed tokens of an
//! issuer.

use std::io;
use std::sync::Arc;

use http::HeaderMap;
use toolgate_config::{Gateway as Settings, Token};
use toolgate_json::Digest;

use crate::server::identity::{Caller, Proof, is_same_agents};

mod jwt;

use crate::server::auth::jwt::{Issuer, NO_KEY, UNFETCHED};

/// Authentication error. The message does not reveal which part of a token was almost correct.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NotLetIn {
    /// The request has no token.
    Missing,
    /// The token is not accepted.
    Invalid(&'static str),
}

/// Authenticates callers by one version of the configuration.
pub(crate) struct Keys {
    tokens: Vec<Token>,
    issuer: Option<Arc<Issuer>>,
}

impl Keys {
    /// Fetches the keys of the issuer, or reuses those of `before` if the issuer is unchanged.
    pub(crate) async fn new(settings: &Settings, before: Option<&Self>) -> io::Result<Self> {
        let issuer = match &settings.jwt {
            None => None,
            Some(jwt) => {
                let same = before.and_then(|before| before.issuer.clone()).filter(|issuer| issuer.jwt == *jwt && is_url(&jwt.keys));
                let issuer = match same {
                    Some(issuer) => issuer,
                    None => {
                        let issuer = Arc::new(Issuer::new(jwt.clone()));
                        // A key file must exist. An unreachable URL is tried again when a token
                        // arrives.
                        let is_file = !is_url(&jwt.keys);
                        let had = before.is_some_and(|before| before.issuer.is_some());
                        match issuer.fetch().await {
                            Err(error) if is_file => return Err(io::Error::other(error)),
                            Err(error) => tracing::warn!(error, "{UNFETCHED}"),
                            // An empty key file at startup is a mistake. Later it withdraws all
                            // keys.
                            Ok(()) if is_file && !had && issuer.is_empty() => return Err(io::Error::other(NO_KEY)),
                            Ok(()) => {}
                        }
                        issuer
                    }
                };
                Some(issuer)
            }
        };
        Ok(Self { tokens: settings.tokens.clone(), issuer })
    }

    /// Returns whether requests need no token.
    pub(crate) fn is_auth_disabled(&self) -> bool {
        self.tokens.is_empty() && self.issuer.is_none()
    }

    /// Returns whether a caller that was authenticated before may still be.
    ///
    /// With `any`, another token with the same rights also counts. Of a signed token only the
    /// issuer is compared, because the token itself is not kept.
    pub(crate) fn can_reauthenticate(&self, caller: &Caller, any: bool) -> bool {
        let same = |token: &Token| token.principal == caller.principal && is_same_agents(token.agents.as_deref(), caller.agents.as_deref());
        let known = match &caller.auth_method {
            Proof::Anonymous => false,
            Proof::Token(sha256) => self.tokens.iter().any(|token| (any || token.sha256 == *sha256) && same(token)),
            Proof::Issuer(name) => self.issuer.as_ref().is_some_and(|issuer| issuer.jwt.issuer == *name),
        };
        known || self.is_auth_disabled()
    }

    /// Authenticates a request by its headers.
    pub(crate) async fn authenticate(&self, headers: &HeaderMap, local: &str) -> Result<Caller, NotLetIn> {
        if self.is_auth_disabled() {
            return Ok(Caller { principal: local.to_owned(), agents: None, session: None, auth_method: Proof::Anonymous });
        }
        let mut values = headers.get_all(http::header::AUTHORIZATION).iter();
        let value = values.next().ok_or(NotLetIn::Missing)?;
        if values.next().is_some() {
            return Err(NotLetIn::Invalid("more than one token"));
        }
        let value = value.to_str().map_err(|_| NotLetIn::Invalid("the token is not valid text"))?;
        let token = value.strip_prefix("Bearer ").or_else(|| value.strip_prefix("bearer ")).ok_or(NotLetIn::Missing)?.trim();
        let digest = Digest::of(token.as_bytes()).to_string();
        // Compares with every token, so that the response time reveals nothing.
        let mut found = None;
        for known in &self.tokens {
            if is_equal_in_constant_time(known.sha256.as_bytes(), digest.as_bytes()) {
                found = Some(known);
            }
        }
        if let Some(known) = found {
            return Ok(Caller {
                principal: known.principal.clone(),
                agents: known.agents.clone(),
                session: None,
                auth_method: Proof::Token(digest),
            });
        }
        match &self.issuer {
            Some(issuer) => issuer.authenticate(token).await,
            None => Err(NotLetIn::Invalid("unknown token")),
        }
    }
}

fn is_equal_in_constant_time(one: &[u8], other: &[u8]) -> bool {
    one.len() == other.len() && one.iter().zip(other).fold(0, |all, (a, b)| all | (a ^ b)) == 0
}

fn is_url(keys: &str) -> bool {
    keys.starts_with("http://") || keys.starts_with("https://")
}

#[cfg(test)]
mod tests {
    use toolgate_config::Jwt;

    use super::*;

    #[test]
    fn static_token_is_not_replaced_by_issuer() {
        let token = |sha256: &str| Token { principal: "ann".to_owned(), sha256: sha256.to_owned(), agents: None };
        let jwt = |issuer: &str| Jwt {
            issuer: issuer.to_owned(),
            audience: String::new(),
            keys: String::new(),
            resource: None,
            principal: "sub".to_owned(),
            session: None,
            agents: None,
        };
        let issuer = |name: &str| Arc::new(Issuer::new(jwt(name)));
        let caller = |proof: Proof| Caller { principal: "ann".to_owned(), agents: None, session: None, auth_method: proof };
        let (own, signed) = (caller(Proof::Token("1".to_owned())), caller(Proof::Issuer("a".to_owned())));
        for (tokens, issues, knows_own, knows_signed) in [
            (vec![token("1")], Some("a"), true, true),
            (vec![token("1")], None, true, false),
            // Replaced by another token.
            (vec![token("2")], Some("b"), false, false),
            (vec![], Some("a"), false, true),
            (vec![], None, true, true),
        ] {
            let keys = Keys { tokens, issuer: issues.map(issuer) };
            let known = (keys.can_reauthenticate(&own, false), keys.can_reauthenticate(&signed, false));
            assert_eq!(known, (knows_own, knows_signed), "{issues:?} {:?}", keys.tokens);
            assert_eq!(keys.can_reauthenticate(&caller(Proof::Anonymous), false), keys.is_auth_disabled(), "a caller without proof");
        }
    }

    #[test]
    fn equivalent_token_is_accepted_if_any_is_allowed() {
        let agents = |names: &str| (names != "all").then(|| names.split(' ').map(str::to_owned).collect::<Vec<_>>());
        let caller = |proof: Proof| Caller { principal: "ann".to_owned(), agents: agents("a b"), session: None, auth_method: proof };
        for (principal, names, sha256, known) in [
            ("ann", "a b", "1", (true, true)),
            ("ann", "b a", "1", (true, true)),
            ("ann", "b a", "2", (true, false)),
            ("ann", "a", "2", (false, false)),
            ("ann", "all", "2", (false, false)),
            ("bob", "a b", "2", (false, false)),
        ] {
            let token = Token { principal: principal.to_owned(), sha256: sha256.to_owned(), agents: agents(names) };
            let (keys, own) = (Keys { tokens: vec![token], issuer: None }, caller(Proof::Token("1".to_owned())));
            assert_eq!((keys.can_reauthenticate(&own, true), keys.can_reauthenticate(&own, false)), known, "{principal} {names} {sha256}");
            assert!(!keys.can_reauthenticate(&caller(Proof::Anonymous), true), "a caller without proof");
        }
    }
}
