//! Runs the fuzz corpus and mutations of the corpus, and checks that nothing panics or hangs.
//!
//! The fuzz targets are in `fuzz/`.

use std::path::Path;

use serde_json::json;
use toolgate::policy::{Condition, Deny};
use toolgate::{Agent, Tool};
use toolgate_config::Config;

/// Returns the texts of a corpus and `changes` mutated copies.
fn mutated_corpus(corpus: &str, changes: usize) -> Vec<String> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(corpus);
    let mut files: Vec<_> =
        std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let seeds: Vec<Vec<u8>> = files.iter().map(|path| std::fs::read(path).unwrap()).collect();
    let mut texts: Vec<String> =
        seeds.iter().map(|seed| String::from_utf8_lossy(seed).into_owned()).collect();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = |limit: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % limit.max(1)
    };
    for _ in 0..changes {
        let mut bytes = seeds[next(seeds.len())].clone();
        for _ in 0..1 + next(4) {
            let at = next(bytes.len() + 1);
            match next(4) {
                0 => bytes.insert(at, b"\"'[]{}=,.\n\\$`(#<>|;&"[next(20)]),
                1 if at < bytes.len() => drop(bytes.remove(at)),
                2 => bytes.truncate(at),
                _ => {
                    let other = &seeds[next(seeds.len())];
                    let from = next(other.len() + 1);
                    bytes.splice(at..at, other[from..(from + 20).min(other.len())].iter().copied());
                }
            }
        }
        texts.push(String::from_utf8_lossy(&bytes).into_owned());
    }
    texts
}

fn round_count(rounds: usize) -> usize {
    if std::env::var_os("TOOLGATE_SOAK").is_some() { rounds * 100 } else { rounds }
}

#[test]
fn any_config_text_is_loaded_or_refused() {
    for text in mutated_corpus("config", round_count(2_000)) {
        let config = Config::parse("toolgate.toml", &text);
        let _ = config.lint(None);
        if let Err(error) = config.for_client().build_agents(None) {
            assert!(!error.problems.is_empty(), "{text}");
            let _ = error.render(false);
        }
    }
}

#[tokio::test]
async fn any_command_text_is_analyzed_without_panic() {
    let rule = Deny::new("r", ["bash"])
        .when("/command", Condition::Runs(vec!["rm -r".to_owned(), "git push".to_owned()]));
    let agent = Agent::builder("a")
        .tool(Tool::external("bash", "Runs.", None).shell("/command"))
        .policy(rule)
        .build()
        .unwrap();
    let gate = toolgate::Toolgate::builder().agent(agent).build().unwrap();
    let session = gate.session("a", "b", "c");
    for text in mutated_corpus("shell", round_count(1_000)) {
        let _ = session.explain("bash", json!({"command": text})).await;
    }
}
