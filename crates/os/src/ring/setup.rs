//! Sets up a ring with the best features of the kernel, and as large as the limits allow.

use std::io;

use io_uring::{Builder, IoUring, Parameters};

use super::RingError;
use super::eventfds::COMPLETIONS_EACH;

/// How a ring is made.
#[derive(Clone, Copy, Debug)]
pub struct RingConfig {
    /// Whether private memory is registered with the kernel. Off only to measure what that is worth.
    pub registers_memory: bool,
    /// Entries that can be pushed between two system calls; more need a further call.
    pub entries: u32,
    /// Completions that may be outstanding at one time, for all queues of the lane.
    pub outstanding_max: u32,
    /// Pollers whose eventfds it polls. Each takes twelve completions of 16 bytes, and all together at most three
    /// quarters of the 65536 that Linux allows: 4096 pollers.
    pub pollers_max: u32,
    /// Only the thread that makes the ring uses it. Cheaper: completions are then handed over inside our own calls.
    /// Without, the ring may change owners, one at a time.
    pub single_owner: bool,
}

impl Default for RingConfig {
    fn default() -> Self {
        // 256: two full queues at once; beyond that the share of the call in one operation is below a nanosecond.
        // 10240: eighty queues of the usual depth. With the share of 512 pollers that is a quarter of a mebibyte.
        RingConfig {
            registers_memory: true,
            entries: 256,
            outstanding_max: 10_240,
            pollers_max: 512,
            single_owner: true,
        }
    }
}

/// Completions of the largest ring that Linux makes (`IORING_MAX_CQ_ENTRIES`), 16 bytes each.
const COMPLETIONS_MAX: u32 = 65_536;
/// Completions of the smallest ring that is tried.
const COMPLETIONS_MIN: u32 = 8192;
/// Completions of one poller: those of the eventfds that it listens to, one on either side of its queue, and of those
/// that it signals.
const POLLER_COMPLETIONS: usize = 4 * COMPLETIONS_EACH;

/// Most threads of the kernel that wait in a lane's place: for operations on files, and for others. By default there
/// are four for each CPU, and one disk that hangs holds them all. So many are as much as eight disks with the usual
/// depth have in flight. A thread is made when it is needed, and ends when it is idle.
const WAITING_MAX: u32 = 1024;

/// Makes the kernel's side. Some kernels count it as locked memory: where the whole does not fit, smaller ones are
/// tried.
pub(super) fn set_up(config: RingConfig) -> Result<IoUring, RingError> {
    let wanted = config.outstanding_max.saturating_add(config.pollers_max.saturating_mul(POLLER_COMPLETIONS as u32));
    let mut completions = wanted.max(config.entries).min(COMPLETIONS_MAX);
    let uring = loop {
        match build(config, completions) {
            Err(error) if error.raw_os_error() == Some(libc::ENOMEM) && completions > COMPLETIONS_MIN => {
                completions = (completions / 2).max(COMPLETIONS_MIN);
            }
            made => break made.map_err(RingError::from_setup)?,
        }
    };
    check_features(uring.params())?;
    // Linux 5.15; an older kernel keeps its own limit.
    let _ = uring.submitter().register_iowq_max_workers(&mut [WAITING_MAX; 2]);
    Ok(uring)
}

/// Capacity of a new ring: completions that drivers may have outstanding, and pollers. A ring smaller than requested
/// keeps a quarter for the drivers.
pub(super) fn room(params: &Parameters, config: RingConfig) -> (usize, usize) {
    let made = params.cq_entries() as usize;
    let pollers = (made * 3 / 4 / POLLER_COMPLETIONS).min(config.pollers_max as usize).max(1);
    let drivers = made.saturating_sub(pollers * POLLER_COMPLETIONS).min(config.outstanding_max as usize).max(1);
    (drivers, pollers)
}

fn build(config: RingConfig, completions: u32) -> io::Result<IoUring> {
    let plain = || {
        let mut builder: Builder = IoUring::builder();
        // A bad entry fails alone; the ring continues with those behind it. Sizes beyond the kernel's are clamped.
        builder.setup_submit_all().setup_clamp().setup_cqsize(completions);
        builder
    };
    if config.single_owner {
        // Completions wait until we enter, and the kernel need not look for other submitters. Linux 6.1.
        let made = plain().setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag().build(config.entries);
        if !matches!(&made, Err(error) if error.raw_os_error() == Some(libc::EINVAL)) {
            return made;
        }
    }
    // A ring that changes owners does without cooperation: completions are handed over by the thread that submitted,
    // and with cooperation that thread would do so only at its next system call, while another waits.
    plain().build(config.entries)
}

fn check_features(params: &Parameters) -> Result<(), RingError> {
    let needed = [
        (params.is_feature_nodrop(), "retention of completions when the ring is full (NODROP)"),
        (params.is_feature_submit_stable(), "entries that may be reused once submitted"),
        (params.is_feature_ext_arg(), "a time limit on waiting"),
    ];
    needed.iter().find(|(there, _)| !there).map_or(Ok(()), |(_, what)| Err(RingError::TooOld { missing: what }))
}
