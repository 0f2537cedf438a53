//! Converts syntax nodes to words, as far as these are known before the shell expands them.

use tree_sitter::Node;

use crate::Fed;
use crate::parse::{Reader, SELF_SET};
use crate::word::Word;
use crate::word::unquote::{ansi, bare, braces, has_braces, in_quotes};

impl Reader<'_> {
    /// Returns the words that a node expands to.
    pub(crate) fn words(&self, node: Node<'_>) -> Vec<Word> {
        match braces(self.of(node)) {
            Some(words) => words.iter().map(|word| bare(word)).collect(),
            None => self.word(node, 0).split(),
        }
    }

    /// Returns the word of a node, as far as it is known.
    pub(crate) fn word(&self, node: Node<'_>, depth: usize) -> Word {
        if depth > 24 {
            return Word::unknown(true);
        }
        let text = self.of(node);
        let first = || node.named_child(0);
        match node.kind() {
            "command_name" => first().map_or_else(|| bare(text), |child| self.word(child, depth + 1)),
            "word" | "extglob_pattern" | "regex" | "special_variable_name" | "variable_name" => bare(text),
            "number" => {
                if node.named_child_count() == 0 {
                    bare(text)
                } else {
                    Word::unknown(true)
                }
            }
            "raw_string" => {
                text.strip_prefix('\'').and_then(|text| text.strip_suffix('\'')).map_or_else(|| Word::unknown(true), Word::known)
            }
            "ansi_c_string" => ansi(text).map_or_else(|| Word::unknown(false), Word::known),
            "string" | "translated_string" => self.string(node, depth),
            "concatenation" => self.concatenation(node, depth),
            "simple_expansion" => first().map_or_else(|| Word::unknown(true), |name| self.variable(self.of(name), node.start_byte())),
            "expansion" => {
                let name = text.strip_prefix("${").and_then(|text| text.strip_suffix('}')).unwrap_or_default();
                if !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
                    self.variable(name, node.start_byte())
                } else {
                    Word::unknown(true)
                }
            }
            // The path of a pipe is unique.
            "process_substitution" => Word::known("/dev/fd/63"),
            "command_substitution" => self.substitution(node, depth).map_or_else(
                || Word::unknown(true),
                |text| {
                    let mut word = Word::known(text);
                    word.can_split = true;
                    word
                },
            ),
            _ => Word::unknown(true),
        }
    }

    /// Returns the output of `$(cat <<'EOF' …)`, `$(echo …)` and a few other plain commands.
    ///
    /// The result is `None` if the command may redefine these names.
    pub(crate) fn substitution(&self, node: Node<'_>, depth: usize) -> Option<String> {
        if !self.has_plain_assignments {
            return None;
        }
        let mut cursor = node.walk();
        let mut inside = node.named_children(&mut cursor);
        let (only, None) = (inside.next()?, inside.next()) else { return None };
        let command = match only.kind() {
            "command" => only,
            "redirected_statement" => only.child_by_field_name("body").filter(|body| body.kind() == "command")?,
            _ => return None,
        };
        let name = self.word(command.child_by_field_name("name")?, depth + 1);
        let mut cursor = command.walk();
        let words: Vec<Word> = command.children_by_field_name("argument", &mut cursor).map(|word| self.word(word, depth + 1)).collect();
        let texts: Vec<&str> = words.iter().map(Word::text).collect::<Option<_>>()?;
        let mut cursor = only.walk();
        let redirects: Vec<Node<'_>> = only.children(&mut cursor).filter(|child| child.kind().ends_with("_redirect")).collect();
        let text = match (name.text()?, texts.as_slice(), redirects.is_empty(), self.fed(&redirects)) {
            ("cat", [], false, Some(Fed::Text(text))) if redirects.len() == 1 => text.text()?.to_owned(),
            ("pwd", [], true, _) => ".".to_owned(),
            // Any number will do.
            ("nproc", [], true, _) => "1".to_owned(),
            ("git", ["rev-parse", "--show-toplevel"], ..) => ".".to_owned(),
            // Options and escapes change the output.
            ("echo", words, true, _) if !words.iter().any(|word| word.starts_with('-') || word.contains('\\')) => words.join(" "),
            _ => return None,
        };
        Some(text.trim_end_matches('\n').to_owned())
    }

    /// Returns whether a word has the form `=name`, which `zsh` expands to the path of a program.
    pub(crate) fn is_looked_up(&self, node: Node<'_>, above: &[Node<'_>]) -> bool {
        let Some(name) = self.of(node).strip_prefix('=') else { return false };
        let is_part = above.last().is_some_and(|outer| outer.kind() == "concatenation");
        let begins = !is_part || above.last().is_some_and(|outer| outer.start_byte() == node.start_byte());
        let is_name = name.chars().next().map_or(is_part, |first| first.is_alphabetic() || first == '_');
        let around = above.iter().rev().find(|outer| outer.kind() != "concatenation");
        begins && is_name && around.is_some_and(|outer| matches!(outer.kind(), "command" | "command_name"))
    }

    pub(crate) fn variable(&self, name: &str, at: usize) -> Word {
        // Before the first assignment the value differs, and the shell sets some variables itself.
        let early = self.first_assignments.get(name).is_some_and(|set| *set > at);
        if early || name.starts_with("BASH") || SELF_SET.contains(&name) {
            return Word::unknown(true);
        }
        let mut word = match (self.variables.get(name).filter(|_| self.has_plain_assignments), name) {
            (Some(words), _) => {
                // A value that is empty or contains spaces may expand to any number of words.
                let odd = |word: &Word| word.text().is_none_or(|text| text.is_empty() || text.contains([' ', '\t', '\n', '*', '?', '[']));
                if words.len() > 1 && words.iter().any(odd) && words.iter().any(|word| word.text().is_some()) {
                    return Word::unknown(true);
                }
                Word::one_of(words)
            }
            (None, "HOME") if self.has_plain_assignments => Word::known("~"),
            (None, "PWD") if self.has_plain_assignments => Word::known("."),
            (None, _) => return Word::unknown(true),
        };
        word.can_split = true;
        word
    }

    /// Returns the start of a node without the spaces that the grammar includes.
    fn begins(&self, node: Node<'_>) -> usize {
        node.end_byte() - self.of(node).len()
    }

    /// Returns the word of a string in double quotes. The text between its child nodes is literal.
    pub(crate) fn string(&self, node: Node<'_>, depth: usize) -> Word {
        let inside = self.of(node);
        let Some(opening) = inside.find('"') else { return Word::unknown(false) };
        let mut at = node.start_byte() + opening + 1;
        let end = node.end_byte().saturating_sub(1);
        let mut word = Word::empty();
        let mut cursor = node.walk();
        for child in node.named_children(&mut cursor).filter(|child| child.kind() != "string_content") {
            if child.kind() == "string" {
                return self.string(child, depth + 1);
            }
            word = word.then(&Word::known(in_quotes(self.text.get(at..self.begins(child)).unwrap_or_default())));
            word = word.then(&self.word(child, depth + 1).quoted());
            at = child.end_byte();
        }
        word.then(&Word::known(in_quotes(self.text.get(at..end).unwrap_or_default()))).quoted()
    }

    pub(crate) fn concatenation(&self, node: Node<'_>, depth: usize) -> Word {
        let text = self.of(node);
        // `{a,b}` expands to several words. So may text between brackets, which the grammar splits.
        let hidden = |at: usize| {
            let is_plain = |kind: &str| matches!(kind, "word" | "number" | "extglob_pattern" | "regex");
            let mut cursor = node.walk();
            node.named_children(&mut cursor).any(|child| !is_plain(child.kind()) && (child.start_byte()..child.end_byte()).contains(&at))
        };
        let (start, braced) = (node.start_byte(), has_braces(text));
        let opens = text.match_indices(['{', '[']).filter(|(_, sign)| braced || *sign == "[").map(|(at, _)| at);
        let opens = opens.filter(|at| !text.get(..*at).is_some_and(|before| before.ends_with('$'))).find(|at| !hidden(start + at));
        let end = opens.map_or(node.end_byte(), |at| start + at);
        if opens.is_some() && !text.contains(['$', '`', '"', '\'']) {
            return bare(text);
        }
        let (mut word, mut at) = (Word::empty(), node.start_byte());
        let mut cursor = node.walk();
        for child in node.named_children(&mut cursor) {
            if opens.is_some() && child.end_byte() > end {
                // The word is known up to the first bracket and after the last one.
                let begins = bare(self.text.get(at..end).unwrap_or_default());
                let behind = text.rfind(['}', ']']).and_then(|at| text.get(at + 1..)).unwrap_or_default();
                return word.then(&begins).then(&Word::unknown(true)).then(&bare(behind));
            }
            word = word.then(&bare(self.text.get(at..self.begins(child)).unwrap_or_default()));
            word = word.then(&self.word(child, depth + 1));
            at = child.end_byte();
        }
        word.then(&bare(self.text.get(at..node.end_byte()).unwrap_or_default()))
    }
}
