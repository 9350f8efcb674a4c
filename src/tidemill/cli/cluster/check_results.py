"""Results of the checks of `tidemill doctor`. An unexpected exception of a check is a result as well."""

from __future__ import annotations

from collections.abc import Callable

from tidemill.base.errors import TidemillError
from tidemill.base.runtime.tasks import error_sentence

Result = dict[str, object]


def passed(check: str, found: str) -> Result:
    return {"check": check, "ok": True, "found": found, "fix": ""}


def failed(check: str, error: TidemillError) -> Result:
    return {"check": check, "ok": False, "found": error.message, "fix": error.fix}


def run_check(name: str, check: Callable[[], str]) -> Result:
    """Run one check, which returns what it found or raises."""
    return guard_check(name, lambda: [passed(name, check())])[0]


def guard_check(name: str, check: Callable[[], list[Result]]) -> list[Result]:
    """Run a check with any number of results. An exception becomes its result, so that the others run."""
    try:
        return check()
    except TidemillError as error:
        return [failed(name, error)]
    except Exception as error:
        fix = "This is a defect of the check; the others are not affected."
        return [failed(name, TidemillError(f"the check ended with an error: {error_sentence(error)}", fix=fix))]
