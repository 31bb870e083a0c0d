//! `serve --takeover` as processes: one daemon takes the place of another under a client that checks what it wrote.

use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_mins(2);

/// Written once, block by block, and read back: some seconds.
const IMAGE_BYTES: u64 = 512 << 20;

/// A process that does not outlive its test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Process {
    fn is_there(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }

    /// Waits until it has ended; whether it did so with success.
    fn ends_well(&mut self) -> bool {
        let begin = Instant::now();
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status.success();
            }
            assert!(begin.elapsed() < PATIENCE, "it does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

struct Daemon {
    process: Process,
    _lines: Lines<BufReader<ChildStdout>>,
    /// How long guests rested, milliseconds, if it took over.
    rested_ms: Option<f64>,
}

fn program(folder: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_blkyard"));
    command.args(words).current_dir(folder);
    command
}

impl Daemon {
    /// Starts one with its control socket at `c` and waits until it is ready.
    fn start(folder: &Path, words: &[&str]) -> Daemon {
        let mut child = program(folder, &[&["serve"], words].concat()).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let process = Process(child);
        let mut rested_ms = None;
        loop {
            let line = lines.next().expect("it ends before it is ready").unwrap();
            if let Some(rest) = line.strip_prefix("took over: guests rested ") {
                rested_ms = rest.split(' ').next().unwrap().parse().ok();
            }
            if line == "ready" {
                return Daemon { process, _lines: lines, rested_ms };
            }
        }
    }

    fn on_image(folder: &Path) -> Daemon {
        std::fs::File::create(folder.join("disk.img")).unwrap().set_len(IMAGE_BYTES).unwrap();
        let export = "vhost-user-blk:s?queues=2";
        Daemon::start(folder, &["--device", "file:disk.img", "--export", export, "--control", "c", "--lanes", "2"])
    }

    fn stop(mut self) {
        let pid = rustix::process::Pid::from_child(&self.process.0);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        assert!(self.process.ends_well(), "it ends badly");
    }
}

fn run(folder: &Path, words: &[&str]) -> Output {
    program(folder, words).output().unwrap()
}

/// What the daemon at `c` tells of its only export's session.
fn sessions(folder: &Path) -> String {
    let told = run(folder, &["inspect", "--control", "c"]);
    assert!(told.status.success(), "{}", String::from_utf8_lossy(&told.stderr));
    String::from_utf8(told.stdout).unwrap()
}

fn writes_and_checks(folder: &Path) {
    let words = ["bench", "vhost-user:s", "--rw", "randwrite", "--verify", "crc32c", "--size", "1M", "--iodepth", "8"];
    let done = run(folder, &words);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// A client that writes all of the disk and reads it back.
fn client(folder: &Path) -> Process {
    Process(
        program(folder, &["bench", "vhost-user:s", "--rw", "randwrite", "--verify", "crc32c", "--queues", "2"])
            .args(["--numjobs", "2", "--iodepth", "16"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap(),
    )
}

#[test]
fn daemons_take_over_one_from_another_under_a_client_that_checks_what_it_wrote() {
    /// Takeovers that begin and end in the middle of a client's work.
    const AMID: usize = 8;
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut daemon = Daemon::on_image(folder);
    let (begin, mut amid) = (Instant::now(), 0);
    // A quick machine needs more than one client: each is through with it all in less time than so many takeovers take.
    while amid < AMID {
        assert!(begin.elapsed() < PATIENCE, "clients are gone before they can notice anything: {amid} takeovers");
        let mut client = client(folder);
        while !sessions(folder).contains("is connected") && client.is_there() {
            assert!(begin.elapsed() < PATIENCE, "the client never connects:\n{}", sessions(folder));
            std::thread::sleep(Duration::from_millis(10));
        }
        while client.is_there() && amid < AMID {
            let heir = Daemon::start(folder, &["--takeover", "c"]);
            println!("guests rested {:?} ms", heir.rested_ms);
            assert!(heir.rested_ms.is_some());
            let mut old = std::mem::replace(&mut daemon, heir);
            assert!(old.process.ends_well(), "the old daemon ends badly");
            assert!(folder.join("s").exists() && folder.join("c").exists(), "a socket went with the old daemon");
            amid += usize::from(client.is_there());
        }
        let ended = client.ends_well();
        let mut said = String::new();
        client.0.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        client.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(ended, "the client says:\n{said}");
        assert!(
            !said.contains("I/O waits for it") && !said.contains("served again"),
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
fn queues_that_were_made_since_and_what_bounds_them_go_with_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut daemon = Daemon::on_image(folder);
    let set = |words: &[&str]| {
        let done = run(folder, &[&["set", "--control", "c"], words].concat());
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8(done.stdout).unwrap()
    };
    let works_with = |queues: &str| {
        let words = ["bench", "vhost-user:s", "--rw", "randwrite", "--verify", "crc32c", "--size", "4M", "--queues"];
        let done = run(folder, &[&words[..], &[queues, "--numjobs", queues, "--iodepth", "8"]].concat());
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    };
    set(&["export:0", "depth=3"]);
    let said = set(&["export:0", "queues=5"]);
    assert!(said.contains("offers 5 queues, 3 of them new"), "{said}");
    works_with("5");
    // The bound holds for those that came after it.
    let bounded = |told: &str| told.matches("0 of 3 ").count();
    assert_eq!(bounded(&sessions(folder)), 5, "{}", sessions(folder));
    let heir = Daemon::start(folder, &["--takeover", "c"]);
    assert!(std::mem::replace(&mut daemon, heir).process.ends_well());
    works_with("5");
    assert_eq!(bounded(&sessions(folder)), 5, "{}", sessions(folder));
    set(&["export:0", "queues=2"]);
    set(&["daemon", "lanes=3"]);
    works_with("2");
    assert!(sessions(folder).contains("offers 2 of 5 queues"), "{}", sessions(folder));
    daemon.stop();
}

/// What a daemon tells of itself that nobody but `set` changes.
fn habits(folder: &Path) -> serde_json::Value {
    let told = run(folder, &["inspect", "--json", "--control", "c"]);
    assert!(told.status.success(), "{}", String::from_utf8_lossy(&told.stderr));
    let mut tree: serde_json::Value = serde_json::from_slice(&told.stdout).unwrap();
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
            serde_json::json!([export["name"], export["offered"], export["rate"], queues(export)])
        }).collect::<Vec<_>>(),
        "lanes": all(&mut tree["lanes"]).iter().map(|lane| {
            serde_json::json!([lane["cpus"], lane["spin_us"]])
        }).collect::<Vec<_>>(),
    })
}

#[test]
fn all_that_set_changes_goes_with_the_rest() {
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
        &["export:0", "queues=3", "depth=5", "iops_max=80", "bytes_per_s_max=32M", "burst_ms=30"],
        &["daemon", "stats=1200", "lanes=2", "spin_us=17"],
        // Options alone are of the scheduler that is there.
        &["device:0", "idle_ms=4"],
    ] {
        let done = run(folder, &[&["set", "--control", "c"], set].concat());
        assert!(done.status.success(), "{set:?}: {}", String::from_utf8_lossy(&done.stderr));
    }
    let set = habits(folder);
    let text = set.to_string();
    for word in ["3:200+7:10", "\"idle_ms\":\"4\"", "\"slice\"", "1200", "17"] {
        assert!(text.contains(word), "{word} was not set: {text}");
    }
    for heir in 0..2 {
        let heir_of = Daemon::start(folder, &["--takeover", "c"]);
        assert!(std::mem::replace(&mut daemon, heir_of).process.ends_well());
        assert_eq!(habits(folder), set, "heir {heir}");
    }
    // What is given to the heir is what it does; and without a scheduler, or lines of statistics, there are none.
    for set in [&["device:0", "scheduler=none"][..], &["daemon", "stats=0"]] {
        assert!(run(folder, &[&["set", "--control", "c"], set].concat()).status.success());
    }
    let heir = Daemon::start(folder, &["--takeover", "c", "--spin-us", "3", "--lanes", "1"]);
    assert!(std::mem::replace(&mut daemon, heir).process.ends_well());
    let now = habits(folder);
    assert_eq!(now["lanes"], serde_json::json!([[[0], 3]]));
    assert_eq!((&now["stats"], &now["exports"][0][3][0][1]), (&0.into(), &serde_json::Value::Null));
    assert_eq!(now["exports"][1], set["exports"][1]);
    daemon.stop();
}

#[test]
fn a_daemon_goes_on_when_its_heir_dies_or_cannot_or_is_none() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut daemon = Daemon::on_image(folder);
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
    // It dies before it is told, when it has been told, and says something else.
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
    assert!(hear(&stream).contains("should have taken it"));
    writes_and_checks(folder);
    // It speaks another version, or out of turn.
    let other = hear(&ask(&request.replace("\"version\":2", "\"version\":9")));
    assert!(
        other.contains("version 2") && other.contains("asked for 9") && other.contains("without --takeover"),
        "{other}"
    );
    assert!(hear(&ask("{\"blkyard\":1,\"do\":\"taken\"}\n")).contains("nothing is being handed over"));
    writes_and_checks(folder);
    assert!(daemon.process.0.try_wait().unwrap().is_none(), "the old daemon has ended");
    assert!(folder.join("s").exists() && folder.join("c").exists());
    daemon.stop();
}

/// Has a front-end leave the export at `s` with reads under way, for which the export's thread then waits.
fn hold_up(folder: &Path) {
    let words = ["bench", "vhost-user:s", "--rw", "read", "--bs", "1M", "--size", "16M", "--iodepth", "16"];
    let mut front_end = Process(program(folder, &words).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    let begin = Instant::now();
    while !sessions(folder).contains("is connected") {
        assert!(front_end.is_there() && begin.elapsed() < PATIENCE, "it never connects");
        std::thread::sleep(Duration::from_millis(10));
    }
    // It reads as soon as it is connected.
    std::thread::sleep(Duration::from_secs(2));
    drop(front_end);
}

#[test]
fn nobody_rests_for_an_export_that_its_front_end_holds_up() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let served =
        ["--device", "null:16M?latency_us=10000000&mbps=1", "--export", "vhost-user-blk:s", "--device", "null:16M"];
    let other = ["--export", "vhost-user-blk:t", "--control", "c", "--lanes", "1"];
    let daemon = Daemon::start(folder, &[served, other].concat());
    let goes_on = || {
        let done = run(folder, &["bench", "vhost-user:t", "--rw", "randread", "--size", "1M"]);
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    };
    hold_up(folder);
    goes_on();
    let refused = run(folder, &["serve", "--takeover", "c"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success(), "{said}");
    for word in ["vhost-user-blk:s: it has heard nothing", "nothing was asked to rest", "blkyard inspect"] {
        assert!(said.contains(word), "'{word}' is missing in: {said}");
    }
    goes_on();
    // Once the reads have ended.
    let begin = Instant::now();
    while sessions(folder).contains("is connected") {
        assert!(begin.elapsed() < PATIENCE, "its front-end is not let go");
        std::thread::sleep(Duration::from_millis(100));
    }
    let heir = Daemon::start(folder, &["--takeover", "c"]);
    drop(daemon);
    goes_on();
    heir.stop();
}

#[test]
fn what_cannot_be_handed_over_is_refused_with_what_helps() {
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
    refused(&["serve", "--takeover", "c"], &["takeover of c", "ram:16M", "memory ends", "goes on"]);
    refused(&["serve", "--takeover", "c", "--device", "ram:1M"], &["--takeover", "cannot be used with"]);
    writes_and_checks(folder);
    ram.stop();
    let null = Daemon::start(folder, &["--device", "null:16M", "--export", export, "--control", "c", "--lanes", "2"]);
    // The new one has fewer lanes than the export names.
    refused(&["serve", "--takeover", "c", "--lanes", "1"], &["no lane 1", "run more lanes"]);
    assert!(folder.join("s").exists() && folder.join("c").exists());
    let heir = Daemon::start(folder, &["--takeover", "c"]);
    drop(null);
    heir.stop();
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
