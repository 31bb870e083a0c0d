//! Both sides allocate nothing after start.

use blkyard_mem::{CountingAllocator, Region, RegionTable, Segment};
use blkyard_nvme::tcp::{
    SendList, SendPiece, TcpDirection, TcpHostEvent, TcpHostOptions, TcpHostQueue, TcpTargetEvent, TcpTargetOptions,
    TcpTargetQueue, TcpTransfer,
};
use blkyard_nvme::{NvmeStatus, Sqe, io};

const DEPTH: u16 = 32;
const BYTES: u32 = 256 << 10;

struct Pair {
    host: TcpHostQueue,
    target: TcpTargetQueue,
    memory: RegionTable,
    list: SendList,
    stream: Vec<u8>,
    free: Vec<u16>,
    completed: u32,
}

/// The bytes of a list.
fn copy(list: &mut SendList, memory: &RegionTable, stream: &mut Vec<u8>) {
    stream.clear();
    for piece in list.pieces() {
        match piece {
            SendPiece::Bytes(bytes) => stream.extend_from_slice(bytes),
            SendPiece::Data(segment) => {
                let at = stream.len();
                stream.resize(at + segment.len as usize, 0);
                memory.resolve(segment).unwrap().copy_to_slice(&mut stream[at..]);
            }
        }
    }
    list.clear();
}

impl Pair {
    fn new(digests: bool, in_capsule: u32) -> Pair {
        let (segments_max, alignment) = (4, 0);
        let host = TcpHostOptions {
            depth: DEPTH,
            segments_max,
            in_capsule,
            header_digest: digests,
            data_digest: digests,
            alignment,
        };
        let target = TcpTargetOptions {
            slots: DEPTH,
            segments_max,
            in_capsule: 8192,
            maxh2cdata: 64 << 10,
            header_digest: true,
            data_digest: true,
            alignment,
        };
        let regions = [0; 2].map(|_| Region::anonymous(usize::from(DEPTH) * BYTES as usize).unwrap());
        Pair {
            host: TcpHostQueue::new(host),
            target: TcpTargetQueue::new(target),
            memory: RegionTable::new(regions.into()),
            list: SendList::new(64),
            stream: Vec::with_capacity(32 << 20),
            free: (0..DEPTH).collect(),
            completed: 0,
        }
    }

    fn segment(region: u32, slot: u16, len: u32) -> Segment {
        Segment { region, offset: u64::from(slot) * u64::from(BYTES), len }
    }

    fn submit(&mut self, number: u32) {
        let Some(slot) = self.free.pop() else { return };
        let (opcode, direction) =
            if number.is_multiple_of(2) { (io::READ, TcpDirection::Read) } else { (io::WRITE, TcpDirection::Write) };
        let len = if number.is_multiple_of(3) { BYTES } else { 4096 };
        let segments = std::iter::once(Pair::segment(0, slot, len));
        assert!(self.host.push(&self.memory, slot, Sqe::with_blocks(opcode, 1, 0, 8, 0), direction, segments));
    }

    fn host_sends(&mut self) {
        let Pair { host, target, memory, list, stream, .. } = self;
        let Some(number) = host.fill(memory, list) else { return };
        copy(list, memory, stream);
        let mut bytes = &stream[..];
        let place = |segment, piece: &[u8]| memory.resolve(segment).unwrap().copy_from_slice(piece);
        while let Some(event) = target.receive(&mut bytes, place) {
            match event {
                TcpTargetEvent::Command { slot, sqe, transfer } => {
                    let (TcpTransfer::Transport(len) | TcpTransfer::InCapsule(len)) = transfer else { continue };
                    let segments = std::iter::once(Pair::segment(1, slot, len));
                    if sqe.opcode() == io::READ {
                        assert!(target.respond_with(memory, slot, segments, 0));
                    } else {
                        assert!(target.receive_data(memory, slot, segments));
                    }
                }
                TcpTargetEvent::DataReady(slot) => target.respond(slot, NvmeStatus::SUCCESS, 0),
                TcpTargetEvent::Started | TcpTargetEvent::Released(_) => {}
                TcpTargetEvent::Ended(end) => panic!("{end:?}"),
            }
        }
        assert!(bytes.is_empty());
        host.sent(number);
    }

    fn target_sends(&mut self) {
        let Pair { host, target, memory, list, stream, free, completed } = self;
        let Some(number) = target.fill(memory, list) else { return };
        copy(list, memory, stream);
        target.sent(number);
        let mut bytes = &stream[..];
        let place = |segment, piece: &[u8]| memory.resolve(segment).unwrap().copy_from_slice(piece);
        while let Some(event) = host.receive(&mut bytes, place) {
            match event {
                TcpHostEvent::Completed(done) => {
                    assert_eq!(done.status, NvmeStatus::SUCCESS);
                    free.push(done.slot);
                    *completed += 1;
                }
                TcpHostEvent::Started => {}
                TcpHostEvent::Ended(end) => panic!("{end:?}"),
            }
        }
    }
}

#[test]
fn after_start_nothing_is_allocated() {
    for (digests, in_capsule) in [(false, 0), (false, 8192), (true, 0), (true, 8192)] {
        let mut pair = Pair::new(digests, in_capsule);
        pair.host_sends();
        pair.target_sends();
        let before = CountingAllocator::count();
        for number in 0..2000 {
            pair.submit(number);
            if number.is_multiple_of(7) {
                pair.host_sends();
                pair.target_sends();
            }
        }
        assert_eq!(CountingAllocator::count() - before, 0, "digests {digests}, in-capsule {in_capsule}");
        assert!(pair.completed > 500, "{} commands", pair.completed);
    }
}
