//! Implements `read_output`, which reads the rest of a truncated result.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::call::error_code;
use crate::tool::context::ToolContext;
use crate::tool::{Effect, Failure, Tool};

/// Maximum size of a page, in bytes.
const MAX_PAGE_BYTES: usize = 16 << 10;

#[derive(Deserialize, JsonSchema)]
struct Args {
    /// The handle that came with the beginning of the result.
    #[schemars(length(min = 1, max = 100))]
    handle: String,
    /// Where the page starts, in bytes [default: 0].
    #[serde(default)]
    offset: usize,
    /// Maximum size of the page, in bytes [default: 16384].
    #[schemars(range(min = 4, max = 16384))]
    limit: Option<usize>,
}

#[derive(Serialize, JsonSchema)]
struct Page {
    text: String,
    /// Where the next page starts, in bytes; absent on the last page.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<usize>,
    /// Size of the whole result, in bytes.
    bytes: usize,
}

/// Creates the tool `read_output`, which pages through results that were too large for the context.
#[must_use]
pub fn read_output() -> Tool {
    Tool::typed(
        "read_output",
        "Read the rest of a result that was too large to show at once.\n\
         Use it with the handle and offset that came with the beginning of the result.\n\
         Edge cases: an unknown or expired handle is an error; the last page has no `next`.\n\
         Comes after the tool whose result was truncated.",
        |ctx: ToolContext, args: Args| async move {
            let text = ctx.stored_output(&args.handle).await?;
            let text = text.ok_or_else(|| {
                Failure::from_code(
                    error_code::UNKNOWN_HANDLE,
                    format!(
                        "no result of this session has the handle `{}`",
                        toolgate_text::escape_for_display(&args.handle)
                    ),
                )
            })?;
            let start = floor_char_boundary(&text, args.offset);
            let end = floor_char_boundary(
                &text,
                start.saturating_add(args.limit.unwrap_or(MAX_PAGE_BYTES).min(MAX_PAGE_BYTES)),
            );
            Ok(Page {
                text: text.get(start..end).unwrap_or_default().to_owned(),
                next: (end < text.len()).then_some(end),
                bytes: text.len(),
            })
        },
    )
    .effect(Effect::Read)
    .max_output(usize::MAX)
}

/// Returns the nearest character boundary at or before an offset.
fn floor_char_boundary(text: &str, offset: usize) -> usize {
    let mut at = offset.min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}
