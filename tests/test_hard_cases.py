"""Cases in which other launchers are known to hang, to leak or to blame the wrong rank."""

import importlib.abc
import importlib.machinery
import multiprocessing
import os
import subprocess
import sys
import threading
import time

import pytest

import mpwatch
from support.programs import in_own_process


class ExitsWhenLoaded:
    def __reduce__(self):
        return os._exit, (3,)


def test_a_rank_that_dies_while_it_loads_its_own_argument():
    with pytest.raises(mpwatch.RunFailedError, match="rank 2 ended with exit code 3") as caught:
        mpwatch.run(str, 3, args=(mpwatch.PerRank(["a", "b", ExitsWhenLoaded()]),))
    assert list(caught.value.result.failures) == [2]


@pytest.mark.parametrize("helper", [threading.Thread, multiprocessing.get_context("spawn").Process])
def test_a_failure_does_not_wait_for_a_helper_that_is_no_daemon(helper):
    def start_and_raise():
        helper(target=time.sleep, args=(600,)).start()
        raise ValueError("mine")

    with pytest.raises(mpwatch.RunFailedError, match="ValueError: mine") as caught:
        mpwatch.run(start_and_raise, 2, grace_period=60)
    assert caught.value.result.elapsed < 30


@in_own_process
def test_a_tracer_that_rewrites_the_commands_of_child_processes():
    def rewrite(command):
        command = [os.fsdecode(arg) for arg in command]
        if "-c" in command:
            command[command.index("-c") + 1] = f"import sys; sys.is_traced = True; {command[command.index('-c') + 1]}"
        return command

    def start(popen, args, *more, **options):
        start_untraced(popen, args if isinstance(args, str) else rewrite(args), *more, **options)

    def spawn(path, command, *more, **options):
        return spawn_untraced(path, rewrite(command), *more, **options)

    start_untraced, subprocess.Popen.__init__ = subprocess.Popen.__init__, start
    spawn_untraced, os.posix_spawnp = os.posix_spawnp, spawn
    assert list(mpwatch.run(lambda: sys.is_traced, 2)) == [True, True]


class MakesModule(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "made_by_a_hook" else None

    def exec_module(self, module):
        module.value = 42


@in_own_process
def test_a_module_that_only_a_hook_of_the_caller_can_make():
    sys.meta_path.append(MakesModule())
    import made_by_a_hook

    with pytest.raises(mpwatch.RunFailedError, match="No module named 'made_by_a_hook'"):
        mpwatch.run(lambda: made_by_a_hook.value, 1)
