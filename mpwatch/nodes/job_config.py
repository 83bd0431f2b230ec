"""The options that must be the same on all nodes of a job, and the error text if they differ."""

from importlib.metadata import version
from typing import Any

from mpwatch.nodes.messages import JobConfig
from mpwatch.options.spec import WorkerSpec
from mpwatch.version import __version__


def make_job_config(spec: WorkerSpec[Any]) -> JobConfig:
    rendezvous = spec.rendezvous
    assert rendezvous is not None
    least, most = rendezvous.min_nodes, rendezvous.max_nodes
    items = {
        "the function": spec.fn_name,
        "nnodes": f"{least} to {most}" if least < most else least,
        "max_restarts": spec.policy.max_restarts,
        "backend": spec.torch_backend.name,
        "timeout": spec.timeout,
        "stall_after": spec.torch_backend.stall_after,
        "node_timeout": f"{rendezvous.node_timeout:g}",
        "the version of mpwatch": __version__,
        "the version of torch": version("torch"),
    }
    return JobConfig(tuple((name, str(value)) for name, value in items.items()))


def describe_difference(ours: JobConfig, theirs: JobConfig, our_name: str, their_name: str) -> str:
    """Return an error text about the first option that differs between two nodes, or "" if none differs."""
    their_items = dict(theirs.items)
    for name, value in ours.items:
        their_value = their_items.get(name, "nothing")
        if their_value != value:
            return _describe(name, value, our_name, their_value, their_name)
    return ""


def _describe(name: str, value: str, node: str, other_value: str, other_node: str) -> str:
    return (
        f"the nodes of the job disagree about {name}: {value} on {node}, {other_value} on {other_node}. Make the same call"
        " on all nodes, with the same versions of mpwatch and torch"
    )
