//! Values that stand elsewhere: in the environment, or in a file of their own.

use std::collections::VecDeque;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use super::file::Reader;
use super::read::Table;
use crate::policy::{Place, Problem};

/// A value that may stand elsewhere: `${NAME}` in the environment, or `{ file = "…" }`. It is looked up when it is needed, and
/// never shown.
#[derive(Clone)]
pub struct Reference {
    parts: Vec<Part>,
    place: Option<Place>,
}

#[derive(Clone)]
enum Part {
    Text(String),
    Variable(String),
    /// A file, and what was taken from it to be used.
    File(PathBuf, Given),
}

impl fmt::Debug for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reference")
    }
}

impl Reference {
    /// A value as it stands, with `${NAME}` in it for what the environment has.
    ///
    /// # Errors
    /// A `${` is not closed.
    pub fn of(text: &str) -> Result<Self, String> {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("${") {
            let (name, behind) = after.split_once('}').ok_or("a `${` is not closed")?;
            parts.push(Part::Text(before.to_owned()));
            parts.push(Part::Variable(name.to_owned()));
            rest = behind;
        }
        parts.push(Part::Text(rest.to_owned()));
        Ok(Self { parts, place: None })
    }

    /// A value of a file that clients read: some of them write `${env:NAME}` for `${NAME}`.
    pub(super) fn of_client(text: &str) -> Result<Self, String> {
        let mut reference = Self::of(text)?;
        for part in &mut reference.parts {
            if let Part::Variable(name) = part
                // Behind a variable of that name, a default may stand.
                && let Some(bare) = name.strip_prefix("env:").filter(|bare| !bare.starts_with('-'))
            {
                *part = Part::Variable(bare.to_owned());
            }
        }
        Ok(reference)
    }

    /// The value, as it is now.
    ///
    /// # Errors
    /// What is missing, without saying what is there.
    pub fn resolve(&self) -> Result<String, String> {
        let one = |part: &Part| match part {
            Part::Text(text) => Ok(text.clone()),
            Part::Variable(written) => {
                // As clients spell it: what stands behind `:-` is for where there is none.
                let (name, otherwise) = written.split_once(":-").map_or((written.as_str(), None), |(name, other)| (name, Some(other)));
                let missing = || format!("the environment has no `{}`", crate::names::shown(name));
                std::env::var(name).ok().or_else(|| otherwise.map(str::to_owned)).ok_or_else(missing)
            }
            Part::File(path, _) => super::text::text_of_named(path)
                .map(|text| text.trim_end_matches(['\r', '\n']).to_owned())
                .map_err(|error| format!("{}: {error}", path.display())),
        };
        self.parts.iter().map(one).collect()
    }

    /// The value as it is now, for somebody who is given it: what a file held then is known from now on, whatever it holds later. That is
    /// kept in memory alone, and never shown.
    ///
    /// # Errors
    /// What is missing, without saying what is there.
    pub fn take(&self) -> Result<String, String> {
        let value = self.resolve()?;
        if let Some((_, taken)) = self.file() {
            taken.add(&value);
        }
        Ok(value)
    }

    /// The file that it is the content of. The environment of a process does not change, a file does.
    fn file(&self) -> Option<(&PathBuf, &Given)> {
        match self.parts.as_slice() {
            [Part::File(path, taken)] => Some((path, taken)),
            _ => None,
        }
    }

    /// Whether another one comes now to what was last taken of this one, or to what this one comes to where nothing was. A file that cannot
    /// be read now, or that nothing stands in, may be written at this moment, and changes nothing.
    pub(super) fn is_still(&self, other: &Self) -> bool {
        let last = self.file().and_then(|(_, taken)| taken.all().pop());
        let is_one_file = || self.file().zip(other.file()).is_some_and(|((own, _), (theirs, _))| own == theirs);
        match (last.map_or_else(|| self.resolve(), Ok), other.resolve()) {
            (Ok(_), Err(_)) => is_one_file(),
            (Ok(_), Ok(theirs)) if theirs.is_empty() && is_one_file() => true,
            (own, theirs) => own == theirs,
        }
    }

    /// The value as it is now, and as it was when it was taken.
    pub(super) fn values(&self) -> Vec<String> {
        let taken = self.file().map(|(_, taken)| taken.all()).unwrap_or_default();
        taken.into_iter().chain(self.resolve().ok()).collect()
    }

    /// What stands elsewhere in it, or stood there when it was taken: nobody may see that.
    pub(super) fn hidden(&self) -> impl Iterator<Item = String> {
        let one = |part: &Part| match part {
            Part::Text(_) => Vec::new(),
            other => Self { parts: vec![other.clone()], place: None }.values(),
        };
        self.parts.iter().flat_map(one)
    }

    pub(super) fn at(self, place: Place) -> Self {
        Self { place: Some(place), ..self }
    }

    /// What is wrong with it, at its place.
    pub(super) fn problem(&self) -> Option<Problem> {
        let why = self.resolve().err()?;
        let help = match self.parts.first() {
            Some(Part::File(..)) => "a path is relative to this file",
            _ => "set it where toolgate is started, or use `{ file = \"…\" }`",
        };
        Some(Problem { place: self.place.clone(), ..Problem::new(why).help(help) })
    }
}

/// How many secrets that were given later are known: a call that is under way may have been made with an earlier one.
const MOST: usize = 8;

/// Secrets that were given to somebody, the latest of them: those that stand nowhere, and those that stood in a file then. They are never
/// shown.
#[derive(Clone, Default)]
pub(super) struct Given(Arc<Mutex<VecDeque<String>>>);

impl fmt::Debug for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Given")
    }
}

impl Given {
    pub(super) fn add(&self, secret: &str) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|one| one != secret);
        known.push_back(secret.to_owned());
        if known.len() > MOST {
            known.pop_front();
        }
    }

    pub(super) fn all(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

/// A text without these values: each as a whole, and what of it stands elsewhere or behind a scheme.
pub(super) fn without_values<'a>(references: impl IntoIterator<Item = &'a Reference>, text: &str) -> String {
    let of = |reference: &'a Reference| reference.hidden().chain(reference.values().into_iter().flat_map(and_behind_scheme));
    crate::redact::without(references.into_iter().flat_map(of), text)
}

/// A value, and what of it stands behind a scheme, as in `Bearer …`: a service repeats the one or the other.
pub(super) fn and_behind_scheme(value: String) -> Vec<String> {
    let behind = value.split_once(' ').map(|(_, behind)| behind.to_owned());
    let behind = behind.filter(|behind| behind.len() >= 8 && !behind.contains(' '));
    behind.into_iter().chain([value]).collect()
}

impl Reader<'_> {
    /// A value that may stand elsewhere. What is wrong with it is said without saying what it is.
    pub(super) fn reference(&self, table: &Table<'_>, key: &str) -> Option<Reference> {
        if table.is_table(key) {
            let inner = table.table(key)?;
            let path = inner.text("file").map(|path| self.beside.join(path));
            inner.finish("a reference");
            let Some(path) = path else {
                table.wrong(key, Problem::new("a reference names a `file`").help("like `{ file = \"/run/secrets/key\" }`"));
                return None;
            };
            self.referenced.borrow_mut().values.push(path.clone());
            return Some(Reference { parts: vec![Part::File(path, Given::default())], place: Some(table.place_of(key)) });
        }
        match Reference::of(table.text(key)?) {
            Ok(reference) => Some(reference.at(table.place_of(key))),
            Err(why) => {
                table.wrong(key, Problem::new(why).help("like `${API_KEY}`"));
                None
            }
        }
    }

    /// The value itself, where it is needed at once, and what of it stands elsewhere.
    pub(super) fn secret(&self, table: &Table<'_>, key: &str) -> Option<(String, Vec<String>)> {
        let reference = self.reference(table, key)?;
        if let Some(problem) = reference.problem() {
            table.wrong(key, problem);
            return None;
        }
        Some((reference.resolve().ok()?, reference.hidden().collect()))
    }

    /// Values by name.
    pub(super) fn references(&self, table: &Table<'_>, key: &str) -> Vec<(String, Reference)> {
        let Some(inner) = table.table(key) else { return Vec::new() };
        inner.keys().into_iter().filter_map(|name| self.reference(&inner, &name).map(|value| (name, value))).collect()
    }
}
