//! Checks that every client input is an event or gives an error.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = toolgate_hook::event::Event::parse(bytes);
});
