//! A minimal protocol on the core of the exports, without vhost-user or virtio.
//!
//! A ring is a pair of lists in this process, under a lock. A connection takes commands of two bytes, operation and
//! queue, and answers each with nine bytes: result and a number.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};

use blkyard_export::{
    Accepted, AwaitedFd, BioFeed, Changed, ExportConfig, ExportLog, ExportedDisk, FrontEndSession, QueueSession,
    QueueSignals, RingView, SessionEnd, SessionStep, Suspension,
};
use blkyard_mem::{Region, RegionTable, Segment};
use blkyard_mq::{Bio, BioFlags, DeviceInfo, Op, SECTOR_SHIFT, SignalEventfd, Status};
use blkyard_sys::{EventFd, EventFlags};

/// Reported ring size, entries.
const ENTRIES: u16 = 64;

/// Operations of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MiniOp {
    Read,
    Write,
    /// Completed at once.
    Identify,
    /// Invalid operation.
    Nonsense,
}

/// A request: one sector, at the same number in the ring's memory.
#[derive(Clone, Copy, Debug)]
pub struct MiniRequest {
    pub id: u16,
    pub op: MiniOp,
    pub sector: u64,
    pub slot: u64,
}

/// A ring and its memory, shared by both sides.
pub struct MiniRing {
    state: Mutex<MiniState>,
    memory: Arc<RegionTable>,
    pub kick: Arc<EventFd>,
    pub call: Arc<EventFd>,
}

#[derive(Default)]
struct MiniState {
    offered: VecDeque<MiniRequest>,
    /// Ids and statuses; status zero is success.
    completed: VecDeque<(u16, u8)>,
    wants_kick: bool,
}

impl MiniRing {
    /// Rings that share one memory, like those of one front-end.
    pub fn several(count: usize) -> Vec<Arc<MiniRing>> {
        let memory = Arc::new(RegionTable::new(vec![Region::anonymous(1 << 20).unwrap()]));
        let ring = |_| {
            let (kick, call) = (Arc::new(EventFd::new().unwrap()), Arc::new(EventFd::new().unwrap()));
            Arc::new(MiniRing { state: Mutex::default(), memory: Arc::clone(&memory), kick, call })
        };
        (0..count).map(ring).collect()
    }

    fn state(&self) -> MutexGuard<'_, MiniState> {
        self.state.lock().unwrap()
    }

    /// The client's side: offers a request.
    pub fn offer(&self, request: MiniRequest) {
        let mut state = self.state();
        state.offered.push_back(request);
        if state.wants_kick {
            self.kick.signal();
        }
    }

    /// The client's side: takes a completion, if any.
    pub fn poll(&self) -> Option<(u16, u8)> {
        self.state().completed.pop_front()
    }

    /// Requests that were offered and not fetched.
    pub fn waiting(&self) -> usize {
        self.state().offered.len()
    }

    fn segment(slot: u64) -> Segment {
        Segment { region: 0, offset: slot << SECTOR_SHIFT, len: 1 << SECTOR_SHIFT }
    }

    /// The bytes of a slot.
    pub fn bytes(&self, slot: u64) -> [u8; 512] {
        let mut bytes = [0; 512];
        self.memory.resolve(MiniRing::segment(slot)).unwrap().copy_to_slice(&mut bytes);
        bytes
    }

    pub fn set_bytes(&self, slot: u64, bytes: &[u8; 512]) {
        self.memory.resolve(MiniRing::segment(slot)).unwrap().copy_from_slice(bytes);
    }
}

/// A running ring.
pub struct MiniQueueSession {
    ring: Arc<MiniRing>,
    /// Requests fetched, over all sessions.
    fetched: u64,
    in_flight: u16,
    /// Completions not yet published.
    ended: Vec<(u16, u8)>,
}

/// Setup of a ring: the ring, and its number of fetched requests.
pub type MiniSetup = (Arc<MiniRing>, u64);

impl QueueSession for MiniQueueSession {
    type Setup = MiniSetup;
    /// Data returned by [`MiniOp::Identify`].
    type Identity = [u8; 512];
    type Pending = u16;
    type Base = u64;
    type Refusals = AtomicU64;

    const SEGMENTS: usize = 1;

    fn start((ring, fetched): MiniSetup) -> Result<MiniQueueSession, String> {
        Ok(MiniQueueSession { ring, fetched, in_flight: 0, ended: Vec::new() })
    }

    fn begin<Cx: ?Sized + SignalEventfd>(&mut self, _signals: &mut QueueSignals<'_, Cx>) {
        self.disarm();
    }

    fn memory(&self) -> &Arc<RegionTable> {
        &self.ring.memory
    }

    fn kick(&self) -> Option<BorrowedFd<'_>> {
        Some(self.ring.kick.as_fd())
    }

    fn lose_kick(&mut self, error: &io::Error) {
        panic!("no kick can be listened to: {error}");
    }

    fn set_call<Cx: ?Sized + SignalEventfd>(
        &mut self,
        _call: Option<Arc<EventFd>>,
        _signals: &mut QueueSignals<'_, Cx>,
    ) {
        unreachable!("the call of a ring is its own")
    }

    fn is_broken(&self) -> bool {
        false
    }

    fn stop(&mut self, why: &str) {
        panic!("{why}");
    }

    fn is_lost(&self) -> bool {
        self.ring.memory.is_faulted()
    }

    fn left(&self) -> usize {
        0
    }

    fn round_max(&self) -> usize {
        16
    }

    fn resume(&mut self) {}

    fn fetch<D>(&mut self, feed: &mut BioFeed<'_, D, Self>, most: usize, _device_idle: bool) -> bool {
        let mut fetched = 0;
        while fetched < most {
            let Some(mut bio) = feed.take() else { break };
            let Some(request) = self.ring.state().offered.pop_front() else {
                feed.put_back(bio);
                break;
            };
            fetched += 1;
            let segment = MiniRing::segment(request.slot);
            match request.op {
                MiniOp::Read | MiniOp::Write => {
                    bio.op = if request.op == MiniOp::Read { Op::Read } else { Op::Write };
                    (bio.flags, bio.sector, bio.sectors) = (BioFlags::empty(), request.sector, 1);
                    bio.segments.clear();
                    bio.segments.push(segment);
                    self.in_flight += 1;
                    feed.submit(bio, request.id);
                }
                MiniOp::Identify => {
                    self.ring.memory.resolve(segment).unwrap().copy_from_slice(feed.identity);
                    self.ended.push((request.id, 0));
                    feed.put_back(bio);
                }
                MiniOp::Nonsense => {
                    feed.refusals.fetch_add(1, SeqCst);
                    self.ended.push((request.id, 2));
                    feed.put_back(bio);
                }
            }
        }
        self.fetched += fetched as u64;
        fetched > 0
    }

    fn end(&mut self, bio: &Bio, id: u16) {
        self.in_flight -= 1;
        self.ended.push((id, u8::from(bio.status != Status::Ok)));
    }

    fn publish<Cx: ?Sized + SignalEventfd>(&mut self, signals: &mut QueueSignals<'_, Cx>) {
        if !self.ended.is_empty() {
            self.ring.state().completed.extend(self.ended.drain(..));
            signals.call(&self.ring.call);
        }
    }

    fn end_round<Cx: ?Sized + SignalEventfd>(&mut self, _signals: &mut QueueSignals<'_, Cx>) -> bool {
        false
    }

    fn arm(&mut self) -> bool {
        let mut state = self.ring.state();
        state.wants_kick = true;
        !state.offered.is_empty()
    }

    fn disarm(&mut self) {
        self.ring.state().wants_kick = false;
    }

    fn rest<Cx: ?Sized + SignalEventfd>(mut self, _signals: &mut QueueSignals<'_, Cx>) -> u64 {
        assert!(self.in_flight == 0 && self.ended.is_empty(), "it rests once all is completed and shown");
        self.arm();
        self.fetched
    }

    fn view(&self) -> RingView {
        RingView {
            size: ENTRIES,
            next: self.fetched as u16,
            in_flight: self.in_flight,
            is_recorded: false,
            is_broken: false,
        }
    }
}

/// A disk with its rings; the front-end sends no setup.
pub struct MiniDisk {
    pub info: DeviceInfo,
    pub queues: u16,
    pub write_back: bool,
    pub rings: Vec<Arc<MiniRing>>,
}

impl ExportedDisk for MiniDisk {
    fn infos(&self) -> Vec<&DeviceInfo> {
        vec![&self.info]
    }

    fn set_info(&mut self, _device: u16, info: &Arc<DeviceInfo>) {
        self.info = DeviceInfo::clone(info);
    }

    fn queues(&self) -> u16 {
        self.queues
    }

    fn set_queues(&mut self, queues: u16) {
        self.queues = queues;
    }

    fn write_cache(&self) -> bool {
        self.write_back
    }

    fn set_write_cache(&mut self, write_back: bool) {
        self.write_back = write_back;
    }
}

/// A connection with its session.
pub struct MiniSession {
    connection: Arc<UnixStream>,
    config: ExportConfig<MiniSession>,
    log: Arc<ExportLog>,
    /// Fetched requests of each ring, and whether it runs.
    rings: Vec<(u64, bool)>,
}

/// A handed-over connection, and the number of fetched requests of each ring.
pub type MiniHandover = (UnixStream, Vec<u64>);

impl MiniSession {
    fn new(connection: UnixStream, config: ExportConfig<MiniSession>, log: &Arc<ExportLog>) -> MiniSession {
        connection.set_nonblocking(true).unwrap();
        let rings = vec![(0, false); config.queues.len()];
        MiniSession { connection: Arc::new(connection), config, log: Arc::clone(log), rings }
    }

    fn run(&mut self, queue: usize) -> Result<(), String> {
        let setup = (Arc::clone(&self.config.disk.rings[queue]), self.rings[queue].0);
        self.config.queues[queue].run(setup).map_err(|gone| gone.to_string())??;
        self.rings[queue].1 = true;
        Ok(())
    }

    fn suspend(&mut self, queue: usize) -> Result<u64, String> {
        let base = self.config.queues[queue].suspend().and_then(Suspension::wait);
        let (fetched, runs) = &mut self.rings[queue];
        *fetched = base.map_err(|gone| gone.to_string())?.unwrap_or(*fetched);
        *runs = false;
        Ok(*fetched)
    }

    /// Suspends all running queues; returns their indexes.
    fn suspend_all(&mut self) -> Result<Vec<usize>, String> {
        let running: Vec<usize> = (0..self.rings.len()).filter(|queue| self.rings[*queue].1).collect();
        running.iter().try_for_each(|queue| self.suspend(*queue).map(drop))?;
        Ok(running)
    }

    fn obey(&mut self, [what, queue]: [u8; 2]) -> Result<u64, String> {
        let queue = usize::from(queue);
        match what {
            _ if queue >= usize::from(self.config.disk.queues()) => Err(format!("no queue {queue}")),
            b'R' => self.run(queue).map(|()| 0),
            b'S' => self.suspend(queue),
            b'F' => self.config.queues[queue].flush().map(u64::from).map_err(|gone| gone.to_string()),
            b'C' => Ok(self.config.disk.info.capacity_sectors),
            other => Err(format!("{other} is no command")),
        }
    }
}

impl FrontEndSession for MiniSession {
    type Queue = MiniQueueSession;
    type Disk = MiniDisk;
    type Reserve = ();
    type State = MiniHandover;
    type Start = ();
    /// Indexes of the queues to run.
    type View = usize;
    type Error = String;

    fn reserve() -> io::Result<()> {
        Ok(())
    }

    fn accept(connection: Accepted, (): (), config: ExportConfig<MiniSession>, log: &Arc<ExportLog>) -> MiniSession {
        MiniSession::new(connection.stream, config, log)
    }

    fn resume(
        (connection, fetched): MiniHandover,
        (): (),
        config: ExportConfig<MiniSession>,
        log: &Arc<ExportLog>,
    ) -> Result<(MiniSession, ()), String> {
        let mut session = MiniSession::new(connection, config, log);
        session.rings = fetched.into_iter().map(|fetched| (fetched, false)).collect();
        Ok((session, ()))
    }

    fn begin(&mut self, start: Option<()>) -> Result<(), String> {
        if start.is_some() {
            (0..self.rings.len()).try_for_each(|queue| self.run(queue))?;
        }
        Ok(())
    }

    fn step(&mut self) -> SessionStep<String> {
        let mut command = [0; 2];
        match (&*self.connection).read(&mut command) {
            Ok(2) => {}
            Ok(0) => return SessionStep::Over("it left".into()),
            Ok(_) => return SessionStep::Over("it sent half a command".into()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return SessionStep::Waiting,
            Err(error) => return SessionStep::Over(error.to_string()),
        }
        match self.obey(command) {
            Ok(number) => {
                let answer = [&[0], &number.to_ne_bytes()[..]].concat();
                let sent = (&*self.connection).write_all(&answer);
                sent.map_or_else(|error| SessionStep::Over(error.to_string()), |()| SessionStep::Handled)
            }
            Err(error) => SessionStep::Over(error),
        }
    }

    fn deadline(&self) -> Option<std::time::Instant> {
        None
    }

    fn interest(&self) -> (AwaitedFd, EventFlags) {
        (Arc::clone(&self.connection) as _, EventFlags::IN)
    }

    fn with_config<T>(&mut self, change: impl FnOnce(&mut ExportConfig<MiniSession>) -> T) -> T {
        change(&mut self.config)
    }

    fn change(&mut self, device: u16, info: &Arc<DeviceInfo>) -> Result<Changed, String> {
        let running = self.suspend_all()?;
        let changed = self.config.change(device, info);
        self.go_on(running);
        changed.map(|()| Changed::Untold)
    }

    fn hand_over(&mut self) -> (Vec<usize>, Result<MiniHandover, String>) {
        let running = match self.suspend_all() {
            Ok(running) => running,
            Err(error) => return (Vec::new(), Err(error)),
        };
        let state =
            self.connection.try_clone().map(|copy| (copy, self.rings.iter().map(|(fetched, _)| *fetched).collect()));
        (running, state.map_err(|error| error.to_string()))
    }

    fn go_on(&mut self, running: Vec<usize>) {
        running.into_iter().for_each(|queue| self.run(queue).unwrap());
    }

    fn view(&self) -> usize {
        self.rings.iter().filter(|(_, runs)| *runs).count()
    }

    fn end(mut self, end: &SessionEnd<String>) -> (ExportConfig<MiniSession>, Result<(), String>) {
        let rests = self.suspend_all().map(drop);
        if let SessionEnd::Over(error) = end {
            self.log.info(error);
        }
        (self.config, rests)
    }
}
