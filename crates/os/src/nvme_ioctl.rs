//! NVMe commands through the kernel's driver: one ioctl a command, on /dev/nvmeX, /dev/nvmeXnY or /dev/ngXnY.
//!
//! The caller builds the command as the sixteen dwords of a submission queue entry; the driver fills in the identifier
//! and the data pointers. Formats and meanings of commands are unknown here. A call blocks until the command has
//! completed or the driver has cancelled it after its timeout.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::Duration;

/// Which queue a command is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NvmeIoctlQueue {
    /// The admin queue.
    Admin,
    /// An I/O queue; the device must be a namespace.
    Io,
}

/// A completed command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvmeIoctlResult {
    /// Status without the phase bit; zero for success.
    pub status: u16,
    /// Command-specific result.
    pub result: u64,
}

/// A device node of the kernel's NVMe driver.
#[derive(Debug)]
pub struct NvmeDeviceNode {
    file: File,
}

impl NvmeDeviceNode {
    /// Opens a node. It is opened for reading only, which is enough for ioctls.
    ///
    /// # Errors
    /// Those of `open(2)`.
    pub fn open(path: &Path) -> io::Result<NvmeDeviceNode> {
        Ok(NvmeDeviceNode { file: File::open(path)? })
    }

    /// An open node.
    pub(crate) fn of(file: File) -> NvmeDeviceNode {
        NvmeDeviceNode { file }
    }

    /// The open file.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// The namespace of the node.
    ///
    /// # Errors
    /// `ENOTTY` if the node is a controller, or not of this driver.
    pub fn namespace_id(&self) -> io::Result<u32> {
        // SAFETY: the request has no argument and reads or writes no memory of this process.
        let nsid = unsafe { libc::ioctl(self.file.as_raw_fd(), NVME_IOCTL_ID) };
        u32::try_from(nsid).map_err(|_| io::Error::last_os_error())
    }

    /// Executes a command with the dwords of a submission queue entry. The direction of the data is that of the opcode,
    /// and so is that of the metadata. `timeout` is rounded up to milliseconds; zero selects the driver's default.
    ///
    /// # Errors
    /// The driver did not submit the command, or cancelled it.
    pub fn submit(
        &self,
        queue: NvmeIoctlQueue,
        dwords: [u32; 16],
        data: &mut [u8],
        metadata: &mut [u8],
        timeout: Duration,
    ) -> io::Result<NvmeIoctlResult> {
        let address =
            |bytes: &mut [u8]| if bytes.is_empty() { 0 } else { bytes.as_mut_ptr().expose_provenance() as u64 };
        let length = |bytes: &[u8]| u32::try_from(bytes.len()).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL));
        let mut command = NvmePassthruCmd64 {
            opcode: dwords[0] as u8,
            flags: (dwords[0] >> 8) as u8,
            rsvd1: 0,
            nsid: dwords[1],
            cdw2: dwords[2],
            cdw3: dwords[3],
            metadata: address(metadata),
            addr: address(data),
            metadata_len: length(metadata)?,
            data_len: length(data)?,
            cdw: [dwords[10], dwords[11], dwords[12], dwords[13], dwords[14], dwords[15]],
            timeout_ms: u32::try_from(timeout.as_nanos().div_ceil(1_000_000)).unwrap_or(u32::MAX),
            rsvd2: 0,
            result: 0,
        };
        let request = match queue {
            NvmeIoctlQueue::Admin => NVME_IOCTL_ADMIN64_CMD,
            NvmeIoctlQueue::Io => NVME_IOCTL_IO64_CMD,
        };
        // SAFETY: the request's argument is the structure that the driver defines for it, exclusively borrowed for the
        // call. The driver transfers at most `data_len` bytes to or from `addr`, which is `data`, and `metadata_len`
        // to or from `metadata`, both exclusively borrowed as well, and has ended the transfers when the call returns.
        let status = unsafe { libc::ioctl(self.file.as_raw_fd(), request, &raw mut command) };
        match u16::try_from(status) {
            Ok(status) => Ok(NvmeIoctlResult { status, result: command.result }),
            Err(_) => Err(io::Error::last_os_error()),
        }
    }
}

/// `struct nvme_passthru_cmd64` of `linux/nvme_ioctl.h`.
#[derive(Debug)]
#[repr(C)]
struct NvmePassthruCmd64 {
    opcode: u8,
    flags: u8,
    rsvd1: u16,
    nsid: u32,
    cdw2: u32,
    cdw3: u32,
    metadata: u64,
    addr: u64,
    metadata_len: u32,
    data_len: u32,
    /// Dwords 10 to 15.
    cdw: [u32; 6],
    timeout_ms: u32,
    rsvd2: u32,
    result: u64,
}

/// `_IO('N', number)`.
const fn io_request(number: libc::Ioctl) -> libc::Ioctl {
    (b'N' as libc::Ioctl) << 8 | number
}

/// `_IOWR('N', number, struct nvme_passthru_cmd64)`.
const fn passthru_request(number: libc::Ioctl) -> libc::Ioctl {
    const READ_WRITE: libc::Ioctl = 3;
    READ_WRITE << 30 | (size_of::<NvmePassthruCmd64>() as libc::Ioctl) << 16 | io_request(number)
}

const NVME_IOCTL_ID: libc::Ioctl = io_request(0x40);
const NVME_IOCTL_ADMIN64_CMD: libc::Ioctl = passthru_request(0x47);
const NVME_IOCTL_IO64_CMD: libc::Ioctl = passthru_request(0x48);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_the_numbers_of_the_kernels_header() {
        assert_eq!(size_of::<NvmePassthruCmd64>(), 80);
        assert_eq!([NVME_IOCTL_ID, NVME_IOCTL_ADMIN64_CMD, NVME_IOCTL_IO64_CMD], [0x4e40, 0xc050_4e47, 0xc050_4e48]);
    }

    #[test]
    fn a_file_that_is_no_nvme_device_is_refused() {
        let node = NvmeDeviceNode::open(Path::new("/dev/null")).unwrap();
        assert_eq!(node.namespace_id().unwrap_err().raw_os_error(), Some(libc::ENOTTY));
        let result = node.submit(NvmeIoctlQueue::Admin, [0; 16], &mut [0; 8], &mut [0; 8], Duration::ZERO);
        assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::ENOTTY));
    }
}
