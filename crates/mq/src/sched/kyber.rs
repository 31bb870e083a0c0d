//! `kyber`: a number of requests in flight that keeps latencies within targets. After Kyber of Linux
//! (`block/kyber-iosched.c`); spec A.26.
//!
//! Requests fall into four domains: reads, writes, discards, and others. Each has tokens, held by its requests in
//! flight, so that writes can never take all; and each dispatches a batch before the next domain. Within a domain the
//! order is that of arrival.
//!
//! The number of tokens follows from measurements. Two latencies count, each in quarters of its domain's target: that
//! of the device, and that from arrival to end. The device is congested in a window if the slowest tenth of some domain
//! exceeded its target at the device. Then each domain's tokens are scaled by the quarter of its p99 from arrival to
//! end,
//!
//! ```text
//!   tokens × (quarter + 1) / 4        quarter: 0 .. 3 within the target, 4 .. 7 beyond
//! ```
//!
//! so a domain well within its target gets fewer, and one beyond it gets more, up to the initial number. Without
//! congestion only domains beyond their target get more.
//!
//! Linux measures by CPU and has one set of tokens for a device; here each hardware queue measures and counts
//! separately.

use super::slots::{List, Slots};
use super::{Reach, Scheduler, SchedulerSnapshot, Selected, join_from};
use crate::{Bio, Op};

/// Options of `kyber`. The defaults are those of Linux.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KyberConfig {
    /// How long a read should take at most, microseconds.
    pub read_target_us: u32,
    /// The same for a write.
    pub write_target_us: u32,
    /// The same for a discard.
    pub discard_target_us: u32,
}

impl Default for KyberConfig {
    fn default() -> KyberConfig {
        KyberConfig { read_target_us: 2000, write_target_us: 10_000, discard_target_us: 5_000_000 }
    }
}

/// Domains there are.
const DOMAINS: usize = 4;
/// Their names.
const NAMES: [&str; DOMAINS] = ["read_tokens", "write_tokens", "discard_tokens", "other_tokens"];
/// Tokens that each has at first and at most.
const TOKENS: [u32; DOMAINS] = [256, 128, 64, 16];
/// Requests of each domain's batch.
const BATCH: [u32; DOMAINS] = [16, 8, 1, 1];
/// Latency classes in quarters of the target: half within it, half beyond.
const QUARTERS: usize = 8;
/// The first that is beyond it.
const BAD: usize = 4;
/// Interval between a completion and the evaluation of latencies.
const WINDOW_NS: u64 = 100_000_000;
/// Samples for a percentile; fewer suffice after the time below.
const SAMPLES: u64 = 500;
const SAMPLING_NS: u64 = 1_000_000_000;

fn domain_of(op: Op) -> usize {
    match op {
        Op::Read => 0,
        Op::Write => 1,
        Op::Discard => 2,
        Op::Flush | Op::WriteZeroes => 3,
    }
}

/// Latencies of one domain, by quarter of its target.
#[derive(Clone, Copy, Debug, Default)]
struct Latencies {
    counts: [u64; QUARTERS],
    /// Time from which the present samples suffice.
    due_ns: Option<u64>,
}

impl Latencies {
    fn count(&mut self, latency_ns: u64, target_ns: u64) {
        // Compared rather than divided: most are within the first one.
        let quarter_ns = (target_ns / 4).max(1);
        let quarter = (1..QUARTERS).take_while(|quarter| latency_ns > *quarter as u64 * quarter_ns).count();
        self.counts[quarter] += 1;
    }

    /// Quarter of a percentile, or `None` with too few samples. Resets the counts otherwise.
    fn percentile(&mut self, percent: u64, now_ns: u64) -> Option<usize> {
        let total: u64 = self.counts.iter().sum();
        if total == 0 {
            return None;
        }
        let due_ns = *self.due_ns.get_or_insert(now_ns.saturating_add(SAMPLING_NS));
        if total < SAMPLES && now_ns < due_ns {
            return None;
        }
        let mut left = (total * percent).div_ceil(100);
        let counts = std::mem::take(self).counts;
        counts.iter().position(|count| {
            let found = left <= *count;
            left = left.saturating_sub(*count);
            found
        })
    }
}

#[derive(Debug, Default)]
struct Domain {
    bios: List,
    tokens: u32,
    /// Tokens held.
    out: u32,
    /// With the device.
    io: Latencies,
    /// From arrival to end.
    whole: Latencies,
    /// Where the slowest hundredth was when that could last be said, and was of no use yet.
    slowest: Option<usize>,
}

/// See the head of the module.
#[derive(Debug)]
pub(crate) struct Kyber {
    config: KyberConfig,
    slots: Slots,
    domains: [Domain; DOMAINS],
    /// Domain of the current batch, and its requests so far.
    turn: usize,
    batch: u32,
    /// End of the window.
    window_ends_ns: Option<u64>,
}

impl Kyber {
    pub(crate) fn new(config: KyberConfig, bios_max: usize) -> Kyber {
        let domain = |number: usize| Domain { tokens: TOKENS[number], ..Domain::default() };
        Kyber {
            config,
            slots: Slots::new(bios_max),
            domains: std::array::from_fn(domain),
            turn: 0,
            batch: 0,
            window_ends_ns: None,
        }
    }

    /// Latency target of a domain; `None` for the last.
    fn target_ns(&self, domain: usize) -> Option<u64> {
        let KyberConfig { read_target_us, write_target_us, discard_target_us } = self.config;
        let targets_us = [read_target_us, write_target_us, discard_target_us];
        targets_us.get(domain).map(|target_us| u64::from(*target_us) * 1000)
    }

    /// Whether a domain has a bio, and a token for it.
    #[inline]
    fn is_ready(&self, domain: usize) -> bool {
        let domain = &self.domains[domain];
        !domain.bios.is_empty() && domain.out < domain.tokens
    }

    /// Scales the domains' tokens by the measured latencies.
    #[inline(never)]
    fn scale(&mut self, now_ns: u64) {
        let is_bad = |domain: &mut Domain| domain.io.percentile(90, now_ns).is_some_and(|quarter| quarter >= BAD);
        // All domains are evaluated, since that resets their counts.
        let congested = self.domains.iter_mut().filter_map(|domain| is_bad(domain).then_some(())).count() > 0;
        for (domain, most) in self.domains.iter_mut().zip(TOKENS) {
            let mut slowest = domain.whole.percentile(99, now_ns);
            // Not every domain has enough samples in each window. A domain's result is valid for one congestion.
            if congested {
                slowest = slowest.or(domain.slowest.take());
                domain.slowest = None;
            } else if slowest.is_some() {
                domain.slowest = slowest;
            }
            if let Some(quarter) = slowest.filter(|quarter| congested || *quarter >= BAD) {
                domain.tokens = (domain.tokens * (quarter as u32 + 1) / 4).clamp(1, most);
            }
        }
    }

    fn hand_out(&mut self, domain: usize, mut bio: Box<Bio>, since_ns: u64, now_ns: u64) -> Box<Bio> {
        self.domains[domain].out += 1;
        bio.scheduler_word = (now_ns.saturating_sub(since_ns) / 1000).try_into().unwrap_or(u32::MAX);
        bio
    }
}

impl Scheduler for Kyber {
    fn insert(&mut self, bio: Box<Bio>, now_ns: u64) {
        let domain = &mut self.domains[domain_of(bio.op)];
        self.slots.push(&mut domain.bios, bio, now_ns);
    }

    fn next(&mut self, now_ns: u64) -> Selected {
        if self.batch >= BATCH[self.turn] || !self.is_ready(self.turn) {
            // The other domains in turn, and the same one again if they have none.
            let others = (1..=DOMAINS).map(|step| (self.turn + step) % DOMAINS);
            let Some(turn) = others.into_iter().find(|domain| self.is_ready(*domain)) else {
                return Selected::Wait(u64::MAX);
            };
            (self.turn, self.batch) = (turn, 0);
        }
        let Some((bio, since_ns)) = self.slots.pop(&mut self.domains[self.turn].bios) else {
            unreachable!("looked at above")
        };
        self.batch += 1;
        Selected::Bio(self.hand_out(self.turn, bio, since_ns, now_ns))
    }

    fn join(&mut self, reach: Reach, fits: &mut dyn FnMut(&Bio) -> bool, now_ns: u64) -> Option<Box<Bio>> {
        let domain = self.turn;
        if !self.is_ready(domain) {
            return None;
        }
        let (bio, since_ns) = join_from(&mut self.slots, &mut self.domains[domain].bios, reach, fits)?;
        Some(self.hand_out(domain, bio, since_ns, now_ns))
    }

    fn ended(&mut self, bio: &Bio, start_ns: u64, now_ns: u64) {
        let number = domain_of(bio.op);
        let target_ns = self.target_ns(number);
        let domain = &mut self.domains[number];
        domain.out -= 1;
        if let Some(target_ns) = target_ns {
            let io_ns = now_ns.saturating_sub(start_ns);
            domain.io.count(io_ns, target_ns);
            domain.whole.count(io_ns.saturating_add(u64::from(bio.scheduler_word) * 1000), target_ns);
            let ends_ns = *self.window_ends_ns.get_or_insert(now_ns.saturating_add(WINDOW_NS));
            if now_ns >= ends_ns {
                self.window_ends_ns = None;
                self.scale(now_ns);
            }
        }
    }

    fn take(&mut self, is_it: &mut dyn FnMut(&Bio) -> bool, _now_ns: u64) -> Option<Box<Bio>> {
        let at = self.slots.find(is_it)?;
        let domain = domain_of(self.slots.bio(at).op);
        Some(self.slots.remove(&mut self.domains[domain].bios, at))
    }

    fn drain(&mut self, each: &mut dyn FnMut(Box<Bio>)) {
        self.slots.drain(each);
    }

    fn snapshot(&self, now_ns: u64) -> SchedulerSnapshot {
        let KyberConfig { read_target_us, write_target_us, discard_target_us } = self.config;
        let options = vec![
            ("read_target_us", read_target_us.to_string()),
            ("write_target_us", write_target_us.to_string()),
            ("discard_target_us", discard_target_us.to_string()),
        ];
        let tokens = self.domains.iter().zip(NAMES).map(|(domain, name)| (name, u64::from(domain.tokens)));
        SchedulerSnapshot {
            name: "kyber",
            options,
            waiting: self.domains.iter().map(|domain| domain.bios.len()).sum(),
            oldest_ns: self.slots.oldest_ns().map_or(0, |since_ns| now_ns.saturating_sub(since_ns)),
            facts: tokens.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_latency_is_counted_in_its_quarter_of_the_target() {
        let table = [(0, 0), (1, 0), (500, 0), (501, 1), (2000, 3), (2001, 4), (3999, 7), (u64::MAX, 7)];
        for (latency_ns, quarter) in table {
            let mut latencies = Latencies::default();
            latencies.count(latency_ns, 2000);
            assert_eq!(latencies.counts[quarter], 1, "{latency_ns}");
        }
    }

    #[test]
    fn a_percentile_is_of_five_hundred_or_of_a_second() {
        let mut latencies = Latencies::default();
        assert_eq!(latencies.percentile(90, 0), None, "of nothing");
        latencies.counts = [449, 0, 0, 0, 0, 50, 0, 0];
        assert_eq!(latencies.percentile(90, 0), None);
        assert_eq!(latencies.percentile(90, SAMPLING_NS - 1), None);
        assert_eq!(latencies.percentile(90, SAMPLING_NS), Some(5));
        assert_eq!(latencies.percentile(90, 2 * SAMPLING_NS), None, "it begins anew");
        for (percent, quarter) in [(89, 0), (90, 0), (91, 5), (100, 5)] {
            latencies.counts = [450, 0, 0, 0, 0, 50, 0, 0];
            assert_eq!(latencies.percentile(percent, 0), Some(quarter), "{percent}");
        }
    }
}
