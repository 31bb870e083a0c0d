//! The calls of iommufd (`linux/iommufd.h`), each as a safe function. Those of a device are in `abi`.
//!
//! An I/O address space (IOAS) belongs to the descriptor that it was allocated with, and goes with it. Devices attached
//! to it narrow its addresses, so they are asked for afterwards. Unsafe: ioctls have no safe wrapper.

use std::io;
use std::os::fd::BorrowedFd;

use crate::vfio::abi;

/// Numbers of the calls. They have the type of VFIO's.
const IOAS_ALLOC: u64 = 0x81 - abi::FIRST_CALL;
const IOAS_IOVA_RANGES: u64 = 0x84 - abi::FIRST_CALL;
const IOAS_MAP: u64 = 0x85 - abi::FIRST_CALL;
const IOAS_UNMAP: u64 = 0x86 - abi::FIRST_CALL;

const MAP_FIXED_IOVA: u32 = 1 << 0;
const MAP_READ_WRITE: u32 = 0b110;

/// Ranges asked for at first. IOMMUs have a few, split by the window of interrupts and by reserved memory.
const RANGES_FIRST: usize = 8;
/// More ranges than any machine has.
const RANGES_MAX: usize = 4096;

#[repr(C)]
#[derive(Default)]
struct IoasAllocation {
    bytes: u32,
    flags: u32,
    ioas: u32,
}

/// First and last address of a range.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct IovaRange {
    first: u64,
    last: u64,
}

#[repr(C)]
struct IovaRangesArgument {
    bytes: u32,
    ioas: u32,
    /// Ranges that there is room for, and ranges that there are.
    count: u32,
    reserved: u32,
    ranges: u64,
    alignment: u64,
}

#[repr(C)]
struct IoasMapArgument {
    bytes: u32,
    flags: u32,
    ioas: u32,
    reserved: u32,
    vaddr: u64,
    len: u64,
    iova: u64,
}

#[repr(C)]
struct IoasUnmapArgument {
    bytes: u32,
    ioas: u32,
    iova: u64,
    /// Bytes to unmap, and bytes that were unmapped.
    len: u64,
}

/// Allocates an I/O address space.
pub(super) fn allocate(iommufd: BorrowedFd<'_>) -> io::Result<u32> {
    let mut allocation = IoasAllocation { bytes: size_of::<IoasAllocation>() as u32, ..IoasAllocation::default() };
    // SAFETY: the structure of this request, of the size it names.
    unsafe { abi::ioctl(iommufd, IOAS_ALLOC, &raw mut allocation)? };
    Ok(allocation.ioas)
}

/// First and last address of each range that may be mapped.
pub(super) fn iova_ranges(iommufd: BorrowedFd<'_>, ioas: u32) -> io::Result<Vec<(u64, u64)>> {
    read_ranges(|room| {
        let mut argument = IovaRangesArgument {
            bytes: size_of::<IovaRangesArgument>() as u32,
            ioas,
            count: room.len() as u32,
            reserved: 0,
            ranges: room.as_mut_ptr().expose_provenance() as u64,
            alignment: 0,
        };
        // SAFETY: the structure of this request, of the size it names; it points at as many ranges as it counts.
        match unsafe { abi::ioctl(iommufd, IOAS_IOVA_RANGES, &raw mut argument) } {
            Err(error) if error.raw_os_error() != Some(libc::EMSGSIZE) => return Err(error),
            _ => (),
        }
        if argument.alignment > blkyard_mem::PAGE_BYTES as u64 {
            return Err(io::Error::other("the IOMMU's pages are larger than those of the processor"));
        }
        Ok(argument.count as usize)
    })
}

/// The ranges, from calls that fill the room they are given and return how many ranges there are.
fn read_ranges(mut fill: impl FnMut(&mut [IovaRange]) -> io::Result<usize>) -> io::Result<Vec<(u64, u64)>> {
    let mut ranges = vec![IovaRange::default(); RANGES_FIRST];
    loop {
        let count = fill(&mut ranges)?;
        if count <= ranges.len() {
            ranges.truncate(count);
            // As the rest is data, so is the order of both.
            return Ok(ranges.iter().filter(|range| range.first <= range.last).map(|r| (r.first, r.last)).collect());
        }
        if count > RANGES_MAX {
            return Err(io::Error::other(format!("{count} ranges of I/O addresses, more than {RANGES_MAX}")));
        }
        ranges = vec![IovaRange::default(); count];
    }
}

/// Maps memory of this process at a device address, and pins it once a device is attached.
///
/// # Safety
/// The memory is mapped in this process, may be written by a device at any time, and stays mapped until it is unmapped
/// here or the device is closed.
pub(super) unsafe fn map(iommufd: BorrowedFd<'_>, ioas: u32, vaddr: u64, iova: u64, len: u64) -> io::Result<()> {
    let bytes = size_of::<IoasMapArgument>() as u32;
    let flags = MAP_FIXED_IOVA | MAP_READ_WRITE;
    let mut map = IoasMapArgument { bytes, flags, ioas, reserved: 0, vaddr, len, iova };
    // SAFETY: the structure of this request, of the size it names; the memory is the caller's promise.
    unsafe { abi::ioctl(iommufd, IOAS_MAP, &raw mut map)? };
    Ok(())
}

/// Unmaps what was mapped at a device address. The device cannot access it afterwards.
pub(super) fn unmap(iommufd: BorrowedFd<'_>, ioas: u32, iova: u64, len: u64) -> io::Result<()> {
    let mut unmap = IoasUnmapArgument { bytes: size_of::<IoasUnmapArgument>() as u32, ioas, iova, len };
    // SAFETY: the structure of this request, of the size it names.
    unsafe { abi::ioctl(iommufd, IOAS_UNMAP, &raw mut unmap)? };
    if unmap.len < len {
        return Err(io::Error::other(format!("{} of {len} bytes were unmapped", unmap.len)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers as the kernel does, with so many ranges of a page, and counts the calls.
    fn answer(count: usize, calls: &mut Vec<usize>) -> io::Result<Vec<(u64, u64)>> {
        read_ranges(|room| {
            calls.push(room.len());
            for (index, range) in room.iter_mut().take(count).enumerate() {
                *range = IovaRange { first: index as u64 * 8192, last: index as u64 * 8192 + 4095 };
            }
            Ok(count)
        })
    }

    #[test]
    fn more_ranges_than_room_are_asked_for_again() {
        for count in [0, 1, RANGES_FIRST, RANGES_FIRST + 1, RANGES_MAX] {
            let mut calls = Vec::new();
            let ranges = answer(count, &mut calls).unwrap();
            assert_eq!((ranges.len(), calls[0]), (count, RANGES_FIRST));
            assert_eq!(calls.len(), 1 + usize::from(count > RANGES_FIRST));
            assert!(
                ranges.last().is_none_or(|range| *range == (count as u64 * 8192 - 8192, count as u64 * 8192 - 4097))
            );
        }
    }

    #[test]
    fn endless_ranges_are_an_error() {
        let error = answer(RANGES_MAX + 1, &mut Vec::new()).unwrap_err().to_string();
        assert!(error.contains("4097 ranges"), "{error}");
        // Always one more than there is room for.
        let mut calls = 0;
        let endless = read_ranges(|room| {
            calls += 1;
            Ok(room.len() + 1)
        });
        assert!(endless.is_err() && calls < 2 * RANGES_MAX);
    }

    #[test]
    fn ranges_that_end_before_they_begin_are_left_out() {
        let ranges = read_ranges(|room| {
            room[0] = IovaRange { first: 4096, last: 4095 };
            room[1] = IovaRange { first: 0, last: u64::MAX };
            Ok(2)
        });
        assert_eq!(ranges.unwrap(), [(0, u64::MAX)]);
    }

    #[test]
    fn calls_have_the_numbers_of_the_kernel() {
        let calls = [IOAS_ALLOC, IOAS_IOVA_RANGES, IOAS_MAP, IOAS_UNMAP].map(abi::request);
        assert_eq!(calls, [0x3b81, 0x3b84, 0x3b85, 0x3b86]);
        assert_eq!((size_of::<IoasAllocation>(), size_of::<IovaRangesArgument>()), (12, 32));
        assert_eq!((size_of::<IoasMapArgument>(), size_of::<IoasUnmapArgument>()), (40, 24));
    }
}
