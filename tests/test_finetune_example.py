"""The fine-tuning example runs as a user would run it, and from_pretrained alone loads the model that it saves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import finetune_hf
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from tests.common.distributed import RankPools

pytestmark = pytest.mark.example

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
RANKS = 2
BATCH = 4  # On all ranks together.
SIZE = ["--layers", "2", "--d-model", "64", "--seq-length", "32", "--steps", "4", "--warmup", "1", "--lr", "1e-2"]
SIZE += ["--max-bytes", "200000", "--val-batches", "2"]
FLAGS = [*SIZE, "--batch", str(BATCH // RANKS), "--lowering", "aot_eager", "--device", "cpu"]


def finetune(out: str, flags: tuple[str, ...]) -> None:
    """Run the example; a job for ranks."""
    finetune_hf.run(finetune_hf.parse_args([*FLAGS, "--out", out, *flags]), CPU)


def check(out: Path, tolerance: float = 1e-5) -> torch.nn.Module:
    """Check that training helped, and that the saved model has the loss that the example reported.

    Returns:
        The saved model, loaded by ``from_pretrained`` alone.
    """
    result = json.loads((out / "losses.json").read_text())
    assert result["after"] < result["before"] - 0.02

    args = finetune_hf.parse_args([*SIZE, "--batch", str(BATCH), "--out", str(out / "none")])
    model = AutoModelForCausalLM.from_pretrained(out)
    _, tokens = finetune_hf.read_tokens(args, AutoTokenizer.from_pretrained(out))
    assert finetune_hf.validate(model, model, tokens, args, CPU) == pytest.approx(result["after"], abs=tolerance)
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a GPT-2 in bfloat16 with a tied embedding and a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("checkpoint")
    alphabet = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet | {"se": 256, "lf": 257, "self": 258}, [("s", "e"), ("l", "f"), ("se", "lf")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=259, n_embd=64, n_layer=2, n_head=2, n_positions=32, bos_token_id=None, eos_token_id=None)
    GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_random_llama(tmp_path: Path, rank_pools: RankPools, one_rank: None) -> None:
    rank_pools[RANKS].run(finetune, out=str(tmp_path), flags=())
    check(tmp_path)


@pytest.mark.night
def test_random_llama_by_torchrun(tmp_path: Path, one_rank: None) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += [str(ROOT / "examples/finetune_hf.py"), *FLAGS, "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    check(tmp_path)
    result = json.loads((tmp_path / "losses.json").read_text())
    assert f"held-out loss: {result['before']:.4f} before, {result['after']:.4f} after 4 steps" in done.stdout


@pytest.mark.night
def test_checkpoint_with_tied_embedding_and_tokenizer(
    tmp_path: Path, checkpoint: Path, rank_pools: RankPools, one_rank: None
) -> None:
    rank_pools[RANKS].run(finetune, out=str(tmp_path), flags=("--model", str(checkpoint)))
    model = check(tmp_path)
    assert isinstance(model, GPT2LMHeadModel)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert AutoTokenizer.from_pretrained(tmp_path)("self").input_ids == [258]


def test_lora(tmp_path: Path, rank_pools: RankPools, one_rank: None) -> None:
    pytest.importorskip("peft", reason="--lora needs peft")
    rank_pools[RANKS].run(finetune, out=str(tmp_path), flags=("--lora",))
    loaded = {name.replace(".base_layer", ""): value for name, value in check(tmp_path).state_dict().items()}
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in base.items())


@pytest.mark.night
def test_lora_merged_into_a_checkpoint(tmp_path: Path, checkpoint: Path, rank_pools: RankPools, one_rank: None) -> None:
    pytest.importorskip("peft", reason="--lora needs peft")
    rank_pools[RANKS].run(finetune, out=str(tmp_path), flags=("--model", str(checkpoint), "--lora", "--merge", "--bf16"))
    merged = check(tmp_path, tolerance=1e-3).state_dict()  # The loaded model computes in float32.
    before = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).state_dict()
    assert merged.keys() == before.keys()
    changed = [name for name, value in merged.items() if not torch.equal(value, before[name])]
    assert len(changed) == 2 * 4 and not any("wte" in name for name in changed)


def test_flags_that_would_fail_late(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*flags: str) -> str:
        with pytest.raises(SystemExit):
            finetune_hf.parse_args(["--out", str(tmp_path), *flags])
        return capsys.readouterr().err

    monkeypatch.setattr(finetune_hf.importlib.util, "find_spec", lambda name: None)
    assert "--lora needs peft: pip install peft" in refused("--lora")
    assert "--merge needs --lora" in refused("--merge")
    assert "it has no config.json" in refused("--model", str(tmp_path))
    (tmp_path / "adapter_config.json").touch()
    assert "move it away, or name another folder" in refused()
