//! Replies to commands that were carried out.

use super::payload::{PayloadReader, check_descriptors, payload};
use super::region::{RegionInfoReply, RegionIoFdsReply};
use super::{
    Command, DeviceRegions, DmaAccess, DmaUnmapRequest, IrqInfo, MessageError, MessageHeader, MessageKind,
    RegionAccess, RegionInfo, RegionIoFds, VfioVersion,
};

/// A reply with its payload. The descriptors that belong to it travel beside it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VfioReply<'a> {
    /// The server's answer. The second socket, if there is one, is a descriptor.
    Version(VfioVersion),
    /// Mapped.
    DmaMap,
    /// Unmapped, and no longer used by the server.
    DmaUnmap(DmaUnmapRequest),
    /// Parts of the device.
    DeviceGetInfo(DeviceRegions),
    /// A region's properties. With a descriptor if it can be mapped.
    DeviceGetRegionInfo(RegionInfo),
    /// A region's properties, without its capabilities: the reply would have exceeded the requested length.
    RegionInfoCut {
        /// Bytes of the whole reply, for the next request.
        argsz: u32,
        /// The region. Its mappable parts are unknown so far.
        fixed: RegionInfo,
    },
    /// Descriptors that replace writes to a region. They come with it.
    DeviceGetRegionIoFds(RegionIoFds),
    /// The reply about descriptors exceeds the requested length.
    RegionIoFdsCut {
        /// Bytes of the whole reply, for the next request.
        argsz: u32,
        /// Number of the region.
        index: u32,
    },
    /// Properties of an interrupt type.
    DeviceGetIrqInfo(IrqInfo),
    /// The interrupt action was done.
    DeviceSetIrqs,
    /// Bytes of a region, as many as the access counts.
    RegionRead(RegionAccess, &'a [u8]),
    /// The write to the region was done.
    RegionWrite(RegionAccess),
    /// Bytes of the client's memory, as many as the access counts.
    DmaRead(DmaAccess, &'a [u8]),
    /// The write to the client's memory was done.
    DmaWrite(DmaAccess),
    /// Reset.
    DeviceReset,
    /// Completed writes.
    RegionWriteMulti {
        /// Number of writes.
        count: u64,
    },
}

impl<'a> VfioReply<'a> {
    /// Parses the payload of a reply with this number of descriptors. The receiver accepts `data_max` bytes of data in
    /// one message.
    ///
    /// # Errors
    /// See [`MessageError`].
    pub fn parse(
        command: Command,
        payload: &'a [u8],
        descriptors: usize,
        data_max: u32,
    ) -> Result<VfioReply<'a>, MessageError> {
        let nothing = |reply| {
            check_descriptors(command, descriptors, 0)?;
            PayloadReader::new(command, payload, 0)?.end()?;
            Ok(reply)
        };
        Ok(match command {
            Command::Version => VfioReply::Version(VfioVersion::parse(payload, descriptors, true)?),
            Command::DmaMap => return nothing(VfioReply::DmaMap),
            Command::DmaUnmap => VfioReply::DmaUnmap(DmaUnmapRequest::parse(payload, descriptors)?),
            Command::DeviceGetInfo => VfioReply::DeviceGetInfo(DeviceRegions::parse(payload, descriptors)?),
            Command::DeviceGetRegionInfo => match RegionInfo::parse(payload, descriptors)? {
                RegionInfoReply::Whole(info) => VfioReply::DeviceGetRegionInfo(info),
                RegionInfoReply::Cut { argsz, fixed } => VfioReply::RegionInfoCut { argsz, fixed },
            },
            Command::DeviceGetRegionIoFds => match RegionIoFds::parse(payload, descriptors)? {
                RegionIoFdsReply::Whole(fds) => VfioReply::DeviceGetRegionIoFds(fds),
                RegionIoFdsReply::Cut { argsz, index } => VfioReply::RegionIoFdsCut { argsz, index },
            },
            Command::DeviceGetIrqInfo => VfioReply::DeviceGetIrqInfo(IrqInfo::parse(payload, descriptors)?),
            Command::DeviceSetIrqs => return nothing(VfioReply::DeviceSetIrqs),
            Command::RegionRead => {
                let (access, mut fields) = RegionAccess::parse(command, payload, descriptors, data_max)?;
                VfioReply::RegionRead(access, fields.data(u64::from(access.count))?)
            }
            Command::RegionWrite => {
                let (access, mut fields) = RegionAccess::parse(command, payload, descriptors, data_max)?;
                fields.end()?;
                VfioReply::RegionWrite(access)
            }
            Command::DmaRead => {
                let (access, mut fields) = DmaAccess::parse(command, payload, descriptors, data_max)?;
                VfioReply::DmaRead(access, fields.data(u64::from(access.count))?)
            }
            Command::DmaWrite => VfioReply::DmaWrite(DmaAccess::parse_written(payload, descriptors, data_max)?),
            Command::DeviceReset => return nothing(VfioReply::DeviceReset),
            Command::RegionWriteMulti => {
                check_descriptors(command, descriptors, 0)?;
                let mut fields = PayloadReader::new(command, payload, 8)?;
                let count = fields.u64()?;
                fields.end()?;
                VfioReply::RegionWriteMulti { count }
            }
        })
    }

    /// The command that this reply answers.
    pub fn command(&self) -> Command {
        match self {
            VfioReply::Version(_) => Command::Version,
            VfioReply::DmaMap => Command::DmaMap,
            VfioReply::DmaUnmap(_) => Command::DmaUnmap,
            VfioReply::DeviceGetInfo(_) => Command::DeviceGetInfo,
            VfioReply::DeviceGetRegionInfo(_) | VfioReply::RegionInfoCut { .. } => Command::DeviceGetRegionInfo,
            VfioReply::DeviceGetRegionIoFds(_) | VfioReply::RegionIoFdsCut { .. } => Command::DeviceGetRegionIoFds,
            VfioReply::DeviceGetIrqInfo(_) => Command::DeviceGetIrqInfo,
            VfioReply::DeviceSetIrqs => Command::DeviceSetIrqs,
            VfioReply::RegionRead(..) => Command::RegionRead,
            VfioReply::RegionWrite(_) => Command::RegionWrite,
            VfioReply::DmaRead(..) => Command::DmaRead,
            VfioReply::DmaWrite(_) => Command::DmaWrite,
            VfioReply::DeviceReset => Command::DeviceReset,
            VfioReply::RegionWriteMulti { .. } => Command::RegionWriteMulti,
        }
    }

    /// The whole message, with its header.
    ///
    /// # Panics
    /// If the data has another length than its access says.
    pub fn encode(&self, id: u16) -> Vec<u8> {
        let payload = match self {
            VfioReply::Version(version) => version.encode(),
            VfioReply::DmaMap | VfioReply::DeviceSetIrqs | VfioReply::DeviceReset => Vec::new(),
            VfioReply::DmaUnmap(unmap) => unmap.encode(),
            VfioReply::DeviceGetInfo(device) => device.encode(),
            VfioReply::DeviceGetRegionInfo(info) => info.encode(),
            VfioReply::RegionInfoCut { argsz, fixed } => fixed.encode_cut(*argsz),
            VfioReply::DeviceGetRegionIoFds(fds) => fds.encode(),
            VfioReply::RegionIoFdsCut { argsz, index } => RegionIoFds::encode_cut(*argsz, *index),
            VfioReply::DeviceGetIrqInfo(info) => info.encode(),
            VfioReply::RegionRead(access, data) => {
                assert_eq!(data.len(), access.count as usize, "the access says how many bytes were read");
                access.encode(data)
            }
            VfioReply::RegionWrite(access) => access.encode(&[]),
            VfioReply::DmaRead(access, data) => {
                assert_eq!(data.len(), access.count as usize, "the access says how many bytes were read");
                access.encode(data)
            }
            VfioReply::DmaWrite(access) => access.encode(&[]),
            VfioReply::RegionWriteMulti { count } => payload![count],
        };
        MessageHeader::message(id, self.command(), MessageKind::Reply, &payload)
    }
}
