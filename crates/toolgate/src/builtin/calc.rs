//! `calc`: exact decimal arithmetic. It parses; it never evaluates anything as code.

use rust_decimal::Decimal;
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
            let right = if self.take('+') {
                self.product()?
            } else if self.take('-') {
                -self.product()?
            } else {
                return Ok(value);
            };
            value = added(value, right).ok_or_else(too_large)?;
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
                (false, _) => multiplied(value, right),
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
        let power = raised(base, whole.unsigned_abs()).ok_or_else(too_large)?;
        if whole < 0 { Decimal::ONE.checked_div(power).ok_or_else(too_large) } else { Ok(power) }
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

/// The sum, unless it has more digits than there is room for: nothing of it is rounded away.
fn added(left: Decimal, right: Decimal) -> Option<Decimal> {
    let (left, right) = (left.normalize(), right.normalize());
    left.checked_add(right).filter(|sum| sum.scale() >= left.scale().max(right.scale()))
}

/// The product, unless it has more digits than there is room for.
fn multiplied(left: Decimal, right: Decimal) -> Option<Decimal> {
    let (left, right) = (left.normalize(), right.normalize());
    let product = left.checked_mul(right)?;
    // Behind the point there is room for as many digits as both have together, or for fewer, where the last of them are zeros.
    let missing = (left.scale() + right.scale()).saturating_sub(product.scale());
    let times = |factor: i128| times_in(left.mantissa(), factor) + times_in(right.mantissa(), factor);
    let exact = left.is_zero() || right.is_zero() || times(2).min(times(5)) >= missing;
    exact.then_some(product)
}

/// How often a number is divisible by another.
fn times_in(mut number: i128, factor: i128) -> u32 {
    let mut times = 0;
    while number != 0 && number % factor == 0 {
        (number, times) = (number / factor, times + 1);
    }
    times
}

fn raised(base: Decimal, exponent: u64) -> Option<Decimal> {
    let (mut power, mut square, mut left) = (Decimal::ONE, base, exponent);
    while left > 0 {
        if left % 2 == 1 {
            power = multiplied(power, square)?;
        }
        left /= 2;
        if left > 0 {
            square = multiplied(square, square)?;
        }
    }
    Some(power)
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
            ("1.1^5", "1.61051"),
            ("0.00000000000000000005 * 0.000000002", "0.0000000000000000000000000001"),
            ("0 * 0.00000000000000000001", "0"),
            ("79228162514264337593543950335 - 1", "79228162514264337593543950334"),
            ("1.10 + 1.90", "3"),
        ];
        for (expression, result) in cases {
            assert_eq!(evaluate(expression).map(|d| d.normalize().to_string()), Ok(result.to_owned()), "{expression}");
        }
        for wrong in [
            "",
            "1 +",
            "1/0",
            "0^-1",
            "(1",
            "1)",
            "2^0.5",
            "import os",
            "9^999",
            "1 2",
            "é",
            "1..2",
            "２",
            // Nothing is rounded away unseen.
            "0.00000000000000000001 * 0.00000000000000000001",
            "9999999999999999999999999999 + 0.05",
            "9999999999999999999999999999 - 0.05",
            "1.000000000000001 ^ 2 * 1.000000000000001",
            "1.1 ^ 40",
        ] {
            assert!(evaluate(wrong).is_err(), "{wrong}");
        }
        assert!(evaluate(&"(".repeat(1_000)).is_err() && evaluate(&"2^".repeat(500)).is_err() && evaluate(&"-".repeat(999)).is_err());
    }
}
