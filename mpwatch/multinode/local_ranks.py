"""Start and stop the ranks of this node, on behalf of the node thread.

node thread --- commands ---> watcher thread: start the ranks, stop them, renew their lease
            --- updates ----> caller's thread: prepare the ranks, decisions, errors
"""

import logging
import socket
from collections import deque

from mpwatch.multinode.node_machine import PrepareRanks, ReportAttempt, ReportJob
from mpwatch.multinode.protocol.messages import StartAttempt
from mpwatch.watcher.commands import CommandQueue, RestartCommand
from mpwatch.watcher.machine.transitions import CancelAttempt, Lease, Restart
from mpwatch.watcher.processes.rank_environment import reserve_port
from mpwatch.watcher.restarts.restart_group import RankSetup

log = logging.getLogger("mpwatch")
NodeUpdate = PrepareRanks | ReportAttempt | ReportJob | BaseException
# Fractions of node_timeout after which the ranks of a node that is cut off get SIGTERM, and then SIGKILL.
STOP_SHARE, KILL_SHARE = 0.65, 0.85


class LocalRanks:
    """The ranks of one node, in all rounds.

    Args:
        commands: the queue of the watcher thread.
        node_timeout: seconds without a heartbeat after which the other nodes may go on without this node.
    """

    def __init__(self, commands: CommandQueue, node_timeout: float) -> None:
        self._commands = commands
        self._node_timeout = node_timeout
        self._updates: deque[NodeUpdate] = deque()
        self._setups: list[RankSetup] | None = None  # of ranks that can be started
        self._setups_attempt = -1
        self._wanted_start: StartAttempt | None = None  # the latest one that the caller's thread had to prepare
        self._starts = 0
        self._port_socket: socket.socket | None = None  # keeps the port reserved

    @property
    def has_started(self) -> bool:
        """Whether ranks have ever been started."""
        return self._starts > 0

    @property
    def prepared_attempt(self) -> int | None:
        """The attempt whose ranks can be started now, or None. It may have been stopped meanwhile."""
        return self._setups_attempt if self._setups is not None else None

    def notify_caller(self, update: NodeUpdate) -> None:
        """Send the update to the caller's thread."""
        if isinstance(update, PrepareRanks):
            self._setups, self._wanted_start = None, update.start
        self._updates.append(update)
        self._commands.caller_wakeup.wake()

    def take_updates(self) -> list[NodeUpdate]:
        """Return the updates for the caller's thread since the last call."""
        return [self._updates.popleft() for _ in range(len(self._updates))]

    def set_prepared(self, start: StartAttempt, setups: list[RankSetup]) -> None:
        """Keep the environments that the caller's thread has made, unless a later attempt has replaced this one."""
        if start is self._wanted_start:
            self._setups, self._setups_attempt = setups, start.attempt

    def start(self) -> None:
        """Start the ranks that are prepared."""
        assert self._setups is not None
        setups, self._setups = self._setups, None
        ranks = tuple(worker.rank for worker, _ in setups)
        self._commands.post(RestartCommand(Restart(ranks[0], generation=self._starts, ranks=ranks), setups))
        self._starts += 1

    def stop(self, reason: str) -> None:
        """Stop the ranks, and log the reason."""
        log.info("the ranks of this node are stopped: %s", reason)
        self._commands.post(CancelAttempt())

    def renew_lease(self, since: float) -> None:
        """Let the ranks run on: at time `since` this node has sent a heartbeat.

        If the lease is not renewed, the watcher thread stops the ranks before the other nodes go on without this node.
        """
        stop_at, kill_at = (since + share * self._node_timeout for share in (STOP_SHARE, KILL_SHARE))
        self._commands.post(Lease(stop_at, kill_at))

    def reserve_port(self) -> int:
        """Reserve a port of this host for MASTER_PORT, until the next one is reserved. Raises LaunchError."""
        earlier, self._port_socket = self._port_socket, reserve_port()  # in this order, so that the port is another one
        if earlier is not None:
            earlier.close()
        port: int = self._port_socket.getsockname()[1]
        return port

    def close(self) -> None:
        if self._port_socket is not None:
            self._port_socket.close()
