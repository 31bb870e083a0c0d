//! An association without a thread: for an owner who runs it in another clock, as the simulation does.

use std::time::Instant;

use crate::AttachError;
use crate::mailbox::ControlSender;
use crate::nvme_tcp::admin_stream::AdminConnector;
use crate::nvme_tcp::control::TcpControl;
use crate::nvme_tcp::mailbox::TcpCommand;
use crate::nvme_tcp::{TcpNamespace, TcpNamespaceConfig};

/// The control side of a [`TcpNamespace`], run by its owner: all that the control thread does, without waits.
#[derive(Debug)]
pub struct TcpAssociation {
    control: TcpControl,
    /// Until the namespace is found.
    sender: Option<ControlSender<TcpCommand>>,
}

impl TcpAssociation {
    /// Begins to connect.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn start(
        config: TcpNamespaceConfig,
        connector: Box<dyn AdminConnector>,
    ) -> Result<TcpAssociation, AttachError> {
        let (mut control, sender) = TcpNamespace::control(config, connector)?;
        control.start();
        Ok(TcpAssociation { control, sender: Some(sender) })
    }

    /// Handles all that is due. False once the namespace and its queues are dropped and the controller is disconnected.
    pub fn run_once(&mut self) -> bool {
        self.control.run_once()
    }

    /// Latest time of the next call: sooner when its stream or a queue has something.
    pub fn deadline(&self) -> Option<Instant> {
        self.control.deadline()
    }

    /// The namespace, once: when it is found. It is dropped before this.
    ///
    /// # Errors
    /// The first attempt has failed.
    pub fn take_namespace(&mut self) -> Result<Option<TcpNamespace>, AttachError> {
        if self.sender.is_some()
            && let Some(failure) = self.control.failure()
        {
            return Err(failure);
        }
        let sender = self.sender.take_if(|_| self.control.namespace().is_some());
        Ok(sender.map(|sender| TcpNamespace::of(&self.control, sender)))
    }
}
