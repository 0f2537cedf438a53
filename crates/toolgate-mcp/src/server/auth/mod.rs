//! Authenticates HTTP requests by static tokens, known by digest, and by signed tokens of an
//! issuer.

use std::io;
use std::sync::Arc;

use http::HeaderMap;
use toolgate_config::{GatewayConfig as Settings, GatewayToken};
use toolgate_json::Digest;

use crate::server::identity::{AuthMethod, Caller, is_same_agents};

mod jwt;

use crate::server::auth::jwt::{EMPTY_KEY_SET_MESSAGE, KEY_FETCH_FAILED_MESSAGE, TokenIssuer};

/// Authentication error. The message does not reveal which part of a token was almost correct.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AuthError {
    /// The request has no token.
    Missing,
    /// The token is not accepted.
    Invalid(&'static str),
}

/// Authenticates callers by one version of the configuration.
pub(crate) struct Authenticator {
    tokens: Vec<GatewayToken>,
    issuer: Option<Arc<TokenIssuer>>,
}

impl Authenticator {
    /// Fetches the keys of the issuer, or reuses those of `before` if the issuer is unchanged.
    pub(crate) async fn new(settings: &Settings, before: Option<&Self>) -> io::Result<Self> {
        let issuer = match &settings.jwt {
            None => None,
            Some(jwt) => {
                let same = before
                    .and_then(|before| before.issuer.clone())
                    .filter(|issuer| issuer.jwt == *jwt && is_url(&jwt.keys));
                let issuer = match same {
                    Some(issuer) => issuer,
                    None => {
                        let issuer = Arc::new(TokenIssuer::new(jwt.clone()));
                        // A key file must exist. An unreachable URL is tried again when a token
                        // arrives.
                        let is_file = !is_url(&jwt.keys);
                        let had = before.is_some_and(|before| before.issuer.is_some());
                        match issuer.fetch().await {
                            Err(error) if is_file => return Err(io::Error::other(error)),
                            Err(error) => tracing::warn!(error, "{KEY_FETCH_FAILED_MESSAGE}"),
                            // An empty key file at startup is a mistake. Later it withdraws all
                            // keys.
                            Ok(()) if is_file && !had && issuer.is_empty() => {
                                return Err(io::Error::other(EMPTY_KEY_SET_MESSAGE));
                            }
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
        let same = |token: &GatewayToken| {
            token.principal == caller.principal
                && is_same_agents(token.agents.as_deref(), caller.agents.as_deref())
        };
        let known = match &caller.auth_method {
            AuthMethod::Anonymous => false,
            AuthMethod::Token(sha256) => {
                self.tokens.iter().any(|token| (any || token.sha256 == *sha256) && same(token))
            }
            AuthMethod::Issuer(name) => {
                self.issuer.as_ref().is_some_and(|issuer| issuer.jwt.issuer == *name)
            }
        };
        known || self.is_auth_disabled()
    }

    /// Authenticates a request by its headers.
    pub(crate) async fn authenticate(
        &self,
        headers: &HeaderMap,
        local: &str,
    ) -> Result<Caller, AuthError> {
        if self.is_auth_disabled() {
            return Ok(Caller {
                principal: local.to_owned(),
                agents: None,
                session: None,
                auth_method: AuthMethod::Anonymous,
            });
        }
        let mut values = headers.get_all(http::header::AUTHORIZATION).iter();
        let value = values.next().ok_or(AuthError::Missing)?;
        if values.next().is_some() {
            return Err(AuthError::Invalid("more than one token"));
        }
        let value =
            value.to_str().map_err(|_| AuthError::Invalid("the token is not valid text"))?;
        let token = value
            .strip_prefix("Bearer ")
            .or_else(|| value.strip_prefix("bearer "))
            .ok_or(AuthError::Missing)?
            .trim();
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
                auth_method: AuthMethod::Token(digest),
            });
        }
        match &self.issuer {
            Some(issuer) => issuer.authenticate(token).await,
            None => Err(AuthError::Invalid("unknown token")),
        }
    }
}

fn is_equal_in_constant_time(left: &[u8], right: &[u8]) -> bool {
    left.len() == right.len() && left.iter().zip(right).fold(0, |all, (a, b)| all | (a ^ b)) == 0
}

fn is_url(keys: &str) -> bool {
    keys.starts_with("http://") || keys.starts_with("https://")
}

#[cfg(test)]
mod tests {
    use toolgate_config::JwtConfig;

    use super::*;

    #[test]
    fn static_token_is_not_replaced_by_issuer() {
        let token = |sha256: &str| GatewayToken {
            principal: "ann".to_owned(),
            sha256: sha256.to_owned(),
            agents: None,
        };
        let jwt = |issuer: &str| JwtConfig {
            issuer: issuer.to_owned(),
            audience: String::new(),
            keys: String::new(),
            resource: None,
            principal: "sub".to_owned(),
            session: None,
            agents: None,
        };
        let issuer = |name: &str| Arc::new(TokenIssuer::new(jwt(name)));
        let caller = |proof: AuthMethod| Caller {
            principal: "ann".to_owned(),
            agents: None,
            session: None,
            auth_method: proof,
        };
        let (with_token, with_issuer) =
            (caller(AuthMethod::Token("1".to_owned())), caller(AuthMethod::Issuer("a".to_owned())));
        for (tokens, issues, knows_own, knows_signed) in [
            (vec![token("1")], Some("a"), true, true),
            (vec![token("1")], None, true, false),
            // Replaced by another token.
            (vec![token("2")], Some("b"), false, false),
            (vec![], Some("a"), false, true),
            (vec![], None, true, true),
        ] {
            let keys = Authenticator { tokens, issuer: issues.map(issuer) };
            let known = (
                keys.can_reauthenticate(&with_token, false),
                keys.can_reauthenticate(&with_issuer, false),
            );
            assert_eq!(known, (knows_own, knows_signed), "{issues:?} {:?}", keys.tokens);
            assert_eq!(
                keys.can_reauthenticate(&caller(AuthMethod::Anonymous), false),
                keys.is_auth_disabled(),
                "a caller without proof"
            );
        }
    }

    #[test]
    fn equivalent_token_is_accepted_if_any_is_allowed() {
        let agents = |names: &str| {
            (names != "all").then(|| names.split(' ').map(str::to_owned).collect::<Vec<_>>())
        };
        let caller = |proof: AuthMethod| Caller {
            principal: "ann".to_owned(),
            agents: agents("a b"),
            session: None,
            auth_method: proof,
        };
        for (principal, names, sha256, known) in [
            ("ann", "a b", "1", (true, true)),
            ("ann", "b a", "1", (true, true)),
            ("ann", "b a", "2", (true, false)),
            ("ann", "a", "2", (false, false)),
            ("ann", "all", "2", (false, false)),
            ("bob", "a b", "2", (false, false)),
        ] {
            let token = GatewayToken {
                principal: principal.to_owned(),
                sha256: sha256.to_owned(),
                agents: agents(names),
            };
            let (keys, known_caller) = (
                Authenticator { tokens: vec![token], issuer: None },
                caller(AuthMethod::Token("1".to_owned())),
            );
            assert_eq!(
                (
                    keys.can_reauthenticate(&known_caller, true),
                    keys.can_reauthenticate(&known_caller, false)
                ),
                known,
                "{principal} {names} {sha256}"
            );
            assert!(
                !keys.can_reauthenticate(&caller(AuthMethod::Anonymous), true),
                "a caller without proof"
            );
        }
    }
}
