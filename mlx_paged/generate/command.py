"""Generates text for one or many prompts. The text goes to stdout, everything else to stderr."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_paged.arguments import one_line
from mlx_paged.cli import Parser
from mlx_paged.engine.engine import Engine
from mlx_paged.generate.batch_job import BatchModel, make_batch_job
from mlx_paged.generate.jobs import Job, add_all, make_job, params_of
from mlx_paged.generate.prompts_file import PromptSpec
from mlx_paged.generate.report import (
    RULE,
    Progress,
    print_results,
    print_stats,
    progress_of,
)
from mlx_paged.generate.results_file import Result, read_answers, results_file
from mlx_paged.interrupts import INTERRUPTED
from mlx_paged.launched import rank
from mlx_paged.loading import context_length, engine_options, load_model
from mlx_paged.outputs import Completion
from mlx_paged.runner.ranks import joined
from mlx_paged.vision.host import image_processor
from mlx_paged.vision.images import knows_only_parts

FAILED = 1
SAME_TEXTS = (
    "mlx_paged.generate: warning: --n or --best-of at temperature 0 gives the same text each time:"
    " --temp above 0 gives different ones"
)


def run(parser: Parser, args: argparse.Namespace, specs: Sequence[PromptSpec]) -> int:
    """Answer the prompts of `specs`, none on ranks but the first. Returns 0, or 1 if a prompt
    failed, or 130 after Ctrl-C."""
    try:
        prepared = _prepare(args, specs)
    except (ValueError, OSError) as error:
        parser.error(one_line(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    try:
        return _run(prepared, args)
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # else the reader of stdout has closed it
            print(f"mlx_paged.generate: error: {one_line(error)}", file=sys.stderr)
        if error.filename is None:  # of stdout, which Python flushes again when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


@dataclass(frozen=True, slots=True)
class Prepared:
    """Prompts that an engine has queued."""

    engine: Engine
    jobs: list[Job]
    ids: list[list[int]]  # of the requests of each job
    refusals: dict[int, str]  # why the engine refused a job, by its number
    answered: dict[int, list[bytes]]  # lines of --output that an earlier run wrote, by number


def _prepare(args: argparse.Namespace, specs: Sequence[PromptSpec]) -> Prepared:
    """Load the model, queue the requests. Raises ValueError for a wrong prompt, model or option,
    OSError for a file that cannot be read or written."""
    if rank():  # it has no prompts, and does not return
        joined(load_model(args.model, args.adapter_path, args.trust_remote_code, args.vision)[0])
    model, tokenizer = load_model(
        args.model, args.adapter_path, args.trust_remote_code, args.vision
    )
    model = joined(model)
    try:
        for token in args.extra_eos_token:
            tokenizer.add_eos_token(token)
    except ValueError as error:
        raise ValueError(f"--extra-eos-token: {error}") from error
    params = params_of(args, tokenizer)
    context = context_length(args.model)
    if specs[0].batch is not None:
        jobs = _batch_jobs(specs, BatchModel(model, tokenizer, args, context))
    else:
        jobs = [
            make_job(
                number,
                spec,
                params,
                tokenizer,
                args,
                image_processor(model),
                knows_only_parts(tokenizer),
                context,
            )
            for number, spec in enumerate(specs, start=1)
        ]
    answered = read_answers(args.output, jobs) if args.resume else {}
    jobs = [job for job in jobs if job.number not in answered]
    if any(job.repeats for job in jobs):
        print(SAME_TEXTS, file=sys.stderr)
    engine = Engine(
        model,
        tokenizer,
        max_kv_tokens=max(
            1, sum(job.max_kv_tokens(args.block_size) for job in jobs if not job.refusal)
        ),
        **engine_options(args),
    )
    ids, refusals = add_all(engine, jobs)
    return Prepared(engine, jobs, ids, refusals, answered)


def _batch_jobs(specs: Sequence[PromptSpec], model: BatchModel) -> list[Job]:
    """The jobs of OpenAI's batch lines. One line on stderr names fields without effect."""
    jobs = [make_batch_job(i, spec, model) for i, spec in enumerate(specs, start=1)]
    ignored = sorted({name for job in jobs for name in job.line.ignored})
    if ignored:
        text = f"bodies have fields that are ignored: {', '.join(ignored)[:1000]}"
        print(f"mlx_paged.generate: warning: {text}", file=sys.stderr)
    return [*jobs]


def _run(prepared: Prepared, args: argparse.Namespace) -> int:
    """Generate, print the texts, write the files. Ctrl-C keeps the finished prompts."""
    engine, jobs, answered = prepared.engine, prepared.jobs, prepared.answered
    total = len(jobs) + len(answered)
    is_printed = args.output is None
    is_single = total == len(jobs) == 1 and jobs[0].count == 1 and args.beams is None
    is_single = is_single and jobs[0].spec.batch is None
    streams = is_single and is_printed
    results: list[Result] = []
    status = 0
    if answered and args.verbose:
        text = f"{len(answered)} of {total} prompts are answered in {args.output}"
        print(text, file=sys.stderr)
    if jobs and args.verbose:
        print(engine.memory_budget.line, file=sys.stderr)
    with results_file(args.output, answered) as write:
        try:
            for result in _finished(prepared, streams=streams, shows=args.verbose):
                write(result)
                results.append(result)
        except KeyboardInterrupt:
            status = INTERRUPTED
    if streams:
        print(flush=True)
    elif is_printed:
        print_results(sorted(results, key=lambda result: result.job.number), total)
    if args.verbose and jobs:
        print_stats(engine)
    if status == INTERRUPTED:
        finished = len(results) + len(answered)
        print(f"interrupted: {finished} of {total} prompts finished", file=sys.stderr)
    if args.stats_json is not None:
        stats = json.dumps(engine.metrics(), indent=2)
        Path(args.stats_json).write_text(stats + "\n", encoding="utf-8")
    engine.close()
    for result in results:
        for error in result.errors:
            print(f"{result.job.spec.source}: {error}", file=sys.stderr)
            status = FAILED
    return status


def _finished(prepared: Prepared, *, streams: bool, shows: bool) -> Iterator[Result]:
    """Run the engine until it is idle: print the text as it comes, or show the progress. Yields
    each prompt when all its completions are there, and first the prompts that were refused."""
    engine, jobs = prepared.engine, prepared.jobs
    for job in jobs:
        if job.number in prepared.refusals:
            yield Result.refused(job, prepared.refusals[job.number])
    if streams and shows:
        print(RULE, file=sys.stderr)
    owners = {
        each: (job, group, place)
        for job, group in zip(jobs, prepared.ids, strict=True)
        for place, each in enumerate(group)
    }
    done: dict[int, Completion] = {}
    prompt_tokens = sum(len(job.tokens) for job in jobs)
    with Progress(len(owners), is_shown=shows and bool(jobs), is_brief=streams) as bar:
        while engine.has_work:
            for output in engine.step():
                if streams:
                    if sys.stdout.isatty():
                        bar.close()  # now the text shows the progress
                    print(output.text, end="", flush=True)
                if output.request_id in done:  # a stop string has ended it within this step
                    continue
                job, group, place = owners[output.request_id]
                completion = job.take(engine, place, output)
                if completion is not None:
                    done[output.request_id] = completion
                    if all(each in done for each in group):
                        yield Result(job, job.select([done[each] for each in group]))
            bar.show(len(done), progress_of(engine, prompt_tokens))
