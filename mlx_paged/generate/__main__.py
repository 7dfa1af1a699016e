"""``python -m mlx_paged.generate``: generate text for one or many prompts.

The text goes to stdout, everything else to stderr.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from mlx_paged.cli import engine_options, load_model
from mlx_paged.engine.engine import Engine
from mlx_paged.generate.arguments import make_parser
from mlx_paged.generate.jobs import Job, add_all, make_job, one_line, params_of, prompt_specs
from mlx_paged.generate.report import RULE, Result, print_results, print_stats, write_results
from mlx_paged.outputs import Completion
from mlx_paged.request import FinishReason
from mlx_paged.runner.ranks import joined, rank

INTERRUPTED = 130
FAILED = 1
SAME_TEXTS = (
    "mlx_paged.generate: warning: --n or --best-of at temperature 0 gives the same text each time:"
    " --temp above 0 gives different ones"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, or 1 if a prompt failed, or 130 after Ctrl-C."""
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
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # else the reader of stdout has closed it
            print(f"mlx_paged.generate: error: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _prepare(args: argparse.Namespace) -> tuple[Engine, list[Job], list[list[int]]]:
    """Read the prompts, check the files, load the model, queue the requests. Raises ValueError for
    a wrong prompt, model or option, OSError for a file that cannot be read or written."""
    if rank():  # it has no prompts, and does not return
        joined(load_model(args.model, args.adapter_path, args.trust_remote_code)[0])
    specs = prompt_specs(args)
    for path in (args.output, args.stats_json, args.metrics_jsonl):
        if path is not None:  # a path that cannot be written fails before the work
            Path(path).open("a", encoding="utf-8").close()
    model, tokenizer = load_model(args.model, args.adapter_path, args.trust_remote_code)
    model = joined(model)
    try:
        for token in args.extra_eos_token:
            tokenizer.add_eos_token(token)
    except ValueError as error:
        raise ValueError(f"--extra-eos-token: {error}") from error
    params = params_of(args, tokenizer)
    jobs = [make_job(spec, params, tokenizer, args) for spec in specs]
    if args.beams is None and any(j.count > 1 and j.params.temperature == 0 for j in jobs):
        print(SAME_TEXTS, file=sys.stderr)
    engine = Engine(
        model,
        tokenizer,
        block_size=args.kv_block_size,
        max_kv_tokens=sum(job.max_kv_tokens(args.kv_block_size) for job in jobs),
        max_running=args.max_running,
        prefill_chunk=args.prefill_chunk,
        lookahead=args.lookahead,
        prewarm=not args.no_prewarm,
        **engine_options(args),
    )
    return engine, jobs, add_all(engine, jobs)


def _run(
    engine: Engine, jobs: Sequence[Job], ids: Sequence[list[int]], args: argparse.Namespace
) -> int:
    """Generate, print the texts, write the files. Ctrl-C keeps the finished prompts."""
    done: dict[int, Completion] = {}
    is_single = len(jobs) == 1 and jobs[0].count == 1 and args.beams is None
    status = 0
    try:
        _complete(engine, done, sum(map(len, ids)), streams=is_single, shows=args.verbose)
    except KeyboardInterrupt:
        status = INTERRUPTED
    results = [
        Result(number, job, job.select([done[request_id] for request_id in request_ids]))
        for number, (job, request_ids) in enumerate(zip(jobs, ids, strict=True), start=1)
        if all(request_id in done for request_id in request_ids)
    ]
    if is_single:
        print(flush=True)
    else:
        print_results(results, total=len(jobs))
    if args.verbose:
        print_stats(engine)
    if status == INTERRUPTED:
        print(f"interrupted: {len(results)} of {len(jobs)} prompts finished", file=sys.stderr)
    if args.output is not None:
        write_results(results, args.output)
    if args.stats_json is not None:
        stats = json.dumps(engine.metrics(), indent=2)
        Path(args.stats_json).write_text(stats + "\n", encoding="utf-8")
    engine.close()
    for result in results:
        for completion in result.completions:
            if completion.finish_reason is FinishReason.ERROR:
                print(f"{result.job.spec.source}: {completion.error}", file=sys.stderr)
                status = FAILED
    return status


def _complete(
    engine: Engine, done: dict[int, Completion], total: int, *, streams: bool, shows: bool
) -> None:
    """Run the engine until it is idle: print the text as it comes, or show the progress."""
    if streams and shows:
        print(RULE, file=sys.stderr)
    no_bar = streams or not shows
    with tqdm(total=total, unit="completion", file=sys.stderr, disable=no_bar) as bar:
        while engine.has_work:
            for output in engine.step():
                if streams:
                    print(output.text, end="", flush=True)
                if output.completion is not None:
                    done[output.request_id] = output.completion
            if not streams:
                bar.set_postfix(running=len(engine.scheduler.running), refresh=False)
                bar.update(len(done) - bar.n)


if __name__ == "__main__":
    sys.exit(main())
