"""`.env` next to the configuration: values of variables that the environment does not set.

    # comment
    SHOP_DSN='postgresql://me:secret@localhost:5432/shop'     as a shell reads it; `export` may precede the name
    OTHER=value                                               the rest of the line

Other lines are ignored: an application may have more in its own file than this needs.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tidemill.base.errors import InvalidError

ENV_FILE = ".env"
_LINE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)")


def read_env_file(path: Path) -> dict[str, str]:
    """Return the variables of a file; none if it does not exist. Raises InvalidError if it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InvalidError(
            f"the variables cannot be read: path={path} reason={reason}.", fix="Correct the file, or export them."
        ) from error
    found = (_LINE.fullmatch(line.strip()) for line in lines)
    return {match[1]: _value(match[2]) for match in found if match is not None}


def env_line(name: str, value: str) -> str:
    """Return the line that sets a variable."""
    return f"{name}={shlex.quote(value)}"


def _value(text: str) -> str:
    text = text.strip()
    if not text.startswith(("'", '"')):
        return text
    try:
        return shlex.split(text, comments=True)[0]
    except ValueError:  # a quote is not closed
        return text
