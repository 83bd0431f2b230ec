"""How the results of all nodes become one result. Pure."""

import mpwatch
from mpwatch.cluster.results import merge_results


def stopped(reason):
    return mpwatch.RunResult(mpwatch.WorkerState.STOPPED, reason=reason)


def test_the_reason_is_that_of_a_node_that_the_driver_has_not_stopped():
    by_driver = "the run was stopped: terminate() was called, before its ranks were started"
    own = "the run was stopped: a stop was requested, before its ranks were started"
    for reasons in ([by_driver, own], [own, by_driver], ["", own]):
        assert merge_results(list(map(stopped, reasons))).reason == own
    assert merge_results([stopped(""), stopped(by_driver)]).reason == by_driver
    assert merge_results([stopped("")]).reason == ""
