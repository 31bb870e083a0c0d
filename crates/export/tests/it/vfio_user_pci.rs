//! The PCI function of a vfio-user export as a client sees it: capabilities, reset and power states.

use std::os::fd::AsFd;

use blkyard_mq::Op;
use blkyard_nvme::Sqe;
use blkyard_wire::vfio_user::{RegionAccess, RegionWrite, VfioRequest};

use crate::common::nvme::{file, map, read};
use crate::common::{AdminHost, AnyDevice, Gate, NvmeWorld, RawClient, Seen, until};

const CONFIG: u32 = 7;
/// Bytes of the header of a region's access in a reply.
const HEADER: usize = 16;
/// Offsets of PMCSR and Device Control.
const POWER: u64 = 0x54;
const DEVICE_CONTROL: u64 = 0x68;

fn config(client: &mut RawClient, offset: u64, count: u32) -> Vec<u8> {
    client.call(&read(CONFIG, offset, count), &[]).unwrap().split_off(HEADER)
}

fn write_config(offset: u64, bytes: &[u8]) -> VfioRequest<'_> {
    VfioRequest::RegionWrite(RegionAccess { offset, region: CONFIG, count: bytes.len() as u32 }, bytes)
}

/// CC.EN and CSTS.RDY.
fn enabled(host: &mut AdminHost) -> (u8, u8) {
    (host.client.call(&read(0, 0x14, 4), &[]).unwrap()[HEADER] & 1, host.csts() & 1)
}

#[test]
fn configuration_space_is_that_of_an_express_endpoint() {
    let world = NvmeWorld::new(&AnyDevice::ram(0), 2, 1);
    let mut client = RawClient::greeted(&world.path);
    let info = client.call(&VfioRequest::DeviceGetRegionInfo { argsz: 32, index: CONFIG }, &[]).unwrap();
    assert_eq!(info[16..24], 4096_u64.to_ne_bytes());
    let space = config(&mut client, 0, 4096);
    let (mut at, mut list) = (usize::from(space[0x34]), Vec::new());
    while at != 0 && list.len() < 48 {
        list.push(space[at]);
        at = usize::from(space[at + 1]);
    }
    assert_eq!(list, [0x11, 0x01, 0x10], "MSI-X, power management, PCI Express");
    assert!(space[256..].iter().all(|byte| *byte == 0), "no extended capability");
    // Single bytes and odd words are parts of the same space.
    for (offset, count) in [(0x61, 1), (0x53, 5), (0xff, 2), (4095, 1), (3, 4001)] {
        let at = offset as usize;
        assert_eq!(config(&mut client, offset, count), space[at..at + count as usize], "{offset:#x}");
    }
    drop(client);
    world.stop();
}

#[test]
fn function_level_reset_disables_the_controller() {
    let gate = Gate::open();
    let world = NvmeWorld::new(&AnyDevice::gated(&gate), 2, 1);
    let mut host = AdminHost::enable(&world);
    for round in 0..3 {
        host.client.call(&write_config(4, &[6, 0]), &[]).unwrap();
        assert_eq!(enabled(&mut host), (1, 1), "round {round}");
        let multi = |offset, byte: u8| {
            let access = RegionAccess { offset, region: CONFIG, count: 1 };
            RegionWrite { access, data: [byte, 0, 0, 0, 0, 0, 0, 0] }
        };
        match round {
            0 => host.client.call(&write_config(DEVICE_CONTROL, &[0x10, 0xa8]), &[]).unwrap(),
            1 => host.client.call(&write_config(DEVICE_CONTROL + 1, &[0x80]), &[]).unwrap(),
            // All other registers may be written with the same message.
            _ => {
                let writes = vec![multi(DEVICE_CONTROL + 1, 0x80), multi(4, 0), multi(DEVICE_CONTROL + 1, 0xff)];
                host.client.call(&VfioRequest::RegionWriteMulti(writes), &[]).unwrap()
            }
        };
        assert_eq!(enabled(&mut host), (0, 0), "round {round}");
        assert_eq!(config(&mut host.client, 4, 2), [0, 0], "memory and bus master are disabled");
        assert_eq!(config(&mut host.client, DEVICE_CONTROL, 2), [0x10, 0x28]);
        // Memory stays mapped: the host enables the controller again.
        host.tail = 0;
        host.memory.set_len(0x10000).unwrap();
        host.write(0x24, &[7, 0, 7, 0]);
        host.write(0x28, &AdminHost::BASE.to_le_bytes());
        host.write(0x30, &(AdminHost::BASE + 0x1000).to_le_bytes());
        host.write(0x14, &[1, 0, 0x46, 0]);
    }
    drop(host);
    world.stop();
}

#[test]
fn function_level_reset_waits_for_the_device() {
    let gate = Gate::shut();
    let world = NvmeWorld::new(&AnyDevice::gated(&gate), 2, 1);
    let mut host = AdminHost::stuck(&world, &gate);
    let waits = || world.server().status().session().and_then(|session| Some(session.waits?.0));
    let begin = |host: &AdminHost, id: u16, request: &VfioRequest<'_>| {
        host.client.send(&request.encode(id, false), &[]);
    };
    begin(&host, 1000, &write_config(DEVICE_CONTROL + 1, &[0x80]));
    until("the reset waits", || waits() == Some("a reset by the client"));
    // Registers and the rest of configuration space are served meanwhile; a second reset has its turn.
    assert_eq!(enabled(&mut host), (1, 1));
    host.client.call(&write_config(4, &[6, 0]), &[]).unwrap();
    assert_eq!(gate.held(), 1);
    begin(&host, 1001, &write_config(DEVICE_CONTROL, &[0, 0x80]));
    begin(&host, 1002, &read(0, 0x1c, 4));
    gate.set_shut(false);
    let replied = [(); 3].map(|()| host.client.receive().map(|(id, result)| (id, result.is_ok())));
    assert_eq!(replied, [1000, 1001, 1002].map(|id| Some((id, true))));
    assert!(gate.seen().contains(&Seen::Ended(Op::Write, 0)));
    assert_eq!((enabled(&mut host), gate.held(), waits()), ((0, 0), 0, None));
    drop(host);
    world.stop();
}

#[test]
fn function_that_is_off_answers_configuration_space_only() {
    let world = NvmeWorld::new(&AnyDevice::ram(0), 2, 1);
    let mut host = AdminHost::enable(&world);
    host.client.call(&write_config(POWER, &[3]), &[]).unwrap();
    assert_eq!(config(&mut host.client, POWER, 2), [0x0b, 0]);
    for (offset, count) in [(0, 8), (0x1c, 4), (0x1004, 4), (8, 1), (0x1ff8, 8)] {
        let bytes = host.client.call(&read(0, offset, count), &[]).unwrap().split_off(HEADER);
        assert_eq!(bytes, vec![0xff; count as usize], "{offset:#x}");
    }
    for (offset, count) in [(0, 16), (0, 3), (2, 4), (0, 4096), (0x1ff0, 16), (0x2000, 4)] {
        assert!(host.client.call(&read(0, offset, count), &[]).is_err(), "{offset:#x} {count}");
    }
    // Neither a disable nor a doorbell arrives, of any size.
    host.write(0x14, &[0; 4]);
    host.put(0, 0, Sqe::create_cq(1, 8, AdminHost::BASE + 0x3000, None));
    host.write(0x1000, &[1, 0, 0, 0]);
    host.write(0x1000, &[1; 100]);
    assert_eq!(host.status(1, 0), None);
    // D1 and D2 do not exist.
    for state in [1, 2, 0xff] {
        host.client.call(&write_config(POWER, &[state]), &[]).unwrap();
        assert_eq!(config(&mut host.client, POWER, 1), [0x0b]);
    }
    host.client.call(&write_config(POWER, &[0]), &[]).unwrap();
    assert_eq!(enabled(&mut host), (1, 1), "the state of the controller is kept");
    assert_eq!(host.admin(Sqe::create_cq(1, 8, AdminHost::BASE + 0x3000, None)), Some(0));
    drop(host);
    world.stop();
}

#[test]
fn any_write_of_configuration_space_leaves_a_session_that_is_served() {
    let world = NvmeWorld::new(&AnyDevice::ram(0), 2, 1);
    let mut client = RawClient::greeted(&world.path);
    let before = config(&mut client, 0, 4096);
    for (offset, len) in [(0, 4096), (0x34, 1), (0x3f, 0x62), (POWER, 4), (0x60, 60), (0xfc, 8), (256, 3840), (5, 1000)]
    {
        for value in [0xff, 0x00, 0xa5] {
            client.call(&write_config(offset, &vec![value; len]), &[]).unwrap();
            // Identity and list are as before; a host can always find its way.
            let space = config(&mut client, 0, 4096);
            for at in [0x00..0x04, 0x06..0x0c, 0x2c..0x38, 0x40..0x42, 0x50..0x54, 0x60..0x68, 0x9c..0x1000] {
                assert_eq!(space[at.clone()], before[at], "{offset:#x} {value:#x}");
            }
        }
    }
    client.call(&write_config(POWER, &[0]), &[]).unwrap();
    let memory = file(0x1000);
    client.call(&map(0x10000, 0x1000, 0), &[memory.as_fd()]).unwrap();
    assert_eq!(client.call(&read(0, 8, 4), &[]).unwrap()[HEADER..], [0, 0, 2, 0]);
    drop(client);
    world.stop();
}
