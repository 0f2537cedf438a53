//! Keys: what signs, what seals, what marks. Made on first start, for the owner's eyes only.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use chacha20poly1305::aead::{Aead, KeyInit, Payload};
use chacha20poly1305::{XChaCha20Poly1305, XNonce};
use ed25519_dalek::{Signature, Signer, SigningKey, VerifyingKey};
use toolgate::json::Digest;

/// Bytes as hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn unhex(text: &str) -> Option<Vec<u8>> {
    let text = text.trim();
    if !text.is_ascii() || text.len() % 2 != 0 {
        return None;
    }
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(text.get(at..at + 2)?, 16).ok()).collect()
}

/// The keys of one ledger.
pub(crate) struct Keys {
    sign: SigningKey,
    public: Arc<str>,
    seal: XChaCha20Poly1305,
    pub(crate) redact: [u8; 32],
    /// By which it is known that these are the keys of this ledger.
    pub(crate) print: Digest,
}

impl Keys {
    /// Reads the keys of a directory; makes them where there are none and `make` is said.
    pub(crate) fn open(directory: &Path, make: bool) -> io::Result<Self> {
        if make {
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        }
        let (redact, seal) = (secret(&directory.join("redact.key"), make)?, secret(&directory.join("seal.key"), make)?);
        let sign = SigningKey::from_bytes(&secret(&directory.join("sign.key"), make)?);
        let public = hex(sign.verifying_key().as_bytes()).into();
        let print = Digest::of(&[redact, seal].concat());
        Ok(Self { sign, public, seal: XChaCha20Poly1305::new(&seal.into()), redact, print })
    }

    /// The public key, in hexadecimal digits.
    pub(crate) fn public(&self) -> &Arc<str> {
        &self.public
    }

    pub(crate) fn sign(&self, statement: &[u8]) -> String {
        hex(&self.sign.sign(statement).to_bytes())
    }

    /// Puts a new signing key in place of the old one, which is kept aside under its public name.
    pub(crate) fn rotated(&self, directory: &Path) -> io::Result<Self> {
        std::fs::rename(directory.join("sign.key"), directory.join(format!("sign-{}.old", self.public.get(..16).unwrap_or_default())))?;
        Self::open(directory, true)
    }

    /// Seals what must not be read without the key, for one place.
    pub(crate) fn seal(&self, place: &str, text: &[u8]) -> io::Result<Vec<u8>> {
        let nonce: [u8; 24] = random()?;
        let sealed = self.seal.encrypt(&XNonce::from(nonce), Payload { msg: text, aad: place.as_bytes() });
        let sealed = sealed.map_err(|_| io::Error::other("it could not be sealed"))?;
        Ok([nonce.as_slice(), &sealed].concat())
    }

    /// Opens what was sealed for this place. `None` where it was sealed with another key, or for another place.
    pub(crate) fn unseal(&self, place: &str, sealed: &[u8]) -> Option<Vec<u8>> {
        let (nonce, sealed) = sealed.split_at_checked(24)?;
        let nonce: [u8; 24] = nonce.try_into().ok()?;
        self.seal.decrypt(&XNonce::from(nonce), Payload { msg: sealed, aad: place.as_bytes() }).ok()
    }
}

/// Whether a statement was signed with the key of this public name.
pub(crate) fn is_signed(public: &str, statement: &[u8], signature: &str) -> bool {
    let read = || {
        let key: [u8; 32] = unhex(public)?.try_into().ok()?;
        let signature: [u8; 64] = unhex(signature)?.try_into().ok()?;
        let key = VerifyingKey::from_bytes(&key).ok()?;
        Some(key.verify_strict(statement, &Signature::from_bytes(&signature)).is_ok())
    };
    read().unwrap_or(false)
}

pub(crate) fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0u8; N];
    getrandom::fill(&mut bytes).map_err(|e| io::Error::other(format!("the machine gives no random numbers: {e}")))?;
    Ok(bytes)
}

/// 32 secret bytes in a file that only its owner can read.
fn secret(path: &Path, make: bool) -> io::Result<[u8; 32]> {
    let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    if make && !path.exists() {
        let bytes: [u8; 32] = random()?;
        // Whole or not at all, and whoever is first.
        let draft = path.with_extension(format!("{}.new", hex(&random::<8>()?)));
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&draft).map_err(named)?;
        file.write_all(hex(&bytes).as_bytes())?;
        file.sync_all()?;
        let first = std::fs::hard_link(&draft, path);
        std::fs::remove_file(&draft)?;
        match first {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(named(e)),
            _ => {}
        }
    }
    let mut text = String::new();
    File::open(path).map_err(named)?.take(1_000).read_to_string(&mut text).map_err(named)?;
    let wrong = || named(io::Error::new(io::ErrorKind::InvalidData, "this is no key: 64 hexadecimal digits are wanted"));
    unhex(&text).and_then(|bytes| bytes.try_into().ok()).ok_or_else(wrong)
}
