//! Fetches access tokens for upstreams with the client credentials grant (OAuth 2.1).
//!
//! If only the issuer is configured, its metadata names the token endpoint (RFC 8414). The secret
//! is sent only there, whatever the upstream's metadata says.

use std::time::Duration;

use reqwest::header::{ACCEPT, WWW_AUTHENTICATE};
use reqwest::{Client, Url};
use serde_json::Value;
use toolgate_config::{SecretRef, TokenSource};

/// The timeout of one HTTP request.
const OAUTH_REQUEST_TIMEOUT: Duration = Duration::from_secs(20);

/// A request for an access token.
pub(super) struct AccessTokenRequest<'a> {
    pub(super) source: &'a TokenSource,
    pub(super) client_id: &'a SecretRef,
    pub(super) client_secret: &'a SecretRef,
    pub(super) scope: Option<&'a str>,
}

impl AccessTokenRequest<'_> {
    /// Fetches a token for an upstream.
    pub(super) async fn fetch_token(
        &self,
        client: &Client,
        upstream: &str,
    ) -> Result<String, String> {
        let (id, secret) =
            (self.client_id.resolve_and_remember()?, self.client_secret.resolve_and_remember()?);
        self.request_token(client, upstream, &id, &secret)
            .await
            .map_err(|why| format!("cannot get an access token: {why}"))
    }

    async fn request_token(
        &self,
        client: &Client,
        upstream: &str,
        id: &str,
        secret: &str,
    ) -> Result<String, String> {
        let mut form = vec![("grant_type", "client_credentials".to_owned())];
        let mut scope = self.scope.map(str::to_owned);
        let (url, has_form_credentials) = match self.source {
            TokenSource::Url(url) => (url.clone(), false),
            TokenSource::Issuer(issuer) => {
                let metadata = ProtectedResourceMetadata::load(client, upstream, issuer).await?;
                let endpoint = TokenEndpoint::discover(client, issuer).await?;
                scope = scope.or(metadata.scope);
                form.push(("resource", metadata.resource));
                (endpoint.url, endpoint.has_form_credentials)
            }
        };
        form.extend(scope.map(|scope| ("scope", scope)));
        let mut request = client.post(&url).timeout(OAUTH_REQUEST_TIMEOUT);
        if has_form_credentials {
            form.extend([("client_id", id.to_owned()), ("client_secret", secret.to_owned())]);
        } else {
            request = request.basic_auth(form_encoded(id), Some(form_encoded(secret)));
        }
        let (status, answer) = send_json_request(request.form(&form)).await?;
        if status != 200 {
            return Err(format!("the token endpoint answered with status {status}"));
        }
        string_field(&answer, "access_token")
            .ok_or_else(|| "the token endpoint returned no `access_token`".to_owned())
    }
}

/// Encodes a credential for the `Authorization` header (RFC 6749, section 2.3.1).
fn form_encoded(text: &str) -> String {
    url::form_urlencoded::byte_serialize(text.as_bytes()).collect()
}

/// The protected resource metadata of an upstream (RFC 9728).
struct ProtectedResourceMetadata {
    /// The resource identifier.
    resource: String,
    scope: Option<String>,
}

impl ProtectedResourceMetadata {
    async fn load(client: &Client, upstream: &str, issuer: &str) -> Result<Self, String> {
        let address = Url::parse(upstream).map_err(|error| format!("`url`: {error}"))?;
        let request = client
            .get(address.clone())
            .header(ACCEPT, "application/json, text/event-stream")
            .timeout(OAUTH_REQUEST_TIMEOUT);
        let answer = request.send().await.map_err(|error| error.without_url().to_string())?;
        let challenge = answer
            .headers()
            .get(WWW_AUTHENTICATE)
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default()
            .to_owned();
        // Close the response: a server that does not reject it may stream forever.
        drop(answer);
        // Use only metadata of the same origin.
        let metadata_url = challenge_parameter(&challenge, "resource_metadata")
            .and_then(|url| Url::parse(&url).ok());
        let urls = metadata_url
            .filter(|url| url.origin() == address.origin())
            .into_iter()
            .chain(well_known_urls(&address, "oauth-protected-resource"));
        let Some(metadata) = first_json_object(client, urls).await? else {
            // Without metadata, the URL is the resource identifier.
            return Ok(Self {
                resource: resource_identifier(&address),
                scope: challenge_parameter(&challenge, "scope"),
            });
        };
        let resource = string_field(&metadata, "resource")
            .ok_or("the resource metadata of the upstream has no `resource`")?;
        if !Url::parse(&resource).is_ok_and(|resource| is_same_or_parent(&resource, &address)) {
            return Err(format!(
                "the resource metadata of the upstream names another resource: `{}`",
                truncate_text(&resource)
            ));
        }
        let issuers = string_array_field(&metadata, "authorization_servers");
        if !issuers
            .iter()
            .any(|server| server.trim_end_matches('/') == issuer.trim_end_matches('/'))
        {
            return Err(format!(
                "the upstream accepts tokens of `{}`, not of the issuer `{issuer}`",
                truncate_text(&issuers.join("`, `"))
            ));
        }
        let scopes = string_array_field(&metadata, "scopes_supported").join(" ");
        Ok(Self {
            resource,
            scope: challenge_parameter(&challenge, "scope")
                .or((!scopes.is_empty()).then_some(scopes)),
        })
    }
}

/// Returns a URL as resource identifier, without parts that may be secret (RFC 8707).
fn resource_identifier(address: &Url) -> String {
    let mut identifier = address.clone();
    identifier.set_query(None);
    identifier.set_fragment(None);
    let _ = identifier.set_username("").and_then(|()| identifier.set_password(None));
    identifier.to_string()
}

/// Truncates text of a server for an error message.
fn truncate_text(text: &str) -> String {
    let mut truncated: String = text.chars().take(200).collect();
    if truncated.len() < text.len() {
        truncated.push('…');
    }
    truncated
}

/// Returns whether a resource identifier is the address or a parent path of it.
fn is_same_or_parent(resource: &Url, address: &Url) -> bool {
    let (outer, inner) = (resource.path().trim_end_matches('/'), address.path());
    resource.origin() == address.origin()
        && inner.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// The token endpoint of an issuer, and how clients authenticate there (RFC 8414).
struct TokenEndpoint {
    url: String,
    /// Send the credentials in the form instead of the header.
    has_form_credentials: bool,
}

impl TokenEndpoint {
    async fn discover(client: &Client, issuer: &str) -> Result<Self, String> {
        let issuer_url = Url::parse(issuer).map_err(|error| format!("`issuer`: {error}"))?;
        let well_known_url = |what: &str| well_known_urls(&issuer_url, what).into_iter().next();
        let mut urls: Vec<Url> = ["oauth-authorization-server", "openid-configuration"]
            .into_iter()
            .filter_map(well_known_url)
            .collect();
        urls.extend(Url::parse(&format!(
            "{}/.well-known/openid-configuration",
            issuer.trim_end_matches('/')
        )));
        let (mut metadata, mut why) =
            (None, format!("cannot find the metadata of the issuer `{issuer}`; set `token_url`"));
        for url in urls {
            let Some(body) = first_json_object(client, [url]).await.unwrap_or_default() else {
                continue;
            };
            let named_issuer = string_field(&body, "issuer").unwrap_or_default();
            if named_issuer.trim_end_matches('/') == issuer.trim_end_matches('/') {
                metadata = Some(body);
                break;
            }
            why = format!(
                "the metadata of the issuer `{issuer}` names another issuer: `{}`",
                truncate_text(&named_issuer)
            );
        }
        let metadata = metadata.ok_or(why)?;
        let token_endpoint = string_field(&metadata, "token_endpoint").ok_or_else(|| {
            format!("the metadata of the issuer `{issuer}` has no `token_endpoint`")
        })?;
        // Never send a secret unencrypted if the issuer uses HTTPS.
        if issuer_url.scheme() == "https" && !token_endpoint.starts_with("https://") {
            return Err(format!(
                "the token endpoint of the issuer `{issuer}` is not encrypted: `{}`",
                truncate_text(&token_endpoint)
            ));
        }
        let methods = string_array_field(&metadata, "token_endpoint_auth_methods_supported");
        let supports = |method: &str| methods.iter().any(|known| known == method);
        let has_form_credentials =
            supports("client_secret_post") && !supports("client_secret_basic");
        if !has_form_credentials && !methods.is_empty() && !supports("client_secret_basic") {
            return Err(format!(
                "the issuer `{issuer}` does not support client secrets, only {}",
                truncate_text(&methods.join(", "))
            ));
        }
        Ok(Self { url: token_endpoint, has_form_credentials })
    }
}

/// Returns the well-known URLs of an address: for its path, and for the host.
fn well_known_urls(address: &Url, name: &str) -> Vec<Url> {
    let at = |path: &str| address.join(&format!("/.well-known/{name}{path}")).ok();
    let path = address.path().trim_end_matches('/');
    let root = (!path.is_empty()).then(|| at("")).flatten();
    at(path).into_iter().chain(root).collect()
}

/// Returns the first JSON object that one of the URLs returns.
async fn first_json_object(
    client: &Client,
    urls: impl IntoIterator<Item = Url>,
) -> Result<Option<Value>, String> {
    for url in urls {
        let (status, body) = send_json_request(
            client.get(url).header(ACCEPT, "application/json").timeout(OAUTH_REQUEST_TIMEOUT),
        )
        .await?;
        if status == 200 && body.is_object() {
            return Ok(Some(body));
        }
    }
    Ok(None)
}

/// Sends a request, and returns the status and the JSON body; null if the body is not JSON.
async fn send_json_request(request: reqwest::RequestBuilder) -> Result<(u16, Value), String> {
    let answer = request.send().await.map_err(|error| error.without_url().to_string())?;
    let status = answer.status().as_u16();
    let body = crate::upstream::transport::bounded_http::read_body(answer)
        .await
        .map_err(|error| error.without_url().to_string())?;
    Ok((status, body.and_then(|body| serde_json::from_slice(&body).ok()).unwrap_or_default()))
}

fn string_field(value: &Value, key: &str) -> Option<String> {
    value.get(key).and_then(Value::as_str).map(str::to_owned)
}

fn string_array_field(value: &Value, key: &str) -> Vec<String> {
    value
        .get(key)
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .map(str::to_owned)
        .collect()
}

/// Returns a parameter of a challenge such as `Bearer scope="a b", error="x"`.
fn challenge_parameter(challenge: &str, name: &str) -> Option<String> {
    let mut rest = challenge.trim_start().split_once(' ').map_or("", |(_, parameters)| parameters);
    loop {
        let (key, after) = rest.split_once('=')?;
        let after = after.trim_start();
        let (value, remaining) = match after.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"')?,
            None => after.split_at(after.find(',').unwrap_or(after.len())),
        };
        if key.trim_matches([' ', ',']).eq_ignore_ascii_case(name) {
            return Some(value.trim().to_owned());
        }
        rest = remaining;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_challenge_is_read() {
        let challenge = r#"Bearer realm="no scope=here", resource_metadata="https://a.example/x", scope="a b", error=invalid_token"#;
        for (name, value) in [
            ("resource_metadata", Some("https://a.example/x")),
            ("scope", Some("a b")),
            ("Error", Some("invalid_token")),
            ("none", None),
        ] {
            assert_eq!(challenge_parameter(challenge, name).as_deref(), value, "{name}");
        }
        assert_eq!(challenge_parameter("Bearer", "scope"), None);
        assert_eq!(challenge_parameter("Bearer scope=\"open", "scope"), None);
    }

    #[test]
    fn a_resource_covers_itself_and_the_paths_below() {
        for (resource, address, expected) in [
            ("https://a.example/mcp", "https://a.example/mcp", true),
            ("https://a.example", "https://a.example/mcp", true),
            ("https://a.example/m", "https://a.example/mcp", false),
            ("https://evil.example/mcp", "https://a.example/mcp", false),
            ("http://a.example/mcp", "https://a.example/mcp", false),
        ] {
            assert_eq!(
                is_same_or_parent(&Url::parse(resource).unwrap(), &Url::parse(address).unwrap()),
                expected,
                "{resource} {address}"
            );
        }
    }
}
