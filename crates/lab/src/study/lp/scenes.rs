//! The published scenes, and scenes drawn from a seed.

use blkyard_sim::{PathBurst, PathLoss, PathModel, PathStall, Rng};

use super::rig::PathScene;

pub(crate) const US: u64 = 1_000;
pub(crate) const MS: u64 = 1_000_000;

/// The post's paths: 24 channels, one path slower by this, per cent; with bursts or without.
pub(crate) fn post_paths(wire_us: u64, service_us: u64, percent: u64, burst: Option<PathBurst>) -> Vec<PathModel> {
    let fast = PathModel::new(wire_us * US, service_us * US);
    let slow = PathModel::new(wire_us * percent * US / 100, service_us * percent * US / 100);
    // Staggered: the second path's bursts come half a period later.
    let second = burst.map(|burst| PathBurst { at_ns: burst.at_ns + burst.every_ns / 2, ..burst });
    vec![PathModel { burst, ..fast }, PathModel { burst: second, ..slow }]
}

/// The bursts of the specification's model: 8 times slower for 5 ms of 60.
pub(crate) const BURST: PathBurst = PathBurst { every_ns: 60 * MS, at_ns: 10 * MS, for_ns: 5 * MS, percent: 800 };

/// A path with this latency, a quarter of it service, which never queues.
fn wide(latency_us: u64) -> PathModel {
    PathModel { channels: 1024, sigma_milli: 300, ..PathModel::new(latency_us * US * 3 / 4, latency_us * US / 4) }
}

/// Name of the scene of hedged reads.
pub(crate) const BOTH_STALL: &str = "both paths stall 10 ms for 0.5 % of I/O";

/// Every published scene: its name and itself. Runs are shorter with `quick`.
pub(crate) fn published(quick: bool) -> Vec<(String, PathScene)> {
    let run_ns = |ms: u64| if quick { ms * MS / 4 } else { ms * MS };
    let scene = |name: &str, paths, clients, ms| (name.to_owned(), PathScene::new(paths, clients, run_ns(ms)));
    let base = PathModel::new(60 * US, 80 * US);
    let stall = Some(PathStall { one_in: 200, for_ns: 10 * MS });
    let loss = Some(PathLoss { above: 16, one_in: 100, resend_ns: 20 * MS });
    let mut scenes = vec![
        scene("equal paths", post_paths(60, 80, 100, None), 48, 1000),
        scene("one path 1.5 times slower", post_paths(60, 80, 150, None), 48, 1000),
        scene("one path 1.5 times slower, bursts", post_paths(60, 80, 150, Some(BURST)), 48, 2000),
        scene("one path +30 ms", vec![wide(200), wide(30_200)], 32, 4000),
        scene("0.2 and 0.6 ms, depth 1", vec![wide(600), wide(200)], 1, 16_000),
        scene("0.2 and 0.6 ms, depth 32", vec![wide(600), wide(200)], 32, 2000),
        scene("a path stalls 10 ms for 0.5 % of I/O", vec![PathModel { stall, ..wide(200) }, wide(200)], 16, 4000),
        scene(BOTH_STALL, vec![PathModel { stall, ..wide(200) }, PathModel { stall, ..wide(200) }], 16, 4000),
        scene("a path loses I/O under load", vec![PathModel { loss, ..base }, base], 40, 2000),
        scene("four paths, one slow", vec![base, base, PathModel::new(240 * US, 320 * US), base], 96, 1000),
    ];
    let (mut name, mut degrading) = scene("a path degrades and recovers every second", vec![base, base], 32, 4000);
    let slow = PathModel::new(240 * US, 320 * US);
    let half_ns = run_ns(4000) / 8;
    degrading.changes = (1..8).map(|half| (half * half_ns, 0, if half % 2 == 1 { slow } else { base })).collect();
    scenes.push((std::mem::take(&mut name), degrading));
    let link = |mb: u64| PathModel { bytes_per_s: mb * 1_000_000, channels: 256, ..PathModel::new(60 * US, 80 * US) };
    let (name, mut mixed) = scene("sizes of 512 B to 1 MiB", vec![link(3000), link(1500)], 16, 4000);
    mixed.sizes = vec![512, 4096, 16 << 10, 64 << 10, 256 << 10, 1 << 20];
    mixed.writes = 30;
    scenes.push((name, mixed));
    let (name, mut hosts) = scene("four hosts, one path 1.5 times slower", post_paths(60, 80, 150, None), 48, 1000);
    hosts.hosts = 4;
    scenes.push((name, hosts));
    scenes
}

/// A drawn scene: 2 to 8 paths of 20 us to 50 ms, 1 to 4096 reads in flight, all of one size of 512 B to 1 MiB, and a
/// change of some path at an interval of 10 ms to 10 s. It runs for about so many I/Os, and 60 s at most.
pub(crate) fn drawn(seed: u64, ios: u64) -> PathScene {
    let mut rng = Rng::new(seed);
    let paths: Vec<PathModel> = (0..2 + rng.below(7)).map(|_| drawn_path(&mut rng)).collect();
    let clients = log_uniform(&mut rng, 1, 4096);
    let bytes = 512 << rng.below(12);
    let every_ns = log_uniform(&mut rng, 10 * MS, 10_000 * MS);
    // Highest throughput of the paths together.
    let rate = |model: &PathModel| {
        let latency = model.latency_at_ns(bytes, 0) as f64;
        let served = (clients as f64 / latency).min(f64::from(model.channels) / model.service_ns as f64);
        if model.bytes_per_s > 0 { served.min(1.0 / model.link_ns(bytes).max(1) as f64) } else { served }
    };
    let fastest = paths.iter().map(|model| clients as f64 / model.latency_at_ns(bytes, 0) as f64).fold(0.0, f64::max);
    let rate = paths.iter().map(rate).sum::<f64>().min(fastest);
    let run_ns = ((ios as f64 / rate) as u64).min(60_000 * MS);
    let mut scene = PathScene::new(paths, clients, run_ns);
    scene.sizes = vec![bytes];
    let mut at_ns = every_ns;
    while at_ns < run_ns {
        let path = rng.below(scene.paths.len() as u64) as usize;
        scene.changes.push((at_ns, path, drawn_path(&mut rng)));
        at_ns += every_ns;
    }
    scene
}

fn drawn_path(rng: &mut Rng) -> PathModel {
    let latency_ns = log_uniform(rng, 20 * US, 50 * MS);
    let service_ns = latency_ns * (10 + rng.below(80)) / 100;
    PathModel {
        channels: log_uniform(rng, 4, 256) as u32,
        sigma_milli: rng.below(600) as u32,
        bytes_per_s: log_uniform(rng, 100_000_000, 10_000_000_000),
        ..PathModel::new(latency_ns - service_ns, service_ns)
    }
}

/// A number between these, each power of two equally likely.
fn log_uniform(rng: &mut Rng, low: u64, high: u64) -> u64 {
    let doublings = (high / low).ilog2();
    let from = low << rng.below(u64::from(doublings) + 1);
    (from + rng.below(from)).min(high)
}
