"""mlx-lm's commands: generate, cache_prompt, chat, server, perplexity, benchmark, lora, fuse."""

import json
import re

import mlx.core as mx
from common import MESSAGES, MODEL, PROMPTS, WORK, attempt, command, free_port, post, server, show
from mlx_lm import batch_generate, load

GREEDY = ("--model", MODEL, "--temp", "0", "--max-tokens", "40")
PROMPT = ("--ignore-chat-template", "--prompt", PROMPTS[0])

command("generate", "mlx_lm.generate", *GREEDY, *PROMPT)
command("generate, chat", "mlx_lm.generate", *GREEDY, "--prompt", "a class")
command("generate, draft model", "mlx_lm.generate", *GREEDY, *PROMPT, "--draft-model", MODEL)
command("generate, rotating", "mlx_lm.generate", *GREEDY, *PROMPT, "--max-kv-size", "24")
quantized = ("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "8")
command("generate, quantized", "mlx_lm.generate", *GREEDY, *PROMPT, *quantized)
file = ("--prompt-cache-file", WORK / "prompt.safetensors")
command("cache_prompt", "mlx_lm.cache_prompt", "--model", MODEL, *file, "--prompt", PROMPTS[2])
command(
    "generate, saved prompt", "mlx_lm.generate", "--max-tokens", "40", *file, "--prompt", "x = "
)
command("chat", "mlx_lm.chat", *GREEDY, stdin="a class\na function\nr\na file\nq\n")
command("benchmark", "mlx_lm.benchmark", "--model", MODEL, "-p64", "-g16", "-b3", "-n1")

texts = [
    {"text": f"{prompt} value{n}):\n    return {n}\n"} for n in range(12) for prompt in PROMPTS
]
for name in ("train", "valid", "test"):
    lines = (json.dumps(row) for row in texts)
    (WORK / f"{name}.jsonl").write_text("\n".join(lines))
score = ("--num-samples", "4", "--sequence-length", "32", "--data-path", WORK)
output = command("perplexity", "mlx_lm.perplexity", "--model", MODEL, *score)
show("perplexity, value", [float(n) for n in re.findall(r"Perplexity: ([\d.]+)", output)])
adapter = ("--adapter-path", WORK / "adapter")
train = ("--train", "--data", WORK, "--iters", "4", "--batch-size", "2", "--num-layers", "2")
command("lora", "mlx_lm.lora", "--model", MODEL, *train, *adapter)
show("lora, adapter", dict(mx.load(str(WORK / "adapter" / "adapters.safetensors"))))
command("generate, adapter", "mlx_lm.generate", *GREEDY, *PROMPT, *adapter)
command("fuse", "mlx_lm.fuse", "--model", MODEL, *adapter, "--save-path", WORK / "fused")

model, tokenizer = load(str(MODEL))
prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
batch = batch_generate(model, tokenizer, prompts, max_tokens=24, return_prompt_caches=True)
show("batch_generate", batch.texts)
more = batch_generate(model, tokenizer, prompts, max_tokens=24, prompt_caches=batch.caches)
attempt("batch_generate, again", lambda: more.texts)

port = free_port()
with server("/v1/models", "mlx_lm.server", "--model", MODEL, "--port", str(port), port=port) as url:
    body = {"max_tokens": 24, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    for turn in range(3):
        prompt = PROMPTS[2] * (turn + 1)
        show(f"server, prompt {turn}", post(f"{url}/v1/completions", {**body, "prompt": prompt}))
    chat = {**body, "messages": MESSAGES}
    show("server, chat", post(f"{url}/v1/chat/completions", chat))
    show("server, stream", post(f"{url}/v1/chat/completions", {**chat, "stream": True}))
