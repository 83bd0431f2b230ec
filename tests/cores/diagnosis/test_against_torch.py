"""The errors that the stores of torch really raise, and what the diagnosis takes them for."""

import datetime
import socket

import pytest
from torch.distributed import ProcessGroupGloo, TCPStore

import mpwatch
from mpwatch.watcher.diagnosis.peer_errors import PeerErrorKind, classify_exception
from mpwatch.wire.exceptions.encoder import ExceptionEncoder

SHORT = datetime.timedelta(seconds=0.5)


def lose_the_server_of_the_store():
    server = TCPStore("127.0.0.1", 0, is_master=True)
    client = TCPStore("127.0.0.1", server.port, is_master=False)
    del server
    for _ in range(2):
        client.set("key", "value")
        client.get("key")


def open_a_store_at_a_used_port():
    with socket.create_server(("0.0.0.0", 0)) as server:
        TCPStore("127.0.0.1", server.getsockname()[1], is_master=True)


EXPECTED = {
    lambda: TCPStore("127.0.0.1", 0, is_master=True, timeout=SHORT).get("missing key"): PeerErrorKind.PEER_TIMEOUT,
    lose_the_server_of_the_store: PeerErrorKind.CONNECTION_LOST,
    # nothing listens there
    lambda: TCPStore("127.0.0.1", 1, is_master=False, timeout=SHORT): PeerErrorKind.PEER_TIMEOUT,
    # no second client comes
    lambda: TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=SHORT, wait_for_workers=True): PeerErrorKind.PEER_TIMEOUT,
    open_a_store_at_a_used_port: PeerErrorKind.HINT,
    lambda: ProcessGroupGloo.create_device(interface="no such device"): None,
}


@pytest.mark.slow
def test_errors_of_torch_are_classified():
    def encode_error(function):
        with pytest.raises(RuntimeError) as caught:
            function()
        return ExceptionEncoder(caught.value).plain()

    # in a rank, since torch leaves descriptors open
    encoded = mpwatch.run(lambda functions: [*map(encode_error, functions)], 1, args=([*EXPECTED],))[0]
    assert [*map(classify_exception, encoded)] == [*EXPECTED.values()]
