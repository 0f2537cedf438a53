//! Opens the workspaces of agents, once for all reloads of the configuration.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use toolgate::Store;
use toolgate::files::{FileSystem, HostFs};
use toolgate_config::Config;
use toolgate_json::Digest;

use crate::gateway::lock;

/// Open workspaces. They stay open, because running calls may still use them.
#[derive(Default)]
pub(crate) struct Workspaces(Mutex<BTreeMap<(PathBuf, u64, u64), HostFs>>);

impl Workspaces {
    /// Opens the workspaces of a configuration.
    ///
    /// A workspace may not contain files that control toolgate, because its tools could change
    /// them.
    pub(crate) async fn open(
        self: &Arc<Self>,
        config: Config,
        store: &Arc<dyn Store>,
        own_paths: &[PathBuf],
    ) -> io::Result<Config> {
        if config.workspaces().next().is_none() {
            return Ok(config);
        }
        let own_paths: BTreeSet<PathBuf> =
            own_paths.iter().map(|path| resolve_path(path)).collect();
        let (this, store, runtime) =
            (Arc::clone(self), Arc::clone(store), tokio::runtime::Handle::current());
        let task = tokio::task::spawn_blocking(move || {
            let committed =
                |call| runtime.block_on(store.has_succeeded(call)).map_err(io::Error::other);
            config.with_workspaces(|root| {
                this.open_workspace(root, store.undo_dir().as_deref(), &own_paths, committed)
            })
        });
        task.await.map_err(io::Error::other)
    }

    fn open_workspace(
        &self,
        root: &Path,
        state_dir: Option<&Path>,
        own_paths: &BTreeSet<PathBuf>,
        committed: impl Fn(toolgate::CallId) -> io::Result<bool>,
    ) -> io::Result<Option<Arc<dyn FileSystem>>> {
        let root = std::fs::canonicalize(root)?;
        let state_dir = state_dir.map(std::fs::canonicalize).transpose()?;
        if let Some(path) = own_paths.iter().chain(&state_dir).find(|path| path.starts_with(&root))
        {
            return Err(io::Error::other(format!(
                "it contains `{}`, which controls toolgate",
                path.display()
            )));
        }
        if let Some(path) = own_paths.iter().chain(&state_dir).find(|path| root.starts_with(path)) {
            return Err(io::Error::other(format!(
                "it is inside `{}`, which belongs to toolgate",
                path.display()
            )));
        }
        // Without a state directory, changes have no journal and cannot be undone.
        let Some(state_dir) = state_dir else { return Ok(None) };
        // The path may name another directory by now.
        let metadata = std::fs::metadata(&root)?;
        let key = (root.clone(), metadata.dev(), metadata.ino());
        let mut open_workspaces = lock(&self.0);
        let files = match open_workspaces.get(&key) {
            Some(files) => files.clone(),
            None => {
                let name = Digest::of(root.as_os_str().as_encoded_bytes()).to_string();
                let files =
                    HostFs::open_shared(&root, state_dir.join("files").join(name), committed)?;
                open_workspaces.insert(key, files.clone());
                files
            }
        };
        Ok(Some(Arc::new(files)))
    }
}

/// Resolves a path as far as it exists.
fn resolve_path(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let existing = path.ancestors().find_map(|ancestor| {
        Some((ancestor.canonicalize().ok()?, path.strip_prefix(ancestor).ok()?))
    });
    match existing {
        Some((existing, rest)) if !rest.as_os_str().is_empty() => existing.join(rest),
        Some((existing, _)) => existing,
        None => path,
    }
}
