//! The files of agents, and what they must be kept away from.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::Config;
use crate::config::Reach;
use crate::policy::Problem;
use crate::resource::FileSystem;

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
        self.goes_by.iter().cloned()
    }

    pub(super) fn goes_by_all(&self, name: &str, referenced: Vec<PathBuf>) -> Vec<PathBuf> {
        let (certificate, key) = self.gateway.tls.clone().unzip();
        let keys = self.gateway.jwt.as_ref().map(|jwt| PathBuf::from(&jwt.keys)).filter(|keys| !keys.to_string_lossy().contains("://"));
        let programs = self.upstreams.iter().filter_map(|upstream| match &upstream.reach {
            Reach::Command { program, .. } if program.components().count() > 1 => Some(program.clone()),
            _ => None,
        });
        let own = [PathBuf::from(name)].into_iter().chain(self.files.iter().cloned()).chain(referenced);
        own.chain(certificate).chain(key).chain(keys).chain(programs).filter(|path| !path.as_os_str().is_empty()).collect()
    }
}
