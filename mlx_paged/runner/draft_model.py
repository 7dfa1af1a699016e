"""A smaller model that guesses the next tokens of an engine's requests."""

import mlx.nn as nn

from mlx_paged.request import Request
from mlx_paged.runner.model_probe import Batching, ModelProfile
from mlx_paged.runner.pooled_drafter import Drafted, PooledDrafter, pooled_beside
from mlx_paged.runner.pooled_model import PooledModel, probed
from mlx_paged.scheduler.progress import Planning

RATE = 0.1  # rate at which the share of right drafts follows the latest ones
FIRST_GUESS = 0.6  # share of right drafts before the first one
RETURN_RATE = 0.002  # rate at which it returns to FIRST_GUESS, so that a request is tried again


class DraftModel(PooledDrafter):
    """Drafts of a small model (Leviathan et al. 2023, arXiv:2211.17192), which has the vocabulary
    of the requests.

    Its K/V lies in a pool of its own, because two models cannot share it. Prompts with a common
    prefix share their blocks there, too.
    """

    def __init__(self, pooled: PooledModel, num_tokens: int) -> None:
        super().__init__(pooled, num_tokens)
        self._embedding_rows = pooled.profile.embedding_rows
        self._shares: dict[int, float] = {}  # of right drafts lately, by request id

    @classmethod
    def beside(
        cls, target: PooledModel, model: nn.Module, profile: ModelProfile, num_tokens: int
    ) -> "DraftModel":
        """A drafter whose pool has room for as many tokens as the target's."""
        return cls(pooled_beside(target, model, profile), num_tokens)

    def likelihood(self, request: Request) -> tuple[float, ...]:
        if self._has_failed:
            return ()
        if request.id not in self._drafted:
            return (FIRST_GUESS,)
        share = self._shares.get(request.id, FIRST_GUESS)
        self._shares[request.id] = share = share + RETURN_RATE * (FIRST_GUESS - share)
        return (share,)

    def verified(self, request: Request, drafted: int, accepted: int) -> None:
        known = self._drafted.get(request.id)
        if known is None:  # a later step failed
            return
        known.num_right = accepted
        share = self._shares.get(request.id, FIRST_GUESS)
        for is_right in [1] * accepted + [0] * (accepted < drafted):
            share += RATE * (is_right - share)
        self._shares[request.id] = share

    def drop(self, request: Request) -> None:
        self._shares.pop(request.id, None)
        super().drop(request)

    def _admit(self, planning: Planning, request: Request) -> Drafted | None:
        if max(request.tokens) >= self._embedding_rows:  # of a prompt: others have no such ids
            return None
        own = Request(
            request.id,
            request.tokens,
            request.params,
            request.seed,
            salt=request.salt,
            num_prompt=request.num_prompt,
        )
        drafted = Drafted(own, len(own.tokens))
        return self._entered(planning, drafted, own.tokens)


def can_draft(profile: ModelProfile) -> bool:
    """Whether drafts of a model's requests can be computed."""
    return profile.batching is not Batching.SINGLE


def probed_draft(profile: ModelProfile, draft_model: nn.Module) -> ModelProfile:
    """What a draft model for the model of `profile` stores.

    Raises:
        ValueError: it has another vocabulary, or it computes one sequence at a time.
    """
    own = probed(draft_model)
    if own.logit_columns != profile.logit_columns or own.embedding_rows < own.logit_columns:
        sizes = {own.logit_columns, own.embedding_rows} - {profile.logit_columns}
        raise ValueError(
            f"[Engine] draft_model has a vocabulary of {min(sizes)} tokens: expected "
            f"{profile.logit_columns}, as many as the model has"
        )
    if not can_draft(own):
        raise ValueError(
            "[Engine] draft_model computes one sequence at a time: expected a model that computes "
            "several together"
        )
    return own
