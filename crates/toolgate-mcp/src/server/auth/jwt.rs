//! Verifies signed tokens (JWT) of an issuer and fetches its keys.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::jwk::{JwkSet, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey, Validation};
use serde_json::Value;
use tokio::sync::OwnedMutexGuard;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use toolgate::policy::source::CANARY_PRINCIPAL;
use toolgate_config::JwtConfig;

use super::{AuthError, is_url};
use crate::gateway::lock;
use crate::server::identity::{AuthMethod, Caller, is_session_name};

/// Minimum time between fetches while keys are known, however many tokens use unknown ones.
const MIN_KEY_FETCH_INTERVAL: Duration = Duration::from_secs(30);
/// Minimum time between fetches while no key is known.
const EMPTY_KEY_SET_FETCH_INTERVAL: Duration = Duration::from_secs(1);
/// Age after which keys are fetched again in the background.
const KEY_REFRESH_INTERVAL: Duration = Duration::from_secs(10 * 60);
/// Age after which keys must be fetched again before a token is accepted.
const KEY_SET_TTL: Duration = Duration::from_secs(2 * 10 * 60);
/// Timeout for waiting on a fetch that another request started.
const KEY_FETCH_LOCK_TIMEOUT: Duration = Duration::from_secs(10);
/// Allowed clock difference in seconds.
const MAX_CLOCK_SKEW_SECONDS: f64 = 30.0;
/// Maximum number of keys with the same ID that are tried for a token.
const MAX_KEYS_PER_ID: usize = 16;
/// Messages for keys that cannot be fetched, and for a set without usable keys.
pub(crate) const KEY_FETCH_FAILED_MESSAGE: &str = "cannot fetch the keys for tokens";
pub(crate) const EMPTY_KEY_SET_MESSAGE: &str = "the key set for tokens has no usable key";
/// Asymmetric algorithms only: with a symmetric one, the verification key can also sign.
const ALLOWED_ALGORITHMS: [Algorithm; 9] = [
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

/// A key, and its algorithm if the key set names one.
struct IssuerKey {
    key: DecodingKey,
    algorithm: Option<Algorithm>,
}

impl IssuerKey {
    fn is_usable_with(&self, algorithm: Algorithm) -> bool {
        self.algorithm.is_none_or(|named| named == algorithm)
            && self.key.family() == algorithm.family()
    }
}

/// Keys by ID. Several keys may have the same ID or none.
type KeySet = HashMap<String, Vec<IssuerKey>>;

/// Verifies the tokens of one issuer.
pub(crate) struct TokenIssuer {
    pub(crate) jwt: JwtConfig,
    keys: RwLock<Arc<KeySet>>,
    /// When the last fetch started.
    fetch_started: Mutex<Option<Instant>>,
    /// When the last fetch ended, successful or not.
    fetch_ended: Mutex<Option<Instant>>,
    /// Lets one request fetch while the others wait for the result.
    fetch_lock: Arc<tokio::sync::Mutex<()>>,
}

impl TokenIssuer {
    pub(crate) fn new(jwt: JwtConfig) -> Self {
        Self {
            jwt,
            keys: RwLock::default(),
            fetch_started: Mutex::default(),
            fetch_ended: Mutex::default(),
            fetch_lock: Arc::default(),
        }
    }

    /// Authenticates the bearer of a token.
    pub(crate) async fn authenticate(self: &Arc<Self>, token: &str) -> Result<Caller, AuthError> {
        let header = jsonwebtoken::decode_header(token)
            .map_err(|_| AuthError::Invalid("the token is malformed"))?;
        if !ALLOWED_ALGORITHMS.contains(&header.alg) {
            return Err(AuthError::Invalid("the signature algorithm of the token is not allowed"));
        }
        // Critical header parameters are not supported (RFC 7515, section 4.1.11).
        if header.crit.is_some() {
            return Err(AuthError::Invalid(
                "the token has an unsupported critical header parameter",
            ));
        }
        if self.is_stale() {
            let guard = self.lock_fetch().await?;
            // Another request may have fetched the keys meanwhile.
            if self.is_stale() {
                let _ = self.spawn_fetch(guard).await;
            }
        }
        let kid = header.kid.unwrap_or_default();
        let known = self.keys();
        let mut claims = self.verify_claims(&known, token, &kid, header.alg);
        if claims.is_none() {
            // A key may have been replaced, even under the same ID. Only requests with an
            // unverifiable token wait for a fetch, and fetches are rate limited. While no key is
            // known, fetches are more frequent.
            let guard = self.lock_fetch().await?;
            let age =
                if self.is_empty() { EMPTY_KEY_SET_FETCH_INTERVAL } else { MIN_KEY_FETCH_INTERVAL };
            if Arc::ptr_eq(&known, &self.keys()) && self.is_due(age) {
                let _ = self.spawn_fetch(guard).await;
            }
            let renewed = self.keys();
            if !Arc::ptr_eq(&known, &renewed) {
                claims = self.verify_claims(&renewed, token, &kid, header.alg);
            }
        }
        let claims =
            claims.ok_or(AuthError::Invalid("the token is signed with an unknown key"))??;
        // Refreshes in the background, unless a fetch is running. Requests with a new key wait for
        // it.
        if let Ok(guard) = Arc::clone(&self.fetch_lock).try_lock_owned()
            && self.is_due(KEY_REFRESH_INTERVAL)
        {
            drop(self.spawn_fetch(guard));
        }
        self.caller_from_claims(&claims)
    }

    /// Returns the claims of a valid token, or `None` if none of these keys signed it.
    fn verify_claims(
        &self,
        keys: &KeySet,
        token: &str,
        kid: &str,
        algorithm: Algorithm,
    ) -> Option<Result<Value, AuthError>> {
        let mut validation = Validation::new(algorithm);
        validation.set_audience(&[&self.jwt.audience]);
        validation.set_issuer(&[&self.jwt.issuer]);
        validation.set_required_spec_claims(&["aud", "iss"]);
        // Dates are checked separately, because they may have fractions.
        validation.validate_exp = false;
        // A token without a key ID refers to the only key.
        let named = keys
            .get(kid)
            .or_else(|| keys.values().next().filter(|_| kid.is_empty() && keys.len() == 1))?;
        named.iter().filter(|key| key.is_usable_with(algorithm)).take(MAX_KEYS_PER_ID).find_map(
            |key| match jsonwebtoken::decode::<Value>(token, &key.key, &validation) {
                Ok(token) => Some(check_dates(&token.claims).map(|()| token.claims)),
                Err(error) => match error.kind() {
                    ErrorKind::InvalidSignature => None,
                    ErrorKind::InvalidAudience => {
                        Some(Err(AuthError::Invalid("the token is for another audience")))
                    }
                    ErrorKind::InvalidIssuer => {
                        Some(Err(AuthError::Invalid("the token is from another issuer")))
                    }
                    _ => Some(Err(AuthError::Invalid("the token is not valid"))),
                },
            },
        )
    }

    /// Builds the caller from the claims.
    fn caller_from_claims(&self, claims: &Value) -> Result<Caller, AuthError> {
        let claim = |name: &str| claims.get(name);
        let principal =
            claim(&self.jwt.principal).and_then(Value::as_str).filter(|name| !name.is_empty());
        let principal =
            principal.ok_or(AuthError::Invalid("the token does not name a principal"))?.to_owned();
        if principal == CANARY_PRINCIPAL {
            return Err(AuthError::Invalid("the token names a reserved principal"));
        }
        // Ignoring a claim of another type would ignore a restriction.
        let session = match self.jwt.session.as_deref().and_then(claim) {
            None | Some(Value::Null) => None,
            Some(Value::String(name)) => Some(name.clone()),
            Some(Value::Number(name)) => Some(name.to_string()),
            Some(_) => {
                return Err(AuthError::Invalid("the session claim of the token is not text"));
            }
        };
        // The bearer cannot correct the claim, so the token is rejected.
        if session.as_deref().is_some_and(|name| !is_session_name(name)) {
            return Err(AuthError::Invalid(
                "the session claim of the token must have 1 to 128 ASCII letters, digits or punctuation characters",
            ));
        }
        // If the configured claim is missing, the caller may act as no agent.
        let agents = self.jwt.agents.as_deref().map(|name| match claim(name) {
            Some(Value::Array(names)) => {
                names.iter().filter_map(Value::as_str).map(str::to_owned).collect()
            }
            Some(Value::String(names)) => names.split_whitespace().map(str::to_owned).collect(),
            _ => Vec::new(),
        });
        Ok(Caller {
            principal,
            agents,
            session,
            auth_method: AuthMethod::Issuer(self.jwt.issuer.clone()),
        })
    }

    fn keys(&self) -> Arc<KeySet> {
        Arc::clone(&self.keys.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.keys().is_empty()
    }

    /// Returns whether a fetch is due, and if so marks it as started.
    fn is_due(&self, age: Duration) -> bool {
        let mut fetched = lock(&self.fetch_started);
        let due = fetched.is_none_or(|at| at.elapsed() > age);
        if due {
            *fetched = Some(Instant::now());
        }
        due
    }

    /// Returns whether keys must be fetched before any of them is trusted.
    fn is_stale(&self) -> bool {
        lock(&self.fetch_ended).is_some_and(|at| at.elapsed() > KEY_SET_TTL)
    }

    /// Waits until no fetch is running.
    async fn lock_fetch(&self) -> Result<OwnedMutexGuard<()>, AuthError> {
        let locked =
            tokio::time::timeout(KEY_FETCH_LOCK_TIMEOUT, Arc::clone(&self.fetch_lock).lock_owned())
                .await;
        locked.map_err(|_| AuthError::Invalid("the keys for tokens are not available now"))
    }

    /// Fetches the keys in a separate task, so that a disconnect does not cancel the fetch for
    /// others.
    ///
    /// If the fetch fails, the known keys stay.
    fn spawn_fetch(self: &Arc<Self>, guard: OwnedMutexGuard<()>) -> JoinHandle<()> {
        let issuer = Arc::clone(self);
        tokio::spawn(async move {
            if let Err(error) = issuer.fetch().await {
                tracing::warn!(error, "{KEY_FETCH_FAILED_MESSAGE}");
            }
            drop(guard);
        })
    }

    pub(crate) async fn fetch(&self) -> Result<(), String> {
        *lock(&self.fetch_started) = Some(Instant::now());
        let replaced = self.replace_keys().await;
        // Requests that waited for this fetch do not start another one.
        *lock(&self.fetch_started) = Some(Instant::now());
        *lock(&self.fetch_ended) = Some(Instant::now());
        replaced
    }

    /// Replaces the known keys by the published ones.
    async fn replace_keys(&self) -> Result<(), String> {
        let text = self.read_key_set().await?;
        let set: JwkSet = serde_json::from_str(&text)
            .map_err(|error| format!("the key set for tokens is not valid: {error}"))?;
        let mut keys = KeySet::new();
        for jwk in &set.keys {
            // Skips keys for encryption and for unsupported algorithms.
            if jwk
                .common
                .public_key_use
                .as_ref()
                .is_some_and(|purpose| *purpose != PublicKeyUse::Signature)
            {
                continue;
            }
            let Ok(algorithm) = jwk.common.key_algorithm.map(Algorithm::try_from).transpose()
            else {
                continue;
            };
            if let Ok(key) = DecodingKey::from_jwk(jwk) {
                keys.entry(jwk.common.key_id.clone().unwrap_or_default())
                    .or_default()
                    .push(IssuerKey { key, algorithm });
            }
        }
        if keys.is_empty() {
            tracing::warn!("{EMPTY_KEY_SET_MESSAGE}");
        }
        // An empty set also counts: it withdraws all keys.
        *self.keys.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(keys);
        Ok(())
    }

    /// Reads the published key set.
    async fn read_key_set(&self) -> Result<String, String> {
        if !is_url(&self.jwt.keys) {
            return std::fs::read_to_string(&self.jwt.keys)
                .map_err(|error| format!("{}: {error}", self.jwt.keys));
        }
        // The URL may contain a secret.
        let describe = |error: reqwest::Error| {
            format!("the request for the key set failed: {}", error.without_url())
        };
        let request = crate::http_tool::upstream_client()
            .map_err(describe)?
            .get(&self.jwt.keys)
            .timeout(Duration::from_secs(10));
        let answer =
            request.send().await.and_then(reqwest::Response::error_for_status).map_err(describe)?;
        let bytes = crate::upstream::transport::bounded_http::read_body(answer)
            .await
            .map_err(describe)?
            .ok_or("the key set for tokens is too large")?;
        String::from_utf8(bytes).map_err(|_| "the key set for tokens is not valid UTF-8".to_owned())
    }
}

/// Checks the dates `exp` and `nbf`.
///
/// A date is a number of seconds, possibly with a fraction or exponent (RFC 7519, section 2). The
/// library does not recognize such a number when numbers keep their digits.
fn check_dates(claims: &Value) -> Result<(), AuthError> {
    let now = toolgate::Timestamp::now().as_duration().as_secs_f64();
    let date = |name: &str| claims.get(name).map(Value::as_f64);
    match date("exp") {
        Some(Some(end)) if end < now - MAX_CLOCK_SKEW_SECONDS => {
            return Err(AuthError::Invalid("the token has expired"));
        }
        Some(Some(_)) => {}
        None | Some(None) => {
            return Err(AuthError::Invalid(
                "`exp` of the token is missing or not a number of seconds",
            ));
        }
    }
    match date("nbf") {
        Some(Some(begin)) if begin > now + MAX_CLOCK_SKEW_SECONDS => {
            Err(AuthError::Invalid("the token is not valid yet"))
        }
        Some(None) => Err(AuthError::Invalid("`nbf` of the token is not a number of seconds")),
        Some(Some(_)) | None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
