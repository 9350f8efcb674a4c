"""References of a JSON Schema: the documents, nested schemas and anchors that they may name.

`referencing` searches all documents whenever a reference names an anchor or a nested schema, and each resolver has to
find it again. So the documents are searched here, once, before the first reference is resolved. Nothing is ever
fetched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from tidemill.registry.errors import invalid_schema
from tidemill.registry.limits import shorten

URI_CHARS = 16 << 20
"""Limit of the characters in the URIs of a schema and of its references. A relative URI counts together with its base
URI, because the two are joined."""


class ReferenceResolver:
    """Resolver of the references of one schema.

    `others` are the names of the request with the schemas that they name. Raises RegistryError.
    """

    def __init__(self, tree: Any, others: Sequence[tuple[str, Any]]) -> None:
        from jsonschema_specifications import REGISTRY
        from referencing import Resource
        from referencing.jsonschema import DRAFT7

        _limit_uris([("", tree), *others])
        root = Resource.from_contents(tree, default_specification=DRAFT7)
        uri = root.id() or ""
        named = [(name, Resource.from_contents(other, default_specification=DRAFT7)) for name, other in others]
        registry = _with_documents(REGISTRY, named, named)
        self._draft = DRAFT7
        self._by_name = registry.resolver()
        self.root = _with_documents(registry, [(uri, root)], [*named, (uri, root)]).resolver(uri)
        """Resolver of the schema itself; its parts may have others."""

    def enter(self, schema: dict[str, Any], resolver: Any) -> Any:
        """Return the resolver of a part of a schema, whose `$id` may name another URI."""
        if "$id" not in schema:
            return resolver
        try:
            return resolver.in_subresource(self._draft.create_resource(schema))
        except (AttributeError, TypeError, ValueError) as error:
            raise invalid_schema(f"$id is not a URI: {shorten(schema['$id'])}") from error

    def look_up(self, reference: str, resolver: Any) -> Any:
        """Return what a reference refers to: its `contents`, and their `resolver`."""
        from referencing.exceptions import Unresolvable

        unresolved = (Unresolvable, ValueError, TypeError)  # TypeError: a pointer into a number
        try:
            return resolver.lookup(reference)
        except unresolved:
            try:
                # under the name in the request, independent of the schema's own URI
                return self._by_name.lookup(reference)
            except unresolved as error:
                raise invalid_schema(f"unresolved reference {shorten(reference)}") from error


def _with_documents(registry: Any, documents: Iterable[tuple[str, Any]], first: Iterable[tuple[str, Any]]) -> Any:
    """Return `registry` with documents, their nested schemas and their anchors, so that no look-up searches again.

    The documents `first` precede nested schemas of the same URI, and these precede those of `registry`.
    """
    empty = type(registry)
    for uri, document in documents:
        # Some valid documents cannot be searched, such as one whose `dependencies` have an array after a schema.
        with suppress(AttributeError, TypeError, ValueError):
            registry = registry.combine(empty().with_resource(uri, document).crawl())
    return registry.combine(empty(resources=dict(first)))


def _limit_uris(documents: Iterable[tuple[str, Any]]) -> None:
    chars = 0
    parts = [(len(name), tree) for name, tree in documents]
    while parts:
        base, part = parts.pop()
        if isinstance(part, dict):
            uris = [len(part[word]) for word in ("$id", "id") if isinstance(part.get(word), str)]
            base += sum(uris)
            chars += base * len(uris)
            words = ("$ref", "$dynamicRef", "$recursiveRef")
            chars += sum(base + len(part[word]) for word in words if _is_joined(part.get(word)))
            parts += [(base, one) for one in part.values()]
        elif isinstance(part, list):
            parts += [(base, one) for one in part]
        if chars > URI_CHARS:
            raise invalid_schema(f"its URIs have more than {URI_CHARS} characters")


def _is_joined(reference: Any) -> bool:
    return isinstance(reference, str) and not reference.startswith("#")
