"""The metrics of the last decision: the same from the state folder as from MLflow."""

from dataclasses import replace
from pathlib import Path

import pytest
from cycle_builder import World
from prometheus_client.parser import text_string_to_metric_families

from pollux.errors import ConfigError, SnapshotError, StoreError
from pollux.metrics import LastCycle, exposition, last_cycle, may_read
from pollux.record import Records
from pollux.settings import Settings

TOKEN = "c0ffee" * 4


def samples(cycle: LastCycle) -> dict[tuple[str, str], float]:
    """(metric, its label besides the deployment) -> value, read by Prometheus's own parser."""
    text, content_type = exposition(cycle)
    assert content_type.startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("deployment") == "airflow"
            found[sample.name, "".join(labels.values())] = sample.value
    return found


@pytest.fixture
def busy(world: World) -> World:
    """Four GPUs; five jobs of which at least one has to wait."""
    world.submit("one", "two", "three", "four", "five", max_gpus=1)
    world.cycle()
    return world


def test_they_say_what_the_decision_gave_and_left(busy: World) -> None:
    told = samples(last_cycle(busy.settings, busy.records))
    assert told["pollux_decision", ""] == 1
    assert told["pollux_decision_timestamp_seconds", ""] == busy.now
    assert told["pollux_interval_seconds", ""] == 60
    assert (told["pollux_gpus", ""], told["pollux_gpus_allocated", ""]) == (4, 4)
    assert told["pollux_gpus_idle", ""] == 0
    assert (told["pollux_jobs", "running"], told["pollux_jobs", "waiting"]) == (4, 1)
    assert told["pollux_jobs", "left_out"] == 0
    assert (told["pollux_changes", "done"], told["pollux_changes", "failed"]) == (4, 0)
    steps = {label for name, label in told if name == "pollux_cycle_seconds"}
    assert steps == {"observe", "snapshot", "decide", "plan", "act", "record"}


def test_a_server_without_the_state_folder_tells_the_same_from_mlflow(busy: World, tmp_path: Path) -> None:
    busy.report("one", "two", "three", "four", restarts=2)
    busy.cycle()
    here = samples(last_cycle(busy.settings, busy.records))
    elsewhere = samples(last_cycle(busy.settings, Records(tmp_path / "another-machine")))
    assert here["pollux_restarts", ""] == 8
    for key in here.keys() - {("pollux_cycle_seconds", "record")}:
        assert elsewhere[key] == pytest.approx(here[key], rel=1e-9), key


def test_an_unfinished_cycle_does_not_count(busy: World) -> None:
    (busy.settings.decisions / "2").mkdir()
    (busy.settings.decisions / "2" / "snapshot.json").write_text("{")
    assert samples(last_cycle(busy.settings, busy.records))["pollux_decision", ""] == 1


def test_before_the_first_decision_there_are_no_figures(world: World) -> None:
    assert samples(last_cycle(world.settings, world.records)) == {}


def test_a_broken_record_is_named(busy: World) -> None:
    (busy.settings.decisions / "1" / "result.json").write_text('{"actions": 3}')
    with pytest.raises(SnapshotError, match="decisions/1"):
        last_cycle(busy.settings, busy.records)


def test_a_store_that_is_away_is_an_error_and_no_zero(world: World) -> None:
    away = replace(world.settings, mlflow_tracking_uri="http://127.0.0.1:1")
    with pytest.raises(StoreError):
        last_cycle(away, world.records)


def test_shadow_decisions_are_told_apart_from_real_ones(busy: World) -> None:
    shadow = replace(busy.settings, shadow=True)
    assert samples(last_cycle(shadow, Records(shadow.decisions))) == {}


@pytest.mark.parametrize(
    ("given", "want"),
    [
        pytest.param(f"Bearer {TOKEN}", True, id="the token"),
        pytest.param(f"bearer {TOKEN}", True, id="schemes have no case"),
        pytest.param(f"Bearer {TOKEN}x", False, id="longer"),
        pytest.param(f"Bearer {TOKEN[:-1]}", False, id="shorter"),
        pytest.param(f"Basic {TOKEN}", False, id="another scheme"),
        pytest.param(TOKEN, False, id="no scheme"),
        pytest.param("Bearer é", False, id="no ASCII"),
        pytest.param("", False, id="nothing"),
    ],
)
def test_only_the_bearer_token_reads_them(given: str, want: bool, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    assert may_read(Settings(state=tmp_path, metrics_token=tmp_path / "token"), given) is want
    assert may_read(Settings(state=tmp_path), given) is False


@pytest.mark.parametrize("content", [None, "", "short"])
def test_a_token_that_is_missing_or_could_be_guessed_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "token").write_text(content)
    with pytest.raises(ConfigError, match="POLLUX_METRICS_TOKEN"):
        may_read(Settings(state=tmp_path, metrics_token=tmp_path / "token"), f"Bearer {content}")
