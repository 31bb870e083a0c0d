//! Reads that were given up: what still comes for them goes to waste memory, and touches nothing else.

use blkyard_mem::{Region, RegionTable, Segment};
use blkyard_nvme::tcp::{SendList, TcpDirection, TcpHostEvent, TcpHostQueue};
use blkyard_nvme::{Completed, NvmeStatus, Sqe, io};
use blkyard_wire::nvme_tcp::{C2hData, Framing, Pdu};

use super::hostile_target::{OPTIONS, RESPONSE};

/// Behind the data of all requests.
const WASTE: Segment = Segment { region: 0, offset: 64 << 10, len: 4096 };

fn encode(pdu: Pdu, fill: u8) -> Vec<u8> {
    let mut bytes = pdu.encode(Framing::PLAIN).bytes().to_vec();
    bytes.resize(bytes.len() + pdu.data_bytes() as usize, fill);
    bytes
}

struct Host {
    queue: TcpHostQueue,
    memory: RegionTable,
}

impl Host {
    /// A started queue with two reads of 4096 bytes in flight, of two segments each.
    fn new() -> Host {
        let memory = RegionTable::new(vec![Region::anonymous(1 << 20).unwrap()]);
        let mut host = Host { queue: TcpHostQueue::new(OPTIONS), memory };
        host.send();
        assert_eq!(host.receive(&encode(Pdu::IcResp(RESPONSE), 0)), [TcpHostEvent::Started]);
        for slot in 0..2 {
            let segments =
                [0, 8192].map(|offset| Segment { region: 0, offset: offset + u64::from(slot) * 16384, len: 2048 });
            let sqe = Sqe::with_blocks(io::READ, 1, 0, 8, 0);
            assert!(host.queue.push(&host.memory, slot, sqe, TcpDirection::Read, segments.into_iter()));
        }
        host.send();
        host
    }

    fn send(&mut self) {
        let number = self.queue.fill(&self.memory, &mut SendList::new(64));
        number.into_iter().for_each(|number| self.queue.sent(number));
    }

    fn receive(&mut self, mut bytes: &[u8]) -> Vec<TcpHostEvent> {
        let memory = &self.memory;
        let place = |segment: Segment, piece: &[u8]| memory.resolve(segment).unwrap().copy_from_slice(piece);
        std::iter::from_fn(|| self.queue.receive(&mut bytes, place)).collect()
    }

    /// Data of a read, from this offset on, all of this byte.
    fn data(&mut self, slot: u16, offset: u32, len: u32, fill: u8) -> Vec<TcpHostEvent> {
        let is_success = offset + len == 4096;
        self.receive(&encode(Pdu::C2hData(C2hData { cccid: slot, offset, len, is_last: is_success, is_success }), fill))
    }

    fn byte(&self, offset: u64) -> u8 {
        let mut byte = [0];
        self.memory.resolve(Segment { region: 0, offset, len: 1 }).unwrap().copy_to_slice(&mut byte);
        byte[0]
    }
}

fn success(slot: u16) -> TcpHostEvent {
    TcpHostEvent::Completed(Completed { slot, status: NvmeStatus::SUCCESS, result: 0 })
}

#[test]
fn data_of_a_read_that_was_given_up_goes_to_waste() {
    let mut host = Host::new();
    assert!(host.queue.divert(0, WASTE));
    assert_eq!(host.data(0, 0, 4096, 7), [success(0)]);
    assert_eq!([0, 2047, 8192].map(|at| host.byte(at)), [0; 3]);
    assert_eq!(host.byte(WASTE.offset), 7);
    assert_eq!(host.data(1, 0, 4096, 9), [success(1)]);
    assert_eq!([16384, 24576].map(|at| host.byte(at)), [9; 2]);
}

#[test]
fn what_came_before_stays_and_the_rest_goes_to_waste() {
    let mut host = Host::new();
    assert_eq!(host.data(0, 0, 3072, 5), []);
    assert!(host.queue.divert(0, WASTE));
    assert_eq!(host.data(0, 3072, 1024, 7), [success(0)]);
    assert_eq!([0, 8192, 8192 + 1023, 8192 + 1024].map(|at| host.byte(at)), [5, 5, 5, 0]);
    assert_eq!([0, 3071, 3072].map(|at| host.byte(WASTE.offset + at)), [0, 0, 7]);
}

#[test]
fn a_read_whose_data_is_coming_in_keeps_its_memory() {
    let mut host = Host::new();
    let pdu = encode(Pdu::C2hData(C2hData { cccid: 0, offset: 0, len: 4096, is_last: true, is_success: true }), 7);
    assert_eq!(host.receive(&pdu[..100]), []);
    assert!(!host.queue.divert(0, WASTE), "the kernel may be receiving into it");
    assert!(host.queue.divert(1, WASTE), "the other one can be given up");
    assert_eq!(host.receive(&pdu[100..]), [success(0)]);
    assert_eq!([0, 8192 + 2047].map(|at| host.byte(at)), [7; 2]);
}

#[test]
fn only_reads_in_flight_that_fit_are_given_up() {
    let mut host = Host::new();
    assert!(!host.queue.divert(0, Segment { len: 4095, ..WASTE }), "waste that is too short");
    assert!(!host.queue.divert(5, WASTE), "a free slot");
    assert!(!host.queue.divert(8, WASTE), "no slot");
    let data = std::iter::once(Segment { region: 0, offset: 0, len: 512 });
    assert!(host.queue.push(&host.memory, 2, Sqe::with_blocks(io::WRITE, 1, 0, 1, 0), TcpDirection::Write, data));
    assert!(!host.queue.divert(2, WASTE), "a write");
    let data = std::iter::once(Segment { region: 0, offset: 0, len: 512 });
    assert!(host.queue.push(&host.memory, 3, Sqe::with_blocks(io::READ, 1, 0, 1, 0), TcpDirection::Read, data));
    assert!(host.queue.divert(3, WASTE), "one that is not sent yet");
    assert_eq!(host.data(1, 0, 4096, 3), [success(1)]);
    assert!(!host.queue.divert(1, WASTE), "one that is complete");
}
