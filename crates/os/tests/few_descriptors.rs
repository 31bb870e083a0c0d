//! Where descriptors are short an eventfd cannot be duplicated; it is heard as soon as it can be. Its own process: the
//! limit is.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use blkyard_os::{Ring, RingConfig, allow_all_descriptors};
use blkyard_sys::EventFd;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Patience with a machine that does other things as well.
const PATIENCE: Duration = Duration::from_secs(30);

#[test]
fn an_eventfd_that_cannot_be_duplicated_bounds_the_sleep_and_is_heard_once_it_can_be() {
    let mut ring = Ring::new(RingConfig::default()).unwrap();
    let eventfd = EventFd::new().unwrap();
    let most = getrlimit(Resource::Nofile).maximum;
    // All descriptors there are stay open; there are no more.
    setrlimit(Resource::Nofile, Rlimit { current: Some(0), maximum: most }).unwrap();
    let begin = Instant::now();
    for _ in 0..3 {
        ring.watch(eventfd.as_fd(), 0);
        ring.sleep(None);
        ring.reap();
    }
    assert!(begin.elapsed() < PATIENCE, "the eventfd is slept over");
    assert_eq!(allow_all_descriptors().unwrap(), most);
    assert_eq!(getrlimit(Resource::Nofile).current, most);

    ring.watch(eventfd.as_fd(), 0);
    eventfd.signal();
    ring.sleep(None);
    ring.reap();
    assert!(!eventfd.take(), "the eventfd was heard, and is quiet again");
    assert_eq!(ring.next_signalled(), Some(0));
    // And no sleep is cut short any more.
    let begin = Instant::now();
    ring.watch(eventfd.as_fd(), 0);
    ring.sleep(Some(blkyard_os::now_ns() + 500_000_000));
    assert!(begin.elapsed() >= Duration::from_millis(450), "it does not sleep: {:?}", begin.elapsed());
}
