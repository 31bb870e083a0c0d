//! Errors of PCI devices through VFIO, worded as object, cause and cure.

use std::io;

use crate::vfio::PciAddress;

/// Why a PCI device cannot be opened or used.
#[derive(Debug, thiserror::Error)]
pub enum VfioError {
    /// The address is not one.
    #[error("pci:{text}: not a PCI address; write it as 0000:00:10.0, see `lspci -D`")]
    Address {
        /// The text.
        text: String,
    },
    /// No device has the address.
    #[error("pci:{device}: no such device; see `lspci -D`")]
    Missing {
        /// The device.
        device: PciAddress,
    },
    /// A device of another class.
    #[error("pci:{device}: not an NVMe controller (its class is {class}); see `lspci -D`")]
    Class {
        /// The device.
        device: PciAddress,
        /// Its class code.
        class: String,
    },
    /// A driver of the kernel has the device, or none.
    #[error(
        "pci:{device}: {state}; give it to vfio-pci, or add ?unbind=on to have that done: the kernel's disks of this \
         controller disappear"
    )]
    Bound {
        /// The device.
        device: PciAddress,
        /// Its driver.
        state: String,
    },
    /// The kernel uses a namespace of the device.
    #[error("pci:{device}: {namespace} is in use: {cause}; unmount or close it first")]
    InUse {
        /// The device.
        device: PciAddress,
        /// The block device.
        namespace: String,
        /// Its user.
        cause: String,
    },
    /// The driver of VFIO is not loaded.
    #[error("pci:{device}: the kernel's driver vfio-pci is not loaded; load it with `modprobe vfio-pci`")]
    NoDriver {
        /// The device.
        device: PciAddress,
    },
    /// The kernel refused to change the driver.
    #[error("pci:{device}: cannot be bound to vfio-pci: {cause}; this needs the rights of root, see the kernel's log")]
    Bind {
        /// The device.
        device: PciAddress,
        /// Cause of the failure.
        cause: String,
    },
    /// No IOMMU protects memory from the device.
    #[error(
        "pci:{device}: no IOMMU group; enable the IOMMU in the firmware and the kernel (such as with intel_iommu=on)"
    )]
    NoIommu {
        /// The device.
        device: PciAddress,
    },
    /// Other devices of the group belong to drivers of the kernel.
    #[error("pci:{device}: its IOMMU group {group} contains devices with other drivers: {others}; unbind them too")]
    NotViable {
        /// The device.
        device: PciAddress,
        /// Number of the group.
        group: u32,
        /// The devices, with their drivers.
        others: String,
    },
    /// Another process has the device.
    #[error("pci:{device}: another process has the device; end it first")]
    Busy {
        /// The device.
        device: PciAddress,
    },
    /// The kernel has no node for the device, so that iommufd cannot be used.
    #[error(
        "pci:{device}: the kernel offers no iommufd for it (no CONFIG_IOMMUFD or CONFIG_VFIO_DEVICE_CDEV); give \
         iommu=group or leave iommu out"
    )]
    NoIommufd {
        /// The device.
        device: PciAddress,
    },
    /// A node of the device, of its group, of the containers or of iommufd cannot be opened.
    #[error("pci:{device}: cannot open {path}: {cause}")]
    Open {
        /// The device.
        device: PciAddress,
        /// The file.
        path: String,
        /// Cause and cure.
        cause: String,
    },
    /// More memory than may be locked.
    #[error(
        "pci:{device}: cannot lock {bytes} bytes for the device: {cause}; raise the limit with `ulimit -l unlimited` or \
         LimitMEMLOCK=infinity"
    )]
    Locked {
        /// The device.
        device: PciAddress,
        /// Bytes of the region.
        bytes: u64,
        /// The limit and the error.
        cause: String,
    },
    /// No room for another mapping.
    #[error("pci:{device}: no I/O address is free for {bytes} bytes; use fewer or smaller buffers")]
    Addresses {
        /// The device.
        device: PciAddress,
        /// Bytes of the region.
        bytes: u64,
    },
    /// The device lacks a part.
    #[error("pci:{device}: the device has no {what}; update the kernel, or use the device by the kernel's driver")]
    Part {
        /// The device.
        device: PciAddress,
        /// Missing part.
        what: &'static str,
    },
    /// A system call failed.
    #[error("pci:{device}: {call} failed: {source}; see the kernel's log")]
    System {
        /// The device.
        device: PciAddress,
        /// What was called for.
        call: &'static str,
        /// The system's error.
        source: io::Error,
    },
}
