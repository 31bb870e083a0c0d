//! `tcp-*`: our NVMe/TCP host on one CPU, and on another our daemon, over loopback.
//!
//! Both sides poll. `-cpu` and `-calls` are the CPU time and the socket calls of each side, per I/O. Calls are counted
//! by perf in runs of their own, since tracing slows both sides down.

use std::process::{Command, Stdio};

use blkyard::{Device, DeviceQueue};
use blkyard_lab::floor::{HAND_OFF, MachineLimit, Round, Samples, WindowPlan, partner_cpu, variant};
use blkyard_mq::QueueKind;
use blkyard_os::{Ring, RingConfig, now_ns, thread_cpu_ns};

use crate::core::clock;
use crate::limits::measure_beside;
use crate::lines::first_answer;
use crate::load::{Load, buffers};
use crate::report::{self, CellReport, Figure};
use crate::servers::{CellStore, ListeningServer};
use crate::vhost::{paused, write_all_by};

const NQN: &str = "nqn.2026-01.org.example:cell";
/// Windows of CPU time.
const WINDOWS: usize = 20;
const WINDOW_NS: u64 = 50_000_000;
/// Rounds between two looks at the time.
const ROUNDS: u32 = 64;
/// Events of a socket call: system calls of either side, and operations of io_uring.
const CALLS: &[&str] = &[
    "syscalls:sys_enter_recvfrom",
    "syscalls:sys_enter_recvmsg",
    "syscalls:sys_enter_sendto",
    "syscalls:sys_enter_sendmsg",
    "io_uring:io_uring_submit_req",
];

/// Cells of our host: by device and depth.
pub fn host_cells(plan: WindowPlan, report: &mut CellReport) {
    // As for vhost-user: in the first microseconds of a window the server wakes up.
    let plan = WindowPlan { window_ns: plan.window_ns * 3, windows: plan.windows / 4, warm_up: plan.warm_up / 2 };
    for store in [CellStore::Null, CellStore::Ram] {
        for depth in [1, 32, 128] {
            let name = format!("tcp-{}-qd{depth}", store.name());
            if report.wants(&name)
                && let Err(why) = two_cores(plan, report, store, depth, &name)
            {
                report::skip(&name, &why);
            }
        }
    }
}

fn two_cores(
    plan: WindowPlan,
    report: &mut CellReport,
    store: CellStore,
    depth: usize,
    name: &str,
) -> Result<(), String> {
    let (server, address) = ListeningServer::tcp(store, NQN, Some(partner_cpu()?))?;
    let device = Device::open(&format!("nvme-tcp://{address}/{NQN}?queues=2")).map_err(|error| error.to_string())?;
    let queue = |depth| device.queue(QueueKind::Default, depth).map_err(|error| error.to_string());
    if store == CellStore::Ram {
        write_all_by(&mut ring()?, queue(1)?, device.info(), turn)?;
    }
    // A queue of 128 entries holds 127 commands.
    let depth = depth.min(device.depth_max());
    let load = Load::on(ring()?, queue(depth.max(2))?, device.info(), buffers(depth), depth, true, clock());
    let mut load = HostLoad(load);
    first_answer(|| load.round())?;
    let hand_off = MachineLimit::of(HAND_OFF).ok_or("no such limit")?.variant()?;
    let variants = [variant(|| load.round()), hand_off].map(paused);
    let ([ours, hand_off], floors) = measure_beside(plan, &[name], variants);
    report.add(Figure::median(name, "ns/io", &ours).over(&floors).across(&hand_off));
    let cpu = load.cpu_ns(&server)?;
    for ((side, pid), ns) in [("host", std::process::id()), ("target", server.pid())].into_iter().zip(&cpu) {
        report.add(Figure::median(&format!("{name}-{side}-cpu"), "ns/io", ns));
        let name = format!("{name}-{side}-calls");
        match load.calls(pid) {
            Ok(calls) => report.add(Figure::median(&name, "calls", &calls)),
            Err(why) => report::skip(&name, &why),
        }
    }
    Ok(())
}

fn ring() -> Result<Ring, String> {
    Ring::new(RingConfig::default()).map_err(|error| error.to_string())
}

/// What a lane does between two rounds.
fn turn(ring: &mut Ring) {
    ring.submit();
    ring.reap();
}

/// Our host under load, on a ring of its own.
struct HostLoad<C: FnMut() -> u64>(Load<DeviceQueue, C, Ring>);

impl<C: FnMut() -> u64> HostLoad<C> {
    fn round(&mut self) -> u64 {
        let ended = self.0.round();
        turn(&mut self.0.cx);
        ended
    }

    /// I/Os until this is over.
    fn run(&mut self, mut is_over: impl FnMut() -> bool) -> u64 {
        let mut ios = 0;
        while !is_over() {
            (0..ROUNDS).for_each(|_| ios += self.round());
        }
        ios
    }

    /// CPU time of this thread and of a daemon per I/O, in some windows.
    fn cpu_ns(&mut self, server: &ListeningServer) -> Result<[Samples; 2], String> {
        let mut both = [Samples::default(), Samples::default()];
        for _ in 0..WINDOWS {
            let (start_ns, host_ns, target_ns) = (now_ns(), thread_cpu_ns(), server.cpu_ns()?);
            let ios = self.run(|| now_ns() - start_ns >= WINDOW_NS).max(1) as f64;
            both[0].push((thread_cpu_ns() - host_ns) as f64 / ios);
            both[1].push((server.cpu_ns()? - target_ns) as f64 / ios);
        }
        Ok(both)
    }

    /// Socket calls of a process per I/O, which perf counts while the load runs.
    fn calls(&mut self, pid: u32) -> Result<Samples, String> {
        let mut perf = Command::new("perf");
        perf.args(["stat", "-x", ",", "-p", &pid.to_string()]);
        CALLS.iter().for_each(|call| _ = perf.args(["-e", call]));
        perf.args(["--", "sleep", "1"]).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut perf = perf.spawn().map_err(|error| format!("perf: {error}"))?;
        let start_ns = now_ns();
        let ios = self.run(|| !matches!(perf.try_wait(), Ok(None)));
        let passed_ns = now_ns() - start_ns;
        let said = perf.wait_with_output().map_err(|error| format!("perf: {error}"))?;
        let text = String::from_utf8_lossy(&said.stderr);
        // "1234,,syscalls:sys_enter_sendto,..."
        let counts: Vec<f64> = text.lines().filter_map(|line| line.split(',').next()?.parse().ok()).collect();
        match counts.as_slice() {
            calls if calls.len() == CALLS.len() => {
                let mut samples = Samples::default();
                // It counts for a second, and runs for somewhat longer.
                samples.push(calls.iter().sum::<f64>() * passed_ns as f64 / 1e9 / ios.max(1) as f64);
                Ok(samples)
            }
            _ => Err(format!("perf cannot count system calls here: {}", text.trim())),
        }
    }
}

impl<C: FnMut() -> u64> Drop for HostLoad<C> {
    /// I/O in flight completes as long as the ring turns.
    fn drop(&mut self) {
        while !self.0.drains() {
            turn(&mut self.0.cx);
        }
    }
}
