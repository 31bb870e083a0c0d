//! The oracle: chooses with the present parameters of the paths, which it is told, and its own I/Os in flight. It knows
//! neither coming draws nor coming changes.
//!
//! No single rule is the best for every load: the shortest expected delay fills the fastest path until its queue costs
//! as much as the slower path, which is greedy; the marginal rules keep that queue short. The oracle of a scene is the
//! rule with the highest throughput there, known after the run. It is no bound: a policy can be faster, and a better
//! rule may exist.

use blkyard_sim::ModelPath;

/// A rule of the oracle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OracleRule {
    /// The shortest expected delay.
    ShortestDelay,
    /// The smallest growth of the delay of all I/Os: the cost of a full path is so many times its latency.
    Marginal(u32),
}

impl OracleRule {
    pub(crate) const ALL: [OracleRule; 4] =
        [OracleRule::ShortestDelay, OracleRule::Marginal(2), OracleRule::Marginal(4), OracleRule::Marginal(16)];
}

/// I/Os in flight of one host, by path.
#[derive(Clone, Debug)]
pub(crate) struct PathOracle {
    rule: OracleRule,
    /// Number and bytes.
    in_flight: Vec<(u64, u64)>,
    hosts: u64,
}

impl PathOracle {
    pub(crate) fn new(rule: OracleRule, paths: usize, hosts: u64) -> PathOracle {
        PathOracle { rule, in_flight: vec![(0, 0); paths], hosts }
    }

    pub(crate) fn choose(&mut self, paths: &[ModelPath], bytes: u32, now_ns: u64) -> usize {
        let cost = |number: usize| self.cost(&paths[number], self.in_flight[number], bytes, now_ns);
        let costs = (0..paths.len()).map(|number| (cost(number), number));
        let (_, best) = costs.min_by(|one, other| one.0.total_cmp(&other.0)).unwrap_or_default();
        self.in_flight[best].0 += 1;
        self.in_flight[best].1 += u64::from(bytes);
        best
    }

    pub(crate) fn complete(&mut self, path: usize, bytes: u32) {
        self.in_flight[path].0 -= 1;
        self.in_flight[path].1 -= u64::from(bytes);
    }

    fn cost(&self, path: &ModelPath, (count, sum): (u64, u64), bytes: u32, now_ns: u64) -> f64 {
        let model = path.model();
        // Other hosts have as much in flight, as far as this one knows.
        let count = (count + 1) * self.hosts;
        let sum = (sum + u64::from(bytes)) * self.hosts;
        let base = model.latency_at_ns(bytes, now_ns) as f64;
        let service = model.service_at_ns(now_ns) as f64 * count as f64 / f64::from(model.channels);
        let link = (sum as f64 * 1e9 / model.bytes_per_s.max(1) as f64) * f64::from(u8::from(model.bytes_per_s > 0));
        let stall = model.stall.map_or(0.0, |stall| stall.for_ns as f64 / stall.one_in as f64);
        let is_lossy = |above: u32| count > u64::from(above);
        let loss = model.loss.filter(|loss| is_lossy(loss.above));
        let loss = loss.map_or(0.0, |loss| loss.resend_ns as f64 / loss.one_in as f64);
        // Time until all in flight are served.
        let drained = service.max(link);
        match self.rule {
            OracleRule::ShortestDelay => base.max(drained) + stall + loss,
            OracleRule::Marginal(full) => {
                let (filled, full) = (drained / base, f64::from(full));
                let factor = if filled < 1.0 { 1.0 + (full - 1.0) * filled.powi(8) } else { full * filled };
                base * factor + stall + loss
            }
        }
    }
}
