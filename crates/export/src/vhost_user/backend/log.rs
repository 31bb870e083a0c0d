//! The log of written pages: its memory, its entries, and the eventfd that announces them. [vhost-user, Migration]
//!
//! The message with the eventfd is handled here because the message layer refuses it.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;

use blkyard_mem::Region;
use blkyard_virtio::{DirtyLog, Features, GuestMemory, packed_ring_bytes, ring_bytes};
use vhost::vhost_user::message::{FrontendReq, VhostUserLog, VhostUserProtocolFeatures};
use vhost::vhost_user::{Error, Result};

use super::Backend;
use super::rings::Vring;
use crate::vhost_user::memory::check_bytes;
use crate::vhost_user::notes::Notes;
use crate::vhost_user::wire::Message;

impl Backend {
    /// Sets the log of written pages.
    pub(super) fn keep_log(&mut self, log: &VhostUserLog, file: &File) -> Result<()> {
        check_bytes(&[self.memory.extent().1, self.record_bytes(), log.mmap_size])
            .map_err(|error| self.refuse("the dirty log", error))?;
        let region = Region::map_file(file.as_fd(), log.mmap_offset, log.mmap_size);
        let log = region.map(DirtyLog::new).map_err(|error| self.refuse("the dirty log", error))?;
        self.change_log(|ours| ours.log = log.map(Arc::new))
    }

    /// Bytes of the log.
    pub(super) fn log_bytes(&self) -> u64 {
        self.log.as_ref().map_or(0, |log| log.region().len() as u64)
    }

    /// Handles the message with the log's eventfd. Returns the requested reply, and whether the session can continue.
    pub(crate) fn handle_log_eventfd(&mut self, message: &Message) -> (Message, Result<()>) {
        let outcome = self.set_log_eventfd(message);
        let acknowledges = VhostUserProtocolFeatures::REPLY_ACK.bits();
        let wanted = message.needs_reply() && self.protocol.is_some_and(|taken| taken & acknowledges != 0);
        let answer = wanted.then(|| Message::acknowledgement(FrontendReq::SET_LOG_FD, outcome.is_ok()));
        (answer.unwrap_or_default(), outcome)
    }

    /// The message has no body and one descriptor.
    fn set_log_eventfd(&mut self, message: &Message) -> Result<()> {
        let [eventfd] = &message.files[..] else { return Err(Error::IncorrectFds) };
        if !message.is_bare() {
            return Err(Error::InvalidMessage);
        }
        let eventfd = eventfd.try_clone().map_err(|error| self.refuse("the eventfd of the dirty log", error))?;
        let eventfd = self.event("the eventfd of the dirty log", Some(eventfd.into()))?;
        self.change_log(|ours| ours.log_eventfd = eventfd)
    }

    fn change_log(&mut self, change: impl FnOnce(&mut Backend)) -> Result<()> {
        let running = self.suspend_all()?;
        change(self);
        running.into_iter().try_for_each(|index| self.run_if_ready(index))
    }

    /// Log of a ring's writes, if enabled by the front-end.
    pub(super) fn notes(&self, vring: &Vring, [desc, _, used]: [u64; 3], memory: &GuestMemory) -> Option<Notes> {
        let log = self.log.as_ref().filter(|_| self.features.contains(Features::LOG_ALL))?;
        let ring = match vring.log_at {
            None => Vec::new(),
            // The message gives one address, but the device writes two parts of the ring.
            Some(_) if self.features.contains(Features::RING_PACKED) => {
                let [desc_bytes, _, used_bytes] = packed_ring_bytes(vring.size).map(|(bytes, _)| bytes as u64);
                let area = |addr, bytes| Some((memory.guest_addr_of_user(addr)?, bytes));
                [area(desc, desc_bytes), area(used, used_bytes)].into_iter().flatten().collect()
            }
            Some(at) => vec![(at, ring_bytes(vring.size)[2].0 as u64)],
        };
        Some(Notes::new(Arc::clone(log), ring, self.log_eventfd.clone()))
    }
}
