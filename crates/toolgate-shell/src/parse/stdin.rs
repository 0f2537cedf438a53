//! Determines the standard input of a command.

use tree_sitter::Node;

use crate::StdinSource;
use crate::parse::SyntaxAnalyzer;
use crate::word::ShellWord;

/// Returns the input that a command gets from a pipe or from the group that contains it.
pub(super) fn piped_stdin(node: Node<'_>, above: &[Node<'_>]) -> Option<StdinSource> {
    let mut inner = node;
    for outer in above.iter().rev() {
        if outer.kind() == "pipeline"
            && outer.named_child(0).is_some_and(|first| first.id() != inner.id())
        {
            return Some(StdinSource::Pipe);
        }
        // The input of a group goes to all its commands. The input of a single command is known.
        let mut cursor = outer.walk();
        let is_input = |child: Node<'_>| {
            matches!(child.kind(), "heredoc_redirect" | "herestring_redirect" | "file_redirect")
        };
        if outer.kind() == "redirected_statement"
            && inner.kind() != "command"
            && outer.children(&mut cursor).any(is_input)
        {
            return Some(StdinSource::Unknown);
        }
        inner = *outer;
    }
    None
}

impl SyntaxAnalyzer<'_> {
    /// Returns the input that redirections give to a command.
    pub(crate) fn redirected_stdin(&self, places: &[Node<'_>]) -> Option<StdinSource> {
        let mut all = Vec::new();
        for place in places {
            match place.kind() {
                "heredoc_redirect" => {
                    let mut cursor = place.walk();
                    let body =
                        place.children(&mut cursor).find(|part| part.kind() == "heredoc_body");
                    let known = body.filter(|body| {
                        self.has_quoted_delimiter(*place)
                            || !self.text_of(*body).contains(['$', '`', '\\'])
                    });
                    all.push(known.map_or(StdinSource::Unknown, |body| {
                        StdinSource::Text(ShellWord::known(self.text_of(body)))
                    }));
                }
                "herestring_redirect" => {
                    all.push(place.named_child(0).map_or(StdinSource::Unknown, |word| {
                        StdinSource::Text(self.node_word(word, 0))
                    }))
                }
                "file_redirect"
                    if self
                        .text_of(*place)
                        .trim_start_matches(|c: char| c.is_ascii_digit())
                        .starts_with('<') =>
                {
                    all.push(StdinSource::Unknown)
                }
                _ => {}
            }
        }
        match all.len() {
            0 => None,
            1 => all.pop(),
            // The last redirection counts, and the order is not known here.
            _ => Some(StdinSource::Unknown),
        }
    }
}
