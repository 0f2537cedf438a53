//! From the text of a command to its programs and words.

use std::collections::HashMap;

use tree_sitter::{Node, Parser, Tree};

use super::inner::{self, DEPTH, POWERFUL};
use super::word::Word;
use super::{Command, Fed, Shell};

/// Longer commands are nobody's to read.
const LONGEST: usize = 32 << 10;

/// Reads a command that stands so deep in others.
pub(super) fn read(text: &str, depth: usize) -> Shell {
    if depth > DEPTH {
        return Shell::opaque("commands stand in commands too deeply");
    }
    if text.len() > LONGEST {
        return Shell::opaque("the command is too long to be read");
    }
    // What a shell takes for a letter, others take for a space.
    let odd = |c: char| (c.is_whitespace() && !matches!(c, ' ' | '\t' | '\n')) || (c.is_control() && !matches!(c, '\t' | '\n'));
    let mut found = Shell::default();
    if text.contains(odd) {
        found.opaque.push("it holds a character that shells and people read differently".to_owned());
    }
    found.add(parse(text, depth));
    // A line that goes on: outside of comments, the shell never sees the break.
    if text.contains("\\\n") {
        found.add(parse(&text.replace("\\\n", ""), depth));
    }
    found
}

fn parse(text: &str, depth: usize) -> Shell {
    let unread = || Shell::opaque("the command cannot be parsed");
    let mut parser = Parser::new();
    if parser.set_language(&tree_sitter_bash::LANGUAGE.into()).is_err() {
        return unread();
    }
    let Some(tree) = parser.parse(text, None) else { return unread() };
    let mut reader = Reader { text, variables: HashMap::new(), found: Shell::default(), depth };
    if tree.root_node().has_error() {
        reader.found.opaque.push("the command cannot be parsed".to_owned());
    }
    reader.learn(&tree);
    each(&tree, |node| reader.visit(node));
    reader.found
}

/// All nodes of a tree, however deep it is.
fn each<'t>(tree: &'t Tree, mut visit: impl FnMut(Node<'t>)) {
    let mut cursor = tree.walk();
    loop {
        visit(cursor.node());
        if cursor.goto_first_child() {
            continue;
        }
        while !cursor.goto_next_sibling() {
            if !cursor.goto_parent() {
                return;
            }
        }
    }
}

struct Reader<'r> {
    text: &'r str,
    /// What variables are set to in this text.
    variables: HashMap<String, Vec<Word>>,
    found: Shell,
    depth: usize,
}

impl<'r> Reader<'r> {
    fn of(&self, node: Node<'_>) -> &'r str {
        self.text.get(node.byte_range()).unwrap_or_default()
    }

    /// Learns what variables may be.
    fn learn(&mut self, tree: &Tree) {
        let mut set: Vec<(String, Word)> = Vec::new();
        each(tree, |node| match node.kind() {
            "variable_assignment" => {
                let name = node.child_by_field_name("name");
                // An array, or one element of it.
                let plain = name.is_some_and(|name| name.kind() == "variable_name") && !self.of(node).contains("+=");
                // Before a command, it is set for the command alone.
                let parent = node.parent().map(|parent| parent.kind()).unwrap_or_default();
                if parent == "command" {
                    return;
                }
                let outer = node.parent().and_then(|parent| parent.parent()).map(|outer| outer.kind()).unwrap_or_default();
                let value = node.child_by_field_name("value").map_or_else(Word::empty, |value| self.word(value, 0));
                let name = name.map(|name| self.of(name).split('[').next().unwrap_or_default().to_owned()).unwrap_or_default();
                // What is set in a branch may not be set at all.
                let straight =
                    parent == "program" || (outer == "program" && ["declaration_command", "variable_assignments"].contains(&parent));
                if !straight {
                    set.push((name.clone(), Word::unknown(true)));
                }
                set.push((name, if plain { value } else { Word::unknown(true) }));
            }
            "for_statement" => {
                let Some(name) = node.child_by_field_name("variable") else { return };
                let mut cursor = node.walk();
                for value in node.children_by_field_name("value", &mut cursor) {
                    set.push((self.of(name).to_owned(), self.word(value, 0)));
                }
            }
            "command" => {
                // `read`, `mapfile` and their like fill variables from elsewhere.
                let name = node.child_by_field_name("name").map(|name| self.of(name)).unwrap_or_default();
                if ["read", "mapfile", "readarray", "getopts", "printf", "let", "declare", "local", "typeset"].contains(&name) {
                    let mut cursor = node.walk();
                    for word in node.children_by_field_name("argument", &mut cursor) {
                        set.push((self.of(word).to_owned(), Word::unknown(true)));
                    }
                }
            }
            _ => {}
        });
        for (name, word) in set {
            self.variables.entry(name).or_default().push(word);
        }
    }

    fn visit(&mut self, node: Node<'_>) {
        match node.kind() {
            "command" => self.command(node),
            "declaration_command" | "unset_command" => {
                let words = self.of(node).split_whitespace().map(Word::known).collect();
                self.found.commands.push(Command { words, ..Command::default() });
            }
            // A redirection with no command at all.
            "redirected_statement" if node.child_by_field_name("body").is_none() => {
                let command = Command { files: self.files(node), ..Command::default() };
                self.found.commands.push(command);
            }
            "redirected_statement"
                // Of a group of commands: all of them.
                if node.child_by_field_name("body").is_some_and(|body| body.kind() != "command") => {
                    let files = self.files(node);
                    self.found.commands.push(Command { words: vec![Word::known(":")], files, fed: None });
                }
            "variable_assignment" => {
                let name = node.child_by_field_name("name").map(|name| self.of(name)).unwrap_or_default();
                if POWERFUL.contains(&name) {
                    self.found.opaque.push(format!("`{name}` changes what commands do"));
                }
            }
            "comment" => {
                // What is no comment to a shell is none.
                let before = node.start_byte().checked_sub(1).and_then(|at| self.text.as_bytes().get(at)).copied();
                if before.is_some_and(|before| !b" \t\n;&|()".contains(&before)) {
                    self.found.opaque.push("a part looks like a comment and is none".to_owned());
                }
            }
            "heredoc_redirect" => self.here_document(node),
            "ERROR" => {}
            _ => {}
        }
    }

    /// A text that stands in the command ends where the shell says, too.
    fn here_document(&mut self, node: Node<'_>) {
        let part = |kind: &str| {
            let mut cursor = node.walk();
            node.children(&mut cursor).find(|child| child.kind() == kind).map(|child| self.of(child).to_owned())
        };
        let (start, end) = (part("heredoc_start"), part("heredoc_end"));
        let bare = start.as_deref().unwrap_or_default().trim_matches(['\'', '"']);
        let plain = !bare.is_empty() && bare.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        if !plain || end.as_deref().map(str::trim) != Some(bare) {
            self.found.opaque.push("a text in the command ends where nobody can tell".to_owned());
        }
    }

    fn command(&mut self, node: Node<'_>) {
        let mut words = Vec::new();
        if let Some(name) = node.child_by_field_name("name") {
            words.extend(self.word(name, 0).split());
        }
        let mut cursor = node.walk();
        for word in node.children_by_field_name("argument", &mut cursor) {
            words.extend(self.word(word, 0).split());
        }
        let mut files = self.files(node);
        let mut fed = self.fed(node);
        if let Some(parent) = node.parent().filter(|parent| parent.kind() == "redirected_statement") {
            files.extend(self.files(parent));
            fed = fed.or_else(|| self.fed(parent));
        }
        let fed = fed.or_else(|| self.is_piped_into(node).then_some(Fed::Unknown));
        let command = Command { words, files, fed };
        if self.depth <= DEPTH {
            let inner = inner::look_inside(&command, self.depth);
            self.found.add(inner);
        }
        self.found.commands.push(command);
    }

    /// Whether it, or a group that it stands in, reads what another command writes.
    fn is_piped_into(&self, node: Node<'_>) -> bool {
        let mut node = node;
        while let Some(parent) = node.parent() {
            if parent.kind() == "pipeline" && parent.named_child(0).is_some_and(|first| first.id() != node.id()) {
                return true;
            }
            if parent.kind() == "redirected_statement" && parent.id() != node.id() && self.fed(parent).is_some() && node.kind() != "command"
            {
                return true;
            }
            node = parent;
        }
        false
    }

    /// The files that it is redirected to or from.
    fn files(&self, node: Node<'_>) -> Vec<Word> {
        let mut cursor = node.walk();
        let redirects = node.children(&mut cursor).filter(|child| child.kind() == "file_redirect");
        redirects
            .map(|redirect| redirect.child_by_field_name("destination").map_or_else(|| Word::unknown(true), |to| self.word(to, 0)))
            .collect()
    }

    /// The text that it is given.
    fn fed(&self, node: Node<'_>) -> Option<Fed> {
        let mut cursor = node.walk();
        for child in node.children(&mut cursor) {
            match child.kind() {
                "heredoc_redirect" => {
                    let mut inner = child.walk();
                    let quoted =
                        child.children(&mut inner).any(|part| part.kind() == "heredoc_start" && self.of(part).contains(['\'', '"', '\\']));
                    let body = child.children(&mut inner).find(|part| part.kind() == "heredoc_body");
                    let known = body.filter(|body| quoted || body.named_child_count() == 0 || !self.of(*body).contains(['$', '`']));
                    return Some(known.map_or(Fed::Unknown, |body| Fed::Text(Word::known(self.of(body)))));
                }
                "herestring_redirect" => {
                    let text = child.named_child(0).map(|word| self.word(word, 0));
                    return Some(text.map_or(Fed::Unknown, Fed::Text));
                }
                "file_redirect" if self.of(child).trim_start_matches(|c: char| c.is_ascii_digit()).starts_with('<') => {
                    return Some(Fed::Unknown);
                }
                _ => {}
            }
        }
        None
    }

    /// A word, as far as it is known.
    fn word(&self, node: Node<'_>, depth: usize) -> Word {
        if depth > 64 {
            return Word::unknown(true);
        }
        let text = self.of(node);
        let children = || {
            let mut cursor = node.walk();
            let all: Vec<Node<'_>> = node.named_children(&mut cursor).collect();
            all
        };
        match node.kind() {
            "command_name" => children().first().map_or_else(|| Word::unknown(true), |child| self.word(*child, depth + 1)),
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
            "simple_expansion" => children().first().map_or_else(|| Word::unknown(true), |name| self.variable(self.of(*name))),
            "expansion" => {
                let name = text.strip_prefix("${").and_then(|text| text.strip_suffix('}')).unwrap_or_default();
                if !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
                    self.variable(name)
                } else {
                    Word::unknown(true)
                }
            }
            "command_substitution" => self.substitution(node, depth).map_or_else(
                || Word::unknown(true),
                |text| {
                    // Without quotes, what has spaces comes to several words.
                    let splits = text.contains(char::is_whitespace);
                    let mut word = Word::known(text);
                    word.splits = splits;
                    word
                },
            ),
            _ => Word::unknown(true),
        }
    }

    /// `$(cat <<'EOF' …)` and `$(echo …)` say what they come to.
    fn substitution(&self, node: Node<'_>, depth: usize) -> Option<String> {
        let mut cursor = node.walk();
        let mut inside = node.named_children(&mut cursor);
        let (only, None) = (inside.next()?, inside.next()) else { return None };
        let command = match only.kind() {
            "command" => only,
            "redirected_statement" => {
                only.child_by_field_name("body").filter(|body| body.kind() == "command" && self.files(only).is_empty())?
            }
            _ => return None,
        };
        let name = self.word(command.child_by_field_name("name")?, depth + 1);
        let mut cursor = command.walk();
        let words: Vec<Word> = command.children_by_field_name("argument", &mut cursor).map(|word| self.word(word, depth + 1)).collect();
        let text = match (name.text()?, self.fed(only).or_else(|| self.fed(command))) {
            ("cat", Some(Fed::Text(text))) if words.is_empty() => text.text()?.to_owned(),
            ("pwd", None) if words.is_empty() => ".".to_owned(),
            ("echo", None) => {
                let words: Vec<&str> = words.iter().map(Word::text).collect::<Option<_>>()?;
                // Flags and escapes are another matter.
                if words.iter().any(|word| word.starts_with('-') || word.contains('\\')) {
                    return None;
                }
                words.join(" ")
            }
            _ => return None,
        };
        Some(text.trim_end_matches('\n').to_owned())
    }

    fn variable(&self, name: &str) -> Word {
        match (self.variables.get(name), name) {
            (Some(words), _) => {
                let splits = |word: &Word| word.splits || word.text().is_none_or(|text| text.contains([' ', '\t', '\n', '*', '?', '[']));
                let splits = words.iter().any(splits);
                // Text with spaces comes to several words.
                if words.len() > 1 && words.iter().any(|word| word.text().is_some_and(|text| text.contains([' ', '\t', '\n']))) {
                    return Word::unknown(true);
                }
                let mut word = Word::one_of(words);
                word.splits = splits;
                word
            }
            (None, "HOME") => Word::known("~"),
            (None, "PWD") => Word::known("."),
            (None, _) => Word::unknown(true),
        }
    }

    /// A string in double quotes: what stands between its parts is its text.
    fn string(&self, node: Node<'_>, depth: usize) -> Word {
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
            word = word.then(&Word::known(in_quotes(self.text.get(at..child.start_byte()).unwrap_or_default())));
            word = word.then(&self.word(child, depth + 1));
            at = child.end_byte();
        }
        word.then(&Word::known(in_quotes(self.text.get(at..end).unwrap_or_default()))).quoted()
    }

    fn concatenation(&self, node: Node<'_>, depth: usize) -> Word {
        // `{a,b}` comes to several words.
        let text = self.of(node);
        if has_braces(text) {
            return Word::unknown(true);
        }
        let (mut word, mut at) = (Word::empty(), node.start_byte());
        let mut cursor = node.walk();
        for child in node.named_children(&mut cursor) {
            word = word.then(&bare(self.text.get(at..child.start_byte()).unwrap_or_default()));
            word = word.then(&self.word(child, depth + 1));
            at = child.end_byte();
        }
        word.then(&bare(self.text.get(at..node.end_byte()).unwrap_or_default()))
    }
}

fn has_braces(text: &str) -> bool {
    text.contains('{') && text.contains('}') && (text.contains(',') || text.contains(".."))
}

/// A word without quotes.
fn bare(text: &str) -> Word {
    if has_braces(text) {
        return Word::unknown(true);
    }
    let (mut plain, mut pattern, mut letters) = (String::new(), false, text.chars());
    while let Some(letter) = letters.next() {
        match letter {
            '\\' => plain.extend(letters.next().filter(|next| *next != '\n')),
            '*' | '?' | '[' => {
                pattern = true;
                plain.push(letter);
            }
            // What is no word is not known.
            '$' | '`' | '"' | '\'' => return Word::unknown(true),
            _ => plain.push(letter),
        }
    }
    if pattern { Word::pattern(&plain) } else { Word::known(plain) }
}

fn in_quotes(text: &str) -> String {
    let (mut plain, mut letters) = (String::new(), text.chars());
    while let Some(letter) = letters.next() {
        match (letter, letters.clone().next()) {
            ('\\', Some(next @ ('"' | '\\' | '$' | '`'))) => {
                plain.push(next);
                letters.next();
            }
            ('\\', Some('\n')) => {
                letters.next();
            }
            _ => plain.push(letter),
        }
    }
    plain
}

/// `$'…'` with its escapes spelled out; `None` where one is not known.
fn ansi(text: &str) -> Option<String> {
    let inside = text.strip_prefix("$'")?.strip_suffix('\'')?;
    let (mut plain, mut letters) = (String::new(), inside.chars().peekable());
    while let Some(letter) = letters.next() {
        if letter != '\\' {
            plain.push(letter);
            continue;
        }
        let escaped = letters.next()?;
        let mut digits = |most: usize, base: u32| {
            let mut value = None;
            for _ in 0..most {
                let Some(digit) = letters.peek().and_then(|next| next.to_digit(base)) else { break };
                value = Some(value.unwrap_or(0) * base + digit);
                letters.next();
            }
            value
        };
        plain.push(match escaped {
            'n' => '\n',
            't' => '\t',
            'r' => '\r',
            'a' => '\u{7}',
            'b' => '\u{8}',
            'e' | 'E' => '\u{1b}',
            'f' => '\u{c}',
            'v' => '\u{b}',
            '\\' | '\'' | '"' | '?' => escaped,
            'x' => char::from_u32(digits(2, 16)?).filter(char::is_ascii)?,
            'u' => char::from_u32(digits(4, 16)?)?,
            'U' => char::from_u32(digits(8, 16)?)?,
            '0'..='7' => {
                let more = digits(2, 8);
                let (first, count) = (escaped.to_digit(8)?, more.map_or(0, |more| if more > 7 { 2 } else { 1 }));
                char::from_u32(first * 8_u32.pow(count) + more.unwrap_or(0)).filter(char::is_ascii)?
            }
            _ => return None,
        });
    }
    Some(plain)
}
