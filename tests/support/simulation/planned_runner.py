"""A runner whose steps also go to a second rank, which must see the same."""

from collections.abc import Sequence
from typing import Any

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.runner.batch import BatchTables
from mlx_paged.runner.plan import MirroredAllocator, PlanReader, PlanWriter
from mlx_paged.scheduler.step import Runner, Step


class PlannedRunner:
    """Writes a plan of every step, reads it as another rank does, and compares the two.

    Args:
        inner: computes the steps.

    Attributes:
        num_plans: how many were equal, digests included.
        most_bytes: of one plan.
    """

    def __init__(self, inner: Runner[Any], allocator: BlockAllocator) -> None:
        self.inner, self.allocator = inner, allocator
        self.mirrored = MirroredAllocator(allocator)
        self.writer, self.reader = PlanWriter(allocator), PlanReader(self.mirrored)
        self._tables = BatchTables.of_groups(allocator)  # kept from step to step
        self._mirrored_tables = BatchTables.of_groups(self.mirrored)
        self.num_plans = self.most_bytes = 0
        self._released: list[int] = []
        self._rested: list[int] = []
        self._states = set[int]()  # that the other rank has

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def launch(self, step: Step, before: Any) -> Any:
        self._compare(step)
        return self.inner.launch(step, before)

    def release(self, state_ids: Sequence[int], rested: Sequence[int] = ()) -> None:
        self._released += state_ids
        self._rested += rested
        self.inner.release(state_ids, rested)

    def recover(self, error: BaseException | None = None) -> None:
        self._states.clear()  # real ranks end
        self.inner.recover(error)

    def leaks(self) -> list[Any]:
        """What the other rank still has when every request has ended."""
        self._compare(Step())
        snapshots = getattr(self.allocator.states, "snapshots", None)
        kept = set() if snapshots is None else set(snapshots.state_ids())
        return [*self.reader._requests, *self.mirrored.rows, *self._states ^ kept]

    def _compare(self, step: Step) -> None:
        awaits = any(not span.known for span in step.spans)
        message = self.writer.write(step, awaits, self._released, self._rested)
        found, late = self.reader.read(message)
        assert late == awaits
        assert found.released == [*self._released, *step.released]
        assert found.rested == [*self._rested, *step.rested]
        self._states.update(state.id for span in found.spans for state in span.leaves)
        self._states.difference_update(found.released)
        self._released, self._rested = [], []
        real, mirrored = self.allocator, self.mirrored
        assert found.copies == list(step.copies)
        assert found.is_held_back == step.is_held_back
        for own, other in zip(step.spans, found.spans, strict=True):
            for name in ("start", "stop", "samples", "further", "stored", "reads", "leaves"):
                assert getattr(own, name) == getattr(other, name), name
            assert other.known == own.known
            assert other.request.id == own.request.id
            assert [r.id for r in other.forks] == [r.id for r in own.forks]
        seq_ids = [span.request.id for span in step.spans]
        rows = real.table_rows(seq_ids)
        assert mirrored.table_rows(seq_ids).tolist() == rows.tolist()
        for group in range(len(real.groups)):
            for row in rows.tolist():
                entries = real.block_tables.row(row, group).tolist()
                assert mirrored.block_tables.row(row, group).tolist() == entries
        if seq_ids:
            for own, other in zip(self._tables, self._mirrored_tables, strict=True):
                own.update(seq_ids)
                other.update(seq_ids)
                pieces = real.groups[own.group].pieces
                for array, twin in zip(own.arrays, other.arrays, strict=True):
                    pairs = zip(array.tolist(), twin.tolist(), own._lengths, strict=True)
                    for blocks, theirs, length in pairs:  # what is behind the length is never read
                        assert blocks[: length * pieces] == theirs[: length * pieces]
        self.num_plans += 1
        self.most_bytes = max(self.most_bytes, len(message))
