//! A PCI function of the machine as sysfs shows it: class, driver, IOMMU group; and its change to the driver vfio-pci.
//!
//! A function that the kernel uses is given to vfio-pci only on request, and never while one of its namespaces is in
//! use. It stays there when this process ends.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use crate::file::claim_block_device;
use crate::vfio::VfioError;

/// The kernel's driver that gives a device to processes.
const VFIO_DRIVER: &str = "vfio-pci";
/// Class code of NVMe controllers: mass storage, non-volatile memory, NVM Express.
const NVME_CLASS: &str = "0x010802";

/// Address of a PCI function: domain, bus, device, function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

impl FromStr for PciAddress {
    type Err = VfioError;

    /// Parses `0000:00:10.0`, or without the domain.
    fn from_str(text: &str) -> Result<PciAddress, VfioError> {
        let parse = || {
            let (rest, function) = text.rsplit_once('.')?;
            let (rest, device) = rest.rsplit_once(':')?;
            let (domain, bus) = rest.rsplit_once(':').unwrap_or(("0", rest));
            let number = |text: &str| u32::from_str_radix(text, 16).ok().filter(|_| !text.starts_with('+'));
            let address = PciAddress {
                domain: number(domain)?,
                bus: number(bus)?.try_into().ok()?,
                device: number(device).filter(|device| *device < 32)? as u8,
                function: number(function).filter(|function| *function < 8)? as u8,
            };
            Some(address)
        };
        parse().ok_or_else(|| VfioError::Address { text: text.into() })
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PciAddress { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

/// An NVMe controller on the PCI bus of the machine.
#[derive(Debug)]
pub struct HostPciDevice {
    address: PciAddress,
    /// Root of sysfs.
    sysfs: PathBuf,
    folder: PathBuf,
}

impl HostPciDevice {
    /// Finds the controller with this address.
    ///
    /// # Errors
    /// There is none, or it is no NVMe controller.
    pub fn find(address: PciAddress) -> Result<HostPciDevice, VfioError> {
        HostPciDevice::find_in(address, Path::new("/sys"))
    }

    fn find_in(address: PciAddress, sysfs: &Path) -> Result<HostPciDevice, VfioError> {
        let folder = sysfs.join(format!("bus/pci/devices/{address}"));
        let class = fs::read_to_string(folder.join("class")).map_err(|_| VfioError::Missing { device: address })?;
        let class = class.trim_end();
        if class != NVME_CLASS {
            return Err(VfioError::Class { device: address, class: class.into() });
        }
        Ok(HostPciDevice { address, sysfs: sysfs.into(), folder })
    }

    /// Its address.
    pub fn address(&self) -> PciAddress {
        self.address
    }

    /// The kernel's driver that has it.
    pub fn driver(&self) -> Option<String> {
        link_name(&self.folder.join("driver"))
    }

    /// Its IOMMU group.
    ///
    /// # Errors
    /// The system has no IOMMU, or does not use it.
    pub fn group(&self) -> Result<u32, VfioError> {
        let group = link_name(&self.folder.join("iommu_group")).and_then(|name| name.parse().ok());
        group.ok_or(VfioError::NoIommu { device: self.address })
    }

    /// Gives it to the driver vfio-pci, if it is not there. That is done only on request (`may_unbind`), and logged.
    ///
    /// # Errors
    /// It was not requested, a namespace of the controller is in use, or the kernel refused.
    pub fn bind(&self, may_unbind: bool) -> Result<(), VfioError> {
        let (device, driver) = (self.address, self.driver());
        if driver.as_deref() == Some(VFIO_DRIVER) {
            return Ok(());
        }
        self.group()?;
        if !may_unbind {
            let state =
                driver.map_or("no driver has it".into(), |driver| format!("the kernel's driver {driver} has it"));
            return Err(VfioError::Bound { device, state });
        }
        if !self.sysfs.join("bus/pci/drivers").join(VFIO_DRIVER).is_dir() {
            return Err(VfioError::NoDriver { device });
        }
        // Claimed until the driver has left, so that no one begins to use them meanwhile.
        let namespaces = self.namespaces();
        let claims = namespaces.iter().map(|name| self.claim(name)).collect::<Result<Vec<_>, _>>()?;
        let lost = if namespaces.is_empty() { "no disk".into() } else { namespaces.join(", ") };
        let before = driver.as_deref().unwrap_or("none");
        tracing::info!(
            "pci:{device}: changing the driver from {before} to {VFIO_DRIVER}: {lost} disappears from the kernel; to \
             return it, write the address to {VFIO_DRIVER}/unbind, an empty line to driver_override, and the address \
             to drivers_probe, all in /sys/bus/pci"
        );
        let failed = |error: io::Error| VfioError::Bind { device, cause: error.to_string() };
        self.write("driver_override", VFIO_DRIVER).map_err(failed)?;
        let moved = self.move_driver(driver.is_some());
        drop(claims);
        if moved.is_ok() && self.driver().as_deref() == Some(VFIO_DRIVER) {
            return Ok(());
        }
        // Back to the driver that it had.
        let returned = self.write("driver_override", "\n").and_then(|()| self.probe());
        if let Err(error) = returned {
            tracing::error!("pci:{device}: cannot be returned to the driver {before}: {error}");
        }
        Err(moved.map_or_else(failed, |()| VfioError::Bind { device, cause: "vfio-pci did not take it".into() }))
    }

    fn move_driver(&self, has_driver: bool) -> io::Result<()> {
        if has_driver {
            self.write("driver/unbind", &self.address.to_string())?;
        }
        self.probe()
    }

    fn probe(&self) -> io::Result<()> {
        fs::write(self.sysfs.join("bus/pci/drivers_probe"), self.address.to_string())
    }

    fn write(&self, leaf: &str, text: &str) -> io::Result<()> {
        fs::write(self.folder.join(leaf), text)
    }

    /// Block devices of its namespaces, by name.
    fn namespaces(&self) -> Vec<String> {
        let controllers = entries(&self.folder.join("nvme"));
        let mut names: Vec<_> =
            controllers.iter().flat_map(|folder| entries(folder)).filter_map(|path| block_device(&path)).collect();
        names.sort();
        names.dedup();
        names
    }

    /// Claims a namespace's block device, which no other may use meanwhile.
    fn claim(&self, name: &str) -> Result<Option<File>, VfioError> {
        let path = Path::new("/dev").join(name);
        let in_use = |cause| VfioError::InUse { device: self.address, namespace: path.display().to_string(), cause };
        let opened = File::options().read(true).write(true).custom_flags(libc::O_EXCL).open(&path);
        match opened {
            Ok(file) => claim_block_device(&file).map(|()| Some(file)).map_err(in_use),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                Err(in_use("it is mounted, or part of another device".into()))
            }
            Err(error) => Err(in_use(format!("it cannot be opened: {error}"))),
        }
    }

    /// The other devices of its group that drivers of the kernel have.
    pub(super) fn group_neighbours(&self) -> String {
        let devices = entries(&self.folder.join("iommu_group/devices"));
        let described = devices.iter().filter_map(|folder| {
            let driver = link_name(&folder.join("driver"))?;
            let is_harmless = [VFIO_DRIVER, "pcieport", "pci-stub"].contains(&driver.as_str());
            (!is_harmless).then(|| format!("{} ({driver})", folder.file_name().unwrap_or_default().display()))
        });
        described.collect::<Vec<_>>().join(", ")
    }

    /// Waits for the node of its group, which the system makes after the driver was changed.
    pub(super) fn group_node(&self) -> Result<(u32, PathBuf), VfioError> {
        let group = self.group()?;
        Ok((group, awaited(PathBuf::from(format!("/dev/vfio/{group}")))))
    }

    /// Whether its group has a node.
    pub(super) fn has_group_node(&self) -> bool {
        self.group_node().is_ok_and(|(_, path)| path.exists())
    }

    /// Waits for its own node, if the kernel has one for it: only for iommufd, and not in each kernel.
    pub(super) fn device_node(&self) -> Option<PathBuf> {
        Some(awaited(Path::new("/dev/vfio/devices").join(self.device_name()?)))
    }

    /// Name of its node. Kernels that have the device, but no node for it, have no number for one either.
    fn device_name(&self) -> Option<String> {
        let is_node = |folder: &PathBuf| folder.join("dev").exists();
        let folder = entries(&self.folder.join("vfio-dev")).into_iter().find(is_node)?;
        let name = folder.file_name()?.to_str()?;
        let number = name.strip_prefix("vfio")?;
        (!number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())).then(|| name.into())
    }
}

/// The path, once it is there or a second has passed.
fn awaited(path: PathBuf) -> PathBuf {
    for _ in 0..100 {
        if path.exists() {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    path
}

/// Entries of a folder; none if it cannot be read.
fn entries(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

/// Last part of the target of a link.
fn link_name(link: &Path) -> Option<String> {
    Some(fs::read_link(link).ok()?.file_name()?.to_str()?.into())
}

/// Block device of an entry in a controller's folder: `nvme0n1`, also for `nvme0c1n1`, a path to it.
fn block_device(entry: &Path) -> Option<String> {
    let name = entry.file_name()?.to_str()?;
    let rest = name.strip_prefix("nvme")?;
    let (subsystem, namespace) = rest.split_once('n')?;
    let subsystem = subsystem.split_once('c').map_or(subsystem, |(subsystem, _)| subsystem);
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    (is_number(subsystem) && is_number(namespace)).then(|| format!("nvme{subsystem}n{namespace}"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use tempfile::TempDir;

    use super::*;

    /// A machine with one NVMe controller at 0000:00:10.0.
    fn machine(class: &str, driver: Option<&str>, group: bool) -> TempDir {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("bus/pci/devices/0000:00:10.0");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("class"), format!("{class}\n")).unwrap();
        if let Some(driver) = driver {
            symlink(format!("../../drivers/{driver}"), folder.join("driver")).unwrap();
        }
        if group {
            let group = root.path().join("kernel/iommu_groups/7/devices");
            fs::create_dir_all(group.join("0000:00:1f.2")).unwrap();
            symlink("../../../../../../bus/pci/drivers/ahci", group.join("0000:00:1f.2/driver")).unwrap();
            symlink("../../../../kernel/iommu_groups/7", folder.join("iommu_group")).unwrap();
        }
        root
    }

    fn function(root: &TempDir) -> HostPciDevice {
        HostPciDevice::find_in("00:10.0".parse().unwrap(), root.path()).unwrap()
    }

    #[test]
    fn addresses_are_read_with_and_without_a_domain() {
        for (text, written) in [("00:10.0", "0000:00:10.0"), ("10000:e1:1f.7", "10000:e1:1f.7")] {
            assert_eq!(text.parse::<PciAddress>().unwrap().to_string(), written);
        }
        for text in ["", "nvme0", "00:10", "00:20.0", "00:10.8", "100:10.0", "+0:10.0", "0000:00:10.0.0", "00:10.0 "] {
            let error = text.parse::<PciAddress>().unwrap_err();
            assert!(error.to_string().contains("not a PCI address"), "{text}: {error}");
        }
    }

    #[test]
    fn only_a_present_nvme_controller_is_found() {
        let root = machine("0x020000", None, true);
        let find = |text: &str| HostPciDevice::find_in(text.parse().unwrap(), root.path()).unwrap_err().to_string();
        assert_eq!(find("00:11.0"), "pci:0000:00:11.0: no such device; see `lspci -D`");
        assert!(find("00:10.0").contains("not an NVMe controller (its class is 0x020000)"));
    }

    #[test]
    fn a_driver_is_changed_only_on_request() {
        let root = machine("0x010802", Some("nvme"), true);
        let error = function(&root).bind(false).unwrap_err().to_string();
        assert!(error.contains("the kernel's driver nvme has it") && error.contains("unbind=on"), "{error}");
        assert!(matches!(function(&root).bind(true), Err(VfioError::NoDriver { .. })));
        let root = machine("0x010802", None, true);
        assert!(function(&root).bind(false).unwrap_err().to_string().contains("no driver has it"));
        let root = machine("0x010802", Some("vfio-pci"), true);
        assert!(function(&root).bind(false).is_ok());
    }

    #[test]
    fn a_driver_is_not_changed_without_an_iommu() {
        let root = machine("0x010802", Some("nvme"), false);
        assert!(matches!(function(&root).bind(true), Err(VfioError::NoIommu { .. })));
    }

    #[test]
    fn other_devices_of_a_group_are_named_with_their_drivers() {
        let root = machine("0x010802", Some("vfio-pci"), true);
        let function = function(&root);
        assert_eq!(function.group().unwrap(), 7);
        assert_eq!(function.group_neighbours(), "0000:00:1f.2 (ahci)");
    }

    #[test]
    fn node_of_a_device_is_found_only_where_the_kernel_has_one() {
        let root = machine("0x010802", Some("vfio-pci"), true);
        let function = function(&root);
        assert_eq!(function.device_name(), None);
        let folder = root.path().join("bus/pci/devices/0000:00:10.0/vfio-dev");
        fs::create_dir_all(folder.join("vfio12")).unwrap();
        assert_eq!(function.device_name(), None, "a kernel with groups only");
        fs::write(folder.join("vfio12/dev"), "511:12\n").unwrap();
        assert_eq!(function.device_name().as_deref(), Some("vfio12"));
        fs::rename(folder.join("vfio12"), folder.join("vfio..")).unwrap();
        assert_eq!(function.device_name(), None);
    }

    #[test]
    fn namespaces_are_found_by_their_paths_too() {
        let root = machine("0x010802", Some("nvme"), true);
        let folder = root.path().join("bus/pci/devices/0000:00:10.0/nvme/nvme3");
        for leaf in ["nvme3n1", "nvme2c3n7", "nvme2c4n7", "ng3n1", "power", "nvmen"] {
            fs::create_dir_all(folder.join(leaf)).unwrap();
        }
        assert_eq!(function(&root).namespaces(), ["nvme2n7", "nvme3n1"]);
    }
}
