"""The routes of the gateway, and what holds for every request: whose it is, how many, how it is counted."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import nullcontext
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from inferbus.schemas.errors import InferbusError, InternalError, InvalidRequest, ModelNotFound
from inferbus.schemas.fleet import WorkerInfo
from inferbus.schemas.subjects import Kind
from inferbus.workers.client import Client
from inferbus.workers.client.models import unserved
from inferbus.workers.client.operator import Operator
from inferbus.workers.config import GatewaySettings
from inferbus.workers.gateway import batches, jobs
from inferbus.workers.gateway.answers import chunks, live_answer, live_chunks, on_its_model
from inferbus.workers.gateway.batches import Runner
from inferbus.workers.gateway.errors import UnknownPath, error_response, http_error, json_response
from inferbus.workers.gateway.events import AnswerCut, EventStream, unless_left
from inferbus.workers.gateway.files import Files, upload
from inferbus.workers.gateway.keys import Keys
from inferbus.workers.gateway.metrics import Metrics
from inferbus.workers.gateway.page import PAGE, PAGE_HEADERS
from inferbus.workers.gateway.requests import idempotency_key, page, read_json, read_request, wait_of
from inferbus.workers.observe import defects

log = structlog.get_logger()

Handler = Callable[[Request, Client], Awaitable[ASGIApp]]

REQUEST_ID: Final = "x-request-id"
"""Header of every answer from the bus: the job's id, for logs on both sides."""

COMPUTED_PATHS: Final[dict[str, Kind]] = {
    "/v1/embeddings": "embeddings",
    "/v1/tokenize": "tokenize",
    "/v1/detokenize": "detokenize",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}
"""SGLang's server has its tokenizer at both places."""

_ANY_METHOD: Final = ["GET", "POST", "DELETE"]

_HERE: Final = frozenset({"127.0.0.1", "localhost", "::1"})


class Gateway:
    """OpenAI's API on one connection to NATS.

    Args:
        client: Connected; its connection is used for every owner.
        settings: What it bounds.
        keys: Whom it admits.

    Attributes:
        app: The ASGI application.
        metrics: What it counts.
        runner: Runs batches.
        draining: Whether it is about to end, so that nobody should send it anything new.
    """

    def __init__(self, client: Client, settings: GatewaySettings, keys: Keys) -> None:
        self.metrics = Metrics()
        self.draining = False
        self._client = client
        self._settings = settings
        self._keys = keys
        self._owners: dict[str, Client] = {client.owner: client}
        self.runner = Runner(lambda: keys.owners, self._of)
        self.app = Starlette(
            routes=[
                self._route("POST", "/v1/chat/completions", partial(self._ask, "chat")),
                self._route("POST", "/v1/completions", partial(self._ask, "completions")),
                *(
                    self._route("POST", path, partial(self._ask, kind))
                    for path, kind in COMPUTED_PATHS.items()
                ),
                self._route("GET", "/v1/models", self._models),
                self._route("GET", "/v1/models/{model:path}", self._model),
                self._route("GET", "/v1/jobs/{id}/stream", self._stream_job),
                self._route("GET", "/v1/jobs/{id}", self._job),
                self._route("DELETE", "/v1/jobs/{id}", self._cancel_job, limited=False),
                self._route("POST", "/v1/files", self._upload),
                self._route("GET", "/v1/files", self._files),
                self._route("GET", "/v1/files/{id}", self._file),
                self._route("DELETE", "/v1/files/{id}", self._remove_file, limited=False),
                self._route("GET", "/v1/files/{id}/content", self._content),
                self._route("POST", "/v1/batches", self._create_batch),
                self._route("GET", "/v1/batches", self._batches),
                self._route("GET", "/v1/batches/{id}", self._batch),
                self._route("POST", "/v1/batches/{id}/cancel", self._cancel_batch, limited=False),
                self._route("GET", "/status", self._status, limited=False),
                self._route("GET", "/metrics", self._figures, limited=False),
                Route("/v1/responses", _no_responses, methods=_ANY_METHOD),
                Route("/v1/responses/{rest:path}", _no_responses, methods=_ANY_METHOD),
                Route("/livez", _livez),
                Route("/readyz", self._readyz),
                Route("/", _page),
            ],
            exception_handlers={HTTPException: _http_error},
        )

    async def _ask(self, kind: Kind, request: Request, client: Client) -> ASGIApp:
        asked = await read_request(request, kind, limit=self._settings.max_body)
        asked = await on_its_model(client, asked)
        name = idempotency_key(request)
        if asked.background:
            job = await jobs.submit(client, asked, name)
            return json_response(
                jobs.job_object(job, None), status=202, headers={"location": jobs.location(job)}
            )
        if name is not None:
            job = await jobs.submit(client, asked, name)
            if asked.streamed:
                again = chunks(partial(client.stream, job))
                return self._events(again, job.id, waits=True)
            return await self._whole(request, job.id, jobs.answer(client, job))
        job_id = secrets.token_hex(16)
        if asked.streamed:
            return self._events(live_chunks(client, asked, job_id), job_id)
        return await self._whole(request, job_id, live_answer(client, asked, job_id))

    def _events(self, chunks: AsyncGenerator[dict[str, Any]], job: str, *, waits: bool = False) -> ASGIApp:
        return EventStream(
            chunks,
            headers={REQUEST_ID: job},
            keep_alive=self._settings.keep_alive,
            waits=waits,
        )

    async def _whole(self, request: Request, job: str, work: Coroutine[Any, Any, Any]) -> ASGIApp:
        body = await unless_left(request.receive, work)
        return json_response(body, headers={REQUEST_ID: job})

    async def _job(self, request: Request, client: Client) -> ASGIApp:
        job = await jobs.find(client, request.path_params["id"])
        wait = wait_of(request)
        ended = await unless_left(request.receive, jobs.result(client, job, wait))
        return json_response(jobs.job_object(job, ended))

    async def _stream_job(self, request: Request, client: Client) -> ASGIApp:
        job = await jobs.find(client, request.path_params["id"])
        return self._events(chunks(partial(client.stream, job)), job.id, waits=True)

    async def _cancel_job(self, request: Request, client: Client) -> ASGIApp:
        job = await jobs.find(client, request.path_params["id"])
        ended = await jobs.result(client, job, 0)
        if ended is None:
            await client.cancel(job)
        return json_response(jobs.job_object(job, ended, status="cancelling"))

    async def _upload(self, request: Request, client: Client) -> ASGIApp:
        async with upload(request, self._settings.max_file) as file:
            return json_response((await Files(client).store(file)).openai())

    async def _files(self, request: Request, client: Client) -> ASGIApp:
        purpose = request.query_params.get("purpose")
        found = [each.openai() for each in await Files(client).all() if purpose in (None, each.purpose)]
        return json_response(page(request, found, limit=10_000))

    async def _file(self, request: Request, client: Client) -> ASGIApp:
        return json_response((await Files(client).get(request.path_params["id"])).openai())

    async def _remove_file(self, request: Request, client: Client) -> ASGIApp:
        name = request.path_params["id"]
        await Files(client).remove(name)
        return json_response({"id": name, "object": "file", "deleted": True})

    async def _content(self, request: Request, client: Client) -> ASGIApp:
        files = Files(client)
        return files.content(await files.get(request.path_params["id"]))

    async def _create_batch(self, request: Request, client: Client) -> ASGIApp:
        kept = await batches.create(client, await read_json(request, self._settings.max_body))
        shown = kept.record.openai()
        self.runner.start(kept)
        return json_response(shown)

    async def _batches(self, request: Request, client: Client) -> ASGIApp:
        return json_response(page(request, await batches.listed(client), limit=20))

    async def _batch(self, request: Request, client: Client) -> ASGIApp:
        return json_response((await batches.find(client, request.path_params["id"])).record.openai())

    async def _cancel_batch(self, request: Request, client: Client) -> ASGIApp:
        return json_response(await batches.cancel(client, request.path_params["id"]))

    async def _models(self, request: Request, client: Client) -> ASGIApp:
        return json_response({"object": "list", "data": _models(await client.workers())})

    async def _model(self, request: Request, client: Client) -> ASGIApp:
        name = request.path_params["model"]
        models = _models(await client.workers())
        found = next((each for each in models if each["id"] == name), None)
        if found is None:
            raise ModelNotFound(unserved(name, [each["id"] for each in models]), param="model")
        return json_response(found)

    async def _status(self, request: Request, client: Client) -> ASGIApp:
        """What the page shows: workers and queues."""
        workers = [
            {
                "worker": each.worker,
                "model": each.model,
                "role": each.role,
                "state": each.state,
                "busy": each.load.busy,
                "slots": each.load.slots,
            }
            for each in await client.workers()
        ]
        return json_response({"workers": workers, "queues": await _queues(client)})

    async def _figures(self, request: Request, client: Client) -> ASGIApp:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _readyz(self, request: Request) -> Response:
        ready = self._client.bus.connected and self._keys.known and not self.draining
        return json_response({"ready": ready, "draining": self.draining}, status=200 if ready else 503)

    def _route(self, method: str, path: str, handler: Handler, *, limited: bool = True) -> Route:
        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            with self.metrics.request(path, send) as counting:
                await self._serve(handler, Request(scope, receive), counting, limited=limited)

        return Route(path, _Endpoint(serve), methods=[method])

    async def _serve(self, handler: Handler, request: Request, send: Send, *, limited: bool) -> None:
        """Answers one request of a caller that is admitted; every error is an answer."""
        scope, receive = request.scope, request.receive
        try:
            self._check_host(request)
            key = self._keys.find(request.headers.get("authorization"))
            with key.request() if limited else nullcontext():
                response = await handler(request, self._of(key.owner))
                await response(scope, receive, send)
        except AnswerCut as cut:
            self.metrics.cut(cut.why)
            log.info("gateway.answer_cut", why=cut.why, path=scope["path"])
        except InferbusError as error:
            await error_response(error)(scope, receive, send)
        except Exception:  # a supervision point: the caller gets an answer, the log the reason
            defects.exception("gateway.defect", path=scope["path"])
            await error_response(InternalError("a defect of the gateway"))(scope, receive, send)

    def _of(self, owner: str) -> Client:
        """The client of an owner, on the connection of all."""
        if owner not in self._owners:
            self._owners[owner] = Client(self._client.bus, owner=owner)
        return self._owners[owner]

    def _check_host(self, request: Request) -> None:
        """Without keys, a page of another site must not get here: by a name of its own, or with a form."""
        if self._keys.required:
            return
        if request.url.hostname not in _HERE:
            raise InvalidRequest("without API keys, only requests to this host are answered", param="Host")
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != request.url.netloc:
            raise InvalidRequest("without API keys, pages of other sites are not answered", param="Origin")


class _Endpoint:
    """An ASGI application, which a route takes for one only if it is no function."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _models(workers: list[WorkerInfo]) -> list[dict[str, Any]]:
    """OpenAI's model objects, of the models that a ready worker answers for."""
    ready = [each for each in workers if each.state == "ready" and each.kinds]
    return [
        {
            "id": model,
            "object": "model",
            "created": int(min(each.started for each in ready if each.model == model)),
            "owned_by": "inferbus",
            "max_model_len": min(
                (each.capacity.context_length for each in ready if each.model == model and each.capacity),
                default=None,
            ),
        }
        for model in sorted({each.model for each in ready})
    ]


async def _queues(client: Client) -> list[dict[str, Any]] | None:
    """The queues of jobs; None where the gateway's user may not see them."""
    try:
        queues = await Operator(client.bus).queues()
    except InferbusError:
        return None
    return [
        {"model": each.model, "class": each.job_class, "waiting": each.pending, "running": each.ack_pending}
        for each in queues
    ]


async def _livez(request: Request) -> Response:
    return json_response({"alive": True})


async def _no_responses(request: Request) -> Response:
    """See docs/gateway.md: SGLang's layer keeps its responses in one process, and we keep nothing there."""
    return error_response(UnknownPath("the Responses API is not served; use /v1/chat/completions"))


async def _page(request: Request) -> Response:
    return HTMLResponse(PAGE, headers=PAGE_HEADERS)


async def _http_error(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    return http_error(problem)
