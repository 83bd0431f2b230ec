"""The trainers and test runners that people already have, each in a module of its own, over mpwatch's public names alone.

`lightning`: Trainer and Fabric of Lightning with all ranks under the watcher. `accelerate`: a `notebook_launcher` that
spawns, returns values and keeps exceptions. `pytest_plugin`: tests that run on several ranks. None of them is imported by
mpwatch itself, and none imports another; what each needs beside mpwatch is what it is for.
"""
