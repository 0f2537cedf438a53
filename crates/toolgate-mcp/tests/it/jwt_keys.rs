//! Keys that sign no token.

use jsonwebtoken::{Algorithm, EncodingKey, Header};
use serde_json::json;

use crate::security::{CALC_TOOL_CONFIG, base64url, call_calc, signed_jwt, signing_key};
use crate::support::TestGateway;

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
    for (more, status) in [
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
        two.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        std::fs::write(&keys, json!({"keys": [signing_key("one").1, two]}).to_string()).unwrap();
        let gate = TestGateway::open(&config).await;
        assert_eq!(
            call_calc(&gate.client().with_token(&signed_jwt("two", &claims))).await.0,
            status,
            "{more}"
        );
        assert_eq!(
            call_calc(&gate.client().with_token(&signed_jwt("one", &claims))).await.0,
            200,
            "{more}"
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
    let secret = b"what is published is no secret, however long it is";
    for more in [
        json!({}),
        json!({"use": "sig"}),
        json!({"alg": "HS256"}),
        json!({"alg": "HS256", "use": "sig"}),
    ] {
        let mut shared = json!({"kty": "oct", "kid": "shared", "k": base64url(secret)});
        shared.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
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
                    "{more} {set:?}"
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
