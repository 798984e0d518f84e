"""``pollux doctor``: what an installation lacks, and the exact rule or value to add."""

import copy
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pollux.cli import app
from pollux.cli.opening import StateOption, variables

if TYPE_CHECKING:
    from pollux.doctor import Finding, KubePlan
    from pollux.doctor.release import Release
    from pollux.settings import Settings


@app.command()
def doctor(
    state: StateOption = None,
    cluster: Annotated[str, typer.Option(help="local or kubernetes.", show_default="POLLUX_CLUSTER")] = "",
    namespace: Annotated[
        list[str] | None,
        typer.Option(help="A namespace of jobs; may be repeated.", show_default="POLLUX_KUBE_NAMESPACES"),
    ] = None,
    role: Annotated[
        list[str] | None,
        typer.Option(
            help="Whose rights: scheduler, shadow, operator, driver.", show_default="by POLLUX_SHADOW"
        ),
    ] = None,
    account: Annotated[
        str, typer.Option(help="NAMESPACE/NAME of the ServiceAccount to ask about.", show_default="yourself")
    ] = "",
    image: Annotated[str, typer.Option(help="An image with Python: tries the shared storage.")] = "",
    pod: Annotated[
        Path | None, typer.Option(help="A pod as JSON or YAML for that, where an image is not enough.")
    ] = None,
    release: Annotated[
        str,
        typer.Option(
            help="NAMESPACE/RELEASE of the installed chart, whose settings apply where yours do not."
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check Airflow, MLflow, rights, GPUs, quotas, storage, clocks, versions; 1 if something is missing."""
    from pollux.doctor import examine

    installed = _release(release) if release else None
    environ = _environment(state, cluster, installed)
    config, plan = _plan(environ, namespace, role, account, _template(image, pod, installed), installed)
    findings = []
    for finding in examine(config, plan):
        findings.append(finding)
        if not as_json:
            _print(finding)
    counts = {
        status: sum(finding.status == status for finding in findings)
        for status in ("ok", "warning", "failed")
    }
    if as_json:
        found = [asdict(finding) for finding in findings]
        typer.echo(json.dumps({"ok": not counts["failed"], "counts": counts, "findings": found}, indent=2))
    else:
        typer.echo(f"{counts['ok']} ok, {counts['warning']} warnings, {counts['failed']} failed")
    if counts["failed"]:
        raise typer.Exit(1)


def _release(name: str) -> "Release":
    """The installed release; ends the command where it cannot be read."""
    from pollux.cluster.k8s import kube_settings
    from pollux.doctor.release import read_release
    from pollux.errors import ConfigError
    from pollux_agent.driver.kube.api import KubeError, open_api

    try:
        kube = kube_settings(os.environ)
        return read_release(open_api(kube.config, kube.context), name)
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    except KubeError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def _environment(state: Path | None, cluster: str, release: "Release | None") -> dict[str, str]:
    """Our own variables over those of the release, or else of the stack in the state folder."""
    from pollux.errors import ConfigError, StackError

    try:
        environ = variables(state, release.settings if release else None)
    except (ConfigError, StackError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    if cluster:
        environ["POLLUX_CLUSTER"] = cluster
    return environ


def _plan(
    environ: dict[str, str],
    namespaces: list[str] | None,
    roles: list[str] | None,
    account: str,
    pod: Mapping[str, Any] | None,
    release: "Release | None",
) -> "tuple[Settings, KubePlan | None]":
    """The settings of the environment, and the options; ends with 2 where one is wrong."""
    from pollux.cluster.k8s import kube_settings
    from pollux.cluster.k8s.settings import NAME_PATTERN
    from pollux.doctor import KubePlan
    from pollux.doctor.rights import ROLES
    from pollux.errors import ConfigError
    from pollux.settings import settings

    try:
        config = settings(environ)
        if config.cluster == "local":
            return config, None
        kube = kube_settings(environ)
        wrong = [name for name in namespaces or () if re.fullmatch(NAME_PATTERN, name) is None]
        if wrong:
            raise ConfigError(
                f"--namespace: {wrong[0]!r} is no name of a namespace: lower-case letters, digits and hyphens"
            )
        unknown = sorted(set(roles or ()) - ROLES.keys())
        if unknown:
            raise ConfigError(f"--role: {unknown[0]!r} is none; name one of {', '.join(ROLES)}")
        if account and account.count("/") != 1:
            raise ConfigError(f"--account: {account!r} is no NAMESPACE/NAME")
        return config, KubePlan(
            settings=kube,
            namespaces=namespaces or list(dict.fromkeys((kube.namespace, *kube.namespaces))),
            roles=roles or ["shadow" if config.shadow else "scheduler"],
            account=account,
            pod=pod,
            login_elsewhere=release is not None and "POLLUX_AIRFLOW_LOGIN" in release.inside,
        )
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None


def _template(image: str, pod: Path | None, release: "Release | None") -> dict[str, Any] | None:
    """The pod that tries the storage: the one given, else the release's of trainings, with that image; None
    without pod and image. Ends with 2 where the file holds none.
    """
    if pod is None and not image:
        return None
    plain = {"spec": {"containers": [{"name": "doctor"}]}}
    found = _read_pod(pod) if pod else copy.deepcopy(dict((release and release.training_pod) or plain))
    if image:
        found["spec"]["containers"][0]["image"] = image
    return found


def _read_pod(path: Path) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        typer.echo(f"--pod: {path} cannot be read: {error}", err=True)
        raise typer.Exit(2) from None
    if not isinstance(found, dict) or not (found.get("spec") or {}).get("containers"):
        typer.echo(f"--pod: {path} is no pod with a container; write one as for kubectl", err=True)
        raise typer.Exit(2)
    return found


def _print(finding: "Finding") -> None:
    from rich.console import Console
    from rich.text import Text

    colour = {"ok": "green", "warning": "yellow", "failed": "red"}[finding.status]
    console = Console(highlight=False)
    line = Text.assemble((f"{finding.status:8}", colour), (f"{finding.check}: ", "bold"), finding.detail)
    console.print(line, soft_wrap=True)
    for text in finding.fix.splitlines():
        console.print(Text(f"{'':10}{text}"), soft_wrap=True)
