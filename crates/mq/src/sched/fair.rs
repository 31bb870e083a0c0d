//! `fair`: streams share a device by the time they take of it.
//!
//! A stream is who submits, with one priority class. Writes that nobody waits for are one stream for each class,
//! whoever they are from. How streams share is up to the device:
//!
//! | | with seeks | without |
//! |---|---|---|
//! | who reads or writes in a row | has [turns](turn): the device is its alone for a while, and waits for it | mixes |
//! | who seeks | mixes with others who do; all of them together have turns | mixes |
//! | what is accounted for | wall time of the device | bytes, and a price for each bio |
//! | in flight | what fits in the rest of the turn | what keeps the device [busy](depth) |
//! | in a stream | sorted in batches | as it came |
//!
//! To take turns and to mix are the same algorithm with another unit: see [`line`]. Which kind of device it is is
//! [measured](device). A stream alone has it to itself: nothing is waited for and nothing limited.
//!
//! A more urgent class goes first, also before who has his turn. How long anybody waits is bounded: within a class by a
//! round, which is `target_ms` or as many shortest turns as there are streams; a class below another one has a turn
//! after [`CLASS_LATE_NS`]; a bio in its stream goes at the latest in the batch after the one it came in.
//!
//! After CFQ and BFQ of Linux in what is waited for and for how long (spec D.3 to D.5); sorted batches are N-step-SCAN
//! (Coffman and others, 1972).

mod depth;
mod device;
mod history;
mod hold_off;
mod line;
mod room;
mod shared;
mod turn;

use self::device::DeviceEstimate;
use self::history::StreamHistory;
use self::hold_off::WriteHoldOff;
use self::line::{MemberQueue, MemberShare};
use self::room::Room;
use self::shared::DepthShare;
pub use self::shared::SharedDepth;
use self::turn::ActiveTurn;
use super::slots::{List, Slots};
use super::streams::Streams;
use super::{Reach, Scheduler, SchedulerSnapshot, Selected, join_from};
use crate::{Bio, DeviceInfo, Op, Priority};

/// Classes of priority.
const CLASSES: usize = Priority::ALL.len();
/// The weight of who has no other.
pub(super) const WEIGHT: u32 = 100;
/// A lower class gets something after this long at the latest, whatever a more urgent one wants; and who has used up
/// his due in a mix, whoever comes back meanwhile.
const CLASS_LATE_NS: u64 = 2_000_000_000;
/// Within a class, the same.
const LATE_NS: u64 = 300_000_000;
/// What each bio costs in a mix beside its bytes, in bytes: what flash does in the time of a small read (100 000 a
/// second beside 800 MB/s).
const PRICE: i64 = 8 << 10;
/// The same where there are seeks: 8 ms of a disk that does 64 MB/s.
const SEEK_PRICE: i64 = 512 << 10;
/// Due of a weight of one in a round of a mix, in bytes: 100 of them are 128 KiB, some tens of small bios.
const DUE: i64 = 1311;
/// The same where there are seeks: two of them.
const SEEK_DUE: i64 = 10486;

/// The most that one bio counts for in a mix beside its price, bytes: as much as anybody reads at one time. What is
/// owed is paid off in rounds, one by one, and a guest may well ask for a terabyte.
const COUNTED_MAX: u64 = 16 << 20;
/// A device that several streams have used counts as theirs for so long, whoever thinks: as long as a stream with short
/// thoughts is waited for.
const SHARED_NS: u64 = history::IDLE_NS;
/// Largest request of bios that join, where others share a device without seeks: who comes meanwhile waits for one at
/// least.
const JOIN_SECTORS: u64 = 256;

/// Weights that streams can be given.
pub const FAIR_WEIGHTS_MAX: usize = 8;

/// Whether a device has seeks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FairDevice {
    /// As it [says](crate::DeviceInfo::rotational), until it shows otherwise.
    #[default]
    Measured,
    /// It has.
    Seeks,
    /// It has none.
    Flat,
}

/// Options of `fair`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FairConfig {
    /// How long a turn lasts at most, milliseconds, at a weight of 100.
    pub slice_ms: u32,
    /// How long a round of turns is to last, milliseconds: turns are shorter the more streams there are, but no shorter
    /// than five times the way from one to the other.
    pub target_ms: u32,
    /// How long a stream is waited for in its turn at most, milliseconds; zero for not at all: then a turn ends as soon
    /// as nothing waits.
    pub idle_ms: u32,
    /// Weight of writes nobody waits for, of a hundred.
    pub async_percent: u32,
    /// Whether a turn begins when nothing of the one before is in flight any more.
    pub drain: bool,
    /// What the device is.
    pub device: FairDevice,
    /// How much all queues of a device without seeks have in flight together, where several streams share it: KiB, and
    /// 8 more for each bio. Zero for what is measured.
    pub in_flight_kib: u32,
    /// Whether each queue of the device goes by itself, whatever others have in flight.
    pub per_queue: bool,
    /// Weights of streams, by their numbers, 10 to 1000; all others have 100. Those of weight zero are no entries.
    pub weights: [(u32, u16); FAIR_WEIGHTS_MAX],
}

impl Default for FairConfig {
    fn default() -> FairConfig {
        FairConfig {
            // As CFQ has it (slice_sync): ten times what a seek and the wait for the platter take.
            slice_ms: 100,
            // CFQ's target_latency.
            target_ms: 300,
            idle_ms: (history::IDLE_NS / 1_000_000) as u32,
            // CFQ's slice_async beside slice_sync.
            async_percent: 40,
            drain: true,
            device: FairDevice::default(),
            in_flight_kib: 0,
            per_queue: false,
            weights: [(0, 0); FAIR_WEIGHTS_MAX],
        }
    }
}

impl FairConfig {
    /// As CFQ shares a disk, waiting so long for who has his turn: 8 ms, or zero.
    pub fn like_cfq(idle_ms: u32) -> FairConfig {
        FairConfig { idle_ms, drain: false, device: FairDevice::Seeks, ..FairConfig::default() }
    }
}

/// A stream with its bios; or all that seek of one class, who have turns as one.
#[derive(Clone, Copy, Debug, Default)]
struct FairStream {
    share: MemberShare,
    bios: List,
    in_flight: u32,
    /// How many of its bios, from the first on, are of the batch that is sorted.
    batch: u32,
    /// The sector behind what was handed out last.
    position: u64,
    history: StreamHistory,
    /// Mean time from one end to the next in its turns.
    gap_ns: u32,
    class: u8,
    /// Somebody waits for what it wants.
    sync: bool,
    /// It mixes with others.
    mixes: bool,
}

/// See the head of the module.
#[derive(Debug)]
pub(crate) struct Fair {
    config: FairConfig,
    slots: Slots,
    streams: Streams<FairStream>,
    device: DeviceEstimate,
    /// How much of the device is used, by all its queues.
    depth: DepthShare,
    /// Several streams use the device until then, even if one of them thinks.
    shared_until_ns: u64,
    /// By class, in the order of urgency: who waits for a turn, in nanoseconds.
    turns: [MemberQueue; CLASSES],
    /// Who mixes, in bytes.
    mixes: [MemberQueue; CLASSES],
    /// The places of those who mix, as one.
    crowds: [u32; CLASSES],
    turn: Option<ActiveTurn>,
    /// How long the device is left alone after a turn of writes.
    hold_off: WriteHoldOff,
    /// What they may have who wait for writes.
    room: Room,
    /// The batch of whose turn it is: how far ahead of its position each bio is, and where it is kept. The nearest is
    /// the last.
    batch: Vec<(u64, u32)>,
    /// Whose bio was handed out last, for what joins it.
    last: Option<u32>,
    waiting: [usize; CLASSES],
    out: [usize; CLASSES],
    /// Bios that wait, of those who mix.
    mixing: [usize; CLASSES],
    /// Who is in front of a mix has been served, and wanted more. It goes to the end before the next is: until then its
    /// bios join what it was given, and one whose bios all did leaves the line.
    served: [bool; CLASSES],
    /// Streams that have a bio here or in flight, and what they weigh.
    busy: usize,
    weight: u64,
}

/// What a stream is known by: its number and class; that of async writes, or of a crowd, only by its class.
fn key(bio: &Bio) -> u64 {
    let class = (bio.priority as u64) << 32;
    if bio.is_sync() { class | u64::from(bio.stream) } else { class | ASYNC_KEY }
}

/// What a bio counts for in the depth of a device.
#[inline]
fn cost(bio: &Bio) -> u64 {
    PRICE as u64 + bio.moves_bytes()
}

const ASYNC_KEY: u64 = 1 << 40;
const CROWD_KEY: u64 = 1 << 41;

impl Fair {
    /// For a queue of so many bios, of this device.
    pub(crate) fn new(config: FairConfig, bios_max: usize, info: &DeviceInfo) -> Fair {
        let seeks = match config.device {
            FairDevice::Measured => info.rotational,
            FairDevice::Seeks => true,
            FairDevice::Flat => false,
        };
        let mut streams = Streams::new(bios_max);
        let crowds = Priority::ALL.map(|class| {
            let at = streams.find_or_add(CROWD_KEY | (class as u64) << 32);
            streams.work(at);
            *streams.get_mut(at) = FairStream { class: class as u8, sync: true, ..FairStream::default() };
            at
        });
        Fair {
            config,
            slots: Slots::new(bios_max),
            streams,
            device: DeviceEstimate::new(seeks),
            depth: if config.per_queue { SharedDepth::default() } else { info.depth.clone() }
                .join(config.in_flight_kib),
            shared_until_ns: 0,
            turns: Priority::ALL.map(|_| MemberQueue::new(turn::least_ns(&config), LATE_NS)),
            mixes: Priority::ALL.map(|_| MemberQueue::new(1, LATE_NS)),
            crowds,
            turn: None,
            hold_off: WriteHoldOff::default(),
            room: Room::default(),
            batch: Vec::with_capacity(bios_max),
            last: None,
            waiting: [0; CLASSES],
            out: [0; CLASSES],
            mixing: [0; CLASSES],
            served: [false; CLASSES],
            busy: 0,
            weight: 0,
        }
    }

    fn weight_of(&self, stream: u32) -> u32 {
        let entry = self.config.weights.iter().find(|(number, weight)| *number == stream && *weight > 0);
        entry.map_or(WEIGHT, |(_, weight)| u32::from((*weight).clamp(10, 1000)))
    }

    /// What is due to a member of a mix in a round.
    fn mix_due(&self, at: u32) -> i64 {
        i64::from(self.streams.get(at).share.weight) * if self.device.seeks() { SEEK_DUE } else { DUE }
    }

    fn is_owner(&self, at: u32) -> bool {
        self.turn.as_ref().is_some_and(|turn| turn.who == at)
    }

    /// The place of a bio's stream.
    fn find_stream(&mut self, bio: &Bio) -> u32 {
        let at = self.streams.find_or_add(key(bio));
        if self.streams.get(at).share.weight == 0 {
            let sync = bio.is_sync();
            let weight = if sync { self.weight_of(bio.stream) } else { self.config.async_percent.clamp(1, WEIGHT) };
            let stream = self.streams.get_mut(at);
            (stream.class, stream.sync, stream.share.weight) = (bio.priority as u8, sync, weight);
        }
        at
    }

    /// A stream that has bios, is in no line and has no turn stands in line: with those it belongs to by now.
    fn stand_in_line(&mut self, at: u32, now_ns: u64) {
        let seeks = self.device.seeks();
        let stream = self.streams.get_mut(at);
        let class = usize::from(stream.class);
        let mixes = !seeks || (stream.sync && stream.history.seeks());
        if mixes != stream.mixes {
            // Its credit is in another unit.
            stream.share = MemberShare::new(stream.share.weight);
            (stream.mixes, stream.batch) = (mixes, 0);
        }
        let sync = stream.sync;
        if mixes {
            self.mixing[class] += stream.bios.len();
            let due = self.mix_due(at);
            self.mixes[class].enter(&mut self.streams, at, due, sync, now_ns);
            let crowd = self.crowds[class];
            if seeks && !self.is_owner(crowd) && !self.streams.get(crowd).share.queued {
                self.line_up(crowd, now_ns);
            }
        } else {
            self.line_up(at, now_ns);
        }
    }

    /// Who takes the next bio of a mix; it is in front of its line.
    #[inline]
    fn front_of_mix(&mut self, class: usize, now_ns: u64) -> Option<u32> {
        if std::mem::take(&mut self.served[class]) {
            self.mixes[class].demote(&mut self.streams, now_ns);
        }
        let at = self.mixes[class].front(&self.streams, now_ns)?;
        let stream = self.streams.get(at);
        let takes = !stream.bios.is_empty() && stream.share.credit > 0;
        if takes { Some(at) } else { self.bring_to_front(class, now_ns) }
    }

    /// Has all of a mix go to their places who have nothing or may not have it now, until one is in front who takes the
    /// next bio.
    #[inline(never)]
    fn bring_to_front(&mut self, class: usize, now_ns: u64) -> Option<u32> {
        loop {
            let at = self.mixes[class].front(&self.streams, now_ns)?;
            let stream = self.streams.get(at);
            if stream.bios.is_empty() {
                self.mixes[class].pop(&mut self.streams);
                self.rest(at);
            } else if stream.share.credit > 0 {
                return Some(at);
            } else if self.device.seeks() && !stream.history.seeks() {
                self.mixing[class] -= stream.bios.len();
                self.mixes[class].pop(&mut self.streams);
                self.stand_in_line(at, now_ns);
            } else {
                let due = self.mix_due(at);
                self.mixes[class].rotate(&mut self.streams, due, now_ns);
            }
        }
    }

    /// Hands out the next bio of who is in front of a mix.
    #[inline]
    fn next_of_mix(&mut self, class: usize, at: u32) -> Selected {
        let price = if self.device.seeks() { SEEK_PRICE } else { PRICE };
        let stream = self.streams.get_mut(at);
        let Some((bio, _)) = self.slots.pop(&mut stream.bios) else { unreachable!("it has bios") };
        stream.share.credit -= price;
        self.served[class] = !stream.bios.is_empty();
        self.mixing[class] -= 1;
        Selected::Bio(self.hand_out(at, bio))
    }

    /// On a device without seeks.
    fn next_flat(&mut self, now_ns: u64) -> Selected {
        let Some(class) = self.class(now_ns) else { return Selected::Wait(u64::MAX) };
        let Some(at) = self.front_of_mix(class, now_ns) else { return Selected::Wait(u64::MAX) };
        let stream = self.streams.get(at);
        let Some(first) = stream.bios.first() else { unreachable!("it has bios") };
        let cost = cost(self.slots.bio(first));
        let several = self.is_shared(now_ns);
        if !self.depth.fits(cost, several, self.weight, now_ns) {
            // Who wants little, and has nothing there, does not wait for those who do.
            let may_pass = self.mixes[class].front_is_light() && stream.in_flight == 0;
            if !may_pass || self.depth.is_far_beyond(cost) {
                let until_ns = self.depth.wait_ns(cost, self.weight, now_ns);
                if now_ns < until_ns {
                    return Selected::Wait(until_ns);
                }
            }
        }
        self.next_of_mix(class, at)
    }

    /// Which class is next: the most urgent that waits, unless a lower one has waited for too long. The lowest waits
    /// until all others have ended, too.
    #[inline]
    fn class(&self, now_ns: u64) -> Option<usize> {
        let first = self.waiting.iter().position(|waiting| *waiting > 0)?;
        // Mostly all that wait are of one class.
        let alone = self.waiting[first + 1..].iter().all(|waiting| *waiting == 0);
        if alone && first != Priority::Idle as usize { Some(first) } else { self.class_of_several(first, now_ns) }
    }

    #[inline(never)]
    fn class_of_several(&self, first: usize, now_ns: u64) -> Option<usize> {
        let late = |class: &usize| {
            if self.waiting[*class] == 0 {
                return false;
            }
            let lines = if self.device.seeks() { &self.turns } else { &self.mixes };
            let since_ns = lines[*class].since_ns(&self.streams);
            since_ns.is_some_and(|since_ns| now_ns.saturating_sub(since_ns) > CLASS_LATE_NS)
        };
        let others = self.out[..first].iter().sum::<usize>() > 0;
        if first == Priority::Idle as usize && others {
            return Some(first).filter(late);
        }
        (first + 1..CLASSES).find(late).or(Some(first))
    }

    /// Whether several streams use the device, or have a moment ago.
    #[inline]
    fn is_shared(&self, now_ns: u64) -> bool {
        self.busy > 1 || now_ns < self.shared_until_ns
    }

    fn in_flight(&self) -> usize {
        self.out.iter().sum()
    }

    /// A bio was taken out of a stream.
    #[inline]
    fn hand_out(&mut self, at: u32, bio: Box<Bio>) -> Box<Bio> {
        let stream = self.streams.get_mut(at);
        let class = usize::from(stream.class);
        stream.in_flight += 1;
        stream.position = bio.end();
        if stream.mixes {
            stream.share.credit -= bio.moves_bytes().min(COUNTED_MAX) as i64;
        } else if let Some(turn) = &mut self.turn {
            turn.bytes += bio.moves_bytes();
        }
        self.waiting[class] -= 1;
        self.out[class] += 1;
        self.depth.took(cost(&bio));
        self.last = Some(at);
        bio
    }

    /// Gives up the place of a stream, if it has nothing to do.
    fn rest(&mut self, at: u32) {
        let stream = self.streams.get(at);
        let idle = stream.bios.is_empty() && stream.in_flight == 0 && !stream.share.queued;
        if idle && !self.is_owner(at) && !self.crowds.contains(&at) {
            self.streams.rest(at);
        }
    }

    /// The device has shown that it is of the other kind: everybody stands in line anew.
    #[inline(never)]
    fn change_kind(&mut self, now_ns: u64) {
        let owner = self.turn.take().map(|turn| turn.who).filter(|who| !self.crowds.contains(who));
        self.batch.clear();
        self.mixing = [0; CLASSES];
        for class in 0..CLASSES {
            let turns = self.turns[class].take();
            let mixes = self.mixes[class].take();
            for mut line in [turns, mixes] {
                while let Some(at) = line.front(&self.streams, now_ns) {
                    line.pop(&mut self.streams);
                    self.start_anew(at, now_ns);
                }
            }
        }
        if let Some(at) = owner {
            self.start_anew(at, now_ns);
        }
    }

    fn start_anew(&mut self, at: u32, now_ns: u64) {
        let stream = self.streams.get_mut(at);
        stream.share = MemberShare::new(stream.share.weight);
        stream.batch = 0;
        if self.crowds.contains(&at) {
            return;
        }
        if stream.bios.is_empty() { self.rest(at) } else { self.stand_in_line(at, now_ns) }
    }
}

impl Scheduler for Fair {
    fn insert(&mut self, bio: Box<Bio>, now_ns: u64) {
        let at = self.find_stream(&bio);
        let is_owner = self.is_owner(at);
        let stream = self.streams.get_mut(at);
        let class = usize::from(stream.class);
        let first = stream.bios.is_empty();
        let alone = first && stream.in_flight == 0;
        stream.history.came(&bio, alone, now_ns);
        self.slots.push(&mut stream.bios, bio, now_ns);
        self.waiting[class] += 1;
        if first && !stream.share.queued && !is_owner {
            self.streams.work(at);
            self.stand_in_line(at, now_ns);
        } else {
            self.mixing[class] += usize::from(stream.mixes);
        }
        self.depth.wants(now_ns);
        if alone {
            self.busy += 1;
            self.weight += u64::from(self.streams.get(at).share.weight);
        }
        if self.busy > 1 {
            self.shared_until_ns = now_ns + SHARED_NS;
        }
    }

    fn next(&mut self, now_ns: u64) -> Selected {
        if self.device.seeks() { self.next_turn(now_ns) } else { self.next_flat(now_ns) }
    }

    fn join(&mut self, reach: Reach, fits: &mut dyn FnMut(&Bio) -> bool, now_ns: u64) -> Option<Box<Bio>> {
        let at = self.last?;
        let several = self.is_shared(now_ns);
        let shared = !self.device.seeks() && (several || self.depth.has_company());
        let room = if shared { JOIN_SECTORS.saturating_sub(reach.end - reach.start) } else { u64::MAX };
        if room == 0 {
            return None;
        }
        let (depth, weight) = (&mut self.depth, self.weight);
        let mut fits = |bio: &Bio| {
            let there_is_room = !shared || depth.fits(cost(bio), several, weight, now_ns);
            u64::from(bio.sectors) <= room && there_is_room && fits(bio)
        };
        let stream = self.streams.get_mut(at);
        let bio = match self.batch.last() {
            Some((_, place)) if stream.batch > 0 => {
                let (bio, place) = (self.slots.bio(*place), *place);
                if !reach.touches(bio) || !fits(bio) {
                    return None;
                }
                self.batch.pop();
                stream.batch -= 1;
                self.slots.remove(&mut stream.bios, place)
            }
            _ => join_from(&mut self.slots, &mut stream.bios, reach, &mut fits)?.0,
        };
        let class = usize::from(stream.class);
        self.mixing[class] -= usize::from(stream.mixes);
        Some(self.hand_out(at, bio))
    }

    fn ended(&mut self, bio: &Bio, start_ns: u64, now_ns: u64) {
        // It is there as long as anything of it is in flight.
        let Some(at) = self.streams.find(key(bio)) else { return };
        let stream = self.streams.get_mut(at);
        stream.in_flight -= 1;
        stream.history.ended(now_ns);
        let (class, mixes) = (usize::from(stream.class), stream.mixes);
        let (over, weight) = (stream.in_flight == 0 && stream.bios.is_empty(), stream.share.weight);
        self.out[class] -= 1;
        if over {
            self.busy -= 1;
            self.weight -= u64::from(weight);
        }
        self.ended_in_turn(at, if mixes { self.crowds[class] } else { at }, start_ns, now_ns);
        if over {
            self.rest(at);
        }
        self.depth.ended(cost(bio), now_ns);
        if self.config.device == FairDevice::Measured
            && bio.op == Op::Read
            && self.device.read(bio.sector, bio.sectors, start_ns, now_ns)
        {
            self.change_kind(now_ns);
        }
    }

    fn drain(&mut self, each: &mut dyn FnMut(Box<Bio>)) {
        self.slots.drain(each);
    }

    fn snapshot(&self, now_ns: u64) -> SchedulerSnapshot {
        let FairConfig {
            slice_ms,
            target_ms,
            idle_ms,
            async_percent,
            drain,
            device,
            in_flight_kib,
            per_queue,
            weights,
        } = self.config;
        let device = match device {
            FairDevice::Measured => "measured",
            FairDevice::Seeks => "seeks",
            FairDevice::Flat => "flat",
        };
        let on_off = |on: bool| if on { "on" } else { "off" }.to_string();
        let given = weights.iter().filter(|(_, weight)| *weight > 0);
        let given: Vec<String> = given.map(|(stream, weight)| format!("{stream}:{weight}")).collect();
        let options = vec![
            ("slice_ms", slice_ms.to_string()),
            ("target_ms", target_ms.to_string()),
            ("idle_ms", idle_ms.to_string()),
            ("async_percent", async_percent.to_string()),
            ("drain", on_off(drain)),
            ("device", device.into()),
            ("in_flight_kib", in_flight_kib.to_string()),
            ("per_queue", on_off(per_queue)),
            ("weights", given.join("+")),
        ];
        let mut facts = vec![
            ("seeks", u64::from(self.device.seeks())),
            ("busy", self.busy as u64),
            ("depth_kib", self.depth.depth() >> 10),
            ("in_flight", self.in_flight() as u64),
        ];
        if let Some(turn) = &self.turn {
            // A crowd has no number.
            let stream = self.streams.stream(turn.who);
            facts.push(if stream < ASYNC_KEY {
                ("owner", stream & u64::from(u32::MAX))
            } else {
                ("owner_class", stream >> 32 & 3)
            });
            facts.push(("turn_ns", now_ns.saturating_sub(turn.since_ns)));
        }
        SchedulerSnapshot {
            name: "fair",
            options,
            waiting: self.waiting.iter().sum(),
            oldest_ns: self.slots.oldest_ns().map_or(0, |since_ns| now_ns.saturating_sub(since_ns)),
            facts,
        }
    }
}
