//! Finds likely misspellings in schemas and in the names of secret fields.

use toolgate::policy::{Diagnostic, Severity};
use toolgate::schema::{SchemaLookup, lookup_input, lookup_schema};
use toolgate::tool::ExtraArguments;
use toolgate_text::escape_for_display;
use toolgate_text::suggest::find_closest;

use crate::agent_config::{AgentConfig, ToolConfig};
use crate::lint::{LintFinding, NamedFinding, lint_warning};
use crate::schema_keywords::find_misspelled_keywords;
use crate::tool_backend::ToolBackend;

/// Schemas of upstreams are not checked, because this file cannot change them.
pub(crate) fn check_schemas(declared: &AgentConfig) -> Vec<NamedFinding> {
    let mut found = Vec::new();
    for ToolConfig { tool, span: place, .. } in declared
        .tools
        .iter()
        .filter(|entry| !matches!(entry.backend, Some(ToolBackend::Mcp { .. })))
    {
        let spec = tool.spec();
        for (direction, schema) in
            [("input", spec.input_schema()), ("output", spec.output_schema())]
        {
            for (problem, help) in schema.map(find_misspelled_keywords).unwrap_or_default() {
                let message = format!("the {direction} of `{}` {problem}", spec.name());
                found.push(lint_warning(
                    "unknown_keyword",
                    spec.name(),
                    Some(place),
                    message,
                    &help,
                ));
            }
        }
    }
    found
}

/// Finds misspelled secrets, whose real values would be shown.
///
/// Without an output schema the result may contain the secret, so the finding is only a note.
pub(crate) fn check_secrets(declared: &AgentConfig) -> Vec<NamedFinding> {
    let mut found = Vec::new();
    for ToolConfig { tool, secrets, .. } in &declared.tools {
        let spec = tool.spec();
        for (path, place) in secrets {
            let SchemaLookup::Missing(name, mut known) = lookup_input(spec, path) else { continue };
            let (severity, otherwise) = match spec
                .output_schema()
                .map(|output| lookup_schema(output, ExtraArguments::Pass, path))
            {
                Some(SchemaLookup::Known(_)) => continue,
                Some(SchemaLookup::Missing(_, output_names)) => {
                    known.extend(output_names);
                    (
                        Severity::Warning,
                        "name a field of the arguments or of the result, or remove it",
                    )
                }
                Some(SchemaLookup::Open) | None => {
                    (Severity::Note, "if the result contains it, declare it in `output`")
                }
            };
            let guess = find_closest(&name, known.iter().map(String::as_str));
            let parts = match severity {
                Severity::Note => {
                    ("does not accept", "unless the result contains it, the entry hides nothing")
                }
                _ => ("neither accepts nor returns", "the entry hides nothing"),
            };
            let message = format!(
                "`{}` {} a `{}`: {}",
                spec.name(),
                parts.0,
                escape_for_display(&path.to_string()),
                parts.1
            );
            let problem = Diagnostic {
                span: Some(place.clone()),
                severity,
                ..match guess {
                    Some(guess) => Diagnostic::new(message).did_you_mean(guess),
                    None => Diagnostic::new(message).with_help(otherwise),
                }
            };
            // A note is too uncertain for an automatic fix.
            let finding = match severity {
                Severity::Note => LintFinding { code: "unknown_secret", problem, fix: None },
                _ => LintFinding::from_problem("unknown_secret", problem),
            };
            found.push((finding, spec.name().to_owned()));
        }
    }
    found
}
