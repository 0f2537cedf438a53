//! Gate 3: are the arguments strict JSON that fits the schema of the tool?

use std::sync::Arc;

use crate::agent::ToolEntry;
use crate::call::error::ToolError;
use crate::call::error_code;
use crate::call::{Arguments, CheckedArguments};
use crate::ledger::row::Gate;
use crate::pipeline::Toolgate;
use crate::pipeline::admission::ResolvedCall;
use crate::pipeline::call_state::CallState;
use crate::pipeline::gates::approval::handler_refusal;
use crate::pipeline::rejection::Rejection;
use toolgate_json::Pointer;

/// Parses the arguments as strict JSON, canonicalizes them and checks the schema.
pub(crate) fn run(
    gate: &Toolgate,
    resolved: &ResolvedCall<'_>,
    call_state: &mut CallState,
) -> Result<CheckedArguments, Rejection> {
    call_state.enter_gate(Gate::Validate);
    let ResolvedCall { call, agent, tool, approval, .. } = resolved;
    let refuse = |message: String| {
        Rejection::new(ToolError::from_code(
            error_code::INVALID_ARGUMENTS,
            format!("{}: {message}", tool.spec.name),
        ))
    };
    let value = match (&call.arguments, approval) {
        (_, Some(approval)) => approval.arguments.clone(),
        (Arguments::Text(text), _) if text.iter().all(u8::is_ascii_whitespace) => {
            serde_json::json!({})
        }
        (Arguments::Text(text), _) => {
            let read = if tool.secrets.is_empty() {
                toolgate_json::parse
            } else {
                toolgate_json::parse_with_hidden_keys
            };
            read(text, &agent.bounds)
                .map_err(|e| refuse(format!("the arguments are not valid JSON: {e}")))?
        }
        (Arguments::Value(value), _) => {
            let mut value = value.clone();
            toolgate_json::canonicalize_numbers(&mut value, &mut Pointer::default()).map_err(
                |(at, why)| {
                    refuse(if tool.secrets.is_empty() { format!("{why} (at `{at}`)") } else { why })
                },
            )?;
            value
        }
    };
    check_input_schema(gate, tool, value, call_state)
}

/// Checks arguments against the schema. Also used after a hook has rewritten them.
pub(crate) fn check_input_schema(
    gate: &Toolgate,
    tool: &ToolEntry,
    mut value: serde_json::Value,
    call_state: &mut CallState,
) -> Result<CheckedArguments, Rejection> {
    // The changed definition does not say which arguments are secret, so all of them are
    // masked.
    if tool.spec.veiled {
        call_state.arguments = Arc::new(gate.0.redactor.mark(&value));
        let quarantined = || {
            ToolError::from_code(
                error_code::DEFINITION_CHANGED,
                format!("`{}` is quarantined because its definition changed", tool.spec.name),
            )
            .with_effects(crate::CallEffects::None)
        };
        return Err(handler_refusal(tool).unwrap_or_else(|| quarantined().into()));
    }
    let checked = match &tool.input {
        Some(schema) => schema.validate(&tool.spec.name, &mut value),
        None => Ok(()),
    };
    match checked {
        Ok(()) => {
            let checked_arguments = CheckedArguments::new(&tool.spec.name, value);
            // The digest is always keyed. Which arguments are secret may change, but a call
            // must keep its digest.
            let checked_arguments =
                checked_arguments.with_digest(|digest| gate.0.redactor.key_digest(digest));
            call_state.digest = Some(checked_arguments.digest());
            call_state.arguments =
                gate.0.redactor.redact_shared(checked_arguments.shared_value(), &tool.secrets);
            Ok(checked_arguments)
        }
        Err(invalid) => {
            // A misspelled argument name may carry a secret. If the tool has secrets, mask all
            // invalid arguments.
            call_state.arguments = if tool.secrets.is_empty() {
                Arc::new(value)
            } else {
                Arc::new(gate.0.redactor.mark(&value))
            };
            let mut error = ToolError::from_code(error_code::INVALID_ARGUMENTS, invalid.message);
            error.errors = invalid.errors;
            Err(error.into())
        }
    }
}
