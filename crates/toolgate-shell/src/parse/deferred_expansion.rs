//! Detects texts that a shell evaluates a second time.
//!
//! A shell does so in arithmetic and for the name of a variable, which may contain an array
//! subscript. Then it runs a substitution between the brackets.

use tree_sitter::Node;

use crate::parse::SyntaxAnalyzer;
use crate::word::ShellWord;

/// The reason that is reported if a command contains such a text.
pub(crate) const SECOND_EVALUATION_REASON: &str = "a text may be evaluated a second time";
/// Programs that evaluate their words as arithmetic or as names of variables.
#[rustfmt::skip]
const EVALUATING_PROGRAMS: &[&str] = &[
    "[", "builtin", "command", "declare", "export", "getopts", "let", "local", "mapfile", "read", "readarray", "readonly", "test",
    "typeset", "unset", "wait",
];

impl SyntaxAnalyzer<'_> {
    /// Returns whether this node evaluates arithmetic or takes the name of a variable from a text.
    pub(crate) fn is_evaluated_at(&self, node: Node<'_>) -> bool {
        match node.kind() {
            "arithmetic_expansion"
            | "c_style_for_statement"
            | "declaration_command"
            | "subscript"
            | "unset_command" => true,
            "compound_statement" => self.text_of(node).starts_with("(("),
            "expansion" => self.text_of(node).contains(':'),
            "test_command" => {
                self.text_of(node).starts_with("[[") || self.text_of(node).contains("-v")
            }
            "command" => {
                let name = node.child_by_field_name("name").map(|name| self.node_word(name, 0));
                match name.as_ref().and_then(ShellWord::text) {
                    Some("print" | "printf") => !self.is_plain_printf(node),
                    Some(name) => EVALUATING_PROGRAMS.contains(&name),
                    None => true,
                }
            }
            _ => false,
        }
    }

    /// Returns whether this node turns words or lines into variables: in a function, `set` or
    /// `read`.
    pub(crate) fn is_variable_input_at(&self, node: Node<'_>) -> bool {
        let name = || node.child_by_field_name("name").map(|name| self.node_word(name, 0));
        match node.kind() {
            "function_definition" => true,
            "command" => name()
                .as_ref()
                .and_then(ShellWord::text)
                .is_none_or(|name| matches!(name, "mapfile" | "read" | "readarray" | "set")),
            _ => false,
        }
    }

    /// Returns whether a text opens more brackets than it closes.
    pub(crate) fn has_open_bracket_at(&self, node: Node<'_>) -> bool {
        let is_text = matches!(
            node.kind(),
            "ansi_c_string" | "concatenation" | "heredoc_body" | "raw_string" | "string" | "word"
        );
        let text = self.text_of(node);
        is_text
            && (node.kind() == "ansi_c_string"
                || text.matches('[').count() > text.matches(']').count())
    }

    /// Returns whether a text contains a substitution that only runs when it is evaluated again.
    pub(crate) fn has_deferred_substitution(&self, node: Node<'_>, above: &[Node<'_>]) -> bool {
        let text = self.text_of(node);
        match node.kind() {
            "heredoc_body" => {
                let is_substituted =
                    above.iter().any(|outer| outer.kind() == "command_substitution");
                return (is_substituted || self.reads_variables || self.is_variable_value(above))
                    && is_array_element(text);
            }
            "concatenation" | "word"
                if text.contains(['\'', '"', '\\'])
                    && can_be_array_element(&strip_quotes(text)) =>
            {
                return true;
            }
            "ansi_c_string" | "concatenation" | "raw_string" | "string" | "word" => {}
            _ => return false,
        }
        let outer = above
            .iter()
            .rev()
            .map(Node::kind)
            .find(|kind| !matches!(*kind, "array" | "concatenation"));
        let is_kept = (self.reads_variables && self.has_open_brackets)
            || matches!(outer, Some("for_statement" | "variable_assignment"));
        let word = self.node_word(node, 0);
        // The characters of such a text are not known.
        let is_open = node.kind() == "ansi_c_string" && word.text().is_none();
        // A script may concatenate its variables.
        let is_piece =
            |text: &str| find_substitution(text).is_some() || text == "$" || text.ends_with("[$");
        is_open || word.texts().any(|text| is_array_element(text) || (is_kept && is_piece(text)))
    }

    /// Returns whether a here-document becomes the value of a variable.
    fn is_variable_value(&self, above: &[Node<'_>]) -> bool {
        let owner = above.iter().rev().find(|outer| outer.kind() != "heredoc_redirect");
        let body = owner
            .and_then(|owner| owner.child_by_field_name("body"))
            .map(|body| strip_quotes(self.text_of(body)))
            .unwrap_or_default();
        let mut words = body.split(|c: char| !c.is_alphanumeric());
        words.any(|word| matches!(word, "mapfile" | "read" | "readarray"))
    }
}

fn strip_quotes(text: &str) -> String {
    text.replace(['\'', '"', '\\'], "")
}

/// Returns the position of the first substitution.
fn find_substitution(text: &str) -> Option<usize> {
    [text.find("$("), text.find('`')].into_iter().flatten().min()
}

/// Returns whether a text without quotes may be an array element with a substitution as subscript.
///
/// The end of a bracket is not known, so every later substitution counts.
fn can_be_array_element(text: &str) -> bool {
    text.split_once('[').is_some_and(|(_, inside)| find_substitution(inside).is_some())
}

/// Returns whether a text looks like an array element with a substitution: `a[$(…)]`.
///
/// A substitution after a closed bracket does not count: `- [x] ran $(…)`. Quotes may hide the end
/// of a bracket.
fn is_array_element(text: &str) -> bool {
    if !can_be_array_element(text) || text.contains(['\'', '"', '\\']) {
        return can_be_array_element(text);
    }
    let (mut depth, mut before) = (0_usize, ' ');
    for c in text.chars() {
        match c {
            '[' => depth += 1,
            ']' => depth = depth.saturating_sub(1),
            '`' if depth > 0 => return true,
            '(' if depth > 0 && before == '$' => return true,
            _ => {}
        }
        before = c;
    }
    false
}
