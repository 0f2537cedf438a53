//! Records the values that variables of a command may have.

use tree_sitter::Node;

use crate::ShellCommand;
use crate::nested_command::is_behaviour_change;
use crate::parse::SyntaxAnalyzer;
use crate::word::{Certainty, ShellWord};

/// Programs that set variables in their own way.
const VARIABLE_SETTERS: &[&str] = &[
    ".",
    "builtin",
    "command",
    "coproc",
    "declare",
    "eval",
    "export",
    "getopts",
    "let",
    "local",
    "mapfile",
    "read",
    "readarray",
    "readonly",
    "source",
    "time",
    "trap",
    "typeset",
    "unset",
];

/// Commands that keep the variables that are set in front of them.
const ASSIGNMENT_KEEPING_COMMANDS: &[&str] = &[
    ":", ".", "break", "continue", "eval", "exec", "exit", "export", "readonly", "return", "set",
    "shift", "source", "times", "trap", "unset",
];

impl SyntaxAnalyzer<'_> {
    /// Records the values that variables may have.
    pub(super) fn record_variables(&mut self, node: Node<'_>, above: &[Node<'_>]) {
        let parent = above.last().map(Node::kind).unwrap_or_default();
        self.has_arithmetic = self.has_arithmetic || self.is_evaluated_at(node);
        self.reads_variables = self.reads_variables || self.is_variable_input_at(node);
        self.has_open_brackets = self.has_open_brackets || self.has_open_bracket_at(node);
        match node.kind() {
            "variable_assignment" => {
                let name = node.child_by_field_name("name");
                let plain = name.is_some_and(|name| name.kind() == "variable_name")
                    && !self.text_of(node).contains("+=");
                let value = node
                    .child_by_field_name("value")
                    .map_or_else(ShellWord::empty, |value| self.node_word(value, 0));
                let name = name
                    .map(|name| self.text_of(name).split('[').next().unwrap_or_default().to_owned())
                    .unwrap_or_default();
                // A setting in front of a command usually applies to that command alone. If the
                // command expands to nothing, the setting remains.
                if parent == "command" {
                    let command =
                        above.last().and_then(|command| command.child_by_field_name("name"));
                    let is_known = command.is_some_and(|name| {
                        let is_text =
                            self.node_word(name, 0).text().is_some_and(|text| !text.is_empty());
                        is_text && !self.text_of(name).contains(['$', '`'])
                    });
                    // The setting also remains if the line ends before the command. The grammar
                    // ignores that line break.
                    let gap = command
                        .and_then(|name| self.text.get(node.end_byte()..name.start_byte()))
                        .unwrap_or_default();
                    let is_same_line = !gap.replace("\\\n", "").contains('\n');
                    self.has_plain_assignments &= is_known
                        && is_same_line
                        && !ASSIGNMENT_KEEPING_COMMANDS
                            .contains(&command.map(|name| self.text_of(name)).unwrap_or_default());
                    return;
                }
                // An assignment in a branch may not run.
                let outer = above.iter().rev().nth(1).map(Node::kind).unwrap_or_default();
                let is_background = node.next_sibling().is_some_and(|next| next.kind() == "&");
                let is_declared = outer == "program"
                    && ["declaration_command", "variable_assignments"].contains(&parent);
                let always_runs = !is_background && (parent == "program" || is_declared);
                self.first_assignments.entry(name.clone()).or_insert_with(|| node.start_byte());
                let words = self.variables.entry(name).or_default();
                if !always_runs || !plain {
                    words.push(ShellWord::unknown(true));
                }
                words.push(value);
            }
            "for_statement" => {
                let Some(name) = node.child_by_field_name("variable") else { return };
                let mut cursor = node.walk();
                let values: Vec<ShellWord> = node
                    .children_by_field_name("value", &mut cursor)
                    .flat_map(|value| self.node_words(value))
                    .collect();
                self.first_assignments
                    .entry(self.text_of(name).to_owned())
                    .or_insert_with(|| node.start_byte());
                if values.is_empty() || is_behaviour_change(self.text_of(name), None) {
                    self.has_plain_assignments = false;
                }
                self.variables.entry(self.text_of(name).to_owned()).or_default().extend(values);
            }
            "function_definition" | "unset_command" => self.has_plain_assignments = false,
            // `${x:=…}` sets the variable.
            "expansion" if self.text_of(node).contains('=') => self.has_plain_assignments = false,
            "declaration_command" => {
                let mut cursor = node.walk();
                let is_other = |child: Node<'_>| {
                    !matches!(
                        child.kind(),
                        "variable_assignment" | "variable_name" | "file_redirect"
                    )
                };
                // `export NAME=value` is plain; every other form is not.
                self.has_plain_assignments &= self.text_of(node).starts_with("export")
                    && !node.named_children(&mut cursor).any(is_other);
            }
            "command" => {
                let name = node.child_by_field_name("name").map(|name| self.node_word(name, 0));
                let name = name.as_ref().and_then(ShellWord::text).unwrap_or("eval");
                let mut cursor = node.walk();
                let mut args = node
                    .children_by_field_name("argument", &mut cursor)
                    .map(|word| self.node_word(word, 0));
                // `set -A` sets arrays in other shells.
                let sets_variable = match name {
                    "print" | "printf" => {
                        args.any(|word| word.match_pattern("-v*") != Certainty::No)
                    }
                    "set" => args.any(|word| {
                        word.match_pattern("-A*").max(word.match_pattern("+A*")) == Certainty::Yes
                    }),
                    _ => VARIABLE_SETTERS.contains(&name),
                };
                self.has_plain_assignments &= !sets_variable;
            }
            _ => {}
        }
    }

    pub(super) fn visit_assignment(&mut self, node: Node<'_>, above: &[Node<'_>]) {
        let name =
            node.child_by_field_name("name").map(|name| self.text_of(name)).unwrap_or_default();
        let name = name.split('[').next().unwrap_or_default();
        let value = node
            .child_by_field_name("value")
            .map_or_else(ShellWord::empty, |value| self.node_word(value, 0));
        if let Some(value) = node.child_by_field_name("value") {
            self.record_value(value);
        }
        // `IFS= read` only changes how a line is split.
        let reads = above.last().is_some_and(|command| {
            command.kind() == "command"
                && command
                    .child_by_field_name("name")
                    .is_some_and(|name| self.text_of(name) == "read")
        });
        let value = if name == "PATH" {
            node.child_by_field_name("value")
                .map(|value| self.text_of(value).trim_matches(['"', '\'']))
        } else {
            value.text()
        };
        if is_behaviour_change(name, value) && !(name == "IFS" && reads) {
            self.add_doubt(format!("`{name}` changes what commands do"));
        }
        // A program may read or write a path in its variables: `GIT_TRACE=/x git status`.
        let is_passed = above
            .last()
            .is_some_and(|outer| matches!(outer.kind(), "command" | "declaration_command"));
        if is_passed && let Some(text) = value.filter(|_| name != "PATH") {
            // The parts of a long list are checked separately.
            let is_long = (16..256).contains(&text.matches(['=', ':', '@', ',']).count());
            let parts: Vec<&str> =
                if is_long { text.split([':', ',']).collect() } else { vec![text] };
            let parts = parts.into_iter().map(|part| ShellWord::known(format!("{name}={part}")));
            let words = std::iter::once(ShellWord::known("set")).chain(parts).collect();
            self.analysis.commands.push(ShellCommand { words, ..ShellCommand::default() });
        }
    }

    /// Records the value of a variable, up to a limit.
    pub(super) fn record_value(&mut self, value: Node<'_>) {
        const MAX_VARIABLE_VALUES: usize = 512;
        if self.analysis.variable_values.len() < MAX_VARIABLE_VALUES {
            let forms = self.value_forms(value);
            self.analysis.variable_values.extend(forms.into_iter().take(MAX_VARIABLE_VALUES));
        }
        if self.analysis.variable_values.len() >= MAX_VARIABLE_VALUES {
            self.add_doubt("its variables have too many values");
        }
    }

    /// Returns the values of a variable, as written and as expanded.
    fn value_forms(&self, value: Node<'_>) -> Vec<String> {
        let mut cursor = value.walk();
        let items: Vec<Node<'_>> = if value.kind() == "array" {
            value.named_children(&mut cursor).collect()
        } else {
            vec![value]
        };
        let words: Vec<ShellWord> =
            items.into_iter().flat_map(|item| self.node_words(item)).collect();
        let texts = words.iter().flat_map(|word| word.texts()).map(str::to_owned);
        std::iter::once(self.text_of(value).to_owned()).chain(texts).collect()
    }
}
