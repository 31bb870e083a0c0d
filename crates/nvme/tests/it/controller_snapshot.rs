//! A controller continues in another process as if nothing had happened: two equal machines, one of which is saved and
//! restored, again and again, with commands unfinished.

use std::sync::Arc;

use blkyard_mem::RegionTable;
use blkyard_nvme::registers::{ACQ, AQA, ASQ, CC, CSTS};
use blkyard_nvme::{
    Controller, ControllerIoQueue, ControllerQueueReply, ControllerRequest, ControllerSnapshot, DmaMap, DmaRange,
    NamespaceTable, Psdt, SnapshotError, Sqe, admin, cns, feature, io,
};

use crate::machine::{BASE, MEMORY_BYTES, Machine, PAGE, RawQueue, map_of, namespaces, options};

/// A reproducible sequence of numbers.
#[derive(Clone)]
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// Number of pages that hold data, after those of rings.
const DATA_PAGES: u64 = 64;
/// The region of [`map_of`] has a guard before the host's memory.
const GUARD_BYTES: u64 = 64 << 10;

/// A host that sends any command, and its machine.
struct Walk {
    machine: Machine,
    map: DmaMap,
    table: NamespaceTable,
    queues: Vec<RawQueue>,
    /// Completion queues without submission queues.
    new_queues: Vec<RawQueue>,
    data: u64,
    shadow: u64,
    is_shadowed: bool,
    completions: Vec<(u16, u16, u16, u64)>,
    /// Completion queues that are not answered.
    created: Vec<u16>,
}

impl Walk {
    fn new() -> Walk {
        let mut machine = Machine::enabled();
        let (data, shadow) = (machine.pages(DATA_PAGES), machine.pages(2));
        let map = map_of(&machine.region);
        Walk {
            machine,
            map,
            table: namespaces(),
            queues: vec![],
            new_queues: vec![],
            data,
            shadow,
            is_shadowed: false,
            completions: vec![],
            created: vec![],
        }
    }

    /// The map without the pages of one I/O queue, or the whole.
    fn partial_map(&self, queue: Option<RawQueue>) -> DmaMap {
        let Some(queue) = queue else { return map_of(&self.machine.region) };
        let table = Arc::new(RegionTable::new(vec![Arc::clone(&self.machine.region)]));
        let range =
            |from: u64, to: u64| DmaRange { addr: from, len: to - from, region: 0, offset: from - BASE + GUARD_BYTES };
        let ranges = vec![range(BASE, queue.sq), range(queue.cq + PAGE, BASE + MEMORY_BYTES as u64)];
        DmaMap::new(table, ranges).unwrap()
    }

    /// One action of the host, the same for equal numbers.
    fn act(&mut self, numbers: &mut Numbers) {
        let data = self.data + numbers.below(DATA_PAGES - 2) * PAGE;
        let sqe = match numbers.below(24) {
            0 if self.queues.len() < 6 => return self.create(numbers),
            1 if !self.queues.is_empty() => return self.delete(numbers),
            2 => Sqe::new(admin::ASYNC_EVENT, 0),
            3 => {
                let what = [cns::NAMESPACE, cns::CONTROLLER][numbers.below(2) as usize];
                Sqe::identify(what, numbers.below(4) as u32, 0, 0)
            }
            4 => {
                let features = [feature::WRITE_CACHE, feature::ARBITRATION, feature::ASYNC_EVENTS];
                let fid = features[numbers.below(3) as usize];
                Sqe::feature(admin::SET_FEATURES, fid, [0, 1, 0x100][numbers.below(3) as usize])
            }
            5 => Sqe::feature(admin::GET_FEATURES, numbers.below(16) as u8, 0),
            // The SMART log, and the list of changed namespaces.
            6 => Sqe::get_log_page([2, 4][numbers.below(2) as usize], u32::MAX, 0, 128, 0),
            7 => Sqe::new(numbers.below(256) as u8 | 0x40, 0),
            8 => Sqe::new(admin::KEEP_ALIVE, 0),
            9 if numbers.below(4) == 0 => {
                self.is_shadowed = false;
                self.queues.clear();
                self.new_queues.clear();
                if numbers.below(2) == 0 {
                    self.machine.write32(CC, Machine::config().bits() | 1 << 14);
                } else {
                    self.machine.write32(CC, 0);
                }
                return;
            }
            10 if !self.is_shadowed && numbers.below(4) == 0 => {
                // A host takes the registers as they are.
                self.is_shadowed = true;
                Sqe::doorbell_buffer(self.shadow, self.shadow + PAGE)
            }
            11 => {
                let mut table = namespaces();
                let mut changed = table.find(2).unwrap().clone();
                changed.format.blocks -= numbers.below(8);
                table.set(2, Some(changed));
                self.table = table.clone();
                self.machine.controller.set_namespaces(table);
                return;
            }
            12 => {
                let place = numbers.below(8) as usize;
                self.map = self.partial_map(self.queues.get(place).copied());
                let map = self.map.clone();
                self.machine.controller.set_memory(&map);
                return;
            }
            13 if numbers.below(8) == 0 => {
                // Outside of each ring.
                self.machine.ring_tail(numbers.below(8) as u16, 1000);
                return;
            }
            _ => return self.start_io(numbers, data),
        };
        if self.machine.status().ready {
            let sqe = if sqe.data() == [0, 0] { sqe.with_data(Psdt::Prp, [data, data + PAGE]) } else { sqe };
            self.machine.start_admin(sqe);
        }
    }

    fn create(&mut self, numbers: &mut Numbers) {
        if !self.machine.status().ready {
            return;
        }
        let used: Vec<_> = self.queues.iter().chain(&self.new_queues).map(|queue| queue.sqid).collect();
        let sqid = (1..=8).find(|qid| !used.contains(qid)).unwrap();
        let (sq, cq) = (self.machine.page(), self.machine.page());
        self.machine.zero(cq, PAGE as usize);
        let entries = 4 + numbers.below(20) as u16;
        self.machine.start_admin(Sqe::create_cq(sqid, entries.into(), cq, Some(numbers.below(5) as u16)));
        for word in [self.shadow, self.shadow + PAGE] {
            self.machine.put(word + u64::from(sqid) * 8, &[0; 8]);
        }
        let (sq_entries, cq_entries) = (entries, entries);
        let (tail, head, phase) = (0, 0, true);
        self.new_queues.push(RawQueue { sqid, cqid: sqid, sq, cq, sq_entries, cq_entries, tail, head, phase });
    }

    /// Creates the submission queues of the completion queues that have been created.
    fn finish_creations(&mut self) {
        for queue in std::mem::take(&mut self.new_queues) {
            if self.machine.status().ready {
                let entries = queue.sq_entries.into();
                self.machine.start_admin(Sqe::create_sq(queue.sqid, entries, queue.sq, queue.cqid));
                self.queues.push(queue);
            }
        }
    }

    fn delete(&mut self, numbers: &mut Numbers) {
        if self.machine.status().ready {
            let queue = self.queues.remove(numbers.below(self.queues.len() as u64) as usize);
            self.machine.start_admin(Sqe::delete_queue(admin::DELETE_SQ, queue.sqid));
            self.machine.start_admin(Sqe::delete_queue(admin::DELETE_CQ, queue.cqid));
        }
    }

    fn start_io(&mut self, numbers: &mut Numbers, data: u64) {
        if self.queues.is_empty() {
            return;
        }
        let place = numbers.below(self.queues.len() as u64) as usize;
        let mut queue = self.queues[place];
        let (nsid, slba) = (1 + numbers.below(5) as u32, numbers.below(64));
        let opcodes = [io::READ, io::WRITE, io::COMPARE, io::VERIFY, io::WRITE_ZEROES, io::DSM, io::FLUSH, 0x55];
        let opcode = opcodes[numbers.below(8) as usize];
        let sqe = match opcode {
            io::DSM => {
                let ranges = 1 + numbers.below(16);
                for range in 0..ranges {
                    self.machine.put_words(data + range * 16, &[1 << 32, slba + range]);
                }
                Sqe::deallocate(nsid, ranges as u16)
            }
            io::FLUSH => Sqe::new(io::FLUSH, [nsid, u32::MAX][numbers.below(2) as usize]),
            // Several bios of the largest transfer.
            io::VERIFY => Sqe::with_blocks(opcode, nsid, slba, 1 + numbers.below(700) as u32, 0),
            _ => Sqe::with_blocks(opcode, nsid, slba, 1 + numbers.below(2) as u32, 0),
        };
        let sqe = sqe.with_data(Psdt::Prp, [data, data + PAGE]);
        if (queue.tail + 1) % queue.sq_entries == queue.head {
            return;
        }
        let cid = self.machine.cid();
        self.machine.push(&mut queue, sqe, cid);
        if self.is_shadowed {
            self.machine.store32(self.shadow + u64::from(queue.sqid) * 8, queue.tail.into());
        }
        self.queues[place] = queue;
    }

    /// Takes completions. Their order is free, and so are the heads in them.
    fn take(&mut self) {
        let mut all = vec![];
        let mut queues = std::mem::take(&mut self.queues);
        for queue in &mut queues {
            all.extend(self.machine.take(queue));
            if self.is_shadowed {
                self.machine.store32(self.shadow + u64::from(queue.cqid) * 8 + 4, queue.head.into());
            }
        }
        self.queues = queues;
        if self.machine.status().ready {
            let mut admin = self.machine.admin;
            all.extend(self.machine.take(&mut admin));
            self.machine.admin = admin;
        }
        self.completions = all.iter().map(|cqe| (cqe.cid(), cqe.sq_id(), cqe.status().0, cqe.result())).collect();
        self.completions.sort_unstable();
    }

    /// Has devices and queues finish what was begun, and executes each request of the controller.
    fn quiesce(&mut self) {
        let machine = &mut self.machine;
        while machine.release() > 0 {}
        loop {
            let mut is_busy = false;
            while let Some(request) = machine.controller.take_request() {
                is_busy = true;
                match request {
                    ControllerRequest::Create(queue) => {
                        self.created.push(queue.cqid());
                        machine.queues.insert(queue.cqid(), *queue);
                    }
                    ControllerRequest::Queue(cqid, command) => machine.queues.get_mut(&cqid).unwrap().handle(command),
                    ControllerRequest::Flush(number) => machine.flushes.push(number),
                }
            }
            for number in std::mem::take(&mut machine.flushes) {
                is_busy = true;
                machine.controller.flushed(number);
            }
            for cqid in machine.queues.keys().copied().collect::<Vec<_>>() {
                while let Some(reply) = machine.queues.get_mut(&cqid).and_then(ControllerIoQueue::take_reply) {
                    is_busy = true;
                    if matches!(reply, ControllerQueueReply::Stopped | ControllerQueueReply::Deleted) {
                        machine.queues.remove(&cqid);
                    }
                    machine.controller.reply(cqid, reply);
                }
            }
            if !is_busy {
                return;
            }
        }
    }

    fn save(&self) -> String {
        let saved = self.machine.controller.snapshot(self.machine.queues.values()).unwrap();
        serde_json::to_string(&saved).unwrap()
    }

    /// Continues with another controller.
    fn restore(&mut self, saved: &str) {
        let saved: ControllerSnapshot = serde_json::from_str(saved).unwrap();
        let registers = self.machine.registers.clone();
        self.machine.controller =
            Controller::restore(options(), registers, &self.map, self.table.clone(), &saved).unwrap();
        self.machine.queues.clear();
        self.quiesce();
    }
}

#[test]
fn restored_controller_continues_as_the_saved_one() {
    const STEPS: usize = 150;
    let (mut saved, mut unfinished, mut creating) = (0, 0, 0);
    for seed in 0..60 {
        let mut numbers = Numbers(seed);
        let (mut ours, mut theirs) = (Walk::new(), Walk::new());
        for step in 0..STEPS {
            for _ in 0..=numbers.below(6) {
                let mut again = numbers.clone();
                ours.act(&mut numbers);
                theirs.act(&mut again);
            }
            let (turns, polls) = (numbers.below(3), numbers.below(2) == 0);
            for walk in [&mut ours, &mut theirs] {
                walk.machine.is_held = turns > 0;
                for _ in 0..turns {
                    walk.machine.turn();
                }
                walk.machine.is_held = false;
                if polls && walk.machine.controller.poll(walk.machine.now_ns) {
                    walk.machine.vectors.push(0);
                }
                walk.quiesce();
            }
            if numbers.below(2) == 0 {
                let text = theirs.save();
                saved += 1;
                creating += usize::from(!text.contains("\"creations\":[]"));
                unfinished += usize::from(text.contains("\"unfinished\":["));
                theirs.restore(&text);
                assert_eq!(theirs.save(), text, "seed {seed}, step {step}");
            }
            for walk in [&mut ours, &mut theirs] {
                for cqid in std::mem::take(&mut walk.created) {
                    walk.machine.controller.reply(cqid, ControllerQueueReply::Created);
                }
                walk.machine.now_ns += 1_000_000;
                walk.machine.run();
                walk.take();
                walk.finish_creations();
                walk.machine.run();
            }
            let registers = |walk: &Walk| [CC, CSTS, AQA, ASQ, ACQ].map(|at| walk.machine.read32(at));
            assert_eq!(registers(&ours), registers(&theirs), "seed {seed}, step {step}");
            assert_eq!(ours.completions, theirs.completions, "seed {seed}, step {step}");
            if !ours.machine.status().ready && numbers.below(2) == 0 {
                ours.machine.enable();
                theirs.machine.enable();
            } else if ours.machine.status().shutdown != 0 || ours.machine.status().fatal {
                for walk in [&mut ours, &mut theirs] {
                    walk.machine.write32(CC, 0);
                    walk.queues.clear();
                    walk.is_shadowed = false;
                }
            }
        }
        let data = |walk: &Walk| walk.machine.get(walk.data, (DATA_PAGES * PAGE) as usize);
        assert!(data(&ours) == data(&theirs), "seed {seed}: the data differs");
        assert!(theirs.machine.guards_are_whole());
    }
    println!("saved {saved} times: {unfinished} with an unfinished command, {creating} with a queue that is created");
    assert!(saved > 3000 && unfinished > 30 && creating > 30);
}

#[test]
fn invalid_saved_state_is_refused_or_harmless() {
    let (mut refused, mut restored) = (0, 0);
    for seed in 0..400 {
        let mut numbers = Numbers(seed);
        let mut walk = Walk::new();
        for _ in 0..60 {
            walk.act(&mut numbers);
        }
        walk.machine.is_held = true;
        walk.machine.turn();
        walk.machine.is_held = false;
        walk.quiesce();
        let text = walk.save();
        // One number becomes another.
        let starts: Vec<_> = text
            .match_indices(|digit: char| digit.is_ascii_digit())
            .map(|(at, _)| at)
            .filter(|at| !text.as_bytes()[at - 1].is_ascii_alphanumeric())
            .collect();
        let at = starts[numbers.below(starts.len() as u64) as usize];
        let rest = text[at..].trim_start_matches(|digit: char| digit.is_ascii_digit());
        let number = [0_u64, 1, 2, 9, 17, 63, 64, 255, 4095, 65_535, 1 << 40][numbers.below(11) as usize];
        let Ok(saved) = serde_json::from_str::<ControllerSnapshot>(&format!("{}{number}{rest}", &text[..at])) else {
            refused += 1;
            continue;
        };
        let registers = walk.machine.registers.clone();
        let Ok(controller) = Controller::restore(options(), registers, &walk.map, walk.table.clone(), &saved) else {
            refused += 1;
            continue;
        };
        restored += 1;
        walk.machine.controller = controller;
        walk.machine.queues.clear();
        for _ in 0..20 {
            walk.machine.turn();
            walk.act(&mut numbers);
        }
        assert!(walk.machine.guards_are_whole());
    }
    assert!(refused > 20 && restored > 20, "{refused} refused, {restored} restored");
}

#[test]
fn controller_at_work_is_not_saved() {
    let mut walk = Walk::new();
    let mut queue = walk.machine.queue_pair(1, 8);
    let data = walk.data;
    let read = Sqe::with_blocks(io::READ, 1, 0, 1, 0).with_data(Psdt::Prp, [data, 0]);
    walk.machine.is_held = true;
    walk.machine.push(&mut queue, read, 7);
    walk.machine.turn();
    let saved = walk.machine.controller.snapshot(walk.machine.queues.values());
    assert!(matches!(saved, Err(SnapshotError::Busy(_))), "a command is at its device");
    walk.quiesce();
    walk.machine.controller.snapshot(walk.machine.queues.values()).unwrap();
    let missing = walk.machine.controller.snapshot([]);
    assert!(matches!(missing, Err(SnapshotError::Busy(_))), "a queue is missing");
    walk.machine.write32(CC, 0);
    let resetting = walk.machine.controller.snapshot(walk.machine.queues.values());
    assert!(matches!(resetting, Err(SnapshotError::Busy(_))), "a reset waits for its queues");
}
