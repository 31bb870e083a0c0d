//! `asleep-*`: a daemon with its defaults and clients that sleep until their I/O has completed, as guests do and
//! `blkyard bench` does by default.
//!
//! `asleep-null-qdD` and `asleep-ram-qdD` are I/Os a second of 4 KiB reads from one client; the baseline is the best of
//! four daemons with a fixed `--spin-us`. `-cpu` is the daemon's CPU time for an I/O, beside that of the same best one.
//! `asleep-nvme-*` are the same over vfio-user, the others over vhost-user.
//! `asleep-crowd-*` has four jobs and four lanes, more threads than a small machine has CPUs; there the baseline is the
//! daemon that never looks for work.
//! `asleep-queues2-*` and `asleep-queues4-*` have two and four jobs with a queue each; there the baseline is the best
//! of the same jobs with fewer queues. Every program may use all CPUs; the daemons are asked in turn.

use blkyard_lab::floor::{STORE_BYTES, Samples};

use crate::clients::usual_load;
use crate::report::{self, CellReport, Figure};
use crate::servers::{CellFolder, CellStore, CellTransport, ListeningServer};

const DEPTHS: [usize; 3] = [1, 8, 32];

/// Queues that the jobs use, and options of the daemon.
type AsleepDaemon = (usize, &'static [&'static str]);

/// The daemon that is measured, and those it is compared with.
const ALONE: [AsleepDaemon; 5] = [
    (1, &[]),
    (1, &["--spin-us", "0"]),
    (1, &["--spin-us", "50"]),
    (1, &["--spin-us", "200"]),
    (1, &["--spin-us", "1000"]),
];
const CROWD: [AsleepDaemon; 2] = [(2, &["--lanes", "4"]), (2, &["--lanes", "4", "--spin-us", "0"])];
const QUEUES2: [AsleepDaemon; 2] = [(2, &[]), (1, &[])];
const QUEUES4: [AsleepDaemon; 3] = [(4, &[]), (2, &[]), (1, &[])];

/// Jobs of one client, and its daemons.
struct AsleepBed {
    name: &'static str,
    transport: CellTransport,
    jobs: usize,
    daemons: &'static [AsleepDaemon],
}

const BEDS: [AsleepBed; 5] = [
    AsleepBed { name: "", transport: CellTransport::Vhost, jobs: 1, daemons: &ALONE },
    AsleepBed { name: "nvme-", transport: CellTransport::Vfio, jobs: 1, daemons: &ALONE },
    AsleepBed { name: "crowd-", transport: CellTransport::Vhost, jobs: 4, daemons: &CROWD },
    AsleepBed { name: "queues2-", transport: CellTransport::Vhost, jobs: 2, daemons: &QUEUES2 },
    AsleepBed { name: "queues4-", transport: CellTransport::Vhost, jobs: 4, daemons: &QUEUES4 },
];

/// I/Os a second, and CPU time of the daemon for an I/O, ns.
type Figures = [Samples; 2];

pub fn asleep_cells(quick: bool, report: &mut CellReport) {
    let (seconds, runs) = if quick { (0.5, 3) } else { (1.0, 9) };
    for store in [CellStore::Null, CellStore::Ram] {
        for bed in &BEDS {
            for depth in DEPTHS {
                let name = format!("asleep-{}{}-qd{depth}", bed.name, store.name());
                if !report.wants(&name) {
                    continue;
                }
                match measure(store, bed, depth, seconds, runs) {
                    Ok(figures) => add(&name, &figures, report),
                    Err(why) => report::skip(&name, &why),
                }
            }
        }
    }
}

fn add(name: &str, figures: &[Figures], report: &mut CellReport) {
    let Some((usual, others)) = figures.split_first() else { return };
    let of = |figures: &Figures| figures.each_ref().map(|samples| samples.percentile(50.0));
    let Some([best, its_cpu]) = others.iter().map(of).max_by(|one, other| one[0].total_cmp(&other[0])) else { return };
    report.add(Figure::median(name, "iops", &usual[0]).beside(Some(best)));
    report.add(Figure::median(&format!("{name}-cpu"), "ns", &usual[1]).beside(Some(its_cpu)));
}

fn measure(store: CellStore, bed: &AsleepBed, depth: usize, seconds: f64, runs: usize) -> Result<Vec<Figures>, String> {
    let ground = CellFolder::new()?;
    let AsleepBed { transport, jobs, daemons, .. } = bed;
    let (device, export) = (format!("{}:{STORE_BYTES}", store.name()), format!("?queues={jobs}"));
    let start = |(_, options): &AsleepDaemon| ListeningServer::usual(&ground, &device, *transport, &export, options);
    let servers = daemons.iter().map(start).collect::<Result<Vec<_>, _>>()?;
    let mut figures = vec![Figures::default(); daemons.len()];
    for _ in 0..runs {
        for ((server, (queues, _)), [rate, cost]) in servers.iter().zip(*daemons).zip(&mut figures) {
            let load = format!("--rw randread --bs 4k --iodepth {depth} --numjobs {jobs} --queues {queues}");
            let before_ns = server.cpu_ns()?;
            let iops = usual_load(seconds, *transport, &server.socket, &load)?;
            rate.push(iops);
            cost.push((server.cpu_ns()? - before_ns) as f64 / (iops * seconds));
        }
    }
    Ok(figures)
}
