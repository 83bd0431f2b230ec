"""Hosts of their own: network namespaces without names, on one bridge, and cables between that can be cut and mended.

    hub: bridge0 -- cable0 ======= eth0: host 0, 10.77.0.1
                 -- cable1 ======= eth0: host 1, 10.77.0.2

A namespace lives as long as a descriptor of it, or a process in it: however a test ends, nothing of it is left. A cut is a
black hole: the bridge no longer takes the cable's packets, nor sends any into it; both ends believe that the cable is up.
"""

import ctypes
import os
import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor

__all__ = ["Network", "may_rename_hosts", "reason_against"]

CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000
LIBC = ctypes.CDLL(None, use_errno=True)


def may_rename_hosts():
    """Whether a process may have a hostname of its own."""
    return _in_thread(lambda: LIBC.unshare(CLONE_NEWUTS)) == 0


def reason_against():
    """Why this machine cannot have hosts of their own on it; empty if it can."""
    missing = [program for program in ("ip", "nsenter") if shutil.which(program) is None]
    if missing:
        return f"there is no program {' and no '.join(missing)}"
    try:
        with Network(1):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"this user may not have network namespaces and bridges: {error}"


class Network:
    """Raises OSError or CalledProcessError where the machine does not allow it."""

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
        """A descriptor of it, which stays this object's."""
        return self._namespaces[1 + host]

    def address(self, host):
        return f"10.77.0.{1 + host}"

    def cut(self, host):
        """From now on nothing reaches this host, and nothing comes from it."""
        self._run_ip(self._hub, f"link set cable{host} nomaster")

    def mend(self, host):
        self._run_ip(self._hub, f"link set cable{host} master bridge0")

    def within(self, host, do):
        """What `do` returns when it is called there: sockets stay where they were made."""

        def call():
            _must(LIBC.setns(self.namespace(host), CLONE_NEWNET))
            return do()

        return _in_thread(call)

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
    _must(LIBC.unshare(CLONE_NEWNET))
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _must(returned):
    if returned:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _in_thread(do):
    """In one that has ended afterwards, and with it what it has left behind for itself."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(do).result()


def free_port():
    """Of the loopback device."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
