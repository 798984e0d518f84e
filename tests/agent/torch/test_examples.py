"""The examples run alone, as their first lines say, and reach what they promise."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "agent" / "examples"


def run(script: str, *arguments: str) -> list[str]:
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def score(line: str) -> float:
    found = re.search(r"validation \w+ ([\d.]+),", line)
    assert found is not None, line
    return float(found[1])


@pytest.mark.slow
def test_digits_reaches_its_accuracy() -> None:
    assert score(run("digits.py", "--epochs", "6")[-1]) >= 0.97


def test_digits_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    small = ["--width", "4", "--batch-size", "128", "--checkpoint-dir", str(tmp_path)]
    first = run("digits.py", "--epochs", "1", *small)
    second = run("digits.py", "--epochs", "2", *small)
    assert first[0].startswith("pass 0:")
    assert second[-1].startswith("pass 1:")


@pytest.mark.slow
def test_the_language_model_learns_more_than_byte_frequencies() -> None:
    lines = run("language_model.py", "--epochs", "1", "--width", "32", "--layers", "1", "--lr", "0.005")
    assert score(lines[-1]) < 2.9
