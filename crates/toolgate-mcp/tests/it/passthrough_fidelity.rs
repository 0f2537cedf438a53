//! Tests that metadata, schemas, images and resources pass the gateway unchanged.

use std::borrow::Cow;
use std::sync::Arc;

use rmcp::model::*;
use rmcp::service::RequestContext;
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use rmcp::{ErrorData, RoleServer, ServerHandler};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;

use crate::legacy_http_client::LegacyHttpClient;
use crate::legacy_upstreams::{
    http_response, initialize_result, json_rpc_result, read_request, serve_connections,
};
use crate::support::{TestGateway, fixture_config, http_client, start_mcp_server};

/// The image of one red dot that the fixture returns.
const RED_DOT_PNG: &str =
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR42mP4z8AAAAMBAQD3A0FDAAAAAElFTkSuQmCC";

/// A server that returns the metadata that it received.
struct MetadataEchoServer {
    modern: bool,
}

impl ServerHandler for MetadataEchoServer {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().enable_prompts().build())
    }

    fn supported_protocol_versions(&self) -> Cow<'static, [ProtocolVersion]> {
        let newest =
            if self.modern { ProtocolVersion::V_2026_07_28 } else { ProtocolVersion::V_2025_06_18 };
        Cow::Borrowed(ProtocolVersion::known_up_to(&newest))
    }

    async fn discover(&self, _: RequestContext<RoleServer>) -> Result<DiscoverResult, ErrorData> {
        if !self.modern {
            return Err(ErrorData::method_not_found::<DiscoverRequestMethod>());
        }
        Ok(DiscoverResult::from_server_info(
            self.supported_protocol_versions().into_owned(),
            self.get_info(),
        ))
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let schema = object(json!({"type": "object", "properties": {"n": {"type": "integer"}}}));
        Ok(ListToolsResult::with_all_items(vec![Tool::new("look", "Looks.", schema)]))
    }

    async fn call_tool(
        &self,
        _: CallToolRequestParams,
        cx: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        Ok(CallToolResult::structured(json!({"seen": cx.meta})).into())
    }

    async fn list_prompts(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListPromptsResult, ErrorData> {
        Ok(ListPromptsResult::with_all_items(vec![Prompt::new("look", Some("Looks."), None)]))
    }

    async fn get_prompt(
        &self,
        _: GetPromptRequestParams,
        cx: RequestContext<RoleServer>,
    ) -> Result<GetPromptResponse, ErrorData> {
        let seen = PromptMessage::new_text(Role::User, json!(cx.meta).to_string());
        Ok(GetPromptResponse::Complete(GetPromptResult::new(vec![seen])))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn upstream_gets_metadata_without_toolgate_keys() {
    for modern in [true, false] {
        let sessions = Arc::new(LocalSessionManager::default());
        let service = StreamableHttpService::new(
            move || Ok(MetadataEchoServer { modern }),
            sessions,
            StreamableHttpServerConfig::default(),
        );
        let url = start_mcp_server(service).await;
        let gate = TestGateway::open(&format!(
            "[upstreams.m]\nurl = \"{url}\"\nprefix = \"\"\nundeclared = \"read\"\n"
        ))
        .await;
        let call = |n: u8| {
            let meta = json!({"own": {"a": [1, "b"]}, "toolgate/turn": 1, "toolgate/idempotencyKey": n.to_string(), "toolgate/none": 1});
            json!({"name": "look", "arguments": {"n": n}, "_meta": meta})
        };
        let newer = gate.client().in_session("s").call_method("tools/call", call(1)).await.1;
        let older = LegacyHttpClient::connect(&http_client(), &gate.url, json!({}))
            .await
            .call_method("tools/call", call(2))
            .await;
        for answer in [newer, older] {
            let seen = &answer["result"]["structuredContent"]["seen"];
            assert_eq!(seen["own"], json!({"a": [1, "b"]}), "{modern}: {answer}");
            assert!(
                seen.as_object().unwrap().keys().all(|key| !key.starts_with("toolgate/")),
                "{modern}: {answer}"
            );
        }
        // A modern upstream receives the log level with every request.
        let prompt = json!({"name": "look", "_meta": {"own": 1, "io.modelcontextprotocol/logLevel": "debug"}});
        let answer = gate.client().in_session("s").call_method("prompts/get", prompt).await.1;
        let seen = answer["result"]["messages"][0]["content"]["text"]
            .as_str()
            .unwrap_or_else(|| panic!("{answer}"));
        let seen: Value = serde_json::from_str(seen).unwrap();
        let level = if modern { json!("debug") } else { Value::Null };
        assert_eq!(
            (&seen["own"], &seen["io.modelcontextprotocol/logLevel"]),
            (&json!(1), &level),
            "{modern}: {answer}"
        );
        gate.shut_down().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn result_must_match_listed_output_schema() {
    let address = serve_connections(|mut stream| async move {
        let Some((head, request)) = read_request(&mut stream).await else { return };
        let kind = |kind: &str| json!({"type": "object", "properties": {"n": {"type": kind}}, "required": ["n"]});
        let response = match request["method"].as_str().unwrap_or_default() {
            "server/discover" => http_response("404 No", "text/html", "<p>"),
            "" if head.starts_with("get ") => http_response("405 No", "text/plain", ""),
            "initialize" => json_rpc_result(&request, initialize_result()),
            "ping" => json_rpc_result(&request, json!({})),
            "tools/list" => {
                let tool = json!({"name": "read", "description": "Reads.", "inputSchema": kind("string"), "outputSchema": kind("integer")});
                json_rpc_result(&request, json!({"tools": [tool]}))
            }
            "tools/call" => {
                let text = request["params"]["arguments"]["n"].as_str().unwrap_or_default();
                let read = text.parse::<i64>().map_or_else(|_| json!(text), |n| json!(n));
                json_rpc_result(&request, json!({"content": [], "structuredContent": {"n": read}}))
            }
            _ => http_response("202 Accepted", "text/plain", ""),
        };
        let _ = stream.write_all(response.as_bytes()).await;
    })
    .await;
    let gate = TestGateway::open(&format!(
        "[upstreams.old]\nurl = \"http://{address}/mcp\"\nprefix = \"\"\nundeclared = \"read\"\n"
    ))
    .await;
    let client = gate.client().in_session("s");
    let (_, listed) = client.call_method("tools/list", json!({})).await;
    let schema = &listed["result"]["tools"][0]["outputSchema"];
    assert_eq!(
        (&schema["properties"]["n"]["type"], &schema["required"]),
        (&json!("integer"), &json!(["n"])),
        "{listed}"
    );
    assert_eq!(client.call("read", json!({"n": "7"})).await["structuredContent"], json!({"n": 7}));
    let broken = client.call("read", json!({"n": "seven"})).await;
    assert_eq!(
        (&broken["_meta"]["toolgate/error"]["code"], &broken["isError"]),
        (&json!("invalid_result"), &json!(true)),
        "{broken}"
    );
    assert_eq!(broken["structuredContent"], Value::Null, "{broken}");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn images_and_resources_in_results_are_unchanged() {
    let gate = TestGateway::open(&fixture_config("undeclared = \"read\"")).await;
    let mut older = LegacyHttpClient::connect(&http_client(), &gate.url, json!({})).await;
    let newer = gate.client().in_session("s");
    let embedded = "This is an embedded resource content.";
    for (tool, expected) in [
        (
            "test_image_content",
            [("/content/0/data", RED_DOT_PNG), ("/content/0/mimeType", "image/png")],
        ),
        (
            "test_embedded_resource",
            [
                ("/content/0/resource/text", embedded),
                ("/content/0/resource/uri", "test://embedded-resource"),
            ],
        ),
        (
            "test_multiple_content_types",
            [
                ("/content/1/data", RED_DOT_PNG),
                ("/content/2/resource/mimeType", "application/json"),
            ],
        ),
    ] {
        let older_result =
            older.call_method("tools/call", json!({"name": tool, "arguments": {}})).await["result"]
                .clone();
        for result in [newer.call(tool, json!({})).await, older_result] {
            for (pointer, expected) in expected {
                assert_eq!(result.pointer(pointer), Some(&json!(expected)), "{tool}: {result}");
            }
        }
    }
    gate.shut_down().await;
}
