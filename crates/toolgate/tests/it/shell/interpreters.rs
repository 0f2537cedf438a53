//! Tests scripts that an interpreter runs, and wildcards that match empty text.

use serde_json::json;
use toolgate::policy::{Condition, Deny};
use toolgate::{Agent, Tool};

use super::verdict;
use crate::support::BuildWithReplayCheck;

#[tokio::test]
async fn script_passed_to_interpreter_matches_rule() {
    let schema = json!({"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]});
    let runs = ["deploy.sh --prod", "wipe.py", "setup.mjs"].map(str::to_owned).to_vec();
    let agent = Agent::builder("coder")
        .tool(Tool::external("bash", "Runs a command.", Some(schema)).shell("/command"))
        .policy(
            Deny::new("no_scripts", ["bash"])
                .when("/command", Condition::Runs(runs))
                .reason("Not that."),
        );
    let gate = crate::support::runtime_builder().agent(agent.build().unwrap()).build_checked();
    for (n, (command, expected)) in [
        ("./deploy.sh --prod", "deny"),
        ("bash deploy.sh --prod", "deny"),
        ("bash -x ./bin/deploy.sh -v --prod", "deny"),
        ("sh -eu -- bin/deploy.sh --prod", "deny"),
        ("zsh deploy.sh --prod < in.txt", "deny"),
        (". ./deploy.sh --prod", "deny"),
        ("source -- deploy.sh --prod", "deny"),
        ("sudo bash deploy.sh --prod", "deny"),
        ("cd bin && env A=b bash 'deploy'.sh --prod", "deny"),
        ("find . -name deploy.sh -exec bash {} --prod \\;", "ask"),
        ("python3 wipe.py", "deny"),
        ("python3 -u tools/wipe.py --all", "deny"),
        ("node setup.mjs", "deny"),
        ("timeout 5 node --no-warnings ./setup.mjs", "deny"),
        ("bash deploy.sh --staging", "allow"),
        ("bash other.sh", "allow"),
        ("bash other.sh deploy.sh --prod", "allow"),
        ("bash --rcfile deploy.sh -ic true", "allow"),
        ("bash --rcfile wipe.py -ic true", "deny"),
        ("bash --rcfile wipe.py -i <<< true", "deny"),
        ("bash -init-file i.sh -c 'python3 wipe.py'", "deny"),
        ("bash -rcfile i.sh -c 'python3 wipe.py'", "deny"),
        (". ./deploy.sh --prod <<< true", "deny"),
        ("fish -C 'python3 wipe.py' x.fish", "ask"),
        ("fish --init-command='python3 wipe.py' x.fish", "ask"),
        ("fish --command='python3 wipe.py' x.fish", "ask"),
        ("fish wipe.py", "deny"),
        ("node esbuild.mjs --platform node", "allow"),
        ("python3 scripts/gen_sdk.py --lang python --out x", "allow"),
        ("bash ci/test.sh python", "allow"),
        ("python3 main.py eval --config \"$CFG\"", "allow"),
        ("timeout 60 grep -rn function src", "allow"),
        ("sudo test ! -e /opt/x", "allow"),
        ("env LC_ALL=C grep -c done build.log", "allow"),
        ("echo \"${json//\\\"/\\\\\\\"}\"", "allow"),
        ("bash -n < deploy.sh", "ask"),
        ("cat deploy.sh && grep -n -- --prod deploy.sh", "allow"),
        ("python3 wiped.py", "allow"),
        ("python3 -m pytest wipe.py", "allow"),
    ]
    .into_iter()
    .enumerate()
    {
        assert_eq!(verdict(&gate, n, command).await, expected, "{command}");
    }
}

#[tokio::test]
async fn leading_wildcard_matches_empty_text() {
    let places = vec!["secrets.yaml".to_owned()];
    let condition =
        Condition::Touches { places, lenient: false, trees: true, whole: false, from: None };
    let agent = Agent::builder("coder")
        .tool(Tool::external("bash", "Runs a command.", None).shell("/command"))
        .policy(Deny::new("no_secrets", ["bash"]).when("/command", condition).reason("Not that."));
    let gate = crate::support::runtime_builder().agent(agent.build().unwrap()).build_checked();
    for (n, (command, expected)) in [
        ("cat *secrets.yaml", "ask"),
        ("cat conf/*secrets.yaml", "ask"),
        ("cat **s?crets.yaml", "ask"),
        ("cat *****************secrets.yaml", "ask"),
        ("for f in *secrets.yaml *b *c *d *e *f *g *h *i; do cat $f; done", "ask"),
        ("echo a > *secrets.yaml", "ask"),
        ("cat */*/*/*/*/*secrets.yaml", "ask"),
        ("cat 'secrets.yaml'*", "ask"),
        ("x=secrets; cat $x*", "ask"),
        ("cat \"secrets\"?yaml", "ask"),
        ("cat *.secrets.yaml", "allow"),
        ("cat *secrets.yml", "allow"),
    ]
    .into_iter()
    .enumerate()
    {
        assert_eq!(verdict(&gate, n, command).await, expected, "{command}");
    }
}
