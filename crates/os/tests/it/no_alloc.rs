//! After start the data path allocates nothing.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blkyard_mem::CountingAllocator;
use blkyard_mq::{
    BioFlags, Op, Region, RegionTable, Segment, SendPiece, StreamDestination, StreamEvent, StreamLimits, StreamService,
};
use blkyard_os::{Direct, FileConfig, Ring, RingConfig, now_ns};

use crate::common::{Bench, bio, folders, image, range, run_once};

#[test]
fn requests_of_all_kinds_allocate_nothing() {
    for folder in folders() {
        for direct in [Direct::Auto, Direct::Off] {
            let path = image(&folder, 8 << 20);
            let mut bench = Bench::new(FileConfig { direct, ..FileConfig::new(path) }, 32);
            // Straight, torn, copied, and without data.
            let mut bios: Vec<_> = (0..64)
                .map(|i: u64| match i % 8 {
                    0..3 => bio(Op::Read, i * 8, &[(i * 4096, 4096)]),
                    3 => bio(Op::Write, i * 8, &[(i * 4096, 4096), (1 << 20, 4096)]),
                    4 => bio(Op::Write, i * 8, &[(i * 4096 + 1, 4096)]),
                    5 => range(Op::WriteZeroes, i * 8, 8, BioFlags::NO_UNMAP),
                    6 => range(Op::Flush, 0, 0, BioFlags::empty()),
                    _ => range(Op::Discard, i * 8, 8, BioFlags::empty()),
                })
                .collect();
            let mut ended = Vec::with_capacity(bios.len());
            for round in 0..4 {
                let before = CountingAllocator::count();
                let all = bios.len();
                bios.drain(..).for_each(|bio| bench.queue.submit(bio));
                while ended.len() < all {
                    run_once(&mut bench.queue, &mut bench.ring, &mut |bio| ended.push(bio));
                }
                let allocated = CountingAllocator::count() - before;
                assert!(ended.iter().all(|bio| bio.status.is_ok()));
                assert!(before > 0, "the allocator counts");
                assert_eq!(allocated, 0, "in round {round}");
                std::mem::swap(&mut bios, &mut ended);
            }
        }
    }
}

#[test]
fn streams_allocate_nothing_after_they_are_opened() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut ring = Ring::new(RingConfig::default()).unwrap();
    let inbox = ring.stream_inbox();
    let limits = StreamLimits { pieces_max: 8, bytes_max: 64 };
    let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let stream = ring.attach_stream(&inbox, 0, socket.into(), limits).unwrap();
    let (mut peer, _) = listener.accept().unwrap();
    let memory = Arc::new(RegionTable::new(vec![Region::anonymous(4096).unwrap()]));
    let segment = Segment { region: 0, offset: 0, len: 100 };
    let mut bytes = [0; 104];
    for number in 1..100 {
        let before = CountingAllocator::count();
        assert!(ring.send(stream, number, &memory, [SendPiece::Bytes(b"head"), SendPiece::Data(segment)].into_iter()));
        let destination = StreamDestination { memory: &memory, segment };
        ring.receive(stream, (number % 2 == 0).then_some(destination));
        ring.submit();
        peer.read_exact(&mut bytes).unwrap();
        peer.write_all(&bytes).unwrap();
        let (mut received, mut is_sent) = (0, false);
        let start = Instant::now();
        while received < bytes.len() || !is_sent {
            assert!(start.elapsed() < Duration::from_secs(30));
            ring.sleep(Some(now_ns() + 10_000_000));
            ring.reap();
            while let Some((_, event)) = ring.next_event(&inbox) {
                match event {
                    StreamEvent::Received { direct } => {
                        let buffered = ring.received(stream).len();
                        received += direct as usize + buffered;
                        ring.consume(stream, buffered);
                        if received < bytes.len() {
                            ring.receive(stream, None);
                        }
                    }
                    StreamEvent::Sent(sent) => is_sent = sent == number,
                    event => panic!("{event:?}"),
                }
            }
        }
        assert_eq!(CountingAllocator::count() - before, 0, "in round {number}");
    }
}
