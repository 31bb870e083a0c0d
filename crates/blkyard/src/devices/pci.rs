//! `pci:ADDRESS`: a namespace of an NVMe controller of this machine, driven by this process through VFIO.
//!
//! The kernel's driver is replaced here only, when the device is opened by name, and on request. A controller that is
//! opened again after it was lost must be with vfio-pci by then.

mod controller;

use blkyard_mem::DmaDomain;
use blkyard_os::{HostPciDevice, PciAddress, VfioError, VfioInterface};

use self::controller::PciConfig;
pub(crate) use self::controller::PciController;
use super::nvme::{NvmeOptions, open_namespaces};
use super::{DeviceKind, MakeConnector};
use crate::device::{Device, DeviceError};
use crate::spec::{Spec, SpecError};

pub(super) const KIND: DeviceKind =
    DeviceKind { schemes: &["pci"], usage: "pci:ADDRESS", open, adopt: None, open_all: Some(open_all) };

/// Reason for which an export is refused, and cure: `docs/adr/0049-a-pci-device-through-vfio.md`.
const NO_EXPORT: (&str, &str) = (
    "serving it pins all memory of the front-end for as long as that is connected, and memory that a guest gives back \
     (balloon, free page reporting) would be corrupted",
    "add ?pin=on if no guest does so, or serve the namespace by the kernel's driver, as file:/dev/nvmeXnY",
);

fn open(spec: Spec, connector: Option<MakeConnector<'_>>) -> Result<Device, DeviceError> {
    Ok(open_all(vec![spec], connector)?.remove(0))
}

fn open_all(mut specs: Vec<Spec>, _: Option<MakeConnector<'_>>) -> Result<Vec<Device>, DeviceError> {
    let (options, namespaces) = NvmeOptions::take_all(&mut specs)?;
    let mut spec = specs.remove(0);
    let may_unbind = take_unbind(&mut spec)?;
    let may_pin = spec.take_switch("pin")?.unwrap_or(false);
    let interface = take_interface(&mut spec)?;
    let name = spec.address();
    let address: PciAddress = spec.body.parse()?;
    spec.finish()?;
    HostPciDevice::find(address)?.bind(may_unbind)?;
    let not_exported = (!may_pin).then_some(NO_EXPORT);
    let config = options.config(&name);
    open_namespaces::<PciController>(
        PciConfig { address, interface },
        config,
        &namespaces,
        "NVMe over VFIO",
        not_exported,
    )
}

/// Opens a controller for single commands, whose completions are polled: `pci:ADDRESS`, with `unbind` and `iommu`
/// as its only options.
pub(crate) fn open_controller(name: &str) -> Result<PciController, DeviceError> {
    let mut spec = Spec::parse(name)?;
    let may_unbind = take_unbind(&mut spec)?;
    let interface = take_interface(&mut spec)?;
    let address = spec.body.parse()?;
    spec.finish()?;
    let function = HostPciDevice::find(address)?;
    function.bind(may_unbind)?;
    Ok(PciController::attach(&function, interface, &DmaDomain::new(|| ()), &[])?)
}

/// Whether the device may be taken from the kernel's driver.
fn take_unbind(spec: &mut Spec) -> Result<bool, SpecError> {
    Ok(spec.take_switch("unbind")?.unwrap_or(false))
}

/// The kernel's interface to open the device by; unset for the best one.
fn take_interface(spec: &mut Spec) -> Result<Option<VfioInterface>, SpecError> {
    spec.take_with("iommu", "group or iommufd", |value| match value {
        "group" => Some(VfioInterface::Group),
        "iommufd" => Some(VfioInterface::Iommufd),
        _ => None,
    })
}

impl From<VfioError> for DeviceError {
    fn from(error: VfioError) -> DeviceError {
        DeviceError::Other(error.into())
    }
}
