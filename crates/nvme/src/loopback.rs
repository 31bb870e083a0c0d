//! Host and controller on one thread over one queue pair in memory: a queue of requests on one side, an executor of
//! bios on the other. For tests, benchmarks and studies.
//!
//! The controller runs when the driver is polled, and completes each command at once.

use std::io;
use std::sync::Arc;

use blkyard_mem::{Region, RegionTable, View};
use blkyard_mq::{Batch, Bio, DeviceInfo, Done, Driver, Status, TimedOut};

use crate::{
    ControllerQueuePair, ControllerRings, DmaMap, DmaRange, Doorbells, Fetched, HostQueuePair, IdentifyController,
    IdentifyNamespace, IoCommand, IoParser, IoQueue, ListPool, NamespaceFormat, NvmLimits, NvmeNamespace, NvmeStatus,
    PAGE, QueueRings, RetryDelays, ShadowDoorbells, TRANSFER_BYTES_MAX,
};

/// Identifiers of the one queue pair and the one namespace.
const QID: u16 = 1;
const NSID: u32 = 1;
/// Controller address of the queue's memory, and first controller address of the requests' regions, at multiples of
/// [`REGION_SPACE`].
const QUEUE_ADDR: u64 = 1 << 32;
const REGION_SPACE: u64 = 1 << 40;

/// Configuration of a loopback.
#[derive(Clone, Debug)]
pub struct NvmeLoopbackConfig {
    /// Identify data of the controller.
    pub controller: IdentifyController,
    /// Identify data of its namespace.
    pub namespace: IdentifyNamespace,
    /// Entries of each ring.
    pub entries: u16,
    /// Pages for long lists, at least 5.
    pub list_pages: u16,
    /// Whether there are shadow doorbells.
    pub has_shadow: bool,
}

/// A driver and its controller. As a [`Driver`] it is one queue of the namespace. The partial page at the end of a
/// region is not mapped for the controller.
#[derive(Debug)]
pub struct NvmeLoopback<S> {
    /// The host's half.
    pub host: IoQueue,
    /// The controller's half.
    pub controller: LoopbackController<S>,
    /// The namespace, from the host's view.
    pub info: DeviceInfo,
}

/// The controller's half of an [`NvmeLoopback`].
#[derive(Debug)]
pub struct LoopbackController<S> {
    /// Whether the controller executes commands.
    pub is_running: bool,
    pair: ControllerQueuePair,
    parser: IoParser,
    format: NamespaceFormat,
    serve: S,
    bio: Box<Bio>,
    queue: Arc<Region>,
    map: DmaMap,
}

impl<S: FnMut(&Bio, &RegionTable) -> Status> NvmeLoopback<S> {
    /// A queue whose controller executes bios by calling `serve` with the table that their segments point into.
    ///
    /// # Errors
    /// The namespace cannot be used, or the system has no memory left.
    pub fn new(config: &NvmeLoopbackConfig, serve: S) -> io::Result<NvmeLoopback<S>> {
        let unusable = || io::Error::new(io::ErrorKind::InvalidInput, "the namespace cannot be used");
        let format = config.namespace.current_format().ok_or_else(unusable)?;
        let (namespace, info) = NvmeNamespace::new(NSID, &config.controller, &config.namespace, &NvmLimits::default())
            .ok_or_else(unusable)?;
        let page = PAGE as usize;
        let [sq_bytes, cq_bytes] = QueueRings::bytes(config.entries).map(|bytes| bytes.next_multiple_of(page));
        let lists_bytes = ListPool::bytes(config.entries - 1, config.list_pages);
        let queue = Region::anonymous(sq_bytes + cq_bytes + lists_bytes)?;
        let view = |region: &Arc<Region>, at: usize, len: usize| {
            View::new(Arc::clone(region), at as u64, len, page).ok_or_else(|| io::Error::other("memory of the queue"))
        };
        let (sq, cq) = (view(&queue, 0, sq_bytes)?, view(&queue, sq_bytes, cq_bytes)?);
        let doorbells = Region::anonymous(3 * page)?;
        let shadow =
            ShadowDoorbells { doorbells: view(&doorbells, page, page)?, events: view(&doorbells, 2 * page, page)? };
        let doorbells = Doorbells::new(view(&doorbells, 0, page)?, 0, config.has_shadow.then_some(shadow));
        let rings = QueueRings { sq: sq.clone(), cq: cq.clone(), entries: config.entries };
        let host = HostQueuePair::new(QID, rings, &doorbells, Arc::default());
        let rings = ControllerRings { sq, sq_entries: config.entries, cq, cq_entries: config.entries };
        let pair = ControllerQueuePair::new(QID, rings, &doorbells);
        let lists = ListPool::new(
            view(&queue, sq_bytes + cq_bytes, lists_bytes)?,
            QUEUE_ADDR + (sq_bytes + cq_bytes) as u64,
            host.depth(),
            config.list_pages,
        );
        let parser = IoParser::new(config.controller.transfer_bytes_max(0).unwrap_or(TRANSFER_BYTES_MAX));
        let controller = LoopbackController {
            is_running: true,
            pair,
            format: NamespaceFormat {
                nsid: NSID,
                blocks: config.namespace.blocks,
                block_shift: format.block_shift,
                read_only: false,
            },
            serve,
            bio: Bio::with_capacity(parser.segments_max()),
            parser,
            map: bus(&queue, &RegionTable::default())?,
            queue,
        };
        Ok(NvmeLoopback {
            host: IoQueue::new(host, lists, [namespace].into(), RetryDelays::new(&config.controller)),
            controller,
            info,
        })
    }
}

impl<S: FnMut(&Bio, &RegionTable) -> Status> LoopbackController<S> {
    /// Fetches, executes and completes all available commands.
    #[inline]
    pub fn turn(&mut self) {
        if !self.is_running {
            return;
        }
        // A broken queue returns an error each time, and no command.
        while let Ok(Some(Fetched { token, sqe })) = self.pair.fetch() {
            let LoopbackController { parser, format, serve, bio, map, .. } = self;
            let status = match parser.parse(&sqe, format, map, bio) {
                Ok(IoCommand::Bio) => NvmeStatus::from_status(serve(bio, map.table())),
                Ok(IoCommand::Deallocate) => {
                    let mut status = Status::Ok;
                    while parser.discard(format, bio) {
                        status = status.and(serve(bio, map.table()));
                    }
                    NvmeStatus::from_status(status)
                }
                Ok(IoCommand::Nothing) => NvmeStatus::SUCCESS,
                // The controller has no private memory to read into.
                Ok(IoCommand::Compare | IoCommand::Verify) => NvmeStatus::INVALID_OPCODE.with_dnr(),
                Err(status) => status,
            };
            self.pair.complete(token, status, 0);
        }
    }
}

/// The queue's memory and the regions of the table with their numbers, as mapped for the controller.
fn bus(queue: &Arc<Region>, table: &RegionTable) -> io::Result<DmaMap> {
    let mut table = table.clone();
    let pages = |region: &Arc<Region>| region.len() as u64 / PAGE * PAGE;
    let range = |(region, memory): (u32, &Arc<Region>)| DmaRange {
        addr: REGION_SPACE * (u64::from(region) + 1),
        len: pages(memory),
        region,
        offset: 0,
    };
    let mut ranges: Vec<_> = table.iter().map(range).filter(|range| range.len > 0).collect();
    let region = table.insert(Arc::clone(queue));
    ranges.push(DmaRange { addr: QUEUE_ADDR, len: pages(queue), region, offset: 0 });
    DmaMap::new(Arc::new(table), ranges).map_err(io::Error::other)
}

impl<S: FnMut(&Bio, &RegionTable) -> Status, Cx: ?Sized> Driver<Cx> for NvmeLoopback<S> {
    #[inline]
    fn queue_rqs(&mut self, _cx: &mut Cx, _memory: &RegionTable, batch: &mut Batch<'_>) {
        let map = &self.controller.map;
        // The controller runs when the driver is polled.
        let _ = self.host.queue(batch, |segment| map.addr(segment));
    }

    #[inline]
    fn poll(&mut self, _cx: &mut Cx, _memory: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        self.controller.turn();
        let _ = self.host.poll(done, now_ns);
    }

    fn wants_poll(&self) -> bool {
        self.host.wants_poll()
    }

    fn timed_out(
        &mut self,
        _cx: &mut Cx,
        _memory: &RegionTable,
        place: usize,
        _done: &mut Done<'_>,
        _now_ns: u64,
    ) -> TimedOut {
        self.host.timed_out(place as u16)
    }

    fn deadline_ns(&self) -> Option<u64> {
        self.host.deadline_ns()
    }

    fn set_memory(&mut self, _cx: &mut Cx, memory: &RegionTable) {
        self.controller.map = bus(&self.controller.queue, memory).expect("regions shorter than their space");
    }
}
