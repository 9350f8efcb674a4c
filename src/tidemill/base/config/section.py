"""Base of all sections of the configuration: unknown keys are errors, and names have one spelling."""

from __future__ import annotations

import re
from typing import Final

from pydantic import BaseModel, ConfigDict

NAME: Final = re.compile(r"^[a-z][a-z0-9_]{0,40}\Z")
NOT_A_NAME: Final = "name {!r}: use a-z, 0-9 and _, starting with a letter, at most 41 characters"


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
