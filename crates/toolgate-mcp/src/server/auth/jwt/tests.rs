//! Tests how signed tokens are verified, and how keys are fetched and replaced.

use jsonwebtoken::{EncodingKey, Header};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::*;

use toolgate_testkit::jwt_keys::{FIRST_KEY, SECOND_KEY};

type TestKeyPair = (&'static str, &'static str, &'static str);

fn issuer(keys: String) -> Arc<TokenIssuer> {
    let (issuer, audience, principal) = ("i".to_owned(), "a".to_owned(), "sub".to_owned());
    Arc::new(TokenIssuer::new(JwtConfig {
        issuer,
        audience,
        keys,
        resource: None,
        principal,
        session: None,
        agents: None,
    }))
}

/// Publishes keys in a file.
struct TestTokenSigner {
    home: tempfile::TempDir,
    issuer: Arc<TokenIssuer>,
}

impl TestTokenSigner {
    fn new() -> Self {
        let home = tempfile::tempdir().unwrap();
        let issuer = issuer(home.path().join("keys.json").display().to_string());
        Self { home, issuer }
    }

    fn publish(&self, keys: &[Value]) {
        std::fs::write(self.home.path().join("keys.json"), json!({"keys": keys}).to_string())
            .unwrap();
    }

    async fn is_accepted(&self, token: &str) -> bool {
        self.issuer.authenticate(token).await.is_ok()
    }
}

fn public_jwk(kid: Option<&str>, pair: TestKeyPair) -> Value {
    let mut key = json!({"kty": "EC", "crv": "P-256", "alg": "ES256", "use": "sig", "x": pair.1, "y": pair.2});
    if let Some(kid) = kid {
        key["kid"] = json!(kid);
    }
    key
}

fn sign_token(kid: Option<&str>, pair: TestKeyPair) -> String {
    let header = Header { kid: kid.map(str::to_owned), ..Header::new(Algorithm::ES256) };
    let claims = json!({"iss": "i", "aud": "a", "sub": "ann", "exp": toolgate::Timestamp::now().as_second() + 600});
    jsonwebtoken::encode(&header, &claims, &EncodingKey::from_ec_pem(pair.0.as_bytes()).unwrap())
        .unwrap()
}

async fn advance_past(duration: Duration) {
    tokio::time::advance(duration + Duration::from_secs(1)).await;
}

#[tokio::test(start_paused = true)]
async fn withdrawn_key_is_rejected() {
    let signer = TestTokenSigner::new();
    let (kid, token) = (Some("one"), sign_token(Some("one"), FIRST_KEY));
    for others in [vec![], vec![public_jwk(Some("two"), SECOND_KEY)]] {
        signer.publish(&[public_jwk(kid, FIRST_KEY)]);
        signer.issuer.fetch().await.unwrap();
        // An invalid key set does not replace the known keys.
        std::fs::write(signer.home.path().join("keys.json"), "busy").unwrap();
        assert!(
            signer.issuer.fetch().await.is_err() && signer.is_accepted(&token).await,
            "{others:?}"
        );
        signer.publish(&others);
        assert!(signer.is_accepted(&token).await, "the keys are fresh: {others:?}");
        advance_past(KEY_REFRESH_INTERVAL).await;
        let refused = async {
            while signer.is_accepted(&token).await {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), refused)
            .await
            .unwrap_or_else(|_| panic!("the token is still accepted: {others:?}"));
    }
}

#[tokio::test(start_paused = true)]
async fn withdrawn_key_is_rejected_after_idle_time() {
    let signer = TestTokenSigner::new();
    let (first, second) = (sign_token(Some("one"), FIRST_KEY), sign_token(Some("two"), SECOND_KEY));
    signer.publish(&[public_jwk(Some("one"), FIRST_KEY)]);
    signer.issuer.fetch().await.unwrap();
    advance_past(KEY_SET_TTL).await;
    signer.publish(&[public_jwk(Some("two"), SECOND_KEY)]);
    // The withdrawn key is rejected, also for concurrent requests.
    assert_eq!(
        tokio::join!(
            signer.is_accepted(&first),
            signer.is_accepted(&first),
            signer.is_accepted(&second)
        ),
        (false, false, true)
    );
    // If the fetch fails, the known keys count, and requests do not wait for another fetch.
    std::fs::write(signer.home.path().join("keys.json"), "busy").unwrap();
    advance_past(KEY_SET_TTL).await;
    assert!(signer.is_accepted(&second).await);
    signer.publish(&[]);
    assert!(signer.is_accepted(&second).await);
}

#[tokio::test(start_paused = true)]
async fn key_can_be_replaced_under_the_same_id() {
    for kid in [None, Some("same")] {
        let signer = TestTokenSigner::new();
        let (first, second) = (sign_token(kid, FIRST_KEY), sign_token(kid, SECOND_KEY));
        signer.publish(&[public_jwk(kid, FIRST_KEY)]);
        signer.issuer.fetch().await.unwrap();
        assert!(signer.is_accepted(&first).await && !signer.is_accepted(&second).await, "{kid:?}");
        advance_past(MIN_KEY_FETCH_INTERVAL).await;
        signer.publish(&[public_jwk(kid, SECOND_KEY)]);
        assert!(signer.is_accepted(&second).await, "{kid:?}");
        assert!(!signer.is_accepted(&first).await, "the key was withdrawn: {kid:?}");
        // Many tokens with an unknown key cause no earlier fetch; known keys are accepted
        // meanwhile.
        advance_past(MIN_KEY_FETCH_INTERVAL).await;
        assert!(!signer.is_accepted(&first).await, "{kid:?}");
        signer.publish(&[public_jwk(kid, FIRST_KEY)]);
        for _ in 0..20 {
            assert!(
                !signer.is_accepted(&first).await && signer.is_accepted(&second).await,
                "{kid:?}"
            );
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        advance_past(Duration::from_secs(10)).await;
        assert!(signer.is_accepted(&first).await, "{kid:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn several_keys_may_share_an_id() {
    // A key of another type, which signs nothing here.
    let other = |kid: Option<&str>| {
        let mut key = json!({"kty": "OKP", "crv": "Ed25519", "x": FIRST_KEY.1});
        if let Some(kid) = kid {
            key["kid"] = json!(kid);
        }
        key
    };
    for kid in [None, Some("same")] {
        let signer = TestTokenSigner::new();
        signer.publish(&[public_jwk(kid, FIRST_KEY), public_jwk(kid, SECOND_KEY), other(kid)]);
        signer.issuer.fetch().await.unwrap();
        assert!(
            signer.is_accepted(&sign_token(kid, FIRST_KEY)).await
                && signer.is_accepted(&sign_token(kid, SECOND_KEY)).await,
            "{kid:?}"
        );
        assert!(!signer.is_accepted(&sign_token(Some("other"), FIRST_KEY)).await, "{kid:?}");
        // An expired token is reported as such, whichever key signed it.
        let claims = json!({"iss": "i", "aud": "a", "sub": "ann", "exp": 1});
        let header = Header { kid: kid.map(str::to_owned), ..Header::new(Algorithm::ES256) };
        let token = jsonwebtoken::encode(
            &header,
            &claims,
            &EncodingKey::from_ec_pem(SECOND_KEY.0.as_bytes()).unwrap(),
        )
        .unwrap();
        assert_eq!(
            signer.issuer.authenticate(&token).await,
            Err(AuthError::Invalid("the token has expired")),
            "{kid:?}"
        );
    }
}

#[tokio::test]
async fn dates_may_have_fraction_or_exponent() {
    let signer = TestTokenSigner::new();
    signer.publish(&[public_jwk(None, FIRST_KEY)]);
    signer.issuer.fetch().await.unwrap();
    let now = toolgate::Timestamp::now().as_second();
    let (end, ended) = (format!("{}.25", now + 600), format!("{}.25", now - 600));
    let (expired, early) = ("the token has expired", "the token is not valid yet");
    let (no_end, no_begin) = (
        "`exp` of the token is missing or not a number of seconds",
        "`nbf` of the token is not a number of seconds",
    );
    for (dates, why) in [
        (format!("\"exp\": {end}"), None),
        ("\"exp\": 4e9".to_owned(), None),
        ("\"exp\": 4.0E+9, \"nbf\": 1.5".to_owned(), None),
        (format!("\"exp\": {end}, \"nbf\": {ended}"), None),
        (format!("\"exp\": {ended}"), Some(expired)),
        ("\"exp\": 1e3".to_owned(), Some(expired)),
        ("\"exp\": -1.5".to_owned(), Some(expired)),
        (format!("\"exp\": 4e9, \"nbf\": {end}"), Some(early)),
        ("\"exp\": 4e9, \"nbf\": 3.9e9".to_owned(), Some(early)),
        ("\"exp\": 1e999".to_owned(), Some(no_end)),
        ("\"exp\": \"4000000000\"".to_owned(), Some(no_end)),
        ("\"exp\": null".to_owned(), Some(no_end)),
        ("\"iat\": 1".to_owned(), Some(no_end)),
        ("\"exp\": 4e9, \"nbf\": null".to_owned(), Some(no_begin)),
    ] {
        let claims: Value = serde_json::from_str(&format!(
            "{{\"iss\": \"i\", \"aud\": \"a\", \"sub\": \"ann\", {dates}}}"
        ))
        .unwrap();
        let key = EncodingKey::from_ec_pem(FIRST_KEY.0.as_bytes()).unwrap();
        let token = jsonwebtoken::encode(&Header::new(Algorithm::ES256), &claims, &key).unwrap();
        assert_eq!(
            signer.issuer.authenticate(&token).await.err(),
            why.map(AuthError::Invalid),
            "{dates}"
        );
    }
}

/// A client that disconnects during a fetch does not cancel it for others.
#[tokio::test]
async fn disconnect_does_not_cancel_key_fetch() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let issuer = issuer(format!("http://{}/keys", listener.local_addr().unwrap()));
    let (request_sender, mut requests) = tokio::sync::mpsc::unbounded_channel();
    let disconnected = Arc::new(tokio::sync::Notify::new());
    let disconnect_signal = Arc::clone(&disconnected);
    tokio::spawn(async move {
        for pair in [FIRST_KEY, SECOND_KEY, SECOND_KEY] {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.unwrap());
            }
            request_sender.send(()).unwrap();
            if pair == SECOND_KEY {
                disconnect_signal.notified().await;
            }
            let body = json!({"keys": [public_jwk(None, pair)]}).to_string();
            let response = format!(
                "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            );
            stream.write_all(response.as_bytes()).await.unwrap();
        }
    });
    issuer.fetch().await.unwrap();
    requests.recv().await.unwrap();
    *lock(&issuer.fetch_started) = None;
    let (shared_issuer, token) = (Arc::clone(&issuer), sign_token(None, SECOND_KEY));
    let client = tokio::spawn(async move { shared_issuer.authenticate(&token).await });
    requests.recv().await.unwrap();
    client.abort();
    assert!(client.await.is_err());
    disconnected.notify_one();
    // A second fetch would not be due yet.
    assert!(issuer.authenticate(&sign_token(None, SECOND_KEY)).await.is_ok());
}
