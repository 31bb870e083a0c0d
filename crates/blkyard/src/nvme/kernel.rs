//! Commands through the kernel's NVMe driver.

use std::io::{self, ErrorKind};
use std::path::Path;
use std::time::Duration;

use blkyard_nvme::{NvmeStatus, Sqe};
use blkyard_os::{NvmeDeviceNode, NvmeIoctlQueue, NvmeIoctlResult};

use crate::nvme::{NvmeError, NvmePassthrough, PassthroughData, PassthroughResult, PassthroughTarget};

/// A device node of the kernel's driver.
#[derive(Debug)]
pub struct KernelPassthrough {
    name: String,
    node: NvmeDeviceNode,
    namespace_id: Option<u32>,
}

/// Whether the name is that of a controller or namespace: `nvme` or `ng` and a number, in /dev or bare.
pub fn is_device(name: &str) -> bool {
    let leaf = name.strip_prefix("/dev/").unwrap_or(name);
    let number = leaf.strip_prefix("nvme").or_else(|| leaf.strip_prefix("ng"));
    number.is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit()) && !rest.contains('/'))
}

impl KernelPassthrough {
    /// Opens a device node.
    ///
    /// # Errors
    /// See [`NvmeError`].
    pub fn open(path: &Path) -> Result<KernelPassthrough, NvmeError> {
        let name = path.display().to_string();
        match NvmeDeviceNode::open(path) {
            Ok(node) => Ok(KernelPassthrough { namespace_id: node.namespace_id().ok(), name, node }),
            Err(source) => Err(NvmeError::Open { name, source }),
        }
    }
}

impl NvmePassthrough for KernelPassthrough {
    fn name(&self) -> &str {
        &self.name
    }

    fn namespace_id(&self) -> Option<u32> {
        self.namespace_id
    }

    fn submit(
        &mut self,
        target: PassthroughTarget,
        sqe: Sqe,
        data: PassthroughData<'_>,
        metadata: PassthroughData<'_>,
        timeout: Duration,
    ) -> Result<PassthroughResult, NvmeError> {
        let queue = match target {
            PassthroughTarget::Admin => NvmeIoctlQueue::Admin,
            PassthroughTarget::Io => NvmeIoctlQueue::Io,
        };
        let dwords = sqe.dwords();
        let (mut data_copy, mut metadata_copy) = (vec![], vec![]);
        let data = exclusive(data, &mut data_copy);
        let metadata = exclusive(metadata, &mut metadata_copy);
        let ended = self.node.submit(queue, dwords, data, metadata, timeout);
        match ended {
            Ok(NvmeIoctlResult { status, result }) => Ok(PassthroughResult { status: NvmeStatus(status), result }),
            Err(source) => Err(NvmeError::Kernel { name: self.name.clone(), cure: cure(&source), source }),
        }
    }
}

/// The bytes as the driver takes them, which has one kind of pointer for both directions: those to send are copied.
fn exclusive<'a>(data: PassthroughData<'a>, copy: &'a mut Vec<u8>) -> &'a mut [u8] {
    match data {
        PassthroughData::None => &mut [],
        PassthroughData::Read(bytes) => bytes,
        PassthroughData::Write(bytes) => {
            copy.extend_from_slice(bytes);
            copy
        }
    }
}

/// What to do about an error of the driver.
fn cure(error: &io::Error) -> &'static str {
    match error.kind() {
        ErrorKind::PermissionDenied => "run as root",
        ErrorKind::InvalidInput => {
            "give the namespace of the device, at most the data that its limits allow (MDTS, max_hw_sectors_kb), and \
             metadata only as its format has it"
        }
        ErrorKind::Interrupted | ErrorKind::TimedOut => {
            "the driver cancelled the command after its timeout; give a longer one with -t"
        }
        _ => "for I/O commands give a namespace, /dev/nvmeXnY or /dev/ngXnY; the kernel's log may have more",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_of_the_driver_are_known_by_name() {
        for name in ["/dev/nvme0", "/dev/nvme0n1", "/dev/ng0n1", "nvme3", "ng1n2"] {
            assert!(is_device(name), "{name}");
        }
        for name in ["/dev/nvme-fabrics", "/dev/sda", "nvme", "", "ngx", "nvme0/../sda", "/tmp/nvme0"] {
            assert!(!is_device(name), "{name}");
        }
    }
}
