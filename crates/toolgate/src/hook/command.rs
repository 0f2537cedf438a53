//! Hooks that are programs: JSON on standard input, an exit code, perhaps JSON on standard output.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

use async_trait::async_trait;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::Command;

use super::{Before, Denial, Hook, HookCall, HookDecision, HookFault};
use crate::child;
use crate::error::Category;
use crate::json::{self, Bounds};
use crate::names::{glob, shown};

/// Most that a hook may print on either stream.
const MOST_OUTPUT: u64 = 1 << 20;
/// What of the environment a hook sees unless it is given more.
const ENVIRONMENT: &[&str] = &["PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "USER"];

/// A program that is asked before tools, after them, or both.
///
/// ```
/// use toolgate::hook::CommandHook;
/// let hook = CommandHook::new("refund_policy", "/usr/local/bin/refund-policy").tools("process_refund|issue_*").before();
/// ```
#[derive(Clone)]
pub struct CommandHook {
    name: String,
    program: PathBuf,
    args: Vec<OsString>,
    matcher: Vec<String>,
    timeout: Duration,
    env: Vec<String>,
    set: BTreeMap<String, OsString>,
    hidden: Vec<String>,
    launcher: Option<PathBuf>,
    runs_before: bool,
    runs_after: bool,
}

/// What is set for it may be secret.
impl std::fmt::Debug for CommandHook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let set: Vec<&String> = self.set.keys().collect();
        let (name, program, args, tools) = (&self.name, &self.program, &self.args, &self.matcher);
        f.debug_struct("CommandHook")
            .field("name", name)
            .field("program", program)
            .field("args", args)
            .field("tools", tools)
            .field("env", &set)
            .finish_non_exhaustive()
    }
}

impl CommandHook {
    /// A hook that is asked before tools, unless [`after`](Self::after) says otherwise.
    pub fn new(name: impl Into<String>, program: impl Into<PathBuf>) -> Self {
        Self {
            name: name.into(),
            program: program.into(),
            args: Vec::new(),
            matcher: vec!["*".to_owned()],
            timeout: Duration::from_secs(5),
            env: ENVIRONMENT.iter().map(|name| (*name).to_owned()).collect(),
            set: BTreeMap::new(),
            hidden: Vec::new(),
            launcher: None,
            runs_before: false,
            runs_after: false,
        }
    }

    /// Adds an argument. No shell ever sees it.
    #[must_use]
    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// For which tools: names or patterns with `*`, separated by `|`.
    #[must_use]
    pub fn tools(mut self, matcher: &str) -> Self {
        self.matcher = matcher.split('|').map(|part| part.trim().to_owned()).collect();
        self
    }

    /// The names and patterns that it is for.
    pub(crate) fn names(&self) -> &[String] {
        &self.matcher
    }

    /// How long it may take.
    #[must_use]
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Lets it see one more variable of the environment.
    #[must_use]
    pub fn inherit(mut self, variable: &str) -> Self {
        self.hidden.extend(std::env::var(variable));
        self.env.push(variable.to_owned());
        self
    }

    /// Sets a variable for it.
    #[must_use]
    pub fn env(mut self, variable: &str, value: impl Into<OsString>) -> Self {
        self.set.insert(variable.to_owned(), value.into());
        self
    }

    /// A value that nobody may see in what it says.
    #[must_use]
    pub fn hide(mut self, value: impl Into<String>) -> Self {
        self.hidden.push(value.into());
        self
    }

    /// A program that leads into it, one that calls [`crate::sandbox::enter_if_asked`] as `toolgate` does: it ends the hook with all that it
    /// has started, also when this process is killed. Without one, its process group is ended by this process.
    #[must_use]
    pub fn launcher(mut self, launcher: impl Into<PathBuf>) -> Self {
        self.launcher = Some(launcher.into());
        self
    }

    /// Asked before the tool.
    #[must_use]
    pub const fn before(mut self) -> Self {
        self.runs_before = true;
        self
    }

    /// Asked after the tool.
    #[must_use]
    pub const fn after(mut self) -> Self {
        self.runs_after = true;
        self
    }

    async fn run(&self, input: &Value) -> Result<Finished, HookFault> {
        let fault = |why: String| HookFault(format!("{} {why}", self.program.display()));
        let led = self.launcher.is_some();
        let mut command = Command::new(self.launcher.as_ref().unwrap_or(&self.program));
        if led {
            command.arg(crate::lead::HEARD_OUT).arg(std::process::id().to_string()).arg(&self.program);
        }
        command.args(&self.args);
        child::shut_off(&mut command, led, &self.env, &self.set);
        let mut program = command.spawn().map_err(|e| fault(format!("cannot be started: {e}")))?;
        // Whatever way this ends, also by being dropped, nothing of the hook's process group is left.
        let group = child::Group::of(&program, led);
        let (stdin, stdout, stderr) = (program.stdin.take(), program.stdout.take(), program.stderr.take());
        let text = json::canonical(input);
        let work = async {
            let said = async {
                let said = tokio::join!(drain(stdout), drain(stderr));
                group.is_heard();
                said
            };
            let ((), (stdout, stderr), status) = tokio::join!(child::feed(stdin, &text), said, group.wait(&mut program));
            let status = status.map_err(|e| fault(format!("cannot be waited for: {e}")))?;
            Ok::<_, HookFault>(Finished { status, stdout: stdout.map_err(&fault)?, stderr: stderr.map_err(&fault)? })
        };
        tokio::time::timeout(self.timeout, work)
            .await
            .map_err(|_| fault(format!("gave no answer within {:?} and was stopped", self.timeout)))?
    }

    /// The exit code and what was printed, read as one answer.
    fn answer(&self, done: &Finished) -> Result<Option<Answer>, HookFault> {
        let fault = |why: String| HookFault(format!("{} {why}", self.program.display()));
        let said = crate::redact::without(&self.hidden, String::from_utf8_lossy(&done.stderr).trim());
        match done.status.code() {
            Some(0) => {}
            Some(2) => {
                let reason = if said.is_empty() { format!("refused by the hook `{}`", self.name) } else { cap(&said) };
                // A structured answer may say more than the exit code, never less.
                let answer = self.parse(&done.stdout).ok().flatten().unwrap_or_default();
                return Ok(Some(Answer { decision: Some("deny".to_owned()), reason: answer.reason.or(Some(reason)), ..answer }));
            }
            Some(code) => return Err(fault(format!("ended with exit code {code}{}", tail(&said)))),
            None => return Err(fault(format!("was killed{}", tail(&said)))),
        }
        self.parse(&done.stdout)
    }

    fn parse(&self, stdout: &[u8]) -> Result<Option<Answer>, HookFault> {
        if stdout.iter().all(u8::is_ascii_whitespace) {
            return Ok(None);
        }
        let bounds = Bounds { bytes: MOST_OUTPUT as usize, ..Bounds::default() };
        let fault = |why: String| {
            let why = crate::redact::without(&self.hidden, &why);
            HookFault(format!("{} printed something that is no answer: {why}", self.program.display()))
        };
        let value = json::parse(stdout, &bounds).map_err(|e| fault(e.to_string()))?;
        if !value.is_object() {
            return Err(fault("a JSON object is expected".to_owned()));
        }
        if value == json!({}) {
            return Ok(None);
        }
        let answer = Answer::deserialize(&value).map_err(|_| fault(misfit(&value)))?;
        if let Some(slip) = slip(&value) {
            return Err(fault(slip));
        }
        if answer.says_something() {
            let answer = answer.merged();
            let reason = answer.reason.as_deref().map(|reason| crate::redact::without(&self.hidden, reason));
            Ok(Some(Answer { reason, ..answer }))
        } else {
            Err(fault("it has no `decision`, `tool_input` or `tool_result`".to_owned()))
        }
    }
}

/// The fields of an answer, at its top and in `hookSpecificOutput`, and those of an event, which may be echoed.
const PLAIN: [&str; 10] = [
    "decision",
    "reason",
    "redirectTool",
    "category",
    "code",
    "tool_input",
    "updatedInput",
    "tool_result",
    "updatedResult",
    "hookSpecificOutput",
];
const SPECIFIC: [&str; 4] = ["permissionDecision", "permissionDecisionReason", "updatedInput", "updatedToolOutput"];
const EVENT: [&str; 7] = ["hook_event_name", "session_id", "principal", "agent", "tool_use_id", "tool_name", "latency_ms"];

/// What coding agents know beside these.
const OTHERS: [&str; 3] = ["hookEventName", "additionalContext", "updatedMCPToolOutput"];

/// A field that is one of an answer but for a slip: whoever meant to deny would have allowed.
fn slip(answer: &Value) -> Option<String> {
    let bare = |name: &str| name.replace(['_', '-', ' '], "").to_ascii_lowercase();
    let among = |of: Option<&Value>, known: &[&str], own: &[&str]| {
        let names = of.and_then(Value::as_object).into_iter().flat_map(|of| of.keys());
        names.filter(|name| !known.contains(&name.as_str()) && !own.contains(&name.as_str())).find_map(|name| {
            let meant = known.iter().find(|known| bare(known) == bare(name) || crate::suggest::is_nearly(known, name))?;
            // Whoever says it as it is meant says something else here.
            of?.get(meant).is_none().then_some(())?;
            Some(format!("`{}` is no field of an answer; did you mean `{meant}`?", shown(name)))
        })
    };
    let specific = answer.get("hookSpecificOutput");
    among(Some(answer), &PLAIN, &EVENT).or_else(|| among(specific, &SPECIFIC, &OTHERS))
}

/// What is wrong with an answer: the place, and what must stand there. What does stand there may be a secret, and is not said.
fn misfit(answer: &Value) -> String {
    let no_text = |of: &Value, key: &str| of.get(key).is_some_and(|value| !value.is_string() && !value.is_null());
    let specific = answer.get("hookSpecificOutput").unwrap_or(&Value::Null);
    let plain = ["decision", "reason", "redirectTool", "code"].into_iter().find(|key| no_text(answer, key));
    let special = ["permissionDecision", "permissionDecisionReason"].into_iter().find(|key| no_text(specific, key));
    if let Some(key) = plain.or(special) {
        return format!("`{key}` must be text");
    }
    if !specific.is_object() && !specific.is_null() {
        return "`hookSpecificOutput` must be an object".to_owned();
    }
    if answer.get("category").is_some_and(|category| Option::<Category>::deserialize(category).is_err()) {
        return "`category` must be TRANSIENT, VALIDATION, PERMISSION or BUSINESS".to_owned();
    }
    "it says its arguments or its result twice".to_owned()
}

struct Finished {
    status: ExitStatus,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

/// What a hook may print. Fields that it does not know, and that are not meant to be one of these, are left alone: the whole event may be
/// echoed back.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Answer {
    decision: Option<String>,
    reason: Option<String>,
    redirect_tool: Option<String>,
    category: Option<Category>,
    code: Option<String>,
    #[serde(rename = "tool_input", alias = "updatedInput")]
    input: Option<Value>,
    #[serde(rename = "tool_result", alias = "updatedResult")]
    result: Option<Value>,
    /// The form in which hooks of coding agents answer.
    hook_specific_output: Option<Specific>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Specific {
    permission_decision: Option<String>,
    permission_decision_reason: Option<String>,
    updated_input: Option<Value>,
    updated_tool_output: Option<Value>,
}

impl Answer {
    /// Both forms read as one; the stricter decision counts, and one that is unknown stays to be refused.
    fn merged(mut self) -> Self {
        let Some(specific) = self.hook_specific_output.take() else { return self };
        let strictness = |decision: &Option<String>| match decision.as_deref() {
            None => 0,
            Some("allow" | "approve") => 1,
            Some("ask") => 2,
            Some("deny" | "block") => 4,
            Some(_) => 3,
        };
        if strictness(&specific.permission_decision) > strictness(&self.decision) {
            self.decision = specific.permission_decision;
        }
        self.reason = specific.permission_decision_reason.or(self.reason);
        self.input = specific.updated_input.or(self.input);
        self.result = specific.updated_tool_output.or(self.result);
        self
    }

    /// An object that says nothing we know is no answer.
    fn says_something(&self) -> bool {
        let plain = self.decision.is_some() || self.input.is_some() || self.result.is_some();
        let specific = |s: &Specific| s.permission_decision.is_some() || s.updated_input.is_some() || s.updated_tool_output.is_some();
        plain || self.hook_specific_output.as_ref().is_some_and(specific)
    }
}

async fn drain(stream: Option<impl AsyncRead + Unpin>) -> Result<Vec<u8>, String> {
    let mut out = Vec::new();
    if let Some(stream) = stream {
        stream.take(MOST_OUTPUT + 1).read_to_end(&mut out).await.map_err(|e| format!("cannot be read: {e}"))?;
    }
    if out.len() as u64 > MOST_OUTPUT {
        return Err(format!("printed more than {MOST_OUTPUT} bytes"));
    }
    Ok(out)
}

/// At most so much of what it says; where that is cut, it shows.
fn cap(text: &str) -> String {
    crate::redact::head(text, 2_000)
}

fn tail(said: &str) -> String {
    if said.is_empty() { String::new() } else { format!(": {}", shown(said)) }
}

#[async_trait]
impl Hook for CommandHook {
    fn name(&self) -> &str {
        &self.name
    }

    fn matches(&self, tool: &str) -> bool {
        self.matcher.iter().any(|pattern| pattern.is_empty() || glob(pattern, tool))
    }

    fn timeout(&self) -> Duration {
        // Its own limit comes first and ends the whole process group.
        self.timeout.saturating_add(Duration::from_secs(1))
    }

    async fn before(&self, call: HookCall<'_>) -> Result<Before, HookFault> {
        // A hook that nobody said anything about is asked before: a guard must not be off by omission.
        if !self.runs_before && self.runs_after {
            return Ok(Before::default());
        }
        let event = json!({
            "hook_event_name": "PreToolUse", "session_id": call.key.session, "principal": call.key.principal, "agent": call.key.agent,
            "tool_use_id": call.call, "tool_name": call.tool, "tool_input": call.input,
        });
        let done = self.run(&event).await?;
        let Some(answer) = self.answer(&done)? else { return Ok(Before::default()) };
        let reason = answer.reason.map(|reason| cap(&reason));
        let decision = match answer.decision.as_deref() {
            None | Some("allow" | "approve") => HookDecision::Allow,
            Some("deny" | "block") => HookDecision::Deny(Denial {
                reason: reason.unwrap_or_else(|| format!("refused by the hook `{}`", self.name)),
                category: answer.category,
                code: answer.code,
                redirect: answer.redirect_tool,
            }),
            Some("ask") => HookDecision::Ask(reason.unwrap_or_else(|| format!("the hook `{}` asks", self.name))),
            Some(other) => {
                let other = crate::redact::without(&self.hidden, other);
                return Err(HookFault(format!("{} gave the unknown decision `{}`", self.program.display(), shown(&other))));
            }
        };
        Ok(Before { decision, input: answer.input })
    }

    async fn after(&self, call: HookCall<'_>, result: &Value, latency_ms: u64) -> Result<Option<Value>, HookFault> {
        if !self.runs_after {
            return Ok(None);
        }
        let event = json!({
            "hook_event_name": "PostToolUse", "session_id": call.key.session, "principal": call.key.principal, "agent": call.key.agent,
            "tool_use_id": call.call, "tool_name": call.tool, "tool_input": call.input, "tool_result": result, "latency_ms": latency_ms,
        });
        let done = self.run(&event).await?;
        if done.status.code() != Some(0) {
            return Err(HookFault(format!("{} failed after the tool: {}", self.program.display(), done.status)));
        }
        Ok(self.answer(&done)?.and_then(|answer| answer.result))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matchers() {
        let hook = |matcher: &str| CommandHook::new("h", "/bin/true").tools(matcher);
        assert!(hook("*").matches("x") && hook("").matches("x") && hook("a|b").matches("b") && hook("issue_*").matches("issue_refund"));
        assert!(!hook("a|b").matches("ab") && !hook("issue_*").matches("reissue_x") && hook("*_refund").matches("issue_refund"));
    }
}
