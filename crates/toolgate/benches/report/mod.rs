//! Prints results as a table for people, and writes them to `target/bench.json` for programs.
//!
//! The lines of other benchmarks stay in the file.

use serde::{Deserialize, Serialize};

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[derive(Serialize, Deserialize)]
pub(crate) struct BenchLine {
    pub(crate) name: String,
    pub(crate) value: f64,
    pub(crate) unit: String,
    pub(crate) floor: f64,
    pub(crate) ratio: f64,
    pub(crate) note: String,
}

#[expect(clippy::allow_attributes, reason = "not every benchmark measures in µs")]
#[allow(dead_code, reason = "not every benchmark measures in µs")]
pub(crate) fn line(name: &str, values: Vec<f64>, floors: Vec<f64>, note: &str) -> BenchLine {
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
pub(crate) fn write_lines(lines: Vec<BenchLine>) {
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
#[expect(clippy::allow_attributes, reason = "most benchmarks can always be run")]
#[allow(dead_code, reason = "most benchmarks can always be run")]
pub(crate) fn remove_line(name: &str) {
    update_lines(|all| all.retain(|old| old.name != name));
}

fn update_lines(how: impl FnOnce(&mut Vec<BenchLine>)) {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/bench.json");
    let mut all: Vec<BenchLine> = std::fs::read(&path)
        .ok()
        .and_then(|old| serde_json::from_slice(&old).ok())
        .unwrap_or_default();
    how(&mut all);
    std::fs::write(&path, serde_json::to_vec_pretty(&all).unwrap())
        .expect("target/bench.json can be written");
}
