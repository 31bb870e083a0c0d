//! A daemon that dies with requests in flight, and its successor: all requests complete once, in order.
//!
//! A killed daemon leaves its guest's memory and the records, in their state of that moment. So a copy of both, taken
//! while requests are at the device, is the input of the next daemon.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

use blkyard_mem::Region;
use blkyard_mq::{BioFlags, Op};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserInflight;

use crate::common::{Bystander, Data, Front, Gate, Ram, Request, Seen, Served, Vq, World, kind, ring, rung, until};

/// Entries of the rings here.
const SIZE: u16 = 64;

/// State that a front-end keeps for its queues.
struct Kept {
    file: std::fs::File,
    what: VhostUserInflight,
}

impl Kept {
    /// Asks for memory for two queues.
    fn ask(front: &mut Front) -> Kept {
        let (what, file) = front.get_inflight_fd(&VhostUserInflight::new(0, 0, 2, SIZE)).unwrap();
        Kept { file, what }
    }

    fn give(&self, front: &mut Front) -> bool {
        front.set_inflight_fd(&self.what, self.file.as_raw_fd()).is_ok()
    }

    /// The same bytes in other memory, `at` bytes from its start, without protection against truncation.
    fn copy(&self, at: u64) -> Kept {
        let file = memfd_create("copy", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, at + self.what.mmap_size).unwrap();
        let copy = Region::map_file(file.as_fd(), at, self.what.mmap_size).unwrap();
        copy_region(&self.region(), &copy);
        Kept { file: file.into(), what: VhostUserInflight { mmap_offset: at, ..self.what } }
    }

    fn region(&self) -> Arc<Region> {
        Region::map_file(self.file.as_fd(), self.what.mmap_offset, self.what.mmap_size).unwrap()
    }
}

fn copy_region(from: &Region, to: &Region) {
    let mut bytes = vec![0; from.len()];
    from.span(0, from.len()).unwrap().copy_to_slice(&mut bytes);
    to.span(0, to.len()).unwrap().copy_from_slice(&bytes);
}

/// A guest's memory and its queue at this moment, elsewhere.
fn copy_guest(vq: &Vq) -> Vq {
    let ram = Ram::new(vq.ram.len);
    copy_region(&vq.ram.region, &ram.region);
    let mut copy = Vq::new(&ram, 0);
    (copy.next_avail, copy.used_seen) = (vq.next_avail, vq.used_seen);
    copy
}

/// A front-end that keeps in-flight memory, and has not started its queue.
fn keeps(export: &Served, ram: &Ram, kept: Option<&Kept>) -> (Front, Option<Kept>) {
    let mut front = Front::connect(export);
    let asked = kept.is_none().then(|| Kept::ask(&mut front));
    assert!(kept.or(asked.as_ref()).unwrap().give(&mut front), "the memory for what is in flight is taken");
    front.share(&[ram]).unwrap();
    (front, asked)
}

/// Connects to another daemon, as QEMU does when the one before has died.
fn goes_on(export: &Served, vq: &Vq, kept: &Kept) -> Front {
    let (front, _) = keeps(export, &vq.ram, Some(kept));
    front.set_ring(0, vq);
    // All that it can tell from the ring.
    front.set_vring_base(0, vq.used.load_u16(2, std::sync::atomic::Ordering::Acquire)).unwrap();
    assert!(front.set_event(Request::SetVringKick, 0, Some(&vq.kick)));
    front
}

/// Writes from these slots of the guest, each to a separate position on the disk.
fn offer_writes(vq: &mut Vq, slots: std::ops::Range<u16>) {
    slots.for_each(|slot| vq.put(slot, kind::OUT, u64::from(slot) * 2, Data::Out(&[slot as u8; 512])));
    vq.publish();
}

/// A daemon with ten writes in flight, two of which it has answered; its guest and the records as they are then.
fn dies_with_writes_in_flight() -> (Vq, Kept) {
    let gate = Gate::open();
    let world = World::gated(&gate);
    let ram = Ram::new(1 << 20);
    let (mut front, kept) = keeps(&world.exports[0], &ram, None);
    let kept = kept.unwrap();
    let mut vq = Vq::new(&ram, 0);
    front.start(0, &vq);
    offer_writes(&mut vq, 0..2);
    assert_eq!((vq.wait_used().0, vq.wait_used().0), (0, 3));
    gate.set_shut(true);
    offer_writes(&mut vq, 10..20);
    until("the writes are with the device", || gate.held() == 10);
    // Offered, and perhaps fetched.
    let copies = (copy_guest(&vq), kept.copy(0));
    gate.set_shut(false);
    (0..10).for_each(|_| assert!(vq.wait_used().0 >= 30));
    drop(front);
    world.stop();
    copies
}

#[test]
fn what_was_in_flight_is_done_by_the_next_daemon_in_its_order() {
    let (mut vq, kept) = dies_with_writes_in_flight();
    // Offered after the end.
    vq.put(5, kind::OUT, 10, Data::Out(&[5; 512]));
    vq.publish_silently();
    let gate = Gate::open();
    let world = World::gated(&gate);
    let mut front = goes_on(&world.exports[0], &vq, &kept);
    front.set_vring_enable(0, true).unwrap();
    let heads: BTreeSet<_> = (0..11).map(|_| vq.wait_used().0).collect();
    assert_eq!(heads, [15].into_iter().chain((10..20).map(|slot| slot * 3)).collect());
    let taken: Vec<_> = gate.seen().into_iter().filter(|seen| matches!(seen, Seen::Taken(..))).collect();
    let write = |slot: u64| Seen::Taken(Op::Write, BioFlags::empty(), slot * 2);
    assert_eq!(taken, (10..20).chain([5]).map(write).collect::<Vec<_>>());
    // It continues like any other.
    assert_eq!(vq.write(100, &[1; 512]), 0);
    assert!(vq.poll().is_none());
    drop(front);
    world.stop();
}

#[test]
fn what_a_driver_had_that_panics_in_the_middle_of_a_batch_is_done_by_the_next_daemon_and_answered_once() {
    let gate = Gate::shut();
    let world = World::gated(&gate);
    let ram = Ram::new(1 << 20);
    let (mut front, kept) = keeps(&world.exports[0], &ram, None);
    let kept = kept.unwrap();
    let mut vq = Vq::new(&ram, 0);
    front.start(0, &vq);
    offer_writes(&mut vq, 8..10);
    until("two writes are with the device", || gate.held() == 2);
    // Of eight the driver has taken three, is at the fourth, and was not given the rest.
    gate.plant_bug_at(4);
    offer_writes(&mut vq, 10..18);
    until("the lane ends", || world.lanes.threads()[0].is_finished());
    let write = |slot: u64| Seen::Taken(Op::Write, BioFlags::empty(), slot * 2);
    let taken =
        |gate: &Gate| gate.seen().into_iter().filter(|seen| matches!(seen, Seen::Taken(..))).collect::<Vec<_>>();
    assert_eq!(taken(&gate), (8..13).map(write).collect::<Vec<_>>());
    // No thread waits for the lost requests, and none reports them as done.
    world.exports.iter().for_each(|export| export.server().ask_to_stop());
    until("the exports end", || world.exports.iter().all(|export| export.server().is_finished()));
    assert!(crate::common::end(world.lanes).unwrap_err().to_string().contains("a bug that the test planted"));
    assert!(vq.poll().is_none() && (8..18).all(|slot| vq.status(slot) == 0xff));
    drop(front);

    let gate = Gate::open();
    let world = World::gated(&gate);
    let mut front = goes_on(&world.exports[0], &vq, &kept);
    front.set_vring_enable(0, true).unwrap();
    let heads: BTreeSet<_> = (0..10).map(|_| vq.wait_used().0).collect();
    assert_eq!(heads, (8..18).map(|slot| slot * 3).collect());
    assert_eq!(taken(&gate), (8..18).map(write).collect::<Vec<_>>(), "each once, in its order");
    assert!(vq.poll().is_none() && (8..18).all(|slot| vq.status(slot) == 0));
    drop(front);
    world.stop();
}

#[test]
fn a_ring_that_is_stopped_at_once_finishes_what_was_in_flight_and_nothing_else() {
    let (mut vq, kept) = dies_with_writes_in_flight();
    vq.put(5, kind::OUT, 10, Data::Out(&[5; 512]));
    vq.publish_silently();
    let gate = Gate::shut();
    let world = World::gated(&gate);
    let mut front = goes_on(&world.exports[0], &vq, &kept);
    // Before its lane has run, or after.
    front.set_vring_enable(0, true).unwrap();
    let opener = std::thread::spawn({
        let gate = Arc::clone(&gate);
        move || {
            until("the writes are with the device again", || gate.held() >= 10);
            gate.set_shut(false);
        }
    });
    let base = front.get_vring_base(0).unwrap();
    opener.join().unwrap();
    let used = std::iter::from_fn(|| vq.poll()).count();
    // The eleventh is the one offered since; it may have been fetched before we asked.
    assert!((10..=11).contains(&used), "{used} were answered");
    assert_eq!(base, 2 + used as u32);
    drop(front);
    world.stop();
}

#[test]
fn a_guest_that_was_answered_and_not_called_is_called_by_the_next_daemon() {
    let world = World::pair();
    let ram = Ram::new(1 << 20);
    let (front, kept) = keeps(&world.exports[0], &ram, None);
    let vq = Vq::new(&ram, 0);
    front.set_ring(0, &vq);
    assert!(front.set_event(Request::SetVringKick, 0, Some(&vq.kick)));
    assert_eq!(rung(&vq.call), 0);
    let mut front = front;
    front.set_vring_enable(0, true).unwrap();
    until("the guest is called", || rung(&vq.call) > 0);
    drop((front, kept));
    world.stop();
}

#[test]
fn cache_mode_of_a_guest_outlives_the_daemon() {
    let world = World::pair();
    let ram = Ram::new(1 << 20);
    let (mut front, kept) = keeps(&world.exports[0], &ram, None);
    let kept = kept.unwrap();
    let mut vq = Vq::new(&ram, 0);
    front.start(0, &vq);
    assert_eq!(vq.write(8, &[1; 512]), 0);
    front.set_wce(false);
    let kept = kept.copy(0);
    drop(front);
    world.stop();
    // The first daemon's guest has chosen write-through, that of the second chooses write-back.
    for (flags, chosen) in [(BioFlags::FUA, true), (BioFlags::empty(), false), (BioFlags::FUA, false)] {
        let gate = Gate::open();
        let world = World::gated(&gate);
        let mut front = goes_on(&world.exports[0], &vq, &kept);
        front.set_vring_enable(0, true).unwrap();
        assert_eq!(vq.write(8, &[1; 512]), 0);
        assert!(gate.seen().contains(&Seen::Taken(Op::Write, flags, 8)), "wanted {flags:?}: {:?}", gate.seen());
        assert_eq!(front.config(32, 1).unwrap(), [u8::from(flags.is_empty())]);
        front.set_wce(chosen);
        drop(front);
        world.stop();
    }
    // A front-end that has read the mode of a new daemon has told its guest of it.
    let world = World::pair();
    let mut front = Front::connect(&world.exports[0]);
    assert_eq!(front.config(32, 1).unwrap(), [1]);
    assert!(kept.give(&mut front));
    assert_eq!(front.config(32, 1).unwrap(), [1]);
    front.leave(&world.exports[0]);
    // Memory of another back-end has no mode.
    let mut front = Front::connect(&world.exports[0]);
    kept.region().span(kept.what.mmap_size - 8, 8).unwrap().copy_from_slice(&[0; 8]);
    assert!(kept.give(&mut front));
    assert_eq!(front.config(32, 1).unwrap(), [1]);
    drop(front);
    world.stop();
}

#[test]
fn memory_that_is_given_out_cannot_be_cut_short_and_has_room() {
    let world = World::pair();
    let ram = Ram::new(1 << 20);
    let (front, kept) = keeps(&world.exports[0], &ram, None);
    let Kept { file, what } = kept.unwrap();
    // The cache mode is behind the records.
    let bytes = 2 * 1088 + 64;
    assert_eq!((what.mmap_size, what.mmap_offset, file.metadata().unwrap().len()), (bytes, 0, bytes));
    assert!(file.set_len(1000).is_err(), "cut short");
    drop(front);
    world.stop();
}

#[test]
fn memory_that_cannot_be_is_refused_and_the_next_front_end_served() {
    let world = World::pair();
    let mut bystander = Bystander::new(&world.exports[1]);
    let ram = Ram::new(1 << 20);
    let (front, kept) = keeps(&world.exports[0], &ram, None);
    let kept = kept.unwrap().copy(4096);
    front.leave(&world.exports[0]);
    for what in [
        VhostUserInflight { mmap_size: 2 * 1088 - 1, ..kept.what },
        VhostUserInflight { mmap_size: kept.what.mmap_size + 1, ..kept.what },
        VhostUserInflight { mmap_size: 0, ..kept.what },
        VhostUserInflight { mmap_size: 4096, mmap_offset: u64::MAX - 4095, ..kept.what },
        VhostUserInflight { mmap_offset: 12, ..kept.what },
        VhostUserInflight { num_queues: 3, ..kept.what },
        VhostUserInflight { num_queues: u16::MAX, queue_size: u16::MAX, ..kept.what },
    ] {
        let mut front = Front::connect(&world.exports[0]);
        let refused = front.set_inflight_fd(&what, kept.file.as_raw_fd()).is_err();
        assert!(refused, "{} at {}, {} queues", { what.mmap_size }, { what.mmap_offset }, { what.num_queues });
        front.leave(&world.exports[0]);
    }
    for (queues, size) in [(3, SIZE), (2, 1025)] {
        let mut front = Front::connect(&world.exports[0]);
        assert!(front.get_inflight_fd(&VhostUserInflight::new(0, 0, queues, size)).is_err());
        front.leave(&world.exports[0]);
    }
    let (reader, _writer) = std::io::pipe().unwrap();
    let mut front = Front::connect(&world.exports[0]);
    assert!(front.set_inflight_fd(&kept.what, reader.as_raw_fd()).is_err());
    front.leave(&world.exports[0]);
    bystander.goes_on();
    let (front, _) = keeps(&world.exports[0], &ram, Some(&kept));
    drop((front, bystander));
    world.stop();
}

#[test]
fn a_record_that_makes_no_sense_stops_its_ring_and_nobody_else() {
    let (vq, kept) = dies_with_writes_in_flight();
    let world = World::pair();
    let mut bystander = Bystander::new(&world.exports[1]);
    // The used index of the first queue's record.
    kept.region().span(14, 2).unwrap().copy_from_slice(&[0x77, 0x77]);
    let mut front = goes_on(&world.exports[0], &vq, &kept);
    assert!(front.set_vring_enable(0, true).is_err());
    bystander.goes_on();
    drop((front, bystander));
    world.stop();
}

#[test]
fn memory_that_is_cut_short_ends_its_session_and_nothing_else() {
    let world = World::pair();
    let mut bystander = Bystander::new(&world.exports[1]);
    let ram = Ram::new(1 << 20);
    let (front, kept) = keeps(&world.exports[0], &ram, None);
    // Two pages off the start, so that the rest of the file has nothing of it.
    let kept = kept.unwrap().copy(8192);
    front.leave(&world.exports[0]);
    let (mut front, _) = keeps(&world.exports[0], &ram, Some(&kept));
    let mut vq = Vq::new(&ram, 0);
    front.start(0, &vq);
    assert_eq!(vq.write(0, &[1; 512]), 0);
    kept.file.set_len(0).unwrap();
    vq.put(0, kind::OUT, 0, Data::Out(&[2; 512]));
    vq.publish();
    ring(&vq.kick);
    front.raw.wait_closed();
    bystander.goes_on();
    drop((front, bystander));
    world.stop();
}
