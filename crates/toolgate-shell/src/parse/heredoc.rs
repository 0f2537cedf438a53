//! Analyzes here-documents: where they end, and which parts the shell expands.

use tree_sitter::Node;

use crate::parse::SyntaxAnalyzer;

impl SyntaxAnalyzer<'_> {
    /// Doubts a here-document if a shell may end it at another position than the grammar.
    pub(crate) fn check_here_document(&mut self, node: Node<'_>) {
        let part = |kind: &str| {
            let mut cursor = node.walk();
            node.children(&mut cursor).find(|child| child.kind() == kind)
        };
        let bare = part("heredoc_start")
            .map(|start| self.text_of(start))
            .unwrap_or_default()
            .trim_matches(['\'', '"']);
        let plain = !bare.is_empty() && bare.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        let has_tabs = part("<<-").is_some();
        let is_terminated =
            part("heredoc_end").is_some_and(|end| self.is_delimiter_line(end, bare, has_tabs));
        // A shell uses the first delimiter, even if a substitution is open.
        let is_name =
            |line: &str| line == bare || (has_tabs && line.trim_start_matches('\t') == bare);
        let continues =
            part("heredoc_body").is_some_and(|body| self.text_of(body).lines().any(is_name));
        // The text starts on the next line, even if the command continues there: `cat <<E |`.
        let line = |start: Node<'_>, body: Node<'_>| {
            self.text.get(start.end_byte()..body.start_byte()).map(|text| text.replace("\\\n", ""))
        };
        let between = part("heredoc_start")
            .zip(part("heredoc_body").or(part("heredoc_end")))
            .and_then(|(start, body)| line(start, body));
        let starts_later = between.is_some_and(|between| {
            between.split_once('\n').is_some_and(|(_, after)| !after.trim().is_empty())
        });
        if !plain || !is_terminated || continues || starts_later {
            self.add_doubt("the end of a here-document is ambiguous");
        }
    }

    /// Returns whether a shell ends the here-document at this node, too.
    ///
    /// The delimiter must be alone on its line, after tabs for `<<-`. The grammar also accepts `
    /// E`, and then parses text as commands.
    fn is_delimiter_line(&self, node: Node<'_>, name: &str, has_tabs: bool) -> bool {
        let found = self.text_of(node);
        let at = node.start_byte() + found.len() - found.trim_start().len();
        let indent =
            self.text.get(..at).and_then(|before| before.rsplit('\n').next()).unwrap_or_default();
        let rest = self.text.get(at..).and_then(|line| line.strip_prefix(name));
        let starts_line =
            if has_tabs { indent.trim_start_matches('\t').is_empty() } else { indent.is_empty() };
        starts_line && rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['\n', ')']))
    }

    /// Doubts expansions in a here-document without quotes that only the running shell knows.
    pub(crate) fn check_here_document_body(&mut self, node: Node<'_>, above: &[Node<'_>]) {
        let quoted = above.last().is_some_and(|redirect| self.has_quoted_delimiter(*redirect));
        let text = self.text_of(node);
        let simple = |at: usize| {
            let inside =
                text.get(at + 2..).and_then(|rest| rest.split('}').next()).unwrap_or_default();
            !inside.is_empty() && inside.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
        };
        if !quoted && (text.contains('`') || text.match_indices("${").any(|(at, _)| !simple(at))) {
            self.add_doubt("a here-document contains code that only the running shell knows");
        }
        if !quoted && self.has_unparsed_substitution(node) {
            self.reparse_trimmed(node, above);
        }
    }

    /// Returns whether a text contains a substitution that the grammar has not found.
    fn has_unparsed_substitution(&self, node: Node<'_>) -> bool {
        let text = self.text_of(node);
        let is_escaped = |at: usize| {
            let before = text.get(..at).unwrap_or_default();
            (before.len() - before.trim_end_matches('\\').len()) % 2 == 1
        };
        let is_found = |at: usize| {
            let mut cursor = node.walk();
            let contains_offset =
                |part: Node<'_>| part.byte_range().contains(&(node.start_byte() + at));
            node.named_children(&mut cursor)
                .any(|part| part.kind() != "heredoc_content" && contains_offset(part))
        };
        text.match_indices("$(").any(|(at, _)| !is_escaped(at) && !is_found(at))
    }

    /// Parses a here-document again without its leading space, which the grammar does not support.
    fn reparse_trimmed(&mut self, node: Node<'_>, above: &[Node<'_>]) {
        let before = node.start_byte().checked_sub(1).and_then(|at| self.text.as_bytes().get(at));
        let is_spaced = before.is_some_and(|before| *before != b'\n');
        let ending = above.last().and_then(|redirect| {
            let mut cursor = redirect.walk();
            redirect
                .children(&mut cursor)
                .find(|part| part.kind() == "heredoc_end")
                .map(|end| self.text_of(end).trim())
        });
        match ending.filter(|ending| is_spaced && !ending.is_empty()) {
            Some(ending) => {
                let trimmed = format!(
                    ": <<{ending}\n{}\n{ending}\n",
                    self.text_of(node).trim_end_matches('\n')
                );
                self.analysis.merge(crate::parse::analyze_text(&trimmed, self.depth.nested()));
            }
            None => {
                self.add_doubt("a here-document contains code that only the running shell knows")
            }
        }
    }

    pub(crate) fn has_quoted_delimiter(&self, redirect: Node<'_>) -> bool {
        let mut cursor = redirect.walk();
        redirect.children(&mut cursor).any(|part| {
            part.kind() == "heredoc_start" && self.text_of(part).contains(['\'', '"', '\\'])
        })
    }
}
