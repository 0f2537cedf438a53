//! Compiles the syntax tree of the `cel` crate to our nodes.
//!
//! Names are resolved, patterns are compiled, and unsupported syntax is an error.

use std::ops::Range;
use std::sync::Arc;

use cel::common::ast::operators as op;
use cel::common::ast::{CallExpr, ComprehensionExpr, Expr, LiteralValue, SelectExpr, SourceInfo};
use cel::parser::{Expression as Tree, Parser};

use super::{Arithmetic, Compare, Each, Function, Kind, MAX_DEPTH, MAX_LENGTH, MAX_OPERATORS, Name, Node, Part};
use crate::policy::{Condition, Problem};
use toolgate_json::Pointer;

/// Stack size of the parser thread, several times what an expression at all limits needs.
const STACK: usize = 64 << 20;

const VARIABLES: [&str; 7] = ["input", "result", "session", "principal", "agent", "tool", "now"];

/// Functions and their number of arguments, including the receiver of a method call.
const FUNCTIONS: [(&str, Function, Range<usize>); 17] = [
    ("decimal", Function::Decimal, 1..2),
    ("duration", Function::Duration, 1..2),
    ("timestamp", Function::Timestamp, 1..2),
    ("glob", Function::Glob, 2..3),
    ("same", Function::IsSame, 2..3),
    ("sum_of", Function::SumOf, 1..2),
    ("size", Function::Size, 1..2),
    ("startsWith", Function::StartsWith, 2..3),
    ("endsWith", Function::EndsWith, 2..3),
    ("contains", Function::Contains, 2..3),
    ("lowerAscii", Function::LowerAscii, 1..2),
    ("getFullYear", Function::Part(Part::Year), 1..3),
    ("getMonth", Function::Part(Part::Month), 1..3),
    ("getDate", Function::Part(Part::Day), 1..3),
    ("getDayOfWeek", Function::Part(Part::Weekday), 1..3),
    ("getHours", Function::Part(Part::Hour), 1..3),
    ("getMinutes", Function::Part(Part::Minute), 1..3),
];

pub(crate) fn compile(source: &str) -> Result<Node, Vec<Problem>> {
    bounds(source).map_err(|problem| vec![problem])?;
    // The parser needs much stack for each level, and the caller may have little.
    std::thread::scope(|scope| {
        let parsing = std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, || parse(source));
        let parsed = parsing.ok().and_then(|thread| thread.join().ok());
        parsed.unwrap_or_else(|| Err(vec![Problem::new("the expression cannot be parsed")]))
    })
}

fn parse(source: &str) -> Result<Node, Vec<Problem>> {
    let parsed = Parser::new().max_recursion_depth(96).parse_with_source_info(source);
    let (tree, info) = parsed.map_err(|errors| errors.errors.iter().map(|e| unparsable(source, e)).take(1).collect::<Vec<_>>())?;
    let mut lowering = Lowering { source, info, locals: Vec::new(), depth: 0 };
    lowering.node(&tree).map_err(|problem| vec![problem])
}

/// Rejects expressions that are too long or too deep, because the parser recurses.
fn bounds(source: &str) -> Result<(), Problem> {
    if source.len() > MAX_LENGTH {
        return Err(Problem::new(format!("the expression has {} bytes, the maximum is {MAX_LENGTH}", source.len()))
            .help("move a part of it to another rule"));
    }
    if source.trim().is_empty() {
        return Err(Problem::new("the expression is empty").help("write a condition, or leave `when` out"));
    }
    let (mut depth, mut signs, mut operators, mut quote) = (0usize, 0usize, 0usize, None);
    let (mut before, mut escaped) = (b' ', false);
    for (at, byte) in source.bytes().enumerate() {
        match (quote, byte) {
            // Quoted text contains no operators.
            (Some(_), _) if escaped => escaped = false,
            (Some(_), b'\\') => escaped = true,
            (Some(open), _) if byte == open => quote = None,
            (Some(_), _) => {}
            (None, b'"' | b'\'') => quote = Some(byte),
            (None, b'(' | b'[' | b'{' | b'?') => depth += 1,
            (None, b')' | b']' | b'}') => depth = depth.saturating_sub(1),
            // Each operator adds at most one level. `&&` and `>=` count once.
            (None, b'.' | b'+' | b'*' | b'/' | b'%' | b'<' | b'>' | b'-' | b'!') => operators += 1,
            (None, b'&' | b'|' | b'=') if before == byte => operators += 1,
            _ => {}
        }
        signs = if quote.is_none() && matches!(byte, b'!' | b'-') { signs + 1 } else { 0 };
        before = byte;
        if depth > MAX_DEPTH || signs > MAX_DEPTH {
            return Err(Problem::new(format!("the expression is nested more than {MAX_DEPTH} deep"))
                .within(at..at + 1)
                .help("move a part of it to another rule"));
        }
        if operators > MAX_OPERATORS {
            return Err(Problem::new(format!("the expression has more than {MAX_OPERATORS} operators"))
                .within(at..at + 1)
                .help("move a part of it to another rule"));
        }
    }
    Ok(())
}

fn unparsable(source: &str, error: &cel::ParseError) -> Problem {
    let (line, column) = (usize::try_from(error.pos.0).unwrap_or(1).max(1), usize::try_from(error.pos.1).unwrap_or(1).max(1));
    let start: usize = source.split_inclusive('\n').take(line - 1).map(str::len).sum();
    let rest = source.get(start..).unwrap_or_default();
    let at = start + rest.char_indices().nth(column.saturating_sub(1)).map_or(rest.len(), |(at, _)| at);
    let at = at.min(source.len().saturating_sub(1));
    let end = source.get(at..).and_then(|rest| rest.chars().next()).map_or(at + 1, |c| at + c.len_utf8());
    // The parser lists the tokens that it expected. The first sentence is enough.
    let said = error.msg.lines().next().unwrap_or_default();
    let said = said.split(" expecting ").next().unwrap_or(said).trim_start_matches("Syntax error: ");
    Problem::new(format!("not valid CEL: {said}")).within(at..end).help("like `input.amount > 500 && input.currency == \"EUR\"`")
}

struct Lowering<'s> {
    source: &'s str,
    info: SourceInfo,
    /// Names of local variables, innermost last.
    locals: Vec<String>,
    depth: usize,
}

impl Lowering<'_> {
    fn node(&mut self, tree: &Tree) -> Result<Node, Problem> {
        self.depth += 1;
        if self.depth > MAX_OPERATORS + 2 * MAX_DEPTH {
            return Err(
                Problem::new(format!("the expression is nested more than {MAX_DEPTH} deep")).help("move a part of it to another rule")
            );
        }
        let kind = self.kind(tree);
        self.depth -= 1;
        let kind = kind?;
        let span = self.span(tree);
        Ok(Node { kind, span })
    }

    /// Returns the byte range of a subexpression.
    fn span(&self, tree: &Tree) -> Range<usize> {
        let (mut start, mut end) = (usize::MAX, 0);
        walk(tree, &mut |id| {
            if let Some((from, to)) = self.info.offset_for(id) {
                start = start.min(byte(self.source, from as usize));
                end = end.max(byte(self.source, to as usize));
            }
        });
        // The parser reports the parenthesis of a call: include the name before it.
        if self.source.as_bytes().get(start) == Some(&b'(') {
            let before = self.source.get(..start).unwrap_or_default();
            start = before.rfind(|c: char| !c.is_alphanumeric() && c != '_').map_or(0, |at| at + 1);
        }
        // The parser reports the start of the last token: include the whole name or literal.
        let rest = self.source.get(end..).unwrap_or_default();
        let word = rest.find(|c: char| !c.is_alphanumeric() && !matches!(c, '_' | '.' | '"' | '\'')).unwrap_or(rest.len());
        let least = rest.chars().next().map_or(1, char::len_utf8);
        if start == usize::MAX { 0..self.source.len() } else { start..(end + word.max(least)).min(self.source.len()) }
    }

    fn at(&self, tree: &Tree, message: impl Into<String>) -> Problem {
        Problem::new(message).within(self.span(tree))
    }

    fn kind(&mut self, tree: &Tree) -> Result<Kind, Problem> {
        Ok(match &tree.expr {
            Expr::Literal(literal) => self.literal(tree, literal)?,
            Expr::Ident(name) => self.name(tree, name)?,
            Expr::Select(select) => self.select(select)?,
            Expr::Call(call) => self.call(tree, call)?,
            Expr::List(list) => Kind::List(list.elements.iter().map(|e| self.node(e)).collect::<Result<_, _>>()?),
            Expr::Comprehension(each) => self.comprehension(each)?,
            Expr::Map(_) | Expr::Struct(_) | Expr::Unspecified => {
                return Err(self.at(tree, "map and message literals are not supported").help("compare field by field"));
            }
        })
    }

    fn literal(&self, tree: &Tree, literal: &LiteralValue) -> Result<Kind, Problem> {
        Ok(match literal {
            LiteralValue::Null => Kind::Null,
            LiteralValue::Boolean(value) => Kind::Bool(*value.inner()),
            LiteralValue::Int(value) => Kind::Number((*value.inner()).into()),
            LiteralValue::UInt(value) => Kind::Number((*value.inner()).into()),
            LiteralValue::String(value) => Kind::Text(value.inner().into()),
            // Read the digits in the source, not the nearest double.
            LiteralValue::Double(value) => {
                // A minus before a literal belongs to the literal, but not to the reported range.
                let written = self.source.get(self.span(tree)).unwrap_or_default();
                let sign = if value.inner().is_sign_negative() && !written.starts_with('-') { "-" } else { "" };
                let exact = toolgate_json::canonical_number(&format!("{sign}{written}"))
                    .ok()
                    .and_then(|number| toolgate_json::decimal_of(&serde_json::Value::Number(number)))
                    .filter(|exact| exact.to_string().parse() == Ok(*value.inner()));
                // Reject a literal whose double differs from the written number.
                Kind::Number(exact.ok_or_else(|| self.at(tree, "this number cannot be represented exactly").help("use fewer digits"))?)
            }
            LiteralValue::Bytes(_) => return Err(self.at(tree, "byte literals are not supported")),
        })
    }

    fn name(&self, tree: &Tree, name: &str) -> Result<Kind, Problem> {
        if let Some(slot) = self.locals.iter().rposition(|local| local == name) {
            return Ok(Kind::Local(slot));
        }
        Ok(match name {
            "input" => Kind::Input(Pointer::default()),
            "result" => Kind::Result(Pointer::default()),
            "session" => Kind::Variable(Name::Session),
            "principal" => Kind::Variable(Name::Principal),
            "agent" => Kind::Variable(Name::Agent),
            "tool" => Kind::Variable(Name::Tool),
            "now" => Kind::Variable(Name::Now),
            _ => {
                let problem = self.at(tree, format!("unknown variable `{}`", toolgate_text::shown(name)));
                let guess = VARIABLES.into_iter().find(|known| toolgate_text::suggest::is_nearly(known, name));
                let arguments = format!("write an argument as `input.{}`", toolgate_text::shown(name));
                let help = match guess {
                    Some(guess) => format!("did you mean `{guess}`? If not, {arguments}"),
                    None => format!("{arguments}; the variables are {}", VARIABLES.map(|v| format!("`{v}`")).join(", ")),
                };
                return Err(problem.help(help));
            }
        })
    }

    fn select(&mut self, select: &SelectExpr) -> Result<Kind, Problem> {
        let operand = self.node(&select.operand)?;
        let span = operand.span.clone();
        let inner = step(operand, &select.field);
        Ok(if select.test { Kind::Has(Box::new(Node { kind: inner, span })) } else { inner })
    }

    fn pair(&mut self, call: &CallExpr) -> Result<Box<[Node; 2]>, Problem> {
        match call.args.as_slice() {
            [a, b] => Ok(Box::new([self.node(a)?, self.node(b)?])),
            _ => Err(Problem::new("an operator has too few operands")),
        }
    }

    fn call(&mut self, tree: &Tree, call: &CallExpr) -> Result<Kind, Problem> {
        let compare = |c: Compare| move |pair| Kind::Compare(c, pair);
        let arithmetic = |a: Arithmetic| move |pair| Kind::Arithmetic(a, pair);
        match (call.func_name.as_str(), call.args.as_slice()) {
            (op::LOGICAL_AND, _) => Ok(Kind::And(self.operands(tree, op::LOGICAL_AND)?)),
            (op::LOGICAL_OR, _) => Ok(Kind::Or(self.operands(tree, op::LOGICAL_OR)?)),
            (op::LOGICAL_NOT, [a]) => Ok(Kind::Not(Box::new(self.node(a)?))),
            // Generated by `all`. A fault in the condition occurs again in the step, so no special
            // treatment is needed.
            (op::NOT_STRICTLY_FALSE, [a]) => Ok(self.node(a)?.kind),
            (op::NEGATE, [a]) => Ok(Kind::Negate(Box::new(self.node(a)?))),
            (op::CONDITIONAL, [c, a, b]) => Ok(Kind::If(Box::new([self.node(c)?, self.node(a)?, self.node(b)?]))),
            (op::EQUALS, _) => self.pair(call).map(compare(Compare::Equal)),
            (op::NOT_EQUALS, _) => self.pair(call).map(compare(Compare::NotEqual)),
            (op::LESS, _) => self.pair(call).map(compare(Compare::Less)),
            (op::LESS_EQUALS, _) => self.pair(call).map(compare(Compare::LessOrEqual)),
            (op::GREATER, _) => self.pair(call).map(compare(Compare::Greater)),
            (op::GREATER_EQUALS, _) => self.pair(call).map(compare(Compare::GreaterOrEqual)),
            (op::ADD, _) => self.pair(call).map(arithmetic(Arithmetic::Add)),
            (op::SUBSTRACT, _) => self.pair(call).map(arithmetic(Arithmetic::Subtract)),
            (op::MULTIPLY, _) => self.pair(call).map(arithmetic(Arithmetic::Multiply)),
            (op::DIVIDE, _) => self.pair(call).map(arithmetic(Arithmetic::Divide)),
            (op::MODULO, _) => self.pair(call).map(arithmetic(Arithmetic::Remainder)),
            (op::IN, _) => self.pair(call).map(Kind::In),
            (op::INDEX, [a, b]) => {
                let (a, b) = (self.node(a)?, self.node(b)?);
                Ok(match &b.kind {
                    Kind::Text(name) => step(a, name),
                    _ => Kind::Index(Box::new(a), Box::new(b)),
                })
            }
            (name, _) => self.function(tree, name, call),
        }
    }

    /// Collects the operands of `a && b && c` into one node, however the parser has nested them.
    fn operands(&mut self, tree: &Tree, operator: &str) -> Result<Vec<Node>, Problem> {
        match &tree.expr {
            Expr::Call(call) if call.func_name == operator => {
                let mut all = Vec::new();
                for arg in &call.args {
                    all.append(&mut self.operands(arg, operator)?);
                }
                Ok(all)
            }
            _ => Ok(vec![self.node(tree)?]),
        }
    }

    fn function(&mut self, tree: &Tree, name: &str, call: &CallExpr) -> Result<Kind, Problem> {
        let given: Vec<&Tree> = call.target.as_deref().into_iter().chain(&call.args).collect();
        match (name, given.as_slice()) {
            ("matches", [text, pattern]) => {
                let Kind::Text(source) = self.node(pattern)?.kind else {
                    return Err(self
                        .at(pattern, "a pattern must be a literal")
                        .help("the model could choose a pattern that comes from an argument"));
                };
                let compiled = Condition::matches(&source).map_err(|e| {
                    let why = e.to_string();
                    let why = why.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned();
                    self.at(pattern, format!("`{}` is not a valid regular expression: {why}", toolgate_text::shown(&source)))
                        .help("use the syntax of the Rust `regex` crate")
                })?;
                let Condition::Matches(regex) = compiled else { return Err(self.at(pattern, "the pattern is not valid")) };
                Ok(Kind::Matches(Box::new(self.node(text)?), regex))
            }
            ("came_from", [value, source]) => {
                let (value_node, source_node) = (self.node(value)?, self.node(source)?);
                let Kind::Input(path) = value_node.kind else {
                    return Err(self.at(value, "only arguments have a provenance").help("write `came_from(input.name, \"tool\")`"));
                };
                let Kind::Text(of) = source_node.kind else {
                    return Err(self.at(source, "the source must be a literal").help("use the name of a tool, \"user\" or \"untrusted\""));
                };
                Ok(Kind::CameFrom(path, of))
            }
            ("matches" | "came_from", _) => Err(self.at(tree, format!("`{name}` takes 2 arguments"))),
            _ => {
                let known = FUNCTIONS.iter().find(|(known, ..)| *known == name);
                let Some((_, function, counts)) = known else {
                    let names = FUNCTIONS.iter().map(|(name, ..)| *name).chain(["matches", "came_from"]);
                    return Err(self.at(tree, format!("unknown function `{}`", toolgate_text::shown(name))).did_you_mean(name, names));
                };
                if !counts.contains(&given.len()) {
                    return Err(self.at(tree, format!("`{name}` takes {} argument(s), but got {}", counts.start, given.len())));
                }
                let nodes = given.iter().map(|tree| self.node(tree)).collect::<Result<Vec<_>, _>>()?;
                if let (Function::Glob, Some(pattern), false) =
                    (function, given.get(1), matches!(nodes.get(1), Some(Node { kind: Kind::Text(_), .. })))
                {
                    return Err(self
                        .at(pattern, "a pattern must be a literal")
                        .help("`glob(text, \"pattern\")`; the model could choose a pattern that comes from an argument"));
                }
                if let (Function::SumOf, [Node { kind: Kind::Text(limit), .. }]) = (function, nodes.as_slice()) {
                    return Ok(Kind::LimitUsage(Arc::clone(limit)));
                }
                Ok(Kind::Call(*function, nodes))
            }
        }
    }

    fn comprehension(&mut self, each: &ComprehensionExpr) -> Result<Kind, Problem> {
        if each.iter_var2.is_some() {
            return Err(self.at(&each.iter_range, "macros with two variables are not supported").help("use one variable"));
        }
        let range = self.node(&each.iter_range)?;
        let init = self.node(&each.accu_init)?;
        self.locals.push(each.accu_var.clone());
        self.locals.push(each.iter_var.clone());
        let inner = (|| Ok((self.node(&each.loop_cond)?, self.node(&each.loop_step)?)))();
        self.locals.pop();
        let result = self.node(&each.result);
        self.locals.pop();
        let (condition, step) = inner?;
        Ok(Kind::Comprehension(Box::new(Each { range, init, condition, step, result: result? })))
    }
}

/// Compiles `a.name`, where `a` may be the arguments themselves.
fn step(operand: Node, name: &str) -> Kind {
    let deeper = |path: &Pointer| {
        let mut path = path.clone();
        path.push(name.to_owned());
        path
    };
    match &operand.kind {
        // In a path, `*` would mean every item.
        _ if name == "*" => Kind::Field(Box::new(operand), name.to_owned()),
        Kind::Input(path) => Kind::Input(deeper(path)),
        Kind::Result(path) => Kind::Result(deeper(path)),
        _ => Kind::Field(Box::new(operand), name.to_owned()),
    }
}

/// Returns the start of the character at a byte offset.
///
/// The parser counts bytes and reports the last byte of a token.
fn byte(source: &str, at: usize) -> usize {
    let at = at.min(source.len());
    (0..=at).rev().find(|at| source.is_char_boundary(*at)).unwrap_or(0)
}

fn walk(tree: &Tree, f: &mut dyn FnMut(u64)) {
    f(tree.id);
    match &tree.expr {
        Expr::Call(call) => call.target.as_deref().into_iter().chain(&call.args).for_each(|t| walk(t, f)),
        Expr::Select(select) => walk(&select.operand, f),
        Expr::List(list) => list.elements.iter().for_each(|t| walk(t, f)),
        Expr::Comprehension(each) => walk(&each.iter_range, f),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_bytes_whatever_stands_before() {
        for source in ["foo > 1", "input.a == \"ä\" && foo > 1", "input.a == \"\u{1f600}ß\" || size(\"ä\") > 2 || foo"] {
            let problems = compile(source).unwrap_err();
            let within = problems[0].within.clone().unwrap();
            assert_eq!(source.get(within), Some("foo"), "{source}: {problems:?}");
        }
    }

    #[test]
    fn literals_are_exact_or_refused() {
        let number = |literal: &str| {
            let root = compile(&format!("\"ä\" == input.a || input.n > {literal}")).map_err(|problems| problems[0].message.clone())?;
            let mut found = None;
            root.each(&mut |node| {
                if let Kind::Number(number) = &node.kind {
                    found = Some(number.to_string());
                }
            });
            found.ok_or_else(String::new)
        };
        for literal in ["9007199254740993.0", "0.1", "1.5e2", "1.5E-3", "12345678901234567890.12345678"] {
            let exact = toolgate_json::decimal_of(&serde_json::Value::Number(toolgate_json::canonical_number(literal).unwrap()));
            assert_eq!(number(literal), Ok(exact.unwrap().to_string()), "{literal}");
        }
        for literal in ["0.1234567890123456789012345678901", "1e30", "1e-40"] {
            assert_eq!(number(literal), Err("this number cannot be represented exactly".to_owned()), "{literal}");
        }
    }
}
