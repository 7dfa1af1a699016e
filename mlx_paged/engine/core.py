"""EngineCore: what callers ask of an engine, whatever computes its steps. Knows no mlx."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mlx_paged.engine.arguments import Placing, check_beams, check_samples, checked_params
from mlx_paged.engine.beams import BeamGroup, BeamRequests
from mlx_paged.engine.one_thread import exclusive
from mlx_paged.engine.steps import EngineSteps
from mlx_paged.engine.text import Prompt
from mlx_paged.outputs import Completion
from mlx_paged.request import FinishReason, Request
from mlx_paged.sampling_params import SamplingParams


class EngineCore(EngineSteps):
    """What every engine can do, whatever computes its steps.

    One thread uses it at a time; another one gets a RuntimeError meanwhile. A failure ends the
    requests that caused it and no others; after any exception out of here, Ctrl-C included, the
    engine can go on. A call that adds requests adds all of them or, if it raises, none.

    Args:
        scheduler: decides what is computed.
        runner: computes it.
        stats: counters to keep.
        tokenizer: for text prompts, stop strings and text output.
        vocab_size: token ids are below it.
        seed: of the random streams of requests that bring none.
        lookahead: launch each step before the one before it has been read.
        clock: seconds.
        instruments: to measure its steps with.

    Attributes:
        ticks: the latest steps, newest last.
    """

    @exclusive
    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        keep: bool = False,
        **options: Any,
    ) -> int:
        """Queue a prompt (text or token ids); `options` are fields of :class:`SamplingParams`.

        Args:
            priority: lower numbers first, where the engine's policy is "priority".
            cache_salt: K/V is shared only among requests with the same one, e.g. a tenant's name.
            keep: hold the blocks when the request has ended, for :meth:`fork`, until
                :meth:`release` or until they are needed.

        Returns:
            The request's id.

        Raises:
            ValueError: an empty prompt, a token or a bias outside the vocabulary, an argument of a
                wrong kind or out of range, or a request that the pool could never hold.
        """
        placing = Placing.of("add_request", priority, cache_salt, keep)
        params = checked_params("add_request", params, options, self._encode)
        request = self._make_request(self._encode(prompt), params, params.seed)
        self._admit([request], placing, lambda: self.scheduler.add(request))
        return request.id

    @exclusive
    def add_samples(
        self,
        prompt: Prompt,
        n: int,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        **options: Any,
    ) -> list[int]:
        """Queue `n` samples of one prompt, which is computed once; returns their ids.

        Sample i of a request with seed s draws what a request with seed ``s + i`` draws.

        Raises:
            ValueError: `n` below 1, or as :meth:`add_request`.
        """
        check_samples(n)
        placing = Placing.of("add_samples", priority, cache_salt)
        params = checked_params("add_samples", params, options, self._encode)
        tokens = self._encode(prompt)
        seeds = [None if params.seed is None else (params.seed + i) % 2**64 for i in range(n)]
        requests = [self._make_request(list(tokens), params, seed) for seed in seeds]
        leader = requests[0]
        leader.samples = requests[1:]
        self._admit(requests, placing, lambda: self.scheduler.add(leader))
        return [request.id for request in requests]

    @exclusive
    def add_beam_search(
        self,
        prompt: Prompt,
        num_beams: int,
        params: SamplingParams | None = None,
        *,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
        priority: int = 0,
        cache_salt: str = "",
        **options: Any,
    ) -> int:
        """Queue a beam search; its only output is one with a completion, whose `beams` are all.

        Args:
            num_beams: hypotheses alive, and returned; at most as many as the vocabulary has tokens.
            length_penalty: above 0 favours long hypotheses, below 0 short ones.
            early_stopping: end with the first `num_beams` finished hypotheses, better or not.

        Raises:
            ValueError: as :meth:`add_request`, or options that a beam search has no use for.
        """
        placing = Placing.of("add_beam_search", priority, cache_salt)
        params = checked_params("add_beam_search", params, options, self._encode)
        vocab_size = self._encode.vocab_size
        # A prompt has no more continuations than there are tokens. Where their number is not
        # known: each live hypothesis writes into a block of its own.
        most_beams = vocab_size or self.scheduler.allocator.num_blocks
        check_beams(params, num_beams, early_stopping, most_beams)
        root = self._make_request(self._encode(prompt), params, seed=0)
        root.synchronous = True
        stop = self._outputs.stop_token_ids(root)
        group = BeamGroup(num_beams, params.max_tokens, length_penalty, early_stopping, stop)
        num_candidates = min(group.num_candidates, vocab_size or group.num_candidates)
        root.params = replace(params, logprobs=num_candidates)
        self._beams[root.id] = BeamRequests(
            root, group, lambda tokens, logprobs: self._hypothesis(root, tokens, logprobs)
        )
        self._admit([root], placing, lambda: self.scheduler.add(root))
        return root.id

    @exclusive
    def fork(
        self,
        request_id: int,
        suffix: Prompt = (),
        params: SamplingParams | None = None,
        *,
        keep: bool = False,
        **options: Any,
    ) -> int:
        """Start a request that goes on from where another one is, sharing all its blocks.

        Nothing is computed and no block is copied until one of the two writes into a block that
        they share: at most the last one. For the child, all that the parent has so far is prompt.

        Args:
            request_id: of a request under way, or of one that ended and was kept.
            suffix: what the child's prompt has beyond that.
            params: of the child; default the parent's, without its seed.

        Returns:
            The child's id.

        Raises:
            ValueError: no such request, a beam search, or as :meth:`add_request`.
        """
        parent = self._requests.get(request_id) or self._kept.get(request_id)
        if parent is None or parent.synchronous:
            raise ValueError(
                f"[fork] request_id is {request_id}: expected a request under way, or an ended one"
                " that was added with keep=True"
            )
        placing = Placing.beside(parent, keep)
        if params is None and not options:
            params, seed = parent.params, None
        else:
            params = checked_params("fork", params, options, self._encode)
            seed = params.seed
        continuation = self._encode(suffix, continues=True)
        self._settle()
        child = self._make_request(parent.tokens + continuation, params, seed)
        self.scheduler.check_fits(child)
        self._admit([child], placing, lambda: self._branch(parent, child), context=parent.generated)
        return child.id

    @exclusive
    def abort(self, request_id: int) -> Completion | None:
        """End a request early and free its blocks; None if it has ended already."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request_id in self._beams:
            return self._end_beams(self._beams[request_id], FinishReason.ABORT)
        return self._finish(request, FinishReason.ABORT)

    @exclusive
    def release(self, request_id: int) -> None:
        """Give up the blocks of an ended request that was kept; without effect on others."""
        request = self._kept.pop(request_id, None)
        if request is not None:
            self.scheduler.release(request)
            self.runner.drop(request)

    @exclusive
    def reset_prefix_cache(self) -> None:
        """Forget the K/V that finished requests left for reuse."""
        self.scheduler.allocator.drop_cached()

    # Adding

    def _admit(
        self,
        requests: Sequence[Request],
        placing: Placing,
        queue: Callable[[], None],
        context: Sequence[int] = (),
    ) -> None:
        """Add requests, which `queue` gives to the scheduler: all or, if anything fails, none."""
        try:
            for request in requests:
                placing.apply(request)
                self._requests[request.id] = request
                self._outputs.add(request, context)
            queue()
        except BaseException:
            for request in requests:
                self._withdraw(request)
            raise

    def _withdraw(self, request: Request) -> None:
        """Leave no trace of a request that was not wholly added."""
        request.samples, request.keep_blocks = [], False
        self.scheduler.complete(request)
        if request.id in self.scheduler.allocator:  # forked, and not noted anywhere
            self.scheduler.allocator.free(request.id)
        self.runner.drop(request)
        self._outputs.forget(request)
        self._beams.pop(request.id, None)
        self._requests.pop(request.id, None)

    def _branch(self, parent: Request, child: Request) -> None:
        self.scheduler.fork(parent, child)
        self.runner.fork(parent, child)
