//! A scripted device: takes and completes requests as told, and records what it was given.

use std::collections::VecDeque;
use std::sync::Arc;

use blkyard_mq::{
    Batch, Bio, BioFlags, BufferId, DeviceInfo, Done, Driver, HwQueue, HwQueueConfig, HwSnapshot, Op, QueueLimits,
    RegionTable, RegisteredBuffer, Segment, Shortage, Status, Tag, TimedOut,
};

/// A request that the device has.
pub struct Held {
    pub op: Op,
    pub flags: BioFlags,
    pub namespace: u16,
    pub sector: u64,
    pub sectors: u32,
    pub segments: Vec<Segment>,
    pub ranges: Vec<(u64, u32)>,
    pub tag: Tag,
}

/// Action of the device on a request timeout.
#[derive(Clone, Copy)]
pub enum Late {
    /// It cannot take it back.
    MoreTime,
    /// It sets about taking it back, and says so.
    Abort,
    /// It takes it back on the spot.
    End(Status),
    /// Reset: completes all its requests.
    Reset(Status),
    /// Requeues the request.
    Requeue,
}

/// The device.
pub struct Hand {
    /// Requests at the device, in order of dispatch.
    pub held: Vec<Held>,
    /// First sectors of each batch.
    pub given: Vec<Vec<u64>>,
    /// How often it was offered anything.
    pub offers: usize,
    /// Requests that it takes.
    pub room: usize,
    /// Takes one more than that, and puts it back.
    pub puts_back: bool,
    /// Shortage that it reports when full.
    pub short_of: Shortage,
    /// Actions on late requests, one after another; the last one repeats.
    pub late: VecDeque<Late>,
    /// Which requests it was asked about: first sectors.
    pub asked: Vec<u64>,
    /// Registered buffers that it was told of.
    pub buffers: Vec<BufferId>,
    /// Regions of its memory, as told last.
    pub regions: Vec<u32>,
    ready: Vec<(Tag, Answer)>,
}

/// How a request comes back from the device.
enum Answer {
    Ended(Status),
    Requeued,
    Refused,
}

impl Default for Hand {
    fn default() -> Hand {
        Hand {
            held: Vec::new(),
            given: Vec::new(),
            offers: 0,
            room: usize::MAX,
            puts_back: false,
            short_of: Shortage::Device,
            late: VecDeque::from([Late::MoreTime]),
            asked: Vec::new(),
            buffers: Vec::new(),
            regions: Vec::new(),
            ready: Vec::new(),
        }
    }
}

impl Hand {
    /// Operations of its requests.
    pub fn ops(&self) -> Vec<Op> {
        self.held.iter().map(|held| held.op).collect()
    }

    /// First sectors of its requests.
    pub fn sectors(&self) -> Vec<u64> {
        self.held.iter().map(|held| held.sector).collect()
    }

    /// First sectors and lengths of its requests.
    pub fn extents(&self) -> Vec<(u64, u32)> {
        self.held.iter().map(|held| (held.sector, held.sectors)).collect()
    }

    /// Number of its requests of a namespace.
    pub fn count_of(&self, namespace: u16) -> usize {
        self.held.iter().filter(|held| held.namespace == namespace).count()
    }

    /// Is done with the first request that this holds for, and will say so when it is polled.
    pub fn end(&mut self, is: impl Fn(&Held) -> bool, status: Status) {
        let tag = self.take(is);
        self.ready.push((tag, Answer::Ended(status)));
    }

    /// Requeues the first matching request.
    pub fn requeue(&mut self, is: impl Fn(&Held) -> bool) {
        let tag = self.take(is);
        self.ready.push((tag, Answer::Requeued));
    }

    /// The same for a request that the device will not execute.
    pub fn requeue_answered(&mut self, is: impl Fn(&Held) -> bool) {
        let tag = self.take(is);
        self.ready.push((tag, Answer::Refused));
    }

    fn take(&mut self, is: impl Fn(&Held) -> bool) -> Tag {
        let at = self.held.iter().position(is).expect("there is no such request");
        self.held.remove(at).tag
    }
}

impl Driver<()> for Hand {
    fn queue_rqs(&mut self, (): &mut (), _: &RegionTable, batch: &mut Batch<'_>) {
        self.offers += 1;
        let mut given = Vec::new();
        while self.held.len() < self.room {
            let Some((tag, request, segments)) = batch.take() else { break };
            let held = Held {
                op: request.op(),
                flags: request.flags(),
                namespace: request.namespace(),
                sector: request.sector(),
                sectors: request.sectors(),
                segments: segments.collect(),
                ranges: Vec::new(),
                tag,
            };
            given.push(held.sector);
            let ranges = if held.op == Op::Discard { batch.ranges(&held.tag).collect() } else { Vec::new() };
            self.held.push(Held { ranges, ..held });
        }
        if self.puts_back
            && let Some((tag, ..)) = batch.take()
        {
            batch.put_back(tag);
        }
        if !batch.is_empty() {
            batch.short_of(self.short_of);
        }
        self.given.push(given);
    }

    fn poll(&mut self, (): &mut (), _: &RegionTable, done: &mut Done<'_>, _: u64) {
        for (tag, answer) in self.ready.drain(..) {
            match answer {
                Answer::Ended(status) => done.complete(tag, status),
                Answer::Requeued => done.requeue(tag),
                Answer::Refused => done.requeue_answered(tag),
            }
        }
    }

    fn set_memory(&mut self, (): &mut (), memory: &RegionTable) {
        self.buffers.clear();
        self.regions = memory.iter().map(|(number, _)| number).collect();
    }

    fn change_memory(&mut self, (): &mut (), memory: &RegionTable) {
        self.regions = memory.iter().map(|(number, _)| number).collect();
    }

    fn add_buffer(&mut self, (): &mut (), _: &RegionTable, buffer: &Arc<RegisteredBuffer>) {
        self.buffers.push(buffer.id());
    }

    fn remove_buffer(&mut self, (): &mut (), buffer: BufferId) {
        self.buffers.retain(|known| *known != buffer);
    }

    fn timed_out(&mut self, (): &mut (), _: &RegionTable, place: usize, done: &mut Done<'_>, _: u64) -> TimedOut {
        let at =
            self.held.iter().position(|held| held.tag.index() == place).expect("asked about what it does not have");
        self.asked.push(self.held[at].sector);
        let late = if self.late.len() > 1 { self.late.pop_front() } else { self.late.front().copied() };
        match late.unwrap() {
            Late::MoreTime => return TimedOut::MoreTime,
            Late::Abort => {}
            Late::End(status) => done.complete(self.held.remove(at).tag, status),
            Late::Reset(status) => self.held.drain(..).for_each(|held| done.complete(held.tag, status)),
            Late::Requeue => done.requeue(self.held.remove(at).tag),
        }
        TimedOut::TakenBack
    }
}

/// The disk of most tests: large, with all features.
pub fn disk() -> DeviceInfo {
    let limits =
        QueueLimits { discard_sectors_max: 1 << 20, write_zeroes_sectors_max: 1 << 20, ..QueueLimits::default() };
    DeviceInfo { name: "hand".into(), capacity_sectors: 1 << 30, limits, ..DeviceInfo::default() }
}

/// The same with these limits.
pub fn disk_of(limits: QueueLimits) -> DeviceInfo {
    limits.check().unwrap();
    DeviceInfo { limits, ..disk() }
}

/// A bio that knows itself by its first sector. Its memory lies where its sectors lie, so neighbours meet in memory,
/// too.
pub fn bio(op: Op, sector: u64, sectors: u32) -> Box<Bio> {
    let mut bio = Bio::with_capacity(1);
    (bio.op, bio.sector, bio.sectors, bio.cookie) = (op, sector, sectors, sector);
    if op.has_data() {
        bio.segments.push(Segment { region: 0, offset: sector << 9, len: sectors << 9 });
    }
    bio
}

/// A read of 4 KiB.
pub fn read(sector: u64) -> Box<Bio> {
    bio(Op::Read, sector, 8)
}

/// With these flags.
pub fn with(mut bio: Box<Bio>, flags: BioFlags) -> Box<Bio> {
    bio.flags |= flags;
    bio
}

/// For this namespace.
pub fn of(namespace: u16, mut bio: Box<Bio>) -> Box<Bio> {
    bio.namespace = namespace;
    bio
}

/// A queue over such a device, its clock, and its completed bios.
pub struct Bench {
    pub queue: HwQueue<Hand>,
    pub now_ns: u64,
    pub ended: Vec<(u64, Status)>,
}

impl Bench {
    pub fn new(info: DeviceInfo, config: HwQueueConfig) -> Bench {
        Bench::of(vec![info], config)
    }

    pub fn of(infos: Vec<DeviceInfo>, config: HwQueueConfig) -> Bench {
        let queue = HwQueue::with_namespaces(Hand::default(), infos.into_iter().map(Arc::new).collect(), config);
        Bench { queue, now_ns: 0, ended: Vec::new() }
    }

    /// One with this many tags.
    pub fn deep(depth: usize) -> Bench {
        Bench::new(disk(), HwQueueConfig { depth, ..HwQueueConfig::default() })
    }

    pub fn device(&mut self) -> &mut Hand {
        self.queue.driver_mut()
    }

    pub fn submit(&mut self, bio: Box<Bio>) {
        self.queue.submit(bio);
    }

    pub fn submit_all(&mut self, bios: impl IntoIterator<Item = Box<Bio>>) {
        bios.into_iter().for_each(|bio| self.queue.submit(bio));
    }

    pub fn issue(&mut self) -> usize {
        self.now_ns += 1;
        self.queue.issue(&mut (), self.now_ns)
    }

    pub fn reap(&mut self) -> usize {
        let ended = &mut self.ended;
        self.queue.reap(&mut (), self.now_ns, &mut |bio| ended.push((bio.cookie, bio.status)))
    }

    /// A round of the lane.
    pub fn turn(&mut self) {
        self.now_ns += 1;
        self.reap();
        self.queue.issue(&mut (), self.now_ns);
        self.reap();
    }

    /// A round at this time.
    pub fn turn_at(&mut self, now_ns: u64) {
        self.now_ns = now_ns - 1;
        self.turn();
    }

    /// The device is done with the first request that begins here; then a round.
    pub fn end(&mut self, sector: u64, status: Status) {
        self.device().end(|held| held.sector == sector, status);
        self.turn();
    }

    /// Completes all requests, round after round, until the queue is idle.
    pub fn end_all(&mut self) {
        for _ in 0..100_000 {
            while !self.device().held.is_empty() {
                self.device().end(|_| true, Status::Ok);
            }
            self.turn();
            if self.queue.is_idle() {
                return;
            }
            // The next requeue lets it continue; otherwise time must.
            if self.device().held.is_empty() {
                self.now_ns = self.deadline_ns().map_or(self.now_ns, |ns| ns.max(self.now_ns));
            }
        }
        panic!("the queue does not come to rest");
    }

    pub fn deadline_ns(&self) -> Option<u64> {
        self.queue.deadline_ns::<()>()
    }

    pub fn snapshot(&self) -> HwSnapshot {
        self.queue.snapshot(self.now_ns)
    }

    pub fn take_ended(&mut self) -> Vec<(u64, Status)> {
        std::mem::take(&mut self.ended)
    }

    /// First sectors completed since the last call, in order, all without error.
    pub fn take_ok(&mut self) -> Vec<u64> {
        let ended = self.take_ended();
        assert!(ended.iter().all(|(_, status)| status.is_ok()), "{ended:?}");
        ended.into_iter().map(|(sector, _)| sector).collect()
    }
}
