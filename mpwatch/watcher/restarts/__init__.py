"""Whether, when and how failed ranks are restarted."""
