//! Compiles the syntax tree of the `cel` crate to our nodes.
//!
//! Names are resolved, patterns are compiled, and unsupported syntax is an error.

use std::ops::Range;

use cel::common::ast::operators as op;
use cel::common::ast::{CallExpr, ComprehensionExpr, Expr, LiteralValue, SelectExpr, SourceInfo};
use cel::parser::{Expression as Tree, Parser};

use super::{
    ArithmeticOp, CelComprehension, CelNode, CelNodeKind, CelVariable, CompareOp,
    MAX_EXPRESSION_BYTES, MAX_EXPRESSION_DEPTH, MAX_OPERATORS,
};
use crate::policy::Diagnostic;
use toolgate_json::Pointer;

/// Stack size of the parser thread, several times what an expression at all limits needs.
const PARSER_STACK_BYTES: usize = 64 << 20;

const VARIABLE_NAMES: [&str; 7] =
    ["input", "result", "session", "principal", "agent", "tool", "now"];

pub(crate) fn compile(source: &str) -> Result<CelNode, Vec<Diagnostic>> {
    check_source_bounds(source).map_err(|problem| vec![problem])?;
    // The parser needs much stack for each level, and the caller may have little.
    std::thread::scope(|scope| {
        let parsing = std::thread::Builder::new()
            .stack_size(PARSER_STACK_BYTES)
            .spawn_scoped(scope, || parse(source));
        let parsed = parsing.ok().and_then(|thread| thread.join().ok());
        parsed.unwrap_or_else(|| Err(vec![Diagnostic::new("the expression cannot be parsed")]))
    })
}

fn parse(source: &str) -> Result<CelNode, Vec<Diagnostic>> {
    let parsed = Parser::new().max_recursion_depth(96).parse_with_source_info(source);
    let (tree, info) = parsed.map_err(|errors| {
        errors.errors.iter().map(|e| syntax_problem(source, e)).take(1).collect::<Vec<_>>()
    })?;
    let mut lowering = CelLowering { source, info, locals: Vec::new(), depth: 0 };
    lowering.lower_node(&tree).map_err(|problem| vec![problem])
}

/// Rejects expressions that are too long or too deep, because the parser recurses.
fn check_source_bounds(source: &str) -> Result<(), Diagnostic> {
    if source.len() > MAX_EXPRESSION_BYTES {
        return Err(Diagnostic::new(format!(
            "the expression has {} bytes, the maximum is {MAX_EXPRESSION_BYTES}",
            source.len()
        ))
        .with_help("move a part of it to another rule"));
    }
    if source.trim().is_empty() {
        return Err(Diagnostic::new("the expression is empty")
            .with_help("write a condition, or leave `when` out"));
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
        if depth > MAX_EXPRESSION_DEPTH || signs > MAX_EXPRESSION_DEPTH {
            return Err(Diagnostic::new(format!(
                "the expression is nested more than {MAX_EXPRESSION_DEPTH} deep"
            ))
            .with_range(at..at + 1)
            .with_help("move a part of it to another rule"));
        }
        if operators > MAX_OPERATORS {
            return Err(Diagnostic::new(format!(
                "the expression has more than {MAX_OPERATORS} operators"
            ))
            .with_range(at..at + 1)
            .with_help("move a part of it to another rule"));
        }
    }
    Ok(())
}

fn syntax_problem(source: &str, error: &cel::ParseError) -> Diagnostic {
    let (line, column) = (
        usize::try_from(error.pos.0).unwrap_or(1).max(1),
        usize::try_from(error.pos.1).unwrap_or(1).max(1),
    );
    let start: usize = source.split_inclusive('\n').take(line - 1).map(str::len).sum();
    let rest = source.get(start..).unwrap_or_default();
    let at =
        start + rest.char_indices().nth(column.saturating_sub(1)).map_or(rest.len(), |(at, _)| at);
    let at = at.min(source.len().saturating_sub(1));
    let end =
        source.get(at..).and_then(|rest| rest.chars().next()).map_or(at + 1, |c| at + c.len_utf8());
    // The parser lists the tokens that it expected. The first sentence is enough.
    let message = error.msg.lines().next().unwrap_or_default();
    let message =
        message.split(" expecting ").next().unwrap_or(message).trim_start_matches("Syntax error: ");
    Diagnostic::new(format!("not valid CEL: {message}"))
        .with_range(at..end)
        .with_help("like `input.amount > 500 && input.currency == \"EUR\"`")
}

pub(super) struct CelLowering<'s> {
    pub(super) source: &'s str,
    info: SourceInfo,
    /// Names of local variables, innermost last.
    locals: Vec<String>,
    depth: usize,
}

impl CelLowering<'_> {
    pub(super) fn lower_node(&mut self, tree: &Tree) -> Result<CelNode, Diagnostic> {
        self.depth += 1;
        if self.depth > MAX_OPERATORS + 2 * MAX_EXPRESSION_DEPTH {
            return Err(Diagnostic::new(format!(
                "the expression is nested more than {MAX_EXPRESSION_DEPTH} deep"
            ))
            .with_help("move a part of it to another rule"));
        }
        let kind = self.lower_kind(tree);
        self.depth -= 1;
        let kind = kind?;
        let span = self.span(tree);
        Ok(CelNode { kind, span })
    }

    /// Returns the byte range of a subexpression.
    fn span(&self, tree: &Tree) -> Range<usize> {
        let (mut start, mut end) = (usize::MAX, 0);
        visit_node_ids(tree, &mut |id| {
            if let Some((from, to)) = self.info.offset_for(id) {
                start = start.min(char_start(self.source, from as usize));
                end = end.max(char_start(self.source, to as usize));
            }
        });
        // The parser reports the parenthesis of a call: include the name before it.
        if self.source.as_bytes().get(start) == Some(&b'(') {
            let before = self.source.get(..start).unwrap_or_default();
            start = before.rfind(|c: char| !c.is_alphanumeric() && c != '_').map_or(0, |at| at + 1);
        }
        // The parser reports the start of the last token: include the whole name or literal.
        let rest = self.source.get(end..).unwrap_or_default();
        let word = rest
            .find(|c: char| !c.is_alphanumeric() && !matches!(c, '_' | '.' | '"' | '\''))
            .unwrap_or(rest.len());
        let least = rest.chars().next().map_or(1, char::len_utf8);
        if start == usize::MAX {
            0..self.source.len()
        } else {
            start..(end + word.max(least)).min(self.source.len())
        }
    }

    pub(super) fn problem_at(&self, tree: &Tree, message: impl Into<String>) -> Diagnostic {
        Diagnostic::new(message).with_range(self.span(tree))
    }

    fn lower_kind(&mut self, tree: &Tree) -> Result<CelNodeKind, Diagnostic> {
        Ok(match &tree.expr {
            Expr::Literal(literal) => self.lower_literal(tree, literal)?,
            Expr::Ident(name) => self.lower_name(tree, name)?,
            Expr::Select(select) => self.lower_select(select)?,
            Expr::Call(call) => self.lower_call(tree, call)?,
            Expr::List(list) => CelNodeKind::List(
                list.elements.iter().map(|e| self.lower_node(e)).collect::<Result<_, _>>()?,
            ),
            Expr::Comprehension(comprehension) => self.lower_comprehension(comprehension)?,
            Expr::Map(_) | Expr::Struct(_) | Expr::Unspecified => {
                return Err(self
                    .problem_at(tree, "map and message literals are not supported")
                    .with_help("compare field by field"));
            }
        })
    }

    fn lower_literal(
        &self,
        tree: &Tree,
        literal: &LiteralValue,
    ) -> Result<CelNodeKind, Diagnostic> {
        Ok(match literal {
            LiteralValue::Null => CelNodeKind::Null,
            LiteralValue::Boolean(value) => CelNodeKind::Bool(*value.inner()),
            LiteralValue::Int(value) => CelNodeKind::Number((*value.inner()).into()),
            LiteralValue::UInt(value) => CelNodeKind::Number((*value.inner()).into()),
            LiteralValue::String(value) => CelNodeKind::Text(value.inner().into()),
            // Read the digits in the source, not the nearest double.
            LiteralValue::Double(value) => {
                // A minus before a literal belongs to the literal, but not to the reported range.
                let written = self.source.get(self.span(tree)).unwrap_or_default();
                let sign = if value.inner().is_sign_negative() && !written.starts_with('-') {
                    "-"
                } else {
                    ""
                };
                let exact = toolgate_json::canonical_number(&format!("{sign}{written}"))
                    .ok()
                    .and_then(|number| {
                        toolgate_json::decimal_of(&serde_json::Value::Number(number))
                    })
                    .filter(|exact| exact.to_string().parse() == Ok(*value.inner()));
                // Reject a literal whose double differs from the written number.
                CelNodeKind::Number(exact.ok_or_else(|| {
                    self.problem_at(tree, "this number cannot be represented exactly")
                        .with_help("use fewer digits")
                })?)
            }
            LiteralValue::Bytes(_) => {
                return Err(self.problem_at(tree, "byte literals are not supported"));
            }
        })
    }

    fn lower_name(&self, tree: &Tree, name: &str) -> Result<CelNodeKind, Diagnostic> {
        if let Some(slot) = self.locals.iter().rposition(|local| local == name) {
            return Ok(CelNodeKind::Local(slot));
        }
        Ok(match name {
            "input" => CelNodeKind::Input(Pointer::default()),
            "result" => CelNodeKind::Result(Pointer::default()),
            "session" => CelNodeKind::Variable(CelVariable::Session),
            "principal" => CelNodeKind::Variable(CelVariable::Principal),
            "agent" => CelNodeKind::Variable(CelVariable::Agent),
            "tool" => CelNodeKind::Variable(CelVariable::Tool),
            "now" => CelNodeKind::Variable(CelVariable::Now),
            _ => {
                let problem = self.problem_at(
                    tree,
                    format!("unknown variable `{}`", toolgate_text::escape_for_display(name)),
                );
                let guess = VARIABLE_NAMES
                    .into_iter()
                    .find(|known| toolgate_text::suggest::is_misspelling(known, name));
                let arguments = format!(
                    "write an argument as `input.{}`",
                    toolgate_text::escape_for_display(name)
                );
                let help = match guess {
                    Some(guess) => format!("did you mean `{guess}`? If not, {arguments}"),
                    None => format!(
                        "{arguments}; the variables are {}",
                        VARIABLE_NAMES.map(|v| format!("`{v}`")).join(", ")
                    ),
                };
                return Err(problem.with_help(help));
            }
        })
    }

    fn lower_select(&mut self, select: &SelectExpr) -> Result<CelNodeKind, Diagnostic> {
        let operand = self.lower_node(&select.operand)?;
        let span = operand.span.clone();
        let inner = lower_member(operand, &select.field);
        Ok(if select.test {
            CelNodeKind::Has(Box::new(CelNode { kind: inner, span }))
        } else {
            inner
        })
    }

    fn lower_pair(&mut self, call: &CallExpr) -> Result<Box<[CelNode; 2]>, Diagnostic> {
        match call.args.as_slice() {
            [a, b] => Ok(Box::new([self.lower_node(a)?, self.lower_node(b)?])),
            _ => Err(Diagnostic::new("an operator has too few operands")),
        }
    }

    fn lower_call(&mut self, tree: &Tree, call: &CallExpr) -> Result<CelNodeKind, Diagnostic> {
        let compare = |c: CompareOp| move |pair| CelNodeKind::Compare(c, pair);
        let arithmetic = |a: ArithmeticOp| move |pair| CelNodeKind::Arithmetic(a, pair);
        match (call.func_name.as_str(), call.args.as_slice()) {
            (op::LOGICAL_AND, _) => {
                Ok(CelNodeKind::And(self.collect_operands(tree, op::LOGICAL_AND)?))
            }
            (op::LOGICAL_OR, _) => {
                Ok(CelNodeKind::Or(self.collect_operands(tree, op::LOGICAL_OR)?))
            }
            (op::LOGICAL_NOT, [a]) => Ok(CelNodeKind::Not(Box::new(self.lower_node(a)?))),
            // Generated by `all`. A fault in the condition occurs again in the step, so no special
            // treatment is needed.
            (op::NOT_STRICTLY_FALSE, [a]) => Ok(self.lower_node(a)?.kind),
            (op::NEGATE, [a]) => Ok(CelNodeKind::Negate(Box::new(self.lower_node(a)?))),
            (op::CONDITIONAL, [c, a, b]) => Ok(CelNodeKind::If(Box::new([
                self.lower_node(c)?,
                self.lower_node(a)?,
                self.lower_node(b)?,
            ]))),
            (op::EQUALS, _) => self.lower_pair(call).map(compare(CompareOp::Equal)),
            (op::NOT_EQUALS, _) => self.lower_pair(call).map(compare(CompareOp::NotEqual)),
            (op::LESS, _) => self.lower_pair(call).map(compare(CompareOp::Less)),
            (op::LESS_EQUALS, _) => self.lower_pair(call).map(compare(CompareOp::LessOrEqual)),
            (op::GREATER, _) => self.lower_pair(call).map(compare(CompareOp::Greater)),
            (op::GREATER_EQUALS, _) => {
                self.lower_pair(call).map(compare(CompareOp::GreaterOrEqual))
            }
            (op::ADD, _) => self.lower_pair(call).map(arithmetic(ArithmeticOp::Add)),
            (op::SUBSTRACT, _) => self.lower_pair(call).map(arithmetic(ArithmeticOp::Subtract)),
            (op::MULTIPLY, _) => self.lower_pair(call).map(arithmetic(ArithmeticOp::Multiply)),
            (op::DIVIDE, _) => self.lower_pair(call).map(arithmetic(ArithmeticOp::Divide)),
            (op::MODULO, _) => self.lower_pair(call).map(arithmetic(ArithmeticOp::Remainder)),
            (op::IN, _) => self.lower_pair(call).map(CelNodeKind::In),
            (op::INDEX, [a, b]) => {
                let (a, b) = (self.lower_node(a)?, self.lower_node(b)?);
                Ok(match &b.kind {
                    CelNodeKind::Text(name) => lower_member(a, name),
                    _ => CelNodeKind::Index(Box::new(a), Box::new(b)),
                })
            }
            (name, _) => self.lower_function(tree, name, call),
        }
    }

    /// Collects the operands of `a && b && c` into one node, however the parser has nested them.
    fn collect_operands(
        &mut self,
        tree: &Tree,
        operator: &str,
    ) -> Result<Vec<CelNode>, Diagnostic> {
        match &tree.expr {
            Expr::Call(call) if call.func_name == operator => {
                let mut all = Vec::new();
                for arg in &call.args {
                    all.append(&mut self.collect_operands(arg, operator)?);
                }
                Ok(all)
            }
            _ => Ok(vec![self.lower_node(tree)?]),
        }
    }

    fn lower_comprehension(
        &mut self,
        comprehension: &ComprehensionExpr,
    ) -> Result<CelNodeKind, Diagnostic> {
        if comprehension.iter_var2.is_some() {
            return Err(self
                .problem_at(
                    &comprehension.iter_range,
                    "macros with two variables are not supported",
                )
                .with_help("use one variable"));
        }
        let range = self.lower_node(&comprehension.iter_range)?;
        let init = self.lower_node(&comprehension.accu_init)?;
        self.locals.push(comprehension.accu_var.clone());
        self.locals.push(comprehension.iter_var.clone());
        let inner = (|| {
            Ok((
                self.lower_node(&comprehension.loop_cond)?,
                self.lower_node(&comprehension.loop_step)?,
            ))
        })();
        self.locals.pop();
        let result = self.lower_node(&comprehension.result);
        self.locals.pop();
        let (condition, step) = inner?;
        Ok(CelNodeKind::Comprehension(Box::new(CelComprehension {
            range,
            init,
            condition,
            step,
            result: result?,
        })))
    }
}

/// Compiles `a.name`, where `a` may be the arguments themselves.
fn lower_member(operand: CelNode, name: &str) -> CelNodeKind {
    let deeper = |path: &Pointer| {
        let mut path = path.clone();
        path.push(name.to_owned());
        path
    };
    match &operand.kind {
        // In a path, `*` would mean every item.
        _ if name == "*" => CelNodeKind::Field(Box::new(operand), name.to_owned()),
        CelNodeKind::Input(path) => CelNodeKind::Input(deeper(path)),
        CelNodeKind::Result(path) => CelNodeKind::Result(deeper(path)),
        _ => CelNodeKind::Field(Box::new(operand), name.to_owned()),
    }
}

/// Returns the start of the character at a byte offset.
///
/// The parser counts bytes and reports the last byte of a token.
fn char_start(source: &str, at: usize) -> usize {
    let at = at.min(source.len());
    (0..=at).rev().find(|at| source.is_char_boundary(*at)).unwrap_or(0)
}

fn visit_node_ids(tree: &Tree, f: &mut dyn FnMut(u64)) {
    f(tree.id);
    match &tree.expr {
        Expr::Call(call) => {
            call.target.as_deref().into_iter().chain(&call.args).for_each(|t| visit_node_ids(t, f))
        }
        Expr::Select(select) => visit_node_ids(&select.operand, f),
        Expr::List(list) => list.elements.iter().for_each(|t| visit_node_ids(t, f)),
        Expr::Comprehension(comprehension) => visit_node_ids(&comprehension.iter_range, f),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_are_byte_offsets() {
        for source in [
            "foo > 1",
            "input.a == \"ä\" && foo > 1",
            "input.a == \"\u{1f600}ß\" || size(\"ä\") > 2 || foo",
        ] {
            let problems = compile(source).unwrap_err();
            let within = problems[0].field_range.clone().unwrap();
            assert_eq!(source.get(within), Some("foo"), "{source}: {problems:?}");
        }
    }

    #[test]
    fn literals_are_exact_or_refused() {
        let number = |literal: &str| {
            let root = compile(&format!("\"ä\" == input.a || input.n > {literal}"))
                .map_err(|problems| problems[0].message.clone())?;
            let mut found = None;
            root.visit_nodes(&mut |node| {
                if let CelNodeKind::Number(number) = &node.kind {
                    found = Some(number.to_string());
                }
            });
            found.ok_or_else(String::new)
        };
        for literal in
            ["9007199254740993.0", "0.1", "1.5e2", "1.5E-3", "12345678901234567890.12345678"]
        {
            let exact = toolgate_json::decimal_of(&serde_json::Value::Number(
                toolgate_json::canonical_number(literal).unwrap(),
            ));
            assert_eq!(number(literal), Ok(exact.unwrap().to_string()), "{literal}");
        }
        for literal in ["0.1234567890123456789012345678901", "1e30", "1e-40"] {
            assert_eq!(
                number(literal),
                Err("this number cannot be represented exactly".to_owned()),
                "{literal}"
            );
        }
    }
}
