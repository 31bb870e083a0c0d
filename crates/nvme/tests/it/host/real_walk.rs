//! Host and controller of this crate against each other, with faults of both sides in random order.

use blkyard_mq::{DeviceInfo, Op, Status};
use blkyard_nvme::{ControllerState, NvmeHostConfig};

use crate::host::real::{RealController, device, namespaces};
use crate::host::rig::{MS, Rig, S, config};
use crate::host::walk::Chance;
use crate::host::wide::WideCounts;
use crate::seeds::seeds;

/// Walks per test run.
const SEEDS: u64 = 4000;
const STEPS: usize = 300;
/// Sectors of a namespace, and of a shrunk one that some I/O exceeds.
const SIZES: [u64; 2] = [1 << 16, 200];

struct RealWalk {
    chance: Chance,
    rig: Rig<RealController>,
    devices: [Option<DeviceInfo>; 2],
    /// Queue whose interrupts are lost: it runs when a request is due, and when it gets a message.
    deaf: Option<u16>,
    faults: FaultCounts,
}

/// Faults of the walks, to check that there are some of each.
#[derive(Debug, Default)]
struct FaultCounts {
    fatal: u64,
    /// Queues stopped by an invalid doorbell.
    doorbells: u64,
    withdrawn: u64,
    deaf: u64,
}

impl RealWalk {
    fn new(seed: u64) -> RealWalk {
        let mut chance = Chance(seed);
        let transport = RealController::transport();
        {
            let mut real = transport.fake.borrow_mut();
            real.shares_doorbells = chance.one_in(2);
        }
        let has_shadow = chance.one_in(2);
        let ring_entries = [4, 16, 64][chance.below(3)];
        let queues = 1 + chance.below(4) as u16;
        let rig = Rig::live(transport, NvmeHostConfig { ring_entries, has_shadow, ..config(queues) });
        rig.fake.borrow_mut().is_prompt = false;
        RealWalk {
            chance,
            rig,
            devices: [device(512), device(4096)].map(Some),
            deaf: None,
            faults: FaultCounts::default(),
        }
    }

    fn step(&mut self) {
        let RealWalk { chance, rig, deaf, faults, .. } = self;
        let (qid, now_ns) = (1 + chance.below(rig.queues.len()) as u16, rig.now_ns);
        rig.drain_wide();
        match chance.below(35) {
            0..=5 => {
                let op = if chance.one_in(2) { Op::Read } else { Op::Write };
                let _ = rig.submit(qid, chance.below(2) as u16, op, chance.below(40) as u64);
            }
            6..=8 => {
                let is_due = rig.queues[&qid].deadline_ns::<()>().is_some_and(|due_ns| due_ns <= now_ns);
                if *deaf != Some(qid) || is_due {
                    rig.turn_queue(qid);
                }
            }
            9..=10 => rig.turn_fake(),
            11..=13 => rig.advance_host(),
            14 if !rig.commands.is_empty() => rig.deliver_command(0),
            15 if !rig.reports.is_empty() => rig.deliver_report(0),
            16 if !rig.late.is_empty() => rig.deliver_late(0),
            17..=20 => {
                let held = rig.fake.borrow().held.len();
                if held > 0 && !rig.fake.borrow().gone {
                    let failures = [Status::Io, Status::Medium, Status::NoSpace, Status::Timeout, Status::Offline];
                    let status = if chance.one_in(30) { failures[chance.below(5)] } else { Status::Ok };
                    rig.fake.borrow_mut().complete(chance.below(held), status);
                }
            }
            21 => rig.now_ns += chance.next() % [MS, S, 20 * S][chance.below(3)],
            22 => rig.pass(),
            23 => rig.host.forward_doorbells(qid, now_ns),
            24 if chance.one_in(20) => self.change_namespaces(),
            26..=28 => {
                let op = if chance.one_in(2) { Op::Read } else { Op::Write };
                rig.submit_wide(qid, chance.below(2) as u16, op, chance.below(40));
            }
            29 => rig.register_wide(qid, chance.below(40), true),
            30 if chance.one_in(2) => rig.register_wide(qid, chance.below(40), false),
            25 if chance.one_in(4) => match chance.below(40) {
                0 => rig.fake.borrow_mut().gone = true,
                1 => rig.host.remove(now_ns),
                2..=10 => rig.host.suspend(now_ns),
                11..=20 => rig.host.resume(now_ns),
                _ => drop(rig.host.reset(now_ns)),
            },
            31 if chance.one_in(40) && !rig.fake.borrow().gone => {
                faults.fatal += 1;
                rig.fake.borrow_mut().fail();
            }
            32 if chance.one_in(8) => {
                let (qid, is_head) = (chance.below(rig.queues.len() + 1) as u16, chance.one_in(2));
                let value = [64, 0xffff, 0x1_0000, u32::MAX][chance.below(4)];
                rig.fake.borrow_mut().break_doorbell(qid, is_head, value);
            }
            33 if chance.one_in(6) => {
                let mut real = rig.fake.borrow_mut();
                if real.has_withdrawn() {
                    real.withdraw(None);
                } else if chance.one_in(4) {
                    faults.withdrawn += 1;
                    real.withdraw(Some(chance.below(64)));
                }
            }
            34 if chance.one_in(10) => {
                *deaf = deaf.is_none().then_some(qid);
                faults.deaf += 1;
            }
            _ => {}
        }
    }

    /// A namespace grows, shrinks, becomes read-only, goes or comes back.
    fn change_namespaces(&mut self) {
        let (number, block) = [(0, 512), (1, 4096)][self.chance.below(2)];
        let capacity_sectors = SIZES[self.chance.below(2)];
        let read_only = self.chance.one_in(3);
        let device = DeviceInfo { capacity_sectors, read_only, ..device(block) };
        self.devices[number] = (!self.chance.one_in(4)).then_some(device);
        self.rig.fake.borrow_mut().controller.set_namespaces(namespaces(&self.devices));
    }

    /// All I/O ends, whatever has happened; returns whether the controller is live, the number of bios, and how many of
    /// them failed.
    fn heal(&mut self) -> (bool, usize, usize) {
        self.rig.fake.borrow_mut().is_prompt = true;
        self.rig.fake.borrow_mut().withdraw(None);
        self.rig.tick_ns = 50 * MS;
        self.rig.host.resume(self.rig.now_ns);
        self.finish();
        let rig = &mut self.rig;
        rig.run(|rig| !rig.host.is_busy(), 600 * S);
        rig.check();
        rig.end_wide();
        let failed = rig.ended.iter().filter(|(_, status)| !status.is_ok()).count();
        let (is_live, ended) = (rig.host.state() == ControllerState::Live, rig.ended.len());
        if is_live {
            self.check_works();
        }
        (is_live, ended, failed)
    }

    /// A controller that was repaired works on all queues.
    fn check_works(&mut self) {
        let rig = &mut self.rig;
        rig.fake.borrow_mut().controller.set_namespaces(namespaces(&[device(512), device(4096)].map(Some)));
        rig.host.reset(rig.now_ns);
        rig.run(|rig| !rig.host.is_busy() && rig.commands.is_empty(), 600 * S);
        for op in [Op::Write, Op::Read] {
            for qid in 1..=self.rig.queues.len() as u16 {
                let cookie =
                    self.rig.submit(qid, qid % 2, op, 100 + u64::from(qid)).expect("nothing else is in flight");
                self.finish();
                assert_eq!(self.rig.ended.last(), Some(&(cookie, Status::Ok)), "{op:?} on queue {qid}");
            }
        }
    }

    fn finish(&mut self) {
        let limit_ns = self.rig.now_ns + 2000 * S;
        while self.rig.in_flight() > 0 {
            assert!(
                self.rig.now_ns < limit_ns,
                "{} bios do not end: {:?}",
                self.rig.in_flight(),
                self.rig.host.state()
            );
            for _ in 0..6 {
                self.rig.round();
                for qid in 1..=self.rig.queues.len() as u16 {
                    self.rig.host.forward_doorbells(qid, self.rig.now_ns);
                }
            }
            self.rig.pass();
        }
        self.rig.check();
    }
}

#[test]
fn no_walk_of_both_sides_loses_a_request() {
    let (mut lives, mut bios, mut failures, asked) = (0, 0, 0, seeds());
    let (mut wide, mut faults) = (WideCounts::default(), FaultCounts::default());
    for seed in asked.clone().unwrap_or(0..SEEDS) {
        println!("BLKYARD_SEED={seed}");
        let mut walk = RealWalk::new(seed);
        for _ in 0..STEPS {
            walk.step();
            walk.rig.check();
        }
        let (is_live, ended, failed) = walk.heal();
        let counts = walk.rig.wide.counts;
        wide.succeeded += counts.succeeded;
        wide.refused += counts.refused;
        wide.removed += counts.removed;
        wide.drained += counts.drained;
        faults.fatal += walk.faults.fatal;
        faults.doorbells += walk.rig.fake.borrow().doorbell_faults;
        faults.withdrawn += walk.faults.withdrawn;
        faults.deaf += walk.faults.deaf;
        lives += u64::from(is_live);
        bios += ended as u64;
        failures += failed as u64;
    }
    println!("{lives} controllers were live in the end; of {bios} bios, {failures} failed; {wide:?}; {faults:?}");
    if asked.is_none() {
        assert!(wide.succeeded > SEEDS && wide.refused > SEEDS && wide.removed > SEEDS && wide.drained > SEEDS / 10);
        assert!(lives > SEEDS / 2 && bios > 10 * SEEDS && (bios / 100..bios / 2).contains(&failures));
        let FaultCounts { fatal, doorbells, withdrawn, deaf } = faults;
        assert!(fatal > SEEDS / 10 && doorbells > SEEDS / 10 && withdrawn > SEEDS / 10 && deaf > SEEDS / 10);
    }
}
