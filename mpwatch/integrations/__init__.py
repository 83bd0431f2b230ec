"""Integrations with trainers and test runners. Each module uses only the public names of mpwatch.

- `lightning`: runs the ranks of Lightning's Trainer and Fabric under the watcher.
- `accelerate`: a `notebook_launcher` that starts ranks as new processes, returns their values and reports their exceptions.
- `pytest_plugin`: runs tests on several ranks.

mpwatch itself does not import these modules, and they do not import one another. Each module imports the library that it
supports as late as possible, to save time in programs that do not use the library.
"""
