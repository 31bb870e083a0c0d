//! Registered buffers of an open disk: they come and go while its threads do I/O.
//!
//! A [`RegisteredBuffer`] may be registered with any number of disks. Each thread that has the handle may register and
//! unregister. The disk does not choose which memory is worth it: small I/O gains little.

use std::sync::Arc;

use blkyard_mq::{RegionTable, RegisteredBuffer, SharedDisk};
use blkyard_os::Clock;

use crate::Device;
use crate::disk::Queues;

/// Registers buffers with an open [`Disk`](crate::Disk): see [`Disk::buffers`](crate::Disk::buffers).
///
/// ```
/// use std::sync::Arc;
///
/// use blkyard::{Bio, BufferAccess, Disk, DiskConfig, Op, Region, RegisteredBuffer, Status};
///
/// let mut disk = Disk::open("ram:1M", DiskConfig { threads: 1, ..DiskConfig::default() })?;
/// let memory = Region::shared(65536).unwrap();
/// let buffer = RegisteredBuffer::new(&memory, 0, 65536, BufferAccess::ReadWrite).unwrap();
/// let buffers = disk.buffers();
/// let statuses = disk.run(|queue| {
///     let mut read = || {
///         let mut bio = Bio::with_capacity(1);
///         (bio.op, bio.sectors) = (Op::Read, 8);
///         bio.segments.push(buffer.segment(4096, 4096));
///         queue.submit(bio);
///         let mut status = Status::default();
///         queue.wait(|bio| status = bio.status);
///         status
///     };
///     buffers.register(&buffer);
///     let registered = read();
///     buffers.unregister(&buffer);
///     [registered, read()]
/// });
/// assert_eq!(statuses, [[Status::Ok, Status::Invalid]]);
/// # Ok::<(), blkyard::DiskError>(())
/// ```
#[derive(Clone, Debug)]
pub struct DiskBuffers {
    queues: Arc<SharedDisk<Queues<Arc<Device>>>>,
}

impl DiskBuffers {
    pub(crate) fn new(queues: &Arc<SharedDisk<Queues<Arc<Device>>>>) -> DiskBuffers {
        DiskBuffers { queues: Arc::clone(queues) }
    }

    /// Registers a buffer with the disk: bios that are submitted after this returns may name it, by
    /// [`RegisteredBuffer::segment`]. Its memory, unless a buffer there is registered already, is added to the memory
    /// of all queues; I/O may pause for that. A disk that another process serves reaches only memory that can be shared
    /// ([`Region::shared`](crate::Region::shared)): with others, I/O in the buffer is refused.
    pub fn register(&self, buffer: &Arc<RegisteredBuffer>) {
        let (clock, added) = (Clock::new(), Arc::clone(buffer));
        self.queues.change_queues(
            |queues| queues.register(buffer),
            move |(), hw, cx| {
                hw.add_region(cx, added.region());
                hw.add_buffer(cx, &added);
                true
            },
            &|| clock.now_ns(),
        );
    }

    /// Unregisters a buffer from the disk: waits until no request of it is in flight, and unmaps it. I/O that waits and
    /// names it, and later I/O, comes back with [`Status::Invalid`](crate::Status::Invalid). Other I/O goes on. The
    /// memory is dropped with its last buffer.
    pub fn unregister(&self, buffer: &RegisteredBuffer) {
        let (clock, id) = (Clock::new(), buffer.id());
        let region = Arc::clone(buffer.region());
        self.queues.change_queues(
            |queues| queues.unregister(buffer),
            move |is_last: &bool, hw, cx| hw.remove_buffer(cx, id) && (!is_last || hw.remove_region(cx, &region)),
            &|| clock.now_ns(),
        );
    }
}

impl<R> Queues<R> {
    /// Gives later queues this buffer, too.
    fn register(&mut self, buffer: &Arc<RegisteredBuffer>) {
        if self.buffers.iter().all(|known| known.id() != buffer.id()) {
            self.buffers.push(Arc::clone(buffer));
        }
        if !self.memory.iter().any(|(_, region)| Arc::ptr_eq(region, buffer.region())) {
            Arc::make_mut(&mut self.memory).insert(Arc::clone(buffer.region()));
        }
    }

    /// Gives later queues this buffer no more. Says whether it was the last one in its region.
    fn unregister(&mut self, buffer: &RegisteredBuffer) -> bool {
        self.buffers.retain(|known| known.id() != buffer.id());
        let is_last = !self.buffers.iter().any(|known| Arc::ptr_eq(known.region(), buffer.region()));
        if is_last {
            let table: &mut RegionTable = Arc::make_mut(&mut self.memory);
            let number =
                table.iter().find(|(_, region)| Arc::ptr_eq(region, buffer.region())).map(|(number, _)| number);
            number.map(|number| table.remove(number));
        }
        is_last
    }
}
