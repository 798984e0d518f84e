"""The chart on a real API server: accepted, installed, upgraded, taken away, and what its rights allow."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from helm_runs import CHART, NAMESPACE, VALUE_SETS, account_kubeconfig, render, run_tool
from kube_nodes import TestKube, awaited, has_token

from pollux.doctor.rights import ROLES, Right
from pollux_agent.driver.kube.api import KubeApi, KubeError, open_api, pod_path

pytestmark = [pytest.mark.needs("kube"), pytest.mark.slow]

TEAMS = ("pollux-test-a", "pollux-test-b")
SPACES = (NAMESPACE, *TEAMS, "pollux-test-lease")
"""All that are named in values here and in the sets of values."""

VALUES: Mapping[str, Any] = {
    "namespaces": list(TEAMS),
    "airflow": {"serviceAccounts": [{"name": "airflow-worker", "namespace": NAMESPACE}]},
    "mlflow": {"trackingUri": "http://mlflow.ml:5000"},
    "state": {"pvc": {"create": True}},
}

KubeconfigOf = Callable[[str, str], Path]


def helm(admin: Path, *arguments: str, values: Mapping[str, Any] = VALUES) -> None:
    run_tool(
        "helm", *arguments, "--namespace", NAMESPACE, "--values", "-",
        kubeconfig=admin, stdin=json.dumps(values),
    )  # fmt: skip


@pytest.fixture(scope="module")
def admin(kube: TestKube) -> Path:
    """The kubeconfig of an administrator."""
    found: Path = kube.kubeconfig
    return found


@pytest.fixture(scope="module")
def kubeconfig_of(admin: Path) -> Iterator[KubeconfigOf]:
    """Make the kubeconfig of a ServiceAccount, with a token that the API server issued."""
    folder = Path(tempfile.mkdtemp(prefix="pollux-accounts-"))

    def make(namespace: str, account: str) -> Path:
        return account_kubeconfig(admin, namespace, account, folder / f"{namespace}-{account}")

    yield make
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def api(kube: TestKube, admin: Path) -> Iterator[KubeApi]:
    """The administrator's API, with the namespaces and Airflow's own account."""
    api = open_api(admin)
    for namespace in SPACES:
        kube.bare_namespace(namespace)
    accounts = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
    api.create(accounts, {"metadata": {"name": "airflow-worker"}})
    awaited(lambda: has_token(api, f"{accounts}/default"))
    yield api
    for namespace in SPACES:
        api.delete(f"/api/v1/namespaces/{namespace}")


@pytest.fixture(scope="module")
def installed(admin: Path, api: KubeApi) -> Iterator[None]:
    helm(admin, "install", "pollux", str(CHART))
    yield
    run_tool("helm", "uninstall", "pollux", "--namespace", NAMESPACE, kubeconfig=admin, check=False)


def allowed(api: KubeApi, right: Right, namespace: str) -> bool:
    """What the API server says about its caller."""
    resource, _, part = right.resource.partition("/")
    attributes = {
        "verb": right.verb,
        "group": right.group,
        "resource": resource,
        "subresource": part,
        "namespace": namespace,
        "name": right.name,
    }
    review = {"spec": {"resourceAttributes": attributes}}
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    return bool(api.create(path, {"kind": "SelfSubjectAccessReview", **review})["status"]["allowed"])


def places(right: Right) -> tuple[str, ...]:
    return {"cluster": ("",), "jobs": TEAMS, "lease": (NAMESPACE,)}[right.scope]


def refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except KubeError as error:
        assert error.status == 403, error
        return True
    return False


@pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS)
def test_the_server_accepts_every_object(admin: Path, api: KubeApi, values: Mapping[str, Any]) -> None:
    manifests = render(values)
    for manifest in manifests:  # admission looks up a pod's account, which a dry run has not made
        if manifest["kind"] == "Pod":
            manifest["spec"]["serviceAccountName"] = "default"
    text = "\n---\n".join(json.dumps(manifest) for manifest in manifests)
    arguments = ("create", "--dry-run=server", "--validate=false", "-o", "name", "-f", "-")
    found = run_tool("kubectl", *arguments, kubeconfig=admin, stdin=text)
    assert len(found.stdout.split()) == len(manifests)


@pytest.mark.parametrize(
    ("account", "roles"),
    [
        ((NAMESPACE, "pollux-scheduler"), ("scheduler",)),
        ((NAMESPACE, "airflow-worker"), ("scheduler", "operator")),
    ],
)
def test_airflows_accounts_are_allowed_what_they_need(
    installed: None, kubeconfig_of: KubeconfigOf, account: tuple[str, str], roles: tuple[str, ...]
) -> None:
    api = open_api(kubeconfig_of(*account))
    for role in roles:
        for right in ROLES[role]:
            for namespace in places(right):
                assert allowed(api, right, namespace), right.in_words(namespace)


def test_the_scheduler_is_refused_everything_else(installed: None, kubeconfig_of: KubeconfigOf) -> None:
    api = open_api(kubeconfig_of(NAMESPACE, "pollux-scheduler"))
    assert not refused(lambda: api.get("/api/v1/nodes"))
    assert not refused(lambda: api.get("/api/v1/pods"))
    assert refused(lambda: api.create(pod_path("pollux-test-a"), {"metadata": {"name": "x"}, "spec": {}}))
    assert refused(lambda: api.delete(pod_path("pollux-test-a", "x")))
    assert refused(lambda: api.get("/api/v1/namespaces/pollux-test-a/secrets"))
    assert refused(lambda: api.patch("/api/v1/nodes/x", {"metadata": {"labels": {"a": "b"}}}))
    assert refused(lambda: api.patch(pod_path("kube-system", "x"), {"metadata": {}}))
    lease = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/another"
    assert refused(lambda: api.get(lease))


def test_a_driver_is_confined_to_the_pods_of_its_namespace(
    installed: None, kubeconfig_of: KubeconfigOf
) -> None:
    api = open_api(kubeconfig_of("pollux-test-a", "pollux-driver"))
    for right in ROLES["driver"]:
        assert allowed(api, right, "pollux-test-a"), right
        assert not allowed(api, right, "pollux-test-b"), right
    assert refused(lambda: api.get("/api/v1/nodes"))
    assert refused(lambda: api.get(pod_path("pollux-test-b")))
    assert refused(lambda: api.get("/api/v1/namespaces/pollux-test-a/secrets"))


def test_user_code_may_do_nothing(installed: None, kubeconfig_of: KubeconfigOf) -> None:
    """Even with a token, which no worker is given."""
    api = open_api(kubeconfig_of("pollux-test-a", "pollux-worker"))
    for right in {right for rights in ROLES.values() for right in rights}:
        for namespace in ("pollux-test-a", NAMESPACE, ""):
            assert not allowed(api, right, namespace), right.in_words(namespace)
    assert refused(lambda: api.get(pod_path("pollux-test-a")))
    assert refused(lambda: api.patch(pod_path("pollux-test-a", "x"), {"metadata": {}}))


def test_an_upgrade_to_shadow_mode_takes_the_right_to_write(
    admin: Path, installed: None, kubeconfig_of: KubeconfigOf
) -> None:
    api = open_api(kubeconfig_of(NAMESPACE, "pollux-scheduler"))
    patch = Right(verb="patch", resource="pods")
    assert allowed(api, patch, "pollux-test-a")
    helm(admin, "upgrade", "pollux", str(CHART), values={**VALUES, "scheduler": {"shadow": True}})
    assert not allowed(api, patch, "pollux-test-a")
    assert all(allowed(api, right, "") for right in ROLES["shadow"])
    helm(admin, "upgrade", "pollux", str(CHART))
    assert allowed(api, patch, "pollux-test-a")


def test_uninstalling_leaves_what_running_jobs_need_and_a_new_install_takes_it_over(
    admin: Path, api: KubeApi, installed: None, kubeconfig_of: KubeconfigOf
) -> None:
    driver = open_api(kubeconfig_of("pollux-test-a", "pollux-driver"))
    pod = {
        "metadata": {"name": "job", "labels": {"pollux.dev/role": "driver"}},
        "spec": {"serviceAccountName": "pollux-driver", "containers": [{"name": "base", "image": "none:1"}]},
    }
    awaited(lambda: has_token(api, "/api/v1/namespaces/pollux-test-a/serviceaccounts/pollux-driver"))
    uid = api.create(pod_path("pollux-test-a"), pod)["metadata"]["uid"]
    claim = "/api/v1/namespaces/pollux-test-a/persistentvolumeclaims/pollux-checkpoints"
    claimed = api.get(claim)["metadata"]["uid"]
    scheduler = open_api(kubeconfig_of(NAMESPACE, "pollux-scheduler"))

    run_tool("helm", "uninstall", "pollux", "--namespace", NAMESPACE, kubeconfig=admin)
    assert driver.get(pod_path("pollux-test-a", "job"))["metadata"]["uid"] == uid
    assert api.get(claim)["metadata"]["uid"] == claimed
    with pytest.raises(KubeError) as gone:
        scheduler.get("/api/v1/nodes")
    assert gone.value.status in (401, 403)
    assert not [
        s
        for s in api.items(f"/api/v1/namespaces/{NAMESPACE}/configmaps")
        if "pollux" in s["metadata"]["name"]
    ]

    helm(admin, "install", "pollux", str(CHART))
    assert driver.get(pod_path("pollux-test-a", "job"))["metadata"]["uid"] == uid
    assert api.get(claim)["metadata"]["uid"] == claimed
