//! Implements `audit export`.

use std::io::{self, BufWriter, IsTerminal, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use indicatif::ProgressBar;
use toolgate_store::{LedgerEntry, LedgerReader, RowFilter};

use crate::command::common::{RowFilterArgs, format_count, open_ledger, progress_bar};

pub(crate) fn export(
    filter_args: &RowFilterArgs,
    out: Option<&Path>,
    store: Option<&Path>,
) -> io::Result<ExitCode> {
    let ledger = open_ledger(store)?;
    // An export is complete, so it includes the rows of the canary.
    let filter = RowFilter { excluded_agent: None, ..filter_args.to_filter() };
    let Some(path) = out else {
        let (mut stdout, _) =
            write_rows(&*ledger, &filter, io::stdout().lock(), &ProgressBar::hidden())?;
        return stdout.flush().map(|()| ExitCode::SUCCESS);
    };
    // A broken pipe is an error here: the reader of a named pipe did not get all rows.
    let with_path = |e: io::Error| io::Error::other(format!("{}: {e}", path.display()));
    check_export_target(path, store)?;
    let is_in_place = is_written_in_place(path).map_err(with_path)?;
    let total = if io::stderr().is_terminal() {
        ledger.count(&filter).map_err(io::Error::other)?
    } else {
        0
    };
    let bar = progress_bar(total, "exporting");
    let count = if is_in_place {
        let file = std::fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(path)
            .map_err(with_path)?;
        write_rows(&*ledger, &filter, file, &bar).map_err(with_path)?.1
    } else {
        // Write atomically, readable by the owner only. A symbolic link stays a link.
        let target = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let directory = target
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty())
            .unwrap_or(Path::new("."));
        std::fs::metadata(directory).map_err(with_path)?;
        let draft = tempfile::NamedTempFile::new_in(directory).map_err(with_path)?;
        let (draft, count) = write_rows(&*ledger, &filter, draft, &bar).map_err(with_path)?;
        draft.persist(&target).map_err(|error| with_path(error.error))?;
        count
    };
    bar.finish_and_clear();
    writeln!(io::stdout().lock(), "{} in {}", format_count(count, "row"), path.display())?;
    Ok(ExitCode::SUCCESS)
}

/// Returns true if a path cannot be replaced atomically: a device, a pipe, a dangling link.
fn is_written_in_place(path: &Path) -> io::Result<bool> {
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => Err(io::Error::other("is a directory; name a file")),
        Ok(metadata) => Ok(!metadata.is_file()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Ok(std::fs::symlink_metadata(path).is_ok())
        }
        Err(error) => Err(error),
    }
}

/// Writes the matching rows. Returns the writer and the number of rows.
fn write_rows<W: Write>(
    ledger: &dyn LedgerReader,
    filter: &RowFilter,
    file: W,
    bar: &ProgressBar,
) -> io::Result<(W, u64)> {
    let (mut file, mut count, mut failed) = (BufWriter::new(file), 0_u64, None);
    ledger
        .query(filter, &mut |entry| {
            count += 1;
            bar.set_position(count);
            // An error of the output ends the query. It is returned below, with its kind.
            failed = write_entry(&mut file, &entry).err();
            Ok(failed.is_none())
        })
        .map_err(io::Error::other)?;
    if let Some(error) = failed {
        return Err(error);
    }
    let file = file.into_inner().map_err(|error| error.into_error())?;
    Ok((file, count))
}

fn write_entry(file: &mut impl Write, entry: &LedgerEntry) -> io::Result<()> {
    serde_json::to_writer(&mut *file, entry)?;
    file.write_all(b"\n")
}

/// Checks that an export does not overwrite the ledger, its state directory or a configuration.
fn check_export_target(out: &Path, store: Option<&Path>) -> io::Result<()> {
    let is_config = |path: &Path| {
        path.file_name()
            .is_some_and(|name| name == toolgate_hook::effective_config::CONFIG_FILE_NAME)
    };
    let target = resolve_links(out);
    if is_config(out) || target.as_deref().is_some_and(is_config) {
        return Err(io::Error::other(format!(
            "{} is a configuration; name another file",
            out.display()
        )));
    }
    let (Some(store), Some(target)) = (store, target) else { return Ok(()) };
    let store = std::fs::canonicalize(store)?;
    let is_ledger_file = |suffix: &str| {
        let mut name = store.as_os_str().to_owned();
        name.push(suffix);
        name == target.as_os_str()
    };
    let state = toolgate_store::state_dir_for(&store);
    let state = std::fs::canonicalize(&state).unwrap_or(state);
    if ["", "-wal", "-shm", "-journal"].into_iter().any(is_ledger_file) || target.starts_with(state)
    {
        return Err(io::Error::other(format!(
            "{} is the ledger itself; name another file",
            out.display()
        )));
    }
    Ok(())
}

/// Resolves all symbolic links of a path, even if the file does not exist yet.
fn resolve_links(path: &Path) -> Option<PathBuf> {
    let mut path = path.to_owned();
    // Linux follows at most 40 links.
    for _ in 0..40 {
        if let Ok(resolved) = std::fs::canonicalize(&path) {
            return Some(resolved);
        }
        let parent =
            path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        match std::fs::read_link(&path) {
            Ok(target) => path = parent.join(target),
            Err(_) => return Some(std::fs::canonicalize(parent).ok()?.join(path.file_name()?)),
        }
    }
    None
}
