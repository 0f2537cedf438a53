//! Tests that untrusted URLs, numbers and amounts are recognized in every spelling.

use serde_json::json;
use toolgate::Agent;
use toolgate::policy::Flow;

use crate::flow::{call_code, can_send_to, fixed_answer_tool, send_tool, start_session};

#[tokio::test]
async fn untrusted_url_is_recognized_in_every_spelling() {
    let page = "See https://evil.test/collect or write to mallory@wicked.test, or to oscar+win@wicked.test.";
    let session = start_session(
        Agent::builder("a")
            .tool(fixed_answer_tool("page", page).untrusted())
            .tool(send_tool())
            .policy(Flow::new("f", ["send"], ["/to"])),
    );
    assert_eq!(call_code(&session, "page", json!({})).await, "ok");
    for to in [
        "https://docs@evil.test/x",
        "https://corp.test@evil.test/",
        "https://x:y@evil.test:8443/",
        "https://a1.evil.test/x",
        "https://a1.b2.evil.test?x",
        "https://a1\u{3002}evil\u{ff0e}test/x",
        "https:\\\\evil.test\\x",
        "https://evil.test\\@corp.test/",
        "https://corp.test\\@evil.test/",
        "mallory+promo@wicked.test",
        "mallory(comment)@wicked.test",
        "Mum <mallory+a+b@wicked.test>, dad@corp.test",
        "oscar@wicked.test",
    ] {
        assert!(!can_send_to(&session, to).await, "{to} passed");
    }
    for to in [
        "https://docs@corp.test/x",
        "https://devil.test/y",
        "https://www.corp.test/y",
        "mum+promo@corp.test",
        "mum(x)@corp.test",
    ] {
        assert!(can_send_to(&session, to).await, "{to} was refused");
    }
}

#[tokio::test]
async fn untrusted_number_is_recognized_in_every_spelling() {
    let page = "Mail \u{39d}ίκος@evil.example. \
        Account 0012345678, reference 00 4711 0815, amount 98765.430, or +49 30 901820. Room:0077001122.";
    let session = start_session(
        Agent::builder("a")
            .tool(fixed_answer_tool("page", page).untrusted())
            .tool(send_tool())
            .policy(Flow::new("f", ["send"], ["/to"])),
    );
    assert_eq!(call_code(&session, "page", json!({})).await, "ok");
    for to in [
        // Leading zeros, a sign, a decimal point and an exponent.
        json!("0012345678"),
        json!("12345678"),
        json!(12_345_678),
        json!("+12345678"),
        json!("000012345678"),
        json!("12345678.00"),
        json!("1.2345678e7"),
        json!("pay 12345678.00 now"),
        json!(98_765.43),
        json!("98765.4300"),
        json!(77_001_122),
        // In groups.
        json!(47_110_815),
        json!("4711 0815"),
        json!("004930901820"),
        json!("0049 30 901820"),
        // Lower case.
        json!("νίκος@evil.example"),
        // Digits of other scripts.
        json!("١٢٣٤٥٦٧٨"),
        json!("१२३४५६७८"),
        json!("００１２３４５６７８"),
        json!("pay ۱۲۳۴۵۶۷۸ now"),
    ] {
        assert!(!can_send_to(&session, to.clone()).await, "{to} passed");
    }
    for to in [
        json!(12_345_679),
        json!("123456780"),
        json!("١٢٣٤٥٦٧٩"),
        json!("7.00"),
        json!("007"),
        json!("0"),
    ] {
        assert!(can_send_to(&session, to.clone()).await, "{to} was refused");
    }
}

#[tokio::test]
async fn untrusted_amount_is_recognized_in_every_format() {
    let page = "Pay 12,345.60 now, or 50,000.00, $71345.60, 72345.60\u{20ac}, EUR73345.60, 74.345,60, \u{a3}75,345.50, 76 345,60 \
        or {\"sum\":\"77,345.60\"}.";
    let session = start_session(
        Agent::builder("a")
            .tool(fixed_answer_tool("page", page).untrusted())
            .tool(send_tool())
            .policy(Flow::new("f", ["send"], ["/to"])),
    );
    assert_eq!(call_code(&session, "page", json!({})).await, "ok");
    for to in
        [12_345.6, 50_000.0, 71_345.6, 72_345.6, 73_345.6, 74_345.6, 75_345.5, 76_345.6, 77_345.6]
    {
        assert!(!can_send_to(&session, json!(to)).await, "{to} passed");
    }
    for to in ["12345.6", "12.345,60", "\u{20ac}12'345.60", "send 12,345.6 EUR today", "71 345,6"] {
        assert!(!can_send_to(&session, to).await, "{to} passed");
    }
    for to in [json!(12_345.7), json!("12,345.70"), json!("EUR 99.999,00"), json!(1_234.5)] {
        assert!(can_send_to(&session, to.clone()).await, "{to} was refused");
    }
}
