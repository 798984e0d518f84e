"""A training without a scheduler: by hand, under torchrun, in a notebook, with or without MLflow."""

import code
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elastic_runs import SCRIPT, DriverRun, Line, linear_model

from pollux_agent.protocol import JobSpec, Outcome, decode, encode
from pollux_agent.torch import ElasticJob
from pollux_agent.torch.checkpoint import CheckpointStore

ONE_PASS = Counter(range(64))


@dataclass
class ByHand:
    """Starts the training script as a person would, from a shell."""

    folder: Path
    last_words: str = ""

    def start(self, *arguments: str, ranks: int = 0, **environ: str) -> subprocess.Popen[str]:
        """As plain python, or under torchrun on so many ``ranks``."""
        launcher = (
            ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
        )
        script = [str(SCRIPT), str(self.seen_file), str(self.ready), "--batch-size", "4"]
        command = [sys.executable, *launcher, *script, "--checkpoint-dir", str(self.folder / "kept")]
        self.ready.unlink(missing_ok=True)
        return subprocess.Popen(
            [*command, *arguments],
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
        )

    def run(self, *arguments: str, ranks: int = 0, **environ: str) -> str:
        process = self.start(*arguments, ranks=ranks, **environ)
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output
        return output

    def stop(self, process: subprocess.Popen[str]) -> int:
        """SIGTERM once the training is under way; the exit status."""
        deadline = time.monotonic() + 120
        while not self.ready.exists():
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        self.last_words, _ = process.communicate(timeout=120)
        return process.returncode

    @property
    def seen_file(self) -> Path:
        return self.folder / "seen.jsonl"

    @property
    def ready(self) -> Path:
        return self.folder / "ready"

    def seen(self, epoch: int) -> Counter[int]:
        lines = [json.loads(line) for line in self.seen_file.read_text().splitlines()]
        return Counter(index for number, index in lines if number == epoch)


@pytest.fixture
def by_hand(tmp_path: Path) -> Iterator[ByHand]:
    yield ByHand(tmp_path)


def runs_of(uri: str) -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    return client.search_runs([each.experiment_id for each in client.search_experiments()])


def test_stopped_under_torchrun_and_gone_on_with_alone_in_the_same_mlflow_run(by_hand: ByHand) -> None:
    uri = f"sqlite:///{by_hand.folder / 'mlflow.db'}"
    environ = {"MLFLOW_TRACKING_URI": uri, "MLFLOW_EXPERIMENT_NAME": "by hand"}
    first = by_hand.start("--epochs", "2", "--wait-at", "5", ranks=2, **environ)
    assert by_hand.stop(first) != 0
    saved = max(CheckpointStore(by_hand.folder / "kept").names())
    assert by_hand.last_words.count("stopped as asked") == 1
    assert f"stopped as asked at step {int(saved[-10:])}, which is saved" in by_hand.last_words
    (stopped,) = runs_of(uri)
    assert stopped.info.status == "RUNNING"
    by_hand.run("--epochs", "2", "--workers", "1", **environ)
    assert [by_hand.seen(epoch) for epoch in range(3)] == [ONE_PASS, ONE_PASS, Counter()]
    (run,) = runs_of(uri)
    assert (run.info.run_id, run.info.run_name) == (stopped.info.run_id, "worker_script")
    assert run.info.status == "FINISHED"
    assert run.data.metrics["progress"] == pytest.approx(32)
    from mlflow import MlflowClient

    for name in ("loss", "progress"):
        steps = [point.step for point in MlflowClient(uri).get_metric_history(run.info.run_id, name)]
        assert len(steps) == len(set(steps))


def train(job: ElasticJob, optimizer: torch.optim.Optimizer, epochs: int) -> list[int]:
    seen: list[int] = []
    for _ in job.epochs(epochs):
        for inputs, targets, indices in job.loader:
            optimizer.zero_grad()
            F.mse_loss(job.model(inputs).squeeze(1), targets).backward()
            optimizer.step()
            seen += indices.tolist()
        job.log(accuracy=0.5)
    return seen


def small_job(**arguments: Any) -> tuple[ElasticJob, torch.optim.Optimizer]:
    model = linear_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return ElasticJob(model, optimizer, Line(), batch_size=8, max_batch_size=8, **arguments), optimizer


def test_figures_go_to_the_run_that_the_script_has_open_and_leave_it_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.chdir(tmp_path)
    with mlflow.start_run() as own:
        train(*small_job(), 1)
        assert mlflow.get_run(own.info.run_id).info.status == "RUNNING"
    assert mlflow.get_run(own.info.run_id).data.metrics["accuracy"] == 0.5
    assert len(runs_of(uri)) == 1


def test_a_tracking_server_that_is_not_there_costs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    job, optimizer = small_job(mlflow_tracking_uri="http://127.0.0.1:9")
    assert len(train(job, optimizer, 1)) == 64
    assert "not reported to MLflow: connection refused" in caplog.text


CELL_1 = """
import torch, torch.nn.functional as F
from elastic_runs import Line, linear_model
import pollux_agent.torch as pollux

model = linear_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

def new_job():
    return pollux.ElasticJob(
        model, optimizer, Line(), batch_size=8, max_batch_size=8, max_local_batch_size=4
    )

def train(job, epochs, interrupt_at=-1):
    for _ in job.epochs(epochs):
        for turn, (inputs, targets, _) in enumerate(job.loader):
            optimizer.zero_grad()
            F.mse_loss(job.model(inputs).squeeze(1), targets).backward()
            if turn == interrupt_at:
                raise KeyboardInterrupt
            optimizer.step()

job = new_job()
"""


def notebook(*cells: str) -> dict[str, Any]:
    """What the variables are after these cells, the later ones run whatever became of the earlier."""
    shell = code.InteractiveInterpreter({"__name__": "__main__"})
    before = signal.getsignal(signal.SIGTERM)
    try:
        for cell in cells:
            try:
                shell.runcode(compile(cell, "cell", "exec"))
            except KeyboardInterrupt:
                sys.last_traceback = sys.exc_info()[2]  # as IPython keeps it, with all frames alive
    finally:
        signal.signal(signal.SIGTERM, before)
    return shell.locals


def flat(model: torch.nn.Module) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


@pytest.mark.parametrize("interrupt_at", [4, 5], ids=["at a step's start", "between micro-batches"])
def test_a_notebook_cell_can_be_interrupted_and_run_again(interrupt_at: int) -> None:
    plain = notebook(CELL_1, "train(job, 2)")
    again = notebook(CELL_1, f"train(job, 2, {interrupt_at})", "train(job, 2)")
    assert again["job"].step == plain["job"].step == 16
    assert flat(again["model"]) == pytest.approx(flat(plain["model"]), abs=1e-6)


def test_a_notebook_can_make_a_new_job_in_the_middle_of_a_step() -> None:
    plain = notebook(CELL_1, "job = new_job()", "train(job, 1)")
    again = notebook(CELL_1, "train(job, 1, 1)", CELL_1.replace("train(", "train_("), CELL_1, "train(job, 1)")
    reused = notebook(CELL_1, "train(job, 1, 1)", "job = new_job()", "train(job, 1)")
    for found in (again, reused):
        assert found["job"].step == 8
        assert flat(found["model"]) == pytest.approx(flat(plain["model"]), abs=1e-6)


def test_a_notebook_can_train_on_after_the_end() -> None:
    once = notebook(CELL_1, "train(job, 3)")
    twice = notebook(CELL_1, "train(job, 1)", "train(job, 3)", "train(job, 3)")
    assert once["job"].step == twice["job"].step == 24
    assert twice["job"].complete
    assert flat(twice["model"]) == pytest.approx(flat(once["model"]), abs=1e-6)


def test_sigterm_is_the_scripts_own_again_once_the_training_is_complete() -> None:
    before = signal.getsignal(signal.SIGTERM)
    job, optimizer = small_job()
    assert signal.getsignal(signal.SIGTERM) != before
    train(job, optimizer, 1)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_stop_where_nothing_is_kept_says_so(caplog: pytest.LogCaptureFixture) -> None:
    job, optimizer = small_job()
    job.stop()
    with pytest.raises(SystemExit):
        train(job, optimizer, 1)
    assert "stopped as asked at step 1, which is not saved: there is no checkpoint" in caplog.text


def stopped_training(
    job: ElasticJob, optimizer: torch.optim.Optimizer, stop_at: int, *, leaves: bool = False
) -> tuple[object, int]:
    """Ask to stop within the step behind ``stop_at`` others, and perhaps leave the pass at its end; the exit
    status, and how many passes were begun.
    """
    passes = 0
    with pytest.raises(SystemExit) as end:
        for _ in job.epochs(2):
            passes += 1
            for inputs, targets, _ in job.loader:
                optimizer.zero_grad()
                F.mse_loss(job.model(inputs).squeeze(1), targets).backward()
                stops = job.step == stop_at
                if stops:
                    job.stop()
                optimizer.step()
                if stops and leaves:
                    break
    return end.value.code, passes


def test_a_script_can_ask_to_stop_and_keep_its_work(tmp_path: Path) -> None:
    job, optimizer = small_job(checkpoint_dir=tmp_path)
    assert stopped_training(job, optimizer, 4) == (143, 1)
    assert CheckpointStore(tmp_path).names()[0].endswith("0000000005")
    resumed, optimizer = small_job(checkpoint_dir=tmp_path)
    assert resumed.step == 5
    assert len(train(resumed, optimizer, 2)) == 11 * 8


@pytest.mark.parametrize("stop_at", [1, 4])
def test_a_stop_at_the_step_at_which_a_pass_is_left_ends_the_process_too(
    tmp_path: Path, stop_at: int
) -> None:
    job, optimizer = small_job(checkpoint_dir=tmp_path)
    assert stopped_training(job, optimizer, stop_at, leaves=True) == (143, 1)
    assert CheckpointStore(tmp_path).names()[0].endswith(f"{stop_at + 1:010d}")


class Calls:
    """How often it was called, kept in checkpoints."""

    count = 0

    def add(self) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_what_is_called_after_each_step_misses_none_over_stops(tmp_path: Path) -> None:
    for stop_at in (3, 4, 9):
        calls = Calls()
        job, optimizer = small_job(checkpoint_dir=tmp_path, stateful={"calls": calls})
        assert calls.count == job.step
        job.on_step(calls.add)
        stopped_training(job, optimizer, stop_at)
        assert calls.count == job.step == stop_at + 1


def test_checkpoints_that_take_long_are_made_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes 0.1 s, a save is due at every step, and a step takes a millisecond or so."""
    save, saves = CheckpointStore.save, list[float]()

    def slow(store: CheckpointStore, *args: Any, **options: Any) -> str:
        saves.append(time.monotonic())
        time.sleep(0.1)
        return save(store, *args, **options)

    monkeypatch.setattr(CheckpointStore, "save", slow)
    monkeypatch.setattr("pollux_agent.torch.job._CHECKPOINT_INTERVAL_S", 0.0)
    job, optimizer = small_job(checkpoint_dir=tmp_path)
    job.on_step(lambda: time.sleep(0.05))
    began_s = time.monotonic()
    train(job, optimizer, 4)
    assert 2 <= len(saves) <= 2 + (time.monotonic() - began_s) / 1.0


def test_a_finished_job_goes_on_when_its_spec_has_more_epochs(tmp_path: Path) -> None:
    run = DriverRun(tmp_path)
    run.run(0)
    spec = decode(JobSpec, run.folder.spec.read_bytes())
    run.folder.spec.write_text(encode(replace(spec, epochs=5)))
    run.run(1)
    outcome = run.outcome(1)
    assert (outcome.kind, outcome.step, outcome.steps_taken) == ("done", 80, 32)
    assert decode(Outcome, run.folder.complete.read_bytes()) == outcome
    seen = run.samples_seen()
    for number in range(5):
        assert Counter(index for epoch, index in seen if epoch == number) == ONE_PASS


def test_a_finished_job_that_is_started_again_is_done_at_once(tmp_path: Path) -> None:
    run = DriverRun(tmp_path)
    run.run(0)
    run.run(1)
    assert (run.outcome(1).kind, run.outcome(1).steps_taken) == ("done", 0)
    assert len(run.samples_seen()) == 3 * 64
