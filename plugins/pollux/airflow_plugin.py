"""The Pollux page in Airflow, behind Airflow's own log-in, and the metrics, behind a token of their own."""

import logging
from typing import Annotated

from airflow.api_fastapi.auth.managers.models.resource_details import AccessView
from airflow.api_fastapi.core_api.security import requires_access_view
from airflow.plugins_manager import AirflowPlugin
from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Path, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from pollux.cluster.opening import open_cluster
from pollux.cluster_page import SCRIPT, gather, page_json, render
from pollux.errors import ClusterUnavailable, ConfigError, SnapshotError, StoreError, UnknownJob
from pollux.metrics import exposition, last_cycle, may_read
from pollux.operators.links import mlflow_run_url
from pollux.record import Records
from pollux.settings import Settings, settings

log = logging.getLogger("pollux.metrics")

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; "
    "frame-ancestors 'self'",
}


def create_app() -> FastAPI:
    """The application: all routes ask for a log-in that may see plugins, the metrics for a token."""
    app = FastAPI(title="Pollux", docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(_metrics())
    app.include_router(_pages(), dependencies=[Depends(requires_access_view(AccessView.PLUGINS))])
    return app


def _pages() -> APIRouter:
    router = APIRouter()

    @router.get("/")
    def page(config: Annotated[Settings, Depends(_settings)]) -> HTMLResponse:
        return HTMLResponse(render(gather(config)), headers=_HEADERS)

    @router.get("/page.js")
    def script() -> Response:
        return Response(SCRIPT, media_type="text/javascript")

    @router.get("/api/cluster")
    def cluster(config: Annotated[Settings, Depends(_settings)]) -> Response:
        return Response(page_json(gather(config)), media_type="application/json", headers=_HEADERS)

    @router.get("/jobs/{job_id}/run")
    def run(
        job_id: Annotated[str, Path(pattern=r"^[a-z0-9-]{1,63}$")],
        config: Annotated[Settings, Depends(_settings)],
    ) -> RedirectResponse:
        """The job's MLflow run, also for a job whose run was made after its submission."""
        try:
            job = open_cluster(config).job(job_id)
        except UnknownJob as error:
            raise HTTPException(404, str(error)) from None
        except ClusterUnavailable as error:
            raise HTTPException(503, f"The cluster does not answer: {error}") from None
        base_url = config.mlflow_url or config.mlflow_tracking_uri
        if not job.mlflow_run_id or not base_url.startswith(("http://", "https://")):
            raise HTTPException(404, f"{job_id} has no MLflow run yet; the scheduling cycle makes it")
        return RedirectResponse(mlflow_run_url(base_url, job.mlflow_run_id))

    return router


def _metrics() -> APIRouter:
    """Prometheus reads with a token that does not end, as Airflow's do."""
    router = APIRouter()

    @router.get("/metrics")
    def metrics(
        config: Annotated[Settings, Depends(_settings)],
        authorization: Annotated[str, Header()] = "",
        accept: Annotated[str, Header()] = "",
    ) -> Response:
        try:
            allowed = may_read(config, authorization)
        except ConfigError as error:
            log.error("%s", error)
            raise HTTPException(503, "metrics are not set up; this server's log says why") from None
        if not allowed:
            raise HTTPException(401, "a bearer token is needed", headers={"WWW-Authenticate": "Bearer"})
        try:
            text, content_type = exposition(last_cycle(config, Records(config.decisions)), accept)
        except (SnapshotError, StoreError) as error:
            raise HTTPException(503, f"The last decision cannot be read: {error}") from None
        return Response(text, headers={"Content-Type": content_type, "Cache-Control": "no-store"})

    return router


def _settings() -> Settings:
    try:
        return settings()
    except ConfigError as error:
        raise HTTPException(503, f"Pollux is not set up: {error}") from None


class PolluxPlugin(AirflowPlugin):
    """What Airflow finds by the entry point ``airflow.plugins``."""

    name = "pollux"
    fastapi_apps = [{"app": create_app(), "url_prefix": "/pollux", "name": "Pollux"}]  # noqa: RUF012
    external_views = [  # noqa: RUF012
        {
            "name": "Pollux",
            "href": "/pollux/",
            "destination": "nav",
            "url_route": "pollux",
            "nav_top_level": True,
        }
    ]
