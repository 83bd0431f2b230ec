"""A script whose ranks start pools of processes."""

import multiprocessing

import mpwatch


class Item:
    def __init__(self, n):
        self.n = n


def square(item):
    return Item(item.n**2)


def work(method):
    with multiprocessing.get_context(method).Pool(2) as pool:
        return [item.n for item in pool.map(square, [Item(2), Item(3)])]


if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        assert list(mpwatch.run(work, 2, args=(method,))) == [[4, 9], [4, 9]], method
    multiprocessing.set_start_method("forkserver")
    assert mpwatch.run(multiprocessing.get_start_method, 1)[0] == "forkserver"
