//! A file system that no path, link or race escapes, and that rolls back.

use crate::support::BuildWithReplayCheck;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
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

/// The same story on both file systems.
async fn assert_read_before_write(session: &Session, change_outside: impl Fn(&str)) {
    let write = |path: &str, n: u32| json!({"path": path, "content": format!("version {n}")});
    assert_eq!(
        call_code(session, "write_file", write("new.txt", 1)).await,
        "ok",
        "a new file may be made"
    );
    assert_eq!(
        call_code(session, "write_file", write("new.txt", 2)).await,
        "ok",
        "what I wrote I know"
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
        files.put(path, b"somebody else")
    })
    .await;
    assert_eq!(files.get("config.yaml").as_deref(), Some("version 5".as_bytes()));
}

#[tokio::test]
async fn host_file_must_be_read_before_write() {
    let host = HostFixture::new();
    assert_read_before_write(&editor_session(host.open()), |path| {
        fs::write(host.root.path().join(path), "somebody else").unwrap()
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
    // What no handler can name is not taken for something else.
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
    assert!(!host.root.path().join("deep").exists(), "directories that were made are gone");
    assert_eq!(host.undo_entries(), 0);
}

#[test]
fn recovery_undoes_open_and_keeps_committed_writes() {
    for committed in [false, true] {
        let host = HostFixture::new();
        let files = host.open();
        let mut txn = files.begin(call_id(), Vec::new());
        txn.write("config.yaml", b"half done").unwrap();
        txn.write("new.txt", b"half done").unwrap();
        txn.remove("config.yaml").unwrap();
        // The process dies: nothing is dropped, the lock is let go.
        std::mem::forget(txn);
        assert!(
            HostFs::open(host.root.path(), host.journal.path(), |_| Ok(false)).is_err(),
            "one process has the journal"
        );
        drop(files);
        assert_eq!(host.undo_entries(), 3);
        // The forgotten transaction keeps the directory open in this process; a copy of both stands
        // in for the next one.
        let next = HostFixture {
            root: tempfile::tempdir().unwrap(),
            journal: tempfile::tempdir().unwrap(),
        };
        copy_files(host.root.path(), next.root.path());
        copy_files(host.journal.path(), next.journal.path());
        HostFs::open(next.root.path(), next.journal.path(), |_| Ok(committed)).unwrap();
        let expected = if committed { (None, Some("half done")) } else { (Some("a: 1"), None) };
        assert_eq!(
            (next.read("config.yaml").as_deref(), next.read("new.txt").as_deref()),
            expected
        );
        assert_eq!(next.undo_entries(), 0);
    }
}

#[test]
fn shared_directory_recovers_only_dead_processes() {
    let host = HostFixture::new();
    let open =
        || HostFs::open_shared(host.root.path(), host.journal.path(), |_| Ok(false)).unwrap();
    // Two live at a time, and neither touches what the other has begun.
    let (first, second) = (open(), open());
    let mut theirs = first.begin(call_id(), Vec::new());
    theirs.write("config.yaml", b"half done").unwrap();
    drop(second);
    let third = open();
    assert_eq!(host.read("config.yaml").as_deref(), Some("half done"));
    // The first dies. Its own handle of the journal stays open in this process, so a copy of all
    // that it left stands in.
    let next =
        HostFixture { root: tempfile::tempdir().unwrap(), journal: tempfile::tempdir().unwrap() };
    copy_files(host.root.path(), next.root.path());
    for entry in fs::read_dir(host.journal.path())
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().path().is_dir())
    {
        let left = next.journal.path().join(entry.as_ref().unwrap().file_name());
        fs::create_dir(&left).unwrap();
        copy_files(&entry.unwrap().path(), &left);
    }
    let fourth = HostFs::open_shared(next.root.path(), next.journal.path(), |_| Ok(false)).unwrap();
    assert_eq!(next.read("config.yaml").as_deref(), Some("a: 1"));
    // Nothing is left of those who are gone.
    assert_eq!(
        fs::read_dir(next.journal.path())
            .unwrap()
            .filter(|entry| entry.as_ref().unwrap().path().is_dir())
            .count(),
        1
    );
    theirs.rollback().unwrap();
    drop((first, third, fourth));
}

#[test]
fn concurrent_openings_do_not_conflict() {
    for _ in 0..20 {
        let host = HostFixture::new();
        // One that died is there for all to find.
        fs::create_dir(host.journal.path().join("dead")).unwrap();
        fs::write(host.journal.path().join("dead/lock"), "").unwrap();
        let open = || {
            let files =
                HostFs::open_shared(host.root.path(), host.journal.path(), |_| Ok(false)).unwrap();
            let mut txn = files.begin(call_id(), Vec::new());
            txn.write(&format!("{:?}.txt", std::thread::current().id()), b"x").unwrap();
            txn.commit().unwrap();
            files
        };
        std::thread::scope(|scope| {
            (0..8)
                .map(|_| scope.spawn(open))
                .collect::<Vec<_>>()
                .into_iter()
                .for_each(|one| drop(one.join().unwrap()))
        });
        assert_eq!(fs::read_dir(host.root.path()).unwrap().count(), 9);
    }
}

fn copy_files(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
}

#[test]
fn rollback_restores_file_permissions() {
    use std::os::unix::fs::PermissionsExt;
    let mode = |host: &HostFixture| {
        fs::metadata(host.root.path().join("config.yaml")).unwrap().permissions().mode() & 0o777
    };
    for was in [0o600, 0o640, 0o666, 0o755] {
        let host = HostFixture::new();
        fs::set_permissions(host.root.path().join("config.yaml"), fs::Permissions::from_mode(was))
            .unwrap();
        let files = host.open();
        let mut txn = files.begin(call_id(), Vec::new());
        txn.remove("config.yaml").unwrap();
        txn.write("config.yaml", b"in its place").unwrap();
        txn.rollback().unwrap();
        assert_eq!((host.read("config.yaml").as_deref(), mode(&host)), (Some("a: 1"), was));
        // The same where the process dies.
        txn.remove("config.yaml").unwrap();
        std::mem::forget(txn);
        drop(files);
        let next = HostFixture {
            root: tempfile::tempdir().unwrap(),
            journal: tempfile::tempdir().unwrap(),
        };
        copy_files(host.journal.path(), next.journal.path());
        drop(next.open());
        assert_eq!((next.read("config.yaml").as_deref(), mode(&next)), (Some("a: 1"), was));
    }
}

#[test]
fn journal_inside_directory_is_refused() {
    let host = HostFixture::new();
    assert!(
        HostFs::open(host.root.path(), host.root.path().join("journal"), |_| Ok(false)).is_err()
    );
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
    // A pipe would wait for ever, a device is no file.
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

/// A directory is swapped for a link outside, again and again, while files are written below it.
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
    // On a busy machine it may take a while until one finds the real directory.
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
    assert!(written > 0, "some were written");
}

#[test]
fn write_fails_if_file_changed_after_decision() {
    let host = HostFixture::new();
    let files = host.open();
    let seen = toolgate_json::Digest::of(b"a: 1");
    fs::write(host.root.path().join("config.yaml"), "swapped after the judgement").unwrap();
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
    fs::write(host.root.path().join("new.txt"), "somebody was faster").unwrap();
    assert_eq!(txn.write("new.txt", b"x"), Err(FileError::CreatedMeanwhile("new.txt".into())));
    drop(txn);
    assert_eq!(host.read("new.txt").as_deref(), Some("somebody was faster"));
}

#[test]
fn hard_link_to_file_in_use_is_busy() {
    let host = HostFixture::new();
    fs::hard_link(host.root.path().join("config.yaml"), host.root.path().join("alias")).unwrap();
    let files = host.open();
    let mut one = files.begin(call_id(), Vec::new());
    let mut two = files.begin(
        serde_json::from_value(json!("018f3b1c-0000-7000-8000-000000000002")).unwrap(),
        Vec::new(),
    );
    one.write("config.yaml", b"one").unwrap();
    assert_eq!(two.write("alias", b"two"), Err(FileError::Busy("alias".into())));
    one.rollback().unwrap();
    two.write("alias", b"two").unwrap();
    two.commit().unwrap();
    assert_eq!(host.read("config.yaml").as_deref(), Some("two"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if std::env::var_os("TOOLGATE_SOAK").is_some() { 2_000 } else { 48 }, ..ProptestConfig::default() })]

    /// Any writes and removals, rolled back, leave every byte as it was; on both file systems.
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

#[test]
fn torn_journal_entry_and_foreign_edit_lose_no_data() {
    let host = HostFixture::new();
    let files = host.open();
    let mut txn = files.begin(call_id(), Vec::new());
    txn.write("config.yaml", b"half done").unwrap();
    std::mem::forget(txn);
    drop(files);
    let entry = fs::read_dir(host.journal.path())
        .unwrap()
        .map(|e| e.unwrap().path())
        .find(|p| p.extension().is_some_and(|e| e == "undo"))
        .unwrap();
    let whole = fs::read(&entry).unwrap();
    let reopened = |content: &str, journal: &[u8], name: &str| {
        let next = HostFixture {
            root: tempfile::tempdir().unwrap(),
            journal: tempfile::tempdir().unwrap(),
        };
        fs::write(next.root.path().join("config.yaml"), content).unwrap();
        fs::write(next.journal.path().join(name), journal).unwrap();
        let result = HostFs::open(next.root.path(), next.journal.path(), |_| Ok(false)).map(drop);
        (result.is_ok(), next.read("config.yaml").unwrap())
    };
    // Cut off while it was written, it never counted.
    for cut in [0, 10, whole.len() - 1] {
        assert_eq!(
            reopened("as it was", &whole[..cut], "x.undo"),
            (false, "as it was".into()),
            "cut at {cut}: said, and left alone"
        );
        assert_eq!(reopened("as it was", &whole[..cut], "x.tmp"), (true, "as it was".into()));
    }
    // The crash came before, in the middle of, or after the change.
    for content in ["a: 1", "half", "", "half done"] {
        assert_eq!(reopened(content, &whole, "x.undo"), (true, "a: 1".into()), "{content}");
    }
    // Somebody has worked on the file since: theirs stays, and it is said.
    assert_eq!(reopened("a day of work", &whole, "x.undo"), (false, "a day of work".into()));
}
