"""Integrations with trainers, clusters, IPython and pytest. Each module uses only the public names of mpwatch.

- `lightning`: runs the ranks of Lightning's Trainer and Fabric under the watcher.
- `transformers`: a callback for the Trainer of Hugging Face, which makes all ranks save and stop at the same step.
- `ray`, `dask`, `submitit`: run one job on several nodes of a cluster.
- `ipython`: the magics `%%ranks` and `%ranks`.
- `pytest_plugin`: runs tests on several ranks.

`import mpwatch` does not import an integration, and no integration imports another integration.
"""

from importlib import import_module as _import_module

_MODULES = ("dask", "ipython", "lightning", "pytest_plugin", "ray", "submitit", "transformers")


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return list(_MODULES)
