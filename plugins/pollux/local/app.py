"""The service's HTTP face: documents in, documents out, errors as ``{"error": "..."}``."""

import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import Field
from pydantic.dataclasses import dataclass

from pollux.cluster.base import MAX_LEASE, JobIdentity, StopReason
from pollux.cluster.local import GIVEN_UP_HEADER
from pollux.errors import Conflict, PolluxError, Refused, UnknownJob
from pollux.local.service import LocalService
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import DOCUMENT_CONFIG, Allocation, JobSpec, decode, to_plain

logger = logging.getLogger(__name__)

_STATUS = {UnknownJob: 404, Conflict: 409, Refused: 400, DocumentError: 422}
_MAX_BODY_BYTES = 1_000_000

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class Submission:
    """Body of ``PUT /jobs/{id}``."""

    identity: JobIdentity
    spec: JobSpec
    mlflow_run_id: str | None = None
    fresh: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class AllocationPatch:
    """Body of ``PATCH /jobs/{id}/allocation``."""

    expected: Annotated[int, Field(ge=0, strict=True)]
    allocation: Allocation


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class RunRecord:
    """Body of ``PUT /jobs/{id}/run``."""

    mlflow_run_id: Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class StopRequest:
    """Body of ``POST /jobs/{id}/stop``."""

    reason: StopReason


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class LeaseRequest:
    """Body of ``POST /lease``."""

    holder: Annotated[str, Field(min_length=1, max_length=200)]
    ttl_s: Annotated[float, Field(gt=0, le=MAX_LEASE.total_seconds())]


def make_app(service: LocalService, wake: Callable[[], None]) -> FastAPI:
    """The application; ``wake`` is called after each change, so that drivers act at once."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.middleware("http")
    async def wake_after(request: Request, answer: Callable[[Request], Awaitable[Any]]) -> Any:
        response = await answer(request)
        if request.method != "GET":
            wake()
        return response

    @app.middleware("http")
    async def refuse_what_came_too_late(request: Request, answer: Callable[[Request], Awaitable[Any]]) -> Any:
        if _is_given_up(request.headers.get(GIVEN_UP_HEADER, "")):
            logger.warning("%s %s: came too late and is left", request.method, request.url.path)
            return JSONResponse({"error": "this request came too late; ask again"}, status_code=503)
        return await answer(request)

    async def explain(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": str(error)}, status_code=_STATUS.get(type(error), 500))

    async def unwritten(_: Request, error: Exception) -> JSONResponse:
        why = f"its files cannot be written ({error}); see to the disk of the state folder"
        logger.error("%s", why)
        return JSONResponse({"error": why}, status_code=503)

    for kind in (PolluxError, DocumentError):
        app.add_exception_handler(kind, explain)
    app.add_exception_handler(OSError, unwritten)
    _add_cluster_routes(app, service)
    _add_job_routes(app, service)
    return app


def _add_cluster_routes(app: FastAPI, service: LocalService) -> None:
    @app.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({"ok": True, "pid": os.getpid()})

    @app.get("/view")
    async def view(all: bool = False) -> JSONResponse:  # noqa: A002 - the query parameter's name
        return _document(service.view(time.time(), every=all))

    @app.get("/held")
    async def held() -> JSONResponse:
        return JSONResponse(service.held())

    @app.post("/lease")
    async def take_lease(request: Request) -> JSONResponse:
        body = await _read(request, LeaseRequest)
        service.take_lease(body.holder, body.ttl_s, time.time())
        return JSONResponse({})

    @app.delete("/lease")
    async def drop_lease(holder: str) -> JSONResponse:
        service.drop_lease(holder)
        return JSONResponse({})

    @app.post("/decisions/next")
    async def next_decision(above: int = 0) -> JSONResponse:
        return JSONResponse({"decision": service.next_decision(above)})


def _add_job_routes(app: FastAPI, service: LocalService) -> None:
    @app.get("/jobs/{job_id}")
    async def job(job_id: str) -> JSONResponse:
        return _document(service.job(job_id, time.time()))

    @app.put("/jobs/{job_id}")
    async def submit(job_id: str, request: Request) -> JSONResponse:
        body = await _read(request, Submission)
        submitted = service.submit(
            job_id,
            identity=body.identity,
            spec=body.spec,
            run_id=body.mlflow_run_id,
            fresh=body.fresh,
            now_unix_s=time.time(),
        )
        return _document(submitted)

    @app.patch("/jobs/{job_id}/allocation")
    async def patch_allocation(job_id: str, request: Request) -> JSONResponse:
        body = await _read(request, AllocationPatch)
        service.patch_allocation(job_id, expected=body.expected, allocation=body.allocation)
        return JSONResponse({})

    @app.put("/jobs/{job_id}/run")
    async def set_run(job_id: str, request: Request) -> JSONResponse:
        body = await _read(request, RunRecord)
        service.set_run(job_id, body.mlflow_run_id)
        return JSONResponse({})

    @app.post("/jobs/{job_id}/stop")
    async def stop(job_id: str, request: Request) -> JSONResponse:
        body = await _read(request, StopRequest)
        return _document(service.stop(job_id, body.reason, time.time()))

    @app.get("/jobs/{job_id}/logs")
    async def logs(job_id: str, cursor: str = "") -> JSONResponse:
        return _document(service.logs(job_id, cursor))


def _is_given_up(until_unix_s: str) -> bool:
    try:
        return time.time() > float(until_unix_s)
    except ValueError:
        return False


def _document(document: object) -> JSONResponse:
    return JSONResponse(to_plain(document))


async def _read(request: Request, kind: type[T]) -> T:
    """The request's body; raises DocumentError, also for one that is far too large."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > _MAX_BODY_BYTES:
            raise DocumentError(
                f"{kind.__name__}: more than {_MAX_BODY_BYTES} bytes; send a smaller document"
            )
    return decode(kind, bytes(data))
