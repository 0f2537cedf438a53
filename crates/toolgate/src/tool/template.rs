//! Text with arguments of a call in it.

use serde_json::Value;

use crate::json::Pointer;

/// Text in which `{/path}` stands for an argument of the call.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Template(Vec<Part>);

/// A part of it: as it stands, or the text of an argument.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Text(String),
    Argument(Pointer),
}

/// A part of a template, filled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Filled<'t> {
    /// As it stands in the template.
    Text(&'t str),
    /// What the call says.
    Argument(&'t Pointer, String),
}

impl Template {
    /// Reads it.
    #[must_use]
    pub fn new(text: &str) -> Self {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("{/")
            && let Some((path, behind)) = after.split_once('}')
        {
            parts.push(Part::Text(before.to_owned()));
            parts.push(Part::Argument(format!("/{path}").as_str().into()));
            rest = behind;
        }
        parts.push(Part::Text(rest.to_owned()));
        parts.retain(|part| *part != Part::Text(String::new()));
        Self(parts)
    }

    /// The arguments that it names.
    pub fn named(&self) -> impl Iterator<Item = &Pointer> {
        self.0.iter().filter_map(|part| if let Part::Argument(path) = part { Some(path) } else { None })
    }

    /// The text in front of the first argument.
    #[must_use]
    pub fn head(&self) -> &str {
        match self.0.first() {
            Some(Part::Text(text)) => text,
            _ => "",
        }
    }

    /// The argument, where the template is nothing else.
    #[must_use]
    pub fn whole(&self) -> Option<&Pointer> {
        match self.0.as_slice() {
            [Part::Argument(path)] => Some(path),
            _ => None,
        }
    }

    /// Its parts, with what the call says in them.
    ///
    /// # Errors
    /// The path of an argument that is not there.
    pub fn fill<'t>(&'t self, arguments: &Value) -> Result<Vec<Filled<'t>>, &'t Pointer> {
        let one = |part: &'t Part| match part {
            Part::Text(text) => Ok(Filled::Text(text)),
            Part::Argument(path) => match path.get(arguments) {
                Some(Value::String(text)) => Ok(Filled::Argument(path, text.clone())),
                Some(Value::Null) | None => Err(path),
                Some(other) => Ok(Filled::Argument(path, other.to_string())),
            },
        };
        self.0.iter().map(one).collect()
    }
}
