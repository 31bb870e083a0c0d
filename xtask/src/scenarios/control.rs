//! The control socket of a running daemon: `inspect` and `set`.
//!
//! Both are run like by a user; their JSON is parsed like by a user's program.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::Value;

use super::{CLIENT_LIMIT, MIB, RunsIn, Scenario, ScenarioContext};
use crate::process::{self, Ended};
use crate::server::{Export, OfferedDevice, ReadyServer};
use crate::vm::Vm;

pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "control-inspect",
        sentence: "inspect shows devices, exports, queues and lanes, and under load the requests in flight, as text and JSON",
        place: RunsIn::Host,
        ours: true,
        tell: inspect,
    },
    Scenario {
        name: "control-socket",
        sentence: "the control socket is where it is asked to be, private, gone at the end, and found among several",
        place: RunsIn::Host,
        ours: true,
        tell: socket,
    },
    Scenario {
        name: "control-size",
        sentence: "set grows a disk and its file, finds a file that others have grown, and shrinks none that is attached",
        place: RunsIn::Host,
        ours: true,
        tell: size,
    },
    Scenario {
        name: "control-limits",
        sentence: "set bounds requests in flight and their length under load, and what an export offers",
        place: RunsIn::Host,
        ours: true,
        tell: limits,
    },
    Scenario {
        name: "control-lanes",
        sentence: "set changes the number of lanes under load: queues move and go on, and every byte is where it belongs",
        place: RunsIn::Host,
        ours: true,
        tell: lanes,
    },
    Scenario {
        name: "control-scheduler",
        sentence: "set puts one scheduler in the place of another under load, inspect shows it, and every byte is where it belongs",
        place: RunsIn::Host,
        ours: true,
        tell: scheduler,
    },
    Scenario {
        name: "control-refusals",
        sentence: "what cannot be set is refused with its name, the reason and what helps, and changes nothing",
        place: RunsIn::Host,
        ours: true,
        tell: refusals,
    },
    Scenario {
        name: "control-guest-grows",
        sentence: "a guest that does I/O sees its disk grow, uses what was added, and loses nothing",
        place: RunsIn::Guest,
        ours: true,
        tell: guest_grows,
    },
];

/// A daemon with its control socket at `control.sock`.
pub(super) fn serve(ground: &ScenarioContext, exports: &[Export]) -> Result<ReadyServer> {
    let mut command = ground.program.serve(exports)?;
    command.arg("--control").arg(ground.path("control.sock"));
    let sockets: Vec<_> = exports.iter().map(|export| export.socket.clone()).collect();
    ReadyServer::start_command(&command, &sockets, &ground.log)
}

/// Runs blkyard with this command at the control socket of that daemon.
fn ask(ground: &ScenarioContext, words: &[&str]) -> Result<Ended> {
    let mut command = ground.program.command()?;
    command.arg(words[0]).arg("--control").arg(ground.path("control.sock")).args(&words[1..]);
    process::run("blkyard", &command, CLIENT_LIMIT)
}

pub(super) fn succeed(ground: &ScenarioContext, words: &[&str]) -> Result<String> {
    let ended = ask(ground, words)?;
    ensure!(ended.status.success(), "blkyard {words:?} failed ({}):\n{}", ended.status, ended.said());
    Ok(ended.stdout)
}

pub(super) fn tree(ground: &ScenarioContext) -> Result<Value> {
    let text = succeed(ground, &["inspect", "--json"])?;
    serde_json::from_str(&text).with_context(|| format!("the tree is not JSON:\n{text}"))
}

/// Waits until the tree satisfies a condition.
pub(super) fn tree_when(ground: &ScenarioContext, what: &str, ready: impl Fn(&Value) -> bool) -> Result<Value> {
    let begin = Instant::now();
    loop {
        let tree = tree(ground)?;
        if ready(&tree) {
            return Ok(tree);
        }
        ensure!(begin.elapsed() < CLIENT_LIMIT, "the tree never showed {what}:\n{tree:#}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whether the owner of every queue has answered: a lane without CPU time may be late.
pub(super) fn all_answered(tree: &Value) -> bool {
    let exports = tree["exports"].as_array().into_iter().flatten();
    exports.filter_map(|export| export["queues"].as_array()).flatten().all(|queue| !queue["now"].is_null())
}

/// Sets the number of lanes; retries while a queue does not drain within the time limit of `set`.
fn set_lanes(ground: &ScenarioContext, lanes: usize) -> Result<String> {
    let begin = Instant::now();
    loop {
        let ended = ask(ground, &["set", "daemon", &format!("lanes={lanes}")])?;
        if ended.status.success() {
            return Ok(ended.stdout);
        }
        let may_try_again = ended.stderr.contains("was not drained") && begin.elapsed() < CLIENT_LIMIT;
        ensure!(may_try_again, "lanes={lanes} was not set:\n{}", ended.said());
    }
}

pub(super) fn sum(tree: &Value, pointer: &str) -> u64 {
    let queues = tree["exports"].as_array().into_iter().flatten().filter_map(|export| export["queues"].as_array());
    queues.flatten().filter_map(|queue| queue.pointer(pointer)?.as_u64()).sum()
}

fn inspect(ground: &ScenarioContext) -> Result<()> {
    let image = ground.image("disk.img", 8 * MIB)?;
    let file = ground.export(OfferedDevice::File(image.path), "disk.sock", 2);
    let slow = ground.export(OfferedDevice::Spec("null:64M?latency_us=300000".into()), "slow.sock", 1);
    let server = serve(ground, &[file.clone(), slow.clone()])?;
    ground.qemu_io(&file.socket, &["write 0 64k".into(), "read 0 4k".into(), "flush".into()])?;
    let bench = ground.start_qemu_bench(&slow.socket, &["-c", "100000", "-d", "16", "-s", "4k", "-S", "64k"])?;
    let seen = tree_when(ground, "16 requests in flight and the first client gone", |tree| {
        tree.pointer("/exports/1/queues/0/now/in_flight").and_then(Value::as_u64) == Some(16)
            && tree["exports"][0]["session"].is_null()
            && all_answered(tree)
    })?;
    for (pointer, want) in [
        ("/daemon/pid", Value::from(server.id())),
        ("/devices/0/size_bytes", (8 * MIB).into()),
        ("/devices/1/name", "null:64M?latency_us=300000".into()),
        ("/exports/0/device", 0.into()),
        ("/exports/0/session", Value::Null),
        ("/exports/1/sessions", 1.into()),
        ("/exports/1/queues/0/now/state", "running".into()),
        ("/exports/0/queues/1/now/state", "at rest".into()),
    ] {
        ensure!(seen.pointer(pointer) == Some(&want), "{pointer} should be {want}:\n{seen:#}");
    }
    let requests = seen.pointer("/exports/1/queues/0/now/requests").and_then(Value::as_array).context("no requests")?;
    let whole = |request: &Value| {
        request["op"] == "read"
            && request["state"] == "in flight"
            && request["sectors"] == 8
            && request["age_ns"].as_u64().is_some_and(|age_ns| age_ns < CLIENT_LIMIT.as_nanos() as u64)
    };
    ensure!(requests.len() == 16 && requests.iter().all(whole), "16 reads of 4 KiB are in flight:\n{requests:#?}");
    let session = &seen["exports"][1]["session"];
    ensure!(session["memory_bytes"].as_u64() > Some(0), "the session shares no memory: {session}");
    ensure!(session["features"].as_array().is_some_and(|all| all.contains(&"VERSION_1".into())), "features: {session}");
    ensure!(sum(&seen, "/ops/write/bytes") == 65_536, "64 KiB were written:\n{seen:#}");
    let lanes = seen["lanes"].as_array().context("no lanes")?;
    let placed: usize = lanes.iter().filter_map(|lane| Some(lane["queues"].as_array()?.len())).sum();
    ensure!(placed == 3, "three queues live on lanes:\n{seen:#}");

    let words = [
        "blkyard",
        "device 0",
        "disk.img",
        "8 MiB",
        "slow.sock",
        "16 in flight",
        "at rest",
        "write  ",
        "lane 0",
        "tags 16 of 128",
        "tag 0",
        "+8, in flight for",
    ];
    // Between two batches of the client, fewer requests are in flight.
    let begin = Instant::now();
    let mut text = succeed(ground, &["inspect"])?;
    while !words.iter().all(|word| text.contains(word)) && begin.elapsed() < CLIENT_LIMIT {
        text = succeed(ground, &["inspect"])?;
    }
    for word in words {
        ensure!(text.contains(word), "the text should say '{word}':\n{text}");
    }
    let part = succeed(ground, &["inspect", "export:slow.sock"])?;
    ensure!(part.contains("slow.sock") && !part.contains("disk.sock"), "only one export was asked for:\n{part}");
    let absent = ask(ground, &["inspect", "export:fast.sock"])?;
    ensure!(!absent.status.success() && absent.stderr.contains("export:fast.sock"), "{}", absent.said());
    drop(bench);
    tree_when(ground, "the client's end", |tree| tree["exports"][1]["session"].is_null())?;
    server.stop()?;
    Ok(())
}

fn socket(ground: &ScenarioContext) -> Result<()> {
    let folder = ground.path("run");
    std::fs::create_dir(&folder)?;
    let serve = |leaf: &str, words: &[&str]| -> Result<ReadyServer> {
        let export = ground.export(OfferedDevice::Ram(16), leaf, 1);
        let mut command: Command = ground.program.serve(std::slice::from_ref(&export))?;
        command.args(words).env("XDG_RUNTIME_DIR", &folder);
        ReadyServer::start_command(&command, &[export.socket], &ground.log)
    };
    let inspect = |words: &[&str]| {
        let mut command = ground.program.command()?;
        command.arg("inspect").args(words).env("XDG_RUNTIME_DIR", &folder).current_dir(&folder);
        process::run("blkyard inspect", &command, CLIENT_LIMIT)
    };
    let sockets = || -> Result<Vec<String>> {
        let entries = std::fs::read_dir(folder.join("blkyard")).context("serve made no folder")?;
        entries.map(|entry| Ok(entry?.path().display().to_string())).collect()
    };

    let first = serve("a.sock", &[])?;
    let path = folder.join("blkyard").join(format!("{}.sock", first.id()));
    let mode = std::os::unix::fs::PermissionsExt::mode(&path.metadata().context("no control socket")?.permissions());
    ensure!(mode & 0o777 == 0o600, "the control socket's permissions are {mode:o}");
    let path = path.display().to_string();
    let at = inspect(&["--control", &path])?;
    ensure!(at.status.success() && at.stdout.contains("a.sock"), "{}", at.said());

    let second = serve("b.sock", &[])?;
    let both = inspect(&[])?;
    if both.status.success() {
        bail!("two daemons run, and one was chosen:\n{}", both.said());
    }
    for socket in sockets()? {
        ensure!(both.stderr.contains(&socket), "the list lacks {socket}:\n{}", both.stderr);
    }
    let refused = ground.program.refusal(&[
        "--device",
        "ram:16M",
        "--export",
        &format!("vhost-user-blk:{}", ground.path("c.sock").display()),
        "--control",
        &path,
    ])?;
    ensure!(refused.contains(&path) && refused.contains("listening"), "a socket in use was not refused so: {refused}");

    // The first is killed, and its unfinished command has no effect; its path can be reused.
    second.kill();
    let left = inspect(&["--control", &path, "daemon"])?;
    ensure!(left.status.success(), "{}", left.said());
    let third = serve("d.sock", &["--control", "none"])?;
    first.stop()?;
    ensure!(!std::path::Path::new(&path).exists(), "the control socket outlived its daemon");
    third.stop()?;
    let fourth = serve("e.sock", &[])?;
    ensure!(sockets()?.len() == 1, "sockets of the dead are left: {:?}", sockets()?);
    fourth.stop()?;
    Ok(())
}

/// Checks that `set` refuses a change, with one word of each group in its error.
pub(super) fn refused(ground: &ScenarioContext, words: &[&str], explained: &[&str]) -> Result<()> {
    let ended = ask(ground, words)?;
    ensure!(!ended.status.success(), "blkyard {words:?} should have been refused: {}", ended.said());
    for word in explained {
        ensure!(ended.stderr.contains(word), "blkyard {words:?} should say '{word}', and says: {}", ended.stderr);
    }
    Ok(())
}

fn size(ground: &ScenarioContext) -> Result<()> {
    let image = ground.image("disk.img", 8 * MIB)?;
    let file = ground.export(OfferedDevice::File(image.path.clone()), "disk.sock", 2);
    let null = ground.export(OfferedDevice::Null(64), "null.sock", 1);
    let server = serve(ground, &[file.clone(), null.clone()])?;
    let served = |device: usize| -> Result<u64> {
        tree(ground)?["devices"][device]["size_bytes"].as_u64().context("a device without a size")
    };
    let length = || Ok::<_, anyhow::Error>(image.path.metadata()?.len());

    let said = succeed(ground, &["set", "device:disk.img", "size=16M"])?;
    ensure!(said.contains("16 MiB") && said.contains("was grown") && said.contains("no front-end"), "set says: {said}");
    ensure!((served(0)?, length()?) == (16 * MIB, 16 * MIB), "{} served of {}", served(0)?, length()?);
    ground.qemu_io(&file.socket, &["write -P 0x61 15M 1M".into()])?;
    image.check_pattern(15 * MIB, MIB, 0x61)?;

    // After another program has grown the file, the size is unchanged until `set`.
    std::fs::File::options().write(true).open(&image.path)?.set_len(24 * MIB)?;
    ensure!(served(0)? == 16 * MIB, "the size changed by itself");
    succeed(ground, &["set", "device:0", "size=probe"])?;
    ensure!(served(0)? == 24 * MIB, "{} are served after the probe", served(0)?);

    let client = ground.start_silent_client(&file.socket, &image)?;
    refused(ground, &["set", "device:0", "size=20M"], &["device:0", "from 24 MiB to 20 MiB", "force=on"])?;
    let said = succeed(ground, &["set", "device:0", "size=20M", "force=on"])?;
    ensure!(said.contains("the file keeps its 24 MiB"), "set says: {said}");
    ensure!((served(0)?, length()?) == (20 * MIB, 24 * MIB), "{} served of {}", served(0)?, length()?);
    succeed(ground, &["set", "device:0", "size=32M"])?;
    drop(client);
    tree_when(ground, "the client's end", |tree| tree["exports"][0]["session"].is_null())?;
    ground.qemu_io(&file.socket, &["read -P 0x61 15M 1M".into(), "write -P 0x62 31M 1M".into()])?;
    image.check_pattern(31 * MIB, MIB, 0x62)?;

    succeed(ground, &["set", "device:1", "size=1T"])?;
    ground.qemu_io(&null.socket, &["write 1023G 4k".into()])?;
    server.stop()?;
    Ok(())
}

fn limits(ground: &ScenarioContext) -> Result<()> {
    let export = ground.export(OfferedDevice::Spec("null:64M?latency_us=20000".into()), "slow.sock", 2);
    let server = serve(ground, std::slice::from_ref(&export))?;
    let bench = ground.start_qemu_bench(&export.socket, &["-c", "10000000", "-d", "16", "-s", "4k", "-S", "64k"])?;
    let in_flight = |wanted: u64| {
        tree_when(ground, &format!("{wanted} requests in flight"), move |tree| {
            tree.pointer("/exports/0/queues/0/now/in_flight").and_then(Value::as_u64) == Some(wanted)
        })
    };
    in_flight(16)?;
    let said = succeed(ground, &["set", "device:0", "depth=4"])?;
    ensure!(said.contains("at most 4 requests in flight"), "set says: {said}");
    in_flight(4)?;
    succeed(ground, &["set", "export:slow.sock", "depth=128"])?;
    in_flight(16)?;

    // 4 KiB are four requests of two sectors.
    succeed(ground, &["set", "device:0", "sectors_max=2"])?;
    in_flight(64)?;
    let limit = tree(ground)?["devices"][0]["limits"]["sectors_max"].as_u64();
    ensure!(limit == Some(2), "the limit is shown as {limit:?}");

    let said = succeed(ground, &["set", "export:0", "queues=1"])?;
    ensure!(said.contains("keeps its queues"), "set says: {said}");
    ensure!(tree(ground)?["exports"][0]["offered"] == 1, "it does not offer one queue");
    drop(bench);
    tree_when(ground, "the client's end", |tree| tree["exports"][0]["session"].is_null())?;
    ground.qemu_io(&export.socket, &["read 0 64k".into()])?;

    let lines = |server: &ReadyServer| {
        Ok::<_, anyhow::Error>(server.said()?.lines().filter(|line| line.contains("IOPS")).count())
    };
    ensure!(lines(&server)? == 0, "it prints statistics that nobody asked for");
    succeed(ground, &["set", "daemon", "stats=1"])?;
    let begin = Instant::now();
    while lines(&server)? < 2 {
        ensure!(begin.elapsed() < CLIENT_LIMIT, "it prints no statistics:\n{}", server.said()?);
        std::thread::sleep(Duration::from_millis(100));
    }
    server.stop()?;
    Ok(())
}

fn lanes(ground: &ScenarioContext) -> Result<()> {
    const BYTE: u8 = 0x71;
    const SPIN_US: u64 = 7;
    let (filled, checked) = (ground.image("filled.img", 4 * MIB)?, ground.image("checked.img", 4 * MIB)?);
    let exports = [
        ground.export(OfferedDevice::Ram(16), "idle.sock", 1),
        ground.export(OfferedDevice::File(filled.path.clone()), "filled.sock", 1),
        ground.export(OfferedDevice::File(checked.path.clone()), "checked.sock", 1),
    ];
    let mut command = ground.program.serve(&exports)?;
    command.args(["--lanes", "2", "--control"]).arg(ground.path("control.sock"));
    let sockets: Vec<_> = exports.iter().map(|export| export.socket.clone()).collect();
    let server = ReadyServer::start_command(&command, &sockets, &ground.log)?;

    let pattern = format!("--pattern={BYTE}");
    let options = ["-w", &pattern, "-c", "100000000", "-d", "16", "-s", "4k"];
    let mut bench = ground.start_qemu_bench(&exports[1].socket, &options)?;
    let enough = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let checking = scope.spawn(|| check_until(ground, &exports[2].socket, &enough));
        let told = (|| {
            all_write_on(ground)?;
            let said = succeed(ground, &["set", "daemon", &format!("spin_us={SPIN_US}")])?;
            ensure!(said.contains(&format!("for {SPIN_US} us before they sleep")), "set says: {said}");
            // The queues of each export start one lane after those of the previous export.
            for (lanes, places) in [(1, [0, 0, 0]), (3, [0, 1, 2]), (2, [0, 1, 0])] {
                let said = set_lanes(ground, lanes)?;
                ensure!(said.contains(&format!("before, {lanes} now")), "set says: {said}");
                let tree = tree(ground)?;
                check_places(&tree, lanes, &places)?;
                // Existing lanes and new ones.
                let spins = tree["lanes"].as_array().into_iter().flatten().all(|lane| lane["spin_us"] == SPIN_US);
                ensure!(spins, "lanes do not spin as they were told:\n{tree:#}");
                all_write_on(ground)?;
            }
            // Twice the image size, so that each block was written at least once.
            tree_when(ground, "a whole lap of the client", |tree| {
                tree.pointer("/exports/1/queues/0/ops/write/bytes").and_then(Value::as_u64) >= Some(8 * MIB)
            })?;
            ensure!(bench.poll()?.is_none(), "the client has ended: {}{}", bench.stdout()?, bench.stderr()?);
            Ok(())
        })();
        enough.store(true, Relaxed);
        let checked = checking.join().map_err(|_| anyhow!("the checking thread panicked"))?;
        told.and(checked)
    })?;
    let after = tree(ground)?;
    ensure!(sum(&after, "/ops/write/errors") + sum(&after, "/ops/read/errors") == 0, "requests failed:\n{after:#}");
    drop(bench);
    tree_when(ground, "the client's end", |tree| tree["exports"][1]["session"].is_null())?;
    // The client wraps around before the last block.
    filled.check_pattern(0, 4 * MIB - 4096, BYTE)?;
    server.stop()?;
    Ok(())
}

fn scheduler(ground: &ScenarioContext) -> Result<()> {
    const BYTE: u8 = 0x5c;
    let image = ground.image("disk.img", 4 * MIB)?;
    let export = ground.export(OfferedDevice::File(image.path.clone()), "disk.sock", 1);
    let server = serve(ground, std::slice::from_ref(&export))?;
    // A small number of tags, so that bios wait.
    succeed(ground, &["set", "device:0", "depth=2"])?;
    let pattern = format!("--pattern={BYTE}");
    let options = ["-w", &pattern, "-c", "100000000", "-d", "16", "-s", "4k"];
    let mut bench = ground.start_qemu_bench(&export.socket, &options)?;
    let writes = |tree: &Value| tree.pointer("/exports/0/queues/0/ops/write/ios").and_then(Value::as_u64);
    let requests = [
        ("deadline", &["scheduler=deadline", "fifo_batch=4"][..]),
        ("timeslice", &["scheduler=timeslice", "slice_us=250"]),
        ("timeslice", &["slice_us=1000", "idle_us=slice"]),
        ("kyber", &["scheduler=kyber"]),
    ];
    for (name, request) in requests.into_iter().cycle().take(12) {
        let said = succeed(ground, &[&["set", "device:disk.img"][..], request].concat())?;
        ensure!(said.contains(&format!("scheduler {name}")), "set says: {said}");
        let before = writes(&tree(ground)?);
        let seen = tree_when(ground, "more writes", |tree| all_answered(tree) && writes(tree) > before)?;
        let shown = &seen["exports"][0]["queues"][0]["now"]["scheduler"];
        ensure!(shown["name"] == name, "{name} should be shown: {shown:#}");
        for option in request.iter().filter(|option| !option.starts_with("scheduler=")) {
            let (key, value) = option.split_once('=').context("an option without a value")?;
            ensure!(shown["options"][key] == value, "{option} should be shown: {shown:#}");
        }
    }
    let text = succeed(ground, &["inspect"])?;
    ensure!(text.contains("kyber (") && text.contains("read_target_us=2000"), "the text should show it:\n{text}");
    succeed(ground, &["set", "device:0", "scheduler=none"])?;
    let before = writes(&tree(ground)?);
    tree_when(ground, "no scheduler, and twice the image written", |tree| {
        let shown = tree.pointer("/exports/0/queues/0/now/scheduler");
        shown.is_some_and(Value::is_null) && writes(tree) > before && writes(tree) >= Some(2048)
    })?;
    ensure!(bench.poll()?.is_none(), "the client has ended: {}{}", bench.stdout()?, bench.stderr()?);
    let after = tree(ground)?;
    ensure!(sum(&after, "/ops/write/errors") == 0, "requests failed:\n{after:#}");
    refused(ground, &["set", "device:0", "scheduler=cfq"], &["device:0", "cfq", "deadline"])?;
    drop(bench);
    tree_when(ground, "the client's end", |tree| tree["exports"][0]["session"].is_null())?;
    // The client wraps around before the last block.
    image.check_pattern(0, 4 * MIB - 4096, BYTE)?;
    server.stop()?;
    Ok(())
}

/// Writes and reads back at a socket until stopped, each time with other bytes and as another front-end.
fn check_until(ground: &ScenarioContext, socket: &Path, enough: &AtomicBool) -> Result<()> {
    for round in 0_u32.. {
        if enough.load(Relaxed) {
            break;
        }
        let place = |n: u32| format!("-P {} {}k 64k", (round + n) % 255 + 1, n * 64);
        let writes = (0..64).map(|n| format!("write {}", place(n)));
        let reads = (0..64).map(|n| format!("read {}", place(n)));
        ground.qemu_io(socket, &writes.chain(reads).collect::<Vec<_>>())?;
    }
    Ok(())
}

/// Waits until each export but the first has completed more writes.
fn all_write_on(ground: &ScenarioContext) -> Result<()> {
    let writes =
        |tree: &Value| [1, 2].map(|export| tree["exports"][export]["queues"][0]["ops"]["write"]["ios"].as_u64());
    let before = writes(&tree(ground)?);
    tree_when(ground, "more writes", |tree| writes(tree).iter().zip(&before).all(|(now, before)| now > before))?;
    Ok(())
}

/// Checks the number of running lanes, and the lane of each export's first queue from both sides.
fn check_places(tree: &Value, lanes: usize, places: &[usize]) -> Result<()> {
    let running = tree["lanes"].as_array().context("no lanes")?;
    ensure!(running.len() == lanes, "{} lanes are shown, not {lanes}:\n{tree:#}", running.len());
    for (export, &place) in places.iter().enumerate() {
        let of_queue = &tree["exports"][export]["queues"][0]["lane"];
        let of_lane = running[place]["queues"].as_array().context("a lane without queues")?;
        ensure!(
            *of_queue == place && of_lane.contains(&serde_json::json!([export, 0])),
            "the queue of export {export} should be on lane {place} of {lanes}:\n{tree:#}"
        );
    }
    Ok(())
}

fn refusals(ground: &ScenarioContext) -> Result<()> {
    let image = ground.image("disk.img", 8 * MIB)?;
    let locked = ground.image("locked.img", 8 * MIB)?;
    let exports = [
        ground.export(OfferedDevice::File(image.path.clone()), "disk.sock", 2),
        ground.export(OfferedDevice::Ram(16), "ram.sock", 1),
        ground.export(OfferedDevice::ReadOnly(locked.path.clone()), "locked.sock", 1),
    ];
    let server = serve(ground, &exports)?;
    let before = tree(ground)?;
    for (words, explained) in [
        (&["device:0", "size=lots"][..], &["device:0", "size=lots", "2G"][..]),
        (&["device:0", "size=1000"], &["device:0", "1000 bytes", "blocks of 512"]),
        (&["device:1", "size=32M"], &["device:1", "allocated at start", "larger"]),
        (&["device:2", "size=16M"], &["device:2", "read-only", "size=probe"]),
        (&["device:0", "force=on"], &["device:0", "force=on", "size=SIZE"]),
        (&["device:0", "colour=red"], &["device:0", "unknown key 'colour'", "sectors_max"]),
        (&["device:0", "size=16M", "depth=0"], &["device:0", "depth=0", "from 1 to"]),
        (&["device:0", "size=16M", "sectors_max=999999999"], &["device:0", "sectors_max=999999999", "from 1 to"]),
        (&["device:0", "size=16M", "size=24M"], &["device:0", "twice"]),
        (&["device:img", "depth=8"], &["device:img", "ambiguous: 0", "by its number"]),
        (&["device:9", "depth=8"], &["device:9", "no part of that name", "inspect"]),
        (&["floor:0", "depth=8"], &["floor:0", "device:0"]),
        (&["export:0", "queues=65"], &["export:0", "queues=65", "from 1 to 64"]),
        (&["lane:0", "spin_us=3"], &["lane:0", "set daemon"]),
        (&["daemon", "stats=never"], &["daemon", "stats=never"]),
        (&["daemon", "spin_us=1000001"], &["daemon", "spin_us=1000001", "from 0 to"]),
        (&["daemon", "lanes=0"], &["daemon", "lanes=0", "from 1 to"]),
        (&["daemon", "lanes=2", "stats=never"], &["daemon", "stats=never"]),
    ] {
        refused(ground, &[&["set"], words].concat(), explained)?;
    }
    let after = tree(ground)?;
    let lanes = |tree: &Value| tree["lanes"].as_array().map(Vec::len);
    ensure!(
        after["devices"] == before["devices"] && lanes(&after) == lanes(&before),
        "something has changed all the same:\n{after:#}"
    );
    ensure!(image.path.metadata()?.len() == 8 * MIB, "the image was grown");
    server.stop()?;
    refused(ground, &["set", "device:0", "size=16M"], &["control.sock", "check that the daemon runs"])
}

fn guest_grows(ground: &ScenarioContext) -> Result<()> {
    let image = ground.image("disk.img", 16 * MIB)?;
    let export = ground.export(OfferedDevice::File(image.path.clone()), "disk.sock", 2);
    let server = serve(ground, std::slice::from_ref(&export))?;
    let task = "modprobe virtio_blk
        size() { cat /sys/block/vda/size; }
        ( rounds=0
          while [ ! -e /tmp/enough ]; do
              tr '\\0' '\\121' </dev/zero | dd of=/dev/vda bs=64k count=16 iflag=fullblock oflag=direct conv=notrunc 2>/dev/null || echo failed
              rounds=$((rounds + 1))
          done
          echo $rounds >/tmp/rounds ) &
        size
        while [ $(size) = 32768 ]; do sleep 1; done
        size
        echo 'the end' | dd of=/dev/vda bs=512 seek=65535 conv=sync,fsync 2>/dev/null || echo failed
        touch /tmp/enough
        wait
        test $(cat /tmp/rounds) -gt 0 && echo done";
    let mut machine = Vm::new(ground.guest, 2).disk(&export.socket, 2).start(task)?;
    machine.wait_for_output(|output| output.contains('\n'))?;
    // An emulated guest on a busy machine may need longer to complete its requests than `set` waits; the change is made
    // in any case.
    let set = ask(ground, &["set", "device:0", "size=32M"])?;
    let late = set.stderr.contains("the change is made once it has");
    ensure!(late || set.stdout.contains("its front-end was notified"), "set says: {}", set.said());
    let output = machine.wait()?.success()?;
    let lines: Vec<_> = output.lines().collect();
    ensure!(lines == ["32768", "65536", "done"], "the guest says: {lines:?}");
    ensure!(image.read(65_535 * 512, 8)? == b"the end\n", "what the guest wrote at the end is not in the image");
    image.check_pattern(0, MIB, 0x51)?;
    server.stop()?;
    Ok(())
}
