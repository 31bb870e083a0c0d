//! A network path to a device, as its user sees it: a wire, a link with a rate, and channels that serve in parallel.
//!
//! An I/O takes half of the wire's time, passes the link for its bytes, waits for a channel in order of arrival, is
//! served there, and takes the other half. All delays are known when it is submitted, so the model has no events of its
//! own. Its properties may change with time; service uses those of the moment when it begins.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::Rng;

/// Parameters of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathModel {
    /// I/Os served at one time.
    pub channels: u32,
    /// Time on the wire, both ways together.
    pub wire_ns: u64,
    /// Mean service time.
    pub service_ns: u64,
    /// Deviation of the service time's logarithm, in thousandths: service times are lognormal.
    pub sigma_milli: u32,
    /// Rate of the link, bytes per second; 0 for unlimited.
    pub bytes_per_s: u64,
    /// Periods of slower service.
    pub burst: Option<PathBurst>,
    /// A delay that some I/Os meet, beside the channels.
    pub stall: Option<PathStall>,
    /// Losses under load.
    pub loss: Option<PathLoss>,
}

/// Service is slower for a part of each period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathBurst {
    /// Length of the period.
    pub every_ns: u64,
    /// Beginning of the slow part in it.
    pub at_ns: u64,
    /// Length of the slow part.
    pub for_ns: u64,
    /// Service time during it, in per cent of the usual.
    pub percent: u64,
}

/// One of so many I/Os is delayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathStall {
    /// The mean number of I/Os with one delayed.
    pub one_in: u64,
    /// The delay.
    pub for_ns: u64,
}

/// With more I/Os in flight than `above`, one of `one_in` is lost and sent again after a timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathLoss {
    /// I/Os in flight without loss.
    pub above: u32,
    /// The mean number of I/Os with one lost.
    pub one_in: u64,
    /// Time until it is sent again.
    pub resend_ns: u64,
}

impl PathModel {
    /// A path with this wire and service time: 24 channels, a deviation of 0.4.
    pub const fn new(wire_ns: u64, service_ns: u64) -> PathModel {
        PathModel {
            channels: 24,
            wire_ns,
            service_ns,
            sigma_milli: 400,
            bytes_per_s: 0,
            burst: None,
            stall: None,
            loss: None,
        }
    }

    /// Mean service time at a moment.
    pub fn service_at_ns(&self, now_ns: u64) -> u64 {
        match self.burst {
            Some(burst) if (now_ns + burst.every_ns - burst.at_ns) % burst.every_ns < burst.for_ns => {
                self.service_ns * burst.percent / 100
            }
            _ => self.service_ns,
        }
    }

    /// Time on the link.
    pub fn link_ns(&self, bytes: u32) -> u64 {
        (u64::from(bytes) * 1_000_000_000).checked_div(self.bytes_per_s).unwrap_or(0)
    }

    /// Mean latency at a moment without a queue, stalls and losses excluded.
    pub fn latency_at_ns(&self, bytes: u32, now_ns: u64) -> u64 {
        self.wire_ns + self.link_ns(bytes) + self.service_at_ns(now_ns)
    }
}

/// A path with the I/Os on it.
#[derive(Debug)]
pub struct ModelPath {
    model: PathModel,
    rng: Rng,
    link_free_ns: u64,
    /// Times at which the channels are free.
    free_ns: BinaryHeap<Reverse<u64>>,
    in_flight: u32,
}

impl ModelPath {
    /// An idle path.
    pub fn new(model: PathModel, seed: u64) -> ModelPath {
        let free_ns = (0..model.channels.max(1)).map(|_| Reverse(0)).collect();
        ModelPath { model, rng: Rng::new(seed), link_free_ns: 0, free_ns, in_flight: 0 }
    }

    /// Its properties.
    pub fn model(&self) -> &PathModel {
        &self.model
    }

    /// Changes its properties; I/Os on it are not affected, and neither is the number of channels.
    pub fn set_model(&mut self, model: PathModel) {
        self.model = PathModel { channels: self.model.channels, ..model };
    }

    /// I/Os on it.
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Submits an I/O. Returns the time at which it completes.
    pub fn submit(&mut self, now_ns: u64, bytes: u32) -> u64 {
        self.in_flight += 1;
        let PathModel { wire_ns, stall, loss, .. } = self.model;
        let mut delay_ns = 0;
        if let Some(stall) = stall
            && self.rng.below(stall.one_in) == 0
        {
            delay_ns += stall.for_ns;
        }
        if let Some(loss) = loss
            && self.in_flight > loss.above
            && self.rng.below(loss.one_in) == 0
        {
            delay_ns += loss.resend_ns;
        }
        let arrives_ns = (now_ns + wire_ns / 2).max(self.link_free_ns) + self.model.link_ns(bytes);
        self.link_free_ns = if self.model.bytes_per_s > 0 { arrives_ns } else { 0 };
        let free_ns = self.free_ns.pop().map_or(0, |Reverse(ns)| ns);
        let begins_ns = arrives_ns.max(free_ns);
        let ends_ns = begins_ns + lognormal(&mut self.rng, self.model.service_at_ns(begins_ns), self.model.sigma_milli);
        self.free_ns.push(Reverse(ends_ns));
        ends_ns + wire_ns - wire_ns / 2 + delay_ns
    }

    /// An I/O of it has completed.
    pub fn complete(&mut self) {
        self.in_flight -= 1;
    }
}

/// A draw with this mean, whose logarithm is normal with this deviation in thousandths. Additions and multiplications
/// only, so that rounding is the same on all machines.
fn lognormal(rng: &mut Rng, mean_ns: u64, sigma_milli: u32) -> u64 {
    const ONE: u64 = 1 << 32;
    let sigma = f64::from(sigma_milli) / 1000.0;
    let normal = rng.normal(ONE) as f64 / ONE as f64;
    // exp(x) as (1 + x / 2^20)^(2^20).
    let mut value = 1.0 + (sigma * normal - sigma * sigma / 2.0) / 1_048_576.0;
    for _ in 0..20 {
        value *= value;
    }
    (mean_ns as f64 * value) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: u64 = 1000;

    /// Mean latency with so many closed-loop clients.
    fn mean_us(model: PathModel, clients: u64) -> f64 {
        let mut path = ModelPath::new(model, 1);
        let mut ends: BinaryHeap<Reverse<u64>> = (0..clients).map(|_| Reverse(path.submit(0, 4096))).collect();
        let (mut sum_ns, ios) = (0, 100_000);
        for _ in 0..ios {
            let Some(Reverse(now_ns)) = ends.pop() else { unreachable!("clients are endless") };
            path.complete();
            let next_ns = path.submit(now_ns, 4096);
            sum_ns += next_ns - now_ns;
            ends.push(Reverse(next_ns));
        }
        sum_ns as f64 / f64::from(ios) / 1e3
    }

    #[test]
    fn latency_is_wire_plus_service_until_the_channels_are_busy() {
        let model = PathModel::new(60 * US, 80 * US);
        assert!((mean_us(model, 1) - 140.0).abs() < 1.0, "{}", mean_us(model, 1));
        // 24 channels end 300 a millisecond.
        assert!((mean_us(model, 96) - 320.0).abs() < 3.0, "{}", mean_us(model, 96));
    }

    #[test]
    fn a_link_passes_its_bytes_per_second() {
        let model = PathModel { bytes_per_s: 4096 * 100_000, ..PathModel::new(60 * US, 80 * US) };
        assert!((mean_us(model, 40) - 400.0).abs() < 4.0, "{}", mean_us(model, 40));
        assert_eq!(model.latency_at_ns(4096, 0), 150 * US);
    }

    #[test]
    fn stalls_and_losses_come_as_often_as_they_are_set() {
        let stall = Some(PathStall { one_in: 200, for_ns: 10_000 * US });
        let stalled = mean_us(PathModel { stall, ..PathModel::new(60 * US, 80 * US) }, 8);
        assert!((stalled - 190.0).abs() < 6.0, "{stalled}");
        let loss = Some(PathLoss { above: 8, one_in: 10, resend_ns: 1000 * US });
        let lossy = PathModel { loss, ..PathModel::new(60 * US, 80 * US) };
        assert!((mean_us(lossy, 8) - 140.0).abs() < 2.0);
        assert!((mean_us(lossy, 9) - 240.0).abs() < 5.0, "{}", mean_us(lossy, 9));
    }

    #[test]
    fn bursts_come_in_their_part_of_the_period() {
        let burst = Some(PathBurst { every_ns: 60, at_ns: 50, for_ns: 15, percent: 800 });
        let model = PathModel { burst, ..PathModel::new(0, 10) };
        let slow: Vec<u64> = (0..120).filter(|now_ns| model.service_at_ns(*now_ns) == 80).collect();
        assert_eq!(slow, (0..5).chain(50..65).chain(110..120).collect::<Vec<_>>());
    }

    #[test]
    fn a_lognormal_has_its_mean_and_median() {
        let mut rng = Rng::new(9);
        let mut draws: Vec<u64> = (0..100_000).map(|_| lognormal(&mut rng, 1_000_000, 1500)).collect();
        let mean = draws.iter().sum::<u64>() as f64 / 1e5;
        assert!((mean / 1e6 - 1.0).abs() < 0.05, "{mean}");
        draws.sort_unstable();
        // exp(-1.5^2 / 2) of the mean.
        assert!((draws[50_000] as f64 / 1e6 - 0.3247).abs() < 0.01, "{}", draws[50_000]);
    }
}
