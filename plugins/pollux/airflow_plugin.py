"""The Pollux page inside Airflow: a small web application behind Airflow's own log-in."""

from typing import Annotated

from airflow.api_fastapi.auth.managers.models.resource_details import AccessView
from airflow.api_fastapi.core_api.security import requires_access_view
from airflow.plugins_manager import AirflowPlugin
from fastapi import Depends, FastAPI, HTTPException, Path, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from pollux.cluster.local import LocalCluster
from pollux.cluster_page import SCRIPT, gather, page_json, render
from pollux.errors import ClusterUnavailable, ConfigError, UnknownJob
from pollux.operators.links import mlflow_run_url
from pollux.settings import Settings, settings

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; "
    "frame-ancestors 'self'",
}


def create_app() -> FastAPI:
    """The application. Each of its routes asks for a log-in that may see plugins; there are no others."""
    app = FastAPI(
        title="Pollux",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        dependencies=[Depends(requires_access_view(AccessView.PLUGINS))],
    )

    @app.get("/")
    def page(config: Annotated[Settings, Depends(_settings)]) -> HTMLResponse:
        return HTMLResponse(render(gather(config)), headers=_HEADERS)

    @app.get("/page.js")
    def script() -> Response:
        return Response(SCRIPT, media_type="text/javascript")

    @app.get("/api/cluster")
    def cluster(config: Annotated[Settings, Depends(_settings)]) -> Response:
        return Response(page_json(gather(config)), media_type="application/json", headers=_HEADERS)

    @app.get("/jobs/{job_id}/run")
    def run(
        job_id: Annotated[str, Path(pattern=r"^[a-z0-9-]{1,63}$")],
        config: Annotated[Settings, Depends(_settings)],
    ) -> RedirectResponse:
        """The job's MLflow run, also for a job whose run was made after its submission."""
        try:
            job = LocalCluster(config.socket).job(job_id)
        except UnknownJob as error:
            raise HTTPException(404, str(error)) from None
        except ClusterUnavailable as error:
            raise HTTPException(503, f"The cluster does not answer: {error}") from None
        base_url = config.mlflow_url or config.mlflow_tracking_uri
        if not job.mlflow_run_id or not base_url.startswith(("http://", "https://")):
            raise HTTPException(404, f"{job_id} has no MLflow run yet; the scheduling cycle makes it")
        return RedirectResponse(mlflow_run_url(base_url, job.mlflow_run_id))

    return app


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
