"""What Airflow asks a provider about itself."""

from typing import Any

from pollux import __version__


def get_provider_info() -> dict[str, Any]:
    return {
        "package-name": "airflow-provider-pollux",
        "name": "Pollux",
        "description": "Trains PyTorch jobs on GPUs that a scheduler gives and takes by goodput.",
        "versions": [__version__],
        "integrations": [{"integration-name": "Pollux", "external-doc-url": "", "tags": ["software"]}],
        "operators": [
            {"integration-name": "Pollux", "python-modules": ["pollux.operators.training"]},
        ],
        "triggers": [
            {"integration-name": "Pollux", "python-modules": ["pollux.triggers.training"]},
        ],
        "extra-links": ["pollux.operators.links.MLflowRunLink"],
    }
