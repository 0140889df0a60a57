"""Independent implementations, where they are installed: the packages are not part of the tested set.

`pip install --no-deps performer-pytorch linformer local-attention einops axial-positional-embedding hyper-connections`
"""

from __future__ import annotations

import pytest
import torch

from crossfade.operators import Linformer, Performer, Window
from tests.operators.cases import inputs

# They use deprecated modules while they are imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
REASON = "an independent implementation, installed by hand"


@pytest.mark.parametrize("causal", [False, True])
def test_performer_against_performer_pytorch(causal):
    theirs = pytest.importorskip("performer_pytorch.performer_pytorch", reason=REASON)
    q, k, v = inputs(40, heads=3, kv_heads=3)
    op = Performer(3, 5, kv_heads=3, features=12).double()
    # Without the constant that they add to the features the two are the same function.
    phi_q, phi_k = (
        theirs.softmax_kernel(x, projection_matrix=op.projection, is_query=is_query, eps=0.0)
        for x, is_query in ((q, True), (k, False))
    )
    if causal:
        wanted = theirs.causal_linear_attention_noncuda(phi_q, phi_k, v, chunk_size=4, eps=0.0)
    else:
        wanted = theirs.linear_attention(phi_q, phi_k, v)
    torch.testing.assert_close(op(q, k, v, causal=causal), wanted, rtol=0.0, atol=1e-10)


@pytest.mark.parametrize("share_kv", [False, True])
@pytest.mark.parametrize("length", [30, 17])
def test_linformer_against_linformer(length, share_kv):
    theirs = pytest.importorskip("linformer", reason=REASON)
    heads, dim = 3, 5
    module = theirs.LinformerSelfAttention(heads * dim, 30, k=7, heads=heads, share_kv=share_kv).double()
    module.to_out = torch.nn.Identity()
    x = torch.randn(2, length, heads * dim, dtype=torch.float64)
    op = Linformer(heads, dim, max_length=30, rank=7, share_kv=share_kv).double()
    with torch.no_grad():
        op.k_projection.copy_(module.proj_k.T)
        op.v_projection.copy_((module.proj_k if share_kv else module.proj_v).T)
    # Their share_kv makes the values the keys too; the operator's shares the projection along the length alone.
    to_v = module.to_k if share_kv else module.to_v
    q, k, v = (f(x).unflatten(-1, (heads, dim)).transpose(1, 2) for f in (module.to_q, module.to_k, to_v))
    torch.testing.assert_close(op(q, k, v).transpose(1, 2).flatten(2), module(x), rtol=0.0, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("radius", [4, 40])
def test_window_against_local_attention(radius, causal):
    theirs = pytest.importorskip("local_attention", reason=REASON)
    q, k, v = inputs(120, heads=3, kv_heads=3, v_dim=5)
    mask = torch.ones(2, 120, dtype=torch.bool)
    mask[1, 100:] = False
    other = theirs.LocalAttention(window_size=radius, causal=causal, exact_windowsize=True, use_rotary_pos_emb=False)
    op = Window(3, 5, radius=radius, global_tokens=0).double()
    seen = mask[:, None, :, None]  # Their rows without a key are a mean over padding, so real queries alone count.
    got, wanted = op(q, k, v, mask=mask, causal=causal), other(q, k, v, mask=mask)
    torch.testing.assert_close(got * seen, wanted * seen, rtol=0.0, atol=1e-10)
