"""`JobStore` is the store through which the nodes of a job find one another. The driver serves the store."""

from typing import Any

from mpwatch.multinode.protocol.json_codec import to_json
from mpwatch.multinode.protocol.messages import ExpectedNodes, RestartHistory
from mpwatch.multinode.protocol.signed_json import SignedJson


class JobStore:
    """The store that all nodes of one job use.

    Args:
        address: the address of the driver.
        run_id: name of the job.
        key: the secret of the job.

    Attributes:
        port: the port of the store.
    """

    def __init__(self, address: str, run_id: str, key: bytes) -> None:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch's stubs do not export them

        from mpwatch.multinode.job_config_check import SERVED_ELSEWHERE_KEY  # imports torch

        self._signed_json = SignedJson(key, run_id)
        self._server: Any = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self._store: Any = PrefixStore(f"mpwatch.{run_id}", self._server)
        self._store.set(SERVED_ELSEWHERE_KEY, "1")  # else the nodes wait a second for that node
        self.port: int = self._server.port

    def write_history(self, history: RestartHistory) -> None:
        """Write the RestartHistory of the job to the store, so that new nodes can read it.

        Each node sends its RestartHistory to the leader of the nodes. The leader uses the RestartHistory with the most
        attempts.
        """
        from mpwatch.multinode.job_config_check import HISTORY_KEY

        self._store.set(HISTORY_KEY, self._signed_json.encode(HISTORY_KEY, to_json(history)))

    def write_expected_nodes(self, count: int) -> None:
        """Let new nodes start their ranks as soon as `count` nodes have joined the job."""
        from mpwatch.multinode.rendezvous.rounds import EXPECTED_NODES_KEY

        self._store.set(EXPECTED_NODES_KEY, self._signed_json.encode(EXPECTED_NODES_KEY, to_json(ExpectedNodes(count))))

    def close(self) -> None:
        """End the server by deleting all references to it.

        The server ends even if a traceback keeps this JobStore alive.
        """
        self._store = self._server = None
