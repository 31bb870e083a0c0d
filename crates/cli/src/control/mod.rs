//! The control socket of a daemon: how `inspect` looks at one that runs, and `set` changes it.
//!
//! A thread of its own answers there. No I/O passes through it, and while nobody asks it costs nothing: counters are
//! read where they are, and what only the owner of a queue knows is asked of it when somebody wants to know.

mod client;
mod daemon;
mod place;
mod server;
mod target;
mod wire;

use std::sync::Arc;

use blkyard_export::BoundSocket;

pub(crate) use client::connect;
pub use client::{AskError, INSPECT_TIMEOUT_S, SET_TIMEOUT_S, TIMEOUT_S_MAX, ask};
pub use daemon::{Daemon, ServedDevice, ServedExport};
pub use place::ControlPlace;
pub use server::{Answer, ControlServer};
pub use target::{Kind, Target};
pub use wire::Wish;
pub(crate) use wire::{answer_line, parse_answer, parse_request, request_line};

use crate::takeover::{self, Given};
use crate::{inspect, set};

/// Answers for a daemon at a socket, from now on.
///
/// # Errors
/// The system gives no thread or descriptor.
pub fn serve(socket: Arc<BoundSocket>, daemon: Arc<Daemon>) -> std::io::Result<ControlServer> {
    ControlServer::start(Arc::clone(&socket), move |wish, client| {
        Answer::Say(match wish {
            Wish::Inspect => serde_json::to_value(inspect::collect(&daemon)).map_err(|error| error.to_string()),
            Wish::Set { what, values } => set::apply(&daemon, &what, values).map(Into::into),
            Wish::Takeover { version } => match takeover::give(&daemon, &socket, client, version) {
                Given::Gone => return Answer::Last,
                Given::Kept(why) => Err(why),
            },
            Wish::Taken => Err("nothing is being handed over; ask for it with blkyard serve --takeover".into()),
        })
    })
}
