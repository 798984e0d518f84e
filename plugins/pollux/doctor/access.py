"""Whether an account may do what its part needs: the API server is asked, verb by verb."""

from collections.abc import Iterator, Mapping, Sequence

from pollux.doctor.finding import Finding, failed, ok
from pollux.doctor.rights import ROLES, Right, Scope, rule
from pollux_agent.driver.kube.api import KubeApi

_REVIEWS = "/apis/authorization.k8s.io/v1"


def check_rights(
    api: KubeApi, roles: Sequence[str], places: Mapping[Scope, Sequence[str]], account: str = ""
) -> Iterator[Finding]:
    """One finding a role, with the rules that are missing.

    Asks about the caller, or about ``account`` (``namespace/name`` of a ServiceAccount), for which the caller
    needs the right to create SubjectAccessReviews. Raises KubeError where the API server does not answer.
    """
    for role in roles:
        missing: dict[str, list[Right]] = {}
        for right in ROLES[role]:
            for namespace in places[right.scope]:
                if not _allowed(api, right, namespace, account):
                    missing.setdefault(namespace, []).append(right)
        if not missing:
            yield ok(f"rights: {role}", f"all {len(ROLES[role])} are there")
        for namespace, rights in missing.items():
            kind = f"Role in namespace {namespace}" if namespace else "ClusterRole"
            yield failed(
                f"rights: {role}",
                "may not " + "; may not ".join(right.in_words(namespace) for right in rights),
                f"rules of a {kind}, bound to {account or 'this account'} "
                f"(the chart makes them with rbac.create=true):\n{rule(rights)}",
            )


def _allowed(api: KubeApi, right: Right, namespace: str, account: str) -> bool:
    resource, _, part = right.resource.partition("/")
    attributes = {
        "verb": right.verb,
        "group": right.group,
        "resource": resource,
        "subresource": part,
        "namespace": namespace,
        "name": right.name,
    }
    spec: dict[str, object] = {"resourceAttributes": attributes}
    kind = "SelfSubjectAccessReview"
    if account:
        kind = "SubjectAccessReview"
        where, _, name = account.partition("/")
        spec["user"] = f"system:serviceaccount:{where}:{name}"
        spec["groups"] = ["system:serviceaccounts", f"system:serviceaccounts:{where}", "system:authenticated"]
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": spec}
    answer = api.create(f"{_REVIEWS}/{kind.lower()}s", body)
    return bool((answer.get("status") or {}).get("allowed"))
