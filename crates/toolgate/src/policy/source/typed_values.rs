//! Reads values of a TOML table as numbers, durations, paths and words.

use std::time::Duration;

use jiff::SignedDuration;
use rust_decimal::Decimal;
use serde_json::Value;
use toml::de::DeValue;
use toolgate_json::Pointer;

use crate::call::error::ErrorCategory;
use crate::policy::Diagnostic;
use crate::policy::source::table_reader::{TomlTable, to_json};

/// Converts the number exactly as written, without rounding to a double.
fn decimal_value(value: &DeValue<'_>) -> Option<Decimal> {
    toolgate_json::decimal_of(&to_json(value).filter(Value::is_number)?)
}

impl TomlTable<'_> {
    /// Reads a boolean.
    pub fn bool(&self, key: &str) -> Option<bool> {
        self.read_typed(key, ("`true` or `false`", "true"), DeValue::as_bool)
    }

    pub(crate) fn number(&self, key: &str) -> Option<Decimal> {
        self.read_typed(key, ("a number of at most 28 digits", "500"), decimal_value)
    }

    /// Reads a number that is not negative.
    pub fn non_negative(&self, key: &str) -> Option<Decimal> {
        let amount = self.number(key)?;
        if amount.is_sign_negative() && !amount.is_zero() {
            self.report(
                key,
                Diagnostic::new(format!("`{key}` must not be negative"))
                    .with_help(format!("like `{key} = 0.02`")),
            );
        }
        Some(amount)
    }

    /// Reads a concurrency limit of at least 1.
    pub fn concurrency(&self, key: &str) -> Option<usize> {
        let most = self.count(key)?;
        if most == 0 {
            self.report(
                key,
                Diagnostic::new(format!("`{key}` of 0 allows no calls"))
                    .with_help(format!("like `{key} = 16`")),
            );
        }
        Some(usize::try_from(most).unwrap_or(usize::MAX).max(1))
    }

    /// Reads a whole number that is not negative.
    pub fn count(&self, key: &str) -> Option<u64> {
        self.read_typed(key, ("a non-negative integer", "3"), |value| match value {
            DeValue::Integer(number) if number.radix() == 10 => number.as_str().parse().ok(),
            _ => None,
        })
    }

    /// Reads a number of bytes: `1024` or `"512MB"`.
    pub fn bytes(&self, key: &str) -> Option<u64> {
        self.read_typed(key, ("a number of bytes", "\"512MB\""), |value| match value {
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

    /// Reads the path of an argument or of an evidence field.
    pub fn pointer(&self, key: &str) -> Option<Pointer> {
        self.read_typed(key, ("the path of an argument", "\"/amount\""), |value| {
            value.as_str().filter(|t| !t.is_empty()).map(Pointer::from)
        })
    }

    /// Reads a duration, such as `15m`.
    pub fn duration(&self, key: &str) -> Option<SignedDuration> {
        let text = self.read_typed(
            key,
            ("a duration", "\"15m\"` or `\"24h\"` or `\"7d\""),
            DeValue::as_str,
        )?;
        let length = crate::clock::parse_duration(text);
        if length.is_none() {
            let problem = Diagnostic::new(format!(
                "`{}` is not a duration",
                toolgate_text::escape_for_display(text)
            ));
            self.report(key, problem.with_help(crate::clock::DURATION_HELP));
        }
        length
    }

    /// Reads a duration longer than zero; a limit over no time limits nothing.
    pub(crate) fn positive_duration(&self, key: &str) -> Option<SignedDuration> {
        let length = self.duration(key)?;
        if !length.is_positive() {
            self.report(
                key,
                Diagnostic::new(format!("`{key}` must be longer than zero"))
                    .with_help(format!("like `{key} = \"1s\"`")),
            );
        }
        Some(length).filter(SignedDuration::is_positive)
    }

    /// Reads the same as a [`Duration`].
    pub fn positive_std_duration(&self, key: &str) -> Option<Duration> {
        self.positive_duration(key).and_then(|length| Duration::try_from(length).ok())
    }

    /// Reads one of a fixed set of words.
    pub fn keyword<T: Copy>(&self, key: &str, words: &[(&str, T)]) -> Option<T> {
        let text = self.text(key)?;
        let found = words.iter().find(|(word, _)| *word == text).map(|(_, meaning)| *meaning);
        if found.is_none() {
            let known =
                words.iter().map(|(word, _)| format!("`{word}`")).collect::<Vec<_>>().join(", ");
            let help = if words.len() == 1 {
                format!("the only value is {known}")
            } else {
                format!("expected one of {known}")
            };
            let problem = Diagnostic::new(format!(
                "unknown {key} `{}`",
                toolgate_text::escape_for_display(text)
            ))
            .with_help(help);
            // Suggest only near misspellings: in a short list, another word has another meaning.
            let misspellings = words
                .iter()
                .map(|(word, _)| *word)
                .filter(|word| toolgate_text::suggest::is_misspelling(word, text));
            self.report(key, problem.with_suggestion(text, misspellings));
        }
        found
    }

    /// Reads the category of an error.
    pub fn category(&self) -> Option<ErrorCategory> {
        let words = [
            ("BUSINESS", ErrorCategory::Business),
            ("PERMISSION", ErrorCategory::Permission),
            ("VALIDATION", ErrorCategory::Validation),
            ("TRANSIENT", ErrorCategory::Transient),
        ];
        self.keyword("category", &words)
    }
}
