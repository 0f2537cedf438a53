//! What an upstream is given that nobody else may read.

use std::path::Path;

use serde_json::Value;

use super::{Credentials, Reach, Upstream};
use crate::config::reference::{Reference, and_behind_scheme};
use crate::values::percent;

impl Upstream {
    /// Takes note of a token that was fetched for it: that is a secret like those that stand in the configuration.
    pub fn was_given(&self, token: &str) {
        self.tokens.add(token);
    }

    /// A text without the secrets that it is given.
    #[must_use]
    pub fn without_secrets(&self, text: &str) -> String {
        crate::redact::without(self.secrets(), text)
    }

    /// How much of a text that goes on can be told by itself: what stands behind may be the beginning of a secret.
    #[must_use]
    pub fn before_secret(&self, text: &str) -> usize {
        crate::redact::before_beginning(&self.secrets(), text)
    }

    /// What it says without the secrets that it is given, member names too.
    #[must_use]
    pub fn said_without_secrets(&self, said: Value) -> Value {
        // A path that is there is no secret, nor is a plain word: whoever reads of a failure has to know them.
        let is_there = |value: &String| Path::new(value).is_absolute() && Path::new(value).exists();
        let (mut secrets, plain) = (self.secrets(), self.plain_words());
        secrets.retain(|value| !is_there(value) && !plain.contains(value));
        crate::redact::cleaned(said, &secrets, |secrets, text| crate::redact::without(secrets, text))
    }

    /// What stands elsewhere of what it is given, and all that it is set: many write their keys down as they are. Each as a whole, and
    /// line by line; and what was taken of it before it changed, which may still be in use.
    fn secrets(&self) -> Vec<String> {
        let set: Vec<&Reference> = match &self.reach {
            Reach::Command { env, .. } => env.iter().map(|(_, value)| value).collect(),
            Reach::Url { headers, credentials, .. } => {
                let own = match credentials {
                    Credentials::None => None,
                    Credentials::Bearer(token) => Some(token),
                    Credentials::Client { client_secret, .. } => Some(client_secret),
                };
                headers.iter().map(|(_, value)| value).chain(own).collect()
            }
        };
        let values = set.into_iter().flat_map(Reference::values).flat_map(and_behind_scheme).chain(self.in_address());
        let known = self.references().into_iter().flat_map(Reference::hidden).chain(self.tokens.all());
        crate::redact::and_lines(known.chain(values.filter(|value| value.len() >= 8)).collect())
    }

    /// Who is named in its address, and what is asked for with it: many are told to write their key there.
    fn in_address(&self) -> Vec<String> {
        let Reach::Url { url, .. } = &self.reach else { return Vec::new() };
        url.values().iter().flat_map(|address| of_address(address)).collect()
    }

    /// Words of small letters that it is set, as in `NODE_ENV = "production"`, unless their name speaks of a secret, or they stand
    /// elsewhere.
    fn plain_words(&self) -> Vec<String> {
        const SECRET: &[&str] = &["auth", "cookie", "cred", "key", "pass", "pwd", "secret", "token"];
        let (Reach::Command { env: named, .. } | Reach::Url { headers: named, .. }) = &self.reach;
        let speaks = |name: &str| {
            let name = name.to_ascii_lowercase();
            SECRET.iter().any(|part| name.contains(part))
        };
        let is_secret = |name: &str, value: &Reference| speaks(name) || value.hidden().next().is_some();
        let set = named.iter().flat_map(|(name, value)| {
            let is_secret = is_secret(name, value);
            value.values().into_iter().map(move |value| (is_secret, value))
        });
        let (hidden, plain): (Vec<_>, Vec<_>) = set.partition(|(is_secret, _)| *is_secret);
        let is_plain = |value: &String| {
            let is_word = value.chars().all(|letter| letter.is_ascii_lowercase());
            is_word && hidden.iter().all(|(_, other)| other != value)
        };
        plain.into_iter().map(|(_, value)| value).filter(is_plain).collect()
    }
}

/// Name, password and the values of the query in an address: as they are written, and as they are meant.
fn of_address(address: &str) -> Vec<String> {
    let address = address.split('#').next().unwrap_or_default();
    let (place, query) = address.split_once('?').unwrap_or((address, ""));
    let host = place.split_once("://").map_or(place, |(_, behind)| behind).split('/').next().unwrap_or_default();
    let who = host.rsplit_once('@').map_or("", |(who, _)| who);
    let asked = query.split('&').map(|pair| pair.split_once('=').map_or(pair, |(_, value)| value));
    let both = |written: &str| {
        let meant = written.replace('+', " ");
        [written.to_owned(), percent(written).unwrap_or_default(), percent(&meant).unwrap_or(meant)]
    };
    who.split(':').chain(asked).flat_map(both).collect()
}
