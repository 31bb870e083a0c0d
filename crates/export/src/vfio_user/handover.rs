//! Handover of a session with its controller: plain data beside descriptors.
//!
//! The controller is handed over at rest: queues are drained, and the requests of its admin side are executed. The
//! next process maps the same memory, signals the same eventfds and continues with the same positions of each ring. A
//! message that has not been read stays in the socket, which both processes have.
//!
//! Owned by the session. What the data means is said in `nvme` for the controller, in `pci.rs` and `memory.rs` for the
//! rest.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use blkyard_mem::Region;
use blkyard_nvme::registers::DOORBELLS;
use blkyard_nvme::{Controller, ControllerRequest, ControllerSnapshot};
use blkyard_sys::EventFd;
use serde::{Deserialize, Serialize};

use super::device::{NvmeFunction, options};
use super::doorbells::{DoorbellEventfds, doorbell_bytes, registers_in};
use super::memory::{DmaMappingSnapshot, DmaSlots};
use super::pci::PciSnapshot;
use super::queue::ReplyQueue;
use super::{NvmeDoorbells, VfioUserExport};
use crate::core::ExportLog;

/// Version of [`VfioSessionRecord`], incremented by every incompatible change.
pub const VFIO_STATE_VERSION: u32 = 3;

/// A session with drained queues.
#[derive(Debug)]
pub struct VfioSessionState {
    /// The connection.
    pub connection: OwnedFd,
    /// Its state.
    pub record: VfioSessionRecord,
    /// Descriptors in the order of the state: those of the received part of a message, files of memory, eventfds of
    /// vectors, the file of the doorbells, their eventfds.
    pub files: Vec<OwnedFd>,
}

/// State of a session beside its descriptors.
#[derive(Debug, Serialize, Deserialize)]
pub struct VfioSessionRecord {
    /// Number of queues offered to the client.
    pub(super) queues: u16,
    /// Received part of a message, and the number of its descriptors.
    pub(super) part: Vec<u8>,
    pub(super) part_files: usize,
    pub(super) is_unshared_told: bool,
    /// Unset before the version is negotiated.
    pub(super) function: Option<NvmeFunctionRecord>,
}

/// State of a controller and its PCI function beside its descriptors.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct NvmeFunctionRecord {
    pci: PciSnapshot,
    dma: Vec<DmaMappingSnapshot>,
    /// Whether each vector has an eventfd.
    vectors: Vec<bool>,
    /// Whether the client maps the doorbells and signals nothing.
    is_polled: bool,
    /// Number of eventfds of doorbells.
    doorbell_eventfds: usize,
    time_ns: u64,
    controller: ControllerSnapshot,
}

impl NvmeFunction {
    /// Drains all queues and saves the state; adds duplicates of the descriptors.
    pub(super) fn hand_over(
        &mut self,
        config: &VfioUserExport,
        files: &mut Vec<OwnedFd>,
    ) -> Result<NvmeFunctionRecord, String> {
        self.quiesce(config).map_err(|error| error.to_string())?;
        let said = |error: io::Error| error.to_string();
        let slots: Vec<_> = self
            .queues
            .iter()
            .flatten()
            .map(|queue| queue.slot.lock().unwrap_or_else(PoisonError::into_inner))
            .collect();
        let queues = slots.iter().filter_map(|slot| slot.as_deref());
        let controller = self.controller.snapshot(queues).map_err(|error| error.to_string())?;
        drop(slots);
        let dma = self.dma.snapshot(files).map_err(said)?;
        for eventfd in self.vectors.iter().flatten() {
            files.push(eventfd.as_fd().try_clone_to_owned().map_err(said)?);
        }
        let (file, _) = self.registers.region().file().ok_or("its doorbells have no file")?;
        files.push(file.try_clone_to_owned().map_err(said)?);
        for eventfd in self.doorbell_eventfds.iter() {
            files.push(eventfd.as_fd().try_clone_to_owned().map_err(said)?);
        }
        Ok(NvmeFunctionRecord {
            pci: self.pci.snapshot(&self.reset_pci(config)),
            dma,
            vectors: self.vectors.iter().map(Option::is_some).collect(),
            is_polled: self.is_polled,
            doorbell_eventfds: self.doorbell_eventfds.iter().len(),
            time_ns: self.time_ns(Instant::now()),
            controller,
        })
    }

    /// A controller from its handover state; its descriptors are next in `files`. Its queues run from the next
    /// [`NvmeFunction::update`] on.
    pub(super) fn take_over(
        config: &VfioUserExport,
        parts: (&Arc<ReplyQueue>, &Arc<ExportLog>),
        record: &NvmeFunctionRecord,
        files: &mut impl Iterator<Item = OwnedFd>,
    ) -> Result<NvmeFunction, String> {
        let disk = &config.disk;
        let dma = DmaSlots::restore(&record.dma, files)?;
        let mut file = || files.next().ok_or_else(|| "descriptors are missing".to_owned());
        let eventfd = |file| EventFd::from_foreign(file).map(Arc::new).map_err(|error| error.to_string());
        let mut vectors = Vec::with_capacity(record.vectors.len());
        for has_eventfd in &record.vectors {
            vectors.push(if *has_eventfd { Some(eventfd(file()?)?) } else { None });
        }
        if vectors.len() != usize::from(disk.io_queues()) + 1 {
            return Err(format!("it has {} vectors, and {} were made", vectors.len(), disk.io_queues() + 1));
        }
        if record.is_polled != (disk.doorbells == NvmeDoorbells::Shared) || record.doorbell_eventfds > vectors.len() {
            return Err("its doorbells are not those of this export".into());
        }
        let len = DOORBELLS + doorbell_bytes(disk);
        let region = Region::map_file(file()?.as_fd(), 0, len as u64).map_err(|error| error.to_string())?;
        let registers = registers_in(region);
        let mut doorbell_eventfds = Vec::with_capacity(record.doorbell_eventfds);
        for _ in 0..record.doorbell_eventfds {
            doorbell_eventfds.push(eventfd(file()?)?);
        }
        let saved = &record.controller;
        let controller = Controller::restore(options(disk), registers.clone(), &dma.map(), disk.table(), saved);
        let controller = controller.map_err(|error| error.to_string())?;
        let mut function = NvmeFunction::with(config, parts, registers, dma, controller);
        function.pci.restore(&record.pci).ok_or("its PCI function has other registers")?;
        function.vectors = vectors;
        function.doorbell_eventfds = DoorbellEventfds::of(doorbell_eventfds);
        // The host may have missed the last interrupts of the other process.
        function.is_admin_call_pending = function.controller.is_processing();
        function.before_ns = record.time_ns.max(saved.now_ns());
        while let Some(request) = function.controller.take_request() {
            let ControllerRequest::Create(queue) = request else { continue };
            let (cqid, place) = (queue.cqid(), usize::from(queue.cqid()) - 1);
            // A failure must be found while the other process still serves.
            config.queues[place].open()?;
            function.create(queue);
            if let Some(queue) = &mut function.queues[place] {
                (queue.is_new, queue.is_call_new) = (saved.is_creating(cqid), true);
            }
        }
        Ok(function)
    }
}
