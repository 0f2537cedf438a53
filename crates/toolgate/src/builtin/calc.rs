//! Implements `calc`: exact decimal arithmetic with its own parser, without executing code.

use rust_decimal::Decimal;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::call::error_code;
use crate::tool::context::ToolContext;
use crate::tool::{Effect, Failure, Tool};
use toolgate_json::number_from_decimal;

/// Maximum nesting depth of an expression.
const MAX_EXPRESSION_DEPTH: usize = 64;

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

/// Creates the tool `calc`, which calculates with exact decimals.
#[must_use]
pub fn calc() -> Tool {
    Tool::typed(
        "calc",
        "Calculate an arithmetic expression with exact decimals.\n\
         Use it for every sum, difference, product, share or power, instead of calculating yourself.\n\
         Edge cases: division by zero and results over 28 digits are errors; a quotient with endless digits is rounded to 28 digits.\n\
         Needs no other tool first.",
        |_: ToolContext, args: Args| async move {
            let result = evaluate(&args.expression).map_err(|message| Failure::from_code(error_code::INVALID_EXPRESSION, message))?;
            Ok(Result_ { result: number_from_decimal(result) })
        },
    )
    .effect(Effect::Read)
    .example("A price with tax", json!({"expression": "19.99 * 1.19"}), json!({"result": 23.7881}))
}

/// An intermediate result.
#[derive(Clone, Copy)]
struct Number {
    value: Decimal,
    /// Whether an earlier division was rounded, which makes all later results inexact.
    is_rounded: bool,
}

impl Number {
    const fn exact(value: Decimal) -> Self {
        Self { value, is_rounded: false }
    }

    /// Combines two numbers: exactly, or rounded if one of them is rounded already.
    fn combine(
        self,
        other: Self,
        exactly: fn(Decimal, Decimal) -> Option<Decimal>,
        nearly: fn(Decimal, Decimal) -> Option<Decimal>,
    ) -> Option<Self> {
        match exactly(self.value, other.value) {
            Some(value) => Some(Self { value, is_rounded: self.is_rounded || other.is_rounded }),
            None if self.is_rounded || other.is_rounded => {
                nearly(self.value, other.value).map(|value| Self { value, is_rounded: true })
            }
            None => None,
        }
    }

    fn plus(self, other: Self) -> Option<Self> {
        self.combine(other, add_exact, Decimal::checked_add)
    }

    fn multiply(self, other: Self) -> Option<Self> {
        self.combine(other, multiply_exact, Decimal::checked_mul)
    }

    fn divide(self, other: Self) -> Option<Self> {
        let value = self.value.checked_div(other.value)?;
        let exact = multiply_exact(value, other.value) == Some(self.value.normalize());
        let rounded = self.is_rounded || other.is_rounded || !exact;
        // A finite quotient with too many digits is an error, not rounded.
        (exact
            || self.is_rounded
            || other.is_rounded
            || !is_finite_quotient(self.value, other.value))
        .then_some(Self { value, is_rounded: rounded })
    }

    fn power(self, exponent: i64) -> Option<Self> {
        let base = if exponent < 0 { Self::exact(Decimal::ONE).divide(self) } else { Some(self) };
        let power = |base: Self| {
            let (mut power, mut square, mut left) =
                (Self::exact(Decimal::ONE), base, exponent.unsigned_abs());
            while left > 0 {
                if left % 2 == 1 {
                    power = power.multiply(square)?;
                }
                left /= 2;
                if left > 0 {
                    square = square.multiply(square)?;
                }
            }
            Some(power)
        };
        match base {
            Some(base) if exponent >= 0 || !base.is_rounded => power(base),
            // Invert the result, so that rounding happens once and not with every step.
            _ => Self::exact(Decimal::ONE).divide(self.power(exponent.checked_neg()?)?),
        }
    }
}

/// Returns whether a quotient is finite: the reduced divisor has only the factors 2 and 5.
fn is_finite_quotient(left: Decimal, right: Decimal) -> bool {
    let (mut a, mut b) = (left.normalize().mantissa().abs(), right.normalize().mantissa().abs());
    let divisor = b;
    while b != 0 {
        (a, b) = (b, a % b);
    }
    let mut rest = if a == 0 { divisor } else { divisor / a };
    for factor in [2, 5] {
        while rest != 0 && rest % factor == 0 {
            rest /= factor;
        }
    }
    rest == 1
}

/// Evaluates an expression, or describes the error and its position.
fn evaluate(expression: &str) -> Result<Decimal, String> {
    let mut parser = Parser { rest: expression, depth: 0 };
    let value = parser.parse_sum()?.value;
    parser.skip_spaces();
    match parser.rest.chars().next() {
        None => Ok(value),
        Some(c) => Err(format!(
            "`{}` was not expected at character {}",
            toolgate_text::escape_for_display(&c.to_string()),
            parser.position(expression)
        )),
    }
}

struct Parser<'a> {
    rest: &'a str,
    depth: usize,
}

impl Parser<'_> {
    fn position(&self, expression: &str) -> usize {
        expression.chars().count() - self.rest.chars().count() + 1
    }

    fn skip_spaces(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn accept(&mut self, c: char) -> bool {
        self.skip_spaces();
        match self.rest.strip_prefix(c) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn parse_sum(&mut self) -> Result<Number, String> {
        let mut value = self.parse_product()?;
        loop {
            let right = if self.accept('+') {
                self.parse_product()?
            } else if self.accept('-') {
                let right = self.parse_product()?;
                Number { value: -right.value, ..right }
            } else {
                return Ok(value);
            };
            value = value.plus(right).ok_or_else(too_large_message)?;
        }
    }

    fn parse_product(&mut self) -> Result<Number, String> {
        let mut value = self.parse_signed()?;
        loop {
            let (divide, remainder) = if self.accept('*') {
                (false, false)
            } else if self.accept('/') {
                (true, false)
            } else if self.accept('%') {
                (true, true)
            } else {
                return Ok(value);
            };
            let right = self.parse_signed()?;
            if divide && right.value.is_zero() {
                return Err("division by zero".to_owned());
            }
            value = match (divide, remainder) {
                (false, _) => value.multiply(right),
                (true, false) => value.divide(right),
                (true, true) => {
                    let rounded = value.is_rounded || right.is_rounded;
                    value
                        .value
                        .checked_rem(right.value)
                        .map(|value| Number { value, is_rounded: rounded })
                }
            }
            .ok_or_else(too_large_message)?;
        }
    }

    fn parse_signed(&mut self) -> Result<Number, String> {
        let mut negative = false;
        loop {
            if self.accept('-') {
                negative = !negative;
            } else if !self.accept('+') {
                break;
            }
        }
        let value = self.parse_power()?;
        Ok(if negative { Number { value: -value.value, ..value } } else { value })
    }

    fn parse_power(&mut self) -> Result<Number, String> {
        let base = self.parse_atom()?;
        if !self.accept('^') {
            return Ok(base);
        }
        self.depth += 1;
        if self.depth > MAX_EXPRESSION_DEPTH {
            return Err("the expression is nested too deeply".to_owned());
        }
        let exponent = self.parse_signed()?.value;
        self.depth -= 1;
        let power = i64::try_from(exponent)
            .ok()
            .filter(|_| exponent.fract().is_zero())
            .filter(|e| e.abs() <= 1_000);
        let power = power.ok_or_else(|| {
            "an exponent must be a whole number between -1000 and 1000".to_owned()
        })?;
        if base.value.is_zero() && power < 0 {
            return Err("division by zero".to_owned());
        }
        base.power(power).ok_or_else(too_large_message)
    }

    fn parse_atom(&mut self) -> Result<Number, String> {
        if self.accept('(') {
            self.depth += 1;
            if self.depth > MAX_EXPRESSION_DEPTH {
                return Err("the expression is nested too deeply".to_owned());
            }
            let value = self.parse_sum()?;
            self.depth -= 1;
            return if self.accept(')') { Ok(value) } else { Err("a `)` is missing".to_owned()) };
        }
        self.skip_spaces();
        let end = self
            .rest
            .find(|c: char| !c.is_ascii_digit() && c != '.' && c != '_')
            .unwrap_or(self.rest.len());
        let (digits, rest) = self.rest.split_at_checked(end).unwrap_or((self.rest, ""));
        if digits.is_empty() {
            let found = self.rest.chars().next().map_or_else(
                || "the end".to_owned(),
                |c| format!("`{}`", toolgate_text::escape_for_display(&c.to_string())),
            );
            return Err(format!("a number or `(` was expected, found {found}"));
        }
        self.rest = rest;
        Decimal::from_str_exact(&digits.replace('_', "")).map(Number::exact).map_err(|_| {
            format!(
                "`{}` is not a number of at most 28 digits",
                toolgate_text::escape_for_display(digits)
            )
        })
    }
}

/// Adds two numbers; returns `None` if the exact sum has too many digits.
fn add_exact(left: Decimal, right: Decimal) -> Option<Decimal> {
    let (left, right) = (left.normalize(), right.normalize());
    let sum = left.checked_add(right)?;
    // If the sum was rounded, subtracting one operand does not give the other.
    (sum.checked_sub(left) == Some(right) && sum.checked_sub(right) == Some(left)).then_some(sum)
}

/// Multiplies two numbers; returns `None` if the exact product has too many digits.
fn multiply_exact(left: Decimal, right: Decimal) -> Option<Decimal> {
    let (left, right) = (left.normalize(), right.normalize());
    let product = left.checked_mul(right)?;
    // The product needs the decimal places of both factors, except for trailing zeros.
    let missing = (left.scale() + right.scale()).saturating_sub(product.scale());
    let times = |factor: i128| {
        count_factor(left.mantissa(), factor) + count_factor(right.mantissa(), factor)
    };
    let exact = left.is_zero() || right.is_zero() || times(2).min(times(5)) >= missing;
    exact.then_some(product)
}

/// Returns how often a number is divisible by a factor.
fn count_factor(mut number: i128, factor: i128) -> u32 {
    let mut times = 0;
    while number != 0 && number % factor == 0 {
        (number, times) = (number / factor, times + 1);
    }
    times
}

fn too_large_message() -> String {
    "the result has more than 28 digits".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_is_exact() {
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
            ("19.99 / 3 * 3", "19.99"),
            ("200 / 3 + 50", "116.66666666666666666666666667"),
            ("0.5 ^ -40", "1099511627776"),
            ("2 ^ -20", "0.00000095367431640625"),
            ("7922816251426433759354395033.5 + 0.5", "7922816251426433759354395034"),
            ("10 / 4", "2.5"),
            ("1 / 3", "0.3333333333333333333333333333"),
        ];
        for (expression, result) in cases {
            assert_eq!(
                evaluate(expression).map(|d| d.normalize().to_string()),
                Ok(result.to_owned()),
                "{expression}"
            );
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
            // Inexact results are errors.
            "0.00000000000000000001 * 0.00000000000000000001",
            "9999999999999999999999999999 + 0.05",
            "9999999999999999999999999999 - 0.05",
            "1.000000000000001 ^ 2 * 1.000000000000001",
            "1.1 ^ 40",
            "2 ^ -90",
            "2 ^ -30",
        ] {
            assert!(evaluate(wrong).is_err(), "{wrong}");
        }
        assert!(
            evaluate(&"(".repeat(1_000)).is_err()
                && evaluate(&"2^".repeat(500)).is_err()
                && evaluate(&"-".repeat(999)).is_err()
        );
    }
}
