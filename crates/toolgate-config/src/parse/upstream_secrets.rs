//! Removes the secrets of an upstream from texts.

use std::path::Path;

use serde_json::Value;

use crate::secret_ref::{SecretRef, with_and_without_scheme};
use crate::upstream_config::{Credentials, UpstreamConfig, UpstreamTransport};
use toolgate::provenance::decode_percent;

impl UpstreamConfig {
    /// Records a fetched token as a secret of this upstream.
    pub fn remember_token(&self, token: &str) {
        self.fetched_tokens.add(token);
    }

    /// Removes the secrets of this upstream from a text.
    #[must_use]
    pub fn redact_secrets(&self, text: &str) -> String {
        toolgate::redact::remove_values(self.secret_values(), text)
    }

    /// Returns the length of the prefix of a growing text that cannot contain the start of a
    /// secret.
    #[must_use]
    pub fn safe_prefix_len(&self, text: &str) -> usize {
        toolgate::redact::safe_prefix_len(&self.secret_values(), text)
    }

    /// Removes the secrets of this upstream from a value, including member names.
    #[must_use]
    pub fn redact_value(&self, value: Value) -> Value {
        // Paths that exist and plain words are not secret, and diagnosing a failure needs them.
        let is_existing_path =
            |value: &String| Path::new(value).is_absolute() && Path::new(value).exists();
        let (mut secrets, plain) = (self.secret_values(), self.non_secret_words());
        secrets.retain(|value| !is_existing_path(value) && !plain.contains(value));
        toolgate::redact::clean_document(value, &secrets, |secrets, text| {
            toolgate::redact::remove_values(secrets, text)
        })
    }

    /// Lists referenced values and all configured values, because many files contain keys
    /// literally.
    ///
    /// Each value counts as a whole and line by line. Earlier values of files count too, because a
    /// running call may still use them.
    fn secret_values(&self) -> Vec<String> {
        let set: Vec<&SecretRef> = match &self.transport {
            UpstreamTransport::Command { env, .. } => env.iter().map(|(_, value)| value).collect(),
            UpstreamTransport::Http { headers, credentials, .. } => {
                let credential = match credentials {
                    Credentials::None => None,
                    Credentials::Bearer(token) => Some(token),
                    Credentials::ClientCredentials { client_secret, .. } => Some(client_secret),
                };
                headers.iter().map(|(_, value)| value).chain(credential).collect()
            }
        };
        let values = set
            .into_iter()
            .flat_map(SecretRef::known_values)
            .flat_map(with_and_without_scheme)
            .chain(self.url_secrets());
        let known = self
            .secret_references()
            .into_iter()
            .flat_map(SecretRef::secret_values)
            .chain(self.fetched_tokens.values());
        toolgate::redact::with_single_lines(
            known.chain(values.filter(|value| value.len() >= 8)).collect(),
        )
    }

    /// Lists the user, password and query values of the URL, where many services expect a key.
    fn url_secrets(&self) -> Vec<String> {
        let UpstreamTransport::Http { url, .. } = &self.transport else { return Vec::new() };
        url.known_values().iter().flat_map(|address| secrets_of_url(address)).collect()
    }

    /// Lists lower-case words in the settings that are not secret, such as `NODE_ENV =
    /// "production"`.
    ///
    /// A word is secret if its key suggests a secret or if it comes from a reference.
    fn non_secret_words(&self) -> Vec<String> {
        const SECRET_KEY_WORDS: &[&str] =
            &["auth", "cookie", "cred", "key", "pass", "pwd", "secret", "token"];
        let (UpstreamTransport::Command { env: named, .. }
        | UpstreamTransport::Http { headers: named, .. }) = &self.transport;
        let suggests_secret = |name: &str| {
            let name = name.to_ascii_lowercase();
            SECRET_KEY_WORDS.iter().any(|part| name.contains(part))
        };
        let is_secret = |name: &str, value: &SecretRef| {
            suggests_secret(name) || value.secret_values().next().is_some()
        };
        let set = named.iter().flat_map(|(name, value)| {
            let is_secret = is_secret(name, value);
            value.known_values().into_iter().map(move |value| (is_secret, value))
        });
        let (hidden, plain): (Vec<_>, Vec<_>) = set.partition(|(is_secret, _)| *is_secret);
        let is_plain = |value: &String| {
            let is_word = value.chars().all(|letter| letter.is_ascii_lowercase());
            is_word && hidden.iter().all(|(_, other)| other != value)
        };
        plain.into_iter().map(|(_, value)| value).filter(is_plain).collect()
    }
}

/// Splits user, password and query values out of a URL, as written and percent-decoded.
fn secrets_of_url(address: &str) -> Vec<String> {
    let address = address.split('#').next().unwrap_or_default();
    let (place, query) = address.split_once('?').unwrap_or((address, ""));
    let host = place
        .split_once("://")
        .map_or(place, |(_, after_scheme)| after_scheme)
        .split('/')
        .next()
        .unwrap_or_default();
    let user = host.rsplit_once('@').map_or("", |(user, _)| user);
    let query_values =
        query.split('&').map(|pair| pair.split_once('=').map_or(pair, |(_, value)| value));
    let both = |written: &str| {
        let decoded = written.replace('+', " ");
        [
            written.to_owned(),
            decode_percent(written).unwrap_or_default(),
            decode_percent(&decoded).unwrap_or(decoded),
        ]
    };
    user.split(':').chain(query_values).flat_map(both).collect()
}
