//! Whole runs on devices in memory and on a file.

use blkyard::Device;
use clap::Parser;

use super::{BenchArgs, BenchError, BenchReport, measure};

#[derive(Debug, clap::Parser)]
struct Cli {
    #[command(flatten)]
    bench: BenchArgs,
}

fn args(device: &str, line: &str) -> BenchArgs {
    Cli::parse_from(["bench", device].into_iter().chain(line.split_whitespace())).bench
}

fn bench(device: &str, line: &str) -> BenchReport {
    let opened = Device::open(device).unwrap();
    measure(&args(device, line), &opened).unwrap()
}

fn json(report: &BenchReport) -> serde_json::Value {
    serde_json::from_str(&report.json()).unwrap()
}

#[test]
fn without_a_time_each_block_is_done_once() {
    for (line, ios) in [
        ("--rw read --bs 64k --iodepth 8", 64),
        ("--rw write --bs 4k --iodepth 32 --numjobs 3", 1024),
        ("--rw randread --bs 8k --iodepth 4 --numjobs 2 --size 50%", 256),
        ("--rw trim --bs 128k", 32),
        // Shared by four.
        ("--rw randwrite --iodepth 8 --numjobs 4 --queues 1", 1024),
        // Reads and writes on separate queues, without sleepers.
        ("--rw randrw --iodepth 8 --numjobs 3 --queues 2 --read_queues 1", 1024),
        ("--rw randrw --iodepth 8 --numjobs 2 --hipri --poll_queues 1", 1024),
    ] {
        let report = bench("ram:4M", line);
        assert!(report.is_good() && report.ios() == ios, "{line}: {report:?}");
    }
}

#[test]
fn jobs_that_slept_are_told_how_to_look_instead() {
    let slow = "null:4G?latency_us=20000";
    let report = |line| super::text::text(&bench(slow, line));
    let asleep = report("--rw randread --runtime 200ms");
    assert!(asleep.contains("% of the run; with --spin_us 200 they would look"), "{asleep}");
    let awake = report("--rw randread --runtime 200ms --spin_us 100000");
    assert!(!awake.contains("--spin_us"), "{awake}");
}

#[test]
fn the_report_has_the_keys_of_fio() {
    // So many I/Os and not so long: on a machine without a CPU to spare, a time holds too few for the mix, and for
    // ticks of CPU time.
    let report = bench("null:4G", "--rw randrw --rwmixread 75 --iodepth 16 --fsync 8");
    assert!(report.ios() >= 1 << 20, "{}", report.ios());
    let json = json(&report);
    let job = &json["jobs"][0];
    let iops = |direction: &str| job[direction]["iops"].as_f64().unwrap();
    let mix = iops("read") / (iops("read") + iops("write"));
    assert!((0.73..0.77).contains(&mix), "{mix}");
    assert!(job["read"]["bw_bytes"].as_u64().unwrap() > 1 << 20);
    let latency = &job["read"]["lat_ns"];
    let number = |key: &str| latency[key].as_f64().unwrap();
    assert!(number("min") <= number("mean") && number("mean") <= number("max") && number("stddev") > 0.0);
    assert_eq!(latency["N"], job["read"]["total_ios"]);
    let percentiles = latency["percentile"].as_object().unwrap();
    assert!(percentiles["50.000000"].as_u64() <= percentiles["99.990000"].as_u64());
    let per_flush = job["write"]["total_ios"].as_f64().unwrap() / job["sync"]["total_ios"].as_f64().unwrap();
    assert!((7.9..9.0).contains(&per_flush), "{per_flush} writes a flush");
    let depths: f64 = job["iodepth_level"].as_object().unwrap().values().filter_map(serde_json::Value::as_f64).sum();
    assert!((depths - 100.0).abs() < 0.01);
    assert_eq!((&job["error"], &job["job options"]["rwmixread"]), (&0.into(), &"75".into()));
    let words = super::text::text(&report);
    assert!(["read: IOPS=", "99.99th=", "ns per I/O", "IO depths"].iter().all(|word| words.contains(word)), "{words}");
}

#[test]
fn latency_is_what_the_device_takes() {
    let report = bench("null:1G?latency_us=2000", "--rw randread --iodepth 4 --size 400k");
    let read = &json(&report)["jobs"][0]["read"];
    // A busy machine adds to most of a hundred, but not to all.
    let min = read["lat_ns"]["min"].as_u64().unwrap();
    assert!((2_000_000..20_000_000).contains(&min), "{read}");
    // Four at a time.
    assert!(report.ios() == 100 && read["runtime"].as_u64().unwrap() >= 49, "{read}");
    // 200 ms at 4 in 2 ms at the most; how much less is the machine's affair.
    let report = bench("null:1G?latency_us=2000", "--rw randread --iodepth 4 --runtime 200ms");
    assert!((4..=400).contains(&report.ios()), "{}", report.ios());
}

#[test]
fn what_is_written_is_found_again_and_what_is_changed_is_found_out() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let name = path.to_str().unwrap();
    for line in [
        "--rw write --iodepth 4",
        "--rw randwrite --iodepth 16 --numjobs 2",
        "--rw randwrite --numjobs 3 --queues 1",
        "--rw randwrite --iodepth 4 --numjobs 3 --queues 2 --read_queues 2",
        "--rw write --iodepth 4 --hipri",
    ] {
        let report = bench(name, &format!("{line} --verify crc32c"));
        assert!(report.is_good() && report.checked == 256, "{line}: {report:?}");
    }
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[5 * 4096 + 100] ^= 1;
    bytes.copy_within(7 * 4096..8 * 4096, 9 * 4096);
    bytes[200 * 4096..201 * 4096].fill(0);
    std::fs::write(&path, bytes).unwrap();
    let report = bench(name, "--rw randread --iodepth 8 --verify crc32c");
    assert_eq!((report.mismatches(), report.checked, report.is_good()), (3, 256, false));
    let words = report.violations.join("\n");
    for part in
        ["sector 40: checksum", "the first at 100", "sector 72: it is intact, but belongs to sector 56", "all zeroes"]
    {
        assert!(words.contains(part), "{part}: {words}");
    }
}

#[test]
fn a_device_that_cannot_is_an_error_and_one_that_fails_ends_the_job() {
    let device = Device::open("ram:1M?readonly=on").unwrap();
    let refused = measure(&args("ram:1M?readonly=on", "--rw randwrite"), &device);
    assert!(matches!(refused, Err(BenchError::Args(_))), "{refused:?}");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let name = format!("{}?direct=off", path.display());
    let device = Device::open(&name).unwrap();
    // Shorter than it was when it was opened.
    std::fs::File::options().write(true).open(&path).unwrap().set_len(1 << 19).unwrap();
    let report = measure(&args(&name, "--rw read --bs 64k --iodepth 4"), &device).unwrap();
    assert!(report.errors() > 0 && !report.is_good(), "{report:?}");
    assert!(report.violations[0].contains("Read of 128 sectors at sector"), "{:?}", report.violations);
}
