"""Times the first token of a long prompt after kill -9 and a restart, with its K/V on a disk.

    python -m scripts.kv_disk_restart [--tokens 4000] [--rounds 5] [--cold]

A process computes a prompt on bench's reference model and is killed with SIGKILL when it is idle.
Then, in turns, new processes answer the same prompt with the disk and without, each by the first
step that it ever runs. The first time is beside that of a plain read of the same bytes and of two
steps. With --cold the system forgets the pages of the packs before each round; otherwise they are
in memory. The plain read is by a new process, too; it reads twice, the second time into memory
that it has touched before.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from bench.command import print_result
from bench.models import llama_model, random_prompts
from bench.pairs import in_turns
from mlx_paged import Engine, EngineService
from mlx_paged.cli import COUNT, Parser

OUTPUT = 8


def make_engine(directory: Path | None, num_tokens: int) -> Engine:
    num_blocks = 2 * -(-num_tokens // 16) + 64
    return Engine(llama_model(), num_blocks=num_blocks, kv_disk=directory)


def serve(directory: Path, num_tokens: int) -> None:
    """Answer the prompt and stay idle."""
    service = EngineService(make_engine(directory, num_tokens)).start()
    (prompt,) = random_prompts(1, num_tokens, "reference")
    completion = service.submit(prompt, max_tokens=OUTPUT).result()
    print(json.dumps(completion.tokens), flush=True)
    time.sleep(600)


def answer(directory: Path | None, num_tokens: int, is_cold: bool) -> None:
    """Print the seconds to the first token, the median seconds of a later step, what was read from
    the disk, and all tokens."""
    (prompt,) = random_prompts(1, num_tokens, "reference")
    engine = make_engine(directory, num_tokens)
    if directory is not None and is_cold:
        forget_pages(directory)
    started = time.perf_counter()
    engine.add_request(prompt, max_tokens=OUTPUT)
    times, tokens = list[float](), list[int]()
    while engine.has_work:
        for output in engine.step():
            times.append(time.perf_counter())
            tokens += [] if output.token is None else [output.token]
    gaps = [b - a for a, b in pairwise(times)]
    bytes_read = engine.metrics()["kv_disk"]["bytes_read"] if directory is not None else 0
    engine.close()
    print(json.dumps([times[0] - started, median(gaps), bytes_read, tokens]))


READ = """
import sys, time
from pathlib import Path
files = [path.open("rb", buffering=0) for path in Path(sys.argv[1]).glob("*.kv")]
started = time.perf_counter()
memory = [bytearray(file.seek(0, 2)) for file in files]
for _ in range(2):
    for file, content in zip(files, memory, strict=True):
        file.seek(0)
        file.readinto(content)
    print(time.perf_counter() - started)
    started = time.perf_counter()
"""


def read_all(directory: Path) -> tuple[float, float]:
    """Seconds to read the bytes of all packs in a new process, and once more."""
    command = [sys.executable, "-c", READ, str(directory)]
    first, again = subprocess.check_output(command, text=True).split()
    return float(first), float(again)


def forget_pages(directory: Path) -> None:
    for path in directory.glob("*.kv"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("kv_disk_restart", description="First token after a restart.")
    parser.add_argument("--tokens", type=COUNT, default=4000, metavar="N")
    parser.add_argument("--rounds", type=COUNT, default=5, metavar="N")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--serve", type=Path, metavar="DIR", help="the process that is killed")
    parser.add_argument(
        "--answer", nargs="?", default=False, type=Path, metavar="DIR", help="a process after it"
    )
    args = parser.parse_args(argv)
    if args.serve is not None:
        serve(args.serve, args.tokens)
    if args.answer is not False:
        answer(args.answer, args.tokens, args.cold)
        return 0
    directory = Path(tempfile.mkdtemp(prefix="kv_disk"))
    command = [sys.executable, "-m", "scripts.kv_disk_restart", "--tokens", str(args.tokens)]
    command += ["--cold"] if args.cold else []
    with subprocess.Popen([*command, "--serve", str(directory)], stdout=-1, text=True) as server:
        assert server.stdout is not None
        expected = json.loads(server.stdout.readline())
        time.sleep(2.0)
        server.send_signal(signal.SIGKILL)

    def computed() -> dict[str, float]:
        answered = subprocess.check_output([*command, "--answer"], text=True)
        ttft, *_, tokens = json.loads(answered)
        assert tokens == expected
        return {"computed_ms": 1000 * ttft}

    def read() -> dict[str, float]:
        if args.cold:
            forget_pages(directory)
        first, again = read_all(directory)
        return {"plain_read_ms": 1000 * first, "read_again_ms": 1000 * again}

    def restored() -> dict[str, float]:
        answered = subprocess.check_output([*command, "--answer", str(directory)], text=True)
        ttft, step, bytes_read, tokens = json.loads(answered)
        assert tokens == expected, "other tokens after the restart"
        return {"ttft_ms": 1000 * ttft, "step_ms": 1000 * step, "bytes_read": bytes_read}

    courses = {"restored": restored, "read": read, "computed": computed}
    found = in_turns(courses, args.rounds, title="rounds")
    shutil.rmtree(directory)
    result = {
        name: median(row[name] for row in rows) for rows in found.values() for name in rows[0]
    }
    for name in ("plain_read_ms", "read_again_ms"):
        bound = result[name] + 2 * result["step_ms"]
        result[f"of_{name.removesuffix('_ms')}_and_two_steps"] = result["ttft_ms"] / bound
    result["of_computed"] = result["ttft_ms"] / result["computed_ms"]
    about = {"page_cache": "cold" if args.cold else "warm", "load": os.getloadavg()[0]}
    print_result("kv_disk_restart", {**about, **result})
    return 0


if __name__ == "__main__":
    sys.exit(main())
