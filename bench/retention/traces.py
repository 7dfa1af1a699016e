"""Fixed traces: who asks what, when, and how large the pool is.

A prompt is a list of pieces. Pieces with the same number have the same tokens, so two prompts agree
as far as their pieces do. The answers are given too. A seed makes every number, so that a name
always means the same trace.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random

POOL_BLOCKS = 1024  # of 16 tokens
LONGEST_PIECE = 1 << 14
TURNS = 20  # of the chat
BETWEEN = 6  # steps from one prompt of a sweep to the next

Piece = tuple[int, int]  # number and tokens


@dataclass(frozen=True)
class Ask:
    """A request of a trace.

    Attributes:
        at: the step before which it arrives.
        who: which part of the trace it belongs to.
        prompt: the pieces of its prompt.
        answer: the piece that answers it.
        salt: only requests with the same salt share K/V.
    """

    at: int
    who: str
    prompt: tuple[Piece, ...]
    answer: Piece
    salt: str = ""

    @property
    def prompt_tokens(self) -> list[int]:
        return [token for piece in self.prompt for token in tokens_of(piece)]

    @property
    def answer_tokens(self) -> list[int]:
        return list(tokens_of(self.answer))


def tokens_of(piece: Piece) -> range:
    """The tokens of a piece; no other number has any of them."""
    number, length = piece
    return range(number * LONGEST_PIECE, number * LONGEST_PIECE + length)


@dataclass
class Trace:
    """Requests in the order of their arrival.

    Attributes:
        watched: the part of the trace whose reuse counts by itself; "": none.
    """

    watched: str = ""
    pool_blocks: int = POOL_BLOCKS
    asks: list[Ask] = field(default_factory=list)


class Author:
    """Writes a trace: a clock in steps, new pieces, and random lengths."""

    def __init__(self, name: str, seed: int = 0, watched: str = "") -> None:
        name = f"{name} {seed}" if seed else name
        self.trace = Trace(watched)
        self.now = 0
        self.random = Random(name)
        self._of_sweeps = Random(f"{name} sweeps")  # the others do not depend on the sweeps
        self._numbers = count(1)

    def piece(self, least: int, most: int, random: Random | None = None) -> Piece:
        """A new piece of `least` to `most` tokens."""
        return next(self._numbers), (random or self.random).randint(least, most)

    def ask(
        self, who: str, prompt: list[Piece], answer: Piece, salt: str = "", wait: int = 0
    ) -> None:
        """A request now; the next one is `wait` steps later."""
        self.trace.asks.append(Ask(self.now, who, tuple(prompt), answer, salt))
        self.now += wait

    def one_off(self, who: str, before: list[Piece], salt: str = "") -> int:
        """A prompt of 300 to 1,200 tokens that comes once; returns its length."""
        prompt = [*before, self.piece(300, 1200, self._of_sweeps)]
        self.ask(who, prompt, self.piece(8, 16, self._of_sweeps), salt, wait=BETWEEN)
        return sum(length for _, length in prompt)

    def sweep(self, pools: float, before: list[Piece], salt: str = "") -> None:
        """One-off prompts with as many tokens as `pools` pools."""
        left = pools * self.trace.pool_blocks * 16
        while left > 0:
            left -= self.one_off("sweep", before, salt)


class Talk:
    """A conversation that grows by a question and an answer each turn."""

    def __init__(self, author: Author, who: str, before: list[Piece], salt: str = "") -> None:
        self._author, self._who, self._salt = author, who, salt
        self._pieces = list(before)

    def turn(self, least: int, most: int, answer: int, wait: int) -> None:
        """Ask with `least` to `most` new tokens; the answer has `answer` tokens or up to half as
        many more."""
        author = self._author
        self._pieces.append(author.piece(least, most))
        said = author.piece(answer, answer + answer // 2)
        author.ask(self._who, self._pieces, said, self._salt, wait)
        self._pieces.append(said)


def chat(pools: float, turns: int = TURNS) -> Callable[[int], Trace]:
    """A chat, and before each of its next turns a sweep. The sweep's prompts and the chat begin
    with the same short system prompt."""

    def write(seed: int = 0) -> Trace:
        author = Author("chat", seed, "chat")
        system = author.piece(200, 200)
        talk = Talk(author, "chat", [system])
        for _ in range(turns):
            talk.turn(40, 120, 80, wait=200)
            author.sweep(pools, [system])
            author.now += 100
        return author.trace

    return write


def agents(seed: int = 0) -> Trace:
    """Three kinds of agents: two that work all the time, short ones that they start one after the
    other, and single calls that summarize a file. Each kind has a system prompt."""
    author = Author("agents", seed)
    main, helper, summary = (author.piece(n, n) for n in (800, 500, 200))
    long_ones = [Talk(author, "main", [main, author.piece(100, 200)]) for _ in range(2)]
    for _ in range(24):
        for agent in long_ones:
            agent.turn(60, 250, 40, wait=100)
            short = Talk(author, "helper", [helper])
            for _ in range(author.random.randint(3, 6)):
                short.turn(100, 400, 40, wait=90)
            for _ in range(author.random.randint(4, 10)):
                author.one_off("summary", [summary])
            author.now += 60
    return author.trace


def tenants(seed: int = 0) -> Trace:
    """Six tenants with a system prompt and a salt each. Four have chats, some more often than
    others, and each tenant's chats come one after the other; two have only one-off prompts."""
    author = Author("tenants", seed)
    systems = [author.piece(n, n) for n in (1500, 900, 700, 400, 300, 300)]
    names = [f"tenant {i}" for i in range(6)]
    talks = [Talk(author, names[i], [systems[i]], names[i]) for i in range(4)]
    left = [6] * 4
    for _ in range(200):
        (i,) = author.random.choices(range(6), (8, 4, 2, 1, 12, 12))
        if i >= 4:
            for _ in range(3):
                author.one_off(names[i], [systems[i]], names[i])
            continue
        if not left[i]:
            talks[i] = Talk(author, names[i], [systems[i]], names[i])
            left[i] = author.random.randint(3, 10)
        talks[i].turn(50, 300, 60, wait=120)
        left[i] -= 1
    return author.trace


def crowd(seed: int = 0) -> Trace:
    """Ten conversations that go on together and have twice the tokens of the pool, some with more
    turns than others: whatever is evicted, some turns have to compute tokens a second time."""
    author = Author("crowd", seed)
    system = author.piece(300, 300)
    talks = [Talk(author, f"talk {i}", [system, author.piece(400, 1200)]) for i in range(10)]
    for _ in range(160):
        (talk,) = author.random.choices(talks, (8, 6, 4, 4, 2, 2, 2, 1, 1, 1))
        talk.turn(40, 240, 60, wait=110)
    return author.trace


TRACES: dict[str, Callable[[int], Trace]] = {
    "chat alone": chat(0),
    "chat beside 1x": chat(1),
    "chat beside 3x": chat(3),
    "chat beside 10x": chat(10),
    "agents": agents,
    "tenants": tenants,
    "crowd": crowd,
}
"""By name: what writes each trace, with its seed."""
