//! Caches the part of a configuration that one tool needs, in the user's state directory.
//!
//! An entry is authenticated with a key from there. It is invalid once a source file has changed or
//! a link leads elsewhere.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;
use toolgate::{Agent, AgentSubset, ErrorDialect};
use toolgate_json::Digest;

use super::Args;
use crate::builtin_rules::{ProtectedPaths, SymlinkSnapshot};
use crate::effective_config::{
    EffectiveConfig, FileMetadataFingerprint, UserStateDir, fingerprint, is_stable_at,
};

/// A cache entry for calls of one tool.
#[derive(Serialize, Deserialize)]
pub(crate) struct HookCacheEntry {
    /// Fingerprint of the program that wrote the entry.
    program: Option<FileMetadataFingerprint>,
    files: Vec<(OsString, Option<FileMetadataFingerprint>)>,
    /// Links on the way to the protected paths.
    links: SymlinkSnapshot,
    pub(crate) agent: String,
    pub(crate) granted: bool,
    /// Whether to ask if the gate fails, and about undeclared tools.
    pub(crate) asks: (bool, bool),
    pub(crate) redact: Vec<String>,
    pub(crate) dialect: ErrorDialect,
    pub(crate) notice: Option<String>,
    pub(crate) store: PathBuf,
    /// Id of the ledger that has the whole configuration.
    pub(crate) ledger: String,
    pub(crate) excerpt: AgentSubset,
}

/// Returns the path of an entry, for one set of arguments and one directory.
fn cache_path(args: &Args, project: &Path, state: &UserStateDir, tool: &str) -> PathBuf {
    state.path().join("compiled").join(cache_key(args, project)).join(tool)
}

/// Returns a name for the arguments, the environment and the directory of a hook.
pub(crate) fn cache_key(args: &Args, project: &Path) -> String {
    let config =
        args.config.as_ref().map(|path| std::path::absolute(path).unwrap_or_else(|_| path.clone()));
    let config = config.as_ref().map_or(&b""[..], |path| path.as_os_str().as_bytes());
    let mut parts = vec![
        config.to_vec(),
        project.as_os_str().as_bytes().to_vec(),
        args.agent.clone().unwrap_or_default().into_bytes(),
    ];
    // The command line and the environment also affect the configuration.
    let store =
        crate::effective_config::requested_store().and_then(|path| std::path::absolute(path).ok());
    parts.push(store.unwrap_or_default().as_os_str().as_bytes().to_vec());
    for name in ["XDG_CONFIG_HOME", "HOME", "CLAUDE_CONFIG_DIR", "CODEX_HOME"] {
        parts.push(std::env::var_os(name).unwrap_or_default().as_bytes().to_vec());
    }
    let digest = Digest::of(&parts.join(&[0][..])).to_string();
    digest.get(..32).unwrap_or(&digest).to_owned()
}

fn authentication_code(key: &[u8; 32], place: &Path, body: &[u8]) -> Option<Vec<u8>> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).ok()?;
    mac.update(place.as_os_str().as_bytes());
    mac.update(body);
    Some(mac.finalize().into_bytes().to_vec())
}

fn program_fingerprint() -> Option<FileMetadataFingerprint> {
    fingerprint(Path::new("/proc/self/exe"))
}

impl HookCacheEntry {
    /// Returns the entry for a tool if it is current.
    pub(crate) fn find(
        args: &Args,
        project: &Path,
        state: &UserStateDir,
        tool: &str,
    ) -> Option<Self> {
        let path = cache_path(args, project, state, tool);
        let text = fs::read(&path).ok()?;
        let (sum, body) = text.split_at_checked(32)?;
        let mut mac = Hmac::<Sha256>::new_from_slice(&state.read_or_create_key().ok()?).ok()?;
        mac.update(path.as_os_str().as_bytes());
        mac.update(body);
        mac.verify_slice(sum).ok()?;
        let compiled: Self = serde_json::from_slice(body).ok()?;
        compiled.is_current().then_some(compiled)
    }

    /// Returns whether all sources of the entry are unchanged.
    pub(crate) fn is_current(&self) -> bool {
        let is_unchanged = self.program == program_fingerprint()
            && self.files.iter().all(|(path, was)| fingerprint(Path::new(path)) == *was);
        is_unchanged && self.links.is_current()
    }

    /// Writes an entry for each tool of an agent. If this fails, the next hook reads the
    /// configuration again.
    pub(crate) fn write(
        args: &Args,
        project: &Path,
        state: &UserStateDir,
        agent: &Agent,
        ledger: &str,
        metadata: &HookCacheMetadata,
    ) -> io::Result<()> {
        // A file that changed during or just before the read may differ from what was read.
        let is_settled = |(path, was): &(PathBuf, Option<FileMetadataFingerprint>)| {
            fingerprint(path) == *was
                && was.as_ref().is_none_or(|was| is_stable_at(was, metadata.read_started))
        };
        // A file that was read and is now missing no longer counts.
        let is_missing =
            |path: &PathBuf| metadata.files.iter().any(|(seen, was)| seen == path && was.is_none());
        if !metadata.files.iter().all(is_settled) || metadata.read_files.iter().any(is_missing) {
            return Ok(());
        }
        let files: Vec<(OsString, Option<FileMetadataFingerprint>)> = metadata
            .files
            .iter()
            .map(|(path, was)| (path.clone().into_os_string(), *was))
            .collect();
        let key = state.read_or_create_key()?;
        for (tool, excerpt) in agent.tool_subsets() {
            let path = cache_path(args, project, state, &tool);
            let compiled = Self {
                program: program_fingerprint(),
                files: files.clone(),
                links: metadata.links.clone(),
                agent: agent.name().to_owned(),
                granted: metadata.granted.iter().any(|name| *name == *tool),
                asks: metadata.asks,
                redact: metadata.redact.clone(),
                dialect: agent.dialect(),
                notice: metadata.notice.clone(),
                store: metadata.store.clone(),
                ledger: ledger.to_owned(),
                excerpt,
            };
            let body = serde_json::to_vec(&compiled)?;
            let sum = authentication_code(&key, &path, &body)
                .ok_or_else(|| io::Error::other("no digest"))?;
            if let Some(parent) = path.parent() {
                fs::DirBuilder::new().recursive(true).mode(0o700).create(parent)?;
            }
            // Replaced atomically.
            let draft = path.with_extension(format!("{}.new", std::process::id()));
            let mut file = fs::OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(&draft)?;
            file.write_all(&[sum, body].concat())?;
            fs::rename(draft, path)?;
        }
        Ok(())
    }
}

/// The parts of a configuration that are cached with its rules.
pub(crate) struct HookCacheMetadata {
    files: Vec<(PathBuf, Option<FileMetadataFingerprint>)>,
    links: SymlinkSnapshot,
    read_files: Vec<PathBuf>,
    read_started: SystemTime,
    granted: Vec<String>,
    asks: (bool, bool),
    redact: Vec<String>,
    notice: Option<String>,
    store: PathBuf,
}

impl HookCacheMetadata {
    pub(crate) fn from_config(
        found: &EffectiveConfig,
        agent: &str,
        protected: &ProtectedPaths,
    ) -> Self {
        let is_ask = |fallback| fallback == toolgate_config::FallbackDecision::Ask;
        let asks = (is_ask(found.config.client.on_failure), is_ask(found.config.client.undeclared));
        Self {
            files: found.examined_files.clone(),
            links: protected.links().clone(),
            read_files: found.files.clone(),
            read_started: found.read_started,
            granted: found.config.granted_tools(agent).map(str::to_owned).collect(),
            asks,
            redact: found.config.redact.clone(),
            notice: found.notice.clone(),
            store: found.store.clone(),
        }
    }

    /// Returns whether the protected paths are unchanged.
    pub(crate) fn has_current_links(&self) -> bool {
        self.links.is_current()
    }
}
