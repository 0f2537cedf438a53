//! Opens the directories of agents and lists the files that a configuration depends on.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::UpstreamTransport;
use crate::config::Config;
use toolgate::files::FileSystem;
use toolgate::policy::Diagnostic;

/// Files that a configuration references without including them.
#[derive(Default)]
pub(crate) struct ReferencedFiles {
    /// Files that contain values.
    pub(crate) value_files: Vec<PathBuf>,
    /// Files among the arguments of programs.
    pub(crate) program_args: Vec<PathBuf>,
}

/// All files that a configuration depends on.
#[derive(Clone, Default)]
pub(crate) struct ConfigDependencies {
    files: Vec<PathBuf>,
    /// The subset that contains values.
    value_files: Vec<PathBuf>,
}

impl ConfigDependencies {
    pub(crate) fn extend(&mut self, other: Self) {
        self.files.extend(other.files);
        self.value_files.extend(other.value_files);
    }
}

impl Config {
    /// Iterates over the directories that agents work on.
    pub fn workspaces(&self) -> impl Iterator<Item = &Path> {
        self.agents
            .iter()
            .filter_map(|declared| declared.files.as_ref().map(|(root, _)| root.as_path()))
    }

    /// Opens the directories for the tools of agents.
    ///
    /// A directory that cannot be opened is reported at its `files` key. If `open` returns `None`,
    /// rules can still read the directory.
    #[must_use]
    pub fn with_workspaces(
        mut self,
        open: impl Fn(&Path) -> std::io::Result<Option<Arc<dyn FileSystem>>>,
    ) -> Self {
        for declared in &mut self.agents {
            let Some((root, place)) = &declared.files else { continue };
            match open(root) {
                Ok(files) => declared.open_files = files,
                Err(error) => {
                    let problem = Diagnostic::new(format!(
                        "cannot use the directory {}: {error}",
                        root.display()
                    ));
                    let problem = problem.with_help(
                        "`files` names a directory of its own for the tools, relative to this file",
                    );
                    self.problems.push(Diagnostic { span: Some(place.clone()), ..problem });
                }
            }
        }
        self
    }

    /// Iterates over all files that the configuration depends on.
    ///
    /// These are the file itself, included files, files with values, keys of the gateway and
    /// programs.
    pub fn dependencies(&self) -> impl Iterator<Item = PathBuf> {
        self.dependencies.files.iter().cloned()
    }

    /// Lists the files that contain values: references and the keys for tokens.
    ///
    /// They may change after the configuration was accepted and must then be read again.
    #[must_use]
    pub fn value_files(&self) -> &[PathBuf] {
        &self.dependencies.value_files
    }

    pub(crate) fn collect_dependencies(
        &self,
        name: &str,
        referenced: ReferencedFiles,
    ) -> ConfigDependencies {
        let (certificate, key) = self.gateway.tls.clone().unzip();
        let keys = self
            .gateway
            .jwt
            .as_ref()
            .map(|jwt| PathBuf::from(&jwt.keys))
            .filter(|keys| !keys.to_string_lossy().contains("://"));
        let programs = self.upstreams.iter().filter_map(|upstream| match &upstream.transport {
            UpstreamTransport::Command { program, .. } if program.components().count() > 1 => {
                Some(program.clone())
            }
            _ => None,
        });
        let values: Vec<PathBuf> = referenced.value_files.into_iter().chain(keys).collect();
        let own_file = [PathBuf::from(name)]
            .into_iter()
            .chain(self.included_files.iter().cloned())
            .chain(values.iter().cloned())
            .chain(referenced.program_args);
        let all = own_file
            .chain(certificate)
            .chain(key)
            .chain(programs)
            .filter(|path| !path.as_os_str().is_empty())
            .collect();
        ConfigDependencies { files: all, value_files: values }
    }
}
