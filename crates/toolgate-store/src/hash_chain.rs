//! Computes the hash chains of the ledger: one for each session, and one over all rows.

use sha2::{Digest as _, Sha256};
use toolgate::SessionKey;
use toolgate_json::Digest;

fn hash_parts(parts: &[&[u8]]) -> Digest {
    let mut hash = Sha256::new();
    parts.iter().for_each(|part| hash.update(part));
    Digest::from_bytes(hash.finalize().into())
}

/// Returns the chain value before the first row of the ledger.
#[must_use]
pub fn genesis() -> Digest {
    Digest::from_bytes([0; 32])
}

/// Returns the chain value before the first row of a session.
#[must_use]
pub fn session_genesis(key: &SessionKey) -> Digest {
    let key = serde_json::json!([key.agent, key.principal, key.session]);
    hash_parts(&[b"toolgate-session-v1\0", &toolgate_json::to_canonical_bytes(&key)])
}

/// Returns the session chain value at row `n`, from the value before and the row's canonical bytes.
#[must_use]
pub fn session_link(before: &Digest, n: u64, body: &[u8]) -> Digest {
    hash_parts(&[b"toolgate-row-v1\0", before.as_bytes(), &n.to_be_bytes(), body])
}

/// Returns the ledger chain value at row `seq`, from the value before and the row's session link.
#[must_use]
pub fn ledger_link(before: &Digest, seq: u64, link: &Digest) -> Digest {
    hash_parts(&[b"toolgate-chain-v1\0", before.as_bytes(), &seq.to_be_bytes(), link.as_bytes()])
}
