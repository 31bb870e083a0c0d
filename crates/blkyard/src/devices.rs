//! The kinds of device: `file:PATH` or a bare path, `vhost-user:SOCKET`, `vfio-user:SOCKET`, `nvme:/dev/ngXnY`,
//! `nvme-tcp://HOST:PORT/NQN`, `pci:ADDRESS`, `ram:SIZE`, `null:SIZE`, `chaos:SIZE`, `model:NAME`,
//! `multipath:DEVICE,DEVICE`, `nvme-discover://HOST:PORT/NQN`.
//!
//! Each has a separate file, with the scheme of its names, its options, and its [`DeviceOps`](crate::DeviceOps). A
//! further kind is such a file and its line in [`KINDS`]; no other code names kinds.

mod chaos;
mod discovered;
mod file;
mod memory;
mod model;
mod multipath;
mod null;
mod nvme;
mod nvme_char;
pub(crate) mod nvme_tcp;
pub(crate) mod pci;
mod ram;
mod vfio_user;
mod vhost_user;

use std::io;
use std::sync::Arc;

use blkyard_attach::Connector;

pub use multipath::put_path_rules;

use crate::spec::{Spec, SpecError, parse_size};
use crate::{Device, DeviceError, ReceivedDevice};

/// All kinds, in the order in which a message lists them.
pub(crate) const KINDS: &[DeviceKind] = &[
    file::KIND,
    vhost_user::KIND,
    vfio_user::KIND,
    nvme_char::KIND,
    nvme_tcp::KIND,
    pci::KIND,
    ram::KIND,
    null::KIND,
    chaos::KIND,
    model::KIND,
    multipath::KIND,
    discovered::KIND,
];

/// Schemes of kinds with the options `read_queues` and `poll_queues`.
pub(crate) const QUEUE_KIND_SCHEMES: [&str; 4] = ["vfio-user", "nvme-tcp", "nvme-discover", "pci"];

/// One kind of device.
pub(crate) struct DeviceKind {
    /// Schemes of its names; the empty one is that of a bare path.
    schemes: &'static [&'static str],
    /// How its names are written, for messages.
    usage: &'static str,
    /// Opens one.
    pub(crate) open: fn(Spec, Option<MakeConnector<'_>>) -> Result<Device, DeviceError>,
    /// Continues with a device that another process hands over. `None` for a kind that cannot be handed over.
    pub(crate) adopt: Option<AdoptDevice>,
    /// Opens several with the same address over one connection: namespaces of one controller. All options other than
    /// those that tell them apart are those of the first. `None` if each has a connection of its own.
    pub(crate) open_all: Option<OpenDevices>,
}

pub(crate) type OpenDevices = fn(Vec<Spec>, Option<MakeConnector<'_>>) -> Result<Vec<Device>, DeviceError>;

pub(crate) type AdoptDevice = fn(Spec, ReceivedDevice) -> Result<Device, DeviceError>;

/// Makes the connector to back-ends. Without one the connection is direct.
pub(crate) type MakeConnector<'a> = Box<dyn FnOnce() -> io::Result<Arc<dyn Connector>> + 'a>;

/// The kind of device that a name is for.
pub(crate) fn kind_of<'a>(kinds: &'a [DeviceKind], spec: &Spec) -> Result<&'a DeviceKind, SpecError> {
    kinds.iter().find(|kind| kind.schemes.contains(&spec.scheme.as_str())).ok_or_else(|| {
        let (last, others) = kinds.split_last().map_or(("", kinds), |(last, others)| (last.usage, others));
        let others: Vec<_> = others.iter().map(|kind| kind.usage).collect();
        let cause = format!("unknown kind of device '{}'", spec.scheme);
        SpecError::new(&spec.name, cause, format!("use {} or {last}", others.join(", ")))
    })
}

/// The other daemon hands over resources that this kind cannot use.
pub(crate) fn no_handover(spec: &Spec) -> DeviceError {
    SpecError::new(&spec.name, "this kind of device cannot be handed over", "start this daemon without --takeover")
        .into()
}

/// Opens a device that is handed over by its name alone.
fn adopt_by_name(
    spec: Spec,
    received: ReceivedDevice,
    open: fn(Spec, Option<MakeConnector<'_>>) -> Result<Device, DeviceError>,
) -> Result<Device, DeviceError> {
    let ReceivedDevice { file, claim, .. } = received;
    if file.or(claim).is_some() { Err(no_handover(&spec)) } else { open(spec, None) }
}

/// Whether completed writes may wait for a flush.
fn take_write_back(spec: &mut Spec) -> Result<Option<bool>, SpecError> {
    spec.take_with("cache", "writeback or writethrough", |value| match value {
        "writeback" => Some(true),
        "writethrough" => Some(false),
        _ => None,
    })
}

fn take_block_bytes(spec: &mut Spec) -> Result<Option<u32>, SpecError> {
    spec.take_with("block_size", "512, 1k, 2k or 4k", |value| {
        let bytes = u32::try_from(parse_size(value)?).ok()?;
        (bytes.is_power_of_two() && (512..=4096).contains(&bytes)).then_some(bytes)
    })
}

#[cfg(test)]
mod tests;
