//! Determines the directory of a command that only runs after a successful `cd`.

use tree_sitter::Node;

use crate::parse::SyntaxAnalyzer;
use crate::word::ShellWord;
use crate::{base_name, nested_command};

/// States how a statement changes the working directory of the shell.
enum CwdChange {
    Enter(ShellWord),
    Unchanged,
    Unknown,
}

impl SyntaxAnalyzer<'_> {
    /// Returns the directory of the `cd` whose success is required for a command: `cd x && tar …`.
    pub(crate) fn required_directory(
        &self,
        node: Node<'_>,
        above: &[Node<'_>],
    ) -> Option<ShellWord> {
        // A function may change the directory.
        if !self.has_plain_assignments {
            return None;
        }
        let mut inner = node;
        for outer in above.iter().rev() {
            let is_first = outer.named_child(0).is_some_and(|first| first.id() == inner.id());
            match outer.kind() {
                "list" if !is_first => {
                    match outer
                        .named_child(0)
                        .filter(|_| is_and_list(*outer))
                        .map(|before| self.directory_change(before))
                    {
                        Some(CwdChange::Enter(directory)) => return Some(directory),
                        Some(CwdChange::Unchanged) => {}
                        Some(CwdChange::Unknown) | None => return None,
                    }
                }
                "list" | "pipeline" | "redirected_statement" => {}
                "subshell" | "compound_statement" if is_first => {}
                _ => return None,
            }
            inner = *outer;
        }
        None
    }

    /// Returns the change of directory by a statement that succeeds.
    fn directory_change(&self, node: Node<'_>) -> CwdChange {
        match node.kind() {
            "command" => {
                let name = node.child_by_field_name("name").map(|name| self.node_word(name, 0));
                match name.as_ref().and_then(ShellWord::text) {
                    Some("cd") => {
                        let mut cursor = node.walk();
                        let mut words = node
                            .children_by_field_name("argument", &mut cursor)
                            .flat_map(|word| self.node_words(word));
                        match (words.next(), words.next()) {
                            (Some(to), None)
                                if to.text().is_some_and(|text| {
                                    !text.is_empty() && !text.starts_with('-')
                                }) =>
                            {
                                CwdChange::Enter(to)
                            }
                            _ => CwdChange::Unknown,
                        }
                    }
                    Some("chdir" | "pushd" | "popd") | None => CwdChange::Unknown,
                    Some(name) if nested_command::is_known_program(base_name(name)) => {
                        CwdChange::Unchanged
                    }
                    Some(_) => CwdChange::Unknown,
                }
            }
            "redirected_statement" => node
                .child_by_field_name("body")
                .map_or(CwdChange::Unknown, |body| self.directory_change(body)),
            "list" if is_and_list(node) => {
                let mut cursor = node.walk();
                let parts: Vec<Node<'_>> = node
                    .named_children(&mut cursor)
                    .filter(|part| part.kind() != "comment")
                    .collect();
                match parts.as_slice() {
                    [first, second] => match self.directory_change(*second) {
                        CwdChange::Unchanged => self.directory_change(*first),
                        went => went,
                    },
                    _ => CwdChange::Unknown,
                }
            }
            // Some shells run the last part of a pipeline in the current process.
            "pipeline"
                if !["cd", "chdir", "pushd", "popd"]
                    .iter()
                    .any(|word| self.text_of(node).contains(word)) =>
            {
                CwdChange::Unchanged
            }
            "subshell" | "test_command" | "variable_assignment" | "variable_assignments" => {
                CwdChange::Unchanged
            }
            _ => CwdChange::Unknown,
        }
    }
}

/// Returns whether a list only continues after a success.
fn is_and_list(list: Node<'_>) -> bool {
    let mut cursor = list.walk();
    let mut parts = list.children(&mut cursor);
    parts.any(|part| part.kind() == "&&")
}
