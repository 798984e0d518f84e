"""The picture's data, and that a picture is drawn."""

from pathlib import Path

from pollux.demo.picture import save_picture, stack_of
from pollux.verify import JobFigures


def job(name: str, submitted_s: float, allocations: list[tuple[float, int]]) -> JobFigures:
    return JobFigures(
        job_id=name,
        name=name,
        state="success",
        submitted_s=submitted_s,
        jct_s=allocations[-1][0] - submitted_s,
        resizes=1,
        moves=0,
        restart_s=5.0,
        mlflow_run_id="r",
        allocations=tuple(allocations),
    )


JOBS = [
    job("a", 0, [(0, 0), (10, 4), (70, 2), (120, 0)]),
    job("b", 50, [(50, 0), (75, 2), (130, 4), (200, 0)]),
]


def test_jobs_share_one_time_axis() -> None:
    stack = stack_of(JOBS)
    assert stack.times_s == (0, 10, 50, 70, 75, 120, 130, 200)
    assert stack.gpus == ((0, 4, 4, 2, 2, 0, 0, 0), (0, 0, 0, 0, 2, 2, 4, 0))


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    save_picture(tmp_path / "picture.png", JOBS, capacity=4, title="GPUs by job")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_never_began_still_gives_a_picture(tmp_path: Path) -> None:
    save_picture(tmp_path / "picture.png", [], capacity=4, title="nothing")
    assert (tmp_path / "picture.png").stat().st_size > 0
