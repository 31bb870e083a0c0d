//! A signal ends a wait with a deadline early: no descriptor is ready, and it is no error. A separate process, since
//! handlers are global.
//!
//! Unsafe: the C library's call that sends a signal to one thread.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use blkyard_os::Signals;
use blkyard_sys::{Epoll, EventFd, EventFlags, PollFd, PollFlags, wait_until};

/// Longer than a busy machine keeps anybody from a CPU.
const LONG: Duration = Duration::from_secs(30);

/// How many descriptors were ready when a signal had ended a wait.
fn interrupted(wait: impl FnOnce(Instant) -> usize + Send) -> usize {
    let (start, is_over) = (Instant::now(), AtomicBool::new(false));
    let (sender, receiver) = channel();
    std::thread::scope(|scope| {
        let over = &is_over;
        let waiting = scope.spawn(move || {
            // SAFETY: no precondition.
            sender.send(unsafe { libc::pthread_self() }).unwrap();
            let ready = wait(start);
            over.store(true, Relaxed);
            ready
        });
        let thread = receiver.recv().unwrap();
        while !is_over.load(Relaxed) {
            // SAFETY: the thread is not joined before the end of this scope, so its number is valid.
            unsafe { libc::pthread_kill(thread, libc::SIGHUP) };
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(start.elapsed() < LONG, "the signal did not end the wait");
        waiting.join().unwrap()
    })
}

#[test]
fn a_signal_ends_a_wait_early_and_is_no_error() {
    let _signals = Signals::install().unwrap().and_hangup().unwrap();
    let event = EventFd::new().unwrap();
    let ready =
        interrupted(|now| wait_until(&mut [PollFd::new(&event, PollFlags::IN)], now, Some(now + LONG)).unwrap());
    assert_eq!(ready, 0);
    let set = Epoll::new().unwrap();
    let _registered = set.register(&event, 1, EventFlags::IN).unwrap();
    assert_eq!(interrupted(|now| set.wait(now, Some(now + LONG)).unwrap().len()), 0);
}
