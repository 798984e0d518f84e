"""A job whose model is sharded: trains as a whole one does, and resumes on another number of ranks."""

import resource
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from elastic_runs import Line
from forked import forked
from ftp_server import ftp_server
from gang import run_gang
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pollux_agent.errors import CheckpointError, DocumentError
from pollux_agent.torch import ElasticJob, join
from pollux_agent.torch.checkpoint import CheckpointStore
from pollux_agent.torch.precondition import SETTLED_STEPS
from pollux_agent.torch.sharded_saver import _drop_unused, _SafeReader, _shards_problem
from pollux_agent.torch.world import join_world


def build(sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    if sharded:
        fully_shard(model[0])
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(
    folder: Path | str | None, epochs: int, stop_at: int = -1, *, sharded: bool = True
) -> dict[str, Any]:
    model, optimizer = build(sharded)
    job = ElasticJob(
        model,
        optimizer,
        Line(),
        batch_size=6,
        max_batch_size=6,
        max_local_batch_size=3,
        scaling_rule="none",
        checkpoint_dir=folder,
    )
    seen: list[tuple[int, int]] = []
    stopped = False
    try:
        for epoch in job.epochs(epochs):
            for inputs, targets, indices in job.loader:
                optimizer.zero_grad()
                F.mse_loss(job.model(inputs).squeeze(1), targets).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                if job.steps_taken + 1 == stop_at and dist.get_rank() == 0:
                    job.stop()
                optimizer.step()
                seen += [(epoch, index) for index in indices.tolist()]
    except SystemExit:
        stopped = True
    whole = [
        parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        for parameter in model.parameters()
    ]
    return {
        "seen": seen,
        "stopped": stopped,
        "step": job.step,
        "weights": torch.cat([each.detach().flatten() for each in whole]).tolist(),
        "noise": job._trained.sync.noise.noise_scale,
    }


def whole_model(epochs: int) -> dict[str, Any]:
    return train(None, epochs, sharded=False)


def run_alone(*args: Any) -> dict[str, Any]:
    """What ``train(*args)`` returns in one process that nobody launched."""
    context = forked()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_alone, args=(sender, args), daemon=True)
    process.start()
    sender.close()
    grouped_unasked, answer = receiver.recv()
    process.join()
    assert not grouped_unasked
    return answer


def _alone(pipe: Connection, args: tuple[Any, ...]) -> None:
    join_world(None, torch.device("cpu"))
    grouped_unasked = dist.is_initialized()
    join()
    pipe.send((grouped_unasked, train(*args)))


def test_it_resumes_on_any_number_of_ranks_and_ends_as_the_whole_model_does(tmp_path: Path) -> None:
    (want,) = run_gang(1, whole_model, 2)
    seen: list[tuple[int, int]] = []
    for ranks, stop_at in [(2, 5), (3, 4), (1, 4), (2, -1)]:
        work = tmp_path, 2, stop_at
        gang = run_gang(ranks, train, *work) if ranks > 1 else [run_alone(*work)]
        for answer in gang:
            assert answer["stopped"] == (stop_at >= 0)
            assert answer["step"] == gang[0]["step"]
            assert answer["weights"] == gang[0]["weights"]
            assert answer["noise"] == gang[0]["noise"]
            assert (answer["noise"] is None) == (answer["step"] <= SETTLED_STEPS)
            seen += answer["seen"]
    assert gang[0]["step"] == want["step"] == 22
    assert gang[0]["weights"] == pytest.approx(want["weights"], abs=1e-5)
    assert set(seen) == set(want["seen"])
    assert sum(Counter(seen).values()) - 2 * 64 <= 4, "more samples borrowed than the passes' ends need"
    kept = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert len(kept) == 4, kept
    assert [name.replace("shards", "checkpoint") for name in kept[2:]] == kept[:2]


def refused(folder: Path) -> list[str]:
    said = []
    torch.manual_seed(11)
    model = fully_shard(nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    try:
        ElasticJob(model, optimizer, Line(), batch_size=6, checkpoint_dir=folder)
    except CheckpointError as error:
        said.append(str(error))
    try:
        ElasticJob(model, optimizer, Line(), batch_size=6, grad_scaler=torch.amp.GradScaler("cpu"))
    except DocumentError as error:
        said.append(str(error))
    return said


def test_shards_behind_a_url_load_on_another_number_of_ranks(tmp_path: Path) -> None:
    with ftp_server(tmp_path) as url:
        stopped = run_gang(2, train, url, 1, 5)[0]
        resumed = run_gang(1, train, url, 1, 1)[0]
    assert resumed["step"] == stopped["step"] + 1
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir())
    assert [name.replace("shards", "checkpoint") for name in kept[2:]] == kept[:2]


class Planted:
    """What must not be run when metadata is read."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("planted"),)


def test_damaged_shards_fall_back_and_foreign_ones_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "kept"
    for stop_at in (3, 3):
        run_gang(2, train, folder, 2, stop_at)
    newest, older = (int(name[-10:]) for name in CheckpointStore(folder).names())
    shard = next((folder / f"shards-000002-{newest:010d}").glob("__1_*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    (answer, *_) = run_gang(1, train, folder, 2, 1)
    assert older < answer["step"] <= older + 2
    for said in run_gang(2, refused, folder):
        assert "does not fit the script" in said[0]
        assert "grad_scaler" in said[1]

    import pickle

    shards = next(folder.glob("shards-*"))
    (shards / ".metadata").write_bytes(pickle.dumps(Planted()))
    with pytest.raises((pickle.UnpicklingError, CheckpointException)):
        dcp_load({"model": {}}, storage_reader=_SafeReader(shards), no_dist=True)
    assert not (tmp_path / "planted").exists()


def save_with_a_rank_that_cannot(folder: Path) -> dict[str, Any]:
    model, optimizer = build(True)
    model.register_buffer("ballast", torch.zeros(1))
    job = ElasticJob(model, optimizer, Line(), batch_size=6, max_batch_size=6, checkpoint_dir=folder)
    answer: dict[str, Any] = {}
    for _ in job.epochs(1):
        for inputs, targets, _ in job.loader:
            optimizer.zero_grad()
            F.mse_loss(job.model(inputs).squeeze(1), targets).backward()
            optimizer.step()
            if job.steps_taken in (1, 3, 5):
                denied = job.steps_taken == 3 and job.rank == 1
                resource.setrlimit(resource.RLIMIT_FSIZE, (10 if denied else -1, -1))
                job._training.checkpoint()
                resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
                dist.barrier()
                answer[str(job.steps_taken)] = sorted(path.name for path in folder.iterdir() if path.is_dir())
                dist.barrier()
        break
    return answer


def test_where_one_rank_finds_no_room_all_go_on_and_nothing_is_left(tmp_path: Path) -> None:
    for answer in run_gang(2, save_with_a_rank_that_cannot, tmp_path):
        assert [len(answer[step]) for step in ("1", "3", "5")] == [2, 2, 4]
        assert answer["3"] == answer["1"]


def test_a_start_that_is_fenced_off_leaves_the_newer_ones_shards(tmp_path: Path) -> None:
    older = CheckpointStore(tmp_path)
    older.claim(3)
    for name in ("shards-000002-0000000001", "shards-000003-0000000002", "shards-000004-0000000003"):
        (tmp_path / name).mkdir()
    _drop_unused(older)
    assert [path.name for path in tmp_path.glob("shards-*")] == ["shards-000004-0000000003"]


@pytest.mark.parametrize("left", ["none named", "one is missing", "one is a folder"])
def test_a_checkpoint_whose_shards_are_not_all_there_is_not_whole(tmp_path: Path, left: str) -> None:
    store, shards = CheckpointStore(tmp_path), tmp_path / "shards-000001-0000000001"
    store.claim(1)
    shards.mkdir()
    files = {} if left == "none named" else {"__0_0.distcp": ""}
    if left == "one is a folder":
        (shards / "__0_0.distcp").mkdir()
    store.save({"shards": {"folder": shards.name, "files": files}}, step=1)
    (name,) = store.names()
    assert _shards_problem(store, name)
