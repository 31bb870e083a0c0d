//! Queues of each kind over the transports of NVMe, to a daemon: reads have queues of their own, and submitters that
//! poll.

use std::path::Path;

use blkyard::{Bio, Disk, DiskConfig, Op, QueueCounts, Status};
use serde_json::Value;

use crate::common::{Daemon, inspect_at, run, succeed};
use crate::cross_reset::{NQN, two_ports};

/// A daemon with a RAM disk for each transport, and the names of the disk over them.
fn serve(folder: &Path) -> (Vec<Daemon>, [String; 3]) {
    let (tcp, addresses) = two_ports(folder, "ram:16M?share=on");
    let socket = "vfio-user:v?queues=16";
    let vfio = Daemon::start(folder, &["--control", "v.c", "--device", "ram:16M", "--export", socket]);
    let [one, other] = addresses.map(|address| format!("nvme-tcp://{address}/{NQN}"));
    let names = [one.clone(), format!("multipath:{one},{other}?policy=round-robin"), "vfio-user:v".into()];
    (vec![tcp, vfio], names)
}

/// I/Os of each queue of all exports so far: reads and writes.
fn ios(folder: &Path, control: &str) -> Vec<[u64; 2]> {
    let tree = inspect_at(folder, control, &[]);
    let queues = tree["exports"].as_array().unwrap().iter().flat_map(|export| export["queues"].as_array().unwrap());
    let count = |queue: &Value, op: &str| queue["ops"][op]["ios"].as_u64().unwrap_or(0);
    queues.map(|queue| ["read", "write"].map(|op| count(queue, op))).collect()
}

/// The control socket of the daemon that serves the disk of this name.
fn control_of(name: &str) -> &'static str {
    if name.starts_with("vfio") { "v.c" } else { "c" }
}

/// I/Os of each queue that had some meanwhile.
fn during(folder: &Path, name: &str, work: impl FnOnce()) -> Vec<[u64; 2]> {
    let before = ios(folder, control_of(name));
    work();
    let after = ios(folder, control_of(name));
    let new = after.iter().enumerate().map(|(queue, [read, write])| {
        let [old_read, old_write] = before.get(queue).copied().unwrap_or_default();
        [read - old_read, write - old_write]
    });
    new.filter(|ios| *ios != [0; 2]).collect()
}

fn bench(folder: &Path, name: &str, words: &[&str]) -> Value {
    let load = ["--bs", "4k", "--iodepth", "8", "--numjobs", "2", "--runtime", "1", "--output-format", "json"];
    let report = succeed(folder, &[&["bench", name], &load[..], words].concat());
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["jobs"][0]["total_err"], 0, "{report:#}");
    report
}

#[test]
fn reads_have_queues_of_their_own_over_each_transport() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (daemons, names) = serve(folder);
    for name in &names {
        let queues = during(folder, name, || {
            bench(folder, name, &["--rw", "randrw", "--queues", "2", "--read_queues", "2"]);
        });
        let (reads, writes): (Vec<[u64; 2]>, Vec<[u64; 2]>) = queues.iter().partition(|[_, writes]| *writes == 0);
        // Two queues of each kind at a port; a device over two paths has them at both.
        let each = if name.starts_with("multipath") { 4 } else { 2 };
        assert_eq!((reads.len(), writes.len()), (each, each), "{name}: {queues:?}");
        assert!(writes.iter().all(|[reads, _]| *reads == 0), "{name}: {queues:?}");
    }
    // No more than asked for.
    let refused = run(
        folder,
        &[
            "bench",
            &format!("{}?read_queues=0", names[0]),
            "--rw",
            "randread",
            "--numjobs",
            "4",
            "--queues",
            "2",
            "--read_queues",
            "2",
            "--runtime",
            "1",
        ],
    );
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && error.contains("queues"), "{error}");
    daemons.into_iter().for_each(Daemon::stop);
}

#[test]
fn polled_io_has_queues_of_its_own_over_each_transport() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (daemons, names) = serve(folder);
    for name in &names {
        let words = ["--rw", "randrw", "--queues", "2", "--hipri", "--poll_queues", "1"];
        let queues = during(folder, name, || {
            let report = bench(folder, name, &words);
            assert_eq!(report["jobs"][0]["job options"]["poll_queues"], "1", "{report:#}");
        });
        let each = if name.starts_with("multipath") { 2 } else { 1 };
        assert!(queues.len() == each && queues.iter().flatten().all(|ios| *ios > 0), "{name}: {queues:?}");
        // All three kinds at once.
        bench(folder, name, &["--rw", "randrw", "--hipri", "--poll_queues", "1", "--read_queues", "1"]);
    }
    daemons.into_iter().for_each(Daemon::stop);
}

#[test]
fn a_program_has_read_queues_over_each_transport() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (daemons, names) = serve(folder);
    for name in &names {
        let path = name.replace("vfio-user:v", &format!("vfio-user:{}/v", folder.display()));
        let queues = during(folder, name, || {
            let config = DiskConfig {
                threads: 1,
                depth: 2,
                buffer_bytes: 4096,
                queues: QueueCounts { default: 1, read: 1, poll: 1 },
            };
            let mut disk = Disk::open(&path, config).unwrap();
            let kinds: Vec<_> = disk.queues().stats().into_iter().map(|(kind, _)| kind.name()).collect();
            assert_eq!(kinds, ["default", "read", "poll"], "{name}");
            disk.run(|queue| {
                for (op, polled) in [(Op::Write, false), (Op::Read, false), (Op::Read, true)] {
                    let mut bio = Bio::with_capacity(1);
                    (bio.op, bio.sectors) = (op, 8);
                    bio.segments.push(queue.buffer(0, 4096));
                    if polled {
                        bio.flags |= blkyard::BioFlags::POLLED;
                    }
                    if op == Op::Write {
                        queue.data(bio.segments[0]).fill(7);
                    }
                    queue.submit(bio);
                    let mut ended = Vec::new();
                    while queue.wait(|bio| ended.push(bio)) > 0 {}
                    let mut bytes = [0; 4096];
                    queue.data(ended[0].segments[0]).copy_to_slice(&mut bytes);
                    assert!(ended[0].status == Status::Ok && bytes == [7; 4096], "{name}: {op:?}");
                }
            });
        });
        let mut queues = queues;
        queues.sort_unstable();
        assert_eq!(queues, [[0, 1], [1, 0], [1, 0]], "{name}");
    }
    daemons.into_iter().for_each(Daemon::stop);
}
