"""A free port, for programs that must have one."""

import socket


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
