//! Tests the diagnostics of invalid rules.
//!
//! Each file in `tests/broken` has a snapshot of its diagnostics.

use serde_json::{Value, json};
use toolgate::policy::source::RuleSet;
use toolgate::{Agent, Effect, Tool};

pub(crate) fn refund_desk_builder() -> toolgate::AgentBuilder {
    let dynamic = |name: &str, properties: Value| {
        let schema = json!({"type": "object", "properties": properties});
        Tool::dynamic(name, "A tool.", schema, |_, _| async { Ok(Value::Null) })
    };
    let text = || json!({"type": "string"});
    Agent::builder("desk")
        .tool(dynamic("verify_customer", json!({"customer_id": text()})).effect(Effect::Read).entity("customer_id", "/customer_id").proves("/active"))
        .tool(dynamic("lookup_order", json!({"order_id": text()})).effect(Effect::Read).entity("order_id", "/order_id").proves("/customer_id"))
        .tool(dynamic("read_mail", json!({})).effect(Effect::Read).untrusted())
        .tool(
            dynamic(
                "issue_refund",
                json!({"order_id": text(), "customer_id": text(), "amount_usd": {"type": "number", "maximum": 10_000}, "currency": {"enum": ["USD", "EUR"]}}),
            )
            .open(),
        )
        .tool(dynamic("escalate_to_human", json!({"order_id": text()})).open())
}

/// Adds the tool that a case needs.
fn builder_for_case(case: &str) -> toolgate::AgentBuilder {
    let mail = Tool::dynamic(
        "send_mail",
        "Sends.",
        json!({"type": "object", "properties": {"to": {"type": "string"}}}),
        |_, _| async { Ok(Value::Null) },
    );
    // A tool with effects that is not declared open needs an enforced rule.
    refund_desk_builder().tool(if case == "only_observed" { mail } else { mail.open() })
}

#[test]
fn broken_policy_reports_error_span_and_help() {
    let directory = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/broken");
    let mut files: Vec<_> =
        std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "toml"));
    files.sort();
    assert!(files.len() >= 30, "{}", files.len());
    for path in files {
        let case = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let text = std::fs::read_to_string(&path).unwrap();
        let diagnostics =
            match builder_for_case(&case).rules(RuleSet::parse("policy.toml", &text)).build() {
                Err(error) => error.render(false),
                Ok(agent) => {
                    assert!(!agent.warnings().is_empty(), "{case} is valid");
                    agent.render_warnings(false)
                }
            };
        // An ungoverned tool is an error of the agent and has no place in the file.
        assert!(diagnostics.contains("--> policy.toml:"), "{case} has no place:\n{diagnostics}");
        insta::with_settings!({snapshot_path => "../broken", prepend_module_to_snapshot => false, omit_expression => true}, {
            insta::assert_snapshot!(case.as_str(), diagnostics);
        });
    }
}

/// Checks that a mutated rule file loads or is refused with a diagnostic, without a panic.
#[test]
fn any_rule_file_is_loaded_or_refused() {
    use proptest::prelude::*;
    use proptest::strategy::ValueTree;
    use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
    let directory = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/broken");
    let examples = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    let example_files = ["refund-desk", "file_editor", "deployment", "bank_transfers"]
        .map(|name| examples.join(name).join("policy.toml"));
    let files = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "toml"));
    let texts: Vec<Vec<char>> = files
        .chain(example_files)
        .map(|path| std::fs::read_to_string(path).unwrap().chars().collect())
        .collect();
    let rounds = if std::env::var_os("TOOLGATE_SOAK").is_some() { 200_000 } else { 2_000 };
    let mut runner = TestRunner::new_with_rng(
        Config::default(),
        TestRng::from_seed(RngAlgorithm::ChaCha, &[9; 32]),
    );
    let fragments = prop::sample::select(vec![
        "\"",
        "'",
        "[",
        "]",
        "{",
        "}",
        "=",
        "\n",
        "#",
        "input.",
        "(",
        ")",
        "&&",
        "\\",
        "ä",
        "\u{0}",
        "1e400",
        "-",
        "[[policy]]\n",
        "*",
        "/",
    ]);
    let strategy = (
        any::<prop::sample::Index>(),
        prop::collection::vec((any::<prop::sample::Index>(), 0..6usize, fragments), 1..5),
    );
    for _ in 0..rounds {
        let (which, edits) = strategy.new_tree(&mut runner).unwrap().current();
        let mut text = texts[which.index(texts.len())].clone();
        for (at, cut, inserted) in edits {
            let at = at.index(text.len() + 1);
            let end = (at + cut).min(text.len());
            text.splice(at..end, inserted.chars());
        }
        let text: String = text.into_iter().collect();
        if let Err(error) = builder_for_case("").rules(RuleSet::parse("policy.toml", &text)).build()
        {
            assert!(!error.problems.is_empty() && !error.render(false).is_empty(), "{text}");
        }
    }
}

#[test]
fn broken_config_reports_error_span_and_help() {
    let directory = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/broken_config");
    let mut files: Vec<_> =
        std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "toml"));
    files.sort();
    assert!(files.len() >= 40, "{}", files.len());
    let mut incomplete = String::new();
    for path in files {
        let case = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let config = toolgate_config::Config::parse(
            "toolgate.toml",
            &std::fs::read_to_string(&path).unwrap(),
        );
        let diagnostics = match config.build_agents(None) {
            Err(error) => error.render(false),
            Ok(_) => panic!("{case} is valid"),
        };
        if !diagnostics.contains("--> toolgate.toml:") || !diagnostics.contains("= help:") {
            incomplete.push_str(&format!("{case}:\n{diagnostics}\n\n"));
        }
        insta::with_settings!({snapshot_path => "../broken_config", prepend_module_to_snapshot => false, omit_expression => true}, {
            insta::assert_snapshot!(case.as_str(), diagnostics);
        });
    }
    assert!(incomplete.is_empty(), "no place or no help:\n{incomplete}");
}
