//! `beside-*`: files behind a daemon with its defaults, for a client that sleeps until its I/O has completed, as guests
//! do. The baseline is qemu-storage-daemon with its defaults and a file of the same kind.
//!
//! Figures are I/Os a second, without the flushes; `-cpu` is the server's CPU time for each. Files of `write-flush` are
//! on disk and opened with `O_DIRECT`, the others on tmpfs. Every program may use all CPUs; the servers are asked in
//! turn, for a second each.

use blkyard_lab::floor::Samples;

use crate::clients::usual_load;
use crate::report::{self, CellReport, Figure};
use crate::servers::{CellFile, CellFolder, CellTransport, ListeningServer, Who};

/// Name, kind of file, and load in words of `blkyard bench`.
const CELLS: [(&str, CellFile, &str); 5] = [
    ("beside-write-flush-qd1", CellFile::Disk, "--rw randwrite --bs 4k --iodepth 1 --fsync 1"),
    ("beside-write-flush-qd8", CellFile::Disk, "--rw randwrite --bs 4k --iodepth 8 --fsync 8"),
    ("beside-read-1m-qd4", CellFile::Tmpfs, "--rw read --bs 1m --iodepth 4"),
    ("beside-read-128k-qd8", CellFile::Tmpfs, "--rw randread --bs 128k --iodepth 8"),
    ("beside-mixed-4k-qd32", CellFile::Tmpfs, "--rw randrw --rwmixread 70 --bs 4k --iodepth 32"),
];

pub fn beside_cells(quick: bool, report: &mut CellReport) {
    let (seconds, runs) = if quick { (0.5, 3) } else { (1.0, 9) };
    for (name, file, load) in CELLS {
        if !report.wants(name) {
            continue;
        }
        match measure(file, load, seconds, runs) {
            Ok([ours, theirs]) => {
                let beside = theirs.map(|samples| samples.percentile(50.0));
                report.add(Figure::median(name, "iops", &ours[0]).beside(Some(beside[0])));
                report.add(Figure::median(&format!("{name}-cpu"), "ns", &ours[1]).beside(Some(beside[1])));
            }
            Err(why) => report::skip(name, &why),
        }
    }
}

/// I/Os a second, and CPU time of the server for an I/O, ns, with ours and theirs.
fn measure(file: CellFile, load: &str, seconds: f64, runs: usize) -> Result<[[Samples; 2]; 2], String> {
    let ground = CellFolder::new()?;
    let servers = [
        ListeningServer::usual_file(&ground, Who::Ours, file)?,
        ListeningServer::usual_file(&ground, Who::Theirs, file)?,
    ];
    let mut figures = <[[Samples; 2]; 2]>::default();
    for _ in 0..runs {
        for (server, [rate, cost]) in servers.iter().zip(&mut figures) {
            let before_ns = server.cpu_ns()?;
            let iops = usual_load(seconds, CellTransport::Vhost, &server.socket, load)?;
            rate.push(iops);
            cost.push((server.cpu_ns()? - before_ns) as f64 / (iops * seconds));
        }
    }
    Ok(figures)
}
