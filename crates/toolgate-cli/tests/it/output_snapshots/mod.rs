//! Tests the exact output and exit codes of verbs.

mod ledger;

use assert_cmd::Command;
use assert_cmd::cargo::CommandCargoExt;
use regex::Regex;
use serde_json::{Value, json};

use crate::hook::TestProject;

/// Configures an agent that runs commands, and that needs approval to delete.
pub(crate) const CODER_CONFIG: &str = r#"
store = "ledger.db"
name = "coder"
[tools.bash]
kind = "client"
policy = "open"
shell = "/command"
[[policy]]
name = "deletes"
rule = "ask"
tools = ["bash"]
where = [{ argument = "/command", runs = ["rm"] }]
reason = "This deletes something."
approvers = ["boss", "ann"]
"#;

/// Creates a project with the ledger of `toolgate demo`.
pub(crate) fn demo_project() -> TestProject {
    let project = TestProject::with_config("store = \"ledger.db\"\n");
    assert_eq!(project.run(&["demo", "--store", "ledger.db"], "").0, 0);
    project
}

/// Sends a hook event of a command.
pub(crate) fn send_hook_event(
    project: &TestProject,
    event_name: &str,
    command: &str,
    fields: &Value,
) {
    let mut event = json!({"hook_event_name": event_name, "session_id": "s1", "tool_name": "Bash", "tool_use_id": command});
    event["tool_input"] = json!({"command": command});
    event.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let (code, _, stderr) = project.run(&["hook", "--config", "toolgate.toml"], &event.to_string());
    assert_eq!((code, stderr.as_str()), (0, ""), "{command}");
}

/// Runs a program of this package.
pub(crate) fn run_program(
    project: &TestProject,
    name: &str,
    args: &[&str],
    input: &[u8],
) -> (i32, String, String) {
    let mut command = std::process::Command::cargo_bin(name).unwrap();
    project.set_environment(&mut command);
    let output = Command::from_std(command).args(args).write_stdin(input).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (
        output.status.code().unwrap_or_else(|| panic!("killed")),
        text(output.stdout),
        text(output.stderr),
    )
}

/// Masks the parts that differ between runs or machines.
pub(crate) fn mask_variable_parts(text: &str) -> String {
    let masks = [
        ("[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "CALL"),
        ("[0-9a-f]{128}", "SIGNATURE"),
        ("[0-9a-f]{64}", "HEX"),
        ("[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+Z", "MOMENT"),
        ("127.0.0.1:[0-9]+", "127.0.0.1:PORT"),
        ("for [^ ]+ as coder", "for USER as coder"),
        ("\"principal\":\"[^\"]*\",\"session\"", "\"principal\":\"USER\",\"session\""),
        (" of [^ ]+ with coder", " of USER with coder"),
    ];
    masks.iter().fold(text.to_owned(), |text, (from, to)| {
        Regex::new(from).unwrap().replace_all(&text, *to).into_owned()
    })
}

/// Runs the commands of a line, and returns the exit code and output of each.
///
/// Omits changed lines of files, because other tests check the files.
pub(crate) fn transcript(project: &TestProject, line: &str) -> String {
    let run_command = |command: &str| {
        let output = project.masked_output(&command.split(' ').collect::<Vec<_>>(), "");
        let (code, output) = output.strip_prefix("exit ").unwrap().split_once('\n').unwrap();
        let is_diff = |line: &str| {
            line.starts_with("  +") || (line.starts_with("  -") && !line.starts_with("  --"))
        };
        // Whether the sandbox works depends on the machine.
        let lines = output
            .lines()
            .filter(|line| !line.is_empty() && !is_diff(line) && !line.contains(" sandbox "));
        format!(
            "$ {command} [{code}]\n{}",
            lines.map(|line| format!("{line}\n")).collect::<String>()
        )
    };
    mask_variable_parts(&line.split("; ").map(run_command).collect::<String>())
}

/// Returns one field of each JSON line that a verb prints.
fn json_field_values(project: &TestProject, args: &[&str], field: &str) -> Vec<String> {
    let (_, stdout, _) = project.run(args, "");
    stdout
        .lines()
        .map(|line| {
            serde_json::from_str::<Value>(line).unwrap()[field].as_str().unwrap().to_owned()
        })
        .collect()
}

#[test]
fn approvals_are_listed_and_answered() {
    let project = TestProject::with_config(CODER_CONFIG);
    send_hook_event(&project, "PreToolUse", "ls", &json!({}));
    assert_eq!(
        transcript(&project, "approvals list"),
        "$ approvals list [0]\nno approvals are waiting in HOME/project/ledger.db\n"
    );
    send_hook_event(&project, "PreToolUse", "rm x", &json!({}));
    send_hook_event(&project, "PreToolUse", "rm y", &json!({}));
    let [first, second] =
        json_field_values(&project, &["approvals", "list", "--json"], "id").try_into().unwrap();
    let output = transcript(
        &project,
        &format!(
            "approvals list; approvals list --json; approvals approve {first} --as mallory; approvals approve apr_none; approvals deny; \
             approvals approve {first} --as boss; approvals approve {first} --as boss; approvals deny {second} --as ann; approvals list --json; \
             approvals list --store none.db"
        ),
    );
    insta::assert_snapshot!(output, @r#"
    $ approvals list [0]
    apr_CALL bash {"command":"rm x"}
      This deletes something.
      asked by deletes; to be answered by boss or ann until TIME; session s1
      for USER as coder; run `toolgate approvals approve apr_CALL`, or `deny`
    apr_CALL bash {"command":"rm y"}
      This deletes something.
      asked by deletes; to be answered by boss or ann until TIME; session s1
      for USER as coder; run `toolgate approvals approve apr_CALL`, or `deny`
    $ approvals list --json [0]
    {"answered_by":null,"approvers":[["boss","ann"]],"asked_at":"MOMENT","asked_by":["deletes"],"digest":"HEX","expires":"MOMENT","id":"apr_CALL","key":{"agent":"coder","principal":"USER","session":"s1"},"reason":"This deletes something.","shown":{"command":"rm x"},"state":"waiting","tool":"bash"}
    {"answered_by":null,"approvers":[["boss","ann"]],"asked_at":"MOMENT","asked_by":["deletes"],"digest":"HEX","expires":"MOMENT","id":"apr_CALL","key":{"agent":"coder","principal":"USER","session":"s1"},"reason":"This deletes something.","shown":{"command":"rm y"},"state":"waiting","tool":"bash"}
    $ approvals approve apr_CALL --as mallory [2]
    error: `mallory` may not answer this approval; pass the name of an approver with `--as`
    $ approvals approve apr_none [2]
    error: `apr_none` is not an approval id, nor at least 6 digits at its beginning or end; list waiting approvals with `toolgate approvals list`
    $ approvals deny [2]
    error: the following required arguments were not provided:
      <ID>
    Usage: toolgate approvals deny <ID>
    For more information, try '--help'.
    $ approvals approve apr_CALL --as boss [0]
    approved bash {"command":"rm x"} in HOME/project/ledger.db
    $ approvals approve apr_CALL --as boss [2]
    error: `apr_CALL` is not waiting; list waiting approvals with `toolgate approvals list`
    $ approvals deny apr_CALL --as ann [0]
    denied bash {"command":"rm y"} in HOME/project/ledger.db
    $ approvals list --json [0]
    $ approvals list --store none.db [2]
    error: the ledger none.db: no such file; name an existing ledger with `--store`
    "#);
}

#[test]
fn approval_id_part_must_be_unambiguous() {
    let project = TestProject::with_config(CODER_CONFIG);
    for command in ["rm x", "rm y", "rm z"] {
        send_hook_event(&project, "PreToolUse", command, &json!({}));
    }
    let [x, y, z] =
        json_field_values(&project, &["approvals", "list", "--json"], "id").try_into().unwrap();
    let digits = |id: &String| id.trim_start_matches("apr_").to_owned();
    // The ids have the same time, so they have the same beginning. Their ends differ.
    let (x, y, z) = (digits(&x), digits(&y), digits(&z));
    let beginning: String = x
        .chars()
        .zip(y.chars())
        .zip(z.chars())
        .take_while(|((a, b), c)| a == b && b == c)
        .map(|((a, _), _)| a)
        .collect();
    let beginning = beginning.get(..6).unwrap_or_else(|| panic!("{x} {y} {z}"));
    let end = |id: &str| id.chars().skip(id.len() - 8).collect::<String>();
    let short = |id: &str| id.chars().take(id.len() - 4).collect::<String>();
    let answer = |verb: &str, id: &str| project.run(&["approvals", verb, id, "--as", "boss"], "");
    let waiting = || json_field_values(&project, &["approvals", "list", "--json"], "id").len();
    for part in [beginning.to_owned(), format!("apr_{beginning}"), format!("apr_{beginning}…")] {
        let (code, _, stderr) = answer("approve", &part);
        assert_eq!(code, 2, "{part}");
        assert_eq!(stderr, format!("error: several approvals match: apr_{x}, apr_{y}, apr_{z}\n"));
    }
    for part in ["", "apr_", "apr_none", end(&x).get(..5).unwrap(), "%%%%%%", "______"] {
        let (code, _, stderr) = answer("approve", part);
        assert!(code == 2 && stderr.contains("nor at least 6 digits"), "{part}: {stderr}");
    }
    let (code, _, stderr) = answer("deny", "ffffffffffff");
    assert!(code == 2 && stderr.contains("`ffffffffffff` is not waiting"), "{stderr}");
    assert_eq!(waiting(), 3, "an approval was answered");
    let (code, stdout, stderr) = answer("approve", &format!("…{}", end(&y).to_uppercase()));
    assert!(
        code == 0 && stdout.starts_with("approved bash {\"command\":\"rm y\"}"),
        "{stdout}{stderr}"
    );
    let (code, stdout, stderr) = answer("deny", &format!("apr_{}", short(&x)));
    assert!(
        code == 0 && stdout.starts_with("denied bash {\"command\":\"rm x\"}"),
        "{stdout}{stderr}"
    );
    // The id of the waiting approval does not match the ids of answered ones.
    assert_eq!(waiting(), 1);
    for part in [beginning.to_owned(), end(&x), end(&y)] {
        assert_eq!(answer("approve", &part).0, 2, "{part}");
    }
    assert_eq!(waiting(), 1);
    assert_eq!(answer("approve", &z).0, 0);
    assert_eq!(waiting(), 0);
}

#[test]
fn pause_and_resume_list_their_targets() {
    let session = "--agent refund-desk --principal agent-7 --session monday";
    let output = transcript(
        &demo_project(),
        &format!(
            "pause; pause --agent refund-desk --because incident-7; pause --principal agent-7 --because on-leave; \
             pause {session} --because it-loops; pause; resume --agent refund-desk; resume --agent refund-desk; \
             resume --principal agent-7; resume {session}; resume; pause --store none.db"
        ),
    );
    insta::assert_snapshot!(output, @"
    $ pause [0]
    nothing is paused in HOME/project/ledger.db
    $ pause --agent refund-desk --because incident-7 [0]
    the agent `refund-desk` is paused in HOME/project/ledger.db
    $ pause --principal agent-7 --because on-leave [0]
    the principal `agent-7` is paused in HOME/project/ledger.db
    $ pause --agent refund-desk --principal agent-7 --session monday --because it-loops [0]
    the session `monday` of `agent-7` as `refund-desk` is paused in HOME/project/ledger.db
    $ pause [0]
    the agent `refund-desk`: incident-7
    the principal `agent-7`: on-leave
    the session `monday` of `agent-7` as `refund-desk`: it-loops
    $ resume --agent refund-desk [0]
    the agent `refund-desk` is resumed in HOME/project/ledger.db
    $ resume --agent refund-desk [2]
    error: the agent `refund-desk` is not paused; list paused targets with `toolgate pause`
    $ resume --principal agent-7 [0]
    the principal `agent-7` is resumed in HOME/project/ledger.db
    $ resume --agent refund-desk --principal agent-7 --session monday [0]
    the session `monday` of `agent-7` as `refund-desk` is resumed in HOME/project/ledger.db
    $ resume [2]
    error: missing target: pass `--agent`, `--tool`, `--principal`, or `--session` with its agent and principal
    $ pause --store none.db [2]
    error: the ledger none.db: no such file; name an existing ledger with `--store`
    ");
}

#[test]
fn eject_removes_one_or_all_clients() {
    let project = TestProject::new();
    for client in ["cursor", "vscode"] {
        assert_eq!(project.run(&["init", "--for", client], "").0, 0);
    }
    insta::assert_snapshot!(transcript(&project, "eject --dry-run; eject --for cursor; eject; eject; eject --for emacs"), @"
    $ eject --dry-run [0]
    would remove HOME/project/.cursor/hooks.json
    would remove HOME/project/.github/hooks/toolgate.json
    would change HOME/project/toolgate.toml
    $ eject --for cursor [0]
    removed HOME/project/.cursor/hooks.json
    $ eject [0]
    removed HOME/project/.github/hooks/toolgate.json
    changed HOME/project/toolgate.toml
    $ eject [0]
    no settings with toolgate found
    $ eject --for emacs [2]
    error: invalid value 'emacs' for '--for <CLIENT>'
      [possible values: claude-code, codex, cursor, claude-desktop, vscode]
    For more information, try '--help'.
    ");
    project.write("project/.codex/hooks.json", "{\"hooks\": [");
    let broken = "error: HOME/project/.codex/hooks.json: Unterminated array on line 1 column 11";
    assert_eq!(transcript(&project, "eject"), format!("$ eject [2]\n{broken}\n"));
}

#[test]
fn trust_accepts_config_and_reports_its_contents() {
    let project = TestProject::new();
    insta::assert_snapshot!(transcript(&project, "trust; trust nowhere.toml"), @"
    $ trust [2]
    error: no toolgate.toml here; create one with `toolgate init`
    $ trust nowhere.toml [2]
    error: nowhere.toml: No such file or directory (os error 2)
    ");
    project.write(
        "project/more.toml",
        "[[policy]]\nname = \"no\"\nrule = \"deny\"\ntools = [\"look\"]\n",
    );
    project.write("project/toolgate.toml", "include = [\"more.toml\"]\nname = \"c\"\n[tools.look]\nkind = \"client\"\neffect = \"read\"\n");
    insta::assert_snapshot!(transcript(&project, "trust; trust --revoke; trust --revoke"), @"
    $ trust [0]
    trusted HOME/project/toolgate.toml
      c has 1 tool and 1 rule
      with 1 included file: `more.toml`
    after any change, run `toolgate trust` again
    $ trust --revoke [0]
    HOME/project/toolgate.toml is no longer trusted
    $ trust --revoke [0]
    HOME/project/toolgate.toml was not trusted
    ");
    project.write("project/toolgate.toml", "[tools.look]\nkind = \"clint\"\n");
    insta::assert_snapshot!(transcript(&project, "trust"), @r#"
    $ trust [2]
    error: invalid configuration, so it is not trusted
    error: unknown kind `clint`
     --> HOME/project/toolgate.toml:2:8
      |
    2 | kind = "clint"
      |        ^^^^^^^
      |
      = help: did you mean `client`?
    "#);
}

#[test]
fn token_verb_prints_config_lines() {
    let output = transcript(
        &TestProject::new(),
        "token ci --agents support,billing; token ci --json; token",
    );
    insta::assert_snapshot!(output, @r#"
    $ token ci --agents support,billing [0]
    tg_HEX
    the token is not shown again; the client sends it as `Authorization: Bearer TOKEN`. Add this to toolgate.toml:
    [[gateway.tokens]]
    principal = "ci"
    sha256 = "HEX"
    agents = ["support","billing"]
    $ token ci --json [0]
    {"agents":null,"principal":"ci","sha256":"HEX","token":"tg_HEX"}
    $ token [2]
    error: the following required arguments were not provided:
      <PRINCIPAL>
    Usage: toolgate token <PRINCIPAL>
    For more information, try '--help'.
    "#);
}

#[test]
fn pause_writes_to_ledger_of_hook() {
    let project = TestProject::with_config(CODER_CONFIG);
    let user_config = ".config/toolgate/toolgate.toml";
    let mut call = json!({"hook_event_name": "PreToolUse", "session_id": "s1", "tool_name": "Bash", "tool_use_id": "t1"});
    call["tool_input"] = json!({"command": "ls"});
    let pause = ["pause", "--tool", "bash", "--because", "x"];
    assert_eq!(project.run(&["trust"], "").0, 0);
    assert_eq!(project.run(&["hook"], &call.to_string()).0, 0);
    // The user's own file takes precedence, and names another ledger.
    project.write(user_config, "store = \"mine.db\"\nname = \"coder\"\n[tools.other]\nkind = \"client\"\npolicy = \"open\"\n");
    assert_eq!(project.run(&["hook"], &call.to_string()).0, 0);
    let (code, stdout, stderr) = project.run(&pause, "");
    assert!(code == 0 && stdout.ends_with("/.config/toolgate/mine.db\n"), "{stdout}{stderr}");
    assert!(project.run(&["hook"], &call.to_string()).1.contains("\"deny\""));
    // If the file cannot be read, its ledger is unknown.
    std::fs::remove_file(project.path(user_config)).unwrap();
    for broken in ["store = [", "store = 5"] {
        project.write("project/toolgate.toml", broken);
        let (code, stdout, stderr) = project.run(&pause, "");
        assert!(
            code == 2 && stdout.is_empty() && stderr.contains("give the ledger with `--store`"),
            "{stdout}{stderr}"
        );
    }
    // With a file of the user, an untrusted project file is ignored.
    project.write(user_config, &CODER_CONFIG.replace("store = \"ledger.db\"\n", ""));
    project.run(&["hook"], &call.to_string());
    let (code, stdout, stderr) = project.run(&pause, "");
    assert!(
        code == 0 && stdout.ends_with("/.local/state/toolgate/ledger.db\n"),
        "{stdout}{stderr}"
    );
    project.write("project/toolgate.toml", CODER_CONFIG);
    std::fs::remove_file(project.path(user_config)).unwrap();
    std::fs::create_dir(project.path("project/deep")).unwrap();
    let mut in_subdirectory = std::process::Command::cargo_bin("toolgate").unwrap();
    project.set_environment(&mut in_subdirectory);
    let output = Command::from_std(in_subdirectory)
        .current_dir(project.path("project/deep"))
        .args(pause)
        .output()
        .unwrap();
    assert!(String::from_utf8(output.stdout).unwrap().ends_with("/project/ledger.db\n"));
    // Like the hook, the verb finds the project by the variable of the client.
    let mut elsewhere = std::process::Command::cargo_bin("toolgate").unwrap();
    project.set_environment(&mut elsewhere);
    elsewhere.env("CLAUDE_PROJECT_DIR", project.path("project"));
    let output = Command::from_std(elsewhere).current_dir("/").args(pause).output().unwrap();
    assert!(String::from_utf8(output.stdout).unwrap().ends_with("/project/ledger.db\n"));
}
