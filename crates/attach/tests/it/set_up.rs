//! A set-up that fails at any of its messages has no lasting effect: the next good back-end serves all queues.

use std::path::Path;

use blkyard_attach::Attached;
use blkyard_mq::{Op, QueueKind, Status};

use crate::common::{Backend, Fake, Faults, Ill, User, blk_config, config, disk, disk_info, place, until};

/// Keeps an in-flight record, and handles messages without I/O.
const HOLDS: Faults = Faults { ill: Ill::Holds, account: true, table: false, messages_max: None, from_kick: false };
/// More than any conversation of these tests has.
const MESSAGES_MAX: usize = 80;

fn fakes<const N: usize>(path: &Path, queues: usize, faults: [Faults; N]) -> Fake {
    Fake::start_each(path, blk_config(&disk_info(), queues), faults)
}

/// A good back-end takes over, and all users of the disk can do I/O.
fn next_one_serves(path: &Path, attached: Attached, mut users: Vec<User>, what: &str) {
    let _ = std::fs::remove_file(path);
    let backend = Backend::start(path, &disk(), attached.queues_max());
    for (number, user) in users.iter_mut().enumerate() {
        user.submit(Op::Read, 1, 0);
        user.drain_asleep();
        assert!(user.ended.drain(..).all(|bio| bio.status == Status::Ok), "{what}, queue {number}");
    }
    drop((users, attached));
    backend.stop();
}

/// Has a back-end disconnect after each number of messages, one number at a time. Returns the number of a complete
/// set-up.
fn at_each_message(fails: impl Fn(usize) -> bool + Sync) -> usize {
    let failed: Vec<bool> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..MESSAGES_MAX)
            .map(|messages| {
                scope.spawn({
                    let fails = &fails;
                    move || fails(messages)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    failed.iter().position(|failed| !failed).expect("a conversation ends")
}

#[test]
fn a_set_up_with_new_rings_can_fail_at_any_message() {
    let whole = at_each_message(|messages| {
        let (_folder, path) = place();
        let lies = Faults { ill: Ill::Lies, ..HOLDS };
        let fake = fakes(&path, 1, [lies, Faults { messages_max: Some(messages), ..HOLDS }]);
        let attached = Attached::open(config(&path)).unwrap();
        let mut user = User::new(&attached, QueueKind::Default);
        user.submit(Op::Read, 0, 0);
        until("the second back-end has hung up, or has the request", || {
            user.turn_idle();
            fake.is_over() || fake.kicks() > 1
        });
        let is_over = fake.is_over();
        if is_over {
            next_one_serves(&path, attached, vec![user], &format!("{messages} messages"));
        }
        is_over
    });
    assert!(whole > 15, "{whole} messages");
}

#[test]
fn a_change_of_memory_can_fail_at_any_message() {
    let whole = at_each_message(|messages| {
        let (_folder, path) = place();
        // The previous one got all messages of a first set-up.
        let first = Faults { table: true, messages_max: Some(messages + 9), ..HOLDS };
        let fake = fakes(&path, 2, [first]);
        let attached = Attached::open(config(&path)).unwrap();
        let mut users = vec![User::new(&attached, QueueKind::Default)];
        // The memory of the second comes after the set-up has begun, or it would be part of it.
        until("the back-end has hung up, or was told of the first memory", || fake.is_over() || fake.tables() > 0);
        users.push(User::new(&attached, QueueKind::Default));
        users[1].submit(Op::Read, 0, 0);
        until("the back-end has hung up, or has the request", || {
            users.iter_mut().for_each(User::turn_idle);
            fake.is_over() || fake.kicks() > 0
        });
        let is_over = fake.is_over();
        if is_over {
            next_one_serves(&path, attached, users, &format!("{messages} messages"));
        }
        is_over
    });
    assert!(whole > 30, "{whole} messages");
}

#[test]
fn a_queue_closed_in_the_middle_of_io_and_opened_again_gets_a_ring_from_the_next() {
    let whole = at_each_message(|messages| {
        let (_folder, path) = place();
        let fake = fakes(&path, 1, [Faults { messages_max: Some(messages), from_kick: true, ..HOLDS }]);
        let attached = Attached::open(config(&path)).unwrap();
        let mut user = User::new(&attached, QueueKind::Default);
        user.submit(Op::Read, 0, 0);
        until("the back-end has the request", || {
            user.turn_idle();
            fake.kicks() > 0
        });
        drop(user);
        let mut user = User::new(&attached, QueueKind::Default);
        user.submit(Op::Read, 0, 0);
        until("the back-end has hung up, or has the request", || {
            user.turn_idle();
            fake.is_over() || fake.kicks() > 1
        });
        let is_over = fake.is_over();
        if is_over {
            next_one_serves(&path, attached, vec![user], &format!("{messages} messages"));
        }
        is_over
    });
    assert!(whole > 10, "{whole} messages");
}

#[test]
fn who_takes_over_in_flight_io_is_kicked_whatever_came_before() {
    let (_folder, path) = place();
    // The first keeps no account and leaves before there is a ring; the others take the request and leave.
    let first = Faults { account: false, messages_max: Some(9), ..HOLDS };
    let swallows = Faults { ill: Ill::Swallows, ..HOLDS };
    let fake = fakes(&path, 1, [first, swallows, swallows]);
    let attached = Attached::open(config(&path)).unwrap();
    let mut user = User::new(&attached, QueueKind::Default);
    user.submit(Op::Read, 0, 0);
    until("the third back-end was kicked", || {
        user.turn_idle();
        fake.is_over()
    });
    assert_eq!(fake.kicks(), 2);
    next_one_serves(&path, attached, vec![user], "after three");
}
