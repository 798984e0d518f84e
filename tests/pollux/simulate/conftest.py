"""The recorded traces, where the machine has them."""

import os
from pathlib import Path

import pytest


@pytest.fixture
def recorded() -> Path:
    return Path(os.environ["POLLUX_TRACES"])
