//! Tests that each example in `examples/` decides the calls of its script as the script expects.

use toolgate::{Agent, AgentBuildError};

#[path = "../../../../examples/play.rs"]
mod play;

macro_rules! example {
    ($name:ident, $directory:literal) => {
        #[path = "."]
        mod $name {
            #[path = "../../../../examples/"]
            mod root {
                #[path = $directory]
                pub(super) mod $name {
                    pub(in super::super) mod tools;
                }
            }
            #[tokio::test]
            async fn example_follows_its_script() {
                super::run_example_script(
                    root::$name::tools::agent(),
                    include_str!(concat!("../../../../examples/", $directory, "/calls.txt")),
                )
                .await;
            }
        }
    };
}

example!(refund_desk, "refund-desk");
example!(file_editor, "file_editor");
example!(deployment, "deployment");
example!(bank_transfers, "bank_transfers");

async fn run_example_script(agent: Result<Agent, AgentBuildError>, script: &str) {
    let agent = agent.unwrap_or_else(|error| panic!("{}", error.render(false)));
    assert!(agent.warnings().is_empty(), "{}", agent.render_warnings(false));
    let name = agent.name().to_owned();
    let (gate, clock) = play::build_gate(agent).unwrap();
    let tally = play::run_script(&gate, &name, &clock, script, |_| {}).await;
    assert!(tally.mismatches.is_empty(), "{}", tally.mismatches.join("\n"));
    assert!(tally.allowed >= 15 && tally.refused >= 15, "{tally:?}");
}
