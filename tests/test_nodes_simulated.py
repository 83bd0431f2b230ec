"""Jobs of many nodes that fail at random, simulated: they come to an end, all nodes tell the same, and a failure costs a few
messages a node.
"""

import pytest
from simulated import TIMEOUT, World

from mpwatch.multinode.protocol.messages import NextStep

MESSAGES_A_NODE = 11  # of a failure: told, said, heard, stopped, answered, judged, placed and found again


def with_failing_ranks(n, failures, **options):
    world = World(n, **options)
    for k in range(failures):
        world.after(20.0 + 100.0 * k, lambda: break_any(world))
    return world


def break_any(world):
    world.chance.choice(world.alive()).break_rank(world.chance.randrange(world.nprocs))


def of_a_failure(n, failures=3):
    """Messages."""
    quiet = World(n)
    quiet.run()
    world = with_failing_ranks(n, failures)
    world.run()
    assert {node.verdict.decision for node in world.all()} == {NextStep.DONE}
    return (world.messages.total() - quiet.messages.total()) / world.failures


@pytest.mark.parametrize("n", [2, 10, 100, 300])
def test_messages_of_a_failure_grow_with_the_nodes_and_no_faster(n):
    assert of_a_failure(n) <= MESSAGES_A_NODE * n


def random_job(seed, n=100):
    """Ranks fail, nodes are lost, and others come in their place."""
    world = World(n, nodes=(n // 2, n), seed=seed)
    chance = world.chance
    for k in range(chance.randrange(1, 12)):
        at = chance.uniform(0.0, 300.0)
        name = f"n{chance.randrange(n):05}"
        if chance.random() < 0.5:
            world.after(at, lambda: break_any(world))
        else:
            world.after(at, lambda name=name: world.kill(name))
            if chance.random() < 0.5:
                world.after(at + chance.uniform(0.0, 60.0), lambda k=k: world.come(f"m{k}"))
    world.run(until=3600.0)
    return world


@pytest.mark.parametrize("seed", range(20))
def test_whatever_fails_all_who_are_left_come_to_the_same_end(seed):
    world = random_job(seed)
    assert world.is_over(), f"still under way after {world.now} s"
    alive = world.alive()
    assert {node.verdict.decision for node in alive} == {NextStep.DONE}
    assert len({node.verdict.history for node in alive}) == 1
    assert {node.verdict.attempt + 1 for node in alive} == {node.verdict.history.attempts for node in alive}


def test_a_job_of_a_thousand_nodes_survives_ranks_and_nodes():
    world = World(1000, nodes=(900, 1000), work=100.0)
    world.after(20.0, lambda: break_any(world))
    world.after(60.0, lambda: [world.kill(f"n{i:05}") for i in (0, 1, 999)])
    world.run()
    assert {node.verdict.decision for node in world.alive()} == {NextStep.DONE}
    assert len(world.alive()) == 997
    assert world.now < 60.0 + world.work + 3 * TIMEOUT
