//! Tests of a configuration: given these calls, what becomes of this one?

use serde_json::Value;
use toml::de::DeTable;

use super::ConfigError;
use super::read::{File, Shared, Table};
use crate::policy::{Place, Problem};

/// A call in a test.
#[derive(Debug, Clone, PartialEq)]
pub struct TestCall {
    /// The tool.
    pub tool: String,
    /// Its arguments.
    pub arguments: Value,
    /// What the tool gives, where that matters.
    pub result: Option<Value>,
    /// Who calls; `anybody` unless said.
    pub principal: Option<String>,
    /// In which session; `check` unless said.
    pub session: Option<String>,
    /// As which agent, where there are several.
    pub agent: Option<String>,
    /// Of one that comes first: it is meant to be refused, or asked about.
    pub refused: bool,
}

/// What is expected of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expected {
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
    /// Its name.
    pub name: String,
    /// What comes first.
    pub given: Vec<TestCall>,
    /// The call that is tested.
    pub call: TestCall,
    /// What is expected of it.
    pub expect: Expected,
    /// Where the expectation stands.
    pub place: Place,
}

/// The tests of a file.
///
/// # Errors
/// Everything that is wrong with it, all at once.
///
/// ```
/// let tests = toolgate::config::read_tests("tests.toml", r#"
///     [[test]]
///     name = "a refund needs a verified customer"
///     given = [{ tool = "verify_customer", arguments = { customer_id = "C-1" }, result = { active = false } }]
///     call = { tool = "issue_refund", arguments = { customer_id = "C-1", amount = 20 } }
///     expect = "deny"
///     rule = "verified"
/// "#)?;
/// assert_eq!(tests[0].expect.decision, "deny");
/// # Ok::<(), toolgate::config::ConfigError>(())
/// ```
pub fn read_tests(name: &str, text: &str) -> Result<Vec<PolicyTest>, ConfigError> {
    let file = File { name: name.into(), text: text.into() };
    let (document, errors) = DeTable::parse_recoverable(text);
    if !errors.is_empty() {
        return Err(ConfigError { problems: errors.iter().map(|error| file.broken(error)).collect() });
    }
    let shared = Shared::default();
    let table = Table::new(&file, document.get_ref(), 0..0, &shared);
    let tests = table.tables("test").iter().filter_map(|table| read_test(&file, table)).collect();
    table.finish("a file of tests");
    let problems = shared.into_parts().0;
    if problems.is_empty() { Ok(tests) } else { Err(ConfigError { problems }) }
}

const DECISIONS: [(&str, &str); 3] = [("allow", "allow"), ("deny", "deny"), ("ask", "ask")];

fn read_test(file: &File, table: &Table<'_>) -> Option<PolicyTest> {
    let name = table.text("name");
    for (key, like) in
        [("name", "\"a refund needs a verified customer\""), ("call", "{ tool = \"…\", arguments = { … } }"), ("expect", "\"deny\"")]
    {
        if !table.has(key) {
            table.wrong(key, Problem::new(format!("a test says its `{key}`")).help(format!("like `{key} = {like}`")));
        }
    }
    let given: Vec<Option<TestCall>> = table.tables("given").iter().map(|given| read_call(given, true)).collect();
    let call = table.table("call").and_then(|call| read_call(&call, false));
    let decision = table.word("expect", &DECISIONS);
    let (rule, code) = (table.text("rule").map(str::to_owned), table.text("code").map(str::to_owned));
    if decision == Some("allow") && (rule.is_some() || code.is_some()) {
        table.wrong("expect", Problem::new("what is allowed, no rule refuses").help("take `rule` and `code` out"));
    }
    table.finish("a test");
    let place = file.place(table.own_parts().get("expect").cloned().unwrap_or_else(|| table.span()));
    let expect = Expected { decision: decision?, rule, code };
    Some(PolicyTest { name: name?.to_owned(), given: given.into_iter().collect::<Option<_>>()?, call: call?, expect, place })
}

fn read_call(table: &Table<'_>, comes_first: bool) -> Option<TestCall> {
    if !table.has("tool") {
        table.wrong("tool", Problem::new("a call names its `tool`").help("like `tool = \"issue_refund\"`"));
    }
    let call = TestCall {
        tool: table.text("tool").unwrap_or_default().to_owned(),
        arguments: table.value("arguments").unwrap_or_else(|| serde_json::json!({})),
        result: table.value("result"),
        principal: table.text("principal").map(str::to_owned),
        session: table.text("session").map(str::to_owned),
        agent: table.text("agent").map(str::to_owned),
        refused: comes_first && table.bool("refused") == Some(true),
    };
    table.finish("a call");
    table.has("tool").then_some(call)
}
