//! `idle-*`: one busy client beside exports of the same daemon that do nothing, or next to nothing.
//!
//! The daemon has one lane on one CPU; the client, on the other, reads 4 KiB at depth 1 or 32 from a null device.
//! `idle-N-qdD` is its cost per I/O beside N connected queues, four to an export, that are not used; the baseline is
//! the same without them, in windows that lie between. `idle-sparse500-*` has ten I/Os a second on each of 500 queues;
//! `-p99` is how long those take. Client and daemon poll for 100 us before they sleep.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blkyard_lab::floor::{Round, Samples, WindowPlan, partner_cpu, variant};
use blkyard_os::now_ns;

use crate::core::clock;
use crate::limits::measure_beside;
use crate::lines::{Lines, first_answer, lines};
use crate::report::{self, CellReport, Figure};
use crate::servers::{CellFolder, ListeningServer};

/// Queues of one idle export.
const QUEUES: usize = 4;
/// Idle queues beside the busy one.
const COUNTS: [usize; 3] = [12, 100, 500];
const DEPTHS: [usize; 2] = [1, 32];
/// From one I/O of a sparse queue to its next.
const SPARSE_GAP: Duration = Duration::from_millis(100);

/// Measures the cells that are wanted.
pub fn idle_cells(plan: WindowPlan, report: &mut CellReport) {
    let plan = WindowPlan { window_ns: plan.window_ns * 3, windows: plan.windows / 4, warm_up: plan.warm_up / 2 };
    for (count, sparse) in COUNTS.map(|count| (count, false)).into_iter().chain([(500, true)]) {
        let kind = if sparse { "sparse" } else { "" };
        let names = DEPTHS.map(|depth| format!("idle-{kind}{count}-qd{depth}"));
        let p99 = format!("idle-{kind}{count}-p99");
        if !names.iter().chain(sparse.then_some(&p99)).any(|name| report.wants(name)) {
            continue;
        }
        match beside(plan, count, sparse) {
            Ok((costs, latencies)) => {
                for (name, [with, without]) in names.iter().zip(costs) {
                    report.add(Figure::cost(name, &with).beside(Some(without.cost())));
                }
                if sparse {
                    report.add(Figure { value: latencies.percentile(99.0), ..Figure::median(&p99, "ns", &latencies) });
                }
            }
            Err(why) => report::skip(&names[0], &why),
        }
    }
}

/// Asks once on each queue in every [`SPARSE_GAP`], until it is told to stop. Nanoseconds that an export's queues took.
fn ask_now_and_then<C: FnMut() -> u64>(mut idle: Vec<Lines<C>>, stop: &AtomicBool) -> Samples {
    /// Short beside the bound of a millisecond, long beside what a look costs.
    const LOOK: Duration = Duration::from_micros(50);
    let mut latencies = Samples::default();
    let gap = SPARSE_GAP / idle.len().max(1) as u32;
    while !stop.load(Ordering::Relaxed) {
        for export in &mut idle {
            let start_ns = now_ns();
            export.round();
            while !export.is_answered() {
                std::thread::sleep(LOOK);
            }
            latencies.push((now_ns() - start_ns) as f64);
            std::thread::sleep(gap);
        }
    }
    latencies
}

/// The cost of an I/O with the idle queues and without, for each depth; and the latencies of the sparse ones, ns.
fn beside(plan: WindowPlan, count: usize, sparse: bool) -> Result<([[Samples; 2]; 2], Samples), String> {
    let ground = CellFolder::new()?;
    let cpu = Some(partner_cpu()?);
    let (alone, _) = ListeningServer::with_idle(&ground, 0, QUEUES, cpu)?;
    let (server, sockets) = ListeningServer::with_idle(&ground, count / QUEUES, QUEUES, cpu)?;
    let mut idle =
        sockets.iter().map(|socket| lines(socket, QUEUES, 1, false, clock)).collect::<Result<Vec<_>, _>>()?;
    idle.iter_mut().try_for_each(|export| first_answer(|| u64::from(export.is_answered())))?;
    let stop = Arc::new(AtomicBool::new(false));
    let paced = sparse.then(|| {
        let stop = Arc::clone(&stop);
        let idle = std::mem::take(&mut idle);
        std::thread::spawn(move || ask_now_and_then(idle, &stop))
    });
    let mut costs = Vec::new();
    for depth in DEPTHS {
        let of = |server: &ListeningServer| Ok::<_, String>(variant(lines(&server.socket, 1, depth, false, clock)?));
        let variants = [of(&server)?, of(&alone)?].map(crate::vhost::paused);
        let (samples, _) = measure_beside(plan, &[], variants);
        costs.push(samples);
    }
    stop.store(true, Ordering::Relaxed);
    let latencies = paced.map(|thread| thread.join().map_err(|_| "the sparse clients panicked".to_string()));
    let latencies = latencies.transpose()?.unwrap_or_default();
    drop(idle);
    let costs = costs.try_into().map_err(|_| "a depth is missing".to_string())?;
    Ok((costs, latencies))
}
