//! Holds an agent and its tools as declared in a configuration file.

use std::path::PathBuf;
use std::sync::Arc;

use toolgate::call::error::ErrorDialect;
use toolgate::files::FileSystem;
use toolgate::hook::CommandHook;
use toolgate::limits::Limits;
use toolgate::policy::SourceSpan;
use toolgate::policy::source::RuleSet;
use toolgate::tool::Tool;
use toolgate_json::Pointer;

use crate::tool_backend::ToolBackend;

/// An agent as declared in the file.
#[derive(Clone)]
pub(crate) struct AgentConfig {
    pub(crate) name: String,
    pub(crate) principals: Option<Vec<String>>,
    pub(crate) limits: Limits,
    /// Limits of 0 that refuse every call.
    pub(crate) zero_limits: Vec<SourceSpan>,
    pub(crate) max_output: Option<usize>,
    pub(crate) dialect: Option<ErrorDialect>,
    /// Directory whose files the agent works on, and the position of the key.
    pub(crate) files: Option<(PathBuf, SourceSpan)>,
    /// The same directory, once it is open.
    pub(crate) open_files: Option<Arc<dyn FileSystem>>,
    /// Whether a client runs all tools, on files that toolgate cannot read.
    pub(crate) is_for_client: bool,
    pub(crate) tools: Vec<ToolConfig>,
    /// Upstreams whose undeclared tools the agent is offered.
    ///
    /// `None` means all upstreams if this is the only agent, else no upstream.
    pub(crate) upstreams: Option<Vec<String>>,
    /// Tools for which an allowed call also grants the client's permission.
    pub(crate) granted_tools: Vec<String>,
    pub(crate) hooks: Vec<CommandHook>,
    pub(crate) hook_spans: Vec<(String, SourceSpan)>,
    pub(crate) rules: RuleSet,
}

/// A tool of an agent, and where it is declared.
#[derive(Clone)]
pub(crate) struct ToolConfig {
    pub(crate) tool: Tool,
    pub(crate) span: SourceSpan,
    pub(crate) section: Option<String>,
    pub(crate) backend: Option<ToolBackend>,
    /// Positions of the declared secrets.
    pub(crate) secrets: Vec<(Pointer, SourceSpan)>,
    /// Whether the tool is built in and works on the files of its agent.
    pub(crate) uses_agent_files: bool,
}

impl ToolConfig {
    pub(crate) fn map_tool(self, change: impl FnOnce(Tool) -> Tool) -> Self {
        Self { tool: change(self.tool), ..self }
    }
}
