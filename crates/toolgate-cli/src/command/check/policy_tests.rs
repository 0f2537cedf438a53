//! Runs the policy tests of `toolgate check --tests`.

use std::collections::BTreeSet;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use serde_json::json;
use toolgate::policy::Diagnostic;
use toolgate::{Answer, Gate};
use toolgate_config::{ConfigError, PolicyTest, PolicyTestCall, read_policy_tests};

use super::{Args, CallToCheck, CheckHarness, decision_of};
use crate::command::common::{GREEN, IgnoreBrokenPipe, RED, YELLOW, format_count, sanitize};

/// Returns why a test failed.
fn test_failure(test: &PolicyTest, answer: &Answer) -> Option<String> {
    let actual = decision_of(answer);
    let (decision, rule, code) =
        (actual.decision, actual.rule, actual.error.map(|error| &*error.code));
    let expect = &test.expect;
    let differs = decision != expect.decision
        || expect.rule.as_deref().is_some_and(|expected| Some(expected) != rule)
        || expect.code.as_deref().is_some_and(|expected| Some(expected) != code);
    let by = |rule: Option<&str>, code: Option<&str>| match (rule, code) {
        (Some(rule), Some(code)) => format!(" by `{rule}` ({code})"),
        (Some(rule), None) => format!(" by `{rule}`"),
        (None, Some(code)) => format!(" ({code})"),
        (None, None) => String::new(),
    };
    let expected =
        format!("{}{}", expect.decision, by(expect.rule.as_deref(), expect.code.as_deref()));
    if differs {
        return Some(format!("expected {expected}, but got {}{}", decision, by(rule, code)));
    }
    // An invalid call is refused in any case, so the test would not test the rules.
    let error = actual.error.filter(|_| actual.gate <= Gate::Validate && expect.code.is_none())?;
    Some(format!(
        "the call is refused before any rule: {}: {}; if this is intended, add `code = \"{}\"`",
        error.code,
        error.message.trim_end_matches('.'),
        error.code
    ))
}

/// Returns why a `given` call did not end as the test says.
fn given_call_mismatch(number: usize, call: &PolicyTestCall, answer: &Answer) -> Option<String> {
    let error = answer.outcome.error();
    let why = error
        .map(|error| format!("{}: {}", error.code, error.message.trim_end_matches('.')))
        .unwrap_or_default();
    match (decision_of(answer).decision == "allow", call.is_refused) {
        (true, true) => {
            Some(format!("call {number} of `given` is allowed, but has `refused = true`"))
        }
        (false, false) => Some(format!(
            "call {number} of `given` is refused: {why}; if this is intended, add `refused = true` to the call"
        )),
        // A real call with this result would produce no evidence either.
        (true, false) if call.result.is_some() && error.is_some() => {
            Some(format!("the result of call {number} of `given` does not count: {why}"))
        }
        _ => None,
    }
}

impl From<&PolicyTestCall> for CallToCheck {
    fn from(call: &PolicyTestCall) -> Self {
        Self {
            tool: call.tool.clone(),
            arguments: serde_json::value::to_raw_value(&call.arguments).ok(),
            session: call.session.clone(),
            principal: call.principal.clone(),
            agent: call.agent.clone(),
            result: call.result.clone(),
        }
    }
}

/// Runs the tests. Each starts with an empty history.
pub(super) fn run_tests(args: &Args) -> io::Result<ExitCode> {
    let colours = io::stdout().is_terminal();
    let (mut passed, mut failed, mut decided_rules) = (0_u64, 0_u64, BTreeSet::new());
    let mut rules: BTreeSet<String> = BTreeSet::new();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut out = IgnoreBrokenPipe(anstream::stdout().lock());
    for path in &args.tests {
        let text = std::fs::read_to_string(path)
            .map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))?;
        let tests = read_policy_tests(&path.display().to_string(), &text).map_err(|error| {
            io::Error::other(format!(
                "cannot read the tests

{}",
                error.render(io::stderr().is_terminal())
            ))
        })?;
        for test in &tests {
            let harness = CheckHarness::open(args.config.as_ref())?;
            rules.extend(harness.rules.iter().cloned());
            let (mut last_answer, mut mismatch) = (None, None);
            for (number, call) in test.given.iter().chain([&test.call]).enumerate() {
                let agent = harness
                    .resolve_agent(call.agent.as_ref())
                    .map_err(|why| io::Error::other(format!("test `{}`: {why}", test.name)))?;
                let answer = runtime.block_on(harness.decide(&agent, &CallToCheck::from(call)));
                let decision = decision_of(&answer);
                decided_rules.extend(decision.rule.map(str::to_owned));
                // If a `given` call ends differently, the test would pass for the wrong reason.
                if number < test.given.len() {
                    mismatch = mismatch.or_else(|| given_call_mismatch(number + 1, call, &answer));
                }
                last_answer = Some(answer);
            }
            let Some(why) = mismatch
                .or_else(|| last_answer.as_ref().and_then(|answer| test_failure(test, answer)))
            else {
                passed += 1;
                continue;
            };
            failed += 1;
            if args.json {
                writeln!(
                    out,
                    "{}",
                    json!({ "test": test.name, "failed": why, "file": &*test.span.file })
                )?;
            } else {
                let problem = Diagnostic {
                    span: Some(test.span.clone()),
                    ..Diagnostic::new(format!("test `{}`: {why}", test.name))
                };
                writeln!(out, "{}\n", ConfigError { problems: vec![problem] }.render(colours))?;
            }
        }
    }
    if passed + failed == 0 {
        return Err(io::Error::other(
            "the files contain no tests, so nothing was checked; a test begins with `[[test]]`",
        ));
    }
    let silent_rules: Vec<&String> = rules.difference(&decided_rules).collect();
    if args.json {
        writeln!(
            out,
            "{}",
            json!({ "summary": { "passed": passed, "failed": failed, "rules": rules.len(), "never_spoke": silent_rules } })
        )?;
    } else {
        let style = if failed == 0 { GREEN } else { RED };
        writeln!(
            out,
            "{style}{} passed, {failed} failed{style:#}; {} of {} refused or asked at least once",
            format_count(passed, "test"),
            rules.len() - silent_rules.len(),
            format_count(rules.len() as u64, "rule")
        )?;
        if !silent_rules.is_empty() {
            writeln!(
                out,
                "{YELLOW}never decided{YELLOW:#}: {}",
                silent_rules.iter().map(|rule| sanitize(rule)).collect::<Vec<_>>().join(", ")
            )?;
        }
    }
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
