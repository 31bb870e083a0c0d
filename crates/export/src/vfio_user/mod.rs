//! NVMe over vfio-user: a PCI function with an NVMe controller, for virtual machines and for programs with an NVMe
//! driver of their own.
//!
//! Each device is a namespace, with a hardware queue of its own on each lane. Each I/O completion queue that the host
//! creates feeds those of its lane.
//! Messages of the control path are parsed by `wire`; the controller is in `nvme`. `core` does not depend on this
//! module. See `docs/adr/0042-an-nvme-export-over-vfio-user.md`.
//!
//! A host writes doorbells by messages or in shared memory: see [`NvmeDoorbells`] and
//! `docs/adr/0045-doorbells-in-shared-memory.md`. A session is handed over to another process with its controller: see
//! `docs/adr/0052-an-nvme-controller-is-handed-over.md`.

mod change;
mod device;
mod doorbells;
mod handover;
mod memory;
mod pci;
mod queue;
mod session;

use blkyard_mq::DeviceInfo;
use blkyard_nvme::{NamespaceTable, ServedNamespace};

use crate::core;

pub use handover::{VFIO_STATE_VERSION, VfioSessionRecord, VfioSessionState};
pub use pci::NvmePciId;
pub use queue::{NvmeQueueSession, NvmeQueueSetup};
pub use session::{VfioSessionError, VfioSessionReserve, VfioSessionView, VfioUserSession};

/// Longest transfer of a command (MDTS), bytes.
const TRANSFER_BYTES: u32 = 128 << 10;
/// Descriptors that are received with one message, of an export with fewer vectors.
const DESCRIPTORS_MAX: usize = 32;

/// Constants of the hash FNV-1a with 128 bits.
const FNV_BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
const FNV_PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;

/// Configuration of a vfio-user export.
pub type VfioUserExport = core::ExportConfig<VfioUserSession>;
/// A serving vfio-user export.
pub type VfioUserServer = core::Server<VfioUserSession>;
/// A hardware queue and the I/O completion queues that feed it.
pub type NvmeQueuePoller<D> = core::QueuePoller<D, NvmeQueueSession>;
/// The control path's end of an I/O completion queue.
pub type NvmeQueueRemote = core::QueueRemote<NvmeQueueSession>;

/// A controller as hosts see it, and its namespaces.
#[derive(Clone, Debug)]
pub struct NvmeDisk {
    /// Identifier and device of each namespace, by number of the device.
    namespaces: Vec<(u32, DeviceInfo)>,
    queues: u16,
    serial: String,
    /// Distinguishes controllers with the same serial number.
    name: String,
    write_cache: bool,
    pci_id: NvmePciId,
    doorbells: NvmeDoorbells,
}

/// How a host writes doorbells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NvmeDoorbells {
    /// By messages, or in memory with an eventfd for each queue if the client asks for that. With shadow doorbells, as
    /// in Linux, a host sends or signals only for a queue that sleeps. An idle export takes no CPU time.
    #[default]
    Message,
    /// In memory shared with the client, without messages. The export polls it, also when it is idle, and offers no
    /// shadow doorbells. For clients that poll, such as SPDK, which has no other way.
    Shared,
}

impl NvmeDisk {
    /// A controller with this number of I/O queues and this serial number, and the device as its namespace 1. Devices
    /// with logical blocks outside 512 to 4096 bytes have no namespace.
    pub fn new(info: &DeviceInfo, queues: u16, serial: impl Into<String>) -> NvmeDisk {
        NvmeDisk::of_namespaces(vec![(1, info.clone())], queues, serial)
    }

    /// The same with several namespaces: identifier and device of each, by number of the device.
    ///
    /// # Panics
    /// If there is no namespace, or an identifier is not from 1 to [`NamespaceTable::NAMESPACES_MAX`].
    pub fn of_namespaces(namespaces: Vec<(u32, DeviceInfo)>, queues: u16, serial: impl Into<String>) -> NvmeDisk {
        assert!(!namespaces.is_empty(), "a controller without a namespace");
        NvmeDisk {
            write_cache: namespaces.iter().any(|(_, info)| info.volatile_cache),
            namespaces,
            queues,
            serial: serial.into(),
            name: String::new(),
            pci_id: NvmePciId::default(),
            doorbells: NvmeDoorbells::default(),
        }
    }

    /// The same with a name that no other controller has, such as the path of its socket. Controllers with the same
    /// serial number and name are taken for one.
    #[must_use]
    pub fn with_name(self, name: impl Into<String>) -> NvmeDisk {
        NvmeDisk { name: name.into(), ..self }
    }

    /// The same with another PCI id.
    #[must_use]
    pub fn with_pci_id(self, pci_id: NvmePciId) -> NvmeDisk {
        NvmeDisk { pci_id, ..self }
    }

    /// The same with another way to write doorbells.
    #[must_use]
    pub fn with_doorbells(self, doorbells: NvmeDoorbells) -> NvmeDisk {
        NvmeDisk { doorbells, ..self }
    }

    /// NQN of the subsystem. An NQN with a domain is for the owner of that domain, so it is one of a UUID.
    pub(crate) fn subsystem(&self) -> String {
        let uuid = self.uuid(0);
        let part = |low: u32, bits: u32| uuid >> low & ((1 << bits) - 1);
        format!(
            "nqn.2014-08.org.nvmexpress:uuid:{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
            part(96, 32),
            part(80, 16),
            part(64, 16),
            part(48, 16),
            part(0, 48)
        )
    }

    /// UUID of the subsystem (0) or of a namespace.
    fn uuid(&self, nsid: u32) -> u128 {
        // Version 8: made by a rule of its own; RFC 9562, 5.8.
        self.hash(nsid, "") & !(0xf << 76 | 0b11 << 62) | 8 << 76 | 0b10 << 62
    }

    /// NGUID of a namespace: a vendor-specific extension, and an EUI-64.
    fn nguid(&self, nsid: u32) -> [u8; 16] {
        let mut nguid = self.hash(nsid, "NGUID").to_be_bytes();
        nguid[8] = local_eui(nguid[8]);
        nguid
    }

    /// EUI-64 of a namespace.
    fn eui64(&self, nsid: u32) -> [u8; 8] {
        let mut eui64 = ((self.hash(nsid, "EUI-64") >> 64) as u64).to_be_bytes();
        eui64[0] = local_eui(eui64[0]);
        eui64
    }

    /// Hash of serial number, name and namespace for an identifier of this kind: it stays the same when the export
    /// starts again.
    fn hash(&self, nsid: u32, kind: &str) -> u128 {
        let add = |hash: u128, bytes: &[u8]| {
            bytes.iter().fold(hash, |hash, byte| (hash ^ u128::from(*byte)).wrapping_mul(FNV_PRIME))
        };
        let mut hash = add(FNV_BASIS, self.serial.as_bytes());
        // No part can be taken for the end of the one before it: serial numbers are text.
        let parts = [(0xff, self.name.as_bytes()), (0xfe, &nsid.to_le_bytes()[..]), (0xfd, kind.as_bytes())];
        for (tag, bytes) in parts {
            if bytes.iter().any(|byte| *byte != 0) {
                hash = add(add(hash, &[tag]), bytes);
            }
        }
        hash
    }

    /// The namespaces for the controller. A device whose logical blocks cannot be represented has none.
    pub(crate) fn table(&self) -> NamespaceTable {
        let last = self.namespaces.iter().map(|(nsid, _)| *nsid).max().unwrap_or(1);
        let mut table = NamespaceTable::new(last);
        for (device, (nsid, info)) in (0..).zip(&self.namespaces) {
            let served = ServedNamespace::new(*nsid, device, info);
            let (uuid, nguid, eui64) = (self.uuid(*nsid).to_be_bytes(), self.nguid(*nsid), self.eui64(*nsid));
            table.set(*nsid, served.map(|served| ServedNamespace { uuid, nguid, eui64, ..served }));
        }
        table
    }

    /// I/O queues that a host may create, at least one; each has an interrupt vector.
    fn io_queues(&self) -> u16 {
        self.queues.clamp(1, pci::VECTORS_MAX - 1)
    }

    /// Descriptors that are received with one message at most. A client may send the eventfds of all vectors at once,
    /// although it was told of fewer: that of the crate `vfio_user` does not read what it is told.
    fn descriptors_max(&self) -> usize {
        (usize::from(self.io_queues()) + 1).max(DESCRIPTORS_MAX)
    }
}

/// First byte of an EUI that is administered locally: no registered prefix (OUI) is claimed.
fn local_eui(byte: u8) -> u8 {
    byte & !1 | 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_subsystem_has_the_nqn_of_a_uuid() {
        let nqn = |serial: &str| NvmeDisk::new(&DeviceInfo::default(), 1, serial).subsystem();
        for serial in ["", "S1", "a serial with blanks: and more", "\u{fc}"] {
            let nqn = nqn(serial);
            let uuid = nqn.strip_prefix("nqn.2014-08.org.nvmexpress:uuid:").unwrap();
            let parts: Vec<_> = uuid.split('-').collect();
            assert_eq!(parts.iter().map(|part| part.len()).collect::<Vec<_>>(), [8, 4, 4, 4, 12], "{nqn}");
            assert!(uuid.chars().all(|digit| digit == '-' || matches!(digit, '0'..='9' | 'a'..='f')));
            assert!(parts[2].starts_with('8') && parts[3].starts_with(['8', '9', 'a', 'b']), "{nqn}");
        }
        assert_eq!(nqn("S1"), nqn("S1"));
        assert_ne!(nqn("S1"), nqn("S2"));
    }

    #[test]
    fn controllers_with_one_serial_number_are_distinct() {
        let disk = |name: &str| {
            let namespaces = vec![(1, DeviceInfo::default()), (5, DeviceInfo::default())];
            NvmeDisk::of_namespaces(namespaces, 1, "S1").with_name(name)
        };
        assert_ne!(disk("/run/a").subsystem(), disk("/run/b").subsystem());
        assert_eq!(disk("/run/a").subsystem(), disk("/run/a").subsystem());
        let uuids: Vec<_> =
            ["/run/a", "/run/b"].iter().flat_map(|name| [0, 1, 5].map(|nsid| disk(name).uuid(nsid))).collect();
        assert!((1..uuids.len()).all(|at| !uuids[..at].contains(&uuids[at])), "{uuids:x?}");
        assert_eq!(disk("/run/a").table().identifiers(), 5);
    }

    #[test]
    fn namespaces_have_stable_and_distinct_identifiers() {
        let table = |name: &str| {
            let info = DeviceInfo { capacity_sectors: 8, ..DeviceInfo::default() };
            NvmeDisk::of_namespaces(vec![(1, info.clone()), (2, info)], 1, "S1").with_name(name).table()
        };
        let ids = |name: &str| {
            let of = |served: &ServedNamespace| (served.eui64, served.nguid, served.uuid);
            table(name).iter().map(of).collect::<Vec<_>>()
        };
        assert_eq!(ids("/run/a"), ids("/run/a"));
        let all = [ids("/run/a"), ids("/run/b")].concat();
        for (at, (eui64, nguid, uuid)) in all.iter().enumerate() {
            // Locally administered, and of one device.
            assert_eq!((eui64[0] & 3, nguid[8] & 3, uuid[6] >> 4), (2, 2, 8));
            let differs =
                |other: &([u8; 8], [u8; 16], [u8; 16])| other.0 != *eui64 && other.1 != *nguid && other.2 != *uuid;
            assert!(all[..at].iter().all(differs), "{all:x?}");
        }
    }
}
