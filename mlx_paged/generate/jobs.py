"""Encodes and checks the prompts of the command line, and adds them to an engine."""

import argparse
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm.server import process_message_content
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.arguments import one_line
from mlx_paged.chat.encoding import encoded
from mlx_paged.chat.rendering import rendered
from mlx_paged.engine.engine import Engine
from mlx_paged.generate.prompts_file import NUMBERS, PromptSpec
from mlx_paged.outputs import Completion, TokenOutput, likeliest
from mlx_paged.prompt import Prompt
from mlx_paged.protocol.fields import AS_MANY_AS_FIT
from mlx_paged.protocol.prompts import num_fitting
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.vision.images import MAX_BYTES, has_image, in_parts, parts_of
from mlx_paged.vision.prompts import ImageProcessor

SAMPLING_FLAGS = [name for name in NUMBERS if name not in ("temperature", "seed")]
"""Fields of SamplingParams that may have a flag of the same name. The engine takes --seed."""

CHAT_FLAGS = ("system_prompt", "prefill_response", "chat_template_config")
"""Arguments that need a chat template."""


@dataclass(eq=False)
class Job:
    """A prompt that is ready for the engine."""

    number: int  # its place in the input, from 1
    spec: PromptSpec
    tokens: Sequence[int]  # with its images, if the prompt has some
    params: SamplingParams
    n: int  # completions to return
    args: argparse.Namespace  # of the command
    refusal: str = ""  # why it is not computed
    max_tokens: int | None = None  # that the context has room for, if its line asks for others

    def limit(self, max_tokens: int) -> None:
        """Let each answer have at most `max_tokens` tokens."""
        self.params = replace(self.params, max_tokens=max_tokens)

    @property
    def told_max_tokens(self) -> dict[str, int]:
        """What a result's line says of :attr:`max_tokens`."""
        return {} if self.max_tokens is None else {"max_tokens": self.max_tokens}

    @property
    def count(self) -> int:
        """Sequences that run at the same time."""
        count: int = self.args.beams or self.args.best_of or self.n
        return count

    @property
    def num_answers(self) -> int:
        """Texts of a result."""
        beams: int | None = self.args.beams
        return self.n if beams is None else beams

    @cached_property
    def digest(self) -> str:
        """Names all that its texts depend on; the model's files are not read."""
        args = self.args
        search = args.beams, args.best_of, args.length_penalty, args.early_stopping
        model = args.model, args.adapter_path
        keys = self.tokens.keys if isinstance(self.tokens, Prompt) else self.tokens
        text = repr((self.spec.id, keys, self.params, self.n, search, model))
        return sha256(text.encode()).hexdigest()[:16]

    def max_kv_tokens(self, block_size: int) -> int:
        """Upper bound of the K/V slots that this job needs, unused slots of blocks included."""
        if self.refusal:
            return 0
        return len(self.tokens) + self.count * (self.params.max_tokens + 2 * block_size)

    def add(self, engine: Engine) -> list[int]:
        """Queue the job. Returns the ids of its requests."""
        args, priority = self.args, self.spec.priority
        if args.beams is None:
            return engine.add_samples(self.tokens, self.count, self.params, priority=priority)
        request_id = engine.add_beam_search(
            self.tokens,
            args.beams,
            self.params,
            length_penalty=args.length_penalty,
            early_stopping=args.early_stopping,
            priority=priority,
        )
        return [request_id]

    @property
    def repeats(self) -> bool:
        """Whether the job asks for several texts that are the same."""
        return self.args.beams is None and self.count > 1 and self.params.temperature == 0

    def take(self, engine: Engine, place: int, output: TokenOutput) -> Completion | None:
        """Take an output of the request at a place of those that :meth:`add` returned. Returns its
        completion if it has ended."""
        return output.completion

    def select(self, completions: Sequence[Completion]) -> list[Completion]:
        return list(completions) if self.args.best_of is None else likeliest(completions, self.n)


def params_of(args: argparse.Namespace, tokenizer: TokenizerWrapper) -> SamplingParams:
    """The options of prompts that have none of their own. Raises ValueError if flags do not fit."""
    options: dict[str, Any] = {k: getattr(args, k) for k in SAMPLING_FLAGS if k in args}
    special = tokenizer.encode("\n") + list(tokenizer.eos_token_ids)
    options |= {"temperature": args.temp, "xtc_special_tokens": special}
    options |= {"stop": args.stop, "json_schema": args.json_schema, "adapter": args.use_adapter}
    return SamplingParams(keep_space=args.keep_space, **options)


def make_job(
    number: int,
    spec: PromptSpec,
    params: SamplingParams,
    tokenizer: TokenizerWrapper,
    args: argparse.Namespace,
    image_processor: ImageProcessor | None = None,
    only_parts: bool = False,
    context: int | None = None,
) -> Job:
    """A prompt that is encoded and whose options are checked. --seed gives each prompt a seed of
    its own, which does not depend on the other prompts. `max_tokens` is cut to what `context`
    leaves; the job is refused if that is nothing.

    Raises:
        ValueError: the prompt or an option is wrong; the message names the prompt's source.
    """
    try:
        asked = spec.options.get("max_tokens", params.max_tokens)
        params = replace(params, **{k: v for k, v in spec.options.items() if k != "max_tokens"})
        if args.seed is not None and params.seed is None:
            params = replace(params, seed=seed_of(args.seed, number))
        if spec.images and image_processor is None:
            raise ValueError("images are given: expected --vision and a model that sees")
        if params.keep_space is None:
            params = replace(params, keep_space=not _has_template(tokenizer, args))
        tokens = _encode(spec, tokenizer, args, image_processor, only_parts)
        if not tokens:
            raise ValueError("the prompt is empty")
        n = args.n if spec.n is None else spec.n
        if args.best_of is not None and n > args.best_of:
            raise ValueError(f"n is {n}: expected at most --best-of {args.best_of}")
        _check_beams(args, params, n)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{spec.source}: {one_line(error)}") from error
    if context is None and asked == AS_MANY_AS_FIT:
        raise ValueError(
            f"{spec.source}: max_tokens is -1: expected 1 or more, for the model has"
            " no context length"
        )
    job = Job(number, spec, tokens, params, n, args)
    _fit(job, asked, asked if context is None else context - len(tokens))
    return job


def _fit(job: Job, asked: int, room: int) -> None:
    """Give a job the `max_tokens` that are asked for, or as many as the context has room for. If it
    has room for none the job is refused."""
    most = num_fitting(asked, room)
    if most < 1:
        num_prompt = len(job.tokens)
        job.refusal = (
            f"{num_prompt} prompt tokens and max_tokens 1 are more than the model's context length"
            f" of {num_prompt + room} tokens: expected a shorter prompt"
        )
        return
    job.limit(most)
    if most != job.spec.options.get("max_tokens", most):
        job.max_tokens = most


def seed_of(seed: int, number: int) -> int:
    """The seed of a prompt, which does not depend on the other prompts."""
    return int(np.random.default_rng([seed, number]).integers(2**63))


def add_all(engine: Engine, jobs: Sequence[Job]) -> tuple[list[list[int]], dict[int, str]]:
    """Queue the jobs. Returns the request ids of each job, and by the number of a job why the
    engine refuses it. A job that is refused has no ids, and the others go on.

    Raises:
        ValueError: the engine refuses all jobs; the message names the first prompt's source. Lines
            of a batch file do not raise it: each of them gets its answer.
    """
    ids, refusals = list[list[int]](), dict[int, str]()
    given = jobs[0].spec.options if jobs else {}
    if jobs and jobs[0].params.json_schema is not None and not given.get("json_schema"):
        try:
            engine.constraints.compile(jobs[0].params)
        except ValueError as error:
            reason = one_line(error).removeprefix("json_schema: ")
            raise ValueError(f"--json-schema: {reason}") from error
    for job in jobs:
        try:
            if job.refusal:
                raise ValueError(job.refusal)
            ids.append(job.add(engine))
        except ValueError as error:
            ids.append([])
            refusals[job.number] = one_line(error)
    if jobs and len(refusals) == len(jobs) and jobs[0].spec.batch is None:
        raise ValueError(f"{jobs[0].spec.source}: {refusals[jobs[0].number]}")
    return ids, refusals


def _check_beams(args: argparse.Namespace, params: SamplingParams, n: int) -> None:
    """Raise ValueError if --beams is given beside an option that a beam search does not have."""
    if args.beams is None:
        return
    if n > 1 or args.best_of is not None:
        raise ValueError("n or --best-of is given with --beams: expected one of them")
    if params.temperature > 0 or params.stop:
        raise ValueError("--temp or --stop is given with --beams: expected one of them")


def _encode(
    spec: PromptSpec,
    tokenizer: TokenizerWrapper,
    args: argparse.Namespace,
    image_processor: ImageProcessor | None,
    only_parts: bool,  # what the chat template knows, as `knows_only_parts` tells
) -> Sequence[int]:
    images = [_image(path) for path in spec.images]
    if not _has_template(tokenizer, args):
        named = {f"--{name.replace('_', '-')}": getattr(args, name) for name in CHAT_FLAGS}
        for name, value in ({'"messages"': spec.messages} | named).items():
            if value is not None:
                raise ValueError(f"{name} needs a chat template, which is absent or ignored")
        plain = spec.prompt or ""
        if image_processor and images:
            return image_processor(plain, images)
        return list(tokenizer.encode(plain))
    messages = deepcopy(spec.messages) or [{"role": "user", "content": spec.prompt}]
    if images and not any(has_image(message.get("content")) for message in messages):
        content = [{"type": "image"}] * len(images) + parts_of(messages[-1].get("content"))
        messages[-1] = messages[-1] | {"content": content}
    if args.system_prompt is not None and messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": args.system_prompt})
    begins = args.prefill_response is not None
    if begins:
        messages.append({"role": "assistant", "content": args.prefill_response})
    options = {"continue_final_message": begins, "add_generation_prompt": not begins}
    try:
        process_message_content([m for m in messages if not has_image(m.get("content"))])
        messages = in_parts(messages) if only_parts else messages
        text = rendered(tokenizer, messages, **options | (args.chat_template_config or {}))
    except Exception as error:  # a template can raise anything
        raise ValueError(f"the chat template refuses the messages: {error}") from error
    if image_processor and images:
        return image_processor(text, images)
    adds_special = image_processor is not None and image_processor.adds_special
    return encoded(tokenizer, text, add_special_tokens=adds_special)


def _has_template(tokenizer: TokenizerWrapper, args: argparse.Namespace) -> bool:
    """Whether a chat template makes the prompts."""
    return bool(tokenizer.has_chat_template) and not args.ignore_chat_template


def _image(path: str) -> bytes:
    """The bytes of an image, as far as a reader needs them to refuse more."""
    with Path(path).open("rb") as file:
        return file.read(MAX_BYTES + 1)
