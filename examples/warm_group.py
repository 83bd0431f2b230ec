"""Use ranks that stay alive: each keeps its share of the points, and the caller asks all ranks for many gradients."""

import math

import mpwatch

Point = tuple[float, float]


def keep_share(points: list[Point]) -> int:
    """Keep this rank's share in its `state`, which stays from call to call. Return the number of points."""
    me = mpwatch.current_worker()
    me.state["share"] = points[me.rank :: me.world_size]
    return len(me.state["share"])


def gradient(slope: float, intercept: float) -> tuple[float, float]:
    """Return the gradient of the squared errors of this rank's share."""
    share = mpwatch.current_worker().state["share"]
    errors = [slope * x + intercept - y for x, y in share]
    return sum(e * x for e, (x, _) in zip(errors, share, strict=True)), sum(errors)


points = [(n / 2000, 3.0 * n / 2000 + 2.0 + 0.1 * math.sin(n * n)) for n in range(-2000, 2000)]
slope = intercept = 0.0
with mpwatch.WorkerGroup(nprocs=4) as group:
    print("points by rank:", list(group.run(keep_share, (points,))))
    for _ in range(200):
        parts = list(group.run(gradient, (slope, intercept)))
        slope -= sum(part[0] for part in parts) / len(points)
        intercept -= sum(part[1] for part in parts) / len(points)
print(f"y = {slope:.1f} x + {intercept:.1f}")
