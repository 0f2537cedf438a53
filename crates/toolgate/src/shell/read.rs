//! From the text of a command to its programs and words.

use std::collections::HashMap;

use tree_sitter::{Node, Parser, Tree};

use super::inner::{self, Depth, is_powerful};
use super::word::{Sure, Word};
use super::{Command, Fed, Shell, base, later, normal, otherwise, sets};

/// Longer commands are nobody's to read.
const LONGEST: usize = 32 << 10;
/// What has more parts, neither.
const LARGEST: usize = 6_000;
/// What is nested more deeply, neither.
const DEEPEST: usize = 120;

/// Reads a command that stands so deep in others.
pub(super) fn read(text: &str, depth: Depth<'_>) -> Shell {
    if depth.is_too_deep() {
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

fn parse(text: &str, depth: Depth<'_>) -> Shell {
    let unread = || Shell::opaque("the command cannot be parsed");
    if !depth.affords(text.len()) {
        return Shell::opaque("there are too many commands in it");
    }
    let mut parser = Parser::new();
    if parser.set_language(&tree_sitter_bash::LANGUAGE.into()).is_err() {
        return unread();
    }
    let Some(tree) = parser.parse(text, None) else { return unread() };
    if tree.root_node().descendant_count() > LARGEST {
        return Shell::opaque("the command is too large to be read");
    }
    // What another shell is told may calculate as well.
    let calculates = text.contains("((") || text.contains("$[");
    let (variables, first_set) = (HashMap::new(), HashMap::new());
    let mut reader =
        Reader { text, variables, first_set, is_plain: true, calculates, takes_in: false, opens: false, found: Shell::default(), depth };
    // Quotes are taken off where something is calculated or compared.
    let calculates =
        ["((", "-eq", "-ne", "-lt", "-gt", "-le", "-ge", " -v ", "let ", "declare -i", "typeset -i"].iter().any(|sign| text.contains(sign));
    let hides = text.contains("\\$(") || text.contains("\\`") || text.contains("[$(") || text.contains("[`");
    if calculates && hides {
        reader.doubt(later::WHY);
    }
    if tree.root_node().has_error() {
        reader.found.opaque.push("the command cannot be parsed".to_owned());
    }
    if otherwise::goes_on_oddly(text, &tree) {
        reader.doubt("a line goes on in the middle of a word, and another one only seems to");
    }
    if !each(&tree, |node, above| reader.learn(node, above)) {
        return Shell::opaque("the command is nested too deeply to be read");
    }
    each(&tree, |node, above| reader.visit(node, above));
    reader.look_at_what_is_written();
    reader.found
}

/// All nodes of a tree, each with those that it stands in; false where it is too deep.
pub(super) fn each<'t>(tree: &'t Tree, mut visit: impl FnMut(Node<'t>, &[Node<'t>])) -> bool {
    let mut cursor = tree.walk();
    let mut above: Vec<Node<'t>> = Vec::new();
    loop {
        visit(cursor.node(), &above);
        let here = cursor.node();
        if cursor.goto_first_child() {
            above.push(here);
            if above.len() > DEEPEST {
                return false;
            }
            continue;
        }
        while !cursor.goto_next_sibling() {
            if !cursor.goto_parent() {
                return true;
            }
            above.pop();
        }
    }
}

pub(super) struct Reader<'r> {
    pub(super) text: &'r str,
    /// What variables are set to in this text.
    pub(super) variables: HashMap<String, Vec<Word>>,
    /// Variables are set where it is written, and nothing has another meaning than usual.
    pub(super) is_plain: bool,
    /// Something is calculated somewhere, or a variable named by a text.
    pub(super) calculates: bool,
    /// Whether texts become variables by something else than an assignment.
    pub(super) takes_in: bool,
    /// Whether a bracket stays open in a text: what else there is may stand in it.
    pub(super) opens: bool,
    /// Where each is first set.
    pub(super) first_set: HashMap<String, usize>,
    pub(super) found: Shell,
    pub(super) depth: Depth<'r>,
}

/// Programs that set variables in ways of their own.
const SETTERS: &[&str] = &[
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
/// Variables that the shell sets itself.
pub(super) const SELF_SET: &[&str] =
    &["FUNCNAME", "PIPESTATUS", "RANDOM", "SRANDOM", "REPLY", "DIRSTACK", "GROUPS", "OPTARG", "OPTIND", "LINENO", "SECONDS", "OLDPWD", "_"];
/// Commands before which a variable that is set stays set.
const SPECIAL: &[&str] = &[
    ":", ".", "break", "continue", "eval", "exec", "exit", "export", "readonly", "return", "set", "shift", "source", "times", "trap",
    "unset",
];

impl<'r> Reader<'r> {
    pub(super) fn of(&self, node: Node<'_>) -> &'r str {
        let text = self.text.get(node.byte_range()).unwrap_or_default();
        // In a text of several lines the grammar takes the spaces before one of these for its own.
        let is_spaced = matches!(node.kind(), "arithmetic_expansion" | "command_substitution" | "expansion" | "simple_expansion");
        if is_spaced { text.trim_start() } else { text }
    }

    pub(super) fn doubt(&mut self, why: impl Into<String>) {
        self.found.opaque.push(why.into());
    }

    /// Learns what variables may be.
    fn learn(&mut self, node: Node<'_>, above: &[Node<'_>]) {
        let parent = above.last().map(Node::kind).unwrap_or_default();
        self.calculates = self.calculates || self.calculates_at(node);
        self.takes_in = self.takes_in || self.takes_in_at(node);
        self.opens = self.opens || self.opens_at(node);
        match node.kind() {
            "variable_assignment" => {
                let name = node.child_by_field_name("name");
                let plain = name.is_some_and(|name| name.kind() == "variable_name") && !self.of(node).contains("+=");
                let value = node.child_by_field_name("value").map_or_else(Word::empty, |value| self.word(value, 0));
                let name = name.map(|name| self.of(name).split('[').next().unwrap_or_default().to_owned()).unwrap_or_default();
                // Before a command, it is set for the command alone, mostly; before one that comes to nothing it stays set.
                if parent == "command" {
                    let command = above.last().and_then(|command| command.child_by_field_name("name"));
                    let is_told = command.is_some_and(|name| {
                        let is_text = self.word(name, 0).text().is_some_and(|text| !text.is_empty());
                        is_text && !self.of(name).contains(['$', '`'])
                    });
                    // So it does where a line ends before the command, which the grammar takes for its own.
                    let gap = command.and_then(|name| self.text.get(node.end_byte()..name.start_byte())).unwrap_or_default();
                    let is_of_command = !gap.replace("\\\n", "").contains('\n');
                    self.is_plain &= is_told && is_of_command && !SPECIAL.contains(&command.map(|name| self.of(name)).unwrap_or_default());
                    return;
                }
                // What is set in a branch may not be set at all.
                let outer = above.iter().rev().nth(1).map(Node::kind).unwrap_or_default();
                let away = node.next_sibling().is_some_and(|next| next.kind() == "&");
                let kept = outer == "program" && ["declaration_command", "variable_assignments"].contains(&parent);
                let straight = !away && (parent == "program" || kept);
                self.first_set.entry(name.clone()).or_insert_with(|| node.start_byte());
                let words = self.variables.entry(name).or_default();
                if !straight || !plain {
                    words.push(Word::unknown(true));
                }
                words.push(value);
            }
            "for_statement" => {
                let Some(name) = node.child_by_field_name("variable") else { return };
                let mut cursor = node.walk();
                let values: Vec<Word> = node.children_by_field_name("value", &mut cursor).flat_map(|value| self.words(value)).collect();
                self.first_set.entry(self.of(name).to_owned()).or_insert_with(|| node.start_byte());
                if values.is_empty() || is_powerful(self.of(name), None) {
                    self.is_plain = false;
                }
                self.variables.entry(self.of(name).to_owned()).or_default().extend(values);
            }
            "function_definition" | "unset_command" => self.is_plain = false,
            // `${x:=…}` sets it.
            "expansion" if self.of(node).contains('=') => self.is_plain = false,
            "declaration_command" => {
                let mut cursor = node.walk();
                let odd = |child: Node<'_>| !matches!(child.kind(), "variable_assignment" | "variable_name" | "file_redirect");
                // `export NAME=value` is plain; everything cleverer is not.
                self.is_plain &= self.of(node).starts_with("export") && !node.named_children(&mut cursor).any(odd);
            }
            "command" => {
                let name = node.child_by_field_name("name").map(|name| self.word(name, 0));
                let name = name.as_ref().and_then(Word::text).unwrap_or("eval");
                let mut cursor = node.walk();
                let mut args = node.children_by_field_name("argument", &mut cursor).map(|word| self.word(word, 0));
                // `set -A` is for other shells.
                let fills = match name {
                    "print" | "printf" => args.any(|word| word.is_like("-v*") != Sure::No),
                    "set" => args.any(|word| word.is_like("-A*").max(word.is_like("+A*")) == Sure::Yes),
                    _ => SETTERS.contains(&name),
                };
                self.is_plain &= !fills;
            }
            _ => {}
        }
    }

    fn visit(&mut self, node: Node<'_>, above: &[Node<'_>]) {
        self.compare(node, above);
        if self.calculates && self.is_for_later(node, above) {
            self.doubt(later::WHY);
        }
        match node.kind() {
            "command" => self.command(node, above),
            "declaration_command" | "unset_command" => {
                let words: Vec<&str> = self.of(node).split_whitespace().collect();
                if sets::declares(&words) {
                    self.doubt(sets::WHY);
                }
                let words = words.into_iter().map(Word::known).collect();
                self.found.commands.push(Command { words, ..Command::default() });
            }
            // Wherever it stands, it names a file.
            "file_redirect" => {
                let mut cursor = node.walk();
                let first = node.children_by_field_name("destination", &mut cursor).next();
                let file = first.map_or_else(|| Word::unknown(true), |to| self.word(to, 0));
                if self.of(node).contains('>')
                    && let Some(path) = file.text()
                {
                    self.found.written.insert(base(&normal(path)).to_owned());
                    self.found.written_paths.push(normal(path));
                }
                self.found.commands.push(Command { words: vec![Word::known(":")], files: vec![file], ..Command::default() });
            }
            "variable_assignment" => self.assignment(node, above),
            "for_statement" => {
                let mut cursor = node.walk();
                let values: Vec<Node<'_>> = node.children_by_field_name("value", &mut cursor).collect();
                let name = node.child_by_field_name("variable").map(|name| self.of(name)).unwrap_or_default();
                let words: Vec<Word> = values.iter().flat_map(|value| self.words(*value)).collect();
                if sets::loops(name, &words) {
                    self.doubt(sets::WHY);
                }
                values.into_iter().for_each(|value| self.keep(value));
            }
            "comment" => self.comment(node),
            "word" if self.is_looked_up(node, above) => self.doubt("some shells read a word as the path of a program"),
            "heredoc_redirect" => self.here_document(node),
            "heredoc_body" => self.body(node, above),
            "expansion" => self.expansion(node),
            "regex" | "extglob_pattern" if self.of(node).contains(['$', '`']) => {
                self.doubt("a pattern holds what only the running shell knows")
            }
            // Backticks take one level of escapes away before anybody reads; a `$` before them is none of theirs.
            "command_substitution" if self.of(node).trim_start_matches('$').starts_with('`') && self.of(node).contains('\\') => {
                self.doubt("a substitution holds escapes of its own")
            }
            "raw_string" | "ansi_c_string" if self.of(node).contains("$(") || self.of(node).contains('`') => {
                // Code in quotes that some commands take out of them.
                let evaluated = |node: &Node<'_>| match node.kind() {
                    "variable_assignment"
                    | "test_command"
                    | "declaration_command"
                    | "unset_command"
                    | "subscript"
                    | "arithmetic_expansion" => true,
                    "command" => node.child_by_field_name("name").is_some_and(|name| {
                        let name = self.of(name).trim_matches(['"', '\'', '\\']);
                        let evaluates = ["test", "[", "printf", "read", "let", "unset", "compgen", "wait"].contains(&name);
                        evaluates && !(name == "printf" && self.only_prints(*node))
                    }),
                    _ => false,
                };
                if above.iter().rev().take(4).any(evaluated) {
                    self.doubt(later::WHY);
                }
            }
            _ => {}
        }
    }

    /// Whether `printf` sets no variable, and takes none of its words for a number, which some shells calculate.
    pub(super) fn only_prints(&self, command: Node<'_>) -> bool {
        let mut cursor = command.walk();
        let format = command.children_by_field_name("argument", &mut cursor).next().map(|word| self.word(word, 0));
        let Some(format) = format.as_ref().and_then(Word::text) else { return false };
        let is_width = |c: char| c == '-' || c == '.' || c.is_ascii_digit();
        let is_text = |conversion: &str| conversion.trim_start_matches(is_width).starts_with(['b', 's']);
        !format.starts_with('-') && format.replace("%%", "").split('%').skip(1).all(is_text)
    }

    fn assignment(&mut self, node: Node<'_>, above: &[Node<'_>]) {
        let name = node.child_by_field_name("name").map(|name| self.of(name)).unwrap_or_default();
        let name = name.split('[').next().unwrap_or_default();
        let value = node.child_by_field_name("value").map_or_else(Word::empty, |value| self.word(value, 0));
        if let Some(value) = node.child_by_field_name("value") {
            self.keep(value);
        }
        // `IFS= read` cuts a line otherwise, and nothing else.
        let reads = above.last().is_some_and(|command| {
            command.kind() == "command" && command.child_by_field_name("name").is_some_and(|name| self.of(name) == "read")
        });
        let value = if name == "PATH" {
            node.child_by_field_name("value").map(|value| self.of(value).trim_matches(['"', '\'']))
        } else {
            value.text()
        };
        if is_powerful(name, value) && !(name == "IFS" && reads) {
            self.doubt(format!("`{name}` changes what commands do"));
        }
        // What a program is handed with its variables, it may read or write: `GIT_TRACE=/x git status`.
        let is_handed = above.last().is_some_and(|outer| matches!(outer.kind(), "command" | "declaration_command"));
        if is_handed && let Some(text) = value.filter(|_| name != "PATH") {
            // Where it is a long list, each of its parts is looked at by itself.
            let is_long = (16..256).contains(&text.matches(['=', ':', '@', ',']).count());
            let parts: Vec<&str> = if is_long { text.split([':', ',']).collect() } else { vec![text] };
            let parts = parts.into_iter().map(|part| Word::known(format!("{name}={part}")));
            let words = std::iter::once(Word::known("set")).chain(parts).collect();
            self.found.commands.push(Command { words, ..Command::default() });
        }
    }

    /// Keeps in mind what a variable is set to, as far as there is room for it.
    fn keep(&mut self, value: Node<'_>) {
        const MOST: usize = 512;
        if self.found.kept.len() < MOST {
            let kept = self.kept(value);
            self.found.kept.extend(kept.into_iter().take(MOST));
        }
        if self.found.kept.len() >= MOST {
            self.doubt("its variables hold too many words");
        }
    }

    /// What a variable is set to: as it is written, and as it is read.
    fn kept(&self, value: Node<'_>) -> Vec<String> {
        let mut cursor = value.walk();
        let items: Vec<Node<'_>> = if value.kind() == "array" { value.named_children(&mut cursor).collect() } else { vec![value] };
        let words: Vec<Word> = items.into_iter().flat_map(|item| self.words(item)).collect();
        let texts = words.iter().flat_map(|word| word.texts()).map(str::to_owned);
        std::iter::once(self.of(value).to_owned()).chain(texts).collect()
    }

    /// What is no comment to a shell is none.
    fn comment(&mut self, node: Node<'_>) {
        let byte = |back: usize| node.start_byte().checked_sub(back).and_then(|at| self.text.as_bytes().get(at)).copied();
        let begins = byte(1).is_none_or(|before| b" \t\n;&|(".contains(&before)) && byte(2) != Some(b'\\');
        if !begins {
            self.doubt("a part looks like a comment and is none");
        }
    }

    /// `${…}` with something in it that nobody else reads.
    fn expansion(&mut self, node: Node<'_>) {
        let text = self.of(node);
        let nested = |node: Node<'_>| {
            let mut cursor = node.walk();
            node.children(&mut cursor).any(|child| child.kind() == "command_substitution")
        };
        if text.contains('`') || (text.contains("$(") && !nested(node)) || text.starts_with("${!") || text.contains("@P") {
            self.doubt("an expansion holds what only the running shell knows");
        }
        if sets::defaults(text) {
            self.doubt(sets::WHY);
        }
    }

    fn command(&mut self, node: Node<'_>, above: &[Node<'_>]) {
        // Words may stand behind redirections, and redirections may hold words.
        let mut places = vec![node];
        let outer = above.last().copied().filter(|parent| parent.kind() == "redirected_statement");
        places.extend(outer);
        let mut at = 0;
        while let Some(place) = places.get(at).copied() {
            let mut cursor = place.walk();
            places.extend(
                place
                    .children(&mut cursor)
                    .filter(|child| matches!(child.kind(), "heredoc_redirect" | "file_redirect" | "herestring_redirect")),
            );
            at += 1;
        }
        let mut words: Vec<(usize, Node<'_>)> = Vec::new();
        for place in &places {
            let mut cursor = place.walk();
            match place.kind() {
                "command" => {
                    words.extend(place.child_by_field_name("name").map(|name| (0, name)));
                    words.extend(place.children_by_field_name("argument", &mut cursor).map(|word| (word.start_byte(), word)));
                }
                "heredoc_redirect" => {
                    words.extend(place.children_by_field_name("argument", &mut cursor).map(|word| (word.start_byte(), word)))
                }
                "file_redirect" => {
                    // `>&-` closes, and names no file.
                    let closes = self.of(*place).trim_start_matches(|c: char| c.is_ascii_digit()).get(1..3) == Some("&-");
                    let behind = place.children_by_field_name("destination", &mut cursor).skip(usize::from(!closes));
                    words.extend(behind.map(|word| (word.start_byte(), word)));
                }
                _ => {}
            }
        }
        words.sort_by_key(|(at, _)| *at);
        words.dedup_by_key(|(_, word)| word.id());
        let words: Vec<Word> = words.into_iter().flat_map(|(_, word)| self.words(word)).collect();
        if words.iter().filter_map(Word::text).map(str::len).sum::<usize>() > 2 * LONGEST {
            self.doubt("the command is too long to be read");
            return;
        }
        if sets::fills(&words) {
            self.doubt(sets::WHY);
        }
        let fed = self.fed(&places).or_else(|| piped_into(node, above));
        let command = Command { words, fed, stands: self.stands(node, above), ..Command::default() };
        self.note_what_is_written(&command);
        let inner = inner::look_inside(&command, self.depth);
        self.found.add(inner);
        self.found.commands.push(command);
    }

    /// The text that a command is given.
    pub(super) fn fed(&self, places: &[Node<'_>]) -> Option<Fed> {
        let mut all = Vec::new();
        for place in places {
            match place.kind() {
                "heredoc_redirect" => {
                    let mut cursor = place.walk();
                    let body = place.children(&mut cursor).find(|part| part.kind() == "heredoc_body");
                    let known = body.filter(|body| self.is_quoted(*place) || !self.of(*body).contains(['$', '`', '\\']));
                    all.push(known.map_or(Fed::Unknown, |body| Fed::Text(Word::known(self.of(body)))));
                }
                "herestring_redirect" => all.push(place.named_child(0).map_or(Fed::Unknown, |word| Fed::Text(self.word(word, 0)))),
                "file_redirect" if self.of(*place).trim_start_matches(|c: char| c.is_ascii_digit()).starts_with('<') => {
                    all.push(Fed::Unknown)
                }
                _ => {}
            }
        }
        match all.len() {
            0 => None,
            1 => all.pop(),
            // The last one counts, and which one is the last is for the shell to say.
            _ => Some(Fed::Unknown),
        }
    }
}

/// What a command reads that another writes, or that a group is given in which it stands.
fn piped_into(node: Node<'_>, above: &[Node<'_>]) -> Option<Fed> {
    let mut inner = node;
    for outer in above.iter().rev() {
        if outer.kind() == "pipeline" && outer.named_child(0).is_some_and(|first| first.id() != inner.id()) {
            return Some(Fed::Piped);
        }
        // A group is fed as a whole; of a single command it is known with what.
        let mut cursor = outer.walk();
        let feeds = |child: Node<'_>| matches!(child.kind(), "heredoc_redirect" | "herestring_redirect" | "file_redirect");
        if outer.kind() == "redirected_statement" && inner.kind() != "command" && outer.children(&mut cursor).any(feeds) {
            return Some(Fed::Unknown);
        }
        inner = *outer;
    }
    None
}
