//! Progress of a long item: tests done, their number, and the elapsed time.
//!
//! A separate thread reads the item's log, so the item's runner knows nothing of this. On a terminal the item's line is
//! drawn again each second; elsewhere a line comes now and then.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often a terminal is drawn anew.
const REDRAW: Duration = Duration::from_secs(1);
/// How often a line comes where there is none.
const LINE: Duration = Duration::from_secs(30);

/// What is to be shown beside the time.
#[derive(Clone, Default)]
pub struct WatchedOutput {
    /// Where the tests say how they ended, each on a line.
    pub log: Option<PathBuf>,
    /// How many tests there are; zero while that is not known.
    pub tests: Arc<AtomicUsize>,
}

/// Where an item stands among all of them.
#[derive(Clone, Copy)]
pub struct ItemPosition {
    pub number: usize,
    pub of: usize,
    /// When the first of them began.
    pub start: Instant,
}

/// Shows an item's progress until it is dropped.
pub struct Progress {
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Progress {
    pub fn start(name: &str, place: ItemPosition, watched: WatchedOutput) -> Progress {
        let is_terminal = std::io::stdout().is_terminal();
        let every = if is_terminal { REDRAW } else { LINE };
        let (end, ended) = channel();
        let (name, start) = (name.to_owned(), Instant::now());
        let show = move || {
            while ended.recv_timeout(every) == Err(RecvTimeoutError::Timeout) {
                let line = line(&name, place, start.elapsed(), &watched);
                if is_terminal {
                    // To its end, and what was longer before is gone.
                    print!("\r{line}\x1b[K");
                } else {
                    println!("{line}");
                }
                let _ = std::io::stdout().flush();
            }
        };
        // Without a thread nothing is shown, and all goes on.
        let thread = std::thread::Builder::new().name("progress".into()).spawn(show).ok();
        Progress { end: Some(end), thread }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn line(name: &str, place: ItemPosition, took: Duration, watched: &WatchedOutput) -> String {
    let said = watched.log.as_ref().map(|log| std::fs::read(log).unwrap_or_default()).unwrap_or_default();
    let what = doing(&String::from_utf8_lossy(&said), watched.tests.load(Ordering::Relaxed));
    let all = place.start.elapsed().as_secs();
    format!("{name:24} running  {:5} s  step {} of {}{what}; {all} s in all", took.as_secs(), place.number, place.of)
}

/// What cargo and its tests have said so far, in short.
fn doing(said: &str, tests: usize) -> String {
    let failed = said.lines().filter(|line| line.starts_with("test ") && line.ends_with("... FAILED")).count();
    let passed = said.lines().filter(|line| line.starts_with("test ") && line.ends_with("... ok")).count();
    let of = if tests > 0 { format!(" of {tests}") } else { String::new() };
    let compiled = said.lines().filter(|line| line.trim_start().starts_with("Compiling ")).count();
    match (passed + failed, failed) {
        (0, _) if compiled > 0 => format!(", {compiled} crates compiled"),
        (0, _) => String::new(),
        (done, 0) => format!(", {done}{of} tests"),
        (done, failed) => format!(", {done}{of} tests, {failed} FAILED"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_runs_is_counted_out_of_what_there_is() {
        assert_eq!(doing("", 3), "");
        assert_eq!(doing("   Compiling a v1\n   Compiling b v1\n", 3), ", 2 crates compiled");
        let said = "   Compiling a v1\nrunning 3 tests\ntest a ... ok\ntest b - should panic ... ok\n";
        assert_eq!(doing(said, 3), ", 2 of 3 tests");
        assert_eq!(doing(&format!("{said}test c ... FAILED\n"), 0), ", 3 tests, 1 FAILED");
    }

    #[test]
    fn a_line_says_which_step_of_how_many_and_both_times() {
        let place = ItemPosition { number: 5, of: 60, start: Instant::now() };
        let line = line("unit", place, Duration::from_secs(95), &WatchedOutput::default());
        assert!(line.starts_with("unit ") && line.contains("95 s  step 5 of 60; 0 s in all"), "{line}");
    }
}
