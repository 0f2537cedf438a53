//! Holds the keys of a ledger: for signing, for encryption, and for marking redacted values.
//!
//! The keys are created on first start, in files that only the owner can read.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use chacha20poly1305::aead::{Aead, KeyInit, Payload};
use chacha20poly1305::{XChaCha20Poly1305, XNonce};
use ed25519_dalek::{Signature, Signer, SigningKey, VerifyingKey};
use toolgate::{LazyReceipt, Receipt, Row};
use toolgate_json::{Digest, hex};

pub(crate) fn decode_hex(text: &str) -> Option<Vec<u8>> {
    let text = text.trim();
    if !text.is_ascii() || !text.len().is_multiple_of(2) {
        return None;
    }
    (0..text.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(text.get(at..at + 2)?, 16).ok())
        .collect()
}

/// The keys of one ledger.
pub(crate) struct LedgerKeys {
    signing_key: SigningKey,
    public_key: Arc<str>,
    cipher: XChaCha20Poly1305,
    pub(crate) redaction_key: [u8; 32],
    /// Digest of the secret keys; the ledger stores it to recognize its own keys.
    pub(crate) fingerprint: Digest,
}

impl LedgerKeys {
    /// Creates the keys of a new ledger.
    pub(crate) fn create(directory: &Path) -> io::Result<Self> {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        for name in ["redact.key", "seal.key"] {
            if !directory.join(name).exists() {
                write_secret(&directory.join(name), &random_bytes()?)?;
            }
        }
        let public = Self::create_signing_key(directory)?;
        Self::open(directory, &public)
    }

    fn create_signing_key(directory: &Path) -> io::Result<String> {
        let bytes: [u8; 32] = random_bytes()?;
        let public = hex(SigningKey::from_bytes(&bytes).verifying_key().as_bytes());
        write_secret(&signing_key_path(directory, &public), &bytes)?;
        Ok(public)
    }

    /// Reads the keys of a ledger whose public signing key is `public`.
    pub(crate) fn open(directory: &Path, public: &str) -> io::Result<Self> {
        let (redact, seal) = (
            read_secret(&directory.join("redact.key"))?,
            read_secret(&directory.join("seal.key"))?,
        );
        let path = signing_key_path(directory, public);
        let sign = SigningKey::from_bytes(&read_secret(&path)?);
        if hex(sign.verifying_key().as_bytes()) != public {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("{}: the key does not match the file name", path.display()),
            ));
        }
        let fingerprint = Digest::of(&[redact, seal].concat());
        Ok(Self {
            signing_key: sign,
            public_key: public.into(),
            cipher: XChaCha20Poly1305::new(&seal.into()),
            redaction_key: redact,
            fingerprint,
        })
    }

    /// Returns the public keys of all signing keys in a directory.
    pub(crate) fn read_own_public_keys(directory: &Path) -> io::Result<Vec<String>> {
        let (mut keys, mut read_error) = (Vec::new(), None);
        for entry in std::fs::read_dir(directory)? {
            let path = entry?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if name.starts_with("sign-") && name.ends_with(".key") {
                // A file that is not a key is not a key of this ledger.
                match read_secret(&path) {
                    Ok(secret) => {
                        keys.push(hex(SigningKey::from_bytes(&secret).verifying_key().as_bytes()))
                    }
                    Err(error) => read_error = Some(error),
                }
            }
        }
        match read_error {
            Some(error) if keys.is_empty() => Err(error),
            _ => Ok(keys),
        }
    }

    /// Reads the key that marks redacted values.
    pub(crate) fn read_redaction_key(directory: &Path) -> io::Result<[u8; 32]> {
        read_secret(&directory.join("redact.key"))
    }

    /// Creates a new signing key beside the other keys.
    ///
    /// The caller records the key in the ledger before its first use.
    pub(crate) fn with_new_signing_key(directory: &Path) -> io::Result<Self> {
        let public = Self::create_signing_key(directory)?;
        Self::open(directory, &public)
    }

    /// Returns the public signing key in hexadecimal digits.
    pub(crate) fn public_key(&self) -> &Arc<str> {
        &self.public_key
    }

    pub(crate) fn sign(&self, statement: &[u8]) -> String {
        hex(&self.signing_key.sign(statement).to_bytes())
    }

    /// Encrypts a text. The ciphertext is bound to `place`.
    pub(crate) fn seal(&self, place: &str, text: &[u8]) -> io::Result<Vec<u8>> {
        let nonce: [u8; 24] = random_bytes()?;
        let sealed =
            self.cipher.encrypt(&XNonce::from(nonce), Payload { msg: text, aad: place.as_bytes() });
        let sealed = sealed.map_err(|_| io::Error::other("encryption failed"))?;
        Ok([nonce.as_slice(), &sealed].concat())
    }

    /// Decrypts a text. Returns `None` if it was encrypted with another key or for another place.
    pub(crate) fn unseal(&self, place: &str, sealed: &[u8]) -> Option<Vec<u8>> {
        let (nonce, sealed) = sealed.split_at_checked(24)?;
        let nonce: [u8; 24] = nonce.try_into().ok()?;
        self.cipher
            .decrypt(&XNonce::from(nonce), Payload { msg: sealed, aad: place.as_bytes() })
            .ok()
    }
}

impl toolgate::ReceiptSigner for LedgerKeys {
    fn sign(&self, statement: &[u8]) -> String {
        Self::sign(self, statement)
    }
}

/// Wraps a stored row, for which the ledger can sign a receipt.
pub(crate) fn recorded_row(
    keys: Arc<LedgerKeys>,
    row: &Row,
    seq: u64,
    hash: Digest,
) -> LazyReceipt {
    let unsigned = Receipt {
        call: row.call,
        at: row.at,
        tool: Arc::clone(&row.tool),
        decision: row.decision,
        config: row.config,
        seq,
        hash,
        key: Arc::clone(keys.public_key()),
        signature: String::new(),
    };
    LazyReceipt::new(unsigned, keys)
}

/// Returns true if a statement was signed with this public key.
pub(crate) fn is_valid_signature(public: &str, statement: &[u8], signature: &str) -> bool {
    let read = || {
        let key: [u8; 32] = decode_hex(public)?.try_into().ok()?;
        let signature: [u8; 64] = decode_hex(signature)?.try_into().ok()?;
        let key = VerifyingKey::from_bytes(&key).ok()?;
        Some(key.verify_strict(statement, &Signature::from_bytes(&signature)).is_ok())
    };
    read().unwrap_or(false)
}

pub(crate) fn random_bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0u8; N];
    getrandom::fill(&mut bytes)
        .map_err(|e| io::Error::other(format!("cannot get random numbers: {e}")))?;
    Ok(bytes)
}

fn signing_key_path(directory: &Path, public: &str) -> PathBuf {
    directory.join(format!("sign-{}.key", public.get(..16).unwrap_or(public)))
}

fn with_path(path: &Path) -> impl Fn(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// Writes 32 secret bytes atomically and durably into a file that only its owner can read.
fn write_secret(path: &Path, bytes: &[u8; 32]) -> io::Result<()> {
    let draft = path.with_extension(format!("{}.new", hex(&random_bytes::<8>()?)));
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&draft)
        .map_err(with_path(&draft))?;
    file.write_all(hex(bytes).as_bytes())?;
    file.sync_all()?;
    std::fs::rename(&draft, path).map_err(with_path(path))?;
    path.parent().map_or(Ok(()), |directory| File::open(directory)?.sync_all())
}

fn read_secret(path: &Path) -> io::Result<[u8; 32]> {
    // Opening a pipe would block.
    if !std::fs::metadata(path).map_err(with_path(path))?.is_file() {
        return Err(with_path(path)(io::Error::new(
            io::ErrorKind::InvalidData,
            "not a regular file",
        )));
    }
    let mut text = String::new();
    File::open(path)
        .map_err(with_path(path))?
        .take(1_000)
        .read_to_string(&mut text)
        .map_err(with_path(path))?;
    let wrong = || {
        with_path(path)(io::Error::new(
            io::ErrorKind::InvalidData,
            "not a key: expected 64 hexadecimal digits",
        ))
    };
    decode_hex(&text).and_then(|bytes| bytes.try_into().ok()).ok_or_else(wrong)
}
