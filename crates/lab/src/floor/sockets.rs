//! Limits of a TCP connection over loopback between two CPUs: bytes and batches of 4 KiB random reads over NVMe/TCP.
//!
//! One side sends commands, the other answers each with a header and the data. Neither waits in the kernel, parses
//! anything or copies data itself. Answers of a batch leave in one call, from memory that has them in order, and arrive
//! in as many calls as the kernel makes of them, in memory for the data of all commands.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};

use super::IO_BYTES;
use super::cpus::led;
use super::windows::Variant;

/// A command capsule: common header and submission entry.
const COMMAND_BYTES: usize = 72;
/// The header of a C2HData PDU, and a response capsule: common header and completion entry.
const HEADER_BYTES: usize = 24;

/// End of an answered command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AnswerForm {
    /// Data with the success flag.
    Data,
    /// Data, and a response.
    DataAndResponse,
}

/// Reads with `depth` of them under way.
pub(super) fn reads(depth: usize, form: AnswerForm) -> Result<Variant<'static>, String> {
    let responses = if form == AnswerForm::DataAndResponse { 2 } else { 1 };
    let answer_bytes = responses * HEADER_BYTES + IO_BYTES as usize;
    let (host, target) = connection().map_err(|error| format!("no connection over loopback: {error}"))?;
    let mut host = PlainSocket::new(host, depth * COMMAND_BYTES, depth * answer_bytes);
    let mut target = PlainSocket::new(target, depth * answer_bytes, depth * COMMAND_BYTES);
    let mut free = depth;
    led(
        move || {
            let ended = host.receive(answer_bytes);
            free += ended;
            host.send(std::mem::take(&mut free) * COMMAND_BYTES);
            ended as u64
        },
        move || {
            let commands = target.receive(COMMAND_BYTES);
            target.send(commands * answer_bytes);
        },
    )
}

/// Both ends of a connection, none of which waits.
fn connection() -> std::io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let host = TcpStream::connect(listener.local_addr()?)?;
    let (target, _) = listener.accept()?;
    for stream in [&host, &target] {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
    }
    Ok((host, target))
}

/// A socket with memory for all that it sends and receives at a time.
struct PlainSocket {
    stream: TcpStream,
    output: Vec<u8>,
    /// Bytes to be sent that the kernel has not taken.
    unsent: usize,
    input: Vec<u8>,
    /// Bytes received, in memory that is filled from its start to its end, again and again.
    at: usize,
    /// Bytes of an unfinished message.
    part: usize,
}

impl PlainSocket {
    fn new(stream: TcpStream, output: usize, input: usize) -> PlainSocket {
        PlainSocket { stream, output: vec![0xa5; output], unsent: 0, input: vec![0; input], at: 0, part: 0 }
    }

    /// Receives what is there. Returns the messages of this length that are complete.
    fn receive(&mut self, message: usize) -> usize {
        let received = retried(|| self.stream.read(&mut self.input[self.at..]));
        self.at = (self.at + received) % self.input.len();
        let bytes = self.part + received;
        self.part = bytes % message;
        bytes / message
    }

    /// Sends so many bytes more, as far as the kernel takes them.
    fn send(&mut self, bytes: usize) {
        self.unsent += bytes;
        if self.unsent > 0 {
            self.unsent -= retried(|| self.stream.write(&self.output[..self.unsent]));
        }
    }
}

/// Bytes of a call, zero if it would have to wait.
fn retried(mut call: impl FnMut() -> std::io::Result<usize>) -> usize {
    loop {
        match call() {
            Ok(bytes) => return bytes,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return 0,
            Err(error) => panic!("a connection with ourselves: {error}"),
        }
    }
}
