//! A channel of OpenSSL over memory.

use std::fmt;
use std::io::{self, Read, Write};
use std::sync::{Arc, Mutex, PoisonError};

use openssl::error::ErrorStack;
use openssl::ssl::{
    ErrorCode, Ssl, SslContext, SslContextBuilder, SslMethod, SslOptions, SslSessionCacheMode, SslStream, SslVersion,
};

use crate::TlsError;

/// The suite that goes with keys whose hash is SHA-256, the only one for which OpenSSL takes a key from a callback.
const SUITE: &str = "TLS_AES_128_GCM_SHA256";

/// Bytes that wait to be sent, at most: above what owners write at once. Each renewal of keys that the other end asks
/// for is answered, so one that takes no answers would fill the memory.
const OUTGOING_MAX: usize = 1 << 20;

/// What a client has named itself.
#[derive(Debug, Default)]
enum ClientIdentity {
    #[default]
    None,
    /// There is a key with this identity.
    Known(String),
    /// There is none with this.
    Unknown(String),
}

/// One end of a connection.
pub struct TlsChannel {
    stream: SslStream<Ciphertext>,
    is_open: bool,
    /// Of the client, at a server.
    client: Arc<Mutex<ClientIdentity>>,
}

impl fmt::Debug for TlsChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsChannel").field("is_open", &self.is_open).finish_non_exhaustive()
    }
}

impl TlsChannel {
    /// Whether channels can be made.
    pub const IS_BUILT: bool = true;

    /// The end of a client with this key, whose identity has no zero byte and at most 255 bytes.
    ///
    /// # Errors
    /// The system has no memory left.
    pub fn client(identity: &str, key: &[u8]) -> Result<TlsChannel, TlsError> {
        let (identity, key) = (identity.as_bytes().to_vec(), key.to_vec());
        let mut context = context()?;
        context.set_psk_client_callback(move |_, _, identity_room, key_room| {
            // With a zero byte behind it.
            let is_put = put(&identity, identity_room) && put(&[0], &mut identity_room[identity.len()..]);
            Ok(if is_put && put(&key, key_room) { key.len() } else { 0 })
        });
        let mut ssl = Ssl::new(&context.build()).map_err(no_channel)?;
        ssl.set_connect_state();
        TlsChannel::new(ssl, Arc::default())
    }

    /// The end of a server, which knows the key that goes with an identity. It is asked for what strangers have sent.
    ///
    /// # Errors
    /// The system has no memory left.
    pub fn server(key_of: impl Fn(&str) -> Option<Vec<u8>> + Send + Sync + 'static) -> Result<TlsChannel, TlsError> {
        let client: Arc<Mutex<ClientIdentity>> = Arc::default();
        let named = Arc::clone(&client);
        let mut context = context()?;
        context.set_psk_server_callback(move |_, identity, room| {
            let identity = String::from_utf8_lossy(identity.unwrap_or_default()).into_owned();
            let key = key_of(&identity).filter(|key| put(key, room));
            let len = key.map_or(0, |key| key.len());
            let found = if len > 0 { ClientIdentity::Known(identity) } else { ClientIdentity::Unknown(identity) };
            *named.lock().unwrap_or_else(PoisonError::into_inner) = found;
            Ok(len)
        });
        let mut ssl = Ssl::new(&context.build()).map_err(no_channel)?;
        ssl.set_accept_state();
        TlsChannel::new(ssl, client)
    }

    fn new(ssl: Ssl, client: Arc<Mutex<ClientIdentity>>) -> Result<TlsChannel, TlsError> {
        let stream = SslStream::new(ssl, Ciphertext::default()).map_err(no_channel)?;
        Ok(TlsChannel { stream, is_open: false, client })
    }

    /// Goes on with the handshake as far as it gets with the bytes that have come. Returns whether it is complete.
    ///
    /// # Errors
    /// It has failed. What is outgoing then says so to the other end.
    pub fn shake_hands(&mut self) -> Result<bool, TlsError> {
        if !self.is_open {
            match self.stream.do_handshake() {
                Ok(()) => self.is_open = true,
                Err(error) if is_hungry(error.code()) => {}
                Err(error) => {
                    return Err(match &*self.client.lock().unwrap_or_else(PoisonError::into_inner) {
                        ClientIdentity::Unknown(identity) => TlsError::UnknownIdentity(identity.clone()),
                        _ => broken(&error),
                    });
                }
            }
        }
        Ok(self.is_open)
    }

    /// Whether the handshake is complete.
    pub fn is_open(&self) -> bool {
        self.is_open
    }

    /// The identity that the client of this end has proven; `None` at a client, and before that.
    pub fn identity(&self) -> Option<String> {
        match &*self.client.lock().unwrap_or_else(PoisonError::into_inner) {
            ClientIdentity::Known(identity) if self.is_open => Some(identity.clone()),
            _ => None,
        }
    }

    /// Bytes that have come from the other end.
    pub fn put(&mut self, ciphertext: &[u8]) {
        self.stream.get_mut().incoming.extend_from_slice(ciphertext);
    }

    /// Goes on with the handshake, and reads what the bytes that have come mean. Returns the number of bytes read; zero
    /// if more ciphertext is needed.
    ///
    /// # Errors
    /// The channel is broken, or the other end has closed it, or it sends and takes nothing.
    ///
    /// # Panics
    /// If `clear` is empty.
    pub fn read(&mut self, clear: &mut [u8]) -> Result<usize, TlsError> {
        assert!(!clear.is_empty(), "there is no room to read into");
        if !self.shake_hands()? {
            return Ok(0);
        }
        if self.outgoing().len() > OUTGOING_MAX {
            return Err(TlsError::Protocol("the other end sends, and takes nothing of what is sent to it".into()));
        }
        match self.stream.ssl_read(clear) {
            Ok(bytes) => Ok(bytes),
            Err(error) if is_hungry(error.code()) => Ok(0),
            Err(error) if error.code() == ErrorCode::ZERO_RETURN => Err(TlsError::Ended),
            Err(error) => Err(broken(&error)),
        }
    }

    /// Writes all of it.
    ///
    /// # Errors
    /// The channel is broken.
    ///
    /// # Panics
    /// If the handshake is not complete.
    pub fn write(&mut self, clear: &[u8]) -> Result<(), TlsError> {
        assert!(self.is_open, "the handshake is not complete");
        let mut rest = clear;
        while !rest.is_empty() {
            let bytes = self.stream.ssl_write(rest).map_err(|error| broken(&error))?;
            rest = &rest[bytes..];
        }
        Ok(())
    }

    /// Bytes to be sent to the other end.
    pub fn outgoing(&self) -> &[u8] {
        let Ciphertext { outgoing, sent, .. } = self.stream.get_ref();
        &outgoing[*sent..]
    }

    /// So many of the outgoing bytes were sent.
    ///
    /// # Panics
    /// If there were fewer.
    pub fn sent(&mut self, bytes: usize) {
        let Ciphertext { outgoing, sent, .. } = self.stream.get_mut();
        *sent += bytes;
        assert!(*sent <= outgoing.len(), "more bytes were sent than there are");
        if *sent == outgoing.len() {
            outgoing.clear();
            *sent = 0;
        }
    }

    /// Ends it: what is outgoing then says so to the other end.
    pub fn close(&mut self) {
        // One that is broken has nothing to say.
        let _ = self.stream.shutdown();
    }
}

/// What is common to both ends.
fn context() -> Result<SslContextBuilder, TlsError> {
    let build = || {
        let mut context = SslContext::builder(SslMethod::tls())?;
        context.set_min_proto_version(Some(SslVersion::TLS1_3))?;
        context.set_max_proto_version(Some(SslVersion::TLS1_3))?;
        context.set_ciphersuites(SUITE)?;
        // Each connection has its own keys, of the pre-shared one.
        context.set_options(SslOptions::NO_TICKET);
        context.set_num_tickets(0)?;
        context.set_session_cache_mode(SslSessionCacheMode::OFF);
        Ok(context)
    };
    build().map_err(no_channel)
}

#[expect(clippy::needless_pass_by_value, reason = "an argument of map_err")]
fn no_channel(error: ErrorStack) -> TlsError {
    TlsError::Protocol(format!("no channel: {error}"))
}

/// Copies bytes to the front of a room, if they fit.
fn put(bytes: &[u8], room: &mut [u8]) -> bool {
    let place = room.get_mut(..bytes.len());
    place.map(|place| place.copy_from_slice(bytes)).is_some()
}

/// Whether more ciphertext is needed, and nothing is wrong.
fn is_hungry(code: ErrorCode) -> bool {
    code == ErrorCode::WANT_READ || code == ErrorCode::WANT_WRITE
}

fn broken(error: &openssl::ssl::Error) -> TlsError {
    let first = error.ssl_error().and_then(|stack| stack.errors().first());
    let reason = first.and_then(openssl::error::Error::reason);
    TlsError::Protocol(reason.map_or_else(|| error.to_string(), ToOwned::to_owned))
}

/// The ciphertext of both directions, as the stream that OpenSSL reads and writes.
#[derive(Debug, Default)]
struct Ciphertext {
    incoming: Vec<u8>,
    taken: usize,
    outgoing: Vec<u8>,
    sent: usize,
}

impl Read for Ciphertext {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let rest = &self.incoming[self.taken..];
        if rest.is_empty() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let bytes = rest.len().min(into.len());
        into[..bytes].copy_from_slice(&rest[..bytes]);
        self.taken += bytes;
        if self.taken == self.incoming.len() {
            self.incoming.clear();
            self.taken = 0;
        }
        Ok(bytes)
    }
}

impl Write for Ciphertext {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.outgoing.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDENTITY: &str = "NVMe0R01 nqn.host nqn.subsystem";
    const KEY: [u8; 32] = [7; 32];

    fn server() -> TlsChannel {
        TlsChannel::server(|identity| (identity == IDENTITY).then(|| KEY.to_vec())).unwrap()
    }

    /// Moves what is outgoing on one end to the other, in pieces of so many bytes. Returns whether there was any.
    fn carry(from: &mut TlsChannel, to: &mut TlsChannel, piece: usize) -> bool {
        let bytes = from.outgoing().to_vec();
        from.sent(bytes.len());
        bytes.chunks(piece).for_each(|piece| to.put(piece));
        !bytes.is_empty()
    }

    /// Runs a handshake. The errors of both ends.
    fn shake(client: &mut TlsChannel, server: &mut TlsChannel, piece: usize) -> [Result<bool, TlsError>; 2] {
        let mut ends = [client.shake_hands(), server.shake_hands()];
        while carry(client, server, piece) | carry(server, client, piece) {
            let [of_client, of_server] = &mut ends;
            for (end, channel) in [(of_client, &mut *client), (of_server, &mut *server)] {
                if end.is_ok() {
                    *end = channel.shake_hands();
                }
            }
        }
        ends
    }

    fn pair(piece: usize) -> (TlsChannel, TlsChannel) {
        let mut client = TlsChannel::client(IDENTITY, &KEY).unwrap();
        let mut server = server();
        assert_eq!(shake(&mut client, &mut server, piece), [Ok(true), Ok(true)]);
        (client, server)
    }

    #[test]
    fn both_ends_read_what_the_other_has_written_in_pieces_of_any_size() {
        for piece in [1, 7, 1000, usize::MAX] {
            let (mut client, mut server) = pair(piece);
            assert_eq!((client.identity(), server.identity()), (None, Some(IDENTITY.to_owned())));
            let sent: Vec<u8> = (0..100_000_u32).map(|at| at as u8).collect();
            client.write(&sent).unwrap();
            server.write(&sent).unwrap();
            carry(&mut client, &mut server, piece);
            carry(&mut server, &mut client, piece);
            for end in [&mut client, &mut server] {
                let (mut got, mut room) = (Vec::new(), [0; 777]);
                while let bytes @ 1.. = end.read(&mut room).unwrap() {
                    got.extend_from_slice(&room[..bytes]);
                }
                assert!(got == sent, "{} of {} bytes", got.len(), sent.len());
            }
        }
    }

    #[test]
    fn a_stranger_is_named_and_gets_nothing() {
        let mut client = TlsChannel::client("a stranger", &KEY).unwrap();
        let mut server = server();
        let [of_client, of_server] = shake(&mut client, &mut server, usize::MAX);
        assert_eq!(of_server, Err(TlsError::UnknownIdentity("a stranger".into())));
        assert!(of_client.is_err() && !client.is_open() && !server.is_open(), "{of_client:?}");
        assert_eq!(server.identity(), None);
    }

    #[test]
    fn who_has_the_name_but_not_the_key_gets_nothing() {
        let mut client = TlsChannel::client(IDENTITY, &[8; 32]).unwrap();
        let mut server = server();
        let [of_client, of_server] = shake(&mut client, &mut server, usize::MAX);
        assert!(matches!(of_server, Err(TlsError::Protocol(_))), "{of_server:?}");
        assert!(of_client.is_err() && server.identity().is_none());
    }

    #[test]
    fn a_changed_byte_breaks_the_channel() {
        let (mut client, mut server) = pair(usize::MAX);
        client.write(b"write this").unwrap();
        let mut bytes = client.outgoing().to_vec();
        *bytes.last_mut().unwrap() ^= 1;
        server.put(&bytes);
        assert!(matches!(server.read(&mut [0; 64]), Err(TlsError::Protocol(_))));
    }

    #[test]
    fn an_end_in_order_is_told() {
        let (mut client, mut server) = pair(usize::MAX);
        client.write(b"the last").unwrap();
        client.close();
        carry(&mut client, &mut server, usize::MAX);
        let mut room = [0; 64];
        assert_eq!(server.read(&mut room), Ok(8));
        assert_eq!(server.read(&mut room), Err(TlsError::Ended));
    }

    /// Renewals of keys have the same effect, which no client of ours asks for.
    #[test]
    fn end_that_takes_nothing_is_not_read_for_ever() {
        let (mut client, mut server) = pair(usize::MAX);
        server.write(&vec![0; OUTGOING_MAX]).unwrap();
        client.write(b"more").unwrap();
        carry(&mut client, &mut server, usize::MAX);
        assert!(matches!(server.read(&mut [0; 64]), Err(TlsError::Protocol(_))));
        carry(&mut server, &mut client, usize::MAX);
        assert_eq!(server.read(&mut [0; 64]), Ok(4));
    }

    #[test]
    fn noise_in_place_of_a_handshake_is_an_error() {
        let mut server = server();
        server.put(&[crate::HANDSHAKE; 600]);
        assert!(server.shake_hands().is_err());
    }
}
