"""An agent of the PyPI package openai-agents that writes the files its model asks for.

The part of ``scripts.agents`` that Python with openai-agents runs. Arguments: API (``chat`` or
``responses``), URL, MODEL, NUM_TURNS, TASK.
"""

import sys
from pathlib import Path
from typing import Any

import agents  # type: ignore[import-not-found]
import openai


def write_file(file_path: str, content: str) -> str:
    """The text of a file after `content` was written there."""
    Path(file_path).write_bytes(content.encode())
    return content


def main() -> None:
    api, url, model, num_turns, task = sys.argv[1:]
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=200)
    kinds: dict[str, Any] = {
        "chat": agents.OpenAIChatCompletionsModel,
        "responses": agents.OpenAIResponsesModel,
    }
    agent = agents.Agent(
        name="writer",
        model=kinds[api](model=model, openai_client=client),
        tools=[agents.function_tool(write_file)],
    )
    print(agents.Runner.run_sync(agent, task, max_turns=int(num_turns) + 2).final_output)


if __name__ == "__main__":
    main()
