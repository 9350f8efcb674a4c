"""Names of identical drivers, and drivers that are not missed because they ended on purpose."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.base.config.config import Config
from tidemill.base.limits import STATUS_BLIND_AFTER_MS
from tidemill.base.status.drivers import instance_name, label_and_number, pipeline_of, process_name
from tidemill.base.status.status import StatusReport
from tidemill.node.supervise.driver_instances import forgettable_drivers
from tidemill.node.supervise.processes import supervised_pipelines

NOW_MS = 1_000_000
labels = st.from_regex(r"[a-z][a-z0-9_]{0,5}", fullmatch=True) | st.just("")
drivers = st.tuples(st.sampled_from(["p", "q2"]), labels, st.integers(1, 64))


@given(drivers)
def test_a_driver_s_name_tells_its_pipeline_its_label_and_its_number(driver: tuple[str, str, int]) -> None:
    pipeline, label, number = driver
    process = process_name(pipeline, instance_name(label, number))
    assert (pipeline_of(process), *label_and_number(process)) == driver


def test_what_is_no_driver_is_nobody_s() -> None:
    assert [pipeline_of(process) for process in ("node:p", "up:pipeline-p", "demo", "")] == [""] * 4


@given(st.dictionaries(drivers, st.tuples(st.booleans(), st.booleans())))
def test_of_a_pipeline_that_nobody_does_any_more_one_driver_stays_and_else_all_that_ended_go(
    said: dict[tuple[str, str, int], tuple[bool, bool]],
) -> None:
    names = {
        process_name(pipeline, instance_name(label, n)): reported for (pipeline, label, n), reported in said.items()
    }
    reports = [
        StatusReport(process, NOW_MS - (2 * STATUS_BLIND_AFTER_MS if silent else 0), ())
        for process, (silent, _) in names.items()
    ]
    ended = {process for process, (_, meant) in names.items() if meant}
    gone = set(forgettable_drivers(reports, [*ended, "pipeline:p:never_reported", "node:n1"], NOW_MS))
    assert gone <= ended
    for pipeline in ("p", "q2"):
        mine = {process for process in names if pipeline_of(process) == pipeline}
        works = any(not names[process][0] for process in mine - ended)
        assert len(mine & ended - gone) == (0 if works else min(1, len(mine & ended)))


def test_up_with_no_drivers_of_a_pipeline_does_not_judge_those_that_pipeline_run_starts_beside_it() -> None:
    """The supervisor of those drivers may have been killed with them. Status must show that even if a peer elsewhere
    runs."""
    pipelines = {"mine": {"file": "a.py"}, "theirs": {"file": "b.py", "spark": {"instances": 0}}}
    assert supervised_pipelines(Config.model_validate({"pipeline": pipelines})) == ["mine"]
