//! Queue pairs of the modelled device: the product's NVMe rings and controller, whose commands a model times.
//!
//! The host's half is for the driver of each mode. The controller's half fetches, parses and completes as the product
//! does. Neither knows the time; no data moves.

use std::sync::Arc;

use blkyard_mem::{Region, RegionTable};
use blkyard_mq::{DeviceInfo, SECTOR_SHIFT};
use blkyard_nvme::{
    IdentifyController, IdentifyNamespace, IoCommand, LbaFormat, LoopbackBuffers, LoopbackController, LoopbackQueue,
    NvmeLoopbackConfig, NvmeStatus,
};
use blkyard_sim::DeviceModel;

use super::end::{CAPACITY_SECTORS, IO_BYTES};

/// List pages of a queue; no command of this load needs one.
const LIST_PAGES: u16 = 5;

/// The host's half of a queue pair, with the namespace behind it.
#[derive(Debug)]
pub(crate) struct StudyQueuePair {
    pub(crate) queue: LoopbackQueue,
    pub(crate) info: Arc<DeviceInfo>,
}

/// The controller's half.
#[derive(Debug)]
pub(crate) struct StudyController(LoopbackController<()>);

/// A queue pair of the model's size, whose commands may carry data of `bios` bios.
///
/// # Panics
/// If the system has no memory left.
pub(crate) fn queue_pair(model: DeviceModel, bios: usize) -> (StudyQueuePair, StudyController) {
    let mut namespace =
        IdentifyNamespace { blocks: CAPACITY_SECTORS, capacity: CAPACITY_SECTORS, ..IdentifyNamespace::default() };
    namespace.set_lba_format(0, LbaFormat { block_shift: SECTOR_SHIFT as u8, ..LbaFormat::default() });
    let config = NvmeLoopbackConfig {
        controller: IdentifyController::default(),
        namespace,
        entries: model.ring_entries as u16,
        list_pages: LIST_PAGES,
        has_shadow: false,
        buffers: LoopbackBuffers::default(),
    };
    let opened = Region::anonymous(bios * IO_BYTES as usize)
        .and_then(|data| LoopbackQueue::open(&config, &RegionTable::new(vec![data]), ()));
    let (queue, controller, info) = opened.unwrap_or_else(|error| panic!("memory of a queue pair: {error}"));
    (StudyQueuePair { queue, info: Arc::new(info) }, StudyController(controller))
}

impl StudyController {
    /// Fetches and parses the next command that the doorbell has announced. Returns its token.
    #[inline]
    pub(crate) fn fetch(&mut self) -> Option<u16> {
        let (token, parsed) = self.0.fetch()?;
        assert_eq!(parsed, Ok(IoCommand::Bio), "a command of the study is valid");
        Some(token)
    }

    /// Completes a command in flight.
    #[inline]
    pub(crate) fn complete(&mut self, token: u16) {
        self.0.complete(token, NvmeStatus::SUCCESS);
    }
}

/// The device's queue pairs, by number.
#[derive(Debug)]
pub(crate) struct StudyControllers {
    model: DeviceModel,
    controllers: Vec<StudyController>,
}

impl StudyControllers {
    pub(crate) fn new(model: DeviceModel) -> StudyControllers {
        StudyControllers { model, controllers: Vec::new() }
    }

    /// Makes one more queue pair, for at most `bios` bios.
    pub(crate) fn open(&mut self, bios: usize) -> StudyQueuePair {
        let (queue, controller) = queue_pair(self.model, bios);
        self.controllers.push(controller);
        queue
    }

    pub(crate) fn len(&self) -> usize {
        self.controllers.len()
    }

    pub(crate) fn get(&mut self, queue: usize) -> &mut StudyController {
        &mut self.controllers[queue]
    }
}

#[cfg(test)]
mod tests {
    use blkyard_mq::{Bio, HwQueue};
    use blkyard_sim::Rng;

    use super::*;
    use crate::study::end::{config, fill};

    #[test]
    fn a_bio_crosses_the_driver_and_the_controller() {
        let model = DeviceModel { ring_entries: 4, ..DeviceModel::NVME_2013 };
        let (StudyQueuePair { queue, info }, mut controller) = queue_pair(model, 3);
        let mut hw = HwQueue::new(queue.into_driver(), info, config(3, 3));
        for slot in 0..3 {
            let mut bio = Bio::with_capacity(1);
            fill(&mut bio, slot, &mut Rng::new(7));
            bio.cookie = slot as u64;
            hw.submit(bio);
        }
        assert_eq!((controller.fetch(), hw.issue(&mut (), 1)), (None, 3));
        let tokens: Vec<_> = std::iter::from_fn(|| controller.fetch()).collect();
        assert_eq!(tokens.len(), 3);
        controller.complete(tokens[1]);
        controller.complete(tokens[0]);
        let mut ended = Vec::new();
        hw.reap(&mut (), 2, &mut |bio| ended.push((bio.cookie, bio.status)));
        assert_eq!(ended, [(1, blkyard_mq::Status::Ok), (0, blkyard_mq::Status::Ok)]);
        controller.complete(tokens[2]);
        hw.reap(&mut (), 3, &mut |bio| ended.push((bio.cookie, bio.status)));
    }
}
