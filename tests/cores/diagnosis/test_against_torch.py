"""The errors that the stores of torch really raise, and what the diagnosis takes them for."""

import datetime
import socket

import pytest
from torch.distributed import ProcessGroupGloo, TCPStore

import mpwatch
from mpwatch.watcher.diagnosis.peer_errors import PeerErrorKind, classify_exception
from mpwatch.wire.exceptions.encoder import ExceptionEncoder

SHORT = datetime.timedelta(seconds=0.5)


def gets_a_key_that_no_client_sets():
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=SHORT)
    store.get("missing key")


def loses_the_server_of_the_store():
    server = TCPStore("127.0.0.1", 0, is_master=True)
    client = TCPStore("127.0.0.1", server.port, is_master=False)
    del server
    for _ in range(2):
        client.set("key", "value")
        client.get("key")


def connects_to_a_store_without_a_server():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    TCPStore("127.0.0.1", port, is_master=False, timeout=SHORT)


def waits_for_clients_of_the_store():
    TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=datetime.timedelta(seconds=1), wait_for_workers=True)


def opens_a_store_at_a_used_port():
    with socket.create_server(("0.0.0.0", 0)) as server:
        TCPStore("127.0.0.1", server.getsockname()[1], is_master=True)


def uses_a_missing_gloo_device():
    ProcessGroupGloo.create_device(interface="no such device")


EXPECTED = {
    gets_a_key_that_no_client_sets: PeerErrorKind.PEER_TIMEOUT,
    loses_the_server_of_the_store: PeerErrorKind.CONNECTION_LOST,
    connects_to_a_store_without_a_server: PeerErrorKind.PEER_TIMEOUT,
    waits_for_clients_of_the_store: PeerErrorKind.PEER_TIMEOUT,
    opens_a_store_at_a_used_port: PeerErrorKind.HINT,
    uses_a_missing_gloo_device: None,
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
