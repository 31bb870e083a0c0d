//! A client of an NVMe export over vfio-user that runs in the test: the NVMe host of this project, with several queues
//! on one thread. It uses the first blocks of the disk.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use blkyard_attach::{VfioUserConfig, VfioUserController};
use blkyard_mem::{DmaMapping, Region, RegionTable, Segment};
use blkyard_mq::{Batch, Bio, BioFlags, DeviceInfo, Done, Driver, HwQueue, HwQueueConfig, Op, Status, TimedOut};
use blkyard_nvme::{
    AdminData, ControllerState, HostController, HostEvent, IoQueue, NvmeHostConfig, QueueDemand, ScannedNamespace, Sqe,
};
use blkyard_os::{SystemClock, now_ns};

use crate::common::{IDLE_PAUSE, inspect, run};

/// Longer than any step of a test on a busy machine.
const PATIENCE: Duration = Duration::from_mins(2);
/// Sectors and bytes of a bio.
const SECTORS: u32 = 16;
const BIO_BYTES: u64 = SECTORS as u64 * 512;
/// Bios in flight, each with its part of the buffer.
const BIOS: u64 = 32;
/// Maximum namespaces, each with its parts of the buffer.
const NAMESPACES: u64 = 3;
/// Time after which a command is late, as in Linux.
const LATE_AFTER: Duration = Duration::from_secs(30);
/// Bytes of a daemon's state in a report.
const REPORT_BYTES: usize = 16 << 10;

struct GuestQueue {
    queue: IoQueue,
    /// Controller address of the buffer.
    base: u64,
    /// Whether a doorbell is to be written by message.
    is_rung: bool,
}

impl Driver<()> for GuestQueue {
    fn queue_rqs(&mut self, (): &mut (), _memory: &RegionTable, batch: &mut Batch<'_>) {
        let base = self.base;
        self.is_rung |= self.queue.queue(batch, |segment| Some(base + segment.offset));
    }

    fn poll(&mut self, (): &mut (), _memory: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        self.is_rung |= self.queue.poll(done, now_ns);
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

/// A client with an initialised controller.
pub struct NvmeGuest {
    /// Its socket, in the folder of the daemon.
    socket: PathBuf,
    late_after: Duration,
    /// How often a command was late.
    late: usize,
    /// The longest round, and when it began.
    longest: (Duration, Option<Instant>),
    controller: HostController<VfioUserController>,
    queues: BTreeMap<u16, HwQueue<GuestQueue>>,
    buffer: Arc<Region>,
    base: u64,
    _mapping: DmaMapping,
    in_flight: usize,
    /// Bios in flight of each namespace.
    in_flight_of: [usize; NAMESPACES as usize],
    /// Whether the disk was changed.
    is_changed: bool,
    /// Index of the namespace in use.
    namespace: u16,
    /// Results of completed admin commands.
    results: Vec<u64>,
}

impl NvmeGuest {
    /// Connects, and creates up to this number of I/O queues.
    pub fn connect(socket: &Path, queues: u16, has_shadow: bool) -> NvmeGuest {
        NvmeGuest::connect_with(socket, queues, has_shadow, LATE_AFTER)
    }

    /// The same with another time after which a command is late.
    pub fn connect_with(socket: &Path, queues: u16, has_shadow: bool, late_after: Duration) -> NvmeGuest {
        let mut config = VfioUserConfig::new(socket, Arc::new(SystemClock)).unwrap();
        config.reply_max = PATIENCE;
        let transport = VfioUserController::open(&config).unwrap();
        let buffer = Region::shared((NAMESPACES * BIOS * BIO_BYTES) as usize).unwrap();
        let mapping = transport.domain().map(vec![Arc::clone(&buffer)]);
        let base = transport.mapped_address(&buffer, 0).unwrap();
        let config = NvmeHostConfig {
            queues: QueueDemand { submitters: queues, write_queues: 0, poll_queues: 0 },
            ring_entries: 32,
            has_shadow,
            ..NvmeHostConfig::default()
        };
        let controller = HostController::new(transport, config);
        let queues = BTreeMap::new();
        let mut guest = NvmeGuest {
            socket: socket.into(),
            late_after,
            late: 0,
            longest: (Duration::ZERO, None),
            controller,
            queues,
            buffer,
            base,
            _mapping: mapping,
            in_flight: 0,
            in_flight_of: [0; NAMESPACES as usize],
            is_changed: false,
            namespace: 0,
            results: Vec::new(),
        };
        guest.controller.start(now_ns());
        guest.run("the controller is live", |guest| {
            guest.controller.state() == ControllerState::Live && !guest.queues.is_empty()
        });
        guest
    }

    /// How often a command was late.
    pub fn late(&self) -> usize {
        self.late
    }

    /// Number of I/O queues.
    pub fn queues(&self) -> usize {
        self.queues.len()
    }

    /// Uses the namespace of this index from now on.
    pub fn select(&mut self, namespace: u16) -> &mut NvmeGuest {
        self.namespace = namespace;
        self
    }

    /// Number of namespaces.
    pub fn namespaces(&self) -> usize {
        self.controller.namespaces().len()
    }

    /// Size of the disk.
    pub fn sectors(&self) -> u64 {
        self.controller.namespaces()[usize::from(self.namespace)].info.capacity_sectors
    }

    pub fn serial(&self) -> String {
        String::from_utf8_lossy(&self.controller.identify().serial).trim_end().to_owned()
    }

    /// Whether it writes doorbells without messages.
    pub fn has_shared_doorbells(&mut self) -> bool {
        self.controller.transport().shared_doorbells().is_some()
    }

    /// Waits until the disk has this size.
    pub fn wait_for_sectors(&mut self, sectors: u64) {
        self.run("the disk changes its size", |guest| guest.sectors() == sectors);
    }

    /// Writes a pattern by all queues, and reads each part back by another queue.
    pub fn check(&mut self, seed: u8) {
        self.write(seed);
        self.verify(seed);
    }

    pub fn write(&mut self, seed: u8) {
        self.fill(seed);
        self.submit_all(Op::Write, 0);
        self.finish();
    }

    pub fn flush(&mut self) {
        self.submit(1, Op::Flush, 0);
        self.finish();
    }

    /// Reads what was written with this seed, by any client.
    pub fn verify(&mut self, seed: u8) {
        self.fill(!seed);
        self.submit_all(Op::Read, 1);
        self.finish();
        for number in 0..BIOS {
            let mut bytes = vec![0; BIO_BYTES as usize];
            self.buffer.span(self.offset(number), bytes.len()).unwrap().copy_to_slice(&mut bytes);
            assert!(bytes == pattern(seed, number), "part {number} is not what was written");
        }
    }

    /// Submits reads of all parts, and waits for none.
    pub fn begin_reads(&mut self) {
        self.submit_all(Op::Read, 0);
        self.round();
    }

    /// Closes the connection with requests in flight.
    pub fn die(mut self) {
        // The drop of a queue would wait for its requests.
        std::mem::forget(std::mem::take(&mut self.queues));
    }

    fn fill(&self, seed: u8) {
        for number in 0..BIOS {
            self.buffer.span(self.offset(number), BIO_BYTES as usize).unwrap().copy_from_slice(&pattern(seed, number));
        }
    }

    /// Submits a bio for each part of the buffer, distributed over the queues from this one on.
    fn submit_all(&mut self, op: Op, first: u64) {
        for number in 0..BIOS {
            self.submit(1 + ((number + first) % self.queues.len() as u64) as u16, op, number);
        }
    }

    fn submit(&mut self, qid: u16, op: Op, number: u64) {
        let mut bio = Bio::with_capacity(1);
        (bio.op, bio.flags, bio.namespace) = (op, BioFlags::NO_MERGE, self.namespace);
        if op.has_data() {
            (bio.sector, bio.sectors) = (number * u64::from(SECTORS), SECTORS);
            bio.segments.push(Segment { region: 0, offset: self.offset(number), len: BIO_BYTES as u32 });
        }
        self.in_flight += 1;
        self.in_flight_of[usize::from(self.namespace)] += 1;
        self.queues.get_mut(&qid).unwrap().submit(bio);
    }

    /// Waits until the I/O of the namespace in use has ended.
    fn finish(&mut self) {
        self.run("all I/O ends", |guest| guest.in_flight_of[usize::from(guest.namespace)] == 0);
    }

    /// Submits so many reads to the namespace in use, apart from each other so that they are not merged, and waits for
    /// none.
    pub fn begin_some_reads(&mut self, count: u64) {
        (0..count).for_each(|number| self.submit(1, Op::Read, 2 * number));
        self.round();
    }

    /// Sends an Abort for each command of queue 1. Returns how many were aborted; they are submitted again.
    pub fn abort_all(&mut self) -> usize {
        let queue = &self.queues.get_mut(&1).unwrap().driver_mut().queue;
        // In whichever slots they are: a slot is reused first that was freed last.
        let cids: Vec<_> = (0..queue.depth()).filter_map(|slot| queue.pair().cid(slot)).collect();
        cids.into_iter().filter(|cid| self.abort(*cid)).count()
    }

    fn abort(&mut self, cid: u16) -> bool {
        self.controller.submit_admin(Sqe::abort(1, cid), AdminData::None, 0, u64::MAX, now_ns()).unwrap();
        self.run("the abort is complete", |guest| !guest.results.is_empty());
        self.results.pop() == Some(0)
    }

    /// Number of bios in flight of the namespace in use.
    pub fn in_flight(&self) -> usize {
        self.in_flight_of[usize::from(self.namespace)]
    }

    /// Waits until the I/O of all namespaces has ended.
    pub fn finish_all(&mut self) {
        self.run("all I/O ends", |guest| guest.in_flight == 0);
    }

    fn offset(&self, number: u64) -> u64 {
        (u64::from(self.namespace) * BIOS + number) * BIO_BYTES
    }

    /// Runs all parts once, and judges late commands.
    fn round(&mut self) {
        let began = Instant::now();
        self.turn();
        self.longest = self.longest.max((began.elapsed(), Some(began)));
        for (qid, hw) in &mut self.queues {
            let late = hw.driver_mut().queue.take_late().count();
            self.late += late;
            // They may have completed while the daemon was asked.
            let is_lost = late > 0 && !has_at_device(&self.socket, *qid, late);
            if is_lost && !hw.driver_mut().queue.is_pending() {
                let qid = *qid;
                panic!("{late} commands of queue {qid} are late, and not at the device\n{}", self.report());
            }
        }
    }

    /// What both sides know of commands that do not complete.
    fn report(&mut self) -> String {
        let positions = self.queues.values_mut().map(|hw| format!("{:?}\n", hw.driver_mut().queue.pair().positions()));
        let positions: String = positions.collect();
        let (took, began) = self.longest;
        let (ago, state) = (began.map(|began| began.elapsed()), self.controller.state());
        let daemon = run(self.socket.parent().unwrap(), &["inspect", "--control", "c"]);
        let daemon = [daemon.stdout, daemon.stderr].concat();
        let daemon = String::from_utf8_lossy(&daemon[..daemon.len().min(REPORT_BYTES)]).into_owned();
        format!("{positions}{state:?}; the longest round took {took:?} and began {ago:?} ago\n{daemon}")
    }

    /// A namespace as this client uses it.
    fn info(&self, found: &ScannedNamespace) -> Arc<DeviceInfo> {
        Arc::new(DeviceInfo { timeout_ns: self.late_after.as_nanos() as u64, ..found.info.clone() })
    }

    fn turn(&mut self) {
        let now = now_ns();
        self.controller.advance(now);
        while let Some(event) = self.controller.next_event() {
            match event {
                HostEvent::Queue(qid, command) => {
                    self.queues.get_mut(&qid).unwrap().driver_mut().queue.command(command);
                }
                HostEvent::NamespacesChanged => self.is_changed = true,
                HostEvent::Completed { status, result, .. } => {
                    assert!(status.is_success(), "{status:?}");
                    self.results.push(result);
                }
                _ => {}
            }
        }
        while let Some(queue) = self.controller.take_queue() {
            let infos = self.controller.namespaces().iter().map(|found| self.info(found)).collect();
            let (qid, depth) = (queue.qid(), usize::from(queue.depth()));
            let driver = GuestQueue { queue, base: self.base, is_rung: false };
            let config = HwQueueConfig { depth, bios_max: 64, ..HwQueueConfig::default() };
            let mut hw = HwQueue::with_namespaces(driver, infos, config);
            hw.set_memory(&mut (), Arc::new(RegionTable::new(vec![Arc::clone(&self.buffer)])));
            self.queues.insert(qid, hw);
        }
        // Limits change without I/O in flight only.
        if self.in_flight == 0 && std::mem::take(&mut self.is_changed) {
            for (number, found) in (0..).zip(self.controller.namespaces()) {
                let info = self.info(found);
                self.queues.values_mut().for_each(|hw| hw.set_info(number, Arc::clone(&info)));
            }
        }
        for (qid, hw) in &mut self.queues {
            hw.reap(&mut (), now, &mut |bio| {
                assert_eq!(bio.status, Status::Ok, "{:?} at {}", bio.op, bio.sector);
                self.in_flight -= 1;
                self.in_flight_of[usize::from(bio.namespace)] -= 1;
            });
            hw.issue(&mut (), now);
            if std::mem::take(&mut hw.driver_mut().is_rung) {
                self.controller.forward_doorbells(*qid, now);
            }
            if let Some(report) = hw.driver_mut().queue.take_report() {
                self.controller.queue_report(*qid, report);
            }
        }
    }

    fn run(&mut self, what: &str, holds: impl Fn(&NvmeGuest) -> bool) {
        let limit = Instant::now() + PATIENCE;
        while !holds(self) {
            self.round();
            assert_eq!(self.controller.error(), None);
            assert!(Instant::now() < limit, "timed out: {what}\n{}", self.report());
            std::thread::sleep(IDLE_PAUSE);
        }
    }
}

/// Whether the daemon has passed all commands of a queue on to its device, at least this number: then none is lost, and
/// the device is slow. The daemon's control socket is `c`.
fn has_at_device(socket: &Path, qid: u16, commands: usize) -> bool {
    let (folder, name) = (socket.parent().unwrap(), socket.file_name().unwrap().to_str().unwrap());
    let daemon = inspect(folder, &["exports"]);
    let mut exports = daemon["exports"].as_array().into_iter().flatten();
    let export = exports.find(|export| export["name"] == format!("vfio-user:{name}"));
    let queues = export.map_or(&serde_json::Value::Null, |export| &export["queues"]);
    let queue = &queues[usize::from(qid) - 1];
    // Several queues may share a hardware queue, which one of them shows.
    let now = &queue["shown_with"].as_u64().map_or(queue, |other| &queues[other as usize])["now"];
    let [bios, in_flight, waiting, dispatch] =
        ["bios", "in_flight", "waiting", "dispatch"].map(|key| now[key].as_u64().unwrap_or(u64::MAX));
    now["bios"].is_u64() && bios >= commands as u64 && in_flight > 0 && waiting + dispatch == 0
}

/// Bytes of a part, which differ between and within parts.
fn pattern(seed: u8, number: u64) -> Vec<u8> {
    (0..BIO_BYTES).map(|at| seed ^ (number * 131 + at / 512 * 17 + at) as u8).collect()
}

/// A client that writes and verifies until it is told to stop.
pub struct NvmeLoad {
    thread: JoinHandle<NvmeGuest>,
    stops: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
}

impl NvmeLoad {
    pub fn start(socket: PathBuf, queues: u16) -> NvmeLoad {
        let (stops, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stop, done) = (Arc::clone(&stops), Arc::clone(&rounds));
        let thread = std::thread::spawn(move || {
            let mut guest = NvmeGuest::connect(&socket, queues, true);
            while !stop.load(Relaxed) {
                guest.check(done.fetch_add(1, Relaxed) as u8);
            }
            guest
        });
        let load = NvmeLoad { thread, stops, rounds };
        load.wait_for_rounds(1);
        load
    }

    /// Waits until this number of further rounds have begun.
    pub fn wait_for_rounds(&self, rounds: u64) {
        let (wanted, begin) = (self.rounds.load(Relaxed) + rounds, Instant::now());
        while self.rounds.load(Relaxed) < wanted {
            assert!(!self.thread.is_finished(), "the client has failed");
            assert!(begin.elapsed() < PATIENCE, "the client's I/O does not continue");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends the load, which must have succeeded; returns the client.
    pub fn stop(self) -> NvmeGuest {
        self.stops.store(true, Relaxed);
        self.thread.join().expect("no I/O failed")
    }
}
