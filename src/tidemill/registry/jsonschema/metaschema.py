"""Check that JSON is a schema of its draft, in time that is linear in its size.

The library jsonschema decides, with two keywords of the drafts' metaschemas replaced:

- `uniqueItems`: the library compares every two items of an array that cannot be sorted, such as an enum of a text and
  numbers.
- `$recursiveRef` and `$dynamicRef`: the library searches every level above. In a metaschema that nothing extends they
  always lead to its root.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import orjson

from tidemill.registry.errors import invalid_schema
from tidemill.registry.limits import shorten


def check_schema(tree: Any) -> None:
    """Check against the metaschema that `$schema` names, that of draft 7 without it. Raises RegistryError."""
    from jsonschema import Draft7Validator
    from jsonschema.validators import validator_for

    try:
        draft = validator_for(tree, default=Draft7Validator)
    except (AttributeError, TypeError, ValueError) as error:
        raise invalid_schema(f"$schema is not a URI: {shorten(tree['$schema'])}") from error
    # Formats are not checked: patterns are those of ECMA 262, and Python's are not.
    checker = _checker_class(draft)
    found = next(checker(checker.META_SCHEMA).iter_errors(tree), None)
    if found is not None:
        where = "/".join(str(part) for part in found.absolute_path)
        raise invalid_schema(f"{found.message[:200]} at /{where}") from found


@cache
def _checker_class(draft: Any) -> Any:
    """Return the class that checks schemas of a draft, given as the library's class."""
    from jsonschema.validators import extend

    checker = extend(
        draft, {"uniqueItems": _check_unique_items, "$recursiveRef": _check_whole, "$dynamicRef": _check_whole}
    )

    def evolve(self: Any, *, schema: Any, _resolver: Any = None) -> Any:
        """Return the checker of a part. The library's own evolve() returns to the class that `$schema` names."""
        return checker(schema, _resolver=_resolver or self._resolver)

    checker.evolve = evolve
    return checker


def _check_unique_items(checker: Any, wanted: Any, items: Any, _schema: Any) -> Iterator[Any]:
    from jsonschema.exceptions import ValidationError

    if wanted and isinstance(items, list) and not have_unique_items(items):
        yield ValidationError(f"{items!r} has non-unique elements")


def _check_whole(checker: Any, _reference: Any, part: Any, _schema: Any) -> Iterator[Any]:
    from jsonschema_specifications import REGISTRY

    whole = checker.META_SCHEMA
    yield from checker.descend(part, whole, resolver=REGISTRY.resolver(whole["$id"]))


def have_unique_items(items: list[Any]) -> bool:
    """Return whether no two items are equal by the rules of JSON Schema: 1 equals 1.0, but not true."""
    texts = (orjson.dumps(_with_plain_numbers(item), option=orjson.OPT_SORT_KEYS) for item in items)
    # Texts, because their hashes have a secret seed: a client cannot choose items with equal hashes.
    return len(set(texts)) == len(items)


def _with_plain_numbers(value: Any) -> Any:
    """Return a value with integers in place of equal floats. Integers that JSON may hold have 64 bits here."""
    if isinstance(value, float) and value.is_integer() and -(1 << 63) <= value < 1 << 64:
        return int(value)
    if isinstance(value, list):
        return [_with_plain_numbers(one) for one in value]
    if isinstance(value, dict):
        return {name: _with_plain_numbers(one) for name, one in value.items()}
    return value
