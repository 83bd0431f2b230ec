"""The files under /dev, /proc and /sys of a machine that does not exist, in a folder: its CPUs, NUMA nodes and GPUs.

The contents are those of real machines, shortened.
"""

from pathlib import Path

NVIDIA = "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 236\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n"
KFD = "cpu_cores_count 0\nsimd_count {simds}\ndrm_render_minor {minor}\n"


def uuid_of(minor):
    return f"GPU-{f'{minor}' * 8}-0000-0000-0000-000000000000"


class SimulatedMachine:
    def __init__(self, folder):
        self.folder, self.root = Path(folder), str(folder)

    def write(self, path, text):
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return self

    def add_node(self, node, cpus):
        return self.write(f"sys/devices/system/node/node{node}/cpulist", f"{cpus}\n")

    def add_sockets(self, packages, cores, *, threads=1):
        """Add packages with so many cores each. The first threads of all cores have the first numbers, as in Linux."""
        total = packages * cores
        for cpu in range(total * threads):
            siblings = ",".join(str(cpu % total + thread * total) for thread in range(threads))
            self.write(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", siblings)
        for node in range(packages):
            firsts = [node * cores + thread * total for thread in range(threads)]
            self.add_node(node, ",".join(f"{first}-{first + cores - 1}" for first in firsts))
        return self

    def add_nvidia_gpu(self, address, minor, *, node=-1, device=True):
        """`device` says whether this process has its device file."""
        self.write(f"proc/driver/nvidia/gpus/{address}/information", NVIDIA.format(uuid=uuid_of(minor), minor=minor))
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
            properties = KFD.format(simds=304 * bool(number), minor=127 + number)
            self.write(f"sys/class/kfd/kfd/topology/nodes/{number}/properties", properties)
            self.write(f"sys/class/drm/renderD{127 + number}/device/numa_node", f"{node}\n")
            self.write(f"dev/dri/renderD{127 + number}", "")
        return self
