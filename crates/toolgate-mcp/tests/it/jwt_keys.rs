//! Tests which signed tokens are accepted, and which keys verify them.

use jsonwebtoken::{Algorithm, EncodingKey, Header};
use serde_json::{Value, json};

use crate::security::call_calc;
use crate::support::{CALC_TOOL_CONFIG, TestGateway};

use toolgate_testkit::jwt_keys::{FIRST_KEY, SECOND_KEY};

/// The private key that `signing_key` returns for the id `one`.
pub(crate) const FIRST_PRIVATE_KEY_PEM: &str = FIRST_KEY.0;

/// Returns a private key, and the public key as a JSON Web Key.
pub(crate) fn signing_key(kid: &str) -> (EncodingKey, Value) {
    // Fixed P-256 keys that only the tests use.
    let (private, x, y) = match kid {
        "one" => (FIRST_KEY.0, FIRST_KEY.1, FIRST_KEY.2),
        _ => (SECOND_KEY.0, SECOND_KEY.1, SECOND_KEY.2),
    };
    let key = EncodingKey::from_ec_pem(private.as_bytes()).unwrap();
    (
        key,
        json!({"kty": "EC", "crv": "P-256", "alg": "ES256", "use": "sig", "kid": kid, "x": x, "y": y}),
    )
}

pub(crate) fn signed_jwt(kid: &str, claims: &Value) -> String {
    let mut header = Header::new(Algorithm::ES256);
    header.kid = Some(kid.to_owned());
    jsonwebtoken::encode(&header, claims, &signing_key(kid).0).unwrap()
}

pub(crate) fn base64url(bytes: &[u8]) -> String {
    const BASE64URL_ALPHABET: &[u8; 64] =
        b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let bits = chunk.iter().fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte))
            << (8 * (3 - chunk.len()));
        for index in 0..=chunk.len() {
            text.push(char::from(BASE64URL_ALPHABET[(bits >> (18 - 6 * index) & 63) as usize]));
        }
    }
    text
}

#[tokio::test(flavor = "multi_thread")]
async fn key_for_other_use_verifies_no_token() {
    let home = tempfile::tempdir().unwrap();
    let keys = home.path().join("keys.json");
    let config = format!(
        "{CALC_TOOL_CONFIG}[gateway.jwt]\nissuer = \"i\"\naudience = \"a\"\nkeys = {}\n",
        json!(keys)
    );
    let claims = json!({"iss": "i", "aud": "a", "sub": "ann", "exp": toolgate::Timestamp::now().as_second() + 600});
    let mut bare = signing_key("two").1;
    bare.as_object_mut().unwrap().retain(|name, _| name != "alg" && name != "use");
    for (fields, status) in [
        (json!({}), 200),
        (json!({"use": "sig", "alg": "ES256"}), 200),
        (json!({"use": "enc"}), 401),
        (json!({"use": "enc", "alg": "ES256"}), 401),
        (json!({"use": "tls"}), 401),
        (json!({"alg": "ECDH-ES"}), 401),
        (json!({"alg": "RSA-OAEP"}), 401),
        (json!({"alg": "ES384"}), 401),
    ] {
        let mut two = bare.clone();
        two.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        std::fs::write(&keys, json!({"keys": [signing_key("one").1, two]}).to_string()).unwrap();
        let gate = TestGateway::open(&config).await;
        assert_eq!(
            call_calc(&gate.client().with_token(&signed_jwt("two", &claims))).await.0,
            status,
            "{fields}"
        );
        assert_eq!(
            call_calc(&gate.client().with_token(&signed_jwt("one", &claims))).await.0,
            200,
            "{fields}"
        );
        gate.shut_down().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn symmetric_key_verifies_no_token() {
    let home = tempfile::tempdir().unwrap();
    let keys = home.path().join("keys.json");
    let config = format!(
        "{CALC_TOOL_CONFIG}[gateway.jwt]\nissuer = \"i\"\naudience = \"a\"\nkeys = {}\n",
        json!(keys)
    );
    let claims = json!({"iss": "i", "aud": "a", "sub": "ann", "exp": toolgate::Timestamp::now().as_second() + 600});
    let secret = b"a published key is public, however long the key is";
    for fields in [
        json!({}),
        json!({"use": "sig"}),
        json!({"alg": "HS256"}),
        json!({"alg": "HS256", "use": "sig"}),
    ] {
        let mut shared = json!({"kty": "oct", "kid": "shared", "k": base64url(secret)});
        shared.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        for set in [vec![shared.clone()], vec![shared, signing_key("one").1]] {
            std::fs::write(&keys, json!({"keys": set}).to_string()).unwrap();
            let gate = TestGateway::open(&config).await;
            for kid in [Some("shared".to_owned()), None] {
                let header = Header { kid, ..Header::new(Algorithm::HS256) };
                let token =
                    jsonwebtoken::encode(&header, &claims, &EncodingKey::from_secret(secret))
                        .unwrap();
                assert_eq!(
                    call_calc(&gate.client().with_token(&token)).await.0,
                    401,
                    "{fields} {set:?}"
                );
            }
            let status = if set.len() > 1 { 200 } else { 401 };
            assert_eq!(
                call_calc(&gate.client().with_token(&signed_jwt("one", &claims))).await.0,
                status,
                "{set:?}"
            );
            gate.shut_down().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn altered_jwt_is_rejected() {
    let home = tempfile::tempdir().unwrap();
    let keys = home.path().join("keys.json");
    std::fs::write(&keys, json!({"keys": [signing_key("one").1]}).to_string()).unwrap();
    let config = format!(
        "{CALC_TOOL_CONFIG}[gateway.jwt]\nissuer = \"https://login.example/\"\naudience = \"https://gate.example/mcp\"\nkeys = {}\nsession = \"conversation\"\nagents = \"agents\"\n",
        json!(keys)
    );
    let gate = TestGateway::open(&config).await;
    let now = toolgate::Timestamp::now().as_second();
    let valid_claims = || json!({"iss": "https://login.example/", "aud": "https://gate.example/mcp", "sub": "ann", "exp": now + 600, "agents": ["default"]});
    let with_claim = |key: &str, value: Value| {
        let mut claims = valid_claims();
        claims[key] = value;
        claims
    };
    let client = gate.client();
    assert_eq!(
        call_calc(&client.with_token(&signed_jwt("one", &valid_claims()))).await.1["result"]["isError"],
        json!(false)
    );
    let without_claim = |key: &str| {
        let mut claims = valid_claims();
        claims.as_object_mut().unwrap().remove(key);
        claims
    };
    let unsigned = format!(
        "{}.{}.",
        base64url(br#"{"alg":"none","typ":"JWT"}"#),
        base64url(valid_claims().to_string().as_bytes())
    );
    let hmac_signed = {
        // Algorithm confusion: the public key is used as an HMAC secret.
        let header = Header::new(Algorithm::HS256);
        jsonwebtoken::encode(
            &header,
            &valid_claims(),
            &EncodingKey::from_secret(signing_key("one").1["x"].as_str().unwrap().as_bytes()),
        )
        .unwrap()
    };
    let mut edited = signed_jwt("one", &valid_claims());
    let middle = edited.split('.').nth(1).unwrap().to_owned();
    edited = edited
        .replace(&middle, &base64url(with_claim("sub", json!("root")).to_string().as_bytes()));
    let critical = Header {
        kid: Some("one".to_owned()),
        crit: Some(vec!["exp".to_owned()]),
        ..Header::new(Algorithm::ES256)
    };
    let bad = [
        (
            "unknown critical header",
            jsonwebtoken::encode(&critical, &valid_claims(), &signing_key("one").0).unwrap(),
        ),
        ("expired", signed_jwt("one", &with_claim("exp", json!(now - 600)))),
        ("not valid yet", signed_jwt("one", &with_claim("nbf", json!(now + 600)))),
        (
            "other audience",
            signed_jwt("one", &with_claim("aud", json!("https://other.example/mcp"))),
        ),
        ("other issuer", signed_jwt("one", &with_claim("iss", json!("https://evil.example/")))),
        ("without expiry", signed_jwt("one", &without_claim("exp"))),
        ("without an audience", signed_jwt("one", &without_claim("aud"))),
        ("without subject", signed_jwt("one", &without_claim("sub"))),
        ("subject of the canary", signed_jwt("one", &with_claim("sub", json!("(canary)")))),
        ("signed by another key", signed_jwt("two", &valid_claims())),
        ("not signed", unsigned),
        ("signed with a public value", hmac_signed),
        ("edited", edited),
        ("junk", "a.b.c".to_owned()),
    ];
    for (name, token) in bad {
        let (status, answer) = call_calc(&client.with_token(&token)).await;
        assert_eq!(status, 401, "{name}: {answer}");
        assert!(!answer.to_string().contains(&token), "{name}");
    }
    let (_, refused) =
        call_calc(&client.with_token(&signed_jwt("one", &with_claim("agents", json!(["other"])))))
            .await;
    assert_eq!(refused["result"]["structuredContent"]["code"], json!("forbidden"), "{refused}");
    let (_, refused) =
        call_calc(&client.with_token(&signed_jwt("one", &without_claim("agents")))).await;
    assert_eq!(refused["result"]["structuredContent"]["code"], json!("forbidden"), "{refused}");
    // The token names the session, and the request cannot name another one.
    let (_, refused) = call_calc(
        &client
            .with_token(&signed_jwt("one", &with_claim("conversation", json!("c-1"))))
            .in_session("c-2"),
    )
    .await;
    assert_eq!(refused["result"]["structuredContent"]["code"], json!("forbidden"), "{refused}");
    assert_eq!(
        call_calc(
            &client.with_token(&signed_jwt("one", &with_claim("conversation", json!("c-1"))))
        )
        .await
        .1["result"]["isError"],
        json!(false)
    );
    assert_eq!(
        gate.gateway.runtime().session("default", "ann", "c-1").rows().await.unwrap().len(),
        1
    );
    // The metadata names the issuer of tokens (RFC 9728).
    let answer =
        reqwest::Client::new().post(format!("{}/mcp", gate.url)).body("{}").send().await.unwrap();
    let challenge = answer.headers()["www-authenticate"].to_str().unwrap().to_owned();
    assert!(
        challenge.contains(
            "resource_metadata=\"https://gate.example/.well-known/oauth-protected-resource/mcp\""
        ),
        "{challenge}"
    );
    let metadata: Value =
        reqwest::get(format!("{}/.well-known/oauth-protected-resource", gate.url))
            .await
            .unwrap()
            .json()
            .await
            .unwrap();
    assert_eq!(
        (metadata["resource"].as_str(), metadata["authorization_servers"][0].as_str()),
        (Some("https://gate.example/mcp"), Some("https://login.example/"))
    );
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn jwt_keys_are_replaced_by_reload() {
    let home = tempfile::tempdir().unwrap();
    let keys = home.path().join("keys.json");
    std::fs::write(&keys, json!({"keys": [signing_key("one").1]}).to_string()).unwrap();
    let config = format!(
        "{CALC_TOOL_CONFIG}[gateway.jwt]\nissuer = \"i\"\naudience = \"a\"\nkeys = {}\n",
        json!(keys)
    );
    let gate = TestGateway::open(&config).await;
    let claims = json!({"iss": "i", "aud": "a", "sub": "ann", "exp": toolgate::Timestamp::now().as_second() + 600});
    assert_eq!(call_calc(&gate.client().with_token(&signed_jwt("two", &claims))).await.0, 401);
    std::fs::write(&keys, json!({"keys": [signing_key("two").1]}).to_string()).unwrap();
    gate.reload(&config).await.unwrap();
    assert_eq!(call_calc(&gate.client().with_token(&signed_jwt("two", &claims))).await.0, 200);
    assert_eq!(call_calc(&gate.client().with_token(&signed_jwt("one", &claims))).await.0, 401);
    gate.shut_down().await;
}
