//! The ring against the real kernel, without a driver.

use std::io::Write;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use blkyard_mq::{SignalEventfd, SignalSlot};
use io_uring::opcode;
use io_uring::types::Fd;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, fcntl_setfl};

use super::*;

fn ring(entries: u32, outstanding_max: u32) -> Ring {
    Ring::new(RingConfig { entries, outstanding_max, ..RingConfig::default() }).unwrap()
}

fn nop(ring: &mut Ring, inbox: InboxId, cid: u32) {
    // SAFETY: the entry points to no memory.
    unsafe { ring.push(inbox, Cid(cid), opcode::Nop::new().build()) };
}

fn new_eventfd() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC).unwrap()
}

fn signal_eventfd(eventfd: &OwnedFd) {
    rustix::io::write(eventfd, &1_u64.to_ne_bytes()).unwrap();
}

fn is_quiet(eventfd: &OwnedFd) -> bool {
    let mut wanted = [rustix::event::PollFd::new(eventfd, rustix::event::PollFlags::IN)];
    rustix::event::poll(&mut wanted, Some(&rustix::event::Timespec::default())).unwrap() == 0
}

fn soon() -> u64 {
    now_ns() + 20_000_000
}

fn sleeps(ring: &mut Ring, deadline_ns: Option<u64>) -> Duration {
    let start = Instant::now();
    ring.sleep(deadline_ns);
    start.elapsed()
}

/// Indexes of the signalled eventfds; no sleep begins until they are taken.
fn take_signalled(ring: &mut Ring) -> Vec<usize> {
    std::iter::from_fn(|| ring.next_signalled()).collect()
}

/// Sleeps until soon; whether it lasted until the deadline. Compared with the deadline and not with a length: a thread
/// interrupted between choosing the deadline and sleeping sleeps for a shorter time.
fn sleeps_through(ring: &mut Ring) -> bool {
    take_signalled(ring);
    let deadline_ns = soon();
    ring.sleep(Some(deadline_ns));
    now_ns() >= deadline_ns
}

/// Longer than a busy machine keeps a thread from its CPU.
const LONG: Duration = Duration::from_secs(30);

fn later() -> u64 {
    now_ns() + 2 * LONG.as_nanos() as u64
}

#[test]
fn more_entries_than_the_ring_holds_all_come_back_to_their_own_inbox() {
    for single_owner in [true, false] {
        let mut ring =
            Ring::new(RingConfig { entries: 4, outstanding_max: 1000, single_owner, ..RingConfig::default() }).unwrap();
        let inboxes = [ring.inbox(500), ring.inbox(500)];
        for cid in 0..1000 {
            nop(&mut ring, inboxes[cid as usize % 2], cid);
        }
        ring.submit();
        ring.reap();
        for (which, inbox) in inboxes.into_iter().enumerate() {
            let cids: Vec<_> = std::iter::from_fn(|| ring.take(inbox)).map(|done| done.cid.0 as usize).collect();
            assert_eq!(cids, (0..500).map(|i| 2 * i + which).collect::<Vec<_>>());
        }
        assert_eq!(ring.view().strays(), 0);
    }
}

#[test]
fn a_place_is_held_until_its_completion_is_taken() {
    let mut ring = ring(8, 8);
    let inbox = ring.inbox(64);
    let all = ring.room();
    (0..5).for_each(|cid| nop(&mut ring, inbox, cid));
    ring.submit();
    assert_eq!(ring.reap(), 5);
    assert_eq!(ring.room(), all - 5);
    while ring.take(inbox).is_some() {}
    assert_eq!(ring.room(), all);
}

#[test]
#[should_panic(expected = "another ring")]
fn an_inbox_is_good_with_its_own_ring_only() {
    let (mut one, mut other) = (ring(8, 8), ring(8, 8));
    let inbox = one.inbox(1);
    nop(&mut other, inbox, 0);
}

#[test]
fn a_completion_nobody_waits_for_is_counted_and_dropped() {
    let mut ring = ring(8, 64);
    let inbox = ring.inbox(4);
    for stray in [name(KIND_DRIVER, 0, 7), name(KIND_DRIVER, 55, 7), name(KIND_EVENTFD, 3, 0), name(9, 0, 0)] {
        // SAFETY: the entry points to no memory.
        unsafe { ring.push_named(&opcode::Nop::new().build().user_data(stray)) };
    }
    ring.submit();
    assert_eq!(ring.reap(), 4);
    assert_eq!(ring.take(inbox), None);
    assert_eq!(ring.view().strays(), 4);
}

#[test]
fn a_sleep_ends_at_its_time() {
    let mut ring = ring(8, 64);
    let start = Instant::now();
    assert!(sleeps_through(&mut ring));
    assert!(start.elapsed() < LONG);
    assert!(sleeps(&mut ring, Some(0)) < LONG);
}

#[test]
fn a_sleep_submits_and_ends_with_a_completion_even_one_from_before() {
    let mut ring = ring(8, 64);
    let inbox = ring.inbox(4);
    nop(&mut ring, inbox, 1);
    assert!(sleeps(&mut ring, Some(later())) < LONG);
    // Not reaped yet: sleeping on it would be sleeping through it.
    assert!(sleeps(&mut ring, None) < LONG);
    ring.reap();
    assert_eq!(ring.take(inbox), Some(Completion { cid: Cid(1), result: 0 }));
}

#[test]
fn an_eventfd_ends_a_sleep_whenever_it_rings_and_is_quiet_after() {
    let mut ring = ring(8, 64);
    let eventfd = new_eventfd();
    for before in [true, false] {
        if before {
            signal_eventfd(&eventfd);
        }
        ring.watch(eventfd.as_fd(), 3);
        ring.watch(eventfd.as_fd(), 3);
        if !before {
            signal_eventfd(&eventfd);
        }
        assert!(sleeps(&mut ring, Some(later())) < LONG);
        assert_eq!(ring.reap(), 1, "listened to once");
        assert!(is_quiet(&eventfd));
        assert!(sleeps(&mut ring, None) < LONG, "slept before the lane took what rang");
        assert_eq!(take_signalled(&mut ring), [3]);
    }
    assert!(sleeps_through(&mut ring), "still listened to");
}

#[test]
fn an_eventfd_that_is_forgotten_ends_no_sleep() {
    let mut ring = ring(8, 64);
    let eventfd = new_eventfd();
    ring.watch(eventfd.as_fd(), 0);
    ring.submit();
    ring.unwatch(0);
    // The two answers of the cancellation.
    ring.submit();
    ring.reap();
    signal_eventfd(&eventfd);
    ring.sleep(Some(soon()));
    ring.reap();
    assert!(!is_quiet(&eventfd), "nobody reads an eventfd that is not watched");
    assert_eq!(ring.view().strays(), 0);
}

#[test]
fn another_eventfd_under_the_same_number_is_heard_once_asked_for() {
    let mut ring = ring(8, 64);
    let first = new_eventfd();
    let number = first.as_raw_fd();
    ring.watch(first.as_fd(), 0);
    ring.submit();
    drop(first);
    let second = new_eventfd();
    // Not on another thread's account: descriptors are given out lowest first, but tests run side by side.
    if second.as_raw_fd() != number {
        return;
    }
    ring.unwatch(0);
    ring.watch(second.as_fd(), 0);
    signal_eventfd(&second);
    let start = Instant::now();
    while !is_quiet(&second) {
        ring.sleep(Some(later()));
        ring.reap();
        assert!(start.elapsed() < LONG);
    }
}

#[test]
fn an_eventfd_of_another_number_takes_the_place_of_the_first() {
    let mut ring = ring(8, 64);
    let (first, second) = (new_eventfd(), new_eventfd());
    ring.watch(first.as_fd(), 0);
    ring.submit();
    ring.watch(second.as_fd(), 0);
    signal_eventfd(&second);
    let start = Instant::now();
    while !is_quiet(&second) {
        ring.sleep(Some(later()));
        ring.reap();
        assert!(start.elapsed() < LONG);
    }
    assert_eq!(ring.view().strays(), 0);
}

#[test]
fn what_is_no_event_descriptor_is_given_up_not_spun_on() {
    let mut ring = ring(8, 64);
    let (reader, mut writer) = std::io::pipe().unwrap();
    writer.write_all(b"x").unwrap();
    ring.watch(reader.as_fd(), 0);
    ring.sleep(Some(soon()));
    ring.reap();
    ring.watch(reader.as_fd(), 0);
    assert!(sleeps_through(&mut ring));
}

#[test]
fn a_ring_is_not_gone_before_the_kernel_has_finished() {
    for single_owner in [true, false] {
        let (reader, mut writer) = std::io::pipe().unwrap();
        let mut ring = Ring::new(RingConfig { single_owner, ..RingConfig::default() }).unwrap();
        let inbox = ring.inbox(1);
        let eventfd = new_eventfd();
        ring.watch(eventfd.as_fd(), 0);
        let mut byte = Box::new(0_u8);
        let read = opcode::Read::new(Fd(reader.as_raw_fd()), &raw mut *byte, 1).build();
        // SAFETY: the box outlives the ring.
        unsafe { ring.push(inbox, Cid(0), read) };
        ring.submit();
        let start = Instant::now();
        let other = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(30));
            writer.write_all(b"!").unwrap();
        });
        drop(ring);
        assert!(start.elapsed() >= Duration::from_millis(30));
        assert_eq!(*byte, b'!');
        other.join().unwrap();
    }
}

#[test]
fn what_was_never_submitted_is_forgotten_with_the_ring() {
    let (reader, _writer) = std::io::pipe().unwrap();
    let mut ring = ring(8, 64);
    let inbox = ring.inbox(1);
    let eventfd = new_eventfd();
    let mut byte = 0_u8;
    ring.watch(eventfd.as_fd(), 0);
    // SAFETY: never submitted.
    unsafe { ring.push(inbox, Cid(0), opcode::Read::new(Fd(reader.as_raw_fd()), &raw mut byte, 1).build()) };
}

#[test]
fn a_ring_without_an_owner_for_good_goes_from_thread_to_thread() {
    let mut ring = Ring::new(RingConfig { single_owner: false, ..RingConfig::default() }).unwrap();
    let inbox = ring.inbox(4);
    for cid in 0..4 {
        ring = std::thread::spawn(move || {
            nop(&mut ring, inbox, cid);
            ring.submit();
            ring
        })
        .join()
        .unwrap();
        ring.sleep(Some(later()));
        ring.reap();
        assert_eq!(ring.take(inbox).map(|done| done.cid), Some(Cid(cid)));
    }
}

#[test]
fn memory_is_attached_once_and_let_go_with_its_last_holder() {
    let mut ring = ring(8, 64);
    let region = Region::anonymous(1 << 20).unwrap();
    let (one, two) = (ring.attach(&region), ring.attach(&region));
    assert!(Arc::ptr_eq(&one, &two));
    if let FixedBuffers::Registered { bytes } = ring.buffers() {
        assert_eq!(bytes, 1 << 20);
        assert_eq!(ring.fixed(&one, 4096, 4096), Some(0));
    }
    drop(one);
    ring.sweep();
    assert_eq!(Arc::strong_count(&region), 2, "still held by the second");
    drop(two);
    ring.sweep();
    assert_eq!(Arc::strong_count(&region), 1);
    assert_eq!(ring.buffers(), FixedBuffers::Registered { bytes: 0 });
    let again = ring.attach(&region);
    assert!(ring.fixed(&again, 0, 1 << 20).is_none_or(|buffer| buffer == 0), "the place is free again");
}

#[test]
fn a_driver_that_leaves_makes_room_for_the_next_and_leaves_nothing() {
    let mut ring = ring(8, 64);
    let file = Arc::new(new_eventfd());
    let (one, two) = (ring.hold(&file), ring.hold(&file));
    let inbox = ring.inbox(4);
    nop(&mut ring, inbox, 1);
    ring.submit();
    ring.reap();
    assert!(ring.take(inbox).is_some());
    ring.close(inbox);
    drop(one);
    ring.sweep();
    assert_eq!((ring.view().holdings().files, Arc::strong_count(&file)), (1, 2), "the second still wants it open");
    drop(two);
    ring.sweep();
    assert_eq!((ring.view().holdings(), Arc::strong_count(&file)), (Holdings::default(), 1));
    assert_eq!(ring.inbox(4), inbox, "the place is free again");
    ring.reap();
    assert_eq!(ring.take(inbox), None, "an answer of the one before");
}

#[test]
#[should_panic(expected = "closed while in use")]
fn an_inbox_with_an_entry_out_is_not_closed() {
    let mut ring = ring(8, 64);
    let inbox = ring.inbox(4);
    nop(&mut ring, inbox, 1);
    ring.close(inbox);
}

#[test]
fn an_eventfd_that_is_blocking_and_full_is_signalled_without_waiting() {
    let mut ring = ring(8, 64);
    let eventfd = new_eventfd();
    rustix::io::write(&eventfd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    let done = AtomicBool::new(false);
    let (in_flight, is_stuck) = std::thread::scope(|threads| {
        // Its holder changes the flags all the time: whatever is checked first may not be so afterwards.
        let holder = threads.spawn(|| {
            let start = Instant::now();
            while !done.load(Ordering::Relaxed) {
                fcntl_setfl(&eventfd, OFlags::NONBLOCK).unwrap();
                fcntl_setfl(&eventfd, OFlags::empty()).unwrap();
                if start.elapsed() > LONG {
                    // A signal that waits goes on once there is room.
                    rustix::io::read(&eventfd, &mut [0; 8]).unwrap();
                    return true;
                }
            }
            false
        });
        let mut place = SignalSlot::default();
        let in_flight = (0..50_000).filter(|_| {
            ring.signal(&mut place, eventfd.as_fd());
            ring.pushed > ring.reaped
        });
        let in_flight = in_flight.count();
        done.store(true, Ordering::Relaxed);
        (in_flight, holder.join().unwrap())
    });
    // Read before anything is judged: a signal that waits would keep the ring.
    let mut count = [0; 8];
    rustix::io::read(&eventfd, &mut count).unwrap();
    assert!(!is_stuck, "a signal waits for its reader");
    assert_eq!(in_flight, 0, "signals wait for the kernel");
    assert!(u64::from_ne_bytes(count) >= u64::MAX - 1, "it is full as it was");
    assert_eq!(ring.view().strays(), 0);
}

#[test]
fn a_slot_whose_eventfd_was_replaced_signals_the_new_one_only() {
    let mut ring = ring(8, 64);
    let (first, second) = (new_eventfd(), new_eventfd());
    let mut place = SignalSlot::default();
    ring.signal(&mut place, first.as_fd());
    assert_eq!(ring.view().holdings().signals, 1);
    rustix::io::read(&first, &mut [0; 8]).unwrap();
    ring.forget(&mut place);
    ring.forget(&mut place);
    assert!(ring.view().holdings() == Holdings::default() && place.number.is_none());
    for _ in 0..3 {
        ring.signal(&mut place, second.as_fd());
        assert!(is_quiet(&first) && !is_quiet(&second));
        rustix::io::read(&second, &mut [0; 8]).unwrap();
    }
    assert_eq!((place.number, ring.view().strays()), (Some(0), 0));
}

#[test]
fn each_signal_is_delivered_although_the_answer_comes_before_we_know() {
    let mut ring = ring(8, 64);
    let eventfd = new_eventfd();
    let mut place = SignalSlot::default();
    for _ in 0..20 {
        for reaped in [false, true] {
            ring.signal(&mut place, eventfd.as_fd());
            assert!(!is_quiet(&eventfd), "it is not heard");
            rustix::io::read(&eventfd, &mut [0; 8]).unwrap();
            if reaped {
                ring.reap();
            }
        }
    }
    assert_eq!(ring.view().strays(), 0);
}

#[test]
fn refused_ring_takes_entries_and_answers_none() {
    let mut ring = ring(4, 64);
    let inbox = ring.inbox(8);
    let null = std::fs::File::open("/dev/null").unwrap();
    // SAFETY: both are open; the ring's descriptor is a file of another kind from now on.
    assert!(unsafe { libc::dup2(null.as_raw_fd(), ring.descriptor().as_raw_fd()) } >= 0);
    // More than the ring holds, so that it must enter the kernel in between.
    for cid in 0..8 {
        // SAFETY: the entry points to no memory.
        unsafe { ring.push(inbox, Cid(cid), opcode::Nop::new().build()) };
    }
    ring.submit();
    assert!(ring.has_failed());
    assert_eq!((ring.reap(), ring.take(inbox)), (0, None));
    ring.sleep(None);
    assert!(ring.take_failure().is_some());
}
