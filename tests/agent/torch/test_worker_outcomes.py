"""The worker runs a script as Python does, and tells a failure from a lost peer."""

import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from pollux_agent.errors import ScriptError
from pollux_agent.protocol import Outcome, decode
from pollux_agent.settings import WorkerSettings, environment
from pollux_agent.torch.network import interface_towards
from pollux_agent.torch.worker import forgiving, lost_contact, main, run_script


@pytest.fixture(autouse=True)
def _python_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_a_script_sees_its_arguments_its_folder_and_the_name_main(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 'from beside'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, sys\n"
        "import beside\n"
        "out = pathlib.Path(sys.argv[2])\n"
        "out.write_text('|'.join([__name__, beside.VALUE, __file__, *sys.argv[:2], sys.path[0]]))\n"
    )
    run_script(script, ["--flag", str(tmp_path / "out")])
    seen = (tmp_path / "out").read_text().split("|")
    assert seen == ["__main__", "from beside", str(script), str(script), "--flag", str(tmp_path)]


def test_a_missing_script_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=r"nowhere\.py"):
        run_script(tmp_path / "nowhere.py", [])


def chained(outer: Exception, cause: Exception) -> Exception:
    outer.__cause__ = cause
    return outer


@pytest.mark.parametrize(
    ("error", "want"),
    [
        pytest.param(dist.DistBackendError("NCCL communicator was aborted"), True, id="nccl"),
        pytest.param(
            RuntimeError(
                "[third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]"
            ),
            True,
            id="gloo: a peer closed",
        ),
        pytest.param(
            RuntimeError("[third_party/gloo/gloo/transport/tcp/buffer.cc:72] Timed out waiting 1800000ms"),
            True,
            id="gloo: a peer is silent",
        ),
        pytest.param(
            chained(RuntimeError("step failed"), dist.DistNetworkError("the store is gone")),
            True,
            id="a cause",
        ),
        pytest.param(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False, id="a wrong shape"),
        pytest.param(ConnectionResetError("the data server went away"), False, id="the script's own network"),
        pytest.param(TimeoutError("timed out"), False, id="the script's own timeout"),
        pytest.param(ValueError("gloo connection closed"), False, id="words alone"),
    ],
)
def test_only_losing_a_peer_counts_as_an_interruption(error: Exception, want: bool) -> None:
    assert lost_contact(error) is want


def test_loopback_has_the_interface_lo() -> None:
    assert interface_towards("127.0.0.1") == "lo"


def test_an_error_with_a_name_that_is_no_utf_8_is_an_outcome_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a file that os.listdir found."""
    script = tmp_path / "script.py"
    script.write_text("open('caf\\udce9.csv')\n")
    settings = WorkerSettings(
        job_id="job",
        job_dir=tmp_path,
        incarnation=1,
        node="node-0",
        slots=(0,),
        placement={"node-0": 1},
        node_rank=0,
        rendezvous="127.0.0.1:1",
        gpu_type="gpu",
    )
    for name, value in {**environment(settings), "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert main([str(script)]) == 1
    outcome = decode(Outcome, settings.folder.outcome(1, 0).read_bytes())
    assert outcome.kind == "failed"
    assert outcome.error.startswith("FileNotFoundError: ")
    assert "caf" in outcome.traceback


def test_a_print_to_a_launcher_that_is_gone_is_no_error_of_the_script() -> None:
    """The launcher's end reaches the output a moment before the kernel ends the worker."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as pipe:
        os.close(reading)
        output = forgiving(pipe)
        print("step 1", file=output, flush=True)
        print("step 2", file=output, flush=True)
