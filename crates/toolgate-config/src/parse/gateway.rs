//! Reads the `[gateway]` table: address, authentication and limits of the gateway.

use std::path::PathBuf;
use std::time::Duration;

use crate::config::ConfigReader;
use crate::secret_ref::SecretRef;
use toolgate::limits::RateLimit;
use toolgate::policy::Diagnostic;
use toolgate::policy::source::CANARY_PRINCIPAL;
use toolgate::policy::source::table_reader::TomlTable;

/// Settings of the gateway.
#[derive(Debug, Clone)]
pub struct GatewayConfig {
    /// Whether the file has a `[gateway]` table.
    pub is_declared: bool,
    /// Address to listen on. The default is a loopback address.
    pub listen: Option<String>,
    /// Agent of clients that name none.
    pub agent: Option<String>,
    /// Accepted `Host` names, in addition to those of this machine.
    pub hosts: Vec<String>,
    /// Accepted origins of web pages.
    pub origins: Vec<String>,
    /// Maximum size of a request in bytes.
    pub max_request_bytes: usize,
    /// Maximum number of concurrent requests.
    pub max_concurrency: usize,
    /// Rate limit of each principal.
    pub rate: Option<RateLimit>,
    /// How long a client that names no session keeps its default session.
    pub session_idle_timeout: Duration,
    /// Maximum duration of a response stream that the client can resume. `None` keeps it open until
    /// the response is complete.
    pub max_stream_duration: Option<Duration>,
    /// Tokens, identified by their digests.
    pub tokens: Vec<GatewayToken>,
    /// Tokens that another issuer signs.
    pub jwt: Option<JwtConfig>,
    /// Certificate and private key.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// Collector for spans and metrics.
    pub otlp: Option<OtlpConfig>,
}

/// A collector for OTLP over HTTP.
#[derive(Debug, Clone)]
pub struct OtlpConfig {
    /// The URL, without `/v1/traces` or `/v1/metrics`.
    pub endpoint: String,
    /// Headers of each request.
    pub headers: Vec<(String, SecretRef)>,
}

/// A token, identified by its digest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayToken {
    /// The principal that uses this token.
    pub principal: String,
    /// SHA-256 of the token, in hexadecimal.
    pub sha256: String,
    /// Agents that this token may use. `None` means all.
    pub agents: Option<Vec<String>>,
}

/// Settings for signed tokens of another issuer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JwtConfig {
    /// The expected issuer.
    pub issuer: String,
    /// The expected audience.
    pub audience: String,
    /// URL or file of the keys.
    pub keys: String,
    /// URL of `/mcp` for clients, if it differs from the audience.
    pub resource: Option<String>,
    /// The claim that contains the principal.
    pub principal: String,
    /// The claim that contains the session.
    pub session: Option<String>,
    /// The claim that lists the agents.
    pub agents: Option<String>,
}

impl Default for GatewayConfig {
    fn default() -> Self {
        Self {
            is_declared: false,
            listen: None,
            agent: None,
            hosts: Vec::new(),
            origins: Vec::new(),
            max_request_bytes: 4 << 20,
            max_concurrency: 512,
            rate: None,
            session_idle_timeout: Duration::from_secs(30 * 60),
            max_stream_duration: None,
            tokens: Vec::new(),
            jwt: None,
            tls: None,
            otlp: None,
        }
    }
}

impl ConfigReader<'_> {
    pub(crate) fn read_gateway(&self, table: &TomlTable<'_>) -> GatewayConfig {
        let mut gateway = GatewayConfig { is_declared: true, ..GatewayConfig::default() };
        let names = |key: &str| {
            table.names(key).unwrap_or_default().into_iter().map(str::to_owned).collect()
        };
        gateway.listen = table.text("listen").map(str::to_owned);
        if let Some(address) = &gateway.listen
            && address.parse::<std::net::SocketAddr>().is_err()
        {
            let problem = Diagnostic::new(format!(
                "`{}` is not an address with a port",
                toolgate_text::escape_for_display(address)
            ));
            table.report("listen", problem.with_help("like `127.0.0.1:7070`"));
        }
        gateway.agent = table.text("agent").map(str::to_owned);
        self.named_agents
            .borrow_mut()
            .extend(gateway.agent.iter().map(|name| (name.clone(), table.span_of("agent"))));
        (gateway.hosts, gateway.origins) = (names("hosts"), names("origins"));
        for origin in gateway.origins.iter().filter(|origin| !origin.contains("://")) {
            let problem = Diagnostic::new(format!(
                "`{}` is not an origin",
                toolgate_text::escape_for_display(origin)
            ));
            table.report("origins", problem.with_help("like `https://app.example.com:443`"));
        }
        if let Some(bytes) =
            table.bytes("max_request").and_then(|bytes| usize::try_from(bytes).ok())
        {
            gateway.max_request_bytes = bytes;
        }
        gateway.max_concurrency =
            table.concurrency("concurrency").unwrap_or(gateway.max_concurrency);
        gateway.rate = crate::config::read_rate_limit(table);
        gateway.session_idle_timeout = table
            .positive_std_duration("session_idle_timeout")
            .unwrap_or(gateway.session_idle_timeout);
        gateway.max_stream_duration = table.positive_std_duration("stream_timeout");
        if gateway.max_stream_duration.is_some_and(|stream| stream < Duration::from_secs(1)) {
            let problem = Diagnostic::new("`stream_timeout` must be at least one second");
            table.report(
                "stream_timeout",
                problem.with_help("like `stream_timeout = \"50s\"`; without it, a stream lasts until the response"),
            );
        }
        gateway.tokens =
            table.tables("tokens").iter().filter_map(|table| read_token(table, self)).collect();
        gateway.jwt = table.table("jwt").and_then(|table| read_jwt(&table, self));
        gateway.tls = table.table("tls").and_then(|tls| {
            let (certificate, key) = (tls.text("certificate"), tls.text("key"));
            tls.reject_unknown_keys("`tls`");
            if !tls.has_key("certificate") || !tls.has_key("key") {
                table.report(
                    "tls",
                    Diagnostic::new("TLS needs a `certificate` and a `key`")
                        .with_help("PEM files, relative to this file"),
                );
            }
            Some((self.base_dir.join(certificate?), self.base_dir.join(key?)))
        });
        gateway.otlp = table.table("otlp").and_then(|otlp| {
            let endpoint =
                otlp.text("endpoint").map(|endpoint| endpoint.trim_end_matches('/').to_owned());
            let headers = self.read_references(&otlp, "headers");
            for (_, value) in &headers {
                if let Some(problem) = value.resolution_problem() {
                    otlp.report("headers", problem);
                }
            }
            otlp.reject_unknown_keys("`otlp`");
            if !endpoint.as_ref().is_some_and(|endpoint| {
                endpoint.starts_with("http://") || endpoint.starts_with("https://")
            }) {
                let problem = Diagnostic::new("`otlp` needs an HTTP `endpoint`");
                table.report(
                    "otlp",
                    problem.with_help("like `endpoint = \"http://127.0.0.1:4318\"`"),
                );
            }
            Some(OtlpConfig { endpoint: endpoint?, headers })
        });
        table.reject_unknown_keys("the gateway");
        gateway
    }
}

fn read_token(table: &TomlTable<'_>, reader: &ConfigReader<'_>) -> Option<GatewayToken> {
    for (key, example) in [("principal", "principal = \"ci\""), ("sha256", "sha256 = \"…\"")] {
        if !table.has_key(key) {
            let problem = Diagnostic::new(format!("a token needs a `{key}`"));
            table.report(
                key,
                problem.with_help(format!("like `{example}`; `toolgate token NAME` creates one")),
            );
        }
    }
    let principal = table.text("principal").map(str::to_owned);
    if principal.as_deref() == Some(CANARY_PRINCIPAL) {
        let problem = Diagnostic::new(format!(
            "the principal name `{CANARY_PRINCIPAL}` is reserved for the self-test"
        ));
        table.report("principal", problem.with_help("choose another name"));
    }
    let sha256 = table.text("sha256").map(str::to_ascii_lowercase);
    if sha256
        .as_ref()
        .is_some_and(|digest| digest.len() != 64 || !digest.bytes().all(|b| b.is_ascii_hexdigit()))
    {
        table.report(
            "sha256",
            Diagnostic::new("a digest has 64 hexadecimal digits")
                .with_help("`toolgate token NAME` creates a token and its digest"),
        );
    }
    let agents: Option<Vec<String>> =
        table.names("agents").map(|names| names.into_iter().map(str::to_owned).collect());
    reader
        .named_agents
        .borrow_mut()
        .extend(agents.iter().flatten().map(|name| (name.clone(), table.span_of("agents"))));
    table.reject_unknown_keys("a token");
    Some(GatewayToken { principal: principal?, sha256: sha256?, agents })
}

fn read_jwt(table: &TomlTable<'_>, reader: &ConfigReader<'_>) -> Option<JwtConfig> {
    for (key, example) in [
        ("issuer", "https://login.example.com/"),
        ("audience", "https://gate.example.com/mcp"),
        ("keys", "https://login.example.com/.well-known/jwks.json"),
    ] {
        if !table.has_key(key) {
            table.report(
                key,
                Diagnostic::new(format!("`jwt` needs `{key}`"))
                    .with_help(format!("like `{key} = \"{example}\"`")),
            );
        }
    }
    let text = |key: &str| table.text(key).map(str::to_owned);
    let (issuer, audience, keys) = (text("issuer"), text("audience"), text("keys"));
    let keys = keys.map(|keys| match keys.starts_with("https://") || keys.starts_with("http://") {
        true => keys,
        false => reader.base_dir.join(keys).display().to_string(),
    });
    let resource = text("resource");
    if let Some(resource) = resource.as_ref().filter(|resource| !is_client_url(resource)) {
        let problem = Diagnostic::new(format!(
            "`{}` is not a URL that clients can use",
            toolgate_text::escape_for_display(resource)
        ));
        table.report(
            "resource",
            problem.with_help("like `resource = \"https://gate.example.com/mcp\"`"),
        );
    }
    let (principal, session, agents) =
        (text("principal").unwrap_or_else(|| "sub".to_owned()), text("session"), text("agents"));
    table.reject_unknown_keys("`jwt`");
    Some(JwtConfig {
        issuer: issuer?,
        audience: audience?,
        keys: keys?,
        resource,
        principal,
        session,
        agents,
    })
}

/// Checks for a URL with a host and an optional path, like the pattern in the editor schema.
fn is_client_url(text: &str) -> bool {
    let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    rest.is_some_and(|rest| {
        rest.starts_with(|first: char| first.is_ascii_alphanumeric() || first == '[')
            && rest.chars().all(|c| c.is_ascii_alphanumeric() || "[]:./_~%-".contains(c))
    })
}
