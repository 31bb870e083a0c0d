//! Without a model: io_uring on a file of this machine with O_DIRECT, plain buffers against fixed ones.
//!
//! Both have a queue of their own on the same file. The thread submits up to a depth, sleeps until completions come,
//! and takes them, as a lane does. Its CPU time is all that it uses: the queue core, the system calls with the pinning
//! of plain pages, and its sleep. Interrupts and the kernel's threads are in no figure.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use blkyard::{Device, DeviceQueue};
use blkyard_mq::{
    Bio, BufferAccess, HwQueue, HwQueueConfig, Op, QueueKind, Region, RegionTable, RegisteredBuffer, SECTOR_SHIFT,
    Segment, Status,
};
use blkyard_os::{FixedBuffers, Ring, RingConfig, now_ns, thread_cpu_ns};
use blkyard_sim::Rng;
use serde::Serialize;

use super::pairs::{RealPair, RealWindow};
use super::{PremappedLength, SIZES};

/// Bytes of the file.
const FILE_BYTES: u64 = 64 << 20;
/// I/Os in flight.
const DEPTH: usize = 16;
/// Length of a window.
const WINDOW: Duration = Duration::from_millis(60);
/// A disk that does not answer for so long is not measured.
const SILENCE: Duration = Duration::from_secs(30);
/// `statfs(2)`, TMPFS_MAGIC: direct I/O there is a copy.
const TMPFS: i64 = 0x0102_1994;

/// The pairs, or why there are none.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct HostPairs {
    /// Folder of the file.
    pub(crate) folder: PathBuf,
    pub(crate) depth: usize,
    /// Each I/O in plain and in fixed buffers.
    pub(crate) pairs: Vec<RealPair>,
}

/// Measures on the calling thread.
///
/// # Errors
/// The reason why it cannot be measured, for the report.
pub(crate) fn measure(length: PremappedLength) -> Result<HostPairs, String> {
    let here = std::env::current_dir().unwrap_or_default();
    let folders = [std::env::temp_dir(), PathBuf::from("/var/tmp"), here];
    let is_real = |folder: &&PathBuf| rustix::fs::statfs(*folder).is_ok_and(|fs| fs.f_type != TMPFS);
    let mut reason = "no folder on a disk for the file; set TMPDIR to one".to_owned();
    for folder in folders.iter().filter(is_real) {
        match measure_in(folder, length) {
            Ok(pairs) => return Ok(HostPairs { folder: folder.clone(), depth: DEPTH, pairs }),
            Err(why) => reason = why,
        }
    }
    Err(reason)
}

fn measure_in(folder: &Path, length: PremappedLength) -> Result<Vec<RealPair>, String> {
    let path = folder.join(format!("blkyard-premapped-{}.img", std::process::id()));
    let _file = TestFile::new(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let device = Device::open(&format!("file:{}?direct=on", path.display())).map_err(|error| error.to_string())?;
    let block = device.info().limits.logical_block_bytes;
    let mut sizes = SIZES.map(|bytes| bytes.max(block)).to_vec();
    sizes.dedup();
    sizes.into_iter().map(|bytes| pair(&device, bytes, length.samples)).collect()
}

fn pair(device: &Device, bytes: u32, samples: usize) -> Result<RealPair, String> {
    let mut rigs = [HostRig::new(device, bytes, false)?, HostRig::new(device, bytes, true)?];
    let mut windows = Vec::with_capacity(samples);
    for sample in 0..=samples {
        let [each, once] = &mut rigs;
        let pair = [each.window()?, once.window()?];
        // The first one warms up.
        if sample > 0 {
            windows.push(pair);
        }
    }
    Ok(RealPair::new(bytes, &windows))
}

/// A file with data, removed with its owner.
struct TestFile<'a>(&'a Path);

impl TestFile<'_> {
    fn new(path: &Path) -> std::io::Result<TestFile<'_>> {
        let mut options = File::options();
        let mut file = options.write(true).create_new(true).mode(0o600).open(path)?;
        let guard = TestFile(path);
        let (mut rng, mut block) = (Rng::new(1), vec![0; 1 << 20]);
        for _ in 0..FILE_BYTES >> 20 {
            block.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&rng.draw().to_le_bytes()));
            file.write_all(&block)?;
        }
        file.sync_all()?;
        Ok(guard)
    }
}

impl Drop for TestFile<'_> {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.0);
    }
}

/// A queue on the file, with its ring and bios.
struct HostRig {
    hw: HwQueue<DeviceQueue>,
    ring: Ring,
    free: Vec<Box<Bio>>,
    bytes: u32,
    /// Region or registered buffer that segments name.
    region: u32,
    rng: Rng,
}

impl HostRig {
    fn new(device: &Device, bytes: u32, is_fixed: bool) -> Result<HostRig, String> {
        let region = Region::anonymous(DEPTH * bytes as usize).map_err(|error| error.to_string())?;
        // Pages are there before they are measured.
        region.span(0, region.len()).into_iter().for_each(|all| all.fill(0));
        let ring = Ring::new(RingConfig { registers_memory: is_fixed, ..RingConfig::default() });
        let mut ring = ring.map_err(|error| error.to_string())?;
        let queue = device.queue(QueueKind::Default, DEPTH).map_err(|error| error.to_string())?;
        let config = HwQueueConfig { depth: DEPTH, bios_max: DEPTH, ..HwQueueConfig::default() };
        let mut hw = HwQueue::new(queue, Arc::new(device.info().clone()), config);
        hw.set_memory(&mut ring, Arc::new(RegionTable::new(vec![Arc::clone(&region)])));
        let mut number = 0;
        if is_fixed {
            let buffer = RegisteredBuffer::new(&region, 0, region.len() as u64, BufferAccess::ReadWrite);
            let buffer = buffer.map_err(|error| error.to_string())?;
            if !hw.add_buffer(&mut ring, &buffer) || !matches!(ring.buffers(), FixedBuffers::Registered { .. }) {
                return Err("the kernel does not register buffers; raise ulimit -l".to_owned());
            }
            number = buffer.id().number();
        }
        let free = (0..DEPTH as u64).map(|slot| {
            let mut bio = Bio::with_capacity(1);
            bio.cookie = slot;
            bio
        });
        Ok(HostRig { hw, ring, free: free.collect(), bytes, region: number, rng: Rng::new(2) })
    }

    /// Random reads for the time of a window, and the end of all of them.
    fn window(&mut self) -> Result<RealWindow, String> {
        let HostRig { hw, ring, free, bytes, region, rng } = self;
        let (start_ns, start_cpu_ns) = (now_ns(), thread_cpu_ns());
        let (mut ios, mut failed, mut answered_ns) = (0, None, start_ns);
        let mut time_ns = start_ns;
        loop {
            let is_over = time_ns - start_ns >= WINDOW.as_nanos() as u64 || failed.is_some();
            while let Some(mut bio) = free.pop_if(|_| !is_over) {
                bio.reset();
                (bio.op, bio.sectors) = (Op::Read, *bytes >> SECTOR_SHIFT);
                let block = rng.below(FILE_BYTES / u64::from(*bytes));
                bio.sector = block * u64::from(bio.sectors);
                let offset = bio.cookie * u64::from(*bytes);
                bio.segments.push(Segment { region: *region, offset, len: *bytes });
                hw.submit(bio);
            }
            if free.len() == DEPTH {
                break;
            }
            hw.issue(ring, time_ns);
            ring.sleep(Some(time_ns + SILENCE.as_nanos() as u64));
            ring.reap();
            time_ns = now_ns();
            hw.reap(ring, time_ns, &mut |bio| {
                if bio.status != Status::Ok {
                    failed = Some(bio.status);
                }
                (ios, answered_ns) = (ios + 1, time_ns);
                free.push(bio);
            });
            if time_ns - answered_ns > SILENCE.as_nanos() as u64 {
                return Err("the disk does not answer".to_owned());
            }
        }
        match failed {
            Some(status) => Err(format!("a read with O_DIRECT failed: {status}")),
            None => Ok(RealWindow { ios, cpu_ns: thread_cpu_ns() - start_cpu_ns, elapsed_ns: time_ns - start_ns }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::interval::SAMPLES_MIN;
    use super::*;

    #[test]
    fn both_kinds_of_buffers_are_measured_or_a_reason_is_given() {
        let length = PremappedLength { samples: SAMPLES_MIN, windows: 1, quick: true };
        match measure(length) {
            Ok(HostPairs { folder, pairs, .. }) => {
                assert!(pairs.len() >= SIZES.len() - 1, "{pairs:?}");
                assert!(pairs.iter().all(|pair| pair.samples == SAMPLES_MIN && pair.once.iops.low > 0.0), "{pairs:?}");
                let left =
                    std::fs::read_dir(folder).unwrap().filter_map(|entry| entry.ok()?.file_name().into_string().ok());
                let ours = format!("blkyard-premapped-{}", std::process::id());
                assert_eq!(left.filter(|name| name.starts_with(&ours)).count(), 0);
            }
            Err(why) => assert!(!why.is_empty()),
        }
    }
}
