"""Run a Python function on N processes, and watch these processes. See `run` and `main`.

mpwatch imports the module of a public name when a program first uses this name. If `import mpwatch` imported all modules,
each rank would start more slowly.
"""

from importlib import import_module

TYPE_CHECKING = False  # a rank must not pay for the import of typing
if TYPE_CHECKING:
    from mpwatch import events as events
    from mpwatch.api import main, run, submit
    from mpwatch.errors import ItemFailedError, LaunchError, MpwatchError, RunFailedError, RunTimeoutError
    from mpwatch.events.types import Event
    from mpwatch.group import WorkerGroup
    from mpwatch.item_map import map as map  # noqa: A004  it does what the built-in function does
    from mpwatch.options.backend import Backend
    from mpwatch.options.log_spec import LogSpec
    from mpwatch.options.per_rank import PerRank
    from mpwatch.options.placement import Placement
    from mpwatch.options.rendezvous import Rendezvous
    from mpwatch.options.restart_policy import RestartPolicy
    from mpwatch.options.spec import RunOptions, WorkerSpec
    from mpwatch.options.stop_policy import StopPolicy
    from mpwatch.options.worker_info import Worker
    from mpwatch.results.collective import Collective, CollectiveState
    from mpwatch.results.failure import FailureKind, ItemFailure, ProcessFailure
    from mpwatch.results.model import Attempt, Lateness, Progress, WorkerState
    from mpwatch.results.run_result import RunResult
    from mpwatch.run_handle import RunHandle
    from mpwatch.running_jobs import Job, attach, jobs
    from mpwatch.script import Script
    from mpwatch.version import __version__
    from mpwatch.worker.context import current_worker, heartbeat, report, request_stop, should_stop

__all__ = [
    "Attempt",
    "Backend",
    "Collective",
    "CollectiveState",
    "Event",
    "FailureKind",
    "ItemFailedError",
    "ItemFailure",
    "Job",
    "Lateness",
    "LaunchError",
    "LogSpec",
    "MpwatchError",
    "PerRank",
    "Placement",
    "ProcessFailure",
    "Progress",
    "Rendezvous",
    "RestartPolicy",
    "RunFailedError",
    "RunHandle",
    "RunOptions",
    "RunResult",
    "RunTimeoutError",
    "Script",
    "StopPolicy",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
    "__version__",
    "attach",
    "current_worker",
    "heartbeat",
    "jobs",
    "main",
    "map",
    "report",
    "request_stop",
    "run",
    "should_stop",
    "submit",
]

_NAMES = {  # by module
    ".api": ("main", "run", "submit"),
    ".errors": ("ItemFailedError", "LaunchError", "MpwatchError", "RunFailedError", "RunTimeoutError"),
    ".events.types": ("Event",),
    ".group": ("WorkerGroup",),
    ".item_map": ("map",),
    ".options.backend": ("Backend",),
    ".options.log_spec": ("LogSpec",),
    ".options.per_rank": ("PerRank",),
    ".options.placement": ("Placement",),
    ".options.rendezvous": ("Rendezvous",),
    ".options.restart_policy": ("RestartPolicy",),
    ".options.spec": ("RunOptions", "WorkerSpec"),
    ".options.stop_policy": ("StopPolicy",),
    ".options.worker_info": ("Worker",),
    ".results.collective": ("Collective", "CollectiveState"),
    ".results.failure": ("FailureKind", "ItemFailure", "ProcessFailure"),
    ".results.model": ("Attempt", "Lateness", "Progress", "WorkerState"),
    ".results.run_result": ("RunResult",),
    ".run_handle": ("RunHandle",),
    ".running_jobs": ("Job", "attach", "jobs"),
    ".script": ("Script",),
    ".version": ("__version__",),
    ".worker.context": ("current_worker", "heartbeat", "report", "request_stop", "should_stop"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
_PACKAGES = ("events", "integrations")


def __getattr__(name: str) -> object:
    if name in _PACKAGES:  # so that mpwatch.events.JsonLines(...) works without an import of its own
        return import_module(f".{name}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name], __name__), name)
    return value


def load_ipython_extension(shell: object) -> None:
    """Register the magics `%%ranks` and `%ranks`. IPython calls this function when the user enters `%load_ext mpwatch`."""
    import_module(".integrations.ipython", __name__).register(shell)


def unload_ipython_extension(shell: object) -> None:
    """IPython calls this after `%unload_ext mpwatch`. The WorkerGroup of the magics is closed."""
    import_module(".integrations.ipython", __name__).unregister(shell)


def __dir__() -> list[str]:  # what a tab key offers
    return [*__all__, *_PACKAGES]
