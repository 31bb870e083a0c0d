//! Streams against the real kernel, over loopback.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use blkyard_mem::{Region, Segment};

use super::*;
use crate::now_ns;
use crate::ring::RingConfig;

/// Longer than a busy machine takes for anything here.
const LONG: Duration = Duration::from_secs(30);
const LIMITS: StreamLimits = StreamLimits { pieces_max: 64, bytes_max: 4096 };

fn ring() -> Ring {
    Ring::new(RingConfig::default()).unwrap()
}

fn later() -> u64 {
    now_ns() + LONG.as_nanos() as u64
}

/// Memory of one region, and what counts its users.
fn memory(bytes: usize) -> Arc<RegionTable> {
    Arc::new(RegionTable::new(vec![Region::anonymous(bytes).unwrap()]))
}

fn whole(memory: &RegionTable) -> Segment {
    Segment { region: 0, offset: 0, len: memory.region(0).unwrap().len() as u32 }
}

/// A connection: its peer is an ordinary socket.
fn pair() -> (StreamSocket, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    peer.set_read_timeout(Some(LONG)).unwrap();
    peer.set_write_timeout(Some(LONG)).unwrap();
    (one.into(), peer)
}

fn attached(ring: &mut Ring, inbox: &StreamInbox, token: u64) -> (StreamId, TcpStream) {
    let (socket, peer) = pair();
    (ring.attach_stream(inbox, token, socket, LIMITS).unwrap(), peer)
}

/// Submits and sleeps until something has come, or a while has passed.
fn turn(ring: &mut Ring) {
    ring.sleep(Some(now_ns() + 10_000_000));
    ring.reap();
}

fn next(ring: &mut Ring, inbox: &StreamInbox) -> (u64, StreamEvent) {
    let start = Instant::now();
    loop {
        if let Some(event) = ring.next_event(inbox) {
            return event;
        }
        assert!(start.elapsed() < LONG, "no event");
        turn(ring);
    }
}

fn no_event(ring: &mut Ring, inbox: &StreamInbox) {
    for _ in 0..3 {
        turn(ring);
        let event = ring.next_event(inbox);
        assert!(event.is_none(), "{event:?}");
    }
}

fn close(ring: &mut Ring, inbox: &StreamInbox, stream: StreamId) {
    ring.close_stream(stream);
    let (_, event) = next(ring, inbox);
    assert!(matches!(event, StreamEvent::Closed), "{event:?}");
    assert!(!ring.can_send(stream), "the id is void");
    no_event(ring, inbox);
}

fn send(ring: &mut Ring, stream: StreamId, number: u64, memory: &Arc<RegionTable>, pieces: &[SendPiece<'_>]) -> bool {
    ring.send(stream, number, memory, pieces.iter().copied())
}

/// Receives until so many bytes are there, and consumes them.
fn receive(ring: &mut Ring, inbox: &StreamInbox, stream: StreamId, bytes: usize) -> Vec<u8> {
    let mut all = vec![];
    while all.len() < bytes {
        ring.receive(stream, None);
        let (_, event) = next(ring, inbox);
        assert!(matches!(event, StreamEvent::Received { direct: 0 }), "{event:?}");
        all.extend_from_slice(ring.received(stream));
        let received = ring.received(stream).len();
        ring.consume(stream, received);
    }
    all
}

#[test]
fn stream_sends_headers_and_segments_and_receives_answers() {
    let mut ring = ring();
    let inbox = ring.stream_inbox();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let stream = ring.connect(&inbox, 7, address, LIMITS, later()).unwrap();
    assert!(!ring.can_send(stream), "not connected");
    let (token, event) = next(&mut ring, &inbox);
    assert!(token == 7 && matches!(event, StreamEvent::Connected), "{event:?}");
    let (mut peer, _) = listener.accept().unwrap();

    let memory = memory(8192);
    memory.resolve(whole(&memory)).unwrap().copy_from_slice(&[3; 8192]);
    let data = Segment { region: 0, offset: 4096, len: 100 };
    assert!(send(&mut ring, stream, 1, &memory, &[SendPiece::Bytes(b"head"), SendPiece::Data(data)]));
    assert!(send(&mut ring, stream, 5, &memory, &[SendPiece::Bytes(b"tail")]), "one list may wait");
    assert!(!ring.can_send(stream));
    for number in [1, 5] {
        let (_, event) = next(&mut ring, &inbox);
        assert!(matches!(event, StreamEvent::Sent(sent) if sent == number), "{event:?}");
    }
    assert_eq!(Arc::strong_count(&memory), 1, "the memory is back");
    let mut bytes = [0; 108];
    peer.read_exact(&mut bytes).unwrap();
    assert_eq!((&bytes[..4], &bytes[4..104], &bytes[104..]), (&b"head"[..], &[3; 100][..], &b"tail"[..]));

    peer.write_all(b"answer").unwrap();
    assert_eq!(receive(&mut ring, &inbox, stream, 6), b"answer");
    close(&mut ring, &inbox, stream);
    assert_eq!(peer.read(&mut bytes).map_err(|error| error.kind()), Err(ErrorKind::ConnectionReset));
}

#[test]
fn direct_receive_fills_the_segment_first() {
    let mut ring = ring();
    let inbox = ring.stream_inbox();
    let (stream, mut peer) = attached(&mut ring, &inbox, 0);
    let memory = memory(4096);
    let segment = Segment { region: 0, offset: 16, len: 5 };
    peer.write_all(b"data;head").unwrap();
    ring.receive(stream, Some(StreamDestination { memory: &memory, segment }));
    assert!(ring.received(stream).is_empty(), "outstanding");
    let mut received = 0;
    while received < 5 {
        let (_, event) = next(&mut ring, &inbox);
        let StreamEvent::Received { direct } = event else { panic!("{event:?}") };
        received += direct;
        let segment = Segment { region: 0, offset: 16 + u64::from(received), len: 5 - received };
        if received < 5 {
            ring.receive(stream, Some(StreamDestination { memory: &memory, segment }));
        }
    }
    let mut bytes = [0; 5];
    memory.resolve(segment).unwrap().copy_to_slice(&mut bytes);
    assert_eq!(&bytes, b"data;");
    let mut head = ring.received(stream).to_vec();
    ring.consume(stream, head.len());
    if head.len() < 4 {
        head.extend(receive(&mut ring, &inbox, stream, 4 - head.len()));
    }
    assert_eq!(head, b"head");
    assert_eq!(Arc::strong_count(&memory), 1);
}

#[test]
fn owner_that_takes_less_holds_up_its_peer_only() {
    let mut ring = ring();
    let inbox = ring.stream_inbox();
    let (stalled, mut stalled_peer) = attached(&mut ring, &inbox, 1);
    let (other, mut other_peer) = attached(&mut ring, &inbox, 2);
    stalled_peer.set_nonblocking(true).unwrap();
    let full = |peer: &mut TcpStream| {
        let start = Instant::now();
        let mut idle = 0;
        while idle < 20 {
            assert!(start.elapsed() < LONG, "the peer is not held up");
            // The end of what it takes is written as well.
            let Err(error) = peer.write_all(&[7; 4096]) else {
                idle = 0;
                continue;
            };
            assert_eq!(error.kind(), ErrorKind::WouldBlock);
            std::thread::sleep(Duration::from_millis(1));
            idle += 1;
        }
    };
    ring.receive(stalled, None);
    full(&mut stalled_peer);
    assert!(matches!(next(&mut ring, &inbox), (1, StreamEvent::Received { direct: 0 })));
    ring.consume(stalled, 10);
    ring.receive(stalled, None);
    no_event(&mut ring, &inbox);
    full(&mut stalled_peer);
    for _ in 0..100 {
        other_peer.write_all(b"on").unwrap();
        assert_eq!(receive(&mut ring, &inbox, other, 2), b"on");
    }
    let left = ring.received(stalled).len();
    assert!(left > 0 && left <= stream::RECEIVE_BYTES - 10);
    ring.consume(stalled, left);
    assert!(receive(&mut ring, &inbox, stalled, 100_000).iter().all(|byte| *byte == 7));
}

#[test]
fn peer_that_ends_its_side_still_gets_answers() {
    let mut ring = ring();
    let inbox = ring.stream_inbox();
    let (stream, mut peer) = attached(&mut ring, &inbox, 0);
    peer.write_all(b"last").unwrap();
    peer.shutdown(Shutdown::Write).unwrap();
    assert_eq!(receive(&mut ring, &inbox, stream, 4), b"last");
    ring.receive(stream, None);
    let (_, event) = next(&mut ring, &inbox);
    assert!(matches!(event, StreamEvent::EndOfStream), "{event:?}");
    ring.receive(stream, None);
    no_event(&mut ring, &inbox);
    let memory = memory(4096);
    assert!(send(&mut ring, stream, 1, &memory, &[SendPiece::Bytes(b"answer")]));
    ring.shutdown(stream);
    assert!(!ring.can_send(stream));
    assert!(matches!(next(&mut ring, &inbox), (0, StreamEvent::Sent(1))));
    let mut all = vec![];
    peer.read_to_end(&mut all).unwrap();
    assert_eq!(all, b"answer", "the end comes behind the list");
    close(&mut ring, &inbox, stream);
}

#[test]
fn reset_fails_the_stream_once() {
    let mut ring = ring();
    let inbox = ring.stream_inbox();
    let (stream, peer) = attached(&mut ring, &inbox, 0);
    ring.receive(stream, None);
    turn(&mut ring);
    rustix::net::sockopt::set_socket_linger(&peer, Some(Duration::ZERO)).unwrap();
    drop(peer);
    let (_, event) = next(&mut ring, &inbox);
    let StreamEvent::Failed(error) = event else { panic!("{event:?}") };
    assert!(error.to_string().starts_with("receive: "), "{error}");
    assert!(!ring.can_send(stream));
    ring.receive(stream, None);
    no_event(&mut ring, &inbox);
    close(&mut ring, &inbox, stream);
}

/// A socket with a port of the loopback, and its address.
fn bound() -> (std::os::fd::OwnedFd, SocketAddr) {
    use rustix::net::{AddressFamily, SocketType, bind, getsockname, socket};
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&socket, &"127.0.0.1:0".parse::<SocketAddr>().unwrap()).unwrap();
    let address = getsockname(&socket).unwrap().try_into().unwrap();
    (socket, address)
}

#[test]
fn refused_connect_fails() {
    let mut ring = ring();
    let inbox = ring.stream_inbox();
    // Bound, so that nobody else gets the port, but without a listener.
    let (_bound, address) = bound();
    let stream = ring.connect(&inbox, 0, address, LIMITS, later()).unwrap();
    let (_, event) = next(&mut ring, &inbox);
    assert!(matches!(&event, StreamEvent::Failed(error) if error.to_string().starts_with("connect: ")), "{event:?}");
    close(&mut ring, &inbox, stream);
}

/// A listening socket whose queue is full: the kernel drops later connection requests.
fn silent() -> (std::os::fd::OwnedFd, SocketAddr, Vec<TcpStream>) {
    let (listener, address) = bound();
    rustix::net::listen(&listener, 0).unwrap();
    let queued = (0..8).map_while(|_| TcpStream::connect_timeout(&address, Duration::from_millis(100)).ok()).collect();
    (listener, address, queued)
}

#[test]
fn connect_ends_at_its_deadline() {
    let mut ring = ring();
    let inbox = ring.stream_inbox();
    let (_listener, address, queued) = silent();
    assert!(queued.len() < 8);
    let deadline_ns = now_ns() + 50_000_000;
    let stream = ring.connect(&inbox, 0, address, LIMITS, deadline_ns).unwrap();
    let (_, event) = next(&mut ring, &inbox);
    assert!(now_ns() >= deadline_ns);
    let StreamEvent::Failed(StreamError::ConnectTimeout(of)) = event else { panic!("{event:?}") };
    assert_eq!(of, address);
    close(&mut ring, &inbox, stream);
}

#[test]
fn close_ends_a_connect_that_waits() {
    let mut ring = ring();
    let inbox = ring.stream_inbox();
    let (_listener, address, _queued) = silent();
    let held = ring.held;
    let stream = ring.connect(&inbox, 0, address, LIMITS, later()).unwrap();
    turn(&mut ring);
    close(&mut ring, &inbox, stream);
    assert_eq!(ring.held, held);
}

#[test]
fn peer_that_never_reads_holds_up_its_own_stream_and_close_gives_all_back() {
    let mut ring = ring();
    let inbox = ring.stream_inbox();
    let (stuck, peer) = attached(&mut ring, &inbox, 1);
    let (other, mut other_peer) = attached(&mut ring, &inbox, 2);
    let memory = memory(4 << 20);
    let data = SendPiece::Data(whole(&memory));
    let mut number = 0;
    let start = Instant::now();
    let mut idle = 0;
    while idle < 10 {
        assert!(start.elapsed() < LONG, "the kernel takes all");
        if ring.can_send(stuck) {
            number += 1;
            assert!(send(&mut ring, stuck, number, &memory, &[data]));
        }
        turn(&mut ring);
        idle += 1;
        while let Some((_, event)) = ring.next_event(&inbox) {
            assert!(matches!(event, StreamEvent::Sent(_)), "{event:?}");
            idle = 0;
        }
    }
    assert!(!ring.can_send(stuck) && Arc::strong_count(&memory) > 1);
    assert!(ring.detach_stream(stuck).is_none(), "its list is at the kernel");
    assert!(send(&mut ring, other, 1, &memory, &[SendPiece::Bytes(b"on")]));
    assert!(matches!(next(&mut ring, &inbox), (2, StreamEvent::Sent(1))));
    let mut bytes = [0; 2];
    other_peer.read_exact(&mut bytes).unwrap();
    close(&mut ring, &inbox, stuck);
    assert_eq!(Arc::strong_count(&memory), 1, "all memory is back");
    drop(peer);
}

#[test]
fn list_outside_memory_or_limits_is_refused_whole() {
    let mut ring = ring();
    let inbox = ring.stream_inbox();
    let (stream, mut peer) = attached(&mut ring, &inbox, 0);
    let memory = memory(4096);
    let outside = SendPiece::Data(Segment { region: 0, offset: 4000, len: 200 });
    assert!(!send(&mut ring, stream, 1, &memory, &[SendPiece::Bytes(b"no"), outside]));
    assert!(!send(&mut ring, stream, 1, &memory, &[SendPiece::Bytes(&[0; 4097])]));
    assert!(!send(&mut ring, stream, 1, &memory, &[SendPiece::Bytes(b"x"); 65]));
    assert!(!send(&mut ring, stream, 1, &memory, &[]));
    assert!(send(&mut ring, stream, 1, &memory, &[SendPiece::Bytes(&[1; 64]); 64]));
    assert!(matches!(next(&mut ring, &inbox), (0, StreamEvent::Sent(1))));
    let mut bytes = [0; 4096];
    peer.read_exact(&mut bytes).unwrap();
    assert_eq!(bytes, [1; 4096]);
    assert_eq!(Arc::strong_count(&memory), 1);
}

#[test]
fn listener_accepts_one_connection_for_each_call() {
    let mut ring = ring();
    let inbox = ring.stream_inbox();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let listener = ring.attach_stream(&inbox, 9, listener.into(), LIMITS).unwrap();
    let mut peers = [0, 1].map(|_| TcpStream::connect(address).unwrap());
    no_event(&mut ring, &inbox);
    ring.accept(listener);
    let (9, StreamEvent::Accepted(socket)) = next(&mut ring, &inbox) else { panic!("not accepted") };
    assert_eq!(socket.peer, Some(peers[0].local_addr().unwrap()));
    no_event(&mut ring, &inbox);
    let stream = ring.attach_stream(&inbox, 1, socket, LIMITS).unwrap();
    peers[0].write_all(b"hello").unwrap();
    assert_eq!(receive(&mut ring, &inbox, stream, 5), b"hello");
    assert!(!ring.can_send(listener) && ring.detach_stream(listener).is_none());
    ring.accept(listener);
    assert!(matches!(next(&mut ring, &inbox), (9, StreamEvent::Accepted(_))));
    ring.accept(listener);
    turn(&mut ring);
    close(&mut ring, &inbox, listener);
    assert!(TcpStream::connect(address).is_err(), "the socket is closed");
}

#[test]
fn sockets_that_are_not_tcp_are_refused() {
    let mut ring = ring();
    let inbox = ring.stream_inbox();
    let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
    let socket = TcpStream::from(std::os::fd::OwnedFd::from(socket));
    let (error, _) = ring.attach_stream(&inbox, 0, socket.into(), LIMITS).unwrap_err();
    assert!(matches!(error, StreamError::NotTcp), "{error}");
    assert_eq!(ring.streams.open, 0);
}

#[test]
fn lane_without_room_refuses_another_stream() {
    let mut ring = Ring::new(RingConfig { entries: 8, outstanding_max: 8, ..RingConfig::default() }).unwrap();
    let inbox = ring.stream_inbox();
    let streams = [1, 2].map(|token| attached(&mut ring, &inbox, token));
    let (socket, mut peer) = pair();
    let (error, socket) = ring.attach_stream(&inbox, 3, socket, LIMITS).unwrap_err();
    assert!(matches!(error, StreamError::TooMany { max: 2 }), "{error}");
    close(&mut ring, &inbox, streams[0].0);
    let stream = ring.attach_stream(&inbox, 3, socket, LIMITS).unwrap();
    peer.write_all(b"in").unwrap();
    assert_eq!(receive(&mut ring, &inbox, stream, 2), b"in");
    // Its place was another's before.
    ring.close_stream(streams[0].0);
    no_event(&mut ring, &inbox);
}

#[test]
fn detached_stream_goes_on_at_another_ring() {
    let mut rings = [ring(), ring()];
    let inboxes = rings.each_mut().map(Ring::stream_inbox);
    let (socket, mut peer) = pair();
    let mut socket = Some(socket);
    let held = rings.each_ref().map(|ring| ring.held);
    for round in 0..20_u8 {
        let at = usize::from(round % 2);
        let (ring, inbox) = (&mut rings[at], &inboxes[at]);
        let stream = ring.attach_stream(inbox, 0, socket.take().unwrap(), LIMITS).unwrap();
        let mut all = vec![];
        if round > 0 {
            let event = ring.next_event(inbox);
            assert!(matches!(event, Some((0, StreamEvent::Received { direct: 0 }))), "{event:?}");
            all.extend_from_slice(ring.received(stream));
            ring.consume(stream, all.len());
        }
        peer.write_all(&[round; 5]).unwrap();
        while all.len() < 8 && (round > 0 || all.len() < 5) {
            ring.receive(stream, None);
            next(ring, inbox);
            all.extend_from_slice(ring.received(stream));
            let received = ring.received(stream).len();
            ring.consume(stream, received);
        }
        let before = round.saturating_sub(1);
        let expected: Vec<u8> = if round == 0 { vec![0; 5] } else { [vec![before; 3], vec![round; 5]].concat() };
        assert_eq!(all, expected);
        // One receive is outstanding while the peer sends, or has ended and is not looked at.
        ring.receive(stream, None);
        ring.submit();
        peer.write_all(&[round; 3]).unwrap();
        let start = Instant::now();
        if round % 3 > 0 {
            while ring.received(stream).len() < 3 {
                assert!(start.elapsed() < LONG);
                turn(ring);
                ring.consume(stream, 0);
            }
        }
        let mut detached = ring.detach_stream(stream).unwrap();
        while detached.received.len() < 3 {
            // The bytes are still in the socket.
            let stream = ring.attach_stream(inbox, 0, detached, LIMITS).unwrap();
            ring.receive(stream, None);
            turn(ring);
            detached = ring.detach_stream(stream).unwrap();
        }
        assert!(ring.next_event(inbox).is_none());
        socket = Some(detached);
    }
    assert_eq!(rings.each_ref().map(|ring| ring.held), held);
}

#[test]
fn streams_of_a_dropped_inbox_are_closed() {
    let mut ring = ring();
    let inbox = ring.stream_inbox();
    let (stream, mut peer) = attached(&mut ring, &inbox, 0);
    ring.receive(stream, None);
    peer.write_all(b"nobody takes it").unwrap();
    let start = Instant::now();
    while !ring.streams.has_events() {
        assert!(start.elapsed() < LONG);
        turn(&mut ring);
    }
    drop(inbox);
    assert!(!ring.streams.has_events(), "a lane could not sleep");
    ring.sweep();
    while ring.streams.open > 0 {
        assert!(start.elapsed() < LONG);
        turn(&mut ring);
    }
    assert!(peer.read(&mut [0; 1]).is_err(), "reset");
    let inbox = ring.stream_inbox();
    assert_eq!((inbox.index, ring.streams.inboxes.len()), (0, 1), "its place is used again");
    assert_eq!(ring.streams.unseen, 0);
}

#[test]
fn dropped_ring_gives_back_the_memory_of_its_streams() {
    for single_owner in [true, false] {
        let mut ring = Ring::new(RingConfig { single_owner, ..RingConfig::default() }).unwrap();
        let inbox = ring.stream_inbox();
        let (stream, _peer) = attached(&mut ring, &inbox, 0);
        let (stuck, _stuck_peer) = attached(&mut ring, &inbox, 1);
        let (_listener, address, _queued) = silent();
        let memory = memory(64 << 20);
        ring.connect(&inbox, 2, address, LIMITS, later()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let listener = ring.attach_stream(&inbox, 3, listener.into(), LIMITS).unwrap();
        ring.accept(listener);
        ring.receive(stream, Some(StreamDestination { memory: &memory, segment: whole(&memory) }));
        assert!(send(&mut ring, stuck, 1, &memory, &[SendPiece::Data(whole(&memory))]));
        turn(&mut ring);
        assert_eq!(Arc::strong_count(&memory), 3);
        drop(ring);
        assert_eq!(Arc::strong_count(&memory), 1);
    }
}

#[test]
fn ring_that_changes_threads_goes_on_receiving_and_sending() {
    let mut ring = Ring::new(RingConfig { single_owner: false, ..RingConfig::default() }).unwrap();
    let inbox = ring.stream_inbox();
    let (stream, mut peer) = attached(&mut ring, &inbox, 0);
    let memory = memory(4 << 20);
    // More than the sockets hold.
    let bytes = whole(&memory).len as usize * 8;
    let pieces = [SendPiece::Data(whole(&memory)); 8];
    let (mut ring, inbox) = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            ring.receive(stream, None);
            assert!(send(&mut ring, stream, 1, &memory, &pieces));
            ring.submit();
            (ring, inbox)
        });
        thread.join().unwrap()
    });
    // The kernel cancels what an ended thread had submitted.
    let reader = std::thread::spawn(move || {
        let mut all = vec![1; bytes];
        peer.read_exact(&mut all).unwrap();
        peer.write_all(b"done").unwrap();
        (peer, all)
    });
    assert!(matches!(next(&mut ring, &inbox), (0, StreamEvent::Sent(1))));
    assert!(matches!(next(&mut ring, &inbox), (0, StreamEvent::Received { direct: 0 })));
    assert_eq!(ring.received(stream), b"done");
    let (_peer, all) = reader.join().unwrap();
    assert!(all.iter().all(|byte| *byte == 0));
}

/// SplitMix64.
struct Chance(u64);

impl Chance {
    fn below(&mut self, count: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % count as u64) as usize
    }
}

/// Bytes of the stream, by their position.
fn pattern(at: usize) -> u8 {
    (at % 251) as u8 ^ (at >> 9) as u8
}

#[test]
fn random_lists_and_receives_carry_the_stream_unchanged() {
    const REGION: usize = 1 << 20;
    for seed in 0..20 {
        let mut chance = Chance(seed);
        let mut ring = ring();
        let inbox = ring.stream_inbox();
        let (one, other) = pair();
        let ends = [(1, one), (2, other.into())];
        let [sender, receiver] = ends.map(|(token, socket)| ring.attach_stream(&inbox, token, socket, LIMITS).unwrap());
        let (from, to) = (memory(REGION), memory(REGION));
        let (mut sent, mut reported, mut received, mut number) = (0, 0, 0, 0);
        let mut lists = VecDeque::new();
        let start = Instant::now();
        while received < 3 << 20 {
            assert!(start.elapsed() < LONG, "seed {seed}: stuck at {received}");
            if ring.can_send(sender) {
                let (mut bytes, mut pieces) = (vec![], vec![]);
                for _ in 0..=chance.below(16) {
                    let is_data = chance.below(2) == 0;
                    let len = 1 + if is_data { chance.below(60_000) } else { chance.below(200) };
                    // Bytes of lists not sent stay as they are: at most two lists of a quarter of the region.
                    pieces.push((is_data, bytes.len(), len));
                    let at = sent + bytes.len();
                    bytes.extend((at..at + len).map(pattern));
                    if bytes.len() > REGION / 4 - 60_000 {
                        break;
                    }
                }
                number += 1;
                let base = (number as usize % 3) * (REGION / 4);
                from.resolve(Segment { region: 0, offset: base as u64, len: bytes.len() as u32 })
                    .unwrap()
                    .copy_from_slice(&bytes);
                let list = pieces.iter().map(|&(is_data, at, len)| {
                    let offset = (base + at) as u64;
                    let segment = Segment { region: 0, offset, len: len as u32 };
                    if is_data { SendPiece::Data(segment) } else { SendPiece::Bytes(&bytes[at..at + len]) }
                });
                if ring.send(sender, number, &from, list) {
                    sent += bytes.len();
                    lists.push_back(number);
                } else {
                    number -= 1;
                }
            }
            let len = 1 + chance.below(100_000) as u32;
            let destination = StreamDestination { memory: &to, segment: Segment { region: 0, offset: 0, len } };
            ring.receive(receiver, (chance.below(3) > 0).then_some(destination));
            turn(&mut ring);
            while let Some((token, event)) = ring.next_event(&inbox) {
                match (token, event) {
                    (1, StreamEvent::Sent(done)) => {
                        assert_eq!(lists.pop_front(), Some(done), "in order");
                        reported = done;
                    }
                    (2, StreamEvent::Received { direct }) => {
                        let mut bytes = vec![0; direct as usize];
                        let segment = Segment { region: 0, offset: 0, len: direct };
                        to.resolve(segment).unwrap().copy_to_slice(&mut bytes);
                        bytes.extend_from_slice(ring.received(receiver));
                        let buffered = ring.received(receiver).len();
                        // Consumed in two parts.
                        let part = chance.below(buffered + 1);
                        ring.consume(receiver, part);
                        ring.receive(receiver, None);
                        ring.consume(receiver, buffered - part);
                        for (i, byte) in bytes.iter().enumerate() {
                            assert_eq!(*byte, pattern(received + i), "seed {seed} at {}", received + i);
                        }
                        received += bytes.len();
                    }
                    (token, event) => panic!("stream {token}: {event:?}"),
                }
            }
        }
        assert!(reported > 0 && received <= sent);
        [sender, receiver].into_iter().for_each(|stream| ring.close_stream(stream));
        for _ in 0..2 {
            assert!(matches!(next(&mut ring, &inbox), (_, StreamEvent::Closed)));
        }
        assert_eq!((Arc::strong_count(&from), Arc::strong_count(&to)), (1, 1));
    }
}

#[test]
fn inbox_of_a_parked_owner_is_reported() {
    let mut ring = ring();
    let inboxes = [0, 1].map(|_| ring.stream_inbox());
    let (one, mut peer) = attached(&mut ring, &inboxes[0], 1);
    assert!(!ring.take_unattended());
    ring.receive(one, None);
    peer.write_all(b"for a parked owner").unwrap();
    let start = Instant::now();
    let mut turns = 0;
    while !ring.take_unattended() {
        assert!(start.elapsed() < LONG);
        turns += u32::from(ring.streams.unseen > 0);
        turn(&mut ring);
        assert!(ring.next_event(&inboxes[1]).is_none());
    }
    assert_eq!(turns, 1, "its owner had a turn to look at it");
    assert!(matches!(ring.next_event(&inboxes[0]), Some((1, StreamEvent::Received { .. }))));
    assert!(!ring.take_unattended() && !ring.take_unattended());
}
