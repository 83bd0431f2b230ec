"""The options that must be the same on all nodes of a job, and the error text if they differ."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from mpwatch.options.spec import WorkerSpec
from mpwatch.version import __version__


def list_job_options(spec: WorkerSpec[Any]) -> dict[str, str]:
    rendezvous = spec.rendezvous
    assert rendezvous is not None
    least, most = rendezvous.min_nodes, rendezvous.max_nodes
    options = {
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
    return {name: str(value) for name, value in options.items()}


def describe_difference(ours: Mapping[str, str], theirs: Mapping[str, str], our_name: str, their_name: str) -> str:
    """Return an error text about the first option that differs between two nodes, or "" if none differs."""
    for name, value in ours.items():
        their_value = theirs.get(name, "nothing")
        if their_value != value:
            return (
                f"the nodes of the job disagree about {name}: {value} on {our_name}, {their_value} on {their_name}. Make the"
                " same call on all nodes, with the same versions of mpwatch and torch"
            )
    return ""
