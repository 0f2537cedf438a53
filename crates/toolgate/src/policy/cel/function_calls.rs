//! Compiles function calls of expressions.

use std::ops::Range;
use std::sync::Arc;

use cel::common::ast::CallExpr;
use cel::parser::Expression as Tree;

use crate::policy::cel::compile::CelLowering;
use crate::policy::cel::{CelFunction, CelNode, CelNodeKind, TimestampPart};
use crate::policy::{Condition, Diagnostic};

/// Functions and their number of arguments, including the receiver of a method call.
const FUNCTION_SIGNATURES: [(&str, CelFunction, Range<usize>); 17] = [
    ("decimal", CelFunction::Decimal, 1..2),
    ("duration", CelFunction::Duration, 1..2),
    ("timestamp", CelFunction::Timestamp, 1..2),
    ("glob", CelFunction::Glob, 2..3),
    ("same", CelFunction::IsSame, 2..3),
    ("sum_of", CelFunction::SumOf, 1..2),
    ("size", CelFunction::Size, 1..2),
    ("startsWith", CelFunction::StartsWith, 2..3),
    ("endsWith", CelFunction::EndsWith, 2..3),
    ("contains", CelFunction::Contains, 2..3),
    ("lowerAscii", CelFunction::LowerAscii, 1..2),
    ("getFullYear", CelFunction::Part(TimestampPart::Year), 1..3),
    ("getMonth", CelFunction::Part(TimestampPart::Month), 1..3),
    ("getDate", CelFunction::Part(TimestampPart::Day), 1..3),
    ("getDayOfWeek", CelFunction::Part(TimestampPart::Weekday), 1..3),
    ("getHours", CelFunction::Part(TimestampPart::Hour), 1..3),
    ("getMinutes", CelFunction::Part(TimestampPart::Minute), 1..3),
];

impl CelLowering<'_> {
    pub(super) fn lower_function(
        &mut self,
        tree: &Tree,
        name: &str,
        call: &CallExpr,
    ) -> Result<CelNodeKind, Diagnostic> {
        let arguments: Vec<&Tree> = call.target.as_deref().into_iter().chain(&call.args).collect();
        match (name, arguments.as_slice()) {
            ("matches", [text, pattern]) => {
                let CelNodeKind::Text(source) = self.lower_node(pattern)?.kind else {
                    return Err(self.problem_at(pattern, "a pattern must be a literal").with_help(
                        "the model could choose a pattern that comes from an argument",
                    ));
                };
                let compiled = Condition::matches(&source).map_err(|e| {
                    let reason = e.to_string();
                    let reason = reason
                        .lines()
                        .last()
                        .unwrap_or_default()
                        .trim_start_matches("error: ")
                        .to_owned();
                    self.problem_at(
                        pattern,
                        format!(
                            "`{}` is not a valid regular expression: {reason}",
                            toolgate_text::escape_for_display(&source)
                        ),
                    )
                    .with_help("use the syntax of the Rust `regex` crate")
                })?;
                let Condition::Matches(regex) = compiled else {
                    return Err(self.problem_at(pattern, "the pattern is not valid"));
                };
                Ok(CelNodeKind::Matches(Box::new(self.lower_node(text)?), regex))
            }
            ("came_from", [value, source]) => {
                let (value_node, source_node) = (self.lower_node(value)?, self.lower_node(source)?);
                let CelNodeKind::Input(path) = value_node.kind else {
                    return Err(self
                        .problem_at(value, "only arguments have a provenance")
                        .with_help("write `came_from(input.name, \"tool\")`"));
                };
                let CelNodeKind::Text(of) = source_node.kind else {
                    return Err(self
                        .problem_at(source, "the source must be a literal")
                        .with_help("use the name of a tool, \"user\" or \"untrusted\""));
                };
                Ok(CelNodeKind::CameFrom(path, of))
            }
            ("matches" | "came_from", _) => {
                Err(self.problem_at(tree, format!("`{name}` takes 2 arguments")))
            }
            _ => {
                let known = FUNCTION_SIGNATURES.iter().find(|(known, ..)| *known == name);
                let Some((_, function, counts)) = known else {
                    let names = FUNCTION_SIGNATURES
                        .iter()
                        .map(|(name, ..)| *name)
                        .chain(["matches", "came_from"]);
                    return Err(self
                        .problem_at(
                            tree,
                            format!(
                                "unknown function `{}`",
                                toolgate_text::escape_for_display(name)
                            ),
                        )
                        .with_suggestion(name, names));
                };
                if !counts.contains(&arguments.len()) {
                    return Err(self.problem_at(
                        tree,
                        format!(
                            "`{name}` takes {} argument(s), but got {}",
                            counts.start,
                            arguments.len()
                        ),
                    ));
                }
                let nodes = arguments
                    .iter()
                    .map(|tree| self.lower_node(tree))
                    .collect::<Result<Vec<_>, _>>()?;
                if let (CelFunction::Glob, Some(pattern), false) = (
                    function,
                    arguments.get(1),
                    matches!(nodes.get(1), Some(CelNode { kind: CelNodeKind::Text(_), .. })),
                ) {
                    return Err(self
                        .problem_at(pattern, "a pattern must be a literal")
                        .with_help("`glob(text, \"pattern\")`; the model could choose a pattern that comes from an argument"));
                }
                if let (CelFunction::SumOf, [CelNode { kind: CelNodeKind::Text(limit), .. }]) =
                    (function, nodes.as_slice())
                {
                    return Ok(CelNodeKind::LimitUsage(Arc::clone(limit)));
                }
                Ok(CelNodeKind::Call(*function, nodes))
            }
        }
    }
}
