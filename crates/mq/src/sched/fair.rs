//! `fair`: streams share a device by the time they take of it.
//!
//! A stream is a submitter with one priority class, or a [sequence](super::sequences) where the submitter is unknown;
//! what belongs to no sequence is one stream. The asynchronous writes of a submitter are another stream. The way of
//! sharing depends on the device:
//!
//! | | with seeks | without |
//! |---|---|---|
//! | sequential stream | has [turns](turn): the device serves it alone for a while, and idles for it | mixes |
//! | random stream | mixes with other random ones; all of them together have turns | mixes |
//! | charge | wall time of the device | bytes, and a cost for each bio |
//! | in flight | as much as fits in the rest of the turn | as much as keeps the device [busy](depth) |
//! | within a stream | sorted in batches | order of arrival |
//!
//! Turns and mixing are one algorithm with different units: see [`line`]. The kind of device is [measured](device). A
//! lone stream is neither waited for nor limited.
//!
//! A more urgent class goes first, also ahead of the owner of a turn. Waiting is bounded. Within a class the bound is a
//! round: `target_ms`, or one shortest turn for each stream. A lower class has a turn after [`CLASS_LATE_NS`]. Within a
//! stream a bio is dispatched at the latest in the batch after the one in which it arrived.
//!
//! Idling follows CFQ and BFQ of Linux (spec D.3 to D.5); sorted batches are N-step-SCAN (Coffman and others, 1972).

mod depth;
mod device;
mod history;
mod hold_off;
mod line;
mod shared;
mod tenure;
mod turn;
mod write_cost;

use self::device::{DeviceEstimate, DeviceRead};
use self::history::StreamHistory;
use self::line::{MemberQueue, MemberShare};
use self::shared::DepthShare;
pub use self::shared::SharedDepth;
pub use self::tenure::SharedTenure;
use self::tenure::Tenure;
use self::turn::ActiveTurn;
use super::sequences::Sequences;
use super::slots::{List, Slots};
use super::streams::Streams;
use super::{Reach, Scheduler, SchedulerSnapshot, Selected, join_from};
use crate::{Bio, DeviceInfo, Op, Priority};

/// Classes of priority.
const CLASSES: usize = Priority::ALL.len();
/// Default weight of a stream.
pub(super) const WEIGHT: u32 = FairConfig::WEIGHT as u32;
/// Longest wait of a lower class behind a more urgent one; and of a stream in a mix that has used up its share, behind
/// returning streams.
const CLASS_LATE_NS: u64 = 2_000_000_000;
/// Within a class, the same.
const LATE_NS: u64 = 300_000_000;
/// Cost of a bio in a mix beside its bytes, in bytes: the transfer of flash in the time of a small read (100 000 reads
/// a second, 800 MB/s).
const PRICE: i64 = 8 << 10;
/// The same where there are seeks: 8 ms of a disk that does 64 MB/s.
const SEEK_PRICE: i64 = 512 << 10;
/// Due of a weight of one in a round of a mix, in bytes: 100 of them are 128 KiB, some tens of small bios.
const DUE: i64 = 1311;
/// The same where there are seeks: two of them.
const SEEK_DUE: i64 = 10486;

/// Upper bound of a bio's charge in a mix beside its cost, bytes: the largest usual read. Debts are paid off round by
/// round, and a guest may submit a bio of a terabyte.
const COUNTED_MAX: u64 = 16 << 20;
/// Time for which a device counts as shared after several streams used it: the longest idling for a stream.
const SHARED_NS: u64 = history::IDLE_NS;
/// Largest request made by joining bios while other streams share a device without seeks: a new bio waits for at least
/// one request.
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
    /// Without seeks.
    Flat,
}

/// What makes a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StreamKey {
    /// The submitter; where that is unknown, the sequence that a bio belongs to, if any.
    #[default]
    Sequence,
    /// The client queue or thread through which it came: [`Bio::submitter`].
    Queue,
    /// All bios of a submitter, those of an unknown one together: all of an export.
    Export,
}

/// Options of `fair`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FairConfig {
    /// How long a turn lasts at most, milliseconds, at a weight of 100.
    pub slice_ms: u32,
    /// How long a round of turns is to last, milliseconds: turns are shorter the more streams there are, but no shorter
    /// than five times the way from one to the other.
    pub target_ms: u32,
    /// Longest idling for a stream in its turn, ms; 0 ends a turn as soon as no bio of it waits.
    pub idle_ms: u32,
    /// Weight of asynchronous writes, of a hundred.
    pub async_percent: u32,
    /// Whether a turn begins only when all requests of the previous one have completed.
    pub drain: bool,
    /// Kind of device.
    pub device: FairDevice,
    /// What makes a stream.
    pub stream: StreamKey,
    /// Bytes in flight of all queues of a device without seeks that several streams share, KiB, plus 8 for each bio; 0
    /// for the measured amount.
    pub in_flight_kib: u32,
    /// Whether each queue of the device has its own depth and ignores the others.
    pub per_queue: bool,
    /// Weight of the queue beside others of its device, from [`FairConfig::WEIGHT_MIN`] to [`FairConfig::WEIGHT_MAX`].
    pub weight: u16,
    /// Weights of submitters, by their numbers, 10 to 1000; all others have 100. Those of weight zero are no entries.
    pub weights: [(u32, u16); FAIR_WEIGHTS_MAX],
}

impl Default for FairConfig {
    fn default() -> FairConfig {
        FairConfig {
            // CFQ's value (slice_sync): ten times a seek and the rotational latency.
            slice_ms: 100,
            // CFQ's target_latency.
            target_ms: 300,
            idle_ms: (history::IDLE_NS / 1_000_000) as u32,
            // CFQ's slice_async beside slice_sync.
            async_percent: 40,
            drain: true,
            device: FairDevice::default(),
            stream: StreamKey::default(),
            in_flight_kib: 0,
            per_queue: false,
            weight: FairConfig::WEIGHT,
            weights: [(0, 0); FAIR_WEIGHTS_MAX],
        }
    }
}

impl FairConfig {
    /// Usual weight of a queue beside others of its device.
    pub const WEIGHT: u16 = 100;
    /// Lower bound of weights.
    pub const WEIGHT_MIN: u16 = 10;
    /// Upper bound of weights.
    pub const WEIGHT_MAX: u16 = 1000;

    /// Shares a disk like CFQ, which idles for the owner of a turn for `idle_ms`: 8 ms, or 0.
    pub fn like_cfq(idle_ms: u32) -> FairConfig {
        FairConfig { idle_ms, drain: false, device: FairDevice::Seeks, ..FairConfig::default() }
    }
}

/// A stream with its bios; or all random streams of a class, which have turns as one.
#[derive(Clone, Copy, Debug, Default)]
struct FairStream {
    share: MemberShare,
    bios: List,
    in_flight: u32,
    /// How many of its bios, from the first on, are of the batch that is sorted.
    batch: u32,
    /// End sector of the bio returned last.
    position: u64,
    history: StreamHistory,
    /// Mean time from one end to the next in its turns.
    gap_ns: u32,
    class: u8,
    /// Whether its bios are synchronous.
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
    sequences: Sequences,
    device: DeviceEstimate,
    /// How much of the device is used, by all its queues.
    depth: DepthShare,
    /// Several streams use the device until then, even if one of them thinks.
    shared_until_ns: u64,
    /// Queues for turns, in ns, by class in the order of urgency.
    turns: [MemberQueue; CLASSES],
    /// Queues of mixing streams, in bytes.
    mixes: [MemberQueue; CLASSES],
    /// Slots of the random streams of each class, as one member.
    seek_groups: [u32; CLASSES],
    turn: Option<ActiveTurn>,
    /// When this queue, of all of the device, has it.
    tenure: Tenure,
    /// Sorted batch of the turn's owner: distance ahead of its position, and slot, of each bio; the nearest one last.
    batch: Vec<(u64, u32)>,
    /// Stream of the bio returned last, for joins.
    last: Option<u32>,
    waiting: [usize; CLASSES],
    out: [usize; CLASSES],
    /// Waiting bios of mixing streams.
    mixing: [usize; CLASSES],
    /// Whether the front of a mix has been served and had more bios. It goes to the back before the next call: until
    /// then its bios join the request made, and a stream whose bios all joined leaves the queue.
    served: [bool; CLASSES],
    /// Streams with a bio waiting or in flight.
    busy: usize,
}

/// Charge of a bio in the depth of a device.
#[inline]
fn cost(bio: &Bio) -> u64 {
    PRICE as u64 + bio.moves_bytes()
}

/// Mark in a bio's scheduler word, beside its stream: it was the only one that the stream had.
const LONE: u32 = 1 << 31;

/// Marks in the key of a stream, beside its class and its number: asynchronous writes of a submitter, the random
/// streams of a class, and a sequence.
const ASYNC_KEY: u64 = 1 << 40;
const CROWD_KEY: u64 = 1 << 41;
const SEQUENCE_KEY: u64 = 1 << 42;
/// Mark in the key of a sequence's submitter: its bios are writes.
const WRITE_KEY: u64 = 1 << 43;

impl Fair {
    /// For a queue of `bios_max` bios, of this device.
    pub(crate) fn new(config: FairConfig, bios_max: usize, info: &DeviceInfo) -> Fair {
        let seeks = match config.device {
            FairDevice::Measured => info.rotational,
            FairDevice::Seeks => true,
            FairDevice::Flat => false,
        };
        let mut streams = Streams::new(bios_max);
        let seek_groups = Priority::ALL.map(|class| {
            let at = streams.find_or_add(CROWD_KEY | (class as u64) << 32);
            streams.work(at);
            *streams.get_mut(at) = FairStream { class: class as u8, sync: true, ..FairStream::default() };
            at
        });
        Fair {
            config,
            slots: Slots::new(bios_max),
            streams,
            sequences: Sequences::new(),
            device: DeviceEstimate::new(seeks),
            depth: if config.per_queue { SharedDepth::default() } else { info.depth.clone() }
                .join(config.in_flight_kib, config.weight),
            shared_until_ns: 0,
            turns: Priority::ALL.map(|_| MemberQueue::new(turn::least_ns(&config), turn::passed_ns(&config))),
            mixes: Priority::ALL.map(|_| MemberQueue::new(1, LATE_NS)),
            seek_groups,
            turn: None,
            tenure: if config.per_queue { SharedTenure::default() } else { info.tenure.clone() }
                .join(&config, info.volatile_cache),
            batch: Vec::with_capacity(bios_max),
            last: None,
            waiting: [0; CLASSES],
            out: [0; CLASSES],
            mixing: [0; CLASSES],
            served: [false; CLASSES],
            busy: 0,
        }
    }

    /// Number of a bio's submitter.
    #[inline]
    fn number_of(&self, bio: &Bio) -> u32 {
        if self.config.stream == StreamKey::Queue { u32::from(bio.submitter) } else { bio.stream }
    }

    fn weight_of(&self, submitter: u32) -> u32 {
        let entry = self.config.weights.iter().find(|(number, weight)| *number == submitter && *weight > 0);
        entry.map_or(WEIGHT, |(_, weight)| u32::from((*weight).clamp(FairConfig::WEIGHT_MIN, FairConfig::WEIGHT_MAX)))
    }

    /// Share of a mix's member in a round.
    fn mix_due(&self, at: u32) -> i64 {
        i64::from(self.streams.get(at).share.weight) * if self.device.seeks() { SEEK_DUE } else { DUE }
    }

    fn is_owner(&self, at: u32) -> bool {
        self.turn.as_ref().is_some_and(|turn| turn.who == at)
    }

    /// Key of a bio's stream: class, number and marks.
    #[inline]
    fn key(&mut self, bio: &Bio, now_ns: u64) -> u64 {
        let class = (bio.priority as u64) << 32;
        let number = self.number_of(bio);
        let key = class | u64::from(number);
        if !bio.is_sync() {
            return key | ASYNC_KEY;
        }
        if number > 0 || self.config.stream != StreamKey::Sequence || bio.sectors == 0 {
            return key;
        }
        let submitter = if bio.op == Op::Read { key } else { key | WRITE_KEY };
        let sequence = self.sequences.find(submitter, bio.sector, bio.end(), now_ns);
        sequence.map_or(key, |number| class | SEQUENCE_KEY | u64::from(number))
    }

    /// Slot of a bio's stream.
    #[inline]
    fn find_stream(&mut self, bio: &Bio, now_ns: u64) -> u32 {
        let key = self.key(bio, now_ns);
        let at = self.streams.find_or_add(key);
        if self.streams.get(at).share.weight == 0 {
            let (sync, weight) = (bio.is_sync(), self.weight_of(self.number_of(bio)));
            let percent = if sync { 100 } else { self.config.async_percent };
            let stream = self.streams.get_mut(at);
            (stream.class, stream.sync) = (bio.priority as u8, sync);
            stream.share.weight = (weight * percent / 100).max(1);
        }
        at
    }

    /// Queues a stream that has bios, is in no queue and has no turn, with the streams of its current kind.
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
            let seek_group = self.seek_groups[class];
            if seeks && !self.is_owner(seek_group) && !self.streams.get(seek_group).share.queued {
                self.line_up(seek_group, now_ns);
            }
        } else {
            self.line_up(at, now_ns);
        }
    }

    /// The stream that takes the next bio of a mix; it is at the front of its queue.
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

    /// Moves streams of a mix to their positions while the front has no bio or may not dispatch one.
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

    /// Returns the next bio of the stream at the front of a mix.
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
        if !self.depth.fits(cost, several, now_ns) {
            // A light stream with no request in flight does not wait for heavy ones of the queue.
            let may_pass = self.mixes[class].front_is_light() && stream.in_flight == 0 && !self.depth.is_ahead();
            if !may_pass || self.depth.is_far_beyond(cost) {
                let until_ns = self.depth.wait_ns(cost, now_ns);
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
    fn hand_out(&mut self, at: u32, mut bio: Box<Bio>) -> Box<Bio> {
        let stream = self.streams.get_mut(at);
        let class = usize::from(stream.class);
        if stream.in_flight == 0 && stream.bios.is_empty() {
            bio.scheduler_word |= LONE;
        }
        stream.in_flight += 1;
        if stream.mixes {
            stream.share.credit -= bio.moves_bytes().min(COUNTED_MAX) as i64;
        } else if let Some(turn) = &mut self.turn {
            turn.bytes += bio.moves_bytes();
            turn.price += write_cost::price(&bio, stream.position);
        }
        stream.position = bio.end();
        self.waiting[class] -= 1;
        self.out[class] += 1;
        self.depth.took(cost(&bio));
        self.last = Some(at);
        bio
    }

    /// Frees the slot of a stream, if it is idle.
    fn rest(&mut self, at: u32) {
        let stream = self.streams.get(at);
        let idle = stream.bios.is_empty() && stream.in_flight == 0 && !stream.share.queued;
        if idle && !self.is_owner(at) && !self.seek_groups.contains(&at) {
            self.streams.rest(at);
        }
    }

    /// The device turned out to be of the other kind: all streams are queued again.
    #[inline(never)]
    fn change_kind(&mut self, now_ns: u64) {
        let owner = self.turn.take().map(|turn| turn.who).filter(|who| !self.seek_groups.contains(who));
        self.tenure.leave(now_ns);
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
        if self.seek_groups.contains(&at) {
            return;
        }
        if stream.bios.is_empty() { self.rest(at) } else { self.stand_in_line(at, now_ns) }
    }
}

impl Scheduler for Fair {
    fn insert(&mut self, mut bio: Box<Bio>, now_ns: u64) {
        let at = self.find_stream(&bio, now_ns);
        bio.scheduler_word = at;
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
        let depth = &mut self.depth;
        let mut fits = |bio: &Bio| {
            let there_is_room = !shared || depth.fits(cost(bio), several, now_ns);
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
        // The stream keeps its slot while a request of it is in flight.
        let (at, lone) = (bio.scheduler_word & !LONE, bio.scheduler_word & LONE > 0);
        let stream = self.streams.get_mut(at);
        stream.in_flight -= 1;
        stream.history.ended(now_ns);
        let (class, mixes) = (usize::from(stream.class), stream.mixes);
        let over = stream.in_flight == 0 && stream.bios.is_empty();
        self.out[class] -= 1;
        if over {
            self.busy -= 1;
        }
        if self.turn.is_some() {
            self.ended_in_turn(at, if mixes { self.seek_groups[class] } else { at }, start_ns, now_ns);
        }
        if over {
            self.rest(at);
        }
        self.depth.ended(cost(bio), lone, now_ns);
        if self.config.device == FairDevice::Measured {
            if bio.op == Op::Read {
                let (company, in_a_row) = (self.depth.has_company(), !mixes);
                let Bio { sector, sectors, .. } = *bio;
                if self.device.read(DeviceRead { sector, sectors, start_ns, now_ns, company, in_a_row }) {
                    self.change_kind(now_ns);
                }
            } else {
                self.device.disturb();
            }
        }
    }

    fn take(&mut self, is_it: &mut dyn FnMut(&Bio) -> bool, now_ns: u64) -> Option<Box<Bio>> {
        let place = self.slots.find(is_it)?;
        let at = self.slots.bio(place).scheduler_word;
        let stream = self.streams.get_mut(at);
        // The oldest of a stream are those of its batch.
        if self.slots.iter(&stream.bios).take(stream.batch as usize).any(|other| other == place) {
            stream.batch -= 1;
            self.batch.retain(|(_, other)| *other != place);
        }
        let bio = self.slots.remove(&mut stream.bios, place);
        let class = usize::from(stream.class);
        self.waiting[class] -= 1;
        self.mixing[class] -= usize::from(stream.mixes);
        if stream.bios.is_empty() && stream.in_flight == 0 {
            self.busy -= 1;
            self.rest(at);
        }
        if self.mixing[class] == 0 {
            // Those at the front of the mix are idle, and leave it.
            self.front_of_mix(class, now_ns);
        }
        if self.waiting.iter().all(|waiting| *waiting == 0) && self.in_flight() == 0 {
            // Nobody asks a queue in which nothing waits.
            self.tenure.leave(now_ns);
        }
        Some(bio)
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
            stream,
            in_flight_kib,
            per_queue,
            weight,
            weights,
        } = self.config;
        let stream = match stream {
            StreamKey::Sequence => "sequence",
            StreamKey::Queue => "queue",
            StreamKey::Export => "export",
        };
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
            ("stream", stream.into()),
            ("in_flight_kib", in_flight_kib.to_string()),
            ("per_queue", on_off(per_queue)),
            ("weights", given.join("+")),
        ];
        let mut facts = vec![
            ("seeks", u64::from(self.device.seeks())),
            ("busy", self.busy as u64),
            ("depth_kib", self.depth.depth() >> 10),
            ("in_flight", self.in_flight() as u64),
            ("weight", u64::from(weight)),
        ];
        if let Some(turn) = &self.turn {
            let key = self.streams.stream(turn.who);
            let number = key & u64::from(u32::MAX);
            facts.push(match key {
                // The random streams of a class have no number.
                key if key & CROWD_KEY > 0 => ("owner_class", key >> 32 & 3),
                key if key & ASYNC_KEY > 0 => ("owner_writes", number),
                key if key & SEQUENCE_KEY > 0 => ("owner_sequence", number),
                _ => ("owner", number),
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
