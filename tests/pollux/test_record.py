"""The folder of decisions: the newest whole one is found, whatever else lies there."""

from pathlib import Path

from pollux.record import Records
from pollux.snapshot import Decision
from pollux_agent.protocol import encode


def test_the_newest_decision_is_the_whole_one_of_the_highest_number(tmp_path: Path) -> None:
    records = Records(tmp_path / "decisions")
    assert records.newest_decision() is None
    for number in (2, 9, 10):
        records.save(number, "decision.json", encode(a_decision(number)))
    records.save(11, "snapshot.json", "{}")
    (tmp_path / "decisions" / "notes").mkdir()
    assert records.newest_decision() == a_decision(10)
    assert records.newest_decision(below=10) == a_decision(9)
    records.save(12, "decision.json", "{")
    assert records.newest_decision() is None


def a_decision(number: int) -> Decision:
    return Decision(decision=number, policy="p", objective=0.0, jobs={})
