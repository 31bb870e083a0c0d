//! Cells of the core over memory: the null device, which leaves the core alone, the RAM device, which adds one copy,
//! and a virtio ring with its device on the same thread.

use std::sync::Arc;

use blkyard_lab::floor::{IO_BYTES, Mock, Round, STORE_BYTES, Stamps, WindowPlan, together, variant};
use blkyard_mem::{RegionTable, Segment};
use blkyard_mq::{Bio, BlockDevice, HwQueue, HwQueueConfig, NullConfig, Op, RamDevice, SECTOR_BYTES};
use blkyard_os::Clock;

use crate::limits::measure_beside;
use crate::load::{Load, buffers, info, load_only, null};
use crate::report::{self, CellReport, Figure};
use crate::ring::ring;
use crate::sched::{Queued, deadline, fair, guest, kyber, slices};

/// A clock such as a lane has.
pub fn clock() -> impl Fn() -> u64 {
    let clock = Clock::new();
    move || clock.now_ns()
}

/// `core-null-*` on one thread: the cost of the core, and `load-only-*`, which is a part of each of them.
pub fn null_cells(plan: WindowPlan, report: &mut CellReport) {
    for depth in [1, 8, 32] {
        let name = format!("core-null-b{depth}");
        let [nostats, cost, less] = ["nostats", "stats-cost", "less-load"].map(|what| format!("{name}-{what}"));
        let load = format!("load-only-b{depth}");
        if ![&name, &nostats, &cost, &less, &load].into_iter().any(|cell| report.wants(cell)) {
            continue;
        }
        let variants = [
            variant(null(depth, true, clock())),
            variant(null(depth, false, clock())),
            variant(load_only(depth, clock())),
        ];
        let ([with, without, alone], floors) = measure_beside(plan, &[&name, &nostats, &cost], variants);
        report.add(Figure::cost(&name, &with).over(&floors));
        report.add(Figure::cost(&nostats, &without).over(&floors));
        report.add(Figure::difference(&cost, &with, &without).over(&floors));
        report.add(Figure::difference(&less, &with, &alone));
        report.add(Figure::cost(&load, &alone));
    }
}

/// `core-null-2x2`, and `sched-null-2x2` with time slices: rate of two threads with a queue each, over that of one.
pub fn two_queues_cell(plan: WindowPlan, report: &mut CellReport) {
    two_queues(plan, report, "core-null-2x2", || null(32, true, clock()));
    two_queues(plan, report, "sched-null-2x2", || null(32, true, clock()).scheduled(slices()));
}

fn two_queues<R: Round + Send>(plan: WindowPlan, report: &mut CellReport, cell: &str, core: impl Fn() -> R) {
    if !report.wants(cell) {
        return;
    }
    let mock = || Mock::new(32, Stamps::Batch);
    let both = together(core(), core()).and_then(|cores| Ok((cores, together(mock(), mock())?)));
    match both {
        Err(why) => report::skip(cell, &why),
        Ok((cores, mocks)) => {
            let variants = [variant(core()), cores, variant(mock()), mocks];
            let ([one, two, mock_one, mock_two], _) = measure_beside(plan, &[], variants);
            let floor = mock_one.cost() / mock_two.cost();
            report.add(Figure::times(cell, &one, &two).at_least(floor));
        }
    }
}

/// `sched-*`: a scheduler alone with 10 000 bios queued, and `sched-null-b32`: the core with a scheduler that has no
/// bio to order.
pub fn scheduler_cells(plan: WindowPlan, report: &mut CellReport) {
    let timeslice = |streams| Queued::new(slices(), streams);
    let cells: [(&str, fn(u32) -> Queued, u32); 8] = [
        ("sched-timeslice-64", timeslice, 64),
        ("sched-timeslice-4096", timeslice, 4096),
        ("sched-deadline-64", deadline, 64),
        ("sched-kyber-64", kyber, 64),
        ("sched-fair-64", fair, 64),
        ("sched-fair-4096", fair, 4096),
        ("sched-fair-guest-64", |sequences| guest(u64::from(sequences)), 64),
        ("sched-fair-guest-random", |_| guest(0), 0),
    ];
    for (cell, make, streams) in cells {
        if report.wants(cell) {
            let ([cost], _) = measure_beside(plan, &[], [variant(make(streams))]);
            report.add(Figure::cost(cell, &cost));
        }
    }
    let cell = "sched-null-b32";
    if report.wants(cell) {
        let ([cost], _) = measure_beside(plan, &[], [variant(null(32, true, clock()).scheduled(slices()))]);
        report.add(Figure::cost(cell, &cost));
    }
}

/// `ram-4k-*`: the core and one copy.
pub fn ram_cells(plan: WindowPlan, report: &mut CellReport) {
    for depth in [1, 32] {
        let name = format!("ram-4k-qd{depth}");
        if !report.wants(&name) {
            continue;
        }
        let device = match RamDevice::new(info(), NullConfig::default()) {
            Ok(device) => device,
            Err(error) => {
                report::skip(&name, &format!("{STORE_BYTES} bytes cannot be mapped: {error}"));
                continue;
            }
        };
        write_all(&device);
        let load = Load::new(device.queue(depth), depth, true, clock());
        let ([core], floors) = measure_beside(plan, &[&name], [variant(load)]);
        report.add(Figure::cost(&name, &core).over(&floors));
    }
}

/// `virtio-ring-*`: the core over a driver, a ring and a null device, all on one thread.
pub fn ring_cells(plan: WindowPlan, report: &mut CellReport) {
    for depth in [1, 32, 128] {
        let [split, packed] = ["split", "packed"].map(|format| format!("virtio-ring-{format}-qd{depth}"));
        if ![&split, &packed].into_iter().any(|cell| report.wants(cell)) {
            continue;
        }
        let variants = [variant(ring(false, depth, clock())), variant(ring(true, depth, clock()))];
        let ([of_split, of_packed], _) = measure_beside(plan, &[], variants);
        report.add(Figure::cost(&split, &of_split));
        report.add(Figure::cost(&packed, &of_packed));
    }
}

/// Writes the whole device once, so that every page is allocated.
fn write_all(device: &RamDevice) {
    const BYTES: u32 = 1 << 20;
    let mut queue =
        HwQueue::new(device.queue(1), Arc::new(info()), HwQueueConfig { depth: 1, ..HwQueueConfig::default() });
    let memory = vec![buffers((BYTES / IO_BYTES) as usize)];
    queue.set_memory(&mut (), Arc::new(RegionTable::new(memory)));
    let mut free = vec![Bio::with_capacity(1)];
    for sector in (0..STORE_BYTES / SECTOR_BYTES).step_by(BYTES as usize / SECTOR_BYTES as usize) {
        let Some(mut bio) = free.pop() else { panic!("the bio did not come back") };
        bio.reset();
        (bio.op, bio.sector, bio.sectors) = (Op::Write, sector, BYTES / SECTOR_BYTES as u32);
        bio.segments.push(Segment { region: 0, offset: 0, len: BYTES });
        queue.submit(bio);
        queue.issue(&mut (), 0);
        queue.reap(&mut (), 0, &mut |bio| free.push(bio));
    }
}
