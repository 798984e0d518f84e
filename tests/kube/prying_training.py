"""The steady training, which first tries what user code must not be able to do, and tells what came of it.

Its last argument is a text that must arrive as it was given. PRY is a JSON object: urls (verb and address),
folders that it looks for, and files that it tries to write.
"""

import json
import os
import ssl
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

import steady_training


def status(verb: str, url: str) -> int:
    """What the server answers to who has no credentials to show."""
    body = b'{"metadata": {"labels": {"pried": "open"}}}' if verb == "PATCH" else None
    request = Request(url, method=verb, data=body, headers={"Content-Type": "application/merge-patch+json"})
    unverified = ssl.create_default_context()
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    try:
        with urlopen(request, context=unverified, timeout=20) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


def writes(path: str) -> bool:
    try:
        Path(path).write_text("pried")
    except OSError:
        return False
    return True


def pry(argument: str) -> dict[str, object]:
    wanted = json.loads(os.environ["PRY"])
    secrets = Path("/var/run/secrets")
    return {
        "user": os.getuid(),
        "argument": argument,
        "variable": os.environ["GIVEN"],
        "statuses": [status(verb, url) for verb, url in wanted["urls"]],
        "secrets": [str(path) for path in secrets.rglob("*")] if secrets.exists() else [],
        "folders": [folder for folder in wanted["folders"] if Path(folder).exists()],
        "written": [path for path in wanted["files"] if writes(path)],
    }


if __name__ == "__main__":
    told = Path("/pollux/job/pried.json")
    told.write_text(json.dumps(pry(sys.argv.pop())))
    steady_training.main()
