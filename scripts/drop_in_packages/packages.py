"""The packages that the table tries, and how to install each beside the tested mlx-lm."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Package:
    """A package of PyPI that uses mlx-lm.

    Args:
        workload: a file of the folder workloads, without its prefix `try_` and its suffix.
        extra: requirements of the workload that the package does not name.
        forced: a version that asks for another mlx-lm. It is installed without this requirement.
    """

    workload: str
    extra: tuple[str, ...] = ()
    forced: str = ""


PACKAGES = {
    "mlx-lm": Package("mlx_lm", ("datasets",)),
    "outlines": Package("outlines"),
    "smolagents": Package("smolagents"),
    "llm-mlx": Package("llm_mlx", ("llm",)),
    "langchain-mlx": Package("langchain_mlx"),
    "lm-eval": Package("lm_eval", ("datasets",)),
    "mlx-lm-lora": Package("mlx_lm_lora"),
    "mlx-tune": Package("mlx_tune"),
    "mlx-optiq": Package("mlx_optiq"),
    "pion-vllm-mlx": Package("pion_vllm_mlx"),
    "rapid-mlx": Package("rapid_mlx", forced="0.16.10"),
    "vllm-mlx": Package("vllm_mlx", forced="0.6.0"),
    "mlx-serve": Package("mlx_serve"),
}
