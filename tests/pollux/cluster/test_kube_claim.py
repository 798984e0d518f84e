"""Two Airflows under one name on one cluster: the second one is told, before it ends jobs of the first."""

from datetime import timedelta
from pathlib import Path

import pytest
from fake_kube import NOW_UNIX_S, FakeKube

from pollux.cluster.k8s.claim import claim_of
from pollux.cluster.k8s.lease import NAME, SchedulingLease
from pollux.errors import ConfigError
from pollux.settings import Settings

MINUTE = timedelta(minutes=1)


def cycle(api: FakeKube, url: str, *, deployment: str = "airflow", interval_s: float = 60.0) -> None:
    """What a cycle of the Airflow at ``url`` does with the Lease."""
    config = Settings(state=Path("/state"), deployment=deployment, airflow_url=url, interval_s=interval_s)
    with SchedulingLease(api, "pollux", claim_of(config)).hold(f"{deployment}/run", MINUTE):
        pass


def test_a_name_that_another_airflow_has_is_refused_with_its_address() -> None:
    api = FakeKube()
    cycle(api, "http://one:8080")
    with pytest.raises(
        ConfigError, match="POLLUX_DEPLOYMENT: 'airflow' is the name of the Airflow at http://one"
    ):
        cycle(api, "http://two:8080")
    cycle(api, "http://one:8080/")


def test_it_is_refused_while_the_other_one_holds_the_lease_too() -> None:
    """Else that cycle would only be skipped, and look for orphans all the same."""
    api = FakeKube()
    config = Settings(state=Path("/state"), airflow_url="http://one:8080")
    with SchedulingLease(api, "pollux", claim_of(config)).hold("airflow/run", MINUTE):
        with pytest.raises(ConfigError):
            cycle(api, "http://two:8080")


def test_names_of_their_own_share_the_lease() -> None:
    api = FakeKube()
    for name in ("east", "west", "east"):
        cycle(api, f"http://{name}:8080", deployment=name)


@pytest.mark.parametrize(("interval_s", "kept_s"), [(60.0, 600), (3600.0, 18_000)])
def test_an_airflow_that_moved_has_its_name_again_after_some_minutes_and_some_cycles(
    interval_s: float, kept_s: int
) -> None:
    api = FakeKube()
    cycle(api, "http://before:8080", interval_s=interval_s)
    api.server_unix_s = NOW_UNIX_S + kept_s - 1
    with pytest.raises(ConfigError, match="wait 1 s"):
        cycle(api, "http://after:8080", interval_s=interval_s)
    api.server_unix_s = NOW_UNIX_S + kept_s
    cycle(api, "http://after:8080", interval_s=interval_s)


@pytest.mark.parametrize("text", ["", "[", "[1]", '["x", "y"]', '["x", 1e300]', "[" * 5000])
def test_a_note_that_is_none_keeps_nobody_out(text: str) -> None:
    api = FakeKube()
    cycle(api, "http://one:8080")
    (lease,) = (item for path, item in api.objects.items() if path.endswith(NAME))
    lease["metadata"]["annotations"]["pollux.dev/owner-of-airflow"] = text
    cycle(api, "http://two:8080")


def test_without_an_address_there_is_no_search_for_orphans_and_no_claim() -> None:
    assert claim_of(Settings(state=Path("/state"))) is None


def test_a_stack_that_is_started_again_on_another_port_is_the_same() -> None:
    api = FakeKube()
    cycle(api, "http://127.0.0.1:8080")
    cycle(api, "http://127.0.0.1:9090")


def test_the_same_port_of_two_machines_is_two_airflows(monkeypatch: pytest.MonkeyPatch) -> None:
    api = FakeKube()
    for host in ("laptop-1", "laptop-2"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        if host == "laptop-1":
            cycle(api, "http://127.0.0.1:8080")
        else:
            with pytest.raises(ConfigError, match="on laptop-1"):
                cycle(api, "http://127.0.0.1:8080")
