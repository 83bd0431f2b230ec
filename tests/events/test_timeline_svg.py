"""The picture of a run that notebooks show, drawn from streams of events that are made by hand."""

import platform
from xml.etree import ElementTree

import mpwatch
from mpwatch import RunResult, WorkerState
from mpwatch.events import WorkerFailed
from mpwatch.events.timeline_svg import COLOURS, draw_timelines
from support.event_streams import EventHistory, failed_run, failure, restarted_run

NAME = "{http://www.w3.org/2000/svg}"
COLOUR_NAMES = {colour: name for name, colour in COLOURS.items()}


def draw(events):
    """Return the picture as XML. It must be well-formed."""
    return ElementTree.fromstring(draw_timelines(events))


def rows(picture):
    """Return for each row its name, its bars, the titles of its marks and lines, and the text at its end."""
    found = {}
    for element in picture.iter():
        name = element.tag.removeprefix(NAME)
        y = float(element.get("y", element.get("y1", 0)))
        row = found.setdefault(int((y - 24) // 20), [])
        title = element.find(f"{NAME}title")
        if name == "rect" and title is not None:
            row.append(COLOUR_NAMES[element.get("fill")])
        elif name in ("text", "line") and title is not None:
            row.append(title.text)
        elif name == "text":
            row.append(element.text)
    return [row for number, row in sorted(found.items()) if number >= 0]


def test_a_restarted_run():
    late = "rank 0: silent for 5.0 s of 10.0 s allowed"
    failed = "rank 1: ValueError: boom (the root cause)"
    first, second = ("start-up", "waits 1.0 s to be restarted"), ("start-up", "succeeded")
    assert rows(draw(restarted_run())) == [
        ["rank 0", first[0], "stopped", first[1], *second, late, "succeeded, restarted once"],
        ["rank 1", first[0], "failed", first[1], *second, failed, "succeeded, restarted once"],
        [*COLOURS],
    ]


def test_of_many_ranks_those_that_failed_are_drawn():
    history = EventHistory(nprocs=100).start_and_call()
    history.add(WorkerFailed, 1.5, (90,), failure=failure(90, summary="<escaped>"), is_root_cause=False)
    history.add(WorkerFailed, 1.6, (95,), failure=failure(95), is_root_cause=True)
    *drawn, hidden, _ = rows(draw(history.events))
    assert [row[0] for row in drawn] == [f"rank {rank}" for rank in [*range(30), 90, 95]]
    assert hidden == ["68 more ranks are not drawn"]


def test_without_ranks_there_is_no_picture():
    assert draw_timelines(()) == ""
    assert draw_timelines(EventHistory(is_multi_node=True).events) == ""


def test_a_page_for_a_browser(tmp_path):
    path = tmp_path / "run.html"
    result = RunResult(WorkerState.STOPPED, reason="<why>", events=tuple(failed_run()))
    result.to_html(path)
    page = path.read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert "<title>&lt;why&gt;</title>" in page
    assert draw_timelines(result.events) in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert mpwatch.RunFailedError(result)._repr_html_() in page


def test_a_page_says_how_the_run_was_made(tmp_path):
    mpwatch.run(int, 1, grace_period=3).to_html(tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    for text in ("grace_period=3", f"mpwatch {mpwatch.__version__}", f"1 rank on {platform.node()}", "command"):
        assert text in page
