//! The I/O address space of a device, in one of the kernel's two interfaces, and how a device is opened with it.
//!
//! iommufd has a node for each device and gives it an address space (IOAS). The older interface has a node for each
//! IOMMU group, which is put into a container. Both pin what is mapped. A device is alone in its address space.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use crate::vfio::{HostPciDevice, PciAddress, VfioError, abi, iommufd};

/// Node of the containers.
const CONTAINER: &str = "/dev/vfio/vfio";
/// Node of iommufd.
const IOMMUFD: &str = "/dev/iommu";

/// An interface of the kernel that opens a device and maps memory for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VfioInterface {
    /// IOMMU groups and containers.
    Group,
    /// Nodes of devices, and iommufd.
    Iommufd,
}

/// Device addresses and the memory mapped there.
#[derive(Debug)]
pub(super) enum AddressSpace {
    Container {
        container: OwnedFd,
        /// Keeps the group in the container.
        _group: OwnedFd,
    },
    /// The address space is freed with the descriptor.
    Ioas { iommufd: OwnedFd, id: u32 },
}

impl AddressSpace {
    /// Opens a device that the driver vfio-pci has, with an address space of its own: by this interface, or, if unset,
    /// by iommufd where the kernel has it for the device and lets this process use it, and by its group elsewhere.
    pub(super) fn open(
        function: &HostPciDevice,
        interface: Option<VfioInterface>,
    ) -> Result<(OwnedFd, AddressSpace), VfioError> {
        let by_iommufd = || open_nodes(function, IOMMUFD);
        let (used, opened) = match choose(interface, by_iommufd, || function.has_group_node())? {
            Some((node, iommufd)) => (VfioInterface::Iommufd, open_by_iommufd(function, node, iommufd)?),
            None => (VfioInterface::Group, open_by_group(function)?),
        };
        let device = function.address();
        match used {
            VfioInterface::Iommufd => tracing::info!("pci:{device}: opened through iommufd"),
            VfioInterface::Group => tracing::info!("pci:{device}: opened through IOMMU group {}", function.group()?),
        }
        Ok(opened)
    }

    /// First and last address of each range that may be mapped; empty if the kernel does not say.
    pub(super) fn iova_ranges(&self) -> io::Result<Vec<(u64, u64)>> {
        match self {
            AddressSpace::Container { container, .. } => abi::iova_ranges(container.as_fd()),
            AddressSpace::Ioas { iommufd, id } => iommufd::iova_ranges(iommufd.as_fd(), *id),
        }
    }

    /// Maps memory of this process at a device address, and pins it.
    ///
    /// # Safety
    /// The memory is mapped in this process, may be written by a device at any time, and stays mapped until it is
    /// unmapped here or the device is closed with its address space.
    pub(super) unsafe fn map(&self, vaddr: u64, iova: u64, size: u64) -> io::Result<()> {
        match self {
            // SAFETY: the memory is the caller's promise.
            AddressSpace::Container { container, .. } => unsafe { abi::map_dma(container.as_fd(), vaddr, iova, size) },
            // SAFETY: the memory is the caller's promise.
            AddressSpace::Ioas { iommufd, id } => unsafe { iommufd::map(iommufd.as_fd(), *id, vaddr, iova, size) },
        }
    }

    /// Unmaps what was mapped at a device address. The device cannot access it afterwards.
    pub(super) fn unmap(&self, iova: u64, size: u64) -> io::Result<()> {
        match self {
            AddressSpace::Container { container, .. } => abi::unmap_dma(container.as_fd(), iova, size),
            AddressSpace::Ioas { iommufd, id } => iommufd::unmap(iommufd.as_fd(), *id, iova, size),
        }
    }

    /// Names of the calls that ask for the ranges and that map memory.
    pub(super) fn calls(&self) -> [&'static str; 2] {
        match self {
            AddressSpace::Container { .. } => ["VFIO_IOMMU_GET_INFO", "VFIO_IOMMU_MAP_DMA"],
            AddressSpace::Ioas { .. } => ["IOMMU_IOAS_IOVA_RANGES", "IOMMU_IOAS_MAP"],
        }
    }

    /// Whose pinned memory counts against the limit on locked memory.
    pub(super) fn accounted_to(&self) -> &'static str {
        match self {
            AddressSpace::Container { .. } => "this process",
            AddressSpace::Ioas { .. } => "all processes of this user",
        }
    }
}

/// What iommufd needs, or none if the device is to be opened by its group.
fn choose<T>(
    interface: Option<VfioInterface>,
    by_iommufd: impl FnOnce() -> Result<T, VfioError>,
    has_group_node: impl FnOnce() -> bool,
) -> Result<Option<T>, VfioError> {
    match interface {
        Some(VfioInterface::Group) => Ok(None),
        Some(VfioInterface::Iommufd) => by_iommufd().map(Some),
        // A user who may open the group, but not iommufd, keeps the group. Kernels can be without groups.
        None => match by_iommufd() {
            Err(error @ VfioError::Open { .. }) if !has_group_node() => Err(error),
            nodes => Ok(nodes.ok()),
        },
    }
}

/// Opens the device's own node and iommufd's.
fn open_nodes(function: &HostPciDevice, iommufd: &str) -> Result<(OwnedFd, OwnedFd), VfioError> {
    let device = function.address();
    let node = function.device_node().ok_or(VfioError::NoIommufd { device })?;
    let node = open_node(device, &node, "vfio-pci")?;
    Ok((node, open_node(device, Path::new(iommufd), "iommufd")?))
}

fn open_by_iommufd(
    function: &HostPciDevice,
    node: OwnedFd,
    iommufd: OwnedFd,
) -> Result<(OwnedFd, AddressSpace), VfioError> {
    let device = function.address();
    let failed = |call| move |source| VfioError::System { device, call, source };
    abi::bind_iommufd(node.as_fd(), iommufd.as_fd()).map_err(|error| bind_error(function, error))?;
    let id = iommufd::allocate(iommufd.as_fd()).map_err(failed("IOMMU_IOAS_ALLOC"))?;
    abi::attach_ioas(node.as_fd(), id).map_err(failed("VFIO_DEVICE_ATTACH_IOMMUFD_PT"))?;
    Ok((node, AddressSpace::Ioas { iommufd, id }))
}

/// The node of a device can be opened while others use the device; binding it cannot succeed then.
fn bind_error(function: &HostPciDevice, error: io::Error) -> VfioError {
    let device = function.address();
    let others = function.group_neighbours();
    match error.raw_os_error() {
        Some(libc::EBUSY | libc::EINVAL) if others.is_empty() => VfioError::Busy { device },
        Some(libc::EBUSY) => VfioError::NotViable { device, group: function.group().unwrap_or_default(), others },
        _ => VfioError::System { device, call: "VFIO_DEVICE_BIND_IOMMUFD", source: error },
    }
}

fn open_by_group(function: &HostPciDevice) -> Result<(OwnedFd, AddressSpace), VfioError> {
    let device = function.address();
    let failed = |call| move |source| VfioError::System { device, call, source };
    let (number, path) = function.group_node()?;
    let group = open_node(device, &path, "vfio-pci")?;
    let viable = abi::group_status(group.as_fd()).map_err(failed("VFIO_GROUP_GET_STATUS"))? & abi::GROUP_VIABLE;
    if viable == 0 {
        let others = function.group_neighbours();
        return Err(VfioError::NotViable { device, group: number, others });
    }
    let container = open_node(device, Path::new(CONTAINER), "vfio_iommu_type1")?;
    if !abi::is_supported(container.as_fd()).map_err(failed("VFIO_CHECK_EXTENSION"))? {
        return Err(VfioError::Part { device, what: "IOMMU of a kind that VFIO supports (type 1, version 2)" });
    }
    abi::set_container(group.as_fd(), container.as_fd()).map_err(failed("VFIO_GROUP_SET_CONTAINER"))?;
    abi::set_iommu(container.as_fd()).map_err(failed("VFIO_SET_IOMMU"))?;
    let name = CString::new(device.to_string()).map_err(|_| VfioError::Missing { device })?;
    let opened = abi::open_device(group.as_fd(), &name).map_err(failed("VFIO_GROUP_GET_DEVICE_FD"))?;
    Ok((opened, AddressSpace::Container { container, _group: group }))
}

/// Opens a node, which this module of the kernel makes.
fn open_node(device: PciAddress, path: &Path, module: &str) -> Result<OwnedFd, VfioError> {
    let opened = File::options().read(true).write(true).open(path);
    opened.map(OwnedFd::from).map_err(|error| {
        let cure = match error.kind() {
            io::ErrorKind::ResourceBusy => return VfioError::Busy { device },
            io::ErrorKind::PermissionDenied => "give the user of this process read and write permission".into(),
            io::ErrorKind::NotFound => format!("load the kernel's module {module}"),
            _ => "see the kernel's log".into(),
        };
        VfioError::Open { device, path: path.display().to_string(), cause: format!("{error}; {cure}") }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unopened() -> VfioError {
        let device = "0000:00:10.0".parse().unwrap();
        open_node(device, Path::new("/nowhere/iommu"), "iommufd").unwrap_err()
    }

    fn absent() -> VfioError {
        VfioError::NoIommufd { device: "0000:00:10.0".parse().unwrap() }
    }

    #[test]
    fn iommufd_is_used_where_it_can_be() {
        assert_eq!(choose(None, || Ok(7), || true).unwrap(), Some(7));
        for error in [absent, unopened] {
            assert_eq!(choose::<()>(None, || Err(error()), || true).unwrap(), None);
        }
    }

    #[test]
    fn kernel_without_groups_says_why_iommufd_fails() {
        let error = choose::<()>(None, || Err(unopened()), || false).unwrap_err().to_string();
        assert!(error.contains("/nowhere/iommu") && error.contains("module iommufd"), "{error}");
        // Neither is there: the group's error says which modules to load.
        assert_eq!(choose::<()>(None, || Err(absent()), || false).unwrap(), None);
    }

    #[test]
    fn interface_that_is_asked_for_is_used_or_an_error() {
        let group = Some(VfioInterface::Group);
        assert_eq!(choose::<()>(group, || panic!("not asked for"), || false).unwrap(), None);
        let iommufd = Some(VfioInterface::Iommufd);
        assert_eq!(choose(iommufd, || Ok(7), || panic!("not asked for")).unwrap(), Some(7));
        let error = choose::<()>(iommufd, || Err(absent()), || true).unwrap_err().to_string();
        assert!(error.contains("iommufd") && error.contains("iommu=group"), "{error}");
    }
}
