//! Declares the tools of the test world.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::Semaphore;
use toolgate::{CallEffects, Effect, Failure, PromptSignal, Tool, ToolContext};

/// Declares a tool that changes a slice and a file, and then follows its `how` argument.
pub(super) fn act_tool(ran: &Arc<AtomicU32>, go: &Arc<Semaphore>) -> Tool {
    let (ran, go) = (Arc::clone(ran), Arc::clone(go));
    let schema = json!({
        "type": "object",
        "properties": {"how": {"type": "string"}, "n": {"type": "integer"}, "password": {"type": "string", "writeOnly": true}},
        "required": ["how"],
    });
    Tool::dynamic("act", "Follows its `how` argument.", schema, move |ctx: ToolContext, args: Value| {
        let (ran, go) = (Arc::clone(&ran), Arc::clone(&go));
        async move {
            ran.fetch_add(1, Ordering::SeqCst);
            let how = args["how"].as_str().unwrap_or_default();
            ctx.set_slice("touched", &args)?;
            ctx.log("attempts", &args)?;
            // A read must not change files.
            if !how.starts_with("read") {
                ctx.files()?.write("kept.txt", b"changed")?;
                ctx.files()?.write("new/file.txt", b"made")?;
            }
            run_scripted(&ctx, how, &go).await
        }
    })
    .effect(Effect::Write)
    .timeout(Duration::from_millis(300))
    .output_schema(json!({"type": "object", "properties": {"done": {"type": "boolean"}}, "required": ["done"]}))
}

async fn run_scripted(ctx: &ToolContext, how: &str, go: &Semaphore) -> Result<Value, Failure> {
    match how {
        "ok" | "read" => Ok(json!({"done": true})),
        "fail" => Err(Failure::business("no_stock", "there is none left")),
        "refuse" => {
            Err(Failure::business("no_stock", "there is none left").effects(CallEffects::None))
        }
        "io" => Err(std::io::Error::from(std::io::ErrorKind::ConnectionReset).into()),
        "http" => Err(Failure::http(503, "try later")),
        "panic" => panic!("the handler has a fault"),
        "hang" => std::future::pending().await,
        "beat" => {
            for _ in 0..20 {
                tokio::time::sleep(Duration::from_millis(20)).await;
                ctx.send_heartbeat();
            }
            Ok(json!({"done": true}))
        }
        "beat, then stop" => {
            // Sends heartbeats for 1.2 s, which is longer than any heartbeat interval in the tests.
            for _ in 0..120 {
                tokio::time::sleep(Duration::from_millis(10)).await;
                ctx.send_heartbeat();
            }
            ctx.log("beats", &"stopped")?;
            std::future::pending().await
        }
        "read and wait" => {
            let _let_go = go.acquire().await?;
            Ok(json!({"done": true}))
        }
        "junk" => Ok(json!({"undone": "yes"})),
        "dated" => Ok(json!({"done": true, "at": "soon"})),
        "nothing" => Ok(Value::Null),
        "expand" => Err(Failure::signal(PromptSignal::ExpandSection {
            section: "refunds".into(),
            reason: "needed".into(),
        })),
        other => Err(Failure::validation("unknown_way", format!("unknown mode: {other}"))),
    }
}

pub(crate) fn look_tool() -> Tool {
    let schema = json!({"type": "object", "properties": {"at": {"type": "string"}}});
    Tool::dynamic("look", "Looks at something.", schema, |_, args| async move { Ok(args) })
        .effect(Effect::Read)
}
