//! Defines the error type of the store, with hints for operators.

use std::fmt;

use rusqlite::ErrorCode;
use toolgate::store::{StoreError, StoreErrorKind};

/// Error of a store operation. The operation changed nothing.
#[derive(Debug)]
pub(crate) enum DbError {
    Sql(rusqlite::Error),
    Message(String),
    Io(std::io::Error),
}

pub(crate) type DbResult<T> = Result<T, DbError>;

impl DbError {
    /// Returns true if the file cannot be read now, which says nothing about its content.
    pub(crate) fn is_unreadable(&self) -> bool {
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

    /// Returns the kind of the error for callers of the store.
    pub(crate) fn kind(&self) -> StoreErrorKind {
        match self {
            Self::Message(_) => StoreErrorKind::Schema,
            Self::Io(error) => match error.kind() {
                std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
                    StoreErrorKind::Full
                }
                std::io::ErrorKind::ReadOnlyFilesystem | std::io::ErrorKind::PermissionDenied => {
                    StoreErrorKind::ReadOnly
                }
                _ => StoreErrorKind::Unavailable,
            },
            Self::Sql(error) => match error.sqlite_error_code() {
                Some(ErrorCode::DiskFull) => StoreErrorKind::Full,
                Some(ErrorCode::ReadOnly | ErrorCode::PermissionDenied) => StoreErrorKind::ReadOnly,
                Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => {
                    StoreErrorKind::Schema
                }
                _ => StoreErrorKind::Unavailable,
            },
        }
    }

    /// Returns true if a retry cannot succeed, because the data itself is the cause.
    pub(crate) fn is_permanent(&self) -> bool {
        use rusqlite::Error::{
            FromSqlConversionFailure, IntegralValueOutOfRange, InvalidColumnType, SqliteFailure,
        };
        match self {
            Self::Message(_) => true,
            Self::Io(_) => false,
            // Toolgate has no triggers. A foreign trigger rejects every row, not this one.
            Self::Sql(SqliteFailure(error, _)) => {
                let refused = matches!(
                    error.code,
                    ErrorCode::ConstraintViolation | ErrorCode::TooBig | ErrorCode::TypeMismatch
                );
                refused && error.extended_code != rusqlite::ffi::SQLITE_CONSTRAINT_TRIGGER
            }
            Self::Sql(error) => matches!(
                error,
                FromSqlConversionFailure(..) | IntegralValueOutOfRange(..) | InvalidColumnType(..)
            ),
        }
    }
}

impl From<rusqlite::Error> for DbError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sql(error)
    }
}

impl From<serde_json::Error> for DbError {
    fn from(error: serde_json::Error) -> Self {
        Self::Message(format!("cannot parse a stored value: {error}"))
    }
}

impl From<std::io::Error> for DbError {
    fn from(error: std::io::Error) -> Self {
        Self::Io(error)
    }
}

impl fmt::Display for DbError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Message(what) => f.write_str(what),
            Self::Io(error) => write!(f, "{error}"),
            Self::Sql(error) if error.sqlite_error_code() == Some(ErrorCode::NotADatabase) => {
                write!(f, "not a toolgate ledger: {error}; if it was one, restore a good copy")
            }
            Self::Sql(error) => {
                let help = match error.sqlite_error_code() {
                    Some(ErrorCode::DiskFull) => "; free space on the disk",
                    Some(ErrorCode::ReadOnly) => {
                        "; this user cannot write to the file or its directory"
                    }
                    Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
                        "; another process has held the write lock for too long"
                    }
                    Some(ErrorCode::DatabaseCorrupt) => {
                        "; run `toolgate audit verify` to find the damage, and restore a good copy"
                    }
                    Some(ErrorCode::CannotOpen) => {
                        "; check that the directory exists and is writable"
                    }
                    _ => "",
                };
                write!(f, "{error}{help}")
            }
        }
    }
}

impl From<DbError> for StoreError {
    fn from(fault: DbError) -> Self {
        Self::new(fault.kind(), fault.to_string())
    }
}
