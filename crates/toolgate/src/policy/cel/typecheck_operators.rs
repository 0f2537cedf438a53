//! Type-checks the operators of expressions.

use crate::policy::Diagnostic;
use crate::policy::cel::schema_type::{CelType, compare_bounds, compare_texts};
use crate::policy::cel::typecheck::{TypeChecker, describe_allowed_values};
use crate::policy::cel::{ArithmeticOp, CelNode, CompareOp};

impl TypeChecker<'_> {
    /// Checks `&&` or `||`; `short` is the operand that decides the result: false or true.
    pub(super) fn check_logic(
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

    pub(super) fn check_comparison(
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

    pub(super) fn check_membership(
        &mut self,
        node: &CelNode,
        item: &CelType,
        list: &CelType,
    ) -> CelType {
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

    pub(super) fn check_arithmetic(
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
}
