//! Computes statistics over ledger rows.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::Serialize;
use toolgate::store::StoreError;
use toolgate::{Decision, Gate};

use crate::reader::{Ledger, LedgerEntry, RowFilter};

/// Statistics over ledger rows.
#[derive(Debug, Clone, PartialEq, Serialize, Default)]
pub struct LedgerStats {
    /// Number of rows.
    pub rows: u64,
    /// Time of the first row.
    pub from: Option<Timestamp>,
    /// Time of the last row.
    pub to: Option<Timestamp>,
    /// Rows by decision.
    pub decisions: BTreeMap<&'static str, u64>,
    /// Calls by tool: all, refused, failed.
    pub tools: BTreeMap<String, (u64, u64, u64)>,
    /// Refusals by rule, or by gate if no rule decided.
    pub refused_by: BTreeMap<String, u64>,
    /// Errors by code.
    pub codes: BTreeMap<String, u64>,
    /// Calls that observe-only rules would have refused, by rule.
    pub observed: BTreeMap<String, u64>,
    /// Latency by gate.
    pub latency: BTreeMap<&'static str, LatencyPercentiles>,
}

/// Latency percentiles in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Default)]
pub struct LatencyPercentiles {
    /// The median.
    pub p50_ns: u64,
    /// The 95th percentile.
    pub p95_ns: u64,
    /// The 99th percentile.
    pub p99_ns: u64,
}

impl Ledger {
    /// Computes statistics over the rows that match `filter`.
    ///
    /// # Errors
    /// The rows cannot be read.
    pub fn compute_stats(&self, filter: &RowFilter) -> Result<LedgerStats, StoreError> {
        let mut stats = LedgerStats::default();
        let mut times: BTreeMap<Gate, LatencyHistogram> = BTreeMap::new();
        self.query(filter, |LedgerEntry { row, .. }| {
            stats.rows += 1;
            stats.from = Some(stats.from.map_or(row.at, |from| from.min(row.at)));
            stats.to = Some(stats.to.map_or(row.at, |to| to.max(row.at)));
            *stats.decisions.entry(row.decision.name()).or_default() += 1;
            // A settlement row is not a call.
            if row.decision == Decision::Settled {
                return Ok(true);
            }
            let tool = stats.tools.entry(row.tool.to_string()).or_default();
            tool.0 += 1;
            tool.1 += u64::from(row.decision == Decision::Refused);
            tool.2 += u64::from(row.decision == Decision::Failed);
            if row.decision == Decision::Refused {
                *stats
                    .refused_by
                    .entry(row.rule.clone().unwrap_or_else(|| format!("({})", row.gate)))
                    .or_default() += 1;
            }
            if let Some(code) = row.code() {
                *stats.codes.entry(code.to_owned()).or_default() += 1;
            }
            for observed in &row.facts.observed {
                *stats.observed.entry(observed.rule.clone()).or_default() += 1;
            }
            for gate in Gate::ALL.into_iter().filter(|gate| row.latency.nanos_at(*gate) > 0) {
                times.entry(gate).or_default().record(row.latency.nanos_at(gate));
            }
            Ok(true)
        })?;
        let percentiles = |times: &LatencyHistogram| LatencyPercentiles {
            p50_ns: times.quantile(0.5),
            p95_ns: times.quantile(0.95),
            p99_ns: times.quantile(0.99),
        };
        stats.latency =
            times.iter().map(|(gate, times)| (gate.name(), percentiles(times))).collect();
        Ok(stats)
    }
}

/// Counts values in buckets that are at most 6 % wide, so its size does not grow with the values.
#[derive(Default)]
struct LatencyHistogram {
    buckets: BTreeMap<u32, u64>,
    count: u64,
}

impl LatencyHistogram {
    fn record(&mut self, value: u64) {
        let bits = 63 - value.max(16).leading_zeros();
        let part = (value.max(16) >> (bits - 4)) & 15;
        *self.buckets.entry(bits * 16 + u32::try_from(part).unwrap_or(0)).or_default() += 1;
        self.count += 1;
    }

    /// Returns the lower bound of the bucket that contains the quantile `part`.
    fn quantile(&self, part: f64) -> u64 {
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a percentile"
        )]
        let mut left = (self.count as f64 * part).ceil() as u64;
        for (bucket, count) in &self.buckets {
            left = left.saturating_sub(*count);
            if left == 0 {
                let (bits, part) = (bucket / 16, u64::from(bucket % 16));
                return (16 + part) << (bits - 4);
            }
        }
        0
    }
}
