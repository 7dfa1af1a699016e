"""``python -m mlx_paged.generate``: text for one or many prompts from a paged KV pool."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tqdm import tqdm

from mlx_paged.engine import Engine
from mlx_paged.generate_args import GB, make_parser
from mlx_paged.model_loader import load_model
from mlx_paged.outputs import Completion, TokenOutput
from mlx_paged.prompts_file import PromptSpec, read_prompts
from mlx_paged.sampling_params import SamplingParams

INTERRUPTED = 130
RULE = "=" * 10


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt ready for the engine."""

    spec: PromptSpec
    tokens: list[int]
    params: SamplingParams

    @property
    def max_kv_tokens(self) -> int:
        return len(self.tokens) + self.params.max_tokens


@dataclass(frozen=True, slots=True)
class Result:
    """A finished prompt and its place in the input."""

    number: int
    job: Job
    completion: Completion


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, 130 after Ctrl-C; mistakes exit with 2."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        engine, jobs, ids = _prepare(args)
    except (ValueError, OSError) as error:
        parser.error(_one_line(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    try:
        return _run(engine, jobs, ids, args)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _prepare(args: argparse.Namespace) -> tuple[Engine, list[Job], list[int]]:
    """Everything that can fail because of what was asked: prompts, files, model, pool."""
    specs = _prompt_specs(args)
    _check_writable(args.output)
    _check_writable(args.stats_json)
    model, tokenizer = load_model(args.model, args.adapter_path, args.trust_remote_code)
    jobs = [_job(spec, tokenizer, args) for spec in specs]
    engine = Engine(
        model,
        tokenizer,
        block_size=args.kv_block_size,
        kv_memory=None if args.kv_memory is None else int(args.kv_memory * GB),
        max_kv_tokens=sum(job.max_kv_tokens + args.kv_block_size for job in jobs),
        max_running=args.max_running,
        prefill_chunk=args.prefill_chunk,
        seed=args.seed,
        prewarm=not args.no_prewarm,
    )
    return engine, jobs, _add_all(engine, jobs)


def _prompt_specs(args: argparse.Namespace) -> list[PromptSpec]:
    specs = [PromptSpec(_prompt_text(prompt)) for prompt in args.prompt]
    if args.prompts_file is not None:
        try:
            with Path(args.prompts_file).open(encoding="utf-8") as lines:
                specs += read_prompts(lines, args.prompts_file)
        except UnicodeDecodeError as error:
            raise ValueError(f"{args.prompts_file}: not UTF-8: {error.reason}") from error
    if not specs:
        raise ValueError("no prompt: give --prompt or --prompts-file")
    return specs


def _prompt_text(prompt: str) -> str:
    """As mlx_lm.generate reads it: '-' is stdin, a typed \\n or \\t is the character."""
    if prompt == "-":
        return sys.stdin.read()
    return prompt.replace("\\n", "\n").replace("\\t", "\t")


def _check_writable(path: str | None) -> None:
    if path is not None:
        Path(path).open("a", encoding="utf-8").close()


def _job(spec: PromptSpec, tokenizer: TokenizerWrapper, args: argparse.Namespace) -> Job:
    options: dict[str, Any] = {
        "max_tokens": args.max_tokens,
        "temperature": args.temp,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "top_k": args.top_k,
        "stop": tuple(args.stop),
    }
    try:
        params = SamplingParams(**(options | spec.options))
        tokens = _encode(spec, tokenizer, args)
        if not tokens:
            raise ValueError("the prompt is empty")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{spec.source}: {_one_line(error)}") from error
    return Job(spec, tokens, params)


def _encode(spec: PromptSpec, tokenizer: TokenizerWrapper, args: argparse.Namespace) -> list[int]:
    chat = not args.ignore_chat_template and tokenizer.has_chat_template
    if spec.messages is not None and not chat:
        raise ValueError('"messages" need a chat template, which is absent or ignored')
    if not chat:
        return list(tokenizer.encode(spec.prompt))
    messages = spec.messages or [{"role": "user", "content": spec.prompt}]
    if args.system_prompt is not None and messages[0].get("role") != "system":
        messages = [{"role": "system", "content": args.system_prompt}, *messages]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs of their own
        raise ValueError(f"the chat template refuses the messages: {error}") from error
    return list(tokenizer.encode(text, add_special_tokens=False))


def _add_all(engine: Engine, jobs: Sequence[Job]) -> list[int]:
    ids = []
    for job in jobs:
        try:
            ids.append(engine.add_request(job.tokens, job.params))
        except ValueError as error:
            raise ValueError(f"{job.spec.source}: {_one_line(error)}") from error
    return ids


def _run(engine: Engine, jobs: Sequence[Job], ids: Sequence[int], args: argparse.Namespace) -> int:
    """Generate everything, print it, write the files; Ctrl-C keeps what is finished."""
    done: dict[int, Completion] = {}
    single = len(jobs) == 1
    status = 0
    try:
        if single:
            _stream_one(engine, done)
        else:
            _complete_many(engine, done)
    except KeyboardInterrupt:
        status = INTERRUPTED
    results = [
        Result(number, job, done[request_id])
        for number, (job, request_id) in enumerate(zip(jobs, ids, strict=True), start=1)
        if request_id in done
    ]
    if single:
        print(f"\n{RULE}")
    else:
        _print_results(results, total=len(jobs))
    if status == INTERRUPTED:
        print(f"interrupted: {len(results)} of {len(jobs)} prompts finished", file=sys.stderr)
    _print_stats(engine)
    if args.output is not None:
        _write_results(results, args.output)
    if args.stats_json is not None:
        stats = json.dumps(engine.stats.as_dict(), indent=2)
        Path(args.stats_json).write_text(stats + "\n", encoding="utf-8")
    return status


def _stream_one(engine: Engine, done: dict[int, Completion]) -> None:
    print(RULE)
    while engine.has_work:
        for output in engine.step():
            print(output.text, end="", flush=True)
            _collect(output, done)


def _complete_many(engine: Engine, done: dict[int, Completion]) -> None:
    total = len(engine.scheduler.waiting)
    with tqdm(total=total, unit="prompt", file=sys.stderr) as bar:
        while engine.has_work:
            outputs = engine.step()
            for output in outputs:
                _collect(output, done)
            bar.set_postfix(running=len(engine.scheduler.running), refresh=False)
            bar.update(len(done) - bar.n)


def _collect(output: TokenOutput, done: dict[int, Completion]) -> None:
    if output.completion is not None:
        done[output.request_id] = output.completion


def _print_results(results: Sequence[Result], total: int) -> None:
    for result in results:
        print(f"{RULE} {result.number}/{total}: {result.job.spec.title[:70]}")
        print(result.completion.text)
    print(RULE)


def _print_stats(engine: Engine) -> None:
    stats = engine.stats.as_dict()
    mb = 1e6
    print(
        f"Prompt: {stats['prompt_tokens']} tokens, "
        f"{stats['prompt_tokens_per_sec']:.3f} tokens-per-sec"
    )
    print(
        f"Generation: {stats['generation_tokens']} tokens, "
        f"{stats['generation_tokens_per_sec']:.3f} tokens-per-sec"
    )
    if stats["ttft_median_s"] is not None:
        print(f"TTFT: median {stats['ttft_median_s']:.3f} s, max {stats['ttft_max_s']:.3f} s")
    print(
        f"KV: peak {stats['peak_blocks_in_use']} of {stats['num_blocks']} blocks "
        f"({stats['peak_kv_bytes'] / mb:.3f} MB; "
        f"live tokens {stats['peak_live_kv_bytes'] / mb:.3f}, "
        f"one cache a sequence {stats['contiguous_kv_bytes'] / mb:.3f}, "
        f"padded batch {stats['padded_kv_bytes'] / mb:.3f}), {stats['blocks_in_use']} in use now"
    )
    print(f"Peak memory: {mx.get_peak_memory() / GB:.3f} GB")


def _write_results(results: Sequence[Result], path: str) -> None:
    with Path(path).open("w", encoding="utf-8") as file:
        for result in results:
            spec, completion = result.job.spec, result.completion
            asked = (
                {"prompt": spec.prompt} if spec.messages is None else {"messages": spec.messages}
            )
            record = asked | {
                "text": completion.text,
                "finish_reason": completion.finish_reason,
                "prompt_tokens": completion.prompt_tokens,
                "generation_tokens": len(completion.tokens),
                "tokens": completion.tokens,
                "logprobs": completion.logprobs,
                "ttft_s": completion.ttft_s,
                "seconds": completion.seconds,
            }
            if spec.id is not None:
                record = {"id": spec.id} | record
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
