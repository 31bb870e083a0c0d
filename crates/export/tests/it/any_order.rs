//! Valid messages in any order, while the guest does I/O or writes garbage: the front-end may lose its session, and no
//! other is affected.
//!
//! `ANY_CASES=N` in the environment sets the number of cases.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock};

use blkyard_mem::Region;
use blkyard_mq::DeviceInfo;
use proptest::prelude::*;
use rustix::fs::MemfdFlags;

use crate::common::{
    AnyDevice, Bystander, Data, Front, Ram, Raw, Request, VQ_BYTES, Vq, World, addresses, disk_info, event, kind,
    one_queue, state, words64,
};

/// Queues of the export, and regions of memory that the front-end has.
const QUEUES: u32 = 2;
const RAMS: usize = 3;
const SIZES: [u32; 6] = [1, 2, 7, 64, 256, 1024];
const BASES: [u32; 5] = [0, 1, 63, 0x8000, 0x803f_8040];

/// A random action: its kind, its queue, and two parameters.
type Step = (u8, u32, u16, u64);

/// A front-end without a plan, and the guest in its memory.
struct Wild<'a> {
    world: &'a World,
    raw: Raw,
    rams: Vec<Arc<Ram>>,
    vqs: Vec<Vq>,
    records: OwnedFd,
    log: OwnedFd,
    /// Negotiated features.
    features: u64,
}

impl<'a> Wild<'a> {
    fn new(world: &'a World) -> Wild<'a> {
        let raw = Raw::connect(&world.exports[0].path);
        let features = !(1 << 26 | 1 << 34 | 1 << 35);
        raw.negotiate(features);
        let rams: Vec<_> =
            (0..RAMS as u64).map(|number| Ram::at(0x10_0000 + number * (4 << 20), 2 * VQ_BYTES)).collect();
        let vqs = (0..u64::from(QUEUES)).map(|number| Vq::new(&rams[0], number)).collect();
        let file = || rustix::fs::memfd_create("front", MemfdFlags::CLOEXEC).unwrap();
        let (records, log) = (file(), file());
        rustix::fs::ftruncate(&records, 1 << 20).unwrap();
        rustix::fs::ftruncate(&log, 4096).unwrap();
        let front = Wild { world, raw, rams, vqs, records, log, features };
        front.share(0b001);
        for queue in 0..QUEUES {
            front.start(queue);
        }
        front
    }

    /// Shares the memories of these bits.
    fn share(&self, which: usize) -> bool {
        let shared: Vec<_> =
            self.rams.iter().enumerate().filter(|(at, _)| which >> at & 1 == 1).map(|(_, ram)| ram).collect();
        let mut payload = state(shared.len() as u32, 0);
        shared.iter().for_each(|ram| payload.extend(words64(&ram.words())));
        let files: Vec<_> = shared.iter().map(|ram| ram.file.as_fd()).collect();
        self.raw.accepts(Request::SetMemTable, &payload, &files)
    }

    fn start(&self, queue: u32) -> bool {
        let vq = &self.vqs[queue as usize];
        let index = words64(&[queue.into()]);
        self.raw.accepts(Request::SetVringNum, &state(queue, vq.size.into()), &[])
            && self.raw.accepts(Request::SetVringBase, &state(queue, vq.next_avail.into()), &[])
            && self.raw.accepts(Request::SetVringAddr, &addresses(queue, vq.user_addrs()), &[])
            && self.raw.accepts(Request::SetVringCall, &index, &[vq.call.as_fd()])
            && self.raw.accepts(Request::SetVringKick, &index, &[vq.kick.as_fd()])
            && self.raw.accepts(Request::SetVringEnable, &state(queue, 1), &[])
    }

    /// Does a step; false if that ended the session.
    fn step(&mut self, (what, queue, small, large): Step) -> bool {
        let queue = queue % QUEUES;
        let vq = &mut self.vqs[queue as usize];
        let (raw, number, ram) = (&self.raw, usize::from(small), usize::from(small) % RAMS);
        let single = || [vec![0; 8], words64(&self.rams[ram].words())].concat();
        let fd = |request, fd: &OwnedFd| match small % 4 {
            0 => raw.accepts(request, &words64(&[u64::from(queue) | 0x100]), &[]),
            _ => raw.accepts(request, &words64(&[queue.into()]), &[fd.as_fd()]),
        };
        match what % 24 {
            0 => {
                let bits = [9, 11, 26, 28, 29, 34, 35];
                let toggled = bits.iter().enumerate().filter(|(at, _)| small >> at & 1 == 1);
                let features = toggled.fold(self.features, |all, (_, bit)| all ^ 1 << bit);
                let offered =
                    raw.ask(Request::GetFeatures, &[], &[]).map(|bits| u64::from_ne_bytes(bits.try_into().unwrap()));
                let Some(offered) = offered else { return false };
                self.features = features;
                raw.accepts(Request::SetFeatures, &words64(&[features & offered | 1 << 30]), &[])
            }
            1 => self.share(1 + number % 7),
            2 => raw.accepts(Request::AddMemReg, &single(), &[self.rams[ram].file.as_fd()]),
            3 => raw.accepts(Request::RemMemReg, &single(), &[]),
            4 => raw.accepts(Request::SetVringNum, &state(queue, SIZES[number % SIZES.len()]), &[]),
            5 => {
                // Somewhere in some memory, or where it was.
                let within = (large % VQ_BYTES) & !15;
                let places = match small % 3 {
                    0 => vq.user_addrs(),
                    1 => [0, 0x6000, 0x8000].map(|at| self.rams[ram].user_addr + within + at),
                    _ => [large, large.rotate_left(13), large.rotate_left(29)],
                };
                raw.accepts(Request::SetVringAddr, &addresses(queue, places), &[])
            }
            6 => raw.accepts(Request::SetVringBase, &state(queue, BASES[number % BASES.len()]), &[]),
            7 => raw.ask(Request::GetVringBase, &state(queue, 0), &[]).is_some(),
            8 => fd(Request::SetVringKick, &vq.kick),
            9 => fd(Request::SetVringCall, &vq.call),
            10 => fd(Request::SetVringErr, &vq.err),
            11 => raw.accepts(Request::SetVringEnable, &state(queue, u32::from(small & 1)), &[]),
            12 => {
                let counts = u64::from(small % 3) | [0_u64, 1, 64, 256][number % 4] << 16;
                let bytes = [4096, 65536, 1 << 20][number % 3];
                raw.accepts(Request::SetInflightFd, &words64(&[bytes, 0, counts]), &[self.records.as_fd()])
            }
            13 => raw.ask(Request::SetLogBase, &words64(&[4096, 0]), &[self.log.as_fd()]).is_some(),
            14 => raw.accepts(Request::SetLogFd, &[], &[event().as_fd()]),
            15 => raw.accepts(Request::ResetDevice, &[], &[]),
            16 => {
                let mut wce: Vec<u8> = [32_u32, 1, 0].iter().flat_map(|word| word.to_ne_bytes()).collect();
                wce.push((small & 1) as u8);
                raw.accepts(Request::SetConfig, &wce, &[])
            }
            17 => {
                // Any bytes in a ring, a record or the log.
                let words: Vec<u8> = (0..64_u64)
                    .flat_map(|at| large.rotate_left(at as u32 * 7).wrapping_mul(at | 1).to_le_bytes())
                    .collect();
                let at = [0, 0x6000, 0x8000, VQ_BYTES][number % 4] + u64::from(small >> 4) % 512;
                self.rams[ram].write(at, &words);
                let records = Region::map_file(self.records.as_fd(), 0, 1 << 20).unwrap();
                if small & 8 != 0 {
                    records.span(u64::from(small >> 8) * 16, 64).unwrap().copy_from_slice(&words[..64]);
                }
                crate::common::ring(&self.vqs[queue as usize].kick);
                true
            }
            18 => {
                let info = DeviceInfo { capacity_sectors: 16384 - large % 8 * 8, ..disk_info() };
                let _ = self.world.exports[0].server().hand().change(0, Arc::new(info)).recv();
                true
            }
            19 => {
                let _ = self.world.exports[0].server().hand().set_depth(1 + number % 64).recv();
                true
            }
            20 => self.start(queue),
            _ => {
                // I/O as a guest does it, where the ring was at first.
                for slot in 0..vq.slots().min(small % 22) {
                    let sector = large % 16384;
                    match (what ^ slot as u8) % 4 {
                        0 => vq.put(slot, kind::FLUSH, 0, Data::None),
                        1 => vq.put(slot, kind::OUT, sector, Data::Out(&[what; 4096])),
                        _ => vq.put(slot, kind::IN, sector, Data::In(4096)),
                    }
                }
                vq.publish_silently();
                crate::common::ring(&vq.kick);
                true
            }
        }
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(any::<Step>(), 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: std::env::var("ANY_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(48),
        failure_persistence: None,
        max_shrink_iters: 200,
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_order_of_messages_and_io_harms_nobody_else(steps in steps()) {
        // One world for all cases: damage of one case is found by the next.
        static WORLD: OnceLock<(World, Mutex<Bystander>)> = OnceLock::new();
        let (world, bystander) = WORLD.get_or_init(|| {
            let world = World::new(vec![AnyDevice::ram(200_000), AnyDevice::ram(0)], QUEUES as usize, 1);
            let bystander = Bystander::new(&world.exports[1]);
            (world, Mutex::new(bystander))
        });
        let mut front = Wild::new(world);
        for step in steps {
            if !front.step(step) {
                // Disconnected, as expected: the next one continues.
                front.raw.hang_up();
                front = Wild::new(world);
            }
        }
        bystander.lock().unwrap().goes_on();
        front.raw.hang_up();
        drop(front);
        let (front, mut vq): (Front, Vq) = one_queue(&world.exports[0]);
        prop_assert_eq!(vq.write(0, &[7; 512]), 0);
        front.leave(&world.exports[0]);
    }
}
