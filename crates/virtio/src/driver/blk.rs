//! The virtio-blk driver of one queue: requests become chains, used chains become statuses. [5.2.6]
//!
//! Owned by one thread, inside the queue core's driver. It says when to kick and never does; it knows no session and
//! no clock. The slot of its tag names a request to the device. Header, status and table are in memory shared for the
//! purpose ([`BlkLayout`]). The data stays where its segments point, and the owner of the queue provides the device's
//! address of it.
//!
//! A device that breaks its ring, or whose session is lost, leaves requests in flight. They are taken back only when
//! the device can no longer access the memory ([`BlkRing::take_in_flight`]), to be submitted again or failed; then a
//! new `BlkRing` uses the same memory.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use blkyard_mem::{Region, Segment, View};
use blkyard_mq::{Batch, BioFlags, Done, Op, Shortage, Status, Tag};

use super::place::{ID_AT, RANGES_AT, STATUS_AT, TABLE_AT};
use super::{BlkDisk, BlkLayout, Buffer, DeviceFault, DriverRing, NoRoom, Tables, UsedChain};
use crate::blk::{HEADER_BYTES, ID_BYTES, RANGE_BYTES, RANGE_UNMAP, kind, status_from};
use crate::counters::reasons;
use crate::descriptor::DESC_BYTES;
use crate::ring::RUN_MAX;
use crate::{Features, RingBase, RingLayout, RingSetupError, Violations};

/// Value of a status byte before the device writes it: undefined in the specification. The seven bytes behind it are
/// unused.
const NOT_WRITTEN: u64 = 0xff;
const _: () = assert!(STATUS_AT == 16 && HEADER_BYTES == 16 && TABLE_AT == 32, "a request's line is written as one");

/// The row of the status of a request of one segment.
const PLAIN_STATUS_ROW: u16 = 2;

reasons! {
    /// Why a request failed without the device saying so.
    Violation {
        /// Some of its data is not in memory that the device shares.
        NotReachable = "data outside the memory shared with the device",
        /// An operation that was not negotiated.
        NotNegotiated = "operation that was not negotiated",
        /// Used without a status, or with an undefined one.
        NoStatus = "used without a valid status",
    }
}

/// Memory that the device shares, for one queue.
#[derive(Clone, Debug)]
pub struct SharedMemory {
    /// Where it is for us.
    pub region: Arc<Region>,
    /// Its first byte in the region; [`BlkLayout::bytes`] from there on are the queue's.
    pub offset: u64,
    /// Its first byte as the device sees it (guest physical).
    pub addr: u64,
}

/// The driver's side of one virtio-blk queue.
#[derive(Debug)]
pub struct BlkRing {
    ring: DriverRing,
    /// All of the queue's memory.
    memory: View,
    /// Request slots, and their address at the device.
    places: View,
    places_addr: u64,
    stride: usize,
    /// Rows of each slot's table.
    rows: u16,
    features: Features,
    may_unmap: bool,
    ranges_max: usize,
    /// Tags of requests in flight, by slot.
    parked: Box<[Option<Tag>]>,
    /// The chain being made, if there are no tables.
    buffers: Vec<Buffer>,
    has_tables: bool,
    /// By slot: the row of its table that is the status, if known. It stays from request to request.
    status_rows: Box<[u16]>,
    phase: RequestPhase,
    violations: Arc<Violations>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestPhase {
    /// Requests go through.
    Serving,
    /// The serial number is asked for; requests wait.
    Asking,
    /// All was taken back.
    Over,
}

/// A chain being made.
struct Draft {
    place: usize,
    /// The last buffer's row.
    row: u16,
    writable_bytes: u64,
    /// The previous status row; outside the next chain while that is made.
    status_row: u16,
}

/// Header fields of a request.
#[derive(Clone, Copy)]
struct RequestInfo {
    kind: u32,
    sector: u64,
}

impl BlkRing {
    /// The queue of a disk over this memory, which the device does not access yet. `violations` outlive the queue: its
    /// successor continues counting.
    ///
    /// # Errors
    /// The ring's size is invalid.
    ///
    /// # Panics
    /// If the memory is too short or not aligned ([`BlkLayout::ALIGN`]): its layout is made by this crate.
    pub fn new(
        disk: &BlkDisk,
        size: u16,
        memory: &SharedMemory,
        violations: Arc<Violations>,
    ) -> Result<BlkRing, RingSetupError> {
        let layout = BlkLayout::new(disk, size);
        let view = |at: usize, len: usize| {
            let view = View::new(Arc::clone(&memory.region), memory.offset + at as u64, len, BlkLayout::ALIGN);
            view.filter(|_| memory.addr.is_multiple_of(BlkLayout::ALIGN as u64)).expect("memory as its layout wants it")
        };
        let [desc, avail, used] = layout.parts;
        let ring = RingLayout {
            desc: view(desc, avail - desc),
            avail: view(avail, used - avail),
            used: view(used, layout.places - used),
        };
        let whole = view(0, layout.bytes);
        let places = view(layout.places, layout.bytes - layout.places);
        let places_addr = memory.addr + layout.places as u64;
        let tables = disk.features.contains(Features::INDIRECT_DESC).then(|| {
            let tables = View::new(
                Arc::clone(&memory.region),
                memory.offset + (layout.places + TABLE_AT) as u64,
                places.len() - TABLE_AT,
                DESC_BYTES,
            );
            let tables = tables.expect("a part of the places");
            Tables::new(tables, places_addr + TABLE_AT as u64, layout.stride, layout.rows)
        });
        let has_tables = tables.is_some();
        let ring = DriverRing::new(ring, size, disk.features, tables, RingBase::start(disk.features))?;
        Ok(BlkRing {
            ring,
            memory: whole,
            has_tables,
            status_rows: vec![0; usize::from(layout.depth)].into(),
            places,
            places_addr,
            stride: layout.stride,
            rows: layout.rows,
            features: disk.features,
            may_unmap: disk.may_unmap,
            ranges_max: usize::from(disk.info.limits.discard_segments_max),
            parked: (0..layout.depth).map(|_| None).collect(),
            buffers: Vec::with_capacity(usize::from(layout.rows)),
            phase: RequestPhase::Serving,
            violations,
        })
    }

    /// Has all of the queue's memory on this NUMA node, as far as the device has not touched it.
    pub fn prefer_node(&self, node: u32) {
        self.memory.prefer_node(node);
    }

    /// Requests that may be in flight at one time: the queue core has as many tags, or fewer.
    pub fn depth(&self) -> u16 {
        self.parked.len() as u16
    }

    /// Takes requests from the batch and offers them to the device at once. `translate` returns the device's address of
    /// a segment, or `None` if the device cannot reach it. Returns whether the device wants a kick.
    #[inline]
    #[must_use = "a device that is not kicked when it wants to be sleeps for ever"]
    pub fn queue(&mut self, batch: &mut Batch<'_>, mut translate: impl FnMut(Segment) -> Option<u64>) -> bool {
        if self.phase != RequestPhase::Serving || self.ring.fault().is_some() {
            batch.short_of(Shortage::Device);
            return false;
        }
        while let Some((tag, request, segments)) = batch.take() {
            let (op, sector) = (request.op(), request.sector());
            if matches!(op, Op::Read | Op::Write)
                && self.has_tables
                && let Some(segment) = segments.only()
                && let Some(addr) = translate(segment)
            {
                let data = Buffer { addr, len: segment.len, writable: op == Op::Read };
                self.put_plain(
                    tag,
                    RequestInfo { kind: if data.writable { kind::IN } else { kind::OUT }, sector },
                    data,
                );
            } else if !self.queue_other(batch, tag, &mut translate) {
                break;
            }
        }
        self.ring.publish()
    }

    /// Offers a read or write of one segment, as nearly all are. All that a device reads of it is written together.
    #[inline(always)]
    fn put_plain(&mut self, tag: Tag, request: RequestInfo, data: Buffer) {
        let place = tag.index();
        let [addr, rest] = self.ring.row(0, self.header(place), true);
        let [data_addr, data_rest] = self.ring.row(1, data, true);
        let line = [u64::from(request.kind), request.sector, NOT_WRITTEN, 0, addr, rest, data_addr, data_rest];
        self.places.store_u64s(place * self.stride, line, Relaxed);
        if self.status_rows[place] != PLAIN_STATUS_ROW {
            self.put_status_row(place, PLAIN_STATUS_ROW);
        }
        let writable_bytes = if data.writable { data.len.saturating_add(1) } else { 1 };
        self.ring.add_table(place as u16, PLAIN_STATUS_ROW + 1, writable_bytes);
        self.parked[place] = Some(tag);
    }

    /// Offers any other request that was taken from the batch. False if the device has no room for it: then it is back
    /// there.
    #[inline(never)]
    fn queue_other(
        &mut self,
        batch: &mut Batch<'_>,
        tag: Tag,
        translate: &mut impl FnMut(Segment) -> Option<u64>,
    ) -> bool {
        let (request, segments) = batch.request(&tag);
        let place = tag.index();
        let (op, sector, sectors, flags) = (request.op(), request.sector(), request.sectors(), request.flags());
        let mut draft = self.begin(place);
        let mut made = Ok(());
        match op {
            Op::Read | Op::Write => made = self.put_data(&mut draft, op == Op::Read, segments, translate),
            Op::Flush => {}
            Op::Discard => self.put_ranges(&mut draft, batch.ranges(&tag), 0),
            Op::WriteZeroes => {
                let unmap = self.may_unmap && !flags.contains(BioFlags::NO_UNMAP);
                let range = std::iter::once((sector, sectors));
                self.put_ranges(&mut draft, range, if unmap { RANGE_UNMAP } else { 0 });
            }
        }
        match made.and_then(|()| self.request(op, sector)) {
            Ok(request) if self.finish(&draft, request).is_ok() => self.parked[place] = Some(tag),
            Ok(_) => {
                batch.put_back(tag);
                batch.short_of(Shortage::Device);
                return false;
            }
            Err(violation) => {
                self.violations.request(violation);
                let refused = matches!(violation, Violation::NotNegotiated);
                batch.complete(tag, if refused { Status::NotSupported } else { Status::Invalid });
            }
        }
        true
    }

    /// Returns requests that the device has completed since the last call.
    ///
    /// # Errors
    /// The device broke the ring, now or before. Requests stay in flight: see [`BlkRing::take_in_flight`].
    #[inline]
    pub fn poll(&mut self, done: &mut Done<'_>) -> Result<(), DeviceFault> {
        if self.phase == RequestPhase::Over {
            return Ok(());
        }
        let mut warm = 0;
        while let Some(used) = self.next_used()? {
            warm = if warm == 0 { self.warm_run() } else { warm - 1 };
            let place = usize::from(used.token);
            let status = self.status(place);
            match self.parked[place].take() {
                Some(tag) => done.complete(tag, status),
                // No other request was offered.
                None => self.phase = RequestPhase::Serving,
            }
        }
        Ok(())
    }

    #[inline]
    fn next_used(&mut self) -> Result<Option<UsedChain>, DeviceFault> {
        let is_news = self.ring.fault().is_none();
        self.ring.poll().inspect_err(|fault| {
            if is_news {
                self.violations.ring_fault(*fault);
            }
        })
    }

    /// Prefetches the slots of the chains to be taken next, all together: their statuses are read soon, and they are
    /// the next to be written. Returns how many.
    #[inline(never)]
    fn warm_run(&self) -> u16 {
        let mut run = 0;
        while run < RUN_MAX
            && let Some(token) = self.ring.coming(run)
        {
            self.places.warm(usize::from(token) * self.stride);
            run += 1;
        }
        run
    }

    /// Begins a chain: the header.
    fn begin(&mut self, place: usize) -> Draft {
        let header = self.header(place);
        if self.has_tables {
            self.put_row(place, 0, header, true);
        } else {
            self.buffers.clear();
            self.buffers.push(header);
        }
        Draft { place, row: 0, writable_bytes: 0, status_row: std::mem::take(&mut self.status_rows[place]) }
    }

    /// The next buffer of a chain, which is not its last.
    fn put(&mut self, draft: &mut Draft, buffer: Buffer) {
        draft.row += 1;
        if buffer.writable {
            draft.writable_bytes += u64::from(buffer.len);
        }
        if self.has_tables {
            self.put_row(draft.place, draft.row, buffer, true);
        } else {
            self.buffers.push(buffer);
        }
    }

    /// Writes a row of a slot's table.
    fn put_row(&mut self, place: usize, row: u16, buffer: Buffer, more: bool) {
        assert!(row < self.rows, "a chain longer than a table of {} rows", self.rows);
        let at = place * self.stride + TABLE_AT + usize::from(row) * DESC_BYTES;
        self.places.store_u64s(at, self.ring.row(row, buffer, more), Relaxed);
    }

    /// Has a chain end with its status in this row.
    #[cold]
    fn put_status_row(&mut self, place: usize, row: u16) {
        self.put_row(place, row, self.status_buffer(place), false);
        self.status_rows[place] = row;
    }

    #[inline]
    fn header(&self, place: usize) -> Buffer {
        Buffer { addr: self.addr(place, 0), len: HEADER_BYTES as u32, writable: false }
    }

    fn status_buffer(&self, place: usize) -> Buffer {
        Buffer { addr: self.addr(place, STATUS_AT), len: 1, writable: true }
    }

    fn put_data(
        &mut self,
        draft: &mut Draft,
        writable: bool,
        segments: impl Iterator<Item = Segment>,
        translate: &mut impl FnMut(Segment) -> Option<u64>,
    ) -> Result<(), Violation> {
        for segment in segments {
            let addr = translate(segment).ok_or(Violation::NotReachable)?;
            self.put(draft, Buffer { addr, len: segment.len, writable });
        }
        Ok(())
    }

    /// Writes ranges, each sector, sectors, flags. [5.2.6]
    fn put_ranges(&mut self, draft: &mut Draft, ranges: impl Iterator<Item = (u64, u32)>, flags: u32) {
        let place = draft.place;
        let mut count = 0;
        for (sector, sectors) in ranges {
            assert!(count < self.ranges_max, "a request of more than {} ranges", self.ranges_max);
            let at = place * self.stride + RANGES_AT + count * RANGE_BYTES;
            self.places.store_u64(at, sector, Relaxed);
            self.places.store_u64(at + 8, u64::from(sectors) | u64::from(flags) << 32, Relaxed);
            count += 1;
        }
        let len = (count * RANGE_BYTES) as u32;
        let addr = self.addr(place, RANGES_AT);
        self.put(draft, Buffer { addr, len, writable: false });
    }

    /// The header's words for an operation. Those that only read and write need no feature.
    #[inline]
    fn request(&self, op: Op, sector: u64) -> Result<RequestInfo, Violation> {
        let (kind, sector, needs) = match op {
            Op::Read => (kind::IN, sector, Features::empty()),
            Op::Write => (kind::OUT, sector, Features::empty()),
            Op::Flush => (kind::FLUSH, 0, Features::FLUSH),
            Op::Discard => (kind::DISCARD, 0, Features::DISCARD),
            Op::WriteZeroes => (kind::WRITE_ZEROES, 0, Features::WRITE_ZEROES),
        };
        if self.features.contains(needs) { Ok(RequestInfo { kind, sector }) } else { Err(Violation::NotNegotiated) }
    }

    /// Writes header and status of the request in a slot, and adds its chain to the ring.
    fn finish(&mut self, draft: &Draft, request: RequestInfo) -> Result<(), NoRoom> {
        let place = draft.place;
        let line = [u64::from(request.kind), request.sector, NOT_WRITTEN];
        self.places.store_u64s(place * self.stride, line, Relaxed);
        if !self.has_tables {
            self.buffers.push(self.status_buffer(place));
            return self.ring.add(place as u16, &self.buffers);
        }
        let row = draft.row + 1;
        if draft.status_row != row {
            self.put_status_row(place, row);
        }
        self.status_rows[place] = row;
        self.ring.add_table(place as u16, row + 1, u32::try_from(draft.writable_bytes + 1).unwrap_or(u32::MAX));
        Ok(())
    }

    /// Value of a slot's status byte.
    #[inline]
    fn status(&self, place: usize) -> Status {
        let byte = self.places.load_u8(place * self.stride + STATUS_AT, Relaxed);
        status_from(byte).unwrap_or_else(|| {
            self.violations.request(Violation::NoStatus);
            Status::Io
        })
    }

    /// Device address of a byte of a slot.
    #[inline]
    fn addr(&self, place: usize, at: usize) -> u64 {
        self.places_addr + (place * self.stride + at) as u64
    }

    /// Requests the disk's serial number, before the queue's first request. Returns whether the device wants a kick.
    ///
    /// # Panics
    /// If anything is in flight.
    #[must_use = "a device that is not kicked when it wants to be sleeps for ever"]
    pub fn ask_id(&mut self) -> bool {
        let is_idle = self.phase == RequestPhase::Serving && self.ring.in_flight() == 0;
        assert!(is_idle, "the serial number is asked for on an idle queue");
        let mut draft = self.begin(0);
        let addr = self.addr(0, ID_AT);
        self.put(&mut draft, Buffer { addr, len: ID_BYTES as u32, writable: true });
        let added = self.finish(&draft, RequestInfo { kind: kind::GET_ID, sector: 0 });
        assert!(added.is_ok(), "three descriptors in an empty ring");
        self.phase = RequestPhase::Asking;
        self.ring.publish()
    }

    /// The serial number, once it has arrived: up to 20 bytes, padded with zeroes, or the error.
    ///
    /// # Errors
    /// The device broke the ring.
    ///
    /// # Panics
    /// If it was not requested.
    pub fn poll_id(&mut self) -> Result<Option<Result<[u8; ID_BYTES], Status>>, DeviceFault> {
        assert!(self.phase == RequestPhase::Asking, "nobody asked for the serial number");
        if self.next_used()?.is_none() {
            return Ok(None);
        }
        self.phase = RequestPhase::Serving;
        let mut id = [0; ID_BYTES];
        for (at, byte) in id.iter_mut().enumerate() {
            *byte = self.places.load_u8(ID_AT + at, Relaxed);
        }
        let status = self.status(0);
        Ok(Some(if status.is_ok() { Ok(id) } else { Err(status) }))
    }

    /// Asks the device to call when something comes back. Says whether it has already: then there may be no call.
    pub fn arm(&mut self) -> bool {
        self.ring.arm()
    }

    /// Tells the device that we poll.
    pub fn disarm(&mut self) {
        self.ring.disarm();
    }

    /// Slots of all requests in flight.
    pub fn in_flight(&self) -> impl Iterator<Item = usize> {
        self.parked.iter().enumerate().filter(|(_, tag)| tag.is_some()).map(|(place, _)| place)
    }

    /// Takes back the tags of all requests in flight, to be submitted again or failed. From then on no request is taken
    /// from a batch, and the ring is not read. The device must not access the memory any more: its session is over, and
    /// its process gone or reset.
    pub fn take_in_flight(&mut self) -> impl Iterator<Item = Tag> {
        self.phase = RequestPhase::Over;
        self.parked.iter_mut().filter_map(Option::take)
    }

    /// Counters of the device's violations.
    pub fn violations(&self) -> &Arc<Violations> {
        &self.violations
    }

    /// The ring, for queries of its own state.
    pub fn ring(&self) -> &DriverRing {
        &self.ring
    }
}
