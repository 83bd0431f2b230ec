"""pytest with the plugin of mpwatch, for tests that run pytest."""

PLUGIN = ("-p", "mpwatch.integrations.pytest_plugin", "-p", "no:cacheprovider")  # arguments of pytest


def match_output(result, *lines):
    """Assert that pytest has printed lines that match these patterns, in this order. Return its whole output."""
    result.stdout.fnmatch_lines(lines)
    return result.stdout.str()
