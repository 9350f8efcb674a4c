"""Principals in Kafka's notation `User:NAME`, and the rules that map a certificate's subject to a principal.

A rule is `DEFAULT` (the whole distinguished name, RFC 4514) or `RULE:pattern/replacement/[L|U]`, as Kafka's
`ssl.principal.mapping.rules` (KIP-371): the first rule whose pattern matches the whole name wins, `$1` is its first
group, L and U change the case of the result. A slash within pattern or replacement is written `\\/`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final

from tidemill.base.errors import InvalidError

USER: Final = "User:"
ANONYMOUS: Final = "User:ANONYMOUS"
NAME_CHARS_MAX: Final = 255

_RULE: Final = re.compile(r"RULE:((?:\\.|[^\\/])*)/((?:\\.|[^\\/])*)/([LU]?)")
_GROUP: Final = re.compile(r"\$(\d)|\\(.)|(\\)")

PrincipalOf = Callable[[str], str | None]
"""(distinguished name) → principal, or None if no rule matches."""


def principal_rules(rules: Iterable[str]) -> PrincipalOf:
    """Compile mapping rules. Raises InvalidError naming the rule that cannot be parsed."""
    compiled = [_compile_rule(rule.strip()) for rule in rules]

    def principal_of(name: str) -> str | None:
        return next((USER + found for rule in compiled if (found := rule(name))), None)

    return principal_of


def _compile_rule(rule: str) -> Callable[[str], str | None]:
    if rule == "DEFAULT":
        return lambda name: name
    parts = _RULE.fullmatch(rule)
    fix = "Write DEFAULT, or RULE:pattern/replacement/ with L or U at its end to change the case."
    if parts is None:
        raise InvalidError(f"invalid principal mapping rule: rule={rule!r}.", fix=fix)
    pattern, replacement, case = parts.groups()
    try:
        expression = re.compile(pattern.replace("\\/", "/"))
        groups = [int(match[1]) for match in _GROUP.finditer(replacement) if match[1]]
        if any(group > expression.groups for group in groups):
            raise InvalidError(f"the replacement refers to a group that the pattern lacks: rule={rule!r}.", fix=fix)
    except re.error as error:
        raise InvalidError(f"invalid principal mapping rule: rule={rule!r} reason={error}.", fix=fix) from error

    def apply(name: str) -> str | None:
        match = expression.fullmatch(name)
        if match is None:
            return None
        found = _GROUP.sub(lambda part: (match[int(part[1])] or "") if part[1] else part[2] or "", replacement)
        return found.lower() if case == "L" else found.upper() if case == "U" else found

    return apply
