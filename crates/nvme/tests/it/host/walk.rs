//! Random walks: host, queues and controller move in any order, messages arrive late, and the controller fails. A walk
//! can be repeated by its seed: `BLKYARD_SEED=SEED`; `BLKYARD_SEED=FIRST..END` runs others.
//!
//! Checked at every step: a bio completes once; a read finds the last written data; the controller accesses no returned
//! memory; a controller that was repaired or unplugged leaves no bio behind.

use blkyard_mq::{Op, Status};
use blkyard_nvme::{ControllerState, NvmeHostConfig, NvmeStatus, admin};

use crate::host::fake::{FakeTransport, namespace};
use crate::host::rig::{MS, Rig, S, config};
use crate::seeds::seeds;

/// Walks per test run.
const SEEDS: u64 = 2000;
/// Walks of resets per test run.
const RESET_SEEDS: u64 = 300;
/// Steps before the controller is repaired.
const STEPS: usize = 400;

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
}

/// Actions of a walk, to check that walks cover all of them.
#[derive(Debug, Default)]
struct Seen {
    bios: u64,
    failed: u64,
    resets: u64,
    aborts: u64,
    dead: u64,
    unplugged: u64,
    stale: u64,
}

struct Walk {
    rig: Rig,
    chance: Chance,
    queues: u16,
    /// Whether an action may have caused requests to fail.
    may_fail: bool,
}

impl Walk {
    fn new(seed: u64) -> Walk {
        let mut chance = Chance(seed);
        let transport = FakeTransport::new();
        {
            let mut fake = transport.fake.borrow_mut();
            fake.is_prompt = false;
            fake.identify.abort_limit = chance.below(3) as u8;
            fake.identify.retry_delay_1 = chance.below(20) as u16;
            fake.namespaces.insert(2, namespace(1 << 16, 9));
            (fake.ready_delay_ns, fake.idle_delay_ns) = (chance.next() % (3 * S), chance.next() % (3 * S));
            fake.can_reset_function = chance.one_in(4);
            fake.vectors = chance.below(6) as u16;
        }
        let queues = 1 + chance.below(3) as u16;
        let has_shadow = chance.one_in(2);
        let mut rig = Rig::live(transport, NvmeHostConfig { has_shadow, ..config(queues) });
        rig.round();
        Walk { rig, chance, queues, may_fail: false }
    }

    fn pick(&mut self, len: usize) -> Option<usize> {
        (len > 0).then(|| self.chance.below(len))
    }

    /// Messages to one receiver keep their order.
    fn deliver(&mut self) {
        if let Some(number) = self.pick(self.rig.commands.len()) {
            let qid = self.rig.commands[number].0;
            let first = self.rig.commands.iter().position(|(other, _)| *other == qid);
            self.rig.deliver_command(first.unwrap_or(number));
        }
        if let Some(number) = self.pick(self.rig.reports.len()) {
            let qid = self.rig.reports[number].0;
            let first = self.rig.reports.iter().position(|(other, _)| *other == qid);
            self.rig.deliver_report(first.unwrap_or(number));
        }
        if self.chance.one_in(3)
            && let Some(number) = self.pick(self.rig.late.len())
        {
            self.rig.deliver_late(number);
        }
    }

    fn complete(&mut self) {
        let pending = self.rig.fake.borrow().pending.len();
        let Some(number) = self.pick(pending) else { return };
        let status = match self.chance.below(40) {
            0 => NvmeStatus(NvmeStatus::COMMAND_INTERRUPTED.0 | 1 << 11),
            1 => NvmeStatus::INTERNAL,
            2 => {
                self.may_fail = true;
                NvmeStatus::WRITE_FAULT.with_dnr()
            }
            _ => NvmeStatus::SUCCESS,
        };
        let mut fake = self.rig.fake.borrow_mut();
        if !fake.gone {
            fake.complete(number, status);
        }
    }

    /// Transfers data without a completion, like a slow controller.
    fn transfer(&mut self) {
        let pending = self.rig.fake.borrow().pending.len();
        let Some(number) = self.pick(pending) else { return };
        let mut fake = self.rig.fake.borrow_mut();
        let sqe = fake.pending[number].sqe;
        if !fake.gone || fake.lingers {
            let _ = fake.transfer(&sqe);
        }
    }

    fn break_something(&mut self) {
        let (now_ns, kind) = (self.rig.now_ns, self.chance.below(16));
        match kind {
            0..=2 => {
                self.rig.host.reset(now_ns);
            }
            3 => self.rig.fake.borrow_mut().mute ^= true,
            4 => {
                let opcodes = [admin::ABORT, admin::DELETE_SQ, admin::DELETE_CQ, admin::IDENTIFY, admin::CREATE_SQ];
                let opcode = opcodes[self.chance.below(opcodes.len())];
                let left = self.chance.below(3) as u32;
                self.rig.fake.borrow_mut().ignored.insert(opcode, left);
            }
            5 => self.rig.fake.borrow_mut().ignored.clear(),
            6 => {
                let grant = self.chance.below(usize::from(self.queues) + 2) as u16;
                self.rig.fake.borrow_mut().grant = (grant > 0).then_some(grant);
            }
            7 => {
                let first = self.chance.below(5) as u16;
                self.rig.fake.borrow_mut().reject_from = (first > 0).then_some(first);
            }
            8 => {
                self.rig.fake.borrow_mut().event([2 | 4 << 16, 3 << 8, 1 | 2 << 16][self.chance.below(3)]);
            }
            9 if self.chance.one_in(4) => self.rig.fake.borrow_mut().fatal ^= true,
            10 if self.chance.one_in(4) => self.rig.fake.borrow_mut().never_idle ^= true,
            11 if self.chance.one_in(4) => self.rig.fake.borrow_mut().never_ready ^= true,
            12 if self.chance.one_in(12) => {
                let mut fake = self.rig.fake.borrow_mut();
                (fake.gone, fake.lingers) = (true, self.chance.one_in(2));
            }
            13 if self.chance.one_in(12) => self.rig.host.remove(now_ns),
            14 => self.rig.host.suspend(now_ns),
            15 => self.rig.host.resume(now_ns),
            _ => {}
        }
    }

    fn step(&mut self) {
        match self.chance.below(24) {
            0..=5 => {
                let (qid, namespace) = (1 + self.chance.below(usize::from(self.queues)) as u16, self.chance.below(2));
                let op = if self.chance.one_in(2) { Op::Read } else { Op::Write };
                let block = self.chance.below(40) as u64;
                let _ = self.rig.submit(qid, namespace as u16, op, block);
            }
            6..=8 => {
                let qid = 1 + self.chance.below(usize::from(self.queues)) as u16;
                if self.rig.queues.contains_key(&qid) {
                    self.rig.turn_queue(qid);
                }
            }
            9..=10 => self.rig.turn_fake(),
            11..=13 => self.rig.advance_host(),
            14..=16 => self.deliver(),
            17..=19 => self.complete(),
            20 => self.transfer(),
            21 if self.chance.one_in(4) => self.break_something(),
            22 => {
                let most_ns = [MS, 100 * MS, S, 20 * S][self.chance.below(4)];
                self.rig.now_ns += self.chance.next() % most_ns;
            }
            23 => self.rig.pass(),
            _ => {}
        }
    }

    /// Repairs the controller, or unplugs it as the last resort; all I/O in flight ends.
    fn heal(&mut self) {
        {
            let mut fake = self.rig.fake.borrow_mut();
            (fake.mute, fake.fatal, fake.never_idle, fake.never_ready) = (false, false, false, false);
            fake.ignored.clear();
            fake.lingers = false;
            (fake.grant, fake.reject_from) = (Some(8), None);
            fake.is_prompt = true;
            (fake.ready_delay_ns, fake.idle_delay_ns) = (MS, MS);
        }
        self.rig.tick_ns = 50 * MS;
        self.rig.host.resume(self.rig.now_ns);
        self.rig.run(|rig| !rig.host.is_busy() && rig.commands.is_empty(), 600 * S);
        if self.rig.host.state() == ControllerState::Live {
            // Lost queues are created again.
            self.rig.host.reset(self.rig.now_ns);
            self.rig.run(|rig| !rig.host.is_busy() && rig.commands.is_empty(), 600 * S);
        }
        self.rig.finish();
    }
}

fn walk(seed: u64, seen: &mut Seen) {
    let mut walk = Walk::new(seed);
    for _ in 0..STEPS {
        walk.step();
        walk.rig.check();
    }
    walk.heal();
    let enables = u64::from(walk.rig.fake.borrow().enables);
    let failed = walk.rig.ended.iter().filter(|(_, status)| !status.is_ok()).count() as u64;
    let (state, gone) = (walk.rig.host.state(), walk.rig.fake.borrow().gone);
    assert_eq!(walk.rig.in_flight(), 0);
    match state {
        ControllerState::Live => {
            // A repaired controller works.
            for qid in 1..=walk.queues {
                if let Some(cookie) = walk.rig.submit(qid, 0, Op::Write, 1000 + u64::from(qid)) {
                    walk.rig.finish();
                    assert_eq!(walk.rig.ended.last(), Some(&(cookie, Status::Ok)), "queue {qid}");
                }
            }
        }
        ControllerState::Dead | ControllerState::DeletingNoIo => seen.dead += 1,
        other => panic!("it is left {other:?}"),
    }
    assert!(!gone || state != ControllerState::Live || walk.rig.ended.is_empty(), "it is gone and nobody noticed");
    seen.bios += walk.rig.ended.len() as u64;
    seen.failed += failed;
    seen.resets += enables.saturating_sub(1);
    seen.aborts += walk.rig.fake.borrow().count(admin::ABORT) as u64;
    seen.unplugged += u64::from(gone);
    let faults = walk.rig.queues.values_mut().map(|hw| hw.driver_mut().queue.pair().faults().total());
    seen.stale += faults.sum::<u64>();
}

#[test]
fn no_walk_loses_a_request_or_touches_memory_that_was_given_back() {
    let mut seen = Seen::default();
    let asked = seeds();
    for seed in asked.clone().unwrap_or(0..SEEDS) {
        // The seed is only printed if the walk fails.
        println!("BLKYARD_SEED={seed}");
        walk(seed, &mut seen);
    }
    println!("{seen:?}");
    if asked.is_none() {
        let Seen { bios, failed, resets, aborts, dead, unplugged, stale } = seen;
        assert!(bios > 10 * SEEDS && failed > 0 && failed < bios / 2, "{bios} bios, {failed} failed");
        assert!(resets > SEEDS && aborts > SEEDS / 10 && dead > SEEDS / 50 && unplugged > 0);
        assert_eq!(stale, 0, "an honest controller is believed");
    }
}

/// Resets at any time, each of a controller that is sound, within a few seconds. Returns the number of resets.
fn walk_of_resets(seed: u64) -> u32 {
    let mut walk = Walk::new(seed);
    let begin_ns = walk.rig.now_ns;
    {
        let mut fake = walk.rig.fake.borrow_mut();
        (fake.ready_delay_ns, fake.idle_delay_ns) = (walk.chance.next() % (10 * MS), walk.chance.next() % (10 * MS));
    }
    for _ in 0..1000 {
        match walk.chance.below(16) {
            0..=2 => {
                let qid = 1 + walk.chance.below(usize::from(walk.queues)) as u16;
                let op = if walk.chance.one_in(2) { Op::Read } else { Op::Write };
                let _ = walk.rig.submit(qid, walk.chance.below(2) as u16, op, walk.chance.below(40) as u64);
            }
            3..=9 => walk.rig.round(),
            10 => drop(walk.rig.host.reset(walk.rig.now_ns)),
            11..=12 if walk.chance.one_in(4) => {
                let pending = walk.rig.fake.borrow().pending.len();
                if let Some(number) = walk.pick(pending) {
                    walk.rig.fake.borrow_mut().complete(number, NvmeStatus::SUCCESS);
                }
            }
            13 => walk.transfer(),
            _ => walk.rig.now_ns += walk.chance.next() % (10 * MS),
        }
        walk.rig.check();
    }
    assert!(walk.rig.now_ns - begin_ns < 30 * S);
    let resets = walk.rig.fake.borrow().enables - 1;
    walk.heal();
    let failed = walk.rig.ended.iter().filter(|(_, status)| !status.is_ok()).count();
    assert_eq!((failed, walk.rig.in_flight()), (0, 0), "of {} bios", walk.rig.ended.len());
    resets
}

#[test]
fn no_walk_of_resets_fails_a_request() {
    let (asked, mut resets) = (seeds(), 0);
    for seed in asked.clone().unwrap_or(0..RESET_SEEDS) {
        println!("BLKYARD_SEED={seed}");
        resets += u64::from(walk_of_resets(seed));
    }
    assert!(asked.is_some() || resets > 10 * RESET_SEEDS, "{resets} resets");
}
