//! Defines toolgate's own error codes with category and retryability.

use crate::call::error::ErrorCategory;
use crate::call::error::ErrorCategory::{Business, Permission, Transient, Validation};

/// One entry of the code table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ErrorCode {
    /// The code.
    pub name: &'static str,
    /// The category.
    pub category: ErrorCategory,
    /// Whether the identical call may succeed later. Never true after possible effects.
    pub retryable: bool,
    /// The meaning.
    pub meaning: &'static str,
}

macro_rules! codes {
    ($($constant:ident $name:literal $category:ident $retryable:literal $meaning:literal;)*) => {
        $(#[doc = $meaning] pub const $constant: &str = $name;)*
        /// The table.
        pub const ALL: &[ErrorCode] = &[$(ErrorCode { name: $name, category: $category, retryable: $retryable, meaning: $meaning },)*];
    };
}

codes! {
    FORBIDDEN "forbidden" Permission false "The principal may not act as this agent.";
    PAUSED "paused" Permission false "An operator has paused the agent, tool, principal or session.";
    PAYLOAD_TOO_LARGE "payload_too_large" Validation false "The arguments are too large or too deeply nested.";
    INVALID_REQUEST "invalid_request" Validation false "The request of the call cannot be parsed.";
    UNKNOWN_TOOL "unknown_tool" Validation false "The agent has no such tool.";
    INVALID_ARGUMENTS "invalid_arguments" Validation false "The arguments do not fit the tool's schema, or a limit cannot count them.";
    NO_HANDLER "no_handler" Business false "The client runs this tool itself, so its calls can only be admitted and reported.";
    IN_PROGRESS "in_progress" Transient true "The same call is running now.";
    PENDING_RECONCILIATION "pending_reconciliation" Transient false "The outcome of an earlier run of this call is unknown; a person or a read tool must settle it.";
    KEY_REUSED "key_reused" Validation false "The idempotency key was used before with other arguments.";
    DUPLICATE_CALL "duplicate_call" Business false "The call has ended before, and its result cannot be replayed here.";
    LOOP_DETECTED "loop_detected" Business false "The same call was repeated without progress.";
    BUDGET_EXHAUSTED "budget_exhausted" Business false "A budget of calls, tokens or money is exhausted.";
    DEADLINE_EXCEEDED "deadline_exceeded" Business false "The deadline of the call or session has passed.";
    RATE_LIMITED "rate_limited" Transient true "Too many calls in a short time.";
    HOOK_DENIED "hook_denied" Permission false "A hook denied the call.";
    HOOK_FAILED "hook_failed" Permission false "A hook crashed, timed out, answered invalid data or is missing.";
    POLICY_FAULT "policy_fault" Permission false "A policy could not be evaluated, so the call was denied.";
    PREREQUISITE_MISSING "prerequisite_missing" Business false "Another tool must have succeeded first.";
    READ_BEFORE_WRITE "read_before_write" Business false "An existing file must be read before it is overwritten.";
    STALE_READ "stale_read" Business false "The file has changed since it was read.";
    UNTRUSTED_VALUE "untrusted_value" Permission false "A value came from an untrusted result, or from no known source.";
    APPROVAL_REQUIRED "approval_required" Business false "A person must approve the call first.";
    APPROVAL_DENIED "approval_denied" Business false "A person denied the call.";
    BUSY "busy" Transient true "Another call has locked the session or file.";
    CONFLICT "conflict" Transient true "Another call changed the session first; the changes of this one were dropped.";
    TIMEOUT "timeout" Transient true "The tool did not answer in time.";
    HEARTBEAT_MISSED "heartbeat_missed" Transient true "The tool sent no heartbeat in time.";
    CANCELLED "cancelled" Transient true "The call was cancelled or its caller disconnected.";
    TOOL_PANICKED "tool_panicked" Business false "The tool crashed because of a bug.";
    TOOL_FAILED "tool_failed" Business false "The tool reported a failure.";
    INVALID_RESULT "invalid_result" Business false "The tool's result does not match its declaration.";
    STORE_UNAVAILABLE "store_unavailable" Transient true "The store could not record the call; its row is spooled.";
    INTERNAL_FAULT "internal_fault" Business false "Toolgate itself failed; the call did not complete.";
    NOT_ADMITTED "not_admitted" Permission false "A client reported a run that was never admitted, or was reported before.";
    NOT_AS_ADMITTED "not_as_admitted" Permission false "A client ran other arguments than those that were admitted.";
    ABANDONED "abandoned" Transient false "The call was admitted, but its result was never reported.";
    UPSTREAM_UNAVAILABLE "upstream_unavailable" Transient true "The upstream cannot be reached or is overloaded.";
    UPSTREAM_FORBIDDEN "upstream_forbidden" Permission false "The upstream denied access.";
    UPSTREAM_REJECTED "upstream_rejected" Business false "The upstream rejected the request by its own rules.";
    UPSTREAM_INVALID "upstream_invalid" Validation false "The upstream could not parse the request.";
    DEFINITION_CHANGED "definition_changed" Permission false "The tool has changed since it was accepted; a person must review it.";
    HOST_FORBIDDEN "host_forbidden" Permission false "The request would go to a host or an address that the tool may not reach.";
    UNKNOWN_HANDLE "unknown_handle" Validation false "No stored output has this handle.";
    INVALID_EXPRESSION "invalid_expression" Validation false "The expression cannot be calculated.";
    INVALID_JSON "invalid_json" Validation false "The text is not valid JSON.";
    INVALID_PATH "invalid_path" Validation false "The path cannot name a file here.";
    PATH_FORBIDDEN "path_forbidden" Permission false "The path is outside the directory of the agent.";
    NO_FILE_SYSTEM "no_file_system" Permission false "The agent has no file system.";
    FILE_TOO_LARGE "file_too_large" Business false "The file is larger than the file system allows.";
}

/// Finds the table entry of one of toolgate's own codes.
#[must_use]
pub fn find(name: &str) -> Option<&'static ErrorCode> {
    ALL.iter().find(|code| code.name == name)
}
