//! Host and controller on one thread over one queue pair in memory: a queue of requests on one side, an executor of
//! bios on the other. For tests, benchmarks and studies.
//!
//! The controller runs when the driver is polled, and completes each command at once.

use std::io;
use std::sync::Arc;

use blkyard_mem::{BufferId, BufferMapping, DmaDomain, Region, RegionTable, RegisteredBuffer, Segment, View};
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
/// [`REGION_SPACE`]; the same of regions of registered buffers.
const QUEUE_ADDR: u64 = 1 << 32;
const REGION_SPACE: u64 = 1 << 40;
const BUFFERS_ADDR: u64 = 1 << 60;

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
    /// How registered buffers are mapped.
    pub buffers: LoopbackBuffers,
}

/// How the controller of a loopback reaches registered buffers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoopbackBuffers {
    /// At contiguous addresses.
    #[default]
    Contiguous,
    /// In pages of so many bytes (a power of two, at least 4096) at scattered addresses.
    Scattered(u64),
    /// As copies in scattered pages; the buffers themselves are out of reach.
    Bounced(u64),
}

/// A region of registered buffers, as mapped for the controller.
#[derive(Debug)]
struct LoopbackRegion {
    region: Arc<Region>,
    base: u64,
    /// Bytes of a page.
    page: u64,
    is_scattered: bool,
}

impl LoopbackRegion {
    /// Address of a byte. Scattered pages are in reverse order, with a gap of a page between them.
    fn addr(&self, offset: u64) -> u64 {
        if !self.is_scattered {
            return self.base + offset;
        }
        let last = (self.region.len() as u64 - 1) / self.page;
        self.base + (last - offset / self.page) * 2 * self.page + offset % self.page
    }

    /// Its ranges, whole pages of the controller; `number` is that of the region.
    fn ranges(&self, number: u32) -> impl Iterator<Item = DmaRange> {
        let bytes = self.region.len() as u64 / PAGE * PAGE;
        let step = if self.is_scattered { self.page } else { bytes.max(PAGE) };
        (0..bytes).step_by(step as usize).map(move |offset| DmaRange {
            addr: self.addr(offset),
            len: step.min(bytes - offset),
            region: number,
            offset,
        })
    }
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
    /// Where registered buffers are mapped, and how; the regions that are, in the order of their addresses.
    domain: Arc<DmaDomain>,
    mapping: LoopbackBuffers,
    mapped: Vec<LoopbackRegion>,
}

/// The host's half of a queue pair, for a driver of the caller's.
#[derive(Debug)]
pub struct LoopbackQueue {
    /// The rings.
    pub pair: HostQueuePair,
    /// Memory for lists of data pointers.
    pub lists: ListPool,
    /// The namespace.
    pub namespace: NvmeNamespace,
    delays: RetryDelays,
    queue: Arc<Region>,
    map: DmaMap,
}

impl LoopbackQueue {
    /// A queue pair over the regions of `memory`: its host's half, its controller's half, which calls `serve` in its
    /// [turns](LoopbackController::turn), and the namespace.
    ///
    /// # Errors
    /// The namespace cannot be used, a region is longer than its space of addresses, or the system has no memory left.
    pub fn open<S>(
        config: &NvmeLoopbackConfig,
        memory: &RegionTable,
        serve: S,
    ) -> io::Result<(LoopbackQueue, LoopbackController<S>, DeviceInfo)> {
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
        let map = bus(&queue, memory, &[])?;
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
            map: map.clone(),
            queue: Arc::clone(&queue),
            domain: match config.buffers {
                LoopbackBuffers::Bounced(_) => DmaDomain::bounced(|| ()),
                _ => DmaDomain::new(|| ()),
            },
            mapping: config.buffers,
            mapped: Vec::new(),
        };
        let delays = RetryDelays::new(&config.controller);
        Ok((LoopbackQueue { pair: host, lists, namespace, delays, queue, map }, controller, info))
    }

    /// Bus address of a segment; `None` if the controller cannot reach it.
    #[inline]
    pub fn addr(&self, segment: Segment) -> Option<u64> {
        self.map.addr(segment)
    }

    /// The product's driver on this queue pair.
    pub fn into_driver(self) -> LoopbackHost {
        let LoopbackQueue { pair, lists, namespace, delays, queue, map } = self;
        LoopbackHost { io: IoQueue::new(pair, lists, [namespace].into(), delays), queue, map }
    }
}

impl<S: FnMut(&Bio, &RegionTable) -> Status> NvmeLoopback<S> {
    /// A queue whose controller executes bios by calling `serve` with the table that their segments point into.
    ///
    /// # Errors
    /// The namespace cannot be used, or the system has no memory left.
    pub fn new(config: &NvmeLoopbackConfig, serve: S) -> io::Result<NvmeLoopback<S>> {
        let (queue, controller, info) = LoopbackQueue::open(config, &RegionTable::default(), serve)?;
        Ok(NvmeLoopback { host: queue.into_driver().io, controller, info })
    }
}

/// A queue of the namespace whose controller runs on its own: see [`LoopbackQueue::into_driver`].
#[derive(Debug)]
pub struct LoopbackHost {
    io: IoQueue,
    queue: Arc<Region>,
    map: DmaMap,
}

impl<Cx: ?Sized> Driver<Cx> for LoopbackHost {
    #[inline]
    fn queue_rqs(&mut self, _cx: &mut Cx, memory: &RegionTable, batch: &mut Batch<'_>) {
        let map = &self.map;
        // The controller's thread polls.
        let _ = self.io.queue(batch, |segment| map.addr(memory.plain(segment)?));
    }

    #[inline]
    fn poll(&mut self, _cx: &mut Cx, _memory: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        let _ = self.io.poll(done, now_ns);
    }

    fn wants_poll(&self) -> bool {
        self.io.wants_poll()
    }

    fn timed_out(
        &mut self,
        _cx: &mut Cx,
        _memory: &RegionTable,
        place: usize,
        _done: &mut Done<'_>,
        _now_ns: u64,
    ) -> TimedOut {
        self.io.timed_out(place as u16)
    }

    fn deadline_ns(&self) -> Option<u64> {
        self.io.deadline_ns()
    }

    fn set_memory(&mut self, _cx: &mut Cx, memory: &RegionTable) {
        self.map = bus(&self.queue, memory, &[]).expect("regions shorter than their space");
    }
}

impl<S> LoopbackController<S> {
    /// Fetches and parses the next command, and returns its token. If it needs execution, the caller executes it and
    /// [completes](LoopbackController::complete) it, in any order; an invalid command has its status.
    #[inline]
    pub fn fetch(&mut self) -> Option<(u16, Result<IoCommand, NvmeStatus>)> {
        // A broken queue returns an error each time, and no command.
        let Ok(Some(Fetched { token, sqe })) = self.pair.fetch() else { return None };
        Some((token, self.parser.parse(&sqe, &self.format, &self.map, &mut self.bio)))
    }

    /// Completes all available commands with success, without parsing them.
    pub fn answer(&mut self) {
        while let Ok(Some(Fetched { token, .. })) = self.pair.fetch() {
            self.complete(token, NvmeStatus::SUCCESS);
        }
    }

    /// Completes a command in flight.
    ///
    /// # Panics
    /// If the token is not in use.
    #[inline]
    pub fn complete(&mut self, token: u16, status: NvmeStatus) {
        self.pair.complete(token, status, 0);
    }
}

impl<S: FnMut(&Bio, &RegionTable) -> Status> LoopbackController<S> {
    /// Fetches, executes and completes all available commands.
    #[inline]
    pub fn turn(&mut self) {
        if !self.is_running {
            return;
        }
        while let Some((token, parsed)) = self.fetch() {
            let LoopbackController { parser, format, serve, bio, map, .. } = self;
            let status = match parsed {
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
            self.complete(token, status);
        }
    }
}

impl<S> LoopbackController<S> {
    /// Maps a buffer, or its copy, and its table, which is contiguous. Regions mapped before keep their addresses.
    fn map_buffer(&mut self, memory: &RegionTable, buffer: &RegisteredBuffer) -> io::Result<Arc<BufferMapping>> {
        let mapping = buffer.mapping(&self.domain)?;
        let (page, is_scattered) = match self.mapping {
            LoopbackBuffers::Contiguous => (PAGE, false),
            LoopbackBuffers::Scattered(page) | LoopbackBuffers::Bounced(page) => (page, true),
        };
        for region in self.domain.regions() {
            if self.mapped.iter().all(|mapped| !Arc::ptr_eq(&mapped.region, &region)) {
                let is_table = mapping.table().is_some_and(|(table, _)| Arc::ptr_eq(table, &region));
                let base = BUFFERS_ADDR + REGION_SPACE * self.mapped.len() as u64;
                self.mapped.push(LoopbackRegion { region, base, page, is_scattered: is_scattered && !is_table });
            }
        }
        self.map = bus(&self.queue, memory, &self.mapped)?;
        Ok(mapping)
    }
}

/// The queue's memory, the regions of the table with their numbers, and regions of registered buffers, as mapped for
/// the controller.
fn bus(queue: &Arc<Region>, table: &RegionTable, buffers: &[LoopbackRegion]) -> io::Result<DmaMap> {
    let mut table = table.clone();
    let pages = |region: &Arc<Region>| region.len() as u64 / PAGE * PAGE;
    let range = |(region, memory): (u32, &Arc<Region>)| DmaRange {
        addr: REGION_SPACE * (u64::from(region) + 1),
        len: pages(memory),
        region,
        offset: 0,
    };
    let mut ranges: Vec<_> = table.iter().map(range).filter(|range| range.len > 0).collect();
    for mapped in buffers {
        let number = table.insert(Arc::clone(&mapped.region));
        ranges.extend(mapped.ranges(number));
    }
    let region = table.insert(Arc::clone(queue));
    ranges.push(DmaRange { addr: QUEUE_ADDR, len: pages(queue), region, offset: 0 });
    DmaMap::new(Arc::new(table), ranges).map_err(io::Error::other)
}

impl<S: FnMut(&Bio, &RegionTable) -> Status, Cx: ?Sized> Driver<Cx> for NvmeLoopback<S> {
    #[inline]
    fn queue_rqs(&mut self, _cx: &mut Cx, memory: &RegionTable, batch: &mut Batch<'_>) {
        let map = &self.controller.map;
        // The controller runs when the driver is polled.
        let _ = self.host.queue(batch, |segment| map.addr(memory.plain(segment)?));
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
        let LoopbackController { queue, map, mapped, .. } = &mut self.controller;
        self.host.clear_buffers();
        *map = bus(queue, memory, mapped).expect("regions shorter than their space");
    }

    fn add_buffer(&mut self, _cx: &mut Cx, memory: &RegionTable, buffer: &Arc<RegisteredBuffer>) {
        // A buffer without memory for its table is translated like others.
        let Ok(mapping) = self.controller.map_buffer(memory, buffer) else { return };
        let mapped = &self.controller.mapped;
        let addr = |region: &Arc<Region>, offset: u64| {
            mapped.iter().find(|mapped| Arc::ptr_eq(&mapped.region, region)).map(|mapped| mapped.addr(offset))
        };
        if let Some(addresses) = mapping.addresses(addr) {
            self.host.add_buffer(buffer, &mapping, &addresses);
        }
    }

    fn remove_buffer(&mut self, _cx: &mut Cx, buffer: BufferId) {
        self.host.remove_buffer(buffer);
    }
}
