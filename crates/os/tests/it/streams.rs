//! Streams on a lane thread, beside other pollers.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use blkyard_mq::{
    IdlePolicy, Poller, PollerState, RegionTable, SendPiece, StreamEvent, StreamId, StreamInbox, StreamLimits,
    StreamService, StreamSocket, Wake,
};
use blkyard_os::{LaneConfig, Ring, spawn};

/// Longer than any test on a busy machine.
const PATIENCE: Duration = Duration::from_mins(1);
const LIMITS: StreamLimits = StreamLimits { pieces_max: 1, bytes_max: 1 << 16 };

/// Sends back what it receives.
struct Echo {
    sockets: Vec<StreamSocket>,
    inbox: Option<StreamInbox>,
    streams: Vec<StreamId>,
    memory: Arc<RegionTable>,
    number: u64,
    rounds: Arc<AtomicU64>,
    open: usize,
}

impl Echo {
    fn new(sockets: Vec<StreamSocket>, rounds: &Arc<AtomicU64>) -> Echo {
        let open = sockets.len();
        Echo {
            sockets,
            inbox: None,
            streams: vec![],
            memory: Arc::default(),
            number: 0,
            rounds: Arc::clone(rounds),
            open,
        }
    }
}

/// A poller of these tests: an echo, or one that always works.
enum Kind {
    Echo(Echo),
    Busy(Arc<AtomicBool>),
}

impl Poller<Ring> for Kind {
    fn enter(&mut self, ring: &mut Ring, _: &Arc<dyn Wake>) {
        let Kind::Echo(echo) = self else { return };
        let inbox = ring.stream_inbox();
        for (token, socket) in echo.sockets.drain(..).enumerate() {
            let stream = ring.attach_stream(&inbox, token as u64, socket, LIMITS).unwrap();
            ring.receive(stream, None);
            echo.streams.push(stream);
        }
        echo.inbox = Some(inbox);
    }

    fn run_once(&mut self, ring: &mut Ring, _: u64) -> PollerState {
        let echo = match self {
            Kind::Echo(echo) => echo,
            Kind::Busy(over) if over.load(Relaxed) => return PollerState::Idle,
            Kind::Busy(_) => return PollerState::Busy,
        };
        echo.rounds.fetch_add(1, Relaxed);
        let mut state = PollerState::Idle;
        while let Some((token, event)) = ring.next_event(echo.inbox.as_ref().unwrap()) {
            state = PollerState::Busy;
            let stream = echo.streams[token as usize];
            match event {
                StreamEvent::Received { .. } => {
                    let bytes = ring.received(stream).to_vec();
                    echo.number += 1;
                    assert!(ring.send(stream, echo.number, &echo.memory, [SendPiece::Bytes(&bytes)].into_iter()));
                    ring.consume(stream, bytes.len());
                }
                StreamEvent::Sent(_) => ring.receive(stream, None),
                StreamEvent::EndOfStream => ring.close_stream(stream),
                StreamEvent::Closed => echo.open -= 1,
                event => panic!("{event:?}"),
            }
        }
        state
    }

    fn arm(&mut self) -> bool {
        false
    }

    fn disarm(&mut self) {}

    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn is_over(&self) -> bool {
        match self {
            Kind::Echo(echo) => echo.open == 0,
            Kind::Busy(over) => over.load(Relaxed),
        }
    }
}

fn pairs(count: usize) -> (Vec<StreamSocket>, Vec<TcpStream>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (0..count)
        .map(|_| {
            let peer = TcpStream::connect(address).unwrap();
            peer.set_read_timeout(Some(PATIENCE)).unwrap();
            peer.set_nodelay(true).unwrap();
            (StreamSocket::from(listener.accept().unwrap().0), peer)
        })
        .unzip()
}

fn exchange(peer: &mut TcpStream, round: u8) {
    peer.write_all(&[round; 1000]).unwrap();
    let mut bytes = [0; 1000];
    peer.read_exact(&mut bytes).expect("the lane sleeps, or leaves its poller parked");
    assert_eq!(bytes, [round; 1000]);
}

#[test]
fn parked_poller_is_unparked_for_its_streams() {
    for spin_ns in [0, 200_000] {
        let (sockets, mut peers) = pairs(1);
        let (rounds, over) = (Arc::default(), Arc::new(AtomicBool::new(false)));
        let (echo, busy) = (Echo::new(sockets, &rounds), Kind::Busy(Arc::clone(&over)));
        let config = LaneConfig { name: "parks".into(), policy: IdlePolicy::up_to(spin_ns), ..LaneConfig::default() };
        let lane = spawn(config, move |_| vec![Kind::Echo(echo), busy]).unwrap();
        let peer = &mut peers[0];
        for round in 0..20 {
            exchange(peer, round);
            // Idle for as long as it takes to be parked: in no turn although the other keeps the lane awake.
            let start = std::time::Instant::now();
            loop {
                let before = rounds.load(Relaxed);
                std::thread::sleep(Duration::from_millis(2));
                if rounds.load(Relaxed) == before {
                    break;
                }
                assert!(start.elapsed() < PATIENCE, "it is never parked");
            }
        }
        over.store(true, Relaxed);
        lane.waker().wake();
        exchange(peer, 99);
        peers.clear();
        lane.join().unwrap();
    }
}

#[test]
fn lane_that_sleeps_wakes_for_each_of_its_streams() {
    let (sockets, mut peers) = pairs(200);
    let rounds = Arc::default();
    let echo = Kind::Echo(Echo::new(sockets, &rounds));
    let config = LaneConfig { name: "wakes".into(), policy: IdlePolicy::up_to(0), ..LaneConfig::default() };
    let lane = spawn(config, move |_| vec![echo]).unwrap();
    for round in 0..5 {
        peers.iter_mut().for_each(|peer| exchange(peer, round));
        // All at once.
        peers.iter_mut().for_each(|peer| peer.write_all(&[round; 10]).unwrap());
        peers.iter_mut().for_each(|peer| peer.read_exact(&mut [0; 10]).unwrap());
    }
    let before = rounds.load(Relaxed);
    std::thread::sleep(Duration::from_millis(100));
    assert!(rounds.load(Relaxed) - before < 1000, "it does not sleep");
    peers.clear();
    lane.join().unwrap();
}
