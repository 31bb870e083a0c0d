//! A device with a given latency and ceiling: every access passes a serial stage, one at a time, and then takes the
//! latency, in parallel with others.
//!
//! A model for devices whose inside does not matter: a network path, a fast disk under test. It keeps order, unless its
//! latency varies, and has no cache.

use crate::model::{Access, ModelEvent, SECTOR_BYTES};
use crate::{Events, Rng};

/// Parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LineModel {
    /// Time of each access in the serial stage, for any length: the inverse of the maximum rate.
    pub access_ns: u64,
    /// Bytes per second through the serial stage; 0 for no such ceiling.
    pub bytes_per_s: u64,
    /// Time after it.
    pub latency_ns: u64,
    /// Standard deviation of the latter.
    pub jitter_ns: u64,
    /// Accesses it takes at one time.
    pub depth: usize,
}

/// The device.
#[derive(Debug)]
pub struct FixedLatency {
    model: LineModel,
    rng: Rng,
    /// Time at which the serial stage is free.
    free_ns: u64,
    /// Pending completions.
    due: Events<Access>,
    out: usize,
    happened: Vec<ModelEvent>,
}

impl FixedLatency {
    /// An idle device.
    pub fn new(model: LineModel, seed: u64) -> FixedLatency {
        let happened = Vec::with_capacity(2 * model.depth.min(1024));
        FixedLatency { model, rng: Rng::new(seed), free_ns: 0, due: Events::default(), out: 0, happened }
    }

    pub(crate) fn room(&self) -> usize {
        self.model.depth - self.out
    }

    pub(crate) fn take(&mut self, now_ns: u64, access: Access) {
        let bytes = if access.op.has_data() { u64::from(access.sectors) * SECTOR_BYTES } else { 0 };
        let passes_ns = bytes.saturating_mul(1_000_000_000).checked_div(self.model.bytes_per_s).unwrap_or(0);
        self.free_ns = self.free_ns.max(now_ns).max(self.due.now_ns()) + self.model.access_ns.max(passes_ns);
        let jitter_ns = self.rng.normal(self.model.jitter_ns);
        self.due.at(self.free_ns + self.model.latency_ns.saturating_add_signed(jitter_ns), access);
        self.out += 1;
    }

    pub(crate) fn next_ns(&self) -> Option<u64> {
        self.due.next_ns()
    }

    pub(crate) fn run(&mut self, now_ns: u64) -> &mut Vec<ModelEvent> {
        while self.next_ns().is_some_and(|due_ns| due_ns <= now_ns) {
            let Some(access) = self.due.advance() else { break };
            let at_ns = self.due.now_ns();
            self.out -= 1;
            self.happened.push(ModelEvent::Done { id: access.id, at_ns });
            if access.op.is_write() {
                let (sector, sectors) = (access.sector, u64::from(access.sectors));
                self.happened.push(ModelEvent::OnMedium { sector, sectors });
            }
        }
        &mut self.happened
    }

    pub(crate) fn cut_power(&mut self) {
        self.due.clear();
        self.out = 0;
        self.happened.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blkyard_mq::Op;

    #[test]
    fn the_latency_is_for_each_and_the_ceiling_for_all() {
        let model = LineModel { access_ns: 100, bytes_per_s: 0, latency_ns: 1000, jitter_ns: 0, depth: 3 };
        let mut line = FixedLatency::new(model, 0);
        for id in 0..3 {
            line.take(50, Access { id, op: Op::Read, sectors: 8, ..Access::default() });
        }
        assert_eq!((line.room(), line.next_ns()), (0, Some(1150)));
        let done: Vec<_> = line.run(9999).drain(..).collect();
        let at = |id, at_ns| ModelEvent::Done { id, at_ns };
        assert_eq!(done, [at(0, 1150), at(1, 1250), at(2, 1350)]);
    }

    #[test]
    fn bytes_have_a_ceiling_of_their_own() {
        let model = LineModel { access_ns: 10, bytes_per_s: 1_000_000_000, latency_ns: 0, jitter_ns: 0, depth: 9 };
        let mut line = FixedLatency::new(model, 0);
        line.take(0, Access { op: Op::Write, sectors: 2, ..Access::default() });
        line.take(0, Access { id: 1, op: Op::Flush, ..Access::default() });
        let ends = line.run(9999).drain(..).filter_map(|event| match event {
            ModelEvent::Done { at_ns, .. } => Some(at_ns),
            ModelEvent::OnMedium { .. } => None,
        });
        assert_eq!(ends.collect::<Vec<_>>(), [1024, 1034]);
    }
}
