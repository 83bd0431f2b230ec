"""`%debug` of IPython after a failed run."""

from support.programs import ENV, python

SESSION = """\
import mpwatch
def train():
    secret = 42
    raise ValueError("boo")

mpwatch.run(train, 2, debug='locals')
%debug
p secret
u
p len(dir(mpwatch)) > 0
q
"""


def test_debug_opens_where_the_rank_raised(tmp_path):
    """The text above does not repeat the frames of the rank, and has no frame of mpwatch."""
    arguments = ["-m", "IPython", "--simple-prompt", "--no-banner", "--colors=nocolor", "--HistoryManager.enabled=False"]
    text = python(*arguments, program=SESSION, env={**ENV, "IPYTHONDIR": str(tmp_path)}).stdout
    report, _, debugger = text.partition("RunFailedError: rank ")
    assert report.count("raise ValueError") == 1
    assert "mpwatch/errors.py" not in report
    assert '----> 3     raise ValueError("boo")' in debugger
    assert "ipdb> 42\n" in debugger
    assert "mpwatch.run(train, 2, debug='locals')" in debugger.partition("ipdb> 42\n")[2]
    assert "ipdb> True\n" in debugger
