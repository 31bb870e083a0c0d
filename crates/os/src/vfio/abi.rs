//! The VFIO calls of the kernel (`linux/vfio.h`), each as a safe function. Those of iommufd are in `iommufd`.
//!
//! Structures are given with their size (`argsz`), so the kernel writes no byte beyond them. Variable parts are bytes,
//! parsed by the callers. Unsafe: ioctls have no safe wrapper.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Number of VFIO's first call.
pub(super) const FIRST_CALL: u64 = 100;

/// `_IO(';', 100 + number)`.
pub(super) const fn request(number: u64) -> libc::c_ulong {
    ((0x3b << 8) | (FIRST_CALL + number)) as libc::c_ulong
}

/// Version of the interface.
const API_VERSION: i32 = 0;
/// The container with several DMA mappings that are unmapped as they were mapped (`VFIO_TYPE1v2_IOMMU`).
pub(super) const TYPE1V2: u32 = 3;

pub(super) const GROUP_VIABLE: u32 = 1 << 0;
pub(super) const DEVICE_RESET: u32 = 1 << 0;
pub(super) const DEVICE_PCI: u32 = 1 << 1;
pub(super) const REGION_MMAP: u32 = 1 << 2;

/// Numbers of the regions and interrupts of a PCI device.
pub(super) const BAR0: u32 = 0;
pub(super) const CONFIG: u32 = 7;
pub(super) const IRQ_MSIX: u32 = 2;
pub(super) const IRQ_REQUEST: u32 = 4;

const IRQ_DATA_NONE: u32 = 1 << 0;
const IRQ_DATA_EVENTFD: u32 = 1 << 2;
const IRQ_TRIGGER: u32 = 1 << 5;
const DMA_READ_WRITE: u32 = 0b11;
const INFO_CAPABILITIES: u32 = 1 << 1;
/// Identifier of the list of usable I/O addresses.
const CAPABILITY_IOVA: u16 = 1;
/// More than any kernel needs for its description of an IOMMU.
const IOMMU_INFO_MAX: usize = 64 << 10;

#[repr(C)]
#[derive(Default)]
struct GroupStatus {
    argsz: u32,
    flags: u32,
}

/// Description of a device.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct DeviceDescription {
    argsz: u32,
    pub(super) flags: u32,
    pub(super) regions: u32,
    pub(super) irqs: u32,
    cap_offset: u32,
    pad: u32,
}

/// Description of a region of a device.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct RegionDescription {
    argsz: u32,
    pub(super) flags: u32,
    index: u32,
    cap_offset: u32,
    pub(super) size: u64,
    /// Offset in the device's descriptor.
    pub(super) offset: u64,
}

#[repr(C)]
#[derive(Default)]
struct IrqDescription {
    argsz: u32,
    flags: u32,
    index: u32,
    count: u32,
}

#[repr(C)]
struct DmaMapArgument {
    argsz: u32,
    flags: u32,
    vaddr: u64,
    iova: u64,
    size: u64,
}

#[repr(C)]
struct DmaUnmapArgument {
    argsz: u32,
    flags: u32,
    iova: u64,
    size: u64,
}

#[repr(C)]
struct BindArgument {
    argsz: u32,
    flags: u32,
    iommufd: i32,
    device: u32,
}

#[repr(C)]
struct AttachArgument {
    argsz: u32,
    flags: u32,
    ioas: u32,
}

/// Issues an ioctl with a pointer.
///
/// # Safety
/// `argument` is what the request takes: memory that the kernel may read and write as far as the request does.
pub(super) unsafe fn ioctl<T>(fd: BorrowedFd<'_>, number: u64, argument: *mut T) -> io::Result<i32> {
    // SAFETY: the descriptor is open; the argument is the caller's promise.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request(number), argument) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Issues an ioctl with a number, or without an argument.
fn ioctl_number(fd: BorrowedFd<'_>, number: u64, argument: u32) -> io::Result<i32> {
    // SAFETY: the descriptor is open, and the requests used here take a number or ignore it.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request(number), libc::c_ulong::from(argument)) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Whether the container has the version and the kind of IOMMU that are used here.
pub(super) fn is_supported(container: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(ioctl_number(container, 0, 0)? == API_VERSION && ioctl_number(container, 1, TYPE1V2)? > 0)
}

pub(super) fn set_iommu(container: BorrowedFd<'_>) -> io::Result<()> {
    ioctl_number(container, 2, TYPE1V2).map(drop)
}

/// Flags of a group.
pub(super) fn group_status(group: BorrowedFd<'_>) -> io::Result<u32> {
    let mut status = GroupStatus { argsz: size_of::<GroupStatus>() as u32, ..GroupStatus::default() };
    // SAFETY: the structure of this request, of the size it names.
    unsafe { ioctl(group, 3, &raw mut status)? };
    Ok(status.flags)
}

pub(super) fn set_container(group: BorrowedFd<'_>, container: BorrowedFd<'_>) -> io::Result<()> {
    let mut descriptor = container.as_raw_fd();
    // SAFETY: the request reads one descriptor.
    unsafe { ioctl(group, 4, &raw mut descriptor)? };
    Ok(())
}

/// Opens a device of a group by its name.
pub(super) fn open_device(group: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
    // SAFETY: the request reads a string that ends with a zero.
    let descriptor = unsafe { ioctl(group, 6, name.as_ptr().cast_mut())? };
    // SAFETY: the kernel has made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Binds a device that was opened by its own node to an iommufd. It can be used from then on.
pub(super) fn bind_iommufd(device: BorrowedFd<'_>, iommufd: BorrowedFd<'_>) -> io::Result<()> {
    let argsz = size_of::<BindArgument>() as u32;
    let mut bind = BindArgument { argsz, flags: 0, iommufd: iommufd.as_raw_fd(), device: 0 };
    // SAFETY: the structure of this request as all kernels know it, of the size it names.
    unsafe { ioctl(device, 18, &raw mut bind)? };
    Ok(())
}

/// Has a device that is bound to an iommufd use this I/O address space of it.
pub(super) fn attach_ioas(device: BorrowedFd<'_>, ioas: u32) -> io::Result<()> {
    let mut attach = AttachArgument { argsz: size_of::<AttachArgument>() as u32, flags: 0, ioas };
    // SAFETY: the structure of this request as all kernels know it, of the size it names.
    unsafe { ioctl(device, 19, &raw mut attach)? };
    Ok(())
}

pub(super) fn device_info(device: BorrowedFd<'_>) -> io::Result<DeviceDescription> {
    let argsz = size_of::<DeviceDescription>() as u32;
    let mut info = DeviceDescription { argsz, ..DeviceDescription::default() };
    // SAFETY: the structure of this request, of the size it names.
    unsafe { ioctl(device, 7, &raw mut info)? };
    Ok(info)
}

pub(super) fn region_info(device: BorrowedFd<'_>, index: u32) -> io::Result<RegionDescription> {
    let argsz = size_of::<RegionDescription>() as u32;
    let mut info = RegionDescription { argsz, index, ..RegionDescription::default() };
    // SAFETY: the structure of this request, of the size it names.
    unsafe { ioctl(device, 8, &raw mut info)? };
    Ok(info)
}

/// Number of interrupts of this kind.
pub(super) fn irq_count(device: BorrowedFd<'_>, index: u32) -> io::Result<u32> {
    let mut info = IrqDescription { argsz: size_of::<IrqDescription>() as u32, index, ..IrqDescription::default() };
    // SAFETY: the structure of this request, of the size it names.
    unsafe { ioctl(device, 9, &raw mut info)? };
    Ok(info.count)
}

/// Has the first interrupts of this kind signal these eventfds; without any, disables all of the kind.
pub(super) fn set_irqs(device: BorrowedFd<'_>, index: u32, eventfds: &[BorrowedFd<'_>]) -> io::Result<()> {
    // `struct vfio_irq_set`: argsz, flags, index, start, count, and a descriptor for each interrupt.
    let data = if eventfds.is_empty() { IRQ_DATA_NONE } else { IRQ_DATA_EVENTFD };
    let argsz = 4 * (5 + eventfds.len() as u32);
    let mut words = vec![argsz, data | IRQ_TRIGGER, index, 0, eventfds.len() as u32];
    words.extend(eventfds.iter().map(|eventfd| eventfd.as_raw_fd().cast_unsigned()));
    // SAFETY: the structure of this request, of the size it names.
    unsafe { ioctl(device, 10, words.as_mut_ptr())? };
    Ok(())
}

pub(super) fn reset(device: BorrowedFd<'_>) -> io::Result<()> {
    ioctl_number(device, 11, 0).map(drop)
}

/// First and last address of each range that the IOMMU translates; empty if the kernel does not say.
pub(super) fn iova_ranges(container: BorrowedFd<'_>) -> io::Result<Vec<(u64, u64)>> {
    let mut bytes = vec![0_u64; 8];
    loop {
        let size = size_of_val(&*bytes);
        bytes[0] = size as u64;
        // SAFETY: `struct vfio_iommu_type1_info` with room for what follows it, of the size it names; argsz is the
        // lower half of its first eight bytes.
        unsafe { ioctl(container, 12, bytes.as_mut_ptr())? };
        let needed = (bytes[0] as u32 as usize).min(IOMMU_INFO_MAX);
        if needed <= size {
            let flat: Vec<u8> = bytes.iter().flat_map(|word| word.to_ne_bytes()).collect();
            return Ok(parse_iova_ranges(&flat));
        }
        bytes = vec![0; needed.div_ceil(8)];
    }
}

/// The ranges in `struct vfio_iommu_type1_info` and its list of capabilities.
fn parse_iova_ranges(info: &[u8]) -> Vec<(u64, u64)> {
    let word = |at: usize| Some(u32::from_ne_bytes(info.get(at..at + 4)?.try_into().ok()?));
    let long = |at: usize| Some(u64::from_ne_bytes(info.get(at..at + 8)?.try_into().ok()?));
    let find = || {
        if word(4)? & INFO_CAPABILITIES == 0 {
            return None;
        }
        let mut at = word(16)? as usize;
        // Bounded, since the list is data.
        for _ in 0..64 {
            if at == 0 {
                return None;
            }
            // Identifier and version, next, number of ranges, reserved, ranges.
            if word(at)? as u16 == CAPABILITY_IOVA {
                let ranges = (0..word(at + 8)? as usize).map_while(|number| {
                    let place = at + 16 + number * 16;
                    Some((long(place)?, long(place + 8)?))
                });
                return Some(ranges.collect());
            }
            at = word(at + 4)? as usize;
        }
        None
    };
    find().unwrap_or_default()
}

/// Maps memory of this process at a device address, and pins it.
///
/// # Safety
/// The memory is mapped in this process, may be written by a device at any time, and stays mapped until it is unmapped
/// here or the container is closed.
pub(super) unsafe fn map_dma(container: BorrowedFd<'_>, vaddr: u64, iova: u64, size: u64) -> io::Result<()> {
    let mut map =
        DmaMapArgument { argsz: size_of::<DmaMapArgument>() as u32, flags: DMA_READ_WRITE, vaddr, iova, size };
    // SAFETY: the structure of this request, of the size it names; the memory is the caller's promise.
    unsafe { ioctl(container, 13, &raw mut map)? };
    Ok(())
}

/// Unmaps what was mapped at a device address. The device cannot access it afterwards.
pub(super) fn unmap_dma(container: BorrowedFd<'_>, iova: u64, size: u64) -> io::Result<()> {
    let mut unmap = DmaUnmapArgument { argsz: size_of::<DmaUnmapArgument>() as u32, flags: 0, iova, size };
    // SAFETY: the structure of this request, of the size it names.
    unsafe { ioctl(container, 14, &raw mut unmap)? };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    #[test]
    fn iova_ranges_are_found_behind_other_capabilities() {
        let ranges = [0x1000, 0, 0xfedf_ffff, 0, 0xfef0_0000, 0, 0xffff_ffff, 0x7f];
        let mut words = vec![88, 0b11, 0x1000, 0, 24, 0];
        // A capability of another kind, and the one with two ranges.
        words.extend([0x1_0003, 36, 5]);
        words.extend([0x1_0001, 0, 2, 0]);
        words.extend(ranges);
        let found = parse_iova_ranges(&info(&words));
        assert_eq!(found, [(0x1000, 0xfedf_ffff), (0xfef0_0000, 0x7f_ffff_ffff)]);
    }

    #[test]
    fn malformed_capabilities_yield_no_ranges() {
        assert!(parse_iova_ranges(&[]).is_empty());
        assert!(parse_iova_ranges(&info(&[24, 0b01, 0, 0, 24, 0, 1, 0, 1, 0, 1, 0, 2, 0])).is_empty());
        // A list that points at itself, and one that points outside.
        assert!(parse_iova_ranges(&info(&[32, 0b11, 0, 0, 24, 0, 0x1_0003, 24])).is_empty());
        assert!(parse_iova_ranges(&info(&[24, 0b11, 0, 0, 4000, 0])).is_empty());
        // More ranges than there are.
        let short = info(&[56, 0b11, 0, 0, 24, 0, 0x1_0001, 0, 9, 0, 1, 0, 2, 0]);
        assert_eq!(parse_iova_ranges(&short), [(1, 2)]);
    }
}
