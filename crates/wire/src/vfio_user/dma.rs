//! DMA: memory of the client for the server, by mapping or by message.

use super::payload::{PayloadReader, check_descriptors, check_range, payload};
use super::{Command, MessageError};

/// Bytes of a DMA_MAP payload.
const MAP_BYTES: usize = 32;
/// Bytes of a DMA_UNMAP payload.
const UNMAP_BYTES: usize = 24;
/// Bytes before the data of DMA_READ and DMA_WRITE.
const ACCESS_BYTES: usize = 16;
/// Bytes of the reply to DMA_WRITE, as the specification's table has it.
const WRITTEN_BYTES: usize = 12;
/// Unmap all mappings (`VFIO_DMA_UNMAP_FLAG_ALL`).
const UNMAP_ALL: u32 = 1 << 1;

bitflags::bitflags! {
    /// Permissions of the server for mapped memory.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct DmaMapFlags: u32 {
        /// Read it.
        const READ = 1;
        /// Write it.
        const WRITE = 2;
    }
}

/// Memory of the client, to be mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaMapRequest {
    /// Permissions of the server.
    pub flags: DmaMapFlags,
    /// Offset in the file whose descriptor comes with the message.
    pub offset: u64,
    /// Address by which the device knows the first byte.
    pub address: u64,
    /// Bytes; not zero.
    pub size: u64,
}

/// Memory of the client, to be unmapped. Also the payload of the reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DmaUnmapRequest {
    /// All mappings within a range, which may have none and may end with the address space.
    Range {
        /// Address of its first byte.
        address: u64,
        /// Bytes; not zero.
        size: u64,
    },
    /// All mappings.
    All,
}

/// Bytes of mapped memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaAccess {
    /// Address of the first one.
    pub address: u64,
    /// Number of bytes.
    pub count: u32,
}

impl DmaMapRequest {
    pub(super) fn parse(payload: &[u8], descriptors: usize) -> Result<DmaMapRequest, MessageError> {
        let command = Command::DmaMap;
        check_descriptors(command, descriptors, 1)?;
        let mut fields = PayloadReader::new(command, payload, MAP_BYTES)?;
        fields.argsz(MAP_BYTES)?;
        let flags = fields.u32()?;
        let flags = DmaMapFlags::from_bits(flags).ok_or(MessageError::Flags { command, flags })?;
        let (offset, address, size) = (fields.u64()?, fields.u64()?, fields.u64()?);
        if size == 0 {
            return Err(MessageError::Range { command, start: address, len: size });
        }
        check_range(command, offset, size)?;
        check_range(command, address, size)?;
        Ok(DmaMapRequest { flags, offset, address, size })
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        payload![MAP_BYTES as u32, self.flags.bits(), self.offset, self.address, self.size]
    }
}

impl DmaUnmapRequest {
    pub(super) fn parse(payload: &[u8], descriptors: usize) -> Result<DmaUnmapRequest, MessageError> {
        let command = Command::DmaUnmap;
        check_descriptors(command, descriptors, 0)?;
        let mut fields = PayloadReader::new(command, payload, UNMAP_BYTES)?;
        fields.argsz(UNMAP_BYTES)?;
        let (flags, address, size) = (fields.u32()?, fields.u64()?, fields.u64()?);
        match flags {
            0 => {
                let last = size.checked_sub(1).and_then(|bytes| address.checked_add(bytes));
                last.ok_or(MessageError::Range { command, start: address, len: size })?;
                Ok(DmaUnmapRequest::Range { address, size })
            }
            UNMAP_ALL if address == 0 && size == 0 => Ok(DmaUnmapRequest::All),
            UNMAP_ALL => Err(MessageError::Range { command, start: address, len: size }),
            _ => Err(MessageError::Flags { command, flags }),
        }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let (flags, address, size) = match *self {
            DmaUnmapRequest::Range { address, size } => (0, address, size),
            DmaUnmapRequest::All => (UNMAP_ALL, 0, 0),
        };
        payload![UNMAP_BYTES as u32, flags, address, size]
    }
}

impl DmaAccess {
    /// An access, and the bytes behind it.
    pub(super) fn parse(
        command: Command,
        payload: &[u8],
        descriptors: usize,
        data_max: u32,
    ) -> Result<(DmaAccess, PayloadReader<'_>), MessageError> {
        check_descriptors(command, descriptors, 0)?;
        let mut fields = PayloadReader::new(command, payload, ACCESS_BYTES)?;
        let (address, count) = (fields.u64()?, fields.u64()?);
        check_range(command, address, count)?;
        let fits = u32::try_from(count).ok().filter(|count| *count <= data_max);
        let count = fits.ok_or(MessageError::DataTooLong { command, count, max: data_max })?;
        Ok((DmaAccess { address, count }, fields))
    }

    /// The reply to DMA_WRITE. The specification's table gives the count four bytes; libvfio-user and QEMU send and
    /// expect eight.
    pub(super) fn parse_written(payload: &[u8], descriptors: usize, data_max: u32) -> Result<DmaAccess, MessageError> {
        let command = Command::DmaWrite;
        if payload.len() == WRITTEN_BYTES {
            let mut fields = PayloadReader::new(command, payload, WRITTEN_BYTES)?;
            let wide = payload![fields.u64()?, u64::from(fields.u32()?)];
            return DmaAccess::parse(command, &wide, descriptors, data_max).map(|(access, _)| access);
        }
        let (access, mut fields) = DmaAccess::parse(command, payload, descriptors, data_max)?;
        fields.end().map(|()| access)
    }

    pub(super) fn encode(&self, data: &[u8]) -> Vec<u8> {
        let mut bytes = payload![self.address, u64::from(self.count)];
        bytes.extend_from_slice(data);
        bytes
    }
}
