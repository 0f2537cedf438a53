//! Type-checks function calls and comprehensions of expressions.

use rust_decimal::Decimal;

use crate::policy::Diagnostic;
use crate::policy::cel::schema_type::CelType;
use crate::policy::cel::typecheck::TypeChecker;
use crate::policy::cel::value::{parse_decimal, parse_duration};
use crate::policy::cel::{CelComprehension, CelFunction, CelNode, CelNodeKind, TimestampPart};

impl TypeChecker<'_> {
    pub(super) fn check_call(
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

    pub(super) fn check_comprehension(
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
