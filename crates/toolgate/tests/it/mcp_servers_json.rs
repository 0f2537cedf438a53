//! Files of servers as clients have them.

use serde_json::{Value, json};
use toolgate_config::{
    Config, UndeclaredToolPolicy, UpstreamConfig, UpstreamTransport, parse_mcp_servers,
};

/// What a server of such a file comes to, in one line.
fn describe_upstream(upstream: &UpstreamConfig) -> String {
    let lacks = upstream.missing_references();
    if !lacks.is_empty() {
        return lacks.join("; ");
    }
    match &upstream.transport {
        UpstreamTransport::Command { program, args, env, directory, .. } => {
            let args: Vec<String> = args.iter().map(|word| word.resolve().unwrap()).collect();
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
        // As some clients have it: what is null is not there, and a number is its text.
        (
            json!({"command": "uvx", "args": null, "env": {"PORT": 8080, "RATE": 1.50, "K": null}}),
            "uvx [] [\"PORT=8080\", \"RATE=1.5\"] None".to_owned(),
        ),
        (json!({"command": "uvx", "env": null, "cwd": null}), "uvx [] [] None".to_owned()),
        (json!({"url": "https://x/mcp", "headers": null}), "https://x/mcp [] either".to_owned()),
        // What the environment has, wherever it stands and however it is spelled.
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
        // What is missing is named, and keeps nobody else away.
        (json!({"command": "${NO_SUCH_ROOM}/x"}), missing.clone()),
        (json!({"command": "${env:NO_SUCH_ROOM}/x"}), missing.clone()),
        (json!({"command": "x", "cwd": "${NO_SUCH_ROOM}"}), missing.clone()),
        (json!({"command": "x", "args": ["${env:NO_SUCH_ROOM}"]}), missing.clone()),
        (json!({"command": "x", "env": {"K": "${env:NO_SUCH_ROOM}"}}), missing.clone()),
        (json!({"url": "https://x/${env:NO_SUCH_ROOM}"}), missing.clone()),
        (json!({"url": "https://x", "headers": {"K": "${NO_SUCH_ROOM}"}}), missing.clone()),
        // Addresses, by the names that they have.
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
            let names: Vec<&str> = found.iter().map(|one| one.name.as_str()).collect();
            assert_eq!(names, ["one", "two"], "{key} {server}");
            assert_eq!(
                (&describe_upstream(&found[0]), describe_upstream(&found[1])),
                (expected, "well [] [] None".to_owned()),
                "{key} {server}"
            );
            assert!(
                found.iter().all(|one| one.undeclared == UndeclaredToolPolicy::Ask),
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
    // Nobody has been given it yet: whatever is there is what it will be.
    assert!(used.is_unchanged(&read()));
    assert_eq!(env[0].1.resolve_and_remember().unwrap(), "first-key-of-ours");
    assert!(used.is_unchanged(&read()));
    std::fs::write(&key, "second-key-of-ours\n").unwrap();
    assert!(!used.is_unchanged(&read()));
    let said = "first-key-of-ours, second-key-of-ours";
    assert_eq!(used.redact_secrets(said), "[redacted], [redacted]");
    assert_eq!(used.redact_value(json!({"said": said})), json!({"said": "[redacted], [redacted]"}));
    assert!(!format!("{used:?}").contains("key-of-ours"), "{used:?}");
    // It may be written at this moment.
    std::fs::write(&key, "\n").unwrap();
    assert!(used.is_unchanged(&read()));
    std::fs::remove_file(&key).unwrap();
    assert!(used.is_unchanged(&read()));
    assert_eq!(used.redact_secrets(said), "[redacted], second-key-of-ours");
    // Another file that is not there is another one.
    let other =
        Config::parse("toolgate.toml", &text.replace("/key\"", "/another\"")).upstreams.remove(0);
    assert!(!used.is_unchanged(&other));
    // What values are taken from is looked at again, and is no part of what is accepted.
    let config = Config::parse("toolgate.toml", &text);
    assert_eq!(config.value_files(), [key, "keys.json".into()]);
    assert!(config.included_files().is_empty());
}

#[test]
fn url_secrets_are_redacted_in_every_encoding() {
    let url = "https://ann:pass%2Dword-1@x.example/mcp?region=eu&apiKey=k3y%2Bof+ours&plain-k3y#top-of-page";
    let far = parse_mcp_servers(&json!({"mcpServers": {"far": {"url": url}}}).to_string())
        .unwrap()
        .remove(0);
    for secret in
        ["pass%2Dword-1", "pass-word-1", "k3y%2Bof+ours", "k3y+of+ours", "k3y+of ours", "plain-k3y"]
    {
        let said = format!("`{secret}` of ann is wrong");
        assert_eq!(far.redact_secrets(&said), "`[redacted]` of ann is wrong", "{secret}");
        assert_eq!(
            far.redact_value(json!([said])),
            json!(["`[redacted]` of ann is wrong"]),
            "{secret}"
        );
    }
    let said = "nobody is at x.example/mcp in eu, see apiKey and top-of-page";
    assert_eq!(far.redact_secrets(said), said);
}

#[test]
fn servers_that_map_to_same_name_are_refused() {
    // The first 32 letters are the same.
    let names = ["a-server-with-a-rather-long-name-one", "a-server-with-a-rather-long-name-two"];
    let of = |names: &[&str], more: Value| {
        let servers: serde_json::Map<String, Value> =
            names.iter().map(|name| ((*name).to_owned(), json!({"command": name}))).collect();
        let mut servers = Value::Object(servers);
        servers[names[0]].as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        parse_mcp_servers(&json!({"mcpServers": servers}).to_string())
            .map(|found| found.into_iter().map(|one| one.name).collect::<Vec<_>>())
    };
    let short = "a-server-with-a-rather-long-name";
    let why =
        |name: &str| Err(format!("`{name}` has the same name as another server after mapping"));
    assert_eq!(of(&names, json!({})), why(names[1]));
    assert_eq!(of(&[names[0], short], json!({})), why(names[0]));
    assert_eq!(of(&["Git.Hub", "git_hub"], json!({})), why("Git.Hub"));
    assert_eq!(of(&names[..1], json!({})), Ok(vec![short.to_owned()]));
    // One that is left out is in nobody's way.
    assert_eq!(of(&names, json!({"disabled": true})), Ok(vec![short.to_owned()]));
}

#[test]
fn conflicting_server_files_are_both_named() {
    let home = tempfile::tempdir().unwrap();
    let file = |name: &str, server: Value| {
        std::fs::write(
            home.path().join(name),
            json!({"mcpServers": {"git": server, name: {"command": "x"}}}).to_string(),
        )
        .unwrap();
    };
    file("one", json!({"command": "mcp-git", "args": ["here"]}));
    let read = |more: &str| {
        let name = home.path().join("toolgate.toml").display().to_string();
        let config = Config::parse(&name, &format!("mcp_servers = [\"one\", \"two\"]\n{more}"));
        let names: Vec<String> = config.upstreams.iter().map(|one| one.name.clone()).collect();
        (config.problems().iter().map(|problem| problem.message.clone()).collect::<Vec<_>>(), names)
    };
    let all = ["git", "one", "two"].map(str::to_owned).to_vec();
    file("two", json!({"command": "mcp-git", "args": ["here"]}));
    assert_eq!(read(""), (Vec::new(), all.clone()));
    // Clients differ in whether they name the transport.
    for (one, two, same) in
        [(None, Some("sse"), true), (Some("http"), None, true), (Some("http"), Some("sse"), false)]
    {
        let server = |kind: Option<&str>| match kind {
            Some(kind) => json!({"url": "http://127.0.0.1:1/mcp", "type": kind}),
            None => json!({"url": "http://127.0.0.1:1/mcp"}),
        };
        file("one", server(one));
        file("two", server(two));
        assert_eq!(read("").0.is_empty(), same, "{one:?} {two:?}");
    }
    file("one", json!({"command": "mcp-git", "args": ["here"]}));
    file("two", json!({"command": "mcp-git", "args": ["there"]}));
    let [one, two] = ["one", "two"].map(|name| home.path().join(name).display().to_string());
    let why = format!("{one} and {two} both define a server `git`, but differently");
    assert_eq!(read(""), (vec![why], all.clone()));
    // What the file itself says of it counts.
    assert_eq!(read("[upstreams.git]\ncommand = \"another\"\n"), (Vec::new(), all));
}
