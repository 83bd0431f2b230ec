"""A script that changes its globals between the calls of a group."""

from mpwatch import WorkerGroup

n = 1


def get():
    return n


class Thing:
    pass


def make():
    return Thing()


with WorkerGroup(2) as group:
    assert list(group.run(get)) == [1, 1]
    n = 2
    assert list(group.run(get)) == [2, 2]

    def get():
        return -n

    assert list(group.run(get)) == [-2, -2]
    assert {type(thing) for thing in group.run(make)} == {Thing}
