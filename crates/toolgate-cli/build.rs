//! A coding agent waits for `toolgate-hook` and `toolgate-ask` at every step, and a program that is linked dynamically spends most of
//! its start with looking up and binding what it needs. So these two are linked statically, where the C library can be had that way;
//! where it cannot, they are linked as everything else is, and start later.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What the standard library of Rust links to.
const LIBRARIES: [&str; 7] = ["gcc_s", "util", "rt", "pthread", "m", "dl", "c"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let said = |name: &str| std::env::var(name).unwrap_or_default();
    let here = said("HOST") == said("TARGET") && said("CARGO_CFG_TARGET_OS") == "linux" && said("CARGO_CFG_TARGET_ENV") == "gnu";
    let stands_in = Path::new(&said("OUT_DIR")).join("static");
    if !here || !said("RUSTFLAGS").is_empty() || !said("CARGO_ENCODED_RUSTFLAGS").is_empty() || stand_in(&stands_in).is_none() {
        return;
    }
    for program in ["toolgate-hook", "toolgate-ask"] {
        for argument in ["-static", "-no-pie", &format!("-L{}", stands_in.display())] {
            println!("cargo::rustc-link-arg-bin={program}={argument}");
        }
    }
}

/// Leaves scripts for the linker where it looks first: each names the archive instead of the shared library that rustc asks for.
fn stand_in(directory: &Path) -> Option<()> {
    let (runtime, unwinder, c) = (archive("gcc")?, archive("gcc_eh")?, archive("c")?);
    std::fs::create_dir_all(directory).ok()?;
    for library in LIBRARIES {
        let mut script = String::from("GROUP(");
        if !matches!(library, "gcc_s" | "c") {
            write!(script, "{} ", archive(library)?.display()).ok()?;
        }
        write!(script, "{} {} {})", unwinder.display(), runtime.display(), c.display()).ok()?;
        std::fs::write(directory.join(format!("lib{library}.so")), script).ok()?;
    }
    Some(())
}

/// Where the linker's driver has an archive.
fn archive(library: &str) -> Option<PathBuf> {
    let said = Command::new("cc").arg(format!("-print-file-name=lib{library}.a")).output().ok()?;
    let path = PathBuf::from(String::from_utf8(said.stdout).ok()?.trim());
    path.is_absolute().then_some(path)?.canonicalize().ok()
}
