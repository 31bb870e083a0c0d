//! What `serve` says while it serves: on request a line for each export with what happened since the last one, and
//! unasked how the memory of the guests is reached, whenever that changes.

use std::fmt::{Display, Write};
use std::io::Write as _;
use std::time::Instant;

use blkyard_export::QueueWatch;
use blkyard_mq::{OpClass, StatsSnapshot};
use blkyard_os::{FixedBuffers, LaneThread};

use crate::Device;
use crate::control::Daemon;
use crate::spec::show_size;

/// The exports that are watched.
pub struct Watch {
    exports: Vec<Watched>,
    buffers: Vec<FixedBuffers>,
}

struct Watched {
    before: StatsSnapshot,
    at: Instant,
}

impl Watch {
    /// Watches so many exports of a daemon.
    pub fn new(exports: usize) -> Watch {
        let begin = || Watched { before: StatsSnapshot::default(), at: Instant::now() };
        Watch { exports: (0..exports).map(|_| begin()).collect(), buffers: Vec::new() }
    }

    /// Says of each lane how it reaches the guests' memory, if that is not as it was.
    pub fn tell_buffers<S>(&mut self, lanes: &[LaneThread<S>]) {
        let now: Vec<_> = lanes.iter().map(LaneThread::buffers).collect();
        for (index, (lane, buffers)) in lanes.iter().zip(&now).enumerate() {
            if self.buffers.get(index) != Some(buffers) {
                match buffers {
                    FixedBuffers::Registered { bytes: 0 } => {}
                    FixedBuffers::Registered { bytes } => {
                        tracing::info!(
                            "{}: {} of guest memory registered as fixed buffers",
                            lane.name(),
                            show_size(*bytes)
                        );
                    }
                    FixedBuffers::Plain { reason } => {
                        tracing::info!("{}: guest memory by plain vectored calls: {reason}", lane.name());
                    }
                }
            }
        }
        self.buffers = now;
    }

    /// Prints a line for each.
    pub fn print(&mut self, daemon: &Daemon) {
        for (watched, export) in self.exports.iter_mut().zip(&daemon.exports) {
            let state = if export.status.is_connected() { "connected" } else { "waiting" };
            let line = watched.line(&daemon.devices[export.device].device, &export.queues());
            say(format_args!("{} {state} {line}", export.name));
        }
    }
}

/// Says a line to whoever started the daemon. Nobody may listen any more: that ends the telling, not the daemon.
pub fn say(line: impl Display) {
    let mut stdout = std::io::stdout();
    let _ = writeln!(stdout, "{line}").and_then(|()| stdout.flush());
}

impl Watched {
    fn line(&mut self, device: &Device, queues: &[QueueWatch]) -> String {
        let mut now = StatsSnapshot::default();
        queues.iter().filter_map(QueueWatch::stats).for_each(|stats| now.merge(&stats.snapshot()));
        let seconds = self.at.elapsed().as_secs_f64().max(1e-9);
        self.at = Instant::now();
        let mut line = String::new();
        for (class, name) in [(OpClass::Read, "read"), (OpClass::Write, "write")] {
            let (op, before) = (now.op(class), self.before.op(class));
            let latency = op.latency.since(&before.latency);
            let _ = write!(
                line,
                "{name} {:.0} IOPS {:.1} MiB/s p50 {:.0} us p99 {:.0} us | ",
                (op.ios - before.ios) as f64 / seconds,
                (op.bytes - before.bytes) as f64 / seconds / f64::from(1 << 20),
                latency.percentile_ns(50.0) as f64 / 1000.0,
                latency.percentile_ns(99.0) as f64 / 1000.0,
            );
        }
        let since = |class| now.op(class).ios - self.before.op(class).ios;
        let errors: u64 = now.ops.iter().map(|op| op.errors).sum();
        let refused: u64 =
            now.refused + queues.iter().filter_map(QueueWatch::refusals).map(|refusals| refusals.total()).sum::<u64>();
        let _ = write!(
            line,
            "flush {} trim {} | errors {errors} refused {refused} slow {} ({} now)",
            since(OpClass::Flush),
            since(OpClass::Trim),
            now.slow,
            now.slow_now,
        );
        if let Device::File(file) = device
            && file.counters().bounced() > 0
        {
            let _ = write!(line, " | bounced {}", file.counters().bounced());
        }
        self.before = now;
        line
    }
}
