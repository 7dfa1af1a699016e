"""Requests that have harmed a server, by kind: each is made anew, with other values, when asked."""

import inspect
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from mlx_paged.chat.marks import SPARE
from scripts.attack.mutations import DEPTHS, NUMBERS, RAW, TEXTS, dumped, mutated
from scripts.attack.wire import ANSWERED, REFUSED, Request, get, post

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
OPEN = ("/", "/health", "/ready")
CLOSED = ("/metrics", "/status", "/v1/models", "/v1/models/default_model")
WAYS = (
    *("{}", "{}", "/{}", "{}/", "{}?", "{}#", "{};", "/health/..{}", "/./{}", "{}%00", "//x{}"),
    *("http://127.0.0.1{}", "http://127.0.0.1/health{}", "{}?/health", "{}\\health"),
    *("{}%1b[31m", "{}%0d%0a2026 - INFO - forged", "/{}%c2%9b"),
)
"""How the path of a request is written."""
BAD_HOSTS = ("evil.com", "127.0.0.1@evil.com", "a b", ":80", "evil.com/x?", "127.0.0.1/health?", "")
HOSTS = (
    *("127.0.0.1",) * 4,
    *("127.0.0.1/health#", "localhost/?", "[::1]"),
    *BAD_HOSTS,
)
TRICKS = (
    *("A: b", "Authorization: Bearer", "Authorization: Bearer  ", "Authorization: Basic Og=="),
    *("x-api-key:", "x-api-key: none", "Authorization: Bearer none\r\nAuthorization: Bearer x"),
    *("X-Forwarded-For: 127.0.0.1", "X-Original-URL: /health", "X-Rewrite-URL: /ready"),
    *("X-Forwarded-Prefix: /health", "X-HTTP-Method-Override: GET", "Forwarded: host=127.0.0.1"),
)
"""Headers of a request without a key."""
MERSENNE = 2**61 - 1  # integers that are equal modulo this have one hash


@dataclass(frozen=True)
class Target:
    """What requests must know of the server.

    Attributes:
        names: spellings of the served model.
        strangers: models and directories that the operator has not listed.
        num_tokens: of the vocabulary.
    """

    key: str
    names: tuple[str, ...]
    strangers: tuple[str, ...]
    num_tokens: int


Kind = Callable[[random.Random, Target], Request]


def _chat(rng: random.Random, **more: Any) -> dict[str, Any]:
    content = rng.choice(("hello", "def main():\n"))
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4} | more


def _text(**more: Any) -> dict[str, Any]:
    return {"prompt": "def f(x):", "max_tokens": 4} | more


def ids(rng: random.Random, target: Target) -> Request:
    """Token ids outside of the vocabulary."""
    most = 2 * target.num_tokens
    wrong = rng.choice((most, most + 1, 34_000, 5_000_000, 2**31 - 1, 2**31, 2**40 + 5, 10**30, -1))
    wrong = rng.choice((wrong, wrong, rng.randrange(most, 2**33)))
    bodies = (
        _text(stop_token_ids=[wrong], min_tokens=4),
        _text(stop_token_ids=[1, wrong]),
        _text(logit_bias={str(wrong): 1}),
        _text(prompt=[1, wrong]),
        _text(prompt=[[1], [wrong, 2]]),
        _chat(rng, stop_token_ids=[wrong], min_tokens=2),
        _chat(rng, logit_bias={str(wrong): -100}),
    )
    body = rng.choice(bodies)
    path = COMPLETIONS if "prompt" in body else rng.choice((CHAT, MESSAGES, RESPONSES))
    if path == RESPONSES:
        body = _of_responses(body)
    return Request(post(path, body, target.key), REFUSED)


def _of_responses(chat: dict[str, Any]) -> dict[str, Any]:
    own = {"input": chat["messages"], "max_output_tokens": chat["max_tokens"]}
    return own | {k: v for k, v in chat.items() if k not in ("messages", "max_tokens")}


def templates(rng: random.Random, target: Target) -> Request:
    """Names of the renderer's own arguments, among them endless templates."""
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    found = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    names = [name for name in found if name not in ("self", "kwargs", "documents")]
    name = rng.choice(("chat_template", rng.choice(names)))
    given: Any = endless if name == "chat_template" else rng.choice((True, 1, "a", [], {}))
    body = _chat(rng, chat_template_kwargs={name: given})
    path = rng.choice((CHAT, MESSAGES, MESSAGES + "/count_tokens", RESPONSES))
    body = _of_responses(body) if path == RESPONSES else body
    return Request(post(path, body, target.key), REFUSED, patience=20.0)


def marks(rng: random.Random, target: Target) -> Request:
    """Many texts, and characters for private use, of which a rendering needs one."""
    many = [rng.choice(("", "a"))] * rng.choice((1000, 30_000))
    private = "".join(map(chr, SPARE[: rng.choice((500, 5000, len(SPARE)))]))
    body = _chat(rng, chat_template_kwargs={"a": many, "b": private})
    path = rng.choice((CHAT, MESSAGES, MESSAGES + "/count_tokens"))
    return Request(post(path, body, target.key), patience=20.0)


def logprobs(rng: random.Random, target: Target) -> Request:
    """More log-probabilities of a token than 20."""
    many = rng.choice((21, 1000, 10**6, 2**31, 10**30))
    bodies = (_text(logprobs=many), _text(prompt_logprobs=many), _text(echo=True, logprobs=many))
    if rng.random() < 0.5:
        return Request(post(COMPLETIONS, rng.choice(bodies), target.key), REFUSED)
    body = _chat(rng, logprobs=True, top_logprobs=many)
    return Request(post(CHAT, body, target.key), REFUSED)


def prompts(rng: random.Random, target: Target) -> Request:
    """More prompts or samples than a server has places for."""
    number = rng.choice((20_000, 60_000, 500_000))
    item: Any = rng.choice(("a", [1]))
    if rng.random() < 0.3:
        count = rng.choice((17, 10**6, 2**40))
        return Request(post(CHAT, _chat(rng, n=count), target.key), REFUSED)
    return Request(post(COMPLETIONS, _text(prompt=[item] * number), target.key), REFUSED)


def models(rng: random.Random, target: Target) -> Request:
    """The served model in other spellings, and names that nobody has listed."""
    if rng.random() < 0.3:
        body = _text(model=rng.choice(target.names))
        return Request(post(COMPLETIONS, body, target.key), ANSWERED)
    name = rng.choice(target.strangers)
    if rng.random() < 0.2 and name.isascii() and name.isprintable() and " " not in name:
        raw = get(f"/v1/models/{name}", f"Authorization: Bearer {target.key}")
        return Request(raw, REFUSED, is_http=False)
    body = _text(model=name) if rng.random() < 0.7 else _chat(rng, model=name)
    path = COMPLETIONS if "prompt" in body else rng.choice((CHAT, MESSAGES))
    return Request(post(path, body, target.key), REFUSED)


def grammars(rng: random.Random, target: Target) -> Request:
    """Sources of a grammar that take long to compile, or much memory."""
    size = rng.randint(20, 60)
    meet = " & ".join(f"/(.|\\n)*[a-c]{{{i}}}(.|\\n)*x{{{i}}}(.|\\n)*/" for i in range(1, size))
    nested = "(" * size + "a" + ")*?" * size
    sources: tuple[dict[str, Any], ...] = (
        {"guided_grammar": f"start: A\nA: {meet}"},
        {"guided_grammar": "start: " + " | ".join(f"r{i}" for i in range(5000))},
        {"guided_regex": f"(a|b)*a(a|b){{{10 * size}}}"},
        {"guided_regex": f"(x{{1,{size * 50}}}){{1,{size * 50}}}"},
        {"guided_regex": nested},
        {"guided_json": {"enum": [f"{i}:{'y' * (i % 40)}" for i in range(1500)]}},
        {"guided_json": {"type": "array", "maxItems": 10**9, "items": {"type": "string"}}},
        {
            "guided_json": {
                "allOf": [{"type": "string", "pattern": f"a{{{i},}}"} for i in range(size)]
            }
        },
        {"guided_json": {"type": "string", "pattern": f"^(([a-z])+.)+[A-Z]([a-z])+{{{size}}}$"}},
        {"guided_json": {"$ref": "#"}},
        {"guided_choice": [f"{'z' * 20}{i}" for i in range(2000)]},
    )
    body = _chat(rng, max_tokens=2) | rng.choice(sources)
    return Request(post(CHAT, body, target.key), patience=30.0)


def hashes(rng: random.Random, target: Target) -> Request:
    """Keys that collide where they become integers, and more names than an object can need."""
    first, number = rng.randrange(1, 10**6), rng.choice((20_000, 40_000))
    colliding = {str(i * MERSENNE + first): 1 for i in range(number)}
    many = {f"name{i}": 1 for i in range(number)}
    bodies = (_text(logit_bias=colliding), _text(**many), _text(logit_bias=many))
    body = rng.choice((*bodies, _text(metadata=many), _chat(rng, chat_template_kwargs=colliding)))
    is_ignored = "metadata" in body or "chat_template_kwargs" in body
    wanted = () if is_ignored else REFUSED
    path = COMPLETIONS if "prompt" in body else CHAT
    return Request(post(path, body, target.key), wanted, patience=20.0)


def values(rng: random.Random, target: Target) -> Request:
    """Numbers that JSON has not, halves of characters and depth, in places that are echoed."""
    depth = rng.choice(DEPTHS)
    bad = rng.choice((*NUMBERS[-6:], "\ud800", "\udfff\ud800", RAW + "[" * depth + "]" * depth))
    bad_name = rng.choice(("\ud800", "\0", "\x1b[2J", "x" * 5000))
    name = rng.choice(("metadata", "text", "tools", "instructions", "model", "user", "truncation"))
    own = {"input": "a", "max_output_tokens": 2, "stream": rng.random() < 0.5}
    bodies: tuple[dict[str, Any], ...] = (
        own | {name: {"a": bad}},
        own | {name: bad},
        own | {"tools": [{"type": "function", "name": bad}], "tool_choice": "none"},
        own | {bad_name: 1},
        own | {"metadata": {bad_name: "a"}},
        own | {"input": [{"role": "user", "content": bad}]},
    )
    if rng.random() < 0.6:
        return Request(post(RESPONSES, dumped(rng.choice(bodies)), target.key))
    body = _chat(rng, **{rng.choice(("user", "stop", bad_name, "tools", "temperature")): bad})
    return Request(post(rng.choice((CHAT, MESSAGES)), dumped(body), target.key))


def keys(rng: random.Random, target: Target) -> Request:
    """Requests without the key, with tricks in the path, in Host and in other headers; and requests
    with the key and a wrong Host."""
    path = rng.choice((*CLOSED, COMPLETIONS, CHAT, MESSAGES, RESPONSES))
    encoded = "".join(f"%{ord(c):02x}" if rng.random() < 0.2 and c != "/" else c for c in path)
    path = rng.choice(WAYS).format(rng.choice((path, path, encoded)))
    if rng.random() < 0.2:
        right = f"Authorization: Bearer {target.key}"
        raw = get("/v1/models", right, host=rng.choice(BAD_HOSTS))
        return Request(raw, REFUSED, is_http=False, patience=20.0)
    host = rng.choice(HOSTS)
    method = rng.choice(("GET", "GET", "HEAD", "POST", "OPTIONS", "get", "CONNECT"))
    raw = get(path, rng.choice(TRICKS), host=host, method=method)
    return Request(raw, REFUSED, is_http=False, patience=20.0)


def codings(rng: random.Random, target: Target) -> Request:
    """Bodies that are compressed, or said to be something else than JSON."""
    coding = rng.choice(("gzip", "deflate", "br", "zstd", "identity, gzip", "GZIP"))
    if rng.random() < 0.6:
        content = b"\x1f\x8b\x08" + bytes(rng.randrange(256) for _ in range(200))
        raw = post(COMPLETIONS, content, target.key, f"Content-Encoding: {coding}")
    else:
        kind = rng.choice(("text/plain", "multipart/form-data; boundary=x", "", "application/xml"))
        raw = post(COMPLETIONS, _text(), target.key)
        raw = raw.replace(b"application/json", kind.encode())
    return Request(raw, REFUSED)


def headers(rng: random.Random, target: Target) -> Request:
    """Messages that are no HTTP, or of which two servers may see different ends."""
    good = post(COMPLETIONS, _text(), target.key)
    head, _, body = good.partition(b"\r\n\r\n")
    more = (
        b"Transfer-Encoding: chunked",
        b"Content-Length: 5",
        b"Content-Length: -1",
        b"Content-Length: 1" + b"0" * 18,
        b"Content-Length: +4",
        b"X-A: " + b"a" * 70_000,
        b"X-A: \x00",
        b"X-\xff: \xfe",
        b" folded: yes",
        b"x-request-id: a\x1b[31m\tb",
        b"Expect: 100-continue",
        b"Upgrade: h2c",
        b"Host: evil.com",
        b"\r\n".join(b"X-%d: 1" % i for i in range(3000)),
    )
    raws = (
        head + b"\r\n" + rng.choice(more) + b"\r\n\r\n" + body,
        head.replace(b"HTTP/1.1", rng.choice((b"HTTP/1.0", b"HTTP/9.9", b"HTTP", b"")))
        + b"\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00" + bytes(range(256)),
        bytes(rng.randrange(256) for _ in range(500)) + b"\r\n\r\n",
        good.replace(b"POST ", b"POST  "),
        b"GET " + b"/a" * 40_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        _chunked(rng.choice((target.key, "none")), rng.choice(BAD_CHUNKS)),
    )
    return Request(rng.choice(raws), is_http=False, patience=3.0, may_leave=True)


BAD_CHUNKS = b"zz", b"-5", b"f" * 20, b"5;x=" + b"y" * 9000, b"1\r\n{\r\nzz"


def _chunked(key: str, size: bytes) -> bytes:
    raw = post(COMPLETIONS, b"", key).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    return raw + size + b"\r\nhello\r\n0\r\n\r\n"


def mutations(rng: random.Random, target: Target) -> Request:
    """Random changes of valid requests."""
    return mutated(rng, target.key)


REQUESTS: dict[str, Kind] = {
    each.__name__: each
    for each in (
        *(
            ids,
            templates,
            marks,
            logprobs,
            prompts,
            models,
            grammars,
            hashes,
            values,
            keys,
            codings,
        ),
        *(headers, mutations),
    )
}
"""By name: kinds of harm that one request does."""


def strangers_of(folder: Path, model: Path) -> tuple[str, ...]:
    """Makes what no operator has listed: a directory without weights, and a good model."""
    empty, copy = folder / "empty", folder / "copy"
    empty.mkdir()
    (empty / "config.json").write_text(json.dumps({"model_type": "nosuch"}))
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).symlink_to(file.resolve())
    texts = [text for text in TEXTS if text not in ("", "default_model")]
    names = (
        str(empty),
        str(copy),
        f"{copy}/",
        "/etc",
        "..",
        "../..",
        "/",
        "/dev/zero",
        "/proc/self",
    )
    return (*names, "nosuch/model", "a/b/c", "-", *texts)
