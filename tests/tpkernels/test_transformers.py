"""Small random transformers models with attn_implementation="tpkernels" against "eager": nothing is downloaded.

Both run in fp32; logits and every parameter's gradient agree to 1e-5 of their norm (the engine's bound for two ways to
compute the same step). A mask of one's own is compared with "sdpa", since "eager" adds it up as it is.
"""

from __future__ import annotations

import sys

import pytest
import torch

from tpkernels import compat_transformers
from tpkernels.compat import register_with_transformers

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'transformers>=4.57'"
)

TOKENS = 21
SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,  # scores of a few units, not the near-uniform attention of the default
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GPT2_SIZES = {"vocab_size": 61, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 64, "initializer_range": 0.15}


def configuration(name):
    if name == "gpt2":
        off = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        return transformers.GPT2Config(**GPT2_SIZES, **off, bos_token_id=1, eos_token_id=2)
    if name == "llama":
        return transformers.LlamaConfig(**SIZES)
    if name == "qwen2":  # the second layer sees 6 tokens back
        return transformers.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=1)
    if name == "qwen3":
        return transformers.Qwen3Config(**SIZES, head_dim=12)
    if name == "gemma2":  # softcap, a scale of its own, windows
        return transformers.Gemma2Config(
            **SIZES, head_dim=12, sliding_window=7, attn_logit_softcapping=2.0, query_pre_attn_scalar=9
        )
    assert name == "gpt_oss"  # sinks, windows
    few = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 12, "sliding_window": 7}
    return transformers.GptOssConfig(**SIZES, **few)


MODELS = ["llama", "qwen2", "qwen3", "gpt2", "gemma2", "gpt_oss"]


@pytest.fixture(autouse=True)
def _registered(request, monkeypatch):
    register_with_transformers()
    monkeypatch.setenv(
        "TPK_BACKEND", request.getfixturevalue("backend") if "backend" in request.fixturenames else "cpu"
    )


def build(name, **settings):
    torch.manual_seed(0)
    config = configuration(name)
    config.use_cache = False
    for key, value in settings.items():
        setattr(config, key, value)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def batch(kind):
    """Token ids, the model's further arguments, and which tokens are real."""
    ids = torch.randint(3, 61, (3, TOKENS))
    valid = torch.ones(3, TOKENS, dtype=torch.bool)
    if kind == "left":
        valid[0, :5] = valid[2, :11] = False
    if kind == "right":
        valid[0, -5:] = valid[2, -11:] = False
    if kind in ("left", "right"):
        return ids, {"attention_mask": valid.long()}, valid
    if kind == "packed":
        positions = torch.cat([torch.arange(9), torch.arange(1), torch.arange(11)])
        return ids, {"position_ids": positions[None].expand(3, -1)}, valid
    if kind == "own mask":
        visible = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril() | (torch.arange(TOKENS) < 4)
        return ids, {"attention_mask": visible[None, None].expand(3, 1, -1, -1)}, valid
    return ids, {}, valid


def logits_and_gradients(model, ids, arguments, valid):
    model.zero_grad()
    logits = model(ids, **arguments).logits[valid]
    logits.logsumexp(-1).pow(2).mean().backward()
    return [logits.detach(), *(x.grad.clone() for x in model.parameters() if x.grad is not None)]


def differences(results, expected):
    return [float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in zip(results, expected, strict=True)]


@pytest.mark.parametrize("kind", ["plain", "left", "right", "packed", "own mask"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_the_models_own(name, kind, backend):
    if kind == "own mask" and name not in ("llama", "qwen3", "gpt2"):
        kind = "plain"  # layers with windows take masks of two kinds; "sdpa" knows no softcap and no sinks
    model, inputs = build(name), batch(kind)
    model.set_attn_implementation("sdpa" if kind == "own mask" else "eager")
    expected = logits_and_gradients(model, *inputs)
    model.set_attn_implementation("tpkernels")
    assert len(expected) > 10 and max(differences(logits_and_gradients(model, *inputs), expected)) <= 1e-5


def test_sliding_windows_are_seen_to():
    """The models above would pass without windows if 7 tokens were all that mattered: they are not."""
    ids, _, _ = batch("plain")
    model = build("qwen2")
    model.set_attn_implementation("tpkernels")
    wide = build("qwen2", sliding_window=TOKENS)
    wide.set_attn_implementation("tpkernels")
    assert (model(ids).logits - wide(ids).logits).abs().max() > 0.01


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generation_with_its_cache_is_the_eager_one(name, cache):
    ids, arguments, _ = batch("left")
    model = build(name, use_cache=True).eval()
    generated = []
    for implementation in ("eager", "tpkernels"):
        model.set_attn_implementation(implementation)
        settings = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
        generated.append(
            model.generate(
                ids, **arguments, max_new_tokens=9, do_sample=False, pad_token_id=0, output_logits=True,
                return_dict_in_generate=True, **settings,
            )
        )  # fmt: skip
    assert torch.equal(generated[0].sequences, generated[1].sequences) and generated[1].sequences.shape[1] > TOKENS
    for a, b in zip(generated[0].logits, generated[1].logits, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["plain", "left"])
def test_a_model_compiles_in_one_graph(kind):
    torch._dynamo.reset()
    ids, arguments, valid = batch(kind)
    model = build("llama")
    model.set_attn_implementation("tpkernels")
    expected = logits_and_gradients(model, ids, arguments, valid)
    forward = model.forward
    model.forward = torch.compile(forward, fullgraph=True, backend="aot_eager")
    for a, b in zip(logits_and_gradients(model, ids, arguments, valid), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_gradient_checkpointing_and_bf16():
    model, inputs = build("llama"), batch("left")
    model.set_attn_implementation("tpkernels")
    expected = logits_and_gradients(model, *inputs)
    model.gradient_checkpointing_enable()  # the name that every version knows
    model.train()
    for a, b in zip(logits_and_gradients(model, *inputs), expected, strict=True):
        torch.testing.assert_close(a, b)
    exact = logits_and_gradients(build("llama"), *inputs)
    low = build("llama").to(torch.bfloat16)
    yardstick = max(differences(logits_and_gradients(low, *inputs), exact))
    low.set_attn_implementation("tpkernels")
    assert max(differences(logits_and_gradients(low, *inputs), exact)) <= 3 * yardstick


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_flattened_batch_says_where_its_sequences_are(name, backend):
    """What DataCollatorWithFlattening(return_flash_attn_kwargs=True) gives, also with a cache in use, when
    transformers itself does not look at position_ids."""
    model = build(name, use_cache=True)
    model.set_attn_implementation("tpkernels")
    lengths = [9, 1, 11]
    ids = torch.randint(3, 61, (1, TOKENS))
    totals = torch.tensor([0, 9, 10, 21], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    kwargs = {"cu_seq_lens_q": totals, "cu_seq_lens_k": totals, "max_length_q": 11, "max_length_k": 11}
    packed = model(ids, position_ids=positions, **kwargs).logits
    separate = torch.cat([model(part).logits for part in ids.split(lengths, 1)], 1)
    torch.testing.assert_close(packed, separate, rtol=1e-4, atol=1e-5)


def test_an_encoder_sees_both_ways():
    sizes = {"vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
    off = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "initializer_range": 0.15}
    torch.manual_seed(0)
    config = transformers.BertConfig(**sizes, **off, intermediate_size=40)
    model = transformers.BertModel._from_config(config, attn_implementation="eager").eval()
    for kind in ("plain", "right", "left"):
        ids, arguments, valid = batch(kind)
        results = []
        for implementation in ("eager", "tpkernels"):
            model.set_attn_implementation(implementation)
            results.append(model(ids, **arguments).last_hidden_state[valid])
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_the_dense_mask_is_never_whole(monkeypatch):
    """Intervals are read off a few rows of the dense mask at a time."""
    ids, arguments, _ = batch("left")
    model = build("qwen2")
    model.set_attn_implementation("tpkernels")
    expected = model(ids, **arguments).logits
    sizes = []
    original = compat_transformers.mask_intervals
    monkeypatch.setattr(
        compat_transformers, "mask_intervals", lambda mask: sizes.append(mask.shape[2]) or original(mask)
    )
    monkeypatch.setattr(compat_transformers, "_ROWS_AT_A_TIME", 4)
    assert torch.equal(model(ids, **arguments).logits, expected)
    assert sum(sizes) == 2 * TOKENS and max(sizes) == 4


def test_what_is_not_served_is_refused_by_name():
    ids, _, _ = batch("plain")
    model = build("llama", attention_dropout=0.1)
    model.set_attn_implementation("tpkernels")
    with pytest.raises(ValueError, match=r"attention dropout 0.1 is not served; set the config's attention_dropout"):
        model.train()(ids)
    model.eval()
    bias = torch.zeros(3, 1, TOKENS, TOKENS)
    with pytest.raises(ValueError, match=r"attention_mask is torch.float32 .*pass a boolean mask"):
        model(ids, attention_mask=bias)
    hole = torch.ones(3, 1, TOKENS, TOKENS, dtype=torch.bool)
    hole[..., 3] = False
    with pytest.raises(ValueError, match="sees are not one interval"):
        model(ids, attention_mask=hole)
    with pytest.raises(ValueError, match='output_attentions is not served; use attn_implementation="eager"'):
        compat_transformers._attention(model, *[torch.randn(1, 2, 3, 4)] * 3, None, output_attentions=True)


@pytest.mark.parametrize(
    ("version", "message"), [(None, "transformers 4.57 or newer is needed"), ("4.56.2", "4.56.2 builds")]
)
def test_without_a_transformers_that_fits_it_says_so(version, message, monkeypatch):
    if version is None:
        monkeypatch.setitem(sys.modules, "transformers", None)
    else:
        monkeypatch.setattr("transformers.__version__", version)
    with pytest.raises(ValueError, match=message):
        register_with_transformers()
