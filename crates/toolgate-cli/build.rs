//! Links `toolgate-hook` statically, if the C library permits.
//!
//! A coding agent waits for this program at every step, and dynamic linking takes most of its
//! start.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What the standard library of Rust links to.
const STD_LINK_LIBRARIES: [&str; 7] = ["gcc_s", "util", "rt", "pthread", "m", "dl", "c"];

/// A program that needs something of each: threads, what unwinds and what shows where it stands.
const PROBE_SOURCE: &str = r#"fn main() {
    let root = std::thread::spawn(|| std::env::args().count() as f64).join().unwrap_or_default().powf(0.5).sin();
    let caught = std::panic::catch_unwind(move || if root < 2.0 { std::panic::panic_any(root) });
    let place = std::backtrace::Backtrace::force_capture().to_string();
    std::process::exit(if caught.is_err() && !place.is_empty() { 0 } else { 1 });
}
"#;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=RUSTFLAGS");
    let said = |name: &str| std::env::var(name).unwrap_or_default();
    let here = said("HOST") == said("TARGET")
        && said("CARGO_CFG_TARGET_OS") == "linux"
        && said("CARGO_CFG_TARGET_ENV") == "gnu";
    // Who names a linker or its flags has something in mind.
    let is_named = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    if !here || ["RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS", "RUSTC_LINKER"].into_iter().any(is_named) {
        return;
    }
    let stands_in = Path::new(&said("OUT_DIR")).join("static");
    let arguments =
        ["-static".to_owned(), "-no-pie".to_owned(), format!("-L{}", stands_in.display())];
    if write_linker_scripts(&stands_in).is_none() || !can_link_statically(&stands_in, &arguments) {
        return;
    }
    for argument in &arguments {
        println!("cargo::rustc-link-arg-bin=toolgate-hook={argument}");
    }
}

/// Leaves scripts for the linker where it looks first: each names the archive instead of the shared
/// library that rustc asks for.
fn write_linker_scripts(directory: &Path) -> Option<()> {
    let (runtime, unwinder, c) =
        (find_archive("gcc")?, find_archive("gcc_eh")?, find_archive("c")?);
    std::fs::create_dir_all(directory).ok()?;
    for library in STD_LINK_LIBRARIES {
        let mut script = String::from("GROUP(");
        if !matches!(library, "gcc_s" | "c") {
            write!(script, "\"{}\" ", find_archive(library)?).ok()?;
        }
        write!(script, "\"{unwinder}\" \"{runtime}\" \"{c}\")").ok()?;
        std::fs::write(directory.join(format!("lib{library}.so")), script).ok()?;
    }
    Some(())
}

/// Where the linker's driver has an archive. Once that is another one, the scripts are written
/// anew.
fn find_archive(library: &str) -> Option<String> {
    let said = Command::new("cc").arg(format!("-print-file-name=lib{library}.a")).output().ok()?;
    let path = PathBuf::from(String::from_utf8(said.stdout).ok()?.trim());
    let path = path.is_absolute().then_some(path)?.canonicalize().ok()?;
    // Between quotes, a script takes everything but these as it stands.
    let path = path.to_str().filter(|path| !path.contains(['"', '\n']))?.to_owned();
    println!("cargo::rerun-if-changed={path}");
    Some(path)
}

/// Whether a program that is linked this way comes about, and runs.
fn can_link_statically(directory: &Path, arguments: &[String]) -> bool {
    let (source, program) = (directory.join("trial.rs"), directory.join("trial"));
    if std::fs::write(&source, PROBE_SOURCE).is_err() {
        return false;
    }
    let mut compiler = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    compiler
        .args(["--edition", "2021", "--crate-name", "trial", "--crate-type", "bin"])
        .arg("-o")
        .arg(&program)
        .arg(&source);
    for argument in arguments {
        compiler.arg("-C").arg(format!("link-arg={argument}"));
    }
    can_run(&mut compiler) && can_run(&mut Command::new(&program))
}

/// Whether a program says that all is well. What else it says is nobody's business.
fn can_run(program: &mut Command) -> bool {
    program
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}
