"""Trace folders: what is read and interpolated, and what is refused with field and fix."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from pollux.errors import TraceError
from pollux.simulate.synthetic import synthetic_traces, write_synthetic
from pollux.traces import read_application, read_workload
from pollux.traces.steptimes import rotated

HEADER = "name,time,application,num_replicas,batch_size\n"


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """A copy of the synthetic set that a test may damage."""
    return Path(shutil.copytree(synthetic_traces(), tmp_path / "traces"))


def read(traces: Path, name: str = "resnet18") -> None:
    read_application(traces, name, frozenset({"gpu"}))


def test_the_shipped_set_is_what_its_generator_writes(tmp_path: Path) -> None:
    write_synthetic(tmp_path)
    made = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*.csv")}
    folder = synthetic_traces()
    assert made == {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.csv")}


@pytest.mark.parametrize(
    ("shape", "want"), [((4,), (4,)), ((4, 2), (2, 4)), ((4, 1, 4), (1, 4, 4)), ((2, 4, 1), (1, 2, 4))]
)
def test_a_placement_is_a_ring(shape: tuple[int, ...], want: tuple[int, ...]) -> None:
    assert rotated(shape) == want


def test_a_measured_placement_is_interpolated_over_the_local_batch_alone(traces: Path) -> None:
    rows = (traces / "apps/resnet18/placements.csv").read_text().splitlines()[1:]
    table = {tuple(row.split(",")[:2]): [float(value) for value in row.split(",")[2:]] for row in rows}
    app = read_application(traces, "resnet18", frozenset({"gpu"}))
    low, high = table["44", "64"], table["44", "128"]
    assert app.step_times("gpu", (4, 4), 64) == pytest.approx(table["44", "64"])
    middle = (np.array(low) + np.array(high)) / 2
    assert app.step_times("gpu", (4, 4), 96) == pytest.approx(middle)


def test_between_measured_placements_times_are_linear_in_nodes_gpus_and_batch(traces: Path) -> None:
    """Where times are a linear function, every interpolation of them gives that function."""
    folder = traces / "apps/resnet18"

    def line(nodes: int, gpus: int, local: int) -> str:
        return f"{0.1 + 0.01 * nodes + 0.002 * gpus + 0.0005 * local:.9f},{0.01 * nodes:.9f}"

    placements = [
        f"{'4' * nodes},{local},{line(nodes, 4 * nodes, local)}" for nodes in (1, 2, 3) for local in (32, 64)
    ]
    placements += [f"1,{local},{line(1, 1, local)}" for local in (32, 64)]
    scales = [
        f"{nodes},{gpus},{local},{line(nodes, gpus, local)}"
        for nodes, gpus in ((8, 8), (8, 32), (16, 16), (16, 64))
        for local in (32, 64)
    ]
    (folder / "placements.csv").write_text(
        "\n".join(["placement,local_bsz,step_time,sync_time", *placements])
    )
    header = "num_nodes,num_replicas,local_bsz,step_time,sync_time"
    (folder / "scalability.csv").write_text("\n".join([header, *scales]))
    app = read_application(traces, "resnet18", frozenset({"gpu"}))
    want = [float(value) for value in line(10, 25, 50).split(",")]
    assert app.step_times("gpu", (3, 2, 3, 2, 3, 2, 3, 2, 3, 2), 50) == pytest.approx(want)


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("placements.csv", "placement,", "place,", ["placements.csv", "column 'placement' is missing"]),
        ("placements.csv", "44,32,", "4x,32,", ["placement is '4x'", "one digit from 1 to 9 a node"]),
        ("placements.csv", "44,32,", "44,-32,", ["line", "local_bsz is '-32'", "0 or more"]),
        ("scalability.csv", "16,64,1024,", "16,64,nan,", ["local_bsz is 'nan'", "a finite number"]),
        ("validation-128.csv", "391.0,391", "inf,391", ["progress is 'inf'", "a finite number"]),
        ("validation-128.csv", "391.0,391", "1e300,391", ["progress is '1e+300'", "at most 1e+30"]),
        ("placements.csv", "44,32,", "44,32.5,", ["line", "local_bsz is 32.5", "a whole number from 1"]),
        ("scalability.csv", "16,64,1024,", "16,64,1e12,", ["local_bsz is 1e+12", "to 1e+09"]),
        ("scalability.csv", "16,64,1024,", "0,64,1024,", ["line", "num_nodes is 0", "from 1"]),
        ("scalability.csv", "16,64,1024,", "99,64,1024,", ["num_nodes is 99 and num_replicas 64"]),
        ("scalability.csv", "16,64,1024,", "16,64.5,1024,", ["num_replicas 64.5", "whole numbers"]),
    ],
)
def test_damaged_files_are_refused(traces: Path, file: str, old: str, new: str, words: list[str]) -> None:
    path = traces / "apps/resnet18" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(TraceError) as refused:
        read(traces)
    for word in words:
        assert word in str(refused.value)


def test_progress_that_does_not_grow_is_refused(traces: Path) -> None:
    for path in (traces / "apps/resnet18").glob("validation-*.csv"):
        path.write_text(path.read_text().replace("391.0,", "9999999.0,", 1))
    with pytest.raises(TraceError, match="grow from row to row"):
        read(traces)


@pytest.mark.parametrize("size", ["0", "0128", "-1", "x", "12345678901"])
def test_a_validation_file_with_another_name_is_not_left_out(traces: Path, size: str) -> None:
    file = traces / "apps/resnet18/validation-128.csv"
    file.rename(file.with_name(f"validation-{size}.csv"))
    with pytest.raises(TraceError, match=rf"validation-{size}\.csv: its name must be validation-M\.csv"):
        read(traces)


def test_a_missing_file_is_named(traces: Path) -> None:
    (traces / "apps/resnet18/scalability.csv").unlink()
    with pytest.raises(TraceError, match=r"scalability\.csv: there is no such file"):
        read(traces)


@pytest.mark.parametrize("name", ["vgg", "../apps/resnet18", "", "resnet18/", "a" * 200])
def test_an_unknown_application_is_refused_with_the_known_ones(traces: Path, name: str) -> None:
    with pytest.raises(TraceError, match=r"is unknown: .* has bert, deepspeech2, resnet18"):
        read(traces, name)


def test_an_application_that_was_not_measured_on_the_cluster_is_refused(traces: Path) -> None:
    with pytest.raises(TraceError, match="no measurements on a100"):
        read_application(traces, "resnet18", frozenset({"a100"}))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("a,-1,resnet18,1,128\n", ["line 2", "time is '-1'", "0 or more"]),
        ("a,nan,resnet18,1,128\n", ["time is 'nan'"]),
        ("a,1e12,resnet18,1,128\n", ["line 2", "time is 1e+12 s"]),
        ("a,0,resnet18,0,128\n", ["num_replicas is 0", "whole number"]),
        ("a,0,resnet18,1.5,128\n", ["num_replicas is 1.5"]),
        ("a,0,resnet18,1,none\n", ["batch_size is 'none'", "a finite number"]),
        ("a,0,resnet18,1,128\na,5,resnet18,1,128\n", ["line 3", "'a' is there twice"]),
        ("a,0,,1,128\n", ["application is ''", "not empty"]),
        ("a,True,resnet18,1,128\n", ["line 2", "time is 'True'"]),
        ("a,0,resnet18,1e300,128\n", ["num_replicas is '1e+300'", "at most"]),
        ("a,0,resnet18,1,128,5\n", ["more fields than its header"]),
        ("\n\na,-1,resnet18,1,128\n", ["line 4", "time is '-1'"]),
        ("a,0,resnet18,1,128\n\nb,0,resnet18,0,128\n", ["line 4", "num_replicas is 0"]),
        ("", ["no row below its header"]),
    ],
)
def test_a_wrong_workload_is_refused(tmp_path: Path, rows: str, words: list[str]) -> None:
    path = tmp_path / "workload-1.csv"
    path.write_text(HEADER + rows)
    with pytest.raises(TraceError) as refused:
        read_workload(path)
    for word in [path.name, *words]:
        assert word in str(refused.value)


def test_blank_lines_are_no_submissions_and_their_order_is_free(tmp_path: Path) -> None:
    path = tmp_path / "workload-1.csv"
    path.write_text(HEADER + "a,9,resnet18,1,128\n\n,,,,\nb,0,resnet18,1,128\n\n")
    requests = read_workload(path).requests
    assert [(each.name, each.submitted_s) for each in requests] == [("a", 9.0), ("b", 0.0)]


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe\x00", b'a,"b\n', b"name,time\n", HEADER.replace("time", "time,time").encode() + b"a\n"],
)
def test_what_is_no_workload_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "workload-1.csv"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"workload-1\.csv"):
        read_workload(path)


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    for path in (tmp_path, tmp_path / "pipe.csv"):
        with pytest.raises(TraceError, match="is no file"):
            read_workload(path)


@pytest.mark.needs("traces")
def test_the_recorded_applications_have_the_epochs_of_the_experiments(recorded: Path) -> None:
    epochs = {"bert": 2, "cifar10": 100, "ncf": 10, "imagenet": 90, "deepspeech2": 80, "yolov3": 50}
    read_ones = {name: read_application(recorded, name, frozenset({"gpu"})) for name in epochs}
    assert {name: app.epochs for name, app in read_ones.items()} == epochs
    assert read_ones["yolov3"].local_bounds("gpu") == (4, 8)
    assert read_ones["ncf"].max_batch_size == 32768
