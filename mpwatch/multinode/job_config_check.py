"""Compare the options of this node with the options of the job's first node, before this node joins a rendezvous.

This module runs in the node thread. It uses these keys in the store of the job, which all rounds share:

    job_config           the JobConfig of the first node, as a PublishedJobConfig
    job_config/writers   how many nodes have tried to write job_config; the first of them writes it
    served_elsewhere     exists if the driver of mpwatch.cluster serves the store, and not a node
    history              the RestartHistory of a job whose nodes were all lost, for new nodes; the driver writes it
    expected_nodes       the ExpectedNodes, if the driver knows how many nodes can come at present (rounds.py)
    refused              a node that could not join because of its JobConfig, and the reason, as a RefusedNode
"""

import platform
from threading import Event

from mpwatch.errors import LaunchError
from mpwatch.multinode.protocol.job_config import describe_difference
from mpwatch.multinode.protocol.json_codec import from_json, to_json
from mpwatch.multinode.protocol.messages import JobConfig, PublishedJobConfig, RefusedNode, RestartHistory
from mpwatch.multinode.protocol.signed_json import InvalidEntryError, SecretMismatchError, SignedJson
from mpwatch.multinode.rendezvous.cancellable_wait import Deadline
from mpwatch.multinode.rendezvous.client import JOB_OVER_KEY
from mpwatch.multinode.rendezvous.errors import JobClosedError, StoreLostError
from mpwatch.multinode.rendezvous.store import PrefixedStore
from mpwatch.options.rendezvous import Rendezvous
from mpwatch.os_support.clock import monotonic

STORE_NODE_SECONDS = 1.0  # the other nodes wait this long for the JobConfig of the node that serves the store
JOB_CONFIG_KEY, WRITERS_KEY, REFUSED_KEY = "job_config", "job_config/writers", "refused"
SERVED_ELSEWHERE_KEY, HISTORY_KEY = "served_elsewhere", "history"


class JobConfigCheck:
    """Checks the JobConfig of this node, and finds out whether another node was refused because of its JobConfig.

    Args:
        rendezvous: the options of the rendezvous.
        job_config: the JobConfig of this node.
        signed_json: encodes and verifies the entries in the store of the job.
        cancelled: another thread sets this event to end the check early.
    """

    def __init__(self, rendezvous: Rendezvous, job_config: JobConfig, signed_json: SignedJson, cancelled: Event) -> None:
        self._rendezvous, self._job_config = rendezvous, job_config
        self._signed_json, self._cancelled = signed_json, cancelled

    def check(self, store: PrefixedStore, *, is_host: bool) -> None:
        """Compare the JobConfig of this node with the JobConfig of the first node, which may be this node.

        If the JobConfigs differ, write the difference into the store, so that other nodes can read it with
        `describe_refusal`.

        Args:
            store: the store of the job.
            is_host: whether this node serves the store.

        Raises:
            LaunchError: the JobConfigs differ.
            JobClosedError: the job is over.
            StoreLostError: the store cannot be reached.
            CancelledError: the check was cancelled.
        """
        job = f"job {self._rendezvous.run_id!r} at {self._rendezvous.endpoint}"
        if store.check([JOB_OVER_KEY]):
            raise JobClosedError(f"{job} is over")
        try:
            first = self._publish_or_read(store, is_host=is_host)
            reason = describe_difference(
                self._job_config, first.job_config, platform.node(), f"{first.hostname}, which came first"
            )
        except InvalidEntryError as error:
            reason = f"what the first node of the job has written cannot be read: {error}"
        if reason:
            refused = RefusedNode(platform.node(), reason)
            store.set(REFUSED_KEY, self._signed_json.encode(REFUSED_KEY, to_json(refused)))
            raise LaunchError(f"{job}: {reason}")

    def describe_refusal(self, store: PrefixedStore) -> str:
        """Return an error text that names the refused node, or "" if no node was refused."""
        try:
            if not store.check([REFUSED_KEY]):
                return ""
            refused = from_json(RefusedNode, self._signed_json.decode(REFUSED_KEY, store.get(REFUSED_KEY)))
        except SecretMismatchError as error:
            return f"A node was refused, and what it has written is {error}"
        except (StoreLostError, InvalidEntryError):
            return ""
        return f"{refused.hostname} was refused: {refused.reason}"

    def read_history(self, store: PrefixedStore) -> RestartHistory:
        """Return the restart history from the store, or an empty history if the store has none.

        Raises StoreLostError and LaunchError.
        """
        if not store.check([HISTORY_KEY]):
            return RestartHistory()
        try:
            return from_json(RestartHistory, self._signed_json.decode(HISTORY_KEY, store.get(HISTORY_KEY)))
        except InvalidEntryError as error:
            raise LaunchError(f"the restart history of the job cannot be read: {error}") from error

    def _publish_or_read(self, store: PrefixedStore, *, is_host: bool) -> PublishedJobConfig:
        """Return the JobConfig of the first node. If no node has published a JobConfig, publish the JobConfig of this node.

        If another node serves the store, wait a short time, so that the other node can publish first. If the job refused the
        node that serves the store, the job would lose the store. If the first node is lost before it has published its
        JobConfig, another node publishes its own JobConfig after `node_timeout`.

        Raises InvalidEntryError.
        """
        is_served_by_other_node = (
            self._rendezvous.backend == "c10d" and not is_host and not store.check([SERVED_ELSEWHERE_KEY])
        )
        deadline = self._make_deadline(STORE_NODE_SECONDS if is_served_by_other_node else 0.0)
        may_write = is_host
        while not store.check([JOB_CONFIG_KEY]):
            if deadline.wait_before_retry():
                continue
            if may_write or store.add(WRITERS_KEY, 1) == 1:
                published = PublishedJobConfig(platform.node(), self._job_config)
                store.set(JOB_CONFIG_KEY, self._signed_json.encode(JOB_CONFIG_KEY, to_json(published)))
            deadline = self._make_deadline(self._rendezvous.node_timeout)
            may_write = True  # if this deadline passes, too
        return from_json(PublishedJobConfig, self._signed_json.decode(JOB_CONFIG_KEY, store.get(JOB_CONFIG_KEY)))

    def _make_deadline(self, seconds: float) -> Deadline:
        return Deadline(monotonic() + seconds, self._cancelled)
