//! A session as messages for the next process.
//!
//! Valid order: features before their users, memory before rings, kicks last, since a kick descriptor starts its ring.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use blkyard_sys::EventFd;
use blkyard_virtio::Features;
use vhost::vhost_user::message::{FrontendReq, VhostUserProtocolFeatures, VhostUserVringAddrFlags};

use super::Backend;
use super::rings::{Kick, Vring};
use crate::vhost_user::wire::Message;

/// Bit of a kick, call or error message without a descriptor.
const NO_DESCRIPTOR: u64 = 0x100;
/// Mask of the ring index in such a message.
const INDEX_MASK: u32 = 0xff;

/// Ring index of a kick message.
fn kicked(message: &Message) -> Option<usize> {
    let is_kick = message.request() == Some(FrontendReq::SET_VRING_KICK.into());
    message.body_word().filter(|_| is_kick).map(|word| (word & INDEX_MASK) as usize)
}

impl Backend {
    /// The messages that create this session, and those that then start its queues. The queues are drained.
    ///
    /// # Errors
    /// The system has no descriptors left.
    pub(crate) fn session_messages(&self) -> io::Result<(Vec<Message>, Vec<Message>)> {
        let mut setup = vec![Message::new(FrontendReq::GET_FEATURES, &[], Vec::new())];
        let mut say = |request, body: &[u8], files| setup.push(Message::new(request, body, files));
        if self.protocol.is_some() {
            say(FrontendReq::SET_PROTOCOL_FEATURES, &words64(&[self.protocol_ever]), Vec::new());
        }
        // Unset features are not sent: an empty set would enable every ring.
        if !self.features.is_empty() || self.vrings.iter().any(|vring| vring.enabled) {
            say(FrontendReq::SET_FEATURES, &words64(&[self.features.bits()]), Vec::new());
        }
        if self.protocol_ever & VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS.bits() != 0 {
            for (region, file) in self.memory.announced() {
                say(FrontendReq::ADD_MEM_REG, &words64(&[&[0], &region.words()[..]].concat()), vec![file?]);
            }
        } else if self.memory.extent().0 > 0 {
            let mut body = words64(&[self.memory.extent().0 as u64]);
            let mut files = Vec::new();
            for (region, file) in self.memory.announced() {
                body.extend(words64(&region.words()));
                files.push(file?);
            }
            say(FrontendReq::SET_MEM_TABLE, &body, files);
        }
        if let Some(records) = &self.records {
            let (body, file) = records.announced()?;
            say(FrontendReq::SET_INFLIGHT_FD, &body, vec![file]);
        }
        if let Some(log) = &self.log {
            let region = log.region();
            let Some((file, offset)) = region.file() else { unreachable!("a log is kept in a file") };
            say(FrontendReq::SET_LOG_BASE, &words64(&[region.len() as u64, offset]), vec![file.try_clone_to_owned()?]);
        }
        if let Some(eventfd) = &self.log_eventfd {
            say(FrontendReq::SET_LOG_FD, &[], vec![eventfd.as_fd().try_clone_to_owned()?]);
        }
        if let Some(channel) = &self.channel {
            say(FrontendReq::SET_BACKEND_REQ_FD, &[], vec![channel.end().try_clone()?]);
        }
        // Replaces the union above, which the previous messages needed, by the negotiated set.
        if let Some(protocol) = self.protocol {
            say(FrontendReq::SET_PROTOCOL_FEATURES, &words64(&[protocol]), Vec::new());
        }
        let mut run = Vec::new();
        for (index, vring) in self.vrings.iter().enumerate() {
            self.tell_of(index as u32, vring, &mut setup, &mut run)?;
        }
        Ok((setup, run))
    }

    /// Opens the queues that these messages will start, which takes long. No queue runs yet.
    ///
    /// # Errors
    /// A queue cannot be opened: object, cause, cure.
    pub(crate) fn open_queues(&self, run: &[Message]) -> Result<(), String> {
        let is_ready = |index: &usize| {
            self.vrings.get(*index).is_some_and(|ring| ring.enabled && ring.size > 0 && ring.addresses.is_some())
        };
        run.iter().filter_map(kicked).filter(is_ready).try_for_each(|index| self.config.queues[index].open())
    }

    fn tell_of(&self, index: u32, vring: &Vring, setup: &mut Vec<Message>, run: &mut Vec<Message>) -> io::Result<()> {
        let mut say = |request, body: &[u8]| setup.push(Message::new(request, body, Vec::new()));
        if vring.size > 0 {
            say(FrontendReq::SET_VRING_NUM, &words32(&[index, vring.size.into()]));
        }
        if let Some([descriptors, available, used]) = vring.addresses {
            let logged = vring.log_at.map_or(0, |_| VhostUserVringAddrFlags::VHOST_VRING_F_LOG.bits());
            let log_at = vring.log_at.unwrap_or(0);
            let body = [words32(&[index, logged]), words64(&[descriptors, used, available, log_at])].concat();
            say(FrontendReq::SET_VRING_ADDR, &body);
        }
        if let Some(base) = vring.base {
            say(FrontendReq::SET_VRING_BASE, &words32(&[index, base.bits()]));
        }
        if self.features.contains(Features::PROTOCOL_FEATURES) {
            say(FrontendReq::SET_VRING_ENABLE, &words32(&[index, vring.enabled.into()]));
        }
        setup.push(event(FrontendReq::SET_VRING_CALL, index, vring.call.as_deref())?);
        setup.push(event(FrontendReq::SET_VRING_ERR, index, vring.error.as_deref())?);
        match &vring.kick {
            Kick::Unknown => {}
            Kick::Polled => run.push(event(FrontendReq::SET_VRING_KICK, index, None)?),
            Kick::Rung(kick) => run.push(event(FrontendReq::SET_VRING_KICK, index, Some(kick))?),
        }
        Ok(())
    }
}

fn event(request: FrontendReq, index: u32, event: Option<&EventFd>) -> io::Result<Message> {
    let word = u64::from(index) | if event.is_some() { 0 } else { NO_DESCRIPTOR };
    let files = event.map(|event| event.as_fd().try_clone_to_owned()).transpose()?;
    Ok(Message::new(request, &words64(&[word]), files.into_iter().collect::<Vec<OwnedFd>>()))
}

fn words32(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn words64(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}
