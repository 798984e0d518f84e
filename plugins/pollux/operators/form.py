"""The form with which a person submits a job from Airflow's trigger dialog: JSON schema in, job spec out."""

from collections.abc import Mapping
from typing import Any

from airflow.sdk import Param

_COUNT: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}
_MAYBE_COUNT: dict[str, Any] = {**_COUNT, "type": ["null", "integer"]}


def job_form() -> dict[str, Param]:
    """The fields in the order of the dialog; the defaults train the digits example.

    The dialog opens with those that have no section; the others wait in sections that are closed.
    """
    batch, gpus, how = "Batch size", "GPUs", "Run"
    return {
        "name": Param(
            "digits",
            type="string",
            minLength=1,
            maxLength=100,
            title="Name",
            description="Names the job in Airflow, in MLflow and on the cluster.",
        ),
        "script": Param(
            "digits.py",
            type="string",
            minLength=1,
            title="Script",
            description="The Python script, absolute or relative to the scripts folder of the stack.",
        ),
        "arguments": Param(
            [],
            type=["null", "array"],
            items={"type": "string"},
            title="Arguments",
            description="Command line of the script, an argument a line; empty lines are left out.",
        ),
        "epochs": Param(
            None,
            **_MAYBE_COUNT,
            title="Epochs",
            description="Statistical epochs: one makes as much progress as a pass over the data at the "
            "initial batch size. Empty: the script's own number.",
        ),
        "scaling_rule": Param(
            "adascale",
            type="string",
            enum=["adascale", "sqrt", "linear", "legw", "none"],
            title="Learning rate scaling",
            description="How the learning rate follows the batch size: adascale for SGD, sqrt for Adam; "
            "legw: sqrt with a warm-up.",
        ),
        "initial_batch_size": Param(
            32,
            **_COUNT,
            section=batch,
            title="Initial batch size (M0)",
            description="The total batch size that the script's learning rate was chosen for.",
        ),
        "max_batch_size": Param(
            None,
            **_MAYBE_COUNT,
            section=batch,
            title="Max batch size",
            description="Largest total batch size. Empty: 32 times the initial one.",
        ),
        "max_local_batch_size": Param(
            256,
            **_COUNT,
            section=batch,
            title="Max batch size of one GPU",
            description="What fits in one GPU's memory; larger totals are accumulated.",
        ),
        "min_gpus": Param(
            1, **_COUNT, section=gpus, title="Min GPUs", description="The job waits until it can have these."
        ),
        "max_gpus": Param(
            4, **_COUNT, section=gpus, title="Max GPUs", description="The scheduler never gives more."
        ),
        "kind": Param(
            "adaptive",
            type="string",
            enum=["adaptive", "strong_scaling", "rigid"],
            section=gpus,
            title="Kind",
            description="adaptive: batch size and GPUs are tuned; strong_scaling: GPUs only, at the initial "
            "batch size; rigid: both fixed, with min GPUs = max GPUs.",
        ),
        "fresh": Param(
            False,
            type="boolean",
            section=how,
            title="Start over",
            description="When the task is cleared: forget its checkpoints instead of going on from them.",
        ),
    }


def spec_from_form(context: Mapping[str, Any], jinja_env: Any = None) -> dict[str, Any]:
    """The operator's ``spec`` as it was filled in, each value with the type that it has in the form.

    What a hand leaves in a form by mistake is no part of it: spaces round a text, and empty lines.
    """
    return {
        field: _tidy(value)
        for field, value in dict(context["params"]).items()
        if value is not None and field != "fresh"
    }


def _tidy(value: Any) -> Any:
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, list):
        return [item for item in value if item != ""]
    return value
