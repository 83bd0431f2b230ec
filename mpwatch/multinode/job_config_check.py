"""Compare the options of this node with those of the first node, before the other nodes wait for this one.

Runs in the node thread. These are the keys in the store of the job, which all rounds share:

    job_config           the JobConfig of the first node, as a PublishedJobConfig
    job_config/writers   how many nodes have wanted to write it; the first of them writes it
    served_elsewhere     is there if no node serves the store: the driver of mpwatch.cluster does
    history              the RestartHistory of a job whose nodes were all lost, for new nodes: the driver writes it
    expected_nodes       how many nodes can come at present, if the driver knows it (rounds.py)
    refused              a node that could not join because of its JobConfig, and the reason, as a RefusedNode

With a rendezvous handler of the user's own there is no store of the job. Then the leader compares the JobConfigs, after the
nodes have joined (leader.py).
"""

import platform
import time
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

STORE_NODE_SECONDS = 1.0  # the node that serves the store gets so long to publish its JobConfig first
JOB_CONFIG_KEY, WRITERS_KEY, REFUSED_KEY = "job_config", "job_config/writers", "refused"
SERVED_ELSEWHERE_KEY, HISTORY_KEY = "served_elsewhere", "history"


class JobConfigCheck:
    """Checks the JobConfig of this node, and finds out whether another node was refused because of its own.

    Args:
        rendezvous: the options of the rendezvous.
        job_config: that of this node.
        signed_json: encodes and verifies the entries of the job.
        cancelled: set by another thread to end the check early.
    """

    def __init__(self, rendezvous: Rendezvous, job_config: JobConfig, signed_json: SignedJson, cancelled: Event) -> None:
        self._rendezvous, self._job_config = rendezvous, job_config
        self._signed_json, self._cancelled = signed_json, cancelled

    def check(self, store: PrefixedStore, *, is_host: bool) -> None:
        """Compare the JobConfig of this node with that of the first node, which may be this one.

        If the two differ, write the reason into the store: nodes that wait for this one report it, too.

        Args:
            store: the store of the job.
            is_host: whether this node serves the store.

        Raises LaunchError if they differ, JobClosedError if the job is over, StoreLostError, and CancelledError.
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
        """Return which node could not join because of its JobConfig, as an error text. Return "" if none is known."""
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
        """Return the history of a job whose nodes were all lost, or an empty one. Raises StoreLostError."""
        if not store.check([HISTORY_KEY]):
            return RestartHistory()
        return from_json(RestartHistory, self._signed_json.decode(HISTORY_KEY, store.get(HISTORY_KEY)))

    def _publish_or_read(self, store: PrefixedStore, *, is_host: bool) -> PublishedJobConfig:
        """Return the JobConfig of the first node. If no node has published one, publish that of this node.

        A node that serves the store counts as the first one. If it were refused, the store would be lost. So the other nodes
        wait a moment for it. If the first writer is lost before it has written, another node writes after `node_timeout`.

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
            may_write = True  # when this deadline has passed, too
        return from_json(PublishedJobConfig, self._signed_json.decode(JOB_CONFIG_KEY, store.get(JOB_CONFIG_KEY)))

    def _make_deadline(self, seconds: float) -> Deadline:
        return Deadline(time.monotonic() + seconds, self._cancelled)
