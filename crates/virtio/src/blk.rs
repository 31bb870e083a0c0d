//! virtio-blk: a chain becomes a bio, a bio's status becomes a status byte. [5.2.6]
//!
//! It keeps no state: the same chain gives the same result. It writes status bytes and the disk's serial number to
//! guest memory, nothing else. The request's header is copied once, and later changes by the guest have no effect. The
//! queue core checks bounds and alignment of every bio against the device; this module checks that a request has the
//! form that its type requires.

use blkyard_mq::{Bio, BioFlags, Op, SECTOR_BYTES, Segment, Status};

use crate::counters::reasons;
use crate::{Chain, ChainFault, Features, GuestMemory};

pub(crate) const HEADER_BYTES: usize = 16;
/// A range of discard and write zeroes: sector, sectors, flags. [5.2.6]
pub(crate) const RANGE_BYTES: usize = 16;
pub(crate) const RANGE_UNMAP: u32 = 1;
pub(crate) const ID_BYTES: usize = 20;

/// Request types. [5.2.6]
pub(crate) mod kind {
    pub(crate) const IN: u32 = 0;
    pub(crate) const OUT: u32 = 1;
    pub(crate) const FLUSH: u32 = 4;
    pub(crate) const GET_ID: u32 = 8;
    pub(crate) const DISCARD: u32 = 11;
    pub(crate) const WRITE_ZEROES: u32 = 13;
}

/// The last byte of a request. [5.2.6]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum VirtioStatus {
    /// Done.
    Ok = 0,
    /// Anything that went wrong.
    IoErr = 1,
    /// The device does not do this.
    Unsupp = 2,
}

/// The status byte for a bio's status.
#[inline]
pub fn status_of(status: Status) -> VirtioStatus {
    match status {
        Status::Ok => VirtioStatus::Ok,
        Status::NotSupported => VirtioStatus::Unsupp,
        _ => VirtioStatus::IoErr,
    }
}

reasons! {
    /// Fault of a request whose chain is valid.
    RequestFault {
        /// No writable byte at the end: the request cannot be answered.
        NoStatus = "request without a status byte",
        /// Less than the 16 bytes of a header.
        ShortHeader = "request header too short",
        /// A type the device does not know, or that was not negotiated.
        Unknown = "unknown request type",
        /// Readable bytes behind the header of a request that reads, or writable ones before the status of one that
        /// writes.
        Direction = "data in the wrong direction",
        /// A read or write without data.
        NoData = "read or write without data",
        /// Data that is not made of sectors.
        Unaligned = "data length not a multiple of a sector",
        /// More segments than a bio holds.
        TooManySegments = "more data segments than announced",
        /// Not one whole range, for a type that has one.
        RangeLength = "discard or write zeroes without a whole range",
        /// More than the one range announced.
        TooManyRanges = "discard or write zeroes of several ranges",
        /// A flag of a range that is unknown or not allowed.
        RangeFlags = "discard or write zeroes with unknown flags",
        /// A range without sectors.
        EmptyRange = "discard or write zeroes without sectors",
        /// The last sector overflows.
        Overflow = "sector range wraps around",
        /// A change to a disk that was offered as read-only.
        ReadOnly = "write to a read-only disk",
        /// Less room than the identification needs.
        ShortId = "identification buffer too short",
    }
}

/// Why a request was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Refusal {
    /// Its chain is wrong.
    #[error("{0}")]
    Chain(ChainFault),
    /// It is wrong itself.
    #[error("{0}")]
    Request(RequestFault),
}

/// Session state on which parsing depends.
#[derive(Clone, Copy, Debug)]
pub struct ParseContext {
    /// Negotiated features.
    pub features: Features,
    /// Whether completed writes may wait for a flush. Only so if the driver can flush, too.
    pub write_back: bool,
}

/// Result of parsing a chain.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub enum Parsed {
    /// I/O: the bio is filled in.
    Io {
        /// Where the status goes.
        status_at: Segment,
    },
    /// The disk's serial number, into the first 20 writable bytes ([`SerialId::write`]).
    GetId {
        /// Where the status goes.
        status_at: Segment,
    },
    /// An impossible request.
    Reject {
        /// Status to return.
        status: VirtioStatus,
        /// Where, if that is known. If not, the chain is given back with length zero.
        status_at: Option<Segment>,
        /// Why.
        reason: Refusal,
    },
}

/// Reads a request, and fills in the bio if it is I/O; otherwise the bio is undefined.
///
/// The bio's list of segments is not grown: its capacity is the maximum of a request's segments.
// Always inlined, with reads: for one the call, and its answer in memory, would be a fifth of it.
#[inline(always)]
pub fn parse(chain: &Chain, memory: &GuestMemory, context: &ParseContext, bio: &mut Bio) -> Parsed {
    let status_at = chain.status_at();
    if let Some(fault) = chain.fault() {
        return Parsed::Reject { status: VirtioStatus::IoErr, status_at, reason: Refusal::Chain(fault) };
    }
    let Some(status_at) = status_at else { return reject(None, RequestFault::NoStatus) };
    let Some((kind, sector)) = read_header(chain, memory) else {
        return reject(Some(status_at), RequestFault::ShortHeader);
    };
    bio.reset();
    bio.sector = sector;
    let filled = match kind {
        kind::IN => fill_read(chain, bio),
        kind::OUT => fill_write(chain, context, bio),
        _ => fill_other(kind, chain, memory, context, bio),
    };
    match filled {
        Ok(true) => Parsed::Io { status_at },
        Ok(false) => Parsed::GetId { status_at },
        Err(fault) => reject(Some(status_at), fault),
    }
}

#[cold]
fn reject(status_at: Option<Segment>, fault: RequestFault) -> Parsed {
    let status = match fault {
        // A driver may try operations that are not offered; the specification prescribes this status. [5.2.6.2]
        RequestFault::Unknown | RequestFault::RangeFlags | RequestFault::TooManyRanges => VirtioStatus::Unsupp,
        _ => VirtioStatus::IoErr,
    };
    Parsed::Reject { status, status_at, reason: Refusal::Request(fault) }
}

#[inline(always)]
fn fill_read(chain: &Chain, bio: &mut Bio) -> Result<bool, RequestFault> {
    bio.op = Op::Read;
    if chain.readable_bytes() != HEADER_BYTES as u64 {
        return Err(RequestFault::Direction);
    }
    // The last byte is the status, usually in a segment of its own.
    let Some((last, data)) = chain.writable().split_last() else { return Err(RequestFault::NoStatus) };
    let rest = (last.len > 1).then(|| Segment { len: last.len - 1, ..*last });
    fill_data(bio, None, data, rest, chain.writable_bytes() - 1)
}

#[inline]
fn fill_write(chain: &Chain, context: &ParseContext, bio: &mut Bio) -> Result<bool, RequestFault> {
    bio.op = Op::Write;
    bio.flags = durability(context);
    if chain.writable_bytes() != 1 {
        return Err(RequestFault::Direction);
    }
    if context.features.contains(Features::RO) {
        return Err(RequestFault::ReadOnly);
    }
    // The header may end in the midst of a segment.
    let mut skip = HEADER_BYTES as u32;
    let mut data = chain.readable();
    let mut first = None;
    while let Some((segment, rest)) = data.split_first()
        && skip > 0
    {
        data = rest;
        if segment.len > skip {
            first = Some(Segment { offset: segment.offset + u64::from(skip), len: segment.len - skip, ..*segment });
            break;
        }
        skip -= segment.len;
    }
    fill_data(bio, first, data, None, chain.readable_bytes() - HEADER_BYTES as u64)
}

#[inline(always)]
fn fill_data(
    bio: &mut Bio,
    first: Option<Segment>,
    data: &[Segment],
    last: Option<Segment>,
    bytes: u64,
) -> Result<bool, RequestFault> {
    if bytes == 0 {
        return Err(RequestFault::NoData);
    }
    if !bytes.is_multiple_of(SECTOR_BYTES) {
        return Err(RequestFault::Unaligned);
    }
    // A chain has at most 2^32 bytes, so the number of sectors fits.
    bio.sectors = (bytes / SECTOR_BYTES) as u32;
    if bio.sector.checked_add(u64::from(bio.sectors)).is_none() {
        return Err(RequestFault::Overflow);
    }
    let segments = data.len() + usize::from(first.is_some()) + usize::from(last.is_some());
    if segments > bio.segments.capacity() {
        return Err(RequestFault::TooManySegments);
    }
    // One by one: there are few, and a call to copy them costs more than that.
    if let Some(first) = first {
        bio.segments.push(first);
    }
    for segment in data {
        bio.segments.push(*segment);
    }
    if let Some(last) = last {
        bio.segments.push(last);
    }
    Ok(true)
}

/// Everything but reads and writes. False if it is the serial number that is wanted.
fn fill_other(
    kind: u32,
    chain: &Chain,
    memory: &GuestMemory,
    context: &ParseContext,
    bio: &mut Bio,
) -> Result<bool, RequestFault> {
    let has = |feature| context.features.contains(feature);
    match kind {
        kind::FLUSH if has(Features::FLUSH) => {
            bio.op = Op::Flush;
            // The sector of a flush is ignored. [5.2.6.1]
            bio.sector = 0;
            if chain.readable_bytes() != HEADER_BYTES as u64 || chain.writable_bytes() != 1 {
                return Err(RequestFault::Direction);
            }
            Ok(true)
        }
        kind::DISCARD if has(Features::DISCARD) => {
            bio.op = Op::Discard;
            let flags = fill_range(chain, memory, context, bio)?;
            // Unmap is not for discards. [5.2.6.2]
            if flags == 0 { Ok(true) } else { Err(RequestFault::RangeFlags) }
        }
        kind::WRITE_ZEROES if has(Features::WRITE_ZEROES) => {
            bio.op = Op::WriteZeroes;
            bio.flags = durability(context);
            let flags = fill_range(chain, memory, context, bio)?;
            bio.flags.set(BioFlags::NO_UNMAP, flags & RANGE_UNMAP == 0);
            if flags & !RANGE_UNMAP == 0 { Ok(true) } else { Err(RequestFault::RangeFlags) }
        }
        kind::GET_ID => {
            if chain.readable_bytes() != HEADER_BYTES as u64 {
                return Err(RequestFault::Direction);
            }
            if chain.writable_bytes() > ID_BYTES as u64 { Ok(false) } else { Err(RequestFault::ShortId) }
        }
        _ => Err(RequestFault::Unknown),
    }
}

/// Reads the range of a discard or write zeroes; returns its flags.
fn fill_range(chain: &Chain, memory: &GuestMemory, context: &ParseContext, bio: &mut Bio) -> Result<u32, RequestFault> {
    if chain.writable_bytes() != 1 {
        return Err(RequestFault::Direction);
    }
    if context.features.contains(Features::RO) {
        return Err(RequestFault::ReadOnly);
    }
    let bytes = chain.readable_bytes() - HEADER_BYTES as u64;
    if bytes == 0 || !bytes.is_multiple_of(RANGE_BYTES as u64) {
        return Err(RequestFault::RangeLength);
    }
    if bytes > RANGE_BYTES as u64 {
        return Err(RequestFault::TooManyRanges);
    }
    let mut range = [0; RANGE_BYTES];
    if !gather(chain.readable(), HEADER_BYTES, memory, &mut range) {
        return Err(RequestFault::RangeLength);
    }
    let range = u128::from_le_bytes(range);
    bio.sector = range as u64;
    bio.sectors = (range >> 64) as u32;
    if bio.sectors == 0 {
        return Err(RequestFault::EmptyRange);
    }
    if bio.sector.checked_add(u64::from(bio.sectors)).is_none() {
        return Err(RequestFault::Overflow);
    }
    Ok((range >> 96) as u32)
}

/// Write-through: each write is durable when it completes. Without a way to flush there is no other mode. [5.2.6.2]
#[inline]
fn durability(context: &ParseContext) -> BioFlags {
    if context.write_back && context.features.contains(Features::FLUSH) { BioFlags::empty() } else { BioFlags::FUA }
}

/// Copies the header: type and sector, if it is complete. The field between the two is reserved.
// Always inlined: the call, and the answer through memory, would cost a request 36 instructions.
#[inline(always)]
fn read_header(chain: &Chain, memory: &GuestMemory) -> Option<(u32, u64)> {
    let first = chain.readable().first()?;
    if first.len >= HEADER_BYTES as u32 {
        let span = memory.table().resolve_region(Segment { len: HEADER_BYTES as u32, ..*first })?;
        let [kind, sector] = span.u64s(0);
        return Some((kind as u32, sector));
    }
    read_torn_header(chain, memory)
}

/// The same for a header in pieces.
#[cold]
fn read_torn_header(chain: &Chain, memory: &GuestMemory) -> Option<(u32, u64)> {
    let (mut kind, mut sector) = ([0; 4], [0; 8]);
    if !gather(chain.readable(), 0, memory, &mut kind) || !gather(chain.readable(), 8, memory, &mut sector) {
        return None;
    }
    Some((u32::from_le_bytes(kind), u64::from_le_bytes(sector)))
}

/// Copies `to.len()` bytes of the segments, from byte `skip` on; false if there are not as many.
#[cold]
fn gather(segments: &[Segment], mut skip: usize, memory: &GuestMemory, to: &mut [u8]) -> bool {
    let mut filled = 0;
    for segment in segments {
        let len = segment.len as usize;
        if skip >= len {
            skip -= len;
            continue;
        }
        let Some(span) = memory.table().resolve_region(*segment) else { return false };
        let here = (len - skip).min(to.len() - filled);
        span.part(skip, here).copy_to_slice(&mut to[filled..filled + here]);
        filled += here;
        skip = 0;
        if filled == to.len() {
            return true;
        }
    }
    false
}

/// Writes a status byte. The memory is that of the chain; a byte that is no longer mapped is skipped.
#[inline]
pub fn write_status(memory: &GuestMemory, at: Segment, status: VirtioStatus) {
    if let Some(span) = memory.table().resolve_region(Segment { len: 1, ..at }) {
        span.copy_from_slice(&[status as u8]);
    }
}

/// The length for the used element of a request whose status was written, when `data_bytes` is the room for data before
/// the status byte.
///
/// The specification makes it a promise that so many bytes were written from the first writable one on, without a gap.
/// [2.7.8.2] After a failed read the bytes written before the status are unknown, so the length is 0 then.
#[inline]
pub fn written(data_bytes: u64, status: VirtioStatus) -> u32 {
    match status {
        VirtioStatus::Ok => u32::try_from(data_bytes + 1).unwrap_or(u32::MAX),
        _ => u32::from(data_bytes == 0),
    }
}

/// Status of a request, by its status byte; `None` for an undefined value.
#[inline]
pub(crate) fn status_from(byte: u8) -> Option<Status> {
    const OK: u8 = VirtioStatus::Ok as u8;
    const IOERR: u8 = VirtioStatus::IoErr as u8;
    const UNSUPP: u8 = VirtioStatus::Unsupp as u8;
    match byte {
        OK => Some(Status::Ok),
        // And those of zoned devices, which have no zones for us. [5.2.6]
        IOERR | 3..=6 => Some(Status::Io),
        UNSUPP => Some(Status::NotSupported),
        _ => None,
    }
}

/// The disk's serial number: up to 20 printable ASCII characters. [5.2.6, GET_ID]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SerialId([u8; ID_BYTES]);

/// An invalid serial number.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SerialError {
    /// It has more than 20 characters.
    #[error("the serial number {0:?} has more than {ID_BYTES} characters; shorten it")]
    TooLong(String),
    /// It has characters that are not printable ASCII.
    #[error("the serial number {0:?} contains {1:?}; use printable ASCII characters only")]
    Character(String, char),
}

impl SerialId {
    /// Checks a serial number.
    ///
    /// # Errors
    /// It is too long, or holds anything but printable ASCII.
    pub fn new(serial: &str) -> Result<SerialId, SerialError> {
        if let Some(bad) = serial.chars().find(|c| !c.is_ascii_graphic() && *c != ' ') {
            return Err(SerialError::Character(serial.into(), bad));
        }
        let mut bytes = [0; ID_BYTES];
        let to = bytes.get_mut(..serial.len()).ok_or_else(|| SerialError::TooLong(serial.into()))?;
        to.copy_from_slice(serial.as_bytes());
        Ok(SerialId(bytes))
    }

    /// In the guest's format: padded with zeroes, or all 20 characters.
    pub fn bytes(&self) -> &[u8; ID_BYTES] {
        &self.0
    }

    /// Writes it into the first bytes of these segments; returns how many were written.
    pub fn write(&self, memory: &GuestMemory, segments: &[Segment]) -> u32 {
        let mut left = &self.0[..];
        for segment in segments {
            let Some(span) = memory.table().resolve_region(*segment) else { break };
            let (here, rest) = left.split_at(span.len().min(left.len()));
            span.part(0, here.len()).copy_from_slice(here);
            left = rest;
        }
        (ID_BYTES - left.len()) as u32
    }
}

impl std::fmt::Display for SerialId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let end = self.0.iter().position(|byte| *byte == 0).unwrap_or(ID_BYTES);
        f.write_str(&String::from_utf8_lossy(&self.0[..end]))
    }
}

impl std::fmt::Debug for SerialId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SerialId({self})")
    }
}

impl std::str::FromStr for SerialId {
    type Err = SerialError;

    fn from_str(serial: &str) -> Result<SerialId, SerialError> {
        SerialId::new(serial)
    }
}
