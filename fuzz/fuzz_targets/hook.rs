//! Checks that every client input is an event or gives an error.
#![no_main]

#[allow(dead_code)]
#[path = "../../crates/toolgate-cli/src/command/hook/event.rs"]
mod event;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = event::Event::heard(bytes);
});
