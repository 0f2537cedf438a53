//! The files of agents, and what they must be kept away from.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::Config;
use crate::config::Reach;
use crate::policy::Problem;
use crate::resource::FileSystem;

/// Files that a configuration speaks of without including them.
#[derive(Default)]
pub(in crate::config) struct Referenced {
    /// Those that values are taken from.
    pub(in crate::config) values: Vec<PathBuf>,
    /// Those among the words of programs.
    pub(in crate::config) words: Vec<PathBuf>,
}

/// The files that a configuration goes by.
#[derive(Clone, Default)]
pub(super) struct GoesBy {
    all: Vec<PathBuf>,
    /// Those of them that values are taken from.
    values: Vec<PathBuf>,
}

impl GoesBy {
    pub(super) fn extend(&mut self, other: Self) {
        self.all.extend(other.all);
        self.values.extend(other.values);
    }
}

impl Config {
    /// The directories whose files agents have.
    pub fn workspaces(&self) -> impl Iterator<Item = &Path> {
        self.agents.iter().filter_map(|declared| declared.files.as_ref().map(|(root, _)| root.as_path()))
    }

    /// With these directories open for the tools of agents. Why one cannot be is told where it is named. One that is not opened is only
    /// looked at, where a rule wants to know what is there.
    #[must_use]
    pub fn with_workspaces(mut self, open: impl Fn(&Path) -> std::io::Result<Option<Arc<dyn FileSystem>>>) -> Self {
        for declared in &mut self.agents {
            let Some((root, place)) = &declared.files else { continue };
            match open(root) {
                Ok(files) => declared.opened = files,
                Err(error) => {
                    let problem = Problem::new(format!("the files of {} cannot be used: {error}", root.display()));
                    let problem = problem.help("`files` names a directory of their own for tools, relative to this file");
                    self.problems.push(Problem { place: Some(place.clone()), ..problem });
                }
            }
        }
        self
    }

    /// The files that it goes by: itself, what it includes and takes values from, keys of the gateway, programs.
    pub fn goes_by(&self) -> impl Iterator<Item = PathBuf> {
        self.goes_by.all.iter().cloned()
    }

    /// The files that values are taken from, those of references and the keys for tokens: they change without a change to what was
    /// accepted, and are to be read again then.
    #[must_use]
    pub fn taken_from(&self) -> &[PathBuf] {
        &self.goes_by.values
    }

    pub(super) fn goes_by_all(&self, name: &str, referenced: Referenced) -> GoesBy {
        let (certificate, key) = self.gateway.tls.clone().unzip();
        let keys = self.gateway.jwt.as_ref().map(|jwt| PathBuf::from(&jwt.keys)).filter(|keys| !keys.to_string_lossy().contains("://"));
        let programs = self.upstreams.iter().filter_map(|upstream| match &upstream.reach {
            Reach::Command { program, .. } if program.components().count() > 1 => Some(program.clone()),
            _ => None,
        });
        let values: Vec<PathBuf> = referenced.values.into_iter().chain(keys).collect();
        let own = [PathBuf::from(name)].into_iter().chain(self.files.iter().cloned()).chain(values.iter().cloned()).chain(referenced.words);
        let all = own.chain(certificate).chain(key).chain(programs).filter(|path| !path.as_os_str().is_empty()).collect();
        GoesBy { all, values }
    }
}
