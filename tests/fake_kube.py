"""An API server in memory: objects by path, lists by label, and what a test lets it answer or refuse."""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from pollux_agent.driver.kube.api import KubeApi, KubeError

NOW_UNIX_S = 1_700_000_000.0
_KINDS = frozenset({"configmaps", "namespaces", "nodes", "pods", "resourcequotas", "serviceaccounts"})
_REVIEWS = "/apis/authorization.k8s.io/v1/"

Json = Mapping[str, Any]


class FakeKube(KubeApi):
    """Answers what :class:`KubeApi` asks. ``allows`` is asked for each access review's ``spec``;
    ``before`` may raise a KubeError for a call, or change what is there, as somebody else would.
    """

    def __init__(
        self, *objects: tuple[str, Json], allows: Callable[[Json], bool] = lambda spec: True
    ) -> None:
        super().__init__(client=cast(Any, None))
        self.server_unix_s = NOW_UNIX_S
        self.objects: dict[str, dict[str, Any]] = {}
        self.allows = allows
        self.before: Callable[[str, str], None] = lambda method, path: None
        for collection, body in objects:
            self.put(collection, body)

    def put(self, collection: str, body: Json) -> None:
        meta = body["metadata"]
        spaced = f"namespaces/{meta['namespace']}/" if "namespace" in meta else ""
        kind = collection.rpartition("/")[2]
        self.objects[f"{collection.removesuffix(kind)}{spaced}{kind}/{meta['name']}"] = copy.deepcopy(
            dict(body)
        )

    def _json(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any],
        *,
        body: Any = None,
        content: str = "",
        accept: str = "",
    ) -> dict[str, Any]:
        self.before(method, path)
        if path.startswith(_REVIEWS):
            return {"status": {"allowed": self.allows(body["spec"])}}
        if method == "GET" and path not in self.objects and path != "/version":
            return {"metadata": {}, "items": list(self._listed(path, query.get("labelSelector", "")))}
        if method == "POST":
            return self._create(path, body)
        if path == "/version":
            return {"major": "1", "minor": "30", "gitVersion": "v1.30.0"}
        found = self.objects[path] if path in self.objects else _missing(path)
        if method == "DELETE":
            del self.objects[path]
        elif method == "PUT":
            found = self.objects[path] = copy.deepcopy(body)
        elif method == "PATCH":
            _apply(found, body)
        return copy.deepcopy(found)

    def _create(self, path: str, body: Json) -> dict[str, Any]:
        made = copy.deepcopy(dict(body))
        made["metadata"] = {"uid": f"uid-{len(self.objects)}", **made["metadata"]}
        at = f"{path}/{made['metadata']['name']}"
        if at in self.objects:
            raise KubeError(f"POST {path}: {at} already exists", 409, "AlreadyExists")
        self.objects[at] = made
        return copy.deepcopy(made)

    def _listed(self, path: str, selector: str) -> Iterable[dict[str, Any]]:
        top, _, kind = path.rpartition("/")
        if kind not in _KINDS:
            _missing(path)
        for at, found in sorted(self.objects.items()):
            collection = at.rpartition("/")[0]
            here = collection == path or (
                "/namespaces/" not in path
                and collection.startswith(f"{top}/")
                and collection.endswith(f"/{kind}")
            )
            labels = found["metadata"].get("labels") or {}
            asked = [part.partition("=") for part in selector.split(",") if part]
            if here and all(
                name in labels and (not eq or labels[name] == value) for name, eq, value in asked
            ):
                yield copy.deepcopy(found)


def _missing(path: str) -> dict[str, Any]:
    raise KubeError(f"{path} not found", 404, "NotFound")


def _apply(found: dict[str, Any], body: Any) -> None:
    """A JSON patch of annotations, or a merge patch."""
    if isinstance(body, Mapping):
        for name, value in body.items():
            if isinstance(value, Mapping):
                _apply(found.setdefault(name, {}), value)
            else:
                found[name] = value
        return
    notes = found["metadata"].setdefault("annotations", {})
    for change in body:
        name = change["path"].removeprefix("/metadata/annotations/").replace("~1", "/").replace("~0", "~")
        if change["op"] == "test" and notes.get(name) != change["value"]:
            raise KubeError("the test of a patch failed", 422, "Invalid")
        if change["op"] == "add":
            notes[name] = change["value"]
