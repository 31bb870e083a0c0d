//! Rules of the control thread, on a test protocol, with a manual clock. These tests never wait.

use std::collections::HashMap;
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::sync::mpsc::{Sender, channel};

use blkyard_mem::{DmaMapping, Segment};
use blkyard_mq::{Batch, Done, Tag};
use blkyard_sys::TimeSource;

use super::*;
use crate::mailbox::QueueMailbox;
use crate::protocol::{QueueShared, RemoteRing};

const MS: Duration = Duration::from_millis(1);
const IO_MAX: Duration = Duration::from_secs(30);
const GONE_MAX: Duration = Duration::from_mins(1);

/// A clock that tests advance.
#[derive(Debug)]
struct ManualClock(Mutex<Instant>);

impl TimeSource for ManualClock {
    fn now(&self) -> Instant {
        *self.0.lock().unwrap()
    }

    fn wait(&self, _fds: &mut [PollFd<'_>], _deadline: Option<Instant>) -> std::io::Result<usize> {
        unreachable!("a test does not wait")
    }
}

/// A scripted back-end, and its log of messages.
#[derive(Debug, Default)]
struct BackEnd {
    refuses: bool,
    /// Whether it records requests in flight.
    records: bool,
    /// It takes memory as a table.
    takes_table: bool,
    /// Error of the session's next check.
    ends: Option<TalkError>,
    told: Vec<String>,
    /// The other sides of the connections.
    far: Vec<UnixStream>,
}

type Shared = Arc<Mutex<BackEnd>>;

#[derive(Debug)]
struct TestRing;

impl RemoteRing for TestRing {
    type Fault = String;

    fn queue(&mut self, _batch: &mut Batch<'_>, _translate: impl FnMut(Segment) -> Option<u64>) -> bool {
        false
    }

    fn poll(&mut self, _done: &mut Done<'_>) -> Result<(), String> {
        Ok(())
    }

    fn in_flight(&self) -> impl Iterator<Item = usize> {
        std::iter::empty()
    }

    fn take_in_flight(&mut self) -> impl Iterator<Item = Tag> {
        std::iter::empty()
    }

    fn arm(&mut self) -> bool {
        false
    }

    fn disarm(&mut self) {}

    fn prefer_node(&self, _node: u32) {}
}

struct TestSession {
    back_end: Shared,
    info: DeviceInfo,
    near: UnixStream,
    known: Vec<Arc<Region>>,
    runs: bool,
}

impl TestSession {
    fn tell(&self, what: impl Into<String>) {
        self.back_end.lock().unwrap().told.push(what.into());
    }
}

impl RemoteSession for TestSession {
    type Config = Shared;
    type Agreed = ();
    type Ring = TestRing;
    /// Whether they are recorded.
    type Rings = bool;

    fn open(config: &Shared, _end: &Arc<EventFd>) -> Result<TestSession, AttachError> {
        let mut back_end = config.lock().unwrap();
        back_end.told.push("connect".into());
        if back_end.refuses {
            return Err(AttachError::Socket { disk: "test".into(), cause: "nobody listens".into() });
        }
        let (near, far) = UnixStream::pair().unwrap();
        back_end.far.push(far);
        let (back_end, info) = (Arc::clone(config), DeviceInfo::default());
        Ok(TestSession { back_end, info, near, known: Vec::new(), runs: false })
    }

    fn agreed(&self) -> &() {
        &()
    }

    fn check_same(&self, (): &()) -> Result<(), TalkError> {
        Ok(())
    }

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn read_info(&self, _config: &Shared) -> Result<DeviceInfo, AttachError> {
        Ok(self.info.clone())
    }

    fn queues(&self) -> usize {
        2
    }

    fn set_queues(&mut self, queues: usize) {
        assert_eq!(queues, 2);
    }

    fn depth_max(&self, _config: &Shared) -> usize {
        1
    }

    fn depth_cure() -> String {
        String::new()
    }

    fn is_tracked(&self) -> bool {
        self.back_end.lock().unwrap().records
    }

    fn begin(&mut self) {}

    fn adds_regions(&self) -> bool {
        !self.back_end.lock().unwrap().takes_table
    }

    fn must_quiesce(&self, wanted: &[Arc<Region>]) -> bool {
        !self.adds_regions() && !self.knows(wanted)
    }

    fn set_regions(&mut self, wanted: Vec<Arc<Region>>) -> Result<(), TalkError> {
        self.tell(format!("{} regions", wanted.len()));
        self.known = wanted;
        Ok(())
    }

    fn knows(&self, regions: &[Arc<Region>]) -> bool {
        regions.iter().all(|region| crate::queues::has(&self.known, region))
    }

    fn regions(&self) -> usize {
        self.known.len()
    }

    fn make_rings(&self, queues: &[QueueShared]) -> Result<(bool, Vec<NewRing<TestRing>>), TalkError> {
        let new = |_| NewRing { ring: TestRing, kick: Arc::new(EventFd::new().unwrap()) };
        Ok((self.is_tracked(), queues.iter().map(new).collect()))
    }

    fn ring_region(_rings: &bool) -> Option<&Arc<Region>> {
        None
    }

    fn is_recorded(rings: &bool) -> bool {
        *rings
    }

    fn start_rings(&mut self, _rings: &bool, _queues: &[QueueShared], resumed: bool) -> Result<(), TalkError> {
        self.tell(if resumed { "resume" } else { "start" });
        self.runs = true;
        Ok(())
    }

    fn stop_rings(&mut self) -> Result<(), TalkError> {
        self.tell("stop");
        self.runs = false;
        Ok(())
    }

    fn runs(&self) -> bool {
        self.runs
    }

    fn add_fds<'a>(&'a self, _fds: &mut Vec<PollFd<'a>>) {}

    fn look(&mut self) -> Result<bool, TalkError> {
        self.back_end.lock().unwrap().ends.take().map_or(Ok(false), Err)
    }

    fn leave(self) -> std::os::fd::OwnedFd {
        self.tell("leave");
        self.near.into()
    }
}

/// A disk whose control thread makes steps on request.
struct Disk {
    control: Control<TestSession>,
    back_end: Shared,
    clock: Arc<ManualClock>,
    commands: Sender<DeviceCommand<TestRing>>,
    domain: Arc<DmaDomain>,
    /// By queue.
    mappings: HashMap<u16, DmaMapping>,
}

impl Disk {
    fn open(back_end: BackEnd) -> Disk {
        let (back_end, clock) = (Arc::new(Mutex::new(back_end)), Arc::new(ManualClock(Mutex::new(Instant::now()))));
        let time: Arc<dyn TimeSource> = Arc::clone(&clock) as _;
        let (name, reply_max) = ("test".into(), Duration::from_secs(10));
        let options = RemoteOptions { name, clock: time, reply_max, io_max: IO_MAX, gone_max: GONE_MAX };
        let (commands, receiver) = channel();
        let eventfd = || Arc::new(EventFd::new().unwrap());
        let opened = Control::open(Arc::clone(&back_end), options, receiver, &eventfd(), &eventfd());
        let Ok((control, found)) = opened else { panic!("it refuses") };
        Disk { control, back_end, clock, commands, domain: found.domain, mappings: HashMap::new() }
    }

    /// Advances the clock, and runs the control thread once.
    fn advance(&mut self, by: Duration) {
        *self.clock.0.lock().unwrap() += by;
        assert!(self.control.run_once());
    }

    fn send(&mut self, command: DeviceCommand<TestRing>) {
        self.commands.send(command).unwrap();
        self.advance(Duration::ZERO);
    }

    fn open_queue(&mut self) -> Opened<TestRing> {
        let (answer, opened) = channel();
        self.send(DeviceCommand::Open(QueueKind::Default, answer));
        opened.recv().unwrap().unwrap()
    }

    /// A queue with one region of memory.
    fn open_with_memory(&mut self) -> Opened<TestRing> {
        let opened = self.open_queue();
        self.set_memory(opened.number);
        opened
    }

    /// Gives a queue one region of memory.
    fn set_memory(&mut self, number: u16) {
        let regions = vec![Region::shared(1).unwrap()];
        self.mappings.insert(number, self.domain.map(regions.clone()));
        self.send(DeviceCommand::Memory(number, 1, regions, true));
    }

    fn close(&mut self, number: u16, ring: Option<RingEnd<TestRing>>) {
        self.mappings.remove(&number);
        self.send(DeviceCommand::Close(number, ring));
    }

    /// The session is found to have ended; the back-end closes its side if `closes`.
    fn lose(&mut self, why: TalkError, closes: bool) {
        self.back_end.lock().unwrap().ends = Some(why);
        self.advance(Duration::ZERO);
        if closes {
            self.back_end.lock().unwrap().far.clear();
            self.advance(Duration::ZERO);
        }
    }

    /// Messages to the back-end since the last call.
    fn told(&self) -> Vec<String> {
        std::mem::take(&mut self.back_end.lock().unwrap().told)
    }

    fn refuse(&self, refuses: bool) {
        self.back_end.lock().unwrap().refuses = refuses;
    }

    fn connects(&self) -> usize {
        self.told().iter().filter(|told| *told == "connect").count()
    }
}

/// Commands that a queue has not read, by name.
fn unread(mailbox: &QueueMailbox<TestRing>) -> Vec<String> {
    let name = |command| match command {
        QueueCommand::Run(end) => format!("Run({})", end.number),
        other => format!("{other:?}"),
    };
    mailbox.take().into_iter().map(name).collect()
}

fn silent() -> TalkError {
    TalkError::Silent { request: "req.0, a Read,".into(), limit: IO_MAX }
}

#[test]
fn an_answer_that_is_unread_when_the_disk_is_closed_is_no_loss() {
    let mut disk = Disk::open(BackEnd::default());
    disk.open_with_memory();
    disk.told();
    disk.back_end.lock().unwrap().ends = Some(TalkError::HungUp);
    disk.control.end.signal();
    assert!(!disk.control.run_once());
    assert!(disk.told().is_empty() && disk.control.shared.view().last_loss.is_none());
}

#[test]
fn rings_start_with_all_memory_when_the_first_queue_has_some() {
    let mut disk = Disk::open(BackEnd { takes_table: true, ..BackEnd::default() });
    disk.send(DeviceCommand::Reserve(Region::shared(1).unwrap()));
    let reserved = Region::shared(1).unwrap();
    disk.send(DeviceCommand::Reserve(Arc::clone(&reserved)));
    let queue = disk.open_queue();
    assert!(queue.ring.is_some());
    assert_eq!(disk.told(), ["connect"], "no memory yet");
    disk.set_memory(queue.number);
    assert_eq!(disk.told(), ["2 regions", "resume"], "one is reserved for nobody; nothing was served before");
    assert_eq!(unread(&queue.mailbox), ["Memory(1, true)"]);
}

#[test]
fn a_change_of_memory_waits_until_all_are_quiesced_and_begins_new_rings() {
    let mut disk = Disk::open(BackEnd { takes_table: true, ..BackEnd::default() });
    let (first, second) = (disk.open_with_memory(), disk.open_queue());
    assert_eq!((disk.told().pop().as_deref(), unread(&first.mailbox).len()), (Some("resume"), 1));
    disk.set_memory(second.number);
    assert_eq!((disk.told().len(), unread(&first.mailbox)), (0, vec!["Rest(1)".to_owned()]));
    disk.advance(IO_MAX.saturating_sub(MS));
    assert!(disk.told().is_empty(), "it has time");
    disk.send(DeviceCommand::Rested(first.number, 1));
    assert_eq!(disk.told(), ["stop", "2 regions", "start"]);
    for (queue, run) in [(&first, "Run(3)"), (&second, "Run(4)")] {
        assert_eq!(unread(&queue.mailbox), [run, "Memory(1, true)"]);
    }
}

#[test]
fn memory_that_its_owner_maps_is_announced_once_all_are_quiesced() {
    let mut disk = Disk::open(BackEnd { takes_table: true, ..BackEnd::default() });
    let queue = disk.open_with_memory();
    disk.told();
    unread(&queue.mailbox);
    let _mapping = disk.domain.map(vec![Region::shared(1).unwrap()]);
    disk.advance(Duration::ZERO);
    assert_eq!((disk.told().len(), unread(&queue.mailbox)), (0, vec!["Rest(1)".to_owned()]));
    disk.send(DeviceCommand::Rested(queue.number, 1));
    assert_eq!(disk.told(), ["stop", "2 regions", "start"], "no other change was needed");
    assert_eq!(unread(&queue.mailbox), ["Run(3)", "Memory(1, true)"]);
}

#[test]
fn a_queue_that_does_not_quiesce_in_time_ends_the_session() {
    let mut disk = Disk::open(BackEnd { takes_table: true, ..BackEnd::default() });
    let (first, second) = (disk.open_with_memory(), disk.open_queue());
    disk.set_memory(second.number);
    disk.told();
    unread(&first.mailbox);
    disk.advance(IO_MAX.saturating_sub(MS));
    assert!(disk.told().is_empty());
    disk.advance(MS);
    assert_eq!(disk.told(), ["leave"]);
    let loss = disk.control.shared.view().last_loss.unwrap();
    assert!(loss.contains("req.0 was not quiesced"), "{loss}");
    assert_eq!(unread(&first.mailbox), ["Died"]);
}

#[test]
fn regions_are_added_while_rings_run() {
    let mut disk = Disk::open(BackEnd::default());
    let (_first, second) = (disk.open_with_memory(), disk.open_queue());
    disk.told();
    disk.set_memory(second.number);
    assert_eq!(disk.told(), ["2 regions"]);
    assert_eq!(unread(&second.mailbox).last().map(String::as_str), Some("Memory(1, true)"));
}

#[test]
fn a_recorded_session_resumes_its_rings_and_another_begins_new_ones() {
    for records in [true, false] {
        let mut disk = Disk::open(BackEnd { records, ..BackEnd::default() });
        let queue = disk.open_with_memory();
        disk.told();
        unread(&queue.mailbox);
        disk.lose(TalkError::HungUp, true);
        disk.advance(MS);
        let (told, start) = (disk.told(), if records { "resume" } else { "start" });
        assert_eq!(told, ["leave", "connect", "1 regions", start]);
        let run = if records { "GoesOn" } else { "Run(3)" };
        assert_eq!(unread(&queue.mailbox), ["Died", run, "Memory(1, true)"]);
    }
}

#[test]
fn a_silent_back_end_is_left_and_not_replaced_before_it_has_closed() {
    let mut disk = Disk::open(BackEnd { records: true, ..BackEnd::default() });
    let queue = disk.open_with_memory();
    let late = || DeviceCommand::Late(queue.number, 1, "a Read of 8 sectors".into());
    disk.advance(IO_MAX.saturating_sub(MS));
    disk.send(late());
    assert!(!disk.told().contains(&"leave".into()), "the session is younger than a request may be");
    disk.advance(MS);
    disk.send(late());
    assert_eq!(disk.told(), ["leave"]);
    assert_eq!(unread(&queue.mailbox), ["Memory(1, true)", "Silent"]);
    disk.advance(GONE_MAX.saturating_sub(MS));
    assert_eq!((disk.connects(), unread(&queue.mailbox).len()), (0, 0));
    disk.advance(MS);
    assert_eq!(unread(&queue.mailbox), ["Fail"], "it never closed");
    assert_eq!(disk.connects(), 0);
    disk.advance(MS);
    assert_eq!(disk.told(), ["connect", "1 regions", "start"], "rings of a silent one are not resumed");
    assert_eq!(unread(&queue.mailbox), ["Run(3)", "Memory(1, true)"]);
}

#[test]
fn io_fails_after_its_time_without_a_back_end_and_goes_on_with_the_next() {
    let mut disk = Disk::open(BackEnd::default());
    let queue = disk.open_with_memory();
    disk.refuse(true);
    unread(&queue.mailbox);
    disk.lose(TalkError::HungUp, true);
    assert_eq!(unread(&queue.mailbox), ["Died"]);
    disk.told();
    for _ in 0..119 {
        disk.advance(GONE_MAX / 120);
    }
    assert_eq!((disk.connects(), unread(&queue.mailbox).len()), (119, 0), "each half second, and nothing fails yet");
    disk.advance(GONE_MAX / 120);
    assert_eq!(unread(&queue.mailbox), ["Fail"]);
    let other = disk.open_queue();
    assert_eq!(unread(&other.mailbox), ["Fail"], "one that is opened now fails as well");
    disk.advance(10 * GONE_MAX);
    assert!(unread(&queue.mailbox).is_empty(), "once");
    disk.refuse(false);
    disk.advance(GONE_MAX);
    assert_eq!(unread(&queue.mailbox), ["Run(3)", "Memory(1, true)"]);
    assert!(disk.control.shared.view().is_connected);
}

#[test]
fn three_broken_rings_in_a_row_fail_what_is_in_flight() {
    let mut disk = Disk::open(BackEnd { records: true, ..BackEnd::default() });
    let queue = disk.open_with_memory();
    let mut ring = 1;
    for round in 1..=3 {
        unread(&queue.mailbox);
        disk.send(DeviceCommand::Fault(queue.number, ring + 7, "an old ring".into()));
        assert!(disk.control.shared.view().is_connected, "another ring than that of the session");
        disk.send(DeviceCommand::Fault(queue.number, ring, "a lie".into()));
        let fails = if round == 3 { vec!["Died", "Fail"] } else { vec!["Died"] };
        assert_eq!(unread(&queue.mailbox), fails, "round {round}");
        disk.back_end.lock().unwrap().far.clear();
        disk.advance(Duration::ZERO);
        disk.told();
        disk.advance(499 * MS);
        assert_eq!(disk.connects(), 0, "a liar is left alone for half a second");
        disk.advance(MS);
        assert_eq!(disk.connects(), 1);
        ring += 2;
    }
    assert_eq!(disk.control.shared.view().faults, 3);
}

#[test]
fn a_silent_session_is_left_whatever_the_error_of_its_end() {
    let mut disk = Disk::open(BackEnd { records: true, ..BackEnd::default() });
    let queue = disk.open_with_memory();
    unread(&queue.mailbox);
    disk.lose(silent(), true);
    assert_eq!(unread(&queue.mailbox), ["Silent"]);
    disk.told();
    disk.advance(MS);
    assert_eq!(disk.told(), ["connect", "1 regions", "start"]);
}

#[test]
fn closed_queues_give_their_ring_back_and_the_thread_ends_with_its_senders() {
    let mut disk = Disk::open(BackEnd::default());
    let mut queue = disk.open_with_memory();
    disk.told();
    disk.close(queue.number, queue.ring.take());
    assert_eq!(disk.told(), ["0 regions"], "its memory is withdrawn");
    let rings = [disk.open_queue(), disk.open_queue()].map(|queue| queue.ring.map(|end| end.number));
    assert_eq!(rings, [Some(2), Some(1)]);
    drop(disk.commands);
    assert!(!disk.control.run_once());
}
