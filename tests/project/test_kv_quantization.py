"""The quality of quantized K/V: limits on the demo model and on planted outliers."""

import pytest

from scripts import kv_quantization
from scripts.kv_quantization import LIMITS, PAGE, WINDOWS, exceeded, planted_rows, text_rows


@pytest.fixture(scope="module")
def measured():
    return text_rows(WINDOWS[-1]), planted_rows()


@pytest.mark.sampled(2)
def test_nothing_exceeds_its_limit(measured):
    assert exceeded(*measured) == []


@pytest.mark.sampled(2)
def test_the_limits_notice_keys_of_4_bits(measured, monkeypatch):
    texts, rows = measured
    monkeypatch.setattr(kv_quantization, "LIMITS", {"mlx-lm, 4 bits": LIMITS["8,4"]})
    found = " ".join(exceeded(texts, rows))
    for measure in ("mean_kld", "same_top_1", "softmax_kl"):
        assert measure in found


@pytest.mark.sampled(2)
def test_4_bits_change_more_than_8(measured):
    texts, rows = measured
    assert 0 < texts["8"].mean_kld < texts["8,4"].mean_kld < texts["mlx-lm, 4 bits"].mean_kld
    assert rows["8"].output < rows["8,4"].output < rows["8,4"].zero_mean_output


def test_the_page_has_the_tables():
    page = PAGE.read_text()
    for name in (*map(str, WINDOWS), "planted"):
        table = page.split(f"<!-- {name} -->")[1].split("<!-- end -->")[0]
        assert "| 8,4 |" in table and "| mlx-lm, 4 bits |" in table
