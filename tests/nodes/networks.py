"""Hosts for tests: unnamed network namespaces, connected to one bridge by cables that can be cut and mended.

    hub: bridge0 -- cable0 ======= eth0: host 0, 10.77.0.1
                 -- cable1 ======= eth0: host 1, 10.77.0.2

A namespace exists as long as a descriptor of it, or a process in it. So nothing is left, however a test ends. A cut drops
all packets: the bridge neither takes packets from the cable nor sends any into it. Both ends still see the cable as up.
"""

import ctypes
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000
LIBC = ctypes.CDLL(None, use_errno=True)


def may_rename_hosts():
    """Return whether this user may give a process a hostname of its own."""
    return _in_thread(lambda: LIBC.unshare(CLONE_NEWUTS)) == 0


def reason_against():
    """Return why this machine cannot have such hosts. Empty if it can."""
    missing = [program for program in ("ip", "nsenter") if shutil.which(program) is None]
    if missing:
        return f"there is no program {' and no '.join(missing)}"
    try:
        with Network(1):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"this user may not have network namespaces and bridges: {error}"


class Network:
    """The hosts of a test. Raises OSError or CalledProcessError if the machine does not allow them."""

    def __init__(self, hosts):
        self._namespaces = []
        try:
            self._hub = self._new_namespace()
            self._run_ip(self._hub, "link add bridge0 type bridge", "link set bridge0 up")
            for number in range(hosts):
                self._add(number)
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def namespace(self, host):
        return self._namespaces[1 + host]

    def address(self, host):
        return f"10.77.0.{1 + host}"

    def cut(self, host):
        """Cut the cable of this host: from now on all its packets are lost."""
        self._run_ip(self._hub, f"link set cable{host} nomaster")

    def mend(self, host):
        self._run_ip(self._hub, f"link set cable{host} master bridge0")

    def close(self):
        while self._namespaces:
            os.close(self._namespaces.pop())

    def _add(self, number):
        host = self._new_namespace()
        far = f"/proc/self/fd/{host}"
        self._run_ip(
            self._hub,
            f"link add cable{number} type veth peer name eth0 netns {far}",
            f"link set cable{number} master bridge0 up",
            also=[host],
        )
        self._run_ip(host, "link set lo up", f"addr add {self.address(number)}/24 dev eth0", "link set eth0 up")

    def _new_namespace(self):
        self._namespaces.append(_in_thread(_make_namespace))
        return self._namespaces[-1]

    def _run_ip(self, namespace, *lines, also=()):
        subprocess.run(
            ["nsenter", f"--net=/proc/self/fd/{namespace}", "ip", "-batch", "-"],
            input="\n".join(lines),
            text=True,
            stderr=subprocess.PIPE,
            pass_fds=[namespace, *also],
            check=True,
        )


def _make_namespace():
    _check(LIBC.unshare(CLONE_NEWNET))
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _check(returned):
    if returned:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _in_thread(do):
    """Call `do` in a new thread, whose namespaces end with it."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(do).result()
