//! Devices under test, of any kind on one lane, and one whose completions wait for the test.

use std::collections::VecDeque;
use std::path::Path;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use blkyard_mem::DmaDomain;
use blkyard_mq::{
    Batch, BioFlags, BlockDevice, DeviceInfo, Done, Driver, NullConfig, NullDevice, Op, QueueLimits, RamDevice,
    RegionTable, Status, Tag,
};
use blkyard_os::{FileConfig, FileDevice, Ring};

/// A disk of 8 MiB that can do everything.
pub fn disk_info() -> DeviceInfo {
    let limits = QueueLimits { discard_sectors_max: 8192, write_zeroes_sectors_max: 8192, ..QueueLimits::default() };
    DeviceInfo {
        name: "test".into(),
        capacity_sectors: 16384,
        limits,
        read_only: false,
        volatile_cache: true,
        fua: true,
        ..DeviceInfo::default()
    }
}

/// A device of any kind, as a maker of queues.
#[derive(Clone)]
pub struct AnyDevice {
    pub info: DeviceInfo,
    /// Where it reaches memory.
    pub domains: Vec<Arc<DmaDomain>>,
    make: Arc<dyn Fn(usize) -> AnyQueue + Send + Sync>,
}

/// A queue of any kind.
pub struct AnyQueue(Box<dyn Driver<Ring> + Send>);

impl AnyDevice {
    /// A disk in memory, answering at once or after a time.
    pub fn ram(latency_ns: u64) -> AnyDevice {
        AnyDevice::ram_with(disk_info(), latency_ns)
    }

    pub fn ram_with(info: DeviceInfo, latency_ns: u64) -> AnyDevice {
        let device = RamDevice::new(info.clone(), NullConfig { latency_ns, bytes_per_s: 0 }).unwrap();
        AnyDevice { info, domains: Vec::new(), make: Arc::new(move |depth| AnyQueue(Box::new(device.queue(depth)))) }
    }

    /// A file, once it is unlocked.
    pub fn file(path: &Path) -> AnyDevice {
        let mut device = None;
        super::until("the image is free", || {
            device = FileDevice::open(FileConfig::new(path)).ok();
            device.is_some()
        });
        let Some(device) = device else { unreachable!("waited for") };
        AnyDevice {
            info: device.info().clone(),
            domains: Vec::new(),
            make: Arc::new(move |depth| AnyQueue(Box::new(device.queue(depth)))),
        }
    }

    /// A null device.
    pub fn null(latency_ns: u64) -> AnyDevice {
        let device = NullDevice::new(disk_info(), NullConfig { latency_ns, bytes_per_s: 0 });
        AnyDevice {
            info: disk_info(),
            domains: Vec::new(),
            make: Arc::new(move |depth| AnyQueue(Box::new(device.queue(depth)))),
        }
    }

    /// One that records, and completes nothing while its gate is shut.
    pub fn gated(gate: &Arc<Gate>) -> AnyDevice {
        let gate = Arc::clone(gate);
        let make = move |_| {
            AnyQueue(Box::new(GatedQueue { gate: Arc::clone(&gate), held: VecDeque::new(), mapped: 0, now_ns: 0 }))
        };
        AnyDevice { info: disk_info(), domains: Vec::new(), make: Arc::new(make) }
    }

    pub fn queue(&self, depth: usize) -> AnyQueue {
        (self.make)(depth)
    }
}

impl Driver<Ring> for AnyQueue {
    fn queue_rqs(&mut self, cx: &mut Ring, memory: &RegionTable, batch: &mut Batch<'_>) {
        self.0.queue_rqs(cx, memory, batch);
    }

    fn poll(&mut self, cx: &mut Ring, memory: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        self.0.poll(cx, memory, done, now_ns);
    }

    fn set_memory(&mut self, cx: &mut Ring, memory: &RegionTable) {
        self.0.set_memory(cx, memory);
    }

    fn change_memory(&mut self, cx: &mut Ring, memory: &RegionTable) {
        self.0.change_memory(cx, memory);
    }

    fn deadline_ns(&self) -> Option<u64> {
        self.0.deadline_ns()
    }
}

/// Events of a recording device, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
    /// A request came.
    Taken(Op, BioFlags, u64),
    /// It was finished.
    Ended(Op, u64),
    /// Memory of so many regions was given to a queue without requests.
    Memory(usize),
    /// The same while it runs.
    Changed(usize),
}

/// The test's handle on a recording device.
#[derive(Debug, Default)]
pub struct Gate {
    shut: AtomicBool,
    /// Requests that may pass although it is shut.
    admitted: AtomicUsize,
    held: AtomicUsize,
    polls: AtomicUsize,
    /// Number of the request that panics, counted from one; zero for none.
    panics: AtomicUsize,
    seen: Mutex<Vec<Seen>>,
}

impl Gate {
    pub fn open() -> Arc<Gate> {
        Arc::default()
    }

    pub fn shut() -> Arc<Gate> {
        let gate = Gate::open();
        gate.set_shut(true);
        gate
    }

    pub fn set_shut(&self, shut: bool) {
        self.shut.store(shut, SeqCst);
    }

    /// Lets this number of requests pass although it is shut.
    pub fn admit(&self, requests: usize) {
        self.admitted.fetch_add(requests, SeqCst);
    }

    fn lets_pass(&self) -> bool {
        let take = |left: usize| left.checked_sub(1);
        !self.shut.load(SeqCst) || self.admitted.fetch_update(SeqCst, SeqCst, take).is_ok()
    }

    /// Requests that wait behind the gate.
    pub fn held(&self) -> usize {
        self.held.load(SeqCst)
    }

    /// Number of polls by the core.
    pub fn polls(&self) -> usize {
        self.polls.load(SeqCst)
    }

    /// The next request finds a bug: its lane ends.
    pub fn plant_bug(&self) {
        self.plant_bug_at(1);
    }

    /// The `number`-th request from now on does, counted from one.
    pub fn plant_bug_at(&self, number: usize) {
        self.panics.store(number, SeqCst);
    }

    fn meets_bug(&self) -> bool {
        self.panics.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)) == Ok(1)
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    pub fn forget(&self) {
        self.seen.lock().unwrap().clear();
    }

    fn saw(&self, seen: Seen) {
        self.seen.lock().unwrap().push(seen);
    }
}

struct GatedQueue {
    gate: Arc<Gate>,
    held: VecDeque<(Tag, Op, u64)>,
    mapped: usize,
    now_ns: u64,
}

impl Driver<Ring> for GatedQueue {
    fn queue_rqs(&mut self, _: &mut Ring, _: &RegionTable, batch: &mut Batch<'_>) {
        self.now_ns = batch.now_ns();
        while let Some((tag, request, _)) = batch.take() {
            let (op, flags, sector) = (request.op(), request.flags(), request.sector());
            self.held.push_back((tag, op, sector));
            assert!(!self.gate.meets_bug(), "a bug that the test planted");
            self.gate.saw(Seen::Taken(op, flags, sector));
            self.gate.held.fetch_add(1, SeqCst);
        }
    }

    fn poll(&mut self, _: &mut Ring, memory: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        self.now_ns = now_ns;
        self.gate.polls.fetch_add(1, SeqCst);
        while !self.held.is_empty()
            && self.gate.lets_pass()
            && let Some((tag, op, sector)) = self.held.pop_front()
        {
            let (_, mut segments) = done.request(&tag);
            let there = segments.all(|segment| memory.resolve(segment).is_some());
            self.gate.saw(Seen::Ended(op, sector));
            self.gate.held.fetch_sub(1, SeqCst);
            done.complete(tag, if there { Status::Ok } else { Status::Invalid });
        }
    }

    fn set_memory(&mut self, _: &mut Ring, memory: &RegionTable) {
        assert!(self.held.is_empty(), "memory changes under requests in flight");
        self.mapped = memory.iter().count();
        self.gate.saw(Seen::Memory(self.mapped));
    }

    fn change_memory(&mut self, _: &mut Ring, memory: &RegionTable) {
        self.mapped = memory.iter().count();
        self.gate.saw(Seen::Changed(self.mapped));
    }

    fn deadline_ns(&self) -> Option<u64> {
        // Polls the gate that often.
        (!self.held.is_empty()).then_some(self.now_ns + 200_000)
    }
}

impl Drop for GatedQueue {
    fn drop(&mut self) {
        // A lane that ends by a panic takes its requests along; their tags must not complain as well.
        self.held.drain(..).for_each(|(tag, ..)| std::mem::forget(tag));
    }
}
