//! NVMe commands to a controller: the admin queue and an I/O queue, one command at a time.
//!
//! For tools that ask or configure a controller. [`open_nvme`] chooses the transport by the scheme of the name. I/O
//! goes through a [`Disk`](crate::Disk) instead.
//!
//! A controller over vfio-user or VFIO is brought up by this process, so it must not be in use by another. One of the
//! kernel's driver is shared with everything that the kernel does with it.

mod discover;
mod error;
mod host;
mod kernel;
mod list;
mod tcp;

use std::path::PathBuf;
use std::time::Duration;

pub use blkyard_nvme::{
    CONTROLLER_FIELDS, DISCOVERY_PORT, DiscoveredLog, DiscoveryEntry, DiscoveryKind, ERROR_ENTRY_BYTES, ErrorLogEntry,
    FieldKind, IDENTIFY_BYTES, NAMESPACE_FIELDS, NvmeField, NvmeStatus, PowerState, SMART_FIELDS, SMART_LOG_BYTES,
    SecureChannel, Sqe, admin, cns, feature, io,
};
pub use discover::discover;
pub use error::NvmeError;
pub use host::HostPassthrough;
pub use kernel::KernelPassthrough;
pub use list::{NvmeListEntry, list_nvme};

/// Time limit of a command if none is given, as of admin commands in Linux.
const TIMEOUT_DEFAULT: Duration = Duration::from_mins(1);
/// Bytes of a log page that are read by one command.
const LOG_CHUNK: usize = 4096;

/// The queue of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassthroughTarget {
    /// The admin queue.
    Admin,
    /// An I/O queue.
    Io,
}

/// Data or metadata of a command.
#[derive(Debug)]
pub enum PassthroughData<'a> {
    /// No data.
    None,
    /// From the controller.
    Read(&'a mut [u8]),
    /// To the controller.
    Write(&'a [u8]),
}

impl PassthroughData<'_> {
    fn len(&self) -> usize {
        match self {
            PassthroughData::None => 0,
            PassthroughData::Read(bytes) => bytes.len(),
            PassthroughData::Write(bytes) => bytes.len(),
        }
    }
}

/// A completed command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassthroughResult {
    /// Its status, which may be an error.
    pub status: NvmeStatus,
    /// Its result, specific to the command.
    pub result: u64,
}

/// A controller that executes commands of the user.
pub trait NvmePassthrough {
    /// Its name, for messages.
    fn name(&self) -> &str;

    /// The namespace that the name stands for; unset if it stands for a controller.
    fn namespace_id(&self) -> Option<u32>;

    /// Executes a command. Its pointers to data and metadata are set here. Metadata goes in the direction of the data.
    /// A command that exceeds the timeout is aborted, and then the controller is reset. A zero timeout selects the
    /// default, 60 s.
    ///
    /// # Errors
    /// The command could not be submitted, or its result is unknown. A status of the controller is no error here.
    fn submit(
        &mut self,
        target: PassthroughTarget,
        sqe: Sqe,
        data: PassthroughData<'_>,
        metadata: PassthroughData<'_>,
        timeout: Duration,
    ) -> Result<PassthroughResult, NvmeError>;
}

impl dyn NvmePassthrough + '_ {
    /// Executes an admin command that must succeed. Returns its result.
    ///
    /// # Errors
    /// See [`NvmePassthrough::submit`]; [`NvmeError::Status`] if the controller reports an error.
    pub fn admin(
        &mut self,
        command: &'static str,
        sqe: Sqe,
        data: PassthroughData<'_>,
        timeout: Duration,
    ) -> Result<u64, NvmeError> {
        let PassthroughResult { status, result } =
            self.submit(PassthroughTarget::Admin, sqe, data, PassthroughData::None, timeout)?;
        if status.is_success() {
            return Ok(result);
        }
        Err(NvmeError::Status { name: self.name().to_owned(), command, status })
    }

    /// Identify data.
    ///
    /// # Errors
    /// See [`NvmePassthrough::admin`](#method.admin).
    pub fn identify(&mut self, cns: u8, nsid: u32, timeout: Duration) -> Result<Vec<u8>, NvmeError> {
        let mut data = vec![0; IDENTIFY_BYTES];
        self.admin("Identify", Sqe::identify(cns, nsid, 0, 0), PassthroughData::Read(&mut data), timeout)?;
        Ok(data)
    }

    /// The first `bytes` of a log page, a multiple of 4.
    ///
    /// # Errors
    /// See [`NvmePassthrough::admin`](#method.admin).
    pub fn log_page(&mut self, lid: u8, nsid: u32, bytes: usize, timeout: Duration) -> Result<Vec<u8>, NvmeError> {
        let mut data = vec![0; bytes];
        for (number, part) in data.chunks_mut(LOG_CHUNK).enumerate() {
            let sqe = Sqe::get_log_page(lid, nsid, 0, (part.len() / 4) as u32, (number * LOG_CHUNK) as u64);
            self.admin("Get Log Page", sqe, PassthroughData::Read(part), timeout)?;
        }
        Ok(data)
    }
}

/// Opens a controller or namespace by its name: `vfio-user:SOCKET`, `nvme-tcp://HOST:PORT/NQN`, `pci:ADDRESS` or
/// `pci:ADDRESS?unbind=on`, or a device of the kernel's driver, `/dev/nvmeX`, `/dev/nvmeXnY`, `/dev/ngXnY`.
///
/// # Errors
/// See [`NvmeError`].
pub fn open_nvme(name: &str) -> Result<Box<dyn NvmePassthrough>, NvmeError> {
    // The only place that knows the transports.
    match name.split_once(':') {
        Some(("vfio-user", socket)) if !socket.is_empty() => Ok(Box::new(host::open_vfio_user(name, socket)?)),
        Some(("nvme-tcp", _)) => Ok(Box::new(tcp::TcpPassthrough::open(name)?)),
        Some(("pci", address)) if !address.is_empty() => Ok(Box::new(host::open_pci(name)?)),
        None if kernel::is_device(name) => Ok(Box::new(KernelPassthrough::open(&device_path(name))?)),
        _ => Err(NvmeError::Name(name.to_owned())),
    }
}

/// A bare name is one in /dev.
fn device_path(name: &str) -> PathBuf {
    PathBuf::from("/dev").join(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_no_transport_is_refused_with_the_list() {
        for name in ["", "disk.img", "vfio-user:", "nvme:x", "/dev/sda", "tcp://x"] {
            let error = open_nvme(name).err().unwrap().to_string();
            assert!(error.contains("vfio-user:SOCKET") && error.starts_with(&format!("{name}: ")), "{error}");
        }
        for name in ["nvme-tcp:x", "nvme-tcp://127.0.0.1:4420", "nvme-tcp://127.0.0.1/nqn.x?sise=1"] {
            let error = open_nvme(name).err().unwrap().to_string();
            assert!(error.starts_with("nvme-tcp:"), "{error}");
        }
        for name in ["pci:x", "pci:0000:ff:1f.7", "pci:0000:00:00.0?queues=2"] {
            let error = open_nvme(name).err().unwrap().to_string();
            assert!(error.contains(name.split('?').next().unwrap().trim_start_matches("pci:")), "{error}");
        }
        for name in ["/dev/nvme987", "nvme987n1", "ng987n1"] {
            let error = open_nvme(name).err().unwrap().to_string();
            assert!(error.starts_with("/dev/n") && error.contains("No such file"), "{error}");
        }
    }
}
