//! Fills templates with arguments of a call.

use serde_json::Value;

use toolgate_json::Pointer;

/// Text in which `{/path}` is replaced by an argument of the call.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Template(Vec<TemplatePart>);

/// A part of a template: literal text, or the path of an argument.
#[derive(Debug, Clone, PartialEq, Eq)]
enum TemplatePart {
    Text(String),
    Argument(Pointer),
}

/// A part of a filled template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FilledPart<'t> {
    /// Literal text of the template.
    Text(&'t str),
    /// The text of an argument.
    Argument(&'t Pointer, String),
}

impl Template {
    /// Parses a template.
    #[must_use]
    pub fn new(text: &str) -> Self {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("{/")
            && let Some((path, behind)) = after.split_once('}')
        {
            parts.push(TemplatePart::Text(before.to_owned()));
            parts.push(TemplatePart::Argument(format!("/{path}").as_str().into()));
            rest = behind;
        }
        parts.push(TemplatePart::Text(rest.to_owned()));
        parts.retain(|part| *part != TemplatePart::Text(String::new()));
        Self(parts)
    }

    /// Iterates over the arguments that the template contains.
    pub fn argument_paths(&self) -> impl Iterator<Item = &Pointer> {
        self.0.iter().filter_map(|part| {
            if let TemplatePart::Argument(path) = part { Some(path) } else { None }
        })
    }

    /// Returns the text before the first argument.
    #[must_use]
    pub fn literal_prefix(&self) -> &str {
        match self.0.first() {
            Some(TemplatePart::Text(text)) => text,
            _ => "",
        }
    }

    /// Returns the argument if the template consists of nothing else.
    #[must_use]
    pub fn as_single_argument(&self) -> Option<&Pointer> {
        match self.0.as_slice() {
            [TemplatePart::Argument(path)] => Some(path),
            _ => None,
        }
    }

    /// Fills the template.
    ///
    /// # Errors
    /// The path of a missing argument.
    pub fn fill<'t>(&'t self, arguments: &Value) -> Result<Vec<FilledPart<'t>>, &'t Pointer> {
        let fill_part = |part: &'t TemplatePart| match part {
            TemplatePart::Text(text) => Ok(FilledPart::Text(text)),
            TemplatePart::Argument(path) => match path.get(arguments) {
                Some(Value::String(text)) => Ok(FilledPart::Argument(path, text.clone())),
                Some(Value::Null) | None => Err(path),
                Some(other) => Ok(FilledPart::Argument(path, other.to_string())),
            },
        };
        self.0.iter().map(fill_part).collect()
    }
}
