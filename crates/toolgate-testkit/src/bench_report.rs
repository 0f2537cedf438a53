//! Prints results as a table for people, and writes them to `target/bench.json` for programs.
//!
//! The lines of other benchmarks stay in the file.

use serde::{Deserialize, Serialize};

/// Returns the median of some values.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// One result.
#[derive(Serialize, Deserialize)]
pub struct BenchLine {
    /// What is measured.
    pub name: String,
    /// The measured value.
    pub value: f64,
    /// The unit of the value.
    pub unit: String,
    /// The value of the floor in the same run.
    pub floor: f64,
    /// The value divided by its floor.
    pub ratio: f64,
    /// What the floor is.
    pub note: String,
}

/// Builds a line in microseconds from samples in nanoseconds.
pub fn line(name: &str, values: Vec<f64>, floors: Vec<f64>, note: &str) -> BenchLine {
    let (value, floor) = (median(values) / 1_000.0, median(floors) / 1_000.0);
    let round = |x: f64| (x * 1_000.0).round() / 1_000.0;
    BenchLine {
        name: name.into(),
        value: round(value),
        unit: "µs".into(),
        floor: round(floor),
        ratio: round(value / floor),
        note: note.into(),
    }
}

/// Prints lines, and writes them to `target/bench.json`.
pub fn write_lines(lines: Vec<BenchLine>) {
    println!("{:<28} {:>10} {:>10} {:<6} {:>7}  note", "name", "value", "floor", "unit", "ratio");
    for line in &lines {
        println!(
            "{:<28} {:>10.2} {:>10.2} {:<6} {:>7.2}  {}",
            line.name, line.value, line.floor, line.unit, line.ratio, line.note
        );
    }
    update_lines(|all| {
        all.retain(|old| !lines.iter().any(|new| new.name == old.name));
        all.extend(lines);
    });
}

/// Removes a line of an earlier run that this run could not measure.
pub fn remove_line(name: &str) {
    update_lines(|all| all.retain(|old| old.name != name));
}

fn update_lines(how: impl FnOnce(&mut Vec<BenchLine>)) {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/bench.json");
    let mut all: Vec<BenchLine> = std::fs::read(&path)
        .ok()
        .and_then(|old| serde_json::from_slice(&old).ok())
        .unwrap_or_default();
    how(&mut all);
    std::fs::write(&path, serde_json::to_vec_pretty(&all).unwrap()).unwrap();
}
