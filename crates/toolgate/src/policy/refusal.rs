//! What a rule says when it says no.

use super::Problem;
use super::problem::unknown_tool;
use crate::error::{Category, ToolError};
use crate::tool::Spec;

/// Reason, category, code and redirect of a rule. Unless said: BUSINESS, the rule's own name as code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// For the model to act on.
    pub reason: String,
    /// What kind of refusal it is.
    pub category: Category,
    /// Its code.
    pub code: String,
    /// The tool that handles such requests instead.
    pub redirect: Option<String>,
}

impl Refusal {
    /// A refusal that only has a reason yet.
    pub(super) fn of(rule: &str, reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), category: Category::Business, code: rule.to_owned(), redirect: None }
    }

    /// A redirect to a tool that is not there leads nowhere.
    pub(super) fn problems(&self, tools: &[&Spec]) -> Option<Problem> {
        let to = self.redirect.as_deref()?;
        let problem = unknown_tool("redirect", to, tools)?;
        Some(Problem { message: format!("it redirects to `{}`, which is no tool of this agent", crate::names::shown(to)), ..problem })
    }

    pub(super) fn error(&self) -> ToolError {
        let mut error = ToolError::new(self.category, self.code.clone(), self.reason.clone());
        // The law does not pass by itself.
        error.retryable = false;
        error.redirect_tool.clone_from(&self.redirect);
        error
    }
}

/// Setters that every rule has.
macro_rules! refusal_setters {
    () => {
        /// What the model is told.
        #[must_use]
        pub fn reason(mut self, reason: impl Into<String>) -> Self {
            self.refusal.reason = reason.into();
            self
        }

        /// The category of the refusal: BUSINESS unless said.
        #[must_use]
        pub const fn category(mut self, category: crate::error::Category) -> Self {
            self.refusal.category = category;
            self
        }

        /// The code of the refusal: the rule's name unless said.
        #[must_use]
        pub fn code(mut self, code: impl Into<String>) -> Self {
            self.refusal.code = code.into();
            self
        }

        /// The tool that handles such requests instead.
        #[must_use]
        pub fn redirect(mut self, tool: impl Into<String>) -> Self {
            self.refusal.redirect = Some(tool.into());
            self
        }
    };
}

/// Setters of rules that have an expression.
macro_rules! expression_setters {
    ($doc:literal) => {
        #[doc = $doc]
        #[must_use]
        pub fn when_cel(mut self, expression: &str) -> Self {
            self.when = Some(crate::policy::cel::Expression::new(expression));
            self
        }

        /// Lets `sum_of("name")` in the expression read how much of a limit is used.
        #[must_use]
        pub fn reading(mut self, limit: &crate::policy::Limit) -> Self {
            if let Some(when) = &mut self.when {
                when.reads(limit);
            }
            self
        }
    };
}

pub(super) use {expression_setters, refusal_setters};
