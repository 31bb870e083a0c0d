//! The limit of the machine for each cell, with the reason for it: the only table of them.
//!
//! A limit is measured in turn with the cell's own windows, so that both share their minute. Limits are those of
//! `blkyard floor`.

use blkyard_lab::floor::{MachineLimit, Samples, Variant, WindowPlan, measure};

/// A cell and its limit.
pub struct Beside {
    pub cell: &'static str,
    pub against: Against,
    /// Reason for this limit.
    pub why: &'static str,
}

/// Reference of a cell.
pub enum Against {
    /// The sum of these limits: nanoseconds.
    Limits(&'static [&'static str]),
    /// The cost of the first less that of the second.
    Difference(&'static str, &'static str),
    /// A figure that needs no measuring.
    Fixed(f64),
    /// The same figure of the mock instead of the core, measured by the cell.
    Mock,
}

macro_rules! beside {
    ($($cell:literal, $against:expr, $why:literal;)*) => {
        &[$(Beside { cell: $cell, against: $against, why: $why }),*]
    };
}

use Against::{Difference, Fixed, Limits, Mock};

/// Cells that are not here have no limit but themselves.
pub const TABLE: &[Beside] = beside! {
    "core-null-b1", Limits(&["mock-b1"]), "the least a core does for one I/O, with the one clock read of a round";
    "core-null-b8", Limits(&["mock-b8"]), "the same in batches of 8";
    "core-null-b32", Limits(&["mock-b32"]), "the same in batches of 32";
    "core-null-b1-nostats", Limits(&["mock-b1"]), "reads the clock too, though it counts nothing";
    "core-null-b8-nostats", Limits(&["mock-b8"]), "as above";
    "core-null-b32-nostats", Limits(&["mock-b32"]), "as above";
    "core-null-b32-stats-cost", Difference("mock-b32", "mock-b32-nostats"), "a stamp and a histogram for each batch";
    "sched-null-2x2", Mock, "as for two queues without one: each queue has a scheduler of its own";
    "core-null-2x2", Mock, "two mocks, which share nothing, are as many times one as the machine's CPUs allow";
    "shared-null-b32", Limits(&["mock-b32"]), "one thread could do without a ring and a baton";
    "shared-null-b32-threads2", Limits(&["pair-qd128"]), "half of all I/Os cross to the other CPU and back";
    "shared-null-2x1-b32", Fixed(1.0), "a queue has one owner at a time, who can do no more than one thread";
    "ram-4k-qd1", Limits(&["copy-4k-dram"]), "the data must be copied";
    "ram-4k-qd32", Limits(&["copy-4k-dram-ahead"]), "the same, where the next is known";
    "file-tmpfs-4k-randread-qd1", Limits(&["uring-b1", "copy-4k-dram"]), "an operation of the kernel's, and the copy";
    "file-tmpfs-4k-randread-qd32", Limits(&["uring-b32", "copy-4k-dram"]), "32 operations in a call, and the copies";
    "file-tmpfs-4k-randread-qd1-cpu", Limits(&["uring-b1", "copy-4k-dram"]), "as above";
    "file-tmpfs-4k-randread-qd32-cpu", Limits(&["uring-b32", "copy-4k-dram"]), "as above";
    "nvme-null-qd1", Limits(&["pair-qd1"]), "a command must cross to the other CPU and back";
    "nvme-null-qd32", Limits(&["pair-qd128"]), "the same in a stream";
    "nvme-null-qd128", Limits(&["pair-qd128"]), "as above";
    "tcp-null-qd1", Limits(&["sockets-qd1"]), "the bytes must cross, by at least one call of each side each way";
    "tcp-null-qd32", Limits(&["sockets-qd32"]), "the same in batches";
    "tcp-null-qd128", Limits(&["sockets-qd128"]), "as above";
    "tcp-ram-qd1", Limits(&["sockets-qd1", "copy-4k-dram"]), "and the data must be copied";
    "tcp-ram-qd32", Limits(&["sockets-qd32", "copy-4k-dram-ahead"]), "as above";
    "tcp-ram-qd128", Limits(&["sockets-qd128", "copy-4k-dram-ahead"]), "as above";
    "vfio-user-null-qd1", Limits(&["pair-qd1"]), "a command must cross to the other CPU and back";
    "vfio-user-null-qd32", Limits(&["pair-qd128"]), "the same in a stream";
    "vfio-user-null-qd128", Limits(&["pair-qd128"]), "as above";
    "vfio-user-ram-qd1", Limits(&["pair-qd1", "copy-4k-dram"]), "and the data must be copied";
    "vfio-user-ram-qd32", Limits(&["pair-qd128", "copy-4k-dram-ahead"]), "as above";
    "vfio-user-ram-qd128", Limits(&["pair-qd128", "copy-4k-dram-ahead"]), "as above";
    "vhost-null-qd1", Limits(&["virtio-qd1"]), "a request must cross to the other CPU and back";
    "vhost-null-qd1-packed", Limits(&["virtio-qd1"]), "as above";
    "vhost-null-qd32", Limits(&["virtio-qd128"]), "the same in a stream";
    "vhost-null-qd32-packed", Limits(&["virtio-qd128"]), "as above";
    "vhost-null-qd128", Limits(&["virtio-qd128"]), "as above";
    "vhost-null-qd128-packed", Limits(&["virtio-qd128"]), "as above";
    "vhost-ram-qd1", Limits(&["virtio-qd1", "copy-4k-dram"]), "and the data must be copied";
    "vhost-ram-qd1-packed", Limits(&["virtio-qd1", "copy-4k-dram"]), "as above";
    "vhost-ram-qd32", Limits(&["virtio-qd128", "copy-4k-dram-ahead"]), "as above, in a stream";
    "vhost-ram-qd32-packed", Limits(&["virtio-qd128", "copy-4k-dram-ahead"]), "as above";
    "vhost-ram-qd128", Limits(&["virtio-qd128", "copy-4k-dram-ahead"]), "as above";
    "vhost-ram-qd128-packed", Limits(&["virtio-qd128", "copy-4k-dram-ahead"]), "as above";
};

/// The table's row of a cell.
pub fn beside(cell: &str) -> Option<&'static Beside> {
    TABLE.iter().find(|beside| beside.cell == cell)
}

/// Limits as they were measured, in nanoseconds.
#[derive(Debug, Default)]
pub struct Floors(Vec<(&'static str, f64)>);

impl Floors {
    /// The reference value of a cell, if all its inputs were measured.
    pub fn of(&self, cell: &str) -> Option<f64> {
        match beside(cell)?.against {
            Limits(names) => names.iter().map(|name| self.cost(name)).sum(),
            Difference(more, less) => Some(self.cost(more)? - self.cost(less)?),
            Fixed(figure) => Some(figure),
            Mock => None,
        }
    }

    fn cost(&self, name: &str) -> Option<f64> {
        self.0.iter().find(|(limit, _)| *limit == name).map(|(_, cost)| *cost)
    }
}

/// Runs the variants in turn with the limits of these cells.
pub fn measure_beside<const N: usize>(
    plan: WindowPlan,
    cells: &[&str],
    variants: [Variant<'_>; N],
) -> ([Samples; N], Floors) {
    let mut names = Vec::new();
    for cell in cells {
        match beside(cell).map(|beside| &beside.against) {
            Some(Limits(limits)) => names.extend_from_slice(limits),
            Some(Difference(more, less)) => names.extend([*more, *less]),
            Some(Fixed(_) | Mock) | None => {}
        }
    }
    names.sort_unstable();
    names.dedup();
    let mut variants = Vec::from(variants);
    let mut made = Vec::new();
    for name in names {
        let limit = MachineLimit::of(name).ok_or_else(|| "there is no such limit".to_string());
        match limit.and_then(MachineLimit::variant) {
            Ok(variant) => {
                made.push(name);
                variants.push(variant);
            }
            Err(why) => eprintln!("{name}: not measured: {why}"),
        }
    }
    let mut samples = measure(plan, &mut variants).into_iter();
    let ours = std::array::from_fn(|_| samples.next().unwrap_or_default());
    (ours, Floors(made.into_iter().zip(samples.map(|limit| limit.cost())).collect()))
}
