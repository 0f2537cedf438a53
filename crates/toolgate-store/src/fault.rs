//! What can go wrong, said so that an operator knows what to do.

use std::fmt;

use rusqlite::ErrorCode;
use toolgate::store::StoreError;

/// Why something could not be done. Nothing was changed.
#[derive(Debug)]
pub(crate) enum Fault {
    Sql(rusqlite::Error),
    Said(String),
    Io(std::io::Error),
}

pub(crate) type Done<T> = Result<T, Fault>;

impl Fault {
    /// Whether somebody merely may not read the file now: that says nothing about what is in it.
    pub(crate) fn is_unread(&self) -> bool {
        let Self::Sql(error) = self else { return false };
        matches!(
            error.sqlite_error_code(),
            Some(
                ErrorCode::PermissionDenied
                    | ErrorCode::CannotOpen
                    | ErrorCode::ReadOnly
                    | ErrorCode::SystemIoFailure
                    | ErrorCode::OutOfMemory
                    | ErrorCode::DatabaseBusy
                    | ErrorCode::DatabaseLocked
            )
        )
    }

    /// Whether it hangs on what was to be written, or on what is stored about it, and not on how the store is: then it is so
    /// whenever somebody tries again.
    pub(crate) fn is_for_good(&self) -> bool {
        use rusqlite::Error::{FromSqlConversionFailure, IntegralValueOutOfRange, InvalidColumnType, SqliteFailure};
        match self {
            Self::Said(_) => true,
            Self::Io(_) => false,
            // No trigger is toolgate's own: whoever has put one there keeps everything out.
            Self::Sql(SqliteFailure(error, _)) => {
                let refused = matches!(error.code, ErrorCode::ConstraintViolation | ErrorCode::TooBig | ErrorCode::TypeMismatch);
                refused && error.extended_code != rusqlite::ffi::SQLITE_CONSTRAINT_TRIGGER
            }
            Self::Sql(error) => matches!(error, FromSqlConversionFailure(..) | IntegralValueOutOfRange(..) | InvalidColumnType(..)),
        }
    }
}

impl From<rusqlite::Error> for Fault {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sql(error)
    }
}

impl From<serde_json::Error> for Fault {
    fn from(error: serde_json::Error) -> Self {
        Self::Said(format!("what is stored cannot be read: {error}"))
    }
}

impl From<std::io::Error> for Fault {
    fn from(error: std::io::Error) -> Self {
        Self::Io(error)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Said(what) => f.write_str(what),
            Self::Io(error) => write!(f, "{error}"),
            Self::Sql(error) if error.sqlite_error_code() == Some(ErrorCode::NotADatabase) => {
                write!(f, "it is no ledger of toolgate: {error}; if it was one, put back a good copy")
            }
            Self::Sql(error) => {
                let help = match error.sqlite_error_code() {
                    Some(ErrorCode::DiskFull) => "; make room on the disk",
                    Some(ErrorCode::ReadOnly) => "; the file or its directory cannot be written to by this user",
                    Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => "; another process has been writing to it for too long",
                    Some(ErrorCode::DatabaseCorrupt) => "; run `toolgate audit verify` to see what is damaged, and put back a good copy",
                    Some(ErrorCode::CannotOpen) => "; look whether the directory is there and can be written to",
                    _ => "",
                };
                write!(f, "{error}{help}")
            }
        }
    }
}

impl From<Fault> for StoreError {
    fn from(fault: Fault) -> Self {
        Self(fault.to_string())
    }
}
