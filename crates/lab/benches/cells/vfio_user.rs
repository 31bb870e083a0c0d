//! `vfio-user-*`: our NVMe driver on one CPU, and on another our daemon, which serves a controller over vfio-user.
//!
//! Both sides poll: the driver's queue has no interrupt.

use std::sync::Arc;

use blkyard_attach::{NamespaceConfig, NamespaceQueue, RemoteNamespace, VfioUserConfig, VfioUserController};
use blkyard_lab::floor::{HAND_OFF, IO_BYTES, MachineLimit, Round, WindowPlan, partner_cpu, variant};
use blkyard_mem::Region;
use blkyard_mq::QueueKind;
use blkyard_nvme::QueueDemand;
use blkyard_os::SystemClock;

use crate::core::clock;
use crate::limits::measure_beside;
use crate::lines::{DirectSignals, first_answer};
use crate::load::Load;
use crate::report::{self, CellReport, Figure};
use crate::servers::{CellFolder, CellStore, ListeningServer};
use crate::vhost::{paused, write_all_by};

/// Cells of our driver: by device and depth.
pub fn nvme_cells(plan: WindowPlan, report: &mut CellReport) {
    // As for vhost-user: in the first microseconds of a window the server wakes up.
    let plan = WindowPlan { window_ns: plan.window_ns * 3, windows: plan.windows / 4, warm_up: plan.warm_up / 2 };
    for store in [CellStore::Null, CellStore::Ram] {
        for depth in [1, 32, 128] {
            let name = format!("vfio-user-{}-qd{depth}", store.name());
            if report.wants(&name)
                && let Err(why) = two_cores(plan, report, store, depth, &name)
            {
                report::skip(&name, &why);
            }
        }
    }
}

fn two_cores(
    plan: WindowPlan,
    report: &mut CellReport,
    store: CellStore,
    depth: usize,
    name: &str,
) -> Result<(), String> {
    let ground = CellFolder::new()?;
    let server = ListeningServer::nvme(&ground, store, 2, Some(partner_cpu()?))?;
    let mut config = NamespaceConfig::new(name, Arc::new(SystemClock));
    // A controller has a queue with an interrupt before one without.
    config.host.queues = QueueDemand { submitters: 1, write_queues: 0, poll_queues: 1 };
    let transport = VfioUserConfig::new(&server.socket, Arc::new(SystemClock)).map_err(|error| error.to_string())?;
    let disk = RemoteNamespace::open::<VfioUserController>(transport, config).map_err(|error| error.to_string())?;
    let queue = |depth| disk.queue(QueueKind::Poll, depth).map_err(|error| error.to_string());
    if store == CellStore::Ram {
        write_all_by(&mut DirectSignals, queue(1)?, disk.info(), |_| ())?;
    }
    let queue: NamespaceQueue = queue(depth.max(2))?;
    let memory = Region::shared(depth * IO_BYTES as usize).map_err(|error| error.to_string())?;
    memory.span(0, memory.len()).inspect(|all| all.fill(0xa5));
    let mut load = Load::on(DirectSignals, queue, disk.info(), memory, depth, true, clock());
    first_answer(|| load.round())?;
    let hand_off = MachineLimit::of(HAND_OFF).ok_or("no such limit")?.variant()?;
    let variants = [variant(load), hand_off].map(paused);
    let ([ours, hand_off], floors) = measure_beside(plan, &[name], variants);
    report.add(Figure::median(name, "ns/io", &ours).over(&floors).across(&hand_off));
    Ok(())
}
