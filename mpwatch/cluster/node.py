"""The code that runs on each node of a job: `run_node`, and the node's end of its link to the driver."""

import pickle
import platform
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import wait
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any

import mpwatch
from mpwatch.api import make_handle
from mpwatch.cluster.engine import NodeOutcome
from mpwatch.live_view.live import Ask, Display, LiveView
from mpwatch.nodes.address import Endpoint
from mpwatch.nodes.frames import Framing
from mpwatch.nodes.joining import RETRY_SECONDS
from mpwatch.nodes.json_codec import InvalidMessageError
from mpwatch.nodes.messages import LinkHello, encode_message
from mpwatch.options.log_spec import STREAMS
from mpwatch.options.spec import WorkerSpec
from mpwatch.wire.pickling.pickler import pack_by_value

CONNECT_TRIES, CONNECT_SECONDS = 20, 10.0
READ_SIZE = 1 << 16
ORPHAN_SECONDS = 5.0  # for ranks to end by SIGINT when the driver is gone; then they are killed


@dataclass(frozen=True)
class NodeSpec:
    number: int
    nprocs: Any
    call: bytes
    """The function and the options of `mpwatch.run`, pickled by cloudpickle."""
    rendezvous: mpwatch.Rendezvous
    """Its endpoint is the address of the driver."""
    find_address: Callable[[], str] | None
    """Returns the address of the node. None means that mpwatch finds the address."""
    stop_signals: Collection[int]
    """See `Engine`."""
    log_options: Mapping[str, Any]
    view_period: float | None
    """Seconds between two statuses of the ranks. None means that the driver shows no view."""
    wants_progress: bool
    version: str = str(mpwatch.__version__)


def run_node(spec: NodeSpec) -> NodeOutcome:
    """Run the ranks of this node, and return their results."""
    received: list[int] = []  # before `mpwatch.run` has its own handlers
    for number in spec.stop_signals:  # for good: submitit's handler would queue a job again that the driver has given up
        signal.signal(number, lambda signum, _: received.append(signum))
    with closing(_DriverLink(spec.number, spec.rendezvous)) as link:
        try:
            with _make_handle(spec, link) as handle:
                follower = threading.Thread(target=_follow_driver, args=(link, handle), name="mpwatch link")
                follower.start()
                try:
                    if received:
                        handle._ask_to_stop(signal.Signals(received[0]).name)
                    if spec.stop_signals:
                        handle._execute()  # here, since Python runs signal handlers in the main thread only
                    else:
                        handle._start()
                    return NodeOutcome.pack(handle.result())
                finally:
                    link.send("end", None)
                    link.shut_down()
                    follower.join()
        except Exception as error:  # noqa: BLE001  the driver raises it
            link.send("end", None)
            return NodeOutcome.pack(error)


class _DriverLink:
    """A node's connection to the driver. Any thread may send. If the connection is lost, `send` does nothing."""

    def __init__(self, number: int, rendezvous: mpwatch.Rendezvous) -> None:
        self._lock = threading.Lock()
        endpoint = Endpoint.parse(rendezvous.endpoint)
        for tries_left in reversed(range(CONNECT_TRIES)):
            try:
                self._connect(number, endpoint, rendezvous.key)
                return
            except (OSError, InvalidMessageError) as error:
                if not tries_left:
                    raise ConnectionError(
                        f"{platform.node()} cannot connect to the driver at {endpoint}: {error}"
                    ) from error
            time.sleep(RETRY_SECONDS)  # if many nodes connect at once, the server refuses some

    def _connect(self, number: int, endpoint: Endpoint, key: bytes) -> None:
        self._framing = Framing(key, is_server=False)
        self._socket = socket.create_connection((endpoint.host, endpoint.port), CONNECT_SECONDS)
        try:
            self._socket.sendall(self._framing.greeting)
            while not self._framing.is_greeted:
                self._receive()
            self._socket.sendall(self._framing.encode(encode_message(LinkHello(number, platform.node()))))
            while not (frames := self._receive()):  # the answer
                pass
            self._is_stop_requested = len(frames) > 1  # a request to stop may have come with it
            self._socket.settimeout(None)
        except BaseException:
            self._socket.close()
            raise

    def send(self, kind: str, content: object) -> None:
        data = pickle.dumps((kind, content))
        with self._lock, suppress(OSError):
            self._socket.sendall(self._framing.encode(data))

    def wait_for_stop(self) -> None:
        """Return when the driver has requested it. Raises OSError or InvalidMessageError if the connection is lost."""
        while not self._is_stop_requested:
            self._is_stop_requested = bool(self._receive())

    def _receive(self) -> list[bytes]:
        if not (data := self._socket.recv(READ_SIZE)):
            raise ConnectionError("the driver has closed the connection")
        return list(self._framing.feed(data))

    def shut_down(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def _make_handle(spec: NodeSpec, link: _DriverLink) -> "mpwatch.RunHandle[Any]":
    if spec.version != mpwatch.__version__:
        raise mpwatch.LaunchError(
            f"node {spec.number} ({platform.node()}) has mpwatch {mpwatch.__version__}, but the driver has {spec.version};"
            " install the same version on all nodes"
        )
    rendezvous = spec.rendezvous
    if spec.find_address is not None:
        rendezvous = replace(rendezvous, local_addr=spec.find_address())
    log_options = {**spec.log_options, "prefix": spec.log_options["prefix"] or "[{node}:{rank}] "}
    logs = mpwatch.LogSpec(**log_options)
    streams: dict[str, Any] = {stream: _LinkStream(link, stream) for stream in STREAMS if not logs.inherits(stream)}
    try:
        fn, options = pickle.loads(spec.call)
    except Exception as error:
        raise mpwatch.LaunchError(
            f"node {spec.number} ({platform.node()}) cannot load the function and its arguments:"
            f" {type(error).__name__}: {error}; each node needs the modules of the driver's program"
        ) from error

    def observer(event: mpwatch.Event) -> None:
        link.send("event", pack_by_value(event))

    run_spec: WorkerSpec[Any] = WorkerSpec(
        fn=fn,
        nprocs=spec.nprocs,
        rendezvous=rendezvous,
        logs=mpwatch.LogSpec(**log_options, **streams),
        on_event=observer,
        on_progress=observer if spec.wants_progress else None,
        progress=False,
        **options,
    )
    if spec.stop_signals:
        run_spec = replace(run_spec, stop=replace(run_spec.stop_policy, signals=spec.stop_signals))
    period = spec.view_period

    def make_view(ask: Ask) -> LiveView | None:
        if period is None:
            return None
        show = lambda statuses, _: list(statuses)  # noqa: E731
        return LiveView(lambda: _LinkDisplay(link, period), ask, show, starts_at_once=True, first_period=period)

    return make_handle(run_spec, make_view, check=False)


def _follow_driver(link: _DriverLink, handle: "mpwatch.RunHandle[Any]") -> None:
    """Stop the ranks when the driver requests it, or when the connection to the driver is lost."""
    try:
        link.wait_for_stop()
    except (OSError, InvalidMessageError):
        handle._interrupt()
        wait([handle], ORPHAN_SECONDS)
    handle._interrupt()


class _LinkStream:
    def __init__(self, link: _DriverLink, stream: str) -> None:
        self._link, self._stream = link, stream

    def write(self, text: str) -> None:
        self._link.send("output", (self._stream, text))


class _LinkDisplay(Display):
    """Sends the statuses of the node's ranks to the driver."""

    def __init__(self, link: _DriverLink, period: float) -> None:
        self._link, self.period = link, period

    def show(self, snapshot: Any) -> None:
        self._link.send("statuses", snapshot)
