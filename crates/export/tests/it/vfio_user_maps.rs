//! DMA mappings of a vfio-user client that change while its queues run: no queue stops, and memory is not used after
//! the reply which says that it is unmapped.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use blkyard_export::NvmeDoorbells;
use blkyard_mem::Region;
use blkyard_mq::Op;
use blkyard_nvme::{ControllerTransport, NvmeStatus, Psdt, Sqe, io};
use blkyard_wire::vfio_user::{DmaUnmapRequest, VfioRequest};

use crate::common::nvme::{file, map};
use crate::common::nvme_host::{Host, QUEUES};
use crate::common::{AdminHost, AnyDevice, Gate, NvmeWorld, Seen, until};

/// Entries of the rings of an [`IoHost`].
const ENTRIES: u32 = 64;
/// Addresses of memory beside that of the rings.
const A: u64 = 0x100_0000;
const B: u64 = 0x200_0000;
/// Namespace whose device holds its requests, and one whose device does not.
const SLOW: u32 = 1;
const FAST: u32 = 2;

fn unmap(address: u64, size: u64) -> VfioRequest<'static> {
    VfioRequest::DmaUnmap(DmaUnmapRequest::Range { address, size })
}

/// A host with one I/O queue, whose commands transfer a block.
pub(crate) struct IoHost {
    pub(crate) host: AdminHost,
    cid: u16,
    tail: u32,
    head: u32,
    phase: u16,
}

impl IoHost {
    pub(crate) fn new(world: &NvmeWorld) -> IoHost {
        let mut host = AdminHost::enable(world);
        assert_eq!(host.admin(Sqe::create_cq(1, ENTRIES, page(3), None)), Some(0));
        assert_eq!(host.admin(Sqe::create_sq(1, ENTRIES, page(2), 1)), Some(0));
        IoHost { host, cid: 0, tail: 0, head: 0, phase: 1 }
    }

    /// Starts a command with the block at this address.
    fn begin(&mut self, opcode: u8, nsid: u32, data: u64) {
        self.begin_command(Sqe::with_blocks(opcode, nsid, 0, 1, 0).with_data(Psdt::Prp, [data, 0]));
    }

    fn begin_command(&mut self, sqe: Sqe) {
        self.cid += 1;
        self.host.put(2, self.tail, sqe.with_cid(self.cid));
        self.tail = (self.tail + 1) % ENTRIES;
        self.host.write(0x1080, &self.tail.to_le_bytes());
    }

    /// The status of the next completion.
    fn end(&mut self) -> NvmeStatus {
        let mut word = [0; 2];
        until("a command is complete", || {
            let at = 0x3000 + u64::from(self.head) * 16 + 14;
            self.host.memory.read_exact_at(&mut word, at).unwrap();
            word[0] as u16 & 1 == self.phase
        });
        self.head = (self.head + 1) % ENTRIES;
        self.phase ^= u16::from(self.head == 0);
        self.host.write(0x10c0, &self.head.to_le_bytes());
        NvmeStatus(u16::from_le_bytes(word) >> 1)
    }

    /// The status of a command, which is the only one in flight.
    pub(crate) fn run(&mut self, sqe: Sqe) -> NvmeStatus {
        self.begin_command(sqe);
        self.end()
    }

    pub(crate) fn io(&mut self, opcode: u8, nsid: u32, data: u64) -> NvmeStatus {
        self.begin(opcode, nsid, data);
        self.end()
    }

    fn map(&mut self, address: u64, file: impl AsFd) {
        self.host.client.call(&map(address, 0x1000, 0), &[file.as_fd()]).unwrap();
    }

    fn unmap(&mut self, address: u64) {
        self.host.client.call(&unmap(address, 0x1000), &[]).unwrap();
    }

    /// Sends a command without waiting for its reply.
    fn send(&self, id: u16, request: &VfioRequest<'_>, file: Option<&File>) {
        let files: Vec<_> = file.iter().map(AsFd::as_fd).collect();
        self.host.client.send(&request.encode(id, false), &files);
    }

    fn is_answered(&self) -> bool {
        self.host.client.is_readable(Duration::from_millis(100))
    }

    fn replied(&self) -> u16 {
        let (id, result) = self.host.client.receive().expect("the connection is open");
        result.unwrap();
        id
    }
}

/// Address of a page of the rings' memory.
pub(crate) fn page(number: u64) -> u64 {
    AdminHost::BASE + number * 0x1000
}

pub(crate) const UNMAPPED: NvmeStatus = NvmeStatus::DATA_TRANSFER_ERROR.with_dnr();

/// Two namespaces, one of which is slow, with a hardware queue for each queue or for all.
fn worlds() -> impl Iterator<Item = (NvmeWorld, Arc<Gate>, Arc<Gate>)> {
    [false, true].into_iter().map(|shares| {
        let (slow, fast) = (Gate::shut(), Gate::open());
        let devices = [AnyDevice::gated(&slow), AnyDevice::gated(&fast)];
        let world = if shares {
            NvmeWorld::shared(&devices, 2)
        } else {
            NvmeWorld::of_devices(&devices, 2, 1, NvmeDoorbells::Message)
        };
        (world, slow, fast)
    })
}

fn count(gate: &Gate, is: impl Fn(&Seen) -> bool) -> usize {
    gate.seen().iter().filter(|seen| is(seen)).count()
}

#[test]
fn maps_and_unmaps_stop_no_queue() {
    for (world, slow, fast) in worlds() {
        let mut host = IoHost::new(&world);
        host.begin(io::WRITE, SLOW, page(4));
        until("the write is in flight", || slow.held() == 1);
        slow.forget();
        fast.forget();
        let memory = file(0x1000);
        for round in 0..100 {
            let at = A + round * 0x1000;
            host.map(at, &memory);
            assert_eq!(host.io(io::WRITE, FAST, at), NvmeStatus::SUCCESS, "round {round}");
            host.unmap(at);
            assert_eq!(host.io(io::WRITE, FAST, at), UNMAPPED, "round {round}");
        }
        assert_eq!(slow.held(), 1, "a write was in flight all the time");
        assert_eq!(count(&fast, |seen| matches!(seen, Seen::Memory(_))), 0, "the queue was stopped");
        assert_eq!(count(&fast, |seen| matches!(seen, Seen::Ended(Op::Write, _))), 100);
        slow.set_shut(false);
        assert_eq!(host.end(), NvmeStatus::SUCCESS);
        drop(host);
        world.stop();
    }
}

#[test]
fn unmap_waits_for_requests_in_its_memory_only() {
    for (world, slow, _) in worlds() {
        for opcode in [io::WRITE, io::READ, io::COMPARE] {
            let mut host = IoHost::new(&world);
            let memory = [(); 2].map(|()| File::from(file(0x1000)));
            [A, B].into_iter().zip(&memory).for_each(|(at, file)| host.map(at, file));
            host.begin(opcode, SLOW, A);
            until("the command is in flight", || slow.held() == 1);
            slow.forget();
            host.send(1000, &unmap(A, 0x1000), None);
            until("the unmap waits", || world.server().status().session().unwrap().waits.is_some());
            for _ in 0..20 {
                // Memory without an address is not used by later commands.
                assert_eq!(host.io(io::WRITE, FAST, B), NvmeStatus::SUCCESS);
                assert_eq!(host.io(io::WRITE, FAST, A), UNMAPPED);
            }
            assert_eq!(world.server().status().session().unwrap().dma_maps, 3, "it is mapped here");
            // The next change has its turn, also at the same address.
            host.send(1001, &map(A, 0x1000, 0), Some(&memory[1]));
            assert!(!host.is_answered() && slow.held() == 1);
            slow.set_shut(false);
            assert_eq!([host.replied(), host.replied()], [1000, 1001]);
            assert_eq!(host.end(), NvmeStatus::SUCCESS);
            let ended = slow.seen().iter().position(|seen| matches!(seen, Seen::Ended(..))).unwrap();
            // The rings, the other memory, and that of the controller.
            let left = slow.seen().iter().position(|seen| *seen == Seen::Changed(3)).unwrap();
            assert!(ended < left, "{:?}", slow.seen());
            assert_eq!(host.io(io::WRITE, FAST, A), NvmeStatus::SUCCESS);
            slow.set_shut(true);
            drop(host);
            until("the session ends", || world.server().status().session().is_none());
        }
        world.stop();
    }
}

#[test]
fn rings_are_unmapped_with_a_command_in_flight() {
    for (world, slow, _) in worlds() {
        let mut host = IoHost::new(&world);
        let memory = file(0x1000);
        host.map(A, &memory);
        host.begin(io::WRITE, SLOW, A);
        until("the write is in flight", || slow.held() == 1);
        let rings = host.host.memory.try_clone().unwrap();
        for _ in 0..3 {
            // No request names their memory.
            host.host.client.call(&unmap(AdminHost::BASE, 0x10000), &[]).unwrap();
            assert_eq!(slow.held(), 1);
            host.host.client.call(&map(AdminHost::BASE, 0x10000, 0), &[rings.as_fd()]).unwrap();
            assert_eq!(host.io(io::WRITE, FAST, A), NvmeStatus::SUCCESS);
        }
        host.host.client.call(&unmap(AdminHost::BASE, 0x10000), &[]).unwrap();
        slow.set_shut(false);
        until("the write has ended", || slow.held() == 0);
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(host.host.status(3, 3), None, "memory was written after it was unmapped");
        host.host.client.call(&map(AdminHost::BASE, 0x10000, 0), &[rings.as_fd()]).unwrap();
        assert_eq!(host.end(), NvmeStatus::SUCCESS);
        drop(host);
        world.stop();
    }
}

#[test]
fn map_during_a_controller_reset_is_used_after_it() {
    for (world, slow, _) in worlds() {
        let mut host = IoHost::new(&world);
        host.begin(io::WRITE, SLOW, page(4));
        until("the write is in flight", || slow.held() == 1);
        host.host.write(0x14, &[0, 0, 0x46, 0]);
        let memory = File::from(file(0x1000));
        host.send(1000, &map(A, 0x1000, 0), Some(&memory));
        assert!(!host.is_answered(), "the queue may still use its memory");
        assert_eq!(host.host.csts(), 1, "registers are served");
        slow.set_shut(false);
        assert_eq!(host.replied(), 1000);
        until("the controller is reset", || host.host.csts() == 0);
        drop(host);
        until("the session ends", || world.server().status().session().is_none());
        world.stop();
    }
}

#[test]
fn thousands_of_maps_use_slots_again_and_keep_the_data() {
    let world = NvmeWorld::shared(&[AnyDevice::ram(0)], 2);
    let mut host = IoHost::new(&world);
    let [from, to] = [(); 2].map(|()| File::from(file(0x1000)));
    for round in 0..3000_u64 {
        let (pattern, mut bytes) = ([round as u8; 512], [0; 512]);
        from.write_all_at(&pattern, 0).unwrap();
        let (one, two) = (A + round % 7 * 0x1000, B + round % 5 * 0x1000);
        host.map(one, &from);
        assert_eq!(host.io(io::WRITE, 1, one), NvmeStatus::SUCCESS);
        host.map(two, &to);
        if round % 2 == 0 {
            host.unmap(one);
        }
        assert_eq!(host.io(io::READ, 1, two), NvmeStatus::SUCCESS);
        to.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes, pattern, "round {round}");
        if round % 2 == 1 {
            host.unmap(one);
        }
        host.unmap(two);
    }
    assert_eq!(world.server().status().session().unwrap().dma_maps, 1);
    drop(host);
    world.stop();
}

#[test]
fn load_on_several_queues_verifies_while_memory_comes_and_goes() {
    let device = [AnyDevice::ram(300_000)];
    for world in [NvmeWorld::of_devices(&device, QUEUES, 2, NvmeDoorbells::Message), NvmeWorld::shared(&device, QUEUES)]
    {
        let mut host = Host::connect(&world.path, true);
        for seed in 40..50 {
            host.fill(seed);
            for first in 0..8 {
                host.submit_all(Op::Write, first);
                for _ in 0..10 {
                    host.round();
                    let region = Region::shared(0x4000).unwrap();
                    let mapping = host.controller.transport().domain().map(vec![Arc::clone(&region)]);
                    assert!(host.controller.transport().dma_addr(&region, 0).is_some());
                    host.round();
                    drop(mapping);
                }
                host.finish();
            }
            host.verify(seed);
        }
        drop(host);
        world.stop();
    }
}
