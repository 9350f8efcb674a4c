"""Command-line settings of pipelines, applied over those of the configuration file."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import ValidationError

from tidemill.base.config.config import Config
from tidemill.base.config.sections import PipelineSparkSection
from tidemill.base.errors import InvalidError


def with_overrides(
    config: Config,
    names: Iterable[str],
    *,
    instances: int | None = None,
    master: str = "",
    driver_memory: str = "",
    conf: Iterable[str] = (),
) -> Config:
    """Return the configuration with these settings for the pipelines `names`. None and "" leave the file's. Each item
    of `conf` is KEY=VALUE.

    Raises InvalidError with the option that is wrong.
    """
    pairs = [_parse_pair(text) for text in conf]
    given = {"instances": instances, "master": master or None, "driver_memory": driver_memory or None}
    values = {key: value for key, value in given.items() if value is not None}
    pipelines = dict(config.pipeline)
    for name in names:
        section = pipelines[name]
        merged = section.spark.model_dump() | values | {"conf": section.spark.conf | dict(pairs)}
        try:
            spark = PipelineSparkSection.model_validate(merged)
        except ValidationError as error:
            first = error.errors()[0]
            option = "--" + str(first["loc"][0]).replace("_", "-")
            raise InvalidError(f"bad option: {option}: {first['msg']}.", fix=f"Correct {option}.") from error
        pipelines[name] = section.model_copy(update={"spark": spark})
    return config.model_copy(update={"pipeline": pipelines})


def _parse_pair(text: str) -> tuple[str, str]:
    key, found, value = text.partition("=")
    if not found or not key.strip():
        raise InvalidError(f"invalid Spark setting: --conf {text!r}.", fix="Write --conf KEY=VALUE.")
    return key.strip(), value
