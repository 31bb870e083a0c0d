//! `nvme-tcp://HOST:PORT/NQN`: a namespace of an NVMe controller over TCP.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use blkyard_attach::{TcpNamespace, TcpNamespaceConfig, TcpPeer, TcpSparePath};
use blkyard_mpath::PathMonitor;
use blkyard_mq::{DeviceInfo, QueueKind, SECTOR_SHIFT};
use blkyard_nvme::fabrics::Nqn;
use blkyard_nvme::{FabricsHostConfig, NamespaceIds};
use blkyard_os::{SystemClock, cpu_places};

use super::nvme::demand;
use super::{DeviceKind, MakeConnector, adopt_by_name};
use crate::device::{Backing, Device, DeviceError, DeviceHandover, DeviceOps, DeviceQueue, LatePath, ReceivedDevice};
use crate::secrets::{take_secrets, take_tls_key};
use crate::spec::{Spec, SpecError};

pub(super) const KIND: DeviceKind =
    DeviceKind { schemes: &["nvme-tcp"], usage: "nvme-tcp://HOST:PORT/NQN", open, adopt: Some(adopt), open_all: None };

/// The port of NVMe/TCP that is registered with IANA.
const PORT: u16 = 4420;
/// Form of an NQN, for messages.
pub(crate) const NQN_FORM: &str = "a name that begins with nqn. and has at most 223 bytes";
/// Default time of a request, as for other attached disks.
const TIMEOUT_S: u64 = 30;

fn open(mut spec: Spec, _: Option<MakeConnector<'_>>) -> Result<Device, DeviceError> {
    let config = take_config(&mut spec)?;
    spec.finish()?;
    Ok(TcpDevice { namespace: TcpNamespace::open(config)? }.into())
}

/// Connects anew: the other process has its own association until it ends.
fn adopt(spec: Spec, received: ReceivedDevice) -> Result<Device, DeviceError> {
    adopt_by_name(spec, received, open)
}

/// Takes address and options from a name.
pub(crate) fn take_config(spec: &mut Spec) -> Result<TcpNamespaceConfig, SpecError> {
    let (address, subsystem) = parse_address(spec, PORT)?;
    let (host, host_id) = take_host(spec)?;
    let mut config = FabricsHostConfig::new(host, host_id, subsystem);
    let queues = spec.take_number("queues", 1, 256)?.map_or_else(|| cpu_places().len(), |queues| queues as usize);
    config.queues = demand(
        u16::try_from(queues).unwrap_or(u16::MAX),
        spec.take_number("read_queues", 0, 256)?.unwrap_or(0) as u16,
        spec.take_number("poll_queues", 0, 256)?.unwrap_or(0) as u16,
    );
    if let Some(entries) = spec.take_number("queue_size", 2, 4095)? {
        config.queue_entries = entries as u16 + 1;
    }
    config.header_digest = spec.take_switch("header_digest")?.unwrap_or(config.header_digest);
    config.data_digest = spec.take_switch("data_digest")?.unwrap_or(config.data_digest);
    if let Some(seconds) = spec.take_number("keep_alive_s", 0, 3600)? {
        config.keep_alive_ms = seconds as u32 * 1000;
    }
    if let Some(longest_ns) = take_ns(spec, "reconnect_delay_s", 1, 3600)? {
        config.reconnect_ns[1] = longest_ns;
        config.reconnect_ns[0] = config.reconnect_ns[0].min(longest_ns);
    }
    // The time runs from the start, too: zero would leave none for the first connection.
    config.ctrl_loss_ns = take_ns(spec, "ctrl_loss_s", 1, u64::from(u32::MAX))?.or(config.ctrl_loss_ns);
    config.fast_io_fail_ns = take_ns(spec, "fast_io_fail_s", 0, u64::from(u32::MAX))?.or(config.fast_io_fail_ns);
    take_secrets(spec, &mut config)?;
    take_tls_key(spec, &mut config)?;
    let namespace = spec.take_number("namespace", 1, u64::from(u32::MAX) - 1)?;
    let timeout_s = spec.take_number("timeout_s", 1, 3600)?.unwrap_or(TIMEOUT_S);
    Ok(TcpNamespaceConfig {
        name: spec.address(),
        address,
        host: config,
        namespace: namespace.map(|number| number as u32),
        io_max_ns: Duration::from_secs(timeout_s).as_nanos() as u64,
        clock: Arc::new(SystemClock),
    })
}

fn take_ns(spec: &mut Spec, key: &'static str, min: u64, max: u64) -> Result<Option<u64>, SpecError> {
    Ok(spec.take_number(key, min, max)?.map(|seconds| seconds * 1_000_000_000))
}

/// Takes name and identifier of this host.
pub(super) fn take_host(spec: &mut Spec) -> Result<(Nqn, [u8; 16]), SpecError> {
    let host = spec.take_with("host_nqn", NQN_FORM, Nqn::new)?;
    host.map_or_else(|| own_host(&spec.name), |host| Ok(named_host(host)))
}

/// Address in a name, with this port if it has none, and name of the subsystem.
pub(super) fn parse_address(spec: &Spec, port: u16) -> Result<(String, Nqn), SpecError> {
    let cure = format!("write it as {}://HOST:PORT/NQN, with a name that begins with nqn.", spec.scheme);
    let wrong = |cause| SpecError::new(&spec.name, cause, &cure);
    let rest = spec.body.strip_prefix("//").ok_or_else(|| wrong("the address has no //"))?;
    let (address, name) = rest.split_once('/').ok_or_else(|| wrong("the name of the subsystem is missing"))?;
    let subsystem = Nqn::new(name).ok_or_else(|| wrong("the name of the subsystem is invalid"))?;
    // An IPv6 address is in brackets, behind which the port follows.
    let has_port = address.rsplit_once(':').is_some_and(|(host, _)| !host.starts_with('[') || host.ends_with(']'));
    if address.is_empty() || address.starts_with(':') {
        return Err(wrong("the host is missing"));
    }
    Ok((if has_port { address.to_owned() } else { format!("{address}:{port}") }, subsystem))
}

/// Name and identifier of this host: those that nvme-cli uses, or ones that follow from the machine's.
pub(crate) fn own_host(name: &str) -> Result<(Nqn, [u8; 16]), SpecError> {
    let read = |path| std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
    let known = read("/etc/nvme/hostnqn").and_then(|name| Nqn::new(&name));
    let id = read("/etc/nvme/hostid").and_then(|id| parse_uuid(&id));
    let machine = read("/etc/machine-id").or_else(|| read("/proc/sys/kernel/hostname")).unwrap_or_default();
    let id = id.unwrap_or_else(|| fold(machine.as_bytes()));
    let own = known.or_else(|| Nqn::new(&format!("nqn.2014-08.org.nvmexpress:uuid:{}", uuid(id))));
    let host = own.ok_or_else(|| SpecError::new(name, "this host has no NVMe name", "name it by ?host_nqn=NQN"))?;
    Ok((host, id))
}

/// A host that was named, with an identifier that follows from the name.
pub(crate) fn named_host(host: Nqn) -> (Nqn, [u8; 16]) {
    let id = fold(host.as_str().as_bytes());
    (host, id)
}

/// 128 bits that differ for different texts (FNV-1a).
fn fold(text: &[u8]) -> [u8; 16] {
    let hash = text.iter().fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128, |hash, byte| {
        (hash ^ u128::from(*byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
    });
    hash.to_be_bytes()
}

fn uuid(id: [u8; 16]) -> String {
    let digits = format!("{:032x}", u128::from_be_bytes(id));
    format!("{}-{}-{}-{}-{}", &digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..])
}

fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits: String = text.chars().filter(|digit| *digit != '-').collect();
    let id = u128::from_str_radix(&digits, 16).ok()?;
    (digits.len() == 32).then(|| id.to_be_bytes())
}

/// A namespace as a device.
#[derive(Debug)]
struct TcpDevice {
    namespace: TcpNamespace,
}

impl DeviceOps for TcpDevice {
    fn info(&self) -> &DeviceInfo {
        self.namespace.info()
    }

    fn describe(&self) -> String {
        format!("NVMe over TCP, namespace {}, up to {} queues", self.namespace.nsid(), self.namespace.queues_max())
    }

    fn queue(&self, kind: QueueKind, depth: usize) -> Result<DeviceQueue, DeviceError> {
        Ok(Box::new(self.namespace.queue(kind, depth)?))
    }

    fn queues_max(&self) -> usize {
        self.namespace.queues_max()
    }

    fn depth_max(&self) -> usize {
        self.namespace.depth_max()
    }

    fn backing(&self) -> io::Result<Backing> {
        let fixed = ("is a namespace of a controller", "resize it there; the new size is read automatically");
        Ok(Backing::Remote { bytes: self.namespace.capacity_sectors() << SECTOR_SHIFT, fixed })
    }

    fn sectors_now(&self) -> Option<u64> {
        Some(self.namespace.capacity_sectors()).filter(|sectors| *sectors > 0)
    }

    fn handover(&self) -> Result<DeviceHandover<'_>, &'static str> {
        Ok(DeviceHandover { ids: Some(self.ids()), ..DeviceHandover::default() })
    }

    fn ids(&self) -> NamespaceIds {
        *self.namespace.ids()
    }

    fn as_path(&self) -> Option<Arc<PathMonitor>> {
        Some(self.namespace.as_path())
    }

    fn later_path(&self, spec: &Spec, late: LatePath) -> Result<Device, DeviceError> {
        let config = take_config(&mut spec.clone())?;
        Ok(TcpDevice { namespace: TcpNamespace::later(config, &self.namespace, late)? }.into())
    }

    fn spare_path(&self, spec: &Spec, late: LatePath) -> Result<(Device, TcpSparePath), DeviceError> {
        let config = take_config(&mut spec.clone())?;
        let (namespace, spare) = TcpNamespace::spare(config, &self.namespace, late)?;
        Ok((TcpDevice { namespace }.into(), spare))
    }

    fn loss(&self) -> Option<String> {
        let view = self.namespace.view();
        view.last_loss.filter(|_| !view.is_connected)
    }

    fn peer(&self) -> Option<&Arc<TcpPeer>> {
        Some(self.namespace.peer())
    }

    fn set_peers(&self, peers: &[Arc<TcpPeer>]) {
        self.namespace.set_peers(peers);
    }

    fn counters(&self) -> BTreeMap<String, u64> {
        let view = self.namespace.view();
        let all = [("connected", u64::from(view.is_connected)), ("sessions", view.sessions)];
        all.map(|(name, count)| (name.to_owned(), count)).into()
    }

    fn has_ended(&self) -> bool {
        self.namespace.is_finished()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(name: &str) -> Result<TcpNamespaceConfig, SpecError> {
        let mut spec = Spec::parse(name)?;
        let config = take_config(&mut spec)?;
        spec.finish()?;
        Ok(config)
    }

    #[test]
    fn address_has_a_host_a_port_and_a_subsystem() {
        for (name, address, subsystem) in [
            ("nvme-tcp://127.0.0.1:4421/nqn.2026-01.org.example:a", "127.0.0.1:4421", "nqn.2026-01.org.example:a"),
            ("nvme-tcp://target/nqn.2026-01.org.example:a", "target:4420", "nqn.2026-01.org.example:a"),
            ("nvme-tcp://[::1]:4420/nqn.2026-01.org.example/b", "[::1]:4420", "nqn.2026-01.org.example/b"),
            ("nvme-tcp://[::1]/nqn.2026-01.org.example", "[::1]:4420", "nqn.2026-01.org.example"),
        ] {
            let config = config(name).unwrap();
            assert_eq!((&*config.address, config.host.subsystem.as_str()), (address, subsystem));
            assert_eq!(config.name, name);
        }
        for name in ["nvme-tcp:127.0.0.1", "nvme-tcp://127.0.0.1:4420", "nvme-tcp:///nqn.x", "nvme-tcp://a/disk"] {
            let error = config(name).unwrap_err();
            assert!(error.to_string().contains("nvme-tcp://HOST:PORT/NQN"), "{error}");
        }
    }

    #[test]
    fn options_set_the_association() {
        let name = "nvme-tcp://a/nqn.x?queues=3&queue_size=64&header_digest=on&data_digest=on&keep_alive_s=7\
                    &reconnect_delay_s=2&ctrl_loss_s=60&fast_io_fail_s=5&timeout_s=9&host_nqn=nqn.host&namespace=4";
        let TcpNamespaceConfig { host, namespace, io_max_ns, .. } = config(name).unwrap();
        assert_eq!((host.queues.total(), host.queue_entries, namespace, io_max_ns), (3, 65, Some(4), 9_000_000_000));
        assert!(host.header_digest && host.data_digest);
        assert_eq!((host.keep_alive_ms, host.reconnect_ns), (7000, [100_000_000, 2_000_000_000]));
        assert_eq!((host.ctrl_loss_ns, host.fast_io_fail_ns), (Some(60_000_000_000), Some(5_000_000_000)));
        assert_eq!(host.host.as_str(), "nqn.host");
        for wrong in ["queues=0", "gone_s=1", "ctrl_loss_s=0"] {
            assert!(config(&format!("nvme-tcp://a/nqn.x?{wrong}")).is_err(), "{wrong}");
        }
    }

    #[test]
    fn host_without_a_name_gets_one_that_stays() {
        let [one, other] = [0; 2].map(|_| own_host("x").unwrap());
        assert_eq!(one, other);
        assert_ne!(one.1, [0; 16]);
        assert_eq!(parse_uuid(&uuid(one.1)), Some(one.1));
        assert_ne!(fold(b"one"), fold(b"two"));
    }
}
