//! A device with the time of a model and the bytes of memory, under the real core.
//!
//! Its queues share the model under a lock; each passes commands on and runs the model up to the given time, so lanes
//! in real time and simulations in virtual time drive it alike. Data moves when a command is taken, and the completion
//! waits. It is not a device to measure the core with.
//!
//! One that [keeps](Keeps::Medium) the medium separately knows the effect of a power failure: only data that has
//! reached the medium remains. All other content of its memory is the cache's.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blkyard_mem::{RegionTable, Span};
use blkyard_mq::{Batch, BioFlags, BlockDevice, Cid, Cids, DeviceInfo, Done, Driver, RamStore, SECTOR_SHIFT, Status};

use crate::model::{Access, Model, ModelEvent};

/// Data that a modelled device keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeps {
    /// None: reads leave the memory unchanged.
    Nothing,
    /// Its bytes.
    Bytes,
    /// Its bytes, and apart from them those that are on the medium.
    Medium,
}

/// A device that takes as long as a model says.
#[derive(Debug)]
pub struct Modelled {
    info: DeviceInfo,
    store: Option<RamStore>,
    shared: Arc<Mutex<SharedCore>>,
}

#[derive(Debug)]
struct SharedCore {
    model: Model,
    medium: Option<RamStore>,
    /// By queue: completions not reaped.
    over: Vec<Vec<Cid>>,
    /// Power failures so far.
    cuts: u64,
}

/// One queue of it.
#[derive(Debug)]
pub struct ModelledQueue {
    shared: Arc<Mutex<SharedCore>>,
    store: Option<RamStore>,
    number: u64,
    cids: Cids,
    /// By tag: commands at the device.
    out: Box<[Option<Cid>]>,
    in_flight: usize,
    /// Power failures that it knows of.
    cuts: u64,
}

impl Modelled {
    /// A device as `info` describes it, all zeroes. Memory is taken as it is written.
    ///
    /// # Errors
    /// The address space has no room for it.
    pub fn new(info: DeviceInfo, model: Model, keeps: Keeps) -> io::Result<Modelled> {
        let store = |wanted: bool| wanted.then(|| RamStore::new(info.capacity_sectors)).transpose();
        let (bytes, medium) = (store(keeps != Keeps::Nothing)?, store(keeps == Keeps::Medium)?);
        let shared = SharedCore { model, medium, over: Vec::new(), cuts: 0 };
        Ok(Modelled { info, store: bytes, shared: Arc::new(Mutex::new(shared)) })
    }

    /// A power failure with immediate restart. Commands in flight fail, and data that had not reached the medium is
    /// lost.
    ///
    /// # Panics
    /// If it does not [keep](Keeps::Medium) the medium separately.
    pub fn cut_power(&self, now_ns: u64) {
        let mut shared = lock(&self.shared);
        shared.run(self.store.as_ref(), now_ns);
        shared.model.cut_power(now_ns);
        shared.cuts += 1;
        shared.over.iter_mut().for_each(Vec::clear);
        let (Some(store), Some(medium)) = (&self.store, &shared.medium) else {
            panic!("{}: power fails where nobody knows what it leaves", self.info.name)
        };
        copy(medium, store, 0, self.info.capacity_sectors);
    }

    /// Reads one sector, past the queues.
    ///
    /// # Panics
    /// If there is no such sector, or no bytes are kept.
    pub fn read(&self, sector: u64, to: &mut [u8; 512]) {
        let span = self.store.as_ref().and_then(|store| store.region().span(sector << SECTOR_SHIFT, 512));
        let Some(span) = span else { panic!("{} has no sector {sector}", self.info.name) };
        span.copy_to_slice(to);
    }
}

impl BlockDevice for Modelled {
    type Queue = ModelledQueue;

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn queue(&self, depth: usize) -> ModelledQueue {
        let mut shared = lock(&self.shared);
        shared.over.push(Vec::with_capacity(depth));
        ModelledQueue {
            number: shared.over.len() as u64 - 1,
            cuts: shared.cuts,
            shared: Arc::clone(&self.shared),
            store: self.store.clone(),
            cids: Cids::new(depth),
            out: vec![None; depth].into(),
            in_flight: 0,
        }
    }
}

fn lock(shared: &Mutex<SharedCore>) -> MutexGuard<'_, SharedCore> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn copy(from: &RamStore, to: &RamStore, sector: u64, sectors: u64) {
    let (at, len) = (sector << SECTOR_SHIFT, (sectors << SECTOR_SHIFT) as usize);
    if let (Some(from), Some(to)) = (from.region().span(at, len), to.region().span(at, len)) {
        to.copy_from(&from);
    }
}

impl SharedCore {
    /// Lets the model run up to now.
    fn run(&mut self, store: Option<&RamStore>, now_ns: u64) {
        let SharedCore { model, medium, over, .. } = self;
        model.run(now_ns, |event| match event {
            ModelEvent::Done { id, .. } => over[(id >> 32) as usize].push(Cid(id as u32)),
            ModelEvent::OnMedium { sector, sectors } => {
                if let (Some(store), Some(medium)) = (store, &*medium) {
                    copy(store, medium, sector, sectors);
                }
            }
        });
    }
}

impl<Cx: ?Sized> Driver<Cx> for ModelledQueue {
    fn queue_rqs(&mut self, _cx: &mut Cx, memory: &RegionTable, batch: &mut Batch<'_>) {
        let now_ns = batch.now_ns();
        let shared = Arc::clone(&self.shared);
        let mut shared = lock(&shared);
        shared.run(self.store.as_ref(), now_ns);
        if self.in_flight == 0 {
            self.cuts = shared.cuts;
        }
        // Commands lost in the power failure are reported first.
        while shared.model.room() > 0 && self.cuts == shared.cuts {
            let Some((tag, request, segments)) = batch.take_inline() else { break };
            let status = self
                .store
                .as_ref()
                .map_or(Status::Ok, |store| store.transfer(memory, request, segments, Span::default()));
            if !status.is_ok() {
                batch.complete(tag, status);
                continue;
            }
            let mut access = Access {
                id: 0,
                op: request.op(),
                fua: request.flags().contains(BioFlags::FUA),
                sector: request.sector(),
                sectors: request.sectors(),
            };
            let place = tag.index();
            let cid = self.cids.park(tag);
            access.id = self.number << 32 | u64::from(cid.0);
            self.out[place] = Some(cid);
            self.in_flight += 1;
            shared.model.take(now_ns, access);
        }
    }

    fn poll(&mut self, _cx: &mut Cx, _memory: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        let shared = Arc::clone(&self.shared);
        let mut shared = lock(&shared);
        shared.run(self.store.as_ref(), now_ns);
        if self.cuts != shared.cuts {
            self.cuts = shared.cuts;
            self.fail_all(done);
        }
        for cid in shared.over[self.number as usize].drain(..) {
            self.end(cid, Status::Ok, done);
        }
    }

    fn deadline_ns(&self) -> Option<u64> {
        if self.in_flight == 0 {
            return None;
        }
        let shared = lock(&self.shared);
        let now = self.cuts != shared.cuts || !shared.over[self.number as usize].is_empty();
        if now { Some(0) } else { shared.model.next_ns() }
    }
}

impl ModelledQueue {
    fn end(&mut self, cid: Cid, status: Status, done: &mut Done<'_>) {
        let Ok(tag) = self.cids.redeem(cid) else { unreachable!("the model has what is in flight, once") };
        self.out[tag.index()] = None;
        self.in_flight -= 1;
        done.complete(tag, status);
    }

    /// The power has failed with all this in flight.
    fn fail_all(&mut self, done: &mut Done<'_>) {
        for place in 0..self.out.len() {
            if let Some(cid) = self.out[place] {
                self.end(cid, Status::Io, done);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DiskModel, RotaryDisk};
    use blkyard_mq::{Bio, HwQueue, HwQueueConfig, Op, Region, Segment};

    struct ModelCore {
        device: Modelled,
        queue: HwQueue<ModelledQueue>,
        memory: Arc<Region>,
        now_ns: u64,
    }

    impl ModelCore {
        fn new() -> ModelCore {
            let info =
                DeviceInfo { capacity_sectors: 1 << 20, volatile_cache: true, fua: true, ..DeviceInfo::default() };
            let model = Model::Disk(Box::new(RotaryDisk::new(DiskModel::DESKTOP_2012, 1)));
            let device = Modelled::new(info.clone(), model, Keeps::Medium).unwrap();
            let mut queue =
                HwQueue::new(device.queue(64), Arc::new(info), HwQueueConfig { depth: 64, ..HwQueueConfig::default() });
            let memory = Region::anonymous(4096).unwrap();
            queue.set_memory(&mut (), Arc::new(RegionTable::new(vec![Arc::clone(&memory)])));
            ModelCore { device, queue, memory, now_ns: 0 }
        }

        fn submit(&mut self, op: Op, flags: BioFlags, sector: u64) {
            let mut bio = Bio::with_capacity(1);
            (bio.op, bio.flags, bio.sector) = (op, flags, sector);
            if op != Op::Flush {
                bio.sectors = 8;
                bio.segments.push(Segment { region: 0, offset: 0, len: 4096 });
            }
            self.queue.submit(bio);
        }

        /// Advances time from one deadline to the next until all requests have completed; returns their statuses.
        fn drain(&mut self) -> Vec<Status> {
            let mut ended = Vec::new();
            self.queue.issue(&mut (), self.now_ns);
            while !self.queue.is_idle() {
                let due_ns = self.queue.deadline_ns::<()>().expect("somebody must know when to look");
                self.now_ns = self.now_ns.max(due_ns);
                self.queue.reap(&mut (), self.now_ns, &mut |bio| ended.push(bio.status));
                self.queue.issue(&mut (), self.now_ns);
            }
            ended
        }

        fn byte(&self, sector: u64) -> u8 {
            let mut bytes = [0; 512];
            self.device.read(sector, &mut bytes);
            bytes[0]
        }
    }

    #[test]
    fn a_power_failure_leaves_what_was_flushed_and_what_was_forced_through() {
        let mut bench = ModelCore::new();
        bench.memory.span(0, 4096).unwrap().fill(7);
        bench.submit(Op::Write, BioFlags::empty(), 0);
        assert_eq!(bench.drain(), [Status::Ok]);
        bench.submit(Op::Flush, BioFlags::empty(), 0);
        bench.drain();
        bench.submit(Op::Write, BioFlags::empty(), 800);
        bench.submit(Op::Write, BioFlags::FUA, 1600);
        assert_eq!(bench.drain(), [Status::Ok, Status::Ok]);
        assert_eq!([0, 800, 1600].map(|sector| bench.byte(sector)), [7, 7, 7]);
        bench.submit(Op::Read, BioFlags::empty(), 500_000);
        bench.queue.issue(&mut (), bench.now_ns);
        bench.device.cut_power(bench.now_ns);
        assert_eq!(bench.drain(), [Status::Io]);
        assert_eq!([0, 800, 1600].map(|sector| bench.byte(sector)), [7, 0, 7]);
        // A failure without requests in flight has no effect on them.
        bench.device.cut_power(bench.now_ns);
        bench.submit(Op::Read, BioFlags::empty(), 800);
        assert_eq!(bench.drain(), [Status::Ok]);
    }

    #[test]
    fn more_than_the_device_takes_waits_in_its_order_until_there_is_room() {
        let mut bench = ModelCore::new();
        (0..100).for_each(|number| bench.submit(Op::Read, BioFlags::NO_MERGE, number * 8000));
        bench.queue.issue(&mut (), 0);
        assert_eq!(bench.queue.in_flight(), 31);
        assert_eq!(bench.drain().len(), 100);
        assert!((50_000_000..1_500_000_000).contains(&bench.now_ns), "{}", bench.now_ns);
    }
}
