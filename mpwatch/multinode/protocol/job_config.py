"""What has to be the same on all nodes of a job, and what is said if it is not."""

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

from mpwatch.multinode.protocol.messages import JobConfig, NodeInfo
from mpwatch.options.spec import WorkerSpec
from mpwatch.version import __version__


def terms_of(spec: WorkerSpec[Any]) -> JobConfig:
    """Of this run."""
    at = spec.rendezvous
    assert at is not None
    items = {
        "the function": spec.fn_name,
        "nnodes": f"{at.min_nodes} to {at.max_nodes}" if at.min_nodes < at.max_nodes else at.min_nodes,
        "max_restarts": spec.policy.max_restarts,
        "backend": spec.backend,
        "timeout": spec.timeout,
        "node_timeout": f"{at.node_timeout:g}",
        "the version of mpwatch": __version__,
        "the version of torch": version("torch"),
    }
    return JobConfig(tuple((name, str(value)) for name, value in items.items()))


def disagreement(cards: Iterable[NodeInfo]) -> str:
    """What these nodes do not agree in; empty if there is nothing."""
    cards = sorted(cards, key=lambda card: card.group_rank)
    for name, value in cards[0].terms.items:
        said = {f"node {card.group_rank} ({card.host})": dict(card.terms.items).get(name, "nothing") for card in cards}
        others = {who: other for who, other in said.items() if other != value}
        if others:
            who, other = next(iter(others.items()))
            return _text(name, value, f"node {cards[0].group_rank} ({cards[0].host})", other, who)
    return ""


def unlike(ours: JobConfig, theirs: JobConfig, host: str, who: str) -> str:
    """What this node does not agree in with the one that came first; empty if there is nothing."""
    first = dict(theirs.items)
    for name, value in ours.items:
        if first.get(name) != value:
            return _text(name, value, host, first.get(name, "nothing"), who)
    return ""


def _text(name: str, value: str, who: str, other: str, whose: str) -> str:
    return (
        f"the nodes of the job disagree about {name}: {value} on {who}, {other} on {whose}; make the same call on each, with"
        " the same versions of mpwatch and torch"
    )
