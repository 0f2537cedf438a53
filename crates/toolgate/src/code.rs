//! Every code that toolgate itself gives, with its category and whether the identical call may succeed later.

use crate::error::Category::{self, Business, Permission, Transient, Validation};

/// One line of the table of codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code {
    /// The code as a model reads it.
    pub name: &'static str,
    /// Its category.
    pub category: Category,
    /// Whether the identical call may succeed later (never, once an effect may have happened).
    pub retryable: bool,
    /// What it means.
    pub meaning: &'static str,
}

macro_rules! codes {
    ($($constant:ident $name:literal $category:ident $retryable:literal $meaning:literal;)*) => {
        $(#[doc = $meaning] pub const $constant: &str = $name;)*
        /// The table.
        pub const ALL: &[Code] = &[$(Code { name: $name, category: $category, retryable: $retryable, meaning: $meaning },)*];
    };
}

codes! {
    FORBIDDEN "forbidden" Permission false "The principal may not act as this agent.";
    PAUSED "paused" Permission false "An operator has paused the agent, tool, principal or session.";
    PAYLOAD_TOO_LARGE "payload_too_large" Validation false "The arguments are too large or too deeply nested.";
    INVALID_REQUEST "invalid_request" Validation false "The request that the call came in cannot be understood.";
    UNKNOWN_TOOL "unknown_tool" Validation false "The agent has no such tool.";
    INVALID_ARGUMENTS "invalid_arguments" Validation false "The arguments do not fit the tool's schema, or a limit cannot count them.";
    NO_HANDLER "no_handler" Business false "The client runs this tool itself; it can only be admitted and reported.";
    IN_PROGRESS "in_progress" Transient true "The same call is running now.";
    PENDING_RECONCILIATION "pending_reconciliation" Transient false "An earlier run of this call may or may not have happened; a person or a read tool must settle it.";
    KEY_REUSED "key_reused" Validation false "The idempotency key was used before with other arguments.";
    DUPLICATE_CALL "duplicate_call" Business false "The call was settled before and its result cannot be handed back here.";
    LOOP_DETECTED "loop_detected" Business false "The same call was made again and again without progress.";
    BUDGET_EXHAUSTED "budget_exhausted" Business false "A budget of calls, tokens or money is used up.";
    DEADLINE_EXCEEDED "deadline_exceeded" Business false "The deadline of the call or session has passed.";
    RATE_LIMITED "rate_limited" Transient true "Too many calls in a short time.";
    HOOK_DENIED "hook_denied" Permission false "A hook refused the call.";
    HOOK_FAILED "hook_failed" Permission false "A hook crashed, hung, answered junk or is missing.";
    POLICY_FAULT "policy_fault" Permission false "A policy could not be evaluated, so the call was refused.";
    PREREQUISITE_MISSING "prerequisite_missing" Business false "Another tool must have succeeded first.";
    READ_BEFORE_WRITE "read_before_write" Business false "An existing file must be read before it is overwritten.";
    STALE_READ "stale_read" Business false "The file has changed since it was read.";
    UNTRUSTED_VALUE "untrusted_value" Permission false "A value came from an untrusted result, or from no known source.";
    APPROVAL_REQUIRED "approval_required" Business false "A person must approve the call first.";
    APPROVAL_DENIED "approval_denied" Business false "A person refused the call.";
    BUSY "busy" Transient true "Another call holds the session or file.";
    CONFLICT "conflict" Transient true "Another call changed the session first; nothing of this one was kept.";
    TIMEOUT "timeout" Transient true "The tool did not answer in time.";
    HEARTBEAT_MISSED "heartbeat_missed" Transient true "The tool gave no sign of life in time.";
    CANCELLED "cancelled" Transient true "The call was cancelled or its caller hung up.";
    TOOL_PANICKED "tool_panicked" Business false "The tool has a fault and crashed.";
    TOOL_FAILED "tool_failed" Business false "The tool reported a failure.";
    INVALID_RESULT "invalid_result" Business false "The tool's result could not be brought into its declared shape.";
    STORE_UNAVAILABLE "store_unavailable" Transient true "The store could not record the call; its row is spooled.";
    INTERNAL_FAULT "internal_fault" Business false "toolgate itself failed; the call did not complete.";
    NOT_ADMITTED "not_admitted" Permission false "A client reported a run that was never admitted, or was reported before.";
    NOT_AS_ADMITTED "not_as_admitted" Permission false "A client ran something other than what was admitted.";
    ABANDONED "abandoned" Transient false "The client was admitted and never reported what happened.";
    UPSTREAM_UNAVAILABLE "upstream_unavailable" Transient true "The service behind the tool cannot be reached or is overloaded.";
    UPSTREAM_FORBIDDEN "upstream_forbidden" Permission false "The service behind the tool refused access.";
    UPSTREAM_REJECTED "upstream_rejected" Business false "The service behind the tool refused the request by its own rules.";
    UPSTREAM_INVALID "upstream_invalid" Validation false "The service behind the tool could not make sense of the request.";
    DEFINITION_CHANGED "definition_changed" Permission false "The tool is not what it was when it was accepted; a person must look at it.";
    HOST_FORBIDDEN "host_forbidden" Permission false "The request would go to a host or an address that the tool may not reach.";
    UNKNOWN_HANDLE "unknown_handle" Validation false "No stored output has this handle.";
    INVALID_EXPRESSION "invalid_expression" Validation false "The expression cannot be calculated.";
    INVALID_JSON "invalid_json" Validation false "The text is not JSON.";
    INVALID_PATH "invalid_path" Validation false "The path cannot name a file here.";
    PATH_FORBIDDEN "path_forbidden" Permission false "The path leads outside the directory of the agent.";
    NO_FILE_SYSTEM "no_file_system" Permission false "The agent has no file system.";
    FILE_TOO_LARGE "file_too_large" Business false "The file is larger than the file system takes.";
}

/// The line of the table for a code of toolgate's own.
#[must_use]
pub fn find(name: &str) -> Option<&'static Code> {
    ALL.iter().find(|code| code.name == name)
}
