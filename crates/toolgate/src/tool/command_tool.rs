//! Runs programs as tools: in a sandbox, without a shell.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;

use async_trait::async_trait;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt};

use super::template::{FilledPart, Template};
use super::{Failure, Handler, strip_reserved_fields};
use crate::call::CheckedArguments;
use crate::call::error::CallEffects;
use crate::call::error_code;
use crate::pipeline::{OUTPUT_BOUNDS, Permit};
use crate::tool::context::ToolContext;
use toolgate_json;
use toolgate_json::Pointer;
use toolgate_process::process_group;
use toolgate_process::sandbox::Sandbox;
use toolgate_process::supervisor::NOT_STARTED_SIGNAL;

/// Environment variables that a program inherits by default.
const INHERITED_ENV_VARS: [&str; 5] = ["PATH", "LANG", "LC_ALL", "TZ", "TMPDIR"];

/// A program as a tool.
///
/// Its command-line arguments may contain arguments of the call, as in `--order={/order_id}`. Its
/// standard input is the arguments as JSON. Its standard output is the result, as JSON or text.
///
/// ```
/// use serde_json::json;
/// use toolgate::{CommandTool, Effect, Tool};
/// let program = CommandTool::new("/usr/bin/lookup-order").arg("--id").arg("{/order_id}");
/// let schema = json!({
///     "type": "object",
///     "properties": {"order_id": {"type": "string"}},
///     "required": ["order_id"],
/// });
/// let program = std::sync::Arc::new(program);
/// let tool = Tool::with_handler("lookup_order", "Look up an order.", schema, program)
///     .effect(Effect::Read);
/// ```
#[derive(Clone)]
pub struct CommandTool {
    program: PathBuf,
    args: Vec<Template>,
    env: BTreeMap<String, OsString>,
    secret_values: Vec<String>,
    inherit: Vec<String>,
    sandbox: Sandbox,
    launcher: Option<PathBuf>,
    max_output_bytes: u64,
}

/// Hides the values of environment variables, which may be secret.
impl std::fmt::Debug for CommandTool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let set: Vec<&String> = self.env.keys().collect();
        f.debug_struct("CommandTool")
            .field("program", &self.program)
            .field("args", &self.args)
            .field("env", &set)
            .finish_non_exhaustive()
    }
}

impl CommandTool {
    /// Creates a tool for a program. A name without a path is searched in `PATH`.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Self {
            program: program.into(),
            args: Vec::new(),
            env: BTreeMap::new(),
            secret_values: Vec::new(),
            inherit: INHERITED_ENV_VARS.iter().map(|name| (*name).to_owned()).collect(),
            sandbox: Sandbox::default(),
            launcher: None,
            max_output_bytes: 1 << 20,
        }
    }

    /// Adds a command-line argument. `{/path}` is replaced by the text of that argument of the
    /// call.
    #[must_use]
    pub fn arg(mut self, word: &str) -> Self {
        self.args.push(Template::new(word));
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, variable: &str, value: impl Into<OsString>) -> Self {
        self.env.insert(variable.to_owned(), value.into());
        self
    }

    /// Removes a value from error messages.
    #[must_use]
    pub fn redact_value(mut self, value: impl Into<String>) -> Self {
        self.secret_values.push(value.into());
        self
    }

    /// Inherits one more environment variable.
    #[must_use]
    pub fn inherit(mut self, variable: &str) -> Self {
        self.secret_values.extend(std::env::var(variable));
        self.inherit.push(variable.to_owned());
        self
    }

    /// Sets the sandbox.
    #[must_use]
    pub fn sandbox(mut self, sandbox: Sandbox) -> Self {
        self.sandbox = sandbox;
        self
    }

    /// Sets the program that enters the sandbox. The default is the running program.
    ///
    /// The program must call [`toolgate_process::sandbox::run_as_helper_if_requested`], as
    /// `toolgate` does.
    #[must_use]
    pub fn launcher(mut self, launcher: impl Into<PathBuf>) -> Self {
        self.launcher = Some(launcher.into());
        self
    }

    /// Iterates over the arguments of the call that the command line contains.
    pub fn argument_paths(&self) -> impl Iterator<Item = &Pointer> {
        self.args.iter().flat_map(Template::argument_paths)
    }

    fn fill_argument(template: &Template, arguments: &Value) -> Result<OsString, Failure> {
        let refuse = |message: String| {
            Failure::from_code(error_code::INVALID_ARGUMENTS, message).effects(CallEffects::None)
        };
        let mut word = String::new();
        for part in
            template.fill(arguments).map_err(|path| refuse(format!("`{path}` is required")))?
        {
            match part {
                FilledPart::Text(text) => word.push_str(text),
                // A value must not become a flag.
                FilledPart::Argument(path, text) if word.is_empty() && text.starts_with('-') => {
                    return Err(refuse(format!("`{path}` must not begin with `-`")));
                }
                FilledPart::Argument(path, text) if text.contains('\0') => {
                    return Err(refuse(format!("`{path}` must not contain a NUL character")));
                }
                FilledPart::Argument(_, text) => word.push_str(&text),
            }
        }
        Ok(word.into())
    }
}

#[async_trait]
impl Handler for CommandTool {
    async fn run(
        &self,
        _: &Permit,
        _: ToolContext,
        arguments: &CheckedArguments,
    ) -> Result<Value, Failure> {
        let not_begun = |message: String| {
            Failure::from_code(error_code::INTERNAL_FAULT, message).effects(CallEffects::None)
        };
        let words: Vec<OsString> = self
            .args
            .iter()
            .map(|word| Self::fill_argument(word, arguments.value()))
            .collect::<Result<_, _>>()?;
        let words = self
            .sandbox
            .command_line(self.program.clone().into(), words)
            .map_err(|error| not_begun(error.to_string()))?;
        let launcher = match &self.launcher {
            Some(launcher) => launcher.clone(),
            None => std::env::current_exe()
                .map_err(|error| not_begun(format!("cannot find the running program: {error}")))?,
        };
        let mut command = tokio::process::Command::new(launcher);
        command.args(words);
        process_group::configure_isolation(&mut command, true, &self.inherit, &self.env);
        let mut program = command.spawn().map_err(|error| {
            let message = format!("cannot start the program: {error}");
            // Other errors may occur after the program has started.
            let never = matches!(
                error.kind(),
                ErrorKind::NotFound | ErrorKind::PermissionDenied | ErrorKind::ArgumentListTooLong
            );
            if never {
                not_begun(message)
            } else {
                Failure::from_code(error_code::INTERNAL_FAULT, message)
                    .effects(CallEffects::Unknown)
            }
        })?;
        // Kills the process group in every case, also if this future is dropped.
        let group = process_group::ProcessGroup::new(&program, true);
        let (stdin, stdout, stderr) =
            (program.stdin.take(), program.stdout.take(), program.stderr.take());
        let output = async {
            let output =
                tokio::join!(drain(stdout, self.max_output_bytes), drain(stderr, 64 << 10));
            group.notify_output_drained();
            output
        };
        let ((), (out, err), status) = tokio::join!(
            process_group::write_stdin(stdin, arguments.bytes()),
            output,
            group.wait(&mut program)
        );
        let status = status.map_err(|error| {
            Failure::business("command_failed", format!("cannot wait for the program: {error}"))
        })?;
        let message =
            crate::redact::remove_values(&self.secret_values, &String::from_utf8_lossy(&err.0));
        let message = crate::redact::truncate_chars(message.trim(), 2_000);
        match status.code() {
            Some(0) => {}
            Some(code) => {
                return Err(Failure::business(
                    "command_failed",
                    format!("the program ended with exit code {code}: {message}"),
                ));
            }
            None if status.signal() == Some(NOT_STARTED_SIGNAL.as_raw()) => {
                return Err(not_begun(message));
            }
            None => {
                return Err(Failure::business(
                    "command_failed",
                    format!("a signal ended the program ({status}): {message}"),
                ));
            }
        }
        if out.1 {
            return Err(Failure::business(
                "command_failed",
                format!("the program printed more than {} bytes", self.max_output_bytes),
            ));
        }
        // Output that is not JSON is text.
        let text = || Value::String(String::from_utf8_lossy(&out.0).trim_end().to_owned());
        let value = toolgate_json::parse(&out.0, &OUTPUT_BOUNDS).unwrap_or_else(|_| text());
        Ok(strip_reserved_fields(&value).unwrap_or(value))
    }
}

/// Reads at most `max_bytes` bytes, and reports whether the stream had more.
async fn drain(stream: Option<impl AsyncRead + Unpin>, max_bytes: u64) -> (Vec<u8>, bool) {
    let mut out = Vec::new();
    let Some(mut stream) = stream else { return (out, false) };
    let _ = (&mut stream).take(max_bytes).read_to_end(&mut out).await;
    // Read and discard the rest, so that the program does not block on a full pipe.
    let rest = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await.unwrap_or(0);
    (out, rest > 0)
}
