"""Fine-tune a Hugging Face causal language model, as transformers has it, with fully sharded parameters.

The text is the source code of Python's own standard library.  From the repository root, after `pip install -e .[examples]`:

    torchrun --nproc-per-node 2 examples/finetune_hf.py                       # a small Llama with random weights, on bytes
    torchrun --nproc-per-node 2 examples/finetune_hf.py --model FOLDER        # your checkpoint, with its tokenizer
    torchrun --nproc-per-node 2 examples/finetune_hf.py --model FOLDER --lora            # an adapter for it, by peft
    torchrun --nproc-per-node 2 examples/finetune_hf.py --model FOLDER --lora --merge    # and the two merged

It prints the loss on held-out text before and after training, and saves a model in --out that `from_pretrained` loads:

    model = AutoModelForCausalLM.from_pretrained("runs/finetune_hf")     # an adapter with its base model, where there is peft
    tokenizer = AutoTokenizer.from_pretrained("runs/finetune_hf")

Each rank holds the whole model in CPU memory while it is loaded, and only shards after that.  Parameters are loaded and
saved in float32, whatever the dtype of the checkpoint; --bf16 computes in bfloat16.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.launch import choose_device, join_ranks, mean_over_ranks
from helpers.learning_rate import learning_rate
from helpers.text import check_same_text, read_text, rows
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, LlamaConfig, PreTrainedModel

from fsdp_compile import fsdp_backend, fully_shard


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Fine-tune a Hugging Face causal language model on Python's standard library; start it with torchrun.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help="folder of a checkpoint; default: a small Llama with random weights")
    parser.add_argument("--layers", type=int, default=4, help="of the default model")
    parser.add_argument("--d-model", type=int, default=128, help="width of the default model")
    parser.add_argument("--lora", action="store_true", help="train an adapter of every linear layer, by peft, and nothing else")
    parser.add_argument("--lora-rank", type=int, default=8, help="rank of the adapter")
    parser.add_argument("--merge", action="store_true", help="merge the adapter into what is saved; itself in adapter/")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, reduce gradients in float32")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to run")
    parser.add_argument("--lowering", choices=["inductor", "aot_eager"], default="inductor", help="what compiles the graphs")
    parser.add_argument("--seq-length", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=10, help="steps of linear learning-rate warm-up")
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    parser.add_argument("--seed", type=int, default=0, help="of random weights and the batches")
    parser.add_argument("--max-bytes", type=int, default=4_000_000, help="read at most this much text")
    parser.add_argument("--val-batches", type=int, default=10, help="batches of held-out text")
    parser.add_argument("--out", type=Path, default=Path("runs/finetune_hf"), help="folder for what is written")
    args = parser.parse_args(argv)
    if args.model and not (args.model / "config.json").exists():
        parser.error(f"--model: {args.model} is not the folder of a checkpoint: it has no config.json")
    if any((args.out / name).exists() for name in ("config.json", "adapter_config.json")):
        # Files of another kind of run would stay, and from_pretrained would load a mixture.
        parser.error(f"--out: there is a model in {args.out} already; move it away, or name another folder")
    if args.merge and not args.lora:
        parser.error("--merge needs --lora")
    if args.lora and importlib.util.find_spec("peft") is None:
        parser.error("--lora needs peft: pip install peft")
    return args


# ------------------------------------------------------------------------------------------ model and text


def load_model(args: argparse.Namespace) -> PreTrainedModel:
    """Load the model, or make a small one, in float32: the same on all ranks."""
    if args.model:
        return AutoModelForCausalLM.from_pretrained(args.model.resolve(), dtype=torch.float32)
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=len(ByT5Tokenizer(extra_ids=0)),
        hidden_size=args.d_model,
        intermediate_size=4 * args.d_model,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=args.seq_length,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=1,
    )
    return AutoModelForCausalLM.from_config(config)


def load_tokenizer(args: argparse.Namespace) -> Any:
    """Load the checkpoint's tokenizer. Without a checkpoint, return one with a token per byte and three special ones."""
    return AutoTokenizer.from_pretrained(args.model) if args.model else ByT5Tokenizer(extra_ids=0)


def tokenize(text: Tensor, tokenizer: Any) -> Tensor:
    """Return the token ids of bytes of text; shape (tokens,)."""
    decoded = text.numpy().tobytes().decode(errors="replace")
    return torch.tensor(tokenizer(decoded, add_special_tokens=False, verbose=False).input_ids)


def read_tokens(args: argparse.Namespace, tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Read the text. Return training tokens and held-out tokens."""
    train_text, val_text, digest = read_text(args.max_bytes)
    check_same_text(digest)
    tokens = tokenize(train_text, tokenizer), tokenize(val_text, tokenizer)
    if min(map(len, tokens)) < args.seq_length:
        raise SystemExit("--max-bytes leaves too little text")
    return tokens


def add_lora(model: PreTrainedModel, args: argparse.Namespace) -> Any:
    """Add an adapter to every linear layer. Only adapters are trained."""
    from peft import LoraConfig, get_peft_model

    if not args.model:
        # from_pretrained loads an adapter onto its base model, so that model has to be saved somewhere.
        base = args.out.resolve() / "base"
        if dist.get_rank() == 0:
            model.save_pretrained(base)
        model.name_or_path = str(base)
    torch.manual_seed(args.seed)
    rank = args.lora_rank
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


def shard_model(model: nn.Module, layer_classes: set[str], args: argparse.Namespace, device: torch.device) -> None:
    """Shard each layer, then the rest of the model, and move the shards to the device."""
    options: dict[str, Any] = {"mesh": init_device_mesh(device.type, (dist.get_world_size(),))}
    if args.bf16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = [module for module in model.modules() if type(module).__name__ in layer_classes]
    if not layers:
        raise SystemExit(f"{type(model).__name__} has none of the layers that it says not to split: {sorted(layer_classes)}")
    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    model.to(device)


# ---------------------------------------------------------------------------------------------- training


def loss_of(model: Any, drawn: Tensor) -> Tensor:
    """Return the mean loss of predicting next tokens, in rows of tokens."""
    return model(input_ids=drawn, labels=drawn, use_cache=False).loss


def train(model: nn.Module, compiled: Any, tokens: Tensor, args: argparse.Namespace, device: torch.device) -> list[float]:
    """Train the parameters that are not frozen. Return the loss of each step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr, fused=True)
    losses: list[float] = []
    model.train()
    bar = tqdm(range(args.steps), "training", disable=dist.get_rank() != 0)
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        loss = loss_of(compiled, rows(tokens, args.seq_length, args, device, "train", args.seed, step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
        bar.set_postfix_str(f"loss {losses[-1]:.3f}")
    return losses


@torch.no_grad()
def validate(model: nn.Module, compiled: Any, tokens: Tensor, args: argparse.Namespace, device: torch.device) -> float:
    """Return the mean loss on held-out text."""
    model.eval()
    losses = [loss_of(compiled, rows(tokens, args.seq_length, args, device, "validation", i)) for i in range(args.val_batches)]
    return mean_over_ranks(torch.stack(losses).mean())


# ------------------------------------------------------------------------------------------------ saving


def save(model: Any, tokenizer: Any, args: argparse.Namespace) -> None:
    """Save model and tokenizer in --out, for from_pretrained. With --lora, only the adapter is gathered."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=args.lora)
    state = get_model_state_dict(model, options=options)  # Whole on rank 0, empty elsewhere.
    if dist.get_rank() == 0:
        if args.lora:
            save_adapter(model, state, args)
        else:
            model.save_pretrained(args.out, state_dict=state)
        tokenizer.save_pretrained(args.out)
    dist.barrier()


def save_adapter(model: Any, state: dict[str, Tensor], args: argparse.Namespace) -> None:
    folder = args.out / "adapter" if args.merge else args.out
    model.save_pretrained(folder, state_dict=state, save_embedding_layers=False)
    if args.merge:
        from peft import AutoPeftModelForCausalLM

        whole = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        whole.merge_and_unload().save_pretrained(args.out)


# -------------------------------------------------------------------------------------------------- main


def run(args: argparse.Namespace, device: torch.device) -> None:
    tokenizer = load_tokenizer(args)
    train_tokens, val_tokens = read_tokens(args, tokenizer)
    model: Any = load_model(args)
    name, layer_classes = type(model).__name__, set(model._no_split_modules or ())
    if args.lora:
        model = add_lora(model, args)
    shard_model(model, layer_classes, args, device)
    compiled = torch.compile(model, backend=fsdp_backend, dynamic=False, options={"lowering": args.lowering})

    first = dist.get_rank() == 0
    if first:
        count, trained = (model.num_parameters(only_trainable) / 1e6 for only_trainable in (False, True))
        size = f"{count:.2f} M parameters ({trained:.2f} M trained)"
        print(f"{name}, {size}, on {dist.get_world_size()} {device.type} ranks; compiling", flush=True)
    before = validate(model, compiled, val_tokens, args, device)
    losses = train(model, compiled, train_tokens, args, device)
    after = validate(model, compiled, val_tokens, args, device)
    save(model, tokenizer, args)
    if first:
        (args.out / "losses.json").write_text(json.dumps({"losses": losses, "before": before, "after": after}, indent=1) + "\n")
        print(f"held-out loss: {before:.4f} before, {after:.4f} after {args.steps} steps; saved to {args.out}")


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    device = choose_device(args)
    join_ranks(device)
    try:
        run(args, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
