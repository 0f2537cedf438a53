//! What is secret leaves a keyed mark instead of itself, before anything is written.

use std::sync::Arc;

use hmac::{Hmac, KeyInit, Mac};
use serde_json::Value;
use sha2::Sha256;

use crate::json::{Digest, Pointer, canonical};

/// True where a path is a secret, lies inside one, or should have held one.
pub(crate) fn is_secret(path: &Pointer, secrets: &[Pointer]) -> bool {
    secrets.iter().any(|secret| secret.parts().iter().zip(path.parts()).all(|(s, p)| s == "*" || s == p))
}

/// Replaces secrets by marks. The same secret leaves the same mark under the same key.
#[derive(Clone)]
pub(crate) struct Redactor(Hmac<Sha256>);

impl Redactor {
    /// A redactor with a key of its own.
    pub(crate) fn random() -> Result<Self, String> {
        let mut key = [0u8; 32];
        getrandom::fill(&mut key).map_err(|e| format!("the machine gives no random numbers: {e}"))?;
        Hmac::new_from_slice(&key).map(Self).map_err(|e| e.to_string())
    }

    /// What stands for a digest that a secret could be guessed from.
    pub(crate) fn keyed(&self, digest: Digest) -> Digest {
        let mut mac = self.0.clone();
        mac.update(digest.as_bytes());
        Digest::from_bytes(mac.finalize().into_bytes().into())
    }

    /// What stands for a value that must not be written down.
    pub(crate) fn mark(&self, value: &Value) -> Value {
        let mut mac = self.0.clone();
        mac.update(&canonical(value));
        let hex: String = mac.finalize().into_bytes().iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        Value::String(format!("[redacted {hex}]"))
    }

    /// The same document where nothing is secret, else a copy without secrets.
    pub(crate) fn redact_shared(&self, value: Arc<Value>, secrets: &[Pointer]) -> Arc<Value> {
        if secrets.is_empty() { value } else { Arc::new(self.redact(&value, secrets)) }
    }

    /// A copy without secrets.
    pub(crate) fn redact(&self, value: &Value, secrets: &[Pointer]) -> Value {
        let mut copy = value.clone();
        for secret in secrets {
            // The closure cannot fail.
            let _: Result<(), std::convert::Infallible> = secret.rewrite(&mut copy, &mut |old| Ok(Some(self.mark(&old))));
        }
        copy
    }
}
