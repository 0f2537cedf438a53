//! Evaluates compiled expressions.
//!
//! A value that cannot be compared, added or multiplied exactly is a fault, and a fault is a
//! denial. Only division rounds, at 28 digits.

use std::cell::Cell;

use serde_json::Value;

use super::{Arithmetic, Compare, Each, Expression, Function, Kind, Name, Node};
use crate::policy::cel::value::{Val, apply, arithmetic, compare, field, index_of, proved_in, too_large, unfit, unlike, weight};
use crate::policy::flow::each_value;
use crate::policy::{Ask, Fault};
use crate::session::state::Evidence;
use toolgate_json::Pointer;

/// Maximum number of steps of one evaluation, because macros iterate over lists from the model.
const MAX_STEPS: usize = 100_000;

pub(super) struct Evaluation<'a> {
    ask: Ask<'a>,
    evidence: Option<&'a Evidence>,
    expression: &'a Expression,
    steps: Cell<usize>,
}

impl<'a> Evaluation<'a> {
    pub(super) fn new(ask: &Ask<'a>, proof: Option<&'a Evidence>, expression: &'a Expression) -> Self {
        Self { ask: *ask, evidence: proof, expression, steps: Cell::new(0) }
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
            Kind::Variable(name) => self.name(*name),
            Kind::Local(slot) => {
                let local = locals.get(*slot).ok_or_else(|| Fault::new("a local variable is not defined"))?;
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
                Val::Duration(span) => Val::Duration(span.checked_neg().ok_or_else(too_large)?),
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
                let asks_for_null = matches!(a.kind, Kind::Null) || matches!(b.kind, Kind::Null);
                let (a, b) = (self.eval(a, locals)?, self.eval(b, locals)?);
                let are_null = matches!((&a, &b), (Val::Null, Val::Null));
                Val::Bool(match op {
                    // Any value can be compared with a literal null.
                    Compare::Equal if asks_for_null => are_null,
                    Compare::NotEqual if asks_for_null => !are_null,
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
                let [a, list] = &**nodes;
                Val::Bool(self.is_in(a, list, locals)?)
            }
            Kind::List(nodes) => Val::List(nodes.iter().map(|node| self.eval(node, locals)).collect::<Result<_, _>>()?),
            Kind::Call(Function::IsSame, nodes) => Val::Bool(self.same(nodes, locals)?),
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
            Kind::LimitUsage(name) => {
                let limit = self.expression.limit(name).ok_or_else(|| Fault(format!("unknown limit `{name}`")))?;
                Val::Number(self.ask.counter(&limit.counter(&self.ask)?, limit.window())?)
            }
            Kind::Comprehension(each) => self.walk(each, locals)?,
        })
    }

    /// Adds steps to the budget; reading a list costs one step for each item.
    fn charge(&self, steps: usize) -> Result<(), Fault> {
        self.steps.set(self.steps.get().saturating_add(steps));
        if self.steps.get() > MAX_STEPS { Err(Fault::new("the expression takes too many steps on these arguments")) } else { Ok(()) }
    }

    fn items(&self, of: &Val<'a>) -> Result<Vec<Val<'a>>, Fault> {
        self.charge(of.length())?;
        of.items()
    }

    /// Returns whether two values are equal; lists of different length are not compared further.
    ///
    /// A tool may convert another type (`["admin"]` to `"admin"`, `"3"` to 3), so comparing two
    /// types is a fault.
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
            (Val::Duration(a), Val::Duration(b)) => a == b,
            (Val::Json(Value::Object(a)), Val::Json(Value::Object(b))) => {
                if a.len() != b.len() {
                    return Ok(false);
                }
                self.charge(a.len())?;
                if !a.keys().all(|key| b.contains_key(key)) {
                    return Ok(false);
                }
                for (a, b) in a.iter().filter_map(|(key, value)| Some((value, b.get(key)?))) {
                    if !self.equals(&Val::of(a)?, &Val::of(b)?)? {
                        return Ok(false);
                    }
                }
                true
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
            _ => return Err(unlike(a, b)),
        })
    }

    fn argument(&self, path: &Pointer) -> Result<&'a Value, Fault> {
        self.ask.argument(path).ok_or_else(|| Fault(format!("`{path}` is missing, and the rule depends on it")))
    }

    /// Returns a proved field or a value inside one.
    fn proved(&self, path: &Pointer) -> Result<&'a Value, Fault> {
        let gone = || Fault(format!("the evidence has no `{path}`"));
        let fields = self.evidence.and_then(|proof| proof.fields.as_object()).ok_or_else(gone)?;
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

    /// Returns whether two values are equal; an absent value equals nothing, null only null.
    fn same(&self, nodes: &'a [Node], locals: &mut Vec<Val<'a>>) -> Result<bool, Fault> {
        let [a, b] = nodes else { return Err(Fault::new("`same` compares two values")) };
        for node in [a, b] {
            if matches!(node.kind, Kind::Input(_) | Kind::Result(_) | Kind::Field(..)) && !self.has(node, locals)? {
                return Ok(false);
            }
        }
        let (a, b) = (self.eval(a, locals)?, self.eval(b, locals)?);
        if matches!(a, Val::Null) != matches!(b, Val::Null) {
            return Ok(false);
        }
        self.equals(&a, &b)
    }

    fn is_in(&self, a: &'a Node, list: &'a Node, locals: &mut Vec<Val<'a>>) -> Result<bool, Fault> {
        let asks_for_null = matches!(a.kind, Kind::Null);
        let a = self.eval(a, locals)?;
        // A literal list is searched without building it. It may contain several types, and the
        // type of `a` must be one of them.
        if let Kind::List(nodes) = &list.kind {
            let (mut is_alike, mut fault) = (false, None);
            for node in nodes {
                let item = self.eval(node, locals)?;
                match (&a, &item) {
                    (Val::Null, Val::Null) => return Ok(true),
                    _ if asks_for_null || matches!(node.kind, Kind::Null) => {}
                    _ if a.kind() != item.kind() => fault = fault.or_else(|| Some(unlike(&a, &item))),
                    _ if self.equals(&a, &item)? => return Ok(true),
                    _ => is_alike = true,
                }
            }
            return fault.filter(|_| !is_alike).map_or(Ok(false), Err);
        }
        let list = self.eval(list, locals)?;
        if let (Val::Text(key), Val::Json(Value::Object(map))) = (&a, &list) {
            return Ok(map.contains_key(&**key));
        }
        // Any other list comes from a call: an item of another type may mean the same value.
        let mut fault = None;
        for item in self.items(&list)? {
            match (&a, &item) {
                (Val::Null, Val::Null) => return Ok(true),
                _ if asks_for_null => {}
                _ if a.kind() != item.kind() => fault = fault.or_else(|| Some(unlike(&a, &item))),
                _ if self.equals(&a, &item)? => return Ok(true),
                _ => {}
            }
        }
        fault.map_or(Ok(false), Err)
    }

    /// Checks provenance: one untrusted value is enough for `untrusted`, all must come from a tool.
    fn came_from(&self, path: &Pointer, source: &str) -> Result<bool, Fault> {
        if self.ask.argument(path).is_none() {
            return Err(Fault(format!("`{path}` is missing, and the rule depends on it")));
        }
        let (mut any, mut all, mut fault, mut count) = (false, true, None, 0);
        let all_of_it = path.entries_or_scalars(self.ask.arguments.value()).iter().map(|(_, value)| weight(value)).sum();
        self.charge(all_of_it)?;
        each_value(&self.ask, path, &mut |place, _, _| match self.ask.origin(place) {
            Ok(known) => {
                count += 1;
                any |= known.may_be_untrusted();
                all &= known.comes_from(source);
            }
            Err(missing) => fault = Some(missing),
        })?;
        match fault {
            Some(fault) => Err(fault),
            None if source == "untrusted" => Ok(any),
            // Without a value, there is no provenance.
            None if count == 0 => Err(Fault(format!("there is no value at `{path}`, and the rule depends on it"))),
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
                // `map` and `filter` build a list: append to it instead of copying it each time.
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

/// Returns the `x` of `list + [x]`, for the list in this slot.
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

/// Returns the element that a step appends to the list in this slot, and the condition, if the
/// step does nothing else.
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
