//! The answers of one queue to a host that reads slowly or not at all, over a real socket.

use std::io::Read;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;

use blkyard_mem::Region;
use blkyard_mq::{DeviceInfo, Status};
use blkyard_nvme::fabrics::{
    ANY_CONTROLLER, CONNECT_BYTES, ConnectCommand, ConnectData, FabricsCommand, Nqn, PropertySize,
};
use blkyard_nvme::registers::{CC, ControllerConfig};
use blkyard_nvme::tcp::{TcpAdminEvent, TcpAdminQueue, TcpDataMemory, TcpTargetOptions};
use blkyard_nvme::{Connected, FabricsSubsystem, Psdt, Sqe, io};
use blkyard_wire::nvme_tcp::{Framing, IcReq, Pdu};

use super::*;
use crate::nvme_tcp::{NvmeTcpDisk, queue_options, subsystem_options};

const ENTRIES: u16 = 128;
const READ_BYTES: u32 = 4096;
/// SGL type of data to be transferred.
const TRANSPORT: u64 = 0x5a << 56;
const PATIENCE: Duration = Duration::from_secs(20);

/// Connects a queue. Returns it with the slot of Connect, and the result.
fn connect(subsystem: &mut FabricsSubsystem, qid: u16, id: u16) -> (TcpAdminQueue, u16, Connected) {
    let options = TcpTargetOptions {
        slots: 1,
        segments_max: 1,
        in_capsule: 8192,
        maxh2cdata: TRANSFER_BYTES,
        header_digest: false,
        data_digest: false,
        alignment: 0,
    };
    let mut queue = TcpAdminQueue::new(options).unwrap();
    let sq_size = if qid == 0 { 31 } else { ENTRIES - 1 };
    let command = ConnectCommand { qid, sq_size, no_flow_control: true, keep_alive_ms: 0 };
    let mut data = [0; CONNECT_BYTES];
    let nqn = subsystem.options().nqn.clone();
    ConnectData { host_id: [1; 16], controller_id: id, subsystem: nqn.clone(), host: nqn }.write(&mut data);
    let sqe = FabricsCommand::Connect(command).sqe().with_data(Psdt::Sgl, [0, 1 << 56 | CONNECT_BYTES as u64]);
    let request = Pdu::IcReq(IcReq { alignment: 0, header_digest: false, data_digest: false, maxr2t: 0 });
    let capsule = Pdu::CapsuleCmd { sqe: sqe.0, len: CONNECT_BYTES as u32 };
    let bytes = [request, capsule].map(|pdu| pdu.encode(Framing::PLAIN).bytes().to_vec()).concat();
    let bytes = [&bytes[..], &data].concat();
    let mut bytes = &bytes[..];
    loop {
        match queue.receive(&mut bytes) {
            Some(TcpAdminEvent::Command { slot, data, .. }) => {
                return (queue, slot, subsystem.connect(&command, &data, 0).unwrap());
            }
            event => assert!(event.is_some(), "Connect did not arrive"),
        }
    }
}

/// A queue that runs, with its region, and the host's end of its connection.
fn running() -> (TcpQueueState, Arc<Region>, TcpStream) {
    let info = DeviceInfo { capacity_sectors: 1 << 20, ..DeviceInfo::default() };
    let disk = NvmeTcpDisk::new(Nqn::new("nqn.2026-11.test:disk").unwrap(), vec![(1, info)], 1, "1");
    let mut subsystem = FabricsSubsystem::new(subsystem_options(&disk), disk.table());
    let (_, _, admin) = connect(&mut subsystem, 0, ANY_CONTROLLER);
    let Connected::Admin(id) = admin else { panic!("{admin:?}") };
    let config =
        ControllerConfig { enabled: true, sq_entry_shift: 6, cq_entry_shift: 4, ..ControllerConfig::default() };
    let controller = &mut subsystem.association(id).unwrap().controller;
    controller.set_property(PropertySize::Four, CC as u32, config.bits().into()).unwrap();
    let (tcp, slot, connected) = connect(&mut subsystem, 1, id);
    let Connected::Io(id, connected) = connected else { panic!("{connected:?}") };
    let options = queue_options(ENTRIES, false);
    let bytes = TcpIoQueue::memory_bytes(&options);
    let region = Region::anonymous(bytes as usize).unwrap();
    let table = Arc::new(RegionTable::new(vec![Arc::clone(&region)]));
    let memory = TcpDataMemory { table, region: 0, offset: 0, bytes };
    let mut queue = TcpIoQueue::new(tcp.into_queue(), connected, options, memory);
    queue.accept(slot, id);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let host = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    host.set_read_timeout(Some(PATIENCE)).unwrap();
    let (target, _) = listener.accept().unwrap();
    // Room for a few answers only.
    rustix::net::sockopt::set_socket_send_buffer_size(&target, 16 << 10).unwrap();
    rustix::net::sockopt::set_socket_recv_buffer_size(&host, 16 << 10).unwrap();
    (TcpQueueState::new(BufferedSocket::new(target).unwrap(), queue).unwrap(), region, host)
}

fn read(cid: u16) -> Vec<u8> {
    let blocks = READ_BYTES / 512;
    let sqe = Sqe::with_blocks(io::READ, 1, u64::from(cid) * u64::from(blocks), blocks, 0).with_cid(cid);
    let sqe = sqe.with_data(Psdt::Sgl, [0, TRANSPORT | u64::from(READ_BYTES)]);
    Pdu::CapsuleCmd { sqe: sqe.0, len: 0 }.encode(Framing::PLAIN).bytes().to_vec()
}

/// Fetches all commands, and fills each one's memory with its number.
fn execute(state: &mut TcpQueueState, region: &Region) -> usize {
    let mut count = 0;
    loop {
        let mut bio = Bio::default();
        match state.queue.fetch(&mut bio) {
            NextBio::Bio(slot) => {
                let segment = bio.segments[0];
                region.span(segment.offset, segment.len as usize).unwrap().fill((bio.sector / 8) as u8);
                state.queue.end(slot, Status::Ok);
                count += 1;
            }
            NextBio::Without => {}
            NextBio::Unavailable => return count,
        }
    }
}

#[test]
fn answers_of_a_slow_reader_keep_their_memory_until_sent() {
    let (mut state, region, mut host) = running();
    let commands: Vec<u8> = (1..ENTRIES).flat_map(read).collect();
    state.queue.receive(&mut &commands[..]);
    assert_eq!(execute(&mut state, &region), usize::from(ENTRIES - 1));
    assert!(state.send());
    assert!(state.sending.is_some(), "the socket took all");
    assert!(state.queue.in_flight() > 0 && !state.has_news());
    // One call sends a list, until the socket is full: calls without room take nothing.
    while state.send() {}
    // The answers of later commands wait behind: the memory of these is not taken for them.
    let mut later = &read(ENTRIES)[..];
    state.queue.receive(&mut later);
    execute(&mut state, &region);
    let header = 24;
    // The answers to the initialization and to Connect.
    host.read_exact(&mut vec![0; 128 + header]).unwrap();
    for cid in 1..=ENTRIES {
        let mut answer = vec![0; header + READ_BYTES as usize];
        let mut at = 0;
        while at < answer.len() {
            at += host.read(&mut answer[at..]).unwrap();
            state.send();
            execute(&mut state, &region);
            state.send();
        }
        assert_eq!(u16::from_le_bytes([answer[8], answer[9]]), cid);
        assert!(answer[header..].iter().all(|byte| *byte == cid as u8), "data of command {cid}");
    }
    assert_eq!((state.sending, state.queue.in_flight()), (None, 0));
    // A peer that resets the connection holds up nothing.
    let mut last = &commands[..];
    state.queue.receive(&mut last);
    execute(&mut state, &region);
    state.send();
    drop(host);
    while state.sending.is_some() {
        state.send();
    }
    assert_eq!(state.queue.in_flight(), 0);
}

/// With TLS, the bytes that are encrypted; and those that another process has left.
#[test]
fn answers_behind_bytes_that_the_socket_does_not_take_are_no_news() {
    let (mut state, region, mut host) = running();
    let left = vec![7; 4 << 20];
    state.socket.get_mut().restore(&[], 0, &left);
    while state.send() {}
    state.queue.receive(&mut &read(1)[..]);
    execute(&mut state, &region);
    assert!(state.has_answers() && !state.send(), "the socket took all");
    // The lane would turn without end, and nothing could move.
    assert!(!state.has_news());
    state.queue.abandon(TcpEnd::Closed);
    assert!(!state.has_news());
    let (mut read, mut bytes) = (0, vec![0; 1 << 16]);
    while read < left.len() {
        read += host.read(&mut bytes).unwrap();
        state.send();
    }
    assert!(state.has_news(), "the end of the queue is to be reported");
}
