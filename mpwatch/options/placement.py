"""`Placement` says on which CPUs a rank runs, and which GPUs it sees."""

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from mpwatch.options.validation import check_function, check_word
from mpwatch.options.worker_info import Worker

Cpus = Literal["cores", "numa"] | Callable[[Worker], Iterable[int]]


@dataclass(frozen=True)
class Placement:
    """On which CPUs a rank runs, and which GPUs it sees. `placement="cores"` means `placement=Placement("cores")`.

    Args:
        cpus: the CPUs on which each rank runs, from the start of its interpreter. "cores" splits the CPUs that this process
            may use evenly among the ranks of this machine, if possible as whole physical cores. "numa" gives a rank all
            allowed CPUs of the NUMA node of its GPU. Without a GPU, each rank gets its share of the NUMA nodes. A function
            gets a Worker, and returns the numbers of the CPUs for this rank. mpwatch then sets
            OMP_NUM_THREADS to the number of cores of the rank, and TORCHINDUCTOR_COMPILE_THREADS to the number of its CPUs,
            at most 32, unless you have set them. If ranks are bound to the same CPUs, the numbers are divided among these
            ranks. None means that ranks run on all CPUs that this process may use.
        gpus: "own" means that each rank sees only one GPU. The local rank is the number of this GPU among the GPUs that this
            process sees. In the rank this GPU is device 0, so call `torch.cuda.set_device(0)`. LOCAL_RANK stays the same.
            Code may fail if it copies directly from the GPU of another rank, or shares CUDA tensors with another rank. If
            `env` lists several devices, each rank sees one of these devices. If `env` lists one device, each rank sees that
            device. None means that each rank sees all GPUs.

    Raises TypeError or ValueError if an argument is invalid.
    """

    cpus: Cpus | None = None
    _: KW_ONLY
    gpus: Literal["own"] | None = None

    def __post_init__(self) -> None:
        cpus: object = self.cpus
        expected = "'cores', 'numa', a function from Worker to the numbers of CPUs, or None"
        if isinstance(cpus, str) and cpus not in ("cores", "numa"):
            raise ValueError(f"Placement: cpus must be {expected}, not {cpus!r:.200}")
        if cpus is not None and not isinstance(cpus, str):
            check_function("Placement: cpus", cpus, expected)
        check_word("Placement: gpus", self.gpus, ("own",))
