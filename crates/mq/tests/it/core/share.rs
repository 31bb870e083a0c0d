//! Fair sharing: tags of each of several namespaces behind one queue (Linux `hctx_may_queue`).

use blkyard_mq::{DeviceInfo, HwQueueConfig, Op, Status};

use crate::core::hand::{Bench, bio, disk, of, read};

const LOOK_NS: u64 = 10_000_000;
const IDLE_NS: u64 = 100_000_000;

fn shared(namespaces: usize, depth: usize) -> Bench {
    let config = HwQueueConfig { depth, bios_max: 1000, timeout_ns: 0, ..HwQueueConfig::default() };
    Bench::of((0..namespaces).map(|_| disk()).collect(), config)
}

/// More bios for a namespace than there are tags.
fn burst(bench: &mut Bench, namespace: u16, count: u64) {
    bench.submit_all((0..count).map(|n| of(namespace, read(n * 1000))));
}

fn counts(bench: &mut Bench) -> Vec<usize> {
    let namespaces = bench.snapshot().namespaces.len() as u16;
    (0..namespaces).map(|namespace| bench.device().count_of(namespace)).collect()
}

#[test]
fn a_namespace_alone_has_all_tags() {
    let mut bench = shared(4, 16);
    burst(&mut bench, 2, 30);
    bench.turn();
    assert_eq!(counts(&mut bench), [0, 0, 16, 0]);
    bench.end_all();
}

#[test]
fn each_active_namespace_reaches_an_equal_share_rounded_up_and_four_at_least() {
    for (depth, active, share) in [(16, 2, 8), (16, 3, 6), (7, 2, 4), (16, 8, 4), (12, 3, 4), (3, 2, 3)] {
        // One more namespace is idle: it does not count.
        let mut bench = shared(active + 1, depth);
        bench.submit_all((0..active as u16).map(|namespace| of(namespace, read(0))));
        bench.end_all();
        for namespace in 0..active as u16 {
            burst(&mut bench, namespace, 60);
            bench.turn();
            assert_eq!(bench.device().count_of(namespace), share, "{depth} tags, {active} active");
            bench.end_all();
        }
    }
}

#[test]
fn a_burst_of_one_does_not_keep_out_the_other() {
    let mut bench = shared(2, 16);
    burst(&mut bench, 0, 200);
    bench.turn();
    assert_eq!(counts(&mut bench), [16, 0]);
    burst(&mut bench, 1, 8);
    bench.turn();
    // Each freed tag goes to the newcomer until it has its half.
    for n in 1..=8 {
        bench.device().end(|held| held.namespace == 0, Status::Ok);
        bench.turn();
        assert_eq!(counts(&mut bench), [16 - n, n]);
    }
    bench.end_all();
    assert_eq!(bench.ended.len(), 208);
}

#[test]
fn a_namespace_is_active_from_its_first_bio_though_it_gets_no_tag() {
    let mut bench = shared(2, 16);
    burst(&mut bench, 0, 16);
    bench.turn();
    bench.submit(of(1, read(0)));
    let namespaces = bench.snapshot().namespaces;
    assert_eq!((namespaces[1].tags_held, namespaces[1].active, namespaces[0].tags_max), (0, true, 8));
    bench.submit(of(0, read(50_000)));
    bench.device().end(|_| true, Status::Ok);
    bench.turn();
    assert_eq!(counts(&mut bench), [15, 1]);
    bench.end_all();
}

#[test]
fn who_goes_to_rest_leaves_its_tags_to_the_others_within_a_tenth_of_a_second() {
    let mut bench = shared(2, 16);
    bench.submit(of(1, read(0)));
    burst(&mut bench, 0, 100);
    bench.turn();
    bench.device().end(|held| held.namespace == 1, Status::Ok);
    bench.turn();
    let rest_ns = bench.now_ns;
    assert_eq!(counts(&mut bench), [8, 0]);
    // No completion comes and no timeout is set: still the lane is woken for the scan.
    let mut turns = 0;
    while bench.device().count_of(0) < 16 {
        let due_ns = bench.deadline_ns().expect("the lane sleeps while tags lie idle");
        assert!(due_ns > bench.now_ns, "the lane does not sleep at all");
        bench.turn_at(due_ns);
        turns += 1;
        let late = bench.now_ns > rest_ns + IDLE_NS + LOOK_NS || turns > 2;
        assert!(!late, "{} ns, {turns} turns", bench.now_ns - rest_ns);
    }
    bench.end_all();
}

#[test]
fn who_is_served_at_once_counts_as_active_although_it_never_holds_a_tag_for_long() {
    let mut bench = shared(2, 16);
    bench.submit(of(0, read(0)));
    bench.turn_at(LOOK_NS);
    // A bio between two idle scans, completed by the next.
    for n in 1..40 {
        bench.submit(of(1, read(n * 1000)));
        bench.turn_at(n * LOOK_NS + LOOK_NS / 2);
        bench.device().end(|held| held.namespace == 1, Status::Ok);
        bench.turn();
        bench.turn_at((n + 1) * LOOK_NS);
        assert!(bench.snapshot().namespaces[1].active, "after {n} looks");
    }
    bench.end_all();
}

#[test]
fn a_flush_of_a_namespace_is_its_own() {
    let info = || DeviceInfo { volatile_cache: true, ..disk() };
    let mut bench = Bench::of(vec![info(), info()], HwQueueConfig::default());
    bench.submit_all([of(0, bio(Op::Flush, 0, 0)), of(1, bio(Op::Flush, 0, 0))]);
    bench.turn();
    assert_eq!(counts(&mut bench), [1, 1]);
    let stats = |bench: &Bench, namespace| bench.queue.namespace_stats(namespace).unwrap().snapshot().flushes;
    assert_eq!((stats(&bench, 0), stats(&bench, 1)), (1, 1));
    bench.end_all();
}

#[test]
fn a_bio_for_a_namespace_that_is_not_there_comes_back_invalid() {
    let mut bench = shared(2, 16);
    bench.submit(of(2, read(0)));
    bench.turn();
    assert_eq!(bench.take_ended(), [(0, Status::Invalid)]);
}

#[test]
fn who_refills_as_fast_as_it_is_served_does_not_keep_out_the_other() {
    // Four tags, and a share of four for each: one namespace can have them all.
    let mut bench = shared(2, 4);
    (0..4).for_each(|n| bench.submit(of(0, read(n * 1000))));
    bench.turn();
    bench.submit(of(1, read(0)));
    bench.turn();
    assert_eq!(counts(&mut bench), [4, 0]);
    // They take turns: two tags that come back are one for each.
    for n in 5..7 {
        bench.device().end(|held| held.namespace == 0, Status::Ok);
        bench.reap();
        bench.submit(of(0, read(n * 1000)));
        bench.issue();
    }
    assert_eq!(counts(&mut bench), [3, 1]);
    bench.end_all();
}
