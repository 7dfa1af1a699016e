"""outlines: a plain text, a stream, a batch and a constrained answer."""

import mlx_lm
import outlines
from common import MODEL, PROMPTS, attempt

model = outlines.from_mlxlm(*mlx_lm.load(str(MODEL)))
attempt("text", model, PROMPTS[0], max_tokens=32)
attempt("stream", lambda: list(model.stream(PROMPTS[1], max_tokens=32)))
attempt("batch", lambda: model.batch(list(PROMPTS), max_tokens=32))
attempt("regex", lambda: model(PROMPTS[2], outlines.regex("[a-z]{3,9}[(][a-z]*[)]"), max_tokens=24))
