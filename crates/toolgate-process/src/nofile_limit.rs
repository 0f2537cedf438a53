//! Limits the number of open files. Each connection is one of them.

use std::sync::OnceLock;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Maximum number of open files. Programs that scan all possible descriptors get slow above it.
const MAX_OPEN_FILES: u64 = 65_536;
/// Files that are reserved for the ledger, upstreams and calls.
const RESERVED_FILES: u64 = 1_024;
/// Limit of the process before it was raised.
static PREVIOUS_FILE_LIMIT: OnceLock<u64> = OnceLock::new();

/// Raises the limit of open files of this process, up to 65,536.
///
/// Most systems start programs with a low limit, for the sake of old programs. Upstreams that start
/// through [`crate::sandbox::run_as_helper_if_requested`] get the previous limit. Call this
/// function before you open a gateway.
pub fn raise_open_file_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let target = maximum.map_or(MAX_OPEN_FILES, |most| most.min(MAX_OPEN_FILES));
    if let Some(before) = current.filter(|now| *now < target)
        && setrlimit(Resource::Nofile, Rlimit { current: Some(target), maximum }).is_ok()
    {
        let _ = PREVIOUS_FILE_LIMIT.set(before);
    }
}

/// Returns the previous limit, if it was raised.
pub fn previous_limit() -> Option<u64> {
    PREVIOUS_FILE_LIMIT.get().copied()
}

/// Returns how many of the requested connections the limit permits, after the reserve.
pub fn max_connections(requested: usize) -> usize {
    connections_within_limit(getrlimit(Resource::Nofile).current, requested)
}

fn connections_within_limit(files: Option<u64>, requested: usize) -> usize {
    let available =
        files.map_or(u64::MAX, |files| files.saturating_sub(RESERVED_FILES).max(files / 2));
    usize::try_from(available).map_or(requested, |available| available.min(requested))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_the_reserved_files() {
        for (files, connections) in [
            (None, 16_384),
            (Some(1 << 20), 16_384),
            (Some(17_408), 16_384),
            (Some(4_096), 3_072),
            (Some(1_024), 512),
            (Some(256), 128),
        ] {
            assert_eq!(connections_within_limit(files, 16_384), connections, "{files:?}");
        }
    }
}
