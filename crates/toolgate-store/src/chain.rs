//! How rows hang together: a chain per session, and one through all rows of all sessions.

use sha2::{Digest as _, Sha256};
use toolgate::SessionKey;
use toolgate::json::Digest;

fn hash(parts: &[&[u8]]) -> Digest {
    let mut hash = Sha256::new();
    parts.iter().for_each(|part| hash.update(part));
    Digest::from_bytes(hash.finalize().into())
}

/// Before the first row of all.
#[must_use]
pub fn genesis() -> Digest {
    Digest::from_bytes([0; 32])
}

/// Before the first row of a session.
#[must_use]
pub fn opening(key: &SessionKey) -> Digest {
    let key = serde_json::json!([key.agent, key.principal, key.session]);
    hash(&[b"toolgate-session-v1\0", &toolgate::json::canonical(&key)])
}

/// The `n`th row of a session, whose canonical bytes these are.
#[must_use]
pub fn link(before: &Digest, n: u64, body: &[u8]) -> Digest {
    hash(&[b"toolgate-row-v1\0", before.as_bytes(), &n.to_be_bytes(), body])
}

/// The row that stands at `seq` in the ledger, whose link this is.
#[must_use]
pub fn next(before: &Digest, seq: u64, link: &Digest) -> Digest {
    hash(&[b"toolgate-chain-v1\0", before.as_bytes(), &seq.to_be_bytes(), link.as_bytes()])
}
