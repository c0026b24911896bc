"""Real remotes on loopback that can be told to fail: HTTP, ssh, git's own protocol, and nothing at all.

Each is a context manager that yields the remote's address, and leaves no process, port or file behind.
"""

from __future__ import annotations

import base64
import math
import os
import socket
import socketserver
import ssl
import subprocess
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast
from urllib.parse import parse_qs, urlsplit

import psutil
from requirements import provide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

HOST = "127.0.0.1"
_HERMETIC = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "LC_ALL": "C"}


# Nobody there


@contextmanager
def closed_port() -> Iterator[int]:
    """A port that refuses connections: it is taken, so that nobody else listens there meanwhile."""
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        yield taken.getsockname()[1]


@contextmanager
def silent_port() -> Iterator[int]:
    """A port that takes connections and never says a word."""
    with socket.create_server((HOST, 0)) as server:
        yield server.getsockname()[1]


# A slow line to a remote that is there


@dataclass
class Line:
    """A line to another port on loopback, and how many bytes a second pass in each direction."""

    target: int
    up: float
    down: float
    port: int = 0
    cut_after: float = math.inf
    """After so many bytes nothing passes any more, and nobody is told: a black hole."""
    passed: int = 0
    opened: int = 0
    """Number of connections so far."""

    def carry(self, here: socket.socket, there: socket.socket, rate: float) -> None:
        """Pass on what comes, at this rate, until one side ends."""
        with suppress(OSError):
            free_at = time.monotonic()
            while part := self._hold(here.recv(1 << 16)):
                there.sendall(part)
                free_at = max(free_at, time.monotonic() - 0.05) + len(part) / rate
                time.sleep(max(free_at - time.monotonic(), 0))
            there.shutdown(socket.SHUT_WR)

    def _hold(self, part: bytes) -> bytes:
        self.passed += len(part)
        while self.passed > self.cut_after:
            time.sleep(0.02)
        return part


@contextmanager
def slow_line(target: int, *, up: float = 1e9, down: float = 1e9) -> Iterator[Line]:
    """A proxy before a port. Its buffers are small, so that the sender notices how slow the line is."""
    line = Line(target, up, down)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            line.opened += 1
            with socket.create_connection((HOST, line.target)) as there:
                back = threading.Thread(target=line.carry, args=(there, self.request, line.down), daemon=True)
                back.start()
                line.carry(self.request, there, line.up)
                back.join()

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

        def server_bind(self) -> None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
            super().server_bind()

    with Server((HOST, 0), Handler) as server:
        line.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield line
        finally:
            line.cut_after = math.inf
            server.shutdown()
            thread.join()


# Programs that speak to one connection each, as inetd starts them


@contextmanager
def _inetd(
    command: Sequence[str], log: Path, started: list[subprocess.Popen[bytes]] | None = None
) -> Iterator[int]:
    """Hands each connection to a fresh `command`; yields the port. All of them are gone on leaving."""
    processes = [] if started is None else started

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with log.open("ab") as said:
                process = subprocess.Popen(
                    command,
                    stdin=self.request,
                    stdout=self.request,
                    stderr=said,
                    env={"PATH": os.environ["PATH"], **_HERMETIC},
                    start_new_session=True,
                )
            processes.append(process)

        def finish(self) -> None:
            self.request.close()  # the program has its own

    class Server(socketserver.ThreadingTCPServer):
        def shutdown_request(self, request: object) -> None:
            """Nothing: a shutdown would end the program's connection, too."""

    with Server((HOST, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()
            for process in processes:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    tree: list[psutil.Process] = []
    with suppress(psutil.Error):
        tree = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    for child in tree:
        with suppress(psutil.Error):
            child.kill()


@contextmanager
def git_daemon(
    folder: Path, *options: str, started: list[subprocess.Popen[bytes]] | None = None
) -> Iterator[str]:
    """`git daemon` over the repositories in `folder`; without `--enable=receive-pack`, for reading only.

    `started` gets the process of each connection.
    """
    command = ("git", "daemon", "--inetd", "--export-all", f"--base-path={folder}", *options)
    with _inetd(command, folder / "daemon.log", started) as port:
        yield f"git://{HOST}:{port}"


@dataclass
class SshHost:
    """An sshd with keys of its own, and what a client needs to reach it."""

    folder: Path
    port: int = 0

    @property
    def command(self) -> str:
        """For `core.sshCommand`: the right key, and no configuration but this."""
        files = f"-o UserKnownHostsFile={self.folder}/known_hosts -o GlobalKnownHostsFile=/dev/null"
        return (
            f"ssh -F /dev/null -p {self.port} -i {self.folder}/client {files} -o IdentitiesOnly=yes "
            "-o IdentityAgent=none -o StrictHostKeyChecking=yes"
        )

    def url(self, path: Path) -> str:
        return f"ssh://{HOST}{path}"

    def introduce(self) -> None:
        """The client learns the host's key as it is now."""
        key = (self.folder / "host.pub").read_text()
        (self.folder / "known_hosts").write_text(f"[{HOST}]:{self.port} {key}")

    def let_in(self, *, options: str = "") -> None:
        """Accept the client's key, with `options` of `authorized_keys`."""
        (self.folder / "authorized_keys").write_text(f"{options} {(self.folder / 'client.pub').read_text()}")

    def keep_out(self) -> None:
        """Forget the client's key."""
        (self.folder / "authorized_keys").write_text("")

    def change_host_key(self) -> None:
        """As a host does that was set up anew, or somebody who sits in between."""
        for name in ("host", "host.pub"):
            (self.folder / name).unlink()
        self.make_key("host")

    def make_key(self, name: str) -> None:
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)], check=True
        )


@contextmanager
def sshd(folder: Path, **options: str) -> Iterator[SshHost]:
    """An OpenSSH server that lets the client in, and whose key the client knows. `options` of its own."""
    provide("sshd", package="openssh-server")
    folder.mkdir()
    host = SshHost(folder)
    host.make_key("host")
    host.make_key("client")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where sshd gives up its privileges
    settings = {
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "authorized_keys",
        "PasswordAuthentication": "no",
        "KbdInteractiveAuthentication": "no",
        "PermitRootLogin": "yes",
        "StrictModes": "no",
        "UsePAM": "no",
        "PrintMotd": "no",
        "PidFile": "none",
        "SetEnv": " ".join(f"{name}={value}" for name, value in _HERMETIC.items()),
        **options,
    }
    (folder / "config").write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
    server = next(
        path
        for path in (*(Path(each, "sshd") for each in os.environ["PATH"].split(":")), Path("/usr/sbin/sshd"))
        if path.exists()
    )
    command = (str(server), "-i", "-e", "-f", str(folder / "config"))
    with _inetd(command, folder / "sshd.log") as host.port:
        host.introduce()
        host.let_in()
        yield host


# HTTP


@dataclass
class Exchange:
    """One request, and what can be done with it."""

    handler: BaseHTTPRequestHandler
    body: bytes
    over: threading.Event
    """Set when the server ends."""
    folder: Path = Path()
    """Where git's own server finds repositories."""

    @property
    def service(self) -> str:
        """What the client wants: `git-receive-pack` to push, `git-upload-pack` to look or fetch."""
        address = urlsplit(self.handler.path)
        return parse_qs(address.query).get("service", [address.path.rpartition("/")[2]])[0]

    @property
    def is_push(self) -> bool:
        """Whether this is the push itself, not what is asked before it."""
        return self.handler.command == "POST" and self.service == "git-receive-pack"

    def run(self) -> bytes:
        """What git's own server does with the request and says to it: headers, an empty line, a body."""
        address = urlsplit(self.handler.path)
        headers = self.handler.headers
        env = {
            "PATH": os.environ["PATH"],
            **_HERMETIC,
            "GIT_PROJECT_ROOT": str(self.folder),
            "GIT_HTTP_EXPORT_ALL": "1",
            "PATH_INFO": address.path,
            "QUERY_STRING": address.query,
            "REQUEST_METHOD": self.handler.command,
            "CONTENT_TYPE": headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(self.body)),
            "HTTP_CONTENT_ENCODING": headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": headers.get("Git-Protocol", ""),
            "REMOTE_USER": "somebody",  # whom git allows to push
            "REMOTE_ADDR": HOST,
        }
        done = subprocess.run(
            ["git", "http-backend"], input=self.body, env=env, capture_output=True, check=False
        )
        return done.stdout

    def answer(self, said: bytes, *, cut: int | None = None) -> None:
        """Send what `run` gave; only the first `cut` bytes of its body, if it is cut."""
        head, _, body = said.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().splitlines())
        code = int(fields.pop("Status", "200").split()[0])
        self.reply(code, body, headers=fields, cut=cut)

    def reply(
        self,
        code: int,
        body: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        cut: int | None = None,
    ) -> None:
        self.handler.send_response(code)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.handler.send_header(name, value)
        self.handler.end_headers()
        self.handler.wfile.write(body[:cut])
        if cut is not None:
            self.hang_up()

    def hang_up(self) -> None:
        """End the connection, at once."""
        self.handler.close_connection = True
        with suppress(OSError):
            self.handler.connection.shutdown(socket.SHUT_RDWR)


def serve(exchange: Exchange) -> None:
    """As git's own server does."""
    exchange.answer(exchange.run())


def says(code: int, text: str = "", **headers: str) -> Callable[[Exchange], None]:
    """This status, and words that git shows to a person."""
    fields = {"Content-Type": "text/plain", **{k.replace("_", "-"): v for k, v in headers.items()}}
    return lambda exchange: exchange.reply(code, text.encode(), headers=fields)


def stalls(exchange: Exchange) -> None:
    """Never an answer, and never an end."""
    exchange.over.wait()
    exchange.hang_up()


def cuts_before(exchange: Exchange) -> None:
    """The push arrives, and is thrown away."""
    exchange.hang_up()


def cuts_after(exchange: Exchange) -> None:
    """The push is applied, and nobody is told."""
    exchange.run()
    exchange.hang_up()


def cuts_the_answer(exchange: Exchange) -> None:
    """The push is applied, and only the beginning of the answer is sent."""
    exchange.answer(exchange.run(), cut=9)


def asks_for(user: str, password: str) -> Callable[[Exchange], None]:
    """Serves only who has these."""
    right = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
    wrong = says(401, "Who are you?", WWW_Authenticate='Basic realm="posts"')

    def behave(exchange: Exchange) -> None:
        (serve if exchange.handler.headers.get("Authorization") == right else wrong)(exchange)

    return behave


@dataclass
class Late:
    """Takes a push, hangs up, and applies it only when told, as a slow server does."""

    taken: list[Exchange] = field(default_factory=list)

    def __call__(self, exchange: Exchange) -> None:
        self.taken.append(exchange)
        exchange.hang_up()

    def land(self) -> None:
        """Apply what was taken, now."""
        for exchange in self.taken:
            exchange.run()


@dataclass
class HttpRemote:
    """What the server does with requests; both may be changed at any time."""

    folder: Path
    port: int = 0
    behaviour: Callable[[Exchange], None] = serve
    on_push: Callable[[Exchange], None] | None = None
    """Instead, for the push itself."""
    asked: list[str] = field(default_factory=list)

    def url(self, repository: Path, user: str = "") -> str:
        """The address of a repository in the folder, with `user:password@` if given."""
        return f"http://{user}{HOST}:{self.port}/{repository.relative_to(self.folder)}"

    def heal(self) -> None:
        """Serve everything from now on."""
        self.behaviour, self.on_push = serve, None


@contextmanager
def http_server(behave: Callable[[Exchange], None], certificate: Path | None = None) -> Iterator[int]:
    """A server on loopback, by TLS with a certificate; yields its port."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _do(self) -> None:
            with suppress(OSError):  # the client has had enough
                behave(Exchange(self, _body(self), over))

        do_GET = do_POST = _do  # noqa: N815 - names that http.server looks for

        def log_message(self, *_: object) -> None:
            """Nothing to the test's output."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

    with Server((HOST, 0), Handler) as server:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server.server_port
        finally:
            over.set()
            server.shutdown()
            thread.join()


@contextmanager
def http_remote(folder: Path) -> Iterator[HttpRemote]:
    """`git http-backend` over the repositories in `folder`, behind a server that can be told to fail."""
    remote = HttpRemote(folder)

    def behave(exchange: Exchange) -> None:
        exchange.folder = folder
        remote.asked.append(f"{exchange.handler.command} {exchange.service}")
        (remote.on_push if exchange.is_push and remote.on_push else remote.behaviour)(exchange)

    with http_server(behave) as remote.port:
        yield remote


def _body(handler: BaseHTTPRequestHandler) -> bytes:
    source = cast("IO[bytes]", handler.rfile)
    if "chunked" not in handler.headers.get("Transfer-Encoding", ""):
        return source.read(int(handler.headers.get("Content-Length", "0")))
    parts: list[bytes] = []
    while size := int(source.readline().split(b";")[0] or b"0", 16):
        parts.append(source.read(size))
        source.readline()
    source.readline()
    return b"".join(parts)


# What our side leaves


def left_over(worktree: Path) -> list[str]:
    """The processes that work in the site's repository: git, and whatever it has started there."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cwd").readlink().is_relative_to(worktree):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found
