//! Runs HTTP tools. Their hosts are fixed when the configuration loads, and addresses are checked
//! when the connection is made.

mod ssrf_guard;

use std::error::Error as _;
use std::net::IpAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use ipnet::IpNet;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, LOCATION, RETRY_AFTER};
use reqwest::{Client, Method, StatusCode, Url};
use serde_json::Value;
use toolgate::{
    CallEffects, CheckedArguments, Failure, FilledPart, Handler, Permit, Template, ToolContext,
};
use toolgate_config::{HttpTool, HttpToolBody};

use crate::http_tool::ssrf_guard::{AddressFilterResolver, is_forbidden};

/// The maximum number of redirects.
const MAX_REDIRECTS: usize = 5;

/// Returns the base of every client: no proxy, and no automatic redirects.
fn base_client() -> reqwest::ClientBuilder {
    Client::builder()
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(Duration::from_secs(10))
        .user_agent(concat!("toolgate/", env!("CARGO_PKG_VERSION")))
}

/// Creates the HTTP client for upstreams.
pub(crate) fn upstream_client() -> reqwest::Result<Client> {
    base_client().pool_idle_timeout(Duration::from_secs(30)).build()
}

/// Creates the handler of an HTTP tool.
pub(crate) fn http_tool_handler(tool: &HttpTool) -> Arc<dyn Handler> {
    let networks = tool.networks.iter().filter_map(|network| {
        network.parse().ok().or_else(|| network.parse::<IpAddr>().ok().map(IpNet::from))
    });
    Arc::new(HttpToolHandler {
        networks: networks.collect(),
        tool: tool.clone(),
        client: OnceLock::new(),
    })
}

struct HttpToolHandler {
    tool: HttpTool,
    networks: Arc<[IpNet]>,
    client: OnceLock<Client>,
}

/// A request that is ready to be sent.
struct PreparedHttpRequest {
    method: Method,
    url: Url,
    headers: HeaderMap,
    body: Option<(Vec<u8>, &'static str)>,
}

/// Returns a failure for a request that was not sent.
fn unsent_failure(code: &'static str, message: String) -> Failure {
    Failure::validation(code, message).effects(CallEffects::None)
}

impl HttpToolHandler {
    fn client(&self) -> Result<&Client, Failure> {
        if let Some(client) = self.client.get() {
            return Ok(client);
        }
        let built = base_client()
            .dns_resolver(Arc::new(AddressFilterResolver(Arc::clone(&self.networks))))
            .build();
        let built = built.map_err(|error| {
            Failure::business("internal_fault", format!("cannot create an HTTP client: {error}"))
                .effects(CallEffects::None)
        })?;
        Ok(self.client.get_or_init(|| built))
    }

    fn prepare_request(&self, arguments: &Value) -> Result<PreparedHttpRequest, Failure> {
        let tool = &self.tool;
        let mut url = self.build_url(arguments)?;
        for (name, template) in &tool.query {
            if let Some(value) = fill_text(template, arguments) {
                url.query_pairs_mut().append_pair(name, &value);
            }
        }
        let mut headers = HeaderMap::new();
        for (name, value) in &tool.headers {
            let header_failure = |why: String| {
                Failure::business(
                    "internal_fault",
                    format!("cannot send the header `{name}`: {why}"),
                )
                .effects(CallEffects::None)
            };
            let name = HeaderName::from_bytes(name.as_bytes())
                .map_err(|error| header_failure(error.to_string()))?;
            let mut value =
                HeaderValue::from_str(&value.resolve_and_remember().map_err(header_failure)?)
                    .map_err(|_| {
                        header_failure("its value is not a valid header value".to_owned())
                    })?;
            value.set_sensitive(true);
            headers.insert(name, value);
        }
        let body = match &tool.body {
            HttpToolBody::None => None,
            HttpToolBody::Arguments => Some((
                toolgate_json::to_canonical_bytes(&unused_arguments(arguments, tool)),
                "application/json",
            )),
            HttpToolBody::Json(template) => Some((
                toolgate_json::to_canonical_bytes(
                    &fill_json(template, arguments).unwrap_or(Value::Null),
                ),
                "application/json",
            )),
            HttpToolBody::Form(fields) => {
                let mut form = url::form_urlencoded::Serializer::new(String::new());
                for (name, template) in fields {
                    if let Some(value) = fill_text(template, arguments) {
                        form.append_pair(name, &value);
                    }
                }
                Some((form.finish().into_bytes(), "application/x-www-form-urlencoded"))
            }
        };
        let method = Method::from_bytes(tool.method.as_bytes())
            .map_err(|error| unsent_failure("invalid_arguments", error.to_string()))?;
        Ok(PreparedHttpRequest { method, url, headers, body })
    }

    /// Builds the URL from the arguments. No argument can change the path that was configured.
    fn build_url(&self, arguments: &Value) -> Result<Url, Failure> {
        let parts =
            self.tool.url.fill(arguments).map_err(|path| {
                unsent_failure("invalid_arguments", format!("`{path}` is required"))
            })?;
        if let Some(FilledPart::Argument(path, _)) = parts
            .iter()
            .find(|part| matches!(part, FilledPart::Argument(_, text) if text.is_empty()))
        {
            return Err(unsent_failure(
                "invalid_arguments",
                format!("`{path}` is empty, which would change the address of the request"),
            ));
        }
        let text: String = parts
            .iter()
            .map(|part| match part {
                FilledPart::Text(text) => (*text).to_owned(),
                FilledPart::Argument(_, text) => {
                    crate::http_tool::ssrf_guard::percent_encoded(text)
                }
            })
            .collect();
        let url = Url::parse(&text).map_err(|error| {
            unsent_failure(
                "invalid_arguments",
                format!("the arguments do not form a valid URL: {error}"),
            )
        })?;
        // A value such as `..` would be resolved and change the path.
        let after_host = text
            .split_once("://")
            .and_then(|(_, rest)| rest.split_once(['/', '?']))
            .map_or("", |(_, rest)| rest);
        let path = after_host.split('?').next().unwrap_or_default();
        let begins_with_path = text.split_once("://").is_some_and(|(_, rest)| {
            rest.find(['/', '?']).and_then(|at| rest.get(at..=at)) == Some("/")
        });
        if begins_with_path && url.path() != format!("/{path}") {
            return Err(unsent_failure(
                "invalid_arguments",
                "an argument would change the path of the request".to_owned(),
            ));
        }
        Ok(url)
    }

    /// Checks that the tool may send requests to a URL.
    fn check_target(&self, url: &Url) -> Result<(), Failure> {
        let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']).to_ascii_lowercase();
        let refuse = |why: &str| {
            Failure::permission(
                "host_forbidden",
                format!("the request would go to `{host}`, {why}"),
            )
        };
        if !matches!(url.scheme(), "http" | "https") || !self.tool.hosts.contains(&host) {
            return Err(refuse("which is not one of the `hosts` of this tool"));
        }
        // Host names are checked when they are resolved.
        match host.parse::<IpAddr>() {
            Ok(address) if is_forbidden(address, &self.networks) => {
                Err(refuse("which is a private or local address"))
            }
            _ => Ok(()),
        }
    }

    /// Sends the request. Returns the response, and whether it came without a redirect.
    async fn send(
        &self,
        mut prepared: PreparedHttpRequest,
    ) -> Result<(reqwest::Response, bool), Failure> {
        self.check_target(&prepared.url).map_err(|failure| failure.effects(CallEffects::None))?;
        for redirects in 0..=MAX_REDIRECTS {
            let mut request = self
                .client()?
                .request(prepared.method.clone(), prepared.url.clone())
                .headers(prepared.headers.clone());
            if let Some((body, kind)) = &prepared.body {
                // A configured content type takes precedence: two headers would be ambiguous.
                if !prepared.headers.contains_key(CONTENT_TYPE) {
                    request = request.header(CONTENT_TYPE, *kind);
                }
                request = request.body(body.clone());
            }
            // A redirect means that the first request was sent.
            let answer =
                request.send().await.map_err(|error| connection_failure(&error, redirects == 0))?;
            let status = answer.status();
            let target = answer
                .headers()
                .get(LOCATION)
                .filter(|_| status.is_redirection())
                .and_then(|location| location.to_str().ok());
            let Some(target) = target.and_then(|location| prepared.url.join(location).ok()) else {
                return Ok((answer, redirects == 0));
            };
            self.check_target(&target)?;
            // Do not send headers to another origin, and do not follow a redirect from HTTPS to
            // HTTP.
            if target.origin() != prepared.url.origin() {
                prepared.headers.clear();
                if prepared.url.scheme() == "https" && target.scheme() != "https" {
                    return Err(Failure::permission(
                        "host_forbidden",
                        "the service redirects from HTTPS to an unencrypted address",
                    ));
                }
            }
            let is_read = matches!(prepared.method, Method::GET | Method::HEAD);
            match status {
                // The response is at another URL.
                StatusCode::SEE_OTHER if !is_read => {
                    (prepared.method, prepared.body) = (Method::GET, None)
                }
                StatusCode::TEMPORARY_REDIRECT | StatusCode::PERMANENT_REDIRECT => {}
                _ if is_read => {}
                // Repeating the request with another method would change its meaning.
                _ => {
                    return Err(Failure::business(
                        "tool_failed",
                        "the service has moved; correct the address of the tool",
                    ));
                }
            }
            prepared.url = target;
        }
        Err(Failure::business("tool_failed", "the service redirects too many times"))
    }
}

#[async_trait]
impl Handler for HttpToolHandler {
    async fn run(
        &self,
        _: &Permit,
        _: ToolContext,
        arguments: &CheckedArguments,
    ) -> Result<Value, Failure> {
        let prepared = self.prepare_request(arguments.value())?;
        let (answer, is_direct) = self.send(prepared).await?;
        let status = answer.status();
        let wait = retry_after_ms(answer.headers());
        let (text, is_truncated) = read_limited(answer, self.tool.max_response_bytes).await?;
        if !status.is_success() {
            let body = String::from_utf8_lossy(&text);
            let failure = Failure::http(status.as_u16(), &self.tool.redact_secrets(&body));
            let failure = if status.is_redirection() {
                Failure::business("tool_failed", "the service redirects without a usable target")
            } else if is_direct && status.is_client_error() && status != StatusCode::REQUEST_TIMEOUT
            {
                // The request was rejected, so it was not executed.
                failure.effects(CallEffects::None)
            } else {
                failure
            };
            return Err(match wait {
                Some(ms) => failure.retry_after_ms(ms),
                None => failure,
            });
        }
        if is_truncated {
            return Err(Failure::business(
                "invalid_result",
                format!("the response exceeds {} bytes", self.tool.max_response_bytes),
            ));
        }
        let bounds = toolgate_json::JsonBounds {
            bytes: self.tool.max_response_bytes,
            ..toolgate_json::JsonBounds::default()
        };
        let value = match text.is_empty() {
            true => Value::Null,
            false => toolgate_json::parse(&text, &bounds)
                .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&text).into_owned())),
        };
        Ok(toolgate::strip_reserved_fields(&value).unwrap_or(value))
    }
}

/// Parses `Retry-After` in seconds, and returns milliseconds.
pub(crate) fn parse_retry_after_ms(value: &str) -> Option<u64> {
    value.trim().parse::<u64>().ok().map(|seconds| seconds.saturating_mul(1_000))
}

/// Returns the retry delay of a response in milliseconds.
pub(crate) fn retry_after_ms(headers: &HeaderMap) -> Option<u64> {
    headers.get(RETRY_AFTER)?.to_str().ok().and_then(parse_retry_after_ms)
}

/// Reads at most `max_bytes` of a body, and returns whether the body has more.
async fn read_limited(
    mut answer: reqwest::Response,
    max_bytes: usize,
) -> Result<(Vec<u8>, bool), Failure> {
    let mut text = Vec::new();
    loop {
        match answer.chunk().await {
            Ok(Some(chunk)) if text.len() + chunk.len() > max_bytes => {
                text.extend(chunk.iter().take(max_bytes - text.len()));
                return Ok((text, true));
            }
            Ok(Some(chunk)) => text.extend_from_slice(&chunk),
            Ok(None) => return Ok((text, false)),
            Err(error) => return Err(connection_failure(&error, false)),
        }
    }
}

/// Classifies a connection error. If no connection was opened, nothing was sent.
fn connection_failure(error: &reqwest::Error, is_first_request: bool) -> Failure {
    let without_effects = |failure: Failure| {
        if is_first_request { failure.effects(CallEffects::None) } else { failure }
    };
    let mut cause = error.source();
    while let Some(inner) = cause {
        if let Some(forbidden) =
            inner.downcast_ref::<crate::http_tool::ssrf_guard::ForbiddenAddressError>()
        {
            return without_effects(Failure::permission("host_forbidden", forbidden.to_string()));
        }
        cause = inner.source();
    }
    let problem = match (error.is_timeout(), error.is_connect()) {
        (true, _) => "the service behind the tool did not respond in time",
        (_, true) => "cannot reach the service behind the tool",
        _ => "the connection to the service behind the tool failed",
    };
    let failure = Failure::transient("upstream_unavailable", problem);
    if error.is_connect() { without_effects(failure) } else { failure }
}

/// Fills a template; `None` if an argument is absent.
fn fill_text(template: &Template, arguments: &Value) -> Option<String> {
    let parts = template.fill(arguments).ok()?;
    Some(
        parts
            .into_iter()
            .map(|part| match part {
                FilledPart::Text(text) => text.to_owned(),
                FilledPart::Argument(_, text) => text,
            })
            .collect(),
    )
}

/// Fills a JSON template; `None` if an argument is absent.
fn fill_json(template: &Value, arguments: &Value) -> Option<Value> {
    match template {
        Value::String(text) => {
            let template = Template::new(text);
            match template.as_single_argument() {
                Some(path) => path.get(arguments).cloned(),
                None => fill_text(&template, arguments).map(Value::String),
            }
        }
        Value::Array(items) => {
            Some(Value::Array(items.iter().filter_map(|item| fill_json(item, arguments)).collect()))
        }
        Value::Object(map) => Some(Value::Object(
            map.iter()
                .filter_map(|(key, item)| Some((key.clone(), fill_json(item, arguments)?)))
                .collect(),
        )),
        other => Some(other.clone()),
    }
}

/// Returns the arguments that the URL does not use.
fn unused_arguments(arguments: &Value, tool: &HttpTool) -> Value {
    let Value::Object(map) = arguments else { return arguments.clone() };
    let paths = tool
        .url
        .argument_paths()
        .chain(tool.query.iter().flat_map(|(_, template)| template.argument_paths()));
    let used_names: Vec<String> = paths
        .filter_map(|path| {
            path.to_string().strip_prefix('/').filter(|name| !name.contains('/')).map(str::to_owned)
        })
        .collect();
    Value::Object(
        map.iter()
            .filter(|(key, _)| !used_names.contains(key))
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect(),
    )
}
