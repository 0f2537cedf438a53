//! Reading one table: each part once, each with its place, and nothing left over.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use jiff::SignedDuration;
use rust_decimal::Decimal;
use serde_json::Value;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::error::Category;
use crate::json::Pointer;
use crate::policy::{Place, Problem};

/// A file that is being read.
pub(super) struct File {
    pub(super) name: Arc<str>,
    pub(super) text: Arc<str>,
}

impl File {
    pub(super) fn place(&self, span: Range<usize>) -> Place {
        Place { file: Arc::clone(&self.name), text: Arc::clone(&self.text), span }
    }

    /// It cannot be parsed.
    pub(super) fn broken(&self, error: &toml::de::Error) -> Problem {
        let span = error.span().unwrap_or(0..0);
        let help = match error.message() {
            "duplicate key" => self.twice(&span),
            _ => "text stands in quotes, a list in `[ ]`, a table in `{ }`".to_owned(),
        };
        let problem = Problem::new(format!("this is no TOML: {}", error.message())).help(help);
        Problem { place: Some(self.place(span)), ..problem }
    }

    /// What to do about a name that stands twice.
    fn twice(&self, span: &Range<usize>) -> String {
        let before = self.text.get(..span.start).and_then(|before| before.rsplit('\n').next()).unwrap_or_default().trim_start();
        let name = self.text.get(span.clone()).unwrap_or_default();
        match before.strip_prefix('[').map(|above| above.trim_start_matches('[')) {
            Some(above) if LISTS.contains(&name) => format!("there may be several: write `[[{above}{name}]]`, each time"),
            Some(_) => "write the two tables of this name as one".to_owned(),
            None => "take one of the two out".to_owned(),
        }
    }
}

/// Tables of which there may be several.
const LISTS: [&str; 9] = ["policy", "where", "hooks", "lint", "normalize", "examples", "errors", "tokens", "test"];

/// A table that is being read.
pub(super) struct Table<'t> {
    file: &'t File,
    table: &'t DeTable<'t>,
    span: Range<usize>,
    /// What this table is called in the rule: `where.0.`, or nothing.
    prefix: String,
    /// What stands before its parts in a line of their own: `policy.`, or nothing.
    header: String,
    read: RefCell<BTreeSet<String>>,
    shared: &'t Shared,
}

/// What is found out while a rule is read.
#[derive(Default)]
pub(super) struct Shared {
    problems: RefCell<Vec<Problem>>,
    parts: RefCell<BTreeMap<String, Range<usize>>>,
}

impl Shared {
    pub(super) fn into_parts(self) -> (Vec<Problem>, BTreeMap<String, Range<usize>>) {
        (self.problems.into_inner(), self.parts.into_inner())
    }
}

impl<'t> Table<'t> {
    pub(super) fn new(file: &'t File, table: &'t DeTable<'t>, span: Range<usize>, shared: &'t Shared) -> Self {
        shared.parts.borrow_mut().insert(String::new(), span.clone());
        Self { file, table, span, prefix: String::new(), header: String::new(), read: RefCell::default(), shared }
    }

    /// Read by itself, it stands in the file under a name.
    pub(super) fn under(self, name: &str) -> Self {
        Self { header: format!("{name}."), ..self }
    }

    /// Something is wrong with a part, or with the whole where the part is not there.
    pub(super) fn wrong(&self, key: &str, problem: Problem) {
        let span = self.table.get(key).map_or_else(|| self.span.clone(), Spanned::span);
        self.say(span, problem);
    }

    /// Something is wrong elsewhere in the file.
    pub(super) fn say_at(&self, place: &Place, problem: Problem) {
        self.say(place.span.clone(), problem);
    }

    fn say(&self, span: Range<usize>, problem: Problem) {
        self.shared.problems.borrow_mut().push(Problem { place: Some(self.file.place(span)), ..problem });
    }

    /// A part, wherever it stands.
    fn part(&self, key: &str) -> Option<&'t Spanned<DeValue<'t>>> {
        self.read.borrow_mut().insert(key.to_owned());
        let value = self.table.get(key)?;
        self.shared.parts.borrow_mut().insert(format!("{}{key}", self.prefix), value.span());
        Some(value)
    }

    fn typed<T>(&self, key: &str, wanted: (&str, &str), convert: impl FnOnce(&'t DeValue<'t>) -> Option<T>) -> Option<T> {
        let value = self.part(key)?;
        let converted = convert(value.get_ref());
        if converted.is_none() {
            let problem = Problem::new(format!("`{key}` must be {}, and is {}", wanted.0, kind(value.get_ref())));
            self.say(value.span(), problem.help(format!("like `{key} = {}`", wanted.1)));
        }
        converted
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    pub(super) fn text(&self, key: &str) -> Option<&'t str> {
        self.typed(key, ("text", "\"…\""), DeValue::as_str)
    }

    pub(super) fn bool(&self, key: &str) -> Option<bool> {
        self.typed(key, ("true or false", "true"), DeValue::as_bool)
    }

    pub(super) fn number(&self, key: &str) -> Option<Decimal> {
        self.typed(key, ("a number of at most 28 digits", "500"), decimal)
    }

    /// A number that is not below 0.
    pub(super) fn amount(&self, key: &str) -> Option<Decimal> {
        let amount = self.number(key)?;
        if amount.is_sign_negative() && !amount.is_zero() {
            self.wrong(key, Problem::new(format!("`{key}` must not be below 0")).help(format!("like `{key} = 0.02`")));
        }
        Some(amount)
    }

    /// How many at the same time: one at least.
    pub(super) fn at_once(&self, key: &str) -> Option<usize> {
        let most = self.count(key)?;
        if most == 0 {
            self.wrong(key, Problem::new(format!("`{key}` of 0 would let nothing through")).help(format!("like `{key} = 16`")));
        }
        Some(usize::try_from(most).unwrap_or(usize::MAX).max(1))
    }

    pub(super) fn count(&self, key: &str) -> Option<u64> {
        self.typed(key, ("a whole number, not less than 0", "3"), |value| match value {
            DeValue::Integer(number) if number.radix() == 10 => number.as_str().parse().ok(),
            _ => None,
        })
    }

    /// A number of bytes: `1024`, `"512MB"`.
    pub(super) fn bytes(&self, key: &str) -> Option<u64> {
        self.typed(key, ("a number of bytes", "\"512MB\""), |value| match value {
            DeValue::Integer(number) if number.radix() == 10 => number.as_str().parse().ok(),
            DeValue::String(text) => {
                let (digits, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit())?);
                let scale = match unit.trim() {
                    "B" => 1,
                    "KB" => 1 << 10,
                    "MB" => 1 << 20,
                    "GB" => 1 << 30,
                    _ => return None,
                };
                digits.parse::<u64>().ok()?.checked_mul(scale)
            }
            _ => None,
        })
    }

    /// The path of an argument or of a proved field.
    pub(super) fn pointer(&self, key: &str) -> Option<Pointer> {
        self.typed(key, ("the path of an argument", "\"/amount\""), |value| value.as_str().filter(|t| !t.is_empty()).map(Pointer::from))
    }

    pub(super) fn duration(&self, key: &str) -> Option<SignedDuration> {
        let text = self.typed(key, ("a duration", "\"15m\"` or `\"24h\"` or `\"7d\""), DeValue::as_str)?;
        let length = crate::clock::duration(text);
        if length.is_none() {
            let problem = Problem::new(format!("`{}` is no length of time", crate::names::shown(text)));
            self.wrong(key, problem.help(crate::clock::LENGTHS));
        }
        length
    }

    /// A duration that is longer than nothing: without length, a limit would hold nothing back.
    pub(super) fn lasting(&self, key: &str) -> Option<SignedDuration> {
        let length = self.duration(key)?;
        if !length.is_positive() {
            self.wrong(key, Problem::new(format!("`{key}` must be longer than nothing")).help(format!("like `{key} = \"1s\"`")));
        }
        Some(length).filter(SignedDuration::is_positive)
    }

    /// The same, for what is timed.
    pub(super) fn length(&self, key: &str) -> Option<Duration> {
        self.lasting(key).and_then(|length| Duration::try_from(length).ok())
    }

    pub(super) fn value(&self, key: &str) -> Option<Value> {
        self.typed(key, ("a value that JSON has, too", "true"), json)
    }

    /// Something is wrong inside of a part: with what stands there, or with what it would stand in.
    pub(super) fn wrong_inside(&self, key: &str, at: &Pointer, problem: Problem) {
        let Some(mut value) = self.table.get(key) else { return self.wrong(key, problem) };
        for part in at.parts() {
            let inner = match value.get_ref() {
                DeValue::Table(table) => table.get(part.as_str()),
                DeValue::Array(items) => part.parse::<usize>().ok().and_then(|index| items.get(index)),
                _ => None,
            };
            match inner {
                Some(inner) => value = inner,
                None => break,
            }
        }
        self.say(value.span(), problem);
    }

    /// One of a few words.
    pub(super) fn word<T: Copy>(&self, key: &str, words: &[(&str, T)]) -> Option<T> {
        let text = self.text(key)?;
        let found = words.iter().find(|(word, _)| *word == text).map(|(_, meaning)| *meaning);
        if found.is_none() {
            let known = words.iter().map(|(word, _)| format!("`{word}`")).collect::<Vec<_>>().join(", ");
            let help = if words.len() == 1 { format!("there is only {known}") } else { format!("there are {known}") };
            let problem = Problem::new(format!("there is no {key} `{}`", crate::names::shown(text))).help(help);
            // Of a few words, another one that is merely like it means something else.
            let slips = words.iter().map(|(word, _)| *word).filter(|word| crate::suggest::is_nearly(word, text));
            self.wrong(key, problem.did_you_mean(text, slips));
        }
        found
    }

    /// The category of an error.
    pub(super) fn category(&self) -> Option<Category> {
        let words = [
            ("BUSINESS", Category::Business),
            ("PERMISSION", Category::Permission),
            ("VALIDATION", Category::Validation),
            ("TRANSIENT", Category::Transient),
        ];
        self.word("category", &words)
    }

    /// Names: one, or a list of them.
    pub(super) fn names(&self, key: &str) -> Option<Vec<&'t str>> {
        let value = self.part(key)?;
        if let Some(one) = value.get_ref().as_str() {
            return Some(vec![one]);
        }
        let names =
            value.get_ref().as_array().and_then(|items| items.iter().map(|item| item.get_ref().as_str()).collect::<Option<Vec<_>>>());
        match (names, value.get_ref().as_array()) {
            (Some(names), Some(items)) => {
                for (index, item) in items.iter().enumerate() {
                    self.shared.parts.borrow_mut().insert(format!("{}{key}.{index}", self.prefix), item.span());
                }
                Some(names)
            }
            _ => {
                let problem = Problem::new(format!("`{key}` must be a name or a list of names, and is {}", kind(value.get_ref())));
                self.say(value.span(), problem.help(format!("like `{key} = [\"…\"]`")));
                None
            }
        }
    }

    pub(super) fn values(&self, key: &str) -> Option<Vec<Value>> {
        let values = self.typed(key, ("a list of values", "[\"a\", \"b\"]"), |value| {
            value.as_array().and_then(|items| items.iter().map(|item| json(item.get_ref())).collect())
        })?;
        let items = self.table.get(key).and_then(|value| value.get_ref().as_array());
        for (index, item) in items.into_iter().flatten().enumerate() {
            self.shared.parts.borrow_mut().insert(format!("{}{key}.{index}", self.prefix), item.span());
        }
        Some(values)
    }

    /// A table inside this one.
    pub(super) fn table(&self, key: &str) -> Option<Table<'t>> {
        let value = self.part(key)?;
        match value.get_ref() {
            DeValue::Table(table) => Some(self.inner(key, format!("{}{key}.", self.prefix), table, value.span())),
            other => {
                let problem = Problem::new(format!("`{key}` must be a table, and is {}", kind(other)));
                let line = self.line(key);
                self.say(value.span(), problem.help(format!("like `{key} = {{ … }}`, or with a line `[{line}]` of its own")));
                None
            }
        }
    }

    /// Tables inside this one, in a list.
    pub(super) fn tables(&self, key: &str) -> Vec<Table<'t>> {
        let Some(value) = self.part(key) else { return Vec::new() };
        let wrong = |span, other: &DeValue<'_>| {
            let problem = Problem::new(format!("`{key}` must be a list of tables, and there is {}", kind(other)));
            self.say(span, problem.help(format!("like `[[{}]]`, or `{key} = [{{ … }}]`", self.line(key))));
        };
        let Some(items) = value.get_ref().as_array() else {
            wrong(value.span(), value.get_ref());
            return Vec::new();
        };
        let tables = items.iter().enumerate().filter_map(|(index, item)| match item.get_ref() {
            DeValue::Table(table) => {
                let prefix = format!("{}{key}.{index}", self.prefix);
                self.shared.parts.borrow_mut().insert(prefix.clone(), item.span());
                Some(self.inner(key, format!("{prefix}."), table, item.span()))
            }
            other => {
                wrong(item.span(), other);
                None
            }
        });
        tables.collect()
    }

    fn inner(&self, key: &str, prefix: String, table: &'t DeTable<'t>, span: Range<usize>) -> Table<'t> {
        let header = format!("{}.", self.line(key));
        Table { file: self.file, table, span, prefix, header, read: RefCell::default(), shared: self.shared }
    }

    /// What a line of its own says for a part that is a table: `policy.same`.
    fn line(&self, key: &str) -> String {
        let is_bare = !key.is_empty() && key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-');
        if is_bare { format!("{}{key}", self.header) } else { format!("{}{key:?}", self.header) }
    }

    pub(super) fn is_table(&self, key: &str) -> bool {
        self.table.get(key).is_some_and(|value| value.get_ref().is_table())
    }

    /// The names that a table of free names holds.
    pub(super) fn keys(&self) -> Vec<String> {
        self.table.keys().map(|key| key.get_ref().to_string()).collect()
    }

    /// Where a part stands.
    pub(super) fn place_of(&self, key: &str) -> Place {
        self.file.place(self.table.get(key).map_or_else(|| self.span.clone(), Spanned::span))
    }

    /// Where it stands.
    pub(super) fn span(&self) -> Range<usize> {
        self.span.clone()
    }

    /// What is in it is nobody's business.
    pub(super) fn silence(&self) {
        self.read.borrow_mut().extend(self.keys());
    }

    /// A part that is nobody's business here.
    pub(super) fn mark_read(&self, key: &str) {
        self.read.borrow_mut().insert(key.to_owned());
    }

    /// How much is wrong so far.
    pub(super) fn problems(&self) -> usize {
        self.shared.problems.borrow().len()
    }

    /// What was found wrong since then is wrong with this rule.
    pub(super) fn blame(&self, since: usize, rule: &str) {
        for problem in self.shared.problems.borrow_mut().iter_mut().skip(since) {
            problem.rule = Some(rule.to_owned());
        }
    }

    /// Where its own parts stand.
    pub(super) fn own_parts(&self) -> BTreeMap<String, Range<usize>> {
        let parts = self.shared.parts.borrow();
        // They stand together: a long file is not gone through for each of its rules.
        let own =
            parts.range(self.prefix.clone()..).map_while(|(key, span)| Some((key.strip_prefix(&self.prefix)?.to_owned(), span.clone())));
        own.filter(|(key, _)| !key.is_empty()).chain([(String::new(), self.span.clone())]).collect()
    }

    /// Says what nobody has read.
    pub(super) fn finish(&self, kind: &str) {
        let read = self.read.borrow();
        for key in self.table.keys().filter(|key| !read.contains(&**key.get_ref())) {
            let name = key.get_ref();
            let problem = Problem::new(format!("{kind} has no `{}`", crate::names::shown(name)));
            self.say(key.span(), problem.did_you_mean(name, read.iter()));
        }
    }
}

pub(super) fn kind(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "text",
        DeValue::Float(written) if written.as_str().ends_with(['n', 'f']) => "no number that one can count with",
        DeValue::Integer(written) if written.as_str().starts_with('-') => "a number below 0",
        DeValue::Integer(_) | DeValue::Float(_) => "a number",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

/// The number as it is written, not the double that is nearest to it.
fn decimal(value: &DeValue<'_>) -> Option<Decimal> {
    crate::json::decimal_of(&json(value).filter(Value::is_number)?)
}

pub(super) fn json(value: &DeValue<'_>) -> Option<Value> {
    let number = |text: &str| crate::json::canonical_number(text.trim_start_matches('+')).ok().map(Value::Number);
    match value {
        DeValue::String(text) => Some(Value::String(text.to_string())),
        DeValue::Integer(written) if written.radix() == 10 => number(written.as_str()),
        DeValue::Integer(written) => i64::from_str_radix(written.as_str(), written.radix()).ok().map(Value::from),
        DeValue::Float(written) => number(written.as_str()),
        DeValue::Boolean(value) => Some(Value::Bool(*value)),
        DeValue::Datetime(_) => None,
        DeValue::Array(items) => items.iter().map(|item| json(item.get_ref())).collect::<Option<Vec<_>>>().map(Value::Array),
        DeValue::Table(table) => {
            let members = table.iter().map(|(key, value)| json(value.get_ref()).map(|value| (key.get_ref().to_string(), value)));
            members.collect::<Option<serde_json::Map<_, _>>>().map(Value::Object)
        }
    }
}
