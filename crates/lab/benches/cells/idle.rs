//! `idle-*`: one busy client beside idle or nearly idle exports of the same daemon.
//!
//! The daemon has one lane on one CPU; the client, on the other, reads 4 KiB at depth 1 or 32 from a null device.
//! `idle-N-qdD` is its cost per I/O beside N connected queues, four to an export, that are not used; the baseline is
//! the same without them, in alternating windows. The daemon polls for 100 us before it sleeps, and the client never
//! sleeps; `idle-N-qdD-sleeping` is the rate of a client that does, `blkyard bench` by default.
//!
//! `idle-sparse500-*` has ten I/Os a second on each of 500 queues, four at a time, submitted by the same thread; `-p99`
//! is their latency, from submission until that thread sees the last of the four.

use std::cell::RefCell;
use std::path::PathBuf;

use blkyard_lab::floor::{Round, Samples, Variant, WindowPlan, partner_cpu, variant};
use blkyard_os::now_ns;

use crate::clients::{MeasuredSpan, our_bench};
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
/// From one I/O of a sparse queue to its next, ns.
const SPARSE_GAP_NS: u64 = 100_000_000;

/// Measures the cells that are wanted.
pub fn idle_cells(plan: WindowPlan, quick: bool, report: &mut CellReport) {
    let span = MeasuredSpan { seconds: 0.3, runs: if quick { 5 } else { 15 }, windows: 0 };
    let plan = WindowPlan { window_ns: plan.window_ns * 3, windows: plan.windows / 4, warm_up: plan.warm_up / 2 };
    for count in COUNTS {
        let names = DEPTHS.map(|depth| format!("idle-{count}-qd{depth}"));
        if names.iter().any(|name| report.wants(name))
            && let Err(why) = polling(plan, count, &names, report)
        {
            report::skip(&names[0], &why);
        }
        let names = names.map(|name| name + "-sleeping");
        if names.iter().any(|name| report.wants(name))
            && let Err(why) = sleeping(span, count, &names, report)
        {
            report::skip(&names[0], &why);
        }
    }
    let names = DEPTHS.map(|depth| format!("idle-sparse500-qd{depth}"));
    let p99 = "idle-sparse500-p99";
    if names.iter().any(|name| report.wants(name)) || report.wants(p99) {
        sparse(plan, &names, p99, report).unwrap_or_else(|why| report::skip(p99, &why));
    }
}

/// A daemon without idle queues, one with them, and clients that have used each of those once.
struct Ground {
    alone: ListeningServer,
    beside: ListeningServer,
    idle: Vec<Lines<BoxedClock>>,
    _folder: CellFolder,
}

type BoxedClock = Box<dyn FnMut() -> u64>;

fn boxed_clock() -> BoxedClock {
    Box::new(clock())
}

impl Ground {
    fn new(count: usize) -> Result<Ground, String> {
        let (folder, cpu) = (CellFolder::new()?, Some(partner_cpu()?));
        let (alone, _) = ListeningServer::with_idle(&folder, 0, QUEUES, cpu)?;
        let (beside, sockets) = ListeningServer::with_idle(&folder, count / QUEUES, QUEUES, cpu)?;
        let connect = |socket: &PathBuf| lines(socket, QUEUES, 1, false, boxed_clock);
        let mut idle = sockets.iter().map(connect).collect::<Result<Vec<_>, _>>()?;
        idle.iter_mut().try_for_each(|export| first_answer(|| u64::from(export.is_answered())))?;
        Ok(Ground { alone, beside, idle, _folder: folder })
    }
}

fn polling(plan: WindowPlan, count: usize, names: &[String], report: &mut CellReport) -> Result<(), String> {
    let ground = Ground::new(count)?;
    for (name, depth) in names.iter().zip(DEPTHS) {
        let of = |server: &ListeningServer| Ok::<_, String>(variant(lines(&server.socket, 1, depth, false, clock)?));
        let variants = [of(&ground.beside)?, of(&ground.alone)?].map(crate::vhost::paused);
        let ([with, without], _) = measure_beside(plan, &[], variants);
        report.add(Figure::cost(name, &with).beside(Some(without.cost())));
    }
    Ok(())
}

fn sleeping(span: MeasuredSpan, count: usize, names: &[String], report: &mut CellReport) -> Result<(), String> {
    let ground = Ground::new(count)?;
    for (name, depth) in names.iter().zip(DEPTHS) {
        let [mut with, mut without] = [Samples::default(), Samples::default()];
        for _ in 0..span.runs {
            with.push(our_bench(span, &ground.beside.socket, depth, 1)?);
            without.push(our_bench(span, &ground.alone.socket, depth, 1)?);
        }
        report.add(Figure::median(name, "iops", &with).beside(Some(without.percentile(50.0))));
    }
    Ok(())
}

fn sparse(plan: WindowPlan, names: &[String], p99: &str, report: &mut CellReport) -> Result<(), String> {
    let mut ground = Ground::new(500)?;
    let mut latencies = Samples::default();
    for (name, depth) in names.iter().zip(DEPTHS) {
        let busy = lines(&ground.beside.socket, 1, depth, false, clock)?;
        let sparse = SparseLines { busy, idle: &mut ground.idle, next: 0, asked_ns: None, due_ns: 0, latencies };
        let sparse = RefCell::new(sparse);
        let alone = variant(lines(&ground.alone.socket, 1, depth, false, clock)?);
        let [with, without] = {
            let mut rounds = variant(|| sparse.borrow_mut().round());
            let with: Variant<'_> = Box::new(|window_ns| {
                let cost = rounds(window_ns);
                sparse.borrow_mut().settle();
                cost
            });
            measure_beside(plan, &[], [with, alone].map(crate::vhost::paused)).0
        };
        report.add(Figure::cost(name, &with).beside(Some(without.cost())));
        latencies = sparse.into_inner().latencies;
    }
    report.add(Figure { value: latencies.percentile(99.0), ..Figure::median(p99, "ns", &latencies) });
    Ok(())
}

/// A busy client that asks, now and then, on the queues of one export after another.
struct SparseLines<'a, C: FnMut() -> u64> {
    busy: Lines<C>,
    idle: &'a mut [Lines<BoxedClock>],
    /// The export that is asked, or is to be asked next.
    next: usize,
    /// When it was asked, ns.
    asked_ns: Option<u64>,
    due_ns: u64,
    /// Latencies of an export's queues, ns.
    latencies: Samples,
}

impl<C: FnMut() -> u64> SparseLines<'_, C> {
    /// Takes completions: latency between two windows is not counted.
    fn settle(&mut self) {
        while self.asked_ns.is_some() {
            self.round_of_idle(now_ns());
        }
    }

    /// Counts the I/Os of the busy queue only.
    fn round(&mut self) -> u64 {
        let ended = self.busy.round();
        self.round_of_idle(now_ns());
        ended
    }

    fn round_of_idle(&mut self, now_ns: u64) {
        match self.asked_ns {
            Some(asked_ns) if self.idle[self.next].is_answered() => {
                self.latencies.push((now_ns - asked_ns) as f64);
                (self.asked_ns, self.next) = (None, (self.next + 1) % self.idle.len());
            }
            None if now_ns >= self.due_ns => {
                self.idle[self.next].round();
                self.asked_ns = Some(now_ns);
                // Windows of the other daemon are in between: missed I/Os are not repeated.
                self.due_ns = now_ns + SPARSE_GAP_NS / self.idle.len() as u64;
            }
            _ => {}
        }
    }
}
