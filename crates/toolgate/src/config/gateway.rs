//! Who may come in through the gateway, and how much.

use std::path::PathBuf;
use std::time::Duration;

use super::CANARY_PRINCIPAL;
use super::file::Reader;
use super::read::Table;
use super::reference::Reference;
use crate::limits::Rate;
use crate::policy::Problem;

/// How the gateway listens.
#[derive(Debug, Clone)]
pub struct Gateway {
    /// Whether the file says anything of it.
    pub given: bool,
    /// Where it listens: loopback unless said.
    pub listen: Option<String>,
    /// The agent of those who name none.
    pub agent: Option<String>,
    /// Names that it is called by, beside those of this machine.
    pub hosts: Vec<String>,
    /// Web pages that may talk to it.
    pub origins: Vec<String>,
    /// Largest request, in bytes.
    pub max_request: usize,
    /// Most requests at the same time.
    pub concurrency: usize,
    /// Most requests of one principal.
    pub rate: Option<Rate>,
    /// How long the conversation of a client that names none stays the same one.
    pub idle: Duration,
    /// How long the stream of an answer lasts, where its client comes back for the rest; until the answer unless said.
    pub stream: Option<Duration>,
    /// Tokens that are known by their digests.
    pub tokens: Vec<Token>,
    /// Tokens that somebody else signs.
    pub jwt: Option<Jwt>,
    /// Certificate and key.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// Where spans of calls are sent, and what is counted of them.
    pub otlp: Option<Otlp>,
}

/// A collector that speaks OTLP over HTTP.
#[derive(Debug, Clone)]
pub struct Otlp {
    /// Its address, without `/v1/traces` or `/v1/metrics`.
    pub endpoint: String,
    /// Headers that it wants.
    pub headers: Vec<(String, Reference)>,
}

/// A token that is known by its digest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token {
    /// Who comes with it.
    pub principal: String,
    /// SHA-256 of the token, in hex.
    pub sha256: String,
    /// As which agents; all unless said.
    pub agents: Option<Vec<String>>,
}

/// Tokens that somebody else signs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Jwt {
    /// Who signs them.
    pub issuer: String,
    /// Whom they are for.
    pub audience: String,
    /// Where the keys are: an address, or a file.
    pub keys: String,
    /// The address by which clients call `/mcp`, where the audience is not that.
    pub resource: Option<String>,
    /// The claim that says who comes.
    pub principal: String,
    /// The claim that names the conversation.
    pub session: Option<String>,
    /// The claim that lists the agents.
    pub agents: Option<String>,
}

impl Default for Gateway {
    fn default() -> Self {
        Self {
            given: false,
            listen: None,
            agent: None,
            hosts: Vec::new(),
            origins: Vec::new(),
            max_request: 4 << 20,
            concurrency: 512,
            rate: None,
            idle: Duration::from_secs(30 * 60),
            stream: None,
            tokens: Vec::new(),
            jwt: None,
            tls: None,
            otlp: None,
        }
    }
}

impl Reader<'_> {
    pub(super) fn gateway(&self, table: &Table<'_>) -> Gateway {
        let mut gateway = Gateway { given: true, ..Gateway::default() };
        let names = |key: &str| table.names(key).unwrap_or_default().into_iter().map(str::to_owned).collect();
        gateway.listen = table.text("listen").map(str::to_owned);
        if let Some(address) = &gateway.listen
            && address.parse::<std::net::SocketAddr>().is_err()
        {
            let problem = Problem::new(format!("`{}` is no address with a port", crate::names::shown(address)));
            table.wrong("listen", problem.help("like `127.0.0.1:7070`"));
        }
        gateway.agent = table.text("agent").map(str::to_owned);
        self.named_agents.borrow_mut().extend(gateway.agent.iter().map(|name| (name.clone(), table.place_of("agent"))));
        (gateway.hosts, gateway.origins) = (names("hosts"), names("origins"));
        for origin in gateway.origins.iter().filter(|origin| !origin.contains("://")) {
            let problem = Problem::new(format!("`{}` is no origin", crate::names::shown(origin)));
            table.wrong("origins", problem.help("like `https://app.example.com:443`"));
        }
        if let Some(bytes) = table.bytes("max_request").and_then(|bytes| usize::try_from(bytes).ok()) {
            gateway.max_request = bytes;
        }
        gateway.concurrency = table.at_once("concurrency").unwrap_or(gateway.concurrency);
        gateway.rate = super::file::rate(table);
        gateway.idle = table.length("idle").unwrap_or(gateway.idle);
        gateway.stream = table.length("stream");
        if gateway.stream.is_some_and(|stream| stream < Duration::from_secs(1)) {
            let problem = Problem::new("a stream of less than a second ends before anything is said in it");
            table.wrong("stream", problem.help("like `stream = \"50s\"`, or nothing for streams that last until the answer"));
        }
        gateway.tokens = table.tables("tokens").iter().filter_map(|table| token(table, self)).collect();
        gateway.jwt = table.table("jwt").and_then(|table| jwt(&table, self));
        gateway.tls = table.table("tls").and_then(|tls| {
            let (certificate, key) = (tls.text("certificate"), tls.text("key"));
            tls.finish("`tls`");
            if !tls.has("certificate") || !tls.has("key") {
                table.wrong("tls", Problem::new("TLS needs a `certificate` and a `key`").help("PEM files, relative to this file"));
            }
            Some((self.beside.join(certificate?), self.beside.join(key?)))
        });
        gateway.otlp = table.table("otlp").and_then(|otlp| {
            let endpoint = otlp.text("endpoint").map(|endpoint| endpoint.trim_end_matches('/').to_owned());
            let headers = self.references(&otlp, "headers");
            for (_, value) in &headers {
                if let Some(problem) = value.problem() {
                    otlp.wrong("headers", problem);
                }
            }
            otlp.finish("`otlp`");
            if !endpoint.as_ref().is_some_and(|endpoint| endpoint.starts_with("http://") || endpoint.starts_with("https://")) {
                let problem = Problem::new("`otlp` needs the `endpoint` of a collector that speaks OTLP over HTTP");
                table.wrong("otlp", problem.help("like `endpoint = \"http://127.0.0.1:4318\"`"));
            }
            Some(Otlp { endpoint: endpoint?, headers })
        });
        table.finish("the gateway");
        gateway
    }
}

fn token(table: &Table<'_>, reader: &Reader<'_>) -> Option<Token> {
    for (key, example) in [("principal", "principal = \"ci\""), ("sha256", "sha256 = \"…\"")] {
        if !table.has(key) {
            let problem = Problem::new(format!("a token needs a `{key}`"));
            table.wrong(key, problem.help(format!("like `{example}`; `toolgate token NAME` makes one")));
        }
    }
    let principal = table.text("principal").map(str::to_owned);
    if principal.as_deref() == Some(CANARY_PRINCIPAL) {
        let problem = Problem::new(format!("nobody is called `{CANARY_PRINCIPAL}` but who tries for toolgate whether the gate holds"));
        table.wrong("principal", problem.help("call whoever comes with this token otherwise"));
    }
    let sha256 = table.text("sha256").map(str::to_ascii_lowercase);
    if sha256.as_ref().is_some_and(|digest| digest.len() != 64 || !digest.bytes().all(|b| b.is_ascii_hexdigit())) {
        table.wrong(
            "sha256",
            Problem::new("a digest has 64 digits of 0-9 and a-f").help("`toolgate token NAME` makes a token and its digest"),
        );
    }
    let agents: Option<Vec<String>> = table.names("agents").map(|names| names.into_iter().map(str::to_owned).collect());
    reader.named_agents.borrow_mut().extend(agents.iter().flatten().map(|name| (name.clone(), table.place_of("agents"))));
    table.finish("a token");
    Some(Token { principal: principal?, sha256: sha256?, agents })
}

fn jwt(table: &Table<'_>, reader: &Reader<'_>) -> Option<Jwt> {
    for (key, example) in [
        ("issuer", "https://login.example.com/"),
        ("audience", "https://gate.example.com/mcp"),
        ("keys", "https://login.example.com/.well-known/jwks.json"),
    ] {
        if !table.has(key) {
            table.wrong(key, Problem::new(format!("`jwt` needs `{key}`")).help(format!("like `{key} = \"{example}\"`")));
        }
    }
    let text = |key: &str| table.text(key).map(str::to_owned);
    let (issuer, audience, keys) = (text("issuer"), text("audience"), text("keys"));
    let keys = keys.map(|keys| match keys.starts_with("https://") || keys.starts_with("http://") {
        true => keys,
        false => reader.beside.join(keys).display().to_string(),
    });
    let resource = text("resource");
    if let Some(resource) = resource.as_ref().filter(|resource| !is_place(resource)) {
        let problem = Problem::new(format!("`{}` is no address by which clients call this", crate::names::shown(resource)));
        table.wrong("resource", problem.help("like `resource = \"https://gate.example.com/mcp\"`"));
    }
    let (principal, session, agents) = (text("principal").unwrap_or_else(|| "sub".to_owned()), text("session"), text("agents"));
    table.finish("`jwt`");
    Some(Jwt { issuer: issuer?, audience: audience?, keys: keys?, resource, principal, session, agents })
}

/// Whether that is an address with a host and perhaps a path, as the schema for editors has it.
fn is_place(text: &str) -> bool {
    let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    rest.is_some_and(|rest| {
        rest.starts_with(|first: char| first.is_ascii_alphanumeric() || first == '[')
            && rest.chars().all(|c| c.is_ascii_alphanumeric() || "[]:./_~%-".contains(c))
    })
}
