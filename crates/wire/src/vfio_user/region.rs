//! The device and its regions: their properties, mappings, and reads and writes by message.

use super::payload::{PayloadReader, check_descriptors, check_range, payload};
use super::{Command, MessageError};

/// Bytes of DEVICE_GET_INFO, both ways.
pub(super) const DEVICE_BYTES: usize = 16;
/// Bytes of DEVICE_GET_REGION_INFO, both ways, without capabilities.
pub const REGION_INFO_BYTES: usize = 32;
/// Bytes of DEVICE_GET_REGION_IO_FDS, both ways, without entries.
pub const IO_FDS_BYTES: usize = 16;
/// Bytes of one entry there, as libvfio-user has it, and as the specification has it.
const IO_FD_BYTES: usize = 48;
const SHORT_IO_FD_BYTES: usize = 40;
/// Bytes before the data of REGION_READ and REGION_WRITE.
const ACCESS_BYTES: usize = 16;
/// Bytes of one write of REGION_WRITE_MULTI, and its maximum data.
const WRITE_BYTES: usize = 24;
const WRITE_DATA_BYTES: usize = 8;

/// Bytes of a capability's header, and of the sparse mmap capability before its areas.
const CAPABILITY_BYTES: usize = 8;
const SPARSE_BYTES: usize = 16;
const AREA_BYTES: usize = 16;
/// `VFIO_REGION_INFO_CAP_SPARSE_MMAP`, and its version.
const SPARSE_ID: u16 = 1;
const SPARSE_VERSION: u16 = 1;

bitflags::bitflags! {
    /// Kind of a device. Bits without a name are of other buses, and kept.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct DeviceFlags: u32 {
        /// The device supports DEVICE_RESET.
        const RESET = 1;
        /// The device is a PCI device.
        const PCI = 2;
    }

    /// Permitted accesses to a region. Bits without a name are kept.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct RegionFlags: u32 {
        /// Read it.
        const READ = 1;
        /// Write it.
        const WRITE = 2;
        /// Map it, all or in parts.
        const MMAP = 4;
        /// The region has capabilities. Set by the encoder, not kept in [`RegionInfo`].
        const CAPS = 8;
    }
}

/// Parts of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceRegions {
    /// Its kind.
    pub flags: DeviceFlags,
    /// Number of its regions.
    pub regions: u32,
    /// Number of its interrupt types.
    pub irqs: u32,
}

/// A region of the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionInfo {
    /// Region number.
    pub index: u32,
    /// Permitted accesses.
    pub flags: RegionFlags,
    /// Bytes; zero if the device has no such region.
    pub size: u64,
    /// Offset of its first byte in the file whose descriptor comes with the message.
    pub offset: u64,
    /// The mappable parts, none of them empty; unset if the whole region is mappable.
    pub sparse: Option<Vec<SparseArea>>,
}

/// A part of a region that may be mapped. It lies in its region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SparseArea {
    /// Offset of its first byte in the region.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
}

/// Bytes of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionAccess {
    /// Offset of the first one.
    pub offset: u64,
    /// Number of the region.
    pub region: u32,
    /// Number of bytes.
    pub count: u32,
}

/// One of several writes in one message: 1 to 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionWrite {
    /// Accessed bytes of the region.
    pub access: RegionAccess,
    /// The bytes; those from `access.count` on are zero.
    pub data: [u8; WRITE_DATA_BYTES],
}

/// Notification of the server about writes to parts of a region without a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionIoFds {
    /// Number of the region.
    pub index: u32,
    /// The parts.
    pub parts: Vec<IoFd>,
}

/// A part of a region that has a descriptor for its writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoFd {
    /// Offset of its first byte in the region.
    pub offset: u64,
    /// Bytes; zero if the length of an access does not matter.
    pub size: u64,
    /// Index of the descriptor among those of the message.
    pub fd_index: u32,
    /// Kind of the descriptor.
    pub kind: IoFdKind,
    /// Flags of KVM's interface for it.
    pub flags: u32,
    /// The value that triggers an eventfd, or that an ioregionfd returns with each access.
    pub value: u64,
}

/// A kind of descriptor for I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoFdKind {
    /// KVM's ioeventfd: the value of a write is lost.
    EventFd,
    /// KVM's ioregionfd.
    RegionFd,
    /// An ioeventfd whose writer first stores the value in memory of the server.
    ShadowEventFd {
        /// Index of the memory's file among the descriptors of the message.
        memory: u32,
        /// Offset in that file of the part's first byte.
        at: u64,
    },
}

impl DeviceRegions {
    pub(super) fn parse(payload: &[u8], descriptors: usize) -> Result<DeviceRegions, MessageError> {
        let command = Command::DeviceGetInfo;
        check_descriptors(command, descriptors, 0)?;
        let mut fields = PayloadReader::new(command, payload, DEVICE_BYTES)?;
        fields.argsz(DEVICE_BYTES)?;
        let flags = DeviceFlags::from_bits_retain(fields.u32()?);
        Ok(DeviceRegions { flags, regions: fields.u32()?, irqs: fields.u32()? })
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        payload![DEVICE_BYTES as u32, self.flags.bits(), self.regions, self.irqs]
    }
}

/// A region info reply, either with its capabilities or with the length needed for them.
pub(super) enum RegionInfoReply {
    Whole(RegionInfo),
    Cut { argsz: u32, fixed: RegionInfo },
}

impl RegionInfo {
    /// Bytes of the whole reply: the `argsz` to request it.
    pub fn reply_bytes(&self) -> u32 {
        let areas = self.sparse.as_ref().map_or(0, |areas| SPARSE_BYTES + areas.len() * AREA_BYTES);
        (REGION_INFO_BYTES + areas) as u32
    }

    pub(super) fn parse(payload: &[u8], descriptors: usize) -> Result<RegionInfoReply, MessageError> {
        let command = Command::DeviceGetRegionInfo;
        let mut fields = PayloadReader::new(command, payload, REGION_INFO_BYTES)?;
        let argsz = fields.argsz(REGION_INFO_BYTES)?;
        let flags = RegionFlags::from_bits_retain(fields.u32()?);
        let (index, first) = (fields.u32()?, fields.u32()?);
        let (size, offset) = (fields.u64()?, fields.u64()?);
        check_range(command, offset, size)?;
        let mut info = RegionInfo { index, flags: flags - RegionFlags::CAPS, size, offset, sparse: None };
        let Some(payload) = payload.get(..argsz as usize) else {
            return Ok(RegionInfoReply::Cut { argsz, fixed: info });
        };
        if flags.contains(RegionFlags::MMAP) && descriptors == 0 {
            return Err(MessageError::NoDescriptor { command, index: 0 });
        }
        if flags.contains(RegionFlags::CAPS) {
            info.sparse = parse_sparse(payload, first, size)?;
        }
        Ok(RegionInfoReply::Whole(info))
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let Some(areas) = &self.sparse else { return self.encode_fixed(REGION_INFO_BYTES as u32, self.flags, 0) };
        let first = REGION_INFO_BYTES as u32;
        let mut bytes = self.encode_fixed(self.reply_bytes(), self.flags | RegionFlags::CAPS, first);
        bytes.extend(payload![SPARSE_ID, SPARSE_VERSION, 0_u32, areas.len() as u32, 0_u32]);
        for area in areas {
            bytes.extend(payload![area.offset, area.size]);
        }
        bytes
    }

    /// The reply without the capabilities, for which `argsz` bytes are needed. It does not announce them: QEMU refuses
    /// capabilities without an offset.
    pub(super) fn encode_cut(&self, argsz: u32) -> Vec<u8> {
        self.encode_fixed(argsz, self.flags, 0)
    }

    fn encode_fixed(&self, argsz: u32, flags: RegionFlags, first: u32) -> Vec<u8> {
        payload![argsz, flags.bits(), self.index, first, self.size, self.offset]
    }
}

/// Walks the capabilities from offset `first` on. Each must lie after the previous one, so the walk ends.
fn parse_sparse(payload: &[u8], first: u32, region: u64) -> Result<Option<Vec<SparseArea>>, MessageError> {
    let command = Command::DeviceGetRegionInfo;
    let mut sparse = None;
    let (mut next, mut end) = (first, REGION_INFO_BYTES);
    while next != 0 {
        let invalid = MessageError::Capability { offset: next };
        let at = next as usize;
        let Some(capability) = payload.get(at..).filter(|rest| at >= end && rest.len() >= CAPABILITY_BYTES) else {
            return Err(invalid);
        };
        let mut fields = PayloadReader::new(command, capability, CAPABILITY_BYTES)?;
        let (id, version, following) = (fields.u16()?, fields.u16()?, fields.u32()?);
        end = at + CAPABILITY_BYTES;
        if id == SPARSE_ID {
            if version != SPARSE_VERSION {
                return Err(MessageError::CapabilityVersion { id, version });
            }
            if sparse.is_some() || capability.len() < SPARSE_BYTES {
                return Err(invalid);
            }
            let (count, _reserved) = (fields.u32()?, fields.u32()?);
            let areas_bytes = (count as usize).checked_mul(AREA_BYTES);
            let areas = areas_bytes.and_then(|bytes| fields.rest().get(..bytes)).ok_or(invalid)?;
            end = at + SPARSE_BYTES + areas.len();
            sparse = Some(parse_areas(areas, region)?);
        }
        next = following;
    }
    Ok(sparse)
}

/// Areas that are not empty.
fn parse_areas(bytes: &[u8], region: u64) -> Result<Vec<SparseArea>, MessageError> {
    let mut areas = Vec::new();
    for area in bytes.chunks_exact(AREA_BYTES) {
        let mut fields = PayloadReader::new(Command::DeviceGetRegionInfo, area, AREA_BYTES)?;
        let (offset, size) = (fields.u64()?, fields.u64()?);
        if offset.checked_add(size).is_none_or(|end| end > region) {
            return Err(MessageError::OutsideRegion { start: offset, len: size, region });
        }
        if size > 0 {
            areas.push(SparseArea { offset, size });
        }
    }
    Ok(areas)
}

/// A reply about descriptors for I/O, either with its parts or with the length needed for them.
pub(super) enum RegionIoFdsReply {
    Whole(RegionIoFds),
    Cut { argsz: u32, index: u32 },
}

impl RegionIoFds {
    /// Bytes of the whole reply: the `argsz` to request it.
    pub fn reply_bytes(&self) -> u32 {
        (IO_FDS_BYTES + self.parts.len() * IO_FD_BYTES) as u32
    }

    /// Entries may be longer in later versions; bytes after their known fields are skipped. They may also be shorter:
    /// the specification has none of the fields of an eventfd with memory.
    pub(super) fn parse(payload: &[u8], descriptors: usize) -> Result<RegionIoFdsReply, MessageError> {
        let command = Command::DeviceGetRegionIoFds;
        let mut fields = PayloadReader::new(command, payload, IO_FDS_BYTES)?;
        let argsz = fields.argsz(IO_FDS_BYTES)?;
        let (flags, index, count) = (fields.u32()?, fields.u32()?, fields.u32()?);
        if flags != 0 {
            return Err(MessageError::Flags { command, flags });
        }
        let entries_bytes = argsz as usize - IO_FDS_BYTES;
        let Some(entries) = fields.rest().get(..entries_bytes) else {
            return Ok(RegionIoFdsReply::Cut { argsz, index });
        };
        let entry_bytes = entries_bytes.checked_div(count as usize).unwrap_or(IO_FD_BYTES);
        if entry_bytes < SHORT_IO_FD_BYTES || entry_bytes.checked_mul(count as usize) != Some(entries_bytes) {
            return Err(MessageError::Count { command, count: u64::from(count) });
        }
        let parts = entries.chunks_exact(entry_bytes).map(|entry| IoFd::parse(entry, descriptors));
        Ok(RegionIoFdsReply::Whole(RegionIoFds { index, parts: parts.collect::<Result<_, _>>()? }))
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = payload![self.reply_bytes(), 0_u32, self.index, self.parts.len() as u32];
        self.parts.iter().for_each(|part| part.encode(&mut bytes));
        bytes
    }

    /// The reply without the parts, for which `argsz` bytes are needed.
    pub(super) fn encode_cut(argsz: u32, index: u32) -> Vec<u8> {
        let count = argsz.saturating_sub(IO_FDS_BYTES as u32) / IO_FD_BYTES as u32;
        payload![argsz, 0_u32, index, count]
    }
}

impl IoFd {
    fn parse(entry: &[u8], descriptors: usize) -> Result<IoFd, MessageError> {
        let command = Command::DeviceGetRegionIoFds;
        let has_memory = entry.len() >= IO_FD_BYTES;
        let mut fields = PayloadReader::new(command, entry, if has_memory { IO_FD_BYTES } else { SHORT_IO_FD_BYTES })?;
        let (offset, size, fd_index, kind) = (fields.u64()?, fields.u64()?, fields.u32()?, fields.u32()?);
        let (flags, memory, word) = (fields.u32()?, fields.u32()?, fields.u64()?);
        let (kind, value) = match kind {
            0 if has_memory => (IoFdKind::EventFd, fields.u64()?),
            0 => (IoFdKind::EventFd, word),
            1 => (IoFdKind::RegionFd, word),
            2 if has_memory => (IoFdKind::ShadowEventFd { memory, at: word }, fields.u64()?),
            other => return Err(MessageError::IoFdType(other)),
        };
        check_range(command, offset, size)?;
        let mut highest = fd_index;
        if let IoFdKind::ShadowEventFd { memory, at } = kind {
            check_range(command, at, size)?;
            highest = highest.max(memory);
        }
        if highest as usize >= descriptors {
            return Err(MessageError::NoDescriptor { command, index: highest });
        }
        Ok(IoFd { offset, size, fd_index, kind, flags, value })
    }

    fn encode(&self, bytes: &mut Vec<u8>) {
        let (kind, memory, words) = match self.kind {
            IoFdKind::EventFd => (0_u32, 0, [0, self.value]),
            IoFdKind::RegionFd => (1, 0, [self.value, 0]),
            IoFdKind::ShadowEventFd { memory, at } => (2, memory, [at, self.value]),
        };
        bytes.extend(payload![self.offset, self.size, self.fd_index, kind, self.flags, memory, words[0], words[1]]);
    }
}

impl RegionAccess {
    /// An access, and the bytes behind it.
    pub(super) fn parse(
        command: Command,
        payload: &[u8],
        descriptors: usize,
        data_max: u32,
    ) -> Result<(RegionAccess, PayloadReader<'_>), MessageError> {
        check_descriptors(command, descriptors, 0)?;
        let mut fields = PayloadReader::new(command, payload, ACCESS_BYTES)?;
        let (offset, region, count) = (fields.u64()?, fields.u32()?, fields.u32()?);
        check_range(command, offset, u64::from(count))?;
        if count > data_max {
            return Err(MessageError::DataTooLong { command, count: u64::from(count), max: data_max });
        }
        Ok((RegionAccess { offset, region, count }, fields))
    }

    pub(super) fn encode(&self, data: &[u8]) -> Vec<u8> {
        let mut bytes = payload![self.offset, self.region, self.count];
        bytes.extend_from_slice(data);
        bytes
    }
}

impl RegionWrite {
    /// The writes of a message.
    pub(super) fn parse_all(payload: &[u8], descriptors: usize) -> Result<Vec<RegionWrite>, MessageError> {
        let command = Command::RegionWriteMulti;
        check_descriptors(command, descriptors, 0)?;
        let mut fields = PayloadReader::new(command, payload, 8)?;
        let count = fields.u64()?;
        let writes = fields.data(count.saturating_mul(WRITE_BYTES as u64))?;
        writes.chunks_exact(WRITE_BYTES).map(RegionWrite::parse).collect()
    }

    fn parse(bytes: &[u8]) -> Result<RegionWrite, MessageError> {
        let command = Command::RegionWriteMulti;
        let (access, mut fields) = RegionAccess::parse(command, bytes, 0, u32::MAX)?;
        let mut data = fields.u64()?.to_ne_bytes();
        if !(1..=WRITE_DATA_BYTES as u32).contains(&access.count) {
            return Err(MessageError::Count { command, count: u64::from(access.count) });
        }
        data[access.count as usize..].fill(0);
        Ok(RegionWrite { access, data })
    }

    pub(super) fn encode_all(writes: &[RegionWrite]) -> Vec<u8> {
        let mut bytes = payload![writes.len() as u64];
        writes.iter().for_each(|write| bytes.extend(write.access.encode(&write.data)));
        bytes
    }
}
