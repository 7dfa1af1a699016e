"""Replays the arrays of steps on the allocator, each as long as MLX would hold it."""

from collections import Counter, deque
from collections.abc import Iterable
from random import Random

from tests.gpu_memory.allocator import Allocator
from tests.gpu_memory.engine_steps import DONATES, FROM_BEFORE, VIEWS, Op

MOST_OPS = 50
MOST_ELEMENTS = 50 << 20
MOST_TASKS = 10


class Device:
    """Command buffers hold their arrays until they complete, up to `MOST_TASKS` of them late."""

    def __init__(self, allocator: Allocator, seed: int = 0) -> None:
        self.allocator = allocator
        self._random = Random(seed)
        self._tasks: deque[tuple[int, list[str]]] = deque()  # a step, and what it holds
        self._held: list[str] = []
        self._bound: set[str] = set()  # inputs of the open command buffer
        self._elements = 0  # of these
        self._num_ops = 0
        self._buffers: dict[str, int] = {}
        self._needs: Counter[str] = Counter()  # ops to come and command buffers, by array
        self._results: set[str] = set()
        self._owner: dict[str, str] = {}  # of the last step: what "State" takes
        self._step = 0
        self.num_copied = 0  # arrays that a scatter has copied

    def run(self, step: list[Op], results: set[str]) -> None:
        """One eval. Its results live until the next one is encoded. The engine has waited for the
        step before the last one."""
        self._step += 1
        while self._tasks and self._tasks[0][0] <= self._step - 2:
            self._drop(self._tasks.popleft()[1])
        named = f"{self._step} ".__add__
        owner: dict[str, str] = {}  # of each array's memory
        sizes: dict[str, int] = {}
        for op in step:
            for name, *_ in op.outputs:
                owners = self._owner if op.name in FROM_BEFORE else owner
                owner[name] = owners[op.inputs[0]] if op.name in VIEWS else named(name)
            if op.name not in VIEWS:
                self._needs.update(owner[name] for name in op.inputs)
        kept = {owner[name] for name in results}
        self._needs.update(kept)
        handed = {owner[op.outputs[0][0]] for op in step if op.name == "Pool"}
        self._drop(handed)  # Python's last handle went with the new one
        self._results -= handed
        for op in step:
            if op.name in FROM_BEFORE or op.name not in VIEWS:
                sizes.update((owner[name], count) for name, count, _ in op.outputs)
            if op.name == "constants":
                self._allocate(op, owner)
            elif op.name not in VIEWS and op.name != "weights":
                self._encode(op, owner, sizes)
        self._commit(most=MOST_TASKS)
        self._drop(self._results)
        self._results, self._owner = kept, owner

    def settle(self) -> None:
        """The completion handlers of all command buffers run."""
        self._commit(most=0)

    def _encode(self, op: Op, owner: dict[str, str], sizes: dict[str, int]) -> None:
        inputs = [owner[name] for name in op.inputs]
        given = None
        if op.name in DONATES:
            [(out, _, num_bytes)] = op.outputs
            for each in inputs[:1] if op.name == "Scatter" else inputs:
                fits = num_bytes <= self._buffers.get(each, 0) <= num_bytes + 16_384
                if fits and self._needs[each] == 1:
                    given = each
        if given is None:
            self.num_copied += op.name == "Scatter"
            self._allocate(op, owner)
        else:
            self._buffers[owner[out]] = self._buffers.pop(given)
            del self._needs[given]
            self._drop([owner[out]], 0)
        bound = [each for each in dict.fromkeys(inputs) if each != given]
        self._held += bound
        self._needs.update(bound)
        self._drop(each for each in inputs if each != given)
        for each in inputs:
            if each not in self._bound:
                self._bound.add(each)
                self._elements += sizes[each]
        self._num_ops += 1
        if self._num_ops > MOST_OPS or self._elements >= MOST_ELEMENTS + (1 << 20):
            self._commit(most=self._random.randint(1, MOST_TASKS))

    def _allocate(self, op: Op, owner: dict[str, str]) -> None:
        for name, _, num_bytes in op.outputs:
            self._buffers[owner[name]] = self.allocator.malloc(num_bytes) if num_bytes else 0
            self._drop([owner[name]], 0)

    def _commit(self, most: int) -> None:
        self._tasks.append((self._step, self._held))
        self._held, self._bound, self._elements, self._num_ops = [], set(), 0, 0
        while len(self._tasks) > most:
            self._drop(self._tasks.popleft()[1])

    def _drop(self, names: Iterable[str], count: int = 1) -> None:
        for name in names:
            self._needs[name] -= count
            if self._needs[name] <= 0:
                del self._needs[name]
                size = self._buffers.pop(name, 0)
                if size:
                    self.allocator.free(size)
