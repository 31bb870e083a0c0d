//! What `serve` says while it serves, on request: a line for each export with what happened since the last one.

use std::fmt::{Display, Write};
use std::io::Write as _;
use std::time::Instant;

use blkyard_export::QueueWatch;
use blkyard_mq::{OpClass, StatsSnapshot};

use crate::Device;
use crate::control::Daemon;

/// The exports that are watched.
pub struct Watch {
    exports: Vec<Watched>,
}

struct Watched {
    before: StatsSnapshot,
    at: Instant,
}

impl Watch {
    /// Watches so many exports of a daemon.
    pub fn new(exports: usize) -> Watch {
        let begin = || Watched { before: StatsSnapshot::default(), at: Instant::now() };
        Watch { exports: (0..exports).map(|_| begin()).collect() }
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
