"""Whether, when and how ranks that failed are started again."""
