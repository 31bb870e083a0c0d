//! The line that moves while the jobs run, on standard error, if that is a terminal.

use std::sync::Arc;
use std::time::Duration;

use blkyard_mq::OpClass;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::args::{BenchPlan, Pattern};
use super::tally::LiveCounters;
use super::text::count;

/// A bar over the time of the run, or over its blocks.
pub(crate) struct BenchProgress {
    bar: ProgressBar,
    lives: Vec<Arc<LiveCounters>>,
    timed: bool,
    /// I/Os and bytes when it was drawn last, and how long that is ago.
    before: (u64, u64, Duration),
}

impl BenchProgress {
    pub(crate) fn new(plan: &BenchPlan, lives: Vec<Arc<LiveCounters>>, shown: bool) -> BenchProgress {
        let timed = plan.runtime_ns.is_some() && !plan.verify;
        let rounds = if plan.verify && matches!(plan.pattern, Pattern::Write | Pattern::RandWrite) { 2 } else { 1 };
        let length = match plan.runtime_ns {
            Some(runtime_ns) if timed => runtime_ns / 1_000_000,
            _ => plan.blocks * rounds,
        };
        let target = if shown { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(length), target);
        if let Ok(style) = ProgressStyle::with_template("[{bar:30}] {percent:>3}% {msg}") {
            bar.set_style(style.progress_chars("=> "));
        }
        BenchProgress { bar, lives, timed, before: (0, 0, Duration::ZERO) }
    }

    /// Draws it anew; `passed` is the time since the start.
    pub(crate) fn draw(&mut self, passed: Duration) {
        let (mut ios, mut bytes, mut blocks) = (0, 0, 0);
        for live in &self.lives {
            for class in OpClass::ALL {
                let (class_ios, class_bytes) = live.of(class);
                ios += class_ios;
                bytes += class_bytes;
                blocks += if class == OpClass::Flush { 0 } else { class_ios };
            }
        }
        self.bar.set_position(if self.timed { passed.as_millis() as u64 } else { blocks });
        let (ios_before, bytes_before, at) = self.before;
        let seconds = passed.saturating_sub(at).as_secs_f64().max(1e-3);
        let (iops, rate) = ((ios - ios_before) as f64 / seconds, (bytes - bytes_before) as f64 / seconds);
        self.bar.set_message(format!(
            "{} IOPS, {:.1} MiB/s, {:.0} s",
            count(iops),
            rate / f64::from(1 << 20),
            passed.as_secs_f64()
        ));
        self.before = (ios, bytes, passed);
    }

    /// Takes it away.
    pub(crate) fn finish(self) {
        self.bar.finish_and_clear();
    }
}
