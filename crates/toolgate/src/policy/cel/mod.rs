//! `when`: conditions in CEL, with exact numbers.
//!
//! The language is CEL as the `cel` crate parses it. It is evaluated here and not there, because there numbers are
//! doubles and machine integers, a money column is not, and because every reference is checked against the schemas
//! of the tools before the first call. Two things are stricter than in CEL: all numbers are exact decimals of one
//! type, and a fault on the left of `&&` or `||` is a fault of the whole, so that nothing passes by being absent.

mod eval;
mod lower;
mod ops;
mod ty;
mod types;

use std::ops::Range;
use std::sync::Arc;

use regex::Regex;
use rust_decimal::Decimal;

pub(super) use ty::{Ty, of_schema};

use super::flow::each_value;
use super::never::NEVER_TRUE;
use super::{Ask, Fault, Limit, Needs, Note, Problem};
use crate::json::Pointer;
use crate::session::Evidence;
use crate::tool::Spec;

/// Longest expression, in bytes.
pub const MAX_LENGTH: usize = 2_000;
/// Most operators and dots.
pub const MAX_OPERATORS: usize = 200;
/// Deepest nesting.
pub const MAX_DEPTH: usize = 32;

/// A condition, compiled.
///
/// ```
/// use toolgate::policy::Deny;
/// let rule = Deny::new("office_hours", ["call_customer"]).when_cel("now.getHours() < 8 || now.getHours() >= 18");
/// ```
#[derive(Debug, Clone)]
pub struct Expression {
    source: Arc<str>,
    /// Why it cannot be evaluated, where it cannot.
    compiled: Result<Arc<Node>, Vec<Problem>>,
    /// The limits that `sum_of` names.
    limits: Vec<Limit>,
}

/// An expression, ready to be evaluated.
#[derive(Debug, Clone)]
struct Node {
    kind: Kind,
    /// Bytes of the source.
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
    Name(Name),
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
    /// What a limit has used.
    Used(Arc<str>),
    Each(Box<Each>),
}

/// What CEL's macros come to.
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
    Same,
    SumOf,
    Size,
    StartsWith,
    EndsWith,
    Contains,
    LowerAscii,
    Part(Part),
}

/// A part of a moment.
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
    /// Compiles an expression. What is wrong with it is said by [`super::Policy::problems`] of the rule that holds it.
    #[must_use]
    pub fn new(source: &str) -> Self {
        Self { source: source.into(), compiled: lower::compile(source).map(Arc::new), limits: Vec::new() }
    }

    /// The text of it.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Lets `sum_of("name")` read a limit. One that reads none carries none: there may be many.
    pub(super) fn reads(&mut self, limit: &Limit) {
        let mut asks = false;
        self.each(&mut |node| asks |= matches!(node.kind, Kind::Used(_)));
        if asks {
            self.limits.push(limit.clone());
        }
    }

    /// What is wrong with it for the tools that its rule governs, in an agent with these tools.
    pub(super) fn problems(&self, field: &str, governed: &[&Spec], tools: &[&Spec], evidence: Option<&[&Spec]>) -> Vec<Problem> {
        let placed = |problem: Problem| Problem { field: field.to_owned(), ..problem };
        let root = match &self.compiled {
            Ok(root) => root,
            Err(problems) => return problems.iter().cloned().map(placed).collect(),
        };
        let rule = types::Context { tools, evidence, limits: &self.limits };
        let mut problems: Vec<Problem> = Vec::new();
        let mut never = Vec::new();
        let mut vain: Option<Vec<types::Never>> = None;
        for tool in governed {
            let checked = types::check(root, tool, &rule);
            never.extend(checked.never);
            vain = Some(match vain {
                None => checked.vain,
                Some(known) => known.into_iter().filter(|(span, _)| checked.vain.iter().any(|(other, _)| other == span)).collect(),
            });
            for problem in checked.wrong.into_iter().map(placed) {
                if !problems.contains(&problem) {
                    problems.push(problem);
                }
            }
        }
        // For some of the tools it may well be out of the question.
        if never.len() == governed.len() {
            problems.extend(never.into_iter().next().map(placed));
        } else if problems.is_empty() {
            let told =
                |(span, help): types::Never| Problem::new("this can never be true").within(span).help(help).warning().found_as(NEVER_TRUE);
            problems.extend(vain.unwrap_or_default().into_iter().map(told).map(placed));
        }
        problems
    }

    /// The sources whose values it asks about, if it does.
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
                // Where there are too many, the evaluation says so.
                let _ = each_value(ask, path, &mut |place, leaf, _| needs.origins.push((place.to_owned(), leaf.clone())));
            }
            Kind::Used(name) => {
                let Some(limit) = self.limit(name) else { return };
                crate::policy::Policy::needs(limit, ask, needs);
                match limit.counter(ask) {
                    Ok(counter) => needs.counters.push((counter, limit.window())),
                    // Whose counter it is may hang on evidence that is not there yet.
                    Err(_) => needs.again = true,
                }
            }
            _ => {}
        });
    }

    fn limit(&self, name: &str) -> Option<&Limit> {
        self.limits.iter().find(|limit| limit.is_called(name))
    }

    /// Whether it holds. `proof` is what `result` speaks of.
    pub(super) fn holds(&self, ask: &Ask<'_>, proof: Option<&Evidence>) -> Result<bool, Fault> {
        let root = self.compiled.as_ref().map_err(|_| Fault::new("its expression does not compile"))?;
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
            Kind::Each(each) => [&each.range, &each.init, &each.condition, &each.step, &each.result].into_iter().for_each(|n| n.each(f)),
            Kind::Null
            | Kind::Bool(_)
            | Kind::Number(_)
            | Kind::Text(_)
            | Kind::Input(_)
            | Kind::Result(_)
            | Kind::Name(_)
            | Kind::Local(_)
            | Kind::CameFrom(..)
            | Kind::Used(_) => {}
        }
    }
}
