//! Runs a loom model and says how many orders of events it has.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Explores a model, up to this many preemptions of threads if there is a bound.
pub fn explore(name: &str, preemptions: Option<usize>, model: impl Fn() + Sync + Send + 'static) {
    let orders = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&orders);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(move || {
        counter.fetch_add(1, Ordering::Relaxed);
        model();
    });
    let bound = preemptions.map_or("no bound".into(), |n| format!("at most {n} preemptions"));
    println!("{name}: {} orders, {bound}", orders.load(Ordering::Relaxed));
}
