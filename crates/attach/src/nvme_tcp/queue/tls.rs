//! Encryption between an I/O queue and its stream.
//!
//! What is to be sent is copied and encrypted on the lane, a bounded part of a list at a time. So the memory of
//! requests is free before the kernel has sent anything. What comes is decrypted into a buffer, from which the queue
//! copies it.

use blkyard_mq::{SendPiece, StreamId, StreamLimits, StreamService};
use blkyard_nvme::tls::TlsPsk;
use blkyard_tls::{RECORD_BYTES, TlsChannel, TlsError};

use super::{QueueStream, TcpNamespaceQueue};

/// Bytes that are encrypted at once, at most: four records.
const CLEAR_BYTES: usize = 64 << 10;
/// Bytes of ciphertext that are given to the stream at once, at most.
const SEALED_BYTES: usize = CLEAR_BYTES + (4 << 10);

/// Encryption of a connection.
#[derive(Debug)]
pub(super) struct QueueTls {
    channel: TlsChannel,
    /// Part of a list.
    clear: Vec<u8>,
    /// What the last bytes that have come mean.
    opened: Box<[u8]>,
    /// The list that is being encrypted, by its number, and how many of its bytes are.
    sealing: Option<(u64, usize)>,
    /// Number of the last ciphertext that was given to the stream.
    sealed: u64,
}

impl TcpNamespaceQueue {
    /// What the stream is to take at once.
    pub(super) fn limits(&self) -> StreamLimits {
        if self.psk.is_some() { StreamLimits { pieces_max: 1, bytes_max: SEALED_BYTES } } else { self.list.limits() }
    }

    /// Begins the handshake of a new connection. The queue is open meanwhile, so that its time is bounded, but nothing
    /// of it is sent.
    #[cold]
    pub(super) fn shake_hands<Cx: ?Sized + StreamService>(
        &mut self,
        cx: &mut Cx,
        stream: StreamId,
        psk: &TlsPsk,
        now_ns: u64,
    ) {
        self.queue.opened(now_ns);
        let channel = TlsChannel::client(&psk.identity, &psk.key).and_then(|mut channel| {
            channel.shake_hands()?;
            Ok(channel)
        });
        match channel {
            Ok(channel) => {
                let (clear, opened) = (Vec::with_capacity(CLEAR_BYTES), vec![0; RECORD_BYTES].into());
                self.tls = Some(Box::new(QueueTls { channel, clear, opened, sealing: None, sealed: 0 }));
                self.send_sealed(cx, stream);
            }
            Err(error) => self.broken(&error),
        }
    }

    /// Decrypts what has come, and starts the next receive.
    pub(super) fn received_sealed<Cx: ?Sized + StreamService>(&mut self, cx: &mut Cx, stream: StreamId) {
        let TcpNamespaceQueue { queue, tls: Some(tls), .. } = self else { return };
        let bytes = cx.received(stream);
        tls.channel.put(bytes);
        let len = bytes.len();
        cx.consume(stream, len);
        loop {
            match tls.channel.read(&mut tls.opened) {
                Ok(0) => break,
                Ok(read) => queue.receive(&tls.opened[..read]),
                Err(error) => return self.broken(&error),
            }
        }
        self.receive(cx, stream);
    }

    /// Encrypts and sends all that is to be sent, as far as the stream takes it.
    pub(super) fn send_sealed<Cx: ?Sized + StreamService>(&mut self, cx: &mut Cx, stream: StreamId) {
        loop {
            let TcpNamespaceQueue { queue, list, tls: Some(tls), .. } = self else { return };
            let outgoing = tls.channel.outgoing();
            if !outgoing.is_empty() {
                if !cx.can_send(stream) {
                    self.is_waiting_to_send = true;
                    return;
                }
                let piece = &outgoing[..outgoing.len().min(SEALED_BYTES)];
                tls.sealed += 1;
                let is_taken = cx.send(stream, tls.sealed, queue.memory(), std::iter::once(SendPiece::Bytes(piece)));
                debug_assert!(is_taken, "it is within the limits of the stream");
                let len = piece.len();
                tls.channel.sent(len);
                continue;
            }
            if !tls.channel.is_open() {
                return;
            }
            if tls.sealing.is_none() {
                list.clear();
                tls.sealing = if queue.wants_send() { queue.fill(list).map(|number| (number, 0)) } else { None };
            }
            let Some((number, from)) = tls.sealing else { return };
            tls.clear.clear();
            if !list.copy(queue.memory(), from, CLEAR_BYTES, &mut tls.clear) {
                // Memory of a request is gone: its client has cut its file.
                return queue.lost();
            }
            if let Err(error) = tls.channel.write(&tls.clear) {
                return self.broken(&error);
            }
            let encrypted = from + tls.clear.len();
            tls.sealing = (encrypted < list.total()).then_some((number, encrypted));
            if tls.sealing.is_none() {
                // Its memory is free: it was copied.
                queue.sent(number);
            }
        }
    }

    /// The channel is broken, or ended by the target.
    #[cold]
    fn broken(&mut self, error: &TlsError) {
        // Of an end in order the control thread learns, too.
        if *error != TlsError::Ended && matches!(self.stream, QueueStream::Open(_)) {
            tracing::warn!("NVMe/TCP I/O queue {}: TLS: {error}", self.queue.qid());
        }
        self.queue.lost();
    }
}
