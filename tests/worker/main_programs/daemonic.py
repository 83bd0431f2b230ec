"""A script that calls mpwatch in a daemonic process."""

import multiprocessing

import mpwatch


def run():
    mpwatch.run(print, 1)


if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=run, daemon=True)
    child.start()
    child.join()
