//! Commands of both directions.

use super::payload::{PayloadReader, check_descriptors, payload};
use super::region::{DEVICE_BYTES, IO_FDS_BYTES};
use super::{
    Command, DmaAccess, DmaMapRequest, DmaUnmapRequest, IrqSetRequest, MessageError, MessageHeader, MessageKind,
    REGION_INFO_BYTES, RegionAccess, RegionWrite, VfioVersion, irq,
};

/// A command with its payload. The descriptors that belong to it travel beside it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VfioRequest<'a> {
    /// The client's proposal.
    Version(VfioVersion),
    /// Maps memory of the client, with one descriptor, or none if the server accesses it by messages.
    DmaMap(DmaMapRequest),
    /// Unmaps memory of the client.
    DmaUnmap(DmaUnmapRequest),
    /// Requests the parts of the device.
    DeviceGetInfo,
    /// Requests a region's properties.
    DeviceGetRegionInfo {
        /// Maximum bytes of the reply; at least the fixed part.
        argsz: u32,
        /// Number of the region.
        index: u32,
    },
    /// Requests the descriptors that replace writes to a region.
    DeviceGetRegionIoFds {
        /// Maximum bytes of the reply; at least the fixed part.
        argsz: u32,
        /// Number of the region.
        index: u32,
    },
    /// Requests an interrupt type's properties.
    DeviceGetIrqInfo {
        /// Number of the type.
        index: u32,
    },
    /// Acts on interrupts, with an eventfd for each one set.
    DeviceSetIrqs(IrqSetRequest<'a>),
    /// Reads bytes of a region.
    RegionRead(RegionAccess),
    /// Writes bytes of a region; as many as the access says.
    RegionWrite(RegionAccess, &'a [u8]),
    /// The server reads memory of the client.
    DmaRead(DmaAccess),
    /// The server writes memory of the client; as many bytes as the access says.
    DmaWrite(DmaAccess, &'a [u8]),
    /// Resets the device.
    DeviceReset,
    /// Several small writes, in order.
    RegionWriteMulti(Vec<RegionWrite>),
}

impl<'a> VfioRequest<'a> {
    /// Parses the payload of a command with this number of descriptors. The receiver accepts `data_max` bytes of data
    /// in one message.
    ///
    /// # Errors
    /// See [`MessageError`].
    pub fn parse(
        command: u16,
        payload: &'a [u8],
        descriptors: usize,
        data_max: u32,
    ) -> Result<VfioRequest<'a>, MessageError> {
        let command = Command::from_number(command).ok_or(MessageError::UnknownCommand(command))?;
        // All of these have argsz, and the requested number at the same offset.
        let asked = |fixed: usize| {
            check_descriptors(command, descriptors, 0)?;
            let mut fields = PayloadReader::new(command, payload, fixed)?;
            let (argsz, _flags, index) = (fields.argsz(fixed)?, fields.u32()?, fields.u32()?);
            Ok((argsz, index))
        };
        Ok(match command {
            Command::Version => VfioRequest::Version(VfioVersion::parse(payload, descriptors, false)?),
            Command::DmaMap => VfioRequest::DmaMap(DmaMapRequest::parse(payload, descriptors)?),
            Command::DmaUnmap => VfioRequest::DmaUnmap(DmaUnmapRequest::parse(payload, descriptors)?),
            Command::DeviceGetInfo => asked(DEVICE_BYTES).map(|_| VfioRequest::DeviceGetInfo)?,
            Command::DeviceGetRegionInfo => {
                let (argsz, index) = asked(REGION_INFO_BYTES)?;
                VfioRequest::DeviceGetRegionInfo { argsz, index }
            }
            Command::DeviceGetRegionIoFds => {
                let (argsz, index) = asked(IO_FDS_BYTES)?;
                VfioRequest::DeviceGetRegionIoFds { argsz, index }
            }
            Command::DeviceGetIrqInfo => VfioRequest::DeviceGetIrqInfo { index: asked(irq::INFO_BYTES)?.1 },
            Command::DeviceSetIrqs => VfioRequest::DeviceSetIrqs(IrqSetRequest::parse(payload, descriptors)?),
            Command::RegionRead => {
                let (access, mut fields) = RegionAccess::parse(command, payload, descriptors, data_max)?;
                fields.end()?;
                VfioRequest::RegionRead(access)
            }
            Command::RegionWrite => {
                let (access, mut fields) = RegionAccess::parse(command, payload, descriptors, data_max)?;
                VfioRequest::RegionWrite(access, fields.data(u64::from(access.count))?)
            }
            Command::DmaRead => {
                let (access, mut fields) = DmaAccess::parse(command, payload, descriptors, data_max)?;
                fields.end()?;
                VfioRequest::DmaRead(access)
            }
            Command::DmaWrite => {
                let (access, mut fields) = DmaAccess::parse(command, payload, descriptors, data_max)?;
                VfioRequest::DmaWrite(access, fields.data(u64::from(access.count))?)
            }
            Command::DeviceReset => {
                check_descriptors(command, descriptors, 0)?;
                PayloadReader::new(command, payload, 0)?.end()?;
                VfioRequest::DeviceReset
            }
            Command::RegionWriteMulti => VfioRequest::RegionWriteMulti(RegionWrite::parse_all(payload, descriptors)?),
        })
    }

    /// The command.
    pub fn command(&self) -> Command {
        match self {
            VfioRequest::Version(_) => Command::Version,
            VfioRequest::DmaMap(_) => Command::DmaMap,
            VfioRequest::DmaUnmap(_) => Command::DmaUnmap,
            VfioRequest::DeviceGetInfo => Command::DeviceGetInfo,
            VfioRequest::DeviceGetRegionInfo { .. } => Command::DeviceGetRegionInfo,
            VfioRequest::DeviceGetRegionIoFds { .. } => Command::DeviceGetRegionIoFds,
            VfioRequest::DeviceGetIrqInfo { .. } => Command::DeviceGetIrqInfo,
            VfioRequest::DeviceSetIrqs(_) => Command::DeviceSetIrqs,
            VfioRequest::RegionRead(_) => Command::RegionRead,
            VfioRequest::RegionWrite(..) => Command::RegionWrite,
            VfioRequest::DmaRead(_) => Command::DmaRead,
            VfioRequest::DmaWrite(..) => Command::DmaWrite,
            VfioRequest::DeviceReset => Command::DeviceReset,
            VfioRequest::RegionWriteMulti(_) => Command::RegionWriteMulti,
        }
    }

    /// The whole message, with its header.
    ///
    /// # Panics
    /// If the data has another length than its access says.
    pub fn encode(&self, id: u16, no_reply: bool) -> Vec<u8> {
        let payload = match self {
            VfioRequest::Version(version) => version.encode(),
            VfioRequest::DmaMap(map) => map.encode(),
            VfioRequest::DmaUnmap(unmap) => unmap.encode(),
            VfioRequest::DeviceGetInfo => payload![DEVICE_BYTES as u32, 0_u32, 0_u64],
            VfioRequest::DeviceGetRegionInfo { argsz, index } => {
                payload![argsz, 0_u32, index, 0_u32, 0_u64, 0_u64]
            }
            VfioRequest::DeviceGetRegionIoFds { argsz, index } => payload![argsz, 0_u32, index, 0_u32],
            VfioRequest::DeviceGetIrqInfo { index } => payload![irq::INFO_BYTES as u32, 0_u32, index, 0_u32],
            VfioRequest::DeviceSetIrqs(set) => set.encode(),
            VfioRequest::RegionRead(access) => access.encode(&[]),
            VfioRequest::RegionWrite(access, data) => {
                assert_eq!(data.len(), access.count as usize, "the access says how many bytes are written");
                access.encode(data)
            }
            VfioRequest::DmaRead(access) => access.encode(&[]),
            VfioRequest::DmaWrite(access, data) => {
                assert_eq!(data.len(), access.count as usize, "the access says how many bytes are written");
                access.encode(data)
            }
            VfioRequest::DeviceReset => Vec::new(),
            VfioRequest::RegionWriteMulti(writes) => RegionWrite::encode_all(writes),
        };
        MessageHeader::message(id, self.command(), MessageKind::Command { no_reply }, &payload)
    }
}
