"""Train the demo model: a small Llama on the source code of the Python standard library.

    python examples/train_demo_model.py --output_dir examples/demo_model

needs torch (2.9 or newer, a GPU), tokenizers and safetensors, and writes a checkpoint in the
Hugging Face layout: config.json, generation_config.json, model.safetensors (bfloat16),
tokenizer.json, tokenizer_config.json, the held-out text (heldout.txt), the validation text
(calibration.txt, for quantization), Python's licence and a README.md with the measured perplexity.

The text is small (9M tokens), so it is read for many epochs and the recipe guards against
memorising it: dropout, weight decay, a fresh order and a fresh cut of the documents every epoch,
and the checkpoint that is best on validation modules wins. A model of this size writes code better
than English and tends to repeat itself, so short definitions without docstrings are also read as
documents of their own, and the last steps read mostly those in which no line comes twice: that
costs perplexity and gives greedy text that ends. The validation modules choose the checkpoint that
the last steps begin from; the reported perplexity is of other modules that nothing here looks at.
Matrices are trained with Muon (Jordan et al. 2024, as in torch.optim), the rest with AdamW.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import io
import json
import math
import platform
import re
import shutil
import sys
import sysconfig
import textwrap
import time
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn import functional

# Reported on, never trained on or selected on. Their tests are left out as well.
HELDOUT_MODULES = (
    "bisect",
    "colorsys",
    "csv",
    "fnmatch",
    "graphlib",
    "heapq",
    "queue",
    "reprlib",
    "sched",
    "shlex",
    "statistics",
    "textwrap",
)
# Choose the checkpoint; likewise left out of training.
VALIDATION_MODULES = ("cmd", "copy", "getopt", "glob", "netrc", "string", "timeit", "zipapp")

EXCLUDED_DIRS = frozenset({"site-packages", "__pycache__", "pydoc_data", "encodings"})
TEST_DIRS = frozenset({"test", "tests", "idle_test"})
MAX_DIGIT_SHARE = 0.12  # above it a file is a table of constants, not code
# What one epoch reads: short definitions, each a document of its own so that the model learns to
# begin and to end, and files, for everything else. Definitions are mostly read without docstrings
# and comments: a model of this size writes code better than English.
LIBRARY_SHARE = 0.6  # of the files
TEST_SHARE = 0.15  # of the test files
WRITTEN_SHARE = 0.2  # of the definitions read with their docstrings and comments
# In an epoch of the last steps: of the files, of the definitions without repeated lines, and how
# often each of the self-contained functions among them comes besides.
FINISH_LIBRARY_SHARE, FINISH_DEFINITION_SHARE, FINISH_TIMES = 0.1, 0.3, 2
MIN_LINES, MAX_LINES = 4, 30  # of a definition, the signature included: no stubs
MIN_DISTINCT = 0.75  # share of a definition's lines that differ in more than constants
CONSTANT = r"\d+|'[^']*'|\"[^\"]*\""
COMPOUND = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.If,
    ast.Try,
    ast.For,
    ast.While,
    ast.With,
)

BOS, EOS, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"
# Newlines; the indentation of a line; single digits; words and punctuation with at most one leading
# space; blanks. Indentation is apart from both neighbours, so a prompt may end before or after it.
PRE_TOKEN_PATTERN = r"\n+|(?<=\n)[ \t]+|\p{N}| ?[\p{L}_]+| ?[^\s\p{L}\p{N}_]+|[^\S\n]+"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the model; matrix sides are multiples of 128, as quantization groups want them."""

    vocab_size: int = 5120
    hidden_size: int = 384
    intermediate_size: int = 896
    num_layers: int = 7
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    max_positions: int = 2048
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-5

    def to_hf(self) -> dict[str, object]:
        """The contents of config.json but for the special token ids."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.norm_epsilon,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "use_cache": True,
            "torch_dtype": "bfloat16",
        }


# ---- model; attribute names are the tensor names of LlamaForCausalLM


def rope_cache(config: ModelConfig, num_positions: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the rotary angles, each [num_positions, head_dim], halves repeated."""
    exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    angles = torch.outer(torch.arange(num_positions).float(), config.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of x [batch, heads, tokens, head_dim] by the angles."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        hidden, dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(hidden, config.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * dim, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """What attention adds to the residual stream; x [batch, tokens, hidden_size]."""

        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        v = heads(self.v_proj(x))
        q = rotate(heads(self.q_proj(x)), cos, sin).type_as(v)
        k = rotate(heads(self.k_proj(x)), cos, sin).type_as(v)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """SiLU-gated feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """What the feed-forward adds to the residual stream; x [batch, tokens, hidden_size]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer; dropout acts on what each half adds to the residual stream."""

    def __init__(self, config: ModelConfig, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.norm_epsilon)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.norm_epsilon)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The residual stream after this layer; x [batch, tokens, hidden_size]."""
        added = self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + functional.dropout(added, self.dropout, self.training)
        added = self.mlp(self.post_attention_layernorm(x))
        return x + functional.dropout(added, self.dropout, self.training)


class Decoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: ModelConfig, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, dropout) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_epsilon)

    def forward(self, token_ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Normalised hidden states [batch, tokens, hidden_size] of token_ids [batch, tokens]."""
        x = functional.dropout(self.embed_tokens(token_ids), self.dropout, self.training)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class LanguageModel(nn.Module):
    """A Llama whose output head is its embedding."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, dropout: float, num_positions: int) -> None:
        super().__init__()
        self.model = Decoder(config, dropout)
        cos, sin = rope_cache(config, num_positions)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                shrink = math.sqrt(2 * config.num_layers) if into_residual else 1.0
                nn.init.normal_(parameter, std=0.02 / shrink)

    def forward(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """Mean next-token loss in nats over the targets that are not -100; both [batch, tokens]."""
        num_tokens = token_ids.shape[1]
        hidden = self.model(token_ids, self.cos[:num_tokens], self.sin[:num_tokens])
        logits = functional.linear(hidden, self.model.embed_tokens.weight)
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


# ---- data


@dataclass(frozen=True)
class Corpus:
    """Texts of Python files by use; heldout and validation are one text each."""

    library: list[str]
    tests: list[str]
    validation: str
    heldout: str


def module_of(path: Path) -> str:
    """The top-level module that a file belongs to, for a test the module it tests."""
    return path.parts[0].removesuffix(".py") if path.parts[0] not in TEST_DIRS else path.stem[5:]


def read_corpus(source_dir: Path) -> Corpus:
    """The Python files under source_dir without tables of constants and undecodable files."""
    library: list[str] = []
    tests: list[str] = []
    apart: dict[str, str] = {}
    for path in sorted(source_dir.rglob("*.py")):
        relative = path.relative_to(source_dir)
        if EXCLUDED_DIRS & set(relative.parts) or relative.name.startswith("_sysconfigdata"):
            continue
        try:
            text = path.read_text(encoding="utf-8").replace("\r\n", "\n").replace("\f", "")
        except UnicodeDecodeError:  # test data in other encodings
            continue
        if not text.strip() or sum(map(text.count, "0123456789")) > MAX_DIGIT_SHARE * len(text):
            continue
        is_test = bool(TEST_DIRS & set(relative.parts[:-1]))
        module = module_of(relative)
        if module in HELDOUT_MODULES or module in VALIDATION_MODULES:
            if not is_test:
                apart[module] = text
        else:
            (tests if is_test else library).append(text)
    missing = [m for m in (*HELDOUT_MODULES, *VALIDATION_MODULES) if m not in apart]
    if missing:
        raise SystemExit(
            f"{source_dir} is no Python standard library: it lacks {', '.join(missing)}"
        )
    validation = "\n".join(apart[module] for module in VALIDATION_MODULES)
    return Corpus(
        library, tests, validation, "\n".join(apart[module] for module in HELDOUT_MODULES)
    )


def without_prose(text: str) -> str:
    """Text without comments, docstrings and repeated blank lines; raises SyntaxError."""
    lines = text.split("\n")
    dropped: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
            if not lines[row - 1]:
                dropped.add(row - 1)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        first = node.body[0]
        if ast.get_docstring(node, clean=False) is None or first.lineno == node.lineno:
            continue
        begin, end = first.lineno - 1, first.end_lineno or first.lineno
        dropped.update(range(begin, end))
        if len(node.body) == 1:
            dropped.remove(begin)
            lines[begin] = " " * first.col_offset + "pass"
    kept: list[str] = []
    for index, line in enumerate(lines):
        # a blank line is kept between two statements, not where a docstring was
        if index not in dropped and (line or (kept and kept[-1] and kept[-1][-1] != ":")):
            kept.append(line)
    return "\n".join(kept)


def without_self(text: str) -> str | None:
    """A method as a function; None if it needs the object for more than reading attributes."""
    match = re.match(r"def \w+\((self|cls)(,\s*|(?=\)))", text)
    if match is not None:
        name, comma = match.groups()
        sets = rf"\w+(\[[^]\n]*\])?(, *{name}\.\w+)* *[-+*/|&]?=[^=]"
        if re.search(rf"\b{name}\.(__|assert|subTest|{sets})", text):
            return None  # names the class, is part of a unit test, or sets an attribute
        text = text[: match.end() - len(name + comma)] + text[match.end() :]
        text = re.sub(rf"\b{name}\._?", "", text)
        # what is left over: the object itself, and copies of an attribute that now do nothing
        if re.search(rf"\b{name}\b|^ *(\w+) = \1$", text, re.MULTILINE):
            return None
    return None if "super()" in text else text


def is_readable(text: str) -> bool:
    """Whether text is neither a stub nor long nor much the same line again and again."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    distinct = {re.sub(CONSTANT, "0", line) for line in lines}
    return MIN_LINES <= len(lines) <= MAX_LINES and len(distinct) >= MIN_DISTINCT * len(lines)


def repeats(text: str) -> bool:
    """Whether two lines of text that say something differ in constants at most."""
    lines = [re.sub(CONSTANT, "0", line.strip()) for line in text.split("\n")]
    telling = [line for line in lines if len(line) > len("return result")]
    return len(set(telling)) < len(telling)


def is_self_contained(text: str) -> bool:
    """Whether text is a function that reads only what it is given or imports or Python has."""
    tree = parse(text)
    known = set(dir(builtins)) | sys.stdlib_module_names
    read: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else known).add(node.id)
        elif isinstance(node, ast.arg):
            known.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            known.add(node.name)
        elif isinstance(node, ast.alias):
            known.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            known.add(node.name)
    return isinstance(tree.body[0], ast.FunctionDef) and read <= known


def definitions(text: str) -> list[tuple[str, str]]:
    """Functions, classes and compound statements at the top of text, as (plain, as written).

    Plain is without prose. Methods that make sense without their class are given as functions.
    Only what is_readable is given, and no unit tests.
    """
    try:
        body = parse(text).body
    except (SyntaxError, ValueError):  # the tests hold faulty files on purpose
        return []
    lines = text.split("\n")

    def source(node: ast.stmt) -> str:
        return "\n".join(lines[node.lineno - 1 : node.end_lineno])

    pieces: list[str | None] = []
    for node in body:
        if isinstance(node, COMPOUND):
            pieces.append(source(node))
        elif isinstance(node, ast.ClassDef):
            methods = [child for child in node.body if isinstance(child, ast.FunctionDef)]
            if not any(method.name.startswith("test") for method in methods):
                pieces.append(source(node))
            for method in methods:
                if not method.name.startswith(("__", "test")):
                    pieces.append(without_self(textwrap.dedent(source(method))))
    found = []
    for piece in filter(None, pieces):
        try:
            plain = without_prose(piece)
            parse(plain)
        except (SyntaxError, ValueError, tokenize.TokenError):  # text of several lines dedented
            continue
        if is_readable(plain):
            found.append((plain + "\n", piece + "\n"))
    return found


def parse(text: str) -> ast.Module:
    """The syntax tree of text, without warnings: the tests hold doubtful escapes on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE that starts every text with BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return tokenizer


class Documents:
    """Token ids of what is read, each with BOS and EOS around; draws the epochs."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.eos_id = tokenizer.token_to_id(EOS)
        self.tokenizer = tokenizer
        self.library = self._encode(corpus.library)
        self.tests = self._encode(corpus.tests)
        pairs = [p for text in corpus.library + corpus.tests for p in definitions(text)]
        # the same body under several names is kept once
        pairs = list({plain.partition("\n")[2]: (plain, text) for plain, text in pairs}.values())
        self.plain = self._encode([plain for plain, _ in pairs])
        self.written = self._encode([written for _, written in pairs])
        finish = [plain for plain, _ in pairs if not repeats(plain)]
        self.finish = self._encode(finish)
        self.contained = self._encode([plain for plain in finish if is_self_contained(plain)])

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        encodings = self.tokenizer.encode_batch_fast(texts)
        return [np.array([*e.ids, self.eos_id], dtype=np.int32) for e in encodings]

    @property
    def num_tokens(self) -> int:
        """Number of distinct tokens to train on."""
        return sum(map(len, self.library)) + sum(map(len, self.tests))

    def draw(self, finish: bool) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The files and the definitions of one epoch, of the last steps with finish."""

        def some(documents: list[np.ndarray], share: float) -> list[np.ndarray]:
            return [d for d in documents if self.rng.random() < share]

        if finish:
            definitions = some(self.finish, FINISH_DEFINITION_SHARE) + FINISH_TIMES * self.contained
            return some(self.library, FINISH_LIBRARY_SHARE), definitions
        return some(self.library, LIBRARY_SHARE) + some(self.tests, TEST_SHARE), [
            written if self.rng.random() < WRITTEN_SHARE else plain
            for plain, written in zip(self.plain, self.written, strict=True)
        ]

    def epoch(self, row_len: int, finish: bool) -> np.ndarray:
        """The rows [num_rows, row_len] of one epoch: fresh choice, cut and order; -1 is padding.

        Every row begins with BOS, as a prompt does, also where it goes on with a longer document.
        """
        files, documents = self.draw(finish)
        size = row_len - 1
        for file in files:
            first = int(self.rng.integers(2, size + 2))
            for begin, end in pairwise([1, *range(first, len(file), size), len(file)]):
                documents.append(np.concatenate((file[:1], file[begin:end])))
        rows = [np.full(row_len, -1, np.int32)]
        used = 0
        for index in self.rng.permutation(len(documents)):
            document = documents[index][:row_len]
            if len(document) > row_len - used and len(document) < row_len:
                rows.append(np.full(row_len, -1, np.int32))
                used = 0
            if len(document) == row_len:
                rows.insert(-1, document)
            else:
                rows[-1][used : used + len(document)] = document
                used += len(document)
        return np.stack(rows)

    def batches(
        self, batch_size: int, seq_len: int, device: torch.device, finish: bool
    ) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Endless (token_ids, targets, epoch); the first two [batch_size, seq_len] on device."""
        num_epochs = 0
        while True:
            rows = torch.from_numpy(self.epoch(seq_len + 1, finish)).to(device, torch.int64)
            order = torch.from_numpy(self.rng.permutation(len(rows))).to(device)
            for chosen in order.split(batch_size):
                if len(chosen) == batch_size:
                    batch = rows[chosen]
                    targets = batch[:, 1:].masked_fill(batch[:, 1:] < 0, -100)
                    yield batch[:, :-1].clamp(min=0), targets, num_epochs
            num_epochs += 1


# ---- training


@dataclass(frozen=True)
class Perplexity:
    """Quality on one text: per_token = exp(nats / tokens), per_byte = exp(nats / bytes)."""

    per_token: float
    per_byte: float
    bits_per_byte: float
    num_tokens: int
    num_bytes: int


@torch.no_grad()
def perplexity(model: nn.Module, tokenizer: Tokenizer, text: str, window: int) -> Perplexity:
    """Perplexity of text in windows of BOS and window - 1 tokens, without overlap."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    device = next(model.parameters()).device
    bos_id, size = tokenizer.token_to_id(BOS), window - 1
    rows = [[bos_id, *ids[i : i + size]] for i in range(0, len(ids), size)]
    targets = [row[1:] + [-100] * (window - len(row) + 1) for row in rows]
    padded = [row + [bos_id] * (window - len(row)) for row in rows]
    was_training = model.training
    model.eval()
    nats = 0.0
    for begin in range(0, len(rows), 16):
        goal = torch.tensor(targets[begin : begin + 16], device=device)
        loss = model(torch.tensor(padded[begin : begin + 16], device=device), goal)
        nats += loss.item() * int((goal >= 0).sum())
    model.train(was_training)
    num_bytes = len(text.encode())
    return Perplexity(
        math.exp(nats / len(ids)),
        math.exp(nats / num_bytes),
        nats / num_bytes / math.log(2),
        len(ids),
        num_bytes,
    )


@dataclass(frozen=True)
class Trained:
    """What train() found: the weights it keeps and how they came about."""

    state: dict[str, Tensor]
    step: int
    num_steps: int
    num_epochs: int
    seconds: float


def train(
    model: LanguageModel,
    documents: Documents,
    validation: str,
    args: argparse.Namespace,
    finish: bool = False,
) -> Trained:
    """Train model in place; returns the weights that were best on the validation text.

    With finish: the last steps, of which it returns the last weights.
    """
    num_steps, top_rate = args.steps, args.learning_rate
    if finish:
        num_steps, top_rate = args.finish_steps, args.finish_rate
    device = torch.device(args.device)
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "layers" in n]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    embedding = [model.model.embed_tokens.weight]
    decay = args.weight_decay
    optimizers: list[torch.optim.Optimizer] = [
        # match_rms_adamw: the orthogonal update as large as AdamW's, so one learning rate fits both
        torch.optim.Muon(matrices, lr=top_rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [
                {"params": embedding, "weight_decay": decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=top_rate,
            betas=(0.9, 0.95),
            fused=device.type == "cuda",
        ),
    ]
    forward = torch.compile(model) if device.type == "cuda" else model
    batches = documents.batches(args.batch_size, args.seq_len, device, finish)
    best, best_loss, best_step = {}, math.inf, 0
    start = time.perf_counter()
    step = num_epochs = 0
    while True:
        done = step / num_steps
        if args.minutes is not None and not finish:
            done = max(done, (time.perf_counter() - start) / (60 * args.minutes))
        if step % args.eval_every == 0 or done >= 1:
            with torch.autocast(device.type, torch.bfloat16):
                quality = perplexity(model, documents.tokenizer, validation, args.seq_len)
            bits = quality.bits_per_byte
            if finish or bits < best_loss:
                best_loss, best_step = bits, step
                best = {k: v.detach().clone() for k, v in model.state_dict().items()}
            seconds = time.perf_counter() - start
            print(
                f"step {step:6d}  epoch {num_epochs:3d}  {seconds:6.1f} s  validation "
                f"{quality.per_token:.3f} per token, {bits:.4f} bits per byte",
                flush=True,
            )
        if done >= 1:
            return Trained(best, best_step, step, num_epochs + 1, time.perf_counter() - start)
        # up over the first 2 %, then down to zero in a straight line
        rate = top_rate * min((step + 1) / (0.02 * num_steps), 1.0 - done)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        token_ids, targets, num_epochs = next(batches)
        with torch.autocast(device.type, torch.bfloat16):
            loss = forward(token_ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1


# ---- files

README = """# Demo model

A Llama of {parameters:.1f}M parameters with a byte-level BPE of {vocab_size} tokens, so that the
toolkit runs offline with text worth reading: {num_layers} layers, hidden size {hidden_size},
{num_heads} query and {num_kv_heads} key/value heads of {head_dim}, tied embeddings. It continues
Python code. It is a toy: it knows the style of the standard library, not what is true.

**Data and licence.** The source code of the Python {python} standard library (`Lib`; tables of
constants left out, `Lib/test` read less often) under the PSF licence, LICENSE-PSF.txt. The weights
and the two texts are passed on under the same terms.

**Training.** {num_tokens:.1f}M distinct tokens, Muon and AdamW, batches of {batch_size} x {seq_len}
tokens, dropout {dropout}: {num_steps} steps ({num_epochs} epochs) on files and definitions, then
{finish_steps} steps ({finish_epochs} epochs) mostly on short definitions without docstrings and
with no line twice; {seconds:.0f} s on {device}:

    python examples/train_demo_model.py --output_dir examples/demo_model{flags}

The last steps began from the checkpoint of step {step}, the best on the validation modules
{validation}, which calibration.txt holds.

**Quality.** heldout.txt holds modules that neither the training nor the choice of the checkpoint
saw (their tests were left out too): {heldout}.
Windows of {seq_len} tokens (the begin-of-text token and {window} of the text, no overlap), bfloat16
weights, float32 arithmetic. The last steps cost perplexity; they are there for greedy text that
ends instead of repeating a line.

| checkpoint | bytes | tokens | perplexity per token | perplexity per byte | bits per byte |
| --- | --- | --- | --- | --- | --- |
{rows}
"""


def write_json(path: Path, value: object) -> None:
    """Write value as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_checkpoint(
    output_dir: Path, config: ModelConfig, tokenizer: Tokenizer, state: dict[str, Tensor]
) -> None:
    """Write weights, tokenizer and the three config files in the Hugging Face layout."""
    special_ids = {
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": tokenizer.token_to_id(EOS),
        "pad_token_id": tokenizer.token_to_id(PAD),
    }
    write_json(output_dir / "config.json", config.to_hf() | special_ids)
    write_json(output_dir / "generation_config.json", special_ids)
    tokenizer.save(str(output_dir / "tokenizer.json"), pretty=False)  # 0.1 MB for 0.3
    write_json(
        output_dir / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": PAD,
            "model_max_length": config.max_positions,
            "clean_up_tokenization_spaces": False,
        },
    )
    weights = {
        name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in state.items()
    }
    save_file(weights, output_dir / "model.safetensors", metadata={"format": "pt"})


RECIPE = (
    "steps",
    "finish_steps",
    "batch_size",
    "seq_len",
    "learning_rate",
    "finish_rate",
    "weight_decay",
    "dropout",
    "seed",
)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    parser.add_argument("--source_dir", type=Path, default=stdlib, help="a Python standard library")
    version = platform.python_version()
    parser.add_argument("--source_version", default=version, help="its version, for the README")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--finish_steps", type=int, default=500, help="more on definitions")
    parser.add_argument("--finish_rate", type=float, default=1.5e-3, help="theirs")
    parser.add_argument("--minutes", type=float, help="end --steps early, after this long")
    parser.add_argument("--batch_size", type=int, default=32, help="sequences per step")
    parser.add_argument("--seq_len", type=int, default=1024, help="tokens per sequence")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--eval_every", type=int, default=200, help="steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def changed_flags(args: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """The recipe's flags that differ from their defaults, as they would be typed."""
    changed = [f for f in RECIPE if getattr(args, f) != parser.get_default(f)]
    return "".join(f" --{flag} {getattr(args, flag)}" for flag in changed)


def main() -> None:
    """Read, train, measure, write."""
    parser = make_parser()
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    config = ModelConfig()
    corpus = read_corpus(args.source_dir)
    tokenizer = train_tokenizer(corpus.library, config.vocab_size)
    documents = Documents(corpus, tokenizer, args.seed)
    print(
        f"{len(corpus.library)} modules, {len(corpus.tests)} test files, "
        f"{documents.num_tokens / 1e6:.2f}M tokens",
        flush=True,
    )
    model = LanguageModel(config, args.dropout, config.max_positions).to(args.device)
    trained = train(model, documents, corpus.validation, args)
    model.load_state_dict(trained.state)
    finished = train(model, documents, corpus.validation, args, finish=True)

    args.output_dir.mkdir(parents=True, exist_ok=True)
    write_checkpoint(args.output_dir, config, tokenizer, finished.state)
    (args.output_dir / "heldout.txt").write_text(corpus.heldout, encoding="utf-8")
    (args.output_dir / "calibration.txt").write_text(corpus.validation, encoding="utf-8")
    licence = args.source_dir / "LICENSE.txt"
    if licence.exists():
        shutil.copyfile(licence, args.output_dir / "LICENSE-PSF.txt")
    torch.set_float32_matmul_precision("highest")
    measured = {}
    for name, state in {"before the last steps": trained.state, "this": finished.state}.items():
        model.load_state_dict({key: t.bfloat16().float() for key, t in state.items()})
        measured[name] = perplexity(model, tokenizer, corpus.heldout, args.seq_len)
        print(f"held out, {name}: {measured[name]}")
    on_gpu = args.device.startswith("cuda")
    text = README.format(
        **vars(config),
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        python=args.source_version,
        flags=changed_flags(args, parser),
        num_tokens=documents.num_tokens / 1e6,
        num_steps=trained.num_steps,
        num_epochs=trained.num_epochs,
        finish_steps=finished.num_steps,
        finish_epochs=finished.num_epochs,
        seconds=trained.seconds + finished.seconds,
        step=trained.step,
        batch_size=args.batch_size,
        seq_len=args.seq_len,
        window=args.seq_len - 1,
        dropout=args.dropout,
        device=f"one {torch.cuda.get_device_name()}" if on_gpu else "a CPU",
        validation=", ".join(VALIDATION_MODULES),
        heldout=", ".join(HELDOUT_MODULES),
        rows="\n".join(
            f"| {name} | {q.num_bytes} | {q.num_tokens} | {q.per_token:.3f} | {q.per_byte:.4f} "
            f"| {q.bits_per_byte:.4f} |"
            for name, q in measured.items()
        ),
    )
    (args.output_dir / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
