//! Implements `read_file`, `write_file` and `list_files` on the agent's file system.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::call::error::CallEffects;
use crate::call::error_code;
use crate::tool::context::ToolContext;
use crate::tool::{Effect, Failure, Tool};

#[derive(Deserialize, JsonSchema)]
struct Path {
    /// Relative path of a file.
    #[schemars(length(min = 1, max = 4096))]
    path: String,
}

#[derive(Serialize, JsonSchema)]
struct Content {
    content: String,
}

#[derive(Deserialize, JsonSchema)]
struct Write {
    /// Relative path of a file.
    #[schemars(length(min = 1, max = 4096))]
    path: String,
    /// The whole new content.
    content: String,
}

#[derive(Serialize, JsonSchema)]
struct Written {
    bytes: usize,
}

#[derive(Deserialize, JsonSchema)]
struct List {
    /// A directory [default: the whole workspace].
    #[serde(default)]
    directory: String,
}

#[derive(Serialize, JsonSchema)]
struct Listed {
    files: Vec<String>,
    /// Whether there are more files than listed.
    more: bool,
}

/// Maximum number of names that `list_files` returns.
const MAX_LISTED_FILES: usize = 1_000;

/// Creates the three file tools.
#[must_use]
pub fn files() -> [Tool; 3] {
    [read_file(), write_file(), list_files()]
}

/// Creates the tool `read_file`, which reads a text file.
#[must_use]
pub fn read_file() -> Tool {
    Tool::typed(
        "read_file",
        "Read a text file of the workspace.\n\
         Use it before you change a file, and whenever you need its content.\n\
         Edge cases: a missing file, or one that is not UTF-8 text, is an error; a long file is truncated, with a handle for the rest.\n\
         Must come before write_file on an existing file.",
        |ctx: ToolContext, args: Path| async move {
            let bytes = ctx.files()?.read(&args.path)?;
            let content = String::from_utf8(bytes).map_err(|_| {
                Failure::from_code(
                    error_code::INVALID_PATH,
                    format!("`{}` is not UTF-8 text", toolgate_text::escape_for_display(&args.path)),
                )
            })?;
            Ok(Content { content })
        },
    )
    .effect(Effect::Read)
}

/// Creates the tool `write_file`, which writes a text file.
///
/// Add a policy for this tool, for example [`ReadBeforeWrite`](crate::policy::ReadBeforeWrite).
#[must_use]
pub fn write_file() -> Tool {
    Tool::typed(
        "write_file",
        "Create a text file of the workspace, or replace its whole content.\n\
         Use it to save a change that the user asked for.\n\
         Edge cases: missing directories are created; paths outside the workspace are refused.\n\
         On an existing file, run read_file first.",
        |ctx: ToolContext, args: Write| async move {
            // The file system refuses a write before it changes the file.
            ctx.files()?
                .write(&args.path, args.content.as_bytes())
                .map_err(|e| Failure::from(e).effects(CallEffects::RolledBack))?;
            Ok(Written { bytes: args.content.len() })
        },
    )
    .effect(Effect::Write)
    .idempotent()
    .local()
}

/// Creates the tool `list_files`, which lists files.
#[must_use]
pub fn list_files() -> Tool {
    Tool::typed(
        "list_files",
        "List the files of the workspace, or of one directory and all below it.\n\
         Use it to find out which files exist before you read or write.\n\
         Edge cases: at most 1,000 names are listed, and `more` is true if there are others; links are not followed.\n\
         Needs no other tool first.",
        |ctx: ToolContext, args: List| async move {
            let mut files = ctx.files()?.list(&args.directory, MAX_LISTED_FILES + 1)?;
            let more = files.len() > MAX_LISTED_FILES;
            files.truncate(MAX_LISTED_FILES);
            Ok(Listed { files, more })
        },
    )
    .effect(Effect::Read)
}
