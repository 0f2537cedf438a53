//! Tools that are requests to a web service. Where they may go is fixed when the configuration loads; what a name stands for is
//! looked at when the connection is made.

mod address;

use std::error::Error as _;
use std::net::IpAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use ipnet::IpNet;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, LOCATION, RETRY_AFTER};
use reqwest::{Client, Method, StatusCode, Url};
use serde_json::Value;
use toolgate::config::{Body, HttpTool};
use toolgate::{Ctx, Effects, Failure, Filled, Handler, Judged, Permit, Template};

use address::{Guard, is_forbidden};

/// Most redirects that are followed.
const HOPS: usize = 5;

/// What every client here is: no proxy is asked, and nothing is followed anywhere unseen.
fn plain() -> reqwest::ClientBuilder {
    Client::builder()
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(Duration::from_secs(10))
        .user_agent(concat!("toolgate/", env!("CARGO_PKG_VERSION")))
}

/// A client for upstreams: connections are kept.
pub(crate) fn client() -> reqwest::Result<Client> {
    plain().pool_idle_timeout(Duration::from_secs(30)).build()
}

/// What makes the requests behind an HTTP tool.
pub(crate) fn tool(tool: &HttpTool) -> Arc<dyn Handler> {
    let networks =
        tool.networks.iter().filter_map(|network| network.parse().ok().or_else(|| network.parse::<IpAddr>().ok().map(IpNet::from)));
    Arc::new(Runner { networks: networks.collect(), tool: tool.clone(), client: OnceLock::new() })
}

struct Runner {
    tool: HttpTool,
    networks: Arc<[IpNet]>,
    client: OnceLock<Client>,
}

/// A request that is ready.
struct Ready {
    method: Method,
    url: Url,
    headers: HeaderMap,
    body: Option<(Vec<u8>, &'static str)>,
}

/// Nothing was sent.
fn refused(code: &'static str, message: String) -> Failure {
    Failure::validation(code, message).effects(Effects::None)
}

impl Runner {
    fn client(&self) -> Result<&Client, Failure> {
        if let Some(client) = self.client.get() {
            return Ok(client);
        }
        let built = plain().dns_resolver(Arc::new(Guard(Arc::clone(&self.networks)))).build();
        let built = built
            .map_err(|error| Failure::business("internal_fault", format!("no request can be made: {error}")).effects(Effects::None))?;
        Ok(self.client.get_or_init(|| built))
    }

    fn ready(&self, arguments: &Value) -> Result<Ready, Failure> {
        let tool = &self.tool;
        let mut url = self.url(arguments)?;
        for (name, template) in &tool.query {
            if let Some(value) = optional(template, arguments) {
                url.query_pairs_mut().append_pair(name, &value);
            }
        }
        let mut headers = HeaderMap::new();
        for (name, value) in &tool.headers {
            let missing = |why: String| {
                Failure::business("internal_fault", format!("the header `{name}` cannot be sent: {why}")).effects(Effects::None)
            };
            let name = HeaderName::from_bytes(name.as_bytes()).map_err(|error| missing(error.to_string()))?;
            let mut value = HeaderValue::from_str(&value.take().map_err(missing)?)
                .map_err(|_| missing("its value is no text for a header".to_owned()))?;
            value.set_sensitive(true);
            headers.insert(name, value);
        }
        let body = match &tool.body {
            Body::None => None,
            Body::Arguments => Some((toolgate::json::canonical(&rest(arguments, tool)), "application/json")),
            Body::Json(template) => {
                Some((toolgate::json::canonical(&filled(template, arguments).unwrap_or(Value::Null)), "application/json"))
            }
            Body::Form(fields) => {
                let mut form = url::form_urlencoded::Serializer::new(String::new());
                for (name, template) in fields {
                    if let Some(value) = optional(template, arguments) {
                        form.append_pair(name, &value);
                    }
                }
                Some((form.finish().into_bytes(), "application/x-www-form-urlencoded"))
            }
        };
        let method = Method::from_bytes(tool.method.as_bytes()).map_err(|error| refused("invalid_arguments", error.to_string()))?;
        Ok(Ready { method, url, headers, body })
    }

    /// The address with the arguments in it. No argument leads to another path than the one that was written.
    fn url(&self, arguments: &Value) -> Result<Url, Failure> {
        let parts = self.tool.url.fill(arguments).map_err(|path| refused("invalid_arguments", format!("`{path}` is needed")))?;
        if let Some(Filled::Argument(path, _)) = parts.iter().find(|part| matches!(part, Filled::Argument(_, text) if text.is_empty())) {
            return Err(refused("invalid_arguments", format!("`{path}` is empty, and would lead to another address")));
        }
        let text: String = parts
            .iter()
            .map(|part| match part {
                Filled::Text(text) => (*text).to_owned(),
                Filled::Argument(_, text) => address::encoded(text),
            })
            .collect();
        let url = Url::parse(&text).map_err(|error| refused("invalid_arguments", format!("the address cannot be made: {error}")))?;
        // A value like `..` would be resolved, and the path would be another one.
        let written = text.split_once("://").and_then(|(_, rest)| rest.split_once(['/', '?'])).map_or("", |(_, rest)| rest);
        let path = written.split('?').next().unwrap_or_default();
        let begins_with_path =
            text.split_once("://").is_some_and(|(_, rest)| rest.find(['/', '?']).and_then(|at| rest.get(at..=at)) == Some("/"));
        if begins_with_path && url.path() != format!("/{path}") {
            return Err(refused("invalid_arguments", "an argument would lead to another path".to_owned()));
        }
        Ok(url)
    }

    /// Whether a request may go there at all.
    fn may_go(&self, url: &Url) -> Result<(), Failure> {
        let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']).to_ascii_lowercase();
        let refuse = |why: &str| Failure::permission("host_forbidden", format!("the request would go to `{host}`, {why}"));
        if !matches!(url.scheme(), "http" | "https") || !self.tool.hosts.contains(&host) {
            return Err(refuse("which is none of the hosts of this tool"));
        }
        // A name is looked at when it is resolved.
        match host.parse::<IpAddr>() {
            Ok(address) if is_forbidden(address, &self.networks) => Err(refuse("which is a private or local address")),
            _ => Ok(()),
        }
    }

    /// The answer, and whether it is that of the address itself.
    async fn send(&self, mut ready: Ready) -> Result<(reqwest::Response, bool), Failure> {
        self.may_go(&ready.url).map_err(|failure| failure.effects(Effects::None))?;
        for hop in 0..=HOPS {
            let mut request = self.client()?.request(ready.method.clone(), ready.url.clone()).headers(ready.headers.clone());
            if let Some((body, kind)) = &ready.body {
                // One that the file says counts: two of them would be read by some as one, and by others as the other.
                if !ready.headers.contains_key(CONTENT_TYPE) {
                    request = request.header(CONTENT_TYPE, *kind);
                }
                request = request.body(body.clone());
            }
            // What was answered before was sent before.
            let answer = request.send().await.map_err(|error| unreachable(&error, hop == 0))?;
            let status = answer.status();
            let target = answer.headers().get(LOCATION).filter(|_| status.is_redirection()).and_then(|to| to.to_str().ok());
            let Some(target) = target.and_then(|to| ready.url.join(to).ok()) else { return Ok((answer, hop == 0)) };
            self.may_go(&target)?;
            // What was meant for one host is not for another, and nothing is said in the open that was said in private.
            if target.origin() != ready.url.origin() {
                ready.headers.clear();
                if ready.url.scheme() == "https" && target.scheme() != "https" {
                    return Err(Failure::permission("host_forbidden", "the service leads from an encrypted address to one that is not"));
                }
            }
            let reads = matches!(ready.method, Method::GET | Method::HEAD);
            match status {
                // The answer stands elsewhere.
                StatusCode::SEE_OTHER if !reads => (ready.method, ready.body) = (Method::GET, None),
                StatusCode::TEMPORARY_REDIRECT | StatusCode::PERMANENT_REDIRECT => {}
                _ if reads => {}
                // Made again as something else, it would not be what was asked for.
                _ => return Err(Failure::business("tool_failed", "the service has moved; correct the address of the tool")),
            }
            ready.url = target;
        }
        Err(Failure::business("tool_failed", "the service leads from one address to the next without end"))
    }
}

#[async_trait]
impl Handler for Runner {
    async fn run(&self, _: &Permit, _: Ctx, arguments: &Judged) -> Result<Value, Failure> {
        let ready = self.ready(arguments.value())?;
        let (answer, first) = self.send(ready).await?;
        let status = answer.status();
        let wait = wait_of(answer.headers());
        let (text, more) = read(answer, self.tool.most).await?;
        if !status.is_success() {
            let said = String::from_utf8_lossy(&text);
            let failure = Failure::http(status.as_u16(), &self.tool.without_secrets(&said));
            let failure = if status.is_redirection() {
                Failure::business("tool_failed", "the service leads elsewhere, and does not say where")
            } else if first && status.is_client_error() && status != StatusCode::REQUEST_TIMEOUT {
                // Refused at the door: nothing was carried out.
                failure.effects(Effects::None)
            } else {
                failure
            };
            return Err(match wait {
                Some(ms) => failure.retry_after_ms(ms),
                None => failure,
            });
        }
        if more {
            return Err(Failure::business("invalid_result", format!("the answer is longer than {} bytes", self.tool.most)));
        }
        let bounds = toolgate::json::Bounds { bytes: self.tool.most, ..toolgate::json::Bounds::default() };
        let value = match text.is_empty() {
            true => Value::Null,
            false => toolgate::json::parse(&text, &bounds).unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&text).into_owned())),
        };
        Ok(toolgate::without_contract(&value).unwrap_or(value))
    }
}

/// After how many milliseconds a service wants to be asked again, where it says so in seconds (`Retry-After`).
pub(crate) fn wait_ms(said: &str) -> Option<u64> {
    said.trim().parse::<u64>().ok().map(|seconds| seconds.saturating_mul(1_000))
}

/// The same, of what was answered.
pub(crate) fn wait_of(headers: &HeaderMap) -> Option<u64> {
    headers.get(RETRY_AFTER)?.to_str().ok().and_then(wait_ms)
}

/// What an answer says, and whether it says more than that.
async fn read(mut answer: reqwest::Response, most: usize) -> Result<(Vec<u8>, bool), Failure> {
    let mut text = Vec::new();
    loop {
        match answer.chunk().await {
            Ok(Some(chunk)) if text.len() + chunk.len() > most => {
                text.extend(chunk.iter().take(most - text.len()));
                return Ok((text, true));
            }
            Ok(Some(chunk)) => text.extend_from_slice(&chunk),
            Ok(None) => return Ok((text, false)),
            Err(error) => return Err(unreachable(&error, false)),
        }
    }
}

/// A service that cannot be reached. Who was never connected was sent nothing.
fn unreachable(error: &reqwest::Error, first: bool) -> Failure {
    let untouched = |failure: Failure| if first { failure.effects(Effects::None) } else { failure };
    let mut cause = error.source();
    while let Some(inner) = cause {
        if let Some(forbidden) = inner.downcast_ref::<address::Forbidden>() {
            return untouched(Failure::permission("host_forbidden", forbidden.to_string()));
        }
        cause = inner.source();
    }
    let what = match (error.is_timeout(), error.is_connect()) {
        (true, _) => "the service behind the tool did not answer in time",
        (_, true) => "the service behind the tool cannot be reached",
        _ => "the connection to the service behind the tool broke",
    };
    let failure = Failure::transient("upstream_unavailable", what);
    if error.is_connect() { untouched(failure) } else { failure }
}

/// A template, where all of its arguments are there.
fn optional(template: &Template, arguments: &Value) -> Option<String> {
    let parts = template.fill(arguments).ok()?;
    Some(
        parts
            .into_iter()
            .map(|part| match part {
                Filled::Text(text) => text.to_owned(),
                Filled::Argument(_, text) => text,
            })
            .collect(),
    )
}

/// JSON with the arguments in it; `None` where one is absent.
fn filled(template: &Value, arguments: &Value) -> Option<Value> {
    match template {
        Value::String(text) => {
            let template = Template::new(text);
            match template.whole() {
                Some(path) => path.get(arguments).cloned(),
                None => optional(&template, arguments).map(Value::String),
            }
        }
        Value::Array(items) => Some(Value::Array(items.iter().filter_map(|item| filled(item, arguments)).collect())),
        Value::Object(map) => {
            Some(Value::Object(map.iter().filter_map(|(key, item)| Some((key.clone(), filled(item, arguments)?))).collect()))
        }
        other => Some(other.clone()),
    }
}

/// The arguments without those that stand in the address.
fn rest(arguments: &Value, tool: &HttpTool) -> Value {
    let Value::Object(map) = arguments else { return arguments.clone() };
    let named = tool.url.named().chain(tool.query.iter().flat_map(|(_, template)| template.named()));
    let used: Vec<String> =
        named.filter_map(|path| path.to_string().strip_prefix('/').filter(|name| !name.contains('/')).map(str::to_owned)).collect();
    Value::Object(map.iter().filter(|(key, _)| !used.contains(key)).map(|(key, value)| (key.clone(), value.clone())).collect())
}
