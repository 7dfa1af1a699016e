"""``python -m mlx_paged.generate``: text for one or many prompts from a paged KV pool.

Text goes to stdout, all else to stderr.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from mlx_paged.cli import GB, load_model, metrics_options
from mlx_paged.engine.engine import Engine
from mlx_paged.generate.arguments import make_parser
from mlx_paged.generate.jobs import Job, add_all, make_job, one_line, prompt_specs
from mlx_paged.generate.report import RULE, Result, print_results, print_stats, write_results
from mlx_paged.outputs import Completion, TokenOutput
from mlx_paged.request import FinishReason

INTERRUPTED = 130
FAILED = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, 130 after Ctrl-C; mistakes exit with 2."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        engine, jobs, ids = _prepare(args)
    except (ValueError, OSError) as error:
        parser.error(one_line(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    try:
        return _run(engine, jobs, ids, args)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _prepare(args: argparse.Namespace) -> tuple[Engine, list[Job], list[list[int]]]:
    """Everything that can fail because of what was asked: prompts, files, model, pool."""
    specs = prompt_specs(args)
    _check_writable(args.output)
    _check_writable(args.stats_json)
    _check_writable(args.metrics_jsonl)
    model, tokenizer = load_model(args.model, args.adapter_path, args.trust_remote_code)
    jobs = [make_job(spec, tokenizer, args) for spec in specs]
    engine = Engine(
        model,
        tokenizer,
        block_size=args.kv_block_size,
        kv_memory=None if args.kv_memory is None else int(args.kv_memory * GB),
        max_kv_tokens=sum(job.max_kv_tokens(args.kv_block_size) for job in jobs),
        max_running=args.max_running,
        prefill_chunk=args.prefill_chunk,
        max_stall_ms=args.max_stall_ms,
        policy=args.policy,
        preempt=args.preempt,
        seed=args.seed,
        prefix_cache=not args.no_prefix_cache,
        lookahead=args.lookahead,
        prewarm=not args.no_prewarm,
        **metrics_options(args),
    )
    return engine, jobs, add_all(engine, jobs)


def _check_writable(path: str | None) -> None:
    if path is not None:
        Path(path).open("a", encoding="utf-8").close()


def _run(
    engine: Engine, jobs: Sequence[Job], ids: Sequence[list[int]], args: argparse.Namespace
) -> int:
    """Generate everything, print it, write the files; Ctrl-C keeps what is finished."""
    done: dict[int, Completion] = {}
    streams = len(jobs) == 1 and jobs[0].count == 1 and jobs[0].beams is None
    status = 0
    try:
        if streams:
            _stream_one(engine, done)
        else:
            _complete_many(engine, done, total=sum(map(len, ids)))
    except KeyboardInterrupt:
        status = INTERRUPTED
    results = [
        Result(number, job, job.select([done[request_id] for request_id in request_ids]))
        for number, (job, request_ids) in enumerate(zip(jobs, ids, strict=True), start=1)
        if all(request_id in done for request_id in request_ids)
    ]
    if streams:
        print(flush=True)
    else:
        print_results(results, total=len(jobs))
    print_stats(engine, prewarm=not args.no_prewarm)
    if status == INTERRUPTED:
        print(f"interrupted: {len(results)} of {len(jobs)} prompts finished", file=sys.stderr)
    if args.output is not None:
        write_results(results, args.output)
    if args.stats_json is not None:
        stats = json.dumps(engine.metrics(), indent=2)
        Path(args.stats_json).write_text(stats + "\n", encoding="utf-8")
    return _report_errors(results) or status


def _report_errors(results: Sequence[Result]) -> int:
    """One line for each prompt that failed on the way; the status that says so."""
    status = 0
    for result in results:
        for completion in result.completions:
            if completion.finish_reason is FinishReason.ERROR:
                print(f"{result.job.spec.source}: {completion.error}", file=sys.stderr)
                status = FAILED
    return status


def _stream_one(engine: Engine, done: dict[int, Completion]) -> None:
    print(RULE, file=sys.stderr)
    while engine.has_work:
        for output in engine.step():
            print(output.text, end="", flush=True)
            _collect(output, done)


def _complete_many(engine: Engine, done: dict[int, Completion], total: int) -> None:
    with tqdm(total=total, unit="completion", file=sys.stderr) as bar:
        while engine.has_work:
            for output in engine.step():
                _collect(output, done)
            bar.set_postfix(running=len(engine.scheduler.running), refresh=False)
            bar.update(len(done) - bar.n)


def _collect(output: TokenOutput, done: dict[int, Completion]) -> None:
    if output.completion is not None:
        done[output.request_id] = output.completion


if __name__ == "__main__":
    sys.exit(main())
