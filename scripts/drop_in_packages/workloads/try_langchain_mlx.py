"""langchain-mlx: the pipeline, its stream, a batch, and the chat model."""

from common import MODEL, PROMPTS, attempt
from langchain_core.messages import HumanMessage
from langchain_mlx import ChatMLX, MLXPipeline

options = {"max_tokens": 32, "temp": 0.0}
model = MLXPipeline.from_model_id(str(MODEL), pipeline_kwargs=options)
attempt("invoke", model.invoke, PROMPTS[0])
attempt("stream", lambda: list(model.stream(PROMPTS[1])))
attempt("batch", model.batch, list(PROMPTS), config={"max_concurrency": 1})
chat = ChatMLX(llm=model)
attempt("chat", lambda: chat.invoke([HumanMessage("write a class")]).content)
