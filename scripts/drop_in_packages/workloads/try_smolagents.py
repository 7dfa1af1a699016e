"""smolagents: its MLX model, whole and streamed, and an agent of one step."""

from common import MESSAGES, MODEL, attempt
from smolagents import CodeAgent, MLXModel

model = MLXModel(model_id=str(MODEL), max_tokens=32)
attempt("generate", lambda: model.generate(MESSAGES, stop_sequences=["return"]).content)
attempt("stream", lambda: "".join(d.content or "" for d in model.generate_stream(MESSAGES)))
agent = CodeAgent(tools=[], model=model, max_steps=1, verbosity_level=0)
attempt("agent", lambda: str(agent.run("write a class")))
