"""Engine: many requests generated at once from one paged pool."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import cached_property, partial
from os import PathLike
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase

from mlx_paged.arguments import GB, require, suggesting
from mlx_paged.engine.chats import Chat, ChatPrompt, Chats, Reader, chat_list
from mlx_paged.engine.models import EngineModels
from mlx_paged.engine.one_thread import exclusive
from mlx_paged.engine.text import Tokenizer
from mlx_paged.engine.waiting_calls import OnOutput, WaitingCalls
from mlx_paged.kv.memory import MemoryBudget, gpu_memory
from mlx_paged.kv_disk.opening import open_tier
from mlx_paged.metrics.recorder import KVReads, PhaseTimes, RecorderConfig, TickWriter
from mlx_paged.metrics.stats import EngineStats
from mlx_paged.metrics.tick_log import TickLog
from mlx_paged.options import EngineConfig, Policy, PreemptionPolicy
from mlx_paged.outputs import Completion, TokenOutput
from mlx_paged.runner.device_errors import telling_errors
from mlx_paged.runner.model_probe import Batching, require_model
from mlx_paged.runner.pooled_model import PooledModel
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.scheduler import PredictSeconds, Scheduler
from mlx_paged.scheduler.tier import Tier
from mlx_paged.vision.host import hosted
from mlx_paged.vision.sight import SeenPrompt

QUEUEING = {"priority", "cache_salt", "keep", "turn_ends"}
"""Arguments of `add_request` that are no fields of SamplingParams."""

WATERMARK = 0.01  # part of the pool that must stay free when a request is admitted while others run


class Engine(WaitingCalls):
    """Continuous batching over a pool of K/V blocks.

    Any number of requests may be added at any time. Each :meth:`step` gives every running request
    its next token and computes a bounded piece of the prompts that are still waiting.

    Args:
        model: an mlx-lm model, e.g. the first value of ``mlx_lm.load``, or one of mlx-vlm, which
            sees images (docs/vision.md).
        tokenizer: the second value, or a tokenizer of transformers. Without it prompts are token
            ids and outputs have no text.
        block_size: token slots in a block.
        kv_memory: bytes for the pool; default: what the device can spare.
        num_blocks: size of the pool in blocks of all layers, instead of `kv_memory`.
        kv_bits: 8 or 6 to store K/V with so many bits an element, 4 to store keys with 6 and values
            with 4 bits; docs/kv-quantization.md has the differences. Default: as the model computes
            it.
        max_kv_tokens: without `kv_memory` and `num_blocks`, the pool has room for no more than
            these tokens.
        cache_limit: bytes of freed buffers that MLX keeps on a GPU while the engine lives; less if
            MLX's limit is. Default: a tenth of the GPU's memory; less if `kv_memory` or
            `num_blocks` asks for a small pool.
        max_running: the largest number of requests that are computed together.
        prefill_chunk: the largest number of prompt tokens in a step, beside the running requests.
        max_stall_ms: the longest time of a step while streams run, so that a long prompt does not
            delay them longer. A cost model, which learns from every step, chooses steps that take
            no longer. None: only `prefill_chunk` limits a step, and its tokens do not depend on the
            clock.
        policy: order of waiting requests: "fcfs", "priority" or "shortest".
        preempt: which request is preempted when no block is free: "newest", "longest" or
            "fewest-generated". Its tokens are computed again, with the same result.
        seed: seed of the random streams of requests that have none of their own.
        prefix_cache: share the K/V of prompts that start with the same tokens.
        snapshot_memory: bytes for copies of the states of recurrent layers. Models with such layers
            need these copies to share prefixes; 0: they do not share them. Default: four copies for
            each running request, but at most a quarter of the memory that the device can spare.
        lookahead: launch each step before the step before it has been read. The device then hardly
            waits for the host, and every token is seen one step later.
        prewarm: compile the GPU pipelines and trace the decodes now, so that the first requests do
            not wait; None: when an :class:`EngineService` starts, whose thread needs its own
            traces. ``stats.prewarm_seconds`` says how long the pipelines took; None on a CPU.
        speculate: what guesses tokens that running requests then compute ahead: "ngram" copies what
            followed the same tokens earlier in a request; None: nothing. The output stays the same.
            Steps with guesses are read before the next one is launched. Models that compute one
            sequence at a time compute no guesses.
        draft_model: a smaller mlx-lm model with the same vocabulary, which guesses tokens instead.
            Its pool is a part of `kv_memory`, or has as many blocks as `num_blocks` says.
        num_draft_tokens: the largest number of tokens that a draft model guesses for a request in a
            step.
        compile: compute the steps that only decode by graphs that MLX has traced before, if it can
            (docs/compiled-decodes.md). None: on a CPU, if they take less time: measured now.
        cpu_linear: compute linear layers on a CPU by this package's kernels (docs/cpu-linear.md).
            None: unless MLX_PAGED_CPU_LINEAR is 0. GPUs keep MLX's.
        cascade: let decodes whose contexts begin with the same blocks attend to these blocks
            together: forks, samples, requests with one system prompt. On a CPU every token stays
            the same.
        profile: synchronise between the phases of every step and time each phase, without
            lookahead. All steps are slower then.
        metrics_jsonl: write one line for every tick to this file.
        spike_ms: longer steps are listed as spikes; default: three times the usual time, at least
            50 ms.
        kv_disk: a directory in which K/V outlives the pool and the process (docs/kv-disk.md).
            :meth:`close` writes what is missing there. Default: none.
        kv_disk_gb: the largest size of the directory `kv_disk`, in GB.
        model_files: directories that the model was loaded from. Their hash is kept in `kv_disk`
            while they do not change; without them every start hashes all weights.

    Raises:
        UnsupportedModelError: results for this model could be wrong.
        ValueError: an argument out of range, or `kv_disk` cannot be used or is in use.
        OSError: `metrics_jsonl` cannot be written.
    """

    @suggesting
    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer | PreTrainedTokenizerBase | None = None,
        *,
        block_size: int = 16,
        kv_memory: int | None = None,
        num_blocks: int | None = None,
        kv_bits: int | str | None = None,
        max_kv_tokens: int | None = None,
        cache_limit: int | None = None,
        max_running: int = 32,
        prefill_chunk: int = 512,
        max_stall_ms: float | None = None,
        policy: Policy | str = Policy.FCFS,
        preempt: PreemptionPolicy | str = PreemptionPolicy.NEWEST,
        seed: int | None = None,
        prefix_cache: bool = True,
        snapshot_memory: int | None = None,
        lookahead: bool = True,
        prewarm: bool | None = True,
        speculate: str | None = None,
        draft_model: nn.Module | None = None,
        num_draft_tokens: int = 3,
        compile: bool | None = None,
        cpu_linear: bool | None = None,
        cascade: bool = True,
        profile: bool = False,
        metrics_jsonl: str | PathLike[str] | None = None,
        spike_ms: float | None = None,
        kv_disk: str | PathLike[str] | None = None,
        kv_disk_gb: float = 20.0,
        model_files: Sequence[str | PathLike[str]] = (),
    ) -> None:
        require_model("Engine", "model", model)
        if (host := hosted(model, tokenizer)) is not None:
            model, tokenizer = host
        self._eyes = getattr(model, "eyes", None)
        tokenizer = _with_detokenizer(tokenizer)
        config = EngineConfig(
            block_size=block_size,
            kv_memory=kv_memory,
            num_blocks=num_blocks,
            kv_bits=kv_bits,
            max_kv_tokens=max_kv_tokens,
            cache_limit=cache_limit,
            max_running=max_running,
            prefill_chunk=prefill_chunk,
            max_stall_ms=max_stall_ms,
            policy=policy,
            preempt=preempt,
            seed=seed,
            prefix_cache=prefix_cache,
            snapshot_memory=snapshot_memory,
            lookahead=lookahead,
            prewarm=prewarm,
            speculate=speculate,
            draft_model=draft_model,
            num_draft_tokens=num_draft_tokens,
            compile=compile,
            cpu_linear=cpu_linear,
            cascade=cascade,
            profile=profile,
            metrics_jsonl=metrics_jsonl,
            spike_ms=spike_ms,
            kv_disk=kv_disk,
            kv_disk_gb=kv_disk_gb,
            model_files=model_files,
        )
        if draft_model is not None:
            require_model("Engine", "draft_model", draft_model)
        writer = None if config.metrics_jsonl is None else TickWriter(config.metrics_jsonl)
        phases = PhaseTimes() if config.profile else None
        models = self._models = EngineModels.of(model, config, phases)
        pooled = models.pooled
        traits = pooled.profile
        prewarm_seconds = models.warm_up() if config.prewarm else None
        layers = zip(traits.windows, traits.shapes, strict=True)
        sizes = [(window, shape.token_bytes) for window, shape in layers if shape is not None]
        super().__init__(
            _scheduler(config, models, _tier_opener(config, model, tokenizer, pooled)),
            models.runner,
            EngineStats(
                config.block_size,
                pooled.pool.block_bytes,
                pooled.pool.num_blocks,
                prewarm_seconds=prewarm_seconds,
                refused_kernels=pooled.refused_kernels,
                traces=pooled.traces,
                ranks=models.rank_stats,
                memory_budget=models.budget.parts,
            ),
            tokenizer=tokenizer,
            vocab_size=traits.logit_columns,
            embedding_rows=traits.embedding_rows,
            seed=config.seed,
            lookahead=config.lookahead,
            # Without mixed steps, several tokens of a request at once would need a forward each.
            fast_forward=traits.batching is Batching.MIXED,
            instruments=RecorderConfig(
                TickLog(spike_ms=config.spike_ms, profile=config.profile),
                KVReads(sizes, config.block_size),
                phases,
                writer,
            ),
        )
        self.prewarm = config.prewarm
        # The last attribute, because an object's attributes die in their order: MLX's limits are
        # restored after the arrays of a step under way are gone.
        self._holders = [each.holder for each in models.limits]

    def with_images(self, prompt: str, images: Sequence[Any]) -> SeenPrompt:
        """A prompt with images, for any call that takes a prompt. Any thread may call this.

        Args:
            prompt: text with a place for each image, as the model's chat template writes it.
            images: bytes of PNG, JPEG, WEBP, GIF or BMP files, or images of PIL.

        Raises:
            ValueError: the model sees nothing, an image is broken or too large, or the prompt has
                other places.
        """
        if self._eyes is None:
            raise ValueError(
                "[with_images] images are given: expected a model and a processor of mlx-vlm"
            )
        seen: SeenPrompt = self._eyes(prompt, images)
        return seen

    @cached_property
    def _chats(self) -> Chats:
        return Chats(self.tokenizer, self._eyes)

    @exclusive
    def chat(
        self,
        messages: Chat | Sequence[Chat],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_output: OnOutput | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **options: Any,
    ) -> list[Completion]:
        """Answer chats; return the completions in their order. The chat template of the model makes
        the prompts.

        ``completion.text`` is the answer, ``completion.reasoning`` the thoughts before the answer,
        ``completion.tool_calls`` the functions that the model calls.

        Args:
            messages: a chat, which is a list of ``{"role": ..., "content": ...}``, or a list of
                chats. A content is text or a list of parts: ``{"type": "text", "text": ...}`` and,
                for models that see, ``{"type": "image", "image": bytes of a file or PIL image}``.
            params: for all chats, or a sequence with one entry for each chat.
            on_output: called with every token when it is known; the `text` of an output has only
                what belongs to the answer.
            tools: functions that the model may call, as in OpenAI's chat completions.
            chat_template_kwargs: arguments of the chat template, such as ``enable_thinking``.
            add_generation_prompt: end the prompt with the beginning of an answer.
            continue_final_message: continue the last message; needs
                ``add_generation_prompt=False``.
            options: fields of :class:`SamplingParams`, instead of `params`, and arguments of
                :meth:`add_request`.

        Raises:
            ValueError: the model has no chat template, the template refuses the messages, the
                model takes no tools or images, or as :meth:`add_request`. No chat is computed then.
        """
        chats = chat_list("chat", messages)
        each = params if isinstance(params, Sequence) else [params] * len(chats)
        if len(each) != len(chats):
            raise ValueError(f"[chat] {len(chats)} chats but {len(each)} params: expected one each")
        is_callable = on_output is None or callable(on_output)
        require(is_callable, "chat", "on_output", on_output, "a callable or None")
        ends = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        prompts = [self._chats.prompt(c, tools, chat_template_kwargs, **ends) for c in chats]
        readers: dict[int, Reader] = {}

        def added() -> Iterator[list[int]]:
            for prompt, param in zip(prompts, each, strict=True):
                request_id, reader = self._add_chat(prompt, param, options)
                readers[request_id] = reader
                yield [request_id]

        def read(output: TokenOutput) -> None:
            parts = readers[output.request_id].read(output)
            if on_output is not None:
                on_output(parts)

        done = self._complete(added(), read)
        return [readers[completion.request_id].completion(completion) for completion in done]

    @exclusive
    def stream_chat(
        self,
        messages: Chat,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **options: Any,
    ) -> Generator[TokenOutput]:
        """Answer one chat and yield each of its tokens, as :meth:`stream` does. The `text` of an
        output belongs to the answer, its `reasoning` to the thoughts.

        Arguments and errors are those of :meth:`chat`.
        """
        chats = chat_list("stream_chat", messages)
        if chats[0] is not messages:
            raise ValueError(f"[stream_chat] messages has {len(chats)} chats: expected one chat")
        prompt = self._chats.prompt(
            messages,
            tools,
            chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        outputs = self._read_stream(*self._add_chat(prompt, params, options))
        next(outputs)  # a generator that was never started would not reach its `finally`
        return outputs

    def _add_chat(
        self, prompt: ChatPrompt, params: SamplingParams | None, options: dict[str, Any]
    ) -> tuple[int, Reader]:
        """Add a chat. Returns the request's id and what divides its answer."""
        own = {name: value for name, value in options.items() if name not in QUEUEING}
        if params is not None and own:
            raise ValueError("[chat] both params and options are given: expected one")
        params = self._chats.params(prompt, SamplingParams(**own) if params is None else params)
        queued = {name: value for name, value in options.items() if name in QUEUEING}
        request_id = self.add_request(prompt.tokens, params, **queued)
        return request_id, self._chats.reader(prompt, params)

    def _read_stream(self, request_id: int, reader: Reader) -> Generator[Any]:
        """First None, when the stream is ready; then the outputs, divided."""
        outputs = self._stream_outputs(request_id)
        next(outputs)
        try:
            yield
            for output in outputs:
                yield reader.read(output)
        finally:
            outputs.close()

    @property
    def manager(self) -> PooledModel:
        """The model's pool of K/V blocks and their allocator."""
        return self._models.pooled

    @property
    def memory_budget(self) -> MemoryBudget:
        """What the engine takes of the device's memory at most."""
        return self._models.budget

    @exclusive
    def warm_up(self) -> None:
        """Compile the GPU pipelines, and trace the decodes for the thread that calls this."""
        self.stats.prewarm_seconds = self._models.warm_up()
        self.stats.memory_budget = self.memory_budget.parts

    @exclusive
    def close(self, stream: Any = None) -> None:
        """Restore MLX's limits of memory now, not only when the engine is collected, and with
        `kv_disk` write what is cached and give up the directory. The engine can go on.

        Args:
            stream: computes the steps, if it is not the default stream.
        """
        if self.scheduler.has_tier:
            self._settle()
            while self._pipeline.copy_when_idle():
                pass
            self.scheduler.leave_tier()
        limits = self._models.limits
        if any(each.release.alive for each in limits):
            try:
                with telling_errors():
                    mx.synchronize(stream)
            finally:  # also after an error of the device
                for each in limits:
                    each.release()

    @exclusive
    def copy_when_idle(self) -> bool:
        """Copy some cached blocks to `kv_disk` if there is nothing else to do; whether to call this
        again."""
        if self.has_work:
            return False
        self._settle()  # a step may be under way for requests that ended
        return self._pipeline.copy_when_idle()


def _tier_opener(
    config: EngineConfig, model: nn.Module, tokenizer: Any, pooled: PooledModel
) -> Callable[[PredictSeconds], Tier] | None:
    """A function that opens the directory of K/V; None if there is none."""
    if config.kv_disk is None:
        return None
    limit = int(config.kv_disk_gb * GB)
    opened = partial(open_tier, config.kv_disk, limit, config.model_files, model, tokenizer, pooled)
    return telling_errors()(opened)


def _scheduler(
    config: EngineConfig,
    models: EngineModels,
    open_tier: Callable[[PredictSeconds], Tier] | None,
) -> Scheduler:
    """The scheduler of an engine's requests."""
    pooled, max_stall_ms = models.pooled, config.max_stall_ms
    return Scheduler(
        pooled.allocator,
        config.max_running,
        config.prefill_chunk,
        prefix_cache=config.prefix_cache,
        policy=Policy(config.policy),
        victims=PreemptionPolicy(config.preempt),
        max_stall=None if max_stall_ms is None else max_stall_ms / 1000,
        watermark=int(WATERMARK * pooled.pool.num_blocks),
        rewinds=not pooled.profile.recurrent,
        max_snapshots=pooled.max_snapshots,
        drafter=models.drafter,
        open_tier=open_tier,
        few_sizes=gpu_memory() is not None,
        scores=models.rank_stats is None,
    )


def _with_detokenizer(tokenizer: Any) -> Tokenizer | None:
    """The tokenizer; as in mlx-lm, one of transformers gets a wrapper with a detokenizer. Raises
    ValueError for anything else."""
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        tokenizer = TokenizerWrapper(tokenizer)
    is_tokenizer = tokenizer is None or hasattr(tokenizer, "detokenizer")
    expected = "the second value of mlx_lm.load(path), a tokenizer of transformers, or None"
    require(is_tokenizer, "Engine", "tokenizer", tokenizer, expected)
    wrapped: Tokenizer | None = tokenizer
    return wrapped
