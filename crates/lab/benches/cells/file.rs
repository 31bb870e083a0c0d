//! Cells of the file device on tmpfs, against fio with `io_uring` at the same depth: the cost of our layers above the
//! kernel.
//!
//! Both read the same file from the same CPU, in turn, a second each. fio gets its fast options: registered files and
//! buffers, and submission in batches. `BLKYARD_FIO` names its program, otherwise the path; without it only our figure
//! is measured, and the report says so.
//!
//! CPU time is that of the whole process, with the kernel's workers, which do the copying on tmpfs; fio's start is not
//! counted.

use std::io::Write;
use std::path::Path;
use std::process::Command;

use blkyard::Device;
use blkyard_lab::bench::{BenchArgs, measure};
use blkyard_lab::floor::{Samples, WindowPlan};
use clap::Parser;
use serde_json::Value;

use crate::limits::measure_beside;
use crate::report::{self, CellReport, Figure};

const FOLDER: &str = "/dev/shm";
const FILE_BYTES: usize = 256 << 20;

#[derive(clap::Parser)]
struct Cli {
    #[command(flatten)]
    bench: BenchArgs,
}

/// I/Os a second, and CPU time per I/O.
#[derive(Default)]
struct FileFigures {
    iops: Samples,
    cpu_ns: Samples,
}

/// `file-tmpfs-4k-randread-*`.
pub fn tmpfs_cells(plan: WindowPlan, quick: bool, report: &mut CellReport) {
    for depth in [1, 32] {
        let cell = format!("file-tmpfs-4k-randread-qd{depth}");
        let cpu_cell = format!("{cell}-cpu");
        if !report.wants(&cell) && !report.wants(&cpu_cell) {
            continue;
        }
        let (windows, runtime) = if quick { (3, "500ms") } else { (10, "1s") };
        match compare(depth, windows, runtime) {
            Err(why) => report::skip(&cell, &why),
            Ok((ours, theirs)) => {
                let beside = |samples: &Samples| Some(samples.percentile(50.0)).filter(|value| value.is_finite());
                // Right after: the limits are of milliseconds, the windows above of a second each.
                let ([], floors) = measure_beside(plan, &[&cell, &cpu_cell], []);
                let iops = Figure::median(&cell, "iops", &ours.iops).over(&floors);
                report.add(iops.beside(beside(&theirs.iops)));
                let cpu = Figure::median(&cpu_cell, "ns/io", &ours.cpu_ns).over(&floors);
                report.add(cpu.beside(beside(&theirs.cpu_ns)));
            }
        }
    }
}

fn compare(depth: u32, windows: usize, runtime: &str) -> Result<(FileFigures, FileFigures), String> {
    let file = tempfile::Builder::new().prefix("blkyard-cell").tempfile_in(FOLDER);
    let mut file = file.map_err(|error| format!("no file in {FOLDER}: {error}"))?;
    let chunk: Vec<u8> = (0..1 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for _ in 0..FILE_BYTES / chunk.len() {
        file.write_all(&chunk).map_err(|error| format!("{}: {error}", file.path().display()))?;
    }
    let (mut ours, mut theirs) = (FileFigures::default(), FileFigures::default());
    // Direct I/O as the file system supports it; fio gets the same setting.
    let device = Device::open(&file.path().display().to_string()).map_err(|error| error.to_string())?;
    let direct = !device.describe().contains("page cache");
    let mut fio = true;
    let started = fio_cpu_ns(|| run_fio(file.path(), depth, None, direct)).map_or(0.0, |(_, cpu_ns)| cpu_ns);
    for window in 0..=windows {
        let one = run_ours(&device, depth, runtime)?;
        let other = if fio {
            let ran = fio_cpu_ns(|| run_fio(file.path(), depth, Some(runtime), direct));
            ran.map(|((iops, ios), cpu_ns)| (iops, (cpu_ns - started) / ios))
        } else {
            Ok((f64::NAN, f64::NAN))
        };
        let other = other.unwrap_or_else(|why| {
            eprintln!("fio was not measured: {why}");
            fio = false;
            (f64::NAN, f64::NAN)
        });
        // The first of each is for warming up.
        if window > 0 {
            for (figures, (iops, cpu_ns)) in [(&mut ours, one), (&mut theirs, other)] {
                figures.iops.push(iops);
                figures.cpu_ns.push(cpu_ns);
            }
        }
    }
    Ok((ours, theirs))
}

fn run_ours(device: &Device, depth: u32, runtime: &str) -> Result<(f64, f64), String> {
    let depth = depth.to_string();
    let line = ["bench", "-", "--rw", "randread", "--bs", "4k", "--iodepth", &depth, "--runtime", runtime];
    let cli = Cli::try_parse_from(line).map_err(|error| error.to_string())?;
    let report = measure(&cli.bench, device).map_err(|error| error.to_string())?;
    let json: Value = serde_json::from_str(&report.json()).map_err(|error| error.to_string())?;
    let iops = json["jobs"][0]["read"]["iops"].as_f64().filter(|iops| *iops > 0.0 && report.is_good());
    Ok((iops.ok_or("our own run failed")?, report.cpu_ns_per_io()))
}

/// Runs fio, and returns its CPU time.
fn fio_cpu_ns<T>(run: impl FnOnce() -> Result<T, String>) -> Result<(T, f64), String> {
    let before = children_cpu_ns().ok_or("/proc/self/stat cannot be read")?;
    let done = run()?;
    Ok((done, children_cpu_ns().unwrap_or(before) - before))
}

/// CPU time of child processes that have ended: fields 16 and 17 of /proc/self/stat, in ticks of 10 ms (proc(5)).
fn children_cpu_ns() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    let fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(13).take(2);
    Some(fields.filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() * 1e7)
}

/// Runs fio for a time, or for a single block; returns I/Os a second, and I/Os.
fn run_fio(path: &Path, depth: u32, runtime: Option<&str>, direct: bool) -> Result<(f64, f64), String> {
    let program = std::env::var("BLKYARD_FIO").unwrap_or_else(|_| "fio".into());
    let mut fio = Command::new(&program);
    fio.args(["--name=cell", "--rw=randread", "--bs=4k", "--ioengine=io_uring", "--norandommap", "--randrepeat=0"]);
    fio.args(["--output-format=json", "--registerfiles", "--fixedbufs", "--thread"]);
    match runtime {
        Some(runtime) => fio.arg("--time_based").arg(format!("--runtime={runtime}")),
        None => fio.arg("--io_size=4k"),
    };
    fio.arg(format!("--filename={}", path.display()));
    fio.arg(format!("--iodepth={depth}")).arg(format!("--direct={}", u8::from(direct)));
    fio.arg(format!("--iodepth_batch_submit={depth}")).arg(format!("--iodepth_batch_complete_max={depth}"));
    let output = fio.output().map_err(|error| format!("{program} cannot be run: {error}; set BLKYARD_FIO"))?;
    let failed = || format!("{program} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    let json = serde_json::from_slice::<Value>(&output.stdout).map_err(|_| failed())?;
    let read = &json["jobs"][0]["read"];
    let number = |key: &str| read[key].as_f64().filter(|number| *number > 0.0).ok_or_else(failed);
    Ok((number("iops")?, number("total_ios")?))
}
