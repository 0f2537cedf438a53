//! x
#[cfg(test)]
mod tests {
    use rmcp::model::*;
    #[test]
    fn exact() {
        for t in [
            r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"x","arguments":{"a":1.10,"b":12345678901234567890123,"c":[1,2.5]},"_meta":{"progressToken":7}}}"#,
            r#"{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":7,"progress":0.5,"total":100}}"#,
            r#"{"jsonrpc":"2.0","id":"a","method":"tools/list","params":{}}"#,
            r#"{"jsonrpc":"2.0","id":1,"result":{"action":"accept","content":{"n":1.5,"s":"x"}}}"#,
        ] {
            let m: Result<ClientJsonRpcMessage,_> = serde_json::from_str(t);
            match m { Ok(m) => println!("OK {m:?}\n -> {}", serde_json::to_string(&m).unwrap()), Err(e) => println!("ERR {e} {t}") }
        }
        for t in [
            r#"{"jsonrpc":"2.0","id":1,"result":{"content":[{"type":"text","text":"x","annotations":{"priority":0.9,"audience":["user"]}}],"structuredContent":{"a":1.10,"big":12345678901234567890123}}}"#,
            r#"{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":7,"progress":0.5,"total":100}}"#,
            r#"{"jsonrpc":"2.0","id":1,"result":{"tools":[{"name":"x","inputSchema":{"type":"object","properties":{"a":{"type":"number","minimum":0.5}}}}],"ttlMs":5}}"#,
            r#"{"jsonrpc":"2.0","id":3,"method":"elicitation/create","params":{"message":"m","requestedSchema":{"type":"object","properties":{"age":{"type":"integer","minimum":1,"maximum":10},"f":{"type":"number","minimum":0.5,"default":0.7}}}}}"#,
            r#"{"jsonrpc":"2.0","id":3,"method":"sampling/createMessage","params":{"messages":[{"role":"user","content":{"type":"text","text":"q"}}],"maxTokens":100,"temperature":0.7}}"#,
            r#"{"jsonrpc":"2.0","id":1,"result":{"resources":[{"uri":"a://b","name":"x","size":100}]}}"#,
            r#"{"jsonrpc":"2.0","id":1,"result":{"completion":{"values":["a"],"total":10,"hasMore":false}}}"#,
            r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32602,"message":"no","data":{"x":1.5}}}"#,
        ] {
            let m: Result<ServerJsonRpcMessage,_> = serde_json::from_str(t);
            match m { Ok(m) => println!("OK {m:?}\n -> {}", serde_json::to_string(&m).unwrap()), Err(e) => println!("ERR {e} {t}") }
        }
    }
}
