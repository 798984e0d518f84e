"""The images' recipes and the compose file: linted, and what they promise about users, pins and paths."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

TOP = Path(__file__).resolve().parents[2]
RECIPES = sorted((TOP / "docker").glob("*.Dockerfile"))
COMPOSE = TOP / "docker" / "compose.yaml"


def instructions(recipe: Path) -> list[tuple[str, str]]:
    """(instruction, its text) in order, continued lines joined and comments left out."""
    lines = [line for line in recipe.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines()) if word]


def final_stage(recipe: Path) -> list[tuple[str, str]]:
    found = instructions(recipe)
    start = max(number for number, (word, _) in enumerate(found) if word == "FROM")
    return found[start:]


@pytest.fixture(params=RECIPES, ids=lambda path: path.name.partition(".")[0])
def recipe(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


def test_there_are_two_images() -> None:
    assert [path.name for path in RECIPES] == ["airflow.Dockerfile", "training.Dockerfile"]


def test_hadolint_has_nothing_to_say(recipe: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    command = [str(hadolint), "--failure-threshold", "style", str(recipe)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


def test_bases_have_a_tag_and_packages_the_projects_pins(recipe: Path) -> None:
    bases = [text.split()[0] for word, text in instructions(recipe) if word == "FROM"]
    assert set(bases) == {"debian:12.12-slim"}
    installs = [text for word, text in instructions(recipe) if word == "RUN" and "pip install" in text]
    assert installs
    assert all("--constraint constraints.txt" in text and "pip check" in text for text in installs)


def test_the_last_user_is_a_number_and_not_root(recipe: Path) -> None:
    users = [text for word, text in final_stage(recipe) if word == "USER"]
    assert users[-1] == "50000:0"
    assert any("useradd --uid 50000" in text for word, text in final_stage(recipe) if word == "RUN")


def test_labels_say_what_is_in_it_and_where_its_packages_are_listed(recipe: Path) -> None:
    labels = dict(
        re.findall(r'([\w.]+)="([^"]*)"', " ".join(t for w, t in final_stage(recipe) if w == "LABEL"))
    )
    wanted = {"title", "description", "version", "revision", "licenses", "base.name"}
    assert wanted <= {name.removeprefix("org.opencontainers.image.") for name in labels}
    listed = labels["dev.pollux.sbom.packages"]
    assert any(f"> {listed}" in text for word, text in instructions(recipe) if word == "RUN")


def test_health_is_asked_of_servers_and_no_secret_is_baked_in(recipe: Path) -> None:
    words = [word for word, _ in final_stage(recipe)]
    assert "HEALTHCHECK" in words
    assert not re.search(r"(?i)(password|secret|token)\s*=\s*\S", recipe.read_text())


def test_all_that_is_copied_is_let_through_to_the_build(recipe: Path) -> None:
    ignore = Path(f"{recipe}.dockerignore").read_text().splitlines()
    assert ignore[0] == "*"
    for word, text in instructions(recipe):
        if word == "COPY" and "--from" not in text:
            source = text.split()[0]
            assert (TOP / source).exists()
            assert f"!{source.split('/')[0]}" in ignore


SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text())["services"]


@pytest.mark.parametrize("name", SERVICES)
def test_each_service_is_confined_pinned_and_watched(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert any(mount.startswith("/tmp") for mount in service["tmpfs"])
    assert re.search(r":[0-9]+\.[0-9]+", service["image"])
    assert service.get("user") != "root"
    own_check = name == "airflow-api-server"  # the image's
    assert own_check or "healthcheck" in service
    for port in service.get("ports", ()):
        assert re.match(r"(127\.0\.0\.1|\$\{\w+:-127\.0\.0\.1\}):", port), port


def test_airflow_may_write_where_it_does() -> None:
    service = SERVICES["airflow-api-server"]
    writable = [mount.split(":")[1] for mount in service["volumes"] if not mount.endswith(":ro")]
    for name in ("AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE",):
        assert any(service["environment"][name].startswith(f"{folder}/") for folder in writable)
    assert "/opt/airflow/logs" in writable


def test_no_secret_is_written_down_and_each_variable_is_explained() -> None:
    text = COMPOSE.read_text()
    asked = set(re.findall(r"\$\{(\w+):\?", text))
    example = (TOP / "docker" / "env.example").read_text()
    assert asked <= set(re.findall(r"^(\w+)=", example, re.MULTILINE))
    secrets = {"POSTGRES_PASSWORD", "AIRFLOW_SECRET_KEY", "AIRFLOW_JWT_SECRET", "AIRFLOW_FERNET_KEY"}
    assert secrets <= asked
    assert all(f"\n{name}=\n" in f"\n{example}" for name in secrets)


def test_mlflow_is_told_every_name_by_which_it_is_called() -> None:
    environ = SERVICES["mlflow"]["environment"]
    airflow = SERVICES["airflow-scheduler"]["environment"]
    for url in (airflow["MLFLOW_TRACKING_URI"], airflow["POLLUX_MLFLOW_URL"]):
        assert url.removeprefix("http://") in environ["MLFLOW_SERVER_ALLOWED_HOSTS"].split(",")


def test_airflow_is_given_only_settings_that_pollux_knows() -> None:
    from pollux.cluster.k8s import KubeSettings
    from pollux.settings import Settings

    known = {f"POLLUX_{field.upper()}" for field in Settings.__dataclass_fields__}
    known |= {f"POLLUX_KUBE_{field.upper()}" for field in KubeSettings.__dataclass_fields__}
    given = {name for name in SERVICES["airflow-scheduler"]["environment"] if name.startswith("POLLUX_")}
    assert given <= known
