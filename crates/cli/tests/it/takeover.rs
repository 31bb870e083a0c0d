//! `serve --takeover` as processes: one daemon replaces another under a client that verifies its data.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::common::{Daemon, PATIENCE, Process, inspect, inspect_at, program, run, succeed, wait_until};

/// Written once, block by block, and read back: some seconds.
const IMAGE_BYTES: u64 = 512 << 20;

/// A daemon with an image and the control socket `c`.
fn serve_image(folder: &Path) -> Daemon {
    std::fs::File::create(folder.join("disk.img")).unwrap().set_len(IMAGE_BYTES).unwrap();
    let export = "vhost-user-blk:s?queues=2";
    Daemon::start(folder, &["--device", "file:disk.img", "--export", export, "--control", "c", "--lanes", "2"])
}

/// Time for which guests were paused by a takeover, ms, as the new daemon reports it.
fn pause_ms(new: &Daemon) -> f64 {
    let line = new.greeting.iter().find_map(|line| line.strip_prefix("took over: guests were paused for "));
    line.expect("the new daemon reports the pause").split(' ').next().unwrap().parse().unwrap()
}

/// Replaces a daemon by one with these arguments; the old one must end with success.
fn replace(folder: &Path, old: &mut Daemon, arguments: &[&str]) {
    let new = Daemon::start(folder, &[&["--takeover", "c"], arguments].concat());
    let status = std::mem::replace(old, new).process.ended();
    assert!(status.success(), "the old daemon ends with {status}");
}

/// The text of `inspect` on the daemon at `c`.
fn sessions(folder: &Path) -> String {
    succeed(folder, &["inspect", "--control", "c"])
}

fn writes_and_checks(folder: &Path) {
    let words = ["bench", "vhost-user:s", "--rw", "randwrite", "--verify", "crc32c", "--size", "1M", "--iodepth", "8"];
    succeed(folder, &words);
}

/// A client that writes all of the disk and reads it back.
fn client(folder: &Path) -> Process {
    Process::spawn(
        program(folder, &["bench", "vhost-user:s", "--rw", "randwrite", "--verify", "crc32c", "--queues", "2"])
            .args(["--numjobs", "2", "--iodepth", "16"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped()),
    )
}

#[test]
fn takeovers_under_a_verifying_client_lose_no_write() {
    /// Takeovers that begin and end in the middle of a client's work.
    const AMID: usize = 8;
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut daemon = serve_image(folder);
    let (begin, mut amid) = (Instant::now(), 0);
    // A quick machine needs more than one client: each is through with it all in less time than so many takeovers take.
    while amid < AMID {
        assert!(begin.elapsed() < PATIENCE, "clients are gone before they can notice anything: {amid} takeovers");
        let mut client = client(folder);
        while !sessions(folder).contains("is connected") && client.is_running() {
            assert!(begin.elapsed() < PATIENCE, "the client never connects:\n{}", sessions(folder));
            std::thread::sleep(Duration::from_millis(10));
        }
        while client.is_running() && amid < AMID {
            replace(folder, &mut daemon, &[]);
            println!("guests were paused for {} ms", pause_ms(&daemon));
            assert!(folder.join("s").exists() && folder.join("c").exists(), "a socket went with the old daemon");
            amid += usize::from(client.is_running());
        }
        let ended = client.ended().success();
        let mut said = String::new();
        client.0.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        client.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(ended, "the client says:\n{said}");
        assert!(
            !said.contains("I/O waits until") && !said.contains("connected again"),
            "the client lost its session:\n{said}"
        );
        println!("{said}");
    }
    // Still locked, and by the one that serves.
    let second =
        run(folder, &["serve", "--device", "file:disk.img", "--export", "vhost-user-blk:t", "--lock-wait-s", "0"]);
    assert!(!second.status.success());
    daemon.stop();
    assert!(!folder.join("s").exists() && !folder.join("c").exists(), "a socket is left behind");
}

#[test]
fn a_remote_disk_is_taken_over_under_a_verifying_client() {
    const NQN: &str = "nqn.2026-11.test:takeover";
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    // A port of an address that no other test uses stays free while the target is down.
    let [low, high, ..] = std::process::id().to_le_bytes();
    let address = TcpListener::bind((Ipv4Addr::new(127, 250, high, low), 0)).unwrap().local_addr().unwrap();
    let target = |options: &str| {
        // So slow that the client is at work for longer than three takeovers take.
        let (device, export) = (format!("ram:32M?mbps=10{options}"), format!("nvme-tcp://{address}?nqn={NQN}"));
        Daemon::start(folder, &["--control", "t", "--device", &device, "--export", &export])
    };
    let disk = target("");
    let device = format!("nvme-tcp://{address}/{NQN}?queues=2&reconnect_delay_s=1");
    let words = ["--device", &device, "--export", "vhost-user-blk:s?queues=2", "--control", "c", "--lanes", "2"];
    let mut daemon = Daemon::start(folder, &words);
    let mut client = client(folder);
    wait_until("the client connects", || sessions(folder).contains("is connected"));
    for _ in 0..3 {
        replace(folder, &mut daemon, &[]);
        println!("guests were paused for {} ms", pause_ms(&daemon));
    }
    assert!(client.is_running(), "the client has ended before the last takeover");
    let (mut said, status) = (String::new(), client.ended());
    client.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(status.success() && !said.contains("connected again"), "the client says:\n{said}");
    // An association of each daemon has ended with it.
    let hosts = || {
        let tree = inspect_at(folder, "t", &[]);
        tree["exports"][0]["session"]["target"]["hosts"].as_array().unwrap().len()
    };
    wait_until("one association is left", || hosts() == 1);
    // The disk cannot be reached, or it is another one: the daemon continues.
    disk.stop();
    let refusal = || {
        let output = run(folder, &["serve", "--takeover", "c"]);
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let error = refusal();
    assert!(error.contains(&format!("cannot connect to {address}")), "{error}");
    for (options, reason) in [("&readonly=on", "write protection"), ("&block_size=4k", "limits")] {
        let other = target(options);
        let error = refusal();
        assert!(error.contains(reason), "{error}");
        other.stop();
    }
    let disk = target("");
    assert!(daemon.is_running());
    writes_and_checks(folder);
    daemon.stop();
    disk.stop();
}

#[test]
fn takeover_keeps_added_queues_and_their_depth() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut daemon = serve_image(folder);
    let set = |words: &[&str]| succeed(folder, &[&["set", "--control", "c"], words].concat());
    let works_with = |queues: &str| {
        let words = ["bench", "vhost-user:s", "--rw", "randwrite", "--verify", "crc32c", "--size", "4M", "--queues"];
        succeed(folder, &[&words[..], &[queues, "--numjobs", queues, "--iodepth", "8"]].concat());
    };
    set(&["export:0", "depth=3"]);
    let said = set(&["export:0", "queues=5"]);
    assert!(said.contains("offers 5 queues, 3 of them new"), "{said}");
    works_with("5");
    // The bound holds for those that came after it. Queues that share show their sum until the session has ended.
    let bounded = || {
        let queues = inspect(folder, &[])["exports"][0]["queues"].as_array().unwrap().clone();
        queues.iter().filter(|queue| queue["now"]["tags"]["limit"] == 3).count()
    };
    wait_until("each queue has the bound", || bounded() == 5);
    replace(folder, &mut daemon, &[]);
    works_with("5");
    wait_until("each queue has the bound", || bounded() == 5);
    set(&["export:0", "queues=2"]);
    set(&["daemon", "lanes=3"]);
    works_with("2");
    assert!(sessions(folder).contains("offers 2 of 5 queues"), "{}", sessions(folder));
    daemon.stop();
}

/// The settings of a daemon, which only `set` changes.
fn settings(folder: &Path) -> serde_json::Value {
    let mut tree = inspect(folder, &[]);
    let all = |part: &mut serde_json::Value| part.as_array_mut().map(std::mem::take).unwrap();
    let queues = |export: &mut serde_json::Value| -> serde_json::Value {
        let of = |mut queue: serde_json::Value| {
            let now = &mut queue["now"];
            serde_json::json!([now["tags"]["limit"], now["scheduler"]["name"], now["scheduler"]["options"]])
        };
        all(&mut export["queues"]).into_iter().map(of).collect()
    };
    serde_json::json!({
        "stats": tree["daemon"]["stats_s"],
        "devices": all(&mut tree["devices"]).iter().map(|device| {
            serde_json::json!([device["name"], device["size_bytes"], device["limits"], device["rate"]])
        }).collect::<Vec<_>>(),
        "exports": all(&mut tree["exports"]).iter_mut().map(|export| {
            serde_json::json!([export["name"], export["offered"], export["rate"], queues(export), export["weight"]])
        }).collect::<Vec<_>>(),
        "lanes": all(&mut tree["lanes"]).iter().map(|lane| {
            serde_json::json!([lane["cpus"], lane["spin_us"]])
        }).collect::<Vec<_>>(),
    })
}

#[test]
fn takeover_keeps_all_settings() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let words = [
        "--device",
        "null:1G?scheduler=kyber&iops_max=900&bytes_per_s_max=1G",
        "--export",
        "vhost-user-blk:s?queues=2&iops_max=90",
    ];
    let more = [
        "--device",
        "null:2G",
        "--export",
        "vhost-user-blk:t?queues=1",
        "--control",
        "c",
        "--lanes",
        "1",
        "--cpus",
        "0",
        "--stats",
        "600",
    ];
    let mut daemon = Daemon::start(folder, &[&words[..], &more].concat());
    for set in [
        &["device:0", "size=3G", "force=on", "sectors_max=64", "depth=7"][..],
        &["device:0", "scheduler=fair", "weights=3:200+7:10", "device=seeks", "slice_ms=33", "drain=off"],
        &["device:0", "iops_max=off", "bytes_per_s_max=64M", "burst_ms=20"],
        &["device:1", "scheduler=timeslice", "idle_us=slice", "key=queue", "iops_max=4000"],
        &[
            "export:0",
            "queues=3",
            "depth=5",
            "iops_max=80",
            "bytes_per_s_max=32M",
            "burst_ms=30",
            "scheduler_weight=430",
        ],
        &["daemon", "stats=1200", "lanes=2", "spin_us=17"],
        // Options alone apply to the current scheduler.
        &["device:0", "idle_ms=4"],
    ] {
        succeed(folder, &[&["set", "--control", "c"], set].concat());
    }
    let set = settings(folder);
    let text = set.to_string();
    for word in ["3:200+7:10", "\"idle_ms\":\"4\"", "\"slice\"", "1200", "17", "430"] {
        assert!(text.contains(word), "{word} was not set: {text}");
    }
    for takeover in 0..2 {
        replace(folder, &mut daemon, &[]);
        assert_eq!(settings(folder), set, "takeover {takeover}");
    }
    // Arguments of the new daemon take precedence; an absent scheduler and disabled statistics are inherited too.
    for set in [&["device:0", "scheduler=none"][..], &["daemon", "stats=0"]] {
        succeed(folder, &[&["set", "--control", "c"], set].concat());
    }
    replace(folder, &mut daemon, &["--spin-us", "3", "--lanes", "1"]);
    let now = settings(folder);
    assert_eq!(now["lanes"], serde_json::json!([[[0], 3]]));
    assert_eq!((&now["stats"], &now["exports"][0][3][0][1]), (&0.into(), &serde_json::Value::Null));
    assert_eq!(now["exports"][1], set["exports"][1]);
    // No bound is a setting, too: the next daemon tries as long looks.
    succeed(folder, &["set", "--control", "c", "daemon", "spin_us=auto"]);
    let default = serde_json::json!([[[0], 200]]);
    assert_eq!(settings(folder)["lanes"], default);
    replace(folder, &mut daemon, &[]);
    assert_eq!(settings(folder)["lanes"], default);
    daemon.stop();
}

#[test]
fn a_daemon_continues_after_a_failed_takeover() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut daemon = serve_image(folder);
    let ask = |words: &str| {
        let stream = UnixStream::connect(folder.join("c")).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        (&stream).write_all(words.as_bytes()).unwrap();
        stream
    };
    let hear = |stream: &UnixStream| {
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        line
    };
    let request = "{\"blkyard\":1,\"do\":\"takeover\",\"version\":2}\n";
    // It dies before the answer, after it, and with another message.
    drop(ask(request));
    writes_and_checks(folder);
    let stream = ask(request);
    let handover = hear(&stream);
    assert!(handover.starts_with('#') && handover.contains("\"ok\""), "{handover}");
    drop(stream);
    writes_and_checks(folder);
    let stream = ask(request);
    hear(&stream);
    (&stream).write_all(b"{\"blkyard\":1,\"do\":\"inspect\"}\n").unwrap();
    assert!(hear(&stream).contains("instead of confirming"));
    writes_and_checks(folder);
    // It speaks another version, or out of turn.
    let other = hear(&ask(&request.replace("\"version\":2", "\"version\":9")));
    assert!(
        other.contains("version 2")
            && other.contains("version 9 was requested")
            && other.contains("without --takeover"),
        "{other}"
    );
    assert!(hear(&ask("{\"blkyard\":1,\"do\":\"taken\"}\n")).contains("no handover is in progress"));
    writes_and_checks(folder);
    assert!(daemon.is_running(), "the old daemon has ended");
    assert!(folder.join("s").exists() && folder.join("c").exists());
    daemon.stop();
}

/// Has a front-end leave the export at `s` with reads in flight, for which the export's thread then waits.
fn hold_up(folder: &Path) {
    let words = ["bench", "vhost-user:s", "--rw", "read", "--bs", "1M", "--size", "16M", "--iodepth", "16"];
    let mut front_end = Process::spawn(program(folder, &words).stdout(Stdio::null()).stderr(Stdio::null()));
    wait_until("reads are in flight", || {
        assert!(front_end.is_running(), "the front-end ended by itself");
        let tree = inspect(folder, &["export:0"]);
        let queues = tree["exports"][0]["queues"].as_array().unwrap();
        queues.iter().any(|queue| queue["now"]["in_flight"].as_u64() > Some(0))
    });
}

#[test]
fn an_export_that_drains_blocks_a_takeover_before_any_pause() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let served =
        ["--device", "null:16M?latency_us=10000000&mbps=1", "--export", "vhost-user-blk:s", "--device", "null:16M"];
    let other = ["--export", "vhost-user-blk:t", "--control", "c", "--lanes", "1"];
    let mut daemon = Daemon::start(folder, &[served, other].concat());
    let goes_on = || {
        succeed(folder, &["bench", "vhost-user:t", "--rw", "randread", "--size", "1M"]);
    };
    hold_up(folder);
    goes_on();
    let refused = run(folder, &["serve", "--takeover", "c"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success(), "{said}");
    for word in ["vhost-user-blk:s: it has not responded", "no export was paused", "blkyard inspect"] {
        assert!(said.contains(word), "'{word}' is missing in: {said}");
    }
    goes_on();
    // The session ends once the reads have ended.
    wait_until("the session of the front-end ends", || !sessions(folder).contains("is connected"));
    replace(folder, &mut daemon, &[]);
    goes_on();
    daemon.stop();
}

#[test]
fn a_device_that_hangs_blocks_a_takeover_before_any_pause() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let served =
        ["--device", "null:64M?latency_us=10000000&mbps=1", "--export", "vhost-user-blk:s", "--device", "null:16M"];
    let other = ["--export", "vhost-user-blk:t", "--control", "c", "--lanes", "1"];
    let daemon = Daemon::start(folder, &[served, other].concat());
    let words = ["bench", "vhost-user:s", "--rw", "read", "--bs", "1M", "--size", "64M", "--iodepth", "60"];
    let front_end = Process::spawn(program(folder, &words).stdout(Stdio::null()).stderr(Stdio::null()));
    wait_until("the device is slow", || {
        let tree = inspect(folder, &["export:0"]);
        let queues = tree["exports"][0]["queues"].as_array().unwrap();
        queues.iter().any(|queue| queue["counters"]["slow_now"].as_u64() > Some(0))
    });
    let begin = Instant::now();
    let refused = run(folder, &["serve", "--takeover", "c"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success(), "{said}");
    assert!(begin.elapsed() < Duration::from_secs(10), "all exports were paused: {:?}, {said}", begin.elapsed());
    for word in ["vhost-user-blk:s: its device", "no export was paused", "blkyard inspect"] {
        assert!(said.contains(word), "'{word}' is missing in: {said}");
    }
    succeed(folder, &["bench", "vhost-user:t", "--rw", "randread", "--size", "1M"]);
    drop((front_end, daemon));
}

#[test]
fn a_takeover_that_is_not_possible_is_refused_with_a_cure() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let refused = |words: &[&str], explained: &[&str]| {
        let ended = run(folder, words);
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(!ended.status.success(), "{words:?} is not refused");
        explained.iter().for_each(|word| assert!(said.contains(word), "{words:?}: '{word}' is missing in: {said}"));
    };
    refused(&["serve", "--takeover", "c"], &["takeover of c", "no daemon", "control socket"]);
    let export = "vhost-user-blk:s?queues=1&lanes=1";
    let ram = Daemon::start(
        folder,
        &["--device", "ram:16M", "--export", "vhost-user-blk:s", "--control", "c", "--lanes", "1"],
    );
    refused(&["serve", "--takeover", "c"], &["takeover of c", "ram:16M", "memory is lost", "continues"]);
    refused(&["serve", "--takeover", "c", "--device", "ram:1M"], &["--takeover", "cannot be used with"]);
    writes_and_checks(folder);
    ram.stop();
    let mut null =
        Daemon::start(folder, &["--device", "null:16M", "--export", export, "--control", "c", "--lanes", "2"]);
    // The new one has fewer lanes than the export names.
    refused(&["serve", "--takeover", "c", "--lanes", "1"], &["no lane 1", "run more lanes"]);
    assert!(folder.join("s").exists() && folder.join("c").exists());
    replace(folder, &mut null, &[]);
    null.stop();
    let silent = std::os::unix::net::UnixListener::bind(PathBuf::from(folder).join("old")).unwrap();
    let older = std::thread::spawn(move || {
        let (stream, _) = silent.accept().unwrap();
        BufReader::new(&stream).read_line(&mut String::new()).unwrap();
        let said = "the request is not understood: unknown variant `takeover`, expected `inspect` or `set`";
        writeln!(&stream, "{{\"blkyard\":1,\"error\":\"{said}\"}}").unwrap();
    });
    refused(&["serve", "--takeover", "old"], &["takeover of old", "older", "without --takeover"]);
    older.join().unwrap();
}

#[test]
fn the_log_keeps_its_format_unless_another_is_given() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::write(
        folder.join("disk.toml"),
        "log_format = 'json'\n[[device]]\nspec = 'null:1M'\n[[device.export]]\nspec = 'vhost-user-blk:s'\n",
    )
    .unwrap();
    let start = |log: &str, arguments: &[&str]| {
        let log = std::fs::File::create(folder.join(log)).unwrap();
        Daemon::launch(program(folder, &["serve"]).args(arguments).stderr(log))
    };
    let first = start("0", &["--config", "disk.toml", "--control", "c"]);
    let second = start("1", &["--takeover", "c"]);
    let third = start("2", &["--takeover", "c", "--log-format", "text"]);
    let fourth = start("3", &["--takeover", "c"]);
    [first, second, third].into_iter().for_each(|mut old| assert!(old.process.ended().success()));
    fourth.stop();
    for (log, is_json) in [("0", true), ("1", true), ("2", false), ("3", false)] {
        let log = std::fs::read_to_string(folder.join(log)).unwrap();
        assert!(!log.is_empty() && log.lines().all(|line| line.starts_with('{') == is_json), "{log}");
    }
}

#[test]
fn a_service_manager_is_told_of_a_daemon_and_of_its_successor() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let manager = UnixDatagram::bind(folder.join("manager")).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    let start = |arguments: &[&str]| {
        let mut command = program(folder, arguments);
        let quiet = command.env("NOTIFY_SOCKET", folder.join("manager")).stdout(Stdio::null());
        let process = Process::spawn(quiet);
        let mut said = [0; 64];
        let length = manager.recv(&mut said).unwrap();
        assert_eq!(String::from_utf8_lossy(&said[..length]), format!("READY=1\nMAINPID={}", process.0.id()));
        process
    };
    let device = ["--device", "null:1G", "--export", "vhost-user-blk:s", "--control", "c"];
    let mut old = start(&[&["serve"], &device[..]].concat());
    let mut new = start(&["serve", "--takeover", "c"]);
    assert!(old.ended().success(), "the old daemon fails");
    new.signal(Signal::TERM);
    assert!(new.ended().success(), "the new daemon fails");
}
