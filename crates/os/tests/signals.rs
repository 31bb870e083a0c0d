//! Signals as something to wait for. Its own process: handlers are.

use std::time::{Duration, Instant};

use blkyard_os::{Signal, Signals};
use rustix::process::{Signal as Number, getpid, kill_process};

/// After it a signal to end is another one.
const APART: Duration = Duration::from_millis(60);
/// Longer than a busy machine keeps anybody from a CPU.
const LONG: Duration = Duration::from_secs(30);

#[test]
fn signals_are_waited_for_each_once() {
    let signals = Signals::install().unwrap();
    let start = Instant::now();
    assert_eq!(signals.wait(Some(Duration::from_millis(20))), None);
    assert!(start.elapsed() >= Duration::from_millis(20));
    assert_eq!(signals.wait(Some(Duration::ZERO)), None);
    kill_process(getpid(), Number::TERM).unwrap();
    assert_eq!(signals.wait(Some(LONG)), Some(Signal::Terminate));
    assert_eq!(signals.wait(Some(Duration::ZERO)), None);
    let later = std::thread::spawn(|| {
        std::thread::sleep(APART);
        kill_process(getpid(), Number::INT).unwrap();
    });
    assert_eq!(signals.wait(None), Some(Signal::Interrupt));
    later.join().unwrap();
    // Two were caught; taken over again, two more are, and any number of hangups.
    let signals = Signals::install().unwrap().and_hangup().unwrap();
    for (number, signal) in
        [(Number::INT, Signal::Interrupt), (Number::HUP, Signal::Hangup), (Number::HUP, Signal::Hangup)]
    {
        kill_process(getpid(), number).unwrap();
        assert_eq!(signals.wait(Some(LONG)), Some(signal));
    }
    std::thread::sleep(APART);
    kill_process(getpid(), Number::INT).unwrap();
    assert_eq!(signals.wait(Some(LONG)), Some(Signal::Interrupt));
    check_signals_together();
}

/// As `timeout` does, which signals the process and then its group.
fn check_signals_together() {
    for _ in 0..2 {
        let signals = Signals::install().unwrap();
        let begin = Instant::now();
        kill_process(getpid(), Number::TERM).unwrap();
        assert_eq!(signals.wait(Some(LONG)), Some(Signal::Terminate));
        kill_process(getpid(), Number::TERM).unwrap();
        let again = signals.wait(Some(Duration::from_millis(1)));
        let took = begin.elapsed();
        assert!(again.is_none() || took >= Duration::from_millis(50), "{again:?} after {took:?}");
    }
}
