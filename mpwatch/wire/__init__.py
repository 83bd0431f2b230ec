"""What crosses between watcher and rank; imported on both sides, so light: no dataclasses, no typing at run time."""
