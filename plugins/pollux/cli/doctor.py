"""``pollux doctor``: what an installation lacks, and the exact rule or value to add."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pollux.cli import app
from pollux.cli.opening import DEFAULT_STATE, StateOption

if TYPE_CHECKING:
    from pollux.doctor import Finding, KubePlan
    from pollux.settings import Settings


@app.command()
def doctor(
    state: StateOption = None,
    cluster: Annotated[str, typer.Option(help="local or kubernetes.", show_default="POLLUX_CLUSTER")] = "",
    namespace: Annotated[
        list[str] | None,
        typer.Option(help="A namespace of jobs; may be repeated.", show_default="POLLUX_KUBE_NAMESPACE"),
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

    environ = _environment(state, cluster, release)
    config, plan = _plan(environ, namespace, role, account, image, pod)
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


def _environment(state: Path | None, cluster: str, release: str) -> dict[str, str]:
    """Our own variables over those of the release; ends the command where they cannot be had."""
    from pollux.cluster.k8s import kube_settings
    from pollux.doctor.release import settings_of
    from pollux.errors import ConfigError
    from pollux_agent.driver.kube.api import KubeError, open_api

    environ = dict(os.environ)
    if release:
        try:
            kube = kube_settings(environ)
            environ = settings_of(open_api(kube.config, kube.context), release) | environ
        except ConfigError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(2) from None
        except KubeError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from None
    environ["POLLUX_STATE"] = str(state) if state else environ.get("POLLUX_STATE") or DEFAULT_STATE
    if cluster:
        environ["POLLUX_CLUSTER"] = cluster
    return environ


def _plan(
    environ: dict[str, str],
    namespaces: list[str] | None,
    roles: list[str] | None,
    account: str,
    image: str,
    pod: Path | None,
) -> "tuple[Settings, KubePlan | None]":
    """The settings of the environment, and the options; ends with 2 where one is wrong."""
    from pollux.cluster.k8s import kube_settings
    from pollux.doctor import KubePlan
    from pollux.doctor.rights import ROLES
    from pollux.errors import ConfigError
    from pollux.settings import settings

    try:
        config = settings(environ)
        if config.cluster == "local":
            return config, None
        kube = kube_settings(environ)
        unknown = sorted(set(roles or ()) - ROLES.keys())
        if unknown:
            raise ConfigError(f"--role: {unknown[0]!r} is none; name one of {', '.join(ROLES)}")
        if account and account.count("/") != 1:
            raise ConfigError(f"--account: {account!r} is no NAMESPACE/NAME")
        return config, KubePlan(
            settings=kube,
            namespaces=namespaces or [kube.namespace],
            roles=roles or ["shadow" if config.shadow else "scheduler"],
            account=account,
            pod=_template(image, pod),
        )
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None


def _template(image: str, pod: Path | None) -> dict[str, Any] | None:
    import yaml

    from pollux.errors import ConfigError

    if pod is None:
        return {"spec": {"containers": [{"name": "doctor", "image": image}]}} if image else None
    try:
        found = yaml.safe_load(pod.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--pod: {pod} cannot be read: {error}") from None
    if not isinstance(found, dict) or not (found.get("spec") or {}).get("containers"):
        raise ConfigError(f"--pod: {pod} is no pod with a container; write one as for kubectl")
    if image:
        found["spec"]["containers"][0]["image"] = image
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
