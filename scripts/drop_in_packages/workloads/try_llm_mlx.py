"""llm-mlx: the command `llm` with a registered model, and a conversation of two turns."""

import json
import os

from common import MODEL, WORK, command

os.environ["LLM_USER_PATH"] = str(WORK)
(WORK / "llm-mlx.json").write_text(json.dumps({str(MODEL): {"aliases": ["demo"]}}))
options = ("-m", "demo", "-o", "temperature", "0", "-o", "max_tokens", "32")
command("prompt", "llm", *options, "write a class")
command("conversation", "llm", "-c", *options, "and a function")
command("system prompt", "llm", *options, "-s", "be brief", "write a class")
