//! An I/O queue over fabrics allocates nothing after start.

use blkyard_mem::{CountingAllocator, Segment};
use blkyard_mq::{Bio, Op, Status};
use blkyard_nvme::tcp::SendList;

use crate::fabrics::rig::{Rig, config};
use crate::fabrics::target::BLOCK;

#[test]
fn after_start_a_queue_allocates_nothing() {
    let mut rig = Rig::live(config(), 1);
    rig.run_for(50);
    let number = rig.lanes[0].connection.unwrap();
    let mut free: Vec<Box<Bio>> = (0..8).map(|_| Bio::with_capacity(1)).collect();
    let (mut list, mut ended) = (SendList::new(256), 0);
    let mut allocated = 0;
    for round in 0..1000_u64 {
        let lane = &mut rig.lanes[0];
        let before = CountingAllocator::count();
        while let Some(mut bio) = free.pop() {
            bio.reset();
            bio.op = if free.len().is_multiple_of(2) { Op::Write } else { Op::Read };
            (bio.sector, bio.sectors) = (free.len() as u64 * 2, 1);
            bio.segments.push(Segment { region: 0, offset: bio.sector * BLOCK as u64, len: BLOCK as u32 });
            lane.hw.submit(bio);
        }
        lane.hw.issue(&mut (), rig.now_ns + round);
        list.clear();
        let filled = lane.hw.driver_mut().0.fill(&mut list);
        allocated += CountingAllocator::count() - before;
        let connection = &mut rig.target.connections[number];
        if let Some(filled) = filled {
            connection.to_target.push(lane.hw.driver_mut().0.memory(), &list, filled);
            assert_eq!(connection.to_target.send(64), Some(filled));
            let before = CountingAllocator::count();
            lane.hw.driver_mut().0.sent(filled);
            allocated += CountingAllocator::count() - before;
        }
        connection.to_target.deliver(usize::MAX);
        rig.target.receive(number);
        rig.target.execute_all();
        let connection = &mut rig.target.connections[number];
        connection.pump();
        connection.to_host.deliver(usize::MAX);
        let received = std::mem::take(&mut connection.to_host.received);
        let lane = &mut rig.lanes[0];
        let before = CountingAllocator::count();
        lane.hw.driver_mut().0.receive(&received);
        lane.hw.reap(&mut (), rig.now_ns + round, &mut |bio| {
            assert_eq!(bio.status, Status::Ok);
            free.push(bio);
            ended += 1;
        });
        allocated += CountingAllocator::count() - before;
    }
    assert_eq!((ended, allocated), (8000, 0));
}
