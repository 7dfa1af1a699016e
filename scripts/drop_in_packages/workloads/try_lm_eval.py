"""lm-eval with mlx-lm's adapter: a task of log-probabilities and one of generated text."""

import json

import lm_eval
import mlx.core as mx
from common import MODEL, PROMPTS, WORK, show
from lm_eval.tasks import TaskManager
from mlx_lm.evaluate import MLXLM

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{prompt}}}}"
{rest}
"""
CHOICES = 'doc_to_target: 0\ndoc_to_choice: ["return 1", "pass", "self.x = x"]\n'
UNTIL = 'doc_to_target: "x"\ngeneration_kwargs: {until: ["return"], max_gen_toks: 24}\n'
KINDS = {"multiple_choice": CHOICES, "generate_until": UNTIL, "loglikelihood_rolling": UNTIL}


def greedy(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)


data = WORK / "data.json"
data.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS))
for kind, rest in KINDS.items():
    target = rest if kind != "loglikelihood_rolling" else 'doc_to_target: "{{prompt}}"\n'
    text = TASK.format(name=f"demo_{kind}", data=data, kind=kind, rest=target)
    (WORK / f"{kind}.yaml").write_text(text)
mx.random.seed(0)
model = MLXLM(str(MODEL), max_tokens=32, use_chat_template=False, sampler=greedy)
manager = TaskManager(include_path=str(WORK), include_defaults=False)
found = lm_eval.simple_evaluate(
    model, tasks=[f"demo_{kind}" for kind in KINDS], task_manager=manager, bootstrap_iters=0
)
for name, samples in found["samples"].items():
    show(name, [sample["resps"] for sample in samples])
    show(f"{name}, metrics", {k: v for k, v in found["results"][name].items() if k != "alias"})
