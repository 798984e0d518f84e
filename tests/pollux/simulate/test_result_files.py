"""Files of results: whole at every moment, though several programs write them at once."""

import json
from multiprocessing import get_context
from pathlib import Path

from pollux.simulate.files import write_document


def write_often(path: Path, number: int) -> None:
    for _ in range(100):
        write_document(path, {"writer": [number] * 2000})


def test_readers_of_a_file_with_several_writers_see_one_whole_answer(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_document(path, {"writer": [0]})
    context = get_context("fork")
    writers = [context.Process(target=write_often, args=(path, number)) for number in range(3)]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        seen.add(frozenset(json.loads(path.read_text())["writer"]))
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert all(len(numbers) == 1 for numbers in seen)
    assert [each.name for each in tmp_path.iterdir()] == ["results.json"]
