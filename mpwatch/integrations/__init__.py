"""Integrations with trainers and test runners. Each module uses only the public names of mpwatch.

- `lightning`: runs the ranks of Lightning's Trainer and Fabric under the watcher.
- `accelerate`: a `notebook_launcher` that spawns its ranks, returns their values and keeps their exceptions.
- `pytest_plugin`: runs tests on several ranks.

mpwatch itself imports none of these modules, and none of them imports another. A module imports its own library as late as
possible, so it costs nothing in programs that do not use it.
"""
