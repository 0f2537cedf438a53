//! Reads tools that make HTTP requests.

use std::time::Duration;

use serde_json::Value;

use crate::config::ConfigReader;
use crate::secret_ref::SecretRef;
use toolgate::policy::Diagnostic;
use toolgate::policy::source::table_reader::TomlTable;
use toolgate::tool::{RetrySettings, Template};

/// The HTTP request of a tool. The backend that runs it must enforce [`HttpTool::hosts`].
#[derive(Debug, Clone)]
pub struct HttpTool {
    /// The method, in upper case.
    pub method: String,
    /// The URL; only its path and query may contain arguments.
    pub url: Template,
    /// Query parameters. A parameter whose argument is absent is left out.
    pub query: Vec<(String, Template)>,
    /// Headers of the request.
    pub headers: Vec<(String, SecretRef)>,
    /// Body of the request.
    pub body: HttpToolBody,
    /// Allowed hosts, also after a redirect. The default is the host of the URL.
    pub hosts: Vec<String>,
    /// Private or local networks that are allowed: `10.0.0.0/8`, `127.0.0.1`.
    pub networks: Vec<String>,
    /// Maximum size of a response in bytes.
    pub max_response_bytes: usize,
}

/// The body of a request.
#[derive(Debug, Clone, PartialEq)]
pub enum HttpToolBody {
    /// No body.
    None,
    /// The arguments as JSON, without those that the URL contains.
    Arguments,
    /// JSON in which `"{/path}"` is replaced by an argument.
    Json(Value),
    /// A form in which `{/path}` is replaced by an argument. A field whose argument is absent is
    /// left out.
    Form(Vec<(String, Template)>),
}

impl HttpTool {
    /// Removes the secrets of the headers from a text.
    #[must_use]
    pub fn redact_secrets(&self, text: &str) -> String {
        crate::secret_ref::redact_references(self.headers.iter().map(|(_, value)| value), text)
    }
}

/// The parsed request, the statuses of an empty result, and the retries.
type HttpToolParts = (HttpTool, Vec<u16>, Option<RetrySettings>);

impl ConfigReader<'_> {
    /// Reads the request, the statuses that mean an empty result, and the retries.
    pub(crate) fn read_http_tool(
        &self,
        table: &TomlTable<'_>,
        input: &Value,
    ) -> Option<HttpToolParts> {
        let method = table.text("method").unwrap_or("GET").to_ascii_uppercase();
        if !["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"].contains(&method.as_str()) {
            let problem = Diagnostic::new(format!(
                "unknown method `{}`",
                toolgate_text::escape_for_display(&method)
            ));
            table.report(
                "method",
                problem.with_help("expected one of GET, HEAD, POST, PUT, PATCH, DELETE"),
            );
        }
        let url = table.text("url");
        if !table.has_key("url") {
            let problem = Diagnostic::new("an HTTP tool needs a `url`");
            table.report(
                "kind",
                problem.with_help("like `url = \"https://api.example.com/orders/{/order_id}\"`"),
            );
        }
        let url = url.map(Template::new);
        let host = url.as_ref().and_then(|url| fixed_host(table, url));
        let pairs = |key: &str| -> Vec<(String, Template)> {
            let Some(inner) = table.table(key) else { return Vec::new() };
            inner
                .keys()
                .into_iter()
                .filter_map(|name| {
                    inner.text(&name).map(|text| (name.clone(), Template::new(text)))
                })
                .collect()
        };
        let (query, form) = (pairs("query"), pairs("form"));
        let form = table.has_key("form").then_some(form);
        let sends = matches!(method.as_str(), "POST" | "PUT" | "PATCH");
        let body = match (table.value("body"), form) {
            (Some(_), Some(_)) => {
                table.report(
                    "form",
                    Diagnostic::new("a request has a `body` or a `form`, not both")
                        .with_help("remove one of them"),
                );
                HttpToolBody::None
            }
            (Some(json), None) => HttpToolBody::Json(json),
            (None, Some(form)) => HttpToolBody::Form(form),
            (None, None) if sends => HttpToolBody::Arguments,
            (None, None) => HttpToolBody::None,
        };
        let named = url.iter().chain(query.iter().map(|(_, value)| value)).chain(match &body {
            HttpToolBody::Form(form) => form.iter().map(|(_, value)| value).collect::<Vec<_>>(),
            _ => Vec::new(),
        });
        let mut paths: Vec<(&str, String)> = named
            .flat_map(Template::argument_paths)
            .map(|path| ("url", path.to_string()))
            .collect();
        if let HttpToolBody::Json(json) = &body {
            collect_arguments(json, &mut paths);
        }
        let properties = input.get("properties").and_then(Value::as_object);
        for (key, path) in paths {
            let first = path.split('/').nth(1).unwrap_or_default().to_owned();
            if properties.is_none_or(|properties| !properties.contains_key(&first)) {
                let problem = Diagnostic::new(format!("`{path}` is not an argument of this tool"));
                let known = properties.into_iter().flat_map(|properties| properties.keys());
                table.report(
                    key,
                    problem
                        .with_suggestion(&first, known)
                        .with_default_help("declare it in `input`"),
                );
            }
        }
        let headers = self.read_references(table, "headers");
        for (name, _) in &headers {
            let is_valid = !name.is_empty()
                && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b));
            if !is_valid
                || ["host", "content-length", "transfer-encoding", "connection"]
                    .contains(&name.to_ascii_lowercase().as_str())
            {
                let problem = Diagnostic::new(format!(
                    "the header `{}` cannot be set",
                    toolgate_text::escape_for_display(name)
                ));
                table.report(
                    "headers",
                    problem.with_help("use letters, digits, `_` and `-`; the host and the length are set automatically"),
                );
            }
        }
        let hosts = table
            .names("hosts")
            .map(|names| names.into_iter().map(str::to_ascii_lowercase).collect());
        let networks: Vec<String> =
            table.names("networks").unwrap_or_default().into_iter().map(str::to_owned).collect();
        for network in networks.iter().filter(|network| !is_network(network)) {
            let problem = Diagnostic::new(format!(
                "`{}` is not a network",
                toolgate_text::escape_for_display(network)
            ));
            table.report(
                "networks",
                problem.with_help("like `10.0.0.0/8`, `127.0.0.1` or `fd00::/8`"),
            );
        }
        let most = table
            .bytes("max_response")
            .and_then(|bytes| usize::try_from(bytes).ok())
            .unwrap_or(1 << 20);
        let empty = read_statuses(table, "empty_on");
        let retry = table.table("retry").map(|retry| {
            let (times, delay) = (
                retry.count("times"),
                retry.duration("delay").and_then(|delay| Duration::try_from(delay).ok()),
            );
            retry.reject_unknown_keys("`retry`");
            // Missing keys have the defaults of [`RetrySettings`].
            let usual = RetrySettings::default();
            let times = times.and_then(|times| u32::try_from(times).ok()).unwrap_or(usual.times);
            RetrySettings { times, delay: delay.unwrap_or(usual.delay) }
        });
        let hosts = hosts.unwrap_or_else(|| host.into_iter().collect());
        Some((
            HttpTool {
                method,
                url: url?,
                query,
                headers,
                body,
                hosts,
                networks,
                max_response_bytes: most,
            },
            empty,
            retry,
        ))
    }
}

/// Returns the host of the URL. The host must be fixed, so that no argument can choose where a
/// request goes.
fn fixed_host(table: &TomlTable<'_>, url: &Template) -> Option<String> {
    let head = url.literal_prefix();
    let rest = head.strip_prefix("https://").or_else(|| head.strip_prefix("http://"));
    let Some(rest) = rest else {
        table.report(
            "url",
            Diagnostic::new("the URL must begin with `https://` or `http://`")
                .with_help("like `https://api.example.com/orders`"),
        );
        return None;
    };
    let end = rest.find(['/', '?']);
    let authority = end.and_then(|end| rest.get(..end)).unwrap_or(rest);
    // Without a `/` before it, an argument would extend the host.
    if end.is_none() && url.argument_paths().next().is_some() {
        let problem = Diagnostic::new("an argument must not be part of the host");
        table.report(
            "url",
            problem.with_help("the host is fixed; put arguments into the path or the query"),
        );
        return None;
    }
    if authority.is_empty() || authority.contains('@') || head.contains('#') {
        table.report(
            "url",
            Diagnostic::new("the URL has no host, or it contains a user or a fragment")
                .with_help("like `https://api.example.com/orders`"),
        );
        return None;
    }
    let host = match authority.strip_prefix('[') {
        Some(v6) => v6.split(']').next().unwrap_or_default(),
        None => authority.split(':').next().unwrap_or_default(),
    };
    Some(host.to_ascii_lowercase())
}

/// Reads HTTP statuses.
fn read_statuses(table: &TomlTable<'_>, key: &str) -> Vec<u16> {
    let status = |value: &Value| {
        value
            .as_u64()
            .and_then(|status| u16::try_from(status).ok())
            .filter(|status| (100..600).contains(status))
    };
    let written = table.values(key).unwrap_or_default();
    if let Some(wrong) = written.iter().find(|value| status(value).is_none()) {
        let problem = Diagnostic::new(format!(
            "`{}` is not an HTTP status",
            toolgate_text::escape_for_display(&wrong.to_string())
        ));
        table.report(
            key,
            problem.with_help(format!("use numbers from 100 to 599, like `{key} = [404]`")),
        );
    }
    written.iter().filter_map(status).collect()
}

/// Collects the arguments that a body contains.
fn collect_arguments(value: &Value, paths: &mut Vec<(&str, String)>) {
    match value {
        Value::String(text) => paths
            .extend(Template::new(text).argument_paths().map(|path| ("body", path.to_string()))),
        Value::Array(items) => items.iter().for_each(|item| collect_arguments(item, paths)),
        Value::Object(map) => map.values().for_each(|item| collect_arguments(item, paths)),
        _ => {}
    }
}

fn is_network(text: &str) -> bool {
    let (address, bits) =
        text.split_once('/').map_or((text, None), |(address, bits)| (address, Some(bits)));
    let Ok(address) = address.parse::<std::net::IpAddr>() else { return false };
    let most = if address.is_ipv4() { 32 } else { 128 };
    bits.is_none_or(|bits| bits.parse::<u8>().is_ok_and(|bits| bits <= most))
}
