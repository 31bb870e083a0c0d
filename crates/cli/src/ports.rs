//! Ports of NVMe subsystems: exports over TCP with one NQN are checked against each other.
//!
//! Hosts take namespaces with one identifier in one subsystem for one disk, whatever port they are reached by, and
//! refuse a controller identifier that they know already.

use std::net::TcpListener;
use std::ops::Range;
use std::sync::Arc;

use blkyard::spec::SpecError;
use blkyard_export::{NvmeTcpAna, NvmeTcpDisk, PortDirectory};
use blkyard_mq::DeviceInfo;
use blkyard_nvme::fabrics::Nqn;

use crate::error::ServeError;
use crate::wanted::{Wanted, WantedTarget};

/// Addresses and controller identifiers that the ports of each subsystem have.
pub(crate) struct SubsystemPorts {
    addresses: Vec<(Nqn, Arc<PortDirectory>)>,
    taken: Vec<(Nqn, Range<u16>)>,
}

impl SubsystemPorts {
    /// Checks all exports, and takes the identifiers that are given.
    ///
    /// # Errors
    /// Two ports of a subsystem contradict each other.
    pub(crate) fn new(wanted: &[Wanted]) -> Result<SubsystemPorts, SpecError> {
        let mut ports = SubsystemPorts { addresses: Vec::new(), taken: Vec::new() };
        let targets: Vec<_> =
            wanted.iter().filter_map(|want| want.target.as_ref().map(|target| (want, target))).collect();
        for (at, (want, target)) in targets.iter().enumerate() {
            let siblings = targets[..at].iter().filter(|(_, known)| known.nqn == target.nqn);
            siblings.clone().try_for_each(|(known, its)| check_siblings((known, its), (want, target)))?;
            let Some(first) = target.first_controller else { continue };
            if !ports.is_free(&target.nqn, first) {
                let cause = format!("controller_ids={first} overlaps those of another port of {}", target.nqn);
                let cure = format!("each port has {} of them", NvmeTcpDisk::CONTROLLER_IDS);
                return Err(SpecError::new(&want.share.name, cause, cure));
            }
            ports.take(&target.nqn, first);
        }
        Ok(ports)
    }

    /// Binds the address of a port, unless its socket was inherited, and makes its subsystem with these namespaces.
    ///
    /// # Errors
    /// The address is in use, or no controller identifiers are left.
    pub(crate) fn bind(
        &mut self,
        name: &str,
        target: WantedTarget,
        inherited: Option<TcpListener>,
        namespaces: Vec<(u32, DeviceInfo)>,
        (queues, serial): (u16, String),
    ) -> Result<(NvmeTcpDisk, Arc<NvmeTcpAna>, TcpListener), ServeError> {
        let WantedTarget { address, nqn, hosts, auth, tls, referrals, first_controller, groups, states } = target;
        let bound = inherited.map_or_else(|| TcpListener::bind(address), Ok);
        let listener = bound.map_err(|source| {
            SpecError::new(name, format!("{address}: {source}"), "name an address of this machine and a free port")
        })?;
        let local = listener.local_addr()?;
        let first = first_controller.or_else(|| self.first_controller(&nqn, local.port())).ok_or_else(|| {
            let cause = format!("{nqn} has no controller identifiers left");
            SpecError::new(name, cause, "give it fewer ports, or set controller_ids=FIRST for each")
        })?;
        let ana = Arc::new(NvmeTcpAna::new(groups)?);
        for (group, state) in states {
            ana.set(group, state);
        }
        let ports = self.addresses(&nqn);
        ports.add(local);
        let disk = NvmeTcpDisk::new(nqn, namespaces, queues, serial).with_referrals(referrals).with_ports(ports);
        let disk = disk.with_ana(Arc::clone(&ana)).with_first_controller(first);
        let disk = if let Some(hosts) = hosts { disk.with_hosts(hosts) } else { disk };
        let disk = if let Some(auth) = auth { disk.with_auth(auth) } else { disk };
        let disk = if let Some(tls) = tls { disk.with_tls(tls) } else { disk };
        Ok((disk, ana, listener))
    }

    /// The addresses of a subsystem, which its ports share.
    fn addresses(&mut self, nqn: &Nqn) -> Arc<PortDirectory> {
        if let Some((_, known)) = self.addresses.iter().find(|(known, _)| known == nqn) {
            return Arc::clone(known);
        }
        let addresses = Arc::default();
        self.addresses.push((nqn.clone(), Arc::clone(&addresses)));
        addresses
    }

    /// The first controller identifier of a port that was given none. Daemons on different ports mostly differ.
    pub(crate) fn first_controller(&mut self, nqn: &Nqn, port: u16) -> Option<u16> {
        const RANGES: u16 = NvmeTcpDisk::FIRST_CONTROLLER_MAX / NvmeTcpDisk::CONTROLLER_IDS + 1;
        let firsts = (0..RANGES).map(|step| 1 + (port % RANGES + step) % RANGES * NvmeTcpDisk::CONTROLLER_IDS);
        let first = firsts.into_iter().find(|first| self.is_free(nqn, *first))?;
        self.take(nqn, first);
        Some(first)
    }

    fn take(&mut self, nqn: &Nqn, first: u16) {
        self.taken.push((nqn.clone(), first..first + NvmeTcpDisk::CONTROLLER_IDS));
    }

    fn is_free(&self, nqn: &Nqn, first: u16) -> bool {
        let overlaps = |range: &Range<u16>| range.start < first + NvmeTcpDisk::CONTROLLER_IDS && first < range.end;
        !self.taken.iter().any(|(known, range)| known == nqn && overlaps(range))
    }
}

/// Checks that two ports of one subsystem serve one disk under one identifier.
fn check_siblings(one: (&Wanted, &WantedTarget), other: (&Wanted, &WantedTarget)) -> Result<(), SpecError> {
    let failed = |cause: String, cure: &str| {
        let cause = format!("{cause} at {}, a port of the same subsystem {}", one.0.share.name, one.1.nqn);
        Err(SpecError::new(&other.0.share.name, cause, cure))
    };
    if one.0.serial != other.0.serial {
        return failed(format!("the serial number is {}", one.0.serial), "give both the same serial=");
    }
    let namespaces = |(want, target): (&Wanted, &WantedTarget)| -> Vec<_> {
        want.devices.iter().zip(&target.groups).map(|(of, group)| (of.nsid, of.device, *group)).collect()
    };
    for (nsid, device, group) in namespaces(other) {
        let Some(known) = namespaces(one).into_iter().find(|known| known.0 == nsid) else { continue };
        let nsid = nsid.unwrap_or(1);
        if known.1 != device {
            return failed(format!("namespace {nsid} is another device"), "set namespace=N, or give it another nqn=");
        }
        if known.2 != group {
            return failed(format!("namespace {nsid} is in ANA group {}", known.2), "give both the same ana_group=");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use blkyard::spec::Spec;

    use super::*;
    use crate::daemon::ShareDevice;
    use crate::wanted::want;

    fn ports(names: &[(&str, usize)]) -> Result<SubsystemPorts, String> {
        let wanted = names.iter().enumerate().map(|(number, (name, device))| {
            let device = ShareDevice { number: *device, pool: *device, queues: usize::MAX, orders: false };
            want(Spec::parse(name).unwrap(), number, device).unwrap()
        });
        SubsystemPorts::new(&wanted.collect::<Vec<_>>()).map_err(|error| error.to_string())
    }

    #[test]
    fn ports_of_a_subsystem_have_distinct_controllers() {
        let nqn = Nqn::new("nqn.a").unwrap();
        let mut ports = ports(&[("nvme-tcp://:1?nqn=nqn.a&controller_ids=500", 0)]).unwrap();
        let firsts: Vec<_> = (0..80).map_while(|port| ports.first_controller(&nqn, 64 * port)).collect();
        assert_eq!(firsts.len(), 63, "all but the two that the first one overlaps");
        for (at, first) in firsts.iter().enumerate() {
            assert!(*first >= 1500 && *first <= NvmeTcpDisk::FIRST_CONTROLLER_MAX, "{first}");
            assert!(firsts[..at].iter().all(|known| known.abs_diff(*first) >= NvmeTcpDisk::CONTROLLER_IDS));
        }
        assert_eq!(ports.first_controller(&Nqn::new("nqn.b").unwrap(), 65), Some(1), "another subsystem");
    }

    #[test]
    fn ports_of_a_subsystem_must_agree() {
        let one = "nvme-tcp://:1?nqn=nqn.a&ana_group=2";
        assert!(ports(&[(one, 0), ("nvme-tcp://:2?nqn=nqn.a&ana_group=2&ana_state=inaccessible", 0)]).is_ok());
        assert!(ports(&[(one, 0), ("nvme-tcp://:2?nqn=nqn.a&namespace=2", 1)]).is_ok());
        assert!(ports(&[(one, 0), ("nvme-tcp://:2?nqn=nqn.b", 1)]).is_ok());
        for (other, device, word) in [
            ("nvme-tcp://:2?nqn=nqn.a&ana_group=2", 1, "another device"),
            ("nvme-tcp://:2?nqn=nqn.a", 0, "ANA group 2"),
            ("nvme-tcp://:2?nqn=nqn.a&ana_group=2&serial=S1", 0, "serial"),
        ] {
            let error = ports(&[(one, 0), (other, device)]).err().unwrap();
            assert!(error.starts_with("nvme-tcp://:2: ") && error.contains(word), "{error}");
        }
        let ids = |first: u16| format!("nvme-tcp://:1?nqn=nqn.a&controller_ids={first}");
        assert!(ports(&[(&ids(1), 0), (&ids(1001), 0)]).is_ok());
        assert!(ports(&[(&ids(1), 0), (&ids(1000), 0)]).err().unwrap().contains("overlaps"));
    }
}
