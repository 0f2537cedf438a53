//! Tests the decisions about shell commands.

mod bypass_attempts;
mod home;
pub(crate) mod implicit_access;
mod interpreters;
pub(crate) mod operands;
pub(crate) mod path_patterns;
mod spelling_variants;
pub(crate) mod tree_readers;
mod wrappers;

use serde_json::json;
use toolgate::policy::{Condition, Deny};
use toolgate::{Agent, Tool, Toolgate};

use crate::support::BuildWithReplayCheck;

fn shell_gate() -> Toolgate {
    let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
    let rule = |name: &str, condition| {
        Deny::new(name, ["bash"]).when("/command", condition).reason(format!("{name}."))
    };
    let schema = json!({"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]});
    let agent = Agent::builder("coder")
        .tool(Tool::external("bash", "Runs a command.", Some(schema)).shell("/command"))
        .policy(rule("no_delete", Condition::Runs(texts(&["rm -r", "shred", "find -delete"]))))
        .policy(rule("no_push", Condition::Runs(texts(&["git push"]))))
        .policy(rule("no_network", Condition::Runs(texts(&["curl", "wget", "nc", "ssh", "scp"]))))
        .policy(rule(
            "no_secrets",
            Condition::Touches {
                places: texts(&[".env", "~/.ssh", "/etc/shadow"]),
                lenient: false,
                trees: true,
                whole: false,
                from: None,
            },
        ))
        .policy(rule(
            "no_answers",
            Condition::Runs(texts(&[
                "toolgate approvals approve",
                "toolgate pause",
                "toolgate audit settle",
            ])),
        ));
    crate::support::runtime_builder().agent(agent.build().unwrap()).build_checked()
}

pub(crate) async fn verdict(gate: &Toolgate, n: usize, command: &str) -> &'static str {
    verdict_of(gate, n, json!({ "command": command })).await
}

async fn verdict_of(gate: &Toolgate, n: usize, arguments: serde_json::Value) -> &'static str {
    let answer = gate.session("coder", "alice", &format!("s{n}")).admit("bash", arguments).await;
    match answer {
        Ok(_) => "allow",
        Err(answer) => match answer.outcome.error() {
            Some(error) if error.approval.is_some() => "ask",
            _ => "deny",
        },
    }
}

#[tokio::test]
async fn command_that_is_no_string_asks() {
    for argument in ["", "argument = \"/command\", "] {
        let text = format!(
            "[[policy]]\nname = \"keys\"\nrule = \"deny\"\ntools = [\"bash\"]\nreason = \"No.\"\n\
             where = [{{ {argument}touches = [\"~/.ssh\"], lenient = true }}]\n"
        );
        let agent = Agent::builder("coder")
            .tool(Tool::external("bash", "Runs a command.", None).shell("/command"))
            .rules(toolgate::policy::source::RuleSet::parse("rules.toml", &text));
        let gate = crate::support::runtime_builder().agent(agent.build().unwrap()).build_checked();
        let cases = [
            (json!({"command": "cat ~/.ssh/id_rsa"}), "deny"),
            (json!({"command": ["bash", "-lc", "cat ~/.ssh/id_rsa"]}), "ask"),
            (json!({"command": [["cat ~/.ssh/id_rsa"]]}), "ask"),
            (json!({"command": {"script": "cat ~/.ssh/id_rsa"}}), "ask"),
            (json!({"command": {"cat ~/.ssh/id_rsa": true}}), "ask"),
            (json!({"command": ["cat", "~/.ssh/id_rsa"]}), "deny"),
            (json!({"command": "ls", "note": ["cat"]}), "allow"),
        ];
        for (n, (arguments, expected)) in cases.into_iter().enumerate() {
            assert_eq!(
                verdict_of(&gate, n, arguments.clone()).await,
                expected,
                "{argument}{arguments}"
            );
        }
    }
}

#[tokio::test]
async fn everyday_commands_are_allowed() {
    let everyday = [
        "ls -la",
        "[[ -n $x ]] && [ -f Cargo.toml ] && echo \"${x:-\"a b\"}\"",
        "git commit -F - <<E && git log -1\n\n  A title\n\nAnd more.\nE",
        "wc -l *test.rs *.env.example",
        "cargo test --workspace 2>&1 | tail -20",
        "git status && git diff HEAD~1 --stat",
        "git commit -m 'Push the button'",
        "grep -rn 'rm -rf' src | head",
        "rm target/old.log",
        "find . -name '*.rs' | wc -l",
        "for f in *.rs; do wc -l $f; done",
        "cat > notes.md <<'EOF'\nrun rm -rf never; do not curl\nEOF",
        "echo 'git push is forbidden'",
        "cat <<-E\n\tbuilt at $(date)\n\tE\nls",
        "cat > notes.md <<EOF\n  built at $(date)\n  with \\$(tools)\nEOF",
        "python3 script.py --all",
        "python3 --version",
        "node -v",
        "npm install --save-dev typescript tsx",
        "npx tsx src/index.ts",
        "ts-node script.ts",
        "npx tsx src/server.ts -p 3000",
        "elixir seed.exs -e dev",
        "scala -version",
        "php -S localhost:8000 -t public",
        "php -f x.php",
        "ruby -C lib test.rb",
        "julia -t 4 x.jl",
        "rake db:migrate",
        "psql -d app -c '\\dt'",
        "psql -c \"select a || b from t\"",
        "psql -At -F '|' -c \"select a || ' | ' || b from programs\"",
        "mysql app -e 'select * from system_settings'",
        "mysql app -e 'show tables'",
        "mix test && iex -S mix",
        "bun run build",
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
        "sed -i '/foo/a bar' f",
        "cat f.json | python3 -m json.tool",
        "python3 s.py < in.txt",
        "awk '$1 > max {max=$1} END {print max}' f",
        "find ~ -name '*.log'",
        "git -c core.pager=cat log",
        "git --git-dir=/opt/g/.git log",
        "git switch -c feature",
        "git grep -c foo",
        "git log -c",
        "git log -Smax",
        "git commit -m\"fix foo\"",
        "git cherry-pick -x abc",
        "cmake -B build -DCMAKE_BUILD_TYPE=Release",
        "while IFS= read -r line; do echo \"$line\"; done < names.txt",
        "find . -maxdepth 2 -type f -executable",
        "git stash push -m x",
        "command -v curl",
        "grep -rn '.env' src",
        "rg -t rust .env src",
        "grep -m 5 .env README.md",
        "grep -rn --exclude .env KEY src",
        "grep -C 3 .env README.md",
        "grep -rn -- .env src",
        "test -f .env",
        "rm -f *.log",
        "ls *",
        "wc -l *",
        "git add *",
        "ls src/*",
        "du -sh *",
        "grep -rn foo --include=*.rs src",
        "make -j$(nproc)",
        "sed -i '' 's/a/b/' f.txt",
        "mkdir -p x/{a,b}",
        "cat src/{a,b}.rs",
        "diff <(sort a) <(sort b)",
        "cd $(git rev-parse --show-toplevel) && ls",
        "awk '$3 > 10' f",
        "awk -F'|' '{print $2}' f",
        "awk '{print $1 \";\" $2} $3 > 5 {n++}' f",
        "awk '{print $1/1024; if ($2 > 3) n++}' f",
        "awk 'NR>1 {print \"{\" $1 \"}\"}' f",
        "awk '{\n  print $1\n  if ($2 > 3) n++\n}' f",
        "make CFLAGS=-O2 all",
        "make -j4 PREFIX=/usr/local install",
        "make deploy ENV=prod",
        "go test -run X ./...",
        "NPM_CONFIG_BROWSER=none npm docs y",
        "npm_config_loglevel=warn npm install",
        "PAGER=cat git log",
        "GIT_EDITOR=true git rebase --continue",
        "BROWSER=none npm start",
        "TEST_BROWSER=firefox pytest",
        "TEST_RUNNER=jest npm test",
        "export TEST_RUNNER=vitest; npm test",
        "env CI=1 SELENIUM_BROWSER=chrome npm test",
        "git config --get core.editor",
        "sed -i.bak -e 's/a/b/g' -e '/^#/d' f",
        "sed -n '/start/,/end/p' f",
        "python3 -m pytest -q tests",
        "bash -euo pipefail build.sh",
        "bash -o pipefail -c 'ls | head'",
        "test a = b && echo ====",
        "export RUST_LOG=debug; cargo test",
        "RUST_LOG=a=info,b=info,c=info,d=info,e=info,f=info,g=info,h=info,i=info cargo test",
        "CLASSPATH=a.jar:b.jar:c.jar:d.jar:e.jar:f.jar:g.jar:h.jar:i.jar:j.jar:k.jar:l.jar:m.jar:n.jar:o.jar:p.jar:q.jar:r.jar java Main",
        "cargo test 2>&1 | tee out.log",
        "docker compose up -d",
        "npm run build -- --watch",
        "kubectl get pods",
        "ls | xargs -n1 basename",
        "ls | xargs -I{} basename {}",
        "npx eslint 'src/**/*.ts' --fix",
        "npx prettier --write 'src/**/*.{ts,tsx}'",
        "npx --yes prettier 'src/**/*.{ts,tsx}'",
        "yarn prettier --check \"src/**/*.{ts,tsx}\"",
        "pnpm exec eslint \"src/**/*.{ts,tsx}\"",
        "pnpm --silent dlx prettier \"src/**/*.{ts,tsx}\"",
        "npm run eslint -- \"src/**/*.{ts,tsx}\"",
        "npm install --save-dev typescript @types/node",
        "docker ps --format '{{.Names}}'",
        "docker ps -a --format '{{.ID}} {{.Names}}'",
        "docker inspect -f '{{range .A}}{{.B}}{{end}}' web",
        "docker rm -f web",
        "kubectl patch deploy x -p '{\"spec\":{\"replicas\":2}}'",
        "awk '$1 == \"a\" || $2 == \"b\"' f",
        "awk 'length($0) > 120 {print FILENAME}' src/*.rs",
        "sed ':a;N;$!ba;s/\\n/ /g' f",
        "sed 's/a/b/; t; d' f",
        "git config set user.name Ann",
        "git commit --template=.gitmessage",
        "git commit -m 'config/.env: say what it is for'",
        "git config get remote.origin.url",
        "node --test",
        "node --max-old-space-size=4096 build.js",
        "node --experimental-vm-modules node_modules/.bin/jest",
        "python3 -m twine upload dist/x.whl",
        "uv pip install -e \".[dev]\"",
        "git commit -m \"$(cat <<'EOF'\nAdd a page, see docs/pushing.md\n\nIt's done.\nEOF\n)\"",
        "for i in $(seq 1 3); do echo \"$i\"; sleep 1; done",
        "echo \"built at $(date)\" >> build.log",
        "printf 'use `cargo test`, not $(make)\\n' >> README.md",
        "printf '%s\\n' 'a `b` %' >> README.md",
        "awk '{print $1}' src/filesystem.rs a@b.txt",
        "awk '{n += $1} END {print n}' OFS='|' system.log",
        "gunzip -k data.csv.gz && python3 load.py data.csv",
        "split -l 100 big.txt part_ && bash build.sh",
        "git apply <<'E'\n--- a/x.rs\n+++ b/x.rs\n@@ -1 +1 @@\n-a\n+b\nE\ncargo test",
        "gzip -k out.log && ./run.sh",
        "sed 's/[^\\]]*$//; s/[[:space:]]*#.*//; /^[\\/]/d' f",
        "git commit -m 'Add a, b, c, d and e: more of the same\n\nThe reader takes f, g, h, i, j, k, l, m, n, o, p, q, r: what it has, it keeps.\n\nSigned-off-by: Ann <ann@x.example>'",
        "cd src && git commit -m 'Add a, b, c, d and e: some of the same\n\nThe reader takes f, g, h, i, j, k, l, m, n, o, p, q, r: what it has, it keeps.\n\nSigned-off-by: Ann <ann@x.example>'",
        "jq '{a: .a, b: .b, c: .c, d: .d, e: .e, f: .f, g: .g, h: .h, i: .i, j: .j, k: .k}' x.json",
        "kubectl get pods -o custom-columns=A:.a,B:.b,C:.c,D:.d,E:.e,F:.f,G:.g,H:.h,I:.i",
        "sort -t, -k1.2 f",
        "gcc -O2 -Iinc/x -oapp.out x.c",
        "export \"PATH=$HOME/bin:$PATH\"; ls",
        "for TEST_BROWSER in chrome firefox; do npm test; done",
        "read -rp 'Name? ' name",
        "export PAGER=\"cat\"; git log",
        "for t in build test; do make $t; done",
        "npm version patch --git-tag-version=false && npm run e2e -- --browser chrome",
        "pip install --editable .",
        "bash dev/setup.sh && python3 ../dev/x.py < in.txt",
        "i=0; while read -r f; do\n  i=$((i + 1)); awk '{print $(NF - 1)}' data.txt\ndone < names.txt",
        "cat > count.sh <<'EOF'\nwhile read -r l; do n=$((n + $(wc -c <<< \"$l\"))); a[n]=1; done\nEOF\nchmod +x count.sh",
        "re='^[0-9]+$'; n=5; [[ $n =~ $re ]] && echo $((n + 1))",
        "git commit -m 'Say `x` and $(y), not [z]'",
        "DIR=build; NAME=x ./run.sh $DIR\nls $DIR",
        "x=src; A=1 'make' all && ls $x",
        "cd a && make \\\n  -j4",
        "if [ -f x ]; then\n  echo a # if so\nfi",
        "for f in a b; do\n  echo \"$f\"\ndone > out.log 2>&1",
        "cat > notes.md <<'EOF'\nx = \"a\\\nb\" # see below\nEOF\nls",
        "x=$(date)\necho \"$x\"",
        "[ \"$a\" = b ] && echo c",
        "while [ $i -lt 3 ] && [ ! -f x ]; do\n  i=$((i + 1)) # the next one\ndone",
        "for ((i = 0; i < 3; i++)); do\n  echo $i # a number\ndone",
        "files=(\n  a # the first\n  b\n)\nls",
        "A=1 B=2 \\\n  make \\\n  -j4 2>&1 | tail",
        "{ echo a; echo b; } >> out.log",
        "[[ $a == b &&\n  -f c ]] && echo d",
        "cd - > /dev/null 2>&1\nls | sort -",
        "cat - <<E\nx\nE",
        "ls; # x \\\npwd",
        "test a == b\nls",
        "grep 'a$' f\nls",
        "[[ -f Cargo.toml ]] && git commit -m '[core] use `foo`'",
        "export A=1\ngh pr create --body \"- [x] \\`cargo test\\`\"",
        "n=$((1+1))\ngit commit -m \"$(cat <<'EOF'\n[core] use `foo` and $(bar)\nEOF\n)\"",
        "a=1 b=2 c=3\necho $a",
        "A=1 B=2 # comment\nls",
        "foo=(a b) bar=(c)\necho x",
        "timeout 30 env NODE_ENV=test gcc -S a.c",
        "nice env -u X A=1 ls -S",
        "mkdir -p d &&\\\ncat > d/Dockerfile <<'EOF'\nRUN a && \\\n    b\nEOF",
        "if [[ -f x && # comment\n   -f y ]]; then echo a; fi",
        "sh ./scripts/1",
    ];
    let gate = shell_gate();
    let mut not_allowed = Vec::new();
    for (n, command) in everyday.iter().enumerate() {
        let verdict = verdict(&gate, n, command).await;
        if verdict != "allow" {
            not_allowed.push(format!("{verdict}: {command}"));
        }
    }
    assert!(not_allowed.is_empty(), "not allowed:\n{}", not_allowed.join("\n"));
}

/// Builds nested `env -c` arguments, each of which can be a command at nine positions.
fn nested_env() -> String {
    let escaped = |text: String| text.replace('\\', "\\\\").replace(' ', "\\ ");
    (0..6).fold("ls".to_owned(), |inner, _| format!("env -c{}", escaped(" ".repeat(8) + &inner)))
}

#[tokio::test]
async fn hostile_command_is_answered_in_time() {
    let gate = shell_gate();
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
        format!("{}ls{}", "$(".repeat(1_000), ")".repeat(1_000)),
        "echo $(".repeat(1_000),
        "if a; then ".repeat(2_000),
        format!("cat x{}*", ",".repeat(4_000)),
        "git ".to_owned() + &"run ".repeat(6_000),
        "`a`".repeat(10_000),
        "ls>a;./b;".repeat(3_000),
        format!("rm {}", format!("{}* ", "a".repeat(1_000)).repeat(30)),
        format!("cat {}", "a*b*c ".repeat(1_400)),
        format!("a={}; ls {}", "x".repeat(12_000), "$a".repeat(5_000)),
        // Commands behind many words.
        format!("find d {}-exec rm -r {{}} +", "-true ".repeat(70)),
        format!("fd {}-xrm -r", "-H ".repeat(70)),
        format!("somewrapper {}sh -c 'rm -r d'", "a ".repeat(70)),
        format!("somewrapper {}rm -r d", "a ".repeat(70)),
    ];
    // Harmless commands, which must be answered in time too.
    let long = [
        "cat ".to_owned() + &"[a]*".repeat(6_000),
        "ls ".to_owned() + &">a ".repeat(8_000),
        "find . ".to_owned() + &"-exec ".repeat(4_000),
        format!(
            ": {}; cat {}",
            (0..128).map(|n| format!("/q/../{}{n} ", "x".repeat(220))).collect::<String>(),
            "$z/x$z ".repeat(250)
        ),
        format!("z='{}'; {}", "/a ".repeat(8_000), "a=$z;".repeat(800)),
        format!("tar cf a {}", (0..1_000).map(|n| format!("-C b{n} c{n} ")).collect::<String>()),
        nested_env(),
    ];
    for (n, long) in long.iter().enumerate() {
        verdict(&gate, 900 + n, long).await;
    }
    for (n, bomb) in bombs.iter().enumerate() {
        assert_ne!(verdict(&gate, 1_000 + n, bomb).await, "allow", "{n}");
    }
}

#[tokio::test]
async fn path_with_surrounding_space_matches_and_content_does_not() {
    let text = "[[policy]]\nname = \"no_secrets\"\nrule = \"deny\"\ntools = [\"write\"]\nwhere = [{ touches = [\".env\", \"/etc/shadow\"] }]\n\
                [[policy]]\nname = \"no_names\"\nrule = \"deny\"\ntools = [\"note\"]\nwhere = [{ argument = \"/text\", touches = [\".env\"] }]\n";
    let agent = Agent::builder("coder")
        .tool(Tool::external("write", "Writes a file.", None))
        .tool(Tool::external("note", "Notes a file.", None))
        .rules(toolgate::policy::source::RuleSet::parse("rules.toml", text));
    let gate = crate::support::runtime_builder().agent(agent.build().unwrap()).build_checked();
    let cases = [
        ("write", json!({"file_path": ".env\n"}), false),
        ("write", json!({"file_path": " .env"}), false),
        ("write", json!({"target": "config/.env\n"}), false),
        ("write", json!({"files": ["a.txt", ".env\n"]}), false),
        ("write", json!({"path": "/etc//shadow\n"}), false),
        ("write", json!({"content": {"path": ".env\n"}}), false),
        // A file name in the content does not count if another argument names the file.
        ("write", json!({"file_path": ".gitignore", "content": ".env"}), true),
        (
            "write",
            json!({"filePath": "a.rs", "oldString": "/etc/shadow", "newString": ".env"}),
            true,
        ),
        (
            "write",
            json!({"path": "x", "edits": [{"old_string": ".env", "new_string": "config/.env"}]}),
            true,
        ),
        ("write", json!({"path": ".env", "content": "x"}), false),
        ("write", json!({"path": "x", "edits": [{"path": ".env", "content": "x"}]}), false),
        ("write", json!({"path": "x", "target": ".env"}), false),
        ("write", json!({"path": 7, "content": ".env"}), false),
        ("write", json!({"content": ".env"}), false),
        ("write", json!({"file_path": ".gitignore", "content": ".env\n"}), true),
        ("write", json!({"file_path": ".gitignore", "content": "/etc/shadow\n"}), true),
        (
            "write",
            json!({"file_path": "x", "edits": [{"old_string": "\t.env", "newText": ".env\n"}]}),
            true,
        ),
        ("write", json!({"file_path": "x", "contents": ["a\n", ".env\n"]}), true),
        ("write", json!({"file_path": "x", "content": "--- a/.env\n+++ b/.env\n"}), false),
        ("note", json!({"text": ".env\n"}), false),
        ("note", json!({"text": ["a", ".env\n"]}), false),
    ];
    for (n, (tool, arguments, passes)) in cases.into_iter().enumerate() {
        let answer =
            gate.session("coder", "alice", &format!("s{n}")).admit(tool, arguments.clone()).await;
        assert_eq!(answer.is_ok(), passes, "{tool} {arguments}");
    }
}

#[test]
fn command_rule_needs_declared_shell_argument() {
    let agent =
        Agent::builder("coder").tool(Tool::external("bash", "Runs a command.", None)).policy(
            Deny::new("no_push", ["bash"])
                .when("/command", Condition::Runs(vec!["git push".to_owned()])),
        );
    let error = agent.build().err().unwrap().to_string();
    assert!(error.contains("`/command` of `bash` is not declared as a shell command"), "{error}");
}
