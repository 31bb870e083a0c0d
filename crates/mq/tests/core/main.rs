//! The queue core by worked examples: each rule of blk-mq that it keeps, shown on a device driven by hand.
//! `docs/queue-core.md` says which test shows which rule.
#![cfg(not(any(loom, shuttle)))]

mod control;
mod flush;
mod hand;
mod latency;
mod merge;
mod order;
mod promise;
mod rate;
mod restart;
mod rounds;
mod sched;
mod share;
mod tags;
mod timeout;
