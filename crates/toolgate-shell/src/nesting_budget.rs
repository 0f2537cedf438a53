//! Limits how deep commands are nested, and how many bytes are parsed in total.

use std::cell::Cell;

/// Maximum nesting depth of commands.
const MAX_NESTING_DEPTH: usize = 8;

/// Maximum number of bytes that are parsed in total, including the costs of commands and words.
const MAX_PARSED_BYTES: usize = 96 << 10;

/// Additional cost of a command.
const COMMAND_COST_BYTES: usize = 192;

/// Additional cost of a word of a nested command.
pub(crate) const WORD_COST_BYTES: usize = 8;

/// Tracks how deep a command is nested and how many bytes may still be parsed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NestingBudget<'d> {
    level: usize,
    remaining_bytes: &'d Cell<usize>,
}

impl<'d> NestingBudget<'d> {
    /// Creates the budget for one command with everything that is nested in it.
    pub(crate) fn initial_budget() -> Cell<usize> {
        Cell::new(MAX_PARSED_BYTES)
    }

    pub(crate) fn top_level(left: &'d Cell<usize>) -> Self {
        Self { level: 0, remaining_bytes: left }
    }

    pub(crate) fn nested(self) -> Self {
        Self { level: self.level + 1, ..self }
    }

    pub(crate) fn is_too_deep(self) -> bool {
        self.level > MAX_NESTING_DEPTH
    }

    /// Takes the cost of a text from the budget, and returns whether enough was left.
    pub(crate) fn try_spend(self, length: usize) -> bool {
        let left = self.remaining_bytes.get().checked_sub(length + COMMAND_COST_BYTES);
        self.remaining_bytes.set(left.unwrap_or(0));
        left.is_some()
    }
}
