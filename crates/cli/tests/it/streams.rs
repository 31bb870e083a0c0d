//! Streams of guests that `fair` finds, on the model of a disk, in a daemon as a user starts it.

use std::path::Path;

use serde_json::Value;

use crate::common::{Daemon, inspect, succeed};

/// Comparisons of which one must show the difference.
const ROUNDS: usize = 5;

/// A daemon with a disk that has this scheduler, and an export of so many queues.
fn serve(folder: &Path, scheduler: &str, queues: usize) -> Daemon {
    let (device, export) =
        (format!("model:disk?size=20G&scheduler={scheduler}"), format!("vhost-user-blk:s?queues={queues}"));
    Daemon::start(folder, &["--control", "c", "--device", &device, "--export", &export])
}

/// Bytes that two sequential readers of 64 KiB read in three seconds through one queue.
fn read_by_two(scheduler: &str) -> u64 {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let _daemon = serve(folder, scheduler, 1);
    let load = ["bench", "vhost-user:s?queues=1", "--numjobs", "2", "--rw", "read", "--bs", "64k", "--iodepth", "1"];
    let report = succeed(folder, &[&load[..], &["--runtime", "3", "--output-format", "json"]].concat());
    let report: Value = serde_json::from_str(&report).unwrap();
    let jobs = report["jobs"].as_array().unwrap();
    if scheduler == "fair" {
        let tree = inspect(folder, &[]).to_string();
        assert!(tree.contains("sequence"), "{tree}");
    }
    jobs.iter().map(|job| job["read"]["io_bytes"].as_u64().unwrap()).sum()
}

#[test]
fn sequential_readers_on_one_queue_are_told_apart() {
    // Repeated while the machine is busy: as one stream they are as slow every time.
    let said = (0..ROUNDS).map(|_| {
        let [none, fair] = ["none", "fair"].map(read_by_two);
        (fair * 10 <= none * 13).then(|| format!("{fair} bytes with fair, {none} without"))
    });
    let slow: Vec<_> = said.map_while(|said| said).collect();
    assert!(slow.len() < ROUNDS, "{slow:?}");
}

/// Lets sequential readers, so many for each of two exports of the model of a disk, read for four seconds. Returns what
/// the exports have read.
fn read_by_exports(jobs: [usize; 2], options: [&str; 2], configure: impl Fn(&Path)) -> [u64; 2] {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let exports = [0, 1].map(|number: usize| format!("vhost-user-blk:{number}?queues=2{}", options[number]));
    let device = "model:disk?size=20G&scheduler=fair&share=on";
    let _daemon = Daemon::start(
        folder,
        &["--control", "c", "--device", device, "--export", &exports[0], "--export", &exports[1]],
    );
    configure(folder);
    std::thread::scope(|scope| {
        let read = |number: usize| {
            scope.spawn(move || {
                if jobs[number] == 0 {
                    return 0;
                }
                let (disk, jobs) = (format!("vhost-user:{number}?queues=2"), jobs[number].to_string());
                let load = ["bench", &disk, "--numjobs", &jobs, "--rw", "read", "--bs", "64k", "--iodepth", "4"];
                let report = succeed(folder, &[&load[..], &["--runtime", "4", "--output-format", "json"]].concat());
                let report: Value = serde_json::from_str(&report).unwrap();
                let jobs = report["jobs"].as_array().unwrap();
                jobs.iter().map(|job| job["read"]["io_bytes"].as_u64().unwrap()).sum::<u64>()
            })
        };
        [0, 1].map(read).map(|reader| reader.join().unwrap())
    })
}

#[test]
fn exports_of_a_disk_have_turns_by_their_weights() {
    let nothing = |_: &Path| ();
    let swap = |folder: &Path| {
        for (export, weight) in [("export:0", "300"), ("export:1", "100")] {
            let said = succeed(folder, &["set", "--control", "c", export, &format!("scheduler_weight={weight}")]);
            assert!(said.contains(&format!("its weight is {weight}")), "{said}");
        }
        let tree = inspect(folder, &[]);
        assert_eq!(tree["exports"][0]["weight"], 300);
    };
    let said = (0..ROUNDS).map(|_| {
        let one = read_by_exports([5, 0], [""; 2], nothing)[0];
        let alike = read_by_exports([2, 3], [""; 2], nothing);
        let weighted = read_by_exports([2, 3], ["", "&scheduler_weight=300"], nothing);
        let swapped = read_by_exports([2, 3], ["", "&scheduler_weight=300"], swap);
        let told = format!("{one} bytes by one, {alike:?} alike, {weighted:?} as 1 to 3, {swapped:?} as 3 to 1");
        println!("{told}");
        let percent = |read: [u64; 2]| read[0] * 100 / (read[0] + read[1]);
        let is_as_fast = (alike[0] + alike[1]) * 110 >= one * 100;
        let is_fair =
            [(alike, 50), (weighted, 25), (swapped, 75)].map(|(read, part)| percent(read).abs_diff(part) <= 7);
        (!is_as_fast || is_fair.contains(&false)).then_some(told)
    });
    let wrong: Vec<_> = said.map_while(|said| said).collect();
    assert!(wrong.len() < ROUNDS, "{wrong:?}");
}
