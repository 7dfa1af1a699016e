"""One engine for many asyncio tasks: python examples/service.py [MODEL]"""

import asyncio
import sys

from mlx_lm import load

from mlx_paged import Engine, EngineService, demo_model_path


async def stream(service: EngineService, name: str) -> str:
    """The text of one request, read token by token while the others run."""
    prompt = f"def {name}(path):\n"
    # submit waits for the step under way: in a thread it does not block the loop.
    ticket = await asyncio.to_thread(service.submit, prompt, max_tokens=32)
    pieces = [output.text async for output in ticket]
    return prompt + "".join(pieces)


async def first_token(service: EngineService, prompt: str) -> str:
    """A reader that goes away: leaving `with` aborts its request and frees its K/V."""
    with await asyncio.to_thread(service.submit, prompt, max_tokens=1000) as ticket:
        return (await anext(ticket)).text


async def main() -> None:
    model, tokenizer = load(sys.argv[1] if len(sys.argv) > 1 else demo_model_path())
    async with EngineService(Engine(model, tokenizer)) as service:
        names = "read_lines", "copy_tree", "is_empty"
        streams = (stream(service, name) for name in names)
        *texts, token = await asyncio.gather(*streams, first_token(service, "import "))
        print(*texts, sep="\n---\n")
        print(f"--- the first token after 'import ': {token!r}")
        steps = await asyncio.to_thread(service.call, lambda engine: engine.stats.steps)
        print(f"--- {steps} steps of the model for all")


asyncio.run(main())
