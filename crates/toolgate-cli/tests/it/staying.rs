//! A gateway goes on, whatever becomes of what is around it.

use std::process::Command;

use assert_cmd::cargo::CommandCargoExt;

use crate::gateway::{Served, until};
use crate::hook::Project;

/// How a gateway is started.
fn command(project: &Project) -> Command {
    let mut command = Command::cargo_bin("toolgate").unwrap();
    project.environment(&mut command);
    command.args(["serve", "--config", "toolgate.toml", "--listen", "127.0.0.1:0"]);
    command
}

#[test]
fn who_cannot_be_told_anything_is_served_by_the_newest_file() {
    let config = |rule: &str| format!("store = \"ledger.db\"\n[tools.pay]\nkind = \"client\"\npolicy = \"open\"\n{rule}");
    let no = "[[policy]]\nname = \"no\"\nrule = \"deny\"\ntools = [\"pay\"]\nreason = \"No.\"\n";
    let project = Project::with(&config(""));
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let served = Served::begin(command(&project).stderr(full));
    let mut n = 0;
    let mut decided = |wanted: &str| {
        n += 1;
        served.check("pay", &format!("c{n}")) == wanted
    };
    assert!(decided("allow"));
    // What was read, what does not load, and what was read after that: of nothing can anybody be told.
    project.write("project/toolgate.toml", &config(no));
    until("the first change holds", || decided("deny"));
    project.write("project/toolgate.toml", &config("[[policy]]\nname = \"no\"\nrule = \"dney\"\n"));
    served.signal("-HUP");
    project.write("project/toolgate.toml", &config(""));
    until("the next change holds, too", || decided("allow"));
}
