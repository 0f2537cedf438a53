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
mod schema_type;
mod typecheck;
mod value;

use std::ops::Range;
use std::sync::Arc;

use regex::Regex;
use rust_decimal::Decimal;

pub(super) use crate::policy::cel::schema_type::{Ty, of_schema};

use super::flow::each_value;
use super::{Ask, Fault, Limit, Needs, Note, Problem};
use crate::policy::unsatisfiable::NEVER_TRUE;
use crate::session::state::Evidence;
use crate::tool::Spec;
use toolgate_json::Pointer;

/// Maximum length of an expression, in bytes.
pub const MAX_LENGTH: usize = 2_000;
/// Maximum number of operators and dots in an expression.
pub const MAX_OPERATORS: usize = 200;
/// Maximum nesting depth of an expression.
pub const MAX_DEPTH: usize = 32;

/// A compiled condition.
///
/// ```
/// use toolgate::policy::Deny;
/// let rule = Deny::new("office_hours", ["call_customer"]).when_cel("now.getHours() < 8 || now.getHours() >= 18");
/// ```
#[derive(Debug, Clone)]
pub struct Expression {
    source: Arc<str>,
    /// The compiled expression, or the problems that prevent its evaluation.
    compiled: Result<Arc<Node>, Vec<Problem>>,
    /// The limits that `sum_of` names.
    limits: Vec<Limit>,
}

/// A node of a compiled expression.
#[derive(Debug, Clone)]
struct Node {
    kind: Kind,
    /// The byte range in the source.
    span: Range<usize>,
}

#[derive(Debug, Clone)]
enum Kind {
    Null,
    Bool(bool),
    Number(Decimal),
    Text(Arc<str>),
    Input(Pointer),
    Result(Pointer),
    Variable(Name),
    Local(usize),
    Field(Box<Node>, String),
    Index(Box<Node>, Box<Node>),
    Has(Box<Node>),
    Not(Box<Node>),
    Negate(Box<Node>),
    And(Vec<Node>),
    Or(Vec<Node>),
    If(Box<[Node; 3]>),
    Compare(Compare, Box<[Node; 2]>),
    Arithmetic(Arithmetic, Box<[Node; 2]>),
    In(Box<[Node; 2]>),
    List(Vec<Node>),
    Call(Function, Vec<Node>),
    Matches(Box<Node>, Regex),
    CameFrom(Pointer, Arc<str>),
    /// The used amount of a limit.
    LimitUsage(Arc<str>),
    Comprehension(Box<Each>),
}

/// A loop over a list, to which the macros of CEL compile.
#[derive(Debug, Clone)]
struct Each {
    range: Node,
    init: Node,
    condition: Node,
    step: Node,
    result: Node,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Name {
    Session,
    Principal,
    Agent,
    Tool,
    Now,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Compare {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arithmetic {
    Add,
    Subtract,
    Multiply,
    Divide,
    Remainder,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Function {
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
    Part(Part),
}

/// A component of a timestamp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Year,
    Month,
    Day,
    Weekday,
    Hour,
    Minute,
}

impl Expression {
    /// Compiles an expression.
    ///
    /// [`super::Policy::problems`] of the rule reports errors in the expression.
    #[must_use]
    pub fn new(source: &str) -> Self {
        Self { source: source.into(), compiled: crate::policy::cel::compile::compile(source).map(Arc::new), limits: Vec::new() }
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
    pub(super) fn reads(&mut self, limit: &Limit) {
        let mut asks = false;
        self.each(&mut |node| asks |= matches!(node.kind, Kind::LimitUsage(_)));
        if asks {
            self.limits.push(limit.clone());
        }
    }

    /// Returns the problems of the expression for the governed tools, in an agent with these tools.
    pub(super) fn problems(&self, field: &str, governed: &[&Spec], tools: &[&Spec], evidence: Option<&[&Spec]>) -> Vec<Problem> {
        let placed = |problem: Problem| Problem { field: field.to_owned(), ..problem };
        let root = match &self.compiled {
            Ok(root) => root,
            Err(problems) => return problems.iter().cloned().map(placed).collect(),
        };
        let rule = crate::policy::cel::typecheck::Context { tools, evidence, limits: &self.limits };
        let mut problems: Vec<Problem> = Vec::new();
        let mut never = Vec::new();
        let mut vain: Option<Vec<crate::policy::cel::typecheck::Never>> = None;
        for tool in governed {
            let checked = crate::policy::cel::typecheck::check(root, tool, &rule);
            never.extend(checked.always_false);
            vain = Some(match vain {
                None => checked.unsatisfiable,
                Some(known) => known.into_iter().filter(|(span, _)| checked.unsatisfiable.iter().any(|(other, _)| other == span)).collect(),
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
            let told = |(span, help): crate::policy::cel::typecheck::Never| {
                Problem::new("this can never be true").within(span).help(help).warning().found_as(NEVER_TRUE)
            };
            problems.extend(vain.unwrap_or_default().into_iter().map(told).map(placed));
        }
        problems
    }

    /// Returns the sources in `came_from`, or `None` if the expression does not use provenance.
    pub(super) fn sources(&self) -> Option<Vec<&str>> {
        let mut found: Option<Vec<&str>> = None;
        self.each(&mut |node| {
            if let Kind::CameFrom(_, source) = &node.kind {
                found.get_or_insert_default().push(source);
            }
        });
        found
    }

    pub(super) fn needs(&self, ask: &Ask<'_>, needs: &mut Needs) {
        self.each(&mut |node| match &node.kind {
            Kind::CameFrom(path, _) => {
                // If there are too many values, the evaluation reports the fault.
                let _ = each_value(ask, path, &mut |place, leaf, _| needs.origins.push((place.to_owned(), leaf.clone())));
            }
            Kind::LimitUsage(name) => {
                let Some(limit) = self.limit(name) else { return };
                crate::policy::Policy::needs(limit, ask, needs);
                match limit.counter(ask) {
                    Ok(counter) => needs.counters.push((counter, limit.window())),
                    // The owner of the counter may depend on evidence that is not loaded yet.
                    Err(_) => needs.repeat_with_evidence = true,
                }
            }
            _ => {}
        });
    }

    fn limit(&self, name: &str) -> Option<&Limit> {
        self.limits.iter().find(|limit| limit.is_called(name))
    }

    /// Evaluates the condition; `proof` is the evidence that `result` refers to.
    pub(super) fn holds(&self, ask: &Ask<'_>, proof: Option<&Evidence>) -> Result<bool, Fault> {
        let root = self.compiled.as_ref().map_err(|_| Fault::new("the expression does not compile"))?;
        let held = eval::Evaluation::new(ask, proof, self).holds(root);
        if !ask.is_traced() {
            return held;
        }
        self.each(&mut |node| {
            if let Kind::Input(path) = &node.kind {
                ask.note(|| {
                    let found = ask.argument(path).map_or_else(|| "nothing".to_owned(), |value| ask.shown(path, value));
                    Note { what: format!("input{path}"), found, holds: ask.argument(path).is_some() }
                });
            }
        });
        ask.note(|| {
            let found = held.as_ref().map_or_else(|fault| fault.to_string(), ToString::to_string);
            Note { what: format!("when {}", self.source), found, holds: matches!(held, Ok(true)) }
        });
        held
    }

    fn each<'a>(&'a self, f: &mut dyn FnMut(&'a Node)) {
        if let Ok(root) = &self.compiled {
            root.each(f);
        }
    }
}

impl Node {
    fn each<'a>(&'a self, f: &mut dyn FnMut(&'a Self)) {
        f(self);
        match &self.kind {
            Kind::Field(node, _) | Kind::Has(node) | Kind::Not(node) | Kind::Negate(node) | Kind::Matches(node, _) => node.each(f),
            Kind::Index(a, b) => {
                a.each(f);
                b.each(f);
            }
            Kind::And(nodes) | Kind::Or(nodes) | Kind::List(nodes) | Kind::Call(_, nodes) => nodes.iter().for_each(|node| node.each(f)),
            Kind::If(nodes) => nodes.iter().for_each(|node| node.each(f)),
            Kind::Compare(_, nodes) | Kind::Arithmetic(_, nodes) | Kind::In(nodes) => nodes.iter().for_each(|node| node.each(f)),
            Kind::Comprehension(each) => {
                [&each.range, &each.init, &each.condition, &each.step, &each.result].into_iter().for_each(|n| n.each(f))
            }
            Kind::Null
            | Kind::Bool(_)
            | Kind::Number(_)
            | Kind::Text(_)
            | Kind::Input(_)
            | Kind::Result(_)
            | Kind::Variable(_)
            | Kind::Local(_)
            | Kind::CameFrom(..)
            | Kind::LimitUsage(_) => {}
        }
    }
}
