//! Clients in a closed loop over model paths, in virtual time. The policies are those of `blkyard_mpath`.

use blkyard_mpath::{
    HedgeConfig, HedgeTimer, LatencyPolicy, PathChoice, PathIo, PathPolicy, PathSet, PathState, PolicyKind,
};
use blkyard_mq::{OpClass, TrackerConfig};
use blkyard_sim::{Events, ModelPath, PathModel, Rng};

use super::oracle::{OracleRule, PathOracle};

/// Clients start within this part of the run: the first of so many.
const START_SHARE: u64 = 20;

/// Paths and the load on them.
#[derive(Clone, Debug)]
pub(crate) struct PathScene {
    pub(crate) paths: Vec<PathModel>,
    /// Changes of a path: time, index, and its new properties; in order of time.
    pub(crate) changes: Vec<(u64, usize, PathModel)>,
    /// I/Os in flight, of all hosts.
    pub(crate) clients: u64,
    /// Hosts that choose without knowing of each other.
    pub(crate) hosts: u64,
    /// Sizes of I/Os, drawn with equal chances.
    pub(crate) sizes: Vec<u32>,
    /// Part of the I/Os that are writes, in per cent.
    pub(crate) writes: u64,
    /// Length of the run.
    pub(crate) run_ns: u64,
    /// Whether all clients start at once, as the jobs of `bench` do.
    pub(crate) starts_at_once: bool,
}

impl PathScene {
    /// Reads of 512 bytes by one host.
    pub(crate) fn new(paths: Vec<PathModel>, clients: u64, run_ns: u64) -> PathScene {
        PathScene {
            paths,
            changes: Vec::new(),
            clients,
            hosts: 1,
            sizes: vec![512],
            writes: 0,
            run_ns,
            starts_at_once: false,
        }
    }
}

/// What chooses the path of each I/O.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Chooser {
    Policy(PolicyKind),
    Latency(TrackerConfig),
    /// `adaptive` with hedged reads.
    Hedged,
    Oracle(OracleRule),
    /// So many of the clients on the first path, the others on the second.
    Split(u64),
}

/// What a run measured.
#[derive(Clone, Debug, Default)]
pub(crate) struct PathRun {
    pub(crate) ios: u64,
    pub(crate) iops: f64,
    pub(crate) mean_us: f64,
    pub(crate) stdev_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) p999_us: f64,
    /// I/Os by path, hedges included.
    pub(crate) by_path: Vec<u64>,
    pub(crate) hedges: u64,
    /// Part of the I/Os that were sent while another path had none.
    pub(crate) beside_idle: f64,
}

/// A host's policy.
enum HostPolicy {
    Policy(Box<dyn PathPolicy>),
    Oracle(PathOracle),
    Split(u64),
}

enum PathEvent {
    Complete {
        client: usize,
        serial: u64,
        io: PathIo,
        taken: Taken,
    },
    Hedge {
        client: usize,
        serial: u64,
        io: PathIo,
        first: usize,
    },
    Change(usize),
    /// A client's first I/O.
    Start(usize),
}

/// A path in use by an I/O.
struct Taken {
    path: usize,
    start_ns: u64,
    is_hedge: bool,
    choice: Option<PathChoice>,
}

struct Rig<'a> {
    scene: &'a PathScene,
    paths: Vec<ModelPath>,
    set: PathSet,
    /// The set without one path, by path: for the second path of a hedged read.
    others: Vec<PathSet>,
    hosts: Vec<HostPolicy>,
    hedge: Option<Vec<HedgeTimer>>,
    events: Events<PathEvent>,
    /// By client: number of the I/O in flight, and its start.
    current: Vec<(u64, u64)>,
    rng: Rng,
    latencies_ns: Vec<u64>,
    /// I/Os in flight, by path.
    in_flight: Vec<u64>,
    /// Number of I/Os that were sent while another path had none.
    beside_idle: u64,
    result: PathRun,
}

/// Runs a scene with a policy.
pub(crate) fn play(scene: &PathScene, chooser: Chooser, seed: u64) -> PathRun {
    let mut set = PathSet::new();
    scene.paths.iter().for_each(|_| assert!(set.add(PathState::default(), 0).is_some(), "too many paths"));
    let without = |path| {
        let mut set = set.clone();
        set.set_state(path, PathState { ready: false, ..PathState::default() });
        set
    };
    let host = |_| match chooser {
        Chooser::Policy(kind) => HostPolicy::Policy(kind.build(TrackerConfig::default())),
        Chooser::Latency(config) => HostPolicy::Policy(Box::new(LatencyPolicy::new(config))),
        Chooser::Hedged => HostPolicy::Policy(PolicyKind::Adaptive.build(TrackerConfig::default())),
        Chooser::Oracle(rule) => HostPolicy::Oracle(PathOracle::new(rule, scene.paths.len(), scene.hosts)),
        Chooser::Split(first) => HostPolicy::Split(first),
    };
    let mut rig = Rig {
        scene,
        paths: scene.paths.iter().zip(1..).map(|(model, n)| ModelPath::new(*model, seed ^ n << 32)).collect(),
        others: (0..scene.paths.len()).map(without).collect(),
        set,
        hosts: (0..scene.hosts).map(host).collect(),
        hedge: (chooser == Chooser::Hedged)
            .then(|| (0..scene.hosts).map(|_| HedgeTimer::new(HedgeConfig::default())).collect()),
        events: Events::default(),
        current: vec![(0, 0); scene.clients as usize],
        rng: Rng::new(seed),
        latencies_ns: Vec::new(),
        in_flight: vec![0; scene.paths.len()],
        beside_idle: 0,
        result: PathRun { by_path: vec![0; scene.paths.len()], ..PathRun::default() },
    };
    rig.run();
    rig.finish()
}

impl Rig<'_> {
    fn run(&mut self) {
        for (number, (at_ns, ..)) in self.scene.changes.iter().enumerate() {
            self.events.at(*at_ns, PathEvent::Change(number));
        }
        // Usually one after the other: all at once would be an unmeasured burst on every path.
        let clients = self.scene.clients;
        let start_ns = if self.scene.starts_at_once { 0 } else { self.scene.run_ns / START_SHARE };
        for client in 0..clients {
            self.events.at(start_ns * client / clients, PathEvent::Start(client as usize));
        }
        while self.events.next_ns().is_some_and(|ns| ns < self.scene.run_ns) {
            match self.events.advance() {
                Some(PathEvent::Complete { client, serial, io, taken }) => self.complete(client, serial, io, taken),
                Some(PathEvent::Hedge { client, serial, io, first }) => self.hedge(client, serial, io, first),
                Some(PathEvent::Change(number)) => {
                    let (_, path, model) = self.scene.changes[number];
                    self.paths[path].set_model(model);
                }
                Some(PathEvent::Start(client)) => self.submit(client),
                None => {}
            }
        }
    }

    fn submit(&mut self, client: usize) {
        let now_ns = self.events.now_ns();
        let bytes = self.scene.sizes[self.rng.below(self.scene.sizes.len() as u64) as usize];
        let class = if self.rng.below(100) < self.scene.writes { OpClass::Write } else { OpClass::Read };
        let io = PathIo { class, bytes, node: 0 };
        let host = client % self.hosts.len();
        let (path, choice) = match &mut self.hosts[host] {
            HostPolicy::Policy(policy) => {
                let Some(choice) = policy.choose(&self.set, &io, now_ns) else { unreachable!("all paths are usable") };
                (choice.path, Some(choice))
            }
            HostPolicy::Oracle(oracle) => (oracle.choose(&self.paths, bytes, now_ns), None),
            HostPolicy::Split(first) => (usize::from(client as u64 >= *first), None),
        };
        let serial = self.current[client].0 + 1;
        self.current[client] = (serial, now_ns);
        self.send(client, serial, io, Taken { path, start_ns: now_ns, is_hedge: false, choice });
        if let Some(timers) = &self.hedge
            && let Some(due_ns) = timers[host].due_ns(&io, now_ns)
        {
            self.events.at(due_ns, PathEvent::Hedge { client, serial, io, first: path });
        }
    }

    fn send(&mut self, client: usize, serial: u64, io: PathIo, taken: Taken) {
        self.result.by_path[taken.path] += 1;
        let mut others = self.in_flight.iter().enumerate().filter(|(path, _)| *path != taken.path);
        self.beside_idle += u64::from(others.any(|(_, in_flight)| *in_flight == 0));
        self.in_flight[taken.path] += 1;
        let ends_ns = self.paths[taken.path].submit(self.events.now_ns(), io.bytes);
        self.events.at(ends_ns, PathEvent::Complete { client, serial, io, taken });
    }

    fn hedge(&mut self, client: usize, serial: u64, io: PathIo, first: usize) {
        let (now_ns, host) = (self.events.now_ns(), client % self.hosts.len());
        let (Some(timers), HostPolicy::Policy(policy)) = (&mut self.hedge, &mut self.hosts[host]) else { return };
        if self.current[client].0 != serial || !timers[host].take() {
            return;
        }
        let Some(choice) = policy.choose(&self.others[first], &io, now_ns) else { return };
        self.result.hedges += 1;
        let taken = Taken { path: choice.path, start_ns: now_ns, is_hedge: true, choice: Some(choice) };
        self.send(client, serial, io, taken);
    }

    fn complete(&mut self, client: usize, serial: u64, io: PathIo, taken: Taken) {
        let (now_ns, host) = (self.events.now_ns(), client % self.hosts.len());
        self.paths[taken.path].complete();
        self.in_flight[taken.path] -= 1;
        match (&mut self.hosts[host], taken.choice) {
            (HostPolicy::Policy(policy), Some(choice)) => policy.complete(choice, now_ns),
            (HostPolicy::Oracle(oracle), _) => oracle.complete(taken.path, io.bytes),
            _ => {}
        }
        let is_first = self.current[client].0 == serial;
        if let Some(timers) = &mut self.hedge
            && !taken.is_hedge
        {
            timers[host].completed(&io, Some(now_ns - taken.start_ns));
        }
        if is_first {
            self.latencies_ns.push(now_ns - self.current[client].1);
            self.submit(client);
        }
    }

    fn finish(mut self) -> PathRun {
        self.latencies_ns.sort_unstable();
        let (count, latencies) = (self.latencies_ns.len(), &self.latencies_ns);
        let of = |part: f64| latencies.get((count as f64 * part) as usize).map_or(f64::NAN, |ns| *ns as f64 / 1e3);
        let mean_us = latencies.iter().sum::<u64>() as f64 / count as f64 / 1e3;
        let variance = latencies.iter().map(|ns| (*ns as f64 / 1e3 - mean_us).powi(2)).sum::<f64>() / count as f64;
        PathRun {
            ios: count as u64,
            iops: count as f64 * 1e9 / self.scene.run_ns as f64,
            mean_us,
            stdev_us: variance.sqrt(),
            p99_us: of(0.99),
            p999_us: of(0.999),
            beside_idle: self.beside_idle as f64 / self.result.by_path.iter().sum::<u64>().max(1) as f64,
            ..self.result
        }
    }
}
