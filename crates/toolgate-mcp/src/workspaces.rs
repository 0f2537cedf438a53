//! The directories whose files agents have: opened once, however often the configuration is read.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use toolgate::Store;
use toolgate::config::Config;
use toolgate::json::Digest;
use toolgate::resource::{FileSystem, HostFs};

use crate::gateway::lock;

/// Those that are open. What was open once stays so: calls that began with it may still be under way.
#[derive(Default)]
pub(crate) struct Workspaces(Mutex<BTreeMap<(PathBuf, u64, u64), HostFs>>);

impl Workspaces {
    /// A configuration with its directories open. None of them may hold what toolgate itself goes by: its tools would write that.
    pub(crate) async fn open(self: &Arc<Self>, config: Config, store: &Arc<dyn Store>, own: &[PathBuf]) -> io::Result<Config> {
        if config.workspaces().next().is_none() {
            return Ok(config);
        }
        let own: BTreeSet<PathBuf> = own.iter().map(|path| leads_to(path)).collect();
        let (this, store, runtime) = (Arc::clone(self), Arc::clone(store), tokio::runtime::Handle::current());
        let opening = tokio::task::spawn_blocking(move || {
            let committed = |call| runtime.block_on(store.has_succeeded(call)).map_err(io::Error::other);
            config.with_workspaces(|root| this.one(root, store.home(), &own, committed))
        });
        opening.await.map_err(io::Error::other)
    }

    fn one(
        &self,
        root: &Path,
        home: Option<&Path>,
        own: &BTreeSet<PathBuf>,
        committed: impl Fn(toolgate::CallId) -> io::Result<bool>,
    ) -> io::Result<Option<Arc<dyn FileSystem>>> {
        let root = std::fs::canonicalize(root)?;
        let home = home.map(std::fs::canonicalize).transpose()?;
        if let Some(path) = own.iter().chain(&home).find(|path| path.starts_with(&root)) {
            return Err(io::Error::other(format!("{} stands there, or would, and decides about agents", path.display())));
        }
        if let Some(path) = own.iter().chain(&home).find(|path| root.starts_with(path)) {
            return Err(io::Error::other(format!("it lies in {}, which is toolgate's own", path.display())));
        }
        // Where nothing is kept, nothing could be put back.
        let Some(home) = home else { return Ok(None) };
        // Another directory of the same name is another one.
        let about = std::fs::metadata(&root)?;
        let key = (root.clone(), about.dev(), about.ino());
        let mut open = lock(&self.0);
        let files = match open.get(&key) {
            Some(files) => files.clone(),
            None => {
                let name = Digest::of(root.as_os_str().as_encoded_bytes()).to_string();
                let files = HostFs::open_shared(&root, home.join("files").join(name), committed)?;
                open.insert(key, files.clone());
                files
            }
        };
        Ok(Some(Arc::new(files)))
    }
}

/// Where a path leads, as far as there is something.
fn leads_to(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let there = path.ancestors().find_map(|above| Some((above.canonicalize().ok()?, path.strip_prefix(above).ok()?)));
    match there {
        Some((there, rest)) if !rest.as_os_str().is_empty() => there.join(rest),
        Some((there, _)) => there,
        None => path,
    }
}
