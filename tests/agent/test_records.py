"""Files that workers leave: whole or not there, and the first outcome stands."""

import multiprocessing
from pathlib import Path

from pollux_agent.protocol import Event, JobFolder, Outcome, decode
from pollux_agent.records import append_line, write_atomic, write_completion, write_outcome


def outcome(**changes: object) -> Outcome:
    fields: dict[str, object] = {
        "kind": "failed",
        "job_id": "digits-0",
        "incarnation": 1,
        "rank": 0,
        "time_unix_s": 1.0,
    }
    return Outcome(**(fields | changes))  # type: ignore[arg-type]


def test_the_first_outcome_of_a_rank_stands(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    write_outcome(folder, outcome(error="the cause"))
    write_outcome(folder, outcome(error="a consequence"))
    assert decode(Outcome, folder.outcome(1, 0).read_text()).error == "the cause"


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    target = tmp_path / "complete.json"
    write_atomic(target, b"old")
    target_is_a_folder = tmp_path / "folder"
    (target_is_a_folder / "inside").mkdir(parents=True)
    for path in (target_is_a_folder,):
        try:
            write_atomic(path, b"new")
        except OSError:
            pass
    assert target.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["complete.json", "folder"]


def test_the_completion_marker_is_the_outcome(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    done = outcome(kind="done")
    write_completion(folder, done)
    assert decode(Outcome, folder.complete.read_text()) == done


def _append(path: Path, node: str) -> None:
    for step in range(200):
        append_line(
            path,
            Event(t_unix_s=1.0, event="step", node=node, slots=(0,), step=step, progress=1.0, batch_size=8),
        )


def test_lines_of_several_writers_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append, args=(path, f"node-{i}")) for i in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    events = [decode(Event, line) for line in path.read_text().splitlines()]
    assert len(events) == 800
    for i in range(4):
        assert [event.step for event in events if event.node == f"node-{i}"] == list(range(200))
