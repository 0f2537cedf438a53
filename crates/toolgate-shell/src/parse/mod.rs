//! Parses the text of a command into programs and words.

pub(crate) mod deferred_expansion;
pub(crate) mod grammar_mismatch;
pub(crate) mod heredoc;
mod stdin;
mod variables;

use std::collections::HashMap;

use tree_sitter::{Node, Parser, Tree};

use super::word::ShellWord;
use super::{ShellAnalysis, ShellCommand, base_name, normalize_path};
use crate::env_vars;
use crate::nested_command;
use crate::nesting_budget::NestingBudget;
use crate::parse::stdin::piped_stdin;

/// Maximum length of a command in bytes.
const MAX_COMMAND_BYTES: usize = 32 << 10;
/// Maximum number of syntax nodes of a command.
const MAX_SYNTAX_NODES: usize = 6_000;
/// Maximum nesting depth of the syntax tree.
const MAX_SYNTAX_DEPTH: usize = 120;

/// Analyzes a command that is nested in others at this depth.
pub(crate) fn analyze_text(text: &str, depth: NestingBudget<'_>) -> ShellAnalysis {
    if depth.is_too_deep() {
        return ShellAnalysis::opaque("commands are nested too deeply");
    }
    if text.len() > MAX_COMMAND_BYTES {
        return ShellAnalysis::opaque("the command is too long to analyze");
    }
    // Shells treat these characters as letters, while people and other programs see white space.
    let is_ambiguous = |c: char| {
        (c.is_whitespace() && !matches!(c, ' ' | '\t' | '\n'))
            || (c.is_control() && !matches!(c, '\t' | '\n'))
    };
    let mut found = ShellAnalysis::default();
    if text.contains(is_ambiguous) {
        found
            .opaque_reasons
            .push("it contains a character that shells and people read differently".to_owned());
    }
    found.merge(parse_and_analyze(text, depth));
    // Outside of comments, a shell removes a backslash with the line break after it.
    if text.contains("\\\n") {
        found.merge(parse_and_analyze(&text.replace("\\\n", ""), depth));
    }
    found
}

fn parse_and_analyze(text: &str, depth: NestingBudget<'_>) -> ShellAnalysis {
    let unparsed = || ShellAnalysis::opaque("the command cannot be parsed");
    if !depth.try_spend(text.len()) {
        return ShellAnalysis::opaque("it contains too many commands");
    }
    let mut parser = Parser::new();
    if parser.set_language(&tree_sitter_bash::LANGUAGE.into()).is_err() {
        return unparsed();
    }
    let Some(tree) = parser.parse(text, None) else { return unparsed() };
    if tree.root_node().descendant_count() > MAX_SYNTAX_NODES {
        return ShellAnalysis::opaque("the command is too large to analyze");
    }
    // An argument of another shell may contain arithmetic as well.
    let calculates = text.contains("((") || text.contains("$[");
    let (variables, first_set) = (HashMap::new(), HashMap::new());
    let mut reader = SyntaxAnalyzer {
        text,
        variables,
        first_assignments: first_set,
        has_plain_assignments: true,
        has_arithmetic: calculates,
        reads_variables: false,
        has_open_brackets: false,
        analysis: ShellAnalysis::default(),
        depth,
    };
    // A shell removes quotes again where it evaluates arithmetic or a comparison.
    let calculates = [
        "((",
        "-eq",
        "-ne",
        "-lt",
        "-gt",
        "-le",
        "-ge",
        " -v ",
        "let ",
        "declare -i",
        "typeset -i",
    ]
    .iter()
    .any(|sign| text.contains(sign));
    let has_hidden_substitution = text.contains("\\$(")
        || text.contains("\\`")
        || text.contains("[$(")
        || text.contains("[`");
    if calculates && has_hidden_substitution {
        reader.add_doubt(deferred_expansion::SECOND_EVALUATION_REASON);
    }
    if tree.root_node().has_error() {
        reader.analysis.opaque_reasons.push("the command cannot be parsed".to_owned());
    }
    if grammar_mismatch::has_mixed_line_continuations(text, &tree) {
        reader.add_doubt(
            "a backslash joins lines within a word, and another one does not join lines",
        );
    }
    if !visit_tree(&tree, |node, above| reader.record_variables(node, above)) {
        return ShellAnalysis::opaque("the command is nested too deeply to analyze");
    }
    visit_tree(&tree, |node, above| reader.visit_node(node, above));
    reader.check_executed_files();
    reader.analysis
}

/// Visits all nodes of a tree with their ancestors, and returns false if the tree is too deep.
pub(crate) fn visit_tree<'t>(tree: &'t Tree, mut visit: impl FnMut(Node<'t>, &[Node<'t>])) -> bool {
    let mut cursor = tree.walk();
    let mut above: Vec<Node<'t>> = Vec::new();
    loop {
        visit(cursor.node(), &above);
        let node = cursor.node();
        if cursor.goto_first_child() {
            above.push(node);
            if above.len() > MAX_SYNTAX_DEPTH {
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

pub(crate) struct SyntaxAnalyzer<'r> {
    pub(crate) text: &'r str,
    /// The values of the variables that this text sets.
    pub(crate) variables: HashMap<String, Vec<ShellWord>>,
    /// Whether variables are only set by plain assignments and every name has its usual meaning.
    pub(crate) has_plain_assignments: bool,
    /// Whether the text evaluates arithmetic or takes the name of a variable from a text.
    pub(crate) has_arithmetic: bool,
    /// Whether texts become variables by other means than an assignment.
    pub(crate) reads_variables: bool,
    /// Whether a text leaves a bracket open, so that other texts may be inside of it.
    pub(crate) has_open_brackets: bool,
    /// The position at which each variable is first set.
    pub(crate) first_assignments: HashMap<String, usize>,
    pub(crate) analysis: ShellAnalysis,
    pub(crate) depth: NestingBudget<'r>,
}

/// Variables that the shell sets itself.
pub(crate) const SHELL_MANAGED_VARIABLES: &[&str] = &[
    "FUNCNAME",
    "PIPESTATUS",
    "RANDOM",
    "SRANDOM",
    "REPLY",
    "DIRSTACK",
    "GROUPS",
    "OPTARG",
    "OPTIND",
    "LINENO",
    "SECONDS",
    "OLDPWD",
    "_",
];

impl<'r> SyntaxAnalyzer<'r> {
    pub(crate) fn text_of(&self, node: Node<'_>) -> &'r str {
        let text = self.text.get(node.byte_range()).unwrap_or_default();
        // In a text of several lines, the grammar includes the spaces before such a node.
        let is_spaced = matches!(
            node.kind(),
            "arithmetic_expansion" | "command_substitution" | "expansion" | "simple_expansion"
        );
        if is_spaced { text.trim_start() } else { text }
    }

    pub(crate) fn add_doubt(&mut self, reason: impl Into<String>) {
        self.analysis.opaque_reasons.push(reason.into());
    }

    fn visit_node(&mut self, node: Node<'_>, above: &[Node<'_>]) {
        self.check_node(node, above);
        if self.has_arithmetic && self.has_deferred_substitution(node, above) {
            self.add_doubt(deferred_expansion::SECOND_EVALUATION_REASON);
        }
        match node.kind() {
            "command" => self.visit_command(node, above),
            "declaration_command" | "unset_command" => {
                let words: Vec<&str> = self.text_of(node).split_whitespace().collect();
                if env_vars::is_behaviour_declaration(&words) {
                    self.add_doubt(env_vars::VARIABLE_CHANGE_REASON);
                }
                let words = words.into_iter().map(ShellWord::known).collect();
                self.analysis.commands.push(ShellCommand { words, ..ShellCommand::default() });
            }
            // A redirection names a file at every position.
            "file_redirect" => {
                let mut cursor = node.walk();
                let first = node.children_by_field_name("destination", &mut cursor).next();
                let file =
                    first.map_or_else(|| ShellWord::unknown(true), |to| self.node_word(to, 0));
                if self.text_of(node).contains('>')
                    && let Some(path) = file.text()
                {
                    self.analysis.written_names.insert(base_name(&normalize_path(path)).to_owned());
                    self.analysis.written_paths.push(normalize_path(path));
                }
                self.analysis.commands.push(ShellCommand {
                    words: vec![ShellWord::known(":")],
                    redirect_files: vec![file],
                    ..ShellCommand::default()
                });
            }
            "variable_assignment" => self.visit_assignment(node, above),
            "for_statement" => {
                let mut cursor = node.walk();
                let values: Vec<Node<'_>> =
                    node.children_by_field_name("value", &mut cursor).collect();
                let name = node
                    .child_by_field_name("variable")
                    .map(|name| self.text_of(name))
                    .unwrap_or_default();
                let words: Vec<ShellWord> =
                    values.iter().flat_map(|value| self.node_words(*value)).collect();
                if env_vars::is_behaviour_loop(name, &words) {
                    self.add_doubt(env_vars::VARIABLE_CHANGE_REASON);
                }
                values.into_iter().for_each(|value| self.record_value(value));
            }
            "comment" => self.check_comment(node),
            "word" if self.is_equals_expansion(node, above) => self.add_doubt(
                "a word starts with `=`, which some shells expand to the path of a program",
            ),
            "heredoc_redirect" => self.check_here_document(node),
            "heredoc_body" => self.check_here_document_body(node, above),
            "expansion" => self.check_expansion(node),
            "regex" | "extglob_pattern" if self.text_of(node).contains(['$', '`']) => {
                self.add_doubt("a pattern contains an expansion that only the running shell knows")
            }
            // Backticks remove one level of escapes before anything is parsed. A `$` before them is
            // separate.
            "command_substitution"
                if self.text_of(node).trim_start_matches('$').starts_with('`')
                    && self.text_of(node).contains('\\') =>
            {
                self.add_doubt("a command substitution contains escapes")
            }
            "raw_string" | "ansi_c_string"
                if self.text_of(node).contains("$(") || self.text_of(node).contains('`') =>
            {
                // Some commands evaluate code that is quoted.
                let evaluated = |node: &Node<'_>| match node.kind() {
                    "variable_assignment"
                    | "test_command"
                    | "declaration_command"
                    | "unset_command"
                    | "subscript"
                    | "arithmetic_expansion" => true,
                    "command" => node.child_by_field_name("name").is_some_and(|name| {
                        let name = self.text_of(name).trim_matches(['"', '\'', '\\']);
                        let evaluates =
                            ["test", "[", "printf", "read", "let", "unset", "compgen", "wait"]
                                .contains(&name);
                        evaluates && !(name == "printf" && self.is_plain_printf(*node))
                    }),
                    _ => false,
                };
                if above.iter().rev().take(4).any(evaluated) {
                    self.add_doubt(deferred_expansion::SECOND_EVALUATION_REASON);
                }
            }
            _ => {}
        }
    }

    /// Returns whether `printf` sets no variable and formats no number, which some shells evaluate.
    pub(crate) fn is_plain_printf(&self, command: Node<'_>) -> bool {
        let mut cursor = command.walk();
        let format = command
            .children_by_field_name("argument", &mut cursor)
            .next()
            .map(|word| self.node_word(word, 0));
        let Some(format) = format.as_ref().and_then(ShellWord::text) else { return false };
        let is_width = |c: char| c == '-' || c == '.' || c.is_ascii_digit();
        let is_text =
            |conversion: &str| conversion.trim_start_matches(is_width).starts_with(['b', 's']);
        !format.starts_with('-') && format.replace("%%", "").split('%').skip(1).all(is_text)
    }

    /// Doubts a comment of the grammar that a shell does not treat as a comment.
    fn check_comment(&mut self, node: Node<'_>) {
        let byte = |back: usize| {
            node.start_byte().checked_sub(back).and_then(|at| self.text.as_bytes().get(at)).copied()
        };
        let is_comment =
            byte(1).is_none_or(|before| b" \t\n;&|(".contains(&before)) && byte(2) != Some(b'\\');
        if !is_comment {
            self.add_doubt("a part looks like a comment but is not one");
        }
    }

    /// Doubts `${…}` with contents that the grammar does not parse.
    fn check_expansion(&mut self, node: Node<'_>) {
        let text = self.text_of(node);
        let nested = |node: Node<'_>| {
            let mut cursor = node.walk();
            node.children(&mut cursor).any(|child| child.kind() == "command_substitution")
        };
        if text.contains('`')
            || (text.contains("$(") && !nested(node))
            || text.starts_with("${!")
            || text.contains("@P")
        {
            self.add_doubt("an expansion contains code that only the running shell knows");
        }
        if env_vars::is_behaviour_default(text) {
            self.add_doubt(env_vars::VARIABLE_CHANGE_REASON);
        }
    }

    fn visit_command(&mut self, node: Node<'_>, above: &[Node<'_>]) {
        // Words may follow redirections, and redirections may contain words.
        let mut places = vec![node];
        let outer = above.last().copied().filter(|parent| parent.kind() == "redirected_statement");
        places.extend(outer);
        let mut at = 0;
        while let Some(place) = places.get(at).copied() {
            let mut cursor = place.walk();
            places.extend(place.children(&mut cursor).filter(|child| {
                matches!(child.kind(), "heredoc_redirect" | "file_redirect" | "herestring_redirect")
            }));
            at += 1;
        }
        let mut words: Vec<(usize, Node<'_>)> = Vec::new();
        for place in &places {
            let mut cursor = place.walk();
            match place.kind() {
                "command" => {
                    words.extend(place.child_by_field_name("name").map(|name| (0, name)));
                    words.extend(
                        place
                            .children_by_field_name("argument", &mut cursor)
                            .map(|word| (word.start_byte(), word)),
                    );
                }
                "heredoc_redirect" => words.extend(
                    place
                        .children_by_field_name("argument", &mut cursor)
                        .map(|word| (word.start_byte(), word)),
                ),
                "file_redirect" => {
                    // `>&-` closes a descriptor and names no file.
                    let closes = self
                        .text_of(*place)
                        .trim_start_matches(|c: char| c.is_ascii_digit())
                        .get(1..3)
                        == Some("&-");
                    let targets = place
                        .children_by_field_name("destination", &mut cursor)
                        .skip(usize::from(!closes));
                    words.extend(targets.map(|word| (word.start_byte(), word)));
                }
                _ => {}
            }
        }
        words.sort_by_key(|(at, _)| *at);
        words.dedup_by_key(|(_, word)| word.id());
        let words: Vec<ShellWord> =
            words.into_iter().flat_map(|(_, word)| self.node_words(word)).collect();
        if words.iter().filter_map(ShellWord::text).map(str::len).sum::<usize>()
            > 2 * MAX_COMMAND_BYTES
        {
            self.add_doubt("the command is too long to analyze");
            return;
        }
        if env_vars::is_behaviour_input(&words) {
            self.add_doubt(env_vars::VARIABLE_CHANGE_REASON);
        }
        let stdin = self.redirected_stdin(&places).or_else(|| piped_stdin(node, above));
        let command = ShellCommand {
            words,
            stdin,
            working_directory: self.required_directory(node, above),
            ..ShellCommand::default()
        };
        self.record_written_files(&command);
        let inner = nested_command::analyze_nested(&command, self.depth);
        self.analysis.merge(inner);
        self.analysis.commands.push(command);
    }
}
