//! Looking back.

pub(crate) fn look_away(_: &str) {}
