//! A controller for tests of the host: registers with delays, admin commands, and I/O that completes on command.
//!
//! It fails on request: it does not become ready or idle, does not respond, rejects queues, is unplugged. It records
//! violations by the host ([`FakeController::violations`]), above all memory returned while the controller could still
//! access it.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::rc::Rc;
use std::sync::Arc;

use blkyard_mem::{DmaDomain, Region, View};
use blkyard_mq::{Bio, Op};
use blkyard_nvme::registers::{
    ACQ, AQA, ASQ, CAP, CC, CRTO, CSTS, Capabilities, ControllerConfig, ControllerStatus, DOORBELLS, SUBSYSTEM_RESET,
    admin_queue_entries,
};
use blkyard_nvme::{
    ControllerQueuePair, ControllerRings, Cqe, DmaMap, DmaRights, Doorbells, Fetched, IDENTIFY_BYTES,
    IdentifyController, IdentifyNamespace, IoCommand, IoParser, LbaFormat, NamespaceFormat, NvmeStatus,
    ShadowDoorbells, Sqe, admin, cns, feature, io,
};

use crate::host::peer::{PAGE, Peer, Transport, map_of};

/// A fetched I/O command that is not complete.
#[derive(Clone, Copy, Debug)]
pub struct PendingIo {
    pub qid: u16,
    pub token: u16,
    pub sqe: Sqe,
}

pub struct FakeController {
    pub now_ns: u64,
    pub cap: Capabilities,
    pub crto: u32,
    config: u32,
    aqa: u32,
    asq: u64,
    acq: u64,
    /// Time when RDY follows EN.
    ready_at_ns: Option<u64>,
    ready: bool,
    pub ready_delay_ns: u64,
    pub idle_delay_ns: u64,
    pub never_ready: bool,
    pub never_idle: bool,
    /// Time of the end of a running shutdown; it has ended once that has passed.
    shut_down_at_ns: Option<u64>,
    pub shutdown_delay_ns: u64,
    pub never_shut_down: bool,
    pub fatal: bool,
    /// The subsystem was reset, and the host has not cleared that.
    pub subsystem_reset: bool,
    pub gone: bool,
    /// Whether it may still transfer data although it is gone, like a hanging process.
    pub lingers: bool,
    pub can_reset_function: bool,
    pub function_resets: u32,
    pub shutdowns: u32,
    pub enables: u32,
    pub identify: IdentifyController,
    pub namespaces: BTreeMap<u32, IdentifyNamespace>,
    pub uuids: HashMap<u32, [u8; 16]>,
    pub nvm_limits: Option<[u8; 16]>,
    pub has_active_list: bool,
    /// Number of granted I/O queues; if unset, the feature fails.
    pub grant: Option<u16>,
    granted: u16,
    /// An I/O queue was created since the reset.
    had_queues: bool,
    /// Queues from this one on are rejected.
    pub reject_from: Option<u16>,
    /// So many commands Identify Namespace and of the list fail for the moment.
    pub identify_failures: u32,
    /// The n-th command of an opcode is not answered.
    pub ignored: HashMap<u8, u32>,
    /// Tokens of commands that were not answered.
    pub ignored_tokens: Vec<u16>,
    /// Whether no admin command is answered.
    pub mute: bool,
    pub vectors: u16,
    pub shares_doorbells: bool,
    pub doorbell_bytes: usize,
    /// Offsets and values of doorbells that were written as registers.
    pub doorbell_writes: Vec<(usize, u32)>,
    doorbells: View,
    shadow: Option<ShadowDoorbells>,
    admin: Option<ControllerQueuePair>,
    cqs: BTreeMap<u16, (u64, u16)>,
    queues: BTreeMap<u16, ControllerQueuePair>,
    domain: Arc<DmaDomain>,
    map: DmaMap,
    map_changes: u64,
    /// Data of the last Set Features with data.
    pub written: [u8; PAGE],
    /// Admin commands, in order.
    pub log: Vec<Sqe>,
    pub pending: Vec<PendingIo>,
    /// Whether I/O completes at once.
    pub is_prompt: bool,
    /// Whether memory can be mapped for it.
    pub reaches_memory: bool,
    event: Option<u16>,
    /// Data pages lent by the host, by address.
    pub lent: Rc<RefCell<HashSet<u64>>>,
    pub disk: HashMap<u64, u64>,
    pub violations: Vec<String>,
    parser: IoParser,
}

/// CSTS.SHST.
const SHUTDOWN_RUNNING: u8 = 1;
const SHUTDOWN_COMPLETE: u8 = 2;

pub type FakeTransport = Transport<FakeController>;

pub fn namespace(blocks: u64, block_shift: u8) -> IdentifyNamespace {
    let mut namespace = IdentifyNamespace { blocks, capacity: blocks, ..IdentifyNamespace::default() };
    namespace.set_lba_format(0, LbaFormat { block_shift, ..LbaFormat::default() });
    namespace
}

impl FakeTransport {
    pub fn new() -> FakeTransport {
        let domain = DmaDomain::new(|| ());
        let doorbells = View::new(Region::anonymous(PAGE).unwrap(), 0, PAGE, PAGE).unwrap();
        let cap = Capabilities {
            queue_entries_max: 64,
            contiguous_queues: true,
            timeout_500ms: 10,
            command_sets: 1,
            ..Capabilities::default()
        };
        let identify = IdentifyController {
            mdts: 5,
            nvm_commands: 0xc,
            write_cache: 1,
            abort_limit: 3,
            async_events: 1 << 8,
            admin_commands: 1 << 8,
            namespaces: 4,
            ..IdentifyController::default()
        };
        let fake = FakeController {
            now_ns: 0,
            cap,
            crto: 0,
            config: 0,
            aqa: 0,
            asq: 0,
            acq: 0,
            ready_at_ns: None,
            ready: false,
            ready_delay_ns: 3_000_000,
            idle_delay_ns: 2_000_000,
            never_ready: false,
            never_idle: false,
            shut_down_at_ns: None,
            shutdown_delay_ns: 4_000_000,
            never_shut_down: false,
            fatal: false,
            subsystem_reset: false,
            gone: false,
            lingers: false,
            can_reset_function: false,
            function_resets: 0,
            shutdowns: 0,
            enables: 0,
            identify,
            namespaces: BTreeMap::from([(1, namespace(1 << 16, 9))]),
            uuids: HashMap::new(),
            nvm_limits: None,
            has_active_list: true,
            grant: Some(8),
            granted: 0,
            had_queues: false,
            reject_from: None,
            identify_failures: 0,
            ignored: HashMap::new(),
            ignored_tokens: vec![],
            mute: false,
            vectors: 0,
            shares_doorbells: true,
            doorbell_bytes: PAGE,
            doorbell_writes: vec![],
            doorbells,
            shadow: None,
            admin: None,
            cqs: BTreeMap::new(),
            queues: BTreeMap::new(),
            domain: Arc::clone(&domain),
            map: DmaMap::default(),
            map_changes: u64::MAX,
            written: [0; PAGE],
            log: vec![],
            pending: vec![],
            is_prompt: true,
            reaches_memory: true,
            event: None,
            lent: Rc::default(),
            disk: HashMap::new(),
            violations: vec![],
            parser: IoParser::new(1 << 20),
        };
        Transport::on(domain, fake)
    }
}

impl FakeController {
    /// Updates registers to this time.
    fn follow(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
        let wants = self.config & 1 == 1;
        if self.shutdown() == SHUTDOWN_COMPLETE {
            // It takes no command and accesses no memory until it is disabled.
            self.forget();
        }
        if wants != self.ready && self.ready_at_ns.is_none() {
            let (never, delay_ns) =
                if wants { (self.never_ready, self.ready_delay_ns) } else { (self.never_idle, self.idle_delay_ns) };
            self.ready_at_ns = (!never).then(|| now_ns + delay_ns);
        }
        if self.ready_at_ns.is_some_and(|at_ns| at_ns <= now_ns) {
            self.ready_at_ns = None;
            self.ready = wants;
            if !wants {
                self.forget();
            }
        }
    }

    /// CSTS.SHST.
    fn shutdown(&self) -> u8 {
        match self.shut_down_at_ns {
            Some(at_ns) if at_ns <= self.now_ns => SHUTDOWN_COMPLETE,
            Some(_) => SHUTDOWN_RUNNING,
            None => 0,
        }
    }

    /// Disabled or shut down: drops all queues.
    fn forget(&mut self) {
        self.admin = None;
        self.cqs.clear();
        self.queues.clear();
        self.pending.clear();
        self.shadow = None;
        self.event = None;
        self.had_queues = false;
    }

    fn set_config(&mut self, value: u32) {
        let (was, is) = (ControllerConfig::from_bits(self.config), ControllerConfig::from_bits(value));
        self.config = value;
        if is.shutdown == 1 && was.shutdown == 0 {
            self.shutdowns += 1;
            let delay_ns = if self.never_shut_down { u64::MAX } else { self.shutdown_delay_ns };
            self.shut_down_at_ns = Some(self.now_ns.saturating_add(delay_ns));
        }
        if !is.enabled {
            self.shut_down_at_ns = None;
        }
        if was.enabled == is.enabled {
            return;
        }
        if is.enabled {
            self.enables += 1;
            assert_eq!((is.sq_entry_shift, is.cq_entry_shift, is.page), (6, 4, 0));
            let (sq_entries, cq_entries) = admin_queue_entries(self.aqa);
            self.admin = Some(self.pair(0, self.asq, sq_entries, self.acq, cq_entries));
        }
        self.ready_at_ns = None;
        let now_ns = self.now_ns;
        self.follow(now_ns);
    }

    fn remap(&mut self) {
        if self.domain.changes() == self.map_changes {
            return;
        }
        self.map_changes = self.domain.changes();
        self.map = map_of(&self.domain);
    }

    fn view(&mut self, addr: u64, len: usize) -> View {
        self.remap();
        let segment = self.map.segment(addr, len as u32, DmaRights::ReadWrite).expect("an address that is mapped");
        assert_eq!(segment.len as usize, len, "rings are contiguous");
        View::new(Arc::clone(self.map.table().region(segment.region).unwrap()), segment.offset, len, PAGE).unwrap()
    }

    fn pair(&mut self, qid: u16, sq: u64, sq_entries: u16, cq: u64, cq_entries: u16) -> ControllerQueuePair {
        let rings = ControllerRings {
            sq: self.view(sq, usize::from(sq_entries) * 64),
            sq_entries,
            cq: self.view(cq, usize::from(cq_entries) * 16),
            cq_entries,
        };
        let doorbells = Doorbells::new(self.doorbells.clone(), self.cap.doorbell_stride, self.shadow.clone());
        ControllerQueuePair::new(qid, rings, &doorbells)
    }

    /// Executes admin commands, and fetches I/O commands.
    fn serve(&mut self, now_ns: u64) {
        self.follow(now_ns);
        if self.gone || !self.ready {
            return;
        }
        while let Some(Fetched { token, sqe }) = self.fetch_admin() {
            self.log.push(sqe);
            self.execute(token, sqe);
        }
        let mut fetched = vec![];
        for (qid, pair) in &mut self.queues {
            loop {
                match pair.fetch() {
                    Ok(Some(Fetched { token, sqe })) => fetched.push(PendingIo { qid: *qid, token, sqe }),
                    Ok(None) => break,
                    Err(fault) => {
                        self.violations.push(format!("queue {qid}: {fault}"));
                        break;
                    }
                }
            }
        }
        self.pending.extend(fetched);
        while self.is_prompt && !self.pending.is_empty() {
            self.complete(0, NvmeStatus::SUCCESS);
        }
    }

    fn fetch_admin(&mut self) -> Option<Fetched> {
        if self.mute {
            return None;
        }
        self.admin.as_mut()?.fetch().expect("an admin queue that is in order")
    }

    /// Answers an admin command.
    pub fn answer(&mut self, token: u16, status: NvmeStatus, result: u64) {
        if let Some(admin) = &mut self.admin {
            admin.complete(token, status, result);
        }
    }

    fn execute(&mut self, token: u16, sqe: Sqe) {
        if let Some(left) = self.ignored.get_mut(&sqe.opcode()) {
            if *left == 0 {
                self.ignored_tokens.push(token);
                return;
            }
            *left -= 1;
        }
        let ok = NvmeStatus::SUCCESS;
        let (status, result) = match sqe.opcode() {
            admin::IDENTIFY => (self.identify(sqe), 0),
            admin::SET_FEATURES if sqe.dword(10) as u8 == feature::QUEUES => match self.grant {
                Some(_) if self.had_queues => (NvmeStatus::COMMAND_SEQUENCE.with_dnr(), 0),
                Some(queues) => {
                    let asked = (sqe.dword(11) & 0xffff) as u16 + 1;
                    self.granted = queues.min(asked);
                    let count = u64::from(queues) - 1;
                    (ok, count | count << 16)
                }
                None => (NvmeStatus::INVALID_FIELD.with_dnr(), 0),
            },
            admin::SET_FEATURES if sqe.data()[0] != 0 => {
                let view = self.view(sqe.data()[0], PAGE);
                view.span(0, PAGE).unwrap().copy_to_slice(&mut self.written);
                (ok, 0)
            }
            admin::SET_FEATURES | admin::KEEP_ALIVE | admin::GET_LOG_PAGE => (ok, 0),
            admin::CREATE_CQ | admin::CREATE_SQ => (self.create(sqe), 0),
            admin::DELETE_SQ => {
                let qid = sqe.dword(10) as u16;
                self.pending.retain(|pending| pending.qid != qid);
                let known = self.queues.remove(&qid).is_some();
                (if known { ok } else { NvmeStatus::INVALID_QID.with_dnr() }, 0)
            }
            admin::DELETE_CQ => {
                let qid = sqe.dword(10) as u16;
                let known = !self.queues.contains_key(&qid) && self.cqs.remove(&qid).is_some();
                (if known { ok } else { NvmeStatus::INVALID_QID.with_dnr() }, 0)
            }
            admin::DOORBELL_BUFFER => {
                let [doorbells, events] = sqe.data().map(|addr| self.view(addr, PAGE));
                self.shadow = Some(ShadowDoorbells { doorbells, events });
                (ok, 0)
            }
            admin::ABORT => {
                let (qid, cid) = (sqe.dword(10) as u16, (sqe.dword(10) >> 16) as u16);
                let found = self.pending.iter().position(|io| io.qid == qid && io.sqe.cid() == cid);
                if let Some(number) = found {
                    let aborted = self.pending.remove(number);
                    self.answer_io(aborted, NvmeStatus::ABORT_REQUESTED);
                }
                (ok, u64::from(found.is_none()))
            }
            admin::ASYNC_EVENT => {
                if self.event.replace(token).is_some() {
                    self.violations.push("a second asynchronous event request".to_owned());
                }
                return;
            }
            _ => (NvmeStatus::INVALID_OPCODE.with_dnr(), 0),
        };
        self.answer(token, status, result);
    }

    /// Completes the asynchronous event request, if pending.
    pub fn event(&mut self, result: u64) -> bool {
        let Some(token) = self.event.take() else { return false };
        self.answer(token, NvmeStatus::SUCCESS, result);
        true
    }

    fn identify(&mut self, sqe: Sqe) -> NvmeStatus {
        let mut bytes = [0; IDENTIFY_BYTES];
        let nsid = sqe.nsid();
        let is_scan = matches!(sqe.dword(10) as u8, cns::NAMESPACE | cns::ACTIVE_NAMESPACES | cns::NAMESPACE_IDS);
        if is_scan && self.identify_failures > 0 {
            self.identify_failures -= 1;
            return NvmeStatus::INTERNAL;
        }
        match sqe.dword(10) as u8 {
            cns::CONTROLLER => self.identify.write(&mut bytes),
            cns::NAMESPACE => match self.namespaces.get(&nsid) {
                Some(namespace) => namespace.write(&mut bytes),
                None => return NvmeStatus::INVALID_NAMESPACE.with_dnr(),
            },
            cns::ACTIVE_NAMESPACES if self.has_active_list => {
                let after = self.namespaces.range(nsid + 1..).take(PAGE / 4);
                for (at, (id, _)) in after.enumerate() {
                    bytes[at * 4..][..4].copy_from_slice(&id.to_le_bytes());
                }
            }
            cns::NAMESPACE_IDS => {
                if let Some(uuid) = self.uuids.get(&nsid) {
                    bytes[..4].copy_from_slice(&[3, 16, 0, 0]);
                    bytes[4..20].copy_from_slice(uuid);
                }
            }
            cns::CSI_CONTROLLER if self.nvm_limits.is_some() => {
                bytes[..16].copy_from_slice(&self.nvm_limits.unwrap());
            }
            _ => return NvmeStatus::INVALID_FIELD.with_dnr(),
        }
        let view = self.view(sqe.data()[0], PAGE);
        view.span(0, PAGE).unwrap().copy_from_slice(&bytes);
        NvmeStatus::SUCCESS
    }

    fn create(&mut self, sqe: Sqe) -> NvmeStatus {
        let (qid, entries) = (sqe.dword(10) as u16, (sqe.dword(10) >> 16) as u16 + 1);
        if self.reject_from.is_some_and(|first| qid >= first) || qid == 0 {
            return NvmeStatus::INVALID_QID.with_dnr();
        }
        if qid > self.granted {
            self.violations.push(format!("queue {qid} was created beyond what was granted"));
        }
        let addr = sqe.data()[0];
        self.had_queues = true;
        if sqe.opcode() == admin::CREATE_CQ {
            let is_new = self.cqs.insert(qid, (addr, entries)).is_none();
            return if is_new { NvmeStatus::SUCCESS } else { NvmeStatus::INVALID_QID.with_dnr() };
        }
        let Some((cq, cq_entries)) = self.cqs.get(&qid).copied() else { return NvmeStatus::INVALID_CQ.with_dnr() };
        let pair = self.pair(qid, addr, entries, cq, cq_entries);
        self.queues.insert(qid, pair);
        NvmeStatus::SUCCESS
    }

    /// Completes a pending I/O command, with its data on success.
    pub fn complete(&mut self, number: usize, status: NvmeStatus) {
        let pending = self.pending.remove(number);
        let status = if status.is_success() { self.transfer(&pending.sqe) } else { status };
        self.answer_io(pending, status);
    }

    /// Writes the first completion of the queue of a pending command, under another identifier.
    pub fn complete_as(&mut self, number: usize, cid: u16) {
        let qid = self.pending[number].qid;
        let (addr, entries) = self.cqs[&qid];
        let ring = self.view(addr, usize::from(entries) * 16);
        ring.store_u64s(0, Cqe::new(cid, qid, 1, NvmeStatus::SUCCESS, 0, true).0, std::sync::atomic::Ordering::Release);
    }

    /// Whether it can access no memory.
    pub fn is_silent(&self) -> bool {
        !self.ready || self.shutdown() == SHUTDOWN_COMPLETE
    }

    /// Transfers the data of a command, whether or not the command will be completed.
    pub fn transfer(&mut self, sqe: &Sqe) -> NvmeStatus {
        self.remap();
        let Some(namespace) = self.namespaces.get(&sqe.nsid()) else { return NvmeStatus::INVALID_NAMESPACE.with_dnr() };
        let format = NamespaceFormat {
            nsid: sqe.nsid(),
            blocks: namespace.blocks,
            block_shift: namespace.current_format().unwrap().block_shift,
            read_only: false,
        };
        let mut bio = Bio::with_capacity(16);
        match self.parser.parse(sqe, &format, &self.map, &mut bio) {
            Ok(IoCommand::Bio) if matches!(sqe.opcode(), io::READ | io::WRITE) => {}
            Ok(_) => return NvmeStatus::SUCCESS,
            Err(status) => {
                self.violations.push(format!("a command was refused: {status}"));
                return status;
            }
        }
        let key = u64::from(sqe.nsid()) << 48 | bio.sector;
        for segment in &bio.segments {
            let span = self.map.table().resolve(*segment).unwrap();
            let page = span.as_ptr() as u64 / PAGE as u64;
            if !self.lent.borrow().contains(&page) {
                self.violations.push(format!("{:?} reached page {page:#x} that was given back", bio.op));
            }
            // One word represents the data of a request.
            if bio.op == Op::Read {
                let word = self.disk.get(&key).copied().unwrap_or(0);
                span.part(0, 8).copy_from_slice(&word.to_le_bytes());
            } else {
                let mut word = [0; 8];
                span.part(0, 8).copy_to_slice(&mut word);
                self.disk.insert(key, u64::from_le_bytes(word));
            }
        }
        NvmeStatus::SUCCESS
    }

    /// A copy of mapped memory.
    pub fn memory(&mut self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.view(addr, len.next_multiple_of(PAGE)).span(0, len).unwrap().copy_to_slice(&mut bytes);
        bytes
    }

    fn answer_io(&mut self, io: PendingIo, status: NvmeStatus) {
        if let Some(pair) = self.queues.get_mut(&io.qid) {
            pair.complete(io.token, status, 0);
        }
    }

    /// Number of I/O queues.
    pub fn queue_count(&self) -> usize {
        self.queues.len()
    }

    /// Number of admin commands of this opcode so far.
    pub fn count(&self, opcode: u8) -> usize {
        self.log.iter().filter(|sqe| sqe.opcode() == opcode).count()
    }
}

impl Peer for FakeController {
    fn at(&mut self, now_ns: u64) {
        self.follow(now_ns);
    }

    fn turn(&mut self, now_ns: u64) {
        self.serve(now_ns);
    }

    fn read32(&mut self, offset: usize) -> u32 {
        if self.gone {
            return u32::MAX;
        }
        let cap = self.cap.bits();
        let shutdown = self.shutdown();
        match offset {
            CAP => cap as u32,
            offset if offset == CAP + 4 => (cap >> 32) as u32,
            CC => self.config,
            CSTS => {
                let (ready, fatal, subsystem_reset) = (self.ready, self.fatal, self.subsystem_reset);
                ControllerStatus { ready, fatal, shutdown, subsystem_reset, ..ControllerStatus::default() }.bits()
            }
            CRTO => self.crto,
            other => panic!("register {other:#x}"),
        }
    }

    fn write32(&mut self, offset: usize, value: u32) {
        let half = |whole: &mut u64, shift: u32| {
            *whole = *whole & !(0xffff_ffff << shift) | u64::from(value) << shift;
        };
        match offset {
            _ if self.gone => {}
            CC => self.set_config(value),
            CSTS => self.subsystem_reset &= value & SUBSYSTEM_RESET == 0,
            AQA => self.aqa = value,
            ASQ => half(&mut self.asq, 0),
            at if at == ASQ + 4 => half(&mut self.asq, 32),
            ACQ => half(&mut self.acq, 0),
            at if at == ACQ + 4 => half(&mut self.acq, 32),
            at if at >= DOORBELLS => {
                assert!(!self.shares_doorbells);
                self.doorbell_writes.push((at - DOORBELLS, value));
                self.doorbells.store_u32(at - DOORBELLS, value, std::sync::atomic::Ordering::Release);
            }
            other => panic!("register {other:#x}"),
        }
    }

    fn doorbells(&self) -> Option<View> {
        self.shares_doorbells.then(|| self.doorbells.clone())
    }

    fn doorbell_bytes(&self) -> usize {
        self.doorbell_bytes
    }

    fn vectors(&self) -> u16 {
        self.vectors
    }

    fn reset_function(&mut self) -> bool {
        if !self.can_reset_function {
            return false;
        }
        self.function_resets += 1;
        (self.never_idle, self.never_ready, self.fatal, self.mute) = (false, false, false, false);
        (self.config, self.ready, self.ready_at_ns, self.shut_down_at_ns) = (0, false, None, None);
        self.forget();
        true
    }

    fn is_silent_when_gone(&self) -> bool {
        !self.lingers
    }

    fn reaches_memory(&self) -> bool {
        self.reaches_memory
    }

    fn lent(&self) -> Rc<RefCell<HashSet<u64>>> {
        Rc::clone(&self.lent)
    }

    fn violations(&self) -> Vec<String> {
        self.violations.clone()
    }
}
