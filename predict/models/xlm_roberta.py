"""XLM-RoBERTa: BERT whose positions begin behind the one of padding."""

from dataclasses import replace

from predict.models.bert import WEIGHTS as BERT
from predict.models.bert import bert_like
from predict.nn.hf_config import ConfigReader
from predict.nn.spec import DecoderSpec

WEIGHTS = replace(BERT._with_base("bert.", "roberta."), base="roberta.")


def spec(config: ConfigReader) -> DecoderSpec:
    return bert_like(config, offset=config.get_int("pad_token_id", 1) + 1)
