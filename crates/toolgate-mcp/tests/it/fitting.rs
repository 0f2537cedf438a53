//! What does not fit, of an upstream or of the file, keeps nobody else from working.

use crate::faults::script;
use crate::support::{Gate, fixture, lines};

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_begun_for_a_file_that_is_broken() {
    let home = tempfile::tempdir().unwrap();
    let starts = home.path().join("starts");
    let run = script(home.path(), "new", &format!("echo begun >> {}; exec {} --stdio", starts.display(), fixture().display()));
    let text = format!("[upstreams.new]\ncommand = {run}\nundeclared = \"read\"\n[tools.calc]\nkind = ");
    let gate = Gate::open("[tools.calc]\nkind = \"builtin\"\n").await;
    let error = gate.reload(&format!("{text}\"bulitin\"\n")).await.unwrap_err().to_string();
    assert!(error.contains("did you mean `builtin`?") && error.contains("toolgate.toml:5:"), "{error}");
    assert_eq!(lines(&starts), 0);
    gate.reload(&format!("{text}\"builtin\"\n")).await.unwrap();
    assert_eq!(lines(&starts), 1);
    gate.end().await;
}
