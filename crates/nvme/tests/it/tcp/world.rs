//! A host with the queue core, a target with a RAM disk, and the byte streams between them, all driven by chance.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use blkyard_mem::{Region, RegionTable, Segment};
use blkyard_mq::{Batch, Bio, DeviceInfo, Done, Driver, HwQueue, HwQueueConfig, Op, QueueLimits, Status, Tag};
use blkyard_nvme::tcp::{
    SendList, SendPiece, TcpDirection, TcpEnd, TcpHostEvent, TcpHostOptions, TcpHostQueue, TcpTargetEvent,
    TcpTargetOptions, TcpTargetQueue, TcpTransfer,
};
use blkyard_nvme::{NvmeStatus, Sqe, io};

/// SplitMix64.
pub struct Chance(pub u64);

impl Chance {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, count: usize) -> usize {
        (self.next() % count as u64) as usize
    }

    pub fn one_in(&mut self, count: u64) -> bool {
        self.next().is_multiple_of(count)
    }

    pub fn pick<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }
}

/// One direction of a connection, with the kernel's send queue before it.
#[derive(Default)]
pub struct Stream {
    /// Pieces not sent, and the ends of lists among them.
    queue: VecDeque<Queued>,
    /// Bytes on their way.
    pub bytes: VecDeque<u8>,
    /// Bytes received, not taken.
    pub received: Vec<u8>,
}

enum Queued {
    Bytes(Vec<u8>),
    Data(Segment),
    End(u64),
}

impl Stream {
    fn push(&mut self, list: &SendList, number: u64) {
        for piece in list.pieces() {
            self.queue.push_back(match piece {
                SendPiece::Bytes(bytes) => Queued::Bytes(bytes.to_vec()),
                SendPiece::Data(segment) => Queued::Data(segment),
            });
        }
        self.queue.push_back(Queued::End(number));
    }

    /// Sends pieces; returns the number of a list that was sent. Data is read from memory only now.
    fn send(&mut self, memory: &RegionTable, chance: &mut Chance) -> Option<u64> {
        for _ in 0..chance.below(8) {
            match self.queue.pop_front()? {
                Queued::Bytes(bytes) => self.bytes.extend(bytes),
                Queued::Data(segment) => {
                    let mut bytes = vec![0; segment.len as usize];
                    memory.resolve(segment).unwrap().copy_to_slice(&mut bytes);
                    self.bytes.extend(bytes);
                }
                Queued::End(number) => return Some(number),
            }
        }
        None
    }

    /// Sends or drops all; returns the number of the last list.
    fn finish(&mut self) -> Option<u64> {
        let numbers = self.queue.drain(..).filter_map(|queued| match queued {
            Queued::End(number) => Some(number),
            _ => None,
        });
        numbers.max()
    }

    /// Moves bytes to the receiver, some of which may be damaged.
    fn deliver(&mut self, chance: &mut Chance, is_damaging: bool) {
        let len = match chance.below(4) {
            0 => chance.below(8),
            1 => chance.below(200),
            _ => chance.below(1 << 17),
        };
        let at = self.received.len();
        self.received.extend(self.bytes.drain(..len.min(self.bytes.len())));
        if is_damaging && self.received.len() > at {
            let byte = at + chance.below(self.received.len() - at);
            self.received[byte] ^= 1 << chance.below(8);
        }
    }
}

/// The host's driver.
pub struct TcpDriver {
    pub host: TcpHostQueue,
    parked: Vec<Option<Tag>>,
    ended: Vec<(Tag, NvmeStatus)>,
    requeued: Vec<Tag>,
}

impl Driver<()> for TcpDriver {
    fn queue_rqs(&mut self, (): &mut (), memory: &RegionTable, batch: &mut Batch<'_>) {
        if self.host.end().is_some() {
            return;
        }
        while let Some((tag, request, segments)) = batch.take() {
            let (direction, opcode) = match request.op() {
                Op::Read => (TcpDirection::Read, io::READ),
                Op::Write => (TcpDirection::Write, io::WRITE),
                _ => (TcpDirection::None, io::FLUSH),
            };
            let sqe = Sqe::with_blocks(opcode, 1, request.sector(), request.sectors().max(1), 0);
            let slot = tag.index();
            assert!(self.host.push(memory, slot as u16, sqe, direction, segments.clone()));
            self.parked[slot] = Some(tag);
        }
    }

    fn poll(&mut self, (): &mut (), _: &RegionTable, done: &mut Done<'_>, _: u64) {
        for (tag, status) in self.ended.drain(..) {
            // As a driver does with statuses that allow a retry.
            if status == NvmeStatus::TRANSIENT_TRANSPORT {
                done.requeue(tag);
            } else {
                done.complete(tag, status.to_status());
            }
        }
        self.requeued.drain(..).for_each(|tag| done.requeue(tag));
    }

    fn wants_poll(&self) -> bool {
        !self.ended.is_empty() || !self.requeued.is_empty()
    }
}

/// A command at the target's device.
struct Executing {
    slot: u16,
    sqe: Sqe,
    bytes: u32,
}

/// The disk is divided into ranges of the size of an I/O.
const RANGES: usize = 16;
/// Maximum bytes of a request, which may be merged from several bios.
const REQUEST_BYTES: u64 = 512 << 10;
const DEPTH_MAX: u64 = 16;

/// What a walk has met, to check that walks meet everything.
#[derive(Debug, Default)]
pub struct Seen {
    pub bios: u64,
    pub failed: u64,
    pub cuts: u64,
    pub violations: u64,
    pub transient: u64,
    pub in_capsule: u64,
    pub transported: u64,
    pub direct: u64,
    pub stalls: u64,
    pub requeued: u64,
}

pub struct World {
    pub chance: Chance,
    pub seen: Seen,
    pub hw: HwQueue<TcpDriver>,
    host_memory: Arc<RegionTable>,
    buffer: Arc<Region>,
    target: TcpTargetQueue,
    /// Region 0 is the disk, region 1 the buffers by slot.
    target_memory: RegionTable,
    host_options: TcpHostOptions,
    target_options: TcpTargetOptions,
    to_target: Stream,
    to_host: Stream,
    executing: Vec<Executing>,
    in_capsule: HashMap<u16, (Sqe, u32)>,
    /// What the sectors of each range may hold; more than one value after a failed write.
    pub expected: Vec<Vec<u64>>,
    /// Ranges with a bio in flight.
    busy: Vec<bool>,
    next_value: u64,
    now_ns: u64,
    ended: Vec<Box<Bio>>,
    /// Whether bytes are damaged and connections cut.
    pub has_faults: bool,
    /// Size of an I/O.
    io_bytes: u64,
    idle_steps: u32,
}

impl World {
    pub fn new(seed: u64) -> World {
        let mut chance = Chance(seed);
        let depth = 1 + chance.below(DEPTH_MAX as usize) as u16;
        let has_digests = chance.one_in(2);
        let (header_digest, data_digest) = (has_digests || chance.one_in(3), has_digests || chance.one_in(3));
        let host_options = TcpHostOptions {
            depth,
            segments_max: 128,
            in_capsule: chance.pick(&[0, 512, 4096, 8192]),
            header_digest,
            data_digest,
            alignment: chance.pick(&[0, 0, 1, 31]),
        };
        let target_options = TcpTargetOptions {
            slots: depth + chance.below(3) as u16,
            segments_max: 128,
            in_capsule: 8192,
            maxh2cdata: chance.pick(&[4096, 4100, 65536, 1 << 20]),
            header_digest: true,
            data_digest: true,
            alignment: chance.pick(&[0, 0, 3, 31]),
        };
        let io_bytes = chance.pick(&[512, 4096, 8192, 65536, 300 << 10]);
        let sectors = RANGES as u64 * io_bytes / 512;
        let limits =
            QueueLimits { sectors_max: (REQUEST_BYTES / 512) as u32, dma_alignment_mask: 3, ..QueueLimits::default() };
        let info = DeviceInfo { capacity_sectors: sectors, limits, volatile_cache: true, ..DeviceInfo::default() };
        let driver = TcpDriver {
            host: TcpHostQueue::new(host_options),
            parked: (0..depth).map(|_| None).collect(),
            ended: vec![],
            requeued: vec![],
        };
        let config = HwQueueConfig { depth: depth.into(), bios_max: 64, ..HwQueueConfig::default() };
        let mut hw = HwQueue::new(driver, Arc::new(info), config);
        let buffer = Region::anonymous(RANGES * io_bytes as usize * 2).unwrap();
        let host_memory = Arc::new(RegionTable::new(vec![Arc::clone(&buffer)]));
        hw.set_memory(&mut (), Arc::clone(&host_memory));
        let disk = Region::anonymous(RANGES * io_bytes as usize).unwrap();
        let buffers = Region::anonymous(((DEPTH_MAX + 2) * REQUEST_BYTES) as usize).unwrap();
        World {
            chance,
            seen: Seen::default(),
            hw,
            host_memory,
            buffer,
            target: TcpTargetQueue::new(target_options),
            target_memory: RegionTable::new(vec![disk, buffers]),
            host_options,
            target_options,
            to_target: Stream::default(),
            to_host: Stream::default(),
            executing: vec![],
            in_capsule: HashMap::new(),
            expected: vec![vec![0]; RANGES],
            busy: vec![false; RANGES],
            next_value: 1,
            now_ns: 0,
            ended: vec![],
            has_faults: false,
            io_bytes,
            idle_steps: 0,
        }
    }

    /// Whether damaged bytes are always noticed.
    pub fn has_digests(&self) -> bool {
        self.host_options.header_digest && self.host_options.data_digest
    }

    /// Submits a bio for a range that has none. A range holds one value in all its words.
    pub fn submit(&mut self) {
        let range = self.chance.below(self.busy.len());
        if self.hw.room() == 0 || self.busy[range] {
            return;
        }
        let op = match self.chance.below(20) {
            0 => Op::Flush,
            n if n % 2 == 0 => Op::Read,
            _ => Op::Write,
        };
        // Segments of any length that is a multiple of four; with gaps between them.
        let mut segments = vec![];
        let mut left = if op == Op::Flush { 0 } else { self.io_bytes as u32 };
        let mut offset = range as u64 * self.io_bytes * 2;
        let mut gaps = self.io_bytes;
        let (is_split, piece_max) = (self.chance.one_in(2), self.chance.pick(&[20, 700]));
        while left > 0 {
            let len = if is_split && segments.len() < 120 { 4 + self.chance.below(piece_max) as u32 * 4 } else { left };
            let len = len.min(left);
            segments.push(Segment { region: 0, offset, len });
            let gap = (self.chance.below(64) as u64 * 4).min(gaps);
            (left, offset, gaps) = (left - len, offset + u64::from(len) + gap, gaps - gap);
        }
        let mut bio = Bio::with_capacity(segments.len());
        (bio.op, bio.cookie) = (op, range as u64);
        if op != Op::Flush {
            (bio.sector, bio.sectors) = (range as u64 * self.io_bytes / 512, (self.io_bytes / 512) as u32);
        }
        if op == Op::Write {
            let value = self.next_value;
            self.next_value += 1;
            let whole = value.to_le_bytes().repeat(self.io_bytes as usize / 8);
            let mut at = 0;
            for segment in &segments {
                let end = at + segment.len as usize;
                self.buffer.span(segment.offset, segment.len as usize).unwrap().copy_from_slice(&whole[at..end]);
                at = end;
            }
            self.expected[range].push(value);
        }
        bio.segments = segments;
        self.busy[range] = true;
        self.seen.bios += 1;
        self.hw.submit(bio);
    }

    /// A random step of one of the parts.
    pub fn step(&mut self) {
        let damages = self.has_faults && self.has_digests() && self.chance.one_in(60);
        match self.chance.below(8) {
            0 => self.round(),
            1 => self.host_sends(),
            2 => self.target_sends(),
            3 => {
                if let Some(number) = self.to_target.send(&self.host_memory, &mut self.chance) {
                    self.hw.driver_mut().host.sent(number);
                    self.host_receives();
                }
            }
            4 => {
                if let Some(number) = self.to_host.send(&self.target_memory, &mut self.chance) {
                    self.target.sent(number);
                    self.target_receives();
                }
            }
            5 => {
                self.to_target.deliver(&mut self.chance, damages);
                self.target_receives();
            }
            6 => {
                self.to_host.deliver(&mut self.chance, damages);
                self.host_receives();
            }
            _ => self.execute(),
        }
        if self.has_faults && self.chance.one_in(3000) {
            self.seen.cuts += 1;
            self.reconnect();
        }
        let is_ended = self.hw.driver_mut().host.end().is_some() || self.target.end().is_some();
        if is_ended && self.chance.one_in(20) {
            self.reconnect();
        }
    }

    /// Runs until all bios have ended. A damaged length can hold up a stream; a keep-alive would notice.
    pub fn finish(&mut self) {
        self.has_faults = false;
        let mut steps = 0;
        let mut last = 0;
        while !self.hw.is_idle() {
            self.step();
            steps += 1;
            let ended = self.busy.iter().filter(|busy| !**busy).count();
            self.idle_steps = if ended == last { self.idle_steps + 1 } else { 0 };
            last = ended;
            if self.idle_steps > 20_000 {
                assert!(self.seen.stalls == 0, "the queue does not come to rest: {:?}", self.seen);
                self.seen.stalls += 1;
                self.idle_steps = 0;
                self.reconnect();
            }
            assert!(steps < 1_000_000, "the queue does not come to rest: {:?}", self.seen);
        }
    }

    fn round(&mut self) {
        self.now_ns += 10_000_000;
        self.hw.issue(&mut (), self.now_ns);
        let ended = &mut self.ended;
        self.hw.reap(&mut (), self.now_ns, &mut |bio| ended.push(bio));
        for bio in std::mem::take(&mut self.ended) {
            self.end(&bio);
        }
    }

    fn end(&mut self, bio: &Bio) {
        let range = bio.cookie as usize;
        self.busy[range] = false;
        let allowed = &mut self.expected[range];
        match (bio.op, bio.status) {
            (Op::Write, Status::Ok) => drop(allowed.drain(..allowed.len() - 1)),
            (Op::Read, Status::Ok) => {
                let mut whole = vec![];
                for segment in &bio.segments {
                    let at = whole.len();
                    whole.resize(at + segment.len as usize, 0);
                    self.buffer.span(segment.offset, segment.len as usize).unwrap().copy_to_slice(&mut whole[at..]);
                }
                let first = u64::from_le_bytes(whole[..8].try_into().unwrap());
                assert!(allowed.contains(&first), "range {range} has {first}, and may have {allowed:?}");
                let is_whole = whole.chunks(8).all(|word| word == first.to_le_bytes());
                assert!(is_whole, "range {range} is torn");
                *allowed = vec![first];
            }
            (_, Status::Ok) => {}
            (_, status) => {
                assert!(matches!(status, Status::Io | Status::Medium), "{status:?}");
                self.seen.failed += 1;
            }
        }
    }

    fn host_sends(&mut self) {
        let mut list = SendList::new(self.chance.pick(&[0, 64, 256]));
        if let Some(number) = self.hw.driver_mut().host.fill(&self.host_memory, &mut list) {
            self.to_target.push(&list, number);
        }
    }

    fn target_sends(&mut self) {
        let mut list = SendList::new(self.chance.pick(&[0, 64, 256]));
        if let Some(number) = self.target.fill(&self.target_memory, &mut list) {
            self.to_host.push(&list, number);
        }
    }

    fn host_receives(&mut self) {
        let memory = Arc::clone(&self.host_memory);
        let driver = self.hw.driver_mut();
        let received = std::mem::take(&mut self.to_host.received);
        let mut bytes = &received[..];
        loop {
            // Some data is received directly.
            if let Some(destination) = driver.host.destination().filter(|_| !bytes.is_empty() && self.chance.one_in(2))
            {
                let len = (destination.len as usize).min(bytes.len());
                memory.resolve(destination).unwrap().part(0, len).copy_from_slice(&bytes[..len]);
                driver.host.received(&memory, len as u32);
                bytes = &bytes[len..];
                self.seen.direct += 1;
                continue;
            }
            let event = driver.host.receive(&mut bytes, |segment, piece| {
                memory.resolve(segment).unwrap().copy_from_slice(piece);
            });
            match event {
                None => break,
                Some(TcpHostEvent::Started) => {}
                Some(TcpHostEvent::Completed(completed)) => {
                    let tag = driver.parked[usize::from(completed.slot)].take().unwrap();
                    let is_transient = completed.status.without_flags() == NvmeStatus::TRANSIENT_TRANSPORT;
                    self.seen.transient += u64::from(is_transient);
                    driver.ended.push((tag, completed.status));
                }
                Some(TcpHostEvent::Ended(TcpEnd::Violation(error))) => {
                    assert!(self.has_digests(), "{error}");
                    self.seen.violations += 1;
                    return;
                }
                Some(TcpHostEvent::Ended(end)) => {
                    assert!(self.has_digests(), "{end:?}");
                    return;
                }
            }
        }
        assert_eq!(bytes, [0_u8; 0], "a host takes all bytes");
    }

    fn target_receives(&mut self) {
        let received = std::mem::take(&mut self.to_target.received);
        let mut bytes = &received[..];
        loop {
            let memory = &self.target_memory;
            let event = self.target.receive(&mut bytes, |segment, piece| {
                memory.resolve(segment).unwrap().copy_from_slice(piece);
            });
            match event {
                None => break,
                Some(TcpTargetEvent::Started) => {
                    if self.chance.one_in(2) {
                        self.target.set_flow_control(u32::from(self.target_options.slots) + 1);
                    }
                }
                Some(TcpTargetEvent::Command { slot, sqe, transfer }) => self.command(slot, sqe, transfer),
                Some(TcpTargetEvent::DataReady(slot)) => {
                    let (sqe, bytes) = self.in_capsule.remove(&slot).unwrap();
                    self.executing.push(Executing { slot, sqe, bytes });
                }
                Some(TcpTargetEvent::Released(slot)) => {
                    self.in_capsule.remove(&slot);
                }
                Some(TcpTargetEvent::Ended(end)) => {
                    assert!(self.has_digests(), "{end:?}");
                    self.seen.violations += u64::from(matches!(end, TcpEnd::Violation(_)));
                    bytes = &[];
                }
            }
        }
        // The rest waits for a slot.
        self.to_target.received.splice(0..0, bytes.iter().copied());
    }

    fn command(&mut self, slot: u16, sqe: Sqe, transfer: TcpTransfer) {
        match transfer {
            TcpTransfer::None => self.executing.push(Executing { slot, sqe, bytes: 0 }),
            TcpTransfer::Transport(bytes) if sqe.opcode() == io::READ => {
                self.executing.push(Executing { slot, sqe, bytes });
            }
            TcpTransfer::InCapsule(bytes) | TcpTransfer::Transport(bytes) => {
                let is_in_capsule = matches!(transfer, TcpTransfer::InCapsule(_));
                if self.chance.one_in(30) {
                    // In-capsule data is dropped.
                    return self.target.respond(slot, NvmeStatus::INTERNAL.with_dnr(), 0);
                }
                self.seen.in_capsule += u64::from(is_in_capsule);
                self.seen.transported += u64::from(!is_in_capsule);
                let segments = self.buffer_of(slot, bytes);
                assert!(self.target.receive_data(&self.target_memory, slot, segments.into_iter()));
                self.in_capsule.insert(slot, (sqe, bytes));
            }
        }
    }

    /// The buffer of a slot, in one or several segments.
    fn buffer_of(&mut self, slot: u16, bytes: u32) -> Vec<Segment> {
        let offset = u64::from(slot) * REQUEST_BYTES;
        let first = if self.chance.one_in(2) { self.chance.below(bytes as usize + 1) as u32 } else { bytes };
        let second = Segment { region: 1, offset: offset + u64::from(first), len: bytes - first };
        vec![Segment { region: 1, offset, len: first }, second]
    }

    /// The target's device executes a command, any of them.
    fn execute(&mut self) {
        if self.executing.is_empty() {
            return;
        }
        let number = self.chance.below(self.executing.len());
        let Executing { slot, sqe, bytes } = self.executing.swap_remove(number);
        if self.chance.one_in(40) {
            return self.target.respond(slot, NvmeStatus::UNRECOVERED_READ.with_dnr(), 0);
        }
        let on_disk = Segment { region: 0, offset: sqe.slba() * 512, len: bytes };
        match sqe.opcode() {
            io::READ => {
                let half = bytes / 2;
                let halves = [
                    Segment { len: half, ..on_disk },
                    Segment { offset: on_disk.offset + u64::from(half), len: bytes - half, ..on_disk },
                ];
                let result = u64::from(self.chance.one_in(4));
                assert!(self.target.respond_with(&self.target_memory, slot, halves.into_iter(), result));
            }
            io::WRITE => {
                let from = Segment { region: 1, offset: u64::from(slot) * REQUEST_BYTES, len: bytes };
                let [from, to] = [from, on_disk].map(|segment| self.target_memory.resolve(segment).unwrap());
                to.copy_from(&from);
                self.target.respond(slot, NvmeStatus::SUCCESS, 0);
            }
            _ => self.target.respond(slot, NvmeStatus::SUCCESS, 0),
        }
    }

    /// Both sides lose the connection. The target ends its commands before a new one: the path is fenced.
    fn reconnect(&mut self) {
        self.target.abandon(TcpEnd::Closed);
        for Executing { slot, .. } in std::mem::take(&mut self.executing) {
            self.target.respond(slot, NvmeStatus::SQ_DELETED, 0);
        }
        if let Some(number) = self.to_host.finish() {
            self.target.sent(number);
        }
        self.target_receives();
        assert_eq!(self.target.in_use(), 0, "commands of a dead connection");
        self.in_capsule.clear();
        self.target = TcpTargetQueue::new(self.target_options);

        let last = self.to_target.finish();
        let driver = self.hw.driver_mut();
        driver.host.abandon(TcpEnd::Closed);
        if let Some(number) = last {
            driver.host.sent(number);
        }
        self.to_host.received.clear();
        self.host_receives();
        let driver = self.hw.driver_mut();
        for slot in 0..driver.host.depth() {
            if driver.host.cancel(slot) {
                driver.requeued.push(driver.parked[usize::from(slot)].take().unwrap());
                self.seen.requeued += 1;
            }
        }
        assert!(driver.parked.iter().all(Option::is_none));
        driver.host = TcpHostQueue::new(self.host_options);
        (self.to_target, self.to_host) = (Stream::default(), Stream::default());
    }
}
