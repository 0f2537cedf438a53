//! Who takes too long to say what it wants.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::security::{CALC_TOOL_CONFIG, call_calc};
use crate::support::TestGateway;

/// Until a client is hung up on, which says nothing more, or one letter each second.
async fn wait_for_disconnect(stream: TcpStream, talks: bool) {
    let (mut heard, mut tell) = stream.into_split();
    let talking = async {
        while talks && tell.write_all(b"a").await.is_ok() {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        std::future::pending::<()>().await;
    };
    let mut said = Vec::new();
    let ended = async {
        let ended = heard.read_to_end(&mut said).await;
        // Who was still talking may hear that only from the system.
        assert!(talks || ended.is_ok(), "{ended:?}");
    };
    tokio::select! {
        () = ended => {}
        () = talking => {}
        () = tokio::time::sleep(Duration::from_secs(60)) => panic!("somebody is listened to without end, who talks: {talks}"),
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
    // More than may be at work at the same time.
    for n in 0..800 {
        let mut stream = TcpStream::connect(&address).await.unwrap();
        let begun = if n % 4 == 0 { format!("{head}x-slow: ") } else { body.clone() };
        stream.write_all(begun.as_bytes()).await.unwrap();
        slow.push(stream);
    }
    // In the end nobody listens to them any more, whether they fall silent or go on without end.
    let watched: Vec<TcpStream> = slow.drain(..16).collect();
    let ended = join_all(
        watched.into_iter().enumerate().map(|(n, stream)| wait_for_disconnect(stream, n >= 8)),
    );
    let others = async {
        for _ in 0..20 {
            assert_eq!(call_calc(&gate.client()).await.0, 200);
        }
    };
    tokio::join!(ended, others);
    drop(slow);
    gate.shut_down().await;
}
