//! Tests the journal of host files: rollback, and recovery after a crash.

use std::fs;
use std::path::Path;

use toolgate::HostFs;
use toolgate::files::FileSystem;

use super::{HostFixture, call_id};

#[test]
fn recovery_undoes_open_and_keeps_committed_writes() {
    for committed in [false, true] {
        let host = HostFixture::new();
        let files = host.open();
        let mut txn = files.begin(call_id(), Vec::new());
        txn.write("config.yaml", b"half done").unwrap();
        txn.write("new.txt", b"half done").unwrap();
        txn.remove("config.yaml").unwrap();
        // Simulate a crash: nothing is dropped, but the lock is released.
        std::mem::forget(txn);
        assert!(
            HostFs::open(host.root.path(), host.journal.path(), |_| Ok(false)).is_err(),
            "only one process can open the journal"
        );
        drop(files);
        assert_eq!(host.undo_entries(), 3);
        // The forgotten transaction keeps the directory open, so the next process works on copies.
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
    // Two open file systems do not touch transactions of each other.
    let (first, second) = (open(), open());
    let mut open_txn = first.begin(call_id(), Vec::new());
    open_txn.write("config.yaml", b"half done").unwrap();
    drop(second);
    let third = open();
    assert_eq!(host.read("config.yaml").as_deref(), Some("half done"));
    // Simulate a crash of the first process. Its journal handle stays open in this process, so
    // recovery works on a copy.
    let next =
        HostFixture { root: tempfile::tempdir().unwrap(), journal: tempfile::tempdir().unwrap() };
    copy_files(host.root.path(), next.root.path());
    for entry in fs::read_dir(host.journal.path())
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().path().is_dir())
    {
        let copy = next.journal.path().join(entry.as_ref().unwrap().file_name());
        fs::create_dir(&copy).unwrap();
        copy_files(&entry.unwrap().path(), &copy);
    }
    let fourth = HostFs::open_shared(next.root.path(), next.journal.path(), |_| Ok(false)).unwrap();
    assert_eq!(next.read("config.yaml").as_deref(), Some("a: 1"));
    // Recovery removes the directories of dead processes.
    assert_eq!(
        fs::read_dir(next.journal.path())
            .unwrap()
            .filter(|entry| entry.as_ref().unwrap().path().is_dir())
            .count(),
        1
    );
    open_txn.rollback().unwrap();
    drop((first, third, fourth));
}

#[test]
fn concurrent_openings_do_not_conflict() {
    for _ in 0..20 {
        let host = HostFixture::new();
        // Each opening finds the directory of a dead process.
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
                .for_each(|handle| drop(handle.join().unwrap()))
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
    for original_mode in [0o600, 0o640, 0o666, 0o755] {
        let host = HostFixture::new();
        fs::set_permissions(
            host.root.path().join("config.yaml"),
            fs::Permissions::from_mode(original_mode),
        )
        .unwrap();
        let files = host.open();
        let mut txn = files.begin(call_id(), Vec::new());
        txn.remove("config.yaml").unwrap();
        txn.write("config.yaml", b"in its place").unwrap();
        txn.rollback().unwrap();
        assert_eq!(
            (host.read("config.yaml").as_deref(), mode(&host)),
            (Some("a: 1"), original_mode)
        );
        // The same after a crash.
        txn.remove("config.yaml").unwrap();
        std::mem::forget(txn);
        drop(files);
        let next = HostFixture {
            root: tempfile::tempdir().unwrap(),
            journal: tempfile::tempdir().unwrap(),
        };
        copy_files(host.journal.path(), next.journal.path());
        drop(next.open());
        assert_eq!(
            (next.read("config.yaml").as_deref(), mode(&next)),
            (Some("a: 1"), original_mode)
        );
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
    // A truncated entry was never committed, so recovery reports the entry and keeps the file.
    for cut in [0, 10, whole.len() - 1] {
        assert_eq!(
            reopened("as it was", &whole[..cut], "x.undo"),
            (false, "as it was".into()),
            "cut at {cut}: reported, file unchanged"
        );
        assert_eq!(reopened("as it was", &whole[..cut], "x.tmp"), (true, "as it was".into()));
    }
    // The crash happened before, during or after the change.
    for content in ["a: 1", "half", "", "half done"] {
        assert_eq!(reopened(content, &whole, "x.undo"), (true, "a: 1".into()), "{content}");
    }
    // A later edit of the file is kept, and recovery reports the entry.
    assert_eq!(reopened("a day of work", &whole, "x.undo"), (false, "a day of work".into()));
}
