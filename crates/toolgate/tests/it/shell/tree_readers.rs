//! Tests searches and other commands that read whole directory trees.

use serde_json::json;
use toolgate::policy::{Condition, Deny};
use toolgate::{Agent, Tool};

use crate::shell::implicit_access::{OWN_PATHS, assert_verdicts, gate_with_path_rule};
use crate::support::BuildWithReplayCheck;

#[tokio::test]
async fn search_above_protected_path_is_denied() {
    let new_gate =
        || gate_with_path_rule(&["/home/ann/.local/state/toolgate"], Some("/home/ann/desk"));
    let refused = [
        "grep -r x /home/ann",
        "grep -rn x ..",
        "grep -rn x ../.local",
        "grep -rne x ..",
        "egrep -R x /home/ann/.local",
        "rg x /",
        "rg x ../..",
        "cd .. && grep -r x .",
        "cd .. && rg x",
        "cd /home/ann; rg x",
        "cd /home/ann && rg x",
        "cd src && cd ../.. && rg x",
        "env -C /home/ann grep -r x .",
        "sudo grep -r x /home/ann",
        "tar czf a.tgz /home/ann",
        "tar czf a.tgz -C /home/ann .",
        "zip -r a.zip ..",
        "scp -r /home/ann host:",
        "diff -r /home/ann /tmp/x",
        "grep -r --exclude-dir=.git x /home/ann",
        "grep -r --binary x /home/ann/.local",
        "rg --ignore x /home/ann/.local",
        "ag -C key /home/ann",
        "ag -t key /home/ann",
        "ag -t key /home/ann src",
        "ack --match=key /home/ann src",
        "tar czf a.tgz --exclude=.local /home/ann",
        "tar czf a.tgz /home/ann --exclude=.local",
        "tar czf a.tgz --anchored --exclude=.local /home/ann",
        "tar --no-wildcards --exclude='.l*' -cf x.tar /home/ann",
        "tar -cf x.tar --add-file=/home/ann",
        "cd /opt && tar -cf o.tar --label -x /home/ann/.local",
        "cd /opt && tar -cf o.tar --some-option -x /home/ann/.local",
        "jar cf /opt/x.jar /home/ann/.local",
        "cd /home/ann; tar czf a.tgz . -C /tmp x",
        "diff -r --from-file=/home/ann /tmp/e",
        "git diff --no-index /tmp/e /home/ann/.local",
        "git diff /tmp/e /home/ann/.local",
        "cd /home/ann && git grep --no-index key",
        "env -C/home/ann rg key",
        "env --chd=/home/ann rg key",
        "sudo -D/home/ann rg key",
        "cd /home/ann; grep -r key </dev/null",
        "cd /home/ann; true | grep -r key",
        "cd /home/ann; rg key </dev/null",
        "cd /home/ann; ag -m 5 key",
        "cd ..; cd . && rg key",
        // `--exclude` matches files and `--exclude-dir` directories; the type of the protected path
        // is unknown.
        "grep -r --exclude=.local x /home/ann",
        "grep -r --exclude-dir=toolgate x /home/ann",
        "cat /home/ann/.local/state/toolgate/key",
    ];
    assert_verdicts(&new_gate(), "deny", &refused).await;
    let needs_approval = [
        "grep -r x /home/ann/.*",
        "curl 'file:///home/ann/.local/state/{toolgate}/ledger.db'",
        "curl --url 'file:///home/ann/.local/state/tool[g-g]ate/ledger.db'",
        "find /home/ann -name key -exec cat {} +",
        "find .. -type f | xargs cat",
        "grep -r x ~other",
        "cd ~other; rg key",
        "cd ~-; rg key",
        "cd ~other/..; rg key src",
        "sudo -i rg key",
        "sudo -u ann -i rg key",
        "cd /usr; cd /tmp; cd /var; cd /etc; cd /opt; cd /srv; cd /home/ann; rg key",
        "cd a; cd b; cd c; cd d; cd e; cd f; cd g; cd /home; rg key ann",
    ];
    assert_verdicts(&new_gate(), "ask", &needs_approval).await;
    let allowed = [
        "grep -rn x .",
        "grep -rn x src",
        "grep -rn x",
        "rg x",
        "rg -g '*.rs' x src",
        "grep -rn x /home/ann/desk",
        "cd /home/ann/other && grep -rn x .",
        "grep x ..",
        "ps aux | grep x",
        "ls -R /home/ann",
        "find /home/ann -name '*.log'",
        "find . -name '*.rs' -exec grep -l x {} +",
        "rg --files /home/ann",
        "grep -r --exclude-dir=.local x /home/ann",
        "grep -r --exclude-dir '.l*' x /home/ann",
        "cd .. && ls",
        "cd /home/ann; ls; cd desk && rg x",
        "time grep -rn cd .",
        "sudo -u ann grep -ri x .",
        "sudo grep -rC3 x src",
        "grep -r x . < /dev/null",
        "ag x src",
        "ag -C 3 x src",
        "rg -C3 x src",
        "tar czf a.tgz src",
        "zip -r a.zip src",
        "git diff main topic -- src",
        "git grep x",
        "grep -r x \"$DIR\"",
    ];
    assert_verdicts(&new_gate(), "allow", &allowed).await;
}

#[tokio::test]
async fn search_in_directory_of_protected_file_is_denied() {
    let new_gate = || {
        gate_with_path_rule(
            &["/home/ann/desk/ledger.db", "/home/ann/desk/ledger.db.state"],
            Some("/home/ann/desk"),
        )
    };
    let refused = [
        "grep -rn x .",
        "grep -rn x",
        "rg x",
        "rg x /home/ann/desk",
        "tar czf /tmp/a.tgz .",
        "cd src; rg x",
    ];
    assert_verdicts(&new_gate(), "deny", &refused).await;
    assert_verdicts(&new_gate(), "ask", &["grep -rn x *"]).await;
    let allowed = [
        "grep -rn x src",
        "cd src && rg x",
        "rg x src tests",
        "cat a | rg x",
        "git grep x",
        "tar czf a.tgz -C /tmp/x .",
        "grep -rn --exclude='ledger.db*' --exclude-dir='ledger.db*' x .",
    ];
    assert_verdicts(&new_gate(), "allow", &allowed).await;
}

#[tokio::test]
async fn search_after_cd_to_home_is_denied() {
    let new_gate = || gate_with_path_rule(&["~/.local/state/toolgate"], Some("/nowhere/desk"));
    assert_verdicts(
        &new_gate(),
        "deny",
        &["cd; rg key", "cd --; rg key", "cd -P; rg key", "cd -P && rg key", "cd ~ && rg key"],
    )
    .await;
    assert_verdicts(&new_gate(), "allow", &["rg key", "cd src; rg key", "time grep -rn cd ."])
        .await;
}

#[tokio::test]
async fn wildcard_path_matches_search_above_it() {
    let places = ["/home/*/.ssh"];
    assert_verdicts(
        &gate_with_path_rule(&places, Some("/home/ann/desk")),
        "deny",
        &["grep -r x /home/ann", "rg x /home", "cd .. && rg x"],
    )
    .await;
    assert_verdicts(
        &gate_with_path_rule(&places, Some("/home/ann/desk")),
        "allow",
        &["grep -rn x .", "rg x src", "grep -r x /srv/ann"],
    )
    .await;
    assert_verdicts(&gate_with_path_rule(&places, None), "ask", &["tar xf a -C /home/ann"]).await;
    assert_verdicts(
        &gate_with_path_rule(&places, None),
        "allow",
        &["tar xf a -C /home/ann/desk/build"],
    )
    .await;
}

#[tokio::test]
async fn tree_reads_match_unless_disabled() {
    let with = |trees: &str| {
        let text = format!(
            "[[policy]]\nname = \"own\"\nrule = \"deny\"\ntools = [\"bash\"]\nreason = \"No.\"\n\
             where = [{{ argument = \"/command\", touches = [\"~/.ssh\"], lenient = true{trees} }}]\n"
        );
        let schema = json!({"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]});
        let agent = Agent::builder("coder")
            .tool(Tool::external("bash", "Runs a command.", Some(schema)).shell("/command"))
            .rules(toolgate::policy::source::RuleSet::parse("rules.toml", &text));
        crate::support::runtime_builder().agent(agent.build().unwrap()).build_checked()
    };
    let commands = ["tar czf - ~/", "grep -r . ~/", "zip -r a.zip ~"];
    assert_verdicts(&with(""), "deny", &commands).await;
    assert_verdicts(&with(", recursive = true"), "deny", &commands).await;
    assert_verdicts(&with(", recursive = false"), "allow", &commands).await;
    assert_verdicts(&with(", recursive = false"), "deny", &["rm -r ~/", "cat ~/.ssh/key"]).await;
    assert_verdicts(&with(""), "allow", &["grep -rn x .", "tar czf a.tgz src", "cat \"$FILE\""])
        .await;
}

#[tokio::test]
async fn many_directory_changes_ask() {
    let command =
        format!("env {}rg key", (0..300).map(|n| format!("-C a{n} ")).collect::<String>());
    assert_verdicts(
        &gate_with_path_rule(&OWN_PATHS, Some("/home/ann/desk")),
        "ask",
        &[command.as_str()],
    )
    .await;
}

#[tokio::test]
async fn search_tool_path_is_checked() {
    let places = vec!["/home/ann/.local/state/toolgate".to_owned()];
    let searches = |from: &str| {
        let condition = Condition::Touches {
            places: places.clone(),
            lenient: true,
            trees: false,
            whole: false,
            from: Some(from.to_owned()),
        };
        let agent = Agent::builder("coder")
            .tool(Tool::external("grep", "Searches.", None).effect(toolgate::Effect::Read))
            .policy(Deny::new("own", ["grep"]).when("/path", condition).reason("Not for agents."));
        crate::support::runtime_builder().agent(agent.build().unwrap()).build_checked()
    };
    let (below, above) = (searches("/home/ann/desk"), searches("/home/ann"));
    let cases = [
        (&below, json!({"pattern": "x"}), true),
        (&below, json!({"pattern": "x", "path": null}), true),
        (&below, json!({"pattern": "x", "path": ""}), true),
        (&below, json!({"pattern": "x", "path": "src"}), true),
        (&below, json!({"pattern": "/home/ann"}), true),
        (&below, json!({"pattern": "x", "path": "/home/ann/desk"}), true),
        (&below, json!({"pattern": "x", "path": "/home/ann/.local/state/other"}), true),
        (&below, json!({"pattern": "x", "path": ".."}), false),
        (&below, json!({"pattern": "x", "path": "/"}), false),
        (&below, json!({"pattern": "x", "path": "/home//ann/./desk/.."}), false),
        (&below, json!({"pattern": "x", "path": "/proc/self/root/home"}), false),
        (&below, json!({"pattern": "x", "path": ["src", "/home/ann"]}), false),
        (&below, json!({"pattern": "x", "path": "/home/ann/.local/state/toolgate/keys"}), false),
        (&above, json!({"pattern": "x"}), false),
        (&above, json!({"pattern": "x", "path": null}), false),
        (&above, json!({"pattern": "x", "path": []}), false),
        (&above, json!({"pattern": "x", "path": [null]}), false),
        (&above, json!({"pattern": "x", "path": {}}), false),
        (&below, json!({"pattern": "x", "path": []}), true),
        (&above, json!({"pattern": "x", "path": ["desk"]}), true),
        (&above, json!({"pattern": "x", "path": "."}), false),
        (&above, json!({"pattern": "x", "path": "desk"}), true),
    ];
    for (n, (gate, arguments, passes)) in cases.into_iter().enumerate() {
        let answer =
            gate.session("coder", "alice", &format!("s{n}")).admit("grep", arguments.clone()).await;
        assert_eq!(answer.is_ok(), passes, "{arguments}");
    }
}

#[test]
fn search_base_must_be_absolute() {
    let text = "[[policy]]\nname = \"r\"\nrule = \"deny\"\ntools = [\"bash\"]\nwhere = [{ touches = [\"/x\"], from = \"here\" }]\n";
    let rules = toolgate::policy::source::RuleSet::parse("rules.toml", text);
    let problems: Vec<String> = rules.problems().iter().map(ToString::to_string).collect();
    assert!(
        problems
            .iter()
            .any(|problem| problem.contains("`from` must be the absolute path of a directory")),
        "{problems:?}"
    );
}
