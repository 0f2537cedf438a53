//! Reads one TOML table: records the position of each key and reports unknown keys.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use serde_json::Value;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::policy::{Diagnostic, SourceSpan};
use toolgate_json::Pointer;

/// A file that is being parsed.
pub struct TomlSource {
    /// The name of the file.
    pub name: Arc<str>,
    /// The text of the file.
    pub text: Arc<str>,
}

impl TomlSource {
    /// Returns a position in the file.
    pub fn span_at(&self, span: Range<usize>) -> SourceSpan {
        SourceSpan { file: Arc::clone(&self.name), text: Arc::clone(&self.text), range: span }
    }

    /// Converts a TOML syntax error into a problem.
    pub fn syntax_problem(&self, error: &toml::de::Error) -> Diagnostic {
        let span = error.span().unwrap_or(0..0);
        let help = match error.message() {
            "duplicate key" => self.duplicate_key_help(&span),
            _ => "put text in quotes, a list in `[ ]`, a table in `{ }`".to_owned(),
        };
        let problem =
            Diagnostic::new(format!("not valid TOML: {}", error.message())).with_help(help);
        Diagnostic { span: Some(self.span_at(span)), ..problem }
    }

    /// Suggests how to resolve a duplicate key.
    fn duplicate_key_help(&self, span: &Range<usize>) -> String {
        let before = self
            .text
            .get(..span.start)
            .and_then(|before| before.rsplit('\n').next())
            .unwrap_or_default()
            .trim_start();
        let name = self.text.get(span.clone()).unwrap_or_default();
        match before.strip_prefix('[').map(|above| above.trim_start_matches('[')) {
            Some(above) if TABLE_LIST_KEYS.contains(&name) => {
                format!("for a list of tables, write `[[{above}{name}]]` each time")
            }
            Some(_) => "merge the two tables of this name".to_owned(),
            None => "remove one of the two".to_owned(),
        }
    }
}

/// Keys that hold a list of tables.
const TABLE_LIST_KEYS: [&str; 9] =
    ["policy", "where", "hooks", "lint", "normalize", "examples", "errors", "tokens", "test"];

/// A table that is being read.
pub struct TomlTable<'t> {
    file: &'t TomlSource,
    table: &'t DeTable<'t>,
    span: Range<usize>,
    /// Path of this table inside its rule, such as `where.0.`, or empty.
    prefix: String,
    /// Prefix of the table header in the file, such as `policy.`, or empty.
    header: String,
    read_keys: RefCell<BTreeSet<String>>,
    context: &'t TableReadState,
}

/// State that all tables of one rule share.
#[derive(Default)]
pub struct TableReadState {
    problems: RefCell<Vec<Diagnostic>>,
    part_spans: RefCell<BTreeMap<String, Range<usize>>>,
}

impl TableReadState {
    /// Returns the problems, and the byte ranges of all fields.
    pub fn into_parts(self) -> (Vec<Diagnostic>, BTreeMap<String, Range<usize>>) {
        (self.problems.into_inner(), self.part_spans.into_inner())
    }
}

impl<'t> TomlTable<'t> {
    /// Creates a reader of a table.
    pub fn new(
        file: &'t TomlSource,
        table: &'t DeTable<'t>,
        span: Range<usize>,
        shared: &'t TableReadState,
    ) -> Self {
        shared.part_spans.borrow_mut().insert(String::new(), span.clone());
        Self {
            file,
            table,
            span,
            prefix: String::new(),
            header: String::new(),
            read_keys: RefCell::default(),
            context: shared,
        }
    }

    /// Sets the name under which the file has this table.
    pub(crate) fn with_header(self, name: &str) -> Self {
        Self { header: format!("{name}."), ..self }
    }

    /// Reports a problem at a key, or at the whole table if the key is absent.
    pub fn report(&self, key: &str, problem: Diagnostic) {
        let span = self.table.get(key).map_or_else(|| self.span.clone(), Spanned::span);
        self.push_problem(span, problem);
    }

    /// Reports a problem elsewhere in the file.
    pub fn report_at(&self, place: &SourceSpan, problem: Diagnostic) {
        self.push_problem(place.range.clone(), problem);
    }

    fn push_problem(&self, span: Range<usize>, problem: Diagnostic) {
        self.context
            .problems
            .borrow_mut()
            .push(Diagnostic { span: Some(self.file.span_at(span)), ..problem });
    }

    /// Returns a value and records its key as read.
    fn read_value(&self, key: &str) -> Option<&'t Spanned<DeValue<'t>>> {
        self.read_keys.borrow_mut().insert(key.to_owned());
        let value = self.table.get(key)?;
        self.context.part_spans.borrow_mut().insert(format!("{}{key}", self.prefix), value.span());
        Some(value)
    }

    pub(super) fn read_typed<T>(
        &self,
        key: &str,
        expected: (&str, &str),
        convert: impl FnOnce(&'t DeValue<'t>) -> Option<T>,
    ) -> Option<T> {
        let value = self.read_value(key)?;
        let converted = convert(value.get_ref());
        if converted.is_none() {
            let problem = Diagnostic::new(format!(
                "`{key}` must be {}, not {}",
                expected.0,
                toml_type_name(value.get_ref())
            ));
            self.push_problem(
                value.span(),
                problem.with_help(format!("like `{key} = {}`", expected.1)),
            );
        }
        converted
    }

    /// Returns whether the table has a key.
    pub fn has_key(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    /// The text of the file.
    pub fn text(&self, key: &str) -> Option<&'t str> {
        self.read_typed(key, ("a string", "\"…\""), DeValue::as_str)
    }

    /// Reads a value as JSON.
    pub fn value(&self, key: &str) -> Option<Value> {
        self.read_typed(key, ("a value that JSON can represent", "true"), to_json)
    }

    /// Reports a problem inside a value, at the deepest part of the path that exists.
    pub fn report_inside(&self, key: &str, at: &Pointer, problem: Diagnostic) {
        let Some(mut value) = self.table.get(key) else { return self.report(key, problem) };
        for part in at.parts() {
            let inner = match value.get_ref() {
                DeValue::Table(table) => table.get(part.as_str()),
                DeValue::Array(items) => {
                    part.parse::<usize>().ok().and_then(|index| items.get(index))
                }
                _ => None,
            };
            match inner {
                Some(inner) => value = inner,
                None => break,
            }
        }
        self.push_problem(value.span(), problem);
    }

    /// Reads one name or a list of names.
    pub fn names(&self, key: &str) -> Option<Vec<&'t str>> {
        let value = self.read_value(key)?;
        if let Some(name) = value.get_ref().as_str() {
            return Some(vec![name]);
        }
        let names = value.get_ref().as_array().and_then(|items| {
            items.iter().map(|item| item.get_ref().as_str()).collect::<Option<Vec<_>>>()
        });
        match (names, value.get_ref().as_array()) {
            (Some(names), Some(items)) => {
                for (index, item) in items.iter().enumerate() {
                    self.context
                        .part_spans
                        .borrow_mut()
                        .insert(format!("{}{key}.{index}", self.prefix), item.span());
                }
                Some(names)
            }
            _ => {
                let problem = Diagnostic::new(format!(
                    "`{key}` must be a name or a list of names, not {}",
                    toml_type_name(value.get_ref())
                ));
                self.push_problem(
                    value.span(),
                    problem.with_help(format!("like `{key} = [\"…\"]`")),
                );
                None
            }
        }
    }

    /// Reads a list of values as JSON.
    pub fn values(&self, key: &str) -> Option<Vec<Value>> {
        let values = self.read_typed(key, ("a list of values", "[\"a\", \"b\"]"), |value| {
            value
                .as_array()
                .and_then(|items| items.iter().map(|item| to_json(item.get_ref())).collect())
        })?;
        let items = self.table.get(key).and_then(|value| value.get_ref().as_array());
        for (index, item) in items.into_iter().flatten().enumerate() {
            self.context
                .part_spans
                .borrow_mut()
                .insert(format!("{}{key}.{index}", self.prefix), item.span());
        }
        Some(values)
    }

    /// Reads a nested table.
    pub fn table(&self, key: &str) -> Option<TomlTable<'t>> {
        let value = self.read_value(key)?;
        match value.get_ref() {
            DeValue::Table(table) => {
                Some(self.nested(key, format!("{}{key}.", self.prefix), table, value.span()))
            }
            other => {
                let problem = Diagnostic::new(format!(
                    "`{key}` must be a table, not {}",
                    toml_type_name(other)
                ));
                let line = self.header_of(key);
                self.push_problem(
                    value.span(),
                    problem
                        .with_help(format!("like `{key} = {{ … }}`, or under a header `[{line}]`")),
                );
                None
            }
        }
    }

    /// Reads a list of nested tables.
    pub fn tables(&self, key: &str) -> Vec<TomlTable<'t>> {
        let Some(value) = self.read_value(key) else { return Vec::new() };
        let wrong = |span, other: &DeValue<'_>| {
            let problem = Diagnostic::new(format!(
                "`{key}` must be a list of tables, not {}",
                toml_type_name(other)
            ));
            self.push_problem(
                span,
                problem.with_help(format!(
                    "like `[[{}]]`, or `{key} = [{{ … }}]`",
                    self.header_of(key)
                )),
            );
        };
        let Some(items) = value.get_ref().as_array() else {
            wrong(value.span(), value.get_ref());
            return Vec::new();
        };
        let tables = items.iter().enumerate().filter_map(|(index, item)| match item.get_ref() {
            DeValue::Table(table) => {
                let prefix = format!("{}{key}.{index}", self.prefix);
                self.context.part_spans.borrow_mut().insert(prefix.clone(), item.span());
                Some(self.nested(key, format!("{prefix}."), table, item.span()))
            }
            other => {
                wrong(item.span(), other);
                None
            }
        });
        tables.collect()
    }

    fn nested(
        &self,
        key: &str,
        prefix: String,
        table: &'t DeTable<'t>,
        span: Range<usize>,
    ) -> TomlTable<'t> {
        let header = format!("{}.", self.header_of(key));
        TomlTable {
            file: self.file,
            table,
            span,
            prefix,
            header,
            read_keys: RefCell::default(),
            context: self.context,
        }
    }

    /// Returns the header of a nested table, such as `policy.same`.
    fn header_of(&self, key: &str) -> String {
        let is_bare = !key.is_empty()
            && key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-');
        if is_bare { format!("{}{key}", self.header) } else { format!("{}{key:?}", self.header) }
    }

    /// Returns whether the value of a key is a table.
    pub fn is_table(&self, key: &str) -> bool {
        self.table.get(key).is_some_and(|value| value.get_ref().is_table())
    }

    /// Lists the keys of a table with free names.
    pub fn keys(&self) -> Vec<String> {
        self.table.keys().map(|key| key.get_ref().to_string()).collect()
    }

    /// Returns the position of a key.
    pub fn span_of(&self, key: &str) -> SourceSpan {
        self.file.span_at(self.table.get(key).map_or_else(|| self.span.clone(), Spanned::span))
    }

    /// Returns the byte range of this table.
    pub fn span(&self) -> Range<usize> {
        self.span.clone()
    }

    /// Marks all keys as read, so that none is reported as unknown.
    pub fn mark_all_read(&self) {
        self.read_keys.borrow_mut().extend(self.keys());
    }

    /// Marks a key as read.
    pub fn mark_read(&self, key: &str) {
        self.read_keys.borrow_mut().insert(key.to_owned());
    }

    /// Counts the problems so far.
    pub(crate) fn problem_count(&self) -> usize {
        self.context.problems.borrow().len()
    }

    /// Assigns all problems after the first `since` to this rule.
    pub(crate) fn assign_rule(&self, since: usize, rule: &str) {
        for problem in self.context.problems.borrow_mut().iter_mut().skip(since) {
            problem.rule = Some(rule.to_owned());
        }
    }

    /// Returns the byte ranges of the parts of this table.
    pub fn part_spans(&self) -> BTreeMap<String, Range<usize>> {
        let parts = self.context.part_spans.borrow();
        // The keys are sorted, so this scans only the parts of one rule, even in a long file.
        let own_parts = parts.range(self.prefix.clone()..).map_while(|(key, span)| {
            Some((key.strip_prefix(&self.prefix)?.to_owned(), span.clone()))
        });
        own_parts
            .filter(|(key, _)| !key.is_empty())
            .chain([(String::new(), self.span.clone())])
            .collect()
    }

    /// Reports keys that were not read.
    pub fn reject_unknown_keys(&self, kind: &str) {
        let read = self.read_keys.borrow();
        for key in self.table.keys().filter(|key| !read.contains(&**key.get_ref())) {
            let name = key.get_ref();
            let problem = Diagnostic::new(format!(
                "{kind} has no `{}`",
                toolgate_text::escape_for_display(name)
            ));
            self.push_problem(key.span(), problem.with_suggestion(name, read.iter()));
        }
    }
}

pub(crate) fn toml_type_name(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a string",
        DeValue::Float(written) if written.as_str().ends_with(['n', 'f']) => {
            "a number that is not finite"
        }
        DeValue::Integer(written) if written.as_str().starts_with('-') => "a negative number",
        DeValue::Integer(_) | DeValue::Float(_) => "a number",
        DeValue::Boolean(_) => "a Boolean",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

pub(crate) fn to_json(value: &DeValue<'_>) -> Option<Value> {
    let number = |text: &str| {
        toolgate_json::canonical_number(text.trim_start_matches('+')).ok().map(Value::Number)
    };
    match value {
        DeValue::String(text) => Some(Value::String(text.to_string())),
        DeValue::Integer(written) if written.radix() == 10 => number(written.as_str()),
        DeValue::Integer(written) => {
            i64::from_str_radix(written.as_str(), written.radix()).ok().map(Value::from)
        }
        DeValue::Float(written) => number(written.as_str()),
        DeValue::Boolean(value) => Some(Value::Bool(*value)),
        DeValue::Datetime(_) => None,
        DeValue::Array(items) => items
            .iter()
            .map(|item| to_json(item.get_ref()))
            .collect::<Option<Vec<_>>>()
            .map(Value::Array),
        DeValue::Table(table) => {
            let members = table.iter().map(|(key, value)| {
                to_json(value.get_ref()).map(|value| (key.get_ref().to_string(), value))
            });
            members.collect::<Option<serde_json::Map<_, _>>>().map(Value::Object)
        }
    }
}
