//! A controller with several namespaces, in a daemon as a user starts it.

use std::path::Path;

use rustix::process::Signal;

use crate::common::{Daemon, inspect, run, succeed};
use crate::nvme_guest::NvmeGuest;

fn serve(folder: &Path, words: &[&str]) -> Daemon {
    Daemon::start(folder, &[&["--control", "c"], words].concat())
}

fn set(folder: &Path, words: &[&str]) -> String {
    succeed(folder, &[&["set", "--control", "c"], words].concat())
}

fn image(folder: &Path, name: &str, bytes: u64) {
    std::fs::File::create(folder.join(name)).unwrap().set_len(bytes).unwrap();
}

const TWO: [&str; 8] = [
    "--device",
    "a.img",
    "--export",
    "vfio-user:n?queues=3&serial=both",
    "--device",
    "b.img",
    "--export",
    "vfio-user:n",
];

#[test]
fn two_files_are_namespaces_of_one_controller() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    image(folder, "a.img", 64 << 20);
    image(folder, "b.img", 32 << 20);
    let daemon = serve(folder, &[&TWO[..], &["--lanes", "2"]].concat());
    let greeting = daemon.greeting.join("\n");
    assert!(greeting.contains("namespace 2: b.img: 32 MiB"), "{greeting}");
    for has_shadow in [false, true] {
        let mut guest = NvmeGuest::connect(&folder.join("n"), 3, has_shadow);
        assert_eq!((guest.queues(), guest.namespaces(), guest.serial().as_str()), (3, 2, "both"));
        for (namespace, sectors) in [(0, 131_072), (1, 65_536)] {
            guest.select(namespace);
            assert_eq!(guest.sectors(), sectors);
        }
        for seed in 0..10 {
            for namespace in 0..2 {
                guest.select(namespace);
                guest.write(seed + 100 * namespace as u8);
            }
            for namespace in 0..2 {
                guest.select(namespace);
                guest.verify(seed + 100 * namespace as u8);
                guest.flush();
            }
        }
        let tree = inspect(folder, &[]);
        for (index, namespace) in tree["exports"][0]["namespaces"].as_array().unwrap().iter().enumerate() {
            assert_eq!(
                (namespace["nsid"].as_u64(), namespace["device"].as_u64()),
                (Some(index as u64 + 1), Some(index as u64))
            );
            assert!(namespace["ops"]["write"]["ios"].as_u64().unwrap() > 0, "{namespace:#}");
        }
        let text = succeed(folder, &["inspect", "--control", "c"]);
        assert!(text.contains("of devices 0, 1") && text.contains("namespace 2: device 1"), "{text}");
    }
    // Every setting reaches the namespace of its device, and moves happen under both.
    let mut guest = NvmeGuest::connect(&folder.join("n"), 3, true);
    for words in [
        ["device:1", "size=48M"],
        ["device:1", "scheduler=fair"],
        ["device:0", "iops_max=2000"],
        ["device:1", "scheduler=none"],
        ["export:0", "depth=4"],
        ["daemon", "lanes=1"],
        ["daemon", "lanes=3"],
    ] {
        set(folder, &words);
        for namespace in 0..2 {
            guest.select(namespace);
            guest.check(7 + namespace as u8);
        }
    }
    guest.select(1);
    guest.wait_for_sectors(98_304);
    guest.select(0);
    assert_eq!(guest.sectors(), 131_072, "the other namespace keeps its size");
    guest.check(50);
    drop(guest);
    daemon.stop();
    // The data are in the files, each where it belongs.
    let daemon = serve(
        folder,
        &["--device", "b.img", "--export", "vfio-user:n", "--device", "a.img", "--export", "vfio-user:n?namespace=5"],
    );
    let mut guest = NvmeGuest::connect(&folder.join("n"), 1, true);
    guest.verify(8);
    guest.select(1);
    guest.verify(50);
    drop(guest);
    daemon.stop();
}

#[test]
fn device_that_hangs_stops_its_own_namespace_only() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    image(folder, "a.img", 64 << 20);
    let back_end =
        Daemon::start(folder, &["--control", "d", "--device", "ram:64M", "--export", "vhost-user-blk:b?queues=2"]);
    let first = ["--device", "a.img", "--export", "vfio-user:n?queues=2"];
    let daemon =
        serve(folder, &[&first[..], &["--device", "vhost-user:b?queues=2", "--export", "vfio-user:n"]].concat());
    let mut guest = NvmeGuest::connect(&folder.join("n"), 2, true);
    for namespace in 0..2 {
        guest.select(namespace);
        guest.check(1 + namespace as u8);
    }
    back_end.hang();
    guest.begin_some_reads(8);
    guest.select(0);
    for seed in 10..20 {
        guest.check(seed);
    }
    guest.select(1);
    assert_eq!(guest.in_flight(), 8, "the other device hangs");
    back_end.signal(Signal::CONT);
    guest.finish_all();
    guest.verify(2);
    drop(guest);
    daemon.stop();
    back_end.stop();
}

#[test]
fn namespaces_that_cannot_be_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for (first, second, why) in [
        ("vfio-user:n", "vfio-user:n?queues=2", "at the first export"),
        ("vfio-user:n?namespace=3", "vfio-user:n?namespace=3", "is not free"),
        ("vfio-user:n?namespace=1024", "vfio-user:n", "is not free"),
        ("vfio-user:n?namespace=0", "vfio-user:n", "namespace"),
        ("vhost-user-blk:n?namespace=1", "vhost-user-blk:m", "unknown key 'namespace'"),
    ] {
        let words = ["serve", "--device", "ram:1M", "--export", first, "--device", "ram:2M", "--export", second];
        let refused = run(folder, &words);
        let said = String::from_utf8(refused.stderr).unwrap();
        assert!(!refused.status.success() && said.contains(why), "{first} {second}: {said}");
    }
    let words = ["serve", "--device", "ram:1M?share=on", "--export", "vfio-user:n", "--export", "vfio-user:./n"];
    let refused = run(folder, &words);
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && said.contains("of this controller already"), "{said}");
}

#[test]
fn namespaces_of_one_controller_are_devices_of_a_daemon() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    image(folder, "a.img", 64 << 20);
    image(folder, "b.img", 32 << 20);
    let server = Daemon::start(folder, &[&["--control", "d"], &TWO[..]].concat());
    let devices = [
        ["--device", "vfio-user:n?namespace=2&queues=1", "--export", "vfio-user:m?queues=2"],
        ["--device", "vfio-user:n?namespace=1", "--export", "vfio-user:m"],
    ];
    let daemon = serve(folder, &devices.concat());
    let mut guest = NvmeGuest::connect(&folder.join("m"), 2, true);
    for (namespace, sectors) in [(0, 65_536), (1, 131_072)] {
        guest.select(namespace);
        assert_eq!(guest.sectors(), sectors);
        guest.write(60 + namespace as u8);
    }
    for namespace in 0..2 {
        guest.select(namespace);
        guest.verify(60 + namespace as u8);
        guest.flush();
    }
    // The size of one device changes at its server, and is followed here.
    succeed(folder, &["set", "--control", "d", "device:1", "size=48M"]);
    guest.select(0);
    guest.wait_for_sectors(98_304);
    guest.select(1);
    assert_eq!(guest.sectors(), 131_072);
    drop(guest);
    daemon.stop();
    let mut direct = NvmeGuest::connect(&folder.join("n"), 1, true);
    direct.verify(61);
    direct.select(1);
    direct.verify(60);
    drop(direct);
    server.stop();
    refuses_namespaces_named_wrongly(folder);
}

fn refuses_namespaces_named_wrongly(folder: &Path) {
    for (second, why) in [
        ("vfio-user:n", "choose one for each"),
        ("vfio-user:n?namespace=2", "name each namespace once"),
        ("vfio-user:n?namespace=1&queues=4", "at the first device with this address"),
    ] {
        let first = ["serve", "--device", "vfio-user:n?namespace=2", "--export", "vhost-user-blk:v"];
        let refused = run(folder, &[&first[..], &["--device", second, "--export", "vhost-user-blk:w"]].concat());
        let said = String::from_utf8(refused.stderr).unwrap();
        assert!(!refused.status.success() && said.contains(why), "{second}: {said}");
    }
}

/// The lane of each queue of an export.
fn lanes_of(folder: &Path, export: usize) -> Vec<u64> {
    let tree = inspect(folder, &[]);
    let queues = tree["exports"][export]["queues"].as_array().unwrap();
    queues.iter().map(|queue| queue["lane"].as_u64().unwrap()).collect()
}

#[test]
fn namespaces_of_a_controller_with_few_queues_share_them() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    image(folder, "a.img", 64 << 20);
    image(folder, "b.img", 32 << 20);
    for queues in [2, 1] {
        let first = format!("vfio-user:n?queues={queues}");
        let served = ["--device", "a.img", "--export", &first, "--device", "b.img", "--export", "vfio-user:n"];
        let server = Daemon::start(folder, &[&["--control", "d"], &served[..]].concat());
        // Each namespace wants two queues on two lanes.
        let devices = [
            ["--device", "vfio-user:n?namespace=2&queues=2", "--export", "vfio-user:m?queues=2"],
            ["--device", "ram:8M", "--export", "vfio-user:m"],
            ["--device", "vfio-user:n?namespace=1", "--export", "vfio-user:m"],
        ];
        let daemon = serve(folder, &[&devices.concat()[..], &["--lanes", "2"]].concat());
        assert_eq!(lanes_of(folder, 0), if queues == 2 { [0, 1] } else { [0, 0] });
        let mut guest = NvmeGuest::connect(&folder.join("m"), 2, true);
        let sizes: Vec<_> = (0..3).map(|namespace| guest.select(namespace).sectors()).collect();
        assert_eq!(sizes, [65_536, 16_384, 131_072]);
        let seeds = |round: u8| (0..3).map(move |namespace| (namespace, 10 * round + namespace as u8));
        // Settings of each device, and moves, under the data of all.
        let settings = [
            ["device:0", "scheduler=fair"],
            ["device:2", "iops_max=20000"],
            ["device:0", "scheduler=none"],
            ["export:0", "depth=4"],
            ["daemon", "lanes=1"],
            ["daemon", "lanes=2"],
        ];
        for (round, words) in settings.iter().enumerate() {
            seeds(round as u8).for_each(|(namespace, seed)| guest.select(namespace).write(seed));
            set(folder, words);
            seeds(round as u8).for_each(|(namespace, seed)| guest.select(namespace).verify(seed));
        }
        let tree = inspect(folder, &[]);
        for namespace in tree["exports"][0]["namespaces"].as_array().unwrap() {
            // 32 in a round; some are merged.
            let ios = |op: &str| namespace["ops"][op]["ios"].as_u64().unwrap();
            assert!([ios("read"), ios("write")].iter().all(|ios| (100..=192).contains(ios)), "{namespace:#}");
        }
        // The server is replaced by another with as many queues.
        seeds(20).for_each(|(namespace, seed)| guest.select(namespace).write(seed));
        server.stop();
        let server = Daemon::start(folder, &[&["--control", "d"], &served[..]].concat());
        seeds(20).for_each(|(namespace, seed)| guest.select(namespace).verify(seed));
        (0..3).for_each(|namespace| guest.select(namespace).flush());
        drop(guest);
        daemon.stop();
        let mut direct = NvmeGuest::connect(&folder.join("n"), 1, true);
        direct.verify(202);
        direct.select(1).verify(200);
        drop(direct);
        server.stop();
    }
}
