"""Services that end with the test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from local_service import COUNT, Service


@pytest.fixture
def make_service(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Start services, each on a state folder of its own; all are ended with everything they started."""
    services: list[Service] = []

    def make(*options: str) -> Service:
        state = tmp_path / f"state-{len(services)}"
        state.mkdir()
        (state / "count.py").write_text(COUNT)
        service = Service(state, ("--grace", "10", *options))
        services.append(service)
        service.start()
        return service

    yield make
    for service in services:
        service.stop()


@pytest.fixture
def service(make_service: Callable[..., Service]) -> Service:
    return make_service()
