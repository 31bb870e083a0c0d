//! `adaptive`: the path with the lowest expected cost of one more I/O.
//!
//! Each path has three learned properties. Its *base* is the mean latency without a queue, by direction and size class.
//! Its *load* is the sum of the bases of the I/Os in flight. Its *capacity* is the load that it carries without a
//! queue, by Little's law: load x base / latency, as FAST TCP sizes its window. The cost of one more I/O is its base
//! times a factor: 1 on an idle path, steep near the capacity, proportional to the load beyond it. So I/O goes to the
//! fastest path until that one is about to queue. A loaded path is drained now and then, which shows its base.
//!
//! The capacity of a new path is learned by a *slow start*, as TCP does: each round of a full load doubles it, until a
//! queue shows.
//!
//! A path that completes nothing for longer than its load explains (a burst, a stall, a dead peer) costs more before
//! any latency is measured. An unused path keeps its base, and gets a probe now and then: one I/O. Probes that find a
//! path faster than expected make its probes more frequent, others make them rarer. While another path is known, a path
//! that was never measured gets one I/O until its first completion.

use blkyard_mq::OpClass;

use crate::policy::{ChoiceReason, PathChoice, PathIo, PathPolicy};
use crate::{PATHS_MAX, PathSet};

/// Size classes: one for each power of two. The first ends at 256 bytes, the last one holds all above 2 MiB.
const SIZES: usize = 16;
/// Directions times size classes.
const CLASSES: usize = 2 * SIZES;
/// I/Os in flight on a path whose latency is unknown, while another path is known.
const UNMEASURED_MAX: u32 = 1;
/// Samples that close a window.
const WINDOW_SAMPLES: u32 = 32;
/// Windows of a new path from which its base is learned at once: its first samples may be far from the mean.
const NEW_WINDOWS: u8 = 4;
/// Age at which a window closes with fewer, ns, and the samples that it then needs.
const WINDOW_NS: u64 = 10_000_000;
const WINDOW_SAMPLES_MIN: u32 = 4;
/// Age at which any sample closes it, ns.
const WINDOW_LATE_NS: u64 = 50_000_000;
/// For the base, a sample counts as at most so many times the present base.
const SAMPLE_CLIP: f32 = 8.0;
/// Latency over base up to which a path counts as not queueing.
const QUEUE_FREE: f32 = 1.07;
/// Latency over base from which a path counts as slower than its base says.
const SLOW: f32 = 1.3;
/// Samples after which a window closes early if it is slower than that twice over.
const SLOW_SAMPLES: u32 = 6;
/// Share of the capacity from which a load shows whether more fits.
const FULL: f32 = 0.75;
/// Growth of the capacity in a round of a slow start. Double, as in TCP: 512 channels take eight rounds.
const START_GROWTH: f32 = 2.0;
/// Excess of a mean of `n` samples over the base that is a queue during a slow start, times the root of `n`. Twice the
/// relative deviation of widely spread latencies (0.6): a start that ended by chance would leave a small capacity.
const START_NOISE: f32 = 1.2;
/// Growth of the capacity in a window without a queue.
const GROWTH: f32 = 1.02;
/// How many times fuller a path counts while it is drained.
const DRAIN: f32 = 2.5;
/// Samples that end it, and mean latencies after which it ends without.
const DRAIN_SAMPLES: u32 = 16;
const DRAIN_LATENCIES: f32 = 6.0;
/// Share of the largest capacity up to which a load is light.
const LIGHT: f32 = 0.5;
/// Time between two drains of a loaded path, ns.
const DRAIN_EVERY_NS: u64 = 100_000_000;
/// Cost factor at the capacity.
const FULL_COST: f32 = 8.0;
/// Share of the cost that grows evenly with the load, so that nearly equal paths share it.
const SPREAD: f32 = 0.15;
/// Longest time between two probes of a path, ns.
const PROBE_NS_MAX: u64 = 1_000_000_000;
/// Shortest.
const PROBE_NS_MIN: u64 = 1_000_000;
/// Part of all I/O time that probes of a path take: one in so many, at first and within these bounds.
const PROBE_SHARE: f32 = 50.0;
const PROBE_SHARES: (f32, f32) = (4.0, 250.0);
/// A probe that meets at most so much of the expected latency makes the next one come sooner by `PROBE_SOONER`; any
/// other one delays it by `PROBE_LATER`.
const PROBE_PAYS: f32 = 0.5;
const PROBE_SOONER: f32 = 4.0;
const PROBE_LATER: f32 = 1.2;

/// The policy.
#[derive(Clone, Debug)]
pub struct Adaptive {
    paths: [PathEstimate; PATHS_MAX],
    /// I/Os in flight on all paths.
    in_flight: u32,
    /// Time at which some path may be due for a probe.
    probe_ns: u64,
    costs: PathCosts,
    /// Generation of the path set.
    generation: u32,
}

/// The costs that were last computed, for I/Os of a batch: those of one class that are submitted at one time.
#[derive(Clone, Debug, Default)]
struct PathCosts {
    class: usize,
    now_ns: u64,
    /// Bit set of the paths whose cost holds.
    valid: u32,
    /// Costs, ns.
    by_path: [f32; PATHS_MAX],
}

#[derive(Clone, Debug, Default)]
struct PathEstimate {
    in_flight: u32,
    /// Sum of the bases of the I/Os in flight, ns, as they were when these were submitted.
    load: f32,
    /// One over the capacity, 1/ns; more during a drain.
    per_capacity: f32,
    /// Load without a queue, ns.
    capacity: f32,
    /// The largest capacity of the last second, ns.
    capacity_peak: f32,
    /// Mean latency of the last window over the mean base; 1 if it is near that.
    slowdown: f32,
    /// Time of the last completion, or when the path became busy.
    progress_ns: u64,
    /// Time of the last choice.
    chosen_ns: u64,
    /// Probes take one in so many of all I/O time.
    probe_share: f32,
    is_measured: bool,
    /// Slow start: no queue was seen yet.
    is_starting: bool,
    /// Windows closed, up to 255.
    windows: u8,
    /// It cannot be chosen; late completions are not learned from.
    is_lost: bool,
    /// End of the drain, or beginning of the next one.
    drain_ns: u64,
    is_draining: bool,
    /// Mean latency without a queue by class, ns; 0 if unknown.
    base: [f32; CLASSES],
    window: EstimateWindow,
}

/// Samples of a path since its last update.
#[derive(Clone, Copy, Debug, Default)]
struct EstimateWindow {
    opened_ns: u64,
    samples: u32,
    /// Sums over the samples, ns.
    base: f32,
    latency: f32,
    load: f32,
    /// Number and sum of the clipped latencies by class.
    by_class: [(u32, f32); CLASSES],
}

impl Default for Adaptive {
    fn default() -> Self {
        Adaptive {
            paths: std::array::from_fn(|_| PathEstimate::default()),
            in_flight: 0,
            probe_ns: 0,
            costs: PathCosts::default(),
            generation: 0,
        }
    }
}

/// The larger of two numbers. `f32::max` takes three times as many instructions, for numbers that are none.
#[inline]
fn larger(one: f32, other: f32) -> f32 {
    if one > other { one } else { other }
}

/// A duration as a number; one of more than 292 years as 292 years. Unsigned numbers have no such instruction.
#[inline]
fn ns(duration_ns: u64) -> f32 {
    i64::try_from(duration_ns).unwrap_or(i64::MAX) as f32
}

/// Class of an I/O: direction and size.
#[inline]
fn class_of(io: &PathIo) -> usize {
    let bits = u32::BITS - (io.bytes.saturating_sub(1) >> 8).leading_zeros();
    let size = (bits as usize).min(SIZES - 1);
    if io.class == OpClass::Read { size } else { SIZES + size }
}

impl PathEstimate {
    /// Expected latency without a queue, ns; that of another class while this one is unknown.
    #[inline]
    fn base_of(&self, class: usize) -> f32 {
        let base = self.base[class];
        if base > 0.0 { base } else { self.nearest_base(class) }
    }

    #[inline(never)]
    fn nearest_base(&self, class: usize) -> f32 {
        let known = (0..CLASSES).filter(|other| self.base[*other] > 0.0);
        known.min_by_key(|other| other.abs_diff(class)).map_or(0.0, |other| self.base[other])
    }

    /// Cost of one more I/O, ns.
    #[inline]
    fn cost(&self, class: usize, now_ns: u64) -> f32 {
        let base = self.base_of(class);
        let filled = (self.load + base) * self.per_capacity;
        let factor = if filled < 1.0 {
            let fourth = filled * filled * filled * filled;
            let sixteenth = fourth * fourth * fourth * fourth;
            1.0 + SPREAD * filled + (FULL_COST - 1.0 - SPREAD) * sixteenth
        } else {
            FULL_COST * filled
        };
        base * larger(factor, self.slowdown) * self.silence(now_ns)
    }

    /// How many times longer than expected the path has ended nothing; at least 1.
    #[inline]
    fn silence(&self, now_ns: u64) -> f32 {
        if self.in_flight == 0 {
            return 1.0;
        }
        let gap_ns = ns(now_ns.saturating_sub(self.progress_ns));
        // One completion each latency / in flight is expected. Sixteen such gaps in a row are no chance; completions
        // of larger numbers may come in batches.
        let share = self.in_flight.min(16) as f32;
        let expected = self.load * 16.0 * larger(self.slowdown, 1.0);
        // Rarely more than expected: then there is nothing to divide.
        let (gaps, expected) = (gap_ns * share * self.in_flight as f32, larger(expected, 1.0));
        if gaps <= expected { 1.0 } else { gaps / expected }
    }

    fn probe_interval_ns(&self, class: usize, in_flight: u32) -> u64 {
        let takes_ns = self.base_of(class) * self.probe_share / in_flight.max(1) as f32;
        (takes_ns as u64).clamp(PROBE_NS_MIN, PROBE_NS_MAX)
    }

    #[inline]
    fn begin(&mut self, weight: f32, now_ns: u64) {
        if self.in_flight == 0 {
            self.progress_ns = now_ns;
            self.load = 0.0;
        }
        self.in_flight += 1;
        self.load += weight;
        self.chosen_ns = now_ns;
    }

    #[inline]
    fn end(&mut self, weight: f32) {
        self.in_flight = self.in_flight.saturating_sub(1);
        self.load = larger(self.load - weight, 0.0);
    }

    #[inline]
    fn record(&mut self, class: usize, load: f32, latency_ns: f32, is_probe: bool, now_ns: u64) {
        if !self.is_measured {
            self.begin_measured(class, latency_ns, now_ns);
        }
        if is_probe {
            let pays = latency_ns < self.base_of(class) * self.slowdown * PROBE_PAYS;
            let share = if pays { self.probe_share / PROBE_SOONER } else { self.probe_share * PROBE_LATER };
            self.probe_share = share.clamp(PROBE_SHARES.0, PROBE_SHARES.1);
        }
        let mut base = self.base[class];
        if base == 0.0 {
            base = latency_ns;
            self.base[class] = base;
        }
        if self.is_draining {
            if now_ns >= self.drain_ns {
                self.end_drain(now_ns);
            } else if load > self.capacity_peak * LIGHT {
                // It met the load that is being drained.
                return;
            }
        }
        let clipped = latency_ns.min(base * SAMPLE_CLIP);
        let window = &mut self.window;
        window.samples += 1;
        window.base += base;
        window.latency += latency_ns;
        window.load += load;
        let (samples, sum) = &mut window.by_class[class];
        (*samples, *sum) = (*samples + 1, *sum + clipped);
        let age_ns = now_ns.saturating_sub(window.opened_ns);
        if window.samples >= WINDOW_SAMPLES
            || (age_ns >= WINDOW_NS && window.samples >= WINDOW_SAMPLES_MIN)
            || (window.samples >= SLOW_SAMPLES && window.latency > 2.0 * window.base)
            || age_ns >= WINDOW_LATE_NS
            || (self.is_draining && window.samples >= DRAIN_SAMPLES)
            || (self.is_starting && self.ends_round(load + base, latency_ns, age_ns))
            || is_probe
        {
            self.close(now_ns);
        }
    }

    /// Whether a window of the slow start has lasted for a round, the latency of one I/O, at a full load.
    #[inline(never)]
    fn ends_round(&self, load: f32, latency_ns: f32, age_ns: u64) -> bool {
        self.window.samples >= WINDOW_SAMPLES_MIN && ns(age_ns) >= latency_ns && load > self.capacity * FULL
    }

    #[inline(never)]
    fn begin_measured(&mut self, class: usize, latency_ns: f32, now_ns: u64) {
        self.is_measured = true;
        self.is_starting = true;
        self.probe_share = PROBE_SHARE;
        self.base[class] = latency_ns;
        self.slowdown = 1.0;
        self.window = EstimateWindow { opened_ns: now_ns, ..EstimateWindow::default() };
        self.set_capacity(self.load.max(latency_ns * 2.0));
        self.capacity_peak = self.capacity;
    }

    fn set_capacity(&mut self, capacity: f32) {
        self.capacity = capacity.max(1.0);
        self.per_capacity = if self.is_draining { DRAIN } else { 1.0 } / self.capacity;
    }

    /// Begins a drain of a loaded path: a short time at a part of the capacity, which shows the base, as BBR's ProbeRTT
    /// does.
    fn begin_drain(&mut self, latency: f32, now_ns: u64) {
        self.is_draining = true;
        self.drain_ns = now_ns + (latency * DRAIN_LATENCIES) as u64;
    }

    fn end_drain(&mut self, now_ns: u64) {
        self.is_draining = false;
        self.drain_ns = now_ns + DRAIN_EVERY_NS;
        self.set_capacity(self.capacity);
    }

    /// Learns from the samples of a window.
    #[inline(never)]
    fn close(&mut self, now_ns: u64) {
        let window = std::mem::take(&mut self.window);
        self.window.opened_ns = now_ns;
        let age_ns = now_ns.saturating_sub(window.opened_ns) as f32;
        let samples = window.samples as f32;
        let slowdown = window.latency / window.base.max(1.0);
        let load = window.load / samples;
        // A little more than the base is chance, or the queue that the load explains.
        self.slowdown = if slowdown > SLOW { slowdown } else { 1.0 };
        // A slow start ends with the first queue. A full window is judged as always, a shorter one by its noise.
        let queues = slowdown > QUEUE_FREE
            && (window.samples >= WINDOW_SAMPLES || slowdown > 1.0 + START_NOISE / samples.sqrt());
        let was_starting = self.is_starting;
        self.is_starting &= !queues;
        // Base: down at once; up at once on a path with a light load, else slowly. Small differences are mostly chance;
        // a mean below half the base is none, even that of a single probe.
        let is_new = self.windows < NEW_WINDOWS;
        self.windows = self.windows.saturating_add(1);
        let one = window.base / samples;
        let is_light = is_new || self.is_starting || load <= self.capacity_peak * LIGHT || load <= 1.5 * one;
        let mut after = 0.0;
        for (base, (samples, sum)) in self.base.iter_mut().zip(window.by_class) {
            if samples == 0 {
                continue;
            }
            let samples = samples as f32;
            let mean = sum / samples;
            let trust = (samples / (samples + 8.0)).max(0.25);
            let change = (mean - *base) / *base;
            let noise = change.abs().clamp(if self.is_draining || is_new { 0.5 } else { 0.05 }, 1.0);
            let step = if change < -0.5 {
                1.0
            } else if is_light {
                trust * noise
            } else if change < -0.1 {
                trust * noise * 0.5
            } else if change < 0.0 {
                0.0
            } else {
                trust * (age_ns / 1e9).min(1.0)
            };
            *base += (mean - *base) * step;
            after += *base * samples;
        }
        // A capacity is a number of I/Os: it grows and shrinks with their base.
        let scale = after / window.base.max(1.0);
        // Capacity: what Little's law says of this load, and more while there is no queue.
        let allowed = load * QUEUE_FREE / slowdown + one;
        let is_full = load + one > self.capacity * FULL;
        let capacity = if was_starting && queues {
            allowed
        } else if was_starting && is_full {
            (load + one) * START_GROWTH
        } else if was_starting {
            self.capacity
        } else if slowdown > QUEUE_FREE {
            self.capacity + (allowed - self.capacity) * 0.25
        } else if load < self.capacity_peak * LIGHT {
            self.capacity.max(load * 2.0).max(load + 2.0 * one)
        } else if is_full {
            (self.capacity * GROWTH).max(load * 1.1).max(load + 2.0 * one)
        } else {
            self.capacity
        };
        if self.is_draining {
            self.end_drain(now_ns);
        } else if !is_light && now_ns >= self.drain_ns {
            self.begin_drain(window.latency / samples, now_ns);
        }
        self.set_capacity(capacity.max(one) * scale);
        let forget = (age_ns / 1e9).min(1.0);
        let peak = self.capacity_peak * scale;
        // The last doubling exceeded the capacity. As a peak it would make a queueing path count as lightly loaded.
        let peak = if was_starting { self.capacity } else { peak + (self.capacity - peak) * forget };
        self.capacity_peak = peak.max(self.capacity);
    }
}

impl Adaptive {
    /// Forgets what was learned of paths that cannot be used now: they may come back as others.
    #[inline(never)]
    fn forget_lost(&mut self, paths: &PathSet) {
        self.generation = paths.generation();
        self.costs.valid = 0;
        for (path, estimate) in self.paths.iter_mut().enumerate() {
            let PathEstimate { in_flight, load, .. } = *estimate;
            if !paths.usable().has(path) {
                *estimate = PathEstimate { in_flight, load, ..PathEstimate::default() };
            }
            estimate.is_lost = !paths.usable().has(path);
        }
    }

    /// A path that is due for a probe, and the next time to look.
    #[inline(never)]
    fn probe(&mut self, paths: &PathSet, class: usize, now_ns: u64) -> Option<usize> {
        self.probe_ns = now_ns + PROBE_NS_MAX;
        let mut due = None;
        for path in paths.usable() {
            let estimate = &self.paths[path];
            if estimate.in_flight > 0 || !estimate.is_measured {
                self.probe_ns = self.probe_ns.min(now_ns + PROBE_NS_MIN);
                continue;
            }
            let at_ns = estimate.chosen_ns.saturating_add(estimate.probe_interval_ns(class, self.in_flight));
            if at_ns <= now_ns && due.is_none() && paths.candidates().has(path) {
                due = Some(path);
                self.probe_ns = self.probe_ns.min(now_ns + PROBE_NS_MIN);
            } else {
                self.probe_ns = self.probe_ns.min(at_ns.max(now_ns + PROBE_NS_MIN));
            }
        }
        due
    }

    /// The best among candidates of which some were never measured.
    #[inline(never)]
    fn unmeasured(&self, paths: &PathSet) -> Option<usize> {
        let unknown = || paths.candidates().filter(|path| !self.paths[*path].is_measured);
        let least = unknown().min_by_key(|path| self.paths[*path].in_flight)?;
        let all_unknown = unknown().count() == paths.candidates().count();
        (all_unknown || self.paths[least].in_flight < UNMEASURED_MAX).then_some(least)
    }

    #[inline]
    fn best(&mut self, paths: &PathSet, class: usize, now_ns: u64) -> Option<(usize, ChoiceReason)> {
        let costs = &mut self.costs;
        if costs.now_ns != now_ns || costs.class != class {
            (costs.now_ns, costs.class, costs.valid) = (now_ns, class, 0);
        }
        let mut unmeasured = false;
        for path in paths.candidates().except(costs.valid) {
            let estimate = &self.paths[path];
            if estimate.is_measured {
                costs.by_path[path] = estimate.cost(class, now_ns);
                costs.valid |= 1 << path;
            } else {
                costs.by_path[path] = f32::INFINITY;
                unmeasured = true;
            }
        }
        if unmeasured && let Some(path) = self.unmeasured(paths) {
            return Some((path, ChoiceReason::Unmeasured));
        }
        let (costs, mut candidates) = (&self.costs.by_path, paths.candidates());
        let mut best = candidates.next()?;
        for path in candidates {
            if costs[path] < costs[best] {
                best = path;
            }
        }
        Some((best, ChoiceReason::Best))
    }

    /// The path of a choice, whose cost is no longer what it was.
    #[inline]
    fn changed(&mut self, path: usize) -> &mut PathEstimate {
        self.costs.valid &= !(1 << path);
        &mut self.paths[path]
    }
}

impl PathPolicy for Adaptive {
    #[inline]
    fn choose(&mut self, paths: &PathSet, io: &PathIo, now_ns: u64) -> Option<PathChoice> {
        if self.generation != paths.generation() {
            self.forget_lost(paths);
        }
        let class = class_of(io);
        let (path, reason) = if let Some(only) = paths.candidates().only() {
            (only, ChoiceReason::OnlyPath)
        } else if now_ns >= self.probe_ns
            && let Some(path) = self.probe(paths, class, now_ns)
        {
            (path, ChoiceReason::Probe)
        } else {
            self.best(paths, class, now_ns)?
        };
        let estimate = self.changed(path);
        let weight = larger(estimate.base_of(class), 1.0);
        let load = estimate.load + weight;
        estimate.begin(weight, now_ns);
        self.in_flight += 1;
        Some(PathChoice { class: class as u8, weight, load, ..PathChoice::new(path, reason, io, now_ns) })
    }

    #[inline]
    fn complete(&mut self, choice: PathChoice, now_ns: u64) {
        self.in_flight = self.in_flight.saturating_sub(1);
        let estimate = self.changed(choice.path);
        estimate.end(choice.weight);
        estimate.progress_ns = now_ns;
        let latency_ns = ns(now_ns.saturating_sub(choice.start_ns).max(1));
        if !estimate.is_lost {
            let is_probe = choice.reason == ChoiceReason::Probe;
            estimate.record(usize::from(choice.class), choice.load, latency_ns, is_probe, now_ns);
        }
    }

    fn abandon(&mut self, choice: PathChoice) {
        self.in_flight = self.in_flight.saturating_sub(1);
        self.changed(choice.path).end(choice.weight);
    }
}

#[cfg(test)]
mod tests {
    use blkyard_sim::Rng;

    use super::*;
    use crate::PathState;

    #[test]
    fn choices_are_those_of_a_policy_that_computes_each_cost_anew() {
        let mut set = PathSet::new();
        (0..5).for_each(|_| assert!(set.add(PathState::default(), 0).is_some()));
        let (mut rng, mut now_ns) = (Rng::new(1), 1);
        let (mut kept, mut anew) = (Adaptive::default(), Adaptive::default());
        let (mut in_flight, mut used) = (Vec::new(), [0; 5]);
        for round in 0..20_000 {
            if rng.below(50) == 0 {
                let state = PathState { ready: rng.below(3) > 0, ..PathState::default() };
                set.set_state(rng.below(5) as usize, state);
            }
            // A batch at one time, of a class or of two, with ends between the choices.
            for _ in 0..=rng.below(16) {
                let io = PathIo { class: OpClass::Read, bytes: 4096 << (rng.below(8) / 7), node: 0 };
                anew.costs.valid = 0;
                let (one, other) = (kept.choose(&set, &io, now_ns), anew.choose(&set, &io, now_ns));
                assert_eq!(format!("{one:?}"), format!("{other:?}"), "round {round}");
                if let (Some(one), Some(other)) = (one, other) {
                    used[one.path] += 1;
                    let ends_ns = now_ns + 50_000 * (one.path as u64 + 1) + rng.below(40_000);
                    in_flight.push((ends_ns, one, other));
                }
                if rng.below(4) == 0 && !in_flight.is_empty() {
                    let (_, one, other) = in_flight.swap_remove(rng.below(in_flight.len() as u64) as usize);
                    kept.abandon(one);
                    anew.abandon(other);
                }
            }
            now_ns += rng.below(100_000);
            while let Some(at) = in_flight.iter().position(|(ends_ns, ..)| *ends_ns <= now_ns) {
                let (_, one, other) = in_flight.swap_remove(at);
                kept.complete(one, now_ns);
                anew.complete(other, now_ns);
            }
        }
        assert!(used.iter().all(|ios| *ios > 1000), "{used:?}");
    }
}
