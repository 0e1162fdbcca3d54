"""Train the demo drafts: Medusa heads and an EAGLE-3 head that draft for the demo model.

    python -m examples.train_drafts --output_dir examples/demo_drafts

needs torch, tokenizers and safetensors beside the toolkit, two cores and less than an hour. It
writes a folder for each, `eagle` and `medusa`, with matrices in 8 bits, which
--draft_model_name_or_path takes.

The heads learn what the demo model says, so the demo model writes their texts: greedy and sampled
continuations of code in this repository and in calibration.txt. heldout.txt stays apart for
measuring. The model's states at each token are computed once. A head of EAGLE-3 feeds on its own
output from the second draft on, so it is trained over several of its own drafts in a row (Li et
al. 2025), each against the model's distribution at that place; a Medusa head against that of its
place (Cai et al. 2024), the later ones with less weight. Here the target is sharpened, since a
draft stands where it is the likeliest token, and the head of EAGLE-3 has no matrix for logits of
its own: its rows are the embedding's, of the tokens that are most frequent in these texts.
"""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from examples.train_demo_model import LanguageModel, ModelConfig, rotate, write_json
from predict import LLM, SamplingParams

HERE = Path(__file__).parent
FOLDERS = ("predict", "export", "quant", "tests", "examples", "docs", "csrc")
BEGIN = re.compile(r"^(?:def|class|async def|@|import|from|if|for|[A-Z_]+ =)", re.MULTILINE)
SHARPNESS = 2.0  # the power of the model's distribution that heads learn
DECAY = 0.8  # of the weight of each further draft
NUM_DRAFTS = 3  # in a row, that heads are trained over
NUM_APART = 30  # batches to measure on


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of the EAGLE-3 head; all else is the model's."""

    intermediate_size: int = 128
    num_heads: int = 2
    num_kv_heads: int = 1
    num_tokens: int = 1024  # that it drafts


# ---- texts


def prompts(tokenizer: object, count: int, rng: np.random.Generator) -> list[list[int]]:
    """Beginnings of statements in this repository and in calibration.txt, 6 to 64 tokens each."""
    texts = [(HERE / "demo_model" / "calibration.txt").read_text(encoding="utf-8")] * 4
    for folder in FOLDERS:
        paths = sorted((HERE.parent / folder).rglob("*.py"))
        texts += [path.read_text(encoding="utf-8") for path in paths]
    places = [(text, match.start()) for text in texts for match in BEGIN.finditer(text)]
    chosen = [places[index] for index in rng.permutation(len(places))[:count]]
    encode = tokenizer.encode  # type: ignore[attr-defined]
    return [encode(text[at : at + 400])[: int(rng.integers(6, 64))] for text, at in chosen]


def written_texts(model: Path, num_tokens: int, length: int, seed: int) -> list[list[int]]:
    """Token ids of prompts with what the model writes behind them, half of it greedily."""
    rng, made = np.random.default_rng(seed), list[list[int]]()
    llm = LLM(str(model), attention="append", batch_size=64, max_length=length)
    given = prompts(llm.tokenizer, num_tokens // 64, rng)
    for begin in range(0, len(given), 512):
        part = given[begin : begin + 512]
        params = [
            SamplingParams(temperature=0.0 if index % 2 else 0.8, seed=begin + index,
                           max_new_tokens=length - len(ids))
            for index, ids in enumerate(part)
        ]  # fmt: skip
        outputs = llm.generate(part, params)
        made += [ids + list(each.token_ids) for ids, each in zip(part, outputs, strict=True)]
        count = sum(map(len, made))
        print(f"{count} tokens written", flush=True)
        if count >= num_tokens:
            break
    return made


# ---- what heads learn from


@dataclass(frozen=True)
class Batch:
    """Texts of about one length: B of T tokens, and the model's states behind each."""

    token_ids: Tensor  # int64 [B, T]
    num_tokens: Tensor  # int64 [B]: those that are no padding
    final: Tensor  # bfloat16 [B, T, H], behind the last norm

    def valid(self, shift: int) -> Tensor:
        """Of each place, whether one `shift` tokens behind it is of the text."""
        places = torch.arange(self.token_ids.shape[1] - shift)
        return places[None] + shift < self.num_tokens[:, None]


@torch.no_grad()
def with_states(model: LanguageModel, texts: list[list[int]], size: int) -> list[Batch]:
    """The texts in batches of about `size` tokens, with the model's states."""
    batches, decoder = [], model.model
    order = sorted(texts, key=len)
    while order:
        rows = [order.pop()]
        while order and (len(rows) + 1) * len(rows[0]) <= size:
            rows.append(order.pop())
        ids = torch.zeros(len(rows), len(rows[0]), dtype=torch.int64)
        for row, text in enumerate(rows):
            ids[row, : len(text)] = torch.tensor(text)
        final = decoder(ids, model.cos[: ids.shape[1]], model.sin[: ids.shape[1]])
        batches.append(Batch(ids, torch.tensor([*map(len, rows)]), final.bfloat16()))
    return batches


def frequent(texts: list[list[int]], vocab_size: int, count: int) -> Tensor:
    """The ids of the tokens that are most frequent in the texts, in order."""
    ids, nothing = np.concatenate([np.array(text) for text in texts]), vocab_size
    found = np.argsort(-np.bincount(ids, minlength=nothing), kind="stable")[:count]
    return torch.from_numpy(np.sort(found))


class Goal:
    """What the model says behind each place of a batch, of the tokens that heads know."""

    def __init__(self, batch: Batch, rows: Tensor) -> None:
        """rows: [D, H] of the embedding."""
        self.batch = batch
        logits = functional.linear(batch.final, rows)
        self.drawn = logits.argmax(-1)
        self.target = functional.softmax(SHARPNESS * logits.float(), dim=-1)

    def loss(self, logits: Tensor, shift: int) -> tuple[Tensor, Tensor]:
        """Cross entropy of logits [B, T - shift, D] of drafts, and the share of right ones.

        A draft stands for what the model says `shift` tokens behind its place.
        """
        valid = self.batch.valid(shift)
        drawn, right = logits[valid].float(), self.drawn[:, shift:][valid]
        loss = functional.cross_entropy(drawn, self.target[:, shift:][valid])
        return loss, (drawn.detach().argmax(-1) == right).float().mean()


# ---- heads; attribute names are the tensor names of their files


class MidLayer(nn.Module):
    """EAGLE-3's layer, whose attention reads token and state side by side."""

    def __init__(self, model: ModelConfig, config: HeadConfig) -> None:
        super().__init__()
        hidden, dim = model.hidden_size, model.head_dim
        self.head_dim = dim
        self.input_layernorm = nn.RMSNorm(hidden, model.norm_epsilon)
        self.hidden_norm = nn.RMSNorm(hidden, model.norm_epsilon)
        self.post_attention_layernorm = nn.RMSNorm(hidden, model.norm_epsilon)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(2 * hidden, config.num_heads * dim, bias=False),
                "k_proj": nn.Linear(2 * hidden, config.num_kv_heads * dim, bias=False),
                "v_proj": nn.Linear(2 * hidden, config.num_kv_heads * dim, bias=False),
                "o_proj": nn.Linear(config.num_heads * dim, hidden, bias=False),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, config.intermediate_size, bias=False),
                "up_proj": nn.Linear(hidden, config.intermediate_size, bias=False),
                "down_proj": nn.Linear(config.intermediate_size, hidden, bias=False),
            }
        )

    def forward(
        self, token: Tensor, state: Tensor, cos: Tensor, sin: Tensor, past: list[tuple[Tensor, ...]]
    ) -> Tensor:
        """What the layer makes of rows [B, T, H] whose states are its own of as many drafts ago.

        past: keys and values of the true rows, then of each draft's; these rows' are added. A row
        sees the true ones up to its own place of the text, and of each draft its own chain's.
        """
        attention = self.self_attn
        both = torch.cat((self.input_layernorm(token), self.hidden_norm(state)), dim=-1)

        def heads(name: str) -> Tensor:
            return attention[name](both).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        query, key, value = rotate(heads("q_proj"), cos, sin), heads("k_proj"), heads("v_proj")
        past.append((rotate(key, cos, sin), value))
        size = query.shape[2]
        true_keys, true_values = (part[:, :, :size] for part in past[0])
        scores = query @ true_keys.transpose(-1, -2)
        future = torch.ones(size, size, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
        chains = [tuple(part[:, :, :size] for part in each) for each in past[1:]]
        own = [(query * keys).sum(-1, keepdim=True) for keys, _ in chains]
        weights = (torch.cat([scores, *own], dim=-1) / self.head_dim**0.5).softmax(-1)
        mixed = weights[..., :size] @ true_values
        for index, (_, values) in enumerate(chains):
            mixed = mixed + weights[..., size + index, None] * values
        state = state + attention["o_proj"](mixed.transpose(1, 2).flatten(2))
        x, mlp = self.post_attention_layernorm(state), self.mlp
        return state + mlp["down_proj"](functional.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x))


class EagleHead(nn.Module):
    """A head of EAGLE-3 on the model's final state, over the model's own embedding."""

    def __init__(self, sizes: ModelConfig, config: HeadConfig) -> None:
        super().__init__()
        hidden = sizes.hidden_size
        self.midlayer = MidLayer(sizes, config)
        self.norm = nn.RMSNorm(hidden, sizes.norm_epsilon)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        nn.init.constant_(self.norm.weight, SHARPNESS)

    def losses(
        self, batch: Batch, model: LanguageModel, rows: Tensor, num_drafts: int = NUM_DRAFTS
    ) -> list[tuple[Tensor, ...]]:
        """Of each draft, loss and share of right ones."""
        state, past = batch.final.float(), list[tuple[Tensor, ...]]()
        goal, found = Goal(batch, rows), []
        for draft in range(num_drafts):
            size = batch.token_ids.shape[1] - 1 - draft
            token = model.model.embed_tokens(batch.token_ids[:, 1 + draft :])
            cos, sin = (part[draft : draft + size] for part in (model.cos, model.sin))
            state = self.midlayer(token, state[:, :size], cos, sin, past)
            logits = functional.linear(self.norm(state), rows)
            found.append(goal.loss(logits, 1 + draft))
        return found


class MedusaHeads(nn.Module):
    """Medusa's heads over rows of the model's embedding: head k of the token k + 2 places on."""

    def __init__(self, sizes: ModelConfig, count: int) -> None:
        super().__init__()
        hidden = sizes.hidden_size
        self.heads = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(count))
        for head in self.heads:
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)

    def losses(
        self, batch: Batch, model: LanguageModel, rows: Tensor, num_drafts: int = 0
    ) -> list[tuple[Tensor, ...]]:
        """Of each draft, loss and share of right ones; num_drafts says nothing: all are cheap."""
        final, goal, found = batch.final.float(), Goal(batch, rows), []
        for draft, head in enumerate(self.heads):
            state = final[:, : -1 - draft]
            logits = functional.linear(state + functional.silu(head(state)), rows)
            found.append(goal.loss(logits, 1 + draft))
        return found


# ---- training


def in_steps(batches: list[Batch], size: int) -> list[Batch]:
    """The texts of batches, in batches of about `size` tokens."""
    found = []
    for batch in batches:
        count = max(size // batch.token_ids.shape[1], 1)
        for begin in range(0, len(batch.num_tokens), count):
            rows = slice(begin, begin + count)
            longest = int(batch.num_tokens[rows].max())
            if longest > NUM_DRAFTS + 1:
                parts = batch.token_ids[rows, :longest], batch.num_tokens[rows]
                found.append(Batch(*parts, batch.final[rows, :longest]))
    return found


@torch.no_grad()
def shares(
    head: EagleHead | MedusaHeads, batches: list[Batch], model: LanguageModel, rows: Tensor
) -> str:
    """The share of right drafts at each place, over batches that nothing was learned from."""
    found = [[share.item() for _, share in head.losses(each, model, rows)] for each in batches]
    return " ".join(f"{np.mean(share):.3f}" for share in zip(*found, strict=True))


def train(
    head: EagleHead | MedusaHeads,
    batches: list[Batch],
    model: LanguageModel,
    rows: Tensor,
    args: argparse.Namespace,
) -> None:
    """Train head in place. The first batches are those that it is measured on."""
    apart, learned = batches[:NUM_APART], batches[NUM_APART:]
    optimizer = torch.optim.AdamW(head.parameters(), weight_decay=0.0, betas=(0.9, 0.95))
    rng, begin, step = np.random.default_rng(args.seed), time.perf_counter(), 0
    num_steps = args.epochs * len(learned)
    for _ in range(args.epochs):
        for index in rng.permutation(len(learned)):
            done = step / num_steps
            for group in optimizer.param_groups:  # up, and down to zero in a straight line
                group["lr"] = args.learning_rate * min(1.0, 20 * done + 0.02, 1.5 * (1 - done))
            with torch.autocast("cpu", torch.bfloat16):
                # Later drafts cost as much as the first, and are worth little without it.
                found = head.losses(learned[index], model, rows, NUM_DRAFTS if done > 0.5 else 1)
                loss: Tensor = sum(DECAY**draft * part for draft, (part, _) in enumerate(found))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            if step % 200 == 0 or step == num_steps - 1:
                with torch.autocast("cpu", torch.bfloat16):
                    right = shares(head, apart, model, rows)
                seconds = time.perf_counter() - begin
                print(
                    f"{type(head).__name__} {100 * done:3.0f} % {seconds:6.1f} s  loss "
                    f"{loss.item():.3f}  right {right}",
                    flush=True,
                )
            step += 1


# ---- files

IN_8_BITS = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        }
    },
}


def in_8_bits(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file: matrices as codes, four a word, and a scale for each row."""
    made: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if tensor.dim() < 2:
            made[name] = tensor.bfloat16() if tensor.is_floating_point() else tensor
            continue
        scale = (tensor.abs().amax(dim=1, keepdim=True) / 127).bfloat16()
        codes = (tensor / scale.float()).round().clamp(-128, 127) + 128
        base = name.removesuffix(".weight")
        words = codes.to(torch.uint8).contiguous().view(torch.int32)
        made |= {f"{base}.weight_packed": words, f"{base}.weight_scale": scale}
        made[f"{base}.weight_shape"] = torch.tensor(tensor.shape)
    return {name: tensor.contiguous() for name, tensor in made.items()}


def write_eagle(
    folder: Path, head: EagleHead, ids: Tensor, sizes: ModelConfig, config: HeadConfig
) -> None:
    """The head, as SafeAILab names its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    d2t = (ids - torch.arange(len(ids))).int()  # offsets
    state = {name: tensor.detach() for name, tensor in head.state_dict().items()}
    save_file(in_8_bits({**state, "d2t": d2t}), folder / "model.safetensors", {"format": "pt"})
    model = sizes.to_hf()
    same = ("hidden_size", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps")
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: model[name] for name in (*same, "rope_theta", "vocab_size")},
        "draft_vocab_size": len(ids),
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "tie_word_embeddings": True,
        "eagle_config": {"use_aux_hidden_state": False},
        "quantization_config": IN_8_BITS,
    }
    write_json(folder / "config.json", values)


def write_medusa(folder: Path, heads: MedusaHeads, ids: Tensor, sizes: ModelConfig) -> None:
    """The heads, as FasterDecoding names their tensors, with vLLM's table of tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    named = heads.heads.named_parameters()
    state = {name.replace(".", ".0.linear."): tensor.detach() for name, tensor in named}
    state["token_map"] = ids.int()
    save_file(in_8_bits(state), folder / "medusa_lm_head.safetensors", {"format": "pt"})
    values = {
        "medusa_num_heads": len(heads.heads),
        "medusa_num_layers": 1,
        "original_lm_head": True,
        "hidden_size": sizes.hidden_size,
        "vocab_size": sizes.vocab_size,
        "quantization_config": IN_8_BITS,
    }
    write_json(folder / "config.json", values)


def main() -> None:
    """Writes texts, trains, writes files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=HERE / "demo_model")
    parser.add_argument("--tokens", type=int, default=800_000, help="of texts")
    parser.add_argument("--length", type=int, default=192, help="most tokens of a text")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch_size", type=int, default=1024, help="tokens of a step")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--heads", type=int, default=2, help="of Medusa")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    sizes, config = ModelConfig(), HeadConfig()
    texts = written_texts(args.model, args.tokens, args.length, args.seed)
    model = LanguageModel(sizes, 0.0, sizes.max_positions).eval().requires_grad_(False)
    model.load_state_dict(load_file(args.model / "model.safetensors"))
    with torch.autocast("cpu", torch.bfloat16):
        batches = in_steps(with_states(model, texts, 4096), args.batch_size)
    batches = [batches[index] for index in torch.randperm(len(batches)).tolist()]
    ids = frequent(texts, sizes.vocab_size, config.num_tokens)
    rows = model.model.embed_tokens.weight[ids]
    heads = MedusaHeads(sizes, args.heads)
    train(heads, batches, model, rows, args)
    write_medusa(args.output_dir / "medusa", heads, ids, sizes)
    head = EagleHead(sizes, config)
    train(head, batches, model, rows, args)
    write_eagle(args.output_dir / "eagle", head, ids, sizes, config)


if __name__ == "__main__":
    main()
