"""The driver of a pipeline as `tidemill.spark.pipeline.driver` starts it, with a limit above which steps are Spark
jobs.

python benchmarks/upsert_driver.py INLINE_ROWS ARGUMENTS_OF_THE_DRIVER   (INLINE_ROWS < 0: as the product has it)
"""

from __future__ import annotations

import sys

from tidemill.spark.ingest.steps.step_executor import StepExecutor
from tidemill.spark.pipeline.driver import exit_now, main
from tidemill.spark.pipeline.runner import PipelineRunner

if __name__ == "__main__":
    inline_rows = int(sys.argv[1])
    if inline_rows >= 0:
        StepExecutor.use_spark.__defaults__ = (inline_rows,)
    if inline_rows == 0:
        PipelineRunner.uses_spark = True  # type: ignore[method-assign,assignment]
    exit_now(main(sys.argv[2:]))
