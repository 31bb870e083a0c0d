//! `serve --takeover` under clients of NVMe exports: they continue with the next daemon.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use blkyard_wire::vfio_user::{VERSION, VfioCapabilities, VfioRequest, VfioVersion};

use crate::common::{Daemon, PATIENCE, Stop, inspect, succeed, wait_until};
use crate::guest::Guest;
use crate::nvme_guest::{NvmeGuest, NvmeLoad};

/// A daemon with an image, these exports and the control socket `c`.
fn serve_image(folder: &Path, exports: &[&str]) -> Daemon {
    std::fs::File::create(folder.join("disk.img")).unwrap().set_len(64 << 20).unwrap();
    let mut words = vec!["--device", "file:disk.img?share=on", "--control", "c", "--lanes", "2"];
    exports.iter().for_each(|export| words.extend(["--export", export]));
    Daemon::start(folder, &words)
}

/// Replaces a daemon, which must end with success. Returns the length of the pause, ms, as the new daemon reports it.
pub fn replace(folder: &Path, old: &mut Daemon) -> f64 {
    let new = Daemon::start(folder, &["--takeover", "c"]);
    let line = new.greeting.iter().find_map(|line| line.strip_prefix("took over: guests were paused for "));
    let pause = line.expect("the new daemon reports the pause").split(' ').next().unwrap().parse().unwrap();
    let status = std::mem::replace(old, new).process.ended();
    assert!(status.success(), "the old daemon ends with {status}");
    pause
}

/// Asks for a takeover, and leaves once everything has come, in which `words` must be.
pub fn take_and_leave(folder: &Path, words: &str) {
    let mut stream = UnixStream::connect(folder.join("c")).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(b"{\"blkyard\":1,\"do\":\"takeover\",\"version\":2}\n").unwrap();
    let mut handover = String::new();
    BufReader::new(&stream).read_line(&mut handover).unwrap();
    assert!(handover.contains(words), "{words} is not handed over: {handover}");
}

fn session(folder: &Path) -> serde_json::Value {
    inspect(folder, &[])["exports"][0]["session"].clone()
}

#[test]
fn nvme_clients_continue_through_takeovers_under_load() {
    const TAKEOVERS: usize = 8;
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let exports =
        ["vfio-user:n?queues=3", "vfio-user:m?queues=2&doorbells=shared&serial=m", "vhost-user-blk:v?queues=2"];
    let mut daemon = serve_image(folder, &exports);
    let load = NvmeLoad::start(folder.join("n"), 3);
    let before = session(folder);
    let mut pauses = vec![];
    for takeover in 0..TAKEOVERS {
        load.wait_for_rounds(2);
        pauses.push(replace(folder, &mut daemon));
        assert_eq!(session(folder), before, "takeover {takeover}");
    }
    load.wait_for_rounds(3);
    let longest = pauses.iter().copied().fold(0.0, f64::max);
    println!("doorbells by message: guests were paused for {pauses:?} ms, {longest} ms at most");
    let mut guest = load.stop();
    guest.write(90);
    drop(guest);
    wait_until("the client is gone", || session(folder).is_null());
    // The next client finds the controller as each first one does.
    let mut guest = NvmeGuest::connect(&folder.join("n"), 8, false);
    assert_eq!(guest.queues(), 3);
    guest.verify(90);
    // Doorbells in memory that the client maps, and no shadow doorbells.
    let mut shared = NvmeGuest::connect(&folder.join("m"), 2, true);
    assert!(shared.has_shared_doorbells());
    let mut virtio = Guest::connect(&folder.join("v"), 2);
    for seed in 0..4 {
        replace(folder, &mut daemon);
        shared.check(seed);
        guest.check(seed + 10);
        virtio.check_all(seed.into());
    }
    drop((guest, shared, virtio));
    daemon.stop();
    assert!(!folder.join("n").exists() && !folder.join("m").exists(), "a socket is left behind");
}

#[test]
fn namespaces_of_a_controller_continue_through_takeovers() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for (name, bytes) in [("a.img", 64 << 20), ("b.img", 32 << 20)] {
        std::fs::File::create(folder.join(name)).unwrap().set_len(bytes).unwrap();
    }
    let first = ["--device", "a.img?share=on", "--export", "vhost-user-blk:w", "--export", "vfio-user:n?queues=3"];
    let second = ["--device", "b.img?share=on", "--export", "vfio-user:./n?namespace=7", "--export", "vfio-user:m"];
    let mut daemon = Daemon::start(
        folder,
        &[&["--control", "c", "--lanes", "2"], &first[..], &second, &["--export", "vhost-user-blk:v"]].concat(),
    );
    let exports = || {
        let exports = inspect(folder, &[])["exports"].as_array().unwrap().clone();
        let parts = |export: &serde_json::Value| {
            let namespaces = export["namespaces"].as_array().into_iter().flatten();
            let nsids: Vec<_> = namespaces.map(|namespace| namespace["nsid"].clone()).collect();
            (export["name"].clone(), export["device"].clone(), nsids)
        };
        exports.iter().map(parts).collect::<Vec<_>>()
    };
    let before = exports();
    assert_eq!(before.len(), 4, "{before:?}");
    let mut guest = NvmeGuest::connect(&folder.join("n"), 3, true);
    assert_eq!(guest.namespaces(), 2);
    let mut virtio = Guest::connect(&folder.join("v"), 1);
    for round in 0..4 {
        for namespace in 0..2 {
            guest.select(namespace);
            guest.write(10 * round + namespace as u8);
        }
        replace(folder, &mut daemon);
        assert_eq!(exports(), before);
        for namespace in 0..2 {
            guest.select(namespace);
            guest.verify(10 * round + namespace as u8);
        }
        virtio.check(0, 1000, round.into());
    }
    // Settings reach the namespace of their device.
    succeed(folder, &["set", "--control", "c", "device:1", "size=48M"]);
    guest.wait_for_sectors(96 << 10);
    guest.select(0);
    assert_eq!(guest.sectors(), 128 << 10);
    drop(guest);
    // Without a client, too.
    replace(folder, &mut daemon);
    let mut guest = NvmeGuest::connect(&folder.join("n"), 1, true);
    guest.verify(30);
    guest.select(1);
    guest.verify(31);
    drop((guest, virtio));
    daemon.stop();
}

#[test]
fn size_change_after_a_takeover_reaches_the_nvme_host() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut daemon = serve_image(folder, &["vfio-user:n?queues=2"]);
    let mut guest = NvmeGuest::connect(&folder.join("n"), 2, true);
    guest.check(1);
    replace(folder, &mut daemon);
    // An event request that the first daemon has taken.
    succeed(folder, &["set", "--control", "c", "device:0", "size=128M"]);
    guest.wait_for_sectors(256 << 10);
    replace(folder, &mut daemon);
    guest.check(2);
    succeed(folder, &["set", "--control", "c", "device:0", "size=192M"]);
    guest.wait_for_sectors(384 << 10);
    guest.check(3);
    drop(guest);
    daemon.stop();
}

#[test]
fn takeovers_succeed_while_nvme_clients_come_and_go() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut daemon = serve_image(folder, &["vfio-user:n?queues=2", "vhost-user-blk:v?queues=2"]);
    let (is_over, clients, checks) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let _stop = Stop(&is_over);
        scope.spawn(|| {
            while !is_over.load(Relaxed) {
                let mut guest = NvmeGuest::connect(&folder.join("n"), 2, true);
                guest.check(clients.fetch_add(1, Relaxed) as u8);
            }
        });
        scope.spawn(|| {
            let mut virtio = Guest::connect(&folder.join("v"), 2);
            while !is_over.load(Relaxed) {
                virtio.check(1, 1000, checks.fetch_add(1, Relaxed));
            }
        });
        let wait = |count: &AtomicU64, more: u64| {
            let wanted = count.load(Relaxed) + more;
            wait_until("clients work", || count.load(Relaxed) >= wanted);
        };
        wait(&clients, 1);
        for _ in 0..8 {
            replace(folder, &mut daemon);
            wait(&checks, 1);
            // Those of one takeover: the next one looks at each doorbell again, and would hide a lost one.
            wait(&clients, 2);
        }
    });
    daemon.stop();
}

#[test]
fn message_in_the_middle_is_finished_by_the_next_daemon() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut daemon = serve_image(folder, &["vfio-user:n?queues=2"]);
    let version = VfioVersion { major: VERSION.0, minor: VERSION.1, capabilities: VfioCapabilities::default() };
    let version = VfioRequest::Version(version).encode(1, false);
    // Reads CAP and VS.
    let access = [&0_u64.to_le_bytes()[..], &0_u32.to_le_bytes(), &8_u32.to_le_bytes()].concat();
    let read = [&7_u16.to_le_bytes()[..], &9_u16.to_le_bytes(), &32_u32.to_le_bytes(), &[0; 8], &access].concat();
    let mut client = UnixStream::connect(folder.join("n")).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    wait_until("the client is accepted", || !session(folder).is_null());
    for (message, id) in [(version, 1), (read, 7)] {
        // In the header, and behind it.
        for (from, to) in [(0, 10), (10, 20), (20, message.len())] {
            client.write_all(&message[from..to]).unwrap();
            std::thread::sleep(Duration::from_millis(20));
            replace(folder, &mut daemon);
        }
        let mut header = [0; 16];
        client.read_exact(&mut header).unwrap();
        assert_eq!(u16::from_le_bytes([header[0], header[1]]), id);
        assert_eq!(header[8] & 0x2f, 1, "a reply without an error: {header:?}");
        let bytes = u32::from_le_bytes(header[4..8].try_into().unwrap()) as usize;
        client.read_exact(&mut vec![0; bytes - 16]).unwrap();
    }
    drop(client);
    NvmeGuest::connect(&folder.join("n"), 2, true).check(1);
    daemon.stop();
}

#[test]
fn nvme_clients_continue_after_a_failed_takeover() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut daemon = serve_image(folder, &["vfio-user:n?queues=2"]);
    let load = NvmeLoad::start(folder.join("n"), 2);
    for _ in 0..4 {
        take_and_leave(folder, "\"nvme\":{\"files\":");
        load.wait_for_rounds(3);
    }
    assert!(daemon.is_running(), "the old daemon has ended");
    replace(folder, &mut daemon);
    load.wait_for_rounds(3);
    drop(load.stop());
    daemon.stop();
}
