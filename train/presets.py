"""Sizes of released models, for programs that need no weights."""

from train.model import ModelConfig, RopeScaling

# Sizes as in the config.json of each model on huggingface.co.
_QWEN25 = dict(
  context=131072, rope_theta=1e6, rms_eps=1e-6, qkv_bias=True, head_width=128
)
PRESETS = {
  'SmolLM2-135M': ModelConfig(
    vocab_size=49152,
    width=576,
    layers=30,
    heads=9,
    kv_heads=3,
    head_width=64,
    ff_width=1536,
    context=8192,
    rope_theta=1e5,
    tied_embeddings=True,
  ),
  'Qwen2.5-1.5B': ModelConfig(
    vocab_size=151936,
    width=1536,
    layers=28,
    heads=12,
    kv_heads=2,
    ff_width=8960,
    tied_embeddings=True,
    **_QWEN25,
  ),
  'Qwen2.5-7B': ModelConfig(
    vocab_size=152064,
    width=3584,
    layers=28,
    heads=28,
    kv_heads=4,
    ff_width=18944,
    tied_embeddings=False,
    **_QWEN25,
  ),
  'Llama-3.1-8B': ModelConfig(
    vocab_size=128256,
    width=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    head_width=128,
    ff_width=14336,
    context=131072,
    rope_theta=5e5,
    tied_embeddings=False,
    rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
  ),
  'Qwen3-32B': ModelConfig(
    vocab_size=151936,
    width=5120,
    layers=64,
    heads=64,
    kv_heads=8,
    head_width=128,
    ff_width=25600,
    context=40960,
    rope_theta=1e6,
    tied_embeddings=False,
    rms_eps=1e-6,
    qk_norm=True,
  ),
}
