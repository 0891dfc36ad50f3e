"""What the references in a JSON schema refer to: `$ref`, `$dynamicRef`, `$id`, `$anchor`, of draft 2020-12."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from engine_kit.schemas.places import SchemaPlace, places


class References:
    """The schemas within a schema by place, and what refers to which.

    Args:
        schema: decoded JSON.

    Attributes:
        nodes: by place; bools are there where they were asked for.

    Raises InvalidRequestError for what is no schema, and for a reference to what is not there.
    """

    def __init__(self, schema: Any) -> None:
        self._root = schema
        self.nodes: dict[str, Any] = {"": schema}
        self._places: dict[str, SchemaPlace] = {}
        self._resources: dict[str, str] = {}  # place by URI
        self._base: dict[str, str] = {}  # URI by the place of a schema that has one of its own
        self._anchors: dict[tuple[str, str], str] = {}
        self._dynamic: dict[tuple[str, str], str] = {}
        self._added: dict[str, str] = {}
        found = list(places(schema))
        for place in sorted(found, key=lambda place: place.path.count("/")):
            self._enter(place)

    def _enter(self, place: SchemaPlace) -> None:
        path, node = place.path, place.schema
        self.nodes[path], self._places[path] = node, place
        name = node.get("$id")
        if not path or isinstance(name, str):
            own = name if isinstance(name, str) else ""
            uri = own if not path else _joined(self._uri(path), own)
            uri = urldefrag(uri).url
            self._base[path] = uri
            self._resources.setdefault(uri, path)
        for key, known in (("$anchor", self._anchors), ("$dynamicAnchor", self._dynamic)):
            if isinstance(node.get(key), str):
                known.setdefault((self._uri(path), node[key]), path)

    def _uri(self, path: str) -> str:
        """The URI of the resource that a schema stands in."""
        while path not in self._base:
            path = path.rpartition("/")[0] if "/" in path else ""
        return self._base[path]

    def node(self, path: str) -> Any:
        """The schema at a place."""
        if path not in self.nodes:
            head, _, last = path.rpartition("/")
            above, key = self.nodes.get(head), ""
            if above is None:
                head, _, key = head.rpartition("/")
                above = self.nodes[head][_unescaped(key)]
            self.nodes[path] = above[int(last)] if isinstance(above, list) else above[_unescaped(last)]
        return self.nodes[path]

    def place(self, path: str) -> SchemaPlace:
        """A schema that is not a bool, with its place."""
        return self._places[path]

    def add(self, path: str, part: Mapping[str, Any]) -> str:
        """The place of a schema made of keywords of another, whose parts keep their meaning."""
        key = f"{path} {part!r}"
        if key not in self._added:
            made = f"{path}/ {len(self._added)}"
            self._added[key] = made
            self.nodes[made], self._places[made] = part, SchemaPlace(part, made, self._root, ())
            for inner in places(part):
                if inner.path:
                    self.nodes[made + inner.path] = inner.schema
                    self._places[made + inner.path] = self._places[path + inner.path]
        return self._added[key]

    # -- references ---------------------------------------------------------------------------------------------------
    def target(self, place: SchemaPlace, keyword: str = "$ref") -> str:
        """The place that a schema's reference names."""
        ref = place.schema[keyword]
        uri, fragment = urldefrag(ref if not ref.startswith("#") else self._uri(place.path) + ref)
        if not ref.startswith("#"):
            uri = _joined(self._uri(place.path), uri)
        if uri not in self._resources:
            raise place.refuse(keyword, f"{ref!r:.80} is not in the schema itself, and nothing else is read")
        start, fragment = self._resources[uri], unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return self._anchored(place, keyword, uri, fragment)
        return self._followed(place, keyword, start, fragment)

    def _anchored(self, place: SchemaPlace, keyword: str, uri: str, name: str) -> str:
        known = [anchors[uri, name] for anchors in (self._anchors, self._dynamic) if (uri, name) in anchors]
        if not known:
            raise place.refuse(keyword, f"{place.schema[keyword]!r:.80} is not there")
        if keyword == "$dynamicRef" and (uri, name) in self._dynamic:
            return self._outermost(place, known[-1], name)
        return known[0]

    def _outermost(self, place: SchemaPlace, found: str, name: str) -> str:
        """Where a dynamic reference leads: to the anchor of that name in the outermost resource that has one, which is
        the whole schema where it does, as everything is reached through it."""
        if (self._base[""], name) in self._dynamic:
            return self._dynamic[self._base[""], name]
        if sum(anchor == name for _, anchor in self._dynamic) > 1:
            raise place.refuse(
                "$dynamicRef", f"{name!r:.40} is an anchor in several schemas: which one is meant depends"
            )
        return found

    def _followed(self, place: SchemaPlace, keyword: str, start: str, pointer: str) -> str:
        node, path = self.node(start), start
        for part in pointer.split("/")[1:]:
            name = _unescaped(part)
            try:
                node = node[int(name)] if isinstance(node, list) else node[name]
            except (KeyError, IndexError, ValueError, TypeError):
                raise place.refuse(keyword, f"{place.schema[keyword]!r:.80} is not there") from None
            path += "/" + part
        if path not in self.nodes:
            self.nodes[path] = node
            if not isinstance(node, bool):
                self._unknown(place, keyword, path, node)
        return path

    def _unknown(self, place: SchemaPlace, keyword: str, path: str, node: Any) -> None:
        """A schema under a keyword that holds none, as some keep theirs."""
        if not isinstance(node, Mapping):
            raise place.refuse(keyword, f"{place.schema[keyword]!r:.80} is no schema")
        for inner in places(node):
            inner_path = path + inner.path
            self.nodes[inner_path] = inner.schema
            self._places[inner_path] = SchemaPlace(inner.schema, inner_path, self._root, inner.types)


def _joined(base: str, ref: str) -> str:
    return base if not ref else urljoin(base, ref) if not base.startswith("urn:") else ref


def _unescaped(part: str) -> str:
    return part.replace("~1", "/").replace("~0", "~")
