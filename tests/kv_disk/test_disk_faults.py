"""A sample of the fault run; the whole is python -m scripts.kv_disk_faults."""

import json

import pytest

from mlx_paged.kv_disk import packs
from scripts import kv_disk_faults


@pytest.mark.sampled(2)
def test_no_fault_changes_a_token_or_raises(capsys):
    assert kv_disk_faults.main(["--faults", "150", "--seed", "5"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["wrong"] == 0 and result["hits"] > 50 and sum(result["dropped"].values()) > 20


@pytest.mark.sampled(2)
def test_a_store_that_trusts_every_payload_is_noticed(capsys, monkeypatch):
    monkeypatch.setattr(packs, "_sums", lambda payloads: [(0, 0)] * len(payloads))
    assert kv_disk_faults.main(["--faults", "150", "--seed", "5"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["wrong"] > 0
