//! Reads tests of a configuration: the expected decision on a call after given calls.

use serde_json::Value;
use toml::de::DeTable;

use crate::ConfigError;
use toolgate::policy::source::table_reader::{TableReadState, TomlSource, TomlTable};
use toolgate::policy::{Diagnostic, SourceSpan};

/// A call of a test.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyTestCall {
    /// The tool.
    pub tool: String,
    /// The arguments.
    pub arguments: Value,
    /// Result of the tool, if it matters.
    pub result: Option<Value>,
    /// The principal. The default is `anybody`.
    pub principal: Option<String>,
    /// The session. The default is `check`.
    pub session: Option<String>,
    /// The agent, if there are several.
    pub agent: Option<String>,
    /// Whether a given call is expected to be denied or to need approval.
    pub is_refused: bool,
}

/// The expected decision on a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpectedDecision {
    /// `allow`, `deny` or `ask`.
    pub decision: &'static str,
    /// The rule or hook that decides.
    pub rule: Option<String>,
    /// The code of the refusal.
    pub code: Option<String>,
}

/// One test.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyTest {
    /// The name.
    pub name: String,
    /// Calls before the tested call.
    pub given: Vec<PolicyTestCall>,
    /// The tested call.
    pub call: PolicyTestCall,
    /// The expected decision.
    pub expect: ExpectedDecision,
    /// Position of the expectation.
    pub span: SourceSpan,
}

/// Reads the tests of a file.
///
/// # Errors
/// All problems of the file.
///
/// ```
/// let tests = toolgate_config::read_policy_tests("tests.toml", r#"
///     [[test]]
///     name = "a refund needs a verified customer"
///     given = [{ tool = "verify_customer", arguments = { customer_id = "C-1" }, result = {} }]
///     call = { tool = "issue_refund", arguments = { customer_id = "C-1", amount = 20 } }
///     expect = "deny"
///     rule = "verified"
/// "#)?;
/// assert_eq!(tests[0].expect.decision, "deny");
/// # Ok::<(), toolgate_config::ConfigError>(())
/// ```
pub fn read_policy_tests(name: &str, text: &str) -> Result<Vec<PolicyTest>, ConfigError> {
    let file = TomlSource { name: name.into(), text: text.into() };
    let (document, errors) = DeTable::parse_recoverable(text);
    if !errors.is_empty() {
        return Err(ConfigError {
            problems: errors.iter().map(|error| file.syntax_problem(error)).collect(),
        });
    }
    let shared = TableReadState::default();
    let table = TomlTable::new(&file, document.get_ref(), 0..0, &shared);
    let tests = table.tables("test").iter().filter_map(|table| read_test(&file, table)).collect();
    table.reject_unknown_keys("a file of tests");
    let problems = shared.into_parts().0;
    if problems.is_empty() { Ok(tests) } else { Err(ConfigError { problems }) }
}

const DECISIONS: [(&str, &str); 3] = [("allow", "allow"), ("deny", "deny"), ("ask", "ask")];

fn read_test(file: &TomlSource, table: &TomlTable<'_>) -> Option<PolicyTest> {
    let name = table.text("name");
    for (key, example) in [
        ("name", "\"a refund needs a verified customer\""),
        ("call", "{ tool = \"…\", arguments = { … } }"),
        ("expect", "\"deny\""),
    ] {
        if !table.has_key(key) {
            table.report(
                key,
                Diagnostic::new(format!("a test needs `{key}`"))
                    .with_help(format!("like `{key} = {example}`")),
            );
        }
    }
    let given: Vec<Option<PolicyTestCall>> =
        table.tables("given").iter().map(|call| read_call(call, true)).collect();
    let call = table.table("call").and_then(|call| read_call(&call, false));
    let decision = table.keyword("expect", &DECISIONS);
    let (rule, code) =
        (table.text("rule").map(str::to_owned), table.text("code").map(str::to_owned));
    if decision == Some("allow") && (rule.is_some() || code.is_some()) {
        table.report(
            "expect",
            Diagnostic::new("an allowed call has no refusing rule or code")
                .with_help("remove `rule` and `code`"),
        );
    }
    table.reject_unknown_keys("a test");
    let place =
        file.span_at(table.part_spans().get("expect").cloned().unwrap_or_else(|| table.span()));
    let expect = ExpectedDecision { decision: decision?, rule, code };
    Some(PolicyTest {
        name: name?.to_owned(),
        given: given.into_iter().collect::<Option<_>>()?,
        call: call?,
        expect,
        span: place,
    })
}

fn read_call(table: &TomlTable<'_>, comes_first: bool) -> Option<PolicyTestCall> {
    if !table.has_key("tool") {
        table.report(
            "tool",
            Diagnostic::new("a call needs a `tool`").with_help("like `tool = \"issue_refund\"`"),
        );
    }
    let call = PolicyTestCall {
        tool: table.text("tool").unwrap_or_default().to_owned(),
        arguments: table.value("arguments").unwrap_or_else(|| serde_json::json!({})),
        result: table.value("result"),
        principal: table.text("principal").map(str::to_owned),
        session: table.text("session").map(str::to_owned),
        agent: table.text("agent").map(str::to_owned),
        is_refused: comes_first && table.bool("refused") == Some(true),
    };
    table.reject_unknown_keys("a call");
    table.has_key("tool").then_some(call)
}
