"""Makes the checkpoints beside it, and golden.npz: what Hugging Face transformers finds for them.

Needs torch and transformers 5; the tests that read the files need neither:

    python tests/golden_encoders/make.py

In float32 on the CPU with eager attention. Of each case, of token ids ("ids/N" [T]): the hidden
states behind the last norm, pooled: "CASE/mean", "CASE/cls", "CASE/last" [texts, H]. Of cases with
a classification head or answers "CASE/score" [pairs], of PAIRS, or of the ids. texts.json has the
texts, and their ids by transformers' tokenizers.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests.support.packed import pack_weights

HERE = Path(__file__).resolve().parent
CORPUS = [
    "the capital of france is paris, and paris lies on the river seine",
    "what is the capital of france?",
    "a cat sat on the mat; dogs bark at cats",
    "berlin is the capital of germany and lies on the river spree",
    "how do birds fly? a bird moves its wings, and air carries it",
    "yes no query document instruct judge whether it meets the requirements",
]
TEXTS = ["what is the capital of france?", "cats", "the river, the mat and the birds' wings", "!"]
PAIRS = [[TEXTS[0], text] for text in CORPUS[:5]]
LENGTHS = (1, 2, 5, 33, 64, 129, 300, 512)
VOCAB = 288
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}
QWEN: dict[str, Any] = {
    **SIZES,
    "vocab_size": 512,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


def wordpiece() -> PreTrainedTokenizerFast:
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCAB, special_tokens=special, show_progress=False
    )
    made.train_from_iterator(CORPUS * 3, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    roles = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **roles)


def unigram() -> PreTrainedTokenizerFast:
    made = tokenizers.Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCAB, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(CORPUS * 3, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **roles)


def bytelevel() -> PreTrainedTokenizerFast:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=special,
        show_progress=False,
    )
    made.train_from_iterator(["yes", "no"] * 30 + CORPUS * 3, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<|endoftext|>")


def modules(folder: Path, pooling: dict[str, bool], dense: bool, normalize: bool) -> None:
    """sentence-transformers' files."""
    listed = [("0", "", "Transformer"), ("1", "1_Pooling", "Pooling")]
    (folder / "1_Pooling").mkdir()
    config = {"word_embedding_dimension": 32, **pooling}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    if dense:
        listed.append(("2", "2_Dense", "Dense"))
        (folder / "2_Dense").mkdir()
        torch.manual_seed(7)
        weight = {"linear.weight": torch.randn(24, 32) * 0.2, "linear.bias": torch.randn(24)}
        save_file(weight, folder / "2_Dense" / "model.safetensors")
        layer: dict[str, Any] = {
            "in_features": 32,
            "out_features": 24,
            "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh",
        }
        (folder / "2_Dense" / "config.json").write_text(json.dumps(layer))
    if normalize:
        listed.append((str(len(listed)), f"{len(listed)}_Normalize", "Normalize"))
    entries = [
        {"idx": int(i), "name": i, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, path, kind in listed
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    prompts = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))


# Name -> class, config, tokenizer, sentence-transformers' files.
T = transformers
CASES: dict[str, tuple[Any, Any, Any, Any]] = {
    "bert": (
        T.BertModel,
        lambda: T.BertConfig(**SIZES),
        wordpiece,
        ({"pooling_mode_mean_tokens": True}, False, True),
    ),
    "bert_reranker": (
        T.BertForSequenceClassification,
        lambda: T.BertConfig(**SIZES, num_labels=1),
        wordpiece,
        None,
    ),
    "xlm_roberta": (
        T.XLMRobertaModel,
        lambda: T.XLMRobertaConfig(**SIZES, max_position_embeddings=514, type_vocab_size=1),
        unigram,
        ({"pooling_mode_cls_token": True}, False, True),
    ),
    "xlm_roberta_reranker": (
        T.XLMRobertaForSequenceClassification,
        lambda: T.XLMRobertaConfig(
            **SIZES, max_position_embeddings=514, type_vocab_size=1, num_labels=1
        ),
        unigram,
        None,
    ),
    "modernbert": (
        T.ModernBertModel,
        lambda: T.ModernBertConfig(
            **SIZES, local_attention=32, pad_token_id=0, max_position_embeddings=512
        ),
        wordpiece,
        ({"pooling_mode_mean_tokens": True}, False, False),
    ),
    "modernbert_reranker": (
        T.ModernBertForSequenceClassification,
        lambda: T.ModernBertConfig(
            **SIZES,
            local_attention=32,
            pad_token_id=0,
            max_position_embeddings=512,
            classifier_pooling="mean",
            num_labels=1,
        ),
        wordpiece,
        None,
    ),
    "embedding_gemma": (
        T.Gemma3TextModel,
        lambda: T.Gemma3TextConfig(
            **SIZES,
            num_key_value_heads=1,
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=32,
            use_bidirectional_attention=True,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        ),
        unigram,
        ({"pooling_mode_mean_tokens": True}, True, True),
    ),
    "qwen3_embedding": (
        T.Qwen3ForCausalLM,
        lambda: T.Qwen3Config(**QWEN),
        bytelevel,
        ({"pooling_mode_lasttoken": True}, False, True),
    ),
    "qwen3_reranker": (
        T.Qwen3ForCausalLM,
        lambda: T.Qwen3Config(
            **QWEN, classifier_from_token=["no", "yes"], is_original_qwen3_reranker=True
        ),
        bytelevel,
        None,
    ),
    "qwen3_classifier": (
        T.Qwen3ForSequenceClassification,
        lambda: T.Qwen3Config(**QWEN, num_labels=1, pad_token_id=0),
        bytelevel,
        None,
    ),
}


def _save_halved(model: Any, folder: Path) -> None:
    """Saves values that bfloat16 holds in it, as a model that runs in float32."""
    copy.deepcopy(model).bfloat16().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def make(case: str, found: dict[str, Any], tokens: dict[str, Any]) -> None:
    kind, config, tokenizer_of, files = CASES[case]
    torch.manual_seed(len(case))
    folder = HERE / case
    shutil.rmtree(folder, ignore_errors=True)
    settings = config()
    settings._attn_implementation = "eager"
    model = kind(settings).float().eval()
    with torch.no_grad():
        for value in model.parameters():  # norms' and biases' parts show too
            if value.ndim == 1:
                value.add_(torch.randn_like(value) * 0.1)
            value.copy_(value.bfloat16())
    _save_halved(model, folder)
    tokenizer = tokenizer_of()
    tokenizer.save_pretrained(folder)
    if files is not None:
        modules(folder, *files)
    base = getattr(model, model.base_model_prefix, model)
    for pooling in ("mean", "cls", "last"):
        found[f"{case}/{pooling}"] = []
    for number in range(len(LENGTHS)):
        ids = torch.from_numpy(found[f"ids/{number}"])[None]
        with torch.no_grad():
            hidden = base(ids).last_hidden_state[0].numpy()
        for pooling, row in (("mean", hidden.mean(0)), ("cls", hidden[0]), ("last", hidden[-1])):
            found[f"{case}/{pooling}"].append(row)
    tokens[case] = {"texts": [tokenizer(text)["input_ids"] for text in TEXTS]}
    if "reranker" not in case and "classifier" not in case:
        return
    scores = []
    if case == "qwen3_reranker":
        from predict.engine.retrieval import _BEFORE, _BEHIND, INSTRUCTION
    for query, document in PAIRS:
        if case == "qwen3_reranker":
            body = f"<Instruct>: {INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
            parts = [tokenizer(text, add_special_tokens=False) for text in (_BEFORE, body, _BEHIND)]
            given = {"input_ids": [i for part in parts for i in part["input_ids"]]}
        elif case == "qwen3_classifier":
            continue
        else:
            given = dict(tokenizer(query, document, return_token_type_ids=True))
        with torch.no_grad():
            batch = {
                name: torch.tensor([value])
                for name, value in given.items()
                if name != "token_type_ids" or case.startswith("bert")
            }
            logits = model(**batch).logits[0]
        if case == "qwen3_reranker":
            answers = [tokenizer.convert_tokens_to_ids(each) for each in ("no", "yes")]
            scores.append(torch.softmax(logits[-1][answers], 0)[1].item())
        else:
            scores.append(torch.sigmoid(logits[0]).item())
        tokens[case].setdefault("pairs", []).append(given)
    if case == "qwen3_classifier":
        with torch.no_grad():
            scores = [
                torch.sigmoid(model(torch.tensor([found[f"ids/{n}"]])).logits[0, 0]).item()
                for n in range(len(LENGTHS))
            ]
    found[f"{case}/score"] = np.array(scores, np.float32)


def main() -> None:
    random = np.random.default_rng(0)
    found: dict[str, Any] = {
        f"ids/{number}": random.integers(5, 100, length).astype(np.int32)
        for number, length in enumerate(LENGTHS)
    }
    tokens: dict[str, Any] = {}
    for case in CASES:
        make(case, found, tokens)
        pack_weights(HERE / case)
    made: dict[str, Any] = {k: np.asarray(v) for k, v in found.items()}
    np.savez_compressed(HERE / "golden.npz", **made)
    (HERE / "texts.json").write_text(
        json.dumps({"texts": TEXTS, "pairs": PAIRS, "tokens": tokens}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
