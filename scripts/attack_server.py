"""Whether clients can crash, stop, fill or unlock a server: an attack beside a canary.

    python -m scripts.attack_server --minutes 20 --seed 7

A child process is the server; it listens on loopback and wants a key. Waves of one kind after the
other attack it: requests that have harmed a server before (`attack/kinds.py`), random changes of
valid requests (`attack/mutations.py`), and connections that are slow, unfinished, many or left
(`attack/connections.py`). Meanwhile a canary (`attack/canary.py`) asks greedy questions in three
APIs, streamed and whole. Findings are

- an answer of the canary that differs from its first one, is refused, or takes longer than the
  bound; answers 503 with Retry-After are asked again and count as waiting;
- a server that ends, or that answers nobody for a minute. It is started again;
- a status of 500 or above but for 503 with Retry-After; 200 where a refusal is due; an answer that
  is no JSON of the standard, or no stream of events with an end; no answer in time;
- a traceback, a control character or an unloaded model in the server's log;
- more memory at its peak or its end, or more descriptors or threads at the end, than LIMITS allow.

Each request is made from the seed, its kind and its number, so `--only KIND --first NUMBER` sends a
request of a finding again. It prints a table and one JSON object; the exit status is 1 if there is
a finding. Needs /proc.
"""

import argparse
import json
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.command import ABOVE_ZERO
from mlx_paged import demo_model_path
from mlx_paged.cli import COUNT, Parser
from scripts.attack.canary import Canary
from scripts.attack.connections import FLOODS, is_ended
from scripts.attack.kinds import REQUESTS, Target, strangers_of
from scripts.attack.wire import Request, complaint, exchange
from scripts.soak_server import Footprint, Server

KEY = "attack-7f3a"
WORKERS = 3
WAVE_S, WAVE_REQUESTS = 2.5, 150  # of a wave: no request begins later, and no more of them
FLOOD_S = 3.0  # that connections stay open after they were opened
HELD_S = 45.0  # that those of every third flood stay open; by then the server must have ended them
READ_S = 100.0  # the same where an answer is computed first, and then not read
MAX_HELD = 4  # so many floods at once
HANG_S = 60.0
SETTLE_S = 60.0
MAX_ALIKE = 3  # findings of a kind that differ in numbers only; more are counted and not shown
ALIKE = 40  # letters of a finding that tell it from others
MAX_RESTARTS = 20

LIMITS = {"rss_mib": 150.0, "descriptors": 16, "threads": 48}
"""How much more the process may hold at its end: memory than after the first round of all kinds,
which fills the pool and what the allocator keeps, and which fluctuates by 100 MiB; the rest than at
its start, since threads of executors start when they are first needed."""
KV_MEMORY = "0.1"
PEAK_MIB = 1000.0
"""How much more memory it may hold meanwhile."""


@dataclass
class Kind:
    """What happened to one kind of harm."""

    requests: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    slowest_canary: float = 0.0
    peak_mib: float = 0.0  # of memory during its waves
    findings: int = 0


class Attack:
    """Waves against one server.

    Attributes:
        findings: a line each, with the request where there is one.
        kinds: by name.
    """

    def __init__(self, server: Server, target: Target, log: Path, args: argparse.Namespace) -> None:
        self.findings: list[str] = []
        self.kinds = {name: Kind() for name in (*REQUESTS, *FLOODS)}
        self.num_restarts = 0
        self._now = Kind()  # whose wave runs
        self.warm: Footprint | None = None  # after a round of all kinds, in this life
        self.peak: Footprint = {"rss_mib": 0.0, "descriptors": 0, "threads": 0}
        self._server, self._target, self._log, self._args = server, target, log, args
        self._read = 0  # bytes of the log
        self._numbers: Counter[str] = Counter()
        self._in_flight: dict[str, Request] = {}
        self._held: list[tuple[float, str, list[socket.socket], ExitStack]] = []
        self._alike: Counter[tuple[str | None, str]] = Counter()
        self._ended = threading.Event()
        self.canary = Canary(server.port, KEY, args.bound)

    def run(self) -> None:
        """All kinds in a random order, again and again until the time is over."""
        self.canary.start()
        self.start = self._server.holds()
        watching = threading.Thread(target=self._watch, daemon=True)
        watching.start()
        names = self._args.only or list(self.kinds)
        deadline, rng = time.monotonic() + 60 * self._args.minutes, random.Random(self._args.seed)
        for name in FLOODS:  # some stay open while others attack
            if name in names:
                self._wave(name)
        while not self._is_over(deadline):
            for number, name in enumerate(rng.sample(names, len(names))):
                more = ("mutations",) if number % 3 == 0 and not self._args.only else ()
                for each in (name, *more):
                    if not self._is_over(deadline):
                        self._wave(each)
            if self.warm is None and not self._is_over(deadline):
                self.warm = self._server.holds()
        self._close_held(0.0)
        self.canary.stop()
        self._ended.set()
        watching.join()
        self._found(None, self.canary.findings)

    def _is_over(self, deadline: float) -> bool:
        return self.num_restarts >= MAX_RESTARTS or time.monotonic() > deadline

    def _wave(self, name: str) -> None:
        kind, before = self.kinds[name], len(self.canary.seconds)
        self._now = kind
        self._close_held(HELD_S)
        if name in FLOODS:
            self._flood(name)
        else:
            with ThreadPoolExecutor(WORKERS) as workers:
                until = time.monotonic() + WAVE_S
                share = WAVE_REQUESTS // WORKERS
                list(workers.map(lambda _: self._work(name, until, share), range(WORKERS)))
        restarted = self._revive(name)
        wrong, self.canary.findings = self.canary.findings, []
        self._found(name, [*wrong, *restarted, *self._of_log()])
        kind.slowest_canary = max([kind.slowest_canary, *self.canary.seconds[before:]])

    def _work(self, name: str, until: float, count: int) -> None:
        for _ in range(count):
            if time.monotonic() > until or self._server.exit_status is not None:
                return
            number = self._number(name)
            rng = random.Random(f"{self._args.seed}:{name}:{number}")
            request = REQUESTS[name](rng, self._target)
            label = f"{name} {number}"
            self._in_flight[label] = request
            reply = exchange(self._server.port, request)
            if self._server.exit_status is None:
                del self._in_flight[label]
            kind = self.kinds[name]
            kind.requests += 1
            kind.statuses[str(reply.status or "none")] += 1
            wrong = complaint(request, reply)
            if wrong and self._server.exit_status is None:
                self._found(name, [f"{number}: {wrong}\n    {request.shown()}"])

    def _number(self, name: str) -> int:
        self._numbers[name] += 1
        return int(self._args.first) + self._numbers[name] - 1

    def _flood(self, name: str) -> None:
        number = self._number(name)
        rng = random.Random(f"{self._args.seed}:{name}:{number}")
        stack = ExitStack()
        count, wires = FLOODS[name](rng, self._target, self._server.port, stack)
        self.kinds[name].requests += count
        time.sleep(FLOOD_S)
        if wires and number % 3 == 1 and len(self._held) < MAX_HELD:
            self._held.append((time.monotonic(), name, wires, stack))
        else:
            stack.close()

    def _close_held(self, seconds: float) -> None:
        """Close the connections that have been open for so long. The server must have ended those
        that were open for HELD_S."""
        now, kept = time.monotonic(), []
        for held in self._held:
            opened, name, wires, stack = held
            most = READ_S if name == "slow_readers" else HELD_S
            if now - opened >= most:
                left = sum(not is_ended(wire) for wire in wires)
                text = f"{left} of {len(wires)} connections are open after {most:g} s"
                self._found(name, [text] * bool(left))
            if now - opened < most and seconds:
                kept.append(held)
            else:
                stack.close()
        self._held = kept

    def _revive(self, name: str) -> list[str]:
        """Wait for an answer of the canary. Starts the server again if it has ended, or answers
        nobody; returns what to say of that."""
        ended, server = time.monotonic(), self._server
        while server.exit_status is None and time.monotonic() - ended < HANG_S:
            if self.canary.last_right > ended:
                return []
            time.sleep(0.05)
        status = server.exit_status
        how = f"no answer for {HANG_S:g} s" if status is None else f"exit status {status}"
        with suppress(OSError):
            how += f", {json.dumps(self.peak)}"
        asked = [f"\n    {k}: {request.shown()}" for k, request in self._in_flight.items()]
        self.canary.down()
        server.kill()
        self._close_held(0.0)
        self._in_flight.clear()
        server.start()
        self.start, self.warm = server.holds(), None
        self.num_restarts += 1
        self.canary.up()
        return [f"the server was started again: {how}{''.join(asked)}"]

    def _of_log(self) -> list[str]:
        """What the server's log tells since the last look."""
        with self._log.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        self._read += len(new)
        text = new.decode("utf-8", "replace")
        found = [f"the log has {match!r}" for match in CONTROLS.findall(text)[:1]]
        for word in ("Traceback", "unloading "):
            if word in text:
                at = text.index(word)
                found.append(f"the log has: {text[max(0, at - 200) : at + 1500]!r}")
        return found

    def _found(self, name: str | None, lines: Sequence[str]) -> None:
        for line in lines:
            kind = self.kinds.get(str(name), Kind())
            kind.findings += 1
            self._alike[alike := (name, re.sub(r"[\W\d]", "", line)[:ALIKE])] += 1
            if self._alike[alike] <= MAX_ALIKE:
                self.findings.append(line if name is None else f"{name} {line}")
                print(f"FOUND: {self.findings[-1]}", flush=True)

    def _watch(self) -> None:
        while not self._ended.wait(0.5):
            with suppress(OSError, KeyError, ValueError, IndexError):  # it is ending
                now = self._server.holds()
                self.peak = {name: max(most, now[name]) for name, most in self.peak.items()}
                self._now.peak_mib = max(self._now.peak_mib, now["rss_mib"])

    def settle(self) -> None:
        """Wait until nothing is under way; compare what the process holds with LIMITS."""
        until, held = time.monotonic() + SETTLE_S, 1.0
        while held and time.monotonic() < until:
            time.sleep(1)
            held = self._server.total("mlx_paged_kv_blocks_in_use")
        if held:
            self._found(None, [f"{held:g} blocks are in use at the end"])
        self.end = self._server.holds()
        for name, more in LIMITS.items():
            before = self.warm if name == "rss_mib" else self.start
            if before is not None and self.end[name] > before[name] + more:
                self._found(None, [f"{name} from {before[name]} to {self.end[name]}"])
        if self.peak["rss_mib"] > self.start["rss_mib"] + PEAK_MIB:
            self._found(None, [f"memory up to {self.peak['rss_mib']} MiB"])
        if (status := self._server.stop()) != 0:
            self._found(None, [f"exit status {status} after SIGTERM"])

    def report(self) -> dict[str, Any]:
        seconds = self.canary.seconds or [0.0]
        names = ("p50_s", "p99_s", "max_s")
        quantiles = np.quantile(seconds, (0.5, 0.99, 1)).round(3).tolist()
        return {
            "seed": self._args.seed,
            "canary": {"answers": len(self.canary.seconds), "busy": self.canary.num_busy}
            | dict(zip(names, quantiles, strict=True)),
            "start": self.start,
            "warm": self.warm,
            "peak": self.peak,
            "end": self.end,
            "restarts": self.num_restarts,
            "requests": sum(kind.requests for kind in self.kinds.values()),
            "kinds": {name: vars(kind) for name, kind in self.kinds.items()},
            "findings": self.findings,
        }


CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def table(kinds: dict[str, Kind]) -> str:
    rows = [("kind", "requests", "slowest canary", "peak of memory", "findings", "statuses")]
    for name, kind in ((name, kind) for name, kind in kinds.items() if kind.requests):
        statuses = ", ".join(f"{key}: {n}" for key, n in sorted(kind.statuses.items()))
        slowest = f"{kind.slowest_canary:.2f} s"
        peak = f"{kind.peak_mib:.0f} MiB"
        rows.append((name, str(kind.requests), slowest, peak, str(kind.findings), statuses))
    return "\n".join(f"{a:18}{b:>9}{c:>16}{d:>16}{e:>10}  {f}" for a, b, c, d, e, f in rows)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="scripts.attack_server", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, default=demo_model_path(), metavar="DIR", help="of a chat model")
    add("--minutes", type=ABOVE_ZERO, default=20.0)
    add("--seed", type=int, default=0)
    add("--bound", type=ABOVE_ZERO, default=10.0, metavar="S", help="latest answer of the canary")
    every = ", ".join((*REQUESTS, *FLOODS))
    add("--only", action="append", metavar="KIND", help=f"may be given again: {every}")
    add("--first", type=COUNT, default=1, metavar="N", help="number of each kind's first request")
    args = parser.parse_args(argv)
    if not (args.model / "config.json").is_file():
        parser.error(f"argument --model: expected a directory of a model, got {str(args.model)!r}")
    for name in args.only or ():
        if name not in {**REQUESTS, **FLOODS}:
            parser.error(f"argument --only: expected one of {every}, got {name!r}")
    return args


def target_of(model: Path, folder: Path) -> Target:
    link = folder / "link"
    link.symlink_to(model.resolve())
    config = json.loads((model / "config.json").read_text())
    names = ("default_model", str(model), f"{model}/", str(model.resolve()), str(link))
    return Target(KEY, names, strangers_of(folder, model.resolve()), config["vocab_size"])


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server ends, too
    folder = Path(tempfile.mkdtemp(prefix="attack_server"))
    log = folder / "log"
    started = time.perf_counter()
    server = Server(args.model, "--kv-memory", KV_MEMORY, key=KEY, log=log)
    attack = Attack(server, target_of(args.model, folder), log, args)
    try:
        attack.run()
        attack.settle()
    finally:
        server.kill()
        shutil.rmtree(folder)
    print(table(attack.kinds))
    minutes = {"minutes": round((time.perf_counter() - started) / 60, 1)}
    print(json.dumps(attack.report() | minutes))
    return int(bool(attack.findings))


if __name__ == "__main__":
    sys.exit(main())
