//! Links `toolgate-hook` statically, if the C library permits.
//!
//! A coding agent waits for this program at every step, and dynamic linking takes most of its
//! start.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Libraries that the standard library of Rust links.
const STD_LINK_LIBRARIES: [&str; 7] = ["gcc_s", "util", "rt", "pthread", "m", "dl", "c"];

/// A program that uses threads, unwinding and backtraces, so that it needs all libraries.
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
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let is_native_gnu_linux = variable("HOST") == variable("TARGET")
        && variable("CARGO_CFG_TARGET_OS") == "linux"
        && variable("CARGO_CFG_TARGET_ENV") == "gnu";
    // If a linker or its flags are configured, do not override them.
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    if !is_native_gnu_linux
        || ["RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS", "RUSTC_LINKER"].into_iter().any(is_set)
    {
        return;
    }
    let script_directory = Path::new(&variable("OUT_DIR")).join("static");
    let arguments =
        ["-static".to_owned(), "-no-pie".to_owned(), format!("-L{}", script_directory.display())];
    if write_linker_scripts(&script_directory).is_none()
        || !can_link_statically(&script_directory, &arguments)
    {
        return;
    }
    for argument in &arguments {
        println!("cargo::rustc-link-arg-bin=toolgate-hook={argument}");
    }
}

/// Writes linker scripts that name static archives instead of the shared libraries of rustc.
///
/// The linker searches their directory first.
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

/// Returns the path of a static archive. If the archive changes, this script runs again.
fn find_archive(library: &str) -> Option<String> {
    let output =
        Command::new("cc").arg(format!("-print-file-name=lib{library}.a")).output().ok()?;
    let path = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim());
    let path = path.is_absolute().then_some(path)?.canonicalize().ok()?;
    // A quoted path in a linker script cannot contain these characters.
    let path = path.to_str().filter(|path| !path.contains(['"', '\n']))?.to_owned();
    println!("cargo::rerun-if-changed={path}");
    Some(path)
}

/// Returns whether a statically linked program builds and runs.
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

/// Runs a program without output, and returns whether it succeeds.
fn can_run(program: &mut Command) -> bool {
    program
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}
