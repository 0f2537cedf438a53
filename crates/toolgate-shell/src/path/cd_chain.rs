//! Determines the directory of a command that only runs after a successful `cd`.

use tree_sitter::Node;

use crate::parse::Reader;
use crate::word::Word;
use crate::{base, nested_command};

/// States how a statement changes the working directory of the shell.
enum Went {
    Enter(Word),
    Unchanged,
    Unknown,
}

impl Reader<'_> {
    /// Returns the directory of the `cd` whose success is required for a command: `cd x && tar …`.
    pub(crate) fn stands(&self, node: Node<'_>, above: &[Node<'_>]) -> Option<Word> {
        // A function may change the directory.
        if !self.has_plain_assignments {
            return None;
        }
        let mut inner = node;
        for outer in above.iter().rev() {
            let is_first = outer.named_child(0).is_some_and(|first| first.id() == inner.id());
            match outer.kind() {
                "list" if !is_first => match outer.named_child(0).filter(|_| needs_both(*outer)).map(|before| self.goes(before)) {
                    Some(Went::Enter(directory)) => return Some(directory),
                    Some(Went::Unchanged) => {}
                    Some(Went::Unknown) | None => return None,
                },
                "list" | "pipeline" | "redirected_statement" => {}
                "subshell" | "compound_statement" if is_first => {}
                _ => return None,
            }
            inner = *outer;
        }
        None
    }

    /// Returns the change of directory by a statement that succeeds.
    fn goes(&self, node: Node<'_>) -> Went {
        match node.kind() {
            "command" => {
                let name = node.child_by_field_name("name").map(|name| self.word(name, 0));
                match name.as_ref().and_then(Word::text) {
                    Some("cd") => {
                        let mut cursor = node.walk();
                        let mut words = node.children_by_field_name("argument", &mut cursor).flat_map(|word| self.words(word));
                        match (words.next(), words.next()) {
                            (Some(to), None) if to.text().is_some_and(|text| !text.is_empty() && !text.starts_with('-')) => Went::Enter(to),
                            _ => Went::Unknown,
                        }
                    }
                    Some("chdir" | "pushd" | "popd") | None => Went::Unknown,
                    Some(name) if nested_command::is_known(base(name)) => Went::Unchanged,
                    Some(_) => Went::Unknown,
                }
            }
            "redirected_statement" => node.child_by_field_name("body").map_or(Went::Unknown, |body| self.goes(body)),
            "list" if needs_both(node) => {
                let mut cursor = node.walk();
                let parts: Vec<Node<'_>> = node.named_children(&mut cursor).filter(|part| part.kind() != "comment").collect();
                match parts.as_slice() {
                    [first, second] => match self.goes(*second) {
                        Went::Unchanged => self.goes(*first),
                        went => went,
                    },
                    _ => Went::Unknown,
                }
            }
            // Some shells run the last part of a pipeline in the current process.
            "pipeline" if !["cd", "chdir", "pushd", "popd"].iter().any(|word| self.of(node).contains(word)) => Went::Unchanged,
            "subshell" | "test_command" | "variable_assignment" | "variable_assignments" => Went::Unchanged,
            _ => Went::Unknown,
        }
    }
}

/// Returns whether a list only continues after a success.
fn needs_both(list: Node<'_>) -> bool {
    let mut cursor = list.walk();
    let mut parts = list.children(&mut cursor);
    parts.any(|part| part.kind() == "&&")
}
