//! `vhost-*`: our virtio-blk driver on one CPU and a vhost-user-blk server on another, ours or qemu-storage-daemon, in
//! turn.
//!
//! Driver and core poll, and ring only if they are asked to. Before each window is a pause in which the server of the
//! last one goes to sleep, since all of them share a CPU.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blkyard_lab::floor::{HAND_OFF, MachineLimit, STORE_BYTES, Variant, WindowPlan, partner_cpu, variant};
use blkyard_mem::{Region, RegionTable, Segment};
use blkyard_mq::{Bio, DeviceInfo, Driver, HwQueue, HwQueueConfig, Op, QueueKind, SECTOR_BYTES};
use blkyard_os::now_ns;

use crate::core::clock;
use crate::limits::measure_beside;
use crate::lines::{DirectSignals, attach, first_answer, lines, one_core};
use crate::report::{self, CellReport, Figure};
use crate::servers::{CellFolder, CellStore, ListeningServer, Who};

/// Longer than it takes a server that has no work to sleep.
const PAUSE: Duration = Duration::from_millis(1);

/// With a pause before each window.
pub fn paused(mut inner: Variant<'_>) -> Variant<'_> {
    Box::new(move |window_ns| {
        std::thread::sleep(PAUSE);
        inner(window_ns)
    })
}

/// Cells of our driver: by device, depth, format of the ring, queues.
pub fn driver_cells(plan: WindowPlan, report: &mut CellReport) {
    // Longer than those of one thread: in the first microseconds of each a server wakes up.
    let plan = WindowPlan { window_ns: plan.window_ns * 3, windows: plan.windows / 4, warm_up: plan.warm_up / 2 };
    for store in [CellStore::Null, CellStore::Ram] {
        for (depth, queues) in [(1, 1), (8, 1), (32, 1), (128, 1), (1, 2), (32, 2), (128, 2)] {
            let some = if queues == 1 { String::new() } else { format!("-{queues}q") };
            let name = format!("vhost-{}-qd{depth}{some}", store.name());
            let packed = format!("{name}-packed");
            if !report.wants(&name) && !report.wants(&packed) {
                continue;
            }
            if let Err(why) = two_cores(plan, report, store, depth, queues, [&name, &packed]) {
                report::skip(&name, &why);
            }
        }
    }
    for (depth, queues) in [(1, 1), (32, 1), (128, 1), (32, 2)] {
        let some = if queues == 1 { String::new() } else { format!("-{queues}q") };
        let [split, packed] = ["", "-packed"].map(|format| format!("vhost-null-one-core-qd{depth}{some}{format}"));
        if ![&split, &packed].into_iter().any(|cell| report.wants(cell)) {
            continue;
        }
        match (one_core(queues, depth, false, clock), one_core(queues, depth, true, clock)) {
            (Ok(of_split), Ok(of_packed)) => {
                let variants = [variant(of_split), variant(of_packed)];
                let ([of_split, of_packed], _) = measure_beside(plan, &[], variants);
                report.add(Figure::cost(&split, &of_split));
                report.add(Figure::cost(&packed, &of_packed));
            }
            (Err(why), _) | (_, Err(why)) => report::skip(&split, &why),
        }
    }
}

fn two_cores(
    plan: WindowPlan,
    report: &mut CellReport,
    store: CellStore,
    depth: usize,
    queues: usize,
    [name, packed_name]: [&str; 2],
) -> Result<(), String> {
    let ground = CellFolder::new()?;
    let cpu = Some(partner_cpu()?);
    let server = |who| ListeningServer::start(&ground, who, store, queues, cpu);
    // A daemon for each, so that no other queue is on its lane.
    let (split, packed) = (server(Who::Ours)?, server(Who::Ours)?);
    if store == CellStore::Ram {
        [&split, &packed].into_iter().try_for_each(|server| write_all(&server.socket))?;
    }
    let theirs = server(Who::Theirs);
    let hand_off = MachineLimit::of(HAND_OFF).ok_or("no such limit")?.variant()?;
    let of = |server: &ListeningServer, packed| {
        Ok::<_, String>(variant(lines(&server.socket, queues, depth, packed, clock)?))
    };
    let baseline = theirs.as_ref().map_err(Clone::clone).and_then(|theirs| of(theirs, false));
    let has_baseline = baseline.as_ref().inspect_err(|why| eprintln!("no baseline: {why}")).is_ok();
    let baseline = baseline.unwrap_or_else(|_| Box::new(|_| f64::NAN));
    let variants = [of(&split, false)?, of(&packed, true)?, baseline, hand_off].map(paused);
    let ([ours, ours_packed, theirs, hand_off], floors) = measure_beside(plan, &[name, packed_name], variants);
    let baseline = has_baseline.then(|| theirs.percentile(50.0));
    for (name, samples) in [(name, ours), (packed_name, ours_packed)] {
        report.add(Figure::median(name, "ns/io", &samples).over(&floors).across(&hand_off).beside(baseline));
    }
    Ok(())
}

/// Writes a served disk once, so that every page is allocated.
pub fn write_all(socket: &Path) -> Result<(), String> {
    let disk = attach(socket, false)?;
    let driver = disk.queue(QueueKind::Poll, 1).map_err(|error| error.to_string())?;
    write_all_by(&mut DirectSignals, driver, disk.info(), |_| ())
}

/// The same through this driver, on a lane that is turned so.
pub fn write_all_by<Cx>(
    cx: &mut Cx,
    driver: impl Driver<Cx>,
    info: &DeviceInfo,
    turn: impl Fn(&mut Cx),
) -> Result<(), String> {
    const BYTES: u32 = 256 << 10;
    let config = HwQueueConfig { depth: 1, ..HwQueueConfig::default() };
    let mut queue = HwQueue::new(driver, Arc::new(info.clone()), config);
    let memory = Region::shared(BYTES as usize).map_err(|error| error.to_string())?;
    memory.span(0, memory.len()).inspect(|all| all.fill(0x5a));
    queue.set_memory(cx, Arc::new(RegionTable::new(vec![memory])));
    let mut free = vec![Bio::with_capacity(1)];
    for sector in (0..STORE_BYTES / SECTOR_BYTES).step_by(BYTES as usize / SECTOR_BYTES as usize) {
        let Some(mut bio) = free.pop() else { return Err("the bio did not come back".into()) };
        bio.reset();
        (bio.op, bio.sector, bio.sectors) = (Op::Write, sector, BYTES / SECTOR_BYTES as u32);
        bio.segments.push(Segment { region: 0, offset: 0, len: BYTES });
        queue.submit(bio);
        first_answer(|| {
            let now_ns = now_ns();
            queue.issue(cx, now_ns);
            turn(cx);
            queue.reap(cx, now_ns, &mut |bio| free.push(bio)) as u64
        })?;
        if !free.iter().all(|bio| bio.status.is_ok()) {
            return Err("the disk cannot be written".into());
        }
    }
    Ok(())
}
