//! Defines the permit, without which no tool runs.

use std::sync::Arc;

use crate::agent::ToolEntry;
use crate::call::error::{CallEffects, ToolError};
use crate::call::{CallId, CheckedArguments};
use crate::files::FileExpectation;
use crate::limits::Charge;
use toolgate_json::Digest;

/// Permits one run of one tool with exactly these arguments.
///
/// Only the policy gate creates a permit, so no code can run a tool without a decision.
///
/// A handler gets a reference. Code outside this module cannot build a permit from another:
///
/// ```compile_fail
/// fn forged(judged: toolgate::CheckedArguments, other: toolgate::Permit) -> toolgate::Permit {
///     toolgate::Permit { arguments: judged, ..other }
/// }
/// ```
///
/// nor keep one for a second run:
///
/// ```compile_fail
/// fn kept(lent: &toolgate::Permit) -> toolgate::Permit {
///     lent.clone()
/// }
/// ```
///
/// but any code may read a permit:
///
/// ```
/// fn seen(lent: &toolgate::Permit) -> (toolgate::CallId, toolgate::CheckedArguments) {
///     (lent.call_id(), lent.arguments().clone())
/// }
/// ```
#[derive(Debug)]
pub struct Permit {
    pub(super) call: CallId,
    pub(super) arguments: CheckedArguments,
    pub(super) definition: Digest,
    /// Charges, each with the rule that it comes from.
    pub(super) charges: Vec<(String, Charge, ToolError)>,
    /// Charges of rules in observe mode. They count, but never reject a call.
    pub(super) observed_charges: Vec<(String, Charge, ToolError)>,
    pub(super) file_expectations: Vec<FileExpectation>,
    pub(super) tool: ToolRef,
}

/// Prints only the tool's name in `Debug` output.
pub(super) struct ToolRef(pub(super) Arc<ToolEntry>);

impl std::fmt::Debug for ToolRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0.spec.name())
    }
}

impl Permit {
    /// Returns the id of the permitted call.
    #[must_use]
    pub const fn call_id(&self) -> CallId {
        self.call
    }

    /// Returns the arguments that the policies checked.
    #[must_use]
    pub const fn arguments(&self) -> &CheckedArguments {
        &self.arguments
    }

    /// Returns the digest of the tool's definition at the time of the decision.
    #[must_use]
    pub const fn definition(&self) -> Digest {
        self.definition
    }

    pub(crate) fn has_secrets(&self) -> bool {
        !self.tool.0.secrets.is_empty()
    }

    /// Returns the effects of a finished run whose result is withheld.
    pub(crate) fn effects_of_run(&self) -> CallEffects {
        self.tool.0.effects_of_run()
    }

    pub(crate) const fn tool(&self) -> &Arc<ToolEntry> {
        &self.tool.0
    }

    pub(crate) fn charges(&self) -> &[(String, Charge, ToolError)] {
        &self.charges
    }

    pub(crate) fn observed_charges(&self) -> &[(String, Charge, ToolError)] {
        &self.observed_charges
    }

    pub(crate) fn file_expectations(&self) -> &[FileExpectation] {
        &self.file_expectations
    }
}
