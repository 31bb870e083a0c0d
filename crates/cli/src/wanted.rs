//! The exports that a user asks for, checked: options, queues, and the namespaces of controllers.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use blkyard::rate::{RateSlot, take_own_rate};
use blkyard::secrets::{read_host_secrets, read_tls_hosts};
use blkyard::spec::{Spec, SpecError};
use blkyard_export::{NvmeDoorbells, NvmePciId, NvmeTcpDisk, QUEUES_MAX, SocketConfig};
use blkyard_mq::DeviceInfo;
use blkyard_nvme::auth::HostSecrets;
use blkyard_nvme::fabrics::{DISCOVERY_NQN, Nqn};
use blkyard_nvme::tls::TlsHosts;
use blkyard_nvme::{AnaGroups, AnaState, NamespaceTable, ServedNamespace};
use blkyard_os::cpu_places;
use blkyard_virtio::SerialId;

use crate::daemon::{ExportedDevice, Protocol, Share, ShareDevice, WeightSlot};
use crate::error::ServeError;
use crate::plan::{MODE_KEY, MODE_WANTED, parse_mode};

/// A checked export.
pub(crate) struct Wanted {
    pub(crate) share: Share,
    pub(crate) devices: Vec<ExportedDevice>,
    pub(crate) protocol: Protocol,
    pub(crate) socket: SocketConfig,
    pub(crate) serial: SerialId,
    pub(crate) rate: RateSlot,
    pub(crate) weight: WeightSlot,
    pub(crate) doorbells: NvmeDoorbells,
    pub(crate) pci_id: NvmePciId,
    /// Set for NVMe/TCP only, which has no socket file.
    pub(crate) target: Option<WantedTarget>,
}

/// What an NVMe/TCP export is beside its namespaces.
pub(crate) struct WantedTarget {
    pub(crate) address: SocketAddr,
    pub(crate) nqn: Nqn,
    /// Hosts that may connect; unset for any.
    pub(crate) hosts: Option<Vec<Nqn>>,
    /// Those of them that are authenticated.
    pub(crate) auth: Option<HostSecrets>,
    /// Those of them whose connections are encrypted.
    pub(crate) tls: Option<TlsHosts>,
    /// Other discovery services.
    pub(crate) referrals: Vec<SocketAddr>,
    /// The first controller identifier, if it is given.
    pub(crate) first_controller: Option<u16>,
    /// ANA group of each namespace, by number of its device in the export.
    pub(crate) groups: Vec<u32>,
    /// States of groups that are given.
    pub(crate) states: BTreeMap<u32, AnaState>,
}

/// I/O queues of an NVMe/TCP export if none are given: those of several hosts with as many CPUs as a small server has.
const TARGET_QUEUES: usize = 32;
/// Words for errors.
const NQNS: &str = "NQNs, such as nqn.2014-08.org.nvmexpress:uuid:...";
pub(crate) const ANA_STATES: &str = "optimized, non-optimized, inaccessible, persistent-loss or change";
/// Port of an NVMe/TCP export if none is given.
const TARGET_PORT: u16 = 4420;

/// Adds a device to the controller that has the socket of this export already. Returns the export if there is none.
pub(crate) fn add_namespace(
    wanted: &mut [Wanted],
    mut spec: Spec,
    device: ShareDevice,
) -> Result<Option<Spec>, SpecError> {
    let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.into());
    let (path, mut address) = (absolute(Path::new(&spec.body)), None);
    match Protocol::of_scheme(&spec.scheme) {
        Some(Protocol::VfioUser(())) => {}
        Some(Protocol::NvmeTcp(())) => address = Some(parse_target(&spec)?),
        _ => return Ok(Some(spec)),
    }
    let is_same = |want: &&mut Wanted| match (&want.target, address) {
        (Some(target), Some(address)) => target.address == address && address.port() != 0,
        (None, None) => matches!(want.protocol, Protocol::VfioUser(())) && absolute(&want.socket.path) == path,
        _ => false,
    };
    let Some(want) = wanted.iter_mut().find(is_same) else { return Ok(Some(spec)) };
    let nsid = take_nsid(&mut spec)?;
    let name = spec.name.clone();
    let cure = "write them at the first export with this socket";
    let mut cause = "another namespace has no options other than namespace=N";
    if let Some(target) = &mut want.target {
        take_ana(&mut spec, target)?;
        cause = "another namespace has no options other than namespace=N, ana_group=N and ana_state";
    }
    spec.finish().map_err(|_| SpecError::new(&name, cause, cure))?;
    if want.share.serves(device.number) {
        let cause = "this device is a namespace of this controller already";
        return Err(SpecError::new(name, cause, "name another device, or another socket"));
    }
    let taken = || want.devices.iter().filter_map(|known| known.nsid);
    let nsid = nsid.unwrap_or_else(|| taken().max().unwrap_or(0) + 1);
    if taken().any(|known| known == nsid) || nsid > NamespaceTable::NAMESPACES_MAX {
        let cause = format!("the identifier {nsid} is not free");
        return Err(SpecError::new(name, cause, "give each namespace an identifier of its own, with namespace=N"));
    }
    want.devices.push(ExportedDevice { device: device.number, nsid: Some(nsid) });
    want.share.devices.push(device);
    Ok(None)
}

fn take_nsid(spec: &mut Spec) -> Result<Option<u32>, SpecError> {
    let nsid = spec.take_number("namespace", 1, NamespaceTable::NAMESPACES_MAX.into())?;
    Ok(nsid.map(|nsid| nsid as u32))
}

/// ANA group of one more namespace, and the state of that group.
fn take_ana(spec: &mut Spec, target: &mut WantedTarget) -> Result<(), SpecError> {
    let group = spec.take_number("ana_group", 1, AnaGroups::GROUPS_MAX.into())?.map_or(1, |group| group as u32);
    target.groups.push(group);
    if let Some(state) = spec.take_with("ana_state", ANA_STATES, AnaState::from_name)?
        && let Some(known) = target.states.insert(group, state).filter(|known| *known != state)
    {
        let cause = format!("ana_state={} of group {group}, which is to be {}", state.name(), known.name());
        return Err(SpecError::new(&spec.name, cause, "name it once for each group"));
    }
    Ok(())
}

/// Checks the export of this number, of this device.
pub(crate) fn want(mut spec: Spec, number: usize, device: ShareDevice) -> Result<Wanted, ServeError> {
    let protocol = Protocol::of_scheme(&spec.scheme).ok_or_else(|| {
        let cause = format!("unknown kind of export '{}'", spec.scheme);
        SpecError::new(&spec.name, cause, "use vhost-user-blk:SOCKET, vfio-user:SOCKET or nvme-tcp://ADDRESS:PORT")
    })?;
    let is_target = matches!(protocol, Protocol::NvmeTcp(()));
    let queues = spec.take_number("queues", 1, u64::from(QUEUES_MAX))?;
    let usual = || {
        let queues = if is_target { TARGET_QUEUES } else { cpu_places().len() };
        queues.min(usize::from(QUEUES_MAX)).min(device.queues)
    };
    let queues = queues.map_or_else(usual, |queues| queues as usize);
    let (mut nqn, mut usual) = (None, format!("blkyard-{number}"));
    if is_target {
        // By that name hosts reach the discovery service, and never the disk.
        let of_disk = |name: &str| Nqn::new(name).filter(|nqn| nqn.as_str() != DISCOVERY_NQN);
        nqn = spec.take_with("nqn", "an NQN other than that of the discovery service", of_disk)?;
        // All ports of a subsystem have the same one. Without a name it is one of this address: hosts take the disks of
        // two daemons for one if both have the same.
        let address = parse_target(&spec)?;
        let of = || NvmeTcpDisk::default_nqn(&machine(), &format!("{address}/{number}"));
        usual = NvmeTcpDisk::default_serial(&nqn.clone().unwrap_or_else(of));
    }
    let serial = spec.take("serial").unwrap_or(usual);
    let serial = SerialId::new(&serial)
        .map_err(|error| SpecError::new(&spec.name, error, "give up to 20 printable ASCII characters"))?;
    let (mut mode, mut group, mut target) = (None, None, None);
    if is_target {
        target = Some(want_target(&mut spec, nqn, &serial.to_string())?);
    } else {
        mode = spec.take_with(MODE_KEY, MODE_WANTED, parse_mode)?;
        group = spec.take("group").map(|name| group_number(&spec.name, &name)).transpose()?;
    }
    let named = spec.take_with("lanes", "numbers of lanes, such as 0,1", |text| {
        text.split(',').map(|lane| lane.trim().parse::<usize>().ok()).collect::<Option<Vec<_>>>()
    })?;
    let rate = RateSlot::new(take_own_rate(&mut spec)?);
    let weight = WeightSlot::take_out_of(&mut spec)?;
    let (mut doorbells, mut pci_id, mut nsid) = (None, None, None);
    if is_target {
        nsid = Some(take_nsid(&mut spec)?.unwrap_or(1));
    }
    // Unknown keys for other protocols.
    if matches!(protocol, Protocol::VfioUser(())) {
        doorbells = spec.take_with("doorbells", "message or shared", |text| match text {
            "message" => Some(NvmeDoorbells::Message),
            "shared" => Some(NvmeDoorbells::Shared),
            _ => None,
        })?;
        nsid = Some(take_nsid(&mut spec)?.unwrap_or(1));
        pci_id = spec.take_with("pci_id", "VENDOR:DEVICE in hexadecimal, such as 4e58:0001", parse_pci_id)?;
    }
    let name = format!("{}:{}", spec.scheme, spec.body);
    let path = PathBuf::from(&spec.body);
    spec.finish()?;
    let devices = vec![ExportedDevice { device: device.number, nsid }];
    let share = Share { name, queues, named, devices: vec![device] };
    let (doorbells, pci_id) = (doorbells.unwrap_or_default(), pci_id.unwrap_or_default());
    let socket = SocketConfig { path, mode, group };
    Ok(Wanted { share, devices, protocol, socket, serial, rate, weight, doorbells, pci_id, target })
}

/// Options of an NVMe/TCP export.
fn want_target(spec: &mut Spec, nqn: Option<Nqn>, serial: &str) -> Result<WantedTarget, SpecError> {
    let address = parse_target(spec)?;
    let is_remote = spec.take_switch("remote")?.unwrap_or(false);
    let (secrets, tls_keys) = (spec.take("secrets"), spec.take("tls_keys"));
    let names = |text: &str| text.split(',').map(|name| Nqn::new(name.trim())).collect::<Option<Vec<_>>>();
    let mut hosts = spec.take_with("hosts", NQNS, names)?;
    let nqn = nqn.unwrap_or_else(|| NvmeTcpDisk::default_nqn(&machine(), serial));
    let auth = secrets.map(|path| read_host_secrets(&spec.name, &path)).transpose()?;
    if let Some(auth) = &auth {
        // Others only if they are named.
        hosts.get_or_insert_default().extend(auth.hosts.keys().cloned());
    }
    let tls = tls_keys.map(|path| read_tls_hosts(&spec.name, &path, &nqn)).transpose()?;
    if let Some(tls) = &tls {
        hosts.get_or_insert_default().extend(tls.hosts().cloned());
    }
    let is_encrypted = tls.as_ref().is_some_and(|tls| hosts.iter().flatten().all(|host| tls.contains(host)));
    if !address.ip().is_loopback() && !is_remote && !is_encrypted {
        let cause = format!("{} can be reached from other machines, and not all data is encrypted", address.ip());
        let cure = "add tls_keys=FILE for all hosts, or remote=on on a network that you trust, or use 127.0.0.1";
        return Err(SpecError::new(&spec.name, cause, cure));
    }
    let referrals = spec.take_with("referrals", "addresses with ports, such as 127.0.0.1:8009", |text| {
        text.split(',').map(|address| address.trim().parse().ok()).collect::<Option<Vec<SocketAddr>>>()
    })?;
    let first_controller = spec.take_number("controller_ids", 1, NvmeTcpDisk::FIRST_CONTROLLER_MAX.into())?;
    let mut target = WantedTarget {
        address,
        nqn,
        hosts,
        auth,
        tls,
        referrals: referrals.unwrap_or_default(),
        first_controller: first_controller.map(|first| first as u16),
        groups: Vec::new(),
        states: BTreeMap::new(),
    };
    take_ana(spec, &mut target)?;
    Ok(target)
}

/// Name of this machine.
fn machine() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// The address of an NVMe/TCP export: loopback if it is left out.
fn parse_target(spec: &Spec) -> Result<SocketAddr, SpecError> {
    let text = spec.body.strip_prefix("//").unwrap_or(&spec.body);
    let loopback = |port: u16| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let (host, port) = match text.rsplit_once(':') {
        // The address of IPv6 without a port has several colons.
        Some((host, port)) if !port.ends_with(']') => (host, port.parse().ok()),
        _ => (text, Some(TARGET_PORT)),
    };
    let address = port.and_then(|port| match host {
        "" | "localhost" => Some(loopback(port)),
        host => {
            let literal = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
            literal.parse::<IpAddr>().ok().map(|ip| SocketAddr::new(ip, port))
        }
    });
    let cause = format!("'{text}' is no address");
    address.ok_or_else(|| {
        SpecError::new(&spec.name, cause, "write nvme-tcp://ADDRESS:PORT, such as nvme-tcp://127.0.0.1:4420")
    })
}

fn parse_pci_id(text: &str) -> Option<NvmePciId> {
    let (vendor, device) = text.split_once(':')?;
    // No sign, which the parser of numbers allows.
    let number = |text: &str| {
        let is_valid = text.len() == 4 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
        u16::from_str_radix(text, 16).ok().filter(|_| is_valid)
    };
    Some(NvmePciId { vendor: number(vendor)?, device: number(device)? })
}

/// The number of a group, by its name or number.
fn group_number(object: &str, name: &str) -> Result<u32, SpecError> {
    // For chown(2) the largest number is no group, and changes nothing.
    if let Some(number) = name.parse().ok().filter(|number| *number != u32::MAX) {
        return Ok(number);
    }
    let groups = std::fs::read_to_string("/etc/group").unwrap_or_default();
    let mut lines = groups.lines().map(|line| line.split(':').collect::<Vec<_>>());
    let found = lines.find(|fields| fields.first() == Some(&name)).and_then(|fields| fields.get(2)?.parse().ok());
    found
        .ok_or_else(|| SpecError::new(object, format!("no such group '{name}'"), "name one of /etc/group, or a number"))
}

/// Checks that an NVMe controller can have the device as a namespace.
pub(crate) fn check_is_namespace(export: &str, info: &DeviceInfo) -> Result<(), SpecError> {
    if ServedNamespace::new(1, 0, info).is_some() {
        return Ok(());
    }
    let cause = format!("NVMe cannot represent logical blocks of {} bytes", info.limits.logical_block_bytes);
    Err(SpecError::new(export, cause, "export the device as vhost-user-blk:SOCKET"))
}

#[cfg(test)]
mod tests {
    use blkyard::Device;

    use super::*;

    #[test]
    fn address_of_a_target_is_loopback_unless_asked() {
        let device = || ShareDevice { number: 0, pool: 0, queues: usize::MAX, orders: false };
        let address = |name: &str| {
            let wanted = want(Spec::parse(name).unwrap(), 0, device()).map_err(|error| error.to_string())?;
            Ok::<_, String>(wanted.target.unwrap().address.to_string())
        };
        for (name, want) in [
            ("nvme-tcp://127.0.0.1:4421", "127.0.0.1:4421"),
            ("nvme-tcp://127.0.0.2", "127.0.0.2:4420"),
            ("nvme-tcp://localhost:0", "127.0.0.1:0"),
            ("nvme-tcp://:4420", "127.0.0.1:4420"),
            ("nvme-tcp://[::1]:4420", "[::1]:4420"),
            ("nvme-tcp://[::1]", "[::1]:4420"),
            ("nvme-tcp://0.0.0.0:4420?remote=on", "0.0.0.0:4420"),
        ] {
            assert_eq!(address(name).as_deref(), Ok(want), "{name}");
        }
        for (name, word) in [
            ("nvme-tcp://0.0.0.0:4420", "remote=on"),
            ("nvme-tcp://[::]:4420?remote=off", "remote=on"),
            ("nvme-tcp://192.0.2.1:4420", "remote=on"),
            ("nvme-tcp://example.org:4420", "no address"),
            ("nvme-tcp://127.0.0.1:65536", "no address"),
            ("nvme-tcp://127.0.0.1:4420?nqn=disk", "NQN"),
            ("nvme-tcp://127.0.0.1:4420?nqn=nqn.2014-08.org.nvmexpress.discovery", "discovery service"),
            ("nvme-tcp://127.0.0.1:4420?hosts=nqn.a,b", "NQN"),
            ("nvme-tcp://127.0.0.1:4420?mode=0660", "mode"),
        ] {
            let error = address(name).unwrap_err();
            assert!(error.contains(word), "{name}: {error}");
        }
    }

    #[test]
    fn subsystems_of_two_daemons_are_not_taken_for_one() {
        let subsystem = |name: &str, number| {
            let device = ShareDevice { number: 0, pool: 0, queues: usize::MAX, orders: false };
            let wanted = want(Spec::parse(name).unwrap(), number, device).map_err(|error| error.to_string()).unwrap();
            (wanted.target.unwrap().nqn, wanted.serial.to_string())
        };
        let one = subsystem("nvme-tcp://127.0.0.1:1", 0);
        assert_eq!(subsystem("nvme-tcp://127.0.0.1:1", 0), one, "it stays the same over restarts");
        for (other, number) in [("nvme-tcp://127.0.0.1:2", 0), ("nvme-tcp://127.0.0.2:1", 0), ("nvme-tcp://:0", 1)] {
            let other = subsystem(other, number);
            assert!(other.0 != one.0 && other.1 != one.1, "{other:?}");
        }
        assert_ne!(subsystem("nvme-tcp://:0", 0), subsystem("nvme-tcp://:0", 1));
        // Ports of one subsystem, by name.
        for same in ["serial=S", "nqn=nqn.a"] {
            let ports = [1, 2].map(|port| subsystem(&format!("nvme-tcp://:{port}?{same}"), port));
            assert_eq!(ports[0], ports[1]);
        }
    }

    #[test]
    fn a_group_has_a_name_or_a_number() {
        assert_eq!(group_number("x", "0").unwrap(), 0);
        assert_eq!(group_number("x", "root").unwrap(), 0);
        for wrong in ["4294967295", "-1", "no-such-group"] {
            assert!(group_number("x", wrong).unwrap_err().to_string().contains("no such group"), "{wrong}");
        }
    }

    #[test]
    fn device_that_is_no_namespace_is_refused() {
        let mut info = Device::open("null:1M").unwrap().info().clone();
        assert!(check_is_namespace("vfio-user:n", &info).is_ok());
        info.limits.logical_block_bytes = 16384;
        let error = check_is_namespace("vfio-user:n", &info).unwrap_err().to_string();
        assert!(error.contains("blocks of 16384 bytes; export the device as vhost-user-blk"), "{error}");
    }
}
