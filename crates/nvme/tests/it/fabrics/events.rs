//! Asynchronous events of a target that come while its association is being given up.

use blkyard_mq::{Op, Status};
use blkyard_nvme::{ControllerState, FabricsHostEvent};

use crate::fabrics::rig::{MS, Rig, config};

/// Results of events: namespaces changed, ANA changed, discovery log changed, persistent error, and none that exists.
const EVENTS: [u64; 5] = [2 | 4 << 16, 2 | 3 << 8 | 0x0c << 16, 2 | 0xf0 << 8 | 0x70 << 16, 3 << 8, 0xffff_ffff];

/// CVE-2022-48789: an event completed during error recovery, and its request was sent again on the admin queue that was
/// being destroyed. It comes just before the loss here, or any time until the streams are closed, which takes a while.
#[test]
fn event_during_error_recovery_has_no_answer_on_the_lost_connection() {
    for event in EVENTS {
        for is_admin_lost in [true, false] {
            for is_before in [true, false] {
                let what = format!("event {event:#x}, admin queue lost: {is_admin_lost}, before: {is_before}");
                let mut rig = Rig::live(config(), 1);
                let (association, admin) = rig.admin.unwrap();
                let io = rig.target.connections.iter().position(|connection| connection.qid == 1).unwrap();
                rig.run_for(100);
                let requests = rig.target.connections[admin].events.len();
                assert!(requests > 0, "{what}");
                rig.submit(1, Op::Read, 3, 0);
                rig.closes_late = true;
                if is_before {
                    // In the same bytes as the end of the connection, or in the same round.
                    rig.target.event(event);
                    rig.target.connections[admin].pump();
                }
                let log = rig.target.log.len();
                if is_admin_lost && is_before {
                    rig.target.end(admin);
                } else if is_admin_lost {
                    rig.host.admin_lost(association, rig.now_ns);
                } else {
                    rig.target.end(io);
                }
                rig.round();
                let losses = |rig: &Rig| rig.count(|event| matches!(event, FabricsHostEvent::Lost(_)));
                assert_eq!((losses(&rig), rig.host.state()), (1, ControllerState::Resetting), "{what}");
                if !is_before {
                    rig.target.event(event);
                }
                for _ in 0..20 {
                    rig.now_ns += MS;
                    rig.round();
                }
                // The event took one, and neither it nor a log page is asked for again.
                assert_eq!(rig.target.connections[admin].events.len(), requests - 1, "{what}");
                assert_eq!(rig.target.log[log..], [""; 0], "{what}");
                assert_eq!((losses(&rig), rig.host.state()), (1, ControllerState::Resetting), "{what}");

                rig.closes_late = false;
                rig.close_admin();
                rig.run_until(|rig| rig.host.state() == ControllerState::Live && !rig.ended.is_empty());
                assert_eq!((rig.host.association(), rig.statuses()), (association + 1, vec![Status::Ok]), "{what}");
                rig.run_for(100);
                let (_, admin) = rig.admin.unwrap();
                assert_eq!(rig.target.connections[admin].events.len(), requests, "{what}: each is requested once");
                assert_eq!(losses(&rig), 1, "{what}");
            }
        }
    }
}
