"""A manifest of an export."""

from predict.loading.manifest import FORMAT, Manifest

MANIFEST = Manifest(
    format=FORMAT,
    paddle_version="3.3.1",
    library_abi=1,
    device="cpu",
    dtype="float32",
    scheme="dense",
    block_size=64,
    max_length=256,
    num_layers=2,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=199,
    eos_token_ids=[2],
    model_type="llama",
)
