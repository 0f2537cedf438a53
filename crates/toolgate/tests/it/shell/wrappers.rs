//! Tests commands that run other commands, such as `sudo`, `env` and `fd --exec`.

use crate::shell::implicit_access::{OWN_PATHS, assert_verdicts, gate_with_path_rule};

#[tokio::test]
async fn fd_exec_of_matching_files_asks() {
    let needs_approval = [
        "fd -H settings.json -x rm",
        "fd -H -X rm",
        "fd -Hx rm",
        "fd -xrm",
        "fd --exec=rm",
        "fd --exec-batch rm",
        "fd -e toml -x sed -i s/a/b/",
        "fd -e toml -x cp /tmp/evil {/}",
        "fdfind -H settings.json -x rm",
    ];
    assert_verdicts(&gate_with_path_rule(&OWN_PATHS, None), "ask", &needs_approval).await;
    assert_verdicts(
        &gate_with_path_rule(&OWN_PATHS, None),
        "allow",
        &["fd -e rs -x wc -l", "fd -e txt", "fd -extx", "fd x src"],
    )
    .await;
}

#[tokio::test]
async fn wrapped_command_arguments_are_not_paths() {
    let allowed = [
        "docker build .",
        "sudo docker build .",
        "docker build . -t x",
        "npx eslint .",
        "npx prettier --check .",
        "npx tsc -p .",
        "pnpm exec eslint .",
        "uv run ruff check .",
        "poetry run black .",
        "kubectl apply -f .",
        "npm install .",
        "sudo npm install -g .",
        "timeout 60 npm install .",
        "env CI=1 nice npm install .",
        "uv pip install -e .",
        "timeout 5 grep \"a*\" f",
        "timeout 60 grep -rn \"fn main(\" src",
        "git ls-files | xargs grep -n \"foo.*bar\"",
        "git ls-files -z | xargs -0 grep \"a b(c\"",
        "sudo find / -name \"*.conf\"",
        "env A=1 timeout 5 rg \"a|b\" src",
    ];
    assert_verdicts(&gate_with_path_rule(&OWN_PATHS, None), "allow", &allowed).await;
    let refused = [
        "flock file -c 'cp x toolgate.toml'",
        "timeout 5 flock file -c 'cp x toolgate.toml'",
        "sudo -E su git -c 'cp x toolgate.toml'",
        "sudo -s 'cp x toolgate.toml'",
        "sudo rustup run stable script -c 'cp x toolgate.toml'",
        "sudo find . -exec script -c 'cp x toolgate.toml' +",
        "timeout 5 sh -c 'cp x toolgate.toml'",
        "sudo find . -exec sh -c 'cp x toolgate.toml' +",
        "timeout 5 git rebase -x 'cp x toolgate.toml' main",
        "timeout 5 eval 'cp x toolgate.toml'",
        "ls | xargs -n1 sh -c 'cp x toolgate.toml'",
        // A word that looks like a program can be a file, a number or a value.
        "flock npm install /tmp/e/settings.json .claude/",
        "flock npm install -t .claude /tmp/e/settings.json",
        "flock npm install e.toml toolgate.toml",
        "logsave npm install e.toml toolgate.toml",
        "taskset npm install e.toml toolgate.toml",
        "chroot npm install e.toml toolgate.toml",
        "sudo flock npm install e.toml toolgate.toml",
        "env A=/npm install e.toml toolgate.toml",
        "sudo -p/npm install e.toml toolgate.toml",
        "env A=/cat cp /tmp/e/settings.json .claude/",
        "sudo -p/cat cp /tmp/e/settings.json .claude/",
        "exec -a/cat cp x toolgate.toml",
        "env A=/cat script -c 'cp x toolgate.toml'",
        "xargs -0 -a/tmp/cat script -c 'cp x toolgate.toml'",
        // A word that is neither a package nor a setting is a program.
        "uv run @x/../../../bin/cp x toolgate.toml",
        "uv run @x/cp /tmp/e/settings.json .claude/",
        "uv run --with y @x/cp /tmp/e/settings.json .claude/",
        "poetry run @x/cp /tmp/e/settings.json .claude/",
        "timeout 5 a=/../../../bin/cp x toolgate.toml",
        "timeout 5 a=/../../../bin/flock cat cp /tmp/e/settings.json .claude/",
    ];
    assert_verdicts(&gate_with_path_rule(&OWN_PATHS, None), "deny", &refused).await;
    assert_verdicts(
        &gate_with_path_rule(&OWN_PATHS, None),
        "ask",
        &[
            "sudo command . /dev/stdin",
            "sudo -s . /dev/stdin",
            "watch . /dev/stdin",
            "command . <(echo x)",
            "timeout 5 awk 'BEGIN{system(\"x\")}'",
            "awk 'BEGIN{f=\".claude/set\" \"tings.json\"; print \"{\\\"disableAllHooks\\\":true}\" > f}'",
            "git rebase \"--exec=$X\" main",
            "git push --ex='cp /tmp/e .claude/settings.json;git-receive-pack' /tmp/bare main",
        ],
    )
    .await;
}

#[tokio::test]
async fn long_unknown_word_behind_wrapper_asks() {
    let psql_command = |letters: usize| {
        format!(
            "docker exec db psql -U app -c \"SELECT {} FROM x WHERE id IN ($ID)\"",
            "a".repeat(letters)
        )
    };
    assert_verdicts(
        &gate_with_path_rule(&OWN_PATHS, None),
        "allow",
        &[psql_command(100).as_str(), psql_command(900).as_str()],
    )
    .await;
    let twice = format!("{}; {}", psql_command(600), psql_command(600));
    let guessed = format!("env {}psql -c \"SELECT {} $ID\"", "A=1 x ".repeat(12), "a".repeat(900));
    assert_verdicts(
        &gate_with_path_rule(&OWN_PATHS, None),
        "ask",
        &[psql_command(1_100).as_str(), twice.as_str(), guessed.as_str()],
    )
    .await;
}
