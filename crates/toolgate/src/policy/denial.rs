//! Defines the denial that a rule returns: reason, category, code and redirect.

use super::Problem;
use crate::call::error::{Category, ToolError};
use crate::diagnostic::unknown_tool;
use crate::tool::Spec;

/// The denial of a rule.
///
/// By default the category is BUSINESS and the code is the name of the rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The message that the model reads.
    pub reason: String,
    /// The category of the error.
    pub category: Category,
    /// The code of the error.
    pub code: String,
    /// The tool that handles such requests instead.
    pub redirect: Option<String>,
}

impl Refusal {
    /// Creates a refusal with a reason and the default category and code.
    pub(crate) fn of(rule: &str, reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), category: Category::Business, code: rule.to_owned(), redirect: None }
    }

    /// Reports a redirect to a tool that does not exist.
    pub(crate) fn problems(&self, tools: &[&Spec]) -> Option<Problem> {
        let to = self.redirect.as_deref()?;
        let problem = unknown_tool("redirect", to, tools)?;
        Some(Problem {
            message: format!("the rule redirects to `{}`, which is not a tool of this agent", toolgate_text::shown(to)),
            ..problem
        })
    }

    pub(crate) fn error(&self) -> ToolError {
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
        pub const fn category(mut self, category: crate::call::error::Category) -> Self {
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
            self.when = Some(crate::policy::cel::Expression::new(expression));
            self
        }

        /// Lets `sum_of("name")` in the expression read the used amount of a limit.
        #[must_use]
        pub fn reading(mut self, limit: &crate::policy::Limit) -> Self {
            if let Some(when) = &mut self.when {
                when.reads(limit);
            }
            self
        }
    };
}

pub(crate) use {expression_setters, refusal_setters};
