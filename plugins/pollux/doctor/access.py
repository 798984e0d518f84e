"""Whether an account may do what its part needs: the API server is asked, verb by verb."""

from collections.abc import Iterator, Mapping, Sequence

from pollux.doctor.finding import Finding, failed, ok
from pollux.doctor.rights import ROLES, Right, Scope, rule
from pollux_agent.driver.kube.api import KubeApi, KubeError

_REVIEWS = "/apis/authorization.k8s.io/v1"


def check_rights(
    api: KubeApi,
    roles: Sequence[str],
    places: Mapping[Scope, Sequence[str]],
    account: str = "",
    driver_account: str = "",
) -> Iterator[Finding]:
    """One finding a role and account, with the rules that are missing.

    Asks about the caller, or about ``account`` (``namespace/name`` of a ServiceAccount), for which the caller
    needs the right to create SubjectAccessReviews. A driver has an account of its own in each namespace of
    jobs, ``driver_account`` or else the namespace's default, and is asked about as that one. Raises KubeError
    where the API server does not answer.
    """
    for role in roles:
        if role != "driver":
            yield from _check_role(api, role, places, account)
            continue
        for namespace in places["jobs"]:
            own = f"{namespace}/{driver_account or 'default'}"
            yield from _check_role(api, role, {**places, "jobs": (namespace,)}, own)


def _check_role(
    api: KubeApi, role: str, places: Mapping[Scope, Sequence[str]], account: str
) -> Iterator[Finding]:
    missing: dict[str, list[Right]] = {}
    for right in ROLES[role]:
        for namespace in places[right.scope]:
            if not _allowed(api, right, namespace, account):
                missing.setdefault(namespace, []).append(right)
    who = f"{account} " if account else ""
    if not missing:
        verb = "has" if account else "there are"
        yield ok(f"rights: {role}", f"{who}{verb} all {len(ROLES[role])} in {', '.join(places['jobs'])}")
    for namespace, rights in missing.items():
        kind = f"Role in namespace {namespace}" if namespace else "ClusterRole"
        yield failed(
            f"rights: {role}",
            f"{who}may not " + "; may not ".join(right.in_words(namespace) for right in rights),
            f"rules of a {kind}, bound to {account or 'this account'} "
            f"(the chart makes them with rbac.create=true):\n{rule(rights)}",
        )


def check_places(
    api: KubeApi, namespaces: Mapping[str, str], accounts: Mapping[str, str]
) -> Iterator[Finding]:
    """Namespaces, and ServiceAccounts by ``namespace/name``, that are not there; each maps to the value that
    names it. What the caller may not look up is passed over: its rights there tell as much.
    """
    for namespace, value in namespaces.items():
        if not _exists(api, f"/api/v1/namespaces/{namespace}"):
            yield failed(
                "namespaces",
                f"there is no namespace {namespace}",
                f"kubectl create namespace {namespace}, or correct {value}",
            )
    for account, value in accounts.items():
        namespace, _, name = account.partition("/")
        if not _exists(api, f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}"):
            yield failed(
                "accounts",
                f"namespace {namespace} has no ServiceAccount {name}",
                f"kubectl create serviceaccount {name} -n {namespace}, or correct {value}",
            )


def _exists(api: KubeApi, path: str) -> bool:
    try:
        api.get(path)
    except KubeError as error:
        if error.status not in (403, 404):
            raise
        return error.status == 403
    return True


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
