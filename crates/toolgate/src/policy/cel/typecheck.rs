//! Type-checks expressions against the schemas of the tools, before the first call.

use std::ops::Range;

use rust_decimal::Decimal;

use super::{CelNode, CelNodeKind, CelVariable};
use crate::diagnostic::undeclared_path_problem;
use crate::policy::cel::schema_type::{CelType, type_of_schema};
use crate::policy::cel::value::split_evidence_path;
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

pub(super) struct TypeChecker<'s> {
    tool: &'s ToolSpec,
    context: &'s TypeCheckContext<'s>,
    pub(super) problems: Vec<Diagnostic>,
    /// The comparisons that a schema rules out.
    pub(super) unsatisfiable: Vec<UnsatisfiableComparison>,
}

impl TypeChecker<'_> {
    pub(super) fn report(&mut self, node: &CelNode, problem: Diagnostic) -> CelType {
        self.problems.push(problem.with_range(node.span.clone()));
        CelType::Any
    }

    pub(super) fn infer_type(&mut self, node: &CelNode, locals: &mut Vec<CelType>) -> CelType {
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

    pub(super) fn expect_type(
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

    pub(super) fn infer_bool(&mut self, node: &CelNode, locals: &mut Vec<CelType>) -> Option<bool> {
        match self.expect_type(node, &CelType::Bool(None), locals) {
            CelType::Bool(known) => known,
            _ => None,
        }
    }
}

/// Describes the values that a type allows, if a schema restricts them.
pub(super) fn describe_allowed_values(ty: &CelType) -> Option<String> {
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
