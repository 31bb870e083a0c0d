//! `vfio-user:SOCKET`: a namespace of an NVMe controller that another process serves over vfio-user.

use std::io;
use std::sync::Arc;

use blkyard_attach::{AttachError, VfioUserConfig, VfioUserController};
use blkyard_os::SystemClock;

use super::nvme::{NvmeOptions, open_namespaces};
use super::{DeviceKind, MakeConnector};
use crate::device::{Device, DeviceError};
use crate::spec::Spec;

pub(super) const KIND: DeviceKind =
    DeviceKind { schemes: &["vfio-user"], usage: "vfio-user:SOCKET", open, adopt: None, open_all: Some(open_all) };

fn open(spec: Spec, connector: Option<MakeConnector<'_>>) -> Result<Device, DeviceError> {
    Ok(open_all(vec![spec], connector)?.remove(0))
}

fn open_all(mut specs: Vec<Spec>, connector: Option<MakeConnector<'_>>) -> Result<Vec<Device>, DeviceError> {
    let (options, namespaces) = NvmeOptions::take_all(&mut specs)?;
    let spec = specs.remove(0);
    let name = spec.address();
    let system = |source: io::Error| AttachError::System { disk: name.clone(), source };
    let mut transport = VfioUserConfig::new(&spec.body, Arc::new(SystemClock)).map_err(system)?;
    spec.finish()?;
    if let Some(make) = connector {
        transport.connector = make().map_err(system)?;
    }
    transport.reply_max = options.config(&name).options.reply_max;
    let config = options.config(&name);
    open_namespaces::<VfioUserController>(transport, config, &namespaces, "NVMe over vfio-user", None)
}
