# SPDX-License-Identifier: BSD-3-Clause
"""Self-attention that copies neither queries, keys nor values.

torch's function turns the layer's packed projection into three tensors that are contiguous, with
three copies and one more for the batch dimension; its attention kernels take any strides.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from .._ops import ops
from ._graph import arguments_of, example, is_ours, replace, takes_channels

_ABSENT = ("bias_k", "bias_v", "key_padding_mask", "attn_mask", "static_k", "static_v")


def _split(packed: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    """Views (batch, heads, length, size) of (batch, length, 3 * heads * size)."""
    return packed.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def _takes_heads(embedding: int, num_heads: int) -> bool:
    return takes_channels(embedding // num_heads) and takes_channels(3 * embedding)


class _Split(torch.autograd.Function):
    """`_split`, whose backward also has the gradient of the bias that `packed` contains."""

    @staticmethod
    def forward(ctx, packed, bias, num_heads):
        ctx.dtype = bias.dtype
        return _split(packed, num_heads)

    @staticmethod
    def backward(ctx, q, k, v):
        packed, sums = ops.pack_heads.default(q, k, v)
        return packed, sums.to(ctx.dtype), None


def self_attention(
    query: Tensor,
    num_heads: int,
    in_proj_weight: Tensor,
    in_proj_bias: Tensor | None,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    contiguous: bool,
) -> tuple[Tensor, None]:
    """`F.multi_head_attention_forward(query, query, query, ...)` of (length, batch, embedding),
    without masks or weights; `contiguous` as its result is, or where the batch comes first."""
    x = query.transpose(0, 1)
    bias = in_proj_bias
    if bias is None or not _takes_heads(x.shape[2], num_heads):
        q, k, v = _split(F.linear(x, in_proj_weight, bias), num_heads)
    else:
        q, k, v = _Split.apply(F.linear(x, in_proj_weight, bias.detach()), bias, num_heads)
    found = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)
    found = found.transpose(1, 2).flatten(2)
    found = F.linear(found, out_proj_weight, out_proj_bias).transpose(0, 1)
    return found.contiguous() if contiguous else found, None


def _fits(node: Node, call: dict[str, object]) -> bool:
    query = call["query"]
    value, weight = example(query), example(call["in_proj_weight"])
    result = example(node)
    return (
        call["key"] is query
        and call["value"] is query
        and isinstance(value, Tensor)
        and value.dim() == 3
        and isinstance(weight, Tensor)
        and weight.shape[0] == 3 * value.shape[2]
        and isinstance(result, tuple)
        and is_ours(result[0])
        and all(call[name] is None for name in _ABSENT)
        and not call["add_zero_attn"]
        and not call["need_weights"]
        and not call["use_separate_proj_weight"]
        and not call["is_causal"]
        and call["embed_dim_to_check"] == value.shape[2]
    )


def _batch_comes_first(node: Node) -> bool:
    """Whether its result is transposed at once, and nothing else asks for its strides."""
    results = [user for user in node.users if user.args[1:] == (0,)]
    readers = [reader for result in results for reader in result.users]
    return bool(readers) and all(
        reader.target == "transpose" and sorted(reader.args[1:]) == [0, 1] for reader in readers
    )


def rewrite(graph: Graph) -> None:
    for node in list(graph.nodes):
        if node.target is not F.multi_head_attention_forward:
            continue
        call = arguments_of(node, F.multi_head_attention_forward)
        if not _fits(node, call):
            continue
        names = ["query", "num_heads", "in_proj_weight", "in_proj_bias", "dropout_p"]
        names += ["out_proj_weight", "out_proj_bias"]
        values = [call[name] for name in names]
        if not call["training"]:
            values[4] = 0.0
        values.append(not _batch_comes_first(node))
        replace(graph, node, self_attention, tuple(values))
