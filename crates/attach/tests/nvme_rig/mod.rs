//! The NVMe host over vfio-user on one thread: controller, one I/O queue, and a model of the disk to compare each read
//! with. Its sleep ends only by the server's interrupts or a deadline of the host.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blkyard_attach::{VfioUserConfig, VfioUserController};
use blkyard_mem::{DmaMapping, Region, RegionTable, Segment};
use blkyard_mq::{Batch, Bio, BioFlags, Done, Driver, HwQueue, HwQueueConfig, Op, Status, TimedOut};
use blkyard_nvme::{ControllerState, HostController, HostEvent, IoQueue, NvmeHostConfig, QueueDemand};
use blkyard_os::{SystemClock, now_ns};
use blkyard_sys::{PollFd, PollFlags, wait_for};

/// Time limit of a wait, longer than any step takes on a busy machine.
const PATIENCE: Duration = Duration::from_mins(1);
const BLOCK: u32 = 4096;
/// Bios in flight.
const SLOTS: u64 = 16;

/// Brings up the controller at a socket, writes, reads and compares, resets it with I/O in flight, shuts it down.
pub fn exercise(socket: &Path, has_shadow: bool) {
    let mut rig = NvmeRig::start(socket, has_shadow);
    let blocks = rig.blocks();
    rig.write_and_verify(0..200, 1);
    rig.write_and_verify((0..200).map(|number| number * 7919 % blocks), 77);
    rig.flush();
    rig.reset_under_load();
    rig.write_and_verify((0..100).rev(), 3);
    assert!(rig.interrupts > 0 && rig.ended == 1009, "{} I/Os, {} interrupts", rig.ended, rig.interrupts);
    rig.remove();
}

struct RigDriver {
    queue: IoQueue,
    base: u64,
    /// Whether a doorbell register was written.
    rang: bool,
}

impl Driver<()> for RigDriver {
    fn queue_rqs(&mut self, _cx: &mut (), _memory: &RegionTable, batch: &mut Batch<'_>) {
        let base = self.base;
        self.rang |= self.queue.queue(batch, |segment| Some(base + segment.offset));
    }

    fn poll(&mut self, _cx: &mut (), _memory: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        self.rang |= self.queue.poll(done, now_ns);
    }

    fn wants_poll(&self) -> bool {
        self.queue.wants_poll()
    }

    fn timed_out(&mut self, (): &mut (), _: &RegionTable, place: usize, _: &mut Done<'_>, _: u64) -> TimedOut {
        self.queue.timed_out(place as u16)
    }

    fn deadline_ns(&self) -> Option<u64> {
        self.queue.deadline_ns()
    }
}

/// A host, its queue, and the expected content of the disk.
pub struct NvmeRig {
    host: HostController<VfioUserController>,
    queue: Option<HwQueue<RigDriver>>,
    buffer: Arc<Region>,
    _mapping: DmaMapping,
    base: u64,
    deadline_ns: Option<u64>,
    /// First byte of each block that was written.
    model: BTreeMap<u64, u8>,
    /// Bios in flight by slot.
    in_flight: BTreeMap<u64, (Op, u64, u8)>,
    pub interrupts: u64,
    pub ended: u64,
}

impl NvmeRig {
    /// Connects, and brings the controller up.
    pub fn start(socket: &Path, has_shadow: bool) -> NvmeRig {
        let mut config = VfioUserConfig::new(socket, Arc::new(SystemClock)).unwrap();
        config.reply_max = PATIENCE;
        let transport = VfioUserController::open(&config).unwrap();
        let buffer = Region::shared((SLOTS * u64::from(BLOCK)) as usize).unwrap();
        let mapping = transport.domain().map(vec![Arc::clone(&buffer)]);
        let base = transport.mapped_address(&buffer, 0).unwrap();
        let config = NvmeHostConfig {
            queues: QueueDemand { submitters: 1, write_queues: 0, poll_queues: 0 },
            ring_entries: 32,
            has_shadow,
            ..NvmeHostConfig::default()
        };
        let mut rig = NvmeRig {
            host: HostController::new(transport, config),
            queue: None,
            buffer,
            _mapping: mapping,
            base,
            deadline_ns: None,
            model: BTreeMap::new(),
            in_flight: BTreeMap::new(),
            interrupts: 0,
            ended: 0,
        };
        rig.host.start(now_ns());
        rig.run("the controller comes up", |rig| !rig.host.is_busy());
        assert_eq!(rig.host.state(), ControllerState::Live, "{:?}", rig.host.error());
        assert!(rig.queue.is_some(), "there is a namespace, and a queue for it");
        rig
    }

    /// Blocks of the disk.
    pub fn blocks(&self) -> u64 {
        self.host.namespaces()[0].info.capacity_sectors / u64::from(BLOCK / 512)
    }

    /// Resets the controller with I/O in flight; all requests succeed.
    pub fn reset_under_load(&mut self) {
        for slot in 0..SLOTS / 2 {
            self.submit(Op::Write, slot, slot, 0xa0 | slot as u8);
        }
        self.turn();
        assert!(self.host.reset(now_ns()));
        self.run("the controller comes up again", |rig| !rig.host.is_busy() && rig.in_flight.is_empty());
        assert_eq!(self.host.state(), ControllerState::Live, "{:?}", self.host.error());
    }

    /// Writes blocks, then reads all written blocks, several at a time.
    pub fn write_and_verify(&mut self, blocks: impl Iterator<Item = u64>, seed: u8) {
        let blocks: Vec<_> = blocks.collect();
        for op in [Op::Write, Op::Read] {
            for (number, block) in blocks.iter().enumerate() {
                let slot = number as u64 % SLOTS;
                self.run("a slot is free", |rig| !rig.in_flight.contains_key(&slot));
                self.submit(op, *block, slot, seed.wrapping_add(number as u8));
            }
            self.run("all I/O ends", |rig| rig.in_flight.is_empty());
        }
    }

    /// A flush.
    pub fn flush(&mut self) {
        self.submit(Op::Flush, 0, 0, 0);
        self.run("the flush ends", |rig| rig.in_flight.is_empty());
    }

    /// Shuts the controller down.
    pub fn remove(mut self) {
        self.host.remove(now_ns());
        self.run("the controller is shut down", |rig| !rig.host.is_busy());
        assert_eq!(self.host.transport().failure(), None);
    }

    fn submit(&mut self, op: Op, block: u64, slot: u64, byte: u8) {
        let (at, len) = (slot * u64::from(BLOCK), BLOCK as usize);
        let mut bio = Bio::with_capacity(1);
        (bio.op, bio.flags, bio.cookie) = (op, BioFlags::NO_MERGE, slot);
        if op.has_data() {
            let sectors = BLOCK / 512;
            (bio.sector, bio.sectors) = (block * u64::from(sectors), sectors);
            bio.segments.push(Segment { region: 0, offset: at, len: BLOCK });
            self.buffer.span(at, len).unwrap().fill(if op == Op::Write { byte } else { !byte });
        }
        assert!(self.in_flight.insert(slot, (op, block, byte)).is_none());
        self.queue.as_mut().unwrap().submit(bio);
    }

    fn end(&mut self, bio: &Bio) {
        assert_eq!(bio.status, Status::Ok, "{bio:?}");
        self.ended += 1;
        let (op, block, byte) = self.in_flight.remove(&bio.cookie).expect("a bio ends once");
        match op {
            Op::Write => {
                self.model.insert(block, byte);
            }
            Op::Read => {
                let mut bytes = [0; BLOCK as usize];
                self.buffer.span(bio.cookie * u64::from(BLOCK), bytes.len()).unwrap().copy_to_slice(&mut bytes);
                let expected = self.model.get(&block).copied().unwrap_or(0);
                assert!(bytes == [expected; BLOCK as usize], "block {block}: {} is not {expected}", bytes[0]);
            }
            _ => {}
        }
    }

    /// Runs all parts once. Returns whether any had work.
    fn turn(&mut self) -> bool {
        let now = now_ns();
        self.deadline_ns = self.host.advance(now);
        let mut is_busy = false;
        while let Some(event) = self.host.next_event() {
            is_busy = true;
            if let (HostEvent::Queue(_, command), Some(hw)) = (&event, &mut self.queue) {
                hw.driver_mut().queue.command(*command);
            }
        }
        if let Some(queue) = self.host.take_queue() {
            let infos = self.host.namespaces().iter().map(|found| Arc::new(found.info.clone())).collect();
            let config = HwQueueConfig { depth: usize::from(queue.depth()), bios_max: 64, ..HwQueueConfig::default() };
            let mut hw = HwQueue::with_namespaces(RigDriver { queue, base: self.base, rang: false }, infos, config);
            hw.set_memory(&mut (), Arc::new(RegionTable::new(vec![Arc::clone(&self.buffer)])));
            self.queue = Some(hw);
        }
        let Some(hw) = &mut self.queue else { return is_busy };
        let mut over = Vec::new();
        hw.reap(&mut (), now, &mut |bio| over.push(bio));
        hw.issue(&mut (), now);
        let driver = hw.driver_mut();
        let (qid, rang) = (driver.queue.qid(), std::mem::take(&mut driver.rang));
        let report = driver.queue.take_report();
        is_busy |= report.is_some() || !over.is_empty() || driver.queue.is_pending();
        if rang {
            self.host.forward_doorbells(qid, now);
        }
        if let Some(report) = report {
            self.host.queue_report(qid, report);
        }
        for bio in &over {
            self.end(bio);
        }
        is_busy
    }

    fn run(&mut self, what: &str, until: impl Fn(&NvmeRig) -> bool) {
        let limit_ns = now_ns() + PATIENCE.as_nanos() as u64;
        loop {
            let is_busy = self.turn();
            if until(self) {
                return;
            }
            let now = now_ns();
            assert!(
                now < limit_ns,
                "waited in vain: {what}: {:?} {:?}: {:?} of {:?}",
                self.host.state(),
                self.host.error(),
                self.in_flight,
                self.queue.as_mut().map(|hw| &hw.driver_mut().queue)
            );
            if is_busy {
                continue;
            }
            let queue = self.queue.as_ref().and_then(HwQueue::deadline_ns::<()>);
            let deadline_ns = [self.deadline_ns, queue].into_iter().flatten().fold(limit_ns, u64::min);
            let transport = self.host.transport();
            let mut fds: Vec<_> = transport.eventfds().iter().map(|event| PollFd::new(event, PollFlags::IN)).collect();
            wait_for(&mut fds, Some(Duration::from_nanos(deadline_ns.saturating_sub(now)))).unwrap();
            drop(fds);
            self.interrupts += transport.eventfds().iter().map(|event| u64::from(event.take())).sum::<u64>();
        }
    }
}
