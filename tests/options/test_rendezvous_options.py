"""The options of a Rendezvous, and the errors for invalid ones."""

import pickle

import pytest

from mpwatch import Rendezvous
from mpwatch.options.rendezvous import SECRET_VARIABLE


def make(endpoint="node0:29400", run_id="job", nnodes=2, **options):
    return Rendezvous(endpoint, run_id, nnodes, **options)


def test_nnodes_is_a_number_or_a_range():
    assert (make(nnodes=3).min_nodes, make(nnodes=3).max_nodes) == (3, 3)
    assert make(nnodes=(2, 4)).nnodes == (2, 4)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"endpoint": 5}, TypeError, "endpoint must be a string, not 5"),
        ({"endpoint": ""}, ValueError, "endpoint must not be empty"),
        ({"endpoint": " node0:1"}, ValueError, "nor have blanks around it"),
        ({"endpoint": "node0:http"}, ValueError, "endpoint must be host:port, such as 'node0:29400', not 'node0:http'"),
        ({"endpoint": "node0:70000"}, ValueError, "endpoint must be host:port"),
        ({"run_id": ""}, ValueError, "run_id must not be empty"),
        ({"run_id": "../x"}, ValueError, "run_id also names the folder of logs, and cannot be '../x'"),
        ({"nnodes": 0}, ValueError, "nnodes must be at least 1, not 0"),
        ({"nnodes": "2"}, TypeError, "nnodes must be an int, not '2'"),
        ({"nnodes": (3, 2)}, ValueError, r"nnodes \(max\) must be at least 3, not 2"),
        ({"nnodes": (1, 2, 3)}, ValueError, r"nnodes must be a number or \(min, max\)"),
        ({"backend": "nccl"}, ValueError, "backend must be one of c10d, static, not 'nccl'"),
        ({"join_timeout": 0}, ValueError, "join_timeout must be a number of seconds, more than 0, not 0"),
        ({"node_timeout": 1}, ValueError, "node_timeout must be at least 2 seconds, not 1"),
        ({"exit_barrier_timeout": -1}, ValueError, "exit_barrier_timeout must be a number of seconds, 0 or more, not -1"),
        ({"is_host": 1}, TypeError, "is_host must be True or False, not 1"),
        ({"local_addr": ""}, ValueError, "local_addr must not be empty"),
        ({"secret": 5}, TypeError, "secret must be a string or bytes"),
        ({"secret": ""}, ValueError, "secret must not be empty"),
        ({"options": [1]}, TypeError, "options must be a mapping with strings as keys"),
        ({"options": {"last_call_timeout": "soon"}}, TypeError, r"options\['last_call_timeout'\] must be .* not 'soon'"),
        ({"options": {"last_call_timeout": -1}}, ValueError, r"options\['last_call_timeout'\] must be .* not -1"),
        ({"options": {"last_cal_timeout": 1}}, ValueError, r"no options except .* not \['last_cal_timeout'\]"),
        ({"backend": "static"}, ValueError, r"needs the number of this node: options=\{'rank': 0\}"),
        ({"backend": "static", "options": {"rank": 2}}, ValueError, r"options\['rank'\] must be below nnodes=2, not 2"),
        (
            {"backend": "static", "options": {"rank": 0, "timeout": 5}},
            ValueError,
            "except 'last_call_timeout' and 'rank', not",
        ),
        ({"backend": "static", "nnodes": (1, 2), "options": {"rank": 0}}, ValueError, "nnodes must be one number"),
    ],
)
def test_an_invalid_option_is_named(options, error, text, monkeypatch):
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    with pytest.raises(error, match=text):
        make(**options)


def test_the_secret_can_come_from_the_environment_and_is_never_shown(monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, "open sesame")
    assert make().key == b"open sesame"
    assert make(secret="another").key == b"another"
    assert "sesame" not in repr(make())
    assert pickle.loads(pickle.dumps(make(is_host=True))).is_host
