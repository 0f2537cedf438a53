//! Reads `[upstreams.NAME]` tables: MCP servers that provide tools.

mod secrets;
mod servers;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use super::file::Reader;
use super::read::Table;
use super::reference::{Given, Reference};
use crate::error::{Category, Effects};
use crate::policy::{Place, Problem};

pub use servers::{BEHIND_TOOLGATE, mcp_servers};

/// An MCP server that toolgate connects to.
#[derive(Debug, Clone)]
pub struct Upstream {
    /// Name in this configuration.
    pub name: String,
    /// Transport that reaches the server.
    pub reach: Reach,
    /// Prefix of the names of its tools and prompts.
    pub prefix: String,
    /// Treatment of tools that no table declares.
    pub undeclared: Undeclared,
    /// Default timeout of its tools.
    pub timeout: Duration,
    /// Maximum number of concurrent calls.
    pub concurrency: usize,
    /// Patterns that classify its failures.
    pub errors: Vec<ErrorPattern>,
    /// Whether a successful result whose whole text is `Error: …` counts as an error.
    ///
    /// This is off if the file sets `errors`.
    pub blurts: bool,
    /// Whether clients see its prompts.
    pub prompts: bool,
    /// Whether clients see its resources.
    pub resources: bool,
    /// The program and the directory as written, if they contain references.
    places: Vec<Reference>,
    /// Tokens that toolgate fetched for this upstream.
    tokens: Given,
    pub(super) place: Option<Place>,
}

/// The transport that reaches an upstream.
#[derive(Debug, Clone)]
pub enum Reach {
    /// A child process that speaks MCP over its standard streams.
    Command {
        /// The program.
        program: PathBuf,
        /// Its arguments.
        args: Vec<Reference>,
        /// Environment variables that are set for it.
        env: Vec<(String, Reference)>,
        /// Environment variables that it inherits in addition to [`UPSTREAM_ENVIRONMENT`].
        inherit: Vec<String>,
        /// Its working directory.
        directory: Option<PathBuf>,
    },
    /// A server over HTTP.
    Url {
        /// URL of the server.
        url: Reference,
        /// Headers of every request.
        headers: Vec<(String, Reference)>,
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
    Bearer(Reference),
    /// With tokens that toolgate fetches by client credentials (OAuth 2.1).
    Client {
        /// Where tokens are requested.
        source: TokenSource,
        /// The client identifier.
        client_id: Reference,
        /// The client secret.
        client_secret: Reference,
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
pub enum Undeclared {
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
    pub category: Category,
    /// The code.
    pub code: String,
    /// Effects that such a failure leaves behind. The default is [`Effects::Done`].
    pub effects: Effects,
}

/// Environment variables that a program inherits by default, enough to find itself and its
/// interpreter.
pub const UPSTREAM_ENVIRONMENT: [&str; 10] = ["PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TMPDIR", "TERM"];

impl Upstream {
    fn new(name: &str, reach: Reach) -> Self {
        Self {
            name: name.to_owned(),
            reach,
            prefix: format!("{name}_"),
            undeclared: Undeclared::default(),
            timeout: Duration::from_secs(60),
            concurrency: 16,
            errors: Vec::new(),
            blurts: true,
            prompts: false,
            resources: false,
            places: Vec::new(),
            tokens: Given::default(),
            place: None,
        }
    }

    /// Checks whether `other`, resolved now, has the same transport, settings and secrets as this
    /// upstream.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        let shape = |upstream: &Self| {
            let patterns: (bool, Vec<String>) = (
                upstream.blurts,
                upstream.errors.iter().map(|one| format!("{} {} {:?} {:?}", one.matches, one.code, one.category, one.effects)).collect(),
            );
            let reach = match &upstream.reach {
                Reach::Command { program, env, inherit, directory, .. } => {
                    format!("{program:?} {:?} {inherit:?} {directory:?}", env.iter().map(|(name, _)| name).collect::<Vec<_>>())
                }
                Reach::Url { headers, credentials, sse, .. } => {
                    let how = match credentials {
                        Credentials::None => "none".to_owned(),
                        Credentials::Bearer(_) => "bearer".to_owned(),
                        Credentials::Client { source, scope, .. } => format!("{source:?} {scope:?}"),
                    };
                    format!("{:?} {sse:?} {how}", headers.iter().map(|(name, _)| name).collect::<Vec<_>>())
                }
            };
            let treated = (upstream.prefix.clone(), upstream.undeclared, upstream.prompts, upstream.resources);
            (reach, patterns, upstream.timeout, upstream.concurrency, upstream.name.clone(), treated)
        };
        let (own, theirs) = (self.references(), other.references());
        let still = own.len() == theirs.len() && own.iter().zip(theirs).all(|(own, theirs)| own.is_still(theirs));
        still && shape(self) == shape(other)
    }

    /// Checks whether another file means the same server. A transport that only one of the two
    /// names counts for both.
    fn takes_in(&mut self, other: &Self) -> bool {
        let mut other = other.clone();
        if let (Reach::Url { sse: own, .. }, Reach::Url { sse: theirs, .. }) = (&mut self.reach, &mut other.reach) {
            *own = own.or(*theirs);
            *theirs = theirs.or(*own);
        }
        self.is_same(&other)
    }

    /// Returns the name of a tool that no table declares: its own name with the prefix, unless the
    /// name already begins with it.
    ///
    /// The result may contain characters that tool names do not allow.
    #[must_use]
    pub fn undeclared_name(&self, tool: &str) -> String {
        if tool.starts_with(&self.prefix) { tool.to_owned() } else { format!("{}{tool}", self.prefix) }
    }

    /// Lists missing environment variables and files, each once, without revealing values.
    #[must_use]
    pub fn lacks(&self) -> Vec<String> {
        let mut missing: Vec<String> = self.looked_up().filter_map(|reference| reference.resolve().err()).collect();
        missing.sort();
        missing.dedup();
        missing
    }

    /// Iterates over all references, including the program and the directory, which are not secret.
    pub(super) fn looked_up(&self) -> impl Iterator<Item = &Reference> {
        self.references().into_iter().chain(&self.places)
    }

    /// Lists the references that may contain secrets.
    pub(super) fn references(&self) -> Vec<&Reference> {
        match &self.reach {
            Reach::Command { args, env, .. } => args.iter().chain(env.iter().map(|(_, value)| value)).collect(),
            Reach::Url { url, headers, credentials, .. } => {
                let own: Vec<&Reference> = match credentials {
                    Credentials::None => Vec::new(),
                    Credentials::Bearer(token) => vec![token],
                    Credentials::Client { client_id, client_secret, .. } => vec![client_id, client_secret],
                };
                [url].into_iter().chain(headers.iter().map(|(_, value)| value)).chain(own).collect()
            }
        }
    }
}

impl Reader<'_> {
    /// Reads all upstreams: those of this file, and those of files in the format of clients.
    pub(super) fn upstreams(&self, table: &Table<'_>) -> Vec<Upstream> {
        let mut found: Vec<Upstream> = Vec::new();
        if let Some(inner) = table.table("upstreams") {
            for name in inner.keys() {
                let Some(one) = inner.table(&name) else { continue };
                found.extend(self.upstream(&name, &one));
                one.finish("an upstream");
            }
        }
        // Maps each server of another file to that file.
        let mut files: BTreeMap<String, PathBuf> = BTreeMap::new();
        for path in table.names("mcp_servers").unwrap_or_default() {
            let path = self.beside.join(path);
            self.files.borrow_mut().push(path.clone());
            match super::text::text_of_named(&path).map_err(|error| error.to_string()).and_then(|text| mcp_servers(&text)) {
                Ok(more) => {
                    for one in more {
                        let Some(known) = found.iter_mut().find(|known| known.name == one.name) else {
                            files.insert(one.name.clone(), path.clone());
                            found.push(Upstream { place: Some(table.place_of("mcp_servers")), ..one });
                            continue;
                        };
                        // This file takes precedence over other files, and identical servers in two
                        // files count as one.
                        if let Some(file) = files.get(&one.name).filter(|_| !known.takes_in(&one)) {
                            let (file, path, name) = (file.display(), path.display(), &one.name);
                            let problem = Problem::new(format!("{file} and {path} both define a server `{name}`, but differently"));
                            let help = format!("rename one of them, or define the server here in `[upstreams.{name}]`");
                            table.wrong("mcp_servers", problem.help(help));
                        }
                    }
                }
                Err(why) => {
                    let problem = Problem::new(format!("{}: {why}", path.display()));
                    table.wrong("mcp_servers", problem.help("expected a JSON file with `mcpServers`, as clients use it, relative to this file"));
                }
            }
        }
        found
    }

    fn upstream(&self, name: &str, table: &Table<'_>) -> Option<Upstream> {
        if !is_upstream_name(name) {
            let problem = Problem::new(format!("`{}` is not a valid upstream name", crate::names::shown(name)));
            table.wrong("", problem.help("use 1 to 32 of a-z, 0-9, `_` and `-`"));
            table.silence();
            return None;
        }
        let reach = match (table.has("command"), table.has("url")) {
            (true, false) => self.child(table),
            (false, true) => self.address(table),
            (both, _) => {
                let message =
                    if both { "an upstream has a `command` or a `url`, not both" } else { "an upstream needs a `command` or a `url`" };
                table.wrong(if both { "url" } else { "" }, Problem::new(message).help("like `command = \"mcp-server-git\"`"));
                // Mark the keys of both transports, because either may be intended.
                KEYS.into_iter().for_each(|key| table.mark_read(key));
                None
            }
        };
        let mut upstream = Upstream { place: Some(table.place_of("")), ..Upstream::new(name, reach?) };
        if let Some(prefix) = table.text("prefix") {
            if prefix.is_empty() || is_upstream_name(prefix) {
                upstream.prefix = prefix.to_owned();
            } else {
                table.wrong("prefix", Problem::new("a prefix may contain only a-z, 0-9, `_` and `-`").help("like `prefix = \"git_\"`, or `\"\"`"));
            }
        }
        let words = [("deny", Undeclared::Deny), ("ask", Undeclared::Ask), ("open", Undeclared::Open), ("read", Undeclared::Read)];
        upstream.undeclared = table.word("undeclared", &words).unwrap_or_default();
        // If undeclared tools are offered, prompts and resources are offered too.
        let shares = upstream.undeclared != Undeclared::Deny;
        upstream.prompts = table.bool("prompts").unwrap_or(shares);
        upstream.resources = table.bool("resources").unwrap_or(shares);
        upstream.timeout = table.length("timeout").unwrap_or(upstream.timeout);
        if let Some(most) = table.at_once("concurrency") {
            upstream.concurrency = most.min(4096);
        }
        upstream.errors = table.tables("errors").iter().filter_map(pattern).collect();
        upstream.blurts = !table.has("errors");
        Some(upstream)
    }

    fn child(&self, table: &Table<'_>) -> Option<Reach> {
        let program = table.text("command")?;
        let words = table.names("args").unwrap_or_default();
        self.named_in(&words);
        let mut args = Vec::new();
        for word in words {
            match Reference::of(word) {
                Ok(word) => args.push(word.at(table.place_of("args"))),
                Err(why) => table.wrong("args", Problem::new(why).help("like `${HOME}/notes`")),
            }
        }
        let inherit = table.names("inherit_env").unwrap_or_default().into_iter().map(str::to_owned).collect();
        let directory = table.text("directory").map(|path| self.beside.join(path));
        Some(Reach::Command { program: self.program(program), args, env: self.references(table, "env"), inherit, directory })
    }

    fn address(&self, table: &Table<'_>) -> Option<Reach> {
        let url = self.reference(table, "url");
        let headers = self.references(table, "headers");
        table.mark_read("bearer");
        let credentials = match (table.has("bearer"), table.table("oauth")) {
            (true, None) => self.reference(table, "bearer").map(Credentials::Bearer),
            (false, Some(oauth)) => self.oauth(&oauth),
            (true, Some(oauth)) => {
                oauth.silence();
                table.wrong("bearer", Problem::new("an upstream has `bearer` or `oauth`, not both").help("remove one of them"));
                None
            }
            (false, None) => Some(Credentials::None),
        };
        let sse = table.word("transport", &[("http", false), ("sse", true)]);
        Some(Reach::Url { url: url?, headers, credentials: credentials?, sse })
    }

    fn oauth(&self, table: &Table<'_>) -> Option<Credentials> {
        for key in ["client_id", "client_secret"] {
            if !table.has(key) {
                table.wrong(key, Problem::new(format!("`oauth` needs a `{key}`")).help(format!("like `{key} = \"…\"`")));
            }
        }
        let source = match (table.text("issuer"), table.text("token_url")) {
            (Some(issuer), None) => Some(TokenSource::Issuer(issuer.to_owned())),
            (None, Some(url)) => Some(TokenSource::Url(url.to_owned())),
            (None, None) => {
                let problem = Problem::new("`oauth` needs an `issuer` or a `token_url`");
                table.wrong("issuer", problem.help("like `issuer = \"https://auth.example.com\"`"));
                None
            }
            (Some(_), Some(_)) => {
                table.wrong("token_url", Problem::new("`oauth` has an `issuer` or a `token_url`, not both").help("remove one of them"));
                None
            }
        };
        let (client_id, client_secret) = (
            table.has("client_id").then(|| self.reference(table, "client_id")).flatten(),
            table.has("client_secret").then(|| self.reference(table, "client_secret")).flatten(),
        );
        let scope = table.text("scope").map(str::to_owned);
        table.finish("`oauth`");
        Some(Credentials::Client { source: source?, client_id: client_id?, client_secret: client_secret?, scope })
    }
}

/// All keys of an upstream, for both transports.
const KEYS: [&str; 17] = [
    "command",
    "url",
    "args",
    "env",
    "inherit_env",
    "directory",
    "headers",
    "bearer",
    "oauth",
    "transport",
    "prefix",
    "undeclared",
    "prompts",
    "resources",
    "timeout",
    "concurrency",
    "errors",
];

/// Maximum length of an upstream name.
const LONGEST: usize = 32;

fn is_upstream_name(name: &str) -> bool {
    name.len() <= LONGEST && crate::names::is_tool_name(name)
}

fn pattern(table: &Table<'_>) -> Option<ErrorPattern> {
    for (key, example) in [("matches", "matches = 'not found'"), ("category", "category = \"BUSINESS\""), ("code", "code = \"not_found\"")]
    {
        if !table.has(key) {
            table.wrong(key, Problem::new(format!("a pattern of `errors` needs a `{key}`")).help(format!("like `{example}`")));
        }
    }
    let matches = table.text("matches").and_then(|text| match regex::Regex::new(text) {
        Ok(regex) => Some(regex),
        Err(_) => {
            let problem = Problem::new(format!("`{}` is not a valid regular expression", crate::names::shown(text)));
            table.wrong("matches", problem.help("use the syntax of the `regex` crate"));
            None
        }
    });
    let category = table.category();
    let code = table.text("code").map(str::to_owned);
    let words = [("none", Effects::None), ("done", Effects::Done), ("unknown", Effects::Unknown)];
    let effects = table.word("effects", &words).unwrap_or(Effects::Done);
    table.finish("a pattern of `errors`");
    Some(ErrorPattern { matches: matches?, category: category?, code: code?, effects })
}
