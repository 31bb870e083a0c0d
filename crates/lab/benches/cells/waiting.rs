//! `wait-*`: cost of a daemon with little or no work, and the benefit of its busy-polling.
//!
//! `wait-idle-16q` is the CPU of an idle daemon with sixteen attached queues. For the others a client that never sleeps
//! submits 4 KiB reads at a constant rate of 20 000 a second, independent of completions; latency counts from the time
//! at which each was due. The daemon on the other CPU sleeps at once (`sleep`), has its defaults (`usual`), or never
//! sleeps (`busy`); all in turn. Its disk takes no time (`null`) or as long as flash does (`flash`).

use std::sync::Arc;
use std::time::Duration;

use blkyard_attach::{AttachConfig, Attached, AttachedQueue};
use blkyard_lab::floor::{IO_BYTES, RandomOffsets, Samples, partner_cpu};
use blkyard_mem::{Region, RegionTable};
use blkyard_mq::{Bio, HwQueue, HwQueueConfig, QueueKind};
use blkyard_os::{Clock, SystemClock, now_ns};

use crate::lines::{DirectSignals, first_answer};
use crate::load::{bios, fill};
use crate::report::{self, CellReport, Figure};
use crate::servers::{CellFolder, ListeningServer};

/// 20 000 a second.
const GAP_NS: u64 = 50_000;
/// Many times the rate's usual number in flight.
const DEPTH: usize = 64;
const IDLE_QUEUES: usize = 16;

/// Disks, by their names here and there.
const DISKS: [(&str, &str); 2] = [("null", "null:1G"), ("flash", "null:1G?latency_us=80")];

/// Waiting modes of a daemon: name here, and spin time, us.
const WAYS: [(&str, Option<u64>); 3] = [("sleep", Some(0)), ("usual", None), ("busy", Some(1000))];

pub fn waiting_cells(quick: bool, report: &mut CellReport) {
    let (window, windows) = if quick { (Duration::from_millis(300), 3) } else { (Duration::from_secs(1), 10) };
    let cell = format!("wait-idle-{IDLE_QUEUES}q-cpu");
    if report.wants(&cell) {
        match idle(window, windows) {
            Ok(share) => report.add(Figure::median(&cell, "%", &share)),
            Err(why) => report::skip(&cell, &why),
        }
    }
    for (disk, spec) in DISKS {
        let name = |way: &str, what: &str| format!("wait-20k-{disk}-{way}-{what}");
        if !WAYS.iter().any(|(way, _)| ["p50", "p99", "cpu"].iter().any(|what| report.wants(&name(way, what)))) {
            continue;
        }
        match paced(spec, window, windows) {
            Ok(ways) => {
                let busy = ways[WAYS.len() - 1].each_ref().map(|samples| samples.percentile(50.0));
                for ((way, _), figures) in WAYS.iter().zip(&ways) {
                    for (place, (what, unit)) in [("p50", "ns"), ("p99", "ns"), ("cpu", "%")].into_iter().enumerate() {
                        let figure = Figure::median(&name(way, what), unit, &figures[place]);
                        report.add(figure.beside(Some(busy[place])));
                    }
                }
            }
            Err(why) => report::skip(&name("usual", "p99"), &why),
        }
    }
}

/// Share of a CPU that an idle daemon takes, percent.
fn idle(window: Duration, windows: usize) -> Result<Samples, String> {
    let ground = CellFolder::new()?;
    let server = ListeningServer::ours(&ground, DISKS[0].1, IDLE_QUEUES, None, None)?;
    let disk = attach(&server)?;
    let mut clients = (0..IDLE_QUEUES).map(|_| WaitingClient::of(&disk)).collect::<Result<Vec<_>, _>>()?;
    clients.iter_mut().try_for_each(WaitingClient::ask_once)?;
    let mut share = Samples::default();
    for _ in 0..windows {
        let (before_ns, start_ns) = (server.cpu_ns()?, now_ns());
        std::thread::sleep(window);
        share.push(percent(server.cpu_ns()? - before_ns, now_ns() - start_ns));
    }
    Ok(share)
}

/// Half of all latencies, 99 of 100 of them, and the daemon's CPU; for each way.
fn paced(spec: &str, window: Duration, windows: usize) -> Result<Vec<[Samples; 3]>, String> {
    let (ground, cpu) = (CellFolder::new()?, Some(partner_cpu()?));
    let start = |(_, spin_us)| {
        let server = ListeningServer::ours(&ground, spec, 1, cpu, spin_us)?;
        let disk = attach(&server)?;
        let mut client = WaitingClient::of(&disk)?;
        client.ask_once()?;
        Ok::<_, String>((client, disk, server))
    };
    let mut started = WAYS.into_iter().map(start).collect::<Result<Vec<_>, _>>()?;
    let mut ways = vec![<[Samples; 3]>::default(); WAYS.len()];
    let mut latencies = Vec::new();
    for _ in 0..windows {
        for ((client, _, server), figures) in started.iter_mut().zip(&mut ways) {
            // Longer than the previous server's busy-polling.
            std::thread::sleep(Duration::from_millis(5));
            latencies.clear();
            let (before_ns, start_ns) = (server.cpu_ns()?, now_ns());
            client.ask_evenly(window, &mut latencies);
            figures[2].push(percent(server.cpu_ns()? - before_ns, now_ns() - start_ns));
            latencies.sort_unstable();
            for (samples, percent) in figures.iter_mut().zip([50, 99]) {
                samples.push(latencies[(latencies.len() - 1) * percent / 100] as f64);
            }
        }
    }
    Ok(ways)
}

fn attach(server: &ListeningServer) -> Result<Attached, String> {
    Attached::open(AttachConfig::new(&server.socket, Arc::new(SystemClock))).map_err(|error| error.to_string())
}

fn percent(used_ns: u64, passed_ns: u64) -> f64 {
    used_ns as f64 * 100.0 / passed_ns as f64
}

/// One queue, and a thread that polls it.
struct WaitingClient {
    queue: HwQueue<AttachedQueue>,
    free: Vec<Box<Bio>>,
    /// When each was due, by cookie.
    due_ns: [u64; DEPTH],
    places: RandomOffsets,
    clock: Clock,
}

impl WaitingClient {
    fn of(disk: &Attached) -> Result<WaitingClient, String> {
        let driver = disk.queue(QueueKind::Poll, DEPTH).map_err(|error| error.to_string())?;
        let config = HwQueueConfig { depth: DEPTH, bios_max: DEPTH, ..HwQueueConfig::default() };
        let mut queue = HwQueue::new(driver, Arc::new(disk.info().clone()), config);
        let memory = Region::shared(DEPTH * IO_BYTES as usize).map_err(|error| error.to_string())?;
        queue.set_memory(&mut DirectSignals, Arc::new(RegionTable::new(vec![memory])));
        Ok(WaitingClient {
            queue,
            free: bios(DEPTH),
            due_ns: [0; DEPTH],
            places: RandomOffsets::new(),
            clock: Clock::new(),
        })
    }

    /// Submits the read that was due then, if a bio is free.
    fn ask(&mut self, due_ns: u64) {
        if let Some(mut bio) = self.free.pop() {
            self.due_ns[bio.cookie as usize] = due_ns;
            fill(&mut bio, &mut self.places);
            self.queue.submit(bio);
        }
    }

    /// Returns how many came back.
    fn look(&mut self, now_ns: u64, ended: &mut impl FnMut(u64)) -> usize {
        let WaitingClient { queue, free, due_ns, .. } = self;
        queue.issue(&mut DirectSignals, now_ns);
        queue.reap(&mut DirectSignals, now_ns, &mut |bio| {
            ended(now_ns - due_ns[bio.cookie as usize]);
            free.push(bio);
        })
    }

    fn ask_once(&mut self) -> Result<(), String> {
        self.ask(now_ns());
        first_answer(|| self.look(now_ns(), &mut |_| ()) as u64)
    }

    fn ask_evenly(&mut self, window: Duration, latencies: &mut Vec<u64>) {
        let mut due_ns = self.clock.now_ns();
        let until_ns = due_ns + window.as_nanos() as u64;
        while due_ns < until_ns || !self.queue.is_idle() {
            let now_ns = self.clock.now_ns();
            if now_ns >= due_ns && due_ns < until_ns {
                self.ask(due_ns);
                due_ns += GAP_NS;
            }
            self.look(now_ns, &mut |latency_ns| latencies.push(latency_ns));
        }
    }
}
