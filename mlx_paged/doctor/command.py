"""Checks an installation and its device, and prints one page.

The page goes to stdout; progress, what is found first, and mistakes go to stderr.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx

from mlx_paged.arguments import one_line
from mlx_paged.cli import Parser
from mlx_paged.doctor.acceptance import check_acceptance, check_acceptance_of
from mlx_paged.doctor.apart import found_apart
from mlx_paged.doctor.buffers import check_step
from mlx_paged.doctor.common import check_common
from mlx_paged.doctor.findings import Check, Findings, page, run_check, status
from mlx_paged.doctor.flags import KINDS, STEP, unknown
from mlx_paged.doctor.kernels import check_kernels, chosen, compare
from mlx_paged.doctor.machine import check_machine
from mlx_paged.doctor.memory import check_memory
from mlx_paged.doctor.products import check_products
from mlx_paged.doctor.sources import check_sources
from mlx_paged.doctor.speed import check_speed
from mlx_paged.doctor.tokens import check_order, check_tokens
from mlx_paged.doctor.variants import all_variants, common_variants
from mlx_paged.interrupts import INTERRUPTED
from mlx_paged.loading import engine_options, load_model

CHECKS: dict[str, Check] = {
    "machine": check_machine,
    "common": check_common,
    "kernels": check_kernels,
    "sources": check_sources,
    "products": check_products,
    "tokens": check_tokens,
    "acceptance": check_acceptance,
    "order": check_order,
    "memory": check_memory,
    "speed": check_speed,
}
FIRST = {"machine", "common"}
"""What these find is shown when they end; the page comes when all have ended."""

APART = {"machine", "common", "products", "tokens", "acceptance", "order", "memory", "speed"}
"""On a GPU each of these has a process of its own; the kernels have one for each kind."""


def run(parser: Parser, args: argparse.Namespace) -> int:
    """Run the checks. Returns 0 if all is right, 1 if something is not, 3 if nothing is wrong but a
    check was not finished, 130 after Ctrl-C."""
    try:
        checks = _chosen(args.only) if args.model is None else {args.only: _of_model(args)}
    except ValueError as error:
        parser.error(one_line(error))
    if not checks:
        parser.error(unknown(args.only))
    results = list[Findings]()

    def save() -> None:
        _write(args.json, results, args.quick)

    save()
    is_apart = args.only is None and mx.default_device() != mx.Device(mx.cpu)
    try:
        for name, check in checks.items():
            results.append(found := Findings(name))
            if is_apart and name in APART:
                found_apart(found, args.quick)
            else:
                run_check(found, check, args.quick, save)
            save()
            if len(checks) > 1:
                print(progress(results, len(checks)), file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        save()
        print(page(results, args.quick, not_begun=list(checks)[len(results) :]))
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    print(page(results, args.quick))
    return status(results)


def progress(results: Sequence[Findings], number: int) -> str:
    """What stderr shows when a check has ended: one line, and of the first checks, or of one that
    is not ok, all that it found."""
    found = results[-1]
    head, _, rest = found.text().partition("\n")
    told = f"{len(results)} of {number} checks: {head}"
    return f"{told}\n{rest}" if rest and (found.name in FIRST or not found.ok) else told


def _write(path: str | None, results: Sequence[Findings], quick: bool) -> None:
    """Write what was found so far."""
    if path is None:
        return
    findings = {found.name: {"ok": found.ok, **asdict(found)} for found in results}
    ok = bool(results) and all(found.ok for found in results)
    num_wrong = sum(found.num_wrong for found in results)
    report = {"ok": ok, "num_wrong": num_wrong, "quick": quick, "checks": findings}
    Path(path).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _of_model(args: argparse.Namespace) -> Check:
    """The check :data:`OF_A_MODEL`. Raises ValueError if a model of the flags cannot be loaded."""
    model, tokenizer = load_model(args.model, args.adapter_path, args.trust_remote_code)
    options = engine_options(args)
    return lambda found, quick: check_acceptance_of(found, quick, model, tokenizer, options)


def _chosen(only: str | None) -> dict[str, Check]:
    """The checks that run, by name; none if there is no such check or variant."""
    if only is None:
        return CHECKS
    if only in CHECKS:
        return {only: CHECKS[only]}
    if only == STEP:
        return {STEP: check_step}
    if only in KINDS:
        return {"kernels": lambda found, quick: compare(chosen(quick, only), found)}
    known = {variant.name: variant for variant in (*all_variants(), *common_variants())}
    variants = [known[only]] if only in known else []
    return {"kernels": lambda found, _: compare(variants, found)} if variants else {}
