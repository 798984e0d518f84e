"""``pollux explain``: plain words, the same numbers as JSON, and clear refusals."""

import json
from pathlib import Path

from snapshot_builder import make_job, make_snapshot
from typer.testing import CliRunner

from pollux.cli import app
from pollux.snapshot import PolicySettings, Snapshot
from pollux_agent.protocol import encode


def saved(folder: Path, snapshot: Snapshot) -> str:
    path = folder / "snapshot.json"
    path.write_text(encode(snapshot), encoding="utf-8")
    return str(path)


def explained(path: str, job: str) -> dict[str, object]:
    result = CliRunner().invoke(app, ["explain", path, job, "--json"])
    assert result.exit_code == 0, result.output
    answer: dict[str, object] = json.loads(result.output)
    return answer


def test_each_rule_that_binds_is_named(tmp_path: Path) -> None:
    jobs = [
        make_job("grown", max_gpus=2, placement={"n0": 2}),
        make_job("young", max_gpus=8, max_gpus_seen=1, placement={"n1": 1}),
        make_job("fixed", preemptible=False, placement={"n1": 1}),
        make_job("foreign", gpu_types=("h100",)),
    ]
    path = saved(tmp_path, make_snapshot(jobs, nodes={"n0": 4, "n1": 4}, policy=PolicySettings(name="sia")))
    binding = {job.job_id: str(explained(path, job.job_id)["binding"]) for job in jobs}
    assert binding["grown"].startswith("max_gpus 2")
    assert binding["young"].startswith("the growth limit: at most twice the 1")
    assert "may not be preempted" in binding["fixed"]
    assert "h100" in binding["foreign"]


def test_it_lists_what_each_configuration_is_worth(tmp_path: Path) -> None:
    job = make_job("only", name="bert", placement={"n0": 1})
    path = saved(tmp_path, make_snapshot([job], nodes={"n0": 4, "n1": 4}, policy=PolicySettings(name="ours")))
    answer = explained(path, "bert")
    shapes = [(each["nodes"], each["gpus"]) for each in answer["alternatives"]]  # type: ignore[attr-defined]
    assert shapes == [(1, 1), (1, 2), (1, 4), (2, 8)]
    shown = CliRunner().invoke(app, ["explain", path, "only"]).output
    assert "what binds" in shown and "a restart takes it 30 s" in shown


def test_an_unknown_job_and_a_file_that_is_no_snapshot_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, make_snapshot([make_job("only")]))
    result = CliRunner().invoke(app, ["explain", path, "other"])
    assert result.exit_code == 2 and "it has only" in result.output
    (tmp_path / "no.json").write_text("{}", encoding="utf-8")
    assert CliRunner().invoke(app, ["explain", str(tmp_path / "no.json"), "other"]).exit_code == 2
