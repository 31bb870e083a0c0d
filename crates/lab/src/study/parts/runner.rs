//! Runs the parts of a study on all CPUs of the process, longest first. Results keep the order of the list.

use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::Part;

/// A part that can be run: everything it needs is its length and its seed.
pub(crate) struct PartRun<L> {
    /// For progress output.
    pub(crate) title: &'static str,
    /// CPU time on the project's own machine, full and `--quick`, seconds. Decides order and announced duration only.
    pub(crate) cpu_s: [f64; 2],
    pub(crate) run: fn(L, u64) -> io::Result<Part>,
}

impl<L> PartRun<L> {
    pub(crate) const fn new(title: &'static str, cpu_s: [f64; 2], run: fn(L, u64) -> io::Result<Part>) -> PartRun<L> {
        PartRun { title, cpu_s, run }
    }
}

/// Number of threads: one for each CPU that the process may use.
pub(crate) fn threads() -> usize {
    thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Runs all parts on this many threads. Each part is computed on one thread in virtual time, so that its figures do not
/// depend on the number of threads.
///
/// # Errors
/// That of the first part, in the order of the list, that could not be run.
pub(crate) fn run_parts<L: Copy + Sync>(
    parts: &[PartRun<L>],
    (length, is_quick): (L, bool),
    seed: u64,
    threads: usize,
    say: impl Fn(String) + Sync,
) -> io::Result<Vec<Part>> {
    let costs: Vec<f64> = parts.iter().map(|part| part.cpu_s[usize::from(is_quick)]).collect();
    let order = longest_first(&costs);
    let threads = threads.clamp(1, parts.len().max(1));
    say(format!(
        "{} parts on {threads} threads; about {} if the CPUs are idle",
        parts.len(),
        span(makespan(&costs, threads))
    ));
    let next = AtomicUsize::new(0);
    let results: Mutex<Vec<Option<io::Result<Part>>>> = Mutex::new(parts.iter().map(|_| None).collect());
    let lock = || results.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(at) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let PartRun { title, run, .. } = &parts[*at];
                    say(format!("virtual time: {title} ..."));
                    let result = run(length, seed);
                    if let Ok(part) = &result {
                        say(format!("done: {title}: {}", part.summary()));
                    }
                    lock()[*at] = Some(result);
                }
            });
        }
    });
    let results = std::mem::take(&mut *lock());
    results.into_iter().map(|result| result.unwrap_or_else(|| Err(io::Error::other("a part was not run")))).collect()
}

/// Positions by cost, the highest first; equal ones in the order of the list.
fn longest_first(costs: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..costs.len()).collect();
    order.sort_by(|one, other| costs[*other].total_cmp(&costs[*one]));
    order
}

/// Time until the last thread ends, if each takes the longest remaining part when it is free.
fn makespan(costs: &[f64], threads: usize) -> f64 {
    let mut busy: Vec<f64> = vec![0.0; threads.max(1)];
    for at in longest_first(costs) {
        if let Some(first) = busy.iter_mut().min_by(|one, other| f64::total_cmp(one, other)) {
            *first += costs[at];
        }
    }
    busy.into_iter().fold(0.0, f64::max)
}

/// A duration for people, rounded up to 5 s.
fn span(seconds: f64) -> String {
    let seconds = ((seconds / 5.0).ceil().max(1.0) * 5.0) as u64;
    if seconds < 60 { format!("{seconds} s") } else { format!("{} min {:02} s", seconds / 60, seconds % 60) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(name: &'static str, seed: u64) -> Part {
        let mut part = Part { name, ..Part::default() };
        part.at_most("seed", seed as f64, 10.0, "");
        part
    }

    const PARTS: [PartRun<()>; 3] = [
        PartRun { title: "short", cpu_s: [1.0, 0.1], run: |(), seed| Ok(part("short", seed)) },
        PartRun { title: "long", cpu_s: [9.0, 0.9], run: |(), seed| Ok(part("long", seed)) },
        PartRun { title: "middle", cpu_s: [5.0, 0.5], run: |(), seed| Ok(part("middle", seed)) },
    ];

    #[test]
    fn parts_run_longest_first_and_are_reported_in_order() {
        for threads in [1, 2, 8] {
            let said = Mutex::new(Vec::new());
            let parts = run_parts(&PARTS, ((), false), 7, threads, |line| said.lock().unwrap().push(line)).unwrap();
            assert_eq!(parts.iter().map(|part| part.name).collect::<Vec<_>>(), ["short", "long", "middle"]);
            let said = said.into_inner().unwrap();
            assert!(said[0].starts_with("3 parts on "), "{said:?}");
            assert!(said.contains(&"done: long: 1 of 1 goals met".to_owned()), "{said:?}");
            if threads == 1 {
                assert_eq!(said[1], "virtual time: long ...");
                assert_eq!(said[5], "virtual time: short ...");
            }
        }
    }

    #[test]
    fn the_first_error_in_the_order_of_the_list_is_returned() {
        let failing = |title: &'static str, cpu_s: f64, run| PartRun { title, cpu_s: [cpu_s, cpu_s], run };
        let parts: [PartRun<()>; 2] = [
            failing("one", 1.0, |(), _| Err(io::Error::other("first"))),
            failing("two", 2.0, |(), _| Err(io::Error::other("second"))),
        ];
        let error = run_parts(&parts, ((), true), 0, 1, |_| ()).unwrap_err();
        assert_eq!(error.to_string(), "first");
    }

    #[test]
    fn the_announced_time_is_that_of_the_longest_thread() {
        assert!((makespan(&[1.0, 9.0, 5.0], 2) - 9.0).abs() < 1e-9);
        assert!((makespan(&[4.0, 4.0, 4.0], 2) - 8.0).abs() < 1e-9);
        assert!((makespan(&[4.0, 4.0, 4.0], 1) - 12.0).abs() < 1e-9);
        assert_eq!(span(2.0), "5 s");
        assert_eq!(span(131.0), "2 min 15 s");
    }
}
