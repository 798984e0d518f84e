"""What the chart renders, with several sets of values; no cluster is needed."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml
from helm_runs import CHART, NAMESPACE, TOP, VALUE_SETS, Manifest, named, of_kind, render, run_tool

from pollux.cluster.k8s import kube_settings
from pollux.doctor.rights import ROLES, Right, rule
from pollux.metrics import LastCycle, exposition
from pollux.policy import POLICIES
from pollux.settings import settings

FULL = VALUE_SETS["a whole installation"]


@pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS)
def test_helm_finds_nothing_to_say_against_it(values: Mapping[str, Any]) -> None:
    run_tool("helm", "lint", "--strict", str(CHART), "--values", "-", stdin=json.dumps(values))


@pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS)
def test_what_airflow_is_given_are_settings_that_it_understands(values: Mapping[str, Any]) -> None:
    data = named(render(values), "ConfigMap", "pollux-settings")["data"]
    assert all(isinstance(value, str) for value in data.values())
    general, kube = settings(data), kube_settings(data)
    assert general.cluster == "kubernetes"
    assert kube.namespaces == tuple(values.get("namespaces") or [NAMESPACE])
    assert kube.namespace == kube.namespaces[0]
    known = {f"POLLUX_{field.upper()}" for field in type(general).__dataclass_fields__}
    known |= {f"POLLUX_KUBE_{field.upper()}" for field in type(kube).__dataclass_fields__}
    assert set(data) <= known | {"MLFLOW_TRACKING_URI"}


@pytest.mark.parametrize(
    ("release", "namespace", "want"),
    [
        pytest.param("pollux", "airflow", "airflow-pollux", id="the how-to's"),
        pytest.param("pollux-demo", "pollux-demo", "pollux-demo", id="both alike"),
        pytest.param("a.b", "team", "team-a-b", id="a dot in a release's name"),
    ],
)
def test_releases_tell_their_jobs_apart(release: str, namespace: str, want: str) -> None:
    assert deployment_of(release, namespace) == want


def test_long_names_of_releases_stay_apart() -> None:
    names = {deployment_of("p" * 53, "n" * 62 + end) for end in "ab"}
    assert len(names) == 2
    assert {len(name) for name in names} == {40}


def deployment_of(release: str, namespace: str) -> str:
    found = run_tool(
        "helm", "template", release, str(CHART), "--namespace", namespace, "-s", "templates/settings.yaml"
    )
    return settings(yaml.safe_load(found.stdout)["data"]).deployment


def test_the_values_reach_the_settings() -> None:
    data = named(render(FULL), "ConfigMap", "pollux-settings")["data"]
    general, kube = settings(data), kube_settings(data)
    assert (general.deployment, general.seed, general.shadow) == ("research", 3, False)
    assert general.mlflow_tracking_uri == "http://mlflow.ml:5000"
    assert str(general.airflow_login) == "/pollux/airflow/login.json"
    assert str(general.metrics_token) == "/pollux/metrics/token"
    assert kube.gpu_resources == ("nvidia.com/gpu", "nvidia.com/mig-1g.10gb")
    assert (kube.gpu_type_label, kube.lease_namespace) == ("gpu/type", "pollux-test-lease")
    assert kube.jobs_volume == {"persistentVolumeClaim": {"claimName": "pollux-checkpoints"}}
    assert kube.tolerations[0]["key"] == "nvidia.com/gpu"


@pytest.mark.parametrize(
    ("values", "named_in_error"),
    [
        pytest.param({"namspaces": ["a"]}, "namspaces", id="a misspelt value"),
        pytest.param({"namespaces": ["Team A"]}, "namespaces", id="no name of a namespace"),
        pytest.param({"scheduler": {"intervalSeconds": 0}}, "intervalSeconds", id="no interval"),
        pytest.param({"scheduler": {"shadow": "yes"}}, "shadow", id="a word for a truth value"),
        pytest.param({"gpus": {"resources": []}}, "resources", id="no GPU resource"),
        pytest.param({"settings": {"POLLUX_CLUSTER": "local"}}, "POLLUX_CLUSTER", id="a value's variable"),
        pytest.param({"scheduler": {"policy": "nonsense"}}, "policy", id="no policy"),
        pytest.param({"training": {"pod": {"nonsense": 1}}}, "training.pod", id="no pod"),
        pytest.param({"settings": {"PATH": "/evil"}}, "settings", id="somebody else's variable"),
        pytest.param(
            {"airflow": {"serviceAccounts": [{"namespace": "x"}]}}, "name", id="account without name"
        ),
        pytest.param({"checkpoints": {"pvc": {"size": "big"}}}, "size", id="no size"),
        pytest.param({"scheduler": {"fairnessP": "fair"}}, "fairnessP", id="no exponent"),
        pytest.param({"airflow": {"loginSecret": "a..b"}}, "loginSecret", id="an empty part of a name"),
        pytest.param({"metrics": {"existingSecret": "Token"}}, "existingSecret", id="a capital letter"),
        pytest.param({"airflow": {"loginSecret": "a" * 254}}, "loginSecret", id="too long a name"),
    ],
)
def test_wrong_values_are_refused_by_name(values: Mapping[str, Any], named_in_error: str) -> None:
    arguments = ("template", "pollux", str(CHART), "--values", "-")
    refused = run_tool("helm", *arguments, stdin=json.dumps(values), check=False)
    assert refused.returncode != 0
    assert named_in_error in refused.stderr


@pytest.mark.parametrize("name", ["my.secret.name", "a" * 253, "1.5", "007"])
def test_every_name_that_kubernetes_takes_is_taken_and_stays_a_string(name: str) -> None:
    """Secrets, claims and ServiceAccounts are DNS subdomains; a namespace is one label of up to 63."""
    space = name.replace(".", "-")[:63]
    values = {
        "namespaces": [space],
        "airflow": {"loginSecret": name, "serviceAccounts": [{"name": name, "namespace": space}]},
        "metrics": {"existingSecret": name, "serviceMonitor": {"enabled": True}},
        "checkpoints": {"pvc": {"existingClaim": name}},
        "state": {"pvc": {"existingClaim": name}},
        "training": {"image": "registry/training:1"},
        **{part: {"serviceAccount": {"name": name}} for part in ("scheduler", "driver", "worker")},
    }
    manifests = render(values)
    names = [value for manifest in manifests for value in _names(manifest)]
    assert name in names
    assert all(isinstance(value, str) for value in names)
    notes = run_tool(
        "helm", "install", "pollux", str(CHART), "--dry-run=client", "--values", "-", stdin=json.dumps(values)
    ).stdout.partition("With Airflow's own chart, in its values:")[2]
    for_airflow = yaml.safe_load(notes.partition("\n\n3.")[0])
    assert [value for value in _names(for_airflow["volumes"]) if value == name] == [name] * 3


def _names(part: Any) -> Iterator[object]:
    """Everything that is the name of an object."""
    if isinstance(part, Mapping):
        for key, value in part.items():
            if key in ("name", "namespace", "serviceAccountName", "claimName", "secretName"):
                yield value
            yield from _names(value)
    elif isinstance(part, list):
        for value in part:
            yield from _names(value)


@pytest.mark.parametrize("values", [FULL, VALUE_SETS["nothing set"]], ids=["all", "nothing"])
def test_the_pod_of_helm_test_has_every_file_that_its_settings_send_the_doctor_to(
    values: Mapping[str, Any],
) -> None:
    manifests = render(values)
    config = settings(named(manifests, "ConfigMap", "pollux-settings")["data"])
    spec = named(manifests, "Pod", "pollux-doctor")["spec"]
    (container,) = spec["containers"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert str(config.state) in mounted
    if config.airflow_login is not None:
        volume = mounted[str(config.airflow_login.parent)]
        assert volume["secret"] == {"secretName": values["airflow"]["loginSecret"], "optional": True}


def test_no_policy_but_those_that_schedule_is_taken() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["properties"]["scheduler"]["properties"]["policy"]["enum"] == list(POLICIES)


def test_a_variable_that_another_value_sets_is_refused_among_the_settings() -> None:
    values = {**FULL, "training": {"image": "t:1"}, "driver": {"image": "d:1"}}
    own = named(render(values), "ConfigMap", "pollux-settings")["data"].keys() - FULL["settings"].keys()
    template = (CHART / "templates" / "settings.yaml").read_text()
    assert own == set(re.findall(r"^  ([A-Z_]+):", template, re.MULTILINE)), "all of them are set here"
    helpers = (CHART / "templates" / "_helpers.tpl").read_text()
    block = helpers.partition('define "pollux.ownSettings"')[2].partition("{{- end")[0]
    assert set(re.findall(r"[A-Z][A-Z_]+", block)) == own


def test_a_service_monitor_needs_the_token() -> None:
    values: dict[str, Any] = {"metrics": {"serviceMonitor": {"enabled": True}}}
    arguments = ("template", "pollux", str(CHART), "--values", "-")
    refused = run_tool("helm", *arguments, stdin=json.dumps(values), check=False)
    assert "metrics.existingSecret" in refused.stderr
    values["metrics"]["existingSecret"] = "token"
    (monitor,) = of_kind(render(values), "ServiceMonitor")
    assert monitor["spec"]["endpoints"][0]["path"] == "/pollux/metrics"
    assert monitor["spec"]["endpoints"][0]["authorization"]["credentials"]["name"] == "token"


def granted(manifests: list[Manifest], account: str) -> set[tuple[str, Right]]:
    """(namespace or nothing, right) of everything that is bound to ``namespace/name``."""
    found = set()
    for binding in [*of_kind(manifests, "RoleBinding"), *of_kind(manifests, "ClusterRoleBinding")]:
        subjects = {f"{subject['namespace']}/{subject['name']}" for subject in binding["subjects"]}
        if account not in subjects:
            continue
        namespace = binding["metadata"].get("namespace", "")
        kind, name = binding["roleRef"]["kind"], binding["roleRef"]["name"]
        (role,) = (
            role
            for role in of_kind(manifests, kind)
            if role["metadata"]["name"] == name and role["metadata"].get("namespace", "") == namespace
        )
        for part in role["rules"]:
            for group in part["apiGroups"]:
                for resource in part["resources"]:
                    for verb in part["verbs"]:
                        for only in part.get("resourceNames", [""]):
                            right = Right(verb=verb, resource=resource, group=group, name=only)
                            found.add((namespace, right))
    return found


def needed(role: str, namespaces: list[str], lease: str) -> set[tuple[str, Right]]:
    where = {"cluster": [""], "jobs": namespaces, "lease": [lease]}
    return {
        (namespace, Right(verb=right.verb, resource=right.resource, group=right.group, name=right.name))
        for right in ROLES[role]
        for namespace in where[right.scope]
    }


def test_each_account_has_exactly_the_rights_that_it_needs() -> None:
    manifests, teams, lease = render(FULL), ["pollux-test-a", "pollux-test-b"], "pollux-test-lease"
    scheduler = needed("scheduler", teams, lease)
    assert granted(manifests, f"{NAMESPACE}/pollux-scheduler") == scheduler
    for airflow in ("airflow/airflow-worker", f"{NAMESPACE}/airflow-triggerer"):
        assert granted(manifests, airflow) == scheduler | needed("operator", teams, lease)
    assert granted(manifests, "airflow/airflow-api-server") == needed("shadow", teams, lease)
    for team in teams:
        assert granted(manifests, f"{team}/pollux-driver") == needed("driver", [team], lease)
        assert granted(manifests, f"{team}/pollux-worker") == set()


def test_in_shadow_mode_nobody_is_given_a_right_to_write_for_the_scheduler() -> None:
    manifests = render(VALUE_SETS["shadow"])
    assert granted(manifests, f"{NAMESPACE}/pollux-scheduler") == needed("shadow", [], "")


@pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS)
def test_no_role_has_wildcards_secrets_or_exec(values: Mapping[str, Any]) -> None:
    for role in [*of_kind(render(values), "Role"), *of_kind(render(values), "ClusterRole")]:
        text = json.dumps(role["rules"])
        assert not re.search(r'"\*"|secrets|pods/exec|pods/attach|serviceaccounts|impersonate', text)


def test_the_rule_that_the_doctor_prints_is_a_rule() -> None:
    for rights in ROLES.values():
        rules = yaml.safe_load(rule(rights))
        assert sum(len(part["verbs"]) for part in rules) == len(rights)
        assert all(set(part) <= {"apiGroups", "resources", "resourceNames", "verbs"} for part in rules)


@pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS)
def test_what_running_jobs_need_outlives_the_release(values: Mapping[str, Any]) -> None:
    for manifest in render(values):
        component = manifest["metadata"]["labels"].get("app.kubernetes.io/component", "")
        needs = component in ("driver", "worker") or manifest["kind"] == "PersistentVolumeClaim"
        kept = (manifest["metadata"].get("annotations") or {}).get("helm.sh/resource-policy") == "keep"
        assert kept is needs, f"{manifest['kind']} {manifest['metadata']['name']}"


def test_workers_get_no_token_and_drivers_do() -> None:
    accounts = of_kind(render(FULL), "ServiceAccount")
    mounted = {
        account["metadata"]["labels"]["app.kubernetes.io/component"]: account["automountServiceAccountToken"]
        for account in accounts
    }
    assert mounted == {"scheduler": True, "driver": True, "worker": False}


def test_nobody_but_workers_connects_to_workers_and_nobody_to_drivers() -> None:
    policies = of_kind(render(FULL), "NetworkPolicy")
    by_role = {
        (
            policy["metadata"]["namespace"],
            policy["spec"]["podSelector"]["matchLabels"]["pollux.dev/role"],
        ): policy
        for policy in policies
    }
    assert len(by_role) == len(policies) == 4
    worker = by_role["pollux-test-a", "worker"]["spec"]
    assert worker["policyTypes"] == ["Ingress", "Egress"]
    (peers,) = (part["from"] for part in worker["ingress"])
    assert peers == [{"podSelector": {"matchLabels": {"pollux.dev/role": "worker"}}}]
    assert {"ports": [{"port": 5000, "protocol": "TCP"}]} in worker["egress"]
    assert worker["egress"][-1]["ports"] == [{"port": 443}]
    assert by_role["pollux-test-b", "driver"]["spec"]["ingress"] == []


def test_each_namespace_of_jobs_has_its_claim() -> None:
    claims = of_kind(render(FULL), "PersistentVolumeClaim")
    found = {(c["metadata"]["namespace"], c["metadata"]["name"]): c["spec"] for c in claims}
    assert set(found) == {
        ("pollux-test-a", "pollux-checkpoints"),
        ("pollux-test-b", "pollux-checkpoints"),
        (NAMESPACE, "pollux-state"),
    }
    assert found["pollux-test-a", "pollux-checkpoints"]["storageClassName"] == "fast"
    assert found["pollux-test-a", "pollux-checkpoints"]["resources"]["requests"]["storage"] == "1Ti"
    assert of_kind(render(VALUE_SETS["as little as possible"]), "PersistentVolumeClaim") == []


def test_the_dags_are_the_projects_own() -> None:
    data = named(render(), "ConfigMap", "pollux-dags")["data"]
    assert data == {path.name: path.read_text() for path in (TOP / "dags").glob("*.py")}, "copy dags/ anew"


def test_the_dashboard_asks_only_for_metrics_that_there_are() -> None:
    dashboard = json.loads(named(render(), "ConfigMap", "pollux-dashboard")["data"]["pollux.json"])
    figures = {
        *("decision", "time_unix_s", "interval_s", "objective", "gpus", "gpus_allocated", "gpus_idle"),
        *("restarts", "predicted_goodput", "jobs_running", "jobs_waiting", "jobs_left_out", "changes"),
        *("changes_done", "changes_delayed", "changes_failed"),
    }
    cycle = LastCycle(deployment="d", figures=dict.fromkeys(figures, 1.0), wall_clock_s={"act": 1.0})
    there = set(re.findall(r"^(pollux_\w+)\{", exposition(cycle)[0].decode(), re.MULTILINE))
    asked = set(re.findall(r"pollux_\w+", json.dumps(dashboard["panels"])))
    assert asked
    assert asked <= there
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_the_pod_of_helm_test_is_confined() -> None:
    pod = named(render(), "Pod", "pollux-doctor")["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    container = pod["containers"][0]["securityContext"]
    assert container["readOnlyRootFilesystem"] is True
    assert container["allowPrivilegeEscalation"] is False
    assert container["capabilities"] == {"drop": ["ALL"]}


def test_the_notes_say_which_host_mlflow_must_allow() -> None:
    found = run_tool(
        "helm", "install", "pollux", str(CHART), "--dry-run=client", "--values", "-", stdin=json.dumps(FULL)
    )
    notes = found.stdout.partition("NOTES:")[2]
    assert "--allowed-hosts mlflow.ml:5000" in notes
    assert "configMapRef: {name: pollux-settings}" in notes
    assert 'secretName: "metrics-token"' in notes
    assert "helm test pollux" in notes
    hinted = run_tool("helm", "install", "pollux", str(CHART), "--dry-run=client").stdout
    assert "airflow.serviceAccounts is empty" in hinted
    assert "without it nothing is scheduled" in hinted


@pytest.mark.parametrize(
    ("given", "want"),
    [({}, None), ({"fairnessP": 0}, 0.0), ({"fairnessP": -0.5}, -0.5), ({"fairnessP": "-1"}, -1.0)],
)
def test_the_fairness_exponent_is_the_policy_s_own_unless_it_is_given(
    given: dict[str, Any], want: float | None
) -> None:
    data = named(render({"scheduler": given}), "ConfigMap", "pollux-settings")["data"]
    assert settings(data).fairness_p == want


def test_every_value_is_described_and_in_the_readme() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    readme = (CHART / "README.md").read_text()
    for path in _leaves(values):
        part = schema
        for key in path:
            part = part["properties"][key]
        assert "description" in part, ".".join(path)
        assert f"`{'.'.join(path)}`" in readme, ".".join(path)


_WHOLE = {"selector", "labels", "resources", "securityContext"}
"""Values that are taken as they are."""


def _leaves(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in values.items():
        deeper = isinstance(value, dict) and value and key not in _WHOLE
        found += _leaves(value, (*path, key)) if deeper else [(*path, key)]
    return found


def training_pod(values: Mapping[str, Any]) -> dict[str, Any]:
    assert named(render(values), "ConfigMap", "pollux-settings")["data"]["POLLUX_KUBE_POD_TEMPLATE"]
    found = yaml.safe_load(named(render(values), "ConfigMap", "pollux-training")["data"]["pod.yaml"])
    assert (found.pop("apiVersion"), found.pop("kind")) == ("v1", "Pod")
    return dict(found)


def test_a_training_image_runs_in_a_confined_pod() -> None:
    spec = training_pod({"training": {"image": "registry/training:1"}})["spec"]
    (container,) = spec["containers"]
    assert (container["name"], container["image"]) == ("base", "registry/training:1")
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert spec["serviceAccountName"] == "pollux-worker"


def test_a_whole_training_pod_is_taken_as_it_is() -> None:
    pod = {"spec": {"containers": [{"name": "base", "image": "i:1"}], "imagePullSecrets": [{"name": "s"}]}}
    assert training_pod({"training": {"image": "another:1", "pod": {"kind": "Pod", **pod}}}) == pod


def test_without_either_tasks_have_to_name_their_image() -> None:
    data = named(render(), "ConfigMap", "pollux-settings")["data"]
    assert "POLLUX_KUBE_POD_TEMPLATE" not in data
