"""The rules of MLX's Metal backend that the model follows, each with its source in MLX."""

from enum import Enum


class Rule(Enum):
    """A rule: where MLX has it, and what it says. README.md shows the trace that needs it."""

    INPUT_AFTER_OUTPUT = (
        "backend/metal/device.cpp: CommandEncoder::set_input_array",
        "a dispatch that binds what an earlier one of its encoder wrote waits at a barrier",
    )
    OUTPUT_AFTER_INPUT = (
        "backend/metal/device.cpp: CommandEncoder::register_output_array",
        "a dispatch that writes what an earlier one of its encoder binds waits at a barrier",
    )
    OUTPUT_IS_INPUT = (
        "backend/metal/device.cpp: CommandEncoder::set_output_array",
        "an output is bound as an input, too: writes of one buffer are ordered",
    )
    BARRIER_KEEPS_ITS_DISPATCH = (
        "backend/metal/device.cpp: CommandEncoder::maybeInsertBarrier",
        "after a barrier only the buffers of the dispatch behind it are remembered",
    )
    CONCURRENT = (
        "backend/metal/device.h: CommandEncoder::ConcurrentContext",
        "outputs of a concurrent context are known to barriers only when it ends",
    )
    FENCE = (
        "backend/metal/device.cpp: CommandEncoder::end_encoding",
        "an encoder waits for the encoders that had its inputs as outputs",
    )
    FENCE_IGNORES_INPUTS = (
        "backend/metal/device.cpp: CommandEncoder::end_encoding",
        "an encoder does not wait for encoders that only read what it writes",
    )
    SET_BUFFER_IS_BOTH = (
        "backend/metal/device.cpp: CommandEncoder::set_buffer",
        "set_buffer makes a buffer an input and an output of its encoder",
    )
    SET_BUFFER_HAS_NO_BARRIER = (
        "backend/metal/device.cpp: CommandEncoder::set_buffer",
        "barriers do not know of set_buffer",
    )
    TEMPORARIES = (
        "backend/metal/device.cpp: CommandEncoder::end_encoding",
        "temporaries are neither inputs nor outputs of their encoder",
    )
    OWN_FENCE = (
        "backend/metal/device.cpp: CommandEncoder::end_encoding, completion handler",
        "a completed encoder forgets its outputs, but not those that a later one writes again",
    )
    COMMIT_BY_OPS = (
        "backend/metal/device.cpp: CommandEncoder::needs_commit",
        "a command buffer ends when it has more than 40 (Max and Ultra: 50) dispatches",
    )
    COMMIT_BY_ELEMENTS = (
        "backend/metal/device.cpp: CommandEncoder::needs_commit",
        "a command buffer ends when its inputs have more than 40 (50) x 2^20 elements",
    )
    COUNT_ONCE = (
        "backend/metal/device.cpp: CommandEncoder::set_input_array",
        "a buffer is counted when its encoder does not know it yet",
    )
    EVAL_COMMITS = (
        "transforms.cpp: eval_impl; backend/metal/eval.cpp: finalize",
        "every eval ends the encoder and the command buffer of its streams",
    )
    HELD_UNTIL_COMPLETE = (
        "backend/metal/eval.cpp: eval",
        "the memory of a freed array is used again only when its command buffers are complete",
    )
    DONATION = (
        "array.h: is_donatable; backend/metal/eval.cpp: eval",
        "an op gets its input's memory only if no command buffer under way holds it",
    )
    FENCE_BETWEEN_STREAMS = (
        "transforms.cpp: eval_impl; backend/metal/fence.cpp: Fence::wait, Fence::update",
        "within an eval, a stream waits for the stream that computes its input",
    )
    EVENT_BETWEEN_EVALS = (
        "transforms.cpp: eval_impl; backend/metal/event.cpp: Event::wait",
        "a stream waits for the eval in which another stream computes its input",
    )
    HOST_WAIT = (
        "transforms.cpp: eval; array.cpp: array::wait",
        "what is encoded after the host has waited for an eval runs after it",
    )
    SYNCHRONIZE = (
        "backend/metal/device.cpp: CommandEncoder::synchronize",
        "what is encoded after mx.synchronize runs after all earlier work of the stream",
    )
    WIDTH_LIMIT = (
        "transforms.cpp: eval_impl; utils.h: bfs_max_width",
        "the graph is evaluated breadth first, at most 20 arrays wide",
    )

    @property
    def source(self) -> str:
        """A file and a function below mlx/ of MLX's repository."""
        return self.value[0]

    @property
    def statement(self) -> str:
        return self.value[1]


ALL_RULES = frozenset(Rule)
