"""Computes lines of OpenAI's batch files with the code that reads and answers the server's
requests."""

import argparse
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.cli import demo_model_path
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.token_ids import TokenIds
from mlx_paged.generate.batch_lines import BatchLine
from mlx_paged.generate.jobs import Job, seed_of
from mlx_paged.generate.prompts_file import PromptSpec
from mlx_paged.outputs import Completion, TokenOutput
from mlx_paged.protocol import prompts, responses, thinking
from mlx_paged.protocol.choices import CompletionChoice
from mlx_paged.protocol.deltas import Delta
from mlx_paged.protocol.model_paths import DEFAULT, is_last_part_of, is_path_of
from mlx_paged.protocol.model_traits import ModelTraits, format_of, traits_of
from mlx_paged.protocol.replies import Reply, ResponseReply
from mlx_paged.protocol.request_body import Refusal
from mlx_paged.request import BACKGROUND
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.vision.host import image_processor

NO_LIMIT = 1 << 40  # tokens of a context
PREFIX = "batch_req_"


class BatchModel:
    """What all lines of a file share.

    Args:
        args: of the command.
        context: tokens of prompt and completion; None: no limit.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TokenizerWrapper,
        args: argparse.Namespace,
        context: int | None,
    ) -> None:
        self.args = argparse.Namespace(**vars(args), strict_fields=False)
        self.path = args.model or str(demo_model_path())
        self.template_args: dict[str, Any] = args.chat_template_config or {}
        self._tokenizer = tokenizer
        self._format, self._abilities = format_of(tokenizer)
        self._context = context or NO_LIMIT
        self._image_processor = image_processor(model)
        self.traits = self._with(TokenIds(None, None, tokenizer))  # the engine has not probed it

    def attach(self, engine: Engine) -> None:
        """Use what the engine knows of the model."""
        if self.traits.token_ids is not engine.token_ids:
            self.traits = self._with(engine.token_ids)

    def check_name(self, name: str) -> None:
        """Refuse a request for another model."""
        if not is_path_of(name, self.path) and not is_last_part_of(name, self.path):
            message = f"model {name!r:.200} is not loaded: expected {self.path} or {DEFAULT}"
            raise Refusal(404, message, "model_not_found", "model")

    def _with(self, token_ids: TokenIds) -> ModelTraits:
        # Turns that follow a prompt are in no file: what a model with states keeps would not help.
        return traits_of(
            self._tokenizer,
            self._format,
            self._abilities,
            token_ids,
            max_context=self._context,
            has_states=False,
            image_processor=self._image_processor,
        )


@dataclass
class BatchJob(Job):
    """A line that is ready for the engine, or refused."""

    line: BatchLine = field(kw_only=True)
    model: BatchModel = field(kw_only=True)
    reply: Reply = field(kw_only=True)
    error: Refusal | None = field(kw_only=True, default=None)
    parts: dict[int, Delta] = field(kw_only=True, default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.reply.prompts) * int(self.line.fields.get("best_of", 1))

    @property
    def repeats(self) -> bool:
        temperature = self.line.fields.get("temperature", self.args.temp)
        return int(self.line.fields.get("best_of", 1)) > 1 and not temperature

    @property
    def num_answers(self) -> int:
        return 1

    @cached_property
    def digest(self) -> str:
        args, line = self.args, self.line
        defaults = args.temp, args.top_p, args.top_k, args.min_p, args.max_tokens, args.seed
        model = self.model.path, args.adapter_path, self.model.template_args
        body = json.dumps(line.fields.get("body"), sort_keys=True)
        text = repr((line.custom_id, line.url, body, self.tokens, defaults, model))
        return sha256(text.encode()).hexdigest()[:16]

    def max_kv_tokens(self, block_size: int) -> int:
        if self.refusal:
            return 0
        asked, least = self.line.fields["max_tokens"], self.line.fields["min_tokens"]
        most = max(self.args.max_tokens, least) if asked is None else asked
        most = prompts.num_fitting(most, self.model.traits.max_context)
        return len(self.tokens) + self.count * (int(most) + 2 * block_size)

    def add(self, engine: Engine) -> list[int]:
        self.model.attach(engine)
        try:
            with self.reply.refusing():
                return self._added(engine)
        except Refusal as error:
            self.error = error
            raise ValueError(str(error)) from error

    def take(self, engine: Engine, place: int, output: TokenOutput) -> Completion | None:
        choice = self.reply.choices[place]
        self._add(choice, output)
        if choice.is_cut and choice.completion is None:
            aborted = engine.abort(output.request_id)
            if aborted is not None:
                self._add(choice, TokenOutput.last(aborted))
        return choice.completion

    def select(self, completions: Sequence[Completion]) -> list[Completion]:
        failures = (choice.failure for choice in self.reply.choices)
        self.error = next((each for each in failures if each is not None), None)
        return list(completions)

    @cached_property
    def record(self) -> dict[str, Any]:
        """The line of the answer."""
        error = self.error
        body = self.reply.whole(self.parts) if error is None else error.as_json()
        told = None
        if error is not None:
            told = {"code": error.code or body["error"]["type"], "message": str(error)}
        return {
            "id": f"{PREFIX}{self.number}_{self.digest}",
            "custom_id": self.line.custom_id,
            "response": {
                "status_code": 200 if error is None else error.status,
                "request_id": f"req_{uuid.uuid4().hex}",
                "body": body,
                **self.told_max_tokens,
            },
            "error": told,
        }

    def _added(self, engine: Engine) -> list[int]:
        reply, fields, traits = self.reply, self.line.fields, self.model.traits
        each = reply.sampling(traits, self.args)
        self.max_tokens = reply.max_tokens
        for prompt, params in zip(reply.prompts, each, strict=True):
            engine.check_prompt(prompt.tokens)
            if params.constraint is not None:
                reply.compile(engine.constraints.compile, params)
        options = {"priority": fields["priority"], "cache_salt": fields["cache_salt"]}
        ids: list[int] = []
        try:
            for prompt, params in zip(reply.prompts, each, strict=True):
                ids += engine.add_samples(prompt.tokens, fields["best_of"], params, **options)
        except ValueError:
            for request_id in ids:
                engine.abort(request_id)
            raise
        reply.choices = [
            CompletionChoice(place, traits, fields, reply.prompts[place // fields["best_of"]])
            for place in range(len(ids))
        ]
        return ids

    def _add(self, choice: CompletionChoice, output: TokenOutput) -> None:
        self.parts.setdefault(choice.index, Delta()).add(choice.add(output))


def make_batch_job(number: int, spec: PromptSpec, model: BatchModel) -> BatchJob:
    """Encode the prompts of a line. What refuses the line becomes its refusal."""
    line, args = spec.batch, model.args
    assert line is not None
    kind = ResponseReply if line.url == responses.PATH else Reply
    reply, error = kind(fields=line.fields), line.refusal
    if error is None:
        try:
            with reply.refusing():
                _encode(number, line, reply, model)
        except Refusal as refusal:
            error = refusal
    tokens = [token for prompt in reply.prompts for token in prompt.tokens]
    return BatchJob(
        number,
        spec,
        tokens,
        SamplingParams(),
        1,
        args,
        str(error) if error else "",
        line=line,
        model=model,
        reply=reply,
        error=error,
    )


def _encode(number: int, line: BatchLine, reply: Reply, model: BatchModel) -> None:
    fields, args, traits = line.fields, model.args, model.traits
    if fields["priority"] not in (0, BACKGROUND) and args.policy != "priority":
        expected = 'expected 0 or "background", for the command runs without --policy priority'
        raise ValueError(f"priority: {expected}")
    model.check_name(fields["model"])
    if args.seed is not None and fields.get("seed") is None:
        fields["seed"] = seed_of(args.seed, number)
    found = thinking.template_args(traits, fields)[1] + prompts.without_effect(traits, fields)
    line.ignored += [reply.names.get(name, name) for name in found]
    reply.prompts = prompts.encode(traits, fields, model.template_args)
