//! Host and controller of one queue pair against each other, and each against a hostile other side.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering::Relaxed;

use blkyard_mem::CountingAllocator;
use blkyard_nvme::registers::{cq_doorbell, sq_doorbell};
use blkyard_nvme::{
    Completed, ControllerQueuePair, Cqe, CqeFault, DoorbellFault, Fetched, HostQueuePair, NvmeStatus, QueueRings, Sqe,
    io,
};
use proptest::prelude::*;

use crate::common::{Memory, QID};

fn read(slba: u64) -> Sqe {
    Sqe::with_blocks(io::READ, 1, slba, 8, 0)
}

fn polled(host: &mut HostQueuePair) -> Vec<Completed> {
    let mut all = vec![];
    host.poll(|completed| all.push(completed));
    all
}

#[test]
fn a_command_goes_there_and_comes_back() {
    for (stride, is_shadowed) in [(0, false), (0, true), (3, false), (3, true)] {
        let memory = Memory::new(4, stride, is_shadowed);
        let (mut host, mut controller) = (memory.host(), memory.controller());
        assert_eq!(controller.fetch(), Ok(None));
        host.push(2, read(77));
        assert_eq!(controller.fetch(), Ok(None), "not announced yet");
        host.announce();
        let Ok(Some(Fetched { token, sqe })) = controller.fetch() else { panic!("announced") };
        assert_eq!((sqe.slba(), sqe.opcode(), sqe.cid() & 0xfff, controller.in_flight()), (77, io::READ, 2, 1));
        assert!(!host.is_pending() && polled(&mut host).is_empty());
        controller.complete(token, NvmeStatus::LBA_OUT_OF_RANGE, 99);
        assert!(host.is_pending());
        let completed = Completed { slot: 2, status: NvmeStatus::LBA_OUT_OF_RANGE, result: 99 };
        assert_eq!(polled(&mut host), [completed]);
        assert_eq!((host.in_flight(), controller.in_flight(), host.faults().total()), (0, 0, 0));
    }
}

#[test]
fn a_batch_writes_each_doorbell_once() {
    let memory = Memory::new(8, 0, false);
    let (mut host, mut controller) = (memory.host(), memory.controller());
    let tail = || memory.registers.load_u32(sq_doorbell(QID, 0), Relaxed);
    let head = || memory.registers.load_u32(cq_doorbell(QID, 0), Relaxed);
    for slot in 0..5 {
        host.push(slot, read(0));
        assert_eq!(tail(), 0);
    }
    assert!(host.announce());
    assert_eq!(tail(), 5);
    assert!(!host.announce(), "there is nothing new");
    while let Ok(Some(fetched)) = controller.fetch() {
        controller.complete(fetched.token, NvmeStatus::SUCCESS, 0);
    }
    let mut heads = vec![];
    assert!(host.poll(|_| heads.push(head())));
    assert_eq!((heads, head()), (vec![0; 5], 5));
    assert!(!host.poll(|_| ()), "nothing was found");
}

#[test]
fn a_late_head_is_written_for_a_part_of_the_ring_or_for_room() {
    let memory = Memory::new(17, 0, false);
    let (mut host, mut controller) = (memory.host().with_late_head(), memory.controller());
    let head = || memory.registers.load_u32(cq_doorbell(QID, 0), Relaxed);
    let mut heads = vec![];
    let mut round = |host: &mut HostQueuePair, count: u16| {
        (0..count).for_each(|slot| host.push(slot, read(0)));
        assert!(host.announce());
        let mut fetched = 0;
        while let Ok(Some(Fetched { token, .. })) = controller.fetch() {
            controller.complete(token, NvmeStatus::SUCCESS, 0);
            fetched += 1;
        }
        assert_eq!((fetched, polled(host).len()), (count, count.into()), "all had room");
        heads.push(head());
    };
    (0..9).for_each(|_| round(&mut host, 1));
    round(&mut host, 3);
    round(&mut host, 14);
    // A full ring needs the entry of the completion before.
    (0..50).for_each(|step| round(&mut host, if step % 2 == 0 { 1 } else { 16 }));
    assert_eq!(heads[..11], [0, 0, 0, 4, 4, 4, 4, 8, 8, 12, 9]);
    host.reset();
    assert!(host.in_flight() == 0 && controller.fault().is_none());
}

#[test]
fn shadow_doorbells_spare_the_register_until_it_is_asked_for() {
    let memory = Memory::new(4, 0, true);
    let (mut host, mut controller) = (memory.host(), memory.controller());
    let tail = || memory.registers.load_u32(sq_doorbell(QID, 0), Relaxed);
    // The event index starts at zero, which the first step passes.
    host.push(0, read(0));
    assert!(host.announce());
    for round in 0..20 {
        let fetched = controller.fetch().unwrap().unwrap();
        controller.complete(fetched.token, NvmeStatus::SUCCESS, 0);
        assert_eq!(polled(&mut host).len(), 1);
        let is_asleep = round % 3 == 2;
        if is_asleep {
            assert_eq!(controller.arm(), Ok(false), "nothing is there");
        }
        let before = tail();
        host.push(0, read(0));
        // Without new event indexes, the index wraps to the last requested one.
        let is_rung = host.announce();
        assert!(is_rung || (!is_asleep && tail() == before), "round {round}");
    }
    controller.fetch().unwrap().unwrap();
    assert_eq!(controller.arm(), Ok(false));
    host.push(1, read(0));
    host.push(2, read(0));
    assert!(host.announce());
    assert_eq!(controller.arm(), Ok(true), "what came before is seen");
}

#[test]
fn a_full_ring_leaves_no_command_and_no_completion_behind() {
    for entries in [2, 3, 4, 64, QueueRings::ENTRIES_MAX] {
        let memory = Memory::new(entries, 0, true);
        let (mut host, mut controller) = (memory.host(), memory.controller());
        for round in 0..5 {
            for slot in 0..host.depth() {
                host.push(slot, read(u64::from(slot)));
            }
            host.announce();
            let mut tokens: Vec<_> = std::iter::from_fn(|| controller.fetch().unwrap()).map(|f| f.token).collect();
            assert_eq!(tokens.len(), usize::from(entries - 1), "round {round}");
            let by = round % tokens.len();
            tokens.rotate_left(by);
            tokens.iter().for_each(|token| controller.complete(*token, NvmeStatus::SUCCESS, 0));
            assert_eq!(polled(&mut host).len(), usize::from(entries - 1));
        }
        assert_eq!((host.in_flight(), host.faults().total(), controller.fault()), (0, 0, None));
    }
}

#[test]
fn no_command_is_fetched_before_its_completion_has_room() {
    let memory = Memory::new(4, 0, true);
    let (mut host, mut controller) = (memory.host(), memory.controller());
    (0..3).for_each(|slot| host.push(slot, read(0)));
    host.announce();
    for _ in 0..3 {
        let token = controller.fetch().unwrap().unwrap().token;
        controller.complete(token, NvmeStatus::SUCCESS, 0);
    }
    // More commands although no completion was read: a correct host has no free slot.
    memory.put_sqe(3, read(5).with_cid(0xf00));
    memory.ring_tail(0);
    assert_eq!(controller.fetch(), Ok(None));
    assert_eq!(controller.arm(), Ok(false), "it waits for the head");
    assert!(host.poll(|_| ()), "and is told when that moves");
    assert_eq!(controller.arm(), Ok(true));
    assert_eq!(controller.fetch().unwrap().unwrap().sqe.slba(), 5);
}

/// A host with one command in flight in slot 1, and its cid.
fn with_one(memory: &Memory) -> (HostQueuePair, u16) {
    let mut host = memory.host();
    host.push(1, read(0));
    host.announce();
    let cid = host.cid(1).unwrap();
    (host, cid)
}

#[test]
fn each_completion_that_no_controller_writes_is_refused_and_counted() {
    const OK: NvmeStatus = NvmeStatus::SUCCESS;
    type Lie = fn(u16) -> Cqe;
    let lies: &[(CqeFault, Lie)] = &[
        (CqeFault::WrongQueue, |cid| Cqe::new(cid, QID + 1, 1, OK, 0, true)),
        (CqeFault::WrongQueue, |cid| Cqe::new(cid, 0, 1, OK, 0, true)),
        (CqeFault::SlotOutOfRange, |cid| Cqe::new(cid & 0xf000 | 7, QID, 1, OK, 0, true)),
        (CqeFault::SlotOutOfRange, |_| Cqe::new(0xffff, QID, 1, OK, 0, true)),
        (CqeFault::NotInFlight, |cid| Cqe::new(cid & 0xf000, QID, 1, OK, 0, true)),
        (CqeFault::Stale, |cid| Cqe::new(cid ^ 0x1000, QID, 1, OK, 0, true)),
        (CqeFault::Stale, |cid| Cqe::new(cid ^ 0x8000, QID, 1, OK, 0, true)),
    ];
    for (fault, lie) in lies {
        let memory = Memory::new(8, 0, false);
        let (mut host, cid) = with_one(&memory);
        memory.put_cqe(0, lie(cid));
        assert_eq!(polled(&mut host), [], "{}", fault.name());
        assert_eq!((host.faults().get(*fault), host.faults().total()), (1, 1), "{}", fault.name());
        // The command is still in flight, and a correct completion is accepted.
        assert_eq!((host.in_flight(), host.cid(1)), (1, Some(cid)));
        memory.put_cqe(1, Cqe::new(cid, QID, 1, OK, 5, true));
        assert_eq!(polled(&mut host), [Completed { slot: 1, status: OK, result: 5 }]);
        // The same completion again is stale.
        memory.put_cqe(2, Cqe::new(cid, QID, 1, OK, 5, true));
        assert_eq!((polled(&mut host), host.faults().total()), (vec![], 2));
        host.push(1, read(0));
        host.announce();
        memory.put_cqe(3, Cqe::new(cid, QID, 2, OK, 5, true));
        assert_eq!((polled(&mut host), host.in_flight()), (vec![], 1), "of the use before");
    }
    let names: std::collections::HashSet<_> = CqeFault::ALL.iter().map(|fault| fault.name()).collect();
    assert!(lies.iter().all(|(fault, _)| names.contains(fault.name())) && names.len() == CqeFault::ALL.len());
    let is_tested = |fault: &CqeFault| *fault == CqeFault::NotAnnounced || lies.iter().any(|(seen, _)| seen == fault);
    assert!(CqeFault::ALL.iter().all(is_tested), "each has its test");
}

#[test]
fn a_completion_before_its_announcement_is_refused() {
    let memory = Memory::new(8, 0, false);
    let mut host = memory.host();
    host.push(1, read(0));
    let cid = host.cid(1).unwrap();
    memory.put_cqe(0, Cqe::new(cid, QID, 1, NvmeStatus::SUCCESS, 0, true));
    assert_eq!((polled(&mut host), host.faults().get(CqeFault::NotAnnounced)), (vec![], 1));
    host.announce();
    memory.put_cqe(1, Cqe::new(cid, QID, 1, NvmeStatus::SUCCESS, 0, true));
    assert_eq!((polled(&mut host).len(), host.in_flight()), (1, 0));
}

/// The parts of a controller complete in parallel, each with the head that it has last seen.
#[test]
fn a_head_that_goes_backwards_loses_no_completion() {
    let memory = Memory::new(8, 0, false);
    let mut host = memory.host();
    for heads in [[3, 1, 2], [2, 2, 0]] {
        (0..3).for_each(|slot| host.push(slot, read(0)));
        host.announce();
        for (slot, head) in (0..).zip(heads) {
            let cid = host.cid(slot).unwrap();
            let index = (host.sequence(0).unwrap() * 3) as u16 + slot;
            memory.put_cqe(index, Cqe::new(cid, QID, head, NvmeStatus::SUCCESS, 0, true));
        }
        assert_eq!((polled(&mut host).len(), host.in_flight(), host.faults().total()), (3, 0, 0));
    }
}

#[test]
fn a_controller_that_never_stops_ends_a_poll_with_the_ring() {
    let memory = Memory::new(8, 0, false);
    let (mut host, _) = with_one(&memory);
    for round in 0..3 {
        // All entries look new, which is invalid; the phase changes with each round.
        (0..8).for_each(|index| memory.put_cqe(index, Cqe::new(9, QID, 0, NvmeStatus::SUCCESS, 0, round % 2 == 0)));
        host.poll(|_| panic!("nothing is complete"));
        assert_eq!(host.faults().get(CqeFault::SlotOutOfRange), 8 * (round + 1));
    }
}

#[test]
fn a_cid_goes_on_with_each_use_of_its_slot() {
    let memory = Memory::new(4, 0, false);
    let (mut host, mut controller) = (memory.host(), memory.controller());
    let mut seen = VecDeque::new();
    for round in 0..40_u32 {
        assert_eq!(host.sequence(2), Some(round));
        host.push(2, read(0));
        host.announce();
        let cid = host.cid(2).unwrap();
        assert_eq!((cid & 0xfff, u32::from(cid >> 12)), (2, round % 16));
        assert!(!seen.contains(&cid), "round {round}");
        seen.push_back(cid);
        if seen.len() == 16 {
            seen.pop_front();
        }
        let token = controller.fetch().unwrap().unwrap().token;
        controller.complete(token, NvmeStatus::SUCCESS, 0);
        assert_eq!(polled(&mut host).len(), 1);
    }
    assert_eq!((host.cid(2), host.cid(3), host.sequence(3)), (None, None, None));
}

#[test]
fn after_a_reset_what_was_cancelled_is_stale() {
    let memory = Memory::new(8, 0, true);
    let (mut host, mut controller) = (memory.host(), memory.controller());
    (0..7).for_each(|slot| host.push(slot, read(u64::from(slot))));
    host.announce();
    let first = controller.fetch().unwrap().unwrap();
    controller.complete(first.token, NvmeStatus::SUCCESS, 0);
    assert_eq!(polled(&mut host).len(), 1);
    let old: Vec<u16> = (1..7).map(|slot| host.cid(slot).unwrap()).collect();
    assert_eq!((0..7).filter(|slot| host.cancel(*slot)).count(), 6);
    assert!(!host.cancel(7) && host.in_flight() == 0);
    host.reset();
    let mut controller = {
        drop(controller);
        memory.controller()
    };
    (0..7).for_each(|slot| host.push(slot, read(10 + u64::from(slot))));
    host.announce();
    for (index, cid) in old.iter().enumerate() {
        memory.put_cqe(index as u16, Cqe::new(*cid, QID, 7, NvmeStatus::SUCCESS, 0, true));
    }
    assert_eq!((polled(&mut host), host.faults().get(CqeFault::Stale)), (vec![], 6));
    let sqe = controller.fetch().unwrap().unwrap().sqe;
    assert_eq!((sqe.slba(), Some(sqe.cid())), (10, host.cid(0)), "the rings begin anew");
    host.cancel(0);
    let pushed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| host.push(0, read(0))));
    assert!(pushed.is_err(), "nothing is pushed between cancel and reset");
}

#[test]
fn doorbells_that_no_host_writes_stop_the_queue() {
    use DoorbellFault::{Head, Tail};
    for is_shadowed in [false, true] {
        let lies: [(fn(&Memory), DoorbellFault); 6] = [
            (|memory| memory.ring_tail(8), Tail(8)),
            (|memory| memory.ring_tail(1 << 16), Tail(1 << 16)),
            (|memory| memory.ring_tail(u32::MAX), Tail(u32::MAX)),
            (|memory| memory.ring_head(8), Head(8)),
            (|memory| memory.ring_head(2), Head(2)),
            (|memory| memory.ring_head(u32::MAX), Head(u32::MAX)),
        ];
        for (lie, fault) in lies {
            let memory = Memory::new(8, 0, is_shadowed);
            let (mut host, mut controller) = (memory.host(), memory.controller());
            host.push(0, read(0));
            host.push(1, read(1));
            host.announce();
            let out = [controller.fetch().unwrap().unwrap(), controller.fetch().unwrap().unwrap()];
            controller.complete(out[0].token, NvmeStatus::SUCCESS, 0);
            lie(&memory);
            // The head is read when the ring is full, or before a sleep.
            assert_eq!(controller.arm(), Err(fault));
            assert_eq!((controller.fetch(), controller.fault()), (Err(fault), Some(fault)));
            memory.ring_tail(3);
            memory.ring_head(1);
            assert_eq!((controller.fetch(), controller.arm()), (Err(fault), Err(fault)), "for good");
            controller.complete(out[1].token, NvmeStatus::SUCCESS, 0);
            assert_eq!(polled(&mut host).len(), 2);
        }
    }
}

#[test]
fn a_cid_in_use_is_refused_and_the_first_command_stays() {
    let memory = Memory::new(8, 0, false);
    let mut controller = memory.controller();
    for (index, cid) in [0xffff, 5, 0xffff, 5, 0].into_iter().enumerate() {
        memory.put_sqe(index as u16, read(index as u64).with_cid(cid));
    }
    memory.ring_tail(5);
    // One command each: the host could add more of them without end.
    let fetched: Vec<_> = (0..5).map(|_| controller.fetch().unwrap()).collect();
    assert_eq!(fetched.iter().map(Option::is_some).collect::<Vec<_>>(), [true, true, false, false, true]);
    let fetched: Vec<_> = fetched.into_iter().flatten().collect();
    assert_eq!(fetched.iter().map(|fetched| fetched.sqe.slba()).collect::<Vec<_>>(), [0, 1, 4]);
    let refused = |index: usize| Cqe([0, 1].map(|word| memory.rings.cq.load_u64(index * 16 + word * 8, Relaxed)));
    for (index, cid) in [(0, 0xffff), (1, 5)] {
        let cqe = refused(index);
        assert_eq!((cqe.cid(), cqe.status()), (cid, NvmeStatus::CID_CONFLICT.with_dnr()));
    }
    // The cid may be reused after its completion.
    controller.complete(fetched[0].token, NvmeStatus::SUCCESS, 0);
    memory.put_sqe(5, read(9).with_cid(0xffff));
    memory.ring_tail(6);
    assert_eq!(controller.fetch().unwrap().unwrap().sqe.slba(), 9);
}

#[test]
fn nothing_is_allocated_per_command() {
    let memory = Memory::new(64, 0, true);
    let (mut host, mut controller) = (memory.host(), memory.controller());
    let before = CountingAllocator::count();
    for round in 0..100 {
        (0..63).for_each(|slot| host.push(slot, read(round)));
        host.announce();
        while let Ok(Some(fetched)) = controller.fetch() {
            controller.complete(fetched.token, NvmeStatus::SUCCESS, 0);
        }
        let _ = controller.arm();
        host.poll(|_| ());
    }
    assert!(before > 0 && host.in_flight() == 0);
    assert_eq!(CountingAllocator::count() - before, 0);
}

/// One step of either side.
#[derive(Clone, Copy, Debug)]
enum Turn {
    Push(u16),
    Announce,
    Fetch,
    Complete(u16),
    Poll,
    Arm,
}

fn turn() -> impl Strategy<Value = Turn> {
    prop_oneof![
        6 => any::<u16>().prop_map(Turn::Push),
        3 => Just(Turn::Announce),
        6 => Just(Turn::Fetch),
        6 => any::<u16>().prop_map(Turn::Complete),
        2 => Just(Turn::Poll),
        1 => Just(Turn::Arm),
    ]
}

/// Expected state of both sides.
struct Run {
    host: HostQueuePair,
    controller: ControllerQueuePair,
    /// Read LBA by slot, from push to completion.
    pushed: HashMap<u16, u64>,
    /// LBAs of pushed commands, announced or not, in order.
    queued: VecDeque<u64>,
    announced: usize,
    out: Vec<Fetched>,
    next: u64,
    /// Whether the controller may sleep and was not woken since.
    is_asleep: bool,
}

impl Run {
    fn new(memory: &Memory) -> Run {
        Run {
            host: memory.host(),
            controller: memory.controller(),
            pushed: HashMap::new(),
            queued: VecDeque::new(),
            announced: 0,
            out: vec![],
            next: 0,
            is_asleep: false,
        }
    }

    fn turn(&mut self, turn: Turn) {
        match turn {
            Turn::Push(pick) => {
                let free: Vec<u16> = (0..self.host.depth()).filter(|slot| !self.pushed.contains_key(slot)).collect();
                if let Some(slot) = free.get(usize::from(pick) % free.len().max(1)) {
                    self.next += 1;
                    self.host.push(*slot, read(self.next));
                    self.pushed.insert(*slot, self.next);
                    self.queued.push_back(self.next);
                }
            }
            Turn::Announce => {
                let has_news = self.announced < self.queued.len();
                let is_rung = self.host.announce();
                self.announced = self.queued.len();
                assert!(has_news || !is_rung);
                assert!(!self.is_asleep || !has_news || is_rung, "a wake-up is lost");
                self.is_asleep &= !is_rung;
            }
            Turn::Fetch => {
                let fetched = self.controller.fetch().unwrap();
                // The completion ring has room for as many commands as the host has slots, less the unread completions.
                assert!(fetched.is_some() || self.announced == 0, "{} are announced", self.announced);
                if let Some(fetched) = fetched {
                    assert_eq!(Some(fetched.sqe.slba()), self.queued.pop_front(), "in order");
                    self.announced -= 1;
                    self.out.push(fetched);
                }
                self.is_asleep = false;
            }
            Turn::Complete(pick) => {
                if !self.out.is_empty() {
                    let fetched = self.out.swap_remove(usize::from(pick) % self.out.len());
                    let slba = fetched.sqe.slba();
                    self.controller.complete(fetched.token, NvmeStatus((slba % 0x800) as u16), slba * 3);
                }
            }
            Turn::Poll => {
                let pushed = &mut self.pushed;
                self.host.poll(|completed| {
                    let slba = pushed.remove(&completed.slot).expect("in flight");
                    assert_eq!((completed.result, completed.status), (slba * 3, NvmeStatus((slba % 0x800) as u16)));
                });
                assert_eq!(usize::from(self.host.in_flight()), self.pushed.len());
            }
            Turn::Arm => {
                let has_work = self.controller.arm().unwrap();
                assert_eq!(has_work, self.announced > 0);
                self.is_asleep = !has_work;
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// For any load and order of steps: commands arrive in order once announced; completions return in any order, each
    /// once, with their own result; neither side sleeps while work is available.
    #[test]
    fn any_order_of_turns_keeps_each_command(
        entries in prop_oneof![Just(2_u16), Just(3), Just(4), Just(7), Just(16)],
        is_shadowed in any::<bool>(),
        turns in prop::collection::vec(turn(), 0..800),
    ) {
        let memory = Memory::new(entries, 0, is_shadowed);
        let mut run = Run::new(&memory);
        turns.into_iter().for_each(|turn| run.turn(turn));
        while !run.pushed.is_empty() {
            [Turn::Announce, Turn::Fetch, Turn::Complete(0), Turn::Poll].into_iter().for_each(|turn| run.turn(turn));
        }
        prop_assert_eq!((run.host.faults().total(), run.controller.in_flight()), (0, 0));
    }
}

/// Two threads: the controller sleeps whenever it may, and is woken only by writes of a register.
#[test]
fn two_threads_lose_no_wake_up() {
    use std::sync::mpsc;
    use std::time::Duration;
    const COMMANDS: u64 = 30_000;
    for entries in [2_u16, 5, 32] {
        let memory = Memory::new(entries, 0, true);
        let (mut host, mut controller) = (memory.host(), memory.controller());
        let (wake, woken) = mpsc::sync_channel::<()>(1);
        let device = std::thread::spawn(move || {
            let mut done = 0;
            while done < COMMANDS {
                while let Some(fetched) = controller.fetch().unwrap() {
                    controller.complete(fetched.token, NvmeStatus::SUCCESS, fetched.sqe.slba());
                    done += 1;
                }
                if done < COMMANDS && !controller.arm().unwrap() {
                    woken.recv_timeout(Duration::from_secs(30)).expect("a lost wake-up");
                }
            }
        });
        let (mut sent, mut back) = (0, 0);
        let mut free: Vec<u16> = (0..host.depth()).collect();
        while back < COMMANDS {
            let batch = (sent % 3 + 1).min(COMMANDS - sent).min(free.len() as u64);
            for slot in free.drain(..batch as usize) {
                host.push(slot, read(sent));
                sent += 1;
            }
            let mut is_rung = host.announce();
            let before = free.len();
            is_rung |= host.poll(|completed| free.push(completed.slot));
            back += (free.len() - before) as u64;
            if is_rung {
                // A pending wake-up suffices.
                let _ = wake.try_send(());
            } else if free.len() == before && free.is_empty() {
                std::thread::yield_now();
            }
        }
        device.join().unwrap();
        assert_eq!(host.faults().total(), 0);
    }
}
