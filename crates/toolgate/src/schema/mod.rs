//! Schemas: compiled once, closed where they are silent, and explained in the model's vocabulary.

mod choice;
mod close;
mod explain;
mod faults;
mod known;
mod path;

use std::collections::HashSet;

use jsonschema::{PatternOptions, Validator};
use serde_json::Value;

pub(crate) use explain::write_only;
pub(crate) use faults::faults;
pub(crate) use path::{At, at, at_in, declares, may_be, resolve};

use crate::error::FieldError;
use crate::json::{Bounds, Pointer};
use crate::tool::Extra;

/// A regular expression of a schema may try this often before it counts as "no match".
const BACKTRACKS: usize = 10_000;
/// A regular expression of a schema may compile to this many bytes.
const PATTERN_SIZE: usize = 1 << 20;
/// More errors than this help no model.
const MOST_ERRORS: usize = 20;

/// How the regular expressions of a schema are read.
fn patterns() -> PatternOptions<jsonschema::FancyRegex> {
    PatternOptions::fancy_regex().backtrack_limit(BACKTRACKS).size_limit(PATTERN_SIZE).dfa_size_limit(PATTERN_SIZE)
}

/// A compiled schema.
#[derive(Debug)]
pub(crate) struct Schema {
    source: Value,
    validator: Validator,
    secrets: Vec<Pointer>,
    extra: Extra,
    /// Choices inside choices without end: the validator would list every way a deep document fails.
    tangled: bool,
}

/// What is wrong with a document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Invalid {
    pub(crate) errors: Vec<FieldError>,
    pub(crate) message: String,
}

impl Schema {
    /// Compiles a schema for what goes into a tool (closed) or comes out of it (as it stands).
    pub(crate) fn compile(source: &Value, extra: Extra, secrets: &[Pointer]) -> Result<Self, String> {
        Self::put_together(source, extra, secrets).map_err(|first| {
            // Whoever puts it together stops at the first.
            let all: Vec<String> = faults(source).iter().map(|fault| format!("{} (at `{}`)", fault.why, fault.at)).collect();
            if all.is_empty() { first } else { all.join("; ") }
        })
    }

    fn put_together(source: &Value, extra: Extra, secrets: &[Pointer]) -> Result<Self, String> {
        let closed = match extra {
            Extra::Pass => source.clone(),
            Extra::Refuse | Extra::Drop => close::close(source)?,
        };
        let validator = jsonschema::options()
            .with_pattern_options(patterns())
            .should_validate_formats(true)
            .should_ignore_unknown_formats(true)
            .build(&closed)
            .map_err(|e| format!("{} (at `{}`)", e, e.schema_path()))?;
        let mut secrets = secrets.to_vec();
        secrets.extend(explain::write_only(source)?);
        let tangled = close::is_tangled(&closed);
        Ok(Self { source: closed, validator, secrets, extra, tangled })
    }

    /// Fields that are never shown: `writeOnly` ones and those the tool marks.
    pub(crate) fn secrets(&self) -> &[Pointer] {
        &self.secrets
    }

    /// Validates; where the tool says so, unknown properties are taken out first.
    pub(crate) fn validate(&self, tool: &str, value: &mut Value) -> Result<(), Invalid> {
        if self.validator.is_valid(value) {
            return Ok(());
        }
        if self.extra == Extra::Drop && !self.is_hopeless(value) {
            let mut known = value.clone();
            self.drop_unknown(&mut known);
            if self.validator.is_valid(&known) {
                *value = known;
                return Ok(());
            }
        }
        Err(self.explain(tool, value))
    }

    /// Whether a document fits as it stands.
    pub(crate) fn takes(&self, value: &Value) -> bool {
        self.validator.is_valid(value)
    }

    /// Whether a document fits, with the first reason if not.
    pub(crate) fn check(&self, tool: &str, value: &Value) -> Result<(), Invalid> {
        if self.validator.is_valid(value) { Ok(()) } else { Err(self.explain(tool, value)) }
    }

    /// Whether saying what is wrong could take time out of all proportion.
    fn is_hopeless(&self, value: &Value) -> bool {
        self.tangled && crate::json::value_over_bounds(value, &Bounds { depth: 5, bytes: usize::MAX, nodes: usize::MAX }).is_some()
    }

    fn explain(&self, tool: &str, value: &Value) -> Invalid {
        if self.is_hopeless(value) {
            let message = format!(
                "{tool}: the document does not fit the schema, and is nested too deeply to say where; build it up from a small part that fits"
            );
            return Invalid { errors: Vec::new(), message };
        }
        let errors = self.validator.iter_errors(value).take(MOST_ERRORS);
        explain::explain(tool, &self.source, errors, &self.secrets)
    }

    fn drop_unknown(&self, value: &mut Value) {
        use jsonschema::error::ValidationErrorKind as K;
        // Each round takes out what one closed object does not know; nesting bounds the rounds.
        for _ in 0..16 {
            let unknown: Vec<(String, Vec<String>)> = self
                .validator
                .iter_errors(value)
                .filter_map(|error| match error.kind() {
                    K::AdditionalProperties { unexpected } | K::UnevaluatedProperties { unexpected } => {
                        Some((error.instance_path().to_string(), unexpected.clone()))
                    }
                    _ => None,
                })
                .collect();
            if unknown.is_empty() {
                return;
            }
            let mut dropped = false;
            for (path, names) in unknown {
                // Where a branch does not fit, all that it knows is unknown: what the schema names anywhere there stays, and is told.
                let knows = known::knows(&self.source, &path);
                let names: HashSet<String> = names.into_iter().filter(|name| !knows(name)).collect();
                if let Some(map) = value.pointer_mut(&path).and_then(Value::as_object_mut) {
                    let before = map.len();
                    map.retain(|key, _| !names.contains(key));
                    dropped |= map.len() < before;
                }
            }
            if !dropped {
                return;
            }
        }
    }
}
