//! Exports of NVMe over vfio-user, in a daemon as a user starts it: beside exports of vhost-user-blk, changed under
//! I/O, with clients that are killed, hang or send garbage.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use blkyard_wire::vfio_user::{VERSION, VfioCapabilities, VfioRequest, VfioVersion};
use rustix::process::Signal;
use serde_json::Value;

use crate::common::{Daemon, Process, Stop, inspect, program, run, succeed, wait_until};
use crate::guest::Guest;
use crate::nvme_guest::{NvmeGuest, NvmeLoad};

/// Set in the process of a client that is to be killed: its socket.
const VICTIM: &str = "BLKYARD_TEST_VICTIM";
/// Time within which a daemon ends although clients hang: a drain may take 30 s.
const END_TIME: Duration = Duration::from_secs(30);

/// A daemon with these words and a control socket at `c`; ready.
fn serve(folder: &Path, words: &[&str]) -> Daemon {
    Daemon::start(folder, &[&["--control", "c"], words].concat())
}

fn set(folder: &Path, words: &[&str]) -> String {
    succeed(folder, &[&["set", "--control", "c"], words].concat())
}

fn export(folder: &Path, number: usize) -> Value {
    inspect(folder, &[])["exports"][number].clone()
}

/// The lane of each queue of an export.
fn lanes(folder: &Path, number: usize) -> Vec<u64> {
    export(folder, number)["queues"].as_array().unwrap().iter().map(|queue| queue["lane"].as_u64().unwrap()).collect()
}

fn wait_for_no_client(folder: &Path, number: usize) {
    wait_until("the client is gone", || export(folder, number)["session"].is_null());
}

#[test]
fn both_protocols_serve_one_disk() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let nvme = "vfio-user:n?queues=3&serial=shared-disk";
    let daemon = serve(
        folder,
        &["--device", "ram:64M?share=on", "--export", nvme, "--export", "vhost-user-blk:v?queues=2", "--lanes", "2"],
    );
    assert_eq!((lanes(folder, 0), lanes(folder, 1)), (vec![0, 0, 1], vec![1, 0]), "one rule for all");
    let mut virtio = Guest::connect(&folder.join("v"), 2);
    for has_shadow in [false, true] {
        let mut nvme = NvmeGuest::connect(&folder.join("n"), 8, has_shadow);
        assert_eq!((nvme.queues(), nvme.sectors(), nvme.serial().as_str()), (3, 131_072, "shared-disk"));
        for seed in 0..20 {
            nvme.check(seed);
            virtio.check_all(seed.into());
        }
        nvme.write(77);
        nvme.flush();
        let tree = inspect(folder, &[]);
        let session = &tree["exports"][0]["session"];
        assert_eq!(session["io_queues"], 3, "{session}");
        assert!(session["memory_bytes"].as_u64().unwrap() >= 256 << 10, "{session}");
        let queues = tree["exports"][0]["queues"].as_array().unwrap();
        for queue in queues {
            assert_eq!(queue["now"]["state"], "running", "{queue:#}");
            assert!(queue["ops"]["write"]["ios"].as_u64().unwrap() > 0, "{queue:#}");
        }
        assert!(succeed(folder, &["inspect", "--control", "c"]).contains("I/O queues created: 3"));
        drop(nvme);
        wait_for_no_client(folder, 0);
    }
    // What one client wrote is read by the next, with another number of queues.
    NvmeGuest::connect(&folder.join("n"), 1, true).verify(77);
    drop(virtio);
    let greeting = daemon.greeting.join("\n");
    assert!(greeting.contains(r#"-device '{"driver":"vfio-user-pci","#), "{greeting}");
    daemon.stop();
    assert!(!folder.join("n").exists(), "a socket is left behind");
}

#[test]
fn doorbells_in_shared_memory_are_polled() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let daemon =
        serve(folder, &["--device", "ram:64M", "--export", "vfio-user:n?queues=2&doorbells=shared&pci_id=1234:abcd"]);
    let mut guest = NvmeGuest::connect(&folder.join("n"), 2, true);
    assert!(guest.has_shared_doorbells());
    for seed in 0..20 {
        guest.check(seed);
    }
    std::thread::sleep(Duration::from_millis(100));
    guest.check(20);
    drop(guest);
    daemon.stop();
    for (option, why) in [
        ("vfio-user:n?doorbells=polled", "give message or shared"),
        ("vfio-user:n?pci_id=4e58:+001", "give VENDOR:DEVICE"),
        ("vfio-user:n?pci_id=4e58", "give VENDOR:DEVICE"),
        ("vhost-user-blk:n?doorbells=shared", "doorbells"),
    ] {
        let refused = run(folder, &["serve", "--device", "ram:64M", "--export", option]);
        let said = String::from_utf8(refused.stderr).unwrap();
        assert!(!refused.status.success() && said.contains(why), "{option}: {said}");
    }
}

#[test]
fn settings_change_under_nvme_io() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::File::create(folder.join("disk.img")).unwrap().set_len(64 << 20).unwrap();
    let daemon = serve(
        folder,
        &["--device", "file:disk.img", "--export", "vfio-user:n?queues=4", "--lanes", "2", "--stats", "1"],
    );
    let load = NvmeLoad::start(folder.join("n"), 4);
    let held = || {
        let queues = export(folder, 0)["queues"].as_array().unwrap().clone();
        queues.iter().map(|queue| queue["counters"]["held"].as_u64().unwrap()).sum::<u64>()
    };
    for (words, said) in [
        (["daemon", "lanes=1"], "2 queues moved"),
        (["daemon", "lanes=4"], "3 queues moved"),
        (["device:0", "scheduler=fair"], "scheduler fair orders waiting I/O"),
        (["daemon", "lanes=2"], "2 now"),
        (["device:0", "scheduler=none"], "scheduler none"),
        (["export:0", "depth=2"], "at most 2 requests in flight"),
        (["export:0", "iops_max=50"], "vfio-user:n"),
        (["export:0", "iops_max=off"], "vfio-user:n"),
        (["device:0", "bytes_per_s_max=40M"], "limited to bytes_per_s_max="),
        (["device:0", "bytes_per_s_max=off"], "device:0"),
        (["device:0", "sectors_max=64"], "its front-end was notified"),
        (["device:0", "size=128M"], "its front-end was notified"),
        (["export:0", "queues=6"], "2 of them new, from the next front-end on"),
    ] {
        let answer = set(folder, &words);
        assert!(answer.contains(said), "{words:?}: {answer}");
        load.wait_for_rounds(3);
        if words[1] == "iops_max=50" {
            // On a busy machine the load itself may be slower than the limit for a while.
            wait_until("the limit holds requests back", || held() > 0);
        }
    }
    assert_eq!(lanes(folder, 0)[..4], [0, 0, 1, 1]);
    wait_until("a line of statistics", || {
        let line = daemon.next_line();
        line.contains("vfio-user:n: write ") && line.contains(" IOPS ")
    });
    let mut guest = load.stop();
    guest.wait_for_sectors(256 << 10);
    drop(guest);
    let mut guest = NvmeGuest::connect(&folder.join("n"), 8, true);
    assert_eq!((guest.queues(), guest.sectors()), (6, 256 << 10));
    guest.check(1);
    drop(guest);
    wait_for_no_client(folder, 0);
    for (words, why) in [(["export:0", "queues=65"], "64"), (["export:0", "depth=0"], "depth")] {
        let refused = run(folder, &[&["set", "--control", "c"], &words[..]].concat());
        let said = String::from_utf8(refused.stderr).unwrap();
        assert!(!refused.status.success() && said.contains(why), "{words:?}: {said}");
    }
    daemon.stop();
}

#[test]
fn disk_that_another_process_serves_is_an_nvme_disk() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let back_end = ["--device", "ram:64M", "--export", "vhost-user-blk:disk?queues=2", "--control", "d"];
    let back_end = Daemon::start(folder, &back_end);
    // Its bounded number of queues is shared by both exports.
    let exports = ["--export", "vfio-user:n?queues=3", "--export", "vhost-user-blk:v?queues=1"];
    let device = ["serve", "--control", "c", "--device", "vhost-user:disk?queues=2&share=on"];
    let mut command = program(folder, &[&device, &exports[..], &["--lanes", "2"]].concat());
    let daemon = Daemon::launch(command.stderr(std::fs::File::create(folder.join("log")).unwrap()));
    let load = NvmeLoad::start(folder.join("n"), 3);
    Guest::connect(&folder.join("v"), 1).check(0, 1000, 3);
    for lanes in ["lanes=1", "lanes=3", "lanes=2"] {
        set(folder, &["daemon", lanes]);
        load.wait_for_rounds(3);
    }
    let mut guest = load.stop();
    guest.write(7);
    guest.flush();
    guest.die();
    NvmeGuest::connect(&folder.join("n"), 1, true).verify(7);
    daemon.stop();
    back_end.stop();
    let log = std::fs::read_to_string(folder.join("log")).unwrap();
    assert!(!log.contains("ERROR"), "such as memory that the other process cannot map:\n{log}");
}

/// The process of a client that is killed; otherwise not a test.
#[test]
fn victim() {
    let Some(socket) = std::env::var_os(VICTIM) else { return };
    let mut guest = NvmeGuest::connect(Path::new(&socket), 3, true);
    guest.begin_reads();
    std::thread::sleep(Duration::from_mins(10));
}

#[test]
fn client_killed_with_io_in_flight_is_followed_by_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let daemon = serve(folder, &["--device", "ram:64M?latency_us=400000", "--export", "vfio-user:n?queues=3"]);
    NvmeGuest::connect(&folder.join("n"), 3, true).write(5);
    for sessions in [2, 4] {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "nvme_exports::victim"]).env(VICTIM, folder.join("n")).stdout(Stdio::null());
        let mut victim = Process::spawn(&mut command);
        let in_flight = |queue: &Value| queue["now"]["chains"].as_u64().unwrap_or(0);
        wait_until("requests are in flight", || {
            assert!(victim.is_running());
            let export = export(folder, 0);
            export["sessions"] == sessions
                && export["queues"].as_array().unwrap().iter().map(in_flight).sum::<u64>() > 10
        });
        victim.signal(Signal::KILL);
        victim.ended();
        NvmeGuest::connect(&folder.join("n"), 3, true).verify(5);
    }
    wait_for_no_client(folder, 0);
    assert_eq!(export(folder, 0)["sessions"], 5);
    daemon.stop();
}

/// Pseudo-random bytes.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(|_| next()).collect()
}

fn version() -> Vec<u8> {
    let capabilities = VfioCapabilities::default();
    VfioRequest::Version(VfioVersion { major: VERSION.0, minor: VERSION.1, capabilities }).encode(1, false)
}

/// A command with a valid header and any payload.
fn message(command: u16, payload: &[u8]) -> Vec<u8> {
    let size = 16 + payload.len() as u32;
    [&7_u16.to_le_bytes()[..], &command.to_le_bytes(), &size.to_le_bytes(), &[0; 8], payload].concat()
}

#[test]
fn client_that_sends_garbage_costs_no_other_an_io() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let share = ["--device", "ram:64M?share=on"];
    let exports = ["--export", "vfio-user:n?queues=2", "--export", "vfio-user:m?queues=2", "--export"];
    let words = [&share[..], &exports, &["vhost-user-blk:v?queues=2", "--lanes", "2"]].concat();
    let daemon = serve(folder, &words);
    let load = NvmeLoad::start(folder.join("m"), 2);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = Stop(&is_over);
        scope.spawn(|| {
            let mut virtio = Guest::connect(&folder.join("v"), 2);
            for seed in 0.. {
                // Behind the blocks of the other clients.
                (0..2).for_each(|queue| virtio.check(queue, 1000 + queue as u64, seed));
                if is_over.load(Relaxed) {
                    break;
                }
            }
        });
        for seed in 0..200 {
            let mut client = UnixStream::connect(folder.join("n")).unwrap();
            // The daemon may close the connection at any time.
            let mut send = |bytes: &[u8]| drop(client.write_all(bytes));
            match seed % 4 {
                0 => send(&noise(seed, 4096)),
                1 => send(&version()[..17]),
                2 => {
                    send(&version());
                    (1..20).for_each(|command| send(&message(command, &noise(seed + u64::from(command), 64))));
                }
                _ => {
                    send(&version());
                    // Writes of all registers, among them the doorbells and the controller's configuration.
                    for offset in (0..0x1100_u64).step_by(4) {
                        let value = noise(seed + offset, 4);
                        let access = [&offset.to_le_bytes()[..], &0_u32.to_le_bytes(), &4_u32.to_le_bytes(), &value];
                        send(&message(10, &access.concat()));
                    }
                }
            }
            if seed % 8 >= 4 {
                client.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
                let _ = client.read(&mut [0; 4096]);
            }
        }
        load.wait_for_rounds(3);
    });
    drop(load.stop());
    NvmeGuest::connect(&folder.join("n"), 2, true).check(9);
    daemon.stop();
}

#[test]
fn sigterm_ends_the_daemon_while_clients_hang() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let device = "ram:64M?share=on&latency_us=300000";
    let exports = ["a", "b", "c1", "d"].map(|socket| format!("vfio-user:{socket}?queues=2"));
    let mut words = vec!["--device", device];
    exports.iter().for_each(|export| words.extend(["--export", export]));
    let mut daemon = serve(folder, &words);
    // Half a message; commands whose replies are never read; a controller with requests in flight that is not run.
    let mut half = UnixStream::connect(folder.join("a")).unwrap();
    half.write_all(&version()[..20]).unwrap();
    let mut deaf = UnixStream::connect(folder.join("b")).unwrap();
    deaf.write_all(&version()).unwrap();
    deaf.set_nonblocking(true).unwrap();
    let begin = Instant::now();
    while deaf.write(&message(4, &[16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])).is_ok() {
        assert!(begin.elapsed() < END_TIME, "the daemon reads commands without limit");
    }
    let mut stuck = NvmeGuest::connect(&folder.join("c1"), 2, true);
    stuck.begin_reads();
    let _silent = UnixStream::connect(folder.join("d")).unwrap();
    daemon.signal(Signal::TERM);
    let status = daemon.process.ended_within(END_TIME).expect("it does not end");
    assert!(status.success(), "{status}");
    assert!(!folder.join("a").exists() && !folder.join("d").exists(), "a socket is left behind");
    stuck.die();
}

#[test]
fn restarted_daemon_has_what_was_written() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::File::create(folder.join("disk.img")).unwrap().set_len(64 << 20).unwrap();
    let words = ["--device", "file:disk.img", "--export", "vfio-user:n?queues=2"];
    let mut daemon = serve(folder, &words);
    let mut guest = NvmeGuest::connect(&folder.join("n"), 2, true);
    guest.write(40);
    guest.begin_reads();
    daemon.signal(Signal::KILL);
    daemon.process.ended();
    guest.die();
    let daemon = serve(folder, &words);
    NvmeGuest::connect(&folder.join("n"), 2, true).verify(40);
    daemon.stop();
}
