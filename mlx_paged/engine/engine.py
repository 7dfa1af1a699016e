"""Engine: many requests generated at once from one paged pool."""

import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from os import PathLike
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from transformers import PreTrainedTokenizerBase

from mlx_paged.arguments import is_whole, require, shown, suggesting
from mlx_paged.engine.chats import Chat, ChatPrompt, Chats, Reader, chat_list
from mlx_paged.engine.memory_watch import watch_memory
from mlx_paged.engine.model_core import ModelCore
from mlx_paged.engine.models import EngineParts, with_detokenizer
from mlx_paged.engine.one_thread import exclusive
from mlx_paged.engine.text import PromptLike, Tokenizer, prompt_list
from mlx_paged.engine.waiting_calls import OnOutput
from mlx_paged.options import EngineConfig, Policy, PreemptionPolicy
from mlx_paged.outputs import Completion, TokenOutput, likeliest
from mlx_paged.prompt import Prompt
from mlx_paged.runner.device_errors import telling_errors
from mlx_paged.runner.drafting import Drafting
from mlx_paged.runner.model_probe import Batching, require_model
from mlx_paged.runner.positions import positions_of
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.vision.host import hosted, image_processor

QUEUEING = {"priority", "cache_salt", "share", "keep", "turn_ends", "marks"}
"""Arguments of `add_request` that are no fields of SamplingParams."""


class Engine(ModelCore):
    """Continuous batching over a pool of K/V blocks.

    Any number of requests may be added at any time. Each :meth:`step` gives every running request
    its next token and computes a bounded piece of the prompts that are still waiting.

    Args:
        model: an mlx-lm model, e.g. the first value of ``mlx_lm.load``, or one of mlx-vlm, which
            sees images (docs/vision.md).
        tokenizer: the second value, or a tokenizer of transformers. Without it prompts are token
            ids and outputs have no text.
        block_size: token slots in a block.
        kv_memory: bytes for the pool; default: leaves room for others (docs/on-a-mac.md).
        num_blocks: size of the pool in blocks of all layers, instead of `kv_memory`.
        kv_bits: 8 or 6 to store K/V with that many bits an element, 4 to store keys with 6 and
            values with 4 bits; docs/kv-quantization.md has the differences. Default: as the model
            computes it.
        max_kv_tokens: without `kv_memory` and `num_blocks`, the pool has room for no more than
            these tokens.
        cache_limit: bytes of freed buffers that MLX keeps on a GPU while the engine lives; less if
            MLX's limit is. Default: a tenth of the GPU's memory, less if `kv_memory` or
            `num_blocks` sets a small pool, but at least the arrays of a step.
        wired: raise MLX's wired limit while the engine lives (docs/on-a-mac.md has reports of
            kernel panics with it). None: if MLX_PAGED_WIRED is 1.
        max_running: the largest number of requests that are computed together.
        prefill_chunk: the largest number of prompt tokens in a step, in addition to the running
            requests. On a GPU, a prompt takes up to four times as many while no other request runs
            or waits: at most 2,048, or `prefill_chunk` if that is larger.
        max_stall_ms: the longest time of a step while streams run, so that a long prompt does not
            delay them longer. A cost model, fitted to every step, plans steps that take no longer.
            None: only `prefill_chunk` limits a step, and its tokens do not depend on the clock.
        policy: order of waiting requests: "fcfs", "priority", "shortest" or "fair".
        preempt: which request is preempted when no block is free: "newest", "longest" or
            "fewest-generated". Its tokens are computed again, with the same result.
        seed: seed of the random streams of requests that have none of their own.
        prefix_cache: share the K/V of prompts that start with the same tokens.
        max_pinned: the part of the pool that one owner, a `cache_salt`, may pin. All together may
            pin half of the pool.
        snapshot_memory: bytes for copies of the states of recurrent layers. Models with such layers
            need these copies to share prefixes; 0: they do not share them. Default: four copies for
            each running request, but at most a quarter of the memory that the device can spare.
        snapshot_bits: 8 to store these copies with 8 bits an element: a third of float32's bytes or
            less. A prompt that continues from such a copy may get other tokens; docs/engine.md has
            the differences. Default: as the model computes them.
        lookahead: launch each step before the previous step has been read. The device then hardly
            waits for the host, and every token is seen one step later.
        prewarm: compile the GPU pipelines and trace the decodes now, so that the first requests do
            not wait; None: when an :class:`EngineService` starts, whose thread needs its own
            traces. ``stats.prewarm_seconds`` says how long the pipelines took; None on a CPU.
        speculate: speculative decoding: "ngram" proposes the tokens that followed the same tokens
            earlier in a request; None: off. The output stays the same. Steps with drafts are read
            before the next step is launched. Models that compute one sequence at a time compute no
            drafts.
        draft_model: a smaller mlx-lm model with the same vocabulary, which proposes tokens instead.
            Its pool is a part of `kv_memory`, or has as many blocks as `num_blocks` says.
        draft_head: a head of this model, which proposes tokens instead or, with `speculate`, where
            its drafts promise more: a folder with an EAGLE-3 head, a file of `mlx_paged head
            extract`, or a checkpoint with an MTP head (docs/speculation.md).
        num_draft_tokens: the largest number of tokens that a draft model or head proposes for a
            request in a step.
        compile: compute the steps that only decode by graphs that MLX has traced before, if it can
            (docs/compiled-decodes.md). None: if they take less time: measured now.
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
        adapters: folders of adapters by the names that requests give (docs/adapters.md). None:
            requests have no adapters; {}: :meth:`load_adapter` adds all.
        adapter_memory: bytes for the adapters that are in memory. One step may need more, if each
            of its requests has another adapter.
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
        wired: bool | None = None,
        max_running: int = 32,
        prefill_chunk: int = 512,
        max_stall_ms: float | None = None,
        policy: Policy | str = Policy.FCFS,
        preempt: PreemptionPolicy | str = PreemptionPolicy.NEWEST,
        seed: int | None = None,
        prefix_cache: bool = True,
        max_pinned: float = 0.25,
        snapshot_memory: int | None = None,
        snapshot_bits: int | None = None,
        lookahead: bool = True,
        prewarm: bool | None = True,
        speculate: str | None = None,
        draft_model: nn.Module | None = None,
        draft_head: str | PathLike[str] | None = None,
        num_draft_tokens: int = 3,
        compile: bool | None = None,
        cpu_linear: bool | None = None,
        cascade: bool = True,
        profile: bool = False,
        metrics_jsonl: str | PathLike[str] | None = None,
        spike_ms: float | None = None,
        kv_disk: str | PathLike[str] | None = None,
        adapters: Mapping[str, str | PathLike[str]] | None = None,
        adapter_memory: int = 10**9,
        kv_disk_gb: float = 20.0,
        model_files: Sequence[str | PathLike[str]] = (),
    ) -> None:
        require_model("Engine", "model", model)
        if (host := hosted(model, tokenizer)) is not None:
            model, tokenizer = host
        self._image_processor = image_processor(model)
        tokenizer = with_detokenizer(tokenizer)
        config = EngineConfig(
            block_size=block_size,
            kv_memory=kv_memory,
            num_blocks=num_blocks,
            kv_bits=kv_bits,
            max_kv_tokens=max_kv_tokens,
            cache_limit=cache_limit,
            wired=wired,
            max_running=max_running,
            prefill_chunk=prefill_chunk,
            max_stall_ms=max_stall_ms,
            policy=policy,
            preempt=preempt,
            seed=seed,
            prefix_cache=prefix_cache,
            max_pinned=max_pinned,
            snapshot_memory=snapshot_memory,
            snapshot_bits=snapshot_bits,
            lookahead=lookahead,
            prewarm=prewarm,
            speculate=speculate,
            draft_model=draft_model,
            draft_head=draft_head,
            num_draft_tokens=num_draft_tokens,
            compile=compile,
            cpu_linear=cpu_linear,
            cascade=cascade,
            profile=profile,
            metrics_jsonl=metrics_jsonl,
            spike_ms=spike_ms,
            kv_disk=kv_disk,
            adapters=adapters,
            adapter_memory=adapter_memory,
            kv_disk_gb=kv_disk_gb,
            model_files=model_files,
        )
        parts = EngineParts.of(model, tokenizer, config, Drafting)
        traits = parts.models.pooled.profile
        super().__init__(
            parts,
            tokenizer=tokenizer,
            vocab_size=traits.logit_columns,
            embedding_rows=traits.embedding_rows,
            seed=config.seed,
            lookahead=config.lookahead and parts.models.pooled.pool.changes_in_place,
            # Without mixed steps, several tokens of a request at once would need a forward each.
            mixes_steps=traits.batching is Batching.MIXED,
        )
        self.observers.settled += parts.models.companion.observers
        self._encode.positions, self.prewarm = positions_of(model), config.prewarm
        watch_memory(self._pipeline, parts, self._requests.values)
        # The last attribute: MLX's limits are restored after the arrays of a step are gone.
        self._holders = [each.holder for each in parts.models.limits]

    @exclusive
    def generate(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_output: OnOutput | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Complete all prompts; return the completions in the order of the prompts.

        Args:
            prompts: texts or token ids. One text, or the token ids of one prompt, give a list of
                one completion.
            params: for all prompts, or a sequence with one entry for each prompt.
            on_output: called with every token when it is known.

        Raises:
            ValueError: as :meth:`add_request`; no prompt is computed then.
        """
        prompts = prompt_list("generate", prompts)
        each = params if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(
                f"[generate] {len(prompts)} prompts but {len(each)} params: expected one each"
            )
        return self._complete(
            (
                [self.add_request(prompt, param, **options)]
                for prompt, param in zip(prompts, each, strict=True)
            ),
            on_output,
        )

    @exclusive
    def sample(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        n: int,
        params: SamplingParams | None = None,
        best_of: int | None = None,
        on_output: OnOutput | None = None,
        **options: Any,
    ) -> list[list[Completion]]:
        """`n` completions of each prompt, e.g. for policy-gradient methods such as GRPO.

        Every prompt is computed once and its K/V is shared. With a seed s, completion i of each
        prompt draws the same as a request with seed ``s + i``.

        Args:
            prompts: as of :meth:`generate`. One prompt gives a list of one list.
            best_of: generate this many and return the `n` completions with the highest mean
                log-probability, best first.

        More than one completion at temperature 0 gives a UserWarning: they are equal.

        Raises:
            ValueError: `n` above `best_of`, or as :meth:`add_samples`; nothing is computed then.
        """
        prompts = prompt_list("sample", prompts)
        count = n if best_of is None else best_of
        if not (is_whole(n, 1) and is_whole(count, n)):
            given = f"n is {shown(n)} and best_of {shown(best_of)}"
            raise ValueError(f"[sample] {given}: expected 1 <= n <= best_of")
        temperature = options.get("temperature", (params or SamplingParams()).temperature)
        if count > 1 and temperature == 0:
            message = f"[sample] temperature is 0: all {count} completions of a prompt are equal"
            warnings.warn(message, stacklevel=3)  # the caller of the guarded method
        done = self._complete(
            (self.add_samples(prompt, count, params, **options) for prompt in prompts), on_output
        )
        groups = [done[i : i + count] for i in range(0, len(done), count)]
        if best_of is None:
            return groups
        return [likeliest(group, n) for group in groups]

    @exclusive
    def stream(
        self, prompt: PromptLike, params: SamplingParams | None = None, **options: Any
    ) -> Generator[TokenOutput]:
        """Add a request and yield each of its tokens; other requests advance meanwhile.

        This call adds the request, not the first ``next``. Closing the iterator or dropping the
        last reference to it aborts the request, also before the first ``next``.

        Raises:
            ValueError: as :meth:`add_request`, at once.
        """
        request_id = self.add_request(prompt, params, **options)
        outputs = self._read(request_id)
        next(outputs)  # a generator that was never started would not reach its `finally`
        return outputs

    def _read(self, request_id: int) -> Generator[Any]:
        """First None, when the stream is ready; then the outputs of a request."""
        return self._streams.read(self, request_id, self._abort_dropped)

    def with_images(self, prompt: str, images: Sequence[Any]) -> Prompt:
        """A prompt with images, for any call that takes a prompt. Any thread may call this.

        Args:
            prompt: text with a place for each image, as the model's chat template writes it.
            images: bytes of PNG, JPEG, WEBP, GIF or BMP files, or images of PIL.

        Raises:
            ValueError: the model sees nothing, an image is broken or too large, or the prompt has
                other places.
        """
        if self._image_processor is None:
            raise ValueError(
                "[with_images] images are given: expected a model and a processor of mlx-vlm"
            )
        return self._image_processor(prompt, images)

    @cached_property
    def _chats(self) -> Chats:
        return Chats(self.tokenizer, self._image_processor)

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
        request_id, reader = self._add_chat(prompt, params, options)
        outputs = reader.divided(self._read(request_id))
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
        request_id = self.add_request(prompt.prompt, params, **queued)
        return request_id, self._chats.reader(prompt, params)

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
        if limits := [each for each in self._models.limits if each.release.alive]:
            try:
                with telling_errors():
                    mx.synchronize(stream)
            finally:  # also after an error of the device
                for each in limits:
                    each.release()

    @exclusive
    def copy_when_idle(self) -> bool:
        """Do what waits for a pause, copy blocks to `kv_disk`; whether to call this again."""
        if self.has_work:
            return False
        self._settle()  # a step may be under way for requests that ended
        return self._pipeline.rest() or self._pipeline.copy_when_idle()
