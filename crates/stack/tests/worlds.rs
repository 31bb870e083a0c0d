//! Worlds are repeatable, and their oracles find the faults that a world is given.

use std::panic::catch_unwind;

use blkyard_stack::{StackOptions, run_stack};

/// Worlds in which a fault of the world must be found.
const SEEDS: u64 = 200;

/// Whether an oracle finds something in one of the worlds with these options.
fn is_found(options: &str) -> bool {
    (0..SEEDS).any(|seed| {
        let mut drawn = StackOptions::draw(seed);
        options.split(' ').for_each(|option| drawn.set(option).unwrap());
        catch_unwind(move || run_stack(seed, drawn)).is_err()
    })
}

#[test]
fn the_same_seed_makes_the_same_world_to_the_bit() {
    for seed in 0..6 {
        let [one, other] = [0; 2].map(|_| run_stack(seed, StackOptions::draw(seed)));
        assert_eq!(one, other);
        assert_ne!(one.fingerprint, run_stack(seed + 100, StackOptions::draw(seed)).fingerprint);
    }
}

#[test]
fn honest_worlds_with_all_faults_come_to_a_good_end() {
    let (mut faults, mut ghosts) = ([0; blkyard_stack::FAULT_KINDS], 0);
    let (mut hedges_won, mut handovers) = (0, 0);
    for seed in 2000..2060 {
        let result = run_stack(seed, StackOptions { kinds: 0x1ff, ..StackOptions::draw(seed) });
        faults.iter_mut().zip(result.faults).for_each(|(sum, one)| *sum += one);
        ghosts += result.ghosts;
        hedges_won += result.hedges_won;
        handovers += result.handovers;
        assert_eq!(result.failed, 0, "seed {seed}: a request failed though all faults end");
    }
    assert!(faults.iter().all(|count| *count > 20) && ghosts > 0, "{faults:?}, {ghosts} late pieces");
    assert!(
        hedges_won > 20 && handovers > 5,
        "{hedges_won} hedged reads came first, {handovers} daemons were replaced"
    );
}

/// Bytes of connections that were given up arrive well before the target has ended their association.
const LATE_BYTES: &str = "paths=2 resets=0 blocks=6 kinds=4 keep_alive_ms=5000 timeout_ms=1000 faults=16";

#[test]
fn a_path_that_is_said_to_be_fenced_too_early_is_found() {
    assert!(is_found(&format!("mutation=skip-fence {LATE_BYTES}")));
}

#[test]
fn the_host_waits_out_the_silence_of_a_lost_path() {
    assert!(!is_found(LATE_BYTES));
}

#[test]
fn requests_of_a_dead_daemon_in_another_order_are_found() {
    assert!(is_found("mutation=reorder paths=1 kinds=144 faults=16 fault_every_ms=500"));
}

#[test]
fn a_device_that_ignores_flushes_is_found() {
    assert!(is_found("mutation=ignore-flush kinds=64 fua=0"));
}

#[test]
fn a_retry_while_the_target_is_not_silent_is_found() {
    assert!(is_found(
        "mutation=no-silence paths=2 resets=0 kinds=4 keep_alive_ms=1000 timeout_ms=1000 fault_every_ms=500 faults=16"
    ));
}

#[test]
fn requests_of_a_dead_daemon_that_do_not_wait_are_found() {
    assert!(is_found("mutation=no-pause blocks=6 kinds=144 faults=16 fault_every_ms=500"));
}

/// Two paths that stall, below short timeouts.
const STALLS: &str = "paths=2 resets=0 blocks=6 keep_alive_ms=1000 timeout_ms=1000 fault_every_ms=500 faults=16";

#[test]
fn a_stopped_target_that_goes_on_with_its_past_is_found() {
    assert!(is_found(&format!("mutation=no-deadline kinds=12 ios=400 rings=2 {STALLS}")));
    assert!(!is_found(&format!("mutation=no-hold kinds=14 {STALLS}")), "the look at the timer suffices");
}

#[test]
fn a_target_that_does_not_wait_for_a_hung_device_is_found() {
    assert!(is_found(&format!("mutation=no-hold kinds=30 {STALLS}")));
}

#[test]
fn hangs_of_any_length_lose_no_write() {
    for options in [format!("kinds=30 {STALLS}"), "blocks=6 kinds=144 faults=16 fault_every_ms=500".into()] {
        assert!(!is_found(&options), "{options}");
    }
}
