//! Commands of a client: what each does to the function, its memory, regions and interrupts.
//!
//! A command is executed, or refused with an errno and a reason for the log. The [session](super) reads commands and
//! sends the answers; those that begin a change are answered once it is made.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use blkyard_sys::EventFd;
use blkyard_wire::vfio_user::{
    DeviceFlags, DeviceRegions, DmaMapFlags, Frame, IrqAction, IrqData, IrqFlags, IrqInfo, IrqSetRequest, RegionAccess,
    RegionFlags, RegionInfo, RegionWrite, VfioReply, VfioRequest, irq_index, region_index,
};
use rustix::io::Errno;

use super::{DATA_BYTES_MAX, RefusedMessage, VfioSessionError, VfioUserSession};
use crate::core::SHARE;
use crate::vfio_user::VfioUserExport;
use crate::vfio_user::device::NvmeFunction;
use crate::vfio_user::pci::{CONFIG_BYTES, MSIX_BYTES, PciFunction};

/// Region of the MSI-X table: BAR 4.
const MSIX_REGION: u32 = 4;
/// Regions and interrupt types of a PCI device (`VFIO_PCI_NUM_REGIONS`, `VFIO_PCI_NUM_IRQS`).
const REGIONS: u32 = 9;
const IRQS: u32 = 5;

impl VfioUserSession {
    /// Executes a command. The inner result is the reply to the client.
    pub(super) fn carry_out<'a>(
        &mut self,
        request: &VfioRequest<'_>,
        mut descriptors: Vec<OwnedFd>,
        data: &'a mut Vec<u8>,
    ) -> Result<Result<VfioReply<'a>, RefusedMessage>, VfioSessionError> {
        let VfioUserSession { config, log, function: Some(function), is_unshared_told, descriptors_max, .. } = self
        else {
            return Err(VfioSessionError::OutOfTurn);
        };
        let invalid = |what: String| Ok(Err((Errno::INVAL, what)));
        Ok(Ok(match request {
            VfioRequest::Version(_) => return invalid("VERSION was agreed on before".into()),
            VfioRequest::DmaMap(map) => {
                // Firmware has no descriptor either, but it cannot be written.
                let is_unshared = descriptors.is_empty() && map.flags.contains(DmaMapFlags::READ | DmaMapFlags::WRITE);
                if is_unshared && !std::mem::replace(is_unshared_told, true) {
                    log.warn(format_args!("the guest's memory is not shared, and no command reaches it; {SHARE}"));
                }
                match function.map(config, map, descriptors.pop())? {
                    Ok(()) => VfioReply::DmaMap,
                    Err(error) => return Ok(Err((error.errno(), format!("DMA_MAP: {error}")))),
                }
            }
            VfioRequest::DmaUnmap(unmap) => match function.unmap(config, unmap)? {
                Ok(()) => VfioReply::DmaUnmap(*unmap),
                Err(error) => return Ok(Err((error.errno(), format!("DMA_UNMAP: {error}")))),
            },
            VfioRequest::DeviceGetInfo => VfioReply::DeviceGetInfo(DeviceRegions {
                flags: DeviceFlags::RESET | DeviceFlags::PCI,
                regions: REGIONS,
                irqs: IRQS,
            }),
            VfioRequest::DeviceGetRegionInfo { argsz, index } if *index < REGIONS => {
                let size = match *index {
                    region_index::BAR0 => function.bar0_bytes(),
                    MSIX_REGION => MSIX_BYTES as u64,
                    region_index::CONFIG => CONFIG_BYTES as u64,
                    _ => 0,
                };
                let flags = if size > 0 { RegionFlags::READ | RegionFlags::WRITE } else { RegionFlags::empty() };
                let plain = RegionInfo { index: *index, flags, size, offset: 0, sparse: None };
                match function.shared_doorbells().filter(|_| *index == region_index::BAR0) {
                    None => VfioReply::DeviceGetRegionInfo(plain),
                    Some((area, _)) => {
                        let flags = flags | RegionFlags::MMAP;
                        let info = RegionInfo { flags, sparse: Some(vec![area]), ..plain.clone() };
                        match info.reply_bytes() {
                            bytes if bytes > *argsz => VfioReply::RegionInfoCut { argsz: bytes, fixed: plain },
                            _ => VfioReply::DeviceGetRegionInfo(info),
                        }
                    }
                }
            }
            VfioRequest::DeviceGetRegionIoFds { argsz, index } if *index < REGIONS => {
                match function.offer_eventfds(*argsz, *index, *descriptors_max) {
                    Ok(reply) => reply,
                    Err(why) => return invalid(format!("DEVICE_GET_REGION_IO_FDS: {why}")),
                }
            }
            VfioRequest::DeviceGetRegionInfo { index, .. } | VfioRequest::DeviceGetRegionIoFds { index, .. } => {
                return invalid(format!("there is no region {index}"));
            }
            // Errors of the link are not reported. QEMU always asks, and warns of an interrupt type that is not there.
            VfioRequest::DeviceGetIrqInfo { index: irq_index::ERR } => return Ok(Err((Errno::INVAL, String::new()))),
            VfioRequest::DeviceGetIrqInfo { index } if *index < IRQS => {
                let (flags, count) = match *index {
                    irq_index::MSIX => (IrqFlags::EVENTFD, function.vectors()),
                    _ => (IrqFlags::empty(), 0),
                };
                VfioReply::DeviceGetIrqInfo(IrqInfo { index: *index, flags, count })
            }
            VfioRequest::DeviceGetIrqInfo { index } => return invalid(format!("there is no interrupt type {index}")),
            VfioRequest::DeviceSetIrqs(set) => match set_irqs(function, config, set, descriptors)? {
                Ok(()) => VfioReply::DeviceSetIrqs,
                Err(why) => return invalid(why),
            },
            VfioRequest::RegionRead(access) => match read_region(function, *access, data) {
                Ok(()) => VfioReply::RegionRead(*access, data),
                Err(why) => return invalid(why),
            },
            VfioRequest::RegionWrite(access, bytes) => match write_region(function, config, *access, bytes)? {
                Ok(()) => VfioReply::RegionWrite(*access),
                Err(why) => return invalid(why),
            },
            VfioRequest::RegionWriteMulti(writes) => {
                for write in writes {
                    let bytes = &write.data[..write.access.count as usize];
                    if let Err(why) = write_region(function, config, write.access, bytes)? {
                        return invalid(why);
                    }
                }
                VfioReply::RegionWriteMulti { count: writes.len() as u64 }
            }
            VfioRequest::DeviceReset => {
                function.reset(config)?;
                VfioReply::DeviceReset
            }
            VfioRequest::DmaRead(_) | VfioRequest::DmaWrite(..) => {
                return Ok(Err((Errno::OPNOTSUPP, format!("{} is not served", request.command()))));
            }
        }))
    }
}

/// Whether a command begins a change, and is answered once that is made.
pub(super) fn begins_change(frame: &Frame<OwnedFd>) -> bool {
    let is_reset = |access: &RegionAccess, bytes: &[u8]| {
        access.region == region_index::CONFIG && PciFunction::is_reset(access.offset, bytes)
    };
    match VfioRequest::parse(frame.header.command, &frame.payload, frame.descriptors.len(), DATA_BYTES_MAX) {
        Ok(VfioRequest::DmaMap(_) | VfioRequest::DmaUnmap(_) | VfioRequest::DeviceReset) => true,
        Ok(VfioRequest::RegionWrite(access, bytes)) => is_reset(&access, bytes),
        Ok(VfioRequest::RegionWriteMulti(writes)) => {
            writes.iter().any(|RegionWrite { access, data }| is_reset(access, &data[..access.count as usize]))
        }
        _ => false,
    }
}

/// Sets eventfds of vectors, or triggers them. The inner result is the errno of the client.
fn set_irqs(
    function: &mut NvmeFunction,
    config: &VfioUserExport,
    set: &IrqSetRequest<'_>,
    descriptors: Vec<OwnedFd>,
) -> Result<Result<(), String>, VfioSessionError> {
    let range = set.range;
    let end = range.start.checked_add(range.count).filter(|end| *end <= function.vectors());
    // No vector can be masked here. Clients ask for this once, and unmask the vectors in the table then.
    if end.is_some() && (range.index, set.action) == (irq_index::MSIX, IrqAction::Unmask) {
        return Ok(Err(String::new()));
    }
    let Some(end) = end.filter(|_| range.index == irq_index::MSIX && set.action == IrqAction::Trigger) else {
        return Ok(Err(format!("DEVICE_SET_IRQS: {:?} of {range:?} is not served", set.action)));
    };
    match set.data {
        IrqData::SetEventfds => {
            // All descriptors are checked before the first is set.
            let eventfds: Result<Vec<_>, _> = descriptors.into_iter().map(EventFd::from_foreign).collect();
            let eventfds = match eventfds {
                Ok(eventfds) => eventfds,
                Err(error) => return Ok(Err(format!("DEVICE_SET_IRQS: {error}"))),
            };
            for (vector, eventfd) in (range.start..end).zip(eventfds) {
                function.set_vector(config, vector, Some(&Arc::new(eventfd)))?;
            }
        }
        IrqData::RemoveEventfds => {
            for vector in range.start..end {
                function.set_vector(config, vector, None)?;
            }
        }
        // An empty range disables all vectors.
        IrqData::All if range.count == 0 => {
            for vector in 0..function.vectors() {
                function.set_vector(config, vector, None)?;
            }
        }
        IrqData::All => (range.start..end).try_for_each(|vector| function.signal(config, vector))?,
        IrqData::Some(wanted) => {
            let mut vectors = (range.start..end).zip(wanted).filter(|(_, byte)| **byte != 0);
            vectors.try_for_each(|(vector, _)| function.signal(config, vector))?;
        }
    }
    Ok(Ok(()))
}

fn outside(access: RegionAccess) -> String {
    format!("an access of {} bytes at {:#x} leaves region {}", access.count, access.offset, access.region)
}

fn read_region(function: &NvmeFunction, access: RegionAccess, data: &mut Vec<u8>) -> Result<(), String> {
    data.resize(access.count as usize, 0);
    let read = match access.region {
        region_index::CONFIG => function.pci.read_config(access.offset, data),
        MSIX_REGION => function.pci.read_msix(access.offset, data),
        region_index::BAR0 => {
            check_bar0(function, access)?;
            let value = function.read_register(access.offset, data.len()).map_err(|fault| fault.to_string())?;
            data.copy_from_slice(&value.to_le_bytes()[..access.count as usize]);
            Some(())
        }
        _ => None,
    };
    read.ok_or_else(|| outside(access))
}

fn write_region(
    function: &mut NvmeFunction,
    config: &VfioUserExport,
    access: RegionAccess,
    bytes: &[u8],
) -> Result<Result<(), String>, VfioSessionError> {
    let written = match access.region {
        region_index::CONFIG => {
            let written = function.pci.write_config(access.offset, bytes);
            if written.is_some() && PciFunction::is_reset(access.offset, bytes) {
                function.reset(config)?;
            }
            written
        }
        MSIX_REGION => function.pci.write_msix(access.offset, bytes),
        region_index::BAR0 => {
            if let Err(why) = check_bar0(function, access) {
                return Ok(Err(why));
            }
            let mut value = [0; 8];
            // Other sizes are refused by the register file.
            let len = bytes.len().min(8);
            value[..len].copy_from_slice(&bytes[..len]);
            let value = u64::from_le_bytes(value);
            match function.write_register(config, access.offset, bytes.len(), value)? {
                Ok(()) => Some(()),
                Err(fault) => return Ok(Err(fault.to_string())),
            }
        }
        _ => None,
    };
    Ok(written.ok_or_else(|| outside(access)))
}

fn check_bar0(function: &NvmeFunction, access: RegionAccess) -> Result<(), String> {
    let end = access.offset.checked_add(u64::from(access.count));
    end.filter(|end| *end <= function.bar0_bytes()).map(drop).ok_or_else(|| outside(access))
}
