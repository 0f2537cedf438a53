//! Evaluates compiled expressions.
//!
//! A value that cannot be compared, added or multiplied exactly is a fault, and a fault is a
//! denial. Only division rounds, at 28 digits.

use std::cell::Cell;

use serde_json::Value;

use super::{
    ArithmeticOp, CelComprehension, CelExpression, CelFunction, CelNode, CelNodeKind, CelVariable,
    CompareOp,
};
use crate::policy::cel::value::{
    CelValue, call_function, compare_values, compute, get_field, get_index, json_read_cost,
    mismatch_fault, overflow_fault, split_evidence_path, type_fault,
};
use crate::policy::flow::visit_values;
use crate::policy::{PolicyError, PolicyInput};
use crate::session::state::Evidence;
use toolgate_json::Pointer;

/// Maximum number of steps of one evaluation, because macros iterate over lists from the model.
const MAX_STEPS: usize = 100_000;

pub(super) struct CelEvaluation<'a> {
    input: PolicyInput<'a>,
    evidence: Option<&'a Evidence>,
    expression: &'a CelExpression,
    steps: Cell<usize>,
}

impl<'a> CelEvaluation<'a> {
    pub(super) fn new(
        input: &PolicyInput<'a>,
        proof: Option<&'a Evidence>,
        expression: &'a CelExpression,
    ) -> Self {
        Self { input: *input, evidence: proof, expression, steps: Cell::new(0) }
    }

    pub(super) fn is_true(&self, root: &'a CelNode) -> Result<bool, PolicyError> {
        self.eval(root, &mut Vec::new())?.as_bool()
    }

    fn eval(
        &self,
        node: &'a CelNode,
        locals: &mut Vec<CelValue<'a>>,
    ) -> Result<CelValue<'a>, PolicyError> {
        self.charge_steps(1)?;
        Ok(match &node.kind {
            CelNodeKind::Null => CelValue::Null,
            CelNodeKind::Bool(value) => CelValue::Bool(*value),
            CelNodeKind::Number(value) => CelValue::Number(*value),
            CelNodeKind::Text(text) => CelValue::Text((&**text).into()),
            CelNodeKind::Input(path) => CelValue::from_json(self.argument(path)?)?,
            CelNodeKind::Result(path) => CelValue::from_json(self.evidence_field(path)?)?,
            CelNodeKind::Variable(name) => self.variable_value(*name),
            CelNodeKind::Local(slot) => {
                let local = locals
                    .get(*slot)
                    .ok_or_else(|| PolicyError::new("a local variable is not defined"))?;
                self.charge_steps(local.read_cost())?;
                local.clone()
            }
            CelNodeKind::Field(of, name) => get_field(&self.eval(of, locals)?, name)?,
            CelNodeKind::Index(of, index) => {
                let (of, index) = (self.eval(of, locals)?, self.eval(index, locals)?);
                self.charge_steps(of.read_cost())?;
                get_index(&of, &index)?
            }
            CelNodeKind::Has(of) => CelValue::Bool(self.has_value(of, locals)?),
            CelNodeKind::Not(of) => CelValue::Bool(!self.eval(of, locals)?.as_bool()?),
            CelNodeKind::Negate(of) => match self.eval(of, locals)? {
                CelValue::Number(number) => CelValue::Number(-number),
                CelValue::Duration(span) => {
                    CelValue::Duration(span.checked_neg().ok_or_else(overflow_fault)?)
                }
                other => return Err(type_fault("a number", &other)),
            },
            CelNodeKind::And(nodes) => {
                for node in nodes {
                    if !self.eval(node, locals)?.as_bool()? {
                        return Ok(CelValue::Bool(false));
                    }
                }
                CelValue::Bool(true)
            }
            CelNodeKind::Or(nodes) => {
                for node in nodes {
                    if self.eval(node, locals)?.as_bool()? {
                        return Ok(CelValue::Bool(true));
                    }
                }
                CelValue::Bool(false)
            }
            CelNodeKind::If(nodes) => {
                let [condition, then, otherwise] = &**nodes;
                let branch =
                    if self.eval(condition, locals)?.as_bool()? { then } else { otherwise };
                self.eval(branch, locals)?
            }
            CelNodeKind::Compare(op, nodes) => {
                let [a, b] = &**nodes;
                let asks_for_null =
                    matches!(a.kind, CelNodeKind::Null) || matches!(b.kind, CelNodeKind::Null);
                let (a, b) = (self.eval(a, locals)?, self.eval(b, locals)?);
                let are_null = matches!((&a, &b), (CelValue::Null, CelValue::Null));
                CelValue::Bool(match op {
                    // Any value can be compared with a literal null.
                    CompareOp::Equal if asks_for_null => are_null,
                    CompareOp::NotEqual if asks_for_null => !are_null,
                    CompareOp::Equal => self.equals(&a, &b)?,
                    CompareOp::NotEqual => !self.equals(&a, &b)?,
                    _ => compare_values(*op, &a, &b)?,
                })
            }
            CelNodeKind::Arithmetic(op, nodes) => {
                let [a, b] = &**nodes;
                let (a, b) = (self.eval(a, locals)?, self.eval(b, locals)?);
                self.charge_steps(a.read_cost() + b.read_cost())?;
                compute(*op, a, b)?
            }
            CelNodeKind::In(nodes) => {
                let [a, list] = &**nodes;
                CelValue::Bool(self.is_in(a, list, locals)?)
            }
            CelNodeKind::List(nodes) => CelValue::List(
                nodes.iter().map(|node| self.eval(node, locals)).collect::<Result<_, _>>()?,
            ),
            CelNodeKind::Call(CelFunction::IsSame, nodes) => {
                CelValue::Bool(self.is_same(nodes, locals)?)
            }
            CelNodeKind::Call(function, nodes) => {
                let values = nodes
                    .iter()
                    .map(|node| self.eval(node, locals))
                    .collect::<Result<Vec<_>, _>>()?;
                self.charge_steps(values.iter().map(CelValue::read_cost).sum())?;
                call_function(*function, &values)?
            }
            CelNodeKind::Matches(of, pattern) => {
                let text = self.eval(of, locals)?;
                self.charge_steps(text.as_text()?.len() / 16)?;
                CelValue::Bool(pattern.is_match(text.as_text()?))
            }
            CelNodeKind::CameFrom(path, source) => CelValue::Bool(self.has_source(path, source)?),
            CelNodeKind::LimitUsage(name) => {
                let limit = self
                    .expression
                    .limit(name)
                    .ok_or_else(|| PolicyError(format!("unknown limit `{name}`")))?;
                CelValue::Number(self.input.counter(&limit.counter(&self.input)?, limit.window())?)
            }
            CelNodeKind::Comprehension(comprehension) => {
                self.evaluate_comprehension(comprehension, locals)?
            }
        })
    }

    /// Adds steps to the budget; reading a list costs one step for each item.
    fn charge_steps(&self, steps: usize) -> Result<(), PolicyError> {
        self.steps.set(self.steps.get().saturating_add(steps));
        if self.steps.get() > MAX_STEPS {
            Err(PolicyError::new("the expression takes too many steps on these arguments"))
        } else {
            Ok(())
        }
    }

    fn list_items(&self, of: &CelValue<'a>) -> Result<Vec<CelValue<'a>>, PolicyError> {
        self.charge_steps(of.read_cost())?;
        of.items()
    }

    /// Returns whether two values are equal; lists of different length are not compared further.
    ///
    /// A tool may convert another type (`["admin"]` to `"admin"`, `"3"` to 3), so comparing two
    /// types is a fault.
    fn equals(&self, a: &CelValue<'a>, b: &CelValue<'a>) -> Result<bool, PolicyError> {
        self.charge_steps(1)?;
        Ok(match (a, b) {
            (CelValue::Null, CelValue::Null) => true,
            (CelValue::Bool(a), CelValue::Bool(b)) => a == b,
            (CelValue::Number(a), CelValue::Number(b)) => a == b,
            (CelValue::Text(a), CelValue::Text(b)) => {
                self.charge_steps(a.len().min(b.len()) / 16)?;
                a == b
            }
            (CelValue::Time(a), CelValue::Time(b)) => a == b,
            (CelValue::Duration(a), CelValue::Duration(b)) => a == b,
            (CelValue::Json(Value::Object(a)), CelValue::Json(Value::Object(b))) => {
                if a.len() != b.len() {
                    return Ok(false);
                }
                self.charge_steps(a.len())?;
                if !a.keys().all(|key| b.contains_key(key)) {
                    return Ok(false);
                }
                for (a, b) in a.iter().filter_map(|(key, value)| Some((value, b.get(key)?))) {
                    if !self.equals(&CelValue::from_json(a)?, &CelValue::from_json(b)?)? {
                        return Ok(false);
                    }
                }
                true
            }
            (
                CelValue::Json(Value::Array(_)) | CelValue::List(_),
                CelValue::Json(Value::Array(_)) | CelValue::List(_),
            ) => {
                if a.count() != b.count() {
                    return Ok(false);
                }
                for (a, b) in self.list_items(a)?.iter().zip(&self.list_items(b)?) {
                    if !self.equals(a, b)? {
                        return Ok(false);
                    }
                }
                true
            }
            _ => return Err(mismatch_fault(a, b)),
        })
    }

    fn argument(&self, path: &Pointer) -> Result<&'a Value, PolicyError> {
        self.input
            .argument(path)
            .ok_or_else(|| PolicyError(format!("`{path}` is missing, and the rule depends on it")))
    }

    /// Returns a proved field or a value inside one.
    fn evidence_field(&self, path: &Pointer) -> Result<&'a Value, PolicyError> {
        let missing = || PolicyError(format!("the evidence has no `{path}`"));
        let fields =
            self.evidence.and_then(|proof| proof.fields.as_object()).ok_or_else(missing)?;
        split_evidence_path(fields.keys().map(String::as_str), path)
            .and_then(|(field, rest)| fields.get(field).and_then(|value| rest.get(value)))
            .ok_or_else(missing)
    }

    fn variable_value(&self, name: CelVariable) -> CelValue<'a> {
        match name {
            CelVariable::Session => CelValue::Text((&*self.input.key.session).into()),
            CelVariable::Principal => CelValue::Text((&*self.input.key.principal).into()),
            CelVariable::Agent => CelValue::Text((&*self.input.key.agent).into()),
            CelVariable::Tool => CelValue::Text(self.input.tool.name().into()),
            CelVariable::Now => CelValue::Time(self.input.facts.now),
        }
    }

    fn has_value(
        &self,
        of: &'a CelNode,
        locals: &mut Vec<CelValue<'a>>,
    ) -> Result<bool, PolicyError> {
        Ok(match &of.kind {
            CelNodeKind::Input(path) => self.input.argument(path).is_some(),
            CelNodeKind::Result(path) => self.evidence_field(path).is_ok(),
            CelNodeKind::Field(inner, name) => match self.eval(inner, locals)? {
                CelValue::Json(Value::Object(map)) => map.contains_key(name),
                other => return Err(type_fault("an object", &other)),
            },
            _ => true,
        })
    }

    /// Returns whether two values are equal; an absent value equals nothing, null only null.
    fn is_same(
        &self,
        nodes: &'a [CelNode],
        locals: &mut Vec<CelValue<'a>>,
    ) -> Result<bool, PolicyError> {
        let [a, b] = nodes else { return Err(PolicyError::new("`same` compares two values")) };
        for node in [a, b] {
            if matches!(
                node.kind,
                CelNodeKind::Input(_) | CelNodeKind::Result(_) | CelNodeKind::Field(..)
            ) && !self.has_value(node, locals)?
            {
                return Ok(false);
            }
        }
        let (a, b) = (self.eval(a, locals)?, self.eval(b, locals)?);
        if matches!(a, CelValue::Null) != matches!(b, CelValue::Null) {
            return Ok(false);
        }
        self.equals(&a, &b)
    }

    fn is_in(
        &self,
        a: &'a CelNode,
        list: &'a CelNode,
        locals: &mut Vec<CelValue<'a>>,
    ) -> Result<bool, PolicyError> {
        let asks_for_null = matches!(a.kind, CelNodeKind::Null);
        let a = self.eval(a, locals)?;
        // A literal list is searched without building it. It may contain several types, and the
        // type of `a` must be one of them.
        if let CelNodeKind::List(nodes) = &list.kind {
            let (mut is_alike, mut fault) = (false, None);
            for node in nodes {
                let item = self.eval(node, locals)?;
                match (&a, &item) {
                    (CelValue::Null, CelValue::Null) => return Ok(true),
                    _ if asks_for_null || matches!(node.kind, CelNodeKind::Null) => {}
                    _ if a.type_name() != item.type_name() => {
                        fault = fault.or_else(|| Some(mismatch_fault(&a, &item)))
                    }
                    _ if self.equals(&a, &item)? => return Ok(true),
                    _ => is_alike = true,
                }
            }
            return fault.filter(|_| !is_alike).map_or(Ok(false), Err);
        }
        let list = self.eval(list, locals)?;
        if let (CelValue::Text(key), CelValue::Json(Value::Object(map))) = (&a, &list) {
            return Ok(map.contains_key(&**key));
        }
        // Any other list comes from a call: an item of another type may mean the same value.
        let mut fault = None;
        for item in self.list_items(&list)? {
            match (&a, &item) {
                (CelValue::Null, CelValue::Null) => return Ok(true),
                _ if asks_for_null => {}
                _ if a.type_name() != item.type_name() => {
                    fault = fault.or_else(|| Some(mismatch_fault(&a, &item)))
                }
                _ if self.equals(&a, &item)? => return Ok(true),
                _ => {}
            }
        }
        fault.map_or(Ok(false), Err)
    }

    /// Checks provenance: one untrusted value is enough for `untrusted`, all must come from a tool.
    fn has_source(&self, path: &Pointer, source: &str) -> Result<bool, PolicyError> {
        if self.input.argument(path).is_none() {
            return Err(PolicyError(format!("`{path}` is missing, and the rule depends on it")));
        }
        let (mut any, mut all, mut fault, mut count) = (false, true, None, 0);
        let cost = path
            .entries_or_scalars(self.input.arguments.value())
            .iter()
            .map(|(_, value)| json_read_cost(value))
            .sum();
        self.charge_steps(cost)?;
        visit_values(&self.input, path, &mut |place, _, _| match self.input.provenance(place) {
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
            // An absent value has no provenance.
            None if count == 0 => {
                Err(PolicyError(format!("`{path}` is missing, and the rule depends on it")))
            }
            None => Ok(all),
        }
    }

    fn evaluate_comprehension(
        &self,
        comprehension: &'a CelComprehension,
        locals: &mut Vec<CelValue<'a>>,
    ) -> Result<CelValue<'a>, PolicyError> {
        let range = self.eval(&comprehension.range, locals)?;
        let items = self.list_items(&range)?;
        let depth = locals.len();
        let accumulated = self.eval(&comprehension.init, locals)?;
        locals.push(accumulated);
        let walked = (|| {
            for item in items {
                locals.push(item);
                // `map` and `filter` build a list: append to it instead of copying it each time.
                if let Some((condition, element)) = match_append(&comprehension.step, depth) {
                    let is_included = condition
                        .map_or(Ok(true), |condition| self.eval(condition, locals)?.as_bool())?;
                    let element =
                        if is_included { Some(self.eval(element, locals)?) } else { None };
                    locals.pop();
                    if let (Some(CelValue::List(list)), Some(element)) =
                        (locals.get_mut(depth), element)
                    {
                        list.push(element);
                    }
                    continue;
                }
                let must_continue = self.eval(&comprehension.condition, locals)?.as_bool()?;
                let next = if must_continue {
                    Some(self.eval(&comprehension.step, locals)?)
                } else {
                    None
                };
                locals.pop();
                let Some(next) = next else { break };
                if let Some(slot) = locals.get_mut(depth) {
                    *slot = next;
                }
            }
            self.eval(&comprehension.result, locals)
        })();
        locals.truncate(depth);
        walked
    }
}

/// Returns the `x` of `list + [x]`, for the list in this slot.
fn appended_element(node: &CelNode, slot: usize) -> Option<&CelNode> {
    let CelNodeKind::Arithmetic(ArithmeticOp::Add, pair) = &node.kind else { return None };
    match &**pair {
        [
            CelNode { kind: CelNodeKind::Local(of), .. },
            CelNode { kind: CelNodeKind::List(elements), .. },
        ] if *of == slot => match elements.as_slice() {
            [element] => Some(element),
            _ => None,
        },
        _ => None,
    }
}

/// Returns the element that a step appends to the list in this slot, and the condition, if the
/// step does nothing else.
fn match_append(step: &CelNode, slot: usize) -> Option<(Option<&CelNode>, &CelNode)> {
    let is_slot = |node: &CelNode| matches!(node.kind, CelNodeKind::Local(of) if of == slot);
    match &step.kind {
        CelNodeKind::Arithmetic(..) => appended_element(step, slot).map(|element| (None, element)),
        CelNodeKind::If(nodes) => match &**nodes {
            [condition, then, otherwise] if is_slot(otherwise) => {
                appended_element(then, slot).map(|element| (Some(condition), element))
            }
            _ => None,
        },
        _ => None,
    }
}
