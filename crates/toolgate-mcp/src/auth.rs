//! Who may come in: tokens that are known by their digests, and tokens that somebody else signs.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};

use http::HeaderMap;
use jsonwebtoken::jwk::{JwkSet, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey, Validation};
use serde_json::Value;
use toolgate::config::{CANARY_PRINCIPAL, Gateway as Settings, Jwt, Token};
use toolgate::json::Digest;

use crate::gateway::lock;
use crate::identity::{Caller, Proof, same_agents};

/// How often keys are fetched at most, however many tokens are signed by unknown ones.
const SOONEST: Duration = Duration::from_secs(30);
/// How often, while there are none.
const RETRY: Duration = Duration::from_secs(1);
/// What is told where they cannot be had, or are none.
const UNFETCHED: &str = "the keys for tokens cannot be fetched";
const NO_KEY: &str = "there is no key for tokens that can be used";
/// How old they may become.
const OLDEST: Duration = Duration::from_secs(10 * 60);
/// Ways of signing that only the one who signs can do.
const ALGORITHMS: [Algorithm; 9] = [
    Algorithm::RS256,
    Algorithm::RS384,
    Algorithm::RS512,
    Algorithm::PS256,
    Algorithm::PS384,
    Algorithm::PS512,
    Algorithm::ES256,
    Algorithm::ES384,
    Algorithm::EdDSA,
];

/// Why somebody may not come in. What is told is told without saying which part was nearly right.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NotLetIn {
    /// There is no token.
    Missing,
    /// There is one, and it does not count.
    Invalid(&'static str),
}

/// Who may come in, by one reading of the configuration.
pub(crate) struct Keys {
    tokens: Vec<Token>,
    issuer: Option<Arc<Issuer>>,
}

struct Issuer {
    jwt: Jwt,
    keys: RwLock<HashMap<String, (DecodingKey, Option<Algorithm>)>>,
    fetched: Mutex<Option<Instant>>,
    /// One fetches; the others wait for what it brings.
    fetching: tokio::sync::Mutex<()>,
}

impl Keys {
    /// Keys that were fetched before and are still meant are not fetched again.
    pub(crate) async fn new(settings: &Settings, before: Option<&Self>) -> io::Result<Self> {
        let issuer = match &settings.jwt {
            None => None,
            Some(jwt) => {
                let same = before.and_then(|before| before.issuer.clone()).filter(|issuer| issuer.jwt == *jwt && is_address(&jwt.keys));
                let issuer = match same {
                    Some(issuer) => issuer,
                    None => {
                        let issuer = Arc::new(Issuer {
                            jwt: jwt.clone(),
                            keys: RwLock::default(),
                            fetched: Mutex::new(None),
                            fetching: tokio::sync::Mutex::default(),
                        });
                        // A file must be there; who cannot be reached yet is asked again when a token comes.
                        let is_file = !is_address(&jwt.keys);
                        let had = before.is_some_and(|before| before.issuer.is_some());
                        match issuer.fetch().await {
                            Err(error) if is_file => return Err(io::Error::other(error)),
                            Err(error) => tracing::warn!(error, "{UNFETCHED}"),
                            // Who begins with none has none by mistake. Later they may have been withdrawn, and then nothing else holds.
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

    /// Whether anybody may come in.
    pub(crate) fn is_open(&self) -> bool {
        self.tokens.is_empty() && self.issuer.is_none()
    }

    /// Whether somebody who was let in before might be let in again: with the same token, or with any that allows the same. Of a token
    /// that somebody else has signed nobody knows here.
    pub(crate) fn may_know(&self, caller: &Caller, any: bool) -> bool {
        let same = |token: &Token| token.principal == caller.principal && same_agents(token.agents.as_deref(), caller.agents.as_deref());
        let known = match &caller.proof {
            Proof::Nothing => false,
            Proof::Token(sha256) => self.tokens.iter().any(|token| (any || token.sha256 == *sha256) && same(token)),
            Proof::Issuer(name) => self.issuer.as_ref().is_some_and(|issuer| issuer.jwt.issuer == *name),
        };
        known || self.is_open()
    }

    /// Who comes with these headers.
    pub(crate) async fn caller(&self, headers: &HeaderMap, local: &str) -> Result<Caller, NotLetIn> {
        if self.is_open() {
            return Ok(Caller { principal: local.to_owned(), agents: None, session: None, proof: Proof::Nothing });
        }
        let mut values = headers.get_all(http::header::AUTHORIZATION).iter();
        let value = values.next().ok_or(NotLetIn::Missing)?;
        if values.next().is_some() {
            return Err(NotLetIn::Invalid("there are two tokens"));
        }
        let value = value.to_str().map_err(|_| NotLetIn::Invalid("the token is no text"))?;
        let token = value.strip_prefix("Bearer ").or_else(|| value.strip_prefix("bearer ")).ok_or(NotLetIn::Missing)?.trim();
        let digest = Digest::of(token.as_bytes()).to_string();
        // All are looked at, so that the time it takes tells nothing.
        let mut found = None;
        for known in &self.tokens {
            if same(known.sha256.as_bytes(), digest.as_bytes()) {
                found = Some(known);
            }
        }
        if let Some(known) = found {
            return Ok(Caller {
                principal: known.principal.clone(),
                agents: known.agents.clone(),
                session: None,
                proof: Proof::Token(digest),
            });
        }
        match &self.issuer {
            Some(issuer) => issuer.caller(token).await,
            None => Err(NotLetIn::Invalid("the token is not known")),
        }
    }
}

fn same(one: &[u8], other: &[u8]) -> bool {
    one.len() == other.len() && one.iter().zip(other).fold(0, |all, (a, b)| all | (a ^ b)) == 0
}

fn is_address(keys: &str) -> bool {
    keys.starts_with("http://") || keys.starts_with("https://")
}

impl Issuer {
    async fn caller(self: &Arc<Self>, token: &str) -> Result<Caller, NotLetIn> {
        let header = jsonwebtoken::decode_header(token).map_err(|_| NotLetIn::Invalid("the token cannot be read"))?;
        if !ALGORITHMS.contains(&header.alg) {
            return Err(NotLetIn::Invalid("the token is not signed as it must be"));
        }
        // What must be understood is not understood here (RFC 7515, 4.1.11).
        if header.crit.is_some() {
            return Err(NotLetIn::Invalid("the token says something that must be understood, and is not"));
        }
        let kid = header.kid.clone().unwrap_or_default();
        let key = match self.key(&kid, header.alg) {
            Some(key) => key,
            None => {
                // Only who comes with an unknown key waits for it, and only now and then; where none is known at all, more often.
                let _one = tokio::time::timeout(Duration::from_secs(10), self.fetching.lock())
                    .await
                    .map_err(|_| NotLetIn::Invalid("the keys for tokens cannot be had now"))?;
                let age = if self.is_empty() { RETRY } else { SOONEST };
                if self.key(&kid, header.alg).is_none() && self.is_due(age) {
                    self.fetch_again().await;
                    // Those who have waited do not wait for another try.
                    *lock(&self.fetched) = Some(Instant::now());
                }
                self.key(&kid, header.alg).ok_or(NotLetIn::Invalid("the token is signed by nobody who is known"))?
            }
        };
        if self.is_due(OLDEST) {
            let own = Arc::clone(self);
            tokio::spawn(async move { own.fetch_again().await });
        }
        let mut validation = Validation::new(header.alg);
        validation.set_audience(&[&self.jwt.audience]);
        validation.set_issuer(&[&self.jwt.issuer]);
        validation.set_required_spec_claims(&["exp", "aud", "iss"]);
        validation.validate_nbf = true;
        validation.leeway = 30;
        let claims = jsonwebtoken::decode::<Value>(token, &key, &validation).map_err(|error| match error.kind() {
            jsonwebtoken::errors::ErrorKind::ExpiredSignature => NotLetIn::Invalid("the token has expired"),
            jsonwebtoken::errors::ErrorKind::InvalidAudience => NotLetIn::Invalid("the token is for somebody else"),
            jsonwebtoken::errors::ErrorKind::InvalidIssuer => NotLetIn::Invalid("the token is from somebody else"),
            _ => NotLetIn::Invalid("the token does not hold"),
        })?;
        let claim = |name: &str| claims.claims.get(name);
        let principal = claim(&self.jwt.principal).and_then(Value::as_str).filter(|who| !who.is_empty());
        let principal = principal.ok_or(NotLetIn::Invalid("the token does not say who comes"))?.to_owned();
        if principal == CANARY_PRINCIPAL {
            return Err(NotLetIn::Invalid("the token names somebody whom nobody can be"));
        }
        // A claim that is not understood would be one that does not hold.
        let session = match self.jwt.session.as_deref().and_then(claim) {
            None | Some(Value::Null) => None,
            Some(Value::String(name)) => Some(name.clone()),
            Some(Value::Number(name)) => Some(name.to_string()),
            Some(_) => return Err(NotLetIn::Invalid("the token names a session that is no text")),
        };
        // Where the claim is asked for and is not there, there are none.
        let agents = self.jwt.agents.as_deref().map(|name| match claim(name) {
            Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
            Some(Value::String(names)) => names.split_whitespace().map(str::to_owned).collect(),
            _ => Vec::new(),
        });
        Ok(Caller { principal, agents, session, proof: Proof::Issuer(self.jwt.issuer.clone()) })
    }

    fn key(&self, kid: &str, algorithm: Algorithm) -> Option<DecodingKey> {
        let keys = self.keys.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        let found = keys.get(kid).or_else(|| keys.values().next().filter(|_| kid.is_empty() && keys.len() == 1))?;
        // A key is for one way of signing, where it says so.
        found.1.is_none_or(|own| own == algorithm).then(|| found.0.clone())
    }

    fn is_empty(&self) -> bool {
        self.keys.read().unwrap_or_else(std::sync::PoisonError::into_inner).is_empty()
    }

    /// Whether keys are to be fetched; whoever is told so fetches them.
    fn is_due(&self, age: Duration) -> bool {
        let mut fetched = lock(&self.fetched);
        let due = fetched.is_none_or(|at| at.elapsed() > age);
        if due {
            *fetched = Some(Instant::now());
        }
        due
    }

    /// Fetches them, and leaves them as they were where they cannot be had.
    async fn fetch_again(&self) {
        if let Err(error) = self.fetch().await {
            tracing::warn!(error, "{UNFETCHED}");
        }
    }

    async fn fetch(&self) -> Result<(), String> {
        *lock(&self.fetched) = Some(Instant::now());
        let text = if is_address(&self.jwt.keys) {
            // What stands in the address may be nobody else's.
            let said = |error: reqwest::Error| format!("the keys for tokens: {}", error.without_url());
            let request = crate::http::client().map_err(said)?.get(&self.jwt.keys).timeout(Duration::from_secs(10));
            let answer = request.send().await.and_then(reqwest::Response::error_for_status).map_err(said)?;
            let bytes = crate::bounded::whole(answer).await.map_err(said)?.ok_or("the keys for tokens are too large")?;
            String::from_utf8(bytes).map_err(|_| "the keys for tokens are no text")?
        } else {
            std::fs::read_to_string(&self.jwt.keys).map_err(|error| format!("{}: {error}", self.jwt.keys))?
        };
        let set: JwkSet = serde_json::from_str(&text).map_err(|error| format!("the keys for tokens cannot be read: {error}"))?;
        let mut keys = HashMap::new();
        for jwk in &set.keys {
            // What is for something else, or for a way of signing that is not known here, signs no token.
            if jwk.common.public_key_use.as_ref().is_some_and(|purpose| *purpose != PublicKeyUse::Signature) {
                continue;
            }
            let Ok(algorithm) = jwk.common.key_algorithm.map(Algorithm::try_from).transpose() else { continue };
            if let Ok(key) = DecodingKey::from_jwk(jwk) {
                keys.insert(jwk.common.key_id.clone().unwrap_or_default(), (key, algorithm));
            }
        }
        if keys.is_empty() {
            tracing::warn!("{NO_KEY}");
        }
        // Also where there are none: whoever withdraws the only one means it.
        *self.keys.write().unwrap_or_else(std::sync::PoisonError::into_inner) = keys;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_came_with_a_token_of_its_own_is_not_known_because_somebody_else_signs() {
        let token = |sha256: &str| Token { principal: "ann".to_owned(), sha256: sha256.to_owned(), agents: None };
        let jwt = |issuer: &str| Jwt {
            issuer: issuer.to_owned(),
            audience: String::new(),
            keys: String::new(),
            principal: "sub".to_owned(),
            session: None,
            agents: None,
        };
        let issuer = |name: &str| {
            Arc::new(Issuer { jwt: jwt(name), keys: RwLock::default(), fetched: Mutex::default(), fetching: tokio::sync::Mutex::default() })
        };
        let caller = |proof: Proof| Caller { principal: "ann".to_owned(), agents: None, session: None, proof };
        let (own, signed) = (caller(Proof::Token("1".to_owned())), caller(Proof::Issuer("a".to_owned())));
        for (tokens, issues, knows_own, knows_signed) in [
            (vec![token("1")], Some("a"), true, true),
            (vec![token("1")], None, true, false),
            // Replaced by another.
            (vec![token("2")], Some("b"), false, false),
            (vec![], Some("a"), false, true),
            (vec![], None, true, true),
        ] {
            let keys = Keys { tokens, issuer: issues.map(issuer) };
            let known = (keys.may_know(&own, false), keys.may_know(&signed, false));
            assert_eq!(known, (knows_own, knows_signed), "{issues:?} {:?}", keys.tokens);
            assert_eq!(keys.may_know(&caller(Proof::Nothing), false), keys.is_open(), "who came when nobody was asked");
        }
    }

    include!("../tests/it/keys.rs");

    #[tokio::test]
    async fn a_key_that_was_withdrawn_signs_nothing_any_more() {
        use jsonwebtoken::{EncodingKey, Header};
        use serde_json::json;
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("keys.json");
        let jwt = Jwt {
            issuer: "i".to_owned(),
            audience: "a".to_owned(),
            keys: path.display().to_string(),
            principal: "sub".to_owned(),
            session: None,
            agents: None,
        };
        let (keys, fetched, fetching) = (RwLock::default(), Mutex::default(), tokio::sync::Mutex::default());
        let issuer = Arc::new(Issuer { jwt, keys, fetched, fetching });
        let public = |kid: &str, key: (&str, &str, &str)| json!({"kty": "EC", "crv": "P-256", "alg": "ES256", "use": "sig", "kid": kid, "x": key.1, "y": key.2});
        let publish = |keys: Value| std::fs::write(&path, json!({"keys": keys}).to_string()).unwrap();
        let header = Header { kid: Some("one".to_owned()), ..Header::new(Algorithm::ES256) };
        let claims = json!({"iss": "i", "aud": "a", "sub": "ann", "exp": toolgate::Timestamp::now().as_second() + 600});
        let token = jsonwebtoken::encode(&header, &claims, &EncodingKey::from_ec_pem(ONE.0.as_bytes()).unwrap()).unwrap();
        for others in [json!([]), json!([public("two", TWO)])] {
            publish(json!([public("one", ONE)]));
            issuer.fetch().await.unwrap();
            // Nobody is locked out by what is no set of keys.
            std::fs::write(&path, "busy").unwrap();
            assert!(issuer.fetch().await.is_err() && issuer.caller(&token).await.is_ok(), "{others}");
            publish(others.clone());
            assert!(issuer.caller(&token).await.is_ok(), "they are not old: {others}");
            *lock(&issuer.fetched) = Instant::now().checked_sub(OLDEST + Duration::from_secs(1));
            let refused = async {
                while issuer.caller(&token).await.is_ok() {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            };
            tokio::time::timeout(Duration::from_secs(60), refused).await.unwrap_or_else(|_| panic!("it still holds: {others}"));
        }
    }

    #[test]
    fn any_token_that_allows_the_same_will_do_where_it_may_be_another() {
        let agents = |names: &str| (names != "all").then(|| names.split(' ').map(str::to_owned).collect::<Vec<_>>());
        let caller = |proof: Proof| Caller { principal: "ann".to_owned(), agents: agents("a b"), session: None, proof };
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
            assert_eq!((keys.may_know(&own, true), keys.may_know(&own, false)), known, "{principal} {names} {sha256}");
            assert!(!keys.may_know(&caller(Proof::Nothing), true), "who came when nobody was asked");
        }
    }
}
