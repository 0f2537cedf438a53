//! Tests that `init` includes MCP servers of other clients, and that `eject` restores the files.

use crate::hook::TestProject;

#[test]
fn desktop_client_config_is_restored_on_eject() {
    let project = TestProject::new();
    let file = ".config/Claude/claude_desktop_config.json";
    let before = "{\n  // mine\n  \"mcpServers\": {\n    \"notes\": {\n      \"command\": \"notes-server\",\n      \"env\": {\n        \"KEY\": \"k\"\n      }\n    }\n  },\n  \"theme\": \"dark\"\n}\n";
    project.write(file, before);
    assert_eq!(project.run(&["init", "--for", "claude-desktop", "--dry-run"], "").0, 0);
    assert_eq!(project.read(file), before);
    insta::assert_snapshot!(
        "init_claude_desktop",
        project.masked_output(&["init", "--for", "claude-desktop"], "")
    );
    let second_output = project.masked_output(&["init", "--for", "claude-desktop"], "");
    assert!(second_output.contains("claude_desktop_config.json is unchanged"), "{second_output}");
    let config = project.read("project/toolgate.toml");
    assert!(config.contains("mcp_servers = [\"") && !config.contains("notes-server"), "{config}");
    assert_eq!(project.run(&["lint"], "").0, 0);
    assert_eq!(project.run(&["eject"], "").0, 0);
    assert_eq!(project.read(file), before);
}

#[test]
fn doctor_reports_desktop_servers_that_are_not_included() {
    let project = TestProject::with_config("[tools.calc]\nkind = \"builtin\"\n");
    project.write(
        ".config/Claude/claude_desktop_config.json",
        "{\"mcpServers\": {\"notes\": {\"command\": \"notes-server\"}}}\n",
    );
    let output = project.masked_output(&["init", "--for", "claude-desktop"], "");
    let line = "mcp_servers = [\"HOME/.config/Claude/claude_desktop_config.json\"]";
    let last = format!(
        "add this line at the top of HOME/project/toolgate.toml to include the servers: {line}"
    );
    assert_eq!(output.lines().last(), Some(last.as_str()), "{output}");
    assert_eq!(project.run(&["trust"], "").0, 0);
    let why = format!(
        "HOME/project/toolgate.toml does not read them\n                 add this at its top: {line}\n"
    );
    let doctor = project.masked_output(&["doctor"], "");
    assert!(
        doctor.starts_with("exit 1\n") && doctor.contains("✗ server") && doctor.contains(&why),
        "{doctor}"
    );
    let read = line.replace("HOME", project.path("").to_str().unwrap().trim_end_matches('/'));
    project.write(
        "project/toolgate.toml",
        &format!("{read}\n{}", project.read("project/toolgate.toml")),
    );
    assert_eq!(project.run(&["trust"], "").0, 0);
    let doctor = project.masked_output(&["doctor"], "");
    assert!(doctor.contains("✓ server"), "{doctor}");
}

#[test]
fn init_import_includes_mcp_servers() {
    let project = TestProject::new();
    project.write("project/.mcp.json", "{\"mcpServers\": {\"Notes!\": {\"command\": \"${NOTES:-notes-server}\", \"args\": [\"--stdio\"]}, \"far\": {\"url\": \"https://example.com/mcp\"}}}");
    let output = project.masked_output(&["init", "--import", ".mcp.json"], "");
    assert!(
        output.starts_with("exit 0\n") && output.contains("toolgate upstream list"),
        "{output}"
    );
    let output = project.masked_output(&["init", "--import", "nowhere.json"], "");
    assert!(output.starts_with("exit 2\n"), "{output}");
    assert_eq!(project.run(&["lint"], "").0, 0);
    for client in ["claude-code", "codex", "cursor", "vscode"] {
        let other = TestProject::new();
        other.write("project/.mcp.json", &project.read("project/.mcp.json"));
        assert_eq!(other.run(&["init", "--for", client, "--import", ".mcp.json"], "").0, 0);
        assert!(other.read("project/toolgate.toml").contains("\nmcp_servers = [\""), "{client}");
        assert_eq!(other.run(&["lint"], "").0, 0, "{client}");
    }
}
