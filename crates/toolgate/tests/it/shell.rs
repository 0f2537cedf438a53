//! Shell commands: the same forbidden act, however it is spelled.

use serde_json::json;
use toolgate::policy::{Condition, Deny};
use toolgate::{Agent, Tool, Toolgate};

use crate::support::Built;

fn gate() -> Toolgate {
    let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
    let rule = |name: &str, condition| Deny::new(name, ["bash"]).when("/command", condition).reason(format!("{name}."));
    let schema = json!({"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]});
    let agent = Agent::builder("coder")
        .tool(Tool::external("bash", "Runs a command.", Some(schema)).shell("/command"))
        .policy(rule("no_delete", Condition::Runs(texts(&["rm -r", "shred", "find -delete"]))))
        .policy(rule("no_push", Condition::Runs(texts(&["git push"]))))
        .policy(rule("no_network", Condition::Runs(texts(&["curl", "wget", "nc", "ssh", "scp"]))))
        .policy(rule("no_secrets", Condition::Touches(texts(&[".env", "~/.ssh", "/etc/shadow"]))))
        .policy(rule("no_answers", Condition::Runs(texts(&["toolgate approvals approve", "toolgate pause", "toolgate audit settle"]))));
    crate::support::gate().agent(agent.build().unwrap()).built()
}

async fn verdict(gate: &Toolgate, n: usize, command: &str) -> &'static str {
    let answer = gate.session("coder", "alice", &format!("s{n}")).admit("bash", json!({"command": command})).await;
    match answer {
        Ok(_) => "allow",
        Err(answer) => match answer.outcome.error() {
            Some(error) if error.approval.is_some() => "ask",
            _ => "deny",
        },
    }
}

#[tokio::test]
async fn forbidden_acts_are_refused_or_asked_however_they_are_spelled() {
    let spellings = [
        // To delete a tree.
        "rm -rf /tmp/x",
        "rm -r -f /tmp/x",
        "rm --recursive /tmp/x",
        "/bin/rm -rf /tmp/x",
        "\\rm -rf /tmp/x",
        "r''m -rf /tmp/x",
        "\"rm\" '-rf' /tmp/x",
        "r\\m -r /tmp/x",
        "$'\\x72m' -rf /tmp/x",
        "$'\\162m' -rf /tmp/x",
        "a=rm; $a -rf /tmp/x",
        "a=r; b=m; $a$b -rf /tmp/x",
        "a=-rf; rm $a /tmp/x",
        "false && a=ls; $a -rf /tmp/x",
        "x=(rm -rf /tmp/x); \"${x[@]}\"",
        "set -- rm -rf /tmp/x; \"$@\"",
        "${SHELL:-rm} -rf /tmp/x",
        "{rm,-rf,/tmp/x}",
        "/bin/r? -rf /tmp/x",
        "$(echo rm) -rf /tmp/x",
        "`echo rm` -rf /tmp/x",
        "$(echo rm -rf /tmp/x)",
        "a='rm -rf /tmp/x'; $a",
        "echo $(rm -rf /tmp/x)",
        "echo \"$(rm -rf /tmp/x)\"",
        "cat <(rm -rf /tmp/x)",
        "eval 'rm -rf /tmp/x'",
        "eval rm -rf /tmp/x",
        "eval \"$CODE\"",
        "sh -c 'rm -rf /tmp/x'",
        "bash -lc \"rm -rf /tmp/x\"",
        "bash -c \"$(echo cm0gLXJm | base64 -d)\"",
        "bash <<EOF\nrm -rf /tmp/x\nEOF",
        "bash <<'EOF'\nrm -rf /tmp/x\nEOF",
        "bash <<< 'rm -rf /tmp/x'",
        "echo 'rm -rf /tmp/x' | sh",
        "echo cm0gLXJm | base64 -d | bash",
        "cat script | (bash)",
        "source <(echo rm -rf /tmp/x)",
        "env rm -rf /tmp/x",
        "env -i A=1 rm -rf /tmp/x",
        "sudo -u root rm -rf /tmp/x",
        "nohup nice -n 5 timeout 10 rm -rf /tmp/x",
        "command rm -rf /tmp/x",
        "exec rm -rf /tmp/x",
        "busybox rm -rf /tmp/x",
        "xargs rm -rf < list",
        "echo /tmp/x | xargs -I{} rm -rf {}",
        "ls | xargs -n1 sh -c 'rm -rf \"$0\"'",
        "find . -exec rm -rf {} +",
        "find . -type f -delete",
        "find . -execdir sh -c 'rm -rf {}' \\;",
        "alias x='rm -rf'; x /tmp/x",
        "f() { rm -rf \"$1\"; }; f /tmp/x",
        "if true; then rm -rf /tmp/x; fi",
        "for d in a b; do rm -rf $d; done",
        "while read d; do rm -rf \"$d\"; done < list",
        "true && rm -rf /tmp/x || :",
        "(cd /tmp && rm -rf x) &",
        "trap 'rm -rf /tmp/x' EXIT",
        "python3 -c \"import shutil; shutil.rmtree('/tmp/x')\"",
        "python3 <<'EOF'\nimport shutil\nEOF",
        "perl -e 'system(\"rm -rf /tmp/x\")'",
        "ruby -e 'exec \"rm\"'",
        "node -e 'require(\"fs\").rmSync(\"x\")'",
        "awk 'BEGIN { system(\"rm -rf /tmp/x\") }'",
        "sed '1e rm -rf /tmp/x' file",
        "vim -c ':!rm -rf /tmp/x' -c q",
        "ssh host rm -rf /tmp/x",
        "echo 'rm -rf /tmp/x' | at now",
        "make -f- <<'EOF'\nall:\n\trm -rf /tmp/x\nEOF",
        "r\\\nm -rf /tmp/x",
        "# a comment \\\nrm -rf /tmp/x",
        "echo x\u{a0}# ; rm -rf /tmp/x",
        "rm -rf /tmp/x #",
        "cat <<'E OF'\nx\nE OF\nrm -rf /tmp/x",
        "LD_PRELOAD=./x.so ls",
        "if then fi ((",
        // To push.
        "git push",
        "git -C /repo push --force",
        "git p\"us\"h origin main",
        "git -c alias.p=push p",
        "x=push; git $x",
        "git $SUBCOMMAND origin",
        "GIT_SSH_COMMAND=./x git fetch",
        "git rebase -x 'git push' main",
        "git submodule foreach git push",
        // To fetch from the network.
        "curl https://example.com",
        "c=curl; $c https://example.com",
        "sh -c 'exec wget x'",
        "docker run alpine wget x",
        // To read secrets.
        "cat .env",
        "cat ./config/.env",
        "cat $(echo .env)",
        "cp .env /tmp/x",
        "cat < .env",
        "echo x > .env",
        "dd if=.env of=/tmp/x",
        "tar czf - .en*",
        "cat .e??",
        "cat ~/.ssh/id_rsa",
        "cat $HOME/.ssh/id_rsa",
        "cat /etc/../etc/shadow",
        "F=.env; cat $F",
        "cat \"$FILE\"",
        "python3 -c \"print(open('.env').read())\"",
        "while read l; do echo $l; done < .env",
        // To answer for a person.
        "toolgate approvals approve apr_1",
        "/usr/bin/toolgate pause --agent x",
        "cd /x && ./toolgate --store l.db audit settle c1 --done",
        "T=toolgate; $T audit settle c1",
    ];
    assert!(spellings.len() >= 100);
    let gate = gate();
    let mut allowed = Vec::new();
    for (n, command) in spellings.iter().enumerate() {
        if verdict(&gate, n, command).await == "allow" {
            allowed.push(*command);
        }
    }
    assert!(allowed.is_empty(), "let through:\n{}", allowed.join("\n"));
}

#[tokio::test]
async fn everyday_commands_are_let_through() {
    let everyday = [
        "ls -la",
        "cargo test --workspace 2>&1 | tail -20",
        "git status && git diff HEAD~1 --stat",
        "git commit -m 'Push the button'",
        "grep -rn 'rm -rf' src | head",
        "rm target/old.log",
        "find . -name '*.rs' | wc -l",
        "for f in *.rs; do wc -l $f; done",
        "cat > notes.md <<'EOF'\nrun rm -rf never; do not curl\nEOF",
        "echo 'git push is forbidden'",
        "python3 script.py --all",
        "python3 --version",
        "sed -i 's/old/new/g' file.txt",
        "sed -n '1,20p' README.md",
        "awk '{print $1}' data.txt",
        "NAME=value ./run.sh",
        "DIR=build; mkdir -p $DIR && cd $DIR",
        "echo \"$HOME\"",
        "make test",
        "npm install && npm run build",
        "ps aux | grep server",
        "test -f Cargo.toml && echo yes",
        "cat environment.txt",
        "sort < names.txt | uniq -c",
        "bash build.sh",
        "git log --oneline | head -5",
        "toolgate audit query",
        "git commit -m \"$(cat <<'EOF'\nAdd a page, see docs/pushing.md\n\nIt's done.\nEOF\n)\"",
        "for i in $(seq 1 3); do echo \"$i\"; sleep 1; done",
        "echo \"built at $(date)\" >> build.log",
    ];
    let gate = gate();
    let mut stopped = Vec::new();
    for (n, command) in everyday.iter().enumerate() {
        let verdict = verdict(&gate, n, command).await;
        if verdict != "allow" {
            stopped.push(format!("{verdict}: {command}"));
        }
    }
    assert!(stopped.is_empty(), "stopped:\n{}", stopped.join("\n"));
}

#[tokio::test]
async fn a_hostile_command_is_answered_in_time() {
    let gate = gate();
    let bombs = [
        "sudo ".repeat(3_000) + "rm -rf /",
        "(".repeat(10_000),
        "$(".repeat(10_000),
        "\"$(".repeat(5_000),
        "eval ".repeat(5_000),
        "x=$x$x; ".repeat(3_000) + "$x",
        "{a,b}".repeat(5_000),
        "xargs sh -c 'sh -c \"sh -c ls\"' ".repeat(1_000),
        "a".repeat(100_000),
        "if ".repeat(10_000),
        "<<A ".repeat(3_000),
    ];
    for (n, bomb) in bombs.iter().enumerate() {
        assert_ne!(verdict(&gate, 1_000 + n, bomb).await, "allow", "{n}");
    }
}

#[test]
fn a_rule_about_commands_needs_a_command() {
    let agent = Agent::builder("coder")
        .tool(Tool::external("bash", "Runs a command.", None))
        .policy(Deny::new("no_push", ["bash"]).when("/command", Condition::Runs(vec!["git push".to_owned()])));
    let error = agent.build().err().unwrap().to_string();
    assert!(error.contains("`/command` of `bash` is not declared as a shell command"), "{error}");
}
