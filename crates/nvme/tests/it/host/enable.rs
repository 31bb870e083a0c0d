//! The register sequences: their writes, time limits and failures.

use blkyard_nvme::registers::{CAP, CC, Capabilities, ControllerConfig};
use blkyard_nvme::{AdminRings, ControllerTransport, Disable, Enable, HostStep, NvmeHostError, Silence};

use crate::host::fake::FakeTransport;
use crate::host::peer::Peer;

const MS: u64 = 1_000_000;

/// Memory for admin rings, mapped.
fn rings(transport: &FakeTransport) -> (AdminRings, blkyard_mem::DmaMapping) {
    let region = blkyard_mem::Region::anonymous(8192).unwrap();
    let mapping = transport.dma_domain().map(vec![std::sync::Arc::clone(&region)]);
    let addr = transport.dma_addr(&region, 0).unwrap();
    (AdminRings { sq_addr: addr, cq_addr: addr + 4096, entries: 32 }, mapping)
}

/// Steps until the sequence ends; returns the result and the time. The clock follows its deadlines.
fn run(transport: &mut FakeTransport, mut advance: impl FnMut(&mut FakeTransport, u64) -> HostStep) -> (HostStep, u64) {
    let mut now_ns = transport.fake.borrow().now_ns;
    for _ in 0..200_000 {
        transport.fake.borrow_mut().at(now_ns);
        match advance(transport, now_ns) {
            HostStep::Wait { deadline_ns } => {
                assert!(deadline_ns > now_ns, "a wait that is over");
                now_ns = deadline_ns;
            }
            end => return (end, now_ns),
        }
    }
    panic!("the sequence does not end");
}

fn enable(transport: &mut FakeTransport) -> (HostStep, u64) {
    let (rings, mapping) = rings(transport);
    let mut enable = Enable::new(rings);
    let end = run(transport, |transport, now_ns| enable.advance(transport, now_ns));
    // The controller uses the rings until it is disabled.
    std::mem::forget(mapping);
    end
}

fn disable(transport: &mut FakeTransport, shutdown_ns: Option<u64>) -> (HostStep, u64, Option<Silence>) {
    let mut disable = Disable::new(shutdown_ns);
    let (end, now_ns) = run(transport, |transport, now_ns| disable.advance(transport, now_ns));
    (end, now_ns, disable.silence())
}

#[test]
fn a_controller_is_enabled_with_its_admin_queue() {
    let mut transport = FakeTransport::new();
    let (end, now_ns) = enable(&mut transport);
    assert_eq!((end, now_ns), (HostStep::Done, 3 * MS));
    let config = ControllerConfig::from_bits(transport.read32(CC).unwrap());
    let want = ControllerConfig { enabled: true, sq_entry_shift: 6, cq_entry_shift: 4, ..ControllerConfig::default() };
    assert_eq!(config, want);
}

#[test]
fn an_enabled_controller_is_disabled_first() {
    let mut transport = FakeTransport::new();
    assert_eq!(enable(&mut transport).0, HostStep::Done);
    let (end, now_ns) = enable(&mut transport);
    assert_eq!((end, now_ns), (HostStep::Done, (3 + 2 + 3) * MS));
    assert_eq!(transport.fake.borrow().enables, 2);
}

#[test]
fn command_sets_are_selected_by_csi_where_offered() {
    for (command_sets, selected) in [(1, 0), (0, 0), (0x41, 6), (0x40, 6), (0xc1, 6)] {
        let mut transport = FakeTransport::new();
        transport.fake.borrow_mut().cap.command_sets = command_sets;
        assert_eq!(enable(&mut transport).0, HostStep::Done);
        assert_eq!(ControllerConfig::from_bits(transport.read32(CC).unwrap()).command_set, selected);
    }
}

#[test]
fn a_controller_that_cannot_be_driven_is_refused() {
    let refused = |change: fn(&mut Capabilities)| {
        let mut transport = FakeTransport::new();
        change(&mut transport.fake.borrow_mut().cap);
        let end = enable(&mut transport).0;
        assert_eq!(transport.fake.borrow().enables, 0);
        end
    };
    assert_eq!(refused(|cap| cap.page_min = 1), HostStep::Failed(NvmeHostError::PageSize(8192)));
    assert_eq!(refused(|cap| cap.command_sets = 0x80), HostStep::Failed(NvmeHostError::NoCommandSet));
    assert_eq!(refused(|cap| cap.queue_entries_max = 1), HostStep::Failed(NvmeHostError::QueueEntries(1)));
}

/// Units of 500 ms: CAP.TO plus one, or CRTO.CRWMT if it is longer and ready modes are supported.
#[test]
fn the_controller_says_how_long_it_may_take() {
    for (timeout, ready_modes, crto, ms) in [(0, 0, 99, 500), (9, 0, 99, 5000), (0, 1, 8, 4000), (9, 1, 0, 5000)] {
        let mut transport = FakeTransport::new();
        {
            let mut fake = transport.fake.borrow_mut();
            (fake.cap.timeout_500ms, fake.cap.ready_modes, fake.crto) = (timeout, ready_modes, crto | 0x7f << 16);
            fake.never_ready = true;
        }
        let end = enable(&mut transport);
        assert_eq!(end, (HostStep::Failed(NvmeHostError::NotReady(ms)), ms * MS));
    }
}

#[test]
fn a_device_that_stays_unready_is_reset_once() {
    let mut transport = FakeTransport::new();
    transport.fake.borrow_mut().never_ready = true;
    transport.fake.borrow_mut().can_reset_function = true;
    let (end, now_ns) = enable(&mut transport);
    assert_eq!((end, now_ns), (HostStep::Done, 5500 * MS + 3 * MS));
    assert_eq!(transport.fake.borrow().function_resets, 1);
    // A fatal error during the wait has the same result.
    let mut transport = FakeTransport::new();
    transport.fake.borrow_mut().fatal = true;
    assert_eq!(enable(&mut transport).0, HostStep::Failed(NvmeHostError::Fatal));
    transport.fake.borrow_mut().can_reset_function = true;
    assert_eq!(enable(&mut transport).0, HostStep::Done);
}

#[test]
fn a_controller_that_reads_all_ones_is_gone() {
    let mut transport = FakeTransport::new();
    transport.fake.borrow_mut().gone = true;
    assert_eq!(transport.read32(CAP), Ok(u32::MAX));
    assert!(matches!(enable(&mut transport).0, HostStep::Failed(NvmeHostError::Gone(_))));
    // A device that is gone is silent.
    let (end, _, silence) = disable(&mut transport, None);
    assert_eq!((end, silence), (HostStep::Done, Some(Silence::Gone)));
    // Unplugged while it becomes ready.
    let mut transport = FakeTransport::new();
    let (rings, _mapping) = rings(&transport);
    let mut enable = Enable::new(rings);
    assert!(matches!(enable.advance(&mut transport, 0), HostStep::Wait { .. }));
    transport.fake.borrow_mut().gone = true;
    assert!(matches!(enable.advance(&mut transport, MS), HostStep::Failed(NvmeHostError::Gone(_))));
}

#[test]
fn a_controller_is_silent_when_it_is_not_ready() {
    let mut transport = FakeTransport::new();
    assert_eq!(disable(&mut transport, None), (HostStep::Done, 0, Some(Silence::Disabled)), "it never was enabled");
    assert_eq!(enable(&mut transport).0, HostStep::Done);
    let (end, now_ns, silence) = disable(&mut transport, None);
    assert_eq!((end, now_ns, silence), (HostStep::Done, 5 * MS, Some(Silence::Disabled)));
    assert_eq!(transport.fake.borrow().shutdowns, 0);
}

#[test]
fn a_shutdown_comes_before_an_orderly_end() {
    let mut transport = FakeTransport::new();
    assert_eq!(enable(&mut transport).0, HostStep::Done);
    let (end, now_ns, silence) = disable(&mut transport, Some(1000 * MS));
    assert_eq!((end, now_ns), (HostStep::Done, (3 + 4) * MS));
    assert_eq!(transport.fake.borrow().shutdowns, 1);
    // Cleared, CC.EN would start the controller's power-on state again.
    assert!(ControllerConfig::from_bits(transport.read32(CC).unwrap()).enabled, "the shutdown was undone");
    assert_eq!(silence, Some(Silence::ShutDown));
    // It is enabled again through a disabled state.
    assert_eq!(enable(&mut transport), (HostStep::Done, (3 + 4 + 2 + 3) * MS));
}

#[test]
fn a_shutdown_that_takes_too_long_ends_with_the_controller_disabled() {
    let mut transport = FakeTransport::new();
    assert_eq!(enable(&mut transport).0, HostStep::Done);
    transport.fake.borrow_mut().never_shut_down = true;
    let end = disable(&mut transport, Some(1000 * MS));
    assert_eq!(end, (HostStep::Done, (3 + 1000 + 2) * MS, Some(Silence::Disabled)));
}

#[test]
fn a_controller_that_stays_active_is_not_silent() {
    let mut transport = FakeTransport::new();
    assert_eq!(enable(&mut transport).0, HostStep::Done);
    transport.fake.borrow_mut().never_idle = true;
    let (end, now_ns, silence) = disable(&mut transport, None);
    assert_eq!((end, silence), (HostStep::Failed(NvmeHostError::NotIdle(5500)), None));
    assert_eq!(now_ns, 5503 * MS);
    // A reset of the whole device is the last resort.
    transport.fake.borrow_mut().can_reset_function = true;
    let (end, _, silence) = disable(&mut transport, None);
    assert_eq!((end, silence), (HostStep::Done, Some(Silence::Disabled)));
}
