//! Lanes without descriptors. A separate program: the limit on open files is that of the process.

mod common;

use std::time::Duration;

use common::{Data, Gate, PATIENCE, World, kind, one_queue, readable, until};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Time for a lane to do what it has begun.
const LULL: Duration = Duration::from_millis(300);

#[test]
fn guest_is_called_once_its_lane_has_descriptors_again() {
    let gate = Gate::shut();
    let world = World::gated(&gate);
    let (front, mut vq) = one_queue(&world.exports[0]);
    vq.enable_calls();
    vq.put(0, kind::IN, 0, Data::In(512));
    vq.publish();
    until("the device has the request", || gate.held() == 1);
    // Nothing more can be opened; what is open stays.
    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(3), ..before }).unwrap();
    gate.set_shut(false);
    until("the request is answered", || vq.status(0) == 0);
    assert!(!readable(&vq.call, LULL), "it is called without a descriptor");
    setrlimit(Resource::Nofile, before).unwrap();
    assert!(readable(&vq.call, PATIENCE), "it sent nothing more, and was never called");
    assert_eq!(vq.wait_used(), (0, 513));
    drop(front);
    world.stop();
}
