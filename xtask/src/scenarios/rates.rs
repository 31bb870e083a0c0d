//! Limits on I/Os and bytes a second, of a device and of its exports, in real time and under load.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::Value;

use super::control::{refused, serve, succeed, sum, tree, tree_when};
use super::{CLIENT_LIMIT, MIB, RunsIn, Scenario, ScenarioContext};
use crate::process::Running;
use crate::server::OfferedDevice;

pub const SCENARIOS: &[Scenario] = &[Scenario {
    name: "rates",
    sentence: "exports of one device keep to their limits and to its own, which set changes under load, and no request is lost",
    place: RunsIn::Host,
    ours: true,
    tell: rates,
}];

/// Duration of a measurement.
const TIME: Duration = Duration::from_millis(1500);
const BURST_MS: u32 = 10;
/// Maximum shortfall of a load above its limit, since the machine is shared with other tests.
const MISSING: f64 = 0.25;

/// Time limit for the end of sessions with throttled requests. Waiting for these would take 32 s, at one per second.
const END_TIME: Duration = Duration::from_secs(8);

/// I/Os of two exports, counted between two instants.
struct IoCounts {
    ios: [u64; 2],
    between: [Instant; 2],
}

fn count(ground: &ScenarioContext) -> Result<IoCounts> {
    let before = Instant::now();
    let tree = tree(ground)?;
    let ios =
        |export: usize| tree.pointer(&format!("/exports/{export}/queues/0/ops/write/ios")).and_then(Value::as_u64);
    Ok(IoCounts { ios: [0, 1].map(|export| ios(export).unwrap_or(0)), between: [before, Instant::now()] })
}

/// Time limit of measurements, window by window, until a load above its limit reaches it: time lost on a busy machine
/// is not made up for.
const PATIENCE: Duration = CLIENT_LIMIT;

/// Measures both exports. In any window, neither exceeds its limit by more than the burst, and neither does their sum
/// that of the device. A load above its limit reaches it in at least one window.
fn measure(ground: &ScenarioContext, what: &str, limits: [Option<f64>; 2], device: f64) -> Result<String> {
    let begin = Instant::now();
    loop {
        match window(ground, what, limits, device)? {
            Ok(measured) => return Ok(measured),
            Err(too_few) => ensure!(begin.elapsed() < PATIENCE, "in no window of {PATIENCE:?}: {too_few}"),
        }
    }
}

/// Measures one window. The inner result names an export that did not reach its limit.
fn window(
    ground: &ScenarioContext,
    what: &str,
    limits: [Option<f64>; 2],
    device: f64,
) -> Result<std::result::Result<String, String>> {
    let from = count(ground)?;
    std::thread::sleep(TIME);
    let to = count(ground)?;
    let [least_s, most_s] =
        [to.between[0] - from.between[1], to.between[1] - from.between[0]].map(|time| time.as_secs_f64());
    let ios = [0, 1].map(|export| (to.ios[export] - from.ios[export]) as f64);
    // Tolerance: a quarter of a millisecond reserved by each queue, one I/O, and a round of requests that ended late.
    let most = |rate: f64| rate * (most_s + f64::from(BURST_MS) / 1e3 + 2.0 * 250e-6) + 34.0;
    let mut missed = None;
    for (ios, limit) in ios.into_iter().zip(limits) {
        let Some(limit) = limit else { continue };
        ensure!(ios <= most(limit), "{what}: {ios} in {most_s:.3} s at {limit} a second");
        if ios < limit * least_s * (1.0 - MISSING) {
            missed = Some(format!("{what}: only {ios} in {least_s:.3} s at {limit} a second"));
        }
    }
    let all = ios[0] + ios[1];
    ensure!(all <= most(device) + 34.0, "{what}: {all} in {most_s:.3} s at {device} a second of the device");
    let measured = format!("{what}: {:.0} and {:.0} a second", ios[0] / most_s, ios[1] / most_s);
    Ok(missed.map_or(Ok(measured), Err))
}

fn rates(ground: &ScenarioContext) -> Result<()> {
    const BYTE: u8 = 0x6b;
    let image = ground.image("disk.img", 4 * MIB)?;
    let spec = format!("file:{}?share=on&iops_max=2000&burst_ms={BURST_MS}", image.path.display());
    let export = |leaf| ground.export(OfferedDevice::Spec(spec.clone()), leaf, 1);
    let exports = [export("limited.sock"), export("other.sock")];
    let server = serve(ground, &exports)?;
    let pattern = format!("--pattern={BYTE}");
    let options = ["-w", &pattern, "-c", "100000000", "-d", "16", "-s", "4k"];
    let start = || -> Result<Vec<Running>> {
        let ios = count(ground)?.ios;
        let clients = exports.iter().map(|export| ground.start_qemu_bench(&export.socket, &options));
        let clients = clients.collect::<Result<_>>()?;
        tree_when(ground, "writes at both exports", |tree| {
            [0, 1].iter().all(|export| {
                let now = tree.pointer(&format!("/exports/{export}/queues/0/ops/write/ios"));
                now.and_then(Value::as_u64) > Some(ios[*export] + 200)
            })
        })?;
        Ok(clients)
    };
    let mut clients = start()?;
    // Both exports share the device's limit.
    let mut measured = vec![measure(ground, "a device of 2000", [Some(1000.0), Some(1000.0)], 2000.0)?];

    let said = succeed(ground, &["set", "export:limited.sock", "iops_max=300", &format!("burst_ms={BURST_MS}")])?;
    ensure!(said.contains("limited to iops_max=300 burst_ms=10"), "set says: {said}");
    measured.push(measure(ground, "an export of 300", [Some(300.0), Some(1700.0)], 2000.0)?);
    let seen = tree(ground)?;
    ensure!(seen["exports"][0]["rate"]["iops_max"] == 300, "the export should show it:\n{seen:#}");
    ensure!(seen["devices"][0]["rate"]["iops_max"] == 2000, "the device should show it:\n{seen:#}");
    ensure!(sum(&seen, "/counters/held") > 0 && sum(&seen, "/counters/held_ns") > 0, "nobody was held:\n{seen:#}");
    let text = succeed(ground, &["inspect"])?;
    ensure!(text.contains("does not exceed: burst_ms 10, iops_max 300"), "the text should show it:\n{text}");

    // 4 MiB per second are 1024 writes.
    succeed(ground, &["set", "export:0", "iops_max=off", "bytes_per_s_max=4M"])?;
    succeed(ground, &["set", "device:0", "iops_max=3000"])?;
    measured.push(measure(ground, "an export of 4 MiB", [Some(1024.0), None], 3000.0)?);
    // Up and down, faster than in practice.
    for round in 0..20 {
        let iops = [100, 50_000][round % 2].to_string();
        succeed(ground, &["set", "device:0", &format!("iops_max={iops}")])?;
    }
    refused(ground, &["set", "device:0", "burst_ms=0"], &["device:0", "burst_ms=0", "from 1 to"])?;
    refused(ground, &["set", "export:0", "iops_max=many"], &["export:0", "iops_max=many", "or off"])?;

    succeed(ground, &["set", "device:0", "iops_max=off"])?;
    succeed(ground, &["set", "export:0", "bytes_per_s_max=off"])?;
    let writes = |tree: &Value| sum(tree, "/ops/write/ios");
    let before = writes(&tree(ground)?);
    // Twice the image size for each.
    tree_when(ground, "more writes without a limit", |tree| writes(tree) > before + 8192)?;
    for client in &mut clients {
        ensure!(client.poll()?.is_none(), "a client has ended: {}{}", client.stdout()?, client.stderr()?);
    }
    // A throttled request is not awaited after its client has left. Only time shows this, so a slow attempt is
    // repeated: a server that waits does so every time.
    let begin = Instant::now();
    let after = loop {
        succeed(ground, &["set", "device:0", "iops_max=1"])?;
        let left = Instant::now();
        drop(clients);
        let after = tree_when(ground, "the clients' end", |tree| {
            [0, 1].iter().all(|export| tree["exports"][*export as usize]["session"].is_null())
        })?;
        let took = left.elapsed();
        if took < END_TIME {
            break after;
        }
        ensure!(begin.elapsed() < PATIENCE, "what was held at one a second was waited for: {took:?}");
        succeed(ground, &["set", "device:0", "iops_max=off"])?;
        clients = start()?;
    };
    ensure!(sum(&after, "/ops/write/errors") == 0, "requests failed:\n{after:#}");
    image.check_pattern(0, 4 * MIB - 4096, BYTE)?;
    ground.measured(measured.join("; "));
    server.stop()?;
    Ok(())
}
