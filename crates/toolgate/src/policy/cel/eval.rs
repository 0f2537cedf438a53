//! Evaluation. What cannot be compared, added or multiplied exactly is a fault, and a fault is a denial. Only a division
//! is rounded, at 28 digits.

use std::borrow::Cow;
use std::cell::Cell;
use std::cmp::Ordering;

use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use rust_decimal::Decimal;
use serde_json::Value;

use super::{Arithmetic, Compare, Each, Expression, Function, Kind, Name, Node, Part};
use crate::json::{Pointer, decimal_of};
use crate::policy::flow::each_value;
use crate::policy::{Ask, Fault};
use crate::session::Evidence;

/// Most steps of one evaluation: macros walk lists that a model has written.
const MAX_STEPS: usize = 100_000;

#[derive(Debug, Clone)]
enum Val<'a> {
    Null,
    Bool(bool),
    Number(Decimal),
    Text(Cow<'a, str>),
    Time(Timestamp),
    Span(SignedDuration),
    /// An array or object of the arguments or of evidence.
    Json(&'a Value),
    List(Vec<Val<'a>>),
}

impl<'a> Val<'a> {
    fn of(value: &'a Value) -> Result<Self, Fault> {
        Ok(match value {
            Value::Null => Self::Null,
            Value::Bool(value) => Self::Bool(*value),
            Value::Number(_) => Self::Number(decimal_of(value).ok_or_else(|| Fault::new("a number cannot be compared exactly"))?),
            Value::String(text) => Self::Text(text.as_str().into()),
            Value::Array(_) | Value::Object(_) => Self::Json(value),
        })
    }

    const fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "true or false",
            Self::Number(_) => "a number",
            Self::Text(_) => "text",
            Self::Time(_) => "a time",
            Self::Span(_) => "a duration",
            Self::Json(Value::Object(_)) => "an object",
            Self::Json(_) | Self::List(_) => "a list",
        }
    }

    fn bool(&self) -> Result<bool, Fault> {
        match self {
            Self::Bool(value) => Ok(*value),
            other => Err(unfit("true or false", other)),
        }
    }

    fn text(&self) -> Result<&str, Fault> {
        match self {
            Self::Text(text) => Ok(text),
            other => Err(unfit("text", other)),
        }
    }

    fn items(&self) -> Result<Vec<Self>, Fault> {
        match self {
            Self::List(items) => Ok(items.clone()),
            Self::Json(Value::Array(items)) => items.iter().map(Self::of).collect(),
            // As in CEL, going through an object is going through its keys.
            Self::Json(Value::Object(map)) => Ok(map.keys().map(|key| Self::Text(key.as_str().into())).collect()),
            other => Err(unfit("a list", other)),
        }
    }

    /// How many items it has.
    const fn count(&self) -> usize {
        match self {
            Self::List(items) => items.len(),
            Self::Json(Value::Array(items)) => items.len(),
            _ => 0,
        }
    }

    /// How much there is to look through.
    fn length(&self) -> usize {
        match self {
            // A copy of it copies what was made on the way.
            Self::List(items) => items.iter().map(|item| 1 + item.length()).sum(),
            Self::Json(Value::Array(items)) => items.len(),
            Self::Json(Value::Object(map)) => map.len(),
            Self::Text(text) => text.len() / 16,
            _ => 0,
        }
    }
}

fn unfit(wanted: &str, got: &Val<'_>) -> Fault {
    Fault(format!("{wanted} is wanted, and there is {}", got.kind()))
}

pub(super) struct Evaluation<'a> {
    ask: Ask<'a>,
    proof: Option<&'a Evidence>,
    expression: &'a Expression,
    steps: Cell<usize>,
}

impl<'a> Evaluation<'a> {
    pub(super) fn new(ask: &Ask<'a>, proof: Option<&'a Evidence>, expression: &'a Expression) -> Self {
        Self { ask: *ask, proof, expression, steps: Cell::new(0) }
    }

    pub(super) fn holds(&self, root: &'a Node) -> Result<bool, Fault> {
        self.eval(root, &mut Vec::new())?.bool()
    }

    fn eval(&self, node: &'a Node, locals: &mut Vec<Val<'a>>) -> Result<Val<'a>, Fault> {
        self.charge(1)?;
        Ok(match &node.kind {
            Kind::Null => Val::Null,
            Kind::Bool(value) => Val::Bool(*value),
            Kind::Number(value) => Val::Number(*value),
            Kind::Text(text) => Val::Text((&**text).into()),
            Kind::Input(path) => Val::of(self.argument(path)?)?,
            Kind::Result(path) => Val::of(self.proved(path)?)?,
            Kind::Name(name) => self.name(*name),
            Kind::Local(slot) => {
                let local = locals.get(*slot).ok_or_else(|| Fault::new("a local name is gone"))?;
                self.charge(local.length())?;
                local.clone()
            }
            Kind::Field(of, name) => field(&self.eval(of, locals)?, name)?,
            Kind::Index(of, index) => {
                let (of, index) = (self.eval(of, locals)?, self.eval(index, locals)?);
                self.charge(of.length())?;
                index_of(&of, &index)?
            }
            Kind::Has(of) => Val::Bool(self.has(of, locals)?),
            Kind::Not(of) => Val::Bool(!self.eval(of, locals)?.bool()?),
            Kind::Negate(of) => match self.eval(of, locals)? {
                Val::Number(number) => Val::Number(-number),
                Val::Span(span) => Val::Span(span.checked_neg().ok_or_else(too_large)?),
                other => return Err(unfit("a number", &other)),
            },
            Kind::And(nodes) => {
                for node in nodes {
                    if !self.eval(node, locals)?.bool()? {
                        return Ok(Val::Bool(false));
                    }
                }
                Val::Bool(true)
            }
            Kind::Or(nodes) => {
                for node in nodes {
                    if self.eval(node, locals)?.bool()? {
                        return Ok(Val::Bool(true));
                    }
                }
                Val::Bool(false)
            }
            Kind::If(nodes) => {
                let [condition, then, otherwise] = &**nodes;
                let chosen = if self.eval(condition, locals)?.bool()? { then } else { otherwise };
                self.eval(chosen, locals)?
            }
            Kind::Compare(op, nodes) => {
                let [a, b] = &**nodes;
                let (a, b) = (self.eval(a, locals)?, self.eval(b, locals)?);
                Val::Bool(match op {
                    Compare::Equal => self.equals(&a, &b)?,
                    Compare::NotEqual => !self.equals(&a, &b)?,
                    _ => compare(*op, &a, &b)?,
                })
            }
            Kind::Arithmetic(op, nodes) => {
                let [a, b] = &**nodes;
                let (a, b) = (self.eval(a, locals)?, self.eval(b, locals)?);
                self.charge(a.length() + b.length())?;
                arithmetic(*op, a, b)?
            }
            Kind::In(nodes) => {
                let [a, b] = &**nodes;
                Val::Bool(self.is_in(&self.eval(a, locals)?, b, locals)?)
            }
            Kind::List(nodes) => Val::List(nodes.iter().map(|node| self.eval(node, locals)).collect::<Result<_, _>>()?),
            Kind::Call(Function::Same, nodes) => Val::Bool(self.same(nodes, locals)?),
            Kind::Call(function, nodes) => {
                let values = nodes.iter().map(|node| self.eval(node, locals)).collect::<Result<Vec<_>, _>>()?;
                self.charge(values.iter().map(Val::length).sum())?;
                apply(*function, &values)?
            }
            Kind::Matches(of, pattern) => {
                let text = self.eval(of, locals)?;
                self.charge(text.text()?.len() / 16)?;
                Val::Bool(pattern.is_match(text.text()?))
            }
            Kind::CameFrom(path, source) => Val::Bool(self.came_from(path, source)?),
            Kind::Used(name) => {
                let limit = self.expression.limit(name).ok_or_else(|| Fault(format!("there is no limit `{name}`")))?;
                Val::Number(self.ask.counter(&limit.counter(&self.ask)?, limit.window())?)
            }
            Kind::Each(each) => self.walk(each, locals)?,
        })
    }

    /// Steps are counted by what they cost: looking through a list is as many as it has items.
    fn charge(&self, steps: usize) -> Result<(), Fault> {
        self.steps.set(self.steps.get().saturating_add(steps));
        if self.steps.get() > MAX_STEPS { Err(Fault::new("the expression takes too many steps on these arguments")) } else { Ok(()) }
    }

    fn items(&self, of: &Val<'a>) -> Result<Vec<Val<'a>>, Fault> {
        self.charge(of.length())?;
        of.items()
    }

    /// Whether two values are the same. Lists of another length are not looked into.
    fn equals(&self, a: &Val<'a>, b: &Val<'a>) -> Result<bool, Fault> {
        self.charge(1)?;
        Ok(match (a, b) {
            (Val::Null, Val::Null) => true,
            (Val::Bool(a), Val::Bool(b)) => a == b,
            (Val::Number(a), Val::Number(b)) => a == b,
            (Val::Text(a), Val::Text(b)) => {
                self.charge(a.len().min(b.len()) / 16)?;
                a == b
            }
            (Val::Time(a), Val::Time(b)) => a == b,
            (Val::Span(a), Val::Span(b)) => a == b,
            (Val::Json(a @ Value::Object(_)), Val::Json(b @ Value::Object(_))) => {
                if a.as_object().map(serde_json::Map::len) != b.as_object().map(serde_json::Map::len) {
                    return Ok(false);
                }
                self.charge(weight(a))?;
                a == b
            }
            (Val::Json(Value::Array(_)) | Val::List(_), Val::Json(Value::Array(_)) | Val::List(_)) => {
                if a.count() != b.count() {
                    return Ok(false);
                }
                for (a, b) in self.items(a)?.iter().zip(&self.items(b)?) {
                    if !self.equals(a, b)? {
                        return Ok(false);
                    }
                }
                true
            }
            _ => false,
        })
    }

    fn argument(&self, path: &Pointer) -> Result<&'a Value, Fault> {
        self.ask.argument(path).ok_or_else(|| Fault(format!("there is no `{path}`, and the rule hangs on it")))
    }

    /// A proved field, or something inside one.
    fn proved(&self, path: &Pointer) -> Result<&'a Value, Fault> {
        let gone = || Fault(format!("the evidence holds no `{path}`"));
        let fields = self.proof.and_then(|proof| proof.fields.as_object()).ok_or_else(gone)?;
        proved_in(fields.keys().map(String::as_str), path)
            .and_then(|(field, rest)| fields.get(field).and_then(|value| rest.get(value)))
            .ok_or_else(gone)
    }

    fn name(&self, name: Name) -> Val<'a> {
        match name {
            Name::Session => Val::Text((&*self.ask.key.session).into()),
            Name::Principal => Val::Text((&*self.ask.key.principal).into()),
            Name::Agent => Val::Text((&*self.ask.key.agent).into()),
            Name::Tool => Val::Text(self.ask.tool.name().into()),
            Name::Now => Val::Time(self.ask.facts.now),
        }
    }

    fn has(&self, of: &'a Node, locals: &mut Vec<Val<'a>>) -> Result<bool, Fault> {
        Ok(match &of.kind {
            Kind::Input(path) => self.ask.argument(path).is_some(),
            Kind::Result(path) => self.proved(path).is_ok(),
            Kind::Field(inner, name) => match self.eval(inner, locals)? {
                Val::Json(Value::Object(map)) => map.contains_key(name),
                other => return Err(unfit("an object", &other)),
            },
            _ => true,
        })
    }

    /// What is absent is not the same as anything.
    fn same(&self, nodes: &'a [Node], locals: &mut Vec<Val<'a>>) -> Result<bool, Fault> {
        let [a, b] = nodes else { return Err(Fault::new("`same` compares two values")) };
        for node in [a, b] {
            if matches!(node.kind, Kind::Input(_) | Kind::Result(_) | Kind::Field(..)) && !self.has(node, locals)? {
                return Ok(false);
            }
        }
        let (a, b) = (self.eval(a, locals)?, self.eval(b, locals)?);
        self.equals(&a, &b)
    }

    fn is_in(&self, a: &Val<'a>, list: &'a Node, locals: &mut Vec<Val<'a>>) -> Result<bool, Fault> {
        // A literal list need not be built to be looked through.
        if let Kind::List(nodes) = &list.kind {
            for node in nodes {
                let item = self.eval(node, locals)?;
                if self.equals(a, &item)? {
                    return Ok(true);
                }
            }
            return Ok(false);
        }
        let list = self.eval(list, locals)?;
        if let (Val::Text(key), Val::Json(Value::Object(map))) = (a, &list) {
            return Ok(map.contains_key(&**key));
        }
        for item in self.items(&list)? {
            if self.equals(a, &item)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Of many values one from an untrusted source is enough, and all must be from a trusted one.
    fn came_from(&self, path: &Pointer, source: &str) -> Result<bool, Fault> {
        if self.ask.argument(path).is_none() {
            return Err(Fault(format!("there is no `{path}`, and the rule hangs on it")));
        }
        let (mut any, mut all, mut fault, mut count) = (false, true, None, 0);
        each_value(&self.ask, path, &mut |place, _| match self.ask.origin(place) {
            Ok(known) => {
                count += 1;
                any |= known.may_be_untrusted();
                all &= known.comes_from(source);
            }
            Err(missing) => fault = Some(missing),
        })?;
        self.charge(count)?;
        match fault {
            Some(fault) => Err(fault),
            None if source == "untrusted" => Ok(any),
            // Of nothing nobody can say where it comes from.
            None if count == 0 => Err(Fault(format!("there is no value at `{path}`, and the rule hangs on it"))),
            None => Ok(all),
        }
    }

    fn walk(&self, each: &'a Each, locals: &mut Vec<Val<'a>>) -> Result<Val<'a>, Fault> {
        let range = self.eval(&each.range, locals)?;
        let items = self.items(&range)?;
        let depth = locals.len();
        let accumulated = self.eval(&each.init, locals)?;
        locals.push(accumulated);
        let walked = (|| {
            for item in items {
                locals.push(item);
                // What `map` and `filter` come to is a list that grows: it is added to, not copied.
                if let Some((condition, element)) = pushes(&each.step, depth) {
                    let taken = condition.map_or(Ok(true), |condition| self.eval(condition, locals)?.bool())?;
                    let element = if taken { Some(self.eval(element, locals)?) } else { None };
                    locals.pop();
                    if let (Some(Val::List(list)), Some(element)) = (locals.get_mut(depth), element) {
                        list.push(element);
                    }
                    continue;
                }
                let go_on = self.eval(&each.condition, locals)?.bool()?;
                let next = if go_on { Some(self.eval(&each.step, locals)?) } else { None };
                locals.pop();
                let Some(next) = next else { break };
                if let Some(slot) = locals.get_mut(depth) {
                    *slot = next;
                }
            }
            self.eval(&each.result, locals)
        })();
        locals.truncate(depth);
        walked
    }
}

/// The `x` of `list + [x]`, for the list in this slot.
fn pushed_element(node: &Node, slot: usize) -> Option<&Node> {
    let Kind::Arithmetic(Arithmetic::Add, pair) = &node.kind else { return None };
    match &**pair {
        [Node { kind: Kind::Local(of), .. }, Node { kind: Kind::List(elements), .. }] if *of == slot => match elements.as_slice() {
            [element] => Some(element),
            _ => None,
        },
        _ => None,
    }
}

/// What a step adds to the list in this slot, and on which condition, if that is all it does.
fn pushes(step: &Node, slot: usize) -> Option<(Option<&Node>, &Node)> {
    let is_slot = |node: &Node| matches!(node.kind, Kind::Local(of) if of == slot);
    match &step.kind {
        Kind::Arithmetic(..) => pushed_element(step, slot).map(|element| (None, element)),
        Kind::If(nodes) => match &**nodes {
            [condition, then, otherwise] if is_slot(otherwise) => pushed_element(then, slot).map(|element| (Some(condition), element)),
            _ => None,
        },
        _ => None,
    }
}

/// The declared field that a path lies in, and the rest of the path.
pub(super) fn proved_in<'f>(fields: impl Iterator<Item = &'f str>, path: &Pointer) -> Option<(&'f str, Pointer)> {
    let inside = |field: &'f str| {
        let declared = Pointer::from(field);
        let rest = path.parts().strip_prefix(declared.parts())?.to_vec();
        Some((field, Pointer::of(rest)))
    };
    fields.filter_map(inside).min_by_key(|(_, rest)| rest.parts().len())
}

/// How much there is in a value, all in all.
fn weight(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(weight).sum::<usize>(),
        Value::Object(map) => 1 + map.values().map(weight).sum::<usize>(),
        Value::String(text) => 1 + text.len() / 16,
        _ => 1,
    }
}

fn too_large() -> Fault {
    Fault::new("the figures are too large or too fine to be kept exactly")
}

fn field<'a>(of: &Val<'a>, name: &str) -> Result<Val<'a>, Fault> {
    match of {
        // The name may be a value of the arguments, and what a fault says is shown.
        Val::Json(Value::Object(map)) => {
            map.get(name).map_or_else(|| Err(Fault::new("an object lacks a member that the rule hangs on")), Val::of)
        }
        other => Err(unfit("an object", other)),
    }
}

fn index_of<'a>(of: &Val<'a>, index: &Val<'a>) -> Result<Val<'a>, Fault> {
    match (of, index) {
        (Val::Json(Value::Object(_)), Val::Text(name)) => field(of, name),
        (_, Val::Number(number)) => {
            let at = usize::try_from(*number).ok().filter(|_| number.is_integer()).ok_or_else(|| Fault::new("there is no such index"))?;
            of.items()?.into_iter().nth(at).ok_or_else(|| Fault::new("a list lacks an item that the rule hangs on"))
        }
        (_, other) => Err(unfit("an index", other)),
    }
}

fn compare(op: Compare, a: &Val<'_>, b: &Val<'_>) -> Result<bool, Fault> {
    let order = match (a, b) {
        (Val::Number(a), Val::Number(b)) => a.cmp(b),
        (Val::Text(a), Val::Text(b)) => a.cmp(b),
        (Val::Time(a), Val::Time(b)) => a.cmp(b),
        (Val::Span(a), Val::Span(b)) => a.cmp(b),
        _ => return Err(Fault(format!("{} cannot be compared with {}", a.kind(), b.kind()))),
    };
    Ok(match op {
        Compare::Less => order == Ordering::Less,
        Compare::LessOrEqual => order != Ordering::Greater,
        Compare::Greater => order == Ordering::Greater,
        Compare::GreaterOrEqual | Compare::Equal | Compare::NotEqual => order != Ordering::Less,
    })
}

fn arithmetic<'a>(op: Arithmetic, a: Val<'a>, b: Val<'a>) -> Result<Val<'a>, Fault> {
    use Arithmetic::{Add, Divide, Multiply, Remainder, Subtract};
    Ok(match (op, a, b) {
        (Add, Val::Number(a), Val::Number(b)) => Val::Number(add(a, b)?),
        (Subtract, Val::Number(a), Val::Number(b)) => Val::Number(add(a, -b)?),
        (Multiply, Val::Number(a), Val::Number(b)) => {
            let product = a.checked_mul(b).ok_or_else(too_large)?;
            // A product that was rounded has fewer places than its factors together.
            let exact = a.is_zero() || b.is_zero() || product.scale() == a.scale() + b.scale();
            Val::Number(if exact { product } else { return Err(too_large()) })
        }
        (Divide, Val::Number(a), Val::Number(b)) => Val::Number(a.checked_div(b).ok_or_else(|| Fault::new("nothing is divided by zero"))?),
        (Remainder, Val::Number(a), Val::Number(b)) => {
            Val::Number(a.checked_rem(b).ok_or_else(|| Fault::new("nothing is divided by zero"))?)
        }
        (Add, Val::Text(a), Val::Text(b)) => Val::Text(format!("{a}{b}").into()),
        (Add, Val::List(mut a), Val::List(b)) => {
            a.extend(b);
            Val::List(a)
        }
        (Add, Val::Time(time), Val::Span(span)) | (Add, Val::Span(span), Val::Time(time)) => {
            Val::Time(time.checked_add(span).map_err(|_| too_large())?)
        }
        (Subtract, Val::Time(time), Val::Span(span)) => Val::Time(time.checked_sub(span).map_err(|_| too_large())?),
        (Subtract, Val::Time(a), Val::Time(b)) => Val::Span(a.duration_since(b)),
        (Add, Val::Span(a), Val::Span(b)) => Val::Span(a.checked_add(b).ok_or_else(too_large)?),
        (Subtract, Val::Span(a), Val::Span(b)) => Val::Span(a.checked_sub(b).ok_or_else(too_large)?),
        (_, a, b) => return Err(Fault(format!("there is no arithmetic of {} with {}", a.kind(), b.kind()))),
    })
}

/// Exact, or a fault.
fn add(a: Decimal, b: Decimal) -> Result<Decimal, Fault> {
    let sum = a.checked_add(b).ok_or_else(too_large)?;
    if sum.checked_sub(a) == Some(b) { Ok(sum) } else { Err(too_large()) }
}

fn apply<'a>(function: Function, values: &[Val<'a>]) -> Result<Val<'a>, Fault> {
    let missing = || Fault::new("a function lacks an argument");
    let first = values.first().ok_or_else(missing)?;
    let second = || values.get(1).ok_or_else(missing);
    Ok(match function {
        Function::Decimal => match first {
            Val::Number(number) => Val::Number(*number),
            Val::Text(text) => Val::Number(decimal(text)?),
            other => return Err(unfit("a number", other)),
        },
        Function::Duration => Val::Span(duration(first.text()?)?),
        Function::Timestamp => match first {
            Val::Time(time) => Val::Time(*time),
            other => Val::Time(other.text()?.parse().map_err(|_| Fault::new("this is no RFC 3339 time"))?),
        },
        Function::Glob => Val::Bool(crate::names::glob(second()?.text()?, first.text()?)),
        Function::SumOf => {
            let mut sum = Decimal::ZERO;
            for item in first.items()? {
                match item {
                    Val::Number(number) => sum = add(sum, number)?,
                    other => return Err(unfit("a number", &other)),
                }
            }
            Val::Number(sum)
        }
        Function::Size => Val::Number(match first {
            Val::Text(text) => text.chars().count().into(),
            other => other.items()?.len().into(),
        }),
        Function::StartsWith => Val::Bool(first.text()?.starts_with(second()?.text()?)),
        Function::EndsWith => Val::Bool(first.text()?.ends_with(second()?.text()?)),
        Function::Contains => Val::Bool(first.text()?.contains(second()?.text()?)),
        Function::LowerAscii => Val::Text(first.text()?.to_ascii_lowercase().into()),
        Function::Part(part) => {
            let Val::Time(time) = first else { return Err(unfit("a time", first)) };
            let zone = match values.get(1) {
                Some(name) => TimeZone::get(name.text()?).map_err(|_| Fault::new("this is no time zone"))?,
                None => TimeZone::UTC,
            };
            let zoned = time.to_zoned(zone);
            Val::Number(match part {
                Part::Year => zoned.year().into(),
                // CEL counts months and days of the month from zero.
                Part::Month => (zoned.month() - 1).into(),
                Part::Day => (zoned.day() - 1).into(),
                Part::Weekday => zoned.weekday().to_sunday_zero_offset().into(),
                Part::Hour => zoned.hour().into(),
                Part::Minute => zoned.minute().into(),
            })
        }
        Function::Same => return Err(missing()),
    })
}

pub(super) fn decimal(text: &str) -> Result<Decimal, Fault> {
    let number = crate::json::canonical_number(text.trim()).ok().map(Value::Number);
    number.as_ref().and_then(decimal_of).ok_or_else(|| Fault::new("this is no number that can be kept exactly"))
}

pub(super) fn duration(text: &str) -> Result<SignedDuration, Fault> {
    crate::clock::duration(text).ok_or_else(|| Fault::new("this is no duration, like `15m` or `24h`"))
}
