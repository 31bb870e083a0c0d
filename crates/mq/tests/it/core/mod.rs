//! The queue core by worked examples: each rule of blk-mq that it keeps, on a scripted device. `docs/queue-core.md`
//! maps rules to tests.

mod buffers;
mod cancel;
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
mod take;
mod timeout;
