//! Inspection of a queue: its content at one moment, as plain data. Built on request; no state is kept for it.

use std::sync::Arc;

use super::HwQueue;
use crate::request::{Marks, RequestState};
use crate::sched::SchedulerSnapshot;
use crate::{BioFlags, DeviceInfo, Op};

/// A hardware queue at one moment.
#[derive(Clone, Debug)]
pub struct HwSnapshot {
    /// Tags there are, with those reserved.
    pub depth: usize,
    /// Limit of tags in use, with reserved ones.
    pub depth_limit: usize,
    /// Tags that are reserved.
    pub reserved: usize,
    /// Tags that are out.
    pub tags_in_use: usize,
    /// Requests with the driver.
    pub in_flight: usize,
    /// Requests that wait for the driver.
    pub dispatch: usize,
    /// Bios in the queue, and how many it takes.
    pub bios: usize,
    /// Bios it takes at one time.
    pub bios_max: usize,
    /// How often of late something was left over: zero for not at all, 9 to 16 for always.
    pub dispatch_busy: u32,
    /// How often it is frozen.
    pub frozen: u32,
    /// How often it is quiesced.
    pub quiesced: u32,
    /// By number.
    pub namespaces: Vec<NamespaceSnapshot>,
    /// Every request that has a tag, by tag.
    pub requests: Vec<RequestSnapshot>,
}

/// A namespace of a hardware queue at one moment.
#[derive(Clone, Debug)]
pub struct NamespaceSnapshot {
    /// Properties of the device.
    pub info: Arc<DeviceInfo>,
    /// Bios that wait to become requests.
    pub waiting: usize,
    /// Tags it holds; counted while it has neighbours.
    pub tags_held: usize,
    /// Tags it may hold.
    pub tags_max: usize,
    /// Whether it counts as active for the shares.
    pub active: bool,
    /// Its flush machine.
    pub flush: FlushSnapshot,
    /// Scheduler of the waiting bios, if any.
    pub scheduler: Option<SchedulerSnapshot>,
    /// For how much longer a limit holds them, if one does.
    pub held_ns: Option<u64>,
}

/// A flush machine at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlushSnapshot {
    /// Bios that wait for the next flush.
    pub pending: usize,
    /// Bios that ride on the flush in flight.
    pub running: usize,
}

/// A request at one moment.
#[derive(Clone, Debug)]
pub struct RequestSnapshot {
    /// Its tag.
    pub tag: usize,
    /// Which namespace it is for.
    pub namespace: u16,
    /// Operation.
    pub op: Op,
    /// How.
    pub flags: BioFlags,
    /// First sector.
    pub sector: u64,
    /// Length in sectors of 512 bytes.
    pub sectors: u32,
    /// Where it is in its life.
    pub state: RequestState,
    /// Time since the driver took it; `None` while it waits.
    pub age_ns: Option<u64>,
    /// Whether its time is up, and the driver is at it.
    pub timed_out: bool,
}

impl<D> HwQueue<D> {
    /// The queue at this moment.
    pub fn snapshot(&self, now_ns: u64) -> HwSnapshot {
        let mut waiting: Vec<usize> = self.dispatch.newest_first().map(usize::from).collect();
        waiting.sort_unstable();
        let requests = self.table.requests.iter().enumerate();
        let listed = requests
            .filter(|(tag, request)| request.state() != RequestState::Idle || waiting.binary_search(tag).is_ok());
        let requests = listed.map(|(tag, request)| RequestSnapshot {
            tag,
            namespace: request.namespace,
            op: request.op(),
            flags: request.flags,
            sector: request.sector,
            sectors: request.sectors,
            state: if self.done.iter().any(|(done, _)| usize::from(*done) == tag) {
                RequestState::Complete
            } else {
                request.state()
            },
            age_ns: (request.state() != RequestState::Idle).then(|| now_ns.saturating_sub(request.start_ns)),
            timed_out: request.has(Marks::LATE),
        });
        let namespaces = self.namespaces.iter().map(|namespace| {
            let (tags_held, tags_max, active) = namespace.tags();
            let (pending, running) = namespace.flush.riders();
            NamespaceSnapshot {
                info: Arc::clone(&namespace.info),
                waiting: namespace.waiting(),
                tags_held,
                tags_max,
                active,
                flush: FlushSnapshot { pending, running },
                scheduler: namespace.scheduled.as_ref().map(|scheduled| scheduled.snapshot(now_ns)),
                held_ns: namespace.rated.as_ref().and_then(|rated| rated.held_ns(now_ns)),
            }
        });
        HwSnapshot {
            depth: self.tags.depth(),
            depth_limit: self.tags.limit(),
            reserved: self.tags.reserved(),
            tags_in_use: self.tags.in_use(),
            in_flight: self.in_flight(),
            dispatch: self.dispatch.len(),
            bios: self.bios_held,
            bios_max: self.config.bios_max,
            dispatch_busy: self.busy,
            frozen: self.frozen,
            quiesced: self.quiesced,
            namespaces: namespaces.collect(),
            requests: requests.collect(),
        }
    }
}
