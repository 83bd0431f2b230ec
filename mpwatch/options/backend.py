"""`Backend` says which process group of torch.distributed the ranks have, and how it is watched."""

import sys
from dataclasses import KW_ONLY, dataclass
from importlib.util import find_spec

from mpwatch.options.validation import check_optional_seconds

KNOWN_NAMES = ("auto", "gloo", "mpi", "nccl", "ucc", "xccl")


@dataclass(frozen=True)
class Backend:
    """The option `backend` of `mpwatch.run`, with settings. `backend="gloo"` means the same as `backend=Backend("gloo")`.

    Args:
        name: backend of torch.distributed, such as "gloo" or "nccl". "auto" means nccl if there are GPUs, and otherwise
            gloo. Each rank makes the default process group before it calls the function, and destroys it after the call.
            None means that mpwatch makes no process group. The function may make one itself.
        timeout: limit in seconds for each collective of this process group. None means torch's default, which is 30 minutes
            for gloo and 10 minutes for nccl.
        stall_after: seconds that ranks may wait in a collective for a rank that has not joined the collective. After that
            mpwatch logs one warning that names the missing rank, and the run goes on. If the missing rank has already
            returned, the run ends. If ranks call different collectives with the same sequence number, the run ends within a
            few seconds (FailureKind.MISMATCH). This applies to process groups that the function makes, too. None turns these
            checks off.

    Raises TypeError or ValueError if an argument is invalid.
    """

    name: str | None = None
    _: KW_ONLY
    timeout: float | None = None
    stall_after: float | None = 60.0

    def __post_init__(self) -> None:
        if self.name is not None and not isinstance(self.name, str):
            raise TypeError(f"backend must be a string, a Backend or None, not {self.name!r:.200}")
        if self.name == "":
            raise ValueError("backend must name a backend of torch.distributed, such as 'gloo', 'nccl' or 'auto', not ''")
        if self.name is not None:
            _check_name(self.name)
        check_optional_seconds("Backend: timeout", self.timeout)
        check_optional_seconds("Backend: stall_after", self.stall_after)
        if self.timeout is not None and self.name is None:
            raise ValueError(
                f"Backend: timeout={self.timeout:g} is the limit of the process group that mpwatch makes, and it makes none "
                "without a name; pass the name, or pass timeout= to your own init_process_group"
            )


def _check_name(name: str) -> None:
    if "torch" not in sys.modules and find_spec("torch") is None:
        raise ValueError(f"backend={name!r} needs torch, which is not installed here: pip install torch")
    parts = {part.rpartition(":")[2].lower() for part in name.split(",")}  # of "cpu:gloo,cuda:nccl"
    if not parts <= set(KNOWN_NAMES):
        from torch.distributed import Backend as TorchBackend  # knows those that other packages have registered

        known = sorted({*KNOWN_NAMES, *TorchBackend.backend_list} - {"undefined"})
        if not parts <= set(known):
            raise ValueError(
                f"backend={name!r}: torch has no such backend; there are {', '.join(known)}. If a package adds it, import "
                "that package before"
            )
