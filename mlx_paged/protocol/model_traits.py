"""What a request is read and answered with: a model's tokenizer, format and limits."""

from dataclasses import dataclass

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.engine.token_ids import TokenIds
from mlx_paged.formats import choice
from mlx_paged.formats.format import Format
from mlx_paged.protocol.templates import Abilities, tried
from mlx_paged.vision.prompts import ImageProcessor


@dataclass(eq=False, slots=True, kw_only=True)
class ModelTraits:
    """What is known of a model whose engine runs."""

    tokenizer: TokenizerWrapper
    format: Format  # of its thoughts and calls
    token_ids: TokenIds  # checks ids that requests give
    xtc_special_tokens: frozenset[int]
    max_context: int  # tokens of prompt and completion: the model's, or what the pool can serve
    longest_token: int  # bytes
    abilities: Abilities  # of its chat template
    has_states: bool  # of recurrent layers, so that only prompts up to kept ones are shared
    image_processor: ImageProcessor | None = None  # makes its prompts with images

    @property
    def is_running(self) -> bool:
        """Whether the engine takes requests."""
        return True


def format_of(
    tokenizer: TokenizerWrapper, tools: str | None = None, thoughts: str | None = None
) -> tuple[Format, Abilities]:
    """The format of a model, and what its chat template can do. The marks that end its answers end
    them from now on: call it before an engine is made. Raises ValueError if the chat template is
    wrong.

    Args:
        tools: the name of the format of calls; None: the one that the template has.
        thoughts: the name of the marks of thoughts; None: those that the template has.
    """
    form, problem = choice.chosen(tokenizer, tools, thoughts)
    for mark in form.final_marks:
        if mark in tokenizer.get_vocab():
            tokenizer.add_eos_token(mark)
    return form, tried(tokenizer)._replace(tools_problem=problem)


def traits_of(
    tokenizer: TokenizerWrapper,
    form: Format,
    abilities: Abilities,
    token_ids: TokenIds,
    *,
    max_context: int,
    has_states: bool,
    image_processor: ImageProcessor | None,
) -> ModelTraits:
    """The traits of a model; :func:`format_of` gives its format and its abilities."""
    newline = tokenizer.encode("\n", add_special_tokens=False)
    special = token_ids.with_columns({*newline, *tokenizer.eos_token_ids})
    return ModelTraits(
        tokenizer=tokenizer,
        format=form,
        token_ids=token_ids,
        xtc_special_tokens=frozenset(special),
        max_context=max_context,
        longest_token=max(len(token.encode()) for token in tokenizer.get_vocab()),
        abilities=abilities,
        has_states=has_states,
        image_processor=image_processor,
    )
