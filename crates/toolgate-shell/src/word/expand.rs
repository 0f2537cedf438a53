//! Converts syntax nodes to words, as far as these are known before the shell expands them.

use tree_sitter::Node;

use crate::StdinSource;
use crate::parse::{SHELL_MANAGED_VARIABLES, SyntaxAnalyzer};
use crate::word::ShellWord;
use crate::word::unquote::{
    decode_ansi_c, expand_braces, has_braces, parse_unquoted, unescape_double_quoted,
};

impl SyntaxAnalyzer<'_> {
    /// Returns the words that a node expands to.
    pub(crate) fn node_words(&self, node: Node<'_>) -> Vec<ShellWord> {
        match expand_braces(self.text_of(node)) {
            Some(words) => words.iter().map(|word| parse_unquoted(word)).collect(),
            None => self.node_word(node, 0).split(),
        }
    }

    /// Returns the word of a node, as far as it is known.
    pub(crate) fn node_word(&self, node: Node<'_>, depth: usize) -> ShellWord {
        if depth > 24 {
            return ShellWord::unknown(true);
        }
        let text = self.text_of(node);
        let first = || node.named_child(0);
        match node.kind() {
            "command_name" => first()
                .map_or_else(|| parse_unquoted(text), |child| self.node_word(child, depth + 1)),
            "word" | "extglob_pattern" | "regex" | "special_variable_name" | "variable_name" => {
                parse_unquoted(text)
            }
            "number" => {
                if node.named_child_count() == 0 {
                    parse_unquoted(text)
                } else {
                    ShellWord::unknown(true)
                }
            }
            "raw_string" => text
                .strip_prefix('\'')
                .and_then(|text| text.strip_suffix('\''))
                .map_or_else(|| ShellWord::unknown(true), ShellWord::known),
            "ansi_c_string" => {
                decode_ansi_c(text).map_or_else(|| ShellWord::unknown(false), ShellWord::known)
            }
            "string" | "translated_string" => self.quoted_string_word(node, depth),
            "concatenation" => self.concatenated_word(node, depth),
            "simple_expansion" => first().map_or_else(
                || ShellWord::unknown(true),
                |name| self.variable_word(self.text_of(name), node.start_byte()),
            ),
            "expansion" => {
                let name = text
                    .strip_prefix("${")
                    .and_then(|text| text.strip_suffix('}'))
                    .unwrap_or_default();
                if !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
                    self.variable_word(name, node.start_byte())
                } else {
                    ShellWord::unknown(true)
                }
            }
            // The path of a pipe is unique.
            "process_substitution" => ShellWord::known("/dev/fd/63"),
            "command_substitution" => self.substitution_output(node, depth).map_or_else(
                || ShellWord::unknown(true),
                |text| {
                    let mut word = ShellWord::known(text);
                    word.can_split = true;
                    word
                },
            ),
            _ => ShellWord::unknown(true),
        }
    }

    /// Returns the output of `$(cat <<'EOF' …)`, `$(echo …)` and a few other plain commands.
    ///
    /// The result is `None` if the command may redefine these names.
    pub(crate) fn substitution_output(&self, node: Node<'_>, depth: usize) -> Option<String> {
        if !self.has_plain_assignments {
            return None;
        }
        let mut cursor = node.walk();
        let mut inside = node.named_children(&mut cursor);
        let (only, None) = (inside.next()?, inside.next()) else { return None };
        let command = match only.kind() {
            "command" => only,
            "redirected_statement" => {
                only.child_by_field_name("body").filter(|body| body.kind() == "command")?
            }
            _ => return None,
        };
        let name = self.node_word(command.child_by_field_name("name")?, depth + 1);
        let mut cursor = command.walk();
        let words: Vec<ShellWord> = command
            .children_by_field_name("argument", &mut cursor)
            .map(|word| self.node_word(word, depth + 1))
            .collect();
        let texts: Vec<&str> = words.iter().map(ShellWord::text).collect::<Option<_>>()?;
        let mut cursor = only.walk();
        let redirects: Vec<Node<'_>> = only
            .children(&mut cursor)
            .filter(|child| child.kind().ends_with("_redirect"))
            .collect();
        let text = match (
            name.text()?,
            texts.as_slice(),
            redirects.is_empty(),
            self.redirected_stdin(&redirects),
        ) {
            ("cat", [], false, Some(StdinSource::Text(text))) if redirects.len() == 1 => {
                text.text()?.to_owned()
            }
            ("pwd", [], true, _) => ".".to_owned(),
            // Any number will do.
            ("nproc", [], true, _) => "1".to_owned(),
            ("git", ["rev-parse", "--show-toplevel"], ..) => ".".to_owned(),
            // Options and escapes change the output.
            ("echo", words, true, _)
                if !words.iter().any(|word| word.starts_with('-') || word.contains('\\')) =>
            {
                words.join(" ")
            }
            _ => return None,
        };
        Some(text.trim_end_matches('\n').to_owned())
    }

    /// Returns whether a word has the form `=name`, which `zsh` expands to the path of a program.
    pub(crate) fn is_equals_expansion(&self, node: Node<'_>, above: &[Node<'_>]) -> bool {
        let Some(name) = self.text_of(node).strip_prefix('=') else { return false };
        let is_part = above.last().is_some_and(|outer| outer.kind() == "concatenation");
        let starts_with_equals =
            !is_part || above.last().is_some_and(|outer| outer.start_byte() == node.start_byte());
        let is_name =
            name.chars().next().map_or(is_part, |first| first.is_alphabetic() || first == '_');
        let parent = above.iter().rev().find(|outer| outer.kind() != "concatenation");
        starts_with_equals
            && is_name
            && parent.is_some_and(|outer| matches!(outer.kind(), "command" | "command_name"))
    }

    pub(crate) fn variable_word(&self, name: &str, at: usize) -> ShellWord {
        // Before the first assignment the value differs, and the shell sets some variables itself.
        let early = self.first_assignments.get(name).is_some_and(|set| *set > at);
        if early || name.starts_with("BASH") || SHELL_MANAGED_VARIABLES.contains(&name) {
            return ShellWord::unknown(true);
        }
        let mut word = match (self.variables.get(name).filter(|_| self.has_plain_assignments), name)
        {
            (Some(words), _) => {
                // A value that is empty or contains spaces may expand to any number of words.
                let can_split_to_many = |word: &ShellWord| {
                    word.text().is_none_or(|text| {
                        text.is_empty() || text.contains([' ', '\t', '\n', '*', '?', '['])
                    })
                };
                if words.len() > 1
                    && words.iter().any(can_split_to_many)
                    && words.iter().any(|word| word.text().is_some())
                {
                    return ShellWord::unknown(true);
                }
                ShellWord::one_of(words)
            }
            (None, "HOME") if self.has_plain_assignments => ShellWord::known("~"),
            (None, "PWD") if self.has_plain_assignments => ShellWord::known("."),
            (None, _) => return ShellWord::unknown(true),
        };
        word.can_split = true;
        word
    }

    /// Returns the start of a node without the spaces that the grammar includes.
    fn trimmed_start(&self, node: Node<'_>) -> usize {
        node.end_byte() - self.text_of(node).len()
    }

    /// Returns the word of a string in double quotes. The text between its child nodes is literal.
    pub(crate) fn quoted_string_word(&self, node: Node<'_>, depth: usize) -> ShellWord {
        let inside = self.text_of(node);
        let Some(opening) = inside.find('"') else { return ShellWord::unknown(false) };
        let mut at = node.start_byte() + opening + 1;
        let end = node.end_byte().saturating_sub(1);
        let mut word = ShellWord::empty();
        let mut cursor = node.walk();
        for child in
            node.named_children(&mut cursor).filter(|child| child.kind() != "string_content")
        {
            if child.kind() == "string" {
                return self.quoted_string_word(child, depth + 1);
            }
            word = word.append(&ShellWord::known(unescape_double_quoted(
                self.text.get(at..self.trimmed_start(child)).unwrap_or_default(),
            )));
            word = word.append(&self.node_word(child, depth + 1).into_quoted());
            at = child.end_byte();
        }
        word.append(&ShellWord::known(unescape_double_quoted(
            self.text.get(at..end).unwrap_or_default(),
        )))
        .into_quoted()
    }

    pub(crate) fn concatenated_word(&self, node: Node<'_>, depth: usize) -> ShellWord {
        let text = self.text_of(node);
        // `{a,b}` expands to several words. So may text between brackets, which the grammar splits.
        let hidden = |at: usize| {
            let is_plain =
                |kind: &str| matches!(kind, "word" | "number" | "extglob_pattern" | "regex");
            let mut cursor = node.walk();
            node.named_children(&mut cursor).any(|child| {
                !is_plain(child.kind()) && (child.start_byte()..child.end_byte()).contains(&at)
            })
        };
        let (start, braced) = (node.start_byte(), has_braces(text));
        let opens = text
            .match_indices(['{', '['])
            .filter(|(_, sign)| braced || *sign == "[")
            .map(|(at, _)| at);
        let opens = opens
            .filter(|at| !text.get(..*at).is_some_and(|before| before.ends_with('$')))
            .find(|at| !hidden(start + at));
        let end = opens.map_or(node.end_byte(), |at| start + at);
        if opens.is_some() && !text.contains(['$', '`', '"', '\'']) {
            return parse_unquoted(text);
        }
        let (mut word, mut at) = (ShellWord::empty(), node.start_byte());
        let mut cursor = node.walk();
        for child in node.named_children(&mut cursor) {
            if opens.is_some() && child.end_byte() > end {
                // The word is known up to the first bracket and after the last one.
                let prefix = parse_unquoted(self.text.get(at..end).unwrap_or_default());
                let suffix =
                    text.rfind(['}', ']']).and_then(|at| text.get(at + 1..)).unwrap_or_default();
                return word
                    .append(&prefix)
                    .append(&ShellWord::unknown(true))
                    .append(&parse_unquoted(suffix));
            }
            word = word.append(&parse_unquoted(
                self.text.get(at..self.trimmed_start(child)).unwrap_or_default(),
            ));
            word = word.append(&self.node_word(child, depth + 1));
            at = child.end_byte();
        }
        word.append(&parse_unquoted(self.text.get(at..node.end_byte()).unwrap_or_default()))
    }
}
