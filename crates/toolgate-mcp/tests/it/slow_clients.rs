//! Tests that clients with slow requests are disconnected.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::security::call_calc;
use crate::support::{CALC_TOOL_CONFIG, TestGateway};

/// Waits until the gateway disconnects a client that is silent or sends one byte per second.
async fn wait_for_disconnect(stream: TcpStream, is_sending: bool) {
    let (mut reader, mut writer) = stream.into_split();
    let sending = async {
        while is_sending && writer.write_all(b"a").await.is_ok() {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        std::future::pending::<()>().await;
    };
    let mut received = Vec::new();
    let ended = async {
        let ended = reader.read_to_end(&mut received).await;
        // A client that was still sending may get a connection error instead of the end.
        assert!(is_sending || ended.is_ok(), "{ended:?}");
    };
    tokio::select! {
        () = ended => {}
        () = sending => {}
        () = tokio::time::sleep(Duration::from_secs(60)) => panic!("no disconnect within 60 s, sending: {is_sending}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_clients_do_not_block_other_clients() {
    let gate = TestGateway::open(CALC_TOOL_CONFIG).await;
    let address = gate.url.trim_start_matches("http://").to_owned();
    let head = "POST /mcp HTTP/1.1\r\nhost: localhost\r\n";
    let body = format!(
        "{head}content-type: application/json\r\naccept: application/json, text/event-stream\r\ncontent-length: 1000\r\n\r\n{{"
    );
    let mut slow = Vec::new();
    // More clients than the concurrency limit.
    for n in 0..800 {
        let mut stream = TcpStream::connect(&address).await.unwrap();
        let start = if n % 4 == 0 { format!("{head}x-slow: ") } else { body.clone() };
        stream.write_all(start.as_bytes()).await.unwrap();
        slow.push(stream);
    }
    // Silent and slowly sending clients are both disconnected.
    let observed: Vec<TcpStream> = slow.drain(..16).collect();
    let disconnects = join_all(
        observed.into_iter().enumerate().map(|(n, stream)| wait_for_disconnect(stream, n >= 8)),
    );
    let other_calls = async {
        for _ in 0..20 {
            assert_eq!(call_calc(&gate.client()).await.0, 200);
        }
    };
    tokio::join!(disconnects, other_calls);
    drop(slow);
    gate.shut_down().await;
}
