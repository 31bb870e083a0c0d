//! Abort of I/O commands: those that no device has end with Command Abort Requested, others continue.

use blkyard_mq::{DeadlineConfig, FairConfig, Op, SchedulerConfig};
use blkyard_nvme::{Psdt, Sqe, admin, io};

use crate::common::{AdminHost, AnyDevice, Gate, NvmeWorld, PATIENCE, Seen, until};

const PAGE: u64 = 0x1000;

fn page(number: u64) -> u64 {
    AdminHost::BASE + number * PAGE
}

/// A write of one block at this block, with this cid.
fn write(block: u64, cid: u16) -> Sqe {
    Sqe::with_blocks(io::WRITE, 1, block, 1, 0).with_data(Psdt::Prp, [page(4), 0]).with_cid(cid)
}

/// Puts commands into ring 1 from this index on, and writes its doorbell. Queue 1 has eight entries.
fn submit(host: &mut AdminHost, index: u32, commands: &[Sqe]) {
    for (at, sqe) in (index..).zip(commands) {
        host.put(2, at, *sqe);
    }
    host.write(0x1080, &(index + commands.len() as u32).to_le_bytes());
}

/// The cid and status of the completion with this index in ring 1; unset if it is not there.
fn completion(host: &AdminHost, index: usize) -> Option<(u16, u16)> {
    let status = host.status(3, index as u32)?;
    Some((host.words(3, index * 4 + 4)[index * 4 + 3] as u16, status))
}

/// Sends an Abort. Returns its result once it is complete: zero if the command was aborted.
fn abort(host: &mut AdminHost, cid: u16) -> u32 {
    let index = host.tail;
    host.admin(Sqe::abort(1, cid));
    until("the abort is complete", || host.status(1, index).is_some());
    assert_eq!(host.status(1, index), Some(0));
    host.words(1, index as usize * 4 + 4)[index as usize * 4]
}

/// The cid of the admin completion with this index.
fn admin_cid(host: &AdminHost, index: u32) -> u16 {
    host.words(1, index as usize * 4 + 4)[index as usize * 4 + 3] as u16
}

/// Status Command Abort Requested.
const ABORTED: u16 = 0x07;

#[test]
fn command_without_a_tag_is_aborted_and_one_at_the_device_is_not() {
    for scheduler in [
        SchedulerConfig::None,
        SchedulerConfig::Deadline(DeadlineConfig::default()),
        SchedulerConfig::Fair(FairConfig::default()),
    ] {
        let gate = Gate::shut();
        let world = NvmeWorld::new(&AnyDevice::gated(&gate), 2, 1);
        let hand = world.server().hand();
        hand.set_depth(1).recv_timeout(PATIENCE).unwrap().unwrap();
        hand.schedule(0, scheduler).recv_timeout(PATIENCE).unwrap().unwrap();
        let mut host = AdminHost::stuck(&world, &gate);
        submit(&mut host, 1, &[write(100, 1), write(200, 2), write(300, 3)]);
        assert_eq!(abort(&mut host, 9), 1, "there is no such command");
        assert_eq!(abort(&mut host, 2), 0, "it waits for a tag: {scheduler:?}");
        assert_eq!(completion(&host, 0), Some((2, ABORTED)), "it ends at once");
        assert_eq!(abort(&mut host, 0), 1, "the device has it");
        assert_eq!(completion(&host, 1), None);
        gate.set_shut(false);
        until("the others end", || completion(&host, 3).is_some());
        let mut ended = [1, 2, 3].map(|index| completion(&host, index).unwrap());
        ended.sort_unstable();
        assert_eq!(ended, [(0, 0), (1, 0), (3, 0)], "{scheduler:?}");
        assert!(!gate.seen().iter().any(|seen| matches!(seen, Seen::Taken(Op::Write, _, 200))), "it was not written");
        drop(host);
        world.stop();
    }
}

#[test]
fn waiting_parts_of_a_command_are_spared() {
    let gate = Gate::shut();
    let world = NvmeWorld::new(&AnyDevice::gated(&gate), 2, 1);
    world.server().hand().set_depth(1).recv_timeout(PATIENCE).unwrap().unwrap();
    let mut host = AdminHost::enable(&world);
    assert_eq!(host.admin(Sqe::create_cq(1, 8, page(3), None)), Some(0));
    assert_eq!(host.admin(Sqe::create_sq(1, 8, page(2), 1)), Some(0));
    // Four ranges to deallocate, apart from each other.
    for range in 0..4_u32 {
        let bytes: Vec<u8> = [0, 8, 1000 * range, 0].iter().flat_map(|word| word.to_le_bytes()).collect();
        std::os::unix::fs::FileExt::write_all_at(&host.memory, &bytes, 4 * PAGE + u64::from(range) * 16).unwrap();
    }
    let mut discard = Sqe::new(io::DSM, 1).with_data(Psdt::Prp, [page(4), 0]).with_cid(5);
    discard.0[5] = 3 | 4 << 32;
    submit(&mut host, 0, &[discard]);
    until("the first range is at the device", || gate.held() == 1);
    // A Compare behind another.
    let compare = |cid| Sqe::with_blocks(io::COMPARE, 1, 0, 1, 0).with_data(Psdt::Prp, [page(5), 0]).with_cid(cid);
    submit(&mut host, 1, &[compare(6), compare(7)]);
    assert_eq!(abort(&mut host, 7), 0, "it waits for the first Compare");
    assert_eq!(abort(&mut host, 6), 0, "it waits for a tag");
    let mut ended = [0, 1].map(|index| completion(&host, index).unwrap());
    ended.sort_unstable();
    assert_eq!(ended, [(6, ABORTED), (7, ABORTED)]);
    // The answer waits for the range that the device has, and no other command waits for the answer.
    let next = host.tail;
    host.admin(Sqe::abort(1, 5));
    // Get Features: the number of queues.
    let mut features = Sqe::new(admin::GET_FEATURES, 0);
    features.0[5] = 7;
    host.admin(features);
    until("another admin command is complete", || host.status(1, next).is_some());
    assert_eq!((admin_cid(&host, next), completion(&host, 2)), (next as u16 + 1, None));
    gate.set_shut(false);
    until("the command ends", || completion(&host, 2) == Some((5, ABORTED)));
    until("the abort is complete", || host.status(1, next + 1) == Some(0));
    assert_eq!(
        (admin_cid(&host, next + 1), host.words(1, 4 * next as usize + 5)[4 * next as usize + 4]),
        (next as u16, 0)
    );
    assert_eq!(gate.seen().iter().filter(|seen| matches!(seen, Seen::Taken(Op::Discard, ..))).count(), 1);
    drop(host);
    world.stop();
}

#[test]
fn aborts_are_executed_while_their_queue_is_to_be_deleted() {
    let gate = Gate::shut();
    let world = NvmeWorld::new(&AnyDevice::gated(&gate), 2, 1);
    world.server().hand().set_depth(1).recv_timeout(PATIENCE).unwrap().unwrap();
    let mut host = AdminHost::stuck(&world, &gate);
    submit(&mut host, 1, &[write(100, 1), write(200, 2)]);
    assert_eq!(abort(&mut host, 9), 1, "all commands are fetched before");
    // The deletion waits for all commands of the queue, unless they are aborted.
    assert_eq!(host.admin(Sqe::delete_queue(admin::DELETE_SQ, 1)), None);
    let delete = host.tail - 1;
    host.admin(Sqe::abort(1, 1));
    host.admin(Sqe::abort(1, 2));
    until("they are answered", || host.status(1, delete + 1).is_some());
    assert_eq!([0, 1].map(|index| completion(&host, index)), [Some((1, ABORTED)), Some((2, ABORTED))]);
    assert_eq!(
        ([delete, delete + 1].map(|index| admin_cid(&host, index)), gate.held()),
        ([delete, delete + 1].map(|at| at as u16 + 1), 1)
    );
    gate.set_shut(false);
    until("the queue is deleted", || host.status(1, delete + 2) == Some(0));
    assert_eq!(completion(&host, 2), Some((0, 0)));
    drop(host);
    world.stop();
}
