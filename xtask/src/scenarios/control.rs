//! What a running daemon tells of itself over its control socket, and what it lets itself be told.
//!
//! `inspect` and `set` are run as a user runs them; their JSON is looked at as a user's program would.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::{CLIENT_LIMIT, Ground, MIB, Place, Scenario};
use crate::process::{self, Ended};
use crate::server::{Device, Export, Server};

pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "control-inspect",
        sentence: "inspect shows devices, exports, queues and lanes, and under load the requests in flight, as text and JSON",
        place: Place::Host,
        ours: true,
        tell: inspect,
    },
    Scenario {
        name: "control-socket",
        sentence: "the control socket is where it is asked to be, private, gone at the end, and found among several",
        place: Place::Host,
        ours: true,
        tell: socket,
    },
];

/// A daemon with its control socket at `control.sock`.
fn serve(ground: &Ground, exports: &[Export]) -> Result<Server> {
    let mut command = ground.program.serve(exports)?;
    command.arg("--control").arg(ground.path("control.sock"));
    let sockets: Vec<_> = exports.iter().map(|export| export.socket.clone()).collect();
    Server::start_command(&command, &sockets, &ground.log)
}

/// A command of ours at the control socket of that daemon.
fn ask(ground: &Ground, words: &[&str]) -> Result<Ended> {
    let mut command = ground.program.command()?;
    command.arg(words[0]).arg("--control").arg(ground.path("control.sock")).args(&words[1..]);
    process::run("blkyard", &command, CLIENT_LIMIT)
}

fn succeed(ground: &Ground, words: &[&str]) -> Result<String> {
    let ended = ask(ground, words)?;
    ensure!(ended.status.success(), "blkyard {words:?} failed ({}):\n{}", ended.status, ended.said());
    Ok(ended.stdout)
}

fn tree(ground: &Ground) -> Result<Value> {
    let text = succeed(ground, &["inspect", "--json"])?;
    serde_json::from_str(&text).with_context(|| format!("the tree is not JSON:\n{text}"))
}

/// The tree once it is as it should be.
fn tree_when(ground: &Ground, what: &str, ready: impl Fn(&Value) -> bool) -> Result<Value> {
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

fn sum(tree: &Value, pointer: &str) -> u64 {
    let queues = tree["exports"].as_array().into_iter().flatten().filter_map(|export| export["queues"].as_array());
    queues.flatten().filter_map(|queue| queue.pointer(pointer)?.as_u64()).sum()
}

fn inspect(ground: &Ground) -> Result<()> {
    let image = ground.image("disk.img", 8 * MIB)?;
    let file = ground.export(Device::File(image.path), "disk.sock", 2);
    let slow = ground.export(Device::Spec("null:64M?latency_us=300000".into()), "slow.sock", 1);
    let server = serve(ground, &[file.clone(), slow.clone()])?;
    ground.qemu_io(&file.socket, &["write 0 64k".into(), "read 0 4k".into(), "flush".into()])?;
    let bench = ground.start_qemu_bench(&slow.socket, &["-c", "100000", "-d", "16", "-s", "4k"])?;
    let seen = tree_when(ground, "16 requests in flight and the first client gone", |tree| {
        tree.pointer("/exports/1/queues/0/now/in_flight").and_then(Value::as_u64) == Some(16)
            && tree["exports"][0]["session"].is_null()
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
    let session = &seen["exports"][1]["session"];
    ensure!(session["memory_bytes"].as_u64() > Some(0), "the session shares no memory: {session}");
    ensure!(session["features"].as_array().is_some_and(|all| all.contains(&"VERSION_1".into())), "features: {session}");
    ensure!(sum(&seen, "/ops/write/bytes") == 65_536, "64 KiB were written:\n{seen:#}");
    let lanes = seen["lanes"].as_array().context("no lanes")?;
    let placed: usize = lanes.iter().filter_map(|lane| Some(lane["queues"].as_array()?.len())).sum();
    ensure!(placed == 3, "three queues live on lanes:\n{seen:#}");

    // Between two lots of the client there are fewer.
    let begin = Instant::now();
    let mut text = succeed(ground, &["inspect"])?;
    while !text.contains("16 in flight") && begin.elapsed() < CLIENT_LIMIT {
        text = succeed(ground, &["inspect"])?;
    }
    for word in
        ["blkyard", "device 0", "disk.img", "8 MiB", "slow.sock", "16 in flight", "at rest", "write  ", "lane 0"]
    {
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

fn socket(ground: &Ground) -> Result<()> {
    let folder = ground.path("run");
    std::fs::create_dir(&folder)?;
    let serve = |leaf: &str, words: &[&str]| -> Result<Server> {
        let export = ground.export(Device::Ram(16), leaf, 1);
        let mut command: Command = ground.program.serve(std::slice::from_ref(&export))?;
        command.args(words).env("XDG_RUNTIME_DIR", &folder);
        Server::start_command(&command, &[export.socket], &ground.log)
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

    // One is killed, and what it leaves disturbs nobody; its place can be had again.
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
