//! The tests of this crate from outside, in one program: a program each would take as long to link as to run.
//!
//! Beside it is the test of a daemon in this process whose thread panics.
#![forbid(unsafe_code)]

mod attached;
#[path = "../common/back_end.rs"]
mod back_end;
#[path = "../common/mod.rs"]
mod common;
mod cross_reset;
mod ending;
mod figures;
mod foreign_descriptors;
#[path = "../common/fuse.rs"]
mod fuse;
mod ghost_writes;
#[path = "../common/guest.rs"]
mod guest;
mod hung_device;
mod idle_exports;
mod image_blocks;
mod killed_daemon;
#[path = "../../../os/tests/common/loop_device.rs"]
mod loop_device;
#[path = "../../../attach/tests/common/lossy.rs"]
mod lossy;
mod many_exports;
mod multipath;
mod nvme;
mod nvme_abort;
mod nvme_auth;
mod nvme_discover;
mod nvme_exports;
mod nvme_foreign;
#[path = "../common/nvme_guest.rs"]
mod nvme_guest;
mod nvme_namespaces;
mod nvme_ports;
mod nvme_restarts;
mod nvme_takeover;
mod nvme_tcp;
mod nvme_tcp_takeover;
#[cfg(feature = "tls")]
mod nvme_tls;
mod nvme_waits;
mod output;
mod paths;
mod queue_kinds;
mod registered;
mod serve;
mod silence;
mod streams;
mod suspend;
mod takeover;
#[path = "../common/tcp_host.rs"]
mod tcp_host;
mod virtqueues;
#[path = "../../../attach/tests/common/wire.rs"]
mod wire;
