"""mlx-serve: its manager starts mlx_lm.server as a child process and forwards chats to it."""

from common import MESSAGES, MODEL, WORK, free_port, post, server, show

port, child = free_port(), free_port()
(WORK / "models.yaml").write_text(
    f"mlx_port: {child}\nmanager_port: {port}\nmodels:\n"
    f"  - {{name: demo, type: text, hf_path: {MODEL}, context_length: 24}}\n"
)
serve = ("mlx-serve", "start", "--host", "127.0.0.1", "--port", str(port))
with server("/v1/models", *serve, port=port) as url:
    show("load", post(f"{url}/v1/models/load", {"model": "demo"}))
    for turn in range(3):
        messages = MESSAGES * (turn + 1)
        body = {"model": "demo", "temperature": 0, "max_tokens": 24, "messages": messages}
        show(f"chat {turn}", post(f"{url}/v1/chat/completions", body))
    body["stream"] = True
    show("stream", post(f"{url}/v1/chat/completions", body))
    show("unload", post(f"{url}/v1/models/unload", {}))
