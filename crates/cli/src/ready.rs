//! Exports that are ready: served at once, or prepared to continue those of another daemon.

use std::net::TcpListener;
use std::sync::Arc;

use blkyard::rate::RateSlot;
use blkyard::spec::SpecError;
use blkyard_export::{
    BackendConfig, BoundSocket, ControlLoop, ExportConfig, FrontEndSession, NvmeTcpAna, NvmeTcpExport, NvmeTcpServer,
    NvmeTcpSession, Server, Taking, VfioUserExport, VfioUserSession, VhostUserSession,
};
use blkyard_virtio::SerialId;

use crate::daemon::{
    ByProtocol, ClientSessionState, ClientWatch, ExportedDevice, FrontEndHandle, ServedFrontEnd, ServedServer,
    WeightSlot,
};
use crate::error::ServeError;

/// One export, ready to be served.
pub(crate) struct ReadyExport {
    pub(crate) name: String,
    /// Unset for NVMe/TCP.
    pub(crate) socket: Option<Arc<BoundSocket>>,
    pub(crate) config: ReadyConfig,
    pub(crate) queues: Vec<ClientWatch>,
    pub(crate) serial: SerialId,
    pub(crate) rate: Arc<RateSlot>,
    pub(crate) weight: Arc<WeightSlot>,
    pub(crate) devices: Vec<ExportedDevice>,
    /// Set for NVMe/TCP.
    pub(crate) ana: Option<Arc<NvmeTcpAna>>,
    /// State inherited from another daemon.
    pub(crate) inherited: Option<Inherited>,
}

/// Configuration of an export of any protocol, with the listening socket of NVMe/TCP.
pub(crate) type ReadyConfig = ByProtocol<BackendConfig, VfioUserExport, (NvmeTcpExport, TcpListener)>;

/// State of an export inherited from another daemon, beside its socket.
pub(crate) struct Inherited {
    pub(crate) offered: u16,
    pub(crate) depth: Option<usize>,
    pub(crate) wce: bool,
    pub(crate) session: Option<ClientSessionState>,
}

impl ReadyExport {
    /// Serves it, or prepares to continue with it.
    pub(crate) fn start(self, control: &ControlLoop) -> Result<Start, ServeError> {
        const OTHER: &str = "it has a session of another protocol";
        const NO_SOCKET: &str = "exports on sockets have one";
        let ReadyExport { socket, config, inherited, .. } = self;
        Ok(match config {
            ByProtocol::NvmeTcp((config, listener)) => {
                let Some(inherited) = inherited else {
                    return Ok(ByProtocol::NvmeTcp(StartOf::Served(NvmeTcpServer::serve_on(
                        control, listener, config,
                    )?)));
                };
                let name = config.name.clone();
                ByProtocol::NvmeTcp(StartOf::taking(&name, inherited, |session, (offered, wce)| {
                    let Some(ByProtocol::NvmeTcp(state)) = session else { return Err(OTHER.to_owned()) };
                    NvmeTcpServer::take_over_listening(control, listener, config, (offered, wce), state)
                })?)
            }
            ByProtocol::VhostUser(config) => {
                let socket = socket.expect(NO_SOCKET);
                let session_of = |session| {
                    if let ByProtocol::VhostUser(session) = session { Ok(session) } else { Err(OTHER.to_owned()) }
                };
                ByProtocol::VhostUser(StartOf::new(control, socket, config, inherited, session_of)?)
            }
            ByProtocol::VfioUser(config) => {
                let socket = socket.expect(NO_SOCKET);
                let session_of = |session| {
                    if let ByProtocol::VfioUser(session) = session { Ok(session) } else { Err(OTHER.to_owned()) }
                };
                ByProtocol::VfioUser(StartOf::new(control, socket, config, inherited, session_of)?)
            }
        })
    }
}

/// An export that is served, or will be once the other daemon has let go.
pub(crate) enum StartOf<F: FrontEndSession> {
    Served(Server<F>),
    Taking(Taking<F>),
}

/// The same for any protocol.
pub(crate) type Start = ByProtocol<StartOf<VhostUserSession>, StartOf<VfioUserSession>, StartOf<NvmeTcpSession>>;

impl<F: FrontEndSession> StartOf<F> {
    fn new(
        control: &ControlLoop,
        socket: Arc<BoundSocket>,
        config: ExportConfig<F>,
        inherited: Option<Inherited>,
        session_of: impl FnOnce(ClientSessionState) -> Result<F::State, String>,
    ) -> Result<StartOf<F>, ServeError> {
        let Some(inherited) = inherited else {
            return Ok(StartOf::Served(Server::start_on(control, socket, config)?));
        };
        let name = config.name.clone();
        StartOf::taking(&name, inherited, |session, (offered, wce)| {
            let session = session.map(session_of).transpose()?;
            Server::take_over_on(control, socket, config, offered, wce, session)
        })
    }

    /// Prepares to continue with an export.
    fn taking(
        name: &str,
        inherited: Inherited,
        take: impl FnOnce(Option<ClientSessionState>, (u16, bool)) -> Result<Taking<F>, String>,
    ) -> Result<StartOf<F>, ServeError> {
        let Inherited { offered, depth, wce, session } = inherited;
        let taking = take(session, (offered, wce));
        let cure = "the other daemon continues; stop it instead";
        let taking = taking.map_err(|why| SpecError::new(name, format!("it cannot be taken over: {why}"), cure))?;
        if let Some(depth) = depth {
            // Applied as soon as it serves; it cannot fail.
            let _ = taking.server().hand().set_depth(depth);
        }
        Ok(StartOf::Taking(taking))
    }

    fn front_end(&self) -> FrontEndHandle<F> {
        FrontEndHandle::of(match self {
            StartOf::Served(server) => server,
            StartOf::Taking(taking) => taking.server(),
        })
    }

    fn go(self) -> Server<F> {
        match self {
            StartOf::Served(server) => server,
            StartOf::Taking(taking) => taking.go(),
        }
    }
}

impl Start {
    pub(crate) fn front_end(&self) -> ServedFrontEnd {
        match self {
            ByProtocol::VhostUser(start) => ByProtocol::VhostUser(start.front_end()),
            ByProtocol::VfioUser(start) => ByProtocol::VfioUser(start.front_end()),
            ByProtocol::NvmeTcp(start) => ByProtocol::NvmeTcp(start.front_end()),
        }
    }

    pub(crate) fn go(self) -> ServedServer {
        match self {
            ByProtocol::VhostUser(start) => ByProtocol::VhostUser(start.go()),
            ByProtocol::VfioUser(start) => ByProtocol::VfioUser(start.go()),
            ByProtocol::NvmeTcp(start) => ByProtocol::NvmeTcp(start.go()),
        }
    }
}
