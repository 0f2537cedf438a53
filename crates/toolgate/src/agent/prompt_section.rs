//! Defines sections of the prompt.

use std::sync::Arc;

use crate::policy::Policy;
use crate::tool::Tool;

/// A section of the prompt with its own tools and policies.
///
/// ```
/// use toolgate::{PromptSection, Tool, policy::ReadBeforeWrite};
/// let files = PromptSection::new("files")
///     .tools(toolgate::builtin::files())
///     .policy(ReadBeforeWrite::default());
/// ```
#[derive(Default)]
pub struct PromptSection {
    pub(crate) name: String,
    pub(crate) tools: Vec<Tool>,
    pub(crate) policies: Vec<Arc<dyn Policy>>,
}

impl PromptSection {
    /// Creates an empty section.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), ..Self::default() }
    }

    /// Adds a tool.
    #[must_use]
    pub fn tool(mut self, tool: Tool) -> Self {
        self.tools.push(tool);
        self
    }

    /// Adds tools.
    #[must_use]
    pub fn tools(mut self, tools: impl IntoIterator<Item = Tool>) -> Self {
        self.tools.extend(tools);
        self
    }

    /// Adds a policy for the tools of this section.
    #[must_use]
    pub fn policy(mut self, policy: impl Policy + 'static) -> Self {
        self.policies.push(Arc::new(policy));
        self
    }
}
