//! Type-checks expressions against the schemas of the tools, before the first call.

use std::ops::Range;

use rust_decimal::Decimal;

use super::{
    ArithmeticOp, CelComprehension, CelFunction, CelNode, CelNodeKind, CelVariable, CompareOp,
    TimestampPart,
};
use crate::diagnostic::undeclared_path_problem;
use crate::policy::cel::schema_type::{CelType, compare_bounds, compare_texts, type_of_schema};
use crate::policy::cel::value::{parse_decimal, parse_duration, split_evidence_path};
use crate::policy::{Diagnostic, Limit};
use crate::provenance::USER_SOURCE;
use crate::schema::{SchemaLookup, lookup_input};
use crate::tool::{ExtraArguments, ToolSpec};
use toolgate_json::Pointer;

/// A comparison that a schema rules out, and the values that the schema allows.
pub(crate) type UnsatisfiableComparison = (Range<usize>, String);

/// The result of checking an expression for one tool.
#[derive(Default)]
pub(crate) struct TypeCheckResult {
    /// The problems of the expression.
    pub(crate) errors: Vec<Diagnostic>,
    /// The problem that the expression can never be true; an error if this holds for all tools.
    pub(crate) always_false: Option<Diagnostic>,
    /// Comparisons of arguments that can never be true.
    pub(crate) unsatisfiable: Vec<UnsatisfiableComparison>,
}

/// Checks an expression for one tool.
pub(crate) fn check_types(
    root: &CelNode,
    tool: &ToolSpec,
    rule: &TypeCheckContext<'_>,
) -> TypeCheckResult {
    let mut checking =
        TypeChecker { tool, context: rule, problems: Vec::new(), unsatisfiable: Vec::new() };
    let ty = checking.infer_type(root, &mut Vec::new());
    let TypeChecker { problems: mut wrong, unsatisfiable: never, .. } = checking;
    if !wrong.is_empty() {
        return TypeCheckResult { errors: wrong, ..TypeCheckResult::default() };
    }
    let first = || never.first().cloned();
    let impossible = match ty {
        CelType::Any | CelType::Bool(None | Some(true)) => None,
        CelType::Bool(Some(false)) => {
            let help =
                || (root.span.clone(), "remove the rule, or change the expression".to_owned());
            let (span, help) = first().unwrap_or_else(help);
            Some(Diagnostic::new("this can never be true").with_range(span).with_help(help))
        }
        other => {
            let problem = Diagnostic::new(format!(
                "a condition must be true or false, but this is {}",
                other.type_name()
            ));
            wrong
                .push(problem.with_range(root.span.clone()).with_help("compare it with something"));
            None
        }
    };
    let mut about_arguments = Vec::new();
    root.visit_nodes(&mut |node| {
        if matches!(node.kind, CelNodeKind::Compare(..) | CelNodeKind::In(_))
            && has_argument_reference(node)
        {
            about_arguments.push(node.span.clone());
        }
    });
    let mut unsatisfiable: Vec<UnsatisfiableComparison> = Vec::new();
    for (span, help) in never {
        if about_arguments.contains(&span) && !unsatisfiable.iter().any(|(known, _)| *known == span)
        {
            unsatisfiable.push((span, help));
        }
    }
    TypeCheckResult { errors: wrong, always_false: impossible, unsatisfiable }
}

fn has_argument_reference(node: &CelNode) -> bool {
    let mut found = false;
    node.visit_nodes(&mut |node| found |= matches!(node.kind, CelNodeKind::Input(_)));
    found
}

/// The names that an expression can refer to.
pub(crate) struct TypeCheckContext<'s> {
    /// All tools of the agent.
    pub(crate) tools: &'s [&'s ToolSpec],
    /// The tools whose evidence is `result`, if `result` is available.
    pub(crate) evidence: Option<&'s [&'s ToolSpec]>,
    /// The limits that can be read.
    pub(crate) limits: &'s [Limit],
}

struct TypeChecker<'s> {
    tool: &'s ToolSpec,
    context: &'s TypeCheckContext<'s>,
    problems: Vec<Diagnostic>,
    /// The comparisons that a schema rules out.
    unsatisfiable: Vec<UnsatisfiableComparison>,
}

impl TypeChecker<'_> {
    fn report(&mut self, node: &CelNode, problem: Diagnostic) -> CelType {
        self.problems.push(problem.with_range(node.span.clone()));
        CelType::Any
    }

    fn infer_type(&mut self, node: &CelNode, locals: &mut Vec<CelType>) -> CelType {
        match &node.kind {
            CelNodeKind::Null => CelType::Null,
            CelNodeKind::Bool(value) => CelType::Bool(Some(*value)),
            CelNodeKind::Number(number) => CelType::Number(Some(*number), Some(*number)),
            CelNodeKind::Text(text) => CelType::Text(Some(vec![text.to_string()])),
            CelNodeKind::Input(path) => self.input_type(node, path),
            CelNodeKind::Result(path) => self.result_type(node, path),
            CelNodeKind::Variable(CelVariable::Now) => CelType::Time,
            CelNodeKind::Variable(_) => CelType::Text(None),
            CelNodeKind::Local(slot) => locals.get(*slot).cloned().unwrap_or(CelType::Any),
            CelNodeKind::Field(of, name) => {
                let of = self.infer_type(of, locals);
                self.member_type(node, of, name)
            }
            CelNodeKind::Index(of, index) => {
                self.infer_type(index, locals);
                match self.infer_type(of, locals) {
                    CelType::List(item) => *item,
                    CelType::Any | CelType::Object(..) => CelType::Any,
                    other => self.report(
                        node,
                        Diagnostic::new(format!("{} has no items", other.type_name())),
                    ),
                }
            }
            CelNodeKind::Has(of) => {
                self.infer_type(of, locals);
                CelType::Bool(None)
            }
            CelNodeKind::Not(of) => match self.infer_bool(of, locals) {
                Some(value) => CelType::Bool(Some(!value)),
                None => CelType::Bool(None),
            },
            CelNodeKind::Negate(of) => match self.infer_type(of, locals) {
                CelType::Number(low, high) => CelType::Number(high.map(|n| -n), low.map(|n| -n)),
                ty @ (CelType::Any | CelType::Duration) => ty,
                other => self.report(
                    node,
                    Diagnostic::new(format!("{} cannot be negated", other.type_name())),
                ),
            },
            CelNodeKind::And(nodes) => CelType::Bool(self.check_logic(nodes, locals, false)),
            CelNodeKind::Or(nodes) => CelType::Bool(self.check_logic(nodes, locals, true)),
            CelNodeKind::If(nodes) => {
                let [condition, then, otherwise] = &**nodes;
                self.infer_bool(condition, locals);
                self.infer_type(then, locals).join(self.infer_type(otherwise, locals))
            }
            CelNodeKind::Compare(op, nodes) => {
                let [a, b] = &**nodes;
                let (left, right) = (self.infer_type(a, locals), self.infer_type(b, locals));
                self.check_comparison(node, *op, &left, &right)
            }
            CelNodeKind::Arithmetic(op, nodes) => {
                let [a, b] = &**nodes;
                let (left, right) = (self.infer_type(a, locals), self.infer_type(b, locals));
                self.check_arithmetic(node, *op, left, right)
            }
            CelNodeKind::In(nodes) => {
                let [a, list] = &**nodes;
                let (item, list) = (self.infer_type(a, locals), self.infer_type(list, locals));
                self.check_membership(node, &item, &list)
            }
            CelNodeKind::List(nodes) => CelType::List(Box::new(
                nodes
                    .iter()
                    .map(|node| self.infer_type(node, locals))
                    .reduce(CelType::join)
                    .unwrap_or(CelType::Any),
            )),
            CelNodeKind::Call(function, nodes) => self.check_call(node, *function, nodes, locals),
            CelNodeKind::Matches(of, _) => {
                self.expect_type(of, &CelType::Text(None), locals);
                CelType::Bool(None)
            }
            CelNodeKind::CameFrom(path, source) => {
                self.input_type(node, path);
                self.check_source(node, source);
                CelType::Bool(None)
            }
            CelNodeKind::LimitUsage(name) => {
                if !self.context.limits.iter().any(|limit| limit.has_name(name)) {
                    let problem = Diagnostic::new(format!(
                        "unknown limit `{}`",
                        toolgate_text::escape_for_display(name)
                    ));
                    let names: Vec<&str> =
                        self.context.limits.iter().map(crate::policy::Policy::name).collect();
                    let problem = problem
                        .with_help("`sum_of` takes the name of a `limit` rule")
                        .with_suggestion(name, names.iter());
                    return self.report(node, problem);
                }
                let missing = self
                    .context
                    .limits
                    .iter()
                    .filter(|limit| limit.has_name(name))
                    .find_map(|limit| limit.undeclared_argument(self.tool));
                if let Some(path) = missing {
                    let message = format!(
                        "the limit `{}` depends on `{path}`, which `{}` does not accept",
                        toolgate_text::escape_for_display(name),
                        self.tool.name()
                    );
                    return self.report(
                        node,
                        Diagnostic::new(message)
                            .with_help("use it in a rule for the tools of the limit"),
                    );
                }
                CelType::Number(Some(Decimal::ZERO), None)
            }
            CelNodeKind::Comprehension(comprehension) => {
                self.check_comprehension(comprehension, locals)
            }
        }
    }

    fn input_type(&mut self, node: &CelNode, path: &Pointer) -> CelType {
        let Some(root) = self.tool.input_schema() else { return CelType::Any };
        match lookup_input(self.tool, path) {
            SchemaLookup::Known(schema) => type_of_schema(schema, root, self.tool.extra),
            SchemaLookup::Open => CelType::Any,
            SchemaLookup::Missing(name, known) => {
                self.report(node, undeclared_path_problem(self.tool, path, &name, &known))
            }
        }
    }

    fn result_type(&mut self, node: &CelNode, path: &Pointer) -> CelType {
        let Some(sources) = self.context.evidence else {
            return self.report(
                node,
                Diagnostic::new("`result` is not available here")
                    .with_help("use `result` in a `require` rule"),
            );
        };
        let mut joined: Option<CelType> = None;
        for source in sources {
            let declared: Vec<String> = source.proves.iter().map(ToString::to_string).collect();
            let Some((field, _)) = split_evidence_path(declared.iter().map(String::as_str), path)
            else {
                let name = path.parts().join(".");
                let known: Vec<String> =
                    source.proves.iter().map(|p| p.parts().join(".")).collect();
                let problem = Diagnostic::new(format!(
                    "`{}` does not declare that it proves `{path}`",
                    source.name()
                ));
                return self.report(
                    node,
                    problem
                        .with_help("declare it with `proves`")
                        .with_suggestion(&name, known.iter()),
                );
            };
            let ty = source.output_schema().filter(|_| Pointer::from(field) == *path).map_or(
                CelType::Any,
                |schema| {
                    let found = path.parts().iter().try_fold(
                        type_of_schema(schema, schema, ExtraArguments::Pass),
                        |ty, part| match ty {
                            CelType::Object(mut members, _) => members.remove(part),
                            _ => None,
                        },
                    );
                    found.unwrap_or(CelType::Any)
                },
            );
            joined = Some(joined.map_or(ty.clone(), |known| known.join(ty)));
        }
        joined.unwrap_or(CelType::Any)
    }

    /// Reports a source that does not exist or that is untrusted.
    fn check_source(&mut self, node: &CelNode, source: &str) {
        if source == USER_SOURCE || source == "untrusted" {
            return;
        }
        let tools = || self.context.tools.iter().map(|tool| tool.name());
        match self.context.tools.iter().find(|tool| tool.name() == source) {
            None => {
                let problem = Diagnostic::new(format!(
                    "`{}` is not a source",
                    toolgate_text::escape_for_display(source)
                ))
                .with_help("use the name of a tool, \"user\" or \"untrusted\"");
                let problem =
                    problem.with_suggestion(source, tools().chain([USER_SOURCE, "untrusted"]));
                self.report(node, problem);
            }
            Some(tool) if tool.untrusted => {
                let problem =
                    Diagnostic::new(format!("`{source}` is untrusted, so it cannot be a source"))
                        .with_help("use \"untrusted\"");
                self.report(node, problem);
            }
            Some(_) => {}
        }
    }

    fn member_type(&mut self, node: &CelNode, of: CelType, name: &str) -> CelType {
        match of {
            CelType::Any => CelType::Any,
            CelType::Object(mut members, open) => match members.remove(name) {
                Some(ty) => ty,
                None if open => CelType::Any,
                None => self.report(
                    node,
                    Diagnostic::new(format!(
                        "unknown member `{}`",
                        toolgate_text::escape_for_display(name)
                    ))
                    .with_suggestion(name, members.keys()),
                ),
            },
            other => self.report(
                node,
                Diagnostic::new(format!(
                    "{} has no `{}`",
                    other.type_name(),
                    toolgate_text::escape_for_display(name)
                )),
            ),
        }
    }

    fn expect_type(
        &mut self,
        node: &CelNode,
        expected: &CelType,
        locals: &mut Vec<CelType>,
    ) -> CelType {
        let ty = self.infer_type(node, locals);
        if ty.is_comparable_with(expected) {
            ty
        } else {
            self.report(
                node,
                Diagnostic::new(format!(
                    "expected {}, found {}",
                    expected.type_name(),
                    ty.type_name()
                )),
            )
        }
    }

    fn infer_bool(&mut self, node: &CelNode, locals: &mut Vec<CelType>) -> Option<bool> {
        match self.expect_type(node, &CelType::Bool(None), locals) {
            CelType::Bool(known) => known,
            _ => None,
        }
    }

    /// Checks `&&` or `||`; `short` is the operand that decides the result: false or true.
    fn check_logic(
        &mut self,
        nodes: &[CelNode],
        locals: &mut Vec<CelType>,
        short: bool,
    ) -> Option<bool> {
        let known: Vec<Option<bool>> =
            nodes.iter().map(|node| self.infer_bool(node, locals)).collect();
        if known.contains(&Some(short)) {
            return Some(short);
        }
        known.iter().all(|k| *k == Some(!short)).then_some(!short)
    }

    fn check_comparison(
        &mut self,
        node: &CelNode,
        op: CompareOp,
        a: &CelType,
        b: &CelType,
    ) -> CelType {
        let ordered = !matches!(op, CompareOp::Equal | CompareOp::NotEqual);
        let unordered = |ty: &CelType| {
            matches!(ty, CelType::Null | CelType::Bool(_) | CelType::List(_) | CelType::Object(..))
        };
        let null = matches!(a, CelType::Null) || matches!(b, CelType::Null);
        if (ordered && (unordered(a) || unordered(b))) || !(a.is_comparable_with(b) || null) {
            let help = match (a, b) {
                (CelType::Text(_), CelType::Number(..))
                | (CelType::Number(..), CelType::Text(_)) => {
                    "turn the text into a number with `decimal(…)`"
                }
                (CelType::Text(_), CelType::Time) | (CelType::Time, CelType::Text(_)) => {
                    "turn the text into a time with `timestamp(…)`"
                }
                (CelType::Text(_), CelType::Duration) | (CelType::Duration, CelType::Text(_)) => {
                    "turn the text into a duration with `duration(…)`"
                }
                _ => "compare values of one kind",
            };
            return self.report(
                node,
                Diagnostic::new(format!(
                    "{} cannot be compared with {}",
                    a.type_name(),
                    b.type_name()
                ))
                .with_help(help),
            );
        }
        let known = match (a, b) {
            (CelType::Number(al, ah), CelType::Number(bl, bh)) => {
                compare_bounds(op, (*al, *ah), (*bl, *bh))
            }
            (CelType::Text(Some(a)), CelType::Text(Some(b))) => compare_texts(op, a, b),
            _ => None,
        };
        if known == Some(false) {
            let help =
                describe_allowed_values(a).or_else(|| describe_allowed_values(b)).map_or_else(
                    || "the result is always the same".to_owned(),
                    |allowed| format!("allowed by the schema: {allowed}"),
                );
            self.unsatisfiable.push((node.span.clone(), help));
        }
        CelType::Bool(known)
    }

    fn check_membership(&mut self, node: &CelNode, item: &CelType, list: &CelType) -> CelType {
        match list {
            CelType::List(of) if !item.is_comparable_with(of) && !matches!(**of, CelType::Null) => {
                self.report(
                    node,
                    Diagnostic::new(format!(
                        "cannot look for {} in a list that contains {}",
                        item.type_name(),
                        of.type_name()
                    )),
                )
            }
            CelType::List(of) => match (item, &**of) {
                (CelType::Text(Some(a)), CelType::Text(Some(b)))
                    if !a.iter().any(|a| b.contains(a)) =>
                {
                    self.report_never_in(node, item, of)
                }
                (CelType::Number(al, ah), CelType::Number(bl, bh))
                    if compare_bounds(CompareOp::Equal, (*al, *ah), (*bl, *bh)) == Some(false) =>
                {
                    self.report_never_in(node, item, of)
                }
                _ => CelType::Bool(None),
            },
            CelType::Any | CelType::Object(..) => CelType::Bool(None),
            other => self.report(
                node,
                Diagnostic::new(format!("cannot look for a value in {}", other.type_name())),
            ),
        }
    }

    /// Records that a value is never in a list.
    fn report_never_in(&mut self, node: &CelNode, item: &CelType, of: &CelType) -> CelType {
        let help =
            describe_allowed_values(item).or_else(|| describe_allowed_values(of)).map_or_else(
                || "the value is never in this list".to_owned(),
                |allowed| format!("allowed by the schema: {allowed}"),
            );
        self.unsatisfiable.push((node.span.clone(), help));
        CelType::Bool(Some(false))
    }

    fn check_arithmetic(
        &mut self,
        node: &CelNode,
        op: ArithmeticOp,
        a: CelType,
        b: CelType,
    ) -> CelType {
        use ArithmeticOp::{Add, Subtract};
        match (op, a, b) {
            (_, CelType::Number(..) | CelType::Any, CelType::Number(..))
            | (_, CelType::Number(..), CelType::Any) => CelType::Number(None, None),
            (Add, CelType::Text(_), CelType::Text(_) | CelType::Any)
            | (Add, CelType::Any, CelType::Text(_)) => CelType::Text(None),
            (Add, CelType::List(a), CelType::List(b)) => CelType::List(Box::new(a.join(*b))),
            (Add, CelType::Time, CelType::Duration)
            | (Add, CelType::Duration, CelType::Time)
            | (Subtract, CelType::Time, CelType::Duration) => CelType::Time,
            (Subtract, CelType::Time, CelType::Time)
            | (Add | Subtract, CelType::Duration, CelType::Duration) => CelType::Duration,
            (_, CelType::Any, _) | (_, _, CelType::Any) => CelType::Any,
            (_, a, b) => self.report(
                node,
                Diagnostic::new(format!(
                    "cannot calculate with {} and {}",
                    a.type_name(),
                    b.type_name()
                )),
            ),
        }
    }

    fn check_call(
        &mut self,
        node: &CelNode,
        function: CelFunction,
        nodes: &[CelNode],
        locals: &mut Vec<CelType>,
    ) -> CelType {
        let text = CelType::Text(None);
        let mut literal = |parse: &dyn Fn(&str) -> bool, wants: (&str, &str)| {
            if let Some(CelNode { kind: CelNodeKind::Text(text), span }) = nodes.first()
                && !parse(text)
            {
                let problem = Diagnostic::new(format!(
                    "`{}` is not a valid {}",
                    toolgate_text::escape_for_display(text),
                    wants.0
                ))
                .with_range(span.clone());
                self.problems.push(problem.with_help(format!("like `{}`", wants.1)));
            }
        };
        match function {
            CelFunction::Decimal => literal(&|t| parse_decimal(t).is_ok(), ("number", "12.50")),
            CelFunction::Duration => {
                literal(&|t| parse_duration(t).is_ok(), ("duration", "90d`, `1h` or `30s"))
            }
            CelFunction::Timestamp => literal(
                &|t| t.parse::<jiff::Timestamp>().is_ok(),
                ("RFC 3339 time", "2026-01-31T12:00:00Z"),
            ),
            _ => {}
        }
        match function {
            CelFunction::Decimal => {
                let ty = nodes.first().map_or(CelType::Any, |n| self.infer_type(n, locals));
                match ty {
                    CelType::Number(..) => ty,
                    CelType::Any | CelType::Text(_) => CelType::Number(None, None),
                    other => self.report(
                        node,
                        Diagnostic::new(format!("{} is not a number", other.type_name())),
                    ),
                }
            }
            CelFunction::IsSame => {
                let [a, b] = nodes else { return CelType::Bool(None) };
                let (a, b) = (self.infer_type(a, locals), self.infer_type(b, locals));
                if !a.is_comparable_with(&b) {
                    return self.report(
                        node,
                        Diagnostic::new(format!(
                            "{} is never the same as {}",
                            a.type_name(),
                            b.type_name()
                        )),
                    );
                }
                CelType::Bool(None)
            }
            CelFunction::SumOf => {
                let Some(of) = nodes.first() else { return CelType::Any };
                match self.expect_type(of, &CelType::List(Box::new(CelType::Any)), locals) {
                    CelType::List(item)
                        if !item.is_comparable_with(&CelType::Number(None, None)) =>
                    {
                        self.report(
                            of,
                            Diagnostic::new(format!(
                                "`sum_of` needs numbers, but each item is {}",
                                item.type_name()
                            )),
                        )
                    }
                    _ => CelType::Number(None, None),
                }
            }
            CelFunction::Size => {
                let Some(of) = nodes.first() else { return CelType::Any };
                match self.infer_type(of, locals) {
                    CelType::Any | CelType::Text(_) | CelType::List(_) | CelType::Object(..) => {
                        CelType::Number(Some(Decimal::ZERO), None)
                    }
                    other => self.report(
                        node,
                        Diagnostic::new(format!("{} has no size", other.type_name())),
                    ),
                }
            }
            CelFunction::Part(part) => {
                if let Some((time, zone)) = nodes.split_first() {
                    self.expect_type(time, &CelType::Time, locals);
                    if let Some(CelNode { kind: CelNodeKind::Text(name), span }) = zone.first()
                        && jiff::tz::TimeZone::get(name).is_err()
                    {
                        let problem = Diagnostic::new(format!(
                            "`{}` is not a time zone",
                            toolgate_text::escape_for_display(name)
                        ))
                        .with_range(span.clone());
                        self.problems.push(problem.with_help("like `Europe/Berlin`"));
                    }
                }
                let most = match part {
                    TimestampPart::Year => return CelType::Number(None, None),
                    TimestampPart::Month => 11,
                    TimestampPart::Day => 30,
                    TimestampPart::Weekday => 6,
                    TimestampPart::Hour => 23,
                    TimestampPart::Minute => 59,
                };
                CelType::Number(Some(Decimal::ZERO), Some(Decimal::from(most)))
            }
            CelFunction::Duration | CelFunction::Timestamp | CelFunction::LowerAscii => {
                for of in nodes {
                    self.expect_type(of, &text, locals);
                }
                match function {
                    CelFunction::Duration => CelType::Duration,
                    CelFunction::Timestamp => CelType::Time,
                    _ => text,
                }
            }
            CelFunction::Glob
            | CelFunction::StartsWith
            | CelFunction::EndsWith
            | CelFunction::Contains => {
                for of in nodes {
                    self.expect_type(of, &text, locals);
                }
                CelType::Bool(None)
            }
        }
    }

    fn check_comprehension(
        &mut self,
        comprehension: &CelComprehension,
        locals: &mut Vec<CelType>,
    ) -> CelType {
        let item = match self.infer_type(&comprehension.range, locals) {
            CelType::List(item) => *item,
            CelType::Object(..) => CelType::Text(None),
            CelType::Any => CelType::Any,
            other => {
                return self.report(
                    &comprehension.range,
                    Diagnostic::new(format!("cannot iterate over {}", other.type_name())),
                );
            }
        };
        let init = match self.infer_type(&comprehension.init, locals) {
            // The accumulator starts with a literal and changes, so drop the known value.
            CelType::Bool(_) => CelType::Bool(None),
            CelType::Number(..) => CelType::Number(None, None),
            other => other,
        };
        locals.push(init);
        locals.push(item);
        self.infer_type(&comprehension.condition, locals);
        let step = self.infer_type(&comprehension.step, locals);
        locals.pop();
        if let Some(slot) = locals.last_mut() {
            *slot = match (slot.clone(), step) {
                (CelType::List(_), step @ CelType::List(_)) => step,
                (known, _) => known,
            };
        }
        let result = self.infer_type(&comprehension.result, locals);
        locals.pop();
        match result {
            CelType::Bool(_) => CelType::Bool(None),
            other => other,
        }
    }
}

/// Describes the values that a type allows, if a schema restricts them.
fn describe_allowed_values(ty: &CelType) -> Option<String> {
    match ty {
        CelType::Number(Some(low), Some(high)) if low == high => None,
        CelType::Number(Some(low), Some(high)) => Some(format!("between {low} and {high}")),
        CelType::Number(None, Some(high)) => Some(format!("at most {high}")),
        CelType::Number(Some(low), None) => Some(format!("at least {low}")),
        CelType::Text(Some(values)) if values.len() > 1 => Some(format!(
            "one of {}",
            values.iter().map(|v| format!("\"{v}\"")).collect::<Vec<_>>().join(", ")
        )),
        _ => None,
    }
}
