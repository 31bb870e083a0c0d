//! I/O of several pages in registered buffers, beside that of a rig's single pages. The pages of its memory are in
//! reverse order for the controller, so that each list of pages is a part of a buffer's table.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::sync::Arc;

use blkyard_mem::{BufferAccess, BufferId, DmaDomain, DmaMapping, Region, RegisteredBuffer};
use blkyard_mq::{Bio, BioFlags, Op, Status};
use blkyard_nvme::{ControllerState, NvmeHostConfig};

use crate::host::peer::{PAGE, Peer, base, bus_addr};
use crate::host::real::RealController;
use crate::host::rig::{Rig, S, SECTORS, config};

/// Pages of an I/O, and I/Os that a buffer has room for.
const PAGES: usize = 5;
const SLOTS: usize = 4;
const BUFFERS: usize = 3;
/// Bytes of the memory. No other region is as long.
pub const BYTES: usize = BUFFERS * SLOTS * PAGES * PAGE + PAGE;
/// Cookies and first sectors beyond those of other I/O.
const COOKIES: u64 = 1 << 40;
const SECTOR: u64 = 4096;

/// Memory with registered buffers, of all queues.
pub struct Wide {
    pub region: Arc<Region>,
    _mapping: DmaMapping,
    buffers: Vec<Arc<RegisteredBuffer>>,
    /// Queues and buffers that are being unregistered.
    leaving: Vec<(u16, BufferId)>,
    flying: HashMap<u64, WideIo>,
    lent: Rc<RefCell<HashSet<u64>>>,
    /// Expected first words by namespace and sector of a page; `None` after a failed write.
    model: HashMap<u64, Option<u64>>,
    cookies: u64,
    pub counts: WideCounts,
}

#[derive(Clone, Copy)]
struct WideIo {
    op: Op,
    key: u64,
    number: usize,
    buffer: BufferId,
    qid: u16,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct WideCounts {
    pub succeeded: u64,
    /// In buffers that were unregistered, or are leaving.
    pub refused: u64,
    /// Buffers that were unregistered at once, and after draining.
    pub removed: u64,
    pub drained: u64,
}

impl Wide {
    pub fn new(domain: &Arc<DmaDomain>, lent: &Rc<RefCell<HashSet<u64>>>) -> Wide {
        let region = Region::anonymous(BYTES).unwrap();
        let register = |number: usize| {
            // At a page, or within one.
            let bytes = (SLOTS * PAGES * PAGE) as u64;
            RegisteredBuffer::new(&region, number as u64 * bytes, bytes, BufferAccess::ReadWrite).unwrap()
        };
        Wide {
            buffers: (0..BUFFERS).map(register).collect(),
            _mapping: domain.map(vec![Arc::clone(&region)]),
            region,
            leaving: vec![],
            flying: HashMap::new(),
            lent: Rc::clone(lent),
            model: HashMap::new(),
            cookies: COOKIES,
            counts: WideCounts::default(),
        }
    }

    /// Place of an I/O, pages from the start of the region.
    fn page(number: usize) -> u64 {
        (number * PAGES) as u64
    }

    fn lend(&self, number: usize, lend: bool) {
        for page in 0..PAGES as u64 {
            let at = base(&self.region) / PAGE as u64 + Wide::page(number) + page;
            if lend {
                self.lent.borrow_mut().insert(at)
            } else {
                self.lent.borrow_mut().remove(&at)
            };
        }
    }

    fn word(&self, number: usize, page: u64) -> [u8; 8] {
        let mut word = [0; 8];
        self.region.span((Wide::page(number) + page) * PAGE as u64, 8).unwrap().copy_to_slice(&mut word);
        word
    }

    pub fn in_flight(&self) -> usize {
        self.flying.len()
    }

    /// Handles the end of one of these bios; false for others.
    pub fn end(&mut self, bio: &Bio) -> bool {
        let Some(io) = self.flying.remove(&bio.cookie) else { return false };
        for page in 0..PAGES as u64 {
            let (key, word) = (io.key + page * u64::from(SECTORS), u64::from_le_bytes(self.word(io.number, page)));
            match (io.op, bio.status.is_ok()) {
                (Op::Write, true) => _ = self.model.insert(key, Some(bio.cookie * 8 + page)),
                (Op::Write, false) => _ = self.model.insert(key, None),
                (_, true) => {
                    let want = self.model.get(&key).copied().unwrap_or(Some(0));
                    assert!(want.is_none_or(|want| want == word), "page {page}: read {word}, wrote {want:?}");
                }
                _ => {}
            }
        }
        self.lend(io.number, false);
        self.counts.succeeded += u64::from(bio.status.is_ok());
        self.counts.refused += u64::from(bio.status == Status::Invalid);
        true
    }
}

impl<P: Peer> Rig<P> {
    /// Submits an I/O in a registered buffer, whether its queue knows that or not; unless its place is in use.
    pub fn submit_wide(&mut self, qid: u16, namespace: u16, op: Op, number: usize) {
        let number = number % (BUFFERS * SLOTS);
        let Some(nsid) = self.nsid(namespace) else { return };
        let wide = &mut self.wide;
        let Some(hw) = self.queues.get_mut(&qid) else { return };
        let sector = SECTOR + (number * PAGES) as u64 * u64::from(SECTORS);
        if hw.room() == 0 || wide.flying.values().any(|io| io.number == number) {
            return;
        }
        wide.cookies += 1;
        let mut bio = Bio::with_capacity(1);
        (bio.op, bio.flags, bio.cookie, bio.namespace) = (op, BioFlags::NO_MERGE, wide.cookies, namespace);
        (bio.sector, bio.sectors) = (sector, SECTORS * PAGES as u32);
        for page in 0..PAGES as u64 {
            let word = if op == Op::Write { bio.cookie * 8 + page } else { u64::MAX };
            let at = (Wide::page(number) + page) * PAGE as u64;
            wide.region.span(at, 8).unwrap().copy_from_slice(&word.to_le_bytes());
        }
        wide.lend(number, true);
        let buffer = &wide.buffers[number / SLOTS];
        bio.segments.push(buffer.segment(Wide::page(number % SLOTS) * PAGE as u64, (PAGES * PAGE) as u32));
        let io = WideIo { op, key: (nsid << 48) | sector, number, buffer: buffer.id(), qid };
        wide.flying.insert(bio.cookie, io);
        hw.submit(bio);
    }

    /// Registers a buffer with a queue, or unregisters it there.
    pub fn register_wide(&mut self, qid: u16, number: usize, is_there: bool) {
        let buffer = Arc::clone(&self.wide.buffers[number % BUFFERS]);
        let leaving = (qid, buffer.id());
        let Some(hw) = self.queues.get_mut(&qid) else { return };
        if is_there {
            assert!(hw.add_buffer(&mut (), &buffer));
            self.wide.leaving.retain(|other| *other != leaving);
        } else if hw.remove_buffer(&mut (), buffer.id()) {
            self.wide.counts.removed += 1;
        } else if !self.wide.leaving.contains(&leaving) {
            self.wide.leaving.push(leaving);
        }
    }

    /// Goes on with buffers that drain. One that is gone is named by no request at the controller.
    pub fn drain_wide(&mut self) {
        for (qid, id) in std::mem::take(&mut self.wide.leaving) {
            let hw = self.queues.get_mut(&qid).unwrap();
            if !hw.remove_buffer(&mut (), id) {
                let is_its = |io: &WideIo| io.qid == qid && io.buffer == id;
                assert!(self.wide.flying.values().any(is_its), "queue {qid} waits for no request");
                self.wide.leaving.push((qid, id));
                continue;
            }
            self.wide.counts.drained += 1;
        }
    }

    /// Unregisters all buffers, with no I/O in flight: nothing of them is left.
    pub fn end_wide(&mut self) {
        self.drain_wide();
        assert!(self.wide.leaving.is_empty(), "buffers without I/O drain");
        for buffer in &self.wide.buffers {
            for hw in self.queues.values_mut() {
                assert!(hw.remove_buffer(&mut (), buffer.id()));
            }
            assert_eq!(Arc::strong_count(buffer), 1);
        }
    }
}

/// Address of a byte of this memory: its pages are in reverse order.
pub fn reversed(region: &Region, offset: u64) -> u64 {
    let (page, last) = (PAGE as u64, (BYTES / PAGE - 1) as u64);
    base(region) + (last - offset / page) * page + offset % page
}

/// Address of a byte for the driver.
pub fn addr_of(domain: &DmaDomain, region: &Arc<Region>, offset: u64) -> Option<u64> {
    domain.regions().iter().any(|mapped| Arc::ptr_eq(mapped, region)).then(|| bus_addr(region, offset))
}

fn live() -> Rig<RealController> {
    let mut rig = Rig::live(RealController::transport(), NvmeHostConfig { ring_entries: 32, ..config(1) });
    rig.register_wide(1, 0, true);
    rig
}

#[test]
fn a_reset_keeps_the_mapping_of_a_buffer_and_what_is_in_flight_there() {
    let mut rig = live();
    for op in [Op::Write, Op::Read] {
        rig.fake.borrow_mut().is_prompt = false;
        (0..SLOTS).for_each(|number| rig.submit_wide(1, 0, op, number));
        rig.run(|rig| rig.fake.borrow().held.len() == SLOTS, S);
        let mapped = rig.fake.borrow().domain.changes();
        rig.host.reset(rig.now_ns);
        (0..10).for_each(|_| rig.round());
        rig.fake.borrow_mut().is_prompt = true;
        rig.finish();
        rig.run(|rig| rig.host.state() == ControllerState::Live, 200 * S);
        assert_eq!(rig.fake.borrow().domain.changes(), mapped, "nothing was mapped anew");
    }
    assert_eq!(rig.wide.counts.succeeded, 2 * SLOTS as u64);
    rig.check();
    rig.end_wide();
}

#[test]
fn a_removed_controller_fails_io_in_a_buffer_and_lets_go_of_it() {
    let mut rig = live();
    let domain = Arc::clone(&rig.fake.borrow().domain);
    rig.fake.borrow_mut().is_prompt = false;
    rig.submit_wide(1, 0, Op::Read, 0);
    rig.run(|rig| rig.fake.borrow().held.len() == 1, S);
    rig.register_wide(1, 0, false);
    assert_eq!(rig.wide.counts.removed, 0, "the controller may still reach it");
    rig.register_wide(1, 0, true);
    rig.fake.borrow_mut().gone = true;
    rig.submit_wide(1, 0, Op::Write, 1);
    rig.finish();
    assert!(rig.ended.iter().all(|(_, status)| *status == Status::Offline), "{:?}", rig.ended);
    let before = domain.regions().len();
    rig.end_wide();
    assert_eq!(domain.regions().len(), before - 1, "its table is unmapped");
}

#[test]
fn one_registration_serves_both_namespaces_and_all_queues() {
    let mut rig = Rig::live(RealController::transport(), NvmeHostConfig { ring_entries: 32, ..config(3) });
    (1..=3).for_each(|qid| rig.register_wide(qid, 0, true));
    let mapped = rig.fake.borrow().domain.regions().len();
    for op in [Op::Write, Op::Read] {
        for number in 0..SLOTS {
            rig.submit_wide(1 + number as u16 % 3, number as u16 % 2, op, number);
        }
        rig.finish();
    }
    assert!(rig.ended.len() == 2 * SLOTS && rig.ended.iter().all(|(_, status)| status.is_ok()));
    assert_eq!(rig.fake.borrow().domain.regions().len(), mapped);
    (1..=2).for_each(|qid| rig.register_wide(qid, 0, false));
    assert_eq!(rig.fake.borrow().domain.regions().len(), mapped, "the third queue has it");
    rig.end_wide();
    assert_eq!(rig.fake.borrow().domain.regions().len(), mapped - 1);
}
