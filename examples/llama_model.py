"""A Llama from ``transformers``: built on the meta device, made tensor parallel, then sharded by GTP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

import torch_gtp
from torch_gtp import GTPPolicy

HEAD_DIM = 16


def llama_config(*, vocab_size: int, hidden: int, layers: int, seq_length: int) -> LlamaConfig:
    """A small Llama in the usual proportions."""
    if hidden % HEAD_DIM:
        raise ValueError(f"--hidden must be a multiple of the head size {HEAD_DIM}, got {hidden}")
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_DIM,
        num_key_value_heads=hidden // HEAD_DIM,
        max_position_embeddings=seq_length,
        # A byte has no special meaning: without these, 1 and 2 would begin and end a sequence.
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )


def build_model(config: LlamaConfig, mesh: DeviceMesh, policy: GTPPolicy, seed: int) -> nn.Module:
    """The same model, bit for bit, on every mesh.

    The order matters: tensor parallelism first (the outer split), ``gtp_shard`` on what it left (the inner
    one), and memory only then: no weight is ever whole, but in the one module that is being initialized.
    """
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    if mesh["tp"].size() > 1:
        _apply_tensor_parallelism(model, mesh["tp"])
    torch_gtp.gtp_shard(model, mesh, policy=policy)
    # transformers' initialization of one module also fills its buffers, such as the rotary frequencies.
    torch_gtp.materialize_meta(model, seed, init=model._init_weights)
    return model


def _apply_tensor_parallelism(model: LlamaForCausalLM, tp_mesh: DeviceMesh) -> None:
    heads = model.config.num_key_value_heads
    if heads % tp_mesh.size():
        raise ValueError(f"{heads} attention heads do not divide by --tensor-parallel-size {tp_mesh.size()}")
    # The model's own plan: column-wise q, k, v, gate, up and head, row-wise o and down, vocabulary-parallel
    # embedding. Attention views its projections as (..., -1, head_dim), so each rank finds its share of the
    # heads by itself.
    apply_tensor_parallelism(model, tp_mesh, model._expand_parallel_plan(model.tp_plan))


@dataclass(frozen=True)
class Footprint:
    """What one rank stores, against the whole model."""

    sharded: int
    parameters: int
    bytes_unsharded: int
    bytes_per_rank: int

    @classmethod
    def of(cls, model: nn.Module) -> Footprint:
        """Count what this rank holds."""
        parameters = list(model.parameters())
        here = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
        return cls(
            sharded=sum(part.numel() < p.numel() for part, p in zip(here, parameters, strict=True)),
            parameters=len(parameters),
            bytes_unsharded=sum(p.numel() * p.element_size() for p in parameters),
            bytes_per_rank=sum(part.numel() * part.element_size() for part in here),
        )
