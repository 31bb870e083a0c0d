//! A front-end with arbitrary messages: it loses its session, and no other is affected.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use blkyard_mem::EXPORT_BYTES_MAX;
use proptest::prelude::*;

use crate::common::{
    Bystander, Data, PATIENCE, Ram, Raw, Request, Vq, World, addresses, event, kind, one_queue, readable, rung, state,
    until, words64,
};

/// A hostile front-end at the first export; afterwards a good one is served there and the second export was not
/// affected.
struct Siege {
    world: World,
    bystander: Bystander,
}

impl Siege {
    fn begin() -> Siege {
        let world = World::pair();
        let bystander = Bystander::new(&world.exports[1]);
        Siege { world, bystander }
    }

    fn attacker(&self) -> Raw {
        let raw = Raw::connect(&self.world.exports[0].path);
        raw.negotiate(crate::common::PLAIN);
        raw
    }

    /// After an attack the session has ended, and both exports work.
    fn ended(&mut self, raw: &Raw, what: &str) {
        raw.wait_closed();
        self.intact(what);
    }

    fn intact(&mut self, what: &str) {
        let export = &self.world.exports[0];
        until(what, || !export.status().is_connected());
        self.bystander.goes_on();
        let (front, mut vq) = one_queue(export);
        assert_eq!(vq.write(0, &[7; 512]), 0, "after {what}");
        front.leave(export);
    }

    fn lift(self) {
        drop(self.bystander);
        self.world.stop();
    }
}

/// A memory table: its regions' words, and as many times the same descriptor.
fn table(regions: &[[u64; 4]], count: u32) -> Vec<u8> {
    let mut payload = state(count, 0);
    regions.iter().for_each(|region| payload.extend(words64(region)));
    payload
}

#[test]
fn memory_that_cannot_be_is_refused() {
    let mut siege = Siege::begin();
    let ram = Ram::new(1 << 20);
    let [guest, len, user, _] = ram.words();
    let tables: &[(&str, Vec<[u64; 4]>)] = &[
        ("beyond the end of its file", vec![[guest, len + 1, user, 0]]),
        ("an offset beyond the end", vec![[guest, 4096, user, len]]),
        ("no bytes", vec![[guest, 0, user, 0]]),
        ("guest addresses that wrap around", vec![[u64::MAX - 4095, 8192, user, 0]]),
        ("user addresses that wrap around", vec![[guest, 8192, u64::MAX - 4095, 0]]),
        ("an offset that wraps around", vec![[guest, 8192, user, u64::MAX - 4095]]),
        ("a size of all there is", vec![[0, u64::MAX, 0, 0]]),
        ("two regions that overlap", vec![[guest, 8192, user, 0], [guest + 4096, 8192, user + (1 << 30), 8192]]),
        ("two regions at one user address", vec![[guest, 8192, user, 0], [guest + (1 << 30), 4096, user + 4096, 8192]]),
        ("the same region twice", vec![[guest, 4096, user, 0], [guest, 4096, user, 0]]),
    ];
    for (what, regions) in tables {
        let raw = siege.attacker();
        let fds = vec![ram.file.as_fd(); regions.len()];
        assert!(!raw.accepts(Request::SetMemTable, &table(regions, regions.len() as u32), &fds), "{what}");
        siege.ended(&raw, what);
        // The same slot by slot.
        let raw = siege.attacker();
        let added = regions.iter().all(|region| {
            let mut payload = vec![0; 8];
            payload.extend(words64(region));
            raw.accepts(Request::AddMemReg, &payload, &[ram.file.as_fd()])
        });
        assert!(!added, "{what}, added");
        siege.ended(&raw, what);
    }
    siege.lift();
}

#[test]
fn memory_log_and_record_take_no_more_addresses_than_an_export_has() {
    type Share<'a> = &'a dyn Fn(&Raw, u64) -> bool;
    let mut siege = Siege::begin();
    // A file without memory.
    let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, EXPORT_BYTES_MAX).unwrap();
    let fd = [file.as_fd()];
    let (half, page) = (EXPORT_BYTES_MAX / 2, 4096);
    let memory = |raw: &Raw, bytes| raw.accepts(Request::SetMemTable, &table(&[[0, bytes, 1 << 46, 0]], 1), &fd);
    let log = |raw: &Raw, bytes| raw.ask(Request::SetLogBase, &words64(&[bytes, 0]), &fd).is_some();
    // One queue of 64 entries.
    let record = |raw: &Raw, bytes| raw.accepts(Request::SetInflightFd, &words64(&[bytes, 0, 1 | 64 << 16]), &fd);
    let kinds: [(&str, Share<'_>); 3] = [("memory", &memory), ("log", &log), ("record", &record)];
    for (at, (name, last)) in kinds.iter().enumerate() {
        let raw = siege.attacker();
        for (other, share) in kinds.iter().enumerate().filter(|(other, _)| *other != at) {
            // Replaced by as much.
            assert!(share.1(&raw, half) && share.1(&raw, half), "{other} before the {name}");
        }
        assert!(!last(&raw, page), "{name}");
        siege.ended(&raw, name);
    }
    siege.lift();
}

#[test]
fn memory_tables_that_contradict_themselves_are_refused() {
    let mut siege = Siege::begin();
    let ram = Ram::new(1 << 20);
    let (reader, _writer) = std::io::pipe().unwrap();
    let read_only = std::fs::File::open("/proc/self/exe").unwrap();
    let socket = std::os::unix::net::UnixStream::pair().unwrap().0;
    let (file, one) = (ram.file.as_fd(), ram.words());
    let cases: &[(&str, Vec<u8>, Vec<BorrowedFd<'_>>)] = &[
        ("no descriptor", table(&[one], 1), vec![]),
        ("two descriptors for one region", table(&[one], 1), vec![file; 2]),
        ("more regions than bytes", table(&[one], 2), vec![file; 2]),
        ("more bytes than regions", table(&[one, one], 1), vec![file; 2]),
        ("no regions", table(&[], 0), vec![]),
        ("a number of regions that overflows", table(&[one], u32::MAX), vec![file]),
        ("no payload", vec![], vec![]),
        ("a pipe", table(&[one], 1), vec![reader.as_fd()]),
        ("a socket", table(&[one], 1), vec![socket.as_fd()]),
        ("a file that may not be written", table(&[one], 1), vec![read_only.as_fd()]),
    ];
    for (what, payload, fds) in cases {
        let raw = siege.attacker();
        assert!(!raw.accepts(Request::SetMemTable, payload, fds), "{what}");
        siege.ended(&raw, what);
    }
    let raw = siege.attacker();
    let mut unknown = vec![0; 8];
    unknown.extend(words64(&one));
    assert!(!raw.accepts(Request::RemMemReg, &unknown, &[]), "a region that was never there");
    siege.ended(&raw, "removing an unknown region");
    siege.lift();
}

#[test]
fn rings_that_cannot_be_are_refused() {
    let mut siege = Siege::begin();
    let ram = Ram::new(1 << 20);
    let vq = Vq::new(&ram, 0);
    let [desc, avail, used] = vq.user_addrs();
    let end = ram.user_addr + ram.len;
    // Size, addresses, and which message refuses it at the latest.
    let cases: &[(&str, u32, [u64; 3])] = &[
        ("no entries", 0, [desc, avail, used]),
        ("entries not a power of two", 48, [desc, avail, used]),
        ("more entries than we take", 2048, [desc, avail, used]),
        ("more entries than there are", 65536, [desc, avail, used]),
        ("descriptors outside memory", 64, [0x1000, avail, used]),
        ("descriptors up to beyond the end", 64, [end - 1008, avail, used]),
        ("available ring outside memory", 64, [desc, end, used]),
        ("used ring outside memory", 64, [desc, avail, end - 512]),
        ("addresses at the end of all", 64, [u64::MAX - 15, u64::MAX - 1, u64::MAX - 3]),
        ("guest addresses in place of user ones", 64, [ram.guest_addr, ram.guest_addr + 24576, ram.guest_addr + 32768]),
        ("descriptors not aligned", 64, [desc + 8, avail, used]),
        ("available ring not aligned", 64, [desc, avail + 1, used]),
        ("used ring not aligned", 64, [desc, avail, used + 2]),
    ];
    for (what, size, addrs) in cases {
        let raw = siege.attacker();
        assert!(raw.accepts(Request::SetMemTable, &table(&[ram.words()], 1), &[ram.file.as_fd()]));
        let taken = raw.accepts(Request::SetVringNum, &state(0, *size), &[])
            && raw.accepts(Request::SetVringBase, &state(0, 0), &[])
            && raw.accepts(Request::SetVringAddr, &addresses(0, *addrs), &[])
            && raw.accepts(Request::SetVringKick, &words64(&[0]), &[vq.kick.as_fd()])
            && raw.accepts(Request::SetVringEnable, &state(0, 1), &[]);
        assert!(!taken, "a ring with {what} runs");
        siege.ended(&raw, what);
    }
    // The largest we take is taken.
    let raw = siege.attacker();
    assert!(raw.accepts(Request::SetVringNum, &state(1, 1024), &[]));
    drop(raw);
    siege.intact("a large ring");
    siege.lift();
}

#[test]
fn messages_for_queues_that_are_not_there_are_refused() {
    let mut siege = Siege::begin();
    let kick = event();
    for index in [2_u32, 3, 255, 256, u32::MAX] {
        let cases: &[(Request, Vec<u8>)] = &[
            (Request::SetVringNum, state(index, 64)),
            (Request::SetVringBase, state(index, 0)),
            (Request::GetVringBase, state(index, 0)),
            (Request::SetVringAddr, addresses(index, [0; 3])),
            (Request::SetVringEnable, state(index, 1)),
        ];
        for (request, payload) in cases {
            let raw = siege.attacker();
            assert!(!raw.accepts(*request, payload, &[]), "{request:?} for queue {index}");
            siege.ended(&raw, "a queue that is not there");
        }
    }
    for request in [Request::SetVringKick, Request::SetVringCall, Request::SetVringErr] {
        for index in [2_u64, 255] {
            let raw = siege.attacker();
            assert!(!raw.accepts(request, &words64(&[index]), &[kick.as_fd()]), "{request:?} for queue {index}");
            siege.ended(&raw, "a queue that is not there");
        }
    }
    siege.lift();
}

#[test]
fn descriptors_that_are_no_event_descriptors_are_refused() {
    let mut siege = Siege::begin();
    let (_reader, writer) = std::io::pipe().unwrap();
    let file = tempfile::tempfile().unwrap();
    let socket = std::os::unix::net::UnixStream::pair().unwrap().0;
    let memory = Ram::new(4096);
    let events: [(&str, BorrowedFd<'_>); 4] = [
        ("a pipe", writer.as_fd()),
        ("a file", file.as_fd()),
        ("a socket", socket.as_fd()),
        ("memory", memory.file.as_fd()),
    ];
    let good = event();
    for request in [Request::SetVringKick, Request::SetVringCall, Request::SetVringErr] {
        for (what, fd) in events {
            let raw = siege.attacker();
            assert!(!raw.accepts(request, &words64(&[0]), &[fd]), "{request:?} with {what}");
            siege.ended(&raw, what);
        }
        for (what, word, fds) in [
            ("none where one is announced", 0, vec![]),
            ("one where none is announced", 0x100, vec![good.as_fd()]),
            ("two", 0, vec![good.as_fd(); 2]),
        ] {
            let raw = siege.attacker();
            assert!(!raw.accepts(request, &words64(&[word]), &fds), "{request:?} with {what}");
            siege.ended(&raw, what);
        }
    }
    siege.lift();
}

#[test]
fn a_kick_that_stays_readable_when_it_is_read_is_refused() {
    use rustix::event::{EventfdFlags, eventfd};
    let mut siege = Siege::begin();
    let semaphore = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE).unwrap();
    let info = format!("/proc/self/fdinfo/{}", std::os::fd::AsRawFd::as_raw_fd(&semaphore));
    if !std::fs::read_to_string(info).unwrap().contains("eventfd-semaphore") {
        eprintln!("this kernel does not say what is a semaphore: the lane's own test covers it");
        return siege.lift();
    }
    rustix::io::write(&semaphore, &(1_u64 << 63).to_ne_bytes()).unwrap();
    let raw = siege.attacker();
    assert!(!raw.accepts(Request::SetVringKick, &words64(&[0]), &[semaphore.as_fd()]));
    siege.ended(&raw, "a semaphore for a kick");
    // It is not listened to elsewhere.
    let raw = siege.attacker();
    assert!(raw.accepts(Request::SetVringCall, &words64(&[0]), &[semaphore.as_fd()]));
    drop(raw);
    siege.lift();
}

#[test]
fn an_eventfd_for_the_log_is_one_event_descriptor_and_nothing_else() {
    let mut siege = Siege::begin();
    let (_reader, writer) = std::io::pipe().unwrap();
    let (good, pipe) = (event(), writer.as_fd());
    let log = Request::SetLogFd as u32;
    // Flags: the version, and whether it is an answer.
    let cases: &[(&str, u32, &[u8], &[BorrowedFd<'_>])] = &[
        ("no descriptor", 1, &[], &[]),
        ("two descriptors", 1, &[], &[good.as_fd(), good.as_fd()]),
        ("a pipe", 1, &[], &[pipe]),
        ("a body", 1, &[0; 8], &[good.as_fd()]),
        ("a body of one byte", 1, &[0], &[good.as_fd()]),
        ("version 0", 0, &[], &[good.as_fd()]),
        ("version 2", 2, &[], &[good.as_fd()]),
        ("an answer", 5, &[], &[good.as_fd()]),
        ("reserved flags", 0x11, &[], &[good.as_fd()]),
    ];
    for (what, flags, body, fds) in cases {
        for need_reply in [0, 8] {
            let raw = siege.attacker();
            assert!(raw.send(&Raw::message(log, flags | need_reply, body), fds));
            siege.ended(&raw, what);
        }
    }
    let raw = siege.attacker();
    assert_eq!(raw.ask(Request::SetLogFd, &[], &[]), Some(words64(&[1])), "a refusal is told to who asks");
    siege.ended(&raw, "an eventfd that was refused");
    // A header whose body never comes, and one that arrived whole, are assembled like any other.
    let raw = siege.attacker();
    assert!(raw.send(&Raw::message(log, 1, &[0; 8])[..16], &[good.as_fd()]));
    raw.0.shutdown(std::net::Shutdown::Write).unwrap();
    siege.ended(&raw, "a message that was cut");
    let raw = siege.attacker();
    let whole = Raw::message(log, 9, &[]);
    assert!(raw.send(&whole[..5], &[good.as_fd()]) && raw.send(&whole[5..], &[]));
    assert_eq!(raw.reply(Request::SetLogFd), Some(words64(&[0])));
    // Without acknowledgements there is no reply, and the session continues.
    let all = raw.ask(Request::GetProtocolFeatures, &[], &[]).unwrap();
    let all = u64::from_ne_bytes(all.try_into().unwrap());
    assert!(raw.tell(Request::SetProtocolFeatures, &words64(&[all & !(1 << 3)]), &[]));
    assert!(raw.send(&whole, &[good.as_fd()]));
    assert_eq!(raw.ask(Request::GetQueueNum, &[], &[]), Some(words64(&[2])));
    drop(raw);
    siege.lift();
}

#[test]
fn features_that_were_never_offered_are_refused() {
    let mut siege = Siege::begin();
    // Read-only, a reset of single rings, and an undefined bit.
    for feature in [5, 40, 63] {
        let raw = siege.attacker();
        assert!(!raw.accepts(Request::SetFeatures, &words64(&[1 << 30 | 1 << feature]), &[]), "feature {feature}");
        siege.ended(&raw, "a feature that was never offered");
    }
    // In-band notifications, in-flight requests handed over, and one unknown.
    for feature in [14, 20, 40] {
        let raw = siege.attacker();
        let all = raw.ask(Request::GetProtocolFeatures, &[], &[]).unwrap();
        let all = u64::from_ne_bytes(all.try_into().unwrap());
        assert!(!raw.accepts(Request::SetProtocolFeatures, &words64(&[all | 1 << feature]), &[]), "{feature}");
        siege.ended(&raw, "a protocol feature that was never offered");
    }
    siege.lift();
}

#[test]
fn the_configuration_is_read_and_written_within_its_bounds_only() {
    let mut siege = Siege::begin();
    let space = |offset: u32, size: u32, bytes: usize| {
        let mut payload: Vec<u8> = [offset, size, 0].iter().flat_map(|word| word.to_ne_bytes()).collect();
        payload.resize(12 + bytes, 0);
        payload
    };
    let raw = siege.attacker();
    // An empty reply is a refusal; the session continues.
    for (offset, size) in [(0, 257), (256, 1), (250, 7), (1000, 8)] {
        let answer = raw.ask(Request::GetConfig, &space(offset, size, size as usize), &[]).unwrap();
        assert_eq!(answer, space(offset, 0, 0), "{size} bytes at {offset}");
    }
    assert_eq!(raw.ask(Request::GetConfig, &space(0, 8, 8), &[]).unwrap()[12..], 16384_u64.to_le_bytes());
    drop(raw);
    for payload in
        [space(u32::MAX, 1, 1), space(0, u32::MAX, 8), space(0, 0, 0), space(0, 8, 4), space(0, 4, 8), vec![]]
    {
        let raw = siege.attacker();
        assert!(raw.ask(Request::GetConfig, &payload, &[]).is_none(), "{payload:?}");
        siege.ended(&raw, "a read that makes no sense");
    }
    for payload in [space(0, 8, 8), space(31, 2, 2), space(33, 1, 1), space(32, 1, 2), space(4096, 1, 1)] {
        let raw = siege.attacker();
        assert!(!raw.accepts(Request::SetConfig, &payload, &[]), "{payload:?}");
        siege.ended(&raw, "a write beside the cache mode");
    }
    let raw = siege.attacker();
    let mut two = space(32, 1, 1);
    two[12] = 2;
    assert!(!raw.accepts(Request::SetConfig, &two, &[]), "a cache mode that is neither");
    siege.ended(&raw, "a cache mode that is neither");
    siege.lift();
}

#[test]
fn headers_that_are_wrong_end_the_session() {
    let mut siege = Siege::begin();
    let header = |request: u32, flags: u32, size: u32| -> Vec<u8> {
        [request, flags, size].iter().flat_map(|word| word.to_ne_bytes()).collect()
    };
    let cases = [
        ("version 0", header(1, 0, 0)),
        ("version 2", header(1, 2, 0)),
        ("a reply", header(1, 5, 0)),
        ("reserved flags", header(1, 0x11, 0)),
        ("request 0", header(0, 1, 0)),
        ("an unknown request", header(45, 1, 0)),
        ("a request of all ones", header(u32::MAX, 1, 0)),
        ("a payload where none belongs", [header(3, 1, 8), vec![0; 8]].concat()),
        ("a payload too short", [header(2, 1, 4), vec![0; 4]].concat()),
        ("a payload too long", [header(2, 1, 16), vec![0; 16]].concat()),
        ("more than a page", header(2, 1, 4097)),
        ("four gigabytes", header(2, 1, u32::MAX)),
        ("logging, which was not offered", [header(6, 1, 16), vec![0; 16]].concat()),
        ("in-flight tracking, which was not offered", [header(31, 1, 24), vec![1; 24]].concat()),
        ("a display", header(33, 1, 0)),
        ("device state", [header(42, 1, 8), vec![0; 8]].concat()),
    ];
    for (what, bytes) in cases {
        let raw = siege.attacker();
        assert!(raw.send(&bytes, &[]));
        siege.ended(&raw, what);
    }
    siege.lift();
}

#[test]
fn a_message_cut_anywhere_ends_the_session() {
    let mut siege = Siege::begin();
    let message = Raw::message(Request::SetVringNum as u32, 9, &state(0, 64));
    for len in 1..message.len() {
        let raw = siege.attacker();
        assert!(raw.send(&message[..len], &[]));
        raw.0.shutdown(std::net::Shutdown::Write).unwrap();
        siege.ended(&raw, "a message that was cut");
    }
    siege.lift();
}

#[test]
fn a_header_in_pieces_is_put_together() {
    let siege = Siege::begin();
    let raw = siege.attacker();
    let message = Raw::message(Request::GetFeatures as u32, 1, &[]);
    for byte in &message {
        assert!(raw.send(&[*byte], &[]));
    }
    assert_eq!(raw.reply(Request::GetFeatures).unwrap().len(), 8);
    drop(raw);
    siege.lift();
}

#[test]
fn descriptors_nobody_asked_for_end_the_session_and_are_closed() {
    let mut siege = Siege::begin();
    let ram = Ram::new(1 << 20);
    let features = Raw::message(Request::GetFeatures as u32, 1, &[]);
    let memory = Raw::message(Request::SetMemTable as u32, 9, &table(&[ram.words()], 1));
    for (what, bytes, count) in [
        ("one with a question", &features, 1),
        ("as many as we take with a question", &features, 32),
        ("more than we take with a question", &features, 33),
        ("as many as can be sent", &features, 253),
        ("as many as can be sent, with memory", &memory, 253),
    ] {
        let raw = siege.attacker();
        let (reader, writer) = std::io::pipe().unwrap();
        let writer = OwnedFd::from(writer);
        assert!(raw.send(bytes, &vec![writer.as_fd(); count]));
        drop(writer);
        // Some are dropped by the system with the message they came with; then the rest of it makes no sense.
        raw.0.shutdown(std::net::Shutdown::Write).unwrap();
        siege.ended(&raw, what);
        assert!(readable(&reader, PATIENCE), "{what}: a descriptor stays open");
    }
    // In the middle of a message.
    let raw = siege.attacker();
    let message = Raw::message(Request::SetVringNum as u32, 9, &state(0, 64));
    assert!(raw.send(&message[..12], &[]));
    raw.send(&message[12..], &[ram.file.as_fd()]);
    siege.ended(&raw, "descriptors with the second half of a message");
    siege.lift();
}

#[test]
fn a_ring_with_requests_under_way_is_finished_before_a_rude_front_end_is_let_go() {
    let gate = crate::common::Gate::shut();
    let world = World::gated(&gate);
    let (front, mut vq) = one_queue(&world.exports[0]);
    vq.put(0, kind::OUT, 0, Data::Out(&[1; 512]));
    vq.publish();
    until("the write is with the device", || gate.held() == 1);
    assert!(front.raw.send(&[0xff; 64], &[]));
    std::thread::sleep(std::time::Duration::from_millis(10));
    assert!(world.exports[0].status().is_connected());
    gate.set_shut(false);
    front.raw.wait_closed();
    assert_eq!(vq.poll(), Some((0, 1)));
    let ram = Arc::clone(&vq.ram);
    drop((front, vq));
    world.stop();
    assert_eq!(Arc::strong_count(&ram), 1);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_at_all_harm_nobody(
        messages in prop::collection::vec(
            (0_u32..48, prop::sample::select(vec![1_u32, 9, 0, 5]), prop::collection::vec(any::<u8>(), 0..64), 0_usize..4),
            1..12,
        ),
        tail in prop::collection::vec(any::<u8>(), 0..40),
        polite in any::<bool>(),
    ) {
        // One world for all cases: damage of one case is found by the next.
        static WORLD: std::sync::OnceLock<World> = std::sync::OnceLock::new();
        let world = WORLD.get_or_init(World::pair);
        let ram = Ram::new(1 << 20);
        let kick = event();
        let raw = Raw::connect(&world.exports[0].path);
        if polite {
            raw.negotiate(crate::common::SPLIT);
        }
        for (request, flags, payload, fds) in &messages {
            let fds = &[ram.file.as_fd(), kick.as_fd(), ram.file.as_fd()][..*fds];
            if !raw.send(&Raw::message(*request, *flags, payload), fds) {
                break;
            }
        }
        raw.send(&tail, &[]);
        let _ = raw.0.shutdown(std::net::Shutdown::Write);
        raw.wait_closed();
        let (front, mut vq) = one_queue(&world.exports[0]);
        prop_assert_eq!(vq.write(0, &[7; 512]), 0);
        drop(front);
        let (front, mut vq) = one_queue(&world.exports[1]);
        prop_assert_eq!(vq.write(0, &[7; 512]), 0);
        drop(front);
    }
}

#[test]
fn a_call_descriptor_that_blocks_and_is_full_holds_up_nobody() {
    let mut siege = Siege::begin();
    let (front, mut vq) = one_queue(&siege.world.exports[0]);
    // Its call comes after the completion; a call later than the next step would make this test wait without end.
    vq.put(0, kind::OUT, 0, Data::Out(&[1; 512]));
    vq.publish();
    until("the first request is answered", || vq.poll().is_some());
    assert!(readable(&vq.call, PATIENCE));
    assert_eq!(rung(&vq.call), 1);
    // The flags belong to the description that both sides share; the counter holds one less than the largest number.
    rustix::io::write(&vq.call, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    rustix::fs::fcntl_setfl(&vq.call, rustix::fs::OFlags::empty()).unwrap();
    for round in 0..20 {
        vq.put(0, kind::OUT, round, Data::Out(&[2; 512]));
        vq.enable_calls();
        vq.publish();
        until("the request is answered", || vq.poll().is_some());
        assert_eq!(vq.status(0), 0);
        siege.bystander.goes_on();
    }
    front.leave(&siege.world.exports[0]);
    siege.intact("a front-end that left with a call that cannot be rung");
    siege.lift();
}
