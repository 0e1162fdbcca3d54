"""Aquila: Llama under another name."""

from predict.models.llama import WEIGHTS as WEIGHTS
from predict.models.llama import spec as spec
