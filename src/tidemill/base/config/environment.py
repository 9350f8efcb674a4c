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
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin

from pydantic import BaseModel

from tidemill.base.errors import InvalidError

ENV_FILE = ".env"
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_TOKEN = re.compile(
    r'''(?P<basic>"""(?:[^\\]|\\.)*?"{3,5}(?!")|"(?:[^"\\\n]|\\.)*")'''
    r"""|(?P<literal>'''.*?'{3,5}(?!')|'[^'\n]*')"""
    rf"|(?P<comment>\#[^\n]*)|(?P<bare>{_VARIABLE.pattern})",
    re.DOTALL,
)
"""Strings and comments of a TOML file, and variables outside of both. A string of several lines may end with five
quotes, two of which are part of it (TOML 1.0)."""
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""Characters that a string of one line cannot contain."""
_LINE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)")


def expand_variables(text: str, environ: Mapping[str, str], env_file: Path) -> str:
    """Return the text of a TOML file with the values of its variables.

    Inside a string of any kind a value is taken literally; outside, as a number or a boolean, it is part of the file.
    Variables in comments are left alone. `env_file` is read only if the environment lacks a variable.
    """

    @cache
    def of_file() -> dict[str, str]:
        return read_env_file(env_file)

    def value(name: str) -> str:
        if name in environ:
            return environ[name]
        if name not in of_file():
            raise InvalidError(
                f"the configuration uses ${{{name}}}, which is not set.", fix=f"Export {name}, or set it in {env_file}."
            )
        return of_file()[name]

    def expand(token: re.Match[str]) -> str:
        found = token[0]
        if token.lastgroup == "comment" or not _VARIABLE.search(found):
            return found
        if token.lastgroup == "bare":
            return _escape(value(found[2:-1]).strip())
        if token.lastgroup == "literal":  # without escapes, it could not hold every value
            quotes = 3 if found.startswith("'''") else 1
            lines = found[quotes:-quotes].split("\n")
            found = '"' * quotes + "\n".join(map(_escape, lines)) + '"' * quotes
        return _VARIABLE.sub(lambda variable: _escape(value(variable[1])), found)

    return _TOKEN.sub(expand, text)


def _escape(text: str) -> str:
    """Return the notation of a text inside a basic string."""
    text = text.replace("\\", "\\\\").replace('"', '\\"')
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def overlay_environment(values: dict[str, Any], environ: Mapping[str, str], model: type[BaseModel]) -> None:
    """Set the values of variables TIDEMILL_<SECTION>__<KEY>, over those of the file.

    A key is that of the file, regardless of case, else it is in lower case. The value is a text, of which `model` makes
    a number or a boolean, or TOML where `model` has a list, a map or a section. Raises InvalidError, which never
    contains a value: it may be a secret.
    """
    # A variable of a whole map comes before those of its keys.
    for variable in sorted(environ, key=lambda name: name.count("__")):
        if not variable.startswith("TIDEMILL_") or "__" not in variable:
            continue
        *path, last = variable.removeprefix("TIDEMILL_").split("__")
        section, kind = values, cast("Any", model)
        for part in path:
            key = _key_in(section, part, variable)
            section, kind = section.setdefault(key, {}), _kind_of(kind, key)
            if not isinstance(section, dict):
                raise InvalidError(
                    f"an environment variable sets a key below a plain value: variable={variable} key={key}.",
                    fix=f"Unset it, or make {key} a section of the file.",
                )
        key = _key_in(section, last, variable)
        text = environ[variable]
        section[key] = _parse_toml(text, variable) if _is_toml(_kind_of(kind, key)) else text


def _key_in(section: Mapping[str, Any], name: str, variable: str) -> str:
    """Return the key of a section that a variable means: shells have variables in upper case."""
    if name in section:
        return name
    found = [key for key in section if key.lower() == name.lower()]
    if len(found) > 1:
        raise InvalidError(
            f"an environment variable fits several keys: variable={variable} keys={', '.join(found)}.",
            fix="Write it with the case of one of them.",
        )
    return found[0] if found else name.lower()


def _kind_of(kind: Any, key: str) -> Any:
    """Return the annotation of a key below a model or a map, None if it has none."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        field = kind.model_fields.get(key)
        return field.annotation if field is not None else None
    return get_args(kind)[1] if get_origin(kind) is dict else None


def _is_toml(kind: Any) -> bool:
    """Return whether a text cannot stand for a value of this annotation."""
    origin = get_origin(kind)
    if origin is Literal:
        return not all(isinstance(value, str) for value in get_args(kind))
    return origin in (list, dict) or (isinstance(kind, type) and issubclass(kind, BaseModel))


def _parse_toml(text: str, variable: str) -> Any:
    try:
        found = tomllib.loads(f"value = {text.strip()}")
    except tomllib.TOMLDecodeError:
        found = {}
    if found.keys() != {"value"}:
        raise InvalidError(
            f"an environment variable is not a value of TOML: variable={variable}.",
            fix="""Write a list as '["a", "b"]', a map as '{ name = "value" }', a number as 2.""",
        )
    return found["value"]


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
