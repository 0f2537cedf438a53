//! Runs hooks as programs: JSON on standard input, and an exit code or JSON as the answer.

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

use super::hook_answer::{HookProgramAnswer, describe_invalid_answer, find_misspelled_field};
use super::{BeforeHookResult, Hook, HookCall, HookDecision, HookDenial, HookError};
use toolgate_json;
use toolgate_json::JsonBounds;
use toolgate_process::process_group;
use toolgate_text::{escape_for_display, matches_glob};

/// Maximum size of each output stream in bytes.
const MAX_HOOK_OUTPUT_BYTES: u64 = 1 << 20;
/// Environment variables that a hook inherits by default.
const INHERITED_ENV_VARS: &[&str] = &["PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "USER"];

/// A program that runs before tools, after them, or both.
///
/// ```
/// use toolgate::hook::CommandHook;
/// let hook = CommandHook::new("refund_policy", "/usr/local/bin/refund-policy")
///     .tools("process_refund|issue_*")
///     .before();
/// ```
#[derive(Clone)]
pub struct CommandHook {
    name: String,
    program: PathBuf,
    args: Vec<OsString>,
    matchers: Vec<String>,
    timeout: Duration,
    inherited_env: Vec<String>,
    set_env: BTreeMap<String, OsString>,
    secret_values: Vec<String>,
    launcher: Option<PathBuf>,
    runs_before: bool,
    runs_after: bool,
}

/// Hides the values of environment variables, which may be secret.
impl std::fmt::Debug for CommandHook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let set: Vec<&String> = self.set_env.keys().collect();
        let (name, program, args, tools) = (&self.name, &self.program, &self.args, &self.matchers);
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
    /// Creates a hook that runs before tools, unless [`after`](Self::after) is called.
    pub fn new(name: impl Into<String>, program: impl Into<PathBuf>) -> Self {
        Self {
            name: name.into(),
            program: program.into(),
            args: Vec::new(),
            matchers: vec!["*".to_owned()],
            timeout: Duration::from_secs(5),
            inherited_env: INHERITED_ENV_VARS.iter().map(|name| (*name).to_owned()).collect(),
            set_env: BTreeMap::new(),
            secret_values: Vec::new(),
            launcher: None,
            runs_before: false,
            runs_after: false,
        }
    }

    /// Adds a command-line argument. No shell interprets it.
    #[must_use]
    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// Sets the tools: names or patterns with `*`, separated by `|`.
    #[must_use]
    pub fn tools(mut self, matcher: &str) -> Self {
        self.matchers = matcher.split('|').map(|part| part.trim().to_owned()).collect();
        self
    }

    /// Returns the names and patterns of the tools.
    pub fn matchers(&self) -> &[String] {
        &self.matchers
    }

    /// Sets the timeout.
    #[must_use]
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Inherits one more environment variable.
    #[must_use]
    pub fn inherit(mut self, variable: &str) -> Self {
        self.secret_values.extend(std::env::var(variable));
        self.inherited_env.push(variable.to_owned());
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, variable: &str, value: impl Into<OsString>) -> Self {
        self.set_env.insert(variable.to_owned(), value.into());
        self
    }

    /// Removes a value from all messages of the hook.
    #[must_use]
    pub fn redact_value(mut self, value: impl Into<String>) -> Self {
        self.secret_values.push(value.into());
        self
    }

    /// Sets the program that supervises the hook.
    ///
    /// The program must call [`toolgate_process::sandbox::run_as_helper_if_requested`], as
    /// `toolgate` does. It kills the hook with all of its children, even if this process is killed.
    /// Without a launcher, this process kills the process group of the hook.
    #[must_use]
    pub fn launcher(mut self, launcher: impl Into<PathBuf>) -> Self {
        self.launcher = Some(launcher.into());
        self
    }

    /// Runs the hook before the tool.
    #[must_use]
    pub const fn before(mut self) -> Self {
        self.runs_before = true;
        self
    }

    /// Runs the hook after the tool.
    #[must_use]
    pub const fn after(mut self) -> Self {
        self.runs_after = true;
        self
    }

    async fn run_program(&self, input: &Value) -> Result<HookProgramOutput, HookError> {
        let fault = |why: String| HookError(format!("{} {why}", self.program.display()));
        let has_launcher = self.launcher.is_some();
        let mut command = Command::new(self.launcher.as_ref().unwrap_or(&self.program));
        if has_launcher {
            command
                .arg(toolgate_process::supervisor::SUPERVISE_UNTIL_EOF_ARG)
                .arg(std::process::id().to_string())
                .arg(&self.program);
        }
        command.args(&self.args);
        process_group::configure_isolation(
            &mut command,
            has_launcher,
            &self.inherited_env,
            &self.set_env,
        );
        let mut program = command.spawn().map_err(|e| fault(format!("cannot be started: {e}")))?;
        // Kills the process group of the hook in every case, also if this future is dropped.
        let group = process_group::ProcessGroup::new(&program, has_launcher);
        let (stdin, stdout, stderr) =
            (program.stdin.take(), program.stdout.take(), program.stderr.take());
        let text = toolgate_json::to_canonical_bytes(input);
        let work = async {
            let output = async {
                let output = tokio::join!(read_limited(stdout), read_limited(stderr));
                group.notify_output_drained();
                output
            };
            let ((), (stdout, stderr), status) = tokio::join!(
                process_group::write_stdin(stdin, &text),
                output,
                group.wait(&mut program)
            );
            let status = status.map_err(|e| fault(format!("cannot be waited for: {e}")))?;
            Ok::<_, HookError>(HookProgramOutput {
                status,
                stdout: stdout.map_err(&fault)?,
                stderr: stderr.map_err(&fault)?,
            })
        };
        tokio::time::timeout(self.timeout, work).await.map_err(|_| {
            fault(format!("gave no answer within {:?} and was stopped", self.timeout))
        })?
    }

    /// Combines the exit code and the output into one answer.
    fn read_answer(
        &self,
        output: &HookProgramOutput,
    ) -> Result<Option<HookProgramAnswer>, HookError> {
        let fault = |why: String| HookError(format!("{} {why}", self.program.display()));
        let message = crate::redact::remove_values(
            &self.secret_values,
            String::from_utf8_lossy(&output.stderr).trim(),
        );
        match output.status.code() {
            Some(0) => {}
            Some(2) => {
                let reason = if message.is_empty() {
                    format!("denied by the hook `{}`", self.name)
                } else {
                    limit_message(&message)
                };
                // A structured answer may add to the exit code but never weaken it.
                let answer = self.parse_answer(&output.stdout).ok().flatten().unwrap_or_default();
                return Ok(Some(HookProgramAnswer {
                    decision: Some("deny".to_owned()),
                    reason: answer.reason.or(Some(reason)),
                    ..answer
                }));
            }
            Some(code) => {
                return Err(fault(format!(
                    "ended with exit code {code}{}",
                    message_suffix(&message)
                )));
            }
            None => return Err(fault(format!("was killed{}", message_suffix(&message)))),
        }
        self.parse_answer(&output.stdout)
    }

    fn parse_answer(&self, stdout: &[u8]) -> Result<Option<HookProgramAnswer>, HookError> {
        if stdout.iter().all(u8::is_ascii_whitespace) {
            return Ok(None);
        }
        let bounds = JsonBounds { bytes: MAX_HOOK_OUTPUT_BYTES as usize, ..JsonBounds::default() };
        let fault = |why: String| {
            let why = crate::redact::remove_values(&self.secret_values, &why);
            HookError(format!("{} printed an invalid answer: {why}", self.program.display()))
        };
        let value = toolgate_json::parse(stdout, &bounds).map_err(|e| fault(e.to_string()))?;
        if !value.is_object() {
            return Err(fault("expected a JSON object".to_owned()));
        }
        if value == json!({}) {
            return Ok(None);
        }
        let answer = HookProgramAnswer::deserialize(&value)
            .map_err(|_| fault(describe_invalid_answer(&value)))?;
        if let Some(slip) = find_misspelled_field(&value) {
            return Err(fault(slip));
        }
        if answer.has_known_field() {
            let answer = answer.merge_formats();
            let reason = answer
                .reason
                .as_deref()
                .map(|reason| crate::redact::remove_values(&self.secret_values, reason));
            Ok(Some(HookProgramAnswer { reason, ..answer }))
        } else {
            Err(fault("missing `decision`, `tool_input` or `tool_result`".to_owned()))
        }
    }
}

struct HookProgramOutput {
    status: ExitStatus,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

async fn read_limited(stream: Option<impl AsyncRead + Unpin>) -> Result<Vec<u8>, String> {
    let mut out = Vec::new();
    if let Some(stream) = stream {
        stream
            .take(MAX_HOOK_OUTPUT_BYTES + 1)
            .read_to_end(&mut out)
            .await
            .map_err(|e| format!("cannot be read: {e}"))?;
    }
    if out.len() as u64 > MAX_HOOK_OUTPUT_BYTES {
        return Err(format!("printed more than {MAX_HOOK_OUTPUT_BYTES} bytes"));
    }
    Ok(out)
}

/// Limits the length of a message and marks the cut.
fn limit_message(text: &str) -> String {
    crate::redact::truncate_chars(text, 2_000)
}

fn message_suffix(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(": {}", escape_for_display(message)) }
}

#[async_trait]
impl Hook for CommandHook {
    fn name(&self) -> &str {
        &self.name
    }

    fn matches(&self, tool: &str) -> bool {
        self.matchers.iter().any(|pattern| pattern.is_empty() || matches_glob(pattern, tool))
    }

    fn timeout(&self) -> Duration {
        // The hook's own timeout must end first, because it kills the process group.
        self.timeout.saturating_add(Duration::from_secs(1))
    }

    async fn before(&self, call: HookCall<'_>) -> Result<BeforeHookResult, HookError> {
        // A hook with neither setting runs before the tool, so that an incomplete setting does not
        // disable a guard.
        if !self.runs_before && self.runs_after {
            return Ok(BeforeHookResult::default());
        }
        let event = json!({
            "hook_event_name": "PreToolUse", "session_id": call.key.session, "principal": call.key.principal, "agent": call.key.agent,
            "tool_use_id": call.call, "tool_name": call.tool, "tool_input": call.input,
        });
        let output = self.run_program(&event).await?;
        let Some(answer) = self.read_answer(&output)? else {
            return Ok(BeforeHookResult::default());
        };
        let reason = answer.reason.map(|reason| limit_message(&reason));
        let decision = match answer.decision.as_deref() {
            None | Some("allow" | "approve") => HookDecision::Allow,
            Some("deny" | "block") => HookDecision::Deny(HookDenial {
                reason: reason.unwrap_or_else(|| format!("denied by the hook `{}`", self.name)),
                category: answer.category,
                code: answer.code,
                redirect: answer.redirect_tool,
            }),
            Some("ask") => HookDecision::Ask(
                reason.unwrap_or_else(|| format!("the hook `{}` requests approval", self.name)),
            ),
            Some(other) => {
                let other = crate::redact::remove_values(&self.secret_values, other);
                return Err(HookError(format!(
                    "{} gave the unknown decision `{}`",
                    self.program.display(),
                    escape_for_display(&other)
                )));
            }
        };
        Ok(BeforeHookResult { decision, input: answer.input })
    }

    async fn after(
        &self,
        call: HookCall<'_>,
        result: &Value,
        latency_ms: u64,
    ) -> Result<Option<Value>, HookError> {
        if !self.runs_after {
            return Ok(None);
        }
        let event = json!({
            "hook_event_name": "PostToolUse", "session_id": call.key.session, "principal": call.key.principal, "agent": call.key.agent,
            "tool_use_id": call.call, "tool_name": call.tool, "tool_input": call.input, "tool_result": result, "latency_ms": latency_ms,
        });
        let output = self.run_program(&event).await?;
        if output.status.code() != Some(0) {
            return Err(HookError(format!(
                "{} failed after the tool: {}",
                self.program.display(),
                output.status
            )));
        }
        Ok(self.read_answer(&output)?.and_then(|answer| answer.result))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matchers() {
        let hook = |matcher: &str| CommandHook::new("h", "/bin/true").tools(matcher);
        assert!(
            hook("*").matches("x")
                && hook("").matches("x")
                && hook("a|b").matches("b")
                && hook("issue_*").matches("issue_refund")
        );
        assert!(
            !hook("a|b").matches("ab")
                && !hook("issue_*").matches("reissue_x")
                && hook("*_refund").matches("issue_refund")
        );
    }
}
