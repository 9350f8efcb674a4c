"""Values of the environment in the configuration: its variables `${NAME}`, and TIDEMILL_<SECTION>__<KEY>.

`.env` next to the configuration has values of variables that the environment does not set:

    # comment
    SHOP_DSN='postgresql://me:secret@localhost:5432/shop'     as a shell reads it; `export` may precede the name
    OTHER=value                                               the rest of the line

Other lines are ignored: an application may have more in its own file than this needs.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidemill.base.errors import InvalidError

ENV_FILE = ".env"
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_LINE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)")


def expand_variables(text: str, environ: Mapping[str, str], env_file: Path) -> str:
    """Return the text with the values of its variables. The file is read only if the environment lacks one of them."""
    known = environ
    if not environ.keys() >= set(_VARIABLE.findall(text)):
        known = {**read_env_file(env_file), **environ}

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in known:
            raise InvalidError(
                f"the configuration uses ${{{name}}}, which is not set.", fix=f"Export {name}, or set it in {env_file}."
            )
        return known[name].replace("\\", "\\\\").replace('"', '\\"')

    return _VARIABLE.sub(value, text)


def overlay_environment(values: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Set the values of variables TIDEMILL_<SECTION>__<KEY>, over those of the file."""
    for variable, value in environ.items():
        if not variable.startswith("TIDEMILL_") or "__" not in variable:
            continue
        *path, last = variable.removeprefix("TIDEMILL_").lower().split("__")
        section = values
        for part in path:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise InvalidError(
                    f"an environment variable sets a key below a plain value: variable={variable} key={part}.",
                    fix=f"Unset it, or make {part} a section of the file.",
                )
        section[last] = value


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
