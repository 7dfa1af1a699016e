"""The URLs of the server, and who may use them."""

import argparse
import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, closing, suppress
from datetime import UTC, datetime
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_paged.arguments import missing
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.service import EngineService
from mlx_paged.protocol import cache_marks, json_text, messages, openapi, request_body, responses
from mlx_paged.protocol.fields import AS_MANY_AS_FIT, Fields
from mlx_paged.protocol.request_body import Refusal, refusing
from mlx_paged.request import BACKGROUND
from mlx_paged.server import bodies, cache_view, heap, keys, workers
from mlx_paged.server.answers import Answer
from mlx_paged.server.forms import MessageAnswer, ResponseAnswer, count_tokens
from mlx_paged.server.held_bytes import PART_BYTES, HeldBytes, Share, send_in_pieces, share_of
from mlx_paged.server.json_answer import JsonAnswer
from mlx_paged.server.metrics import CONTENT_TYPE, ServerMetrics
from mlx_paged.server.models import Models
from mlx_paged.server.request_log import Observer, logged, record_of
from mlx_paged.server.tickets import Tickets
from mlx_paged.server.token_endpoints import TOKEN_ENDPOINTS, as_text
from mlx_paged.server.workers import Probes, Workers
from mlx_paged.vision.images import has_image

if TYPE_CHECKING:  # it needs the extra "otel"
    from mlx_paged.server.telemetry import Telemetry

OPEN = {"/", "/health", "/ready", "/openapi.json"}
"""Paths that need no key: they tell nothing about requests."""

LONG_BODY = 1 << 16  # bytes; longer ones are read by few threads
NUM_READERS = 4  # these threads
NUM_COMPILES = 24  # threads that wait for a compiler: more than may wait, so that others are told
NUM_DESCRIBERS = 2  # threads that describe log-probabilities
NUM_THREADS = 32
LONGEST_PATH = 200  # characters of a path that an error tells
NUM_DECODERS = 2  # threads that decode images: so many requests hold decoded ones at a time
LOOPBACK = ("localhost", "127.0.0.1", "::1")
COUNT_TOKENS = messages.PATHS[1]
LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

TOLD = ("x-request-id", "request-id", "x-ignored-fields", "x-max-tokens", "retry-after")
"""Headers of answers that clients read, also those in web pages of other origins."""

HOST = re.compile(r"\[([^\[\]]*)\](:\d*)?|([^:]*)(:\d*)?")
"""A `Host` header: an IPv6 address in brackets, or a name or an IPv4 address; and a port."""

LENGTHS = "content-length", "transfer-encoding"

APIS: dict[str, tuple[type[Answer], Callable[[Fields], Fields] | None]] = {
    "/v1/completions": (Answer, None),
    **dict.fromkeys(("/v1/chat/completions", "/chat/completions"), (Answer, dict)),
    messages.PATHS[0]: (MessageAnswer, partial(messages.as_chat, counts=False)),
    COUNT_TOKENS: (MessageAnswer, partial(messages.as_chat, counts=True)),
    responses.PATH: (ResponseAnswer, responses.as_chat),
    **dict.fromkeys(("/tokenize", "/detokenize"), (Answer, as_text)),
    **dict.fromkeys(("/apply-template", "/v1/estimate"), (Answer, dict)),
}
"""By path: how an answer is written, and what makes a body for chat completions of a request."""

BODIES = {
    "/v1/completions": "completions",
    **dict.fromkeys(("/v1/chat/completions", "/chat/completions"), "chat"),
    messages.PATHS[0]: "messages",
    responses.PATH: "responses",
}
"""By path: the API whose fields its bodies have, in the OpenAPI document."""

OPERATIONS = {"completions": "text_completion"}
"""By API: what a trace calls the operation, if it is no chat."""

FOR_TEXTS = ("/tokenize", "/detokenize", "/v1/estimate")
"""Paths whose bodies may be for completions, too: bodies without messages are."""


def make_app(args: argparse.Namespace, models: Models) -> Starlette:
    """The ASGI application that serves `models`."""
    changing = (LOAD_ADAPTER, UNLOAD_ADAPTER) if args.adapters_dir is not None else ()
    gets = {
        "/v1/models": _list_models,
        **dict.fromkeys(("/health", "/ready"), _health),
        "/metrics": _metrics,
        "/v1/cache": cache_view.cache,
        "/status": _status,
        "/openapi.json": _openapi,
        "/": _page,
    }
    app = Starlette(
        routes=[
            *(Route(path, _complete, methods=["POST"]) for path in APIS),
            *(Route(path, _change_adapters, methods=["POST"]) for path in changing),
            *(Route(path, endpoint) for path, endpoint in gets.items()),
            Route("/v1/models/{name:path}", _list_models),
        ],
        exception_handlers={kind: _refuse for kind in (Refusal, HTTPException, Exception)},
        lifespan=_lifespan,
    )
    app.router.redirect_slashes = False
    app.state.args, app.state.models = args, models
    app.state.metrics = ServerMetrics(models)
    app.state.created = int(time.time())
    others = [path for path in (*APIS, *changing) if path not in BODIES]
    app.state.openapi = JsonAnswer(
        openapi.document(BODIES, others, {path: path in OPEN for path in gets}, bool(args.api_keys))
    )
    app.state.forced = False  # to stop without an end of open answers
    app.state.open_tickets = set[Tickets]()
    app.state.seen = set[str]()  # unknown fields that the log has named
    app.state.telemetry = _telemetry(args)
    observers = [] if app.state.telemetry is None else [app.state.telemetry]
    guard = Middleware(_guarded, args=args, metrics=app.state.metrics, observers=observers)
    app.user_middleware.append(guard)
    if args.allowed_origins:
        every: dict[str, Any] = {"allow_methods": ["*"], "allow_headers": ["*"]}
        every |= {"allow_origins": args.allowed_origins, "expose_headers": TOLD}
        app.add_middleware(CORSMiddleware, **every)
    return app


def _telemetry(args: argparse.Namespace) -> "Telemetry | None":
    """The observer that sends traces of requests, if there is to be one. Raises ValueError without
    the extra "otel"."""
    if args.otlp_traces_endpoint is None:
        return None
    try:
        from mlx_paged.server.telemetry import Telemetry
    except ModuleNotFoundError as error:
        raise ValueError(missing(f"opentelemetry ({error})", "otel")) from error
    operations = {path: OPERATIONS.get(body, "chat") for path, body in BODIES.items()}
    return Telemetry.to(args.otlp_traces_endpoint, operations)


def _refusal(error: Refusal, request: Request) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.code == "overloaded":
        headers["Retry-After"] = str(error.retry_after_s)
    if _has_two_lengths(request) or error.status == 408:
        headers["Connection"] = "close"
    record_of(request.scope).reason = str(error)
    content = messages.error_json(error) if _is_anthropics(request) else error.as_json()
    return JsonAnswer(content, error.status, headers)


def _has_two_lengths(request: Request) -> bool:
    """Whether a request gives its length twice. A proxy may see another end of such a request than
    this server (RFC 9112, section 6.1)."""
    return all(name in request.headers for name in LENGTHS)


def _is_anthropics(request: Request) -> bool:
    is_messages = request.scope["path"].startswith(messages.PATHS[0])
    return is_messages or "anthropic-version" in request.headers


async def _refuse(request: Request, error: Exception) -> Response:
    """The answer to an error that an endpoint or Starlette's router raises. Starlette raises all
    other errors again, so that the log has them."""
    if isinstance(error, Refusal):
        return _refusal(error, request)
    if not isinstance(error, HTTPException):
        return _refusal(Refusal(500, "the server failed"), request)
    response = _refusal(
        Refusal(error.status_code, f"{error.detail}: {request.scope['path'][:LONGEST_PATH]}"),
        request,
    )
    response.headers.update(error.headers or {})
    return response


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    state, requests = app.state, Workers(NUM_THREADS)
    loop.set_default_executor(requests)
    state.long_bodies, state.compiles = Workers(NUM_READERS), Workers(NUM_COMPILES)
    state.images, state.describers = Workers(NUM_DECODERS), Workers(NUM_DESCRIBERS)
    state.workers = {"requests": requests, "long bodies": state.long_bodies}
    state.workers |= {"grammars": state.compiles, "images": state.images}
    state.workers |= {"log-probabilities": state.describers}
    state.probes = Probes(state.workers, partial(_engine_probes, state.models))
    kept_on = state.models.unload_idle, state.probes.run, heap.keep_trimmed
    tasks = [loop.create_task(run()) for run in kept_on]
    yield
    for task in tasks:
        task.cancel()
    if state.telemetry is not None:
        await asyncio.to_thread(state.telemetry.close)
    state.long_bodies.shutdown(wait=False)
    for executor in (state.compiles, state.images, state.describers):
        executor.shutdown(wait=False, cancel_futures=True)


def _engine_probes(models: Models) -> dict[str, Callable[[], Awaitable[object]]]:
    """By model, what returns when its engine has answered."""

    def answer(engine: Engine) -> None:
        pass

    return {
        model.name: partial(asyncio.to_thread, model.service.call, answer)
        for model in list(models.loaded.values())
    }


def _guarded(
    inner: ASGIApp,
    args: argparse.Namespace,
    metrics: ServerMetrics,
    observers: Sequence[Observer] = (),
) -> ASGIApp:
    """Middleware that refuses requests of others, counts all answers, and tells the observers of
    each request that has ended."""
    root, held = args.root_path.rstrip("/"), HeldBytes(args.max_held_bytes)
    metrics.holders.append(held.holdings)
    is_local = args.host in LOOPBACK and args.uds is None
    hosts = args.allowed_hosts or (LOOPBACK if is_local else ["*"])
    names = {name.lower().strip("[]") for name in (*hosts, args.host)} - {""}

    def check(request: Request) -> None:
        if "*" not in names:
            _check_host(request, names)
        if args.all_keys:
            _check_key(request, args)
        if _has_two_lengths(request):
            raise Refusal(400, f"the request has {' and '.join(LENGTHS)}: expected one of them")
        if request.method == "POST":
            _check_kind(request)

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                metrics.responses.labels(str(message["status"])).inc()
            await send_in_pieces(message, send)

        answer = inner
        if scope["type"] != "http":
            await answer(scope, receive, send)
            return
        with closing(Share(held)) as share:
            scope["state"]["share"] = share
            if scope["path"].startswith(f"{root}/"):
                scope = {**scope, "path": scope["path"].removeprefix(root)}
                record_of(scope).path = scope["path"]
            try:
                check(Request(scope))
            except Refusal as error:
                answer = _refusal(error, Request(scope))
            await answer(scope, receive, counted)

    return logged(guarded, observers)


def _check_host(request: Request, names: Collection[str]) -> None:
    """Refuse a request whose `Host` is none of the names. HTTP/1.0 needs no `Host`."""
    host = request.headers.get("host")
    if host is None:
        return
    found = HOST.fullmatch(host.lower())
    if not found or (found[1] or found[3]) not in names:
        raise Refusal(421, f"Host is {host!r:.80}: expected one of --allowed-hosts")


def _check_key(request: Request, args: argparse.Namespace) -> None:
    """Refuse a request without a key, unless its path needs none or no client has a key. The log
    shows the key's name."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    token = token.strip() if scheme.lower() == "bearer" else ""
    name = keys.name_of(args.all_keys, (token, request.headers.get("x-api-key", token)))
    if name is None and args.api_keys and request.scope["path"] not in OPEN:
        raise Refusal(401, "no valid API key was given", "invalid_api_key")
    if name is not None:
        request.scope["state"]["key"] = name
        request.scope["state"]["is_admin"] = args.admin_key is not None and name == keys.ADMIN
    if name:
        record_of(request.scope).parts.append(f"key {name}")


def _share(request: Request, fields: Fields) -> tuple[str, ...]:
    """Who takes turns with others under --policy fair: the key's clients, then salts, then users,
    as far as the request has them."""
    of_key = request.scope["state"].get("key")
    names = [] if of_key is None else [f"key {of_key}"]
    parts = {"salt": fields["cache_salt"], "user": fields["user"]}
    return *names, *(f"{kind} {name}" for kind, name in parts.items() if name)


def _check_kind(request: Request) -> None:
    """Refuse a body that is not JSON as it is."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        expected = "application/json (curl -H 'Content-Type: application/json')"
        raise Refusal(415, f"Content-Type is {kind!r:.80}: expected {expected}")
    coding = ", ".join(request.headers.getlist("content-encoding")).strip().lower()
    if coding not in ("", "identity"):
        raise Refusal(415, f"Content-Encoding is {coding!r:.80}: expected a body without one")


def _fields(raw: bytes, path: str, max_samples: int) -> tuple[Fields, list[str]]:
    """The fields of a body as :func:`request_body.read` gives them, the body itself as `body`, and
    the names of fields that are ignored."""
    body, (_, as_chat) = json_text.parse(raw), APIS[path]
    chat = as_chat(body) if as_chat else body
    is_chat = as_chat is not None and ("messages" in chat or path not in FOR_TEXTS)
    fields, unknown = request_body.read(chat, is_chat, max_samples)
    marks = cache_marks.breakpoints(body) if path in messages.PATHS else []
    return fields | {"body": body, "breakpoints": marks}, unknown


async def _complete(request: Request) -> Answer | Response:
    arrived, state, url = time.monotonic(), request.app.state, request.scope["path"]
    args, models = state.args, state.models
    raw = await bodies.read(request, args.max_request_bytes)
    threads = state.long_bodies if len(raw) > LONG_BODY else None
    run, share = asyncio.get_running_loop().run_in_executor, share_of(request.scope)
    marks = await run(threads, json_text.num_marks, raw) if threads else json_text.num_marks(raw)
    share.grow(marks * PART_BYTES, "the body", 413)
    with refusing(APIS[url][0].names):
        fields, unknown = await run(threads, _fields, raw, url, args.max_samples)
        if fields["priority"] not in (0, BACKGROUND) and args.policy != "priority":
            expected = 'expected 0 or "background", for the server runs without --policy priority'
            raise ValueError(f"priority: {expected}")
        fields["share"] = _share(request, fields)
        if fields["max_tokens"] == AS_MANY_AS_FIT and args.strict_fields:
            name = "max_completion_tokens" if fields["max_completion_tokens"] else "max_tokens"
            raise ValueError(f"{name}: expected an integer >= 1, got {AS_MANY_AS_FIT}")
        _check_count(fields, args)
    if any(has_image(message.get("content")) for message in fields.get("messages", ())):
        threads = state.images
    name, adapter = models.adapters.asked(fields, models.names.served)
    path = await asyncio.to_thread(models.names.path, name)
    if adapter is not None and path != models.names.default:
        expected = f"expected the model {models.names.served[0]}"
        message = f"adapter {adapter!r:.200} is not served with {name!r:.200}: {expected}"
        raise Refusal(404, message, "model_not_found", "model")
    fields["adapter"] = adapter
    answer = APIS[url][0](
        state=state, path=path, fields=fields, arrived=arrived, threads=threads, share=share
    )
    answer.ignore(unknown)
    if url == COUNT_TOKENS:
        return JsonAnswer({"input_tokens": await count_tokens(answer)}, headers=answer.headers)
    if url in TOKEN_ENDPOINTS:
        found = JsonAnswer(await TOKEN_ENDPOINTS[url](answer), headers=answer.headers)
        share.grow(len(found.body), "the answer")
        return found
    return answer


def _check_count(fields: Fields, args: argparse.Namespace) -> None:
    """ValueError for more completions than the server may ever take for one request."""
    samples, places = fields["best_of"], args.decode_concurrency + args.max_queue
    if samples > places:
        name = "n" if fields["n"] == samples else "best_of"
        limit = "--decode-concurrency and --max-queue"
        raise ValueError(f"{name}: expected at most {places}, the places of {limit}, got {samples}")
    count = samples * len(fields.get("prompt", [0]))
    if count > args.max_prompts:
        limit = f"at most --max-prompts {args.max_prompts} prompts, counted for each sample"
        raise ValueError(f"prompt: expected {limit}, got {count}")


async def _list_models(request: Request) -> Response:
    state, name = request.app.state, request.path_params.get("name")
    is_anthropics = _is_anthropics(request)

    def entry(name: str, limit: int | None) -> dict[str, Any]:
        own: dict[str, Any] = {"id": name, "max_model_len": limit}
        if is_anthropics:
            since = datetime.fromtimestamp(state.created, UTC).isoformat()
            return own | {"type": "model", "display_name": name, "created_at": since}
        return own | {"object": "model", "created": state.created, "owned_by": "mlx_paged"}

    parent = state.models.names.served[0]

    def adapters() -> dict[str, dict[str, Any]]:
        limit = state.models.limit_of(parent)
        own = state.models.adapters.listed()
        return {a.name: entry(a.name, limit) | {"root": a.root, "parent": parent} for a in own}

    found = await asyncio.to_thread(adapters) if state.args.adapters else {}
    if name is not None:
        if name in found and name not in state.models.names.served:
            return JsonAnswer(found[name])
        return JsonAnswer(entry(name, await asyncio.to_thread(state.models.limit_of, name)))
    listed = await asyncio.to_thread(state.models.listed)
    entries = found | {each: entry(each, limit) for each, limit in listed.items()}
    names = [*listed, *(each for each in found if each not in listed)]
    ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    others = ends if is_anthropics else {"object": "list"}
    return JsonAnswer({"data": [entries[each] for each in names]} | others)


async def _change_adapters(request: Request) -> Response:
    """Load an adapter, or take its name away, as vLLM does. If there is an admin's key, no other
    key may."""
    state, loads = request.app.state, request.scope["path"] == LOAD_ADAPTER
    models: Models = state.models
    if state.args.admin_key is not None and not request.scope["state"].get("is_admin"):
        raise Refusal(403, "only the key of --admin-key loads and unloads adapters", "forbidden")
    raw = await bodies.read(request, state.args.max_request_bytes)
    with refusing():
        body = json_text.parse(raw)

    def change(service: EngineService) -> str:
        with refusing():
            if loads:
                return models.adapters.load_named(service, body, models.names.served)
            return models.adapters.unload_named(service, body)

    async with models.use(models.names.default, 0) as model:
        name = await asyncio.to_thread(change, model.service)
    return JsonAnswer({"name": name, "status": "loaded" if loads else "unloaded"})


async def _health(request: Request) -> Response:
    state = request.app.state
    most = workers.READY_S if request.scope["path"] == "/ready" else workers.HEALTHY_S
    is_healthy = state.models.is_healthy and not state.probes.silent(most)
    status = "ok" if is_healthy else "unavailable"
    return JsonAnswer({"status": status}, 200 if is_healthy else 503)


async def _metrics(request: Request) -> Response:
    text = await asyncio.to_thread(request.app.state.metrics.text)
    return Response(text, media_type=CONTENT_TYPE)


async def _status(request: Request) -> Response:
    metrics = request.app.state.metrics
    with suppress(RuntimeError):  # an engine has stopped
        status = {"uptime_s": time.time() - request.app.state.created}
        status["failed_answers"] = metrics.failed_answers()
        return JsonAnswer(status | await asyncio.to_thread(metrics.engines))
    raise Refusal(503, "the engine has stopped")


async def _openapi(request: Request) -> Response:
    answer: Response = request.app.state.openapi
    return answer


async def _page(request: Request) -> Response:
    return HTMLResponse((files("mlx_paged") / "server" / "status.html").read_text())
