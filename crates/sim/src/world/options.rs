//! Options of a simulation: drawn from its seed, or given. As text, `key=value`, so that a run can be printed and
//! repeated.

use std::fmt;

use blkyard_mq::{DeadlineConfig, FairConfig, KyberConfig, Merging, SchedulerConfig, TimesliceConfig};

use crate::Rng;

/// Device of a simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorldDevice {
    /// [`Disk`](crate::RotaryDisk).
    Disk,
    /// [`Flash`](crate::Flash).
    Flash,
    /// [`Line`](crate::FixedLatency).
    Line,
    /// [`ChaosDevice`](crate::ChaosDevice).
    Chaos,
}

/// Which scheduler its queues have at first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorldScheduler {
    /// No device.
    None,
    /// The usual one of its name.
    Deadline,
    /// As above.
    Kyber,
    /// As above.
    Timeslice,
    /// As above.
    Fair,
}

impl WorldScheduler {
    pub(super) const ALL: [WorldScheduler; 5] = [
        WorldScheduler::None,
        WorldScheduler::Deadline,
        WorldScheduler::Kyber,
        WorldScheduler::Timeslice,
        WorldScheduler::Fair,
    ];

    /// As the options have it.
    pub(super) fn config(self, options: &WorldOptions) -> SchedulerConfig {
        let in_flight_kib = options.share_kib as u32;
        match self {
            WorldScheduler::None => SchedulerConfig::None,
            WorldScheduler::Deadline => SchedulerConfig::Deadline(DeadlineConfig::default()),
            WorldScheduler::Kyber => SchedulerConfig::Kyber(KyberConfig::default()),
            WorldScheduler::Fair => SchedulerConfig::Fair(FairConfig { in_flight_kib, ..FairConfig::default() }),
            WorldScheduler::Timeslice => SchedulerConfig::Timeslice(TimesliceConfig::default()),
        }
    }
}

macro_rules! options {
    ($($(#[doc = $doc:literal])+ $name:ident: $type:ty,)+) => {
        /// Options of a simulation, without its seed.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct WorldOptions {
            $($(#[doc = $doc])+ pub $name: $type,)+
        }

        impl WorldOptions {
            /// Sets one option in the form `key=value`.
            ///
            /// # Errors
            /// Names the fault, and the known options.
            pub fn set(&mut self, text: &str) -> Result<(), String> {
                let (key, value) = text.split_once('=').ok_or_else(|| format!("'{text}' is not key=value"))?;
                match key {
                    $(stringify!($name) => self.$name = Value::parse(value).ok_or_else(|| {
                        format!("{key}={value}: use {}", <$type as Value>::WHAT)
                    })?,)+
                    _ => return Err(format!("there is no option '{key}'; there are: {}", [$(stringify!($name)),+].join(", "))),
                }
                Ok(())
            }
        }

        impl fmt::Display for WorldOptions {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let parts = [$(format!("{}={}", stringify!($name), self.$name.show())),+];
                f.write_str(&parts.join(" "))
            }
        }
    };
}

options! {
    /// The device.
    device: WorldDevice,
    /// Whether submitters share their queues as threads do, by software queues; else each queue is a lane's.
    shared: bool,
    /// Hardware queues of the device.
    queues: u64,
    /// Submitters of each queue.
    submitters: u64,
    /// Bios of all of them.
    bios: u64,
    /// Bios that one submitter has out.
    window: u64,
    /// Longest time between two bios of a submitter.
    think_us: u64,
    /// Size of the device.
    sectors: u64,
    /// Longest bio.
    bio_sectors: u64,
    /// Tags of a queue.
    depth: u64,
    /// Bios that a queue holds.
    bios_max: u64,
    /// Which bios may share a request.
    merging: Merging,
    /// Scheduler of waiting bios.
    scheduler: WorldScheduler,
    /// Bytes in flight of all queues together with `fair`; 0 for the measured amount.
    share_kib: u64,
    /// Longest request.
    sectors_max: u64,
    /// Most pieces of memory in one.
    segments_max: u64,
    /// Boundary that no request crosses; 0 for none.
    chunk_sectors: u64,
    /// The device has a volatile cache.
    cache: bool,
    /// It knows FUA.
    fua: bool,
    /// Of a hundred bios, how many read.
    reads: u64,
    /// How many are flushes.
    flushes: u64,
    /// How many discard or zero.
    zeroes: u64,
    /// Of a hundred writes, how many say FUA or want a flush before.
    forced: u64,
    /// One in so many requests that a chaos device fails, requeues or loses; 0 for never.
    errors: u64,
    /// As above.
    requeues: u64,
    /// As above.
    losses: u64,
    /// Time between two changes of a queue: its depth, its scheduler, its limit, frozen, quiesced; 0 for none.
    changes_us: u64,
    /// Time between two power failures; 0 for none.
    cuts_us: u64,
    /// I/Os a second that all queues together do not exceed; zero for any number.
    iops_max: u64,
    /// Bytes a second, likewise.
    bytes_per_s_max: u64,
    /// Of a hundred bios, how many are urgent, or may wait for all others.
    classed: u64,
    /// Of a hundred bios, how many rather come back than wait.
    nowait: u64,
}

impl WorldOptions {
    /// Options drawn from a seed.
    pub fn draw(seed: u64) -> WorldOptions {
        let mut rng = Rng::new(seed ^ 0x6f70_7469_6f6e_7300);
        let mut from = |low: u64, high: u64| low + rng.below(high - low + 1);
        let devices = [WorldDevice::Disk, WorldDevice::Flash, WorldDevice::Line, WorldDevice::Chaos];
        let device = devices[from(0, 3) as usize];
        let chaos = device == WorldDevice::Chaos;
        let shared = from(0, 2) == 0;
        let mut sometimes = |low, high| if from(0, 1) == 0 { 0 } else { from(low, high) };
        let [errors, requeues, losses] =
            [sometimes(3, 60), sometimes(3, 60), sometimes(20, 200)].map(|every| if chaos { every } else { 0 });
        let (changes_us, cuts_us) = (sometimes(100, 20_000), sometimes(20_000, 1_000_000));
        let cache = from(0, 2) > 0;
        WorldOptions {
            device,
            shared,
            queues: from(1, 3),
            submitters: from(1, 4),
            bios: from(100, 900),
            window: from(1, 16),
            think_us: [0, 5, 200, 5000][from(0, 3) as usize],
            sectors: [64, 256, 2048][from(0, 2) as usize],
            bio_sectors: from(1, 40),
            depth: from(1, 40),
            bios_max: from(1, 64),
            merging: [Merging::Off, Merging::Last, Merging::Recent][from(0, 2) as usize],
            scheduler: WorldScheduler::ALL[from(0, 4) as usize],
            share_kib: [0, 1, 40][from(0, 2) as usize],
            sectors_max: [8, 24, 2048][from(0, 2) as usize],
            segments_max: from(1, 4),
            chunk_sectors: [0, 0, 16][from(0, 2) as usize],
            cache,
            fua: cache && from(0, 1) == 1,
            reads: from(10, 70),
            flushes: from(0, 10),
            zeroes: from(0, 10),
            forced: from(0, 30),
            errors,
            requeues,
            losses,
            changes_us: if shared { 0 } else { changes_us },
            cuts_us: if chaos { 0 } else { cuts_us },
            // Last, so that the other options of existing seeds stay the same. Some values are tight.
            iops_max: [0, 0, 0, 2000, 50_000][from(0, 4) as usize],
            bytes_per_s_max: [0, 0, 0, 8 << 20, 256 << 20][from(0, 4) as usize],
            classed: [0, 0, 20, 70][from(0, 3) as usize],
            nowait: [0, 0, 10, 50][from(0, 3) as usize],
        }
    }
}

/// How an option is written.
trait Value: Sized {
    const WHAT: &'static str;
    fn parse(text: &str) -> Option<Self>;
    fn show(&self) -> String;
}

impl Value for u64 {
    const WHAT: &'static str = "a number";

    fn parse(text: &str) -> Option<u64> {
        text.parse().ok()
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

/// Options that are words.
macro_rules! words {
    ($type:ty, $what:literal, $($word:literal => $value:expr),+) => {
        impl Value for $type {
            const WHAT: &'static str = $what;

            fn parse(text: &str) -> Option<$type> {
                match text {
                    $($word => Some($value),)+
                    _ => None,
                }
            }

            fn show(&self) -> String {
                let words = [$(($word, $value)),+];
                words.iter().find(|(_, value)| value == self).map_or_else(String::new, |(word, _)| (*word).to_owned())
            }
        }
    };
}

words!(WorldScheduler, "none, deadline, kyber, timeslice or fair", "none" => WorldScheduler::None, "deadline" => WorldScheduler::Deadline, "kyber" => WorldScheduler::Kyber, "timeslice" => WorldScheduler::Timeslice, "fair" => WorldScheduler::Fair);
words!(bool, "on or off", "on" => true, "off" => false);
words!(Merging, "off, last or recent", "off" => Merging::Off, "last" => Merging::Last, "recent" => Merging::Recent);
words!(WorldDevice, "disk, flash, line or chaos", "disk" => WorldDevice::Disk, "flash" => WorldDevice::Flash, "line" => WorldDevice::Line, "chaos" => WorldDevice::Chaos);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_can_be_said_again() {
        for seed in 0..200 {
            let drawn = WorldOptions::draw(seed);
            let mut again = WorldOptions::draw(seed + 1);
            drawn.to_string().split(' ').for_each(|option| again.set(option).unwrap());
            assert_eq!(again, drawn);
        }
        assert!(WorldOptions::draw(0).set("depht=3").unwrap_err().contains("depth"));
        assert!(WorldOptions::draw(0).set("merging=some").unwrap_err().contains("recent"));
    }
}
