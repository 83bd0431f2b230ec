"""A script that has no guard, although multiprocessing imports it again in a spawned process."""

import multiprocessing

import mpwatch


def fn():
    pass


mpwatch.run(fn, 1)
child = multiprocessing.get_context("spawn").Process(target=fn)
child.start()
child.join()
