//! How many files may be open at the same time. A connection is one of them.

use std::sync::OnceLock;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// More is of no use here, and whoever looks through all that might be open would take long.
const MOST: u64 = 65_536;
/// Files for everything but connections: the ledger, upstreams, and what calls need.
const RESERVE: u64 = 1_024;
/// As many there might be before more were wanted.
static BEFORE: OnceLock<u64> = OnceLock::new();

/// Lets this process have as many files open as it may, within reason: most systems begin with few, for the sake of old programs. Upstreams
/// that are led into by [`crate::enter_if_asked`] may have as many as there were before. Call it before a gateway is opened.
pub fn raise_open_files() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let wanted = maximum.map_or(MOST, |most| most.min(MOST));
    if let Some(before) = current.filter(|now| *now < wanted)
        && setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum }).is_ok()
    {
        let _ = BEFORE.set(before);
    }
}

/// How many there might be, where that has been changed.
pub(crate) fn before() -> Option<u64> {
    BEFORE.get().copied()
}

/// How many of them may be connections, if this is what is wanted: the rest is left room.
pub(crate) fn connections(wanted: usize) -> usize {
    room(getrlimit(Resource::Nofile).current, wanted)
}

fn room(files: Option<u64>, wanted: usize) -> usize {
    let room = files.map_or(u64::MAX, |files| files.saturating_sub(RESERVE).max(files / 2));
    usize::try_from(room).map_or(wanted, |room| room.min(wanted))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_room_for_the_rest() {
        for (files, connections) in
            [(None, 16_384), (Some(1 << 20), 16_384), (Some(17_408), 16_384), (Some(4_096), 3_072), (Some(1_024), 512), (Some(256), 128)]
        {
            assert_eq!(room(files, 16_384), connections, "{files:?}");
        }
    }
}
