//! Where descriptors are short no stream is opened, those that are open go on, and later ones are opened again. Its own
//! process: the limit is.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use blkyard_mq::{StreamError, StreamEvent, StreamInbox, StreamLimits, StreamService};
use blkyard_os::{Ring, RingConfig, allow_all_descriptors, now_ns};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Patience with a machine that does other things as well.
const PATIENCE: Duration = Duration::from_secs(30);
const LIMITS: StreamLimits = StreamLimits { pieces_max: 8, bytes_max: 64 };

fn next(ring: &mut Ring, inbox: &StreamInbox) -> StreamEvent {
    let start = Instant::now();
    loop {
        if let Some((_, event)) = ring.next_event(inbox) {
            return event;
        }
        assert!(start.elapsed() < PATIENCE, "no event");
        ring.sleep(Some(now_ns() + 10_000_000));
        ring.reap();
    }
}

#[test]
fn descriptors_that_run_out_fail_new_streams_only() {
    let mut ring = Ring::new(RingConfig::default()).unwrap();
    let inbox = ring.stream_inbox();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let listener = ring.attach_stream(&inbox, 0, listener.into(), LIMITS).unwrap();
    let mut peers = [0, 1].map(|_| TcpStream::connect(address).unwrap());
    ring.accept(listener);
    let StreamEvent::Accepted(socket) = next(&mut ring, &inbox) else { panic!("not accepted") };
    let stream = ring.attach_stream(&inbox, 1, socket, LIMITS).unwrap();

    let most = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: Some(0), maximum: most }).unwrap();
    ring.accept(listener);
    let event = next(&mut ring, &inbox);
    assert!(matches!(event, StreamEvent::AcceptFailed(StreamError::System { .. })), "{event:?}");
    let error = ring.connect(&inbox, 2, address, LIMITS, u64::MAX).unwrap_err();
    assert!(error.to_string().starts_with("a socket cannot be created: "), "{error}");
    peers[0].write_all(b"on").unwrap();
    ring.receive(stream, None);
    assert!(matches!(next(&mut ring, &inbox), StreamEvent::Received { .. }));
    assert_eq!(ring.received(stream), b"on");

    allow_all_descriptors().unwrap();
    ring.accept(listener);
    let event = next(&mut ring, &inbox);
    assert!(matches!(event, StreamEvent::Accepted(_)), "{event:?}");
    drop(event);
    assert_eq!(peers[1].read(&mut [0]).unwrap(), 0);
}
