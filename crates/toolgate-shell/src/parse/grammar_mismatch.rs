//! Detects where the grammar parses a command differently from a shell and reports no error.

use std::ops::Range;

use tree_sitter::{Node, Tree};

use crate::parse::{SyntaxAnalyzer, visit_tree};

const AMBIGUOUS_LINE_END_REASON: &str = "the end of a line is ambiguous";
const UNPARSED_PART_REASON: &str = "a part of the command cannot be parsed";
/// Node kinds that may contain the end of a line.
#[rustfmt::skip]
const MULTILINE_NODE_KINDS: &[&str] = &[
    "\n", "ansi_c_string", "heredoc_body", "heredoc_content", "heredoc_end", "raw_string", "string_content",
];
/// Node kinds that a shell reads from one line.
#[rustfmt::skip]
const SINGLE_LINE_NODE_KINDS: &[&str] = &[
    "command", "concatenation", "declaration_command", "file_redirect", "herestring_redirect", "negated_command", "redirected_statement",
    "simple_expansion", "subscript", "unset_command", "variable_assignment",
];
/// Node kinds with an inside of their own.
#[rustfmt::skip]
const ENCLOSING_NODE_KINDS: &[&str] = &[
    "arithmetic_expansion", "command_substitution", "expansion", "process_substitution", "string", "test_command",
];

impl SyntaxAnalyzer<'_> {
    /// Doubts a part of the tree that a shell would parse differently.
    pub(crate) fn check_node(&mut self, node: Node<'_>, above: &[Node<'_>]) {
        if let Some(reason) = self.find_grammar_mismatch(node, above) {
            self.add_doubt(reason);
        }
    }

    fn find_grammar_mismatch(&self, node: Node<'_>, above: &[Node<'_>]) -> Option<&'static str> {
        match node.kind() {
            "file_redirect" | "heredoc_redirect" if has_orphaned_words(node, above) => {
                return Some(UNPARSED_PART_REASON);
            }
            "file_redirect" if is_expanded_twice(self.text_of(node)) => {
                return Some("the target of `>&` may be expanded twice");
            }
            "comment" if self.is_in_arithmetic(above) => {
                return Some("a part looks like a comment but is not one");
            }
            "test_command" if !has_separate_brackets(self.text_of(node)) => {
                return Some("a word begins or ends like a test but is not one");
            }
            "expansion" if has_hidden_commands(self.text_of(node), above) => {
                return Some("a variable expansion may contain commands");
            }
            _ => {}
        }
        if node.child_count() == 0 {
            self.find_leaf_mismatch(node, above)
        } else {
            self.find_gap_mismatch(node, above)
        }
    }

    /// Checks a node without children.
    ///
    /// A line must not end before its end, and in `[ … ]` it must not be a control operator.
    fn find_leaf_mismatch(&self, node: Node<'_>, above: &[Node<'_>]) -> Option<&'static str> {
        let text = self.text_of(node);
        let is_expanded = || above.iter().rev().take(2).any(|outer| outer.kind() == "expansion");
        if !MULTILINE_NODE_KINDS.contains(&node.kind()) && has_line_end(text) && !is_expanded() {
            return Some(AMBIGUOUS_LINE_END_REASON);
        }
        // `[` is a normal program, so a shell reads a comparison between the brackets as a list or
        // a redirection.
        let is_sign = !node.is_named() && text.contains(['<', '>', '|', '&', ';', '(', ')']);
        (is_sign && self.is_in_test_brackets(node, above))
            .then_some("`[` is followed by signs that a shell reads differently")
    }

    /// Checks that only spaces are between two children of a node.
    fn find_gap_mismatch(&self, node: Node<'_>, above: &[Node<'_>]) -> Option<&'static str> {
        let kind = node.kind();
        if matches!(kind, "string" | "heredoc_body" | "expansion" | "heredoc_redirect" | "regex") {
            return None;
        }
        let is_one_line =
            SINGLE_LINE_NODE_KINDS.contains(&kind) || self.is_in_test_brackets(node, above);
        for gap in gap_ranges(node) {
            let end = gap.end;
            let gap = self.text.get(gap).unwrap_or_default();
            // A single `$` is a text, and the rest is a separate word.
            if kind == "simple_expansion" && !gap.is_empty() {
                return Some("a word follows a `$` that does not belong to it");
            }
            let plain = gap.replace("\\\n", "");
            // The grammar drops a dash before a here-document: `cat - <<E`.
            let is_dropped = kind == "redirected_statement" && plain.trim() == "-";
            if plain.contains(|c: char| !matches!(c, ' ' | '\t' | '\n')) && !is_dropped {
                return Some(UNPARSED_PART_REASON);
            }
            if is_one_line && plain.contains('\n') && !is_after_assignments(node, end) {
                return Some(AMBIGUOUS_LINE_END_REASON);
            }
        }
        has_adjacent_words(node).then_some("the boundary between two words is ambiguous")
    }

    /// Returns whether a node is inside arithmetic, a test or an expansion, where shells have no
    /// comments.
    fn is_in_arithmetic(&self, above: &[Node<'_>]) -> bool {
        let has_commands = |outer: &Node<'_>| match outer.kind() {
            "command_substitution" | "do_group" | "process_substitution" => true,
            "compound_statement" => self.text_of(*outer).starts_with('{'),
            _ => false,
        };
        let mut inside = above.iter().rev().take_while(|outer| !has_commands(outer));
        let calculates = |outer: &Node<'_>| match outer.kind() {
            "arithmetic_expansion"
            | "c_style_for_statement"
            | "expansion"
            | "string"
            | "subscript" => true,
            "compound_statement" => self.text_of(*outer).starts_with("(("),
            "test_command" => !self.text_of(*outer).starts_with("[["),
            _ => false,
        };
        inside.any(calculates)
    }

    /// Returns whether a node is directly inside of `[ … ]`, or is that test.
    fn is_in_test_brackets(&self, node: Node<'_>, above: &[Node<'_>]) -> bool {
        let is_closed = ENCLOSING_NODE_KINDS.contains(&node.kind());
        let outer = if is_closed {
            Some(node)
        } else {
            above.iter().rev().find(|outer| ENCLOSING_NODE_KINDS.contains(&outer.kind())).copied()
        };
        outer.is_some_and(|outer| {
            outer.kind() == "test_command" && !self.text_of(outer).starts_with("[[")
        })
    }
}

/// Returns whether the brackets of a test are separate words: `[[a` is a program, and `b]]` a text.
fn has_separate_brackets(test: &str) -> bool {
    let Some(inner) = test
        .strip_prefix("[[")
        .map(|rest| rest.strip_suffix("]]"))
        .or_else(|| Some(test.strip_prefix('[')?.strip_suffix(']')))
    else {
        return true;
    };
    let is_space = |c: char| matches!(c, ' ' | '\t' | '\n');
    inner.is_some_and(|inner| {
        (inner.starts_with(is_space) || inner.starts_with("\\\n")) && inner.ends_with(is_space)
    })
}

/// Returns whether the grammar treats code in an expansion as text.
///
/// This affects process substitutions, and in double quotes `$\(` between nested quotes.
fn has_hidden_commands(expansion: &str, above: &[Node<'_>]) -> bool {
    let is_quoted = above.iter().any(|outer| outer.kind() == "string");
    let has_quotes = || expansion.replace("\\\"", "").contains('"');
    expansion.contains("<(")
        || expansion.contains(">(")
        || (is_quoted && expansion.contains("$\\") && has_quotes())
}

/// Returns whether Bash may expand the target of `>&` twice, the first time to test for a number.
fn is_expanded_twice(redirect: &str) -> bool {
    redirect.split_once(">&").is_some_and(|(_, target)| target.contains(['$', '`']))
}

/// Returns whether words after a redirection belong to no command that is analyzed.
fn has_orphaned_words(node: Node<'_>, above: &[Node<'_>]) -> bool {
    let mut cursor = node.walk();
    let closes = node.children(&mut cursor).any(|part| matches!(part.kind(), "<&-" | ">&-"));
    let mut cursor = node.walk();
    let has_words = match node.kind() {
        "file_redirect" => {
            node.children_by_field_name("destination", &mut cursor).count() > usize::from(!closes)
        }
        _ => node.children_by_field_name("argument", &mut cursor).next().is_some(),
    };
    let owner = above.iter().rev().find(|outer| outer.kind() != "heredoc_redirect");
    let is_owned = owner.is_some_and(|owner| match owner.kind() {
        "command" => true,
        "redirected_statement" => {
            owner.child_by_field_name("body").is_some_and(|body| body.kind() == "command")
        }
        _ => false,
    });
    has_words && !is_owned
}

/// Returns whether a command consists only of assignments up to a position.
///
/// The grammar takes the next line for the rest of the command. A shell keeps the variables.
fn is_after_assignments(node: Node<'_>, at: usize) -> bool {
    let mut cursor = node.walk();
    let mut before = node.children(&mut cursor).take_while(|part| part.start_byte() < at);
    let is_name = node.child_by_field_name("name").is_some_and(|name| at <= name.start_byte());
    node.kind() == "command"
        && is_name
        && before.all(|part| matches!(part.kind(), "variable_assignment" | "comment"))
}

/// Returns whether a text contains the end of a line.
fn has_line_end(text: &str) -> bool {
    text.contains('\n') && text.replace("\\\n", "").contains('\n')
}

/// Returns the ranges between the children of a node.
fn gap_ranges(node: Node<'_>) -> Vec<Range<usize>> {
    let (mut cursor, mut at, mut gaps) = (node.walk(), node.start_byte(), Vec::new());
    for part in node.children(&mut cursor) {
        gaps.push(at..part.start_byte());
        at = part.end_byte();
    }
    gaps
}

/// Returns whether two words of a command are adjacent without a space, as in `x=(a)ls`. A shell
/// joins them.
fn has_adjacent_words(node: Node<'_>) -> bool {
    if !matches!(
        node.kind(),
        "command" | "declaration_command" | "unset_command" | "variable_assignments"
    ) {
        return false;
    }
    let (mut cursor, mut end) = (node.walk(), None);
    for part in node.children(&mut cursor) {
        let is_word = !part.kind().ends_with("_redirect");
        if is_word && end == Some(part.start_byte()) {
            return true;
        }
        end = Some(part.end_byte()).filter(|_| is_word);
    }
    false
}

/// Returns whether some backslashes join lines within a word, while others only seem to join lines.
///
/// Without the line breaks, the first are parsed as intended, but the others are not.
pub(crate) fn has_mixed_line_continuations(text: &str, tree: &Tree) -> bool {
    if !text.contains("\\\n") {
        return false;
    }
    // The texts in which a shell keeps the line break, with a flag for harmless ones in single
    // quotes.
    let mut unjoined: Vec<(Range<usize>, bool)> = Vec::new();
    visit_tree(tree, |node, _| match node.kind() {
        "comment" | "heredoc_content" => unjoined.push((node.byte_range(), false)),
        "heredoc_body" if node.child_count() == 0 => unjoined.push((node.byte_range(), false)),
        "heredoc_body" => unjoined.extend(gap_ranges(node).into_iter().map(|gap| (gap, false))),
        "raw_string" => unjoined.push((node.byte_range(), true)),
        _ => {}
    });
    unjoined.retain(|(range, _)| !range.is_empty());
    unjoined.sort_by_key(|(range, _)| range.start);
    let in_text = |at: usize| {
        let last = unjoined.partition_point(|(range, _)| range.start <= at).checked_sub(1)?;
        unjoined.get(last).filter(|(range, _)| range.contains(&at)).map(|(_, is_quoted)| *is_quoted)
    };
    let (mut splits, mut keeps) = (false, false);
    for (at, _) in text.match_indices("\\\n") {
        let before = text.get(..at).unwrap_or_default().trim_end_matches('\\');
        let is_escaped = (at - before.len()) % 2 == 1;
        match in_text(at) {
            Some(is_quoted) => keeps |= !is_quoted,
            None if is_escaped => keeps = true,
            None => {
                // A break between an operator and a word splits neither of them.
                let is_sign = |c: char| matches!(c, '&' | '|' | ';' | '(' | ')');
                let is_letter = |c: char| !c.is_whitespace() && !is_sign(c);
                let rest = text.get(at + 2..).unwrap_or_default();
                splits |= before.ends_with(is_letter) && rest.starts_with(is_letter);
                splits |= before.ends_with(is_sign) && rest.starts_with(is_sign);
            }
        }
    }
    splits && keeps
}
