"""Whether anything grows while a server answers chats and agents over HTTP, killed in the middle.

    python -m scripts.soak_server --model DIR --minutes 30

A child process is the server, with K/V on a disk. Clients send chats in OpenAI's and Anthropic's
form, agents whose histories grow, answers that a schema guides, samples, bad requests, and streams
that they leave. In the middle kill -9 ends the server and it starts again on the same directory.
Then it must find prompts on the disk. A fixed set of greedy questions has to get the same answers
all the time. Each process must hold no more at its end than after its first two tenths of the whole
time. The last line is one JSON object; the exit status is 1 if anything grew or was wrong. Needs
/proc.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from bench.command import ABOVE_ZERO
from mlx_paged.cli import COUNT, Parser
from scripts.soak_clients import TEMPLATE, Clients, answer_of

Footprint = dict[str, float]
"""Of the server's process at the end of a tenth of the time. "step_ms", "cpu_ms" and "gap_ms" are
of this tenth: the median time of a decode step, the processor time for each step, and the median
time between two events of a stream."""

LIMITS = {"rss_mib": (1.05, 16.0), "descriptors": (1.0, 6.0), "threads": (1.0, 2.0)}
"""A process may end with so many times what it had, and so much more: answers are under way."""
DECODES = "mlx_paged_decode_tick_seconds"
SLOWER = 1.3
"""Steps are slower if both their time and their processor time grew so many times: other processes
change the one, other requests the other."""
START_S = 600
TICKS = 200
API_KEY = "MLX_PAGED_API_KEY"


class Server:
    """The child process.

    Args:
        flags: of the server, beside the model, the port, the pool and the template.
        key: that the server wants, or None.
        log: a file for what it writes; None: stderr of this process.
    """

    def __init__(
        self, model: Path, *flags: str, key: str | None = None, log: Path | None = None
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = port = free.getsockname()[1]
        self._command = [sys.executable, "-m", "mlx_paged.server", "--model", str(model)]
        self._command += ["--port", str(port), "--kv-memory", "0.3", "--chat-template", TEMPLATE]
        self._command += flags
        self._key, self._log = key, log
        self.start()

    def start(self) -> None:
        """Returns when it listens. Raises RuntimeError if it does not."""
        with open(self._log or os.devnull, "ab") as log:
            output = None if self._log is None else log
            variables = os.environ if self._key is None else os.environ | {API_KEY: self._key}
            self._process = subprocess.Popen(
                self._command, env=variables, stdout=output, stderr=output
            )
        self._before = {"steps": 0.0, "cpu": 0.0}
        for _ in range(10 * START_S):
            time.sleep(0.1)
            if self._process.poll() is not None:
                break
            try:
                with answer_of(self.port, "/health") as answer:
                    if answer.status == 200:
                        return
            except OSError:
                pass
        self.kill()
        raise RuntimeError(f"{' '.join(self._command)}: does not listen")

    @property
    def exit_status(self) -> int | None:
        """None while the process runs."""
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """The exit status after SIGTERM."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(START_S)

    def holds(self) -> Footprint:
        """What the process holds now; its memory with that of its own children."""
        process = Path(f"/proc/{self._process.pid}")
        children = [
            number
            for thread in (process / "task").iterdir()
            for number in (thread / "children").read_text().split()
        ]
        rss = _status(process, "VmRSS")
        for number in children:
            with suppress(OSError, KeyError):  # it has ended
                rss += _status(Path(f"/proc/{number}"), "VmRSS")
        return {
            "rss_mib": round(rss / 1024, 1),
            "descriptors": len(list((process / "fd").iterdir())),
            "threads": _status(process, "Threads"),
        }

    def footprint(self) -> Footprint:
        process = Path(f"/proc/{self._process.pid}")
        times = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
        now = {f"<= {s.labels['le']}": s.value for s in self.samples(DECODES) if "le" in s.labels}
        now["cpu"] = sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
        now["steps"] = self.total("mlx_paged_steps")
        done = {name: count - self._before.get(name, 0.0) for name, count in now.items()}
        self._before = now
        return self.holds() | {
            "steps": done["steps"],
            "step_ms": round(1000 * median_of_buckets(done), 2),
            "cpu_ms": round(1000 * done["cpu"] / max(1.0, done["steps"]), 2),
        }

    def total(self, name: str) -> float:
        """The sum of a metric's samples."""
        found = [s.value for s in self.samples(name) if not s.name.endswith("_created")]
        return float(sum(found))

    def samples(self, name: str) -> list[Any]:
        with answer_of(self.port, "/metrics", key=self._key) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return [sample for each in families if each.name == name for sample in each.samples]


def _status(process: Path, name: str) -> int:
    """A number of what the system tells of a process; memory in KiB."""
    lines = (process / "status").read_text().splitlines()
    return int(dict(line.split(":\t", 1) for line in lines)[name].split()[0])


def median_of_buckets(counts: dict[str, float]) -> float:
    """Of a histogram's buckets "<= bound", as if their values were spread evenly."""
    names = {float(name[3:]): count for name, count in counts.items() if name.startswith("<= ")}
    half, low, below = max(names.values()) / 2, 0.0, 0.0
    for bound, count in sorted(names.items()):
        if count >= half > below:
            return low + (bound - low) * (half - below) / (count - below)
        low, below = bound, count
    return 0.0


def grown(lives: list[list[Footprint]]) -> list[str]:
    """What each process had more of at its end than after its second tenth."""
    found = []
    for number, (_, first, *_, last) in enumerate(lives, 1):
        for name, (times, more) in LIMITS.items():
            if last[name] > times * first[name] + more:
                found.append(f"life {number}: {name} from {first[name]} to {last[name]}")
        if all(last[name] > SLOWER * first[name] for name in ("step_ms", "cpu_ms")):
            found.append(f"life {number}: step_ms from {first['step_ms']} to {last['step_ms']}")
    return found


def run(server: Server, clients: Clients, seconds: float) -> dict[str, Any]:
    """Two lives of the server, five tenths each."""
    (first, known), lives, differing = clients.probe(), list[list[Footprint]](), 0
    clients.up()
    clients.start()
    for life in range(2):
        if life:
            clients.down()
            server.kill()
            server.start()
            answers, known = clients.probe()
            differing += sum(a != b for a, b in zip(answers, first, strict=True))
            clients.up()
        lives.append([])
        for _ in range(5):
            for _ in range(TICKS):  # while the process is stopped, no time counts
                time.sleep(seconds / 10 / TICKS)
            gaps, clients.gaps = clients.gaps, []
            footprint = server.footprint() | {"gap_ms": round(1000 * median(gaps or [0.0]), 2)}
            answers, _ = clients.probe()  # beside the other requests
            differing += sum(a != b for a, b in zip(answers, first, strict=True))
            lives[-1].append(footprint)
            text = ", ".join(f"{name} {value:.10g}" for name, value in footprint.items())
            print(f"life {life + 1}: {text}, load {os.getloadavg()[0]:.1f}", flush=True)
    clients.stop()
    for _ in range(TICKS):  # the server still notices that a client left
        if not (held := server.total("mlx_paged_kv_blocks_in_use")):
            break
        time.sleep(0.1)
    return {
        "counts": dict(sorted(clients.counts.items())),
        "cached_tokens": clients.cached,
        "differing_probes": differing,
        "cached_after_restart": known[0],  # of the first prompt, which no other one preceded
        "from_disk": server.total("mlx_paged_kv_disk_hits"),
        "blocks_in_use": held,
        "failures": len(clients.failures),
        "grown": grown(lives),
        "lives": lives,
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="scripts.soak_server", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="directory of a chat model")
    add("--minutes", type=ABOVE_ZERO, default=30.0)
    add("--clients", type=COUNT, default=3, metavar="N", help="threads that send requests")
    add("--pause", type=ABOVE_ZERO, default=1.0, metavar="S", help="mean time between two of one")
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if not args.model.is_dir():
        parser.error(f"argument --model: expected a directory, got {str(args.model)!r}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    directory = Path(tempfile.mkdtemp(prefix="soak_server"))
    started = time.perf_counter()
    disk = ("--kv-disk", str(directory), "--kv-disk-gb", "1")
    server = Server(args.model, *disk, "--log-level", "ERROR")
    clients = Clients(server.port, args.clients, args.pause, args.seed)
    try:
        report = run(server, clients, 60 * args.minutes)
        report["exit_status"] = server.stop()
    finally:
        clients.stop()
        server.kill()
        shutil.rmtree(directory)
    wrong = report["failures"] or report["differing_probes"] or report["blocks_in_use"]
    is_found = report["cached_after_restart"] > 0 and report["from_disk"] > 0
    report["minutes"] = round((time.perf_counter() - started) / 60, 1)
    print(json.dumps(report))
    return int(bool(wrong or report["grown"] or report["exit_status"] or not is_found))


if __name__ == "__main__":
    sys.exit(main())
