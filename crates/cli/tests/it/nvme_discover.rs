//! A disk at all ports that discovery services name for it, as a user starts it.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::Stdio;

use crate::common::{Daemon, Process, inspect, inspect_at, program, run, succeed, wait_until};
use crate::multipath::own_loopback;

const NQN: &str = "nqn.2026-11.test:discovered";
const HOST: &str = "nqn.2026-11.test:host";
const OTHER_NQN: &str = "nqn.2026-11.test:other";

/// A target with these exports of a device, and their addresses.
fn target(folder: &Path, control: &str, device: &str, exports: &[String]) -> (Daemon, Vec<SocketAddr>) {
    let mut words = vec!["--control", control, "--device", device];
    exports.iter().for_each(|export| words.extend(["--export", export]));
    let daemon = Daemon::start(folder, &words);
    let address = |port: usize| {
        let tree = inspect_at(folder, control, &[]);
        tree["exports"][port]["session"]["target"]["address"].as_str().map(|address| address.parse().unwrap())
    };
    wait_until("all ports listen", || (0..exports.len()).all(|port| address(port).is_some()));
    (daemon, (0..exports.len()).map(|port| address(port).unwrap()).collect())
}

/// A subsystem at two ports for one host, and another target that refers to this address and to the first of them.
fn targets(folder: &Path, referral: SocketAddr) -> ([Daemon; 2], Vec<SocketAddr>, SocketAddr) {
    let export = format!("nvme-tcp://127.0.0.1:0?nqn={NQN}&hosts={HOST}");
    let (disk, ports) = target(folder, "t", "ram:16M?share=on", &[export.clone(), export]);
    let export = format!("nvme-tcp://127.0.0.1:0?nqn={OTHER_NQN}&referrals={referral},{}", ports[0]);
    let (other, services) = target(folder, "o", "null:1M", &[export]);
    ([disk, other], ports, services[0])
}

#[test]
fn a_disk_is_found_at_all_ports_that_discovery_services_name() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (targets, ports, service) = targets(folder, nobody);
    let device = format!("nvme-discover://{service}/{NQN}?host_nqn={HOST}&queues=1&policy=round-robin");
    let serve = ["--control", "c", "--device", &device, "--export", "vhost-user-blk:s"];
    let mut daemon = Daemon::start(folder, &serve);
    let paths = || inspect(folder, &[])["devices"][0]["paths"].clone();
    for _ in 0..2 {
        let found = paths();
        let names: Vec<_> = found.as_array().unwrap().iter().map(|path| path["name"].as_str().unwrap()).collect();
        assert_eq!(names, [0, 1].map(|port: usize| format!("nvme-tcp://{}/{NQN}", ports[port])));
        let words =
            ["bench", "vhost-user:s", "--rw", "randwrite", "--bs", "4k", "--iodepth", "8", "--verify", "crc32c"];
        let mut load = Process::spawn(program(folder, &words).stdout(Stdio::null()));
        assert!(load.ended().success(), "the verified writes");
        assert!((0..2).all(|path| paths()[path]["ios"].as_u64().unwrap() > 0), "a path is not used: {}", paths());
        // The daemon that takes over asks the services again.
        let new = Daemon::start(folder, &["--takeover", "c"]);
        let status = std::mem::replace(&mut daemon, new).process.ended();
        assert!(status.success(), "the old daemon ends with {status}");
    }
    daemon.stop();
    targets.into_iter().for_each(Daemon::stop);
}

#[test]
fn a_subsystem_that_no_service_names_is_refused_with_the_names_of_others() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    // It accepts connections and never answers. The service behind it in the log is asked all the same.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let (targets, _, service) = targets(folder, silent.local_addr().unwrap());
    // The second exists, and is shown to another host alone.
    for subsystem in ["nqn.2026-11.test:unknown", NQN] {
        let expected = format!("names no {subsystem}; it names {OTHER_NQN} to this host");
        let device = format!("nvme-discover://{service}/{subsystem}");
        let output = run(folder, &["serve", "--device", &device, "--export", "vhost-user-blk:s"]);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && error.contains(&expected), "{error}");
        assert!(error.contains("no discovery log within 5s") && error.contains("it is left out"), "{error}");
    }
    targets.into_iter().for_each(Daemon::stop);
}

#[test]
fn a_port_that_is_named_later_becomes_a_path() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let words = ["--control", "d", "--device", "ram:16M?share=on"];
    let exports = ["--export", "vhost-user-blk:d0?queues=4", "--export", "vhost-user-blk:d1?queues=4"];
    let disk = Daemon::start(folder, &[&words[..], &exports].concat());
    // Free ports of an address that no other process uses.
    let listeners = [0; 2].map(|_| TcpListener::bind((own_loopback(), 0)).unwrap());
    let addresses = listeners.map(|listener| listener.local_addr().unwrap());
    let port = |number: usize| {
        let (device, address) = (format!("vhost-user:d{number}"), addresses[number]);
        // The first controller identifier keeps those of the ports apart.
        let export = format!("nvme-tcp://{address}?nqn={NQN}&hosts={HOST}&controller_ids={}", 1 + 1000 * number);
        target(folder, &format!("t{number}"), &device, &[export]).0
    };
    let first = port(0);
    let export = format!("nvme-tcp://127.0.0.1:0?nqn={OTHER_NQN}&referrals={},{}", addresses[0], addresses[1]);
    let (service, services) = target(folder, "o", "null:1M", &[export]);
    let device = format!("nvme-discover://{}/{NQN}?host_nqn={HOST}&queues=1&policy=round-robin", services[0]);
    let device = format!("{device}&rediscover_s=1&reconnect_delay_s=1");
    let daemon = Daemon::start(folder, &["--control", "c", "--device", &device, "--export", "vhost-user-blk:s"]);
    let paths = || inspect(folder, &[])["devices"][0]["paths"].clone();
    let load = || {
        let words =
            ["bench", "vhost-user:s", "--rw", "randwrite", "--bs", "4k", "--iodepth", "8", "--verify", "crc32c"];
        assert!(Process::spawn(program(folder, &words).stdout(Stdio::null())).ended().success(), "the verified writes");
    };
    load();
    assert_eq!(paths().as_array().unwrap().len(), 1, "{}", paths());
    let second = port(1);
    wait_until("the new port is a path", || paths()[1]["state"] == "live");
    assert_eq!(paths()[1]["name"], format!("nvme-tcp://{}/{NQN}", addresses[1]));
    load();
    assert!((0..2).all(|path| paths()[path]["ios"].as_u64().unwrap() > 0), "a path is not used: {}", paths());
    // The later one is a path like any other.
    first.stop();
    wait_until("the first port is lost", || paths()[0]["state"] != "live");
    load();
    daemon.stop();
    [second, service, disk].into_iter().for_each(Daemon::stop);
}

#[test]
fn a_port_named_again_after_its_path_was_given_up_becomes_a_path() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let disk = ["--control", "d", "--device", "ram:16M?share=on", "--export", "vhost-user-blk:d0?queues=4"];
    let disk = Daemon::start(folder, &disk);
    // A free port of an address that no other process uses.
    let address = TcpListener::bind((own_loopback(), 0)).unwrap().local_addr().unwrap();
    let export = format!("nvme-tcp://{address}?nqn={NQN}&hosts={HOST}");
    let port = || target(folder, "t", "vhost-user:d0", std::slice::from_ref(&export)).0;
    let first = port();
    let service = format!("nvme-tcp://127.0.0.1:0?nqn={OTHER_NQN}&referrals={address}");
    let (service, services) = target(folder, "o", "null:1M", &[service]);
    let device = format!("nvme-discover://{}/{NQN}?host_nqn={HOST}&queues=1&no_path_s=600", services[0]);
    let device = format!("{device}&rediscover_s=1&reconnect_delay_s=1&ctrl_loss_s=1");
    let daemon = Daemon::start(folder, &["--control", "c", "--device", &device, "--export", "vhost-user-blk:s"]);
    let paths = || inspect(folder, &[])["devices"][0]["paths"].clone();
    first.stop();
    wait_until("the path is given up", || paths()[0]["state"] == "lost");
    let again = port();
    wait_until("the port is a path again", || paths()[1]["state"] == "live");
    assert_eq!(paths()[1]["name"], format!("nvme-tcp://{address}/{NQN}"));
    let words = ["bench", "vhost-user:s", "--rw", "randwrite", "--bs", "4k", "--iodepth", "8", "--verify", "crc32c"];
    assert!(Process::spawn(program(folder, &words).stdout(Stdio::null())).ended().success(), "the verified writes");
    daemon.stop();
    [again, service, disk].into_iter().for_each(Daemon::stop);
}

#[test]
fn disk_grows_although_one_of_its_paths_was_given_up() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::File::create(folder.join("image")).unwrap().set_len(16 << 20).unwrap();
    let words = ["--control", "d", "--device", "file:image?share=on"];
    let exports = ["--export", "vhost-user-blk:d0?queues=4", "--export", "vhost-user-blk:d1?queues=4"];
    let disk = Daemon::start(folder, &[&words[..], &exports].concat());
    let port = |number: usize| {
        let device = format!("vhost-user:d{number}");
        let export = format!("nvme-tcp://127.0.0.1:0?nqn={NQN}&controller_ids={}", 1 + 1000 * number);
        target(folder, &format!("t{number}"), &device, &[export])
    };
    let ((first, one), (second, other)) = (port(0), port(1));
    let paths = format!("nvme-tcp://{}/{NQN},nvme-tcp://{}/{NQN}", one[0], other[0]);
    let device = format!("multipath:{paths}?queues=1&reconnect_delay_s=1&ctrl_loss_s=1");
    let daemon = Daemon::start(folder, &["--control", "c", "--device", &device, "--export", "vhost-user-blk:s"]);
    let shown = || inspect(folder, &[])["devices"][0].clone();
    second.stop();
    wait_until("the path is given up", || shown()["paths"][1]["state"] == "lost");
    assert_eq!(shown()["size_bytes"], 16 << 20);
    succeed(folder, &["set", "--control", "d", "device:0", "size=32M"]);
    wait_until("the disk has grown", || shown()["size_bytes"] == 32 << 20);
    daemon.stop();
    [first, disk].into_iter().for_each(Daemon::stop);
}
