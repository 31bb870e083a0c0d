//! A world: guest, daemon, network, target and device in virtual time, with faults drawn from its seed.
//!
//! First the daemon opens its disk. Then the guest submits requests while faults come. After the last fault all is
//! well again: the requests in flight end, every block is read, and daemon and target end with nothing left.

use std::cell::RefCell;
use std::rc::Rc;

use blkyard_mpath::{HedgeConfig, PathRules, PolicyKind};
use blkyard_mq::{DeviceInfo, FenceEvidence, QueueLimits};
use blkyard_nvme::fabrics::Nqn;
use blkyard_nvme::{FabricsHostConfig, QueueDemand};
use blkyard_sim::Rng;

use crate::daemon::{DaemonConfig, WorldDaemon};
use crate::guest::{BLOCK, WorldGuest};
use crate::handover::{Handover, HandoverStep};
use crate::medium::{Medium, SECTOR};
use crate::network::{Ending, LATE_NS, Network, fold};
use crate::options::{Mutation, StackOptions};
use crate::oracle::version_of;
use crate::socket::WorldClock;
use crate::target::{TargetConfig, WorldTarget};

const MS: u64 = 1_000_000;
/// Longest stall or hang, ns.
const STALL_NS: u64 = 12_000 * MS;
/// Longest time that a target or a daemon is down, ns.
const DOWN_NS: u64 = 8_000 * MS;
/// Time in which bytes of dead associations arrive with [`Mutation::NoSilence`], ns.
const VERY_LATE_NS: u64 = 120_000 * MS;
/// Longest pause between two attempts to connect, ns.
const RECONNECT_NS: u64 = 10_000 * MS;
/// Time for a connection with its Connect, ns.
const CONNECT_NS: u64 = 10_000 * MS;
/// Time for the streams of a lost association to be closed, and quiesce time of the target, ns: those of the product.
const CLOSE_NS: u64 = 5_000 * MS;
const QUIESCE_NS: u64 = 5_000 * MS;
/// Steps of the world without time passing: more is a loop without an end.
const STEPS_MAX: usize = 10_000;

/// What a world has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StackResult {
    /// Requests of the guest, and those that failed.
    pub ios: u64,
    /// See above.
    pub failed: u64,
    /// Faults, by kind.
    pub faults: [u64; FAULT_KINDS],
    /// Virtual time, ns.
    pub took_ns: u64,
    /// The longest time of a request, ns, and the bound for those in flight at the last fault.
    pub longest_ns: u64,
    /// See above.
    pub bound_ns: u64,
    /// Requests that the device has executed.
    pub executed: u64,
    /// Daemons that were replaced while they served.
    pub handovers: u64,
    /// Pieces of streams that came to the target though their host had left the connection.
    pub ghosts: u64,
    /// Reads that were sent to a second path.
    pub hedges: u64,
    /// Those that it answered first.
    pub hedges_won: u64,
    /// Fingerprint of all that happened.
    pub fingerprint: u64,
}

/// Kinds of faults.
pub const FAULT_KINDS: usize = 9;

/// The kinds of faults, by the bits of [`StackOptions::kinds`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Cut,
    StallStream,
    StallPath,
    HangTarget,
    HangDevice,
    KillTarget,
    PowerFailure,
    KillDaemon,
    HandOver,
}

const FAULTS: [Fault; FAULT_KINDS] = [
    Fault::Cut,
    Fault::StallStream,
    Fault::StallPath,
    Fault::HangTarget,
    Fault::HangDevice,
    Fault::KillTarget,
    Fault::PowerFailure,
    Fault::KillDaemon,
    Fault::HandOver,
];

struct StackWorld {
    options: StackOptions,
    rng: Rng,
    network: Network,
    clock: WorldClock,
    medium: Rc<RefCell<Medium>>,
    info: DeviceInfo,
    nqn: Nqn,
    config: DaemonConfig,
    guest: WorldGuest,
    daemon: Option<WorldDaemon>,
    /// Its replacement, while that is under way.
    handover: Option<Handover>,
    /// Daemons that were replaced, or were to be: they end.
    ending: Vec<WorldDaemon>,
    target: Option<WorldTarget>,
    /// When they start again, ns.
    daemon_ns: Option<u64>,
    target_ns: Option<u64>,
    lives: u64,
    /// Time of the next fault, and how many are left.
    fault_ns: Option<u64>,
    faults_left: u64,
    /// Time by which the last fault has ended, ns.
    healed_ns: u64,
    now_ns: u64,
    result: StackResult,
}

/// Runs a world to its end.
///
/// # Panics
/// If an oracle finds a fault.
pub fn run_stack(seed: u64, options: StackOptions) -> StackResult {
    let mut world = StackWorld::new(seed, options);
    world.run_until("the disk is open", |world| world.daemon.as_ref().is_some_and(WorldDaemon::is_serving));
    world.guest.next_ns = Some(world.now_ns);
    world.fault_ns = Some(world.now_ns + 1 + world.rng.below(2 * options.fault_every_ms * MS));
    world.faults_left = options.faults;
    world.run_until("the last request is submitted", |world| {
        if world.guest.submitted >= options.ios && world.fault_ns.is_none() {
            world.guest.next_ns = None;
        }
        world.guest.next_ns.is_none()
    });
    world.run_until("all requests have ended", |world| world.is_idle());
    world.read_all();
    world.finish()
}

impl StackWorld {
    fn new(seed: u64, options: StackOptions) -> StackWorld {
        let mut rng = Rng::new(seed);
        let mut fork = || Rng::new(rng.draw());
        let late_ns = if options.mutation == Mutation::NoSilence { VERY_LATE_NS } else { LATE_NS };
        let network = Network::new(fork(), options.paths as usize, late_ns);
        let sectors = options.blocks as usize * BLOCK;
        let medium = Medium::new(fork(), sectors, options.mutation == Mutation::IgnoreFlush);
        let medium = Rc::new(RefCell::new(medium));
        let info = DeviceInfo {
            capacity_sectors: sectors as u64,
            limits: QueueLimits::default(),
            volatile_cache: true,
            fua: options.fua > 0,
            ..DeviceInfo::default()
        };
        let nqn = |name| Nqn::new(name).expect("a valid name");
        let mut host =
            FabricsHostConfig::new(nqn("nqn.2026-11.example:host"), [7; 16], nqn("nqn.2026-11.example:disk"));
        host.queues = QueueDemand { submitters: options.rings as u16, write_queues: 0, poll_queues: 0 };
        host.queue_entries = 32;
        host.keep_alive_ms = options.keep_alive_ms as u32;
        (host.header_digest, host.data_digest) = (options.digests > 0, options.digests > 0);
        (host.connect_ns, host.reconnect_ns[1], host.quiesce_ns) = (CONNECT_NS, RECONNECT_NS, QUIESCE_NS);
        let config = DaemonConfig {
            host,
            paths: options.paths as usize,
            rules: PathRules {
                policy: PolicyKind::ALL[options.policy as usize % PolicyKind::ALL.len()],
                // More, and sooner, than users have.
                hedged_reads: (options.hedges > 0).then_some(HedgeConfig { one_in: 3, burst: 8, samples_min: 4 }),
                ..PathRules::default()
            },
            path_stats: Rc::default(),
            waits_for_silence: options.mutation != Mutation::NoPause,
            no_path_ns: 600_000 * MS,
            io_max_ns: options.timeout_ms * MS,
            // The order of writes is judged where there is one path for them, and one request for each.
            merging: options.paths > 1,
        };
        let mut guest = WorldGuest::new(
            fork(),
            options.rings as usize,
            options.blocks,
            // Data within the capsule, so that commands are whole in the order in which they come.
            if options.paths > 1 { options.blocks_max } else { options.blocks_max.min(1) },
            options.write_through > 0,
        );
        guest.set_pause(options.faults * options.fault_every_ms * MS / options.ios.max(1));
        guest.next_ns = None;
        let clock = WorldClock::new(&network);
        let mut world = StackWorld {
            options,
            network,
            clock,
            medium,
            info,
            nqn: nqn("nqn.2026-11.example:disk"),
            config,
            guest,
            daemon: None,
            handover: None,
            ending: Vec::new(),
            target: None,
            daemon_ns: Some(0),
            target_ns: Some(0),
            lives: 0,
            fault_ns: None,
            faults_left: 0,
            healed_ns: 0,
            now_ns: 0,
            result: StackResult::default(),
            rng,
        };
        world.result.bound_ns = world.bound_ns();
        world
    }

    /// Time by which all requests have ended once all faults are over. Of a request at a path that is lost at the last
    /// moment: its timeout, the close of its streams, the proof of its silence, the longest pause and the time for a
    /// connect of the next association, and a daemon's start; then the same again for what was lost when that came.
    fn bound_ns(&self) -> u64 {
        2 * (self.config.io_max_ns + CLOSE_NS + self.silence_ns() + RECONNECT_NS + CONNECT_NS)
    }

    /// Time after which a lost association counts as silent.
    fn silence_ns(&self) -> u64 {
        u64::from(self.config.host.keep_alive_ms) * MS + QUIESCE_NS
    }

    fn is_idle(&self) -> bool {
        self.guest.in_flight() == 0 && self.daemon.as_ref().is_some_and(WorldDaemon::is_serving)
    }

    /// Runs until this is true.
    fn run_until(&mut self, what: &str, mut is_done: impl FnMut(&mut StackWorld) -> bool) {
        loop {
            self.settle();
            if is_done(self) {
                return;
            }
            self.judge_time(what);
            let next_ns = self.next_ns().unwrap_or_else(|| panic!("nothing is left to do before {what}"));
            self.now_ns = next_ns.max(self.now_ns + 1);
            self.network.deliver(self.now_ns);
        }
    }

    /// No request in flight is older than its bound, counted from its submission or from the end of the last fault.
    fn judge_time(&self, what: &str) {
        let Some(oldest_ns) = self.guest.oldest_ns() else {
            assert!(
                self.now_ns < self.healed_ns.saturating_add(3_600_000 * MS),
                "the world waits for ever until {what}"
            );
            return;
        };
        let from_ns = if self.fault_ns.is_some() { return } else { self.healed_ns.max(oldest_ns) };
        assert!(
            self.now_ns <= from_ns + self.result.bound_ns,
            "a request is in flight for {} ms, {} ms after the last fault: its bound is {} ms",
            (self.now_ns - oldest_ns) / MS,
            self.now_ns.saturating_sub(self.healed_ns) / MS,
            self.result.bound_ns / MS
        );
    }

    fn next_ns(&self) -> Option<u64> {
        let all = [
            self.network.next_ns(),
            self.daemon.as_ref().and_then(WorldDaemon::next_ns),
            self.handover.as_ref().and_then(Handover::next_ns),
            self.ending.iter().filter_map(WorldDaemon::next_ns).min(),
            self.target.as_ref().and_then(WorldTarget::next_ns),
            self.medium.borrow().next_ns(),
            self.guest.next_ns,
            self.fault_ns,
            self.daemon_ns,
            // A target starts once the device has no request of the last one: its image is locked until then.
            self.target_ns,
            // A hung target wakes.
            self.target.as_ref().map(|target| target.hung_ns).filter(|hung_ns| *hung_ns > self.now_ns),
        ];
        all.into_iter().flatten().min()
    }

    /// Does all there is to do now.
    fn settle(&mut self) {
        for _ in 0..STEPS_MAX {
            let before = self.network.changes();
            let mut is_busy = self.live();
            is_busy |= self.medium.borrow_mut().run(self.now_ns);
            if let Some(target) = &mut self.target {
                is_busy |= target.run(self.now_ns);
            }
            if self.guest.submitted < self.options.ios || self.fault_ns.is_some() {
                is_busy |= self.guest.submit(self.now_ns);
            }
            let (guest, rings) = (&self.guest, self.guest.rings());
            if let Some(daemon) = &mut self.daemon {
                daemon.run(|ring| guest.setup(ring), rings);
            }
            is_busy |= self.hand_over();
            is_busy |= self.guest.reap(self.now_ns);
            self.mutate();
            if !is_busy && self.network.changes() == before {
                return;
            }
        }
        panic!("the world does not come to rest");
    }

    /// Goes on with a handover. Returns whether anything has changed.
    fn hand_over(&mut self) -> bool {
        self.ending.retain_mut(|daemon| !daemon.has_ended());
        let (Some(handover), Some(daemon)) = (&mut self.handover, &mut self.daemon) else { return false };
        let guest = &self.guest;
        let step = handover.step(daemon, |ring| guest.setup(ring));
        let (ends, is_done) = match step {
            HandoverStep::Going => return false,
            HandoverStep::Done => (self.daemon.take(), true),
            HandoverStep::Refused => (None, false),
        };
        let Some(successor) = self.handover.take().map(Handover::into_successor) else { return false };
        let mut old = match ends {
            Some(old) => {
                self.daemon = Some(successor);
                old
            }
            None => successor,
        };
        old.end();
        self.ending.push(old);
        self.result.handovers += u64::from(is_done);
        true
    }

    /// Starts what is due, and lets faults happen.
    fn live(&mut self) -> bool {
        let mut is_busy = false;
        if self.target_ns.is_some_and(|at_ns| at_ns <= self.now_ns) {
            if self.medium.borrow().is_idle() {
                self.target_ns = None;
                self.lives += 1;
                let config = TargetConfig {
                    info: self.info.clone(),
                    nqn: self.nqn.clone(),
                    ports: self.options.paths as usize,
                    has_resets: self.options.resets > 0,
                    keeps_silent: self.options.mutation != Mutation::NoSilence,
                    keeps_deadlines: self.options.mutation != Mutation::NoDeadline,
                    holds: !matches!(self.options.mutation, Mutation::NoHold | Mutation::NoDeadline),
                    judges_order: self.options.paths == 1,
                };
                self.target = Some(WorldTarget::start(&self.network, &self.medium, config, self.lives));
                is_busy = true;
            } else {
                self.target_ns = Some(self.now_ns + MS);
            }
        }
        if self.daemon_ns.is_some_and(|at_ns| at_ns <= self.now_ns) {
            self.daemon_ns = None;
            let rng = Rng::new(self.rng.draw());
            self.daemon = Some(WorldDaemon::start(&self.network, &self.clock, &self.config, rng));
            is_busy = true;
        }
        if self.fault_ns.is_some_and(|at_ns| at_ns <= self.now_ns) {
            self.fault();
            self.faults_left -= 1;
            let pause_ns = 1 + self.rng.below(2 * self.options.fault_every_ms * MS);
            self.fault_ns = (self.faults_left > 0).then_some(self.now_ns + pause_ns);
            is_busy = true;
        }
        is_busy
    }

    fn mutate(&mut self) {
        if self.options.mutation == Mutation::SkipFence
            && let Some(daemon) = &self.daemon
        {
            daemon.monitors().for_each(|monitor| monitor.fence(u32::MAX, FenceEvidence::QuiesceElapsed));
        }
    }

    /// Lets a fault happen.
    fn fault(&mut self) {
        let kinds: Vec<usize> = (0..FAULT_KINDS).filter(|kind| self.options.kinds >> kind & 1 > 0).collect();
        if kinds.is_empty() {
            return;
        }
        let number = kinds[self.rng.below(kinds.len() as u64) as usize];
        let fault = FAULTS[number];
        // Most are short.
        let long = if self.rng.below(3) == 0 { STALL_NS } else { STALL_NS / 20 };
        let down = if self.rng.below(3) == 0 { DOWN_NS } else { DOWN_NS / 20 };
        let (for_ns, down_ns) = (1 + self.rng.below(long), 1 + self.rng.below(down));
        let until_ns = self.now_ns + for_ns;
        let mut healed_ns = self.now_ns;
        match fault {
            Fault::Cut => self.network.trouble_one(None),
            Fault::StallStream => {
                self.network.trouble_one(Some(for_ns));
                healed_ns = until_ns;
            }
            Fault::StallPath => {
                let path = self.rng.below(self.options.paths) as usize;
                self.network.stall_path(path, until_ns);
                healed_ns = until_ns;
            }
            Fault::HangTarget => {
                if let Some(target) = &mut self.target {
                    target.hung_ns = target.hung_ns.max(until_ns);
                    healed_ns = until_ns;
                }
            }
            Fault::HangDevice => {
                self.medium.borrow_mut().hang(until_ns);
                healed_ns = until_ns;
            }
            Fault::KillTarget | Fault::PowerFailure => {
                if let Some(target) = self.target.take() {
                    let is_power = fault == Fault::PowerFailure;
                    self.result.ghosts += target.ghosts;
                    target.die(if is_power { Ending::Silence } else { Ending::Death });
                    if is_power {
                        self.medium.borrow_mut().cut_power();
                        self.guest.oracle.power_fails();
                    }
                    self.target_ns = Some(self.now_ns + down_ns);
                    healed_ns = self.now_ns + down_ns;
                }
            }
            Fault::KillDaemon => {
                if let Some(daemon) = self.daemon.take() {
                    daemon.die();
                    // A new one does not go on without the state of the old one.
                    self.handover.take().into_iter().for_each(|handover| handover.into_successor().die());
                    // What it had published is with the guest.
                    self.guest.reap(self.now_ns);
                    if self.options.mutation == Mutation::Reorder {
                        self.guest.disorder();
                    }
                    self.daemon_ns = Some(self.now_ns + down_ns);
                    healed_ns = self.now_ns + down_ns;
                }
            }
            Fault::HandOver => {
                if self.handover.is_none() && self.daemon.as_ref().is_some_and(WorldDaemon::is_serving) {
                    let rng = Rng::new(self.rng.draw());
                    let successor = WorldDaemon::start(&self.network, &self.clock, &self.config, rng);
                    self.handover = Some(Handover::to(successor, self.rng.below(4) == 0));
                }
            }
        }
        self.result.faults[number] += 1;
        self.healed_ns = self.healed_ns.max(healed_ns);
    }

    /// Reads every block as the guest does.
    fn read_all(&mut self) {
        for block in 0..self.options.blocks {
            self.run_until("a slot is free", |world| world.guest.in_flight() == 0);
            assert!(self.guest.read_block(block, self.now_ns));
        }
        self.run_until("all blocks are read", |world| world.guest.in_flight() == 0);
    }

    /// Ends in order: nothing is left.
    fn finish(mut self) -> StackResult {
        self.run_until("no daemon is being replaced", |world| world.handover.is_none() && world.is_idle());
        if let Some(daemon) = &mut self.daemon {
            daemon.end();
        }
        self.run_until("the daemon has ended", |world| {
            let has_ended = world.daemon.as_mut().is_some_and(WorldDaemon::has_ended);
            has_ended && world.ending.is_empty() && world.target.as_ref().is_some_and(|target| target.in_use() == 0)
        });
        self.daemon = None;
        assert!(!self.medium.borrow().has_data(), "the device has a request that nobody waits for");
        // A controller that is shut down is flushed, whether its host waits for that or not.
        self.run_until("the device has flushed", |world| world.medium.borrow().is_idle());
        assert_eq!(self.network.open(), 0, "connections are left");
        let medium = self.medium.borrow();
        for sector in 0..self.options.blocks as usize * BLOCK {
            let bytes = medium.sector(sector);
            let bounds = self.guest.oracle.read(sector, 1);
            assert_eq!(bytes.len(), SECTOR);
            version_of(bytes);
            self.guest.oracle.check(sector, bytes, &bounds);
        }
        let mut result = self.result;
        (result.ios, result.failed) = (self.guest.ended, self.guest.failed);
        (result.took_ns, result.longest_ns) = (self.now_ns, self.guest.longest_ns);
        result.executed = medium.executed;
        result.ghosts += self.target.as_ref().map_or(0, |target| target.ghosts);
        let stats = self.config.path_stats.borrow();
        for path in stats.iter().flat_map(|stats| (0..self.options.paths as usize).map(|path| stats.path(path))) {
            result.hedges += path.hedges;
            result.hedges_won += path.hedges_won;
        }
        let traces = [self.network.trace(), medium.trace(), self.guest.trace(), self.now_ns];
        result.fingerprint = fold(0, traces);
        result
    }
}
