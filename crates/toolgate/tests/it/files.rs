//! Tests that paths, links and races cannot leave the directory, and that failed calls roll back.

mod journal;

use crate::support::BuildWithReplayCheck;
use std::fs;
use std::os::unix::fs::symlink;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use proptest::prelude::*;
use serde_json::{Value, json};
use tempfile::TempDir;
use toolgate::files::{FileError, FileExpectation, FileSystem, normalize_path};
use toolgate::policy::ReadBeforeWrite;
use toolgate::{
    Agent, CallId, Failure, HostFs, MemoryFs, PromptSection, Session, Tool, ToolContext,
};

struct HostFixture {
    root: TempDir,
    journal: TempDir,
}

impl HostFixture {
    fn new() -> Self {
        let (root, journal) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::write(root.path().join("config.yaml"), "a: 1").unwrap();
        Self { root, journal }
    }

    fn open(&self) -> HostFs {
        HostFs::open(self.root.path(), self.journal.path(), |_| Ok(false)).unwrap()
    }

    fn read(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.root.path().join(path)).ok()
    }

    fn undo_entries(&self) -> usize {
        fs::read_dir(self.journal.path())
            .unwrap()
            .filter(|e| e.as_ref().unwrap().path().extension().is_some())
            .count()
    }
}

fn call_id() -> CallId {
    serde_json::from_value(json!("018f3b1c-0000-7000-8000-000000000001")).unwrap()
}

fn editor_session(files: impl FileSystem + 'static) -> Session {
    let spoil = Tool::dynamic(
        "spoil",
        "Writes, then fails.",
        json!({"type": "object"}),
        |ctx: ToolContext, _| async move {
            let files = ctx.files()?;
            files.write("config.yaml", b"spoilt")?;
            files.write("deep/er/new.txt", b"spoilt")?;
            files.write("deep/er/new.txt", b"spoilt twice")?;
            if files.list("", 100)?.contains(&"gone.txt".to_owned()) {
                files.remove("gone.txt")?;
            }
            Err::<Value, _>(Failure::business("changed_my_mind", "never mind"))
        },
    )
    .local()
    .open();
    let agent = Agent::builder("editor")
        .files(files)
        .section(
            PromptSection::new("files")
                .tools(toolgate::builtin::files())
                .policy(ReadBeforeWrite::default()),
        )
        .tool(spoil)
        .build()
        .unwrap();
    crate::support::runtime_builder().agent(agent).build_checked().session("editor", "alice", "s")
}

async fn call_code(session: &Session, tool: &str, args: Value) -> String {
    let answer = session.call(tool, args).await;
    answer.outcome.error().map_or_else(|| "ok".to_owned(), |e| e.code.to_string())
}

/// Checks the read-before-write rule on one file system.
async fn assert_read_before_write(session: &Session, change_outside: impl Fn(&str)) {
    let write = |path: &str, n: u32| json!({"path": path, "content": format!("version {n}")});
    assert_eq!(
        call_code(session, "write_file", write("new.txt", 1)).await,
        "ok",
        "a new file needs no read"
    );
    assert_eq!(
        call_code(session, "write_file", write("new.txt", 2)).await,
        "ok",
        "the session wrote the last version"
    );
    let refused = session.call("write_file", write("config.yaml", 1)).await;
    let error = refused.outcome.error().unwrap();
    assert_eq!(error.code, "read_before_write");
    let next = error.next.clone().unwrap();
    assert_eq!(
        (next.tool.as_str(), &next.arguments),
        ("read_file", &json!({"path": "config.yaml"}))
    );
    assert_eq!(call_code(session, &next.tool, next.arguments).await, "ok");
    // Another spelling of the path is the same file.
    assert_eq!(call_code(session, "write_file", write("./config.yaml", 3)).await, "ok");
    change_outside("config.yaml");
    assert_eq!(call_code(session, "write_file", write("config.yaml", 4)).await, "stale_read");
    assert_eq!(call_code(session, "read_file", json!({"path": "config.yaml"})).await, "ok");
    assert_eq!(call_code(session, "write_file", write("config.yaml", 5)).await, "ok");
}

#[tokio::test]
async fn memory_file_must_be_read_before_write() {
    let files = MemoryFs::new([("config.yaml", "a: 1")]);
    assert_read_before_write(&editor_session(files.clone()), |path| {
        files.put(path, b"another process")
    })
    .await;
    assert_eq!(files.get("config.yaml").as_deref(), Some("version 5".as_bytes()));
}

#[tokio::test]
async fn host_file_must_be_read_before_write() {
    let host = HostFixture::new();
    assert_read_before_write(&editor_session(host.open()), |path| {
        fs::write(host.root.path().join(path), "another process").unwrap()
    })
    .await;
    assert_eq!(host.read("config.yaml").as_deref(), Some("version 5"));
    assert_eq!(host.undo_entries(), 0);
}

#[tokio::test]
async fn memory_paths_are_normalized() {
    for spelling in ["./notes/a.txt", "notes//a.txt", "notes/./a.txt", "notes/a.txt"] {
        let files = MemoryFs::new([(spelling, "old")]);
        let session = editor_session(files.clone());
        assert_eq!(
            call_code(&session, "read_file", json!({"path": "notes/a.txt"})).await,
            "ok",
            "{spelling}"
        );
        files.put(spelling, b"new");
        assert_eq!(files.get("notes/a.txt").as_deref(), Some(b"new".as_slice()), "{spelling}");
        assert_eq!(files.get(spelling).as_deref(), Some(b"new".as_slice()), "{spelling}");
    }
    // An absolute path is not mapped to a relative path.
    let files = MemoryFs::new([("/etc/passwd", "root")]);
    assert!(files.get("etc/passwd").is_none() && files.get("/etc/passwd").is_some());
}

#[tokio::test]
async fn read_before_write_denies_without_file_system() {
    let agent = Agent::builder("editor")
        .tools(toolgate::builtin::files())
        .policy(ReadBeforeWrite::default())
        .build()
        .unwrap();
    let session = crate::support::runtime_builder()
        .agent(agent)
        .build_checked()
        .session("editor", "alice", "s");
    assert_eq!(
        call_code(&session, "write_file", json!({"path": "a", "content": "x"})).await,
        "policy_fault"
    );
    assert_eq!(call_code(&session, "read_file", json!({"path": "a"})).await, "no_file_system");
}

#[tokio::test]
async fn failed_call_is_rolled_back_on_host() {
    let host = HostFixture::new();
    fs::write(host.root.path().join("gone.txt"), "still here").unwrap();
    let session = editor_session(host.open());
    let answer = session.call("spoil", json!({})).await;
    assert_eq!(
        answer.outcome.error().map(|e| (&*e.code, e.effects)),
        Some(("changed_my_mind", toolgate::CallEffects::RolledBack))
    );
    assert_eq!(host.read("config.yaml").as_deref(), Some("a: 1"));
    assert_eq!(host.read("gone.txt").as_deref(), Some("still here"));
    assert!(!host.root.path().join("deep").exists(), "new directories are removed");
    assert_eq!(host.undo_entries(), 0);
}

#[test]
fn paths_and_links_cannot_leave_directory() {
    let host = HostFixture::new();
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("secret"), "secret").unwrap();
    symlink(outside.path().join("secret"), host.root.path().join("link")).unwrap();
    symlink(outside.path(), host.root.path().join("dir")).unwrap();
    symlink("../../../../../../etc", host.root.path().join("up")).unwrap();
    symlink("loop", host.root.path().join("loop")).unwrap();
    let files = host.open();
    let mut txn = files.begin(call_id(), Vec::new());
    for path in [
        "link",
        "dir/secret",
        "dir/new",
        "up/passwd",
        "loop",
        "/etc/passwd",
        "../x",
        "a/../../x",
        "",
        ".",
        "a\0b",
        "C:x",
        "./C:x",
        "\\x",
        "./\\x",
        "up/../etc",
    ] {
        assert!(txn.read(path).is_err(), "{path}");
        assert!(txn.write(path, b"pwned").is_err(), "{path}");
        assert!(txn.remove(path).is_err(), "{path}");
    }
    assert_eq!(fs::read_to_string(outside.path().join("secret")).unwrap(), "secret");
    assert!(!outside.path().join("new").exists());
    assert_eq!(txn.list("", 100).unwrap(), ["config.yaml"], "links are not followed");
    // Reading a pipe would block for ever.
    let pipe = host.root.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    assert!(matches!(txn.read("pipe"), Err(FileError::NotAFile(_) | FileError::Io(..))));
}

#[test]
fn non_utf8_name_does_not_hide_other_files() {
    use std::os::unix::ffi::OsStrExt;
    let host = HostFixture::new();
    let odd = host.root.path().join(std::ffi::OsStr::from_bytes(b"caf\xe9"));
    fs::create_dir(&odd).unwrap();
    fs::write(odd.join("menu.txt"), "tea").unwrap();
    fs::write(host.root.path().join(std::ffi::OsStr::from_bytes(b"\xff.txt")), "odd").unwrap();
    fs::create_dir(host.root.path().join("dir")).unwrap();
    fs::write(host.root.path().join("dir/a.txt"), "a").unwrap();
    let mut txn = host.open().begin(call_id(), Vec::new());
    assert_eq!(txn.list("", 100).unwrap(), ["config.yaml", "dir/a.txt"]);
    assert_eq!(txn.list("nowhere", 100), Err(FileError::NotFound("nowhere".into())));
}

/// Swaps a directory for a link to the outside while files are written below it.
#[test]
fn symlink_race_cannot_leave_directory() {
    let host = HostFixture::new();
    let outside = tempfile::tempdir().unwrap();
    let (a, b, dir) =
        (host.root.path().join("a"), host.root.path().join("b"), host.root.path().join("dir"));
    fs::create_dir(&a).unwrap();
    symlink(outside.path(), &b).unwrap();
    fs::rename(&a, &dir).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let swapper = {
        let stop = Arc::clone(&stop);
        std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                let _ = fs::rename(&dir, &a);
                let _ = fs::rename(&b, &dir);
                let _ = fs::rename(&dir, &b);
                let _ = fs::rename(&a, &dir);
                // Long enough for some writes to find the real directory.
                std::thread::sleep(std::time::Duration::from_micros(300));
            }
        })
    };
    let files = host.open();
    let mut written = 0;
    let rounds = if std::env::var_os("TOOLGATE_SOAK").is_some() { 20_000 } else { 300 };
    // On a busy machine, many writes can miss the real directory.
    for n in 0..1_000 * rounds {
        if n >= rounds && written > 0 {
            break;
        }
        let mut txn = files.begin(call_id(), Vec::new());
        written += usize::from(txn.write(&format!("dir/file-{n}"), b"x").is_ok());
        let _ = txn.commit();
    }
    stop.store(true, Ordering::Relaxed);
    swapper.join().unwrap();
    assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
    assert!(written > 0, "no write found the real directory");
}

#[test]
fn write_fails_if_file_changed_after_decision() {
    let host = HostFixture::new();
    let files = host.open();
    let seen = toolgate_json::Digest::of(b"a: 1");
    fs::write(host.root.path().join("config.yaml"), "changed after the decision").unwrap();
    let mut txn = files.begin(
        call_id(),
        vec![
            FileExpectation::Unchanged("config.yaml".into(), seen),
            FileExpectation::Absent("new.txt".into()),
        ],
    );
    assert_eq!(
        txn.write("config.yaml", b"x"),
        Err(FileError::ChangedMeanwhile("config.yaml".into()))
    );
    fs::write(host.root.path().join("new.txt"), "created by another process").unwrap();
    assert_eq!(txn.write("new.txt", b"x"), Err(FileError::CreatedMeanwhile("new.txt".into())));
    drop(txn);
    assert_eq!(host.read("new.txt").as_deref(), Some("created by another process"));
}

#[test]
fn hard_link_to_file_in_use_is_busy() {
    let host = HostFixture::new();
    fs::hard_link(host.root.path().join("config.yaml"), host.root.path().join("alias")).unwrap();
    let files = host.open();
    let mut first = files.begin(call_id(), Vec::new());
    let mut second = files.begin(
        serde_json::from_value(json!("018f3b1c-0000-7000-8000-000000000002")).unwrap(),
        Vec::new(),
    );
    first.write("config.yaml", b"one").unwrap();
    assert_eq!(second.write("alias", b"two"), Err(FileError::Busy("alias".into())));
    first.rollback().unwrap();
    second.write("alias", b"two").unwrap();
    second.commit().unwrap();
    assert_eq!(host.read("config.yaml").as_deref(), Some("two"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if std::env::var_os("TOOLGATE_SOAK").is_some() { 2_000 } else { 48 }, ..ProptestConfig::default() })]

    /// Checks on both file systems that a rollback restores every byte.
    #[test]
    fn rollback_restores_every_byte(steps in prop::collection::vec(("[ab]{1,2}(/[ab])?", prop::option::of("[xyz]{0,6}")), 1..12)) {
        let host = HostFixture::new();
        fs::write(host.root.path().join("a"), "first").unwrap();
        let files = host.open();
        let memory = MemoryFs::new([("a", "first"), ("config.yaml", "a: 1")]);
        let before = memory.digest();
        for fs in [&files as &dyn FileSystem, &memory] {
            let mut txn = fs.begin(call_id(), Vec::new());
            for (path, content) in &steps {
                let _ = match content {
                    Some(content) => txn.write(path, content.as_bytes()),
                    None => txn.remove(path),
                };
            }
            txn.rollback().unwrap();
        }
        prop_assert_eq!(memory.digest(), before);
        let mut left: Vec<_> = fs::read_dir(host.root.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        prop_assert_eq!(left, ["a", "config.yaml"]);
        prop_assert_eq!(host.read("a"), Some("first".to_owned()));
        prop_assert_eq!(host.undo_entries(), 0);
    }

    #[test]
    fn normalized_path_is_stable(path in "[a./\\\\ é]{0,12}") {
        if let Ok(normal) = normalize_path(&path) {
            prop_assert!(!normal.split('/').any(|part| part.is_empty() || part == "." || part == ".."));
            prop_assert_eq!(normalize_path(&normal), Ok(normal));
        }
    }
}
