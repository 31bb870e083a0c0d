//! Memory that its owner maps is announced once, however many queues use it and however often they stop.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use blkyard_attach::Attached;
use blkyard_mem::Region;
use blkyard_mq::{Op, QueueKind, Status};

use crate::common::{Fake, Faults, Ill, Lossy, LossyConfig, SLOTS, User, blk_config, config, disk_info, place, until};

const QUEUES: usize = 4;

fn region() -> Arc<Region> {
    Region::shared(SLOTS as usize * 4096).unwrap()
}

fn users(attached: &Attached, region: &Arc<Region>) -> Vec<User> {
    (0..QUEUES).map(|_| User::over(attached, QueueKind::Default, Arc::clone(region))).collect()
}

/// One I/O of each queue.
fn all_are_served(users: &mut [User]) {
    users.iter_mut().for_each(|user| user.submit(Op::Write, 1, 0));
    until("all queues are served", || {
        users.iter_mut().for_each(User::turn_idle);
        users.iter().all(|user| !user.ended.is_empty())
    });
    assert!(users.iter_mut().flat_map(|user| user.ended.drain(..)).all(|bio| bio.status == Status::Ok));
}

/// Sets this memory in all queues, one after the other, after they had none.
fn use_memory(users: &mut [User], region: &Arc<Region>) {
    users.iter_mut().for_each(|user| user.set_memory(Some(region)));
}

fn stop(users: &mut [User]) {
    users.iter_mut().for_each(|user| user.set_memory(None));
}

/// Asks it for a queue that it does not have, some times.
fn let_control_thread_run(attached: &Attached) {
    (0..8).for_each(|_| assert!(attached.queue(QueueKind::Default, 1).is_err()));
}

#[test]
fn four_queues_cost_one_table_for_each_change_of_memory() {
    let (_folder, path) = place();
    let lossy = Lossy::start(&path, LossyConfig::new(QUEUES as u16, 1));
    let attached = Attached::open(config(&path)).unwrap();
    let tables = || lossy.seen.tables.load(Relaxed);
    let mut memory = region();
    let mut owner = attached.dma_domain().map(vec![Arc::clone(&memory)]);
    let mut users = users(&attached, &memory);
    all_are_served(&mut users);
    assert_eq!(tables(), 1, "to begin with");
    for changes in 1..4 {
        stop(&mut users);
        let_control_thread_run(&attached);
        use_memory(&mut users, &memory);
        all_are_served(&mut users);
        assert_eq!(tables(), changes, "queues that stop and go on change nothing");
        stop(&mut users);
        let_control_thread_run(&attached);
        memory = region();
        owner.replace(vec![Arc::clone(&memory)]);
        use_memory(&mut users, &memory);
        all_are_served(&mut users);
        assert_eq!(tables(), changes + 1, "a change of memory is one table");
    }
    assert_eq!((attached.view().sessions, lossy.seen.tables_running.load(Relaxed)), (1, 0));
}

#[test]
fn four_queues_add_and_remove_a_region_once() {
    let (_folder, path) = place();
    let fake = Fake::start(&path, blk_config(&disk_info(), QUEUES), Faults::from(Ill::Holds), 1);
    let attached = Attached::open(config(&path)).unwrap();
    let mut memory = region();
    let mut owner = attached.dma_domain().map(vec![Arc::clone(&memory)]);
    let mut users = users(&attached, &memory);
    // With that of the rings.
    until("the first memory is known", || fake.regions() == [2, 0]);
    for _ in 0..3 {
        stop(&mut users);
        let_control_thread_run(&attached);
        use_memory(&mut users, &memory);
        let_control_thread_run(&attached);
        stop(&mut users);
        memory = region();
        owner.replace(vec![Arc::clone(&memory)]);
        use_memory(&mut users, &memory);
    }
    // Heard by the last queue, after all that was said before.
    users[QUEUES - 1].submit(Op::Read, 0, 0);
    until("the last memory is known", || {
        users.iter_mut().for_each(User::turn_idle);
        fake.kicks() > 0
    });
    let [added, removed] = fake.regions();
    assert!(added <= 2 + 3 && added == removed + 2, "{added} regions were added, {removed} removed");
    drop((users, owner, attached));
    fake.join();
}

#[test]
fn memory_that_only_a_queue_has_is_mapped_while_it_has_it() {
    let (_folder, path) = place();
    let fake = Fake::start(&path, blk_config(&disk_info(), QUEUES), Faults::from(Ill::Holds), 1);
    let attached = Attached::open(config(&path)).unwrap();
    let [first, second] = [region(), region()];
    let mut users = users(&attached, &first);
    until("the first memory is known", || fake.regions() == [2, 0]);
    users[0].set_memory(Some(&second));
    until("that of one queue is known as well", || fake.regions() == [3, 0]);
    users.truncate(1);
    until("that of the others is not known any more", || fake.regions() == [3, 1]);
    assert_eq!(attached.dma_domain().regions().len(), 1);
    drop((users, attached));
    fake.join();
}
