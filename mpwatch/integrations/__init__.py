"""Integrations with trainers and test runners. Each module uses only the public names of mpwatch.

- `lightning`: runs the ranks of Lightning's Trainer and Fabric under the watcher.
- `accelerate`: a `notebook_launcher` that spawns its ranks, returns their values and keeps their exceptions.
- `pytest_plugin`: runs tests on several ranks.

mpwatch itself does not import these modules, and they do not import one another. Each module imports its library as late as
possible, to save time in programs that do not use the library.
"""
