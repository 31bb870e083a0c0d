//! Commands of the user: data of more than a page, and late commands.

use std::rc::Rc;

use blkyard_nvme::{
    AdminData, ControllerState, ControllerTransport, HostEvent, NvmeHostError, NvmeStatus, Sqe, TRANSFER_BYTES_MAX,
    admin, feature,
};

use crate::host::fake::FakeTransport;
use crate::host::rig::{Rig, S, config};

fn live(mdts: u8) -> Rig {
    let transport = FakeTransport::new();
    transport.fake.borrow_mut().identify.mdts = mdts;
    Rig::live(transport, config(1))
}

#[test]
fn a_buffer_holds_as_much_as_the_controller_transfers() {
    for (mdts, max) in [(1, 8 << 10), (5, 128 << 10), (0, TRANSFER_BYTES_MAX), (255, TRANSFER_BYTES_MAX)] {
        let rig = live(mdts);
        assert_eq!(rig.host.transfer_bytes_max(), max);
        for bytes in [0, max + 1] {
            let refused = rig.host.transfer_buffer(bytes as usize, 0).unwrap_err();
            assert_eq!(refused, NvmeHostError::Transfer { bytes, max });
        }
        for bytes in [1, 512, 4096, 4097, max as usize] {
            let buffer = rig.host.transfer_buffer(bytes, 0).unwrap();
            let data: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
            buffer.write(&data);
            assert!(buffer.bytes() == bytes && buffer.read() == data);
        }
    }
}

#[test]
fn metadata_has_a_pointer_of_its_own() {
    for (bytes, metadata_bytes) in [(512, 8), (0, 64), (4096, 5000), (4097, 1)] {
        let mut rig = live(0);
        let buffer = rig.host.transfer_buffer(bytes, metadata_bytes).unwrap();
        let metadata: Vec<u8> = (0..metadata_bytes).map(|at| (at % 251) as u8 ^ 0x55).collect();
        buffer.write(&vec![0xaa; bytes]);
        buffer.write_metadata(&metadata);
        assert!(buffer.read() == vec![0xaa; bytes] && buffer.read_metadata() == metadata, "{bytes} {metadata_bytes}");
        rig.fake.borrow_mut().ignored.insert(admin::GET_FEATURES, 0);
        let sqe = Sqe::feature(admin::GET_FEATURES, feature::TIMESTAMP, 0);
        rig.host.submit_admin(sqe, AdminData::Buffer(&buffer), 5, 60 * S, rig.now_ns).unwrap();
        rig.round();
        let mut fake = rig.fake.borrow_mut();
        let sent = *fake.log.last().unwrap();
        assert_eq!(sent.data()[0] == 0, bytes == 0, "a data pointer is there without data, or missing");
        assert!(sent.metadata() != 0 && sent.metadata().is_multiple_of(4096), "{:#x}", sent.metadata());
        assert_eq!(fake.memory(sent.metadata(), metadata_bytes), metadata);
    }
    let rig = live(1);
    for (bytes, metadata_bytes) in [(0, 0), (1, (8 << 10) + 1)] {
        assert!(rig.host.transfer_buffer(bytes, metadata_bytes).is_err(), "{bytes} {metadata_bytes}");
    }
}

#[test]
fn a_buffer_is_mapped_until_its_command_has_ended() {
    let mut rig = live(0);
    let mapped = |rig: &mut Rig| rig.host.transport().dma_domain().regions().len();
    let before = mapped(&mut rig);
    rig.fake.borrow_mut().ignored.insert(admin::GET_FEATURES, 0);
    let buffer = rig.host.transfer_buffer(3 << 12, 0).unwrap();
    let sqe = Sqe::feature(admin::GET_FEATURES, feature::TIMESTAMP, 0);
    rig.host.submit_admin(sqe, AdminData::Buffer(&buffer), 5, 60 * S, rig.now_ns).unwrap();
    drop(buffer);
    rig.round();
    assert_eq!(mapped(&mut rig), before + 1);
    let token = rig.fake.borrow_mut().ignored_tokens.pop().unwrap();
    rig.fake.borrow_mut().answer(token, NvmeStatus::SUCCESS, 9);
    rig.events.clear();
    rig.run(|rig| !rig.events.is_empty(), S);
    assert_eq!(rig.events, [HostEvent::Completed { user: 5, status: NvmeStatus::SUCCESS, result: 9, data: None }]);
    assert_eq!(mapped(&mut rig), before);
}

#[test]
fn a_late_command_is_aborted_before_the_controller_is_reset() {
    for is_abortable in [true, false] {
        let mut rig = live(0);
        rig.events.clear();
        rig.fake.borrow_mut().ignored.insert(admin::GET_FEATURES, 0);
        let sqe = Sqe::feature(admin::GET_FEATURES, feature::WRITE_CACHE, 0);
        rig.host.submit_admin(sqe, AdminData::None, 5, S, rig.now_ns).unwrap();
        let fake = Rc::clone(&rig.fake);
        rig.run(|_| fake.borrow().count(admin::ABORT) == 1, 3 * S);
        assert_eq!(rig.host.state(), ControllerState::Live);
        if is_abortable {
            let token = rig.fake.borrow_mut().ignored_tokens.pop().unwrap();
            rig.fake.borrow_mut().answer(token, NvmeStatus::ABORT_REQUESTED, 0);
        }
        rig.run(|rig| !rig.events.is_empty(), 30 * S);
        let status = if is_abortable { NvmeStatus::ABORT_REQUESTED } else { NvmeStatus::HOST_ABORTED };
        assert_eq!(rig.events[0], HostEvent::Completed { user: 5, status, result: 0, data: None });
        assert_eq!(rig.host.state() == ControllerState::Live, is_abortable);
    }
}
