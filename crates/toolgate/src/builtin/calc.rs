//! `calc`: exact decimal arithmetic. It parses; it never evaluates anything as code.

use rust_decimal::{Decimal, MathematicalOps};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::code;
use crate::context::Ctx;
use crate::json::number_from_decimal;
use crate::tool::{Effect, Failure, Tool};

/// Deepest nesting of an expression.
const DEPTH: usize = 64;

#[derive(Deserialize, JsonSchema)]
struct Args {
    /// For example `(19.99 * 3 - 5) / 2`. Operators: + - * / % ^ and parentheses.
    #[schemars(length(min = 1, max = 1000))]
    expression: String,
}

#[derive(Serialize, JsonSchema)]
struct Result_ {
    /// The exact result, up to 28 digits.
    #[schemars(with = "f64")]
    result: Value,
}

/// Calculates with exact decimals.
#[must_use]
pub fn calc() -> Tool {
    Tool::typed(
        "calc",
        "Calculate an arithmetic expression with exact decimals.\n\
         Use it for every sum, difference, product, share or power, instead of calculating yourself.\n\
         Edge cases: division by zero and results over 28 digits are errors; a division that does not end is rounded at 28 digits.\n\
         Needs no other tool first.",
        |_: Ctx, args: Args| async move {
            let result = evaluate(&args.expression).map_err(|why| Failure::of(code::INVALID_EXPRESSION, why))?;
            Ok(Result_ { result: number_from_decimal(result) })
        },
    )
    .effect(Effect::Read)
    .example("A price with tax", json!({"expression": "19.99 * 1.19"}), json!({"result": 23.7881}))
}

/// The value of an expression, or what is wrong with it and where.
fn evaluate(expression: &str) -> Result<Decimal, String> {
    let mut parser = Parser { rest: expression, depth: 0 };
    let value = parser.sum()?;
    parser.space();
    match parser.rest.chars().next() {
        None => Ok(value),
        Some(c) => Err(format!("`{}` was not expected at character {}", crate::names::shown(&c.to_string()), parser.place(expression))),
    }
}

struct Parser<'a> {
    rest: &'a str,
    depth: usize,
}

impl Parser<'_> {
    fn place(&self, whole: &str) -> usize {
        whole.chars().count() - self.rest.chars().count() + 1
    }

    fn space(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn take(&mut self, c: char) -> bool {
        self.space();
        match self.rest.strip_prefix(c) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn sum(&mut self) -> Result<Decimal, String> {
        let mut value = self.product()?;
        loop {
            value = if self.take('+') {
                value.checked_add(self.product()?)
            } else if self.take('-') {
                value.checked_sub(self.product()?)
            } else {
                return Ok(value);
            }
            .ok_or_else(too_large)?;
        }
    }

    fn product(&mut self) -> Result<Decimal, String> {
        let mut value = self.signed()?;
        loop {
            let (divide, remainder) = if self.take('*') {
                (false, false)
            } else if self.take('/') {
                (true, false)
            } else if self.take('%') {
                (true, true)
            } else {
                return Ok(value);
            };
            let right = self.signed()?;
            if divide && right.is_zero() {
                return Err("division by zero".to_owned());
            }
            value = match (divide, remainder) {
                (false, _) => value.checked_mul(right),
                (true, false) => value.checked_div(right),
                (true, true) => value.checked_rem(right),
            }
            .ok_or_else(too_large)?;
        }
    }

    fn signed(&mut self) -> Result<Decimal, String> {
        let mut negative = false;
        loop {
            if self.take('-') {
                negative = !negative;
            } else if !self.take('+') {
                break;
            }
        }
        let value = self.power()?;
        Ok(if negative { -value } else { value })
    }

    fn power(&mut self) -> Result<Decimal, String> {
        let base = self.atom()?;
        if !self.take('^') {
            return Ok(base);
        }
        self.depth += 1;
        if self.depth > DEPTH {
            return Err("the expression is nested too deeply".to_owned());
        }
        let exponent = self.signed()?;
        self.depth -= 1;
        let whole = i64::try_from(exponent).ok().filter(|_| exponent.fract().is_zero()).filter(|e| e.abs() <= 1_000);
        let whole = whole.ok_or_else(|| "an exponent must be a whole number between -1000 and 1000".to_owned())?;
        if base.is_zero() && whole < 0 {
            return Err("division by zero".to_owned());
        }
        base.checked_powi(whole).ok_or_else(too_large)
    }

    fn atom(&mut self) -> Result<Decimal, String> {
        if self.take('(') {
            self.depth += 1;
            if self.depth > DEPTH {
                return Err("the expression is nested too deeply".to_owned());
            }
            let value = self.sum()?;
            self.depth -= 1;
            return if self.take(')') { Ok(value) } else { Err("a `)` is missing".to_owned()) };
        }
        self.space();
        let end = self.rest.find(|c: char| !c.is_ascii_digit() && c != '.' && c != '_').unwrap_or(self.rest.len());
        let (digits, rest) = self.rest.split_at_checked(end).unwrap_or((self.rest, ""));
        if digits.is_empty() {
            let found =
                self.rest.chars().next().map_or_else(|| "the end".to_owned(), |c| format!("`{}`", crate::names::shown(&c.to_string())));
            return Err(format!("a number or `(` was expected, found {found}"));
        }
        self.rest = rest;
        Decimal::from_str_exact(&digits.replace('_', ""))
            .map_err(|_| format!("`{}` is not a number of at most 28 digits", crate::names::shown(digits)))
    }
}

fn too_large() -> String {
    "the result has more than 28 digits".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic() {
        let cases = [
            ("2+2", "4"),
            ("0.1 + 0.2", "0.3"),
            ("2 + 3 * 4", "14"),
            ("(2 + 3) * 4", "20"),
            ("-2^2", "-4"),
            ("2^-1", "0.5"),
            ("2^3^2", "512"),
            ("7 % 3", "1"),
            ("1/8", "0.125"),
            ("--5", "5"),
            ("1_000 * 3", "3000"),
            ("9007199254740993 + 0", "9007199254740993"),
        ];
        for (expression, result) in cases {
            assert_eq!(evaluate(expression).map(|d| d.normalize().to_string()), Ok(result.to_owned()), "{expression}");
        }
        for wrong in ["", "1 +", "1/0", "0^-1", "(1", "1)", "2^0.5", "import os", "9^999", "1 2", "é", "1..2", "２"] {
            assert!(evaluate(wrong).is_err(), "{wrong}");
        }
        assert!(evaluate(&"(".repeat(1_000)).is_err() && evaluate(&"2^".repeat(500)).is_err() && evaluate(&"-".repeat(999)).is_err());
    }
}
