"""Integrations with trainers, clusters, IPython and pytest. Each module uses only the public names of mpwatch.

- `lightning`: runs the ranks of Lightning's Trainer and Fabric under the watcher.
- `accelerate`: a `notebook_launcher` that starts ranks as new processes, returns their values and reports their exceptions.
- `transformers`: a callback for the Trainer of Hugging Face, which makes all ranks save and stop at the same step.
- `ray`, `dask`, `submitit`: run one job on several nodes of a cluster.
- `ipython`: the magics `%%ranks` and `%ranks`.
- `pytest_plugin`: runs tests on several ranks.

`import mpwatch` does not import an integration, and no integration imports another integration.
"""
