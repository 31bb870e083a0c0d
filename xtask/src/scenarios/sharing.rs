//! Sharing of a device between exports in real time: one with hundreds of I/Os in flight, another with one.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::control::{serve, succeed, tree, tree_when};
use super::{CLIENT_LIMIT, RunsIn, Scenario, ScenarioContext};
use crate::process::{self, Running};
use crate::server::{Export, OfferedDevice};

pub const SCENARIOS: &[Scenario] = &[Scenario {
    name: "sharing",
    sentence: "who reads one block at a time at an export hardly notices hundreds at another of the same device, unless queues go by themselves",
    place: RunsIn::Host,
    ours: true,
    tell: sharing,
}];

/// A device with a latency of half a millisecond and 4000 I/Os per second: two or three requests keep it busy, and
/// behind the tags of one queue the latency is 30 ms. It is slow, so that a busy machine does not affect the result.
const DEVICE: &str = "model:latency?us=500&iops=4000&size=64M&share=on&scheduler=fair";
/// Requests in flight of the busy client.
const DEPTH: &str = "256";
/// Device depth below which it counts as found, KiB: a dozen small I/Os.
const FOUND_KIB: u64 = 144;
/// Longer than the time after which a queue counts as alone.
const ALONE: Duration = Duration::from_millis(1500);
/// Number of one-second windows, of which the best counts: in others the machine may have been busy.
const WINDOWS: usize = 3;
/// Minimum ratio of the median without sharing to that with it, and of the 99th percentile: on an idle machine some
/// thirty and ten.
const MEDIAN_TIMES: f64 = 5.0;
const P99_TIMES: f64 = 1.5;

/// Read latency, ms: median and 99th percentile.
#[derive(Clone, Copy, Debug)]
struct Waits([f64; 2]);

/// Random reads of one block at an export.
fn bench(ground: &ScenarioContext, export: &Export, options: &[&str]) -> Result<Command> {
    let mut command = ground.program.command()?;
    command.arg("bench").arg(format!("vhost-user:{}", export.socket.display()));
    command.args(["--rw", "randread"]).args(options);
    Ok(command)
}

/// Reads one block at a time for a second.
fn read(ground: &ScenarioContext, export: &Export) -> Result<Waits> {
    let command = bench(ground, export, &["--iodepth", "1", "--runtime", "1", "--output-format", "json"])?;
    let said = process::succeed("blkyard bench", &command, CLIENT_LIMIT)?;
    let report: Value = serde_json::from_str(&said).with_context(|| format!("the report is not JSON:\n{said}"))?;
    let ms = |percent| {
        let ns = report.pointer(&format!("/jobs/0/read/clat_ns/percentile/{percent}")).and_then(Value::as_f64);
        ns.map(|ns| ns / 1e6).with_context(|| format!("the report has no percentile {percent}:\n{said}"))
    };
    Ok(Waits([ms("50.000000")?, ms("99.000000")?]))
}

/// The lowest value of each figure over several windows.
fn best(ground: &ScenarioContext, export: &Export) -> Result<Waits> {
    let mut best = read(ground, export)?;
    for _ in 1..WINDOWS {
        let Waits(next) = read(ground, export)?;
        best = Waits([0, 1].map(|at| best.0[at].min(next[at])));
    }
    Ok(best)
}

/// The depth found for the device.
fn depth_kib(tree: &Value) -> Option<u64> {
    tree.pointer("/exports/0/queues/0/now/scheduler/facts/depth_kib")?.as_u64()
}

/// Read latency beside a busy neighbour: with sharing, with sharing after the neighbour was alone for a while, and
/// without sharing.
fn compare(ground: &ScenarioContext, quiet: &Export) -> Result<(Waits, Waits, Waits)> {
    // The depth is found within seconds while both clients are active.
    let begin = Instant::now();
    while depth_kib(&tree(ground)?).is_none_or(|found| found > FOUND_KIB) {
        read(ground, quiet)?;
        ensure!(begin.elapsed() < CLIENT_LIMIT, "the depth was never found:\n{:#}", tree(ground)?);
    }
    let shared = best(ground, quiet)?;
    // The neighbour uses the whole device while alone, which reveals no depth.
    std::thread::sleep(ALONE);
    let again = best(ground, quiet)?;
    succeed(ground, &["set", "device:0", "per_queue=on"])?;
    Ok((shared, again, best(ground, quiet)?))
}

fn sharing(ground: &ScenarioContext) -> Result<()> {
    let export = |leaf| ground.export(OfferedDevice::Spec(DEVICE.into()), leaf, 1);
    let exports = [export("noisy.sock"), export("quiet.sock")];
    let [noisy, quiet] = &exports;
    let server = serve(ground, &exports)?;
    let alone = best(ground, quiet)?;
    let options = ["--iodepth", DEPTH, "--runtime", "10m"];
    let mut neighbour = Running::start("blkyard bench", &bench(ground, noisy, &options)?)?;
    let full = |tree: &Value| {
        let waiting = tree.pointer("/exports/0/queues/0/now/scheduler/waiting").and_then(Value::as_u64);
        waiting.is_some_and(|waiting| waiting > 0)
    };
    tree_when(ground, "a neighbour that wants more than there are tags", full)?;
    let begin = Instant::now();
    // Repeated while the machine is busy: without sharing, the latency is as high every time.
    let said = loop {
        let (shared, again, apart) = compare(ground, quiet)?;
        let said = format!(
            "median and p99, ms: {:.2?} alone, {:.2?} beside {DEPTH}, {:.2?} beside who was alone meanwhile, {:.2?} with queues that go by themselves",
            alone.0, shared.0, again.0, apart.0
        );
        let is_shared =
            |Waits([median, p99]): &Waits| median * MEDIAN_TIMES < apart.0[0] && p99 * P99_TIMES < apart.0[1];
        if [shared, again].iter().all(is_shared) {
            break said;
        }
        ensure!(begin.elapsed() < CLIENT_LIMIT, "{said}");
        succeed(ground, &["set", "device:0", "per_queue=off"])?;
    };
    ensure!(neighbour.poll()?.is_none(), "the neighbour has ended: {}{}", neighbour.stdout()?, neighbour.stderr()?);
    ground.measured(said);
    drop(neighbour);
    server.stop()?;
    Ok(())
}
