"""GET /v1/cache: what the prefix caches know, in counts."""

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import Request

from mlx_paged.engine.engine import Engine
from mlx_paged.kv.cached_block import CachedBlock
from mlx_paged.kv.known_chains import Chain, chains, known_blocks, worths
from mlx_paged.kv.worth import UNIT
from mlx_paged.protocol.request_body import Refusal
from mlx_paged.server.json_answer import JsonAnswer
from mlx_paged.server.models import Models

MOST = 1000
USUAL = 100
OWNER_DIGITS = 12


async def cache(request: Request) -> JsonAnswer:
    """The longest chains of each loaded model, of the salt `cache_salt`, at most `limit` of each
    model. Without a salt these are chains that have none, and for the admin's key those of all
    salts. Answers with 400 for another parameter."""
    given = dict(request.query_params)
    everyones = None if request.scope["state"].get("is_admin") else ""
    salt, limit = given.pop("cache_salt", everyones), given.pop("limit", str(USUAL))
    if given:
        raise Refusal(400, f"{next(iter(given))!r:.80}: expected cache_salt or limit")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= MOST):
        raise Refusal(400, f"limit: expected an integer from 1 to {MOST}, got {limit!r:.80}")
    try:
        found = await asyncio.to_thread(_read, request.app.state.models, salt, int(limit))
    except RuntimeError:
        raise Refusal(503, "the engine has stopped") from None
    return JsonAnswer({"object": "list", "data": found})


def _read(models: Models, salt: str | None, most: int) -> list[dict[str, Any]]:
    def blocks(engine: Engine) -> tuple[list[CachedBlock], float, Callable[[CachedBlock], int]]:
        allocator = engine.manager.allocator
        return known_blocks(allocator), engine.clock(), worths(allocator)

    found = []
    for model in list(models.loaded.values()):
        known, now, value = model.service.call(blocks)
        of_salt = None if salt is None else salt.encode()
        count, longest = chains(known, of_salt, most, now, value)
        told = [_told(chain, of_all=salt is None) for chain in longest]
        name = models.names.label(model.name)
        found.append({"model": name, "num_chains": count, "worth_unit": UNIT, "chains": told})
    return found


def _told(chain: Chain, of_all: bool) -> dict[str, Any]:
    """A chain as JSON. Among those of all salts `owner` tells salts and adapters apart."""
    told = chain._asdict()
    root = told.pop("root")
    return told | ({"owner": root.hex()[:OWNER_DIGITS]} if of_all else {})
