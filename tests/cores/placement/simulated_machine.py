"""The files under /dev, /proc and /sys of a machine that does not exist, in a folder: its CPUs, NUMA nodes and GPUs.

The contents are those of real machines, shortened.
"""

from pathlib import Path

NVIDIA_INFORMATION = """\
Model: \t\t NVIDIA H100 80GB HBM3
IRQ:   \t\t 236
GPU UUID: \t {uuid}
Device Minor: \t {minor}
"""
KFD_PROPERTIES = """\
cpu_cores_count 0
simd_count {simds}
drm_render_minor {minor}
"""


class SimulatedMachine:
    def __init__(self, folder):
        self.folder = Path(folder)
        self.root = str(folder)

    def write(self, path, text):
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return self

    def add_node(self, node, cpus):
        return self.write(f"sys/devices/system/node/node{node}/cpulist", f"{cpus}\n")

    def add_sockets(self, packages, cores, *, threads=1, nodes_per_package=1):
        """Add packages with so many cores each. The first threads of all cores have the first numbers, as in Linux."""
        total = packages * cores
        for core in range(total):
            cpus = [core + thread * total for thread in range(threads)]
            for cpu in cpus:
                file = f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
                self.write(file, ",".join(map(str, cpus)))
        per_node = cores // nodes_per_package
        for node in range(packages * nodes_per_package):
            first = node * per_node
            parts = [(first + thread * total, first + thread * total + per_node - 1) for thread in range(threads)]
            self.add_node(node, ",".join(f"{low}-{high}" for low, high in parts))
        return self

    def add_nvidia_gpu(self, address, minor, *, node=-1, device=True):
        """Add a GPU with the UUID GPU-<minor><minor>...; `device` says whether this process has its device file."""
        uuid = f"GPU-{f'{minor}' * 8}-0000-0000-0000-000000000000"
        text = NVIDIA_INFORMATION.format(uuid=uuid, minor=minor)
        self.write(f"proc/driver/nvidia/gpus/{address}/information", text)
        self.write(f"sys/bus/pci/devices/{address}/numa_node", f"{node}\n")
        return self.write(f"dev/nvidia{minor}", "") if device else self

    def add_nvidia_gpus(self, nodes):
        """Add a GPU for each NUMA node in the list. The order of their numbers and their device files differ, as on real ones."""
        for number, node in enumerate(nodes):
            self.add_nvidia_gpu(f"0000:{16 * number + 5:02x}:00.0", number ^ 1, node=node)
        return self

    def add_amd_gpus(self, nodes):
        """Add a CPU, and a GPU for each NUMA node in the list."""
        self.write("dev/kfd", "")
        for number, node in enumerate([None, *nodes]):
            properties = KFD_PROPERTIES.format(simds=304 * bool(number), minor=127 + number)
            self.write(f"sys/class/kfd/kfd/topology/nodes/{number}/properties", properties)
            self.write(f"sys/class/drm/renderD{127 + number}/device/numa_node", f"{node}\n")
            self.write(f"dev/dri/renderD{127 + number}", "")
        return self
