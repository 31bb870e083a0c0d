//! Clients of the control socket that request, wait, disconnect, or are slow.

use super::*;
use crate::control::wire::{parse_answer, request_line};
use blkyard_export::SocketConfig;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;

/// Patience with a machine that does other things as well.
const LIMIT: Duration = Duration::from_secs(30);

struct ControlContext {
    _server: ControlServer,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

/// A server that answers `long` bytes to everything.
fn ground(client_time: Duration, long: usize) -> ControlContext {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c");
    let socket = BoundSocket::bind(&SocketConfig { path: path.clone(), mode: Some(0o600), group: None }).unwrap();
    let server = ControlServer::start_with(Arc::new(socket), client_time, move |request, _| {
        assert_eq!(request, ControlRequest::Inspect);
        Answer::Say(Ok(Value::from("x".repeat(long))))
    });
    ControlContext { _server: server.unwrap(), path, _folder: folder }
}

impl ControlContext {
    fn dial(&self) -> BufReader<UnixStream> {
        let stream = UnixStream::connect(&self.path).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.set_write_timeout(Some(LIMIT)).unwrap();
        BufReader::new(stream)
    }
}

fn say(to: &BufReader<UnixStream>, bytes: &[u8]) -> io::Result<()> {
    to.get_ref().write_all(bytes)
}

fn hear(from: &mut BufReader<UnixStream>) -> Option<Result<Value, String>> {
    let mut line = Vec::new();
    from.read_until(b'\n', &mut line).ok().filter(|n| *n > 0)?;
    Some(parse_answer(&line))
}

/// A connection that the server has ended, as seen from the other side.
fn is_closed(client: &mut BufReader<UnixStream>) -> bool {
    match client.get_ref().read(&mut [0; 64]) {
        Ok(0) => true,
        Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
        Ok(_) => false,
    }
}

#[test]
fn one_client_may_ask_many_things_in_whatever_pieces() {
    let ground = ground(LIMIT, 3);
    let mut client = ground.dial();
    let line = request_line(&ControlRequest::Inspect);
    say(&client, line.repeat(3).as_bytes()).unwrap();
    (0..3).for_each(|_| assert_eq!(hear(&mut client).unwrap().unwrap(), "xxx"));
    line.as_bytes().iter().for_each(|byte| say(&client, &[*byte]).unwrap());
    assert_eq!(hear(&mut client).unwrap().unwrap(), "xxx");
    say(&client, b"nonsense\n").unwrap();
    assert!(hear(&mut client).unwrap().unwrap_err().contains("not of blkyard's protocol"));
    say(&client, line.as_bytes()).unwrap();
    assert!(hear(&mut client).unwrap().is_ok(), "one mistake is forgiven");
}

#[test]
fn a_line_without_end_is_cut_off() {
    let ground = ground(LIMIT, 3);
    let mut client = ground.dial();
    let _ = say(&client, &vec![b' '; REQUEST_BYTES_MAX + 1]);
    assert!(hear(&mut client).unwrap().unwrap_err().contains("exceeds"));
    assert!(is_closed(&mut client));
}

#[test]
fn silent_clients_are_let_go() {
    let ground = ground(Duration::from_secs(3), 3);
    let mut silent: Vec<_> = (0..CLIENTS_MAX).map(|_| ground.dial()).collect();
    let _ = say(&silent[0], b"{");
    assert!(silent.iter_mut().all(is_closed));
}

#[test]
fn new_client_takes_the_place_of_the_longest_idle_one() {
    let ground = ground(Duration::from_mins(10), 3);
    let mut idle: Vec<_> = (0..CLIENTS_MAX).map(|_| ground.dial()).collect();
    // The first has asked since the others came, and the second has begun to: that is no request.
    say(&idle[0], request_line(&ControlRequest::Inspect).as_bytes()).unwrap();
    assert_eq!(hear(&mut idle[0]).unwrap().unwrap(), "xxx");
    let _ = say(&idle[1], b"{");
    let mut new = ground.dial();
    say(&new, request_line(&ControlRequest::Inspect).as_bytes()).unwrap();
    assert_eq!(hear(&mut new).unwrap().unwrap(), "xxx");
    assert!(is_closed(&mut idle[1]));
    say(&idle[0], request_line(&ControlRequest::Inspect).as_bytes()).unwrap();
    assert_eq!(hear(&mut idle[0]).unwrap().unwrap(), "xxx", "the one that asked last is still there");
}

#[test]
fn client_that_has_asked_is_answered_however_many_connect() {
    let ground = ground(LIMIT, 3);
    for _ in 0..20 {
        let mut before: Vec<_> = (0..2 * CLIENTS_MAX).map(|_| ground.dial()).collect();
        let mut asking = ground.dial();
        say(&asking, request_line(&ControlRequest::Inspect).as_bytes()).unwrap();
        before.extend((0..2 * CLIENTS_MAX).map(|_| ground.dial()));
        assert_eq!(hear(&mut asking).unwrap().unwrap(), "xxx");
    }
}

#[test]
fn a_client_that_dribbles_has_no_more_time_than_others() {
    let ground = ground(Duration::from_millis(300), 3);
    let client = ground.dial();
    let begin = Instant::now();
    while say(&client, b" ").is_ok() {
        assert!(begin.elapsed() < LIMIT, "it is served for ever");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_client_that_does_not_read_its_answer_is_let_go_and_disturbs_nobody() {
    let ground = ground(Duration::from_secs(5), 1 << 20);
    let stuck = ground.dial();
    say(&stuck, request_line(&ControlRequest::Inspect).repeat(50).as_bytes()).unwrap();
    let begin = Instant::now();
    let (mut other, mut answers) = (ground.dial(), 0);
    while answers < 3 {
        let _ = say(&other, request_line(&ControlRequest::Inspect).as_bytes());
        match hear(&mut other) {
            Some(Ok(answer)) => {
                assert_eq!(answer.as_str().unwrap().len(), 1 << 20);
                answers += 1;
            }
            // On a machine that does other things as well its time may be up, too.
            _ => other = ground.dial(),
        }
        assert!(begin.elapsed() < LIMIT, "nobody else is served");
    }
    while say(&stuck, b" ").is_ok() {
        assert!(begin.elapsed() < LIMIT, "it is kept for ever");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_client_that_leaves_in_the_middle_is_no_matter() {
    let ground = ground(LIMIT, 8 << 20);
    for bytes in [&b"{\"blk"[..], request_line(&ControlRequest::Inspect).as_bytes()] {
        for _ in 0..CLIENTS_MAX * 2 {
            say(&ground.dial(), bytes).unwrap();
        }
    }
    let mut client = ground.dial();
    say(&client, request_line(&ControlRequest::Inspect).as_bytes()).unwrap();
    assert!(hear(&mut client).unwrap().is_ok());
}

#[test]
fn the_socket_goes_with_the_server() {
    let ground = ground(LIMIT, 3);
    let client = ground.dial();
    assert!(ground.path.exists());
    let ControlContext { _server: server, path, _folder } = ground;
    drop(server);
    assert!(!path.exists());
    drop(client);
}

#[test]
fn looks_are_answered_while_a_job_runs_and_jobs_run_in_their_order() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c");
    let socket = BoundSocket::bind(&SocketConfig { path: path.clone(), mode: Some(0o600), group: None }).unwrap();
    let (go, wait) = channel::<()>();
    let wait = Arc::new(std::sync::Mutex::new(wait));
    let server = ControlServer::start(Arc::new(socket), move |request, _| match request {
        ControlRequest::Set { what, .. } if what == "panics" => Answer::Run(Box::new(|| panic!("as planned"))),
        ControlRequest::Set { what, .. } => {
            let wait = Arc::clone(&wait);
            Answer::Run(Box::new(move || Ok(format!("{what} {:?}", wait.lock().unwrap().recv()).into())))
        }
        _ => Answer::Say(Ok("seen".into())),
    });
    let ground = ControlContext { _server: server.unwrap(), path, _folder: folder };
    let set = |what: &str| {
        let client = ground.dial();
        let request = ControlRequest::Set { what: what.into(), values: [].into() };
        say(&client, request_line(&request).as_bytes()).unwrap();
        client
    };
    let mut sets = [set("first"), set("second"), set("panics"), set("third")];
    // One whose client leaves is no matter.
    drop(set("fourth"));
    let mut looks = ground.dial();
    for _ in 0..3 {
        say(&looks, request_line(&ControlRequest::Inspect).as_bytes()).unwrap();
        assert_eq!(hear(&mut looks).unwrap().unwrap(), "seen");
    }
    go.send(()).unwrap();
    assert_eq!(hear(&mut sets[0]).unwrap().unwrap(), "first Ok(())");
    go.send(()).unwrap();
    assert_eq!(hear(&mut sets[1]).unwrap().unwrap(), "second Ok(())");
    assert_eq!(hear(&mut sets[2]).unwrap().unwrap_err(), JOB_PANICKED);
    drop(go);
    assert_eq!(hear(&mut sets[3]).unwrap().unwrap(), "third Err(RecvError)");
}

/// A server whose changes run until something is sent, or the sender is dropped.
fn with_changes() -> (ControlContext, std::sync::mpsc::Sender<()>, Arc<std::sync::Mutex<Vec<String>>>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c");
    let socket = BoundSocket::bind(&SocketConfig { path: path.clone(), mode: Some(0o600), group: None }).unwrap();
    let (go, wait) = channel::<()>();
    let (wait, made) = (Arc::new(std::sync::Mutex::new(wait)), Arc::new(std::sync::Mutex::new(Vec::new())));
    let log = Arc::clone(&made);
    let server = ControlServer::start(Arc::new(socket), move |request, _| match request {
        ControlRequest::Set { what, .. } => {
            let (wait, log) = (Arc::clone(&wait), Arc::clone(&log));
            Answer::Run(Box::new(move || {
                log.lock().unwrap().push(what);
                let _ = wait.lock().unwrap().recv();
                Ok("made".into())
            }))
        }
        _ => Answer::Say(Ok("seen".into())),
    });
    (ControlContext { _server: server.unwrap(), path, _folder: folder }, go, made)
}

impl ControlContext {
    fn set(&self, what: &str) -> BufReader<UnixStream> {
        let client = self.dial();
        let request = ControlRequest::Set { what: what.into(), values: [].into() };
        say(&client, request_line(&request).as_bytes()).unwrap();
        client
    }
}

#[test]
fn a_change_whose_client_has_left_before_it_began_is_not_made_and_blocks_nobody() {
    let (ground, go, made) = with_changes();
    let mut first = ground.set("first");
    // More than the number of clients: each is gone before the next comes.
    (0..2 * CLIENTS_MAX).for_each(|_| drop(ground.set("abandoned")));
    let mut looks = ground.dial();
    say(&looks, request_line(&ControlRequest::Inspect).as_bytes()).unwrap();
    assert_eq!(hear(&mut looks).unwrap().unwrap(), "seen");
    let mut last = ground.set("last");
    drop(go);
    assert_eq!(hear(&mut first).unwrap().unwrap(), "made");
    assert_eq!(hear(&mut last).unwrap().unwrap(), "made");
    assert_eq!(*made.lock().unwrap(), ["first", "last"]);
}

#[test]
fn changes_that_wait_leave_room_for_looks() {
    let (ground, go, made) = with_changes();
    let mut sets: Vec<_> = (0..CLIENTS_MAX).map(|_| ground.set("waits")).collect();
    let mut looks = ground.dial();
    say(&looks, request_line(&ControlRequest::Inspect).as_bytes()).unwrap();
    assert_eq!(hear(&mut looks).unwrap().unwrap(), "seen");
    drop(go);
    let answers: Vec<_> = sets.iter_mut().filter_map(hear).collect();
    let refused = answers.iter().filter(|answer| answer.as_ref().is_err_and(|why| why == TOO_MANY_WAIT)).count();
    let (made, ran) = (answers.iter().filter(|answer| answer.is_ok()).count(), made.lock().unwrap().len());
    assert_eq!((made, refused), (WAITING_MAX + 1, answers.len() - made));
    assert_eq!(ran, made);
}

#[test]
fn thread_that_panics_is_seen() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c");
    let socket = BoundSocket::bind(&SocketConfig { path: path.clone(), mode: Some(0o600), group: None }).unwrap();
    let server = ControlServer::start(Arc::new(socket), |_, _| panic!("as the test wants it")).unwrap();
    assert!(!server.is_finished());
    let mut client = UnixStream::connect(&path).unwrap();
    client.write_all(request_line(&ControlRequest::Inspect).as_bytes()).unwrap();
    let begin = Instant::now();
    while !server.is_finished() {
        assert!(begin.elapsed() < LIMIT, "the thread is not seen to end");
        std::thread::sleep(Duration::from_millis(1));
    }
}
