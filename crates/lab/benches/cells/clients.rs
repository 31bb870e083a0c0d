//! `vhost-*-libblkio`, `-qemu-img` and `vhost-tmpfs-*`: clients that are separate programs, or that sleep, at our
//! daemon and at qemu-storage-daemon in turn.
//!
//! `BLKYARD_BLKIO` is the command of the program `blkio-load`, which changes sockets by itself from window to window;
//! `BLKYARD_QEMU_IMG` names the other. Without them their cells are not measured. Servers are on one CPU and the client
//! on the other, except for files on tmpfs, where the kernel's workers need both: there no thread is pinned.

use std::path::Path;
use std::process::Command;

use blkyard::Device;
use blkyard_lab::bench::{BenchArgs, measure};
use blkyard_lab::floor::{Samples, partner_cpu};
use clap::Parser;
use serde_json::Value;

use crate::report::{self, CellReport, Figure};
use crate::servers::{CellFolder, CellStore, CellTransport, ListeningServer, Who, everywhere, program};

#[derive(clap::Parser)]
struct Cli {
    #[command(flatten)]
    bench: BenchArgs,
}

/// Client program.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Client {
    Ours,
    Libblkio,
    QemuImg,
}

/// How long, and how often.
#[derive(Clone, Copy)]
pub struct MeasuredSpan {
    /// Of one window of a program that is started for it.
    pub seconds: f64,
    pub runs: usize,
    /// Windows of a program that changes sockets by itself, of 10 ms.
    pub windows: usize,
}

/// I/Os a second of ours, and of theirs.
type RatePair = [Samples; 2];

pub fn client_cells(quick: bool, report: &mut CellReport) {
    let span = if quick {
        MeasuredSpan { seconds: 0.2, runs: 5, windows: 40 }
    } else {
        MeasuredSpan { seconds: 0.5, runs: 10, windows: 100 }
    };
    for store in [CellStore::Null, CellStore::Ram, CellStore::Tmpfs] {
        for client in [Client::Ours, Client::Libblkio, Client::QemuImg] {
            for (depth, queues) in [(1, 1), (32, 1), (128, 1), (1, 2), (32, 2), (128, 2)] {
                // It uses one queue; the cells of `vhost` measure our driver on memory.
                if client == Client::QemuImg && queues > 1 || client == Client::Ours && store != CellStore::Tmpfs {
                    continue;
                }
                let some = if queues == 1 { String::new() } else { format!("-{queues}q") };
                let by = match client {
                    Client::Ours => "",
                    Client::Libblkio => "-libblkio",
                    Client::QemuImg => "-qemu-img",
                };
                let cell = format!("vhost-{}-qd{depth}{some}{by}", store.name());
                if !report.wants(&cell) {
                    continue;
                }
                match compare(span, store, client, depth, queues) {
                    Ok([ours, theirs]) => {
                        let figure = Figure::median(&cell, "iops", &ours);
                        report.add(figure.beside(Some(theirs.percentile(50.0))));
                    }
                    Err(why) => report::skip(&cell, &why),
                }
            }
        }
    }
}

fn compare(
    span: MeasuredSpan,
    store: CellStore,
    client: Client,
    depth: usize,
    queues: usize,
) -> Result<RatePair, String> {
    let ground = CellFolder::new()?;
    let cpu = if store == CellStore::Tmpfs { None } else { Some(partner_cpu()?) };
    let server = |who| ListeningServer::start(&ground, who, store, queues, cpu);
    let servers = [server(Who::Ours)?, server(Who::Theirs)?];
    let sockets = servers.each_ref().map(|server| server.socket.clone());
    if store == CellStore::Ram {
        crate::vhost::write_all(&sockets[0])?;
    }
    let mut pair = RatePair::default();
    if client == Client::Libblkio {
        for line in blkio_load(span, depth, queues, &sockets)?.lines() {
            for (samples, ns) in pair.iter_mut().zip(line.split(' ')) {
                samples.push(1e9 / ns.parse::<f64>().map_err(|_| format!("blkio-load said {line:?}"))?);
            }
        }
        return Ok(pair);
    }
    for _ in 0..span.runs {
        for (samples, socket) in pair.iter_mut().zip(&sockets) {
            samples.push(match client {
                Client::Ours => our_bench(span, socket, depth, queues)?,
                _ => qemu_img(span, socket, depth)?,
            });
        }
    }
    Ok(pair)
}

fn blkio_load(
    span: MeasuredSpan,
    depth: usize,
    queues: usize,
    sockets: &[std::path::PathBuf],
) -> Result<String, String> {
    const WINDOW_MS: &str = "10";
    let command = std::env::var("BLKYARD_BLKIO").map_err(|_| "BLKYARD_BLKIO does not say how to run blkio-load")?;
    let mut words = command.split_whitespace();
    let mut program = Command::new(words.next().unwrap_or_default());
    program.args(words).args([&queues.to_string(), &depth.to_string(), WINDOW_MS, &span.windows.to_string()]);
    said(program.args(sockets))
}

/// `qemu-img bench` for about as long as a window is to be.
fn qemu_img(span: MeasuredSpan, socket: &Path, depth: usize) -> Result<f64, String> {
    let run = |ios: usize| {
        let program = std::env::var("BLKYARD_QEMU_IMG");
        let mut bench =
            Command::new(program.map_err(|_| "BLKYARD_QEMU_IMG does not name qemu-img: run cargo xtask bench")?);
        bench.args(["bench", "-t", "none", "-s", "4k", "-c", &ios.to_string(), "-d", &depth.to_string()]);
        bench
            .arg("--image-opts")
            .arg(format!("driver=virtio-blk-vhost-user,path={},cache.direct=on", socket.display()));
        let text = said(&mut bench)?;
        // "Run completed in 1.234 seconds."
        let seconds = text.split_whitespace().filter_map(|word| word.parse::<f64>().ok()).next_back();
        Ok::<_, String>(ios as f64 / seconds.filter(|seconds| *seconds > 0.0).ok_or(format!("it said {text:?}"))?)
    };
    let about = run(5000)?;
    run((about * span.seconds) as usize + 1)
}

/// Our own `bench`, whose queues sleep when idle.
pub fn our_bench(span: MeasuredSpan, socket: &Path, depth: usize, queues: usize) -> Result<f64, String> {
    let device = Device::open(&format!("vhost-user:{}", socket.display())).map_err(|error| error.to_string())?;
    let (depth, jobs, runtime) = (depth.to_string(), queues.to_string(), format!("{}ms", span.seconds * 1000.0));
    let line = ["bench", "-", "--rw", "randread", "--bs", "4k", "--iodepth", &depth, "--numjobs", &jobs];
    let cli =
        Cli::try_parse_from(line.into_iter().chain(["--runtime", &runtime])).map_err(|error| error.to_string())?;
    let report = measure(&cli.bench, &device).map_err(|error| error.to_string())?;
    let json: Value = serde_json::from_str(&report.json()).map_err(|error| error.to_string())?;
    let iops: f64 = json["jobs"].as_array().into_iter().flatten().filter_map(|job| job["read"]["iops"].as_f64()).sum();
    if report.is_good() && iops > 0.0 { Ok(iops) } else { Err("our own run failed".into()) }
}

/// `blkyard bench` as users run it, in a process of its own on all CPUs, with any load in its words: I/Os a second.
pub fn usual_load(seconds: f64, transport: CellTransport, socket: &Path, load: &str) -> Result<f64, String> {
    let mut command = everywhere();
    command.arg(program()?).arg("bench").arg(format!("{}:{}", transport.device(), socket.display()));
    command.args(load.split(' ')).args(["--output-format", "json"]);
    let json = said(command.args(["--runtime", &format!("{}ms", seconds * 1000.0)]))?;
    let json: Value = serde_json::from_str(&json).map_err(|error| error.to_string())?;
    let jobs = json["jobs"].as_array().into_iter().flatten();
    Ok(jobs.flat_map(|job| ["read", "write"].map(|side| job[side]["iops"].as_f64())).flatten().sum())
}

/// Output of a program that ends without error.
fn said(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        Ok(text)
    } else {
        Err(format!("{command:?} failed: {}", String::from_utf8_lossy(&output.stderr).trim()))
    }
}
