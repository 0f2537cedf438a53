//! Type-checks expressions against the schemas of the tools, before the first call.

use std::ops::Range;

use rust_decimal::Decimal;

use super::{Arithmetic, Compare, Each, Function, Kind, Name, Node, Part};
use crate::diagnostic::lacking;
use crate::policy::cel::schema_type::{Ty, numbers, of_schema, texts};
use crate::policy::cel::value::{decimal, duration, proved_in};
use crate::policy::{Limit, Problem};
use crate::provenance::USER;
use crate::schema::{At, at};
use crate::tool::{Extra, Spec};
use toolgate_json::Pointer;

/// A comparison that a schema rules out, and the values that the schema allows.
pub(crate) type Never = (Range<usize>, String);

/// The result of checking an expression for one tool.
#[derive(Default)]
pub(crate) struct Checked {
    /// The problems of the expression.
    pub(crate) errors: Vec<Problem>,
    /// The problem that the expression can never be true; an error if this holds for all tools.
    pub(crate) always_false: Option<Problem>,
    /// Comparisons of arguments that can never be true.
    pub(crate) unsatisfiable: Vec<Never>,
}

/// Checks an expression for one tool.
pub(crate) fn check(root: &Node, tool: &Spec, rule: &Context<'_>) -> Checked {
    let mut checking = Checking { tool, context: rule, problems: Vec::new(), unsatisfiable: Vec::new() };
    let ty = checking.ty(root, &mut Vec::new());
    let Checking { problems: mut wrong, unsatisfiable: never, .. } = checking;
    if !wrong.is_empty() {
        return Checked { errors: wrong, ..Checked::default() };
    }
    let first = || never.first().cloned();
    let impossible = match ty {
        Ty::Any | Ty::Bool(None | Some(true)) => None,
        Ty::Bool(Some(false)) => {
            let help = || (root.span.clone(), "remove the rule, or change the expression".to_owned());
            let (span, help) = first().unwrap_or_else(help);
            Some(Problem::new("this can never be true").within(span).help(help))
        }
        other => {
            let problem = Problem::new(format!("a condition must be true or false, but this is {}", other.kind()));
            wrong.push(problem.within(root.span.clone()).help("compare it with something"));
            None
        }
    };
    let mut about_arguments = Vec::new();
    root.each(&mut |node| {
        if matches!(node.kind, Kind::Compare(..) | Kind::In(_)) && speaks_of_arguments(node) {
            about_arguments.push(node.span.clone());
        }
    });
    let mut vain: Vec<Never> = Vec::new();
    for (span, help) in never {
        if about_arguments.contains(&span) && !vain.iter().any(|(known, _)| *known == span) {
            vain.push((span, help));
        }
    }
    Checked { errors: wrong, always_false: impossible, unsatisfiable: vain }
}

fn speaks_of_arguments(node: &Node) -> bool {
    let mut found = false;
    node.each(&mut |node| found |= matches!(node.kind, Kind::Input(_)));
    found
}

/// The names that an expression can refer to.
pub(crate) struct Context<'s> {
    /// All tools of the agent.
    pub(crate) tools: &'s [&'s Spec],
    /// The tools whose evidence is `result`, if `result` is available.
    pub(crate) evidence: Option<&'s [&'s Spec]>,
    /// The limits that can be read.
    pub(crate) limits: &'s [Limit],
}

struct Checking<'s> {
    tool: &'s Spec,
    context: &'s Context<'s>,
    problems: Vec<Problem>,
    /// The comparisons that a schema rules out.
    unsatisfiable: Vec<Never>,
}

impl Checking<'_> {
    fn wrong(&mut self, node: &Node, problem: Problem) -> Ty {
        self.problems.push(problem.within(node.span.clone()));
        Ty::Any
    }

    fn ty(&mut self, node: &Node, locals: &mut Vec<Ty>) -> Ty {
        match &node.kind {
            Kind::Null => Ty::Null,
            Kind::Bool(value) => Ty::Bool(Some(*value)),
            Kind::Number(number) => Ty::Number(Some(*number), Some(*number)),
            Kind::Text(text) => Ty::Text(Some(vec![text.to_string()])),
            Kind::Input(path) => self.input(node, path),
            Kind::Result(path) => self.result(node, path),
            Kind::Variable(Name::Now) => Ty::Time,
            Kind::Variable(_) => Ty::Text(None),
            Kind::Local(slot) => locals.get(*slot).cloned().unwrap_or(Ty::Any),
            Kind::Field(of, name) => {
                let of = self.ty(of, locals);
                self.member(node, of, name)
            }
            Kind::Index(of, index) => {
                self.ty(index, locals);
                match self.ty(of, locals) {
                    Ty::List(item) => *item,
                    Ty::Any | Ty::Object(..) => Ty::Any,
                    other => self.wrong(node, Problem::new(format!("{} has no items", other.kind()))),
                }
            }
            Kind::Has(of) => {
                self.ty(of, locals);
                Ty::Bool(None)
            }
            Kind::Not(of) => match self.bool(of, locals) {
                Some(value) => Ty::Bool(Some(!value)),
                None => Ty::Bool(None),
            },
            Kind::Negate(of) => match self.ty(of, locals) {
                Ty::Number(low, high) => Ty::Number(high.map(|n| -n), low.map(|n| -n)),
                ty @ (Ty::Any | Ty::Duration) => ty,
                other => self.wrong(node, Problem::new(format!("{} cannot be negated", other.kind()))),
            },
            Kind::And(nodes) => Ty::Bool(self.logic(nodes, locals, false)),
            Kind::Or(nodes) => Ty::Bool(self.logic(nodes, locals, true)),
            Kind::If(nodes) => {
                let [condition, then, otherwise] = &**nodes;
                self.bool(condition, locals);
                self.ty(then, locals).join(self.ty(otherwise, locals))
            }
            Kind::Compare(op, nodes) => {
                let [a, b] = &**nodes;
                let (left, right) = (self.ty(a, locals), self.ty(b, locals));
                self.compare(node, *op, &left, &right)
            }
            Kind::Arithmetic(op, nodes) => {
                let [a, b] = &**nodes;
                let (left, right) = (self.ty(a, locals), self.ty(b, locals));
                self.arithmetic(node, *op, left, right)
            }
            Kind::In(nodes) => {
                let [a, list] = &**nodes;
                let (item, list) = (self.ty(a, locals), self.ty(list, locals));
                self.is_in(node, &item, &list)
            }
            Kind::List(nodes) => Ty::List(Box::new(nodes.iter().map(|node| self.ty(node, locals)).reduce(Ty::join).unwrap_or(Ty::Any))),
            Kind::Call(function, nodes) => self.call(node, *function, nodes, locals),
            Kind::Matches(of, _) => {
                self.wants(of, &Ty::Text(None), locals);
                Ty::Bool(None)
            }
            Kind::CameFrom(path, source) => {
                self.input(node, path);
                self.source(node, source);
                Ty::Bool(None)
            }
            Kind::LimitUsage(name) => {
                if !self.context.limits.iter().any(|limit| limit.is_called(name)) {
                    let problem = Problem::new(format!("unknown limit `{}`", toolgate_text::shown(name)));
                    let names: Vec<&str> = self.context.limits.iter().map(crate::policy::Policy::name).collect();
                    let problem = problem.help("`sum_of` takes the name of a `limit` rule").did_you_mean(name, names.iter());
                    return self.wrong(node, problem);
                }
                let lacking = self.context.limits.iter().filter(|limit| limit.is_called(name)).find_map(|limit| limit.lacks(self.tool));
                if let Some(path) = lacking {
                    let message = format!(
                        "the limit `{}` depends on `{path}`, which `{}` does not accept",
                        toolgate_text::shown(name),
                        self.tool.name()
                    );
                    return self.wrong(node, Problem::new(message).help("use it in a rule for the tools of the limit"));
                }
                Ty::Number(Some(Decimal::ZERO), None)
            }
            Kind::Comprehension(each) => self.each(each, locals),
        }
    }

    fn input(&mut self, node: &Node, path: &Pointer) -> Ty {
        let Some(root) = self.tool.input_schema() else { return Ty::Any };
        match at(self.tool, path) {
            At::Known(schema) => of_schema(schema, root, self.tool.extra),
            At::Open => Ty::Any,
            At::Missing(name, known) => self.wrong(node, lacking(self.tool, path, &name, &known)),
        }
    }

    fn result(&mut self, node: &Node, path: &Pointer) -> Ty {
        let Some(sources) = self.context.evidence else {
            return self.wrong(node, Problem::new("`result` is not available here").help("use `result` in a `require` rule"));
        };
        let mut joined: Option<Ty> = None;
        for source in sources {
            let declared: Vec<String> = source.proves.iter().map(ToString::to_string).collect();
            let Some((field, _)) = proved_in(declared.iter().map(String::as_str), path) else {
                let wanted = path.parts().join(".");
                let known: Vec<String> = source.proves.iter().map(|p| p.parts().join(".")).collect();
                let problem = Problem::new(format!("`{}` does not declare that it proves `{path}`", source.name()));
                return self.wrong(node, problem.help("declare it with `proves`").did_you_mean(&wanted, known.iter()));
            };
            let ty = source.output_schema().filter(|_| Pointer::from(field) == *path).map_or(Ty::Any, |schema| {
                let found = path.parts().iter().try_fold(of_schema(schema, schema, Extra::Pass), |ty, part| match ty {
                    Ty::Object(mut members, _) => members.remove(part),
                    _ => None,
                });
                found.unwrap_or(Ty::Any)
            });
            joined = Some(joined.map_or(ty.clone(), |known| known.join(ty)));
        }
        joined.unwrap_or(Ty::Any)
    }

    /// Reports a source that does not exist or that is untrusted.
    fn source(&mut self, node: &Node, source: &str) {
        if source == USER || source == "untrusted" {
            return;
        }
        let tools = || self.context.tools.iter().map(|tool| tool.name());
        match self.context.tools.iter().find(|tool| tool.name() == source) {
            None => {
                let problem = Problem::new(format!("`{}` is not a source", toolgate_text::shown(source)))
                    .help("use the name of a tool, \"user\" or \"untrusted\"");
                let problem = problem.did_you_mean(source, tools().chain([USER, "untrusted"]));
                self.wrong(node, problem);
            }
            Some(tool) if tool.untrusted => {
                let problem = Problem::new(format!("`{source}` is untrusted, so it cannot be a source")).help("use \"untrusted\"");
                self.wrong(node, problem);
            }
            Some(_) => {}
        }
    }

    fn member(&mut self, node: &Node, of: Ty, name: &str) -> Ty {
        match of {
            Ty::Any => Ty::Any,
            Ty::Object(mut members, open) => match members.remove(name) {
                Some(ty) => ty,
                None if open => Ty::Any,
                None => self.wrong(
                    node,
                    Problem::new(format!("unknown member `{}`", toolgate_text::shown(name))).did_you_mean(name, members.keys()),
                ),
            },
            other => self.wrong(node, Problem::new(format!("{} has no `{}`", other.kind(), toolgate_text::shown(name)))),
        }
    }

    fn wants(&mut self, node: &Node, wanted: &Ty, locals: &mut Vec<Ty>) -> Ty {
        let ty = self.ty(node, locals);
        if ty.is_like(wanted) { ty } else { self.wrong(node, Problem::new(format!("expected {}, found {}", wanted.kind(), ty.kind()))) }
    }

    fn bool(&mut self, node: &Node, locals: &mut Vec<Ty>) -> Option<bool> {
        match self.wants(node, &Ty::Bool(None), locals) {
            Ty::Bool(known) => known,
            _ => None,
        }
    }

    /// Checks `&&` or `||`; `short` is the operand that decides the result: false or true.
    fn logic(&mut self, nodes: &[Node], locals: &mut Vec<Ty>, short: bool) -> Option<bool> {
        let known: Vec<Option<bool>> = nodes.iter().map(|node| self.bool(node, locals)).collect();
        if known.contains(&Some(short)) {
            return Some(short);
        }
        known.iter().all(|k| *k == Some(!short)).then_some(!short)
    }

    fn compare(&mut self, node: &Node, op: Compare, a: &Ty, b: &Ty) -> Ty {
        let ordered = !matches!(op, Compare::Equal | Compare::NotEqual);
        let unordered = |ty: &Ty| matches!(ty, Ty::Null | Ty::Bool(_) | Ty::List(_) | Ty::Object(..));
        let null = matches!(a, Ty::Null) || matches!(b, Ty::Null);
        if (ordered && (unordered(a) || unordered(b))) || !(a.is_like(b) || null) {
            let help = match (a, b) {
                (Ty::Text(_), Ty::Number(..)) | (Ty::Number(..), Ty::Text(_)) => "turn the text into a number with `decimal(…)`",
                (Ty::Text(_), Ty::Time) | (Ty::Time, Ty::Text(_)) => "turn the text into a time with `timestamp(…)`",
                (Ty::Text(_), Ty::Duration) | (Ty::Duration, Ty::Text(_)) => "turn the text into a duration with `duration(…)`",
                _ => "compare values of one kind",
            };
            return self.wrong(node, Problem::new(format!("{} cannot be compared with {}", a.kind(), b.kind())).help(help));
        }
        let known = match (a, b) {
            (Ty::Number(al, ah), Ty::Number(bl, bh)) => numbers(op, (*al, *ah), (*bl, *bh)),
            (Ty::Text(Some(a)), Ty::Text(Some(b))) => texts(op, a, b),
            _ => None,
        };
        if known == Some(false) {
            let help = allowed(a)
                .or_else(|| allowed(b))
                .map_or_else(|| "the result is always the same".to_owned(), |allowed| format!("allowed by the schema: {allowed}"));
            self.unsatisfiable.push((node.span.clone(), help));
        }
        Ty::Bool(known)
    }

    fn is_in(&mut self, node: &Node, item: &Ty, list: &Ty) -> Ty {
        match list {
            Ty::List(of) if !item.is_like(of) && !matches!(**of, Ty::Null) => {
                self.wrong(node, Problem::new(format!("cannot look for {} in a list that contains {}", item.kind(), of.kind())))
            }
            Ty::List(of) => match (item, &**of) {
                (Ty::Text(Some(a)), Ty::Text(Some(b))) if !a.iter().any(|a| b.contains(a)) => self.is_in_vain(node, item, of),
                (Ty::Number(al, ah), Ty::Number(bl, bh)) if numbers(Compare::Equal, (*al, *ah), (*bl, *bh)) == Some(false) => {
                    self.is_in_vain(node, item, of)
                }
                _ => Ty::Bool(None),
            },
            Ty::Any | Ty::Object(..) => Ty::Bool(None),
            other => self.wrong(node, Problem::new(format!("cannot look for a value in {}", other.kind()))),
        }
    }

    /// Records that a value is never in a list.
    fn is_in_vain(&mut self, node: &Node, item: &Ty, of: &Ty) -> Ty {
        let help = allowed(item)
            .or_else(|| allowed(of))
            .map_or_else(|| "the value is never in this list".to_owned(), |allowed| format!("allowed by the schema: {allowed}"));
        self.unsatisfiable.push((node.span.clone(), help));
        Ty::Bool(Some(false))
    }

    fn arithmetic(&mut self, node: &Node, op: Arithmetic, a: Ty, b: Ty) -> Ty {
        use Arithmetic::{Add, Subtract};
        match (op, a, b) {
            (_, Ty::Number(..) | Ty::Any, Ty::Number(..)) | (_, Ty::Number(..), Ty::Any) => Ty::Number(None, None),
            (Add, Ty::Text(_), Ty::Text(_) | Ty::Any) | (Add, Ty::Any, Ty::Text(_)) => Ty::Text(None),
            (Add, Ty::List(a), Ty::List(b)) => Ty::List(Box::new(a.join(*b))),
            (Add, Ty::Time, Ty::Duration) | (Add, Ty::Duration, Ty::Time) | (Subtract, Ty::Time, Ty::Duration) => Ty::Time,
            (Subtract, Ty::Time, Ty::Time) | (Add | Subtract, Ty::Duration, Ty::Duration) => Ty::Duration,
            (_, Ty::Any, _) | (_, _, Ty::Any) => Ty::Any,
            (_, a, b) => self.wrong(node, Problem::new(format!("cannot calculate with {} and {}", a.kind(), b.kind()))),
        }
    }

    fn call(&mut self, node: &Node, function: Function, nodes: &[Node], locals: &mut Vec<Ty>) -> Ty {
        let text = Ty::Text(None);
        let mut literal = |parse: &dyn Fn(&str) -> bool, wants: (&str, &str)| {
            if let Some(Node { kind: Kind::Text(text), span }) = nodes.first()
                && !parse(text)
            {
                let problem = Problem::new(format!("`{}` is not a valid {}", toolgate_text::shown(text), wants.0)).within(span.clone());
                self.problems.push(problem.help(format!("like `{}`", wants.1)));
            }
        };
        match function {
            Function::Decimal => literal(&|t| decimal(t).is_ok(), ("number", "12.50")),
            Function::Duration => literal(&|t| duration(t).is_ok(), ("duration", "90d`, `1h` or `30s")),
            Function::Timestamp => literal(&|t| t.parse::<jiff::Timestamp>().is_ok(), ("RFC 3339 time", "2026-01-31T12:00:00Z")),
            _ => {}
        }
        match function {
            Function::Decimal => {
                let ty = nodes.first().map_or(Ty::Any, |n| self.ty(n, locals));
                match ty {
                    Ty::Number(..) => ty,
                    Ty::Any | Ty::Text(_) => Ty::Number(None, None),
                    other => self.wrong(node, Problem::new(format!("{} is not a number", other.kind()))),
                }
            }
            Function::IsSame => {
                let [a, b] = nodes else { return Ty::Bool(None) };
                let (a, b) = (self.ty(a, locals), self.ty(b, locals));
                if !a.is_like(&b) {
                    return self.wrong(node, Problem::new(format!("{} is never the same as {}", a.kind(), b.kind())));
                }
                Ty::Bool(None)
            }
            Function::SumOf => {
                let Some(of) = nodes.first() else { return Ty::Any };
                match self.wants(of, &Ty::List(Box::new(Ty::Any)), locals) {
                    Ty::List(item) if !item.is_like(&Ty::Number(None, None)) => {
                        self.wrong(of, Problem::new(format!("`sum_of` needs numbers, but each item is {}", item.kind())))
                    }
                    _ => Ty::Number(None, None),
                }
            }
            Function::Size => {
                let Some(of) = nodes.first() else { return Ty::Any };
                match self.ty(of, locals) {
                    Ty::Any | Ty::Text(_) | Ty::List(_) | Ty::Object(..) => Ty::Number(Some(Decimal::ZERO), None),
                    other => self.wrong(node, Problem::new(format!("{} has no size", other.kind()))),
                }
            }
            Function::Part(part) => {
                if let Some((time, zone)) = nodes.split_first() {
                    self.wants(time, &Ty::Time, locals);
                    if let Some(Node { kind: Kind::Text(name), span }) = zone.first()
                        && jiff::tz::TimeZone::get(name).is_err()
                    {
                        let problem = Problem::new(format!("`{}` is not a time zone", toolgate_text::shown(name))).within(span.clone());
                        self.problems.push(problem.help("like `Europe/Berlin`"));
                    }
                }
                let most = match part {
                    Part::Year => return Ty::Number(None, None),
                    Part::Month => 11,
                    Part::Day => 30,
                    Part::Weekday => 6,
                    Part::Hour => 23,
                    Part::Minute => 59,
                };
                Ty::Number(Some(Decimal::ZERO), Some(Decimal::from(most)))
            }
            Function::Duration | Function::Timestamp | Function::LowerAscii => {
                for of in nodes {
                    self.wants(of, &text, locals);
                }
                match function {
                    Function::Duration => Ty::Duration,
                    Function::Timestamp => Ty::Time,
                    _ => text,
                }
            }
            Function::Glob | Function::StartsWith | Function::EndsWith | Function::Contains => {
                for of in nodes {
                    self.wants(of, &text, locals);
                }
                Ty::Bool(None)
            }
        }
    }

    fn each(&mut self, each: &Each, locals: &mut Vec<Ty>) -> Ty {
        let item = match self.ty(&each.range, locals) {
            Ty::List(item) => *item,
            Ty::Object(..) => Ty::Text(None),
            Ty::Any => Ty::Any,
            other => return self.wrong(&each.range, Problem::new(format!("cannot iterate over {}", other.kind()))),
        };
        let init = match self.ty(&each.init, locals) {
            // The accumulator starts with a literal and changes, so drop the known value.
            Ty::Bool(_) => Ty::Bool(None),
            Ty::Number(..) => Ty::Number(None, None),
            other => other,
        };
        locals.push(init);
        locals.push(item);
        self.ty(&each.condition, locals);
        let stepped = self.ty(&each.step, locals);
        locals.pop();
        if let Some(slot) = locals.last_mut() {
            *slot = match (slot.clone(), stepped) {
                (Ty::List(_), stepped @ Ty::List(_)) => stepped,
                (known, _) => known,
            };
        }
        let result = self.ty(&each.result, locals);
        locals.pop();
        match result {
            Ty::Bool(_) => Ty::Bool(None),
            other => other,
        }
    }
}

/// Describes the values that a type allows, if a schema restricts them.
fn allowed(ty: &Ty) -> Option<String> {
    match ty {
        Ty::Number(Some(low), Some(high)) if low == high => None,
        Ty::Number(Some(low), Some(high)) => Some(format!("between {low} and {high}")),
        Ty::Number(None, Some(high)) => Some(format!("at most {high}")),
        Ty::Number(Some(low), None) => Some(format!("at least {low}")),
        Ty::Text(Some(values)) if values.len() > 1 => {
            Some(format!("one of {}", values.iter().map(|v| format!("\"{v}\"")).collect::<Vec<_>>().join(", ")))
        }
        _ => None,
    }
}
