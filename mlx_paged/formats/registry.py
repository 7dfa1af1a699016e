"""All formats, and which of them a model has."""

from mlx_paged.formats.apertus import Apertus
from mlx_paged.formats.cohere import Cohere
from mlx_paged.formats.deepseek_dsml import DeepSeekV4, DeepSeekV32
from mlx_paged.formats.deepseek_v3 import DeepSeekV3, DeepSeekV31
from mlx_paged.formats.ernie import Ernie
from mlx_paged.formats.format import Format
from mlx_paged.formats.function_gemma import FunctionGemma
from mlx_paged.formats.gemma4 import Gemma4
from mlx_paged.formats.glm import Glm
from mlx_paged.formats.granite import Granite
from mlx_paged.formats.harmony import Harmony
from mlx_paged.formats.hunyuan import Hunyuan
from mlx_paged.formats.json_tools import JsonTools
from mlx_paged.formats.kimi_k2 import KimiK2
from mlx_paged.formats.kimi_k3 import KimiK3
from mlx_paged.formats.lfm2 import Lfm2
from mlx_paged.formats.llama3 import Llama3
from mlx_paged.formats.llama4 import Llama4
from mlx_paged.formats.longcat import Longcat
from mlx_paged.formats.minicpm5 import MiniCpm5
from mlx_paged.formats.minimax_m2 import MiniMaxM2
from mlx_paged.formats.mistral import Mistral
from mlx_paged.formats.muse_spark import MuseSpark
from mlx_paged.formats.nemotron import Nemotron
from mlx_paged.formats.olmo3 import Olmo3
from mlx_paged.formats.phi4_mini import Phi4Mini
from mlx_paged.formats.pythonic import Pythonic
from mlx_paged.formats.qwen3_coder import Qwen3Coder
from mlx_paged.formats.seed_oss import SeedOss

FORMATS: tuple[type[Format], ...] = (
    Qwen3Coder,
    Harmony,
    Mistral,
    Longcat,
    Glm,
    MiniMaxM2,
    KimiK2,
    KimiK3,
    MuseSpark,
    SeedOss,
    Nemotron,
    DeepSeekV31,
    DeepSeekV3,
    DeepSeekV32,
    DeepSeekV4,
    MiniCpm5,
    JsonTools,
    Phi4Mini,
    Granite,
    Hunyuan,
    Apertus,
    Cohere,
    Ernie,
    Lfm2,
    Olmo3,
    Pythonic,
    Gemma4,
    FunctionGemma,
    Llama3,
    Llama4,
)
"""Formats in the order in which they are tried on what a chat template writes. One that reads texts
of another comes after it."""


def named(name: str) -> type[Format] | None:
    """The format with a name or an alias; None if there is none."""
    return next((form for form in FORMATS if name in (form.name, *form.aliases)), None)
