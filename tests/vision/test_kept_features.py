"""Features of pictures that are kept: operations of the vision tower per byte, times their uses."""

import mlx.nn as nn
import numpy as np
import pytest

from mlx_paged.runner.layer_operations import text_work
from mlx_paged.runner.model_probe import probe
from mlx_paged.vision.kept_features import KeptFeatures
from mlx_paged.vision.tower_work import TowerWork

SIZE = 1000
WORK = 10**6


def kept_of(features, digests):
    """Those of some digests that are kept; no use is counted."""
    return [digest for digest in digests if digest in features._kept]


def test_a_picture_that_is_used_stays_before_those_that_come_once():
    features = KeptFeatures(4 * SIZE)
    features.add(b"again", "its features", SIZE, WORK)
    for i in range(20):
        features.add(bytes([i]), i, SIZE, WORK)
        if i % 2:
            assert features.get(b"again") == "its features"
    assert features.nbytes == 4 * SIZE and len(features) == 4


def test_a_picture_that_is_not_used_any_more_goes_at_last():
    features = KeptFeatures(4 * SIZE)
    features.add(b"before", 0, SIZE, WORK)
    for i in range(6):
        features.add(bytes([i]), i, SIZE, WORK)
        features.get(b"before")
    for i in range(40):
        features.add(bytes([i, i]), i, SIZE, WORK)
    assert features.get(b"before") is None


def test_of_pictures_used_as_often_the_one_with_more_operations_per_byte_stays():
    features = KeptFeatures(3 * SIZE)
    features.add(b"dear", 1, SIZE, 2 * WORK)
    features.add(b"large, cheap", 0, 2 * SIZE, WORK)
    features.add(b"new", 2, SIZE, WORK)
    assert kept_of(features, [b"large, cheap", b"dear", b"new"]) == [b"dear", b"new"]


def test_chunks_of_one_prompt_are_one_use():
    features = KeptFeatures(SIZE)
    features.add(b"a", 0, SIZE, WORK)
    for _ in range(5):
        features.get(b"a")
    assert features._kept[b"a"].score == 0


def test_features_of_one_picture_may_take_more():
    features = KeptFeatures(SIZE)
    features.add(b"a", 0, 10 * SIZE, WORK)
    assert features.get(b"a") == 0
    features.add(b"b", 1, 10 * SIZE, WORK)
    assert features.get(b"a") is None and features.nbytes == 10 * SIZE
    features.clear()
    assert (len(features), features.nbytes) == (0, 0)


def test_work_of_a_tower_is_that_of_its_patches_and_of_pairs_in_a_tile():
    work = TowerWork.of(SimpleTower())
    patch = 2 * (16 * 192 + 2 * (4 * 16 * 16 + 16 * 24 * 2))
    assert work == TowerWork(patch, 4 * 16 * 2, 192)
    one = {"pixel_values": np.zeros((1, 3, 32, 32))}
    assert work.of_inputs(one) == 16 * patch + 16 * 16 * 128
    two = {"pixel_values": np.zeros((1, 2, 3, 32, 32))}
    assert work.of_inputs(two) == 2 * work.of_inputs(one)
    rows = {"pixel_values": np.zeros((16, 192))}
    squares = {"pixel_values": np.zeros((1, 16, 3, 8, 8))}
    assert work.of_inputs(rows) == work.of_inputs(squares) == work.of_inputs(one)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(self, name, nn.Linear(16, 16))
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)


class SimpleTower(nn.Module):
    """Patches of 8 by 8 and two layers of attention, and a language model beside them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 8, 8, bias=False)
        self.layers = [Layer(), Layer()]
        self.language_model = nn.Linear(100, 100)


def test_a_language_model_counts_without_its_vision_tower():
    pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: pip install '.[vision]'")
    from mlx_paged.vision.host import hosted
    from tests.support.models import seeing_models

    model, _ = hosted(seeing_models.build("qwen2_vl"), None)
    work = text_work(model, probe(model))
    per_layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48
    assert work.token == 2 * 3 * per_layer
    picture = seeing_models.picture("qwen2_vl", 1)
    assert model.pictures._work.of_inputs(picture.inputs) > 0
