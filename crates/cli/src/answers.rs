//! Requests at the daemon's control socket: each goes to its command.

use std::sync::Arc;

use blkyard_export::BoundSocket;

use crate::control::{Answer, ControlRequest, ControlServer};
use crate::daemon::Daemon;
use crate::takeover::{self, Given};
use crate::{inspect, set};

/// Answers for a daemon at a socket, from now on.
///
/// # Errors
/// The system gives no thread or descriptor.
pub fn serve(socket: Arc<BoundSocket>, daemon: Arc<Daemon>) -> std::io::Result<ControlServer> {
    ControlServer::start(Arc::clone(&socket), move |request, client| {
        Answer::Say(match request {
            ControlRequest::Inspect => {
                serde_json::to_value(inspect::collect(&daemon)).map_err(|error| error.to_string())
            }
            ControlRequest::Set { what, values } => {
                let daemon = Arc::clone(&daemon);
                return Answer::Run(Box::new(move || set::apply(&daemon, &what, values).map(Into::into)));
            }
            ControlRequest::Takeover { version } => match takeover::give(&daemon, &socket, client, version) {
                Given::Gone => return Answer::Last,
                Given::Kept(why) => Err(why),
            },
            ControlRequest::Taken => Err("no handover is in progress; start one with blkyard serve --takeover".into()),
        })
    })
}
