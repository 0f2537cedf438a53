//! Checks that every configuration is accepted, or rejected with a position for each problem.
#![no_main]

use libfuzzer_sys::fuzz_target;
use toolgate_config::Config;

fuzz_target!(|text: &str| {
    let config = Config::parse("toolgate.toml", text);
    let _ = config.lint(None);
    if let Err(error) = config.for_client().build_agents(None) {
        let _ = error.render(false);
    }
});
