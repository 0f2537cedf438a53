//! Describes MCP servers that provide tools.

use std::path::PathBuf;
use std::time::Duration;

use toolgate::call::error::{CallEffects, ErrorCategory};
use toolgate::policy::SourceSpan;

use crate::secret_ref::{SecretHistory, SecretRef};

/// An MCP server that toolgate connects to.
#[derive(Debug, Clone)]
pub struct UpstreamConfig {
    /// Name in this configuration.
    pub name: String,
    /// Transport that reaches the server.
    pub transport: UpstreamTransport,
    /// Prefix of the names of its tools and prompts.
    pub prefix: String,
    /// Treatment of tools that no table declares.
    pub undeclared: UndeclaredToolPolicy,
    /// Default timeout of its tools.
    pub timeout: Duration,
    /// Maximum number of concurrent calls.
    pub max_concurrency: usize,
    /// Patterns that classify its failures.
    pub errors: Vec<ErrorPattern>,
    /// Whether a successful result whose whole text is `Error: …` counts as an error.
    ///
    /// This is off if the file sets `errors`.
    pub detects_text_errors: bool,
    /// Whether clients see its prompts.
    pub exposes_prompts: bool,
    /// Whether clients see its resources.
    pub exposes_resources: bool,
    /// The program and the directory as written, if they contain references.
    pub(crate) path_refs: Vec<SecretRef>,
    /// Tokens that toolgate fetched for this upstream.
    pub(crate) fetched_tokens: SecretHistory,
    pub(crate) span: Option<SourceSpan>,
}

/// The transport that reaches an upstream.
#[derive(Debug, Clone)]
pub enum UpstreamTransport {
    /// A child process that speaks MCP over its standard streams.
    Command {
        /// The program.
        program: PathBuf,
        /// Its arguments.
        args: Vec<SecretRef>,
        /// Environment variables that are set for it.
        env: Vec<(String, SecretRef)>,
        /// Environment variables that it inherits in addition to [`UPSTREAM_ENVIRONMENT`].
        inherit: Vec<String>,
        /// Its working directory.
        directory: Option<PathBuf>,
    },
    /// A server over HTTP.
    Http {
        /// URL of the server.
        url: SecretRef,
        /// Headers of every request.
        headers: Vec<(String, SecretRef)>,
        /// Authentication of toolgate at the server.
        credentials: Credentials,
        /// Whether to use the transport of 2024-11-05: an event stream and a second URL for posts.
        ///
        /// `None` tries that transport if the server does not accept posts.
        sse: Option<bool>,
    },
}

/// How toolgate authenticates at an upstream.
#[derive(Debug, Clone, Default)]
pub enum Credentials {
    /// Without authentication.
    #[default]
    None,
    /// With a bearer token.
    Bearer(SecretRef),
    /// With tokens that toolgate fetches by client credentials (OAuth 2.1).
    ClientCredentials {
        /// Where tokens are requested.
        source: TokenSource,
        /// The client identifier.
        client_id: SecretRef,
        /// The client secret.
        client_secret: SecretRef,
        /// The requested scope.
        scope: Option<String>,
    },
}

/// Where tokens are requested.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenSource {
    /// The token endpoint.
    Url(String),
    /// An authorization server that publishes its token endpoint (RFC 8414).
    ///
    /// Requests name the upstream as their resource (RFC 8707).
    Issuer(String),
}

/// Treatment of an upstream's tools that no table declares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum UndeclaredToolPolicy {
    /// Do not offer them.
    #[default]
    Deny,
    /// Offer them, and ask a person before each call.
    Ask,
    /// Offer them without a rule.
    Open,
    /// Offer them as tools that change nothing.
    Read,
}

/// A pattern that classifies an upstream's error messages.
#[derive(Debug, Clone)]
pub struct ErrorPattern {
    /// A regular expression on the error message.
    pub matches: regex::Regex,
    /// The category.
    pub category: ErrorCategory,
    /// The code.
    pub code: String,
    /// Effects that such a failure leaves behind. The default is [`CallEffects::Done`].
    pub effects: CallEffects,
}

/// Environment variables that a program inherits by default, enough to find itself and its
/// interpreter.
pub const UPSTREAM_ENVIRONMENT: [&str; 10] =
    ["PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TMPDIR", "TERM"];

impl UpstreamConfig {
    pub(crate) fn new(name: &str, transport: UpstreamTransport) -> Self {
        Self {
            name: name.to_owned(),
            transport,
            prefix: format!("{name}_"),
            undeclared: UndeclaredToolPolicy::default(),
            timeout: Duration::from_secs(60),
            max_concurrency: 16,
            errors: Vec::new(),
            detects_text_errors: true,
            exposes_prompts: false,
            exposes_resources: false,
            path_refs: Vec::new(),
            fetched_tokens: SecretHistory::default(),
            span: None,
        }
    }

    /// Checks whether `other`, resolved now, has the same transport, settings and secrets as this
    /// upstream.
    #[must_use]
    pub fn is_unchanged(&self, other: &Self) -> bool {
        let settings = |upstream: &Self| {
            let patterns: (bool, Vec<String>) = (
                upstream.detects_text_errors,
                upstream
                    .errors
                    .iter()
                    .map(|pattern| {
                        format!(
                            "{} {} {:?} {:?}",
                            pattern.matches, pattern.code, pattern.category, pattern.effects
                        )
                    })
                    .collect(),
            );
            let transport = match &upstream.transport {
                UpstreamTransport::Command { program, env, inherit, directory, .. } => {
                    format!(
                        "{program:?} {:?} {inherit:?} {directory:?}",
                        env.iter().map(|(name, _)| name).collect::<Vec<_>>()
                    )
                }
                UpstreamTransport::Http { headers, credentials, sse, .. } => {
                    let authentication = match credentials {
                        Credentials::None => "none".to_owned(),
                        Credentials::Bearer(_) => "bearer".to_owned(),
                        Credentials::ClientCredentials { source, scope, .. } => {
                            format!("{source:?} {scope:?}")
                        }
                    };
                    format!(
                        "{:?} {sse:?} {authentication}",
                        headers.iter().map(|(name, _)| name).collect::<Vec<_>>()
                    )
                }
            };
            let exposure = (
                upstream.prefix.clone(),
                upstream.undeclared,
                upstream.exposes_prompts,
                upstream.exposes_resources,
            );
            (
                transport,
                patterns,
                upstream.timeout,
                upstream.max_concurrency,
                upstream.name.clone(),
                exposure,
            )
        };
        let (own_references, other_references) =
            (self.secret_references(), other.secret_references());
        let has_same_secrets = own_references.len() == other_references.len()
            && own_references
                .iter()
                .zip(other_references)
                .all(|(reference, other)| reference.is_unchanged(other));
        has_same_secrets && settings(self) == settings(other)
    }

    /// Checks whether another file means the same server. A transport that only one of the two
    /// names counts for both.
    pub(crate) fn is_same_server(&mut self, other: &Self) -> bool {
        let mut other = other.clone();
        if let (
            UpstreamTransport::Http { sse: own_sse, .. },
            UpstreamTransport::Http { sse: other_sse, .. },
        ) = (&mut self.transport, &mut other.transport)
        {
            *own_sse = own_sse.or(*other_sse);
            *other_sse = other_sse.or(*own_sse);
        }
        self.is_unchanged(&other)
    }

    /// Returns the name of a tool that no table declares: its own name with the prefix, unless the
    /// name already begins with it.
    ///
    /// The result may contain characters that tool names do not allow.
    #[must_use]
    pub fn default_tool_name(&self, tool: &str) -> String {
        if tool.starts_with(&self.prefix) {
            tool.to_owned()
        } else {
            format!("{}{tool}", self.prefix)
        }
    }

    /// Lists missing environment variables and files, each once, without revealing values.
    #[must_use]
    pub fn missing_references(&self) -> Vec<String> {
        let mut missing: Vec<String> =
            self.all_references().filter_map(|reference| reference.resolve().err()).collect();
        missing.sort();
        missing.dedup();
        missing
    }

    /// Iterates over all references, including the program and the directory, which are not secret.
    pub(crate) fn all_references(&self) -> impl Iterator<Item = &SecretRef> {
        self.secret_references().into_iter().chain(&self.path_refs)
    }

    /// Lists the references that may contain secrets.
    pub(crate) fn secret_references(&self) -> Vec<&SecretRef> {
        match &self.transport {
            UpstreamTransport::Command { args, env, .. } => {
                args.iter().chain(env.iter().map(|(_, value)| value)).collect()
            }
            UpstreamTransport::Http { url, headers, credentials, .. } => {
                let credential: Vec<&SecretRef> = match credentials {
                    Credentials::None => Vec::new(),
                    Credentials::Bearer(token) => vec![token],
                    Credentials::ClientCredentials { client_id, client_secret, .. } => {
                        vec![client_id, client_secret]
                    }
                };
                [url]
                    .into_iter()
                    .chain(headers.iter().map(|(_, value)| value))
                    .chain(credential)
                    .collect()
            }
        }
    }
}
