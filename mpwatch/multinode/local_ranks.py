"""What a node does to its own ranks, as the others and it have decided: by mail to the thread that watches them, and as news
for the caller's thread, whose code runs there.
"""

import logging
import socket
from collections import deque

from mpwatch.multinode import node_machine as m
from mpwatch.multinode.protocol.messages import StartAttempt
from mpwatch.watcher.commands import CommandQueue, RestartCommand
from mpwatch.watcher.machine.transitions import CancelAttempt, Lease, Restart
from mpwatch.watcher.processes.rank_environment import reserve_port
from mpwatch.watcher.restarts.restart_group import RankSetup

log = logging.getLogger("mpwatch")
NodeNews = m.PrepareRanks | m.ReportAttempt | m.ReportJob | BaseException
STOP_SHARE, KILL_SHARE = 0.65, 0.85  # of node_timeout: when ranks of a node that is cut off are stopped, and are killed


class LocalRanks:
    """Of one node, in all rounds.

    Args:
        mailbox: of the ranks' thread.
        node_timeout: seconds of silence after which the others may go on without this node.
    """

    def __init__(self, commands: CommandQueue, node_timeout: float) -> None:
        self._commands = commands
        self._node_timeout = node_timeout
        self._news: deque[NodeNews] = deque()
        self._ready: list[RankSetup] | None = None  # ranks that can be started
        self._ready_for = -1  # attempt
        self._wanted: StartAttempt | None = None
        self._starts = 0
        self._keeper: socket.socket | None = None  # of the port

    def news(self) -> list[NodeNews]:
        """What the caller's thread has to know, or to do, since the last time."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def tell(self, news: NodeNews) -> None:
        """The caller's thread."""
        if isinstance(news, m.PrepareRanks):
            self._ready, self._wanted = None, news.start
        self._news.append(news)
        self._commands.caller_wakeup.wake()

    def take(self, start: StartAttempt, setups: list[RankSetup]) -> None:
        """These can be started, if they are still wanted."""
        if start is self._wanted:
            self._ready, self._ready_for = setups, start.attempt

    def ready_for(self) -> int | None:
        """Of which attempt there are ranks that may be started now. It may have been called off since."""
        return self._ready_for if self._ready is not None else None

    def reserve_port(self) -> int:
        """A port of this host for MASTER_PORT, which is kept until another one is reserved. Raises LaunchError."""
        earlier, self._keeper = self._keeper, reserve_port()  # in this order, so that it is another one
        if earlier is not None:
            earlier.close()
        port: int = self._keeper.getsockname()[1]
        return port

    def close(self) -> None:
        """Give the port back."""
        if self._keeper is not None:
            self._keeper.close()

    @property
    def has_started(self) -> bool:
        """Whether it has ever come to that."""
        return self._starts > 0

    def start(self) -> None:
        """Start them."""
        assert self._ready is not None
        setups, self._ready = self._ready, None
        ranks = tuple(worker.rank for worker, _ in setups)
        self._commands.post(RestartCommand(Restart(ranks[0], generation=self._starts, ranks=ranks), setups))
        self._starts += 1

    def call_off(self, why: str) -> None:
        """Stop the ranks."""
        log.info("the ranks of this node are stopped: %s", why)
        self._commands.post(CancelAttempt())

    def hold(self, since: float) -> None:
        """The others knew at that time that this node is there."""
        stop_at, kill_at = (since + share * self._node_timeout for share in (STOP_SHARE, KILL_SHARE))
        self._commands.post(Lease(stop_at, kill_at))
