//! Compiles JSON schemas, closes objects with undeclared members, and explains validation errors.

mod any_of;
mod close_objects;
mod lookup;
mod messages;
pub mod metaschema;
mod schema_path;
mod write_only;

use std::collections::HashSet;

use jsonschema::{PatternOptions, Validator};
use serde_json::Value;

pub use crate::schema::metaschema::find_schema_faults;
pub use crate::schema::schema_path::{
    SchemaLookup, can_have_type, has_declared_member, lookup_input, lookup_schema, resolve_object,
};
pub(crate) use crate::schema::write_only::find_write_only;

use crate::call::error::FieldError;
use crate::tool::ExtraArguments;
use toolgate_json::{JsonBounds, Pointer};

/// Maximum number of backtracking steps of a regular expression before it counts as "no match".
const MAX_BACKTRACK_STEPS: usize = 10_000;
/// Maximum size of a compiled regular expression in bytes.
const MAX_PATTERN_BYTES: usize = 1 << 20;
/// Maximum number of validation errors in a message; more do not help a model.
const MAX_LISTED_ERRORS: usize = 20;

/// Returns the limits for the regular expressions of a schema.
fn pattern_options() -> PatternOptions<jsonschema::FancyRegex> {
    PatternOptions::fancy_regex()
        .backtrack_limit(MAX_BACKTRACK_STEPS)
        .size_limit(MAX_PATTERN_BYTES)
        .dfa_size_limit(MAX_PATTERN_BYTES)
}

/// A compiled schema.
#[derive(Debug)]
pub(crate) struct CompiledSchema {
    source: Value,
    validator: Validator,
    secrets: Vec<Pointer>,
    extra_members: ExtraArguments,
    /// Whether choices are nested without limit, so that the errors of a deep document are too
    /// many.
    has_excessive_choices: bool,
}

/// Lists the errors of a document, with one message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SchemaValidationError {
    pub(crate) errors: Vec<FieldError>,
    pub(crate) message: String,
}

impl CompiledSchema {
    /// Compiles a schema for the arguments of a tool (closed) or its results (unchanged).
    pub(crate) fn compile(
        source: &Value,
        extra: ExtraArguments,
        secrets: &[Pointer],
    ) -> Result<Self, String> {
        Self::build(source, extra, secrets).map_err(|first| {
            // The validator reports only the first fault.
            let all: Vec<String> = find_schema_faults(source)
                .iter()
                .map(|fault| format!("{} (at `{}`)", fault.reason, fault.pointer))
                .collect();
            if all.is_empty() { first } else { all.join("; ") }
        })
    }

    fn build(source: &Value, extra: ExtraArguments, secrets: &[Pointer]) -> Result<Self, String> {
        let closed = match extra {
            ExtraArguments::Pass => source.clone(),
            ExtraArguments::Refuse | ExtraArguments::Drop => {
                crate::schema::close_objects::close_schema(source)?
            }
        };
        let validator = jsonschema::options()
            .with_pattern_options(pattern_options())
            .should_validate_formats(true)
            .should_ignore_unknown_formats(true)
            .build(&closed)
            .map_err(|e| format!("{} (at `{}`)", e, e.schema_path()))?;
        let mut secrets = secrets.to_vec();
        secrets.extend(crate::schema::write_only::find_write_only(source)?);
        let has_excessive_choices = crate::schema::close_objects::has_excessive_choices(&closed);
        Ok(Self { source: closed, validator, secrets, extra_members: extra, has_excessive_choices })
    }

    /// Returns the secret fields: those with `writeOnly` and those that the tool declares.
    pub(crate) fn secrets(&self) -> &[Pointer] {
        &self.secrets
    }

    /// Validates a document, and removes unknown properties first if the tool drops them.
    pub(crate) fn validate(
        &self,
        tool: &str,
        value: &mut Value,
    ) -> Result<(), SchemaValidationError> {
        if self.validator.is_valid(value) {
            return Ok(());
        }
        if self.extra_members == ExtraArguments::Drop && !self.is_too_costly_to_explain(value) {
            let mut known = value.clone();
            self.drop_unknown(&mut known);
            if self.validator.is_valid(&known) {
                *value = known;
                return Ok(());
            }
        }
        Err(self.explain(tool, value))
    }

    /// Returns whether a document is valid.
    pub(crate) fn is_valid(&self, value: &Value) -> bool {
        self.validator.is_valid(value)
    }

    /// Checks a document, and explains the errors if it is not valid.
    pub(crate) fn check(&self, tool: &str, value: &Value) -> Result<(), SchemaValidationError> {
        if self.validator.is_valid(value) { Ok(()) } else { Err(self.explain(tool, value)) }
    }

    /// Returns whether an explanation of the errors may take far too long.
    fn is_too_costly_to_explain(&self, value: &Value) -> bool {
        self.has_excessive_choices
            && toolgate_json::find_exceeded_bound_of_value(
                value,
                &JsonBounds { depth: 5, bytes: usize::MAX, nodes: usize::MAX },
            )
            .is_some()
    }

    fn explain(&self, tool: &str, value: &Value) -> SchemaValidationError {
        if self.is_too_costly_to_explain(value) {
            let message = format!(
                "{tool}: the document does not fit the schema, and is nested too deeply to say where; build it up from a small part that fits"
            );
            return SchemaValidationError { errors: Vec::new(), message };
        }
        let errors = self.validator.iter_errors(value).take(MAX_LISTED_ERRORS);
        crate::schema::messages::explain_errors(tool, &self.source, errors, &self.secrets)
    }

    fn drop_unknown(&self, value: &mut Value) {
        use jsonschema::error::ValidationErrorKind as K;
        // Each round removes the unknown members of one object level. Nesting limits the rounds.
        for _ in 0..16 {
            let unknown: Vec<(String, Vec<String>)> = self
                .validator
                .iter_errors(value)
                .filter_map(|error| match error.kind() {
                    K::AdditionalProperties { unexpected }
                    | K::UnevaluatedProperties { unexpected } => {
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
                // If a branch fails, the validator reports all its members as unknown. A member
                // that the schema declares stays, so that its real error is reported.
                let is_declared = crate::schema::lookup::declaration_test(&self.source, &path);
                let names: HashSet<String> =
                    names.into_iter().filter(|name| !is_declared(name)).collect();
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
