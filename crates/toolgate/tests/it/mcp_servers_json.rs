//! Tests that server files of clients are read as upstreams.

use serde_json::{Value, json};
use toolgate_config::{
    Config, UndeclaredToolPolicy, UpstreamConfig, UpstreamTransport, parse_mcp_servers,
};

/// Describes an upstream in one line.
fn describe_upstream(upstream: &UpstreamConfig) -> String {
    let missing = upstream.missing_references();
    if !missing.is_empty() {
        return missing.join("; ");
    }
    match &upstream.transport {
        UpstreamTransport::Command { program, args, env, directory, .. } => {
            let args: Vec<String> =
                args.iter().map(|argument| argument.resolve().unwrap()).collect();
            let env: Vec<String> = env
                .iter()
                .map(|(name, value)| format!("{name}={}", value.resolve().unwrap()))
                .collect();
            format!("{} {args:?} {env:?} {directory:?}", program.display())
        }
        UpstreamTransport::Http { url, headers, sse, .. } => {
            let headers: Vec<String> = headers
                .iter()
                .map(|(name, value)| format!("{name}: {}", value.resolve().unwrap()))
                .collect();
            let transport = match sse {
                Some(true) => "sse",
                Some(false) => "http",
                None => "either",
            };
            format!("{} {headers:?} {transport}", url.resolve().unwrap())
        }
    }
}

#[test]
fn server_files_are_read_like_clients_do() {
    let path = std::env::var("PATH").unwrap();
    let missing = "the environment variable `NO_SUCH_ROOM` is not set".to_owned();
    let cases: Vec<(Value, String)> = vec![
        (json!({"command": "uvx"}), "uvx [] [] None".to_owned()),
        (
            json!({"type": "stdio", "command": "uvx", "args": ["a"], "env": {"K": "v"}}),
            "uvx [\"a\"] [\"K=v\"] None".to_owned(),
        ),
        (json!({"command": "uvx", "cwd": "/srv"}), "uvx [] [] Some(\"/srv\")".to_owned()),
        // Some clients write null for a missing value, and a number for a text.
        (
            json!({"command": "uvx", "args": null, "env": {"PORT": 8080, "RATE": 1.50, "K": null}}),
            "uvx [] [\"PORT=8080\", \"RATE=1.5\"] None".to_owned(),
        ),
        (json!({"command": "uvx", "env": null, "cwd": null}), "uvx [] [] None".to_owned()),
        (json!({"url": "https://x/mcp", "headers": null}), "https://x/mcp [] either".to_owned()),
        // References to environment variables, in every place and spelling.
        (json!({"command": "${PATH}/x"}), format!("{path}/x [] [] None")),
        (json!({"command": "${env:PATH}/x"}), format!("{path}/x [] [] None")),
        (json!({"command": "${NO_SUCH_ROOM:-/opt}/x"}), "/opt/x [] [] None".to_owned()),
        (json!({"command": "${env:NO_SUCH_ROOM:-/opt}/x"}), "/opt/x [] [] None".to_owned()),
        (
            json!({"command": "x", "cwd": "${NO_SUCH_ROOM:-/srv}/y"}),
            "x [] [] Some(\"/srv/y\")".to_owned(),
        ),
        (json!({"command": "x", "cwd": "${env:PATH}"}), format!("x [] [] Some({path:?})")),
        (
            json!({"command": "x", "args": ["${env:PATH}"], "env": {"K": "${env:PATH}"}}),
            format!("x {:?} {:?} None", [&path], [format!("K={path}")]),
        ),
        (
            json!({"url": "https://x/${env:NO_SUCH_ROOM:-r}", "headers": {"K": "${env:PATH}"}}),
            format!("https://x/r {:?} either", [format!("K: {path}")]),
        ),
        // A missing variable is named and does not affect other servers.
        (json!({"command": "${NO_SUCH_ROOM}/x"}), missing.clone()),
        (json!({"command": "${env:NO_SUCH_ROOM}/x"}), missing.clone()),
        (json!({"command": "x", "cwd": "${NO_SUCH_ROOM}"}), missing.clone()),
        (json!({"command": "x", "args": ["${env:NO_SUCH_ROOM}"]}), missing.clone()),
        (json!({"command": "x", "env": {"K": "${env:NO_SUCH_ROOM}"}}), missing.clone()),
        (json!({"url": "https://x/${env:NO_SUCH_ROOM}"}), missing.clone()),
        (json!({"url": "https://x", "headers": {"K": "${NO_SUCH_ROOM}"}}), missing.clone()),
        // URLs under each key that clients use.
        (json!({"url": "https://x/mcp"}), "https://x/mcp [] either".to_owned()),
        (json!({"type": "http", "url": "https://x/mcp"}), "https://x/mcp [] http".to_owned()),
        (json!({"type": "sse", "url": "https://x/sse"}), "https://x/sse [] sse".to_owned()),
        (json!({"transport": "sse", "url": "https://x/sse"}), "https://x/sse [] sse".to_owned()),
        (
            json!({"serverUrl": "https://x/mcp", "headers": {"K": "v"}}),
            "https://x/mcp [\"K: v\"] either".to_owned(),
        ),
        (json!({"httpUrl": "https://x/mcp"}), "https://x/mcp [] either".to_owned()),
        (json!({"disabled": false, "command": "uvx"}), "uvx [] [] None".to_owned()),
    ];
    for key in ["mcpServers", "servers", "mcpServersBehindToolgate"] {
        for (server, expected) in &cases {
            let text = json!({key: {"one": server, "two": {"command": "well"}}}).to_string();
            let found = parse_mcp_servers(&text).unwrap_or_else(|why| panic!("{server}: {why}"));
            let names: Vec<&str> = found.iter().map(|upstream| upstream.name.as_str()).collect();
            assert_eq!(names, ["one", "two"], "{key} {server}");
            assert_eq!(
                (&describe_upstream(&found[0]), describe_upstream(&found[1])),
                (expected, "well [] [] None".to_owned()),
                "{key} {server}"
            );
            assert!(
                found.iter().all(|upstream| upstream.undeclared == UndeclaredToolPolicy::Ask),
                "{key} {server}"
            );
        }
    }
}

#[test]
fn disabled_servers_are_skipped_and_invalid_refused() {
    let found = |server: Value| {
        parse_mcp_servers(&json!({"mcpServers": {"one": server}}).to_string())
            .map(|found| found.len())
    };
    for server in [
        json!({"disabled": true, "command": "uvx"}),
        json!({"command": "toolgate"}),
        json!({"command": "${HOME}/bin/toolgate"}),
        json!({"command": "${NO_SUCH_ROOM:-toolgate}", "args": ["serve", "--stdio"]}),
    ] {
        assert_eq!(found(server.clone()), Ok(0), "{server}");
    }
    for (server, why) in [
        (json!({}), "`one`: missing `command` or `url`"),
        (json!({"command": "${PATH"}), "`one`: `${` is not closed"),
        (json!({"command": "x", "cwd": "${PATH"}), "`one`: `${` is not closed"),
        (json!({"command": "x", "args": [1]}), "`one`: `args` must contain only strings"),
        (
            json!({"command": "x", "args": "mcp-server-git --repository /x"}),
            "`one`: `args` must be a list",
        ),
        (json!({"command": "x", "args": {"0": "a"}}), "`one`: `args` must be a list"),
        (json!({"command": "x", "env": {"K": true}}), "`one`: `env.K` must be a string"),
        (json!({"url": "https://x", "headers": []}), "`one`: `headers` must be an object"),
    ] {
        assert_eq!(found(server.clone()), Err(why.to_owned()), "{server}");
    }
    assert_eq!(
        parse_mcp_servers("{}").map(|found| found.len()),
        Err("missing `mcpServers`".to_owned())
    );
}

#[test]
fn secret_from_file_stays_redacted_after_file_change() {
    let home = tempfile::tempdir().unwrap();
    let key = home.path().join("key");
    let text = format!(
        "[upstreams.a]\ncommand = \"a\"\nenv = {{ KEY = {{ file = {} }} }}\n[gateway.jwt]\nissuer = \"i\"\naudience = \"a\"\nkeys = \"keys.json\"\n",
        json!(key)
    );
    let read = || Config::parse("toolgate.toml", &text).upstreams.remove(0);
    std::fs::write(&key, "first-key-of-ours\n").unwrap();
    let used = read();
    let UpstreamTransport::Command { env, .. } = &used.transport else { panic!("{used:?}") };
    // No process uses the secret yet, so a change of the file does not matter.
    assert!(used.is_unchanged(&read()));
    assert_eq!(env[0].1.resolve_and_remember().unwrap(), "first-key-of-ours");
    assert!(used.is_unchanged(&read()));
    std::fs::write(&key, "second-key-of-ours\n").unwrap();
    assert!(!used.is_unchanged(&read()));
    let secrets = "first-key-of-ours, second-key-of-ours";
    assert_eq!(used.redact_secrets(secrets), "[redacted], [redacted]");
    assert_eq!(
        used.redact_value(json!({"text": secrets})),
        json!({"text": "[redacted], [redacted]"})
    );
    assert!(!format!("{used:?}").contains("key-of-ours"), "{used:?}");
    // An empty file can be a write in progress.
    std::fs::write(&key, "\n").unwrap();
    assert!(used.is_unchanged(&read()));
    std::fs::remove_file(&key).unwrap();
    assert!(used.is_unchanged(&read()));
    assert_eq!(used.redact_secrets(secrets), "[redacted], second-key-of-ours");
    // A reference to another missing file is a change.
    let other =
        Config::parse("toolgate.toml", &text.replace("/key\"", "/another\"")).upstreams.remove(0);
    assert!(!used.is_unchanged(&other));
    // Files that hold values are watched, but they are not part of the accepted configuration.
    let config = Config::parse("toolgate.toml", &text);
    assert_eq!(config.value_files(), [key, "keys.json".into()]);
    assert!(config.included_files().is_empty());
}

#[test]
fn url_secrets_are_redacted_in_every_encoding() {
    let url = "https://ann:pass%2Dword-1@x.example/mcp?region=eu&apiKey=k3y%2Bof+ours&plain-k3y#top-of-page";
    let upstream = parse_mcp_servers(&json!({"mcpServers": {"far": {"url": url}}}).to_string())
        .unwrap()
        .remove(0);
    for secret in
        ["pass%2Dword-1", "pass-word-1", "k3y%2Bof+ours", "k3y+of+ours", "k3y+of ours", "plain-k3y"]
    {
        let text = format!("`{secret}` of ann is wrong");
        assert_eq!(upstream.redact_secrets(&text), "`[redacted]` of ann is wrong", "{secret}");
        assert_eq!(
            upstream.redact_value(json!([text])),
            json!(["`[redacted]` of ann is wrong"]),
            "{secret}"
        );
    }
    let text = "no server is at x.example/mcp in eu, see apiKey and top-of-page";
    assert_eq!(upstream.redact_secrets(text), text);
}

#[test]
fn servers_that_map_to_same_name_are_refused() {
    // The first 32 letters are the same.
    let names = ["a-server-with-a-rather-long-name-one", "a-server-with-a-rather-long-name-two"];
    let parse_servers = |names: &[&str], extra: Value| {
        let servers: serde_json::Map<String, Value> =
            names.iter().map(|name| ((*name).to_owned(), json!({"command": name}))).collect();
        let mut servers = Value::Object(servers);
        servers[names[0]].as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        parse_mcp_servers(&json!({"mcpServers": servers}).to_string())
            .map(|found| found.into_iter().map(|server| server.name).collect::<Vec<_>>())
    };
    let short = "a-server-with-a-rather-long-name";
    let why =
        |name: &str| Err(format!("`{name}` has the same name as another server after mapping"));
    assert_eq!(parse_servers(&names, json!({})), why(names[1]));
    assert_eq!(parse_servers(&[names[0], short], json!({})), why(names[0]));
    assert_eq!(parse_servers(&["Git.Hub", "git_hub"], json!({})), why("Git.Hub"));
    assert_eq!(parse_servers(&names[..1], json!({})), Ok(vec![short.to_owned()]));
    // A disabled server does not conflict.
    assert_eq!(parse_servers(&names, json!({"disabled": true})), Ok(vec![short.to_owned()]));
}

#[test]
fn conflicting_server_files_are_both_named() {
    let home = tempfile::tempdir().unwrap();
    let write_file = |name: &str, server: Value| {
        std::fs::write(
            home.path().join(name),
            json!({"mcpServers": {"git": server, name: {"command": "x"}}}).to_string(),
        )
        .unwrap();
    };
    write_file("one", json!({"command": "mcp-git", "args": ["here"]}));
    let read = |extra: &str| {
        let name = home.path().join("toolgate.toml").display().to_string();
        let config = Config::parse(&name, &format!("mcp_servers = [\"one\", \"two\"]\n{extra}"));
        let names: Vec<String> =
            config.upstreams.iter().map(|upstream| upstream.name.clone()).collect();
        (config.problems().iter().map(|problem| problem.message.clone()).collect::<Vec<_>>(), names)
    };
    let all = ["git", "one", "two"].map(str::to_owned).to_vec();
    write_file("two", json!({"command": "mcp-git", "args": ["here"]}));
    assert_eq!(read(""), (Vec::new(), all.clone()));
    // Clients differ in whether they name the transport.
    for (first, second, same) in
        [(None, Some("sse"), true), (Some("http"), None, true), (Some("http"), Some("sse"), false)]
    {
        let server = |kind: Option<&str>| match kind {
            Some(kind) => json!({"url": "http://127.0.0.1:1/mcp", "type": kind}),
            None => json!({"url": "http://127.0.0.1:1/mcp"}),
        };
        write_file("one", server(first));
        write_file("two", server(second));
        assert_eq!(read("").0.is_empty(), same, "{first:?} {second:?}");
    }
    write_file("one", json!({"command": "mcp-git", "args": ["here"]}));
    write_file("two", json!({"command": "mcp-git", "args": ["there"]}));
    let [first, second] = ["one", "two"].map(|name| home.path().join(name).display().to_string());
    let why = format!("{first} and {second} both define a server `git`, but differently");
    assert_eq!(read(""), (vec![why], all.clone()));
    // A definition in the configuration itself wins.
    assert_eq!(read("[upstreams.git]\ncommand = \"another\"\n"), (Vec::new(), all));
}
