//! Compiles, checks and evaluates `when`: conditions in CEL, with exact numbers.
//!
//! The `cel` crate parses the expression. The evaluation is our own for two reasons: `cel` computes
//! with doubles and machine integers, and here every reference is checked against the schemas of
//! the tools before the first call. The semantics are stricter than those of CEL in two points:
//!
//! * All numbers are exact decimals of one type.
//! * A fault on the left of `&&` or `||` is a fault of the whole expression, so that a call does
//!   not pass because an argument is absent.

mod compile;
mod eval;
mod function_calls;
mod schema_type;
mod typecheck;
mod typecheck_calls;
mod typecheck_operators;
mod value;

use std::ops::Range;
use std::sync::Arc;

use regex::Regex;
use rust_decimal::Decimal;

pub(super) use crate::policy::cel::schema_type::{CelType, type_of_schema};

use super::flow::visit_values;
use super::{Diagnostic, FactRequest, Limit, PolicyError, PolicyInput, RuleCheck};
use crate::policy::unsatisfiable::NEVER_TRUE_LINT;
use crate::session::state::Evidence;
use crate::tool::ToolSpec;
use toolgate_json::Pointer;

/// Maximum length of an expression, in bytes.
pub const MAX_EXPRESSION_BYTES: usize = 2_000;
/// Maximum number of operators and dots in an expression.
pub const MAX_OPERATORS: usize = 200;
/// Maximum nesting depth of an expression.
pub const MAX_EXPRESSION_DEPTH: usize = 32;

/// A compiled condition.
///
/// ```
/// use toolgate::policy::Deny;
/// let rule = Deny::new("office_hours", ["call_customer"]).when_cel("now.getHours() < 8 || now.getHours() >= 18");
/// ```
#[derive(Debug, Clone)]
pub struct CelExpression {
    source: Arc<str>,
    /// The compiled expression, or the problems that prevent its evaluation.
    compiled: Result<Arc<CelNode>, Vec<Diagnostic>>,
    /// The limits that `sum_of` names.
    limits: Vec<Limit>,
}

/// A node of a compiled expression.
#[derive(Debug, Clone)]
struct CelNode {
    kind: CelNodeKind,
    /// The byte range in the source.
    span: Range<usize>,
}

#[derive(Debug, Clone)]
enum CelNodeKind {
    Null,
    Bool(bool),
    Number(Decimal),
    Text(Arc<str>),
    Input(Pointer),
    Result(Pointer),
    Variable(CelVariable),
    Local(usize),
    Field(Box<CelNode>, String),
    Index(Box<CelNode>, Box<CelNode>),
    Has(Box<CelNode>),
    Not(Box<CelNode>),
    Negate(Box<CelNode>),
    And(Vec<CelNode>),
    Or(Vec<CelNode>),
    If(Box<[CelNode; 3]>),
    Compare(CompareOp, Box<[CelNode; 2]>),
    Arithmetic(ArithmeticOp, Box<[CelNode; 2]>),
    In(Box<[CelNode; 2]>),
    List(Vec<CelNode>),
    Call(CelFunction, Vec<CelNode>),
    Matches(Box<CelNode>, Regex),
    CameFrom(Pointer, Arc<str>),
    /// The used amount of a limit.
    LimitUsage(Arc<str>),
    Comprehension(Box<CelComprehension>),
}

/// A loop over a list, to which the macros of CEL compile.
#[derive(Debug, Clone)]
struct CelComprehension {
    range: CelNode,
    init: CelNode,
    condition: CelNode,
    step: CelNode,
    result: CelNode,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CelVariable {
    Session,
    Principal,
    Agent,
    Tool,
    Now,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CompareOp {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ArithmeticOp {
    Add,
    Subtract,
    Multiply,
    Divide,
    Remainder,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CelFunction {
    Decimal,
    Duration,
    Timestamp,
    Glob,
    IsSame,
    SumOf,
    Size,
    StartsWith,
    EndsWith,
    Contains,
    LowerAscii,
    Part(TimestampPart),
}

/// A component of a timestamp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TimestampPart {
    Year,
    Month,
    Day,
    Weekday,
    Hour,
    Minute,
}

impl CelExpression {
    /// Compiles an expression.
    ///
    /// [`super::Policy::problems`] of the rule reports errors in the expression.
    #[must_use]
    pub fn new(source: &str) -> Self {
        Self {
            source: source.into(),
            compiled: crate::policy::cel::compile::compile(source).map(Arc::new),
            limits: Vec::new(),
        }
    }

    /// Returns the source text.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Returns what the definition of a rule says of this expression.
    pub(super) fn definition_parts(&self) -> serde_json::Value {
        let limits: serde_json::Value = self.limits.iter().map(Limit::definition_parts).collect();
        serde_json::json!({ "source": self.source, "limits": limits })
    }

    /// Lets `sum_of("name")` read a limit.
    ///
    /// An expression without `sum_of` stores no limits, because there may be many.
    pub(super) fn bind_limit(&mut self, limit: &Limit) {
        let mut uses_limits = false;
        self.visit_nodes(&mut |node| {
            uses_limits |= matches!(node.kind, CelNodeKind::LimitUsage(_))
        });
        if uses_limits {
            self.limits.push(limit.clone());
        }
    }

    /// Returns the problems of the expression for the governed tools, in an agent with these tools.
    pub(super) fn problems(
        &self,
        field: &str,
        governed: &[&ToolSpec],
        tools: &[&ToolSpec],
        evidence: Option<&[&ToolSpec]>,
    ) -> Vec<Diagnostic> {
        let placed = |problem: Diagnostic| Diagnostic { field: field.to_owned(), ..problem };
        let root = match &self.compiled {
            Ok(root) => root,
            Err(problems) => return problems.iter().cloned().map(placed).collect(),
        };
        let rule = crate::policy::cel::typecheck::TypeCheckContext {
            tools,
            evidence,
            limits: &self.limits,
        };
        let mut problems: Vec<Diagnostic> = Vec::new();
        let mut never = Vec::new();
        let mut unsatisfiable: Option<Vec<crate::policy::cel::typecheck::UnsatisfiableComparison>> =
            None;
        for tool in governed {
            let checked = crate::policy::cel::typecheck::check_types(root, tool, &rule);
            never.extend(checked.always_false);
            unsatisfiable = Some(match unsatisfiable {
                None => checked.unsatisfiable,
                Some(known) => known
                    .into_iter()
                    .filter(|(span, _)| {
                        checked.unsatisfiable.iter().any(|(other, _)| other == span)
                    })
                    .collect(),
            });
            for problem in checked.errors.into_iter().map(placed) {
                if !problems.contains(&problem) {
                    problems.push(problem);
                }
            }
        }
        // An expression that is never true for only some of the tools is not an error.
        if never.len() == governed.len() {
            problems.extend(never.into_iter().next().map(placed));
        } else if problems.is_empty() {
            let to_problem =
                |(span, help): crate::policy::cel::typecheck::UnsatisfiableComparison| {
                    Diagnostic::new("this can never be true")
                        .with_range(span)
                        .with_help(help)
                        .into_warning()
                        .with_lint_code(NEVER_TRUE_LINT)
                };
            problems
                .extend(unsatisfiable.unwrap_or_default().into_iter().map(to_problem).map(placed));
        }
        problems
    }

    /// Returns the sources in `came_from`, or `None` if the expression does not use provenance.
    pub(super) fn provenance_sources(&self) -> Option<Vec<&str>> {
        let mut found: Option<Vec<&str>> = None;
        self.visit_nodes(&mut |node| {
            if let CelNodeKind::CameFrom(_, source) = &node.kind {
                found.get_or_insert_default().push(source);
            }
        });
        found
    }

    pub(super) fn request_facts(&self, input: &PolicyInput<'_>, needs: &mut FactRequest) {
        self.visit_nodes(&mut |node| match &node.kind {
            CelNodeKind::CameFrom(path, _) => {
                // If there are too many values, the evaluation reports the fault.
                let _ = visit_values(input, path, &mut |place, leaf, _| {
                    needs.origins.push((place.to_owned(), leaf.clone()))
                });
            }
            CelNodeKind::LimitUsage(name) => {
                let Some(limit) = self.limit(name) else { return };
                crate::policy::Policy::request_facts(limit, input, needs);
                match limit.counter(input) {
                    Ok(counter) => needs.counters.push((counter, limit.window())),
                    // The owner of the counter may depend on evidence that is not loaded yet.
                    Err(_) => needs.repeat_with_evidence = true,
                }
            }
            _ => {}
        });
    }

    fn limit(&self, name: &str) -> Option<&Limit> {
        self.limits.iter().find(|limit| limit.has_name(name))
    }

    /// Evaluates the condition; `proof` is the evidence that `result` refers to.
    pub(super) fn is_true(
        &self,
        input: &PolicyInput<'_>,
        proof: Option<&Evidence>,
    ) -> Result<bool, PolicyError> {
        let root = self
            .compiled
            .as_ref()
            .map_err(|_| PolicyError::new("the expression does not compile"))?;
        let result = eval::CelEvaluation::new(input, proof, self).is_true(root);
        if !input.is_traced() {
            return result;
        }
        self.visit_nodes(&mut |node| {
            if let CelNodeKind::Input(path) = &node.kind {
                input.record_check(|| {
                    let found = input.argument(path).map_or_else(
                        || "nothing".to_owned(),
                        |value| input.display_argument(path, value),
                    );
                    RuleCheck {
                        what: format!("input{path}"),
                        found,
                        holds: input.argument(path).is_some(),
                    }
                });
            }
        });
        input.record_check(|| {
            let found = result.as_ref().map_or_else(|fault| fault.to_string(), ToString::to_string);
            RuleCheck {
                what: format!("when {}", self.source),
                found,
                holds: matches!(result, Ok(true)),
            }
        });
        result
    }

    fn visit_nodes<'a>(&'a self, f: &mut dyn FnMut(&'a CelNode)) {
        if let Ok(root) = &self.compiled {
            root.visit_nodes(f);
        }
    }
}

impl CelNode {
    fn visit_nodes<'a>(&'a self, f: &mut dyn FnMut(&'a Self)) {
        f(self);
        match &self.kind {
            CelNodeKind::Field(node, _)
            | CelNodeKind::Has(node)
            | CelNodeKind::Not(node)
            | CelNodeKind::Negate(node)
            | CelNodeKind::Matches(node, _) => node.visit_nodes(f),
            CelNodeKind::Index(a, b) => {
                a.visit_nodes(f);
                b.visit_nodes(f);
            }
            CelNodeKind::And(nodes)
            | CelNodeKind::Or(nodes)
            | CelNodeKind::List(nodes)
            | CelNodeKind::Call(_, nodes) => nodes.iter().for_each(|node| node.visit_nodes(f)),
            CelNodeKind::If(nodes) => nodes.iter().for_each(|node| node.visit_nodes(f)),
            CelNodeKind::Compare(_, nodes)
            | CelNodeKind::Arithmetic(_, nodes)
            | CelNodeKind::In(nodes) => nodes.iter().for_each(|node| node.visit_nodes(f)),
            CelNodeKind::Comprehension(comprehension) => [
                &comprehension.range,
                &comprehension.init,
                &comprehension.condition,
                &comprehension.step,
                &comprehension.result,
            ]
            .into_iter()
            .for_each(|n| n.visit_nodes(f)),
            CelNodeKind::Null
            | CelNodeKind::Bool(_)
            | CelNodeKind::Number(_)
            | CelNodeKind::Text(_)
            | CelNodeKind::Input(_)
            | CelNodeKind::Result(_)
            | CelNodeKind::Variable(_)
            | CelNodeKind::Local(_)
            | CelNodeKind::CameFrom(..)
            | CelNodeKind::LimitUsage(_) => {}
        }
    }
}
