//! Defines the denial that a rule returns: reason, category, code and redirect.

use super::Diagnostic;
use crate::call::error::{ErrorCategory, ToolError};
use crate::diagnostic::check_tool_name;
use crate::tool::ToolSpec;

/// The denial of a rule.
///
/// By default the category is BUSINESS and the code is the name of the rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleDenial {
    /// The message that the model reads.
    pub reason: String,
    /// The category of the error.
    pub category: ErrorCategory,
    /// The code of the error.
    pub code: String,
    /// The tool that handles such requests instead.
    pub redirect: Option<String>,
}

impl RuleDenial {
    /// Creates a refusal with a reason and the default category and code.
    pub(crate) fn new(rule: &str, reason: impl Into<String>) -> Self {
        Self {
            reason: reason.into(),
            category: ErrorCategory::Business,
            code: rule.to_owned(),
            redirect: None,
        }
    }

    /// Reports a redirect to a tool that does not exist.
    pub(crate) fn check_redirect(&self, tools: &[&ToolSpec]) -> Option<Diagnostic> {
        let to = self.redirect.as_deref()?;
        let problem = check_tool_name("redirect", to, tools)?;
        Some(Diagnostic {
            message: format!(
                "the rule redirects to `{}`, which is not a tool of this agent",
                toolgate_text::escape_for_display(to)
            ),
            ..problem
        })
    }

    pub(crate) fn to_error(&self) -> ToolError {
        let mut error = ToolError::new(self.category, self.code.clone(), self.reason.clone());
        // A rule denial is not retryable: the same call gets the same result.
        error.retryable = false;
        error.redirect_tool.clone_from(&self.redirect);
        error
    }
}

/// Defines the refusal setters that every rule has.
macro_rules! refusal_setters {
    () => {
        /// Sets the message that the model reads.
        #[must_use]
        pub fn reason(mut self, reason: impl Into<String>) -> Self {
            self.refusal.reason = reason.into();
            self
        }

        /// Sets the category of the refusal [default: BUSINESS].
        #[must_use]
        pub const fn category(mut self, category: crate::call::error::ErrorCategory) -> Self {
            self.refusal.category = category;
            self
        }

        /// Sets the code of the refusal [default: the name of the rule].
        #[must_use]
        pub fn code(mut self, code: impl Into<String>) -> Self {
            self.refusal.code = code.into();
            self
        }

        /// Sets the tool that handles such requests instead.
        #[must_use]
        pub fn redirect(mut self, tool: impl Into<String>) -> Self {
            self.refusal.redirect = Some(tool.into());
            self
        }
    };
}

/// Defines the setters of rules that have a CEL expression.
macro_rules! expression_setters {
    ($doc:literal) => {
        #[doc = $doc]
        #[must_use]
        pub fn when_cel(mut self, expression: &str) -> Self {
            self.when = Some(crate::policy::cel::CelExpression::new(expression));
            self
        }

        /// Lets `sum_of("name")` in the expression read the used amount of a limit.
        #[must_use]
        pub fn reading(mut self, limit: &crate::policy::Limit) -> Self {
            if let Some(when) = &mut self.when {
                when.bind_limit(limit);
            }
            self
        }
    };
}

pub(crate) use {expression_setters, refusal_setters};
