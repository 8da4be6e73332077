"""Tensor-parallel inference on CPUs: a small decoder generates tokens, and each rank computes a part of every layer.

    mscomm run -n 4 tensor_parallel_inference.py
    torchrun --nproc_per_node 4 tensor_parallel_inference.py --through torch

Each rank has some of the attention heads and some of the neurons of each MLP, as in Megatron-LM. The first matrices of
the two blocks are split by their outputs, and the last ones by their inputs. So the result of a block is a sum over the
ranks, which one all_reduce computes: mscomm.all_reduce_, or torch.distributed's all_reduce over the backend mscomm.
Then each rank runs the whole decoder alone, and checks that all ranks have generated the same tokens as one rank.
"""

import argparse
import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

import mscomm

VOCABULARY, WIDTH, HEADS, NEURONS, LAYERS = 1000, 512, 8, 2048, 4
HEAD = WIDTH // HEADS  # numbers per head
PROMPT = [3, 141, 592, 653, 589, 793]
TOKENS = 64  # generated after the prompt
# In float32, adding up a block's result in another order changes the logits, which are about 1, by a few units of 1e-6.
TOLERANCE = 1e-4


def random_matrices(*shapes: tuple[int, int]) -> list[torch.Tensor]:
    """Return random matrices that keep the size of their inputs about the same."""
    return [torch.randn(shape) / math.sqrt(shape[1]) for shape in shapes]


def normalized(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (WIDTH,))


class Layer:
    """One rank's part of a layer: attention, then an MLP. It keeps the keys and values of all tokens so far."""

    def __init__(self, rank: int, size: int, all_reduce: Callable[[torch.Tensor], object]) -> None:
        # Every rank draws the whole matrices, so that all have the same random numbers, and keeps only its part.
        qkv, out, up, down = random_matrices((3 * WIDTH, WIDTH), (WIDTH, WIDTH), (NEURONS, WIDTH), (WIDTH, NEURONS))
        self.qkv = qkv.view(3, size, WIDTH // size, WIDTH)[:, rank].reshape(-1, WIDTH)
        self.out = out.chunk(size, 1)[rank].contiguous()
        self.up = up.chunk(size, 0)[rank].contiguous()
        self.down = down.chunk(size, 1)[rank].contiguous()
        self.keys = self.values = torch.empty(HEADS // size, 0, HEAD)
        self.all_reduce = all_reduce

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        attended = self.attention(normalized(x)) @ self.out.T
        self.all_reduce(attended)
        x = x + attended
        thought = F.gelu(normalized(x) @ self.up.T) @ self.down.T
        self.all_reduce(thought)
        return x + thought

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = (x @ self.qkv.T).view(len(x), 3, -1, HEAD).permute(1, 2, 0, 3)
        self.keys, self.values = torch.cat([self.keys, keys], 1), torch.cat([self.values, values], 1)
        # The prompt comes as several tokens, each of which sees only those before it. Later tokens come one by one.
        attended = F.scaled_dot_product_attention(queries, self.keys, self.values, is_causal=len(x) > 1)
        return attended.transpose(0, 1).reshape(len(x), -1)


class Decoder:
    """One rank's part of a decoder. Each rank has the whole embeddings and the whole last matrix."""

    def __init__(self, rank: int, size: int, all_reduce: Callable[[torch.Tensor], object]) -> None:
        torch.manual_seed(1)
        self.embedding, self.position = torch.randn(VOCABULARY, WIDTH), torch.randn(len(PROMPT) + TOKENS, WIDTH)
        self.layers = [Layer(rank, size, all_reduce) for _ in range(LAYERS)]
        (self.head,) = random_matrices((VOCABULARY, WIDTH))

    def generate(self) -> tuple[list[int], torch.Tensor, float]:
        """Return the likeliest tokens after the prompt, the logits from which they were chosen, and tokens per second.

        The rate leaves out the first token: it includes the whole prompt, and the wait for ranks that started later.
        """
        seen, new = 0, PROMPT
        tokens: list[int] = []
        logits: list[torch.Tensor] = []
        while len(tokens) < TOKENS:
            x = self.embedding[new] + self.position[seen : seen + len(new)]
            for layer in self.layers:
                x = layer(x)
            logits.append(self.head @ normalized(x[-1]))
            seen, new = seen + len(new), [int(logits[-1].argmax())]
            if not tokens:
                began = time.perf_counter()
            tokens += new
        return tokens, torch.stack(logits), (TOKENS - 1) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--through", choices=["mscomm", "torch"], default="mscomm", help="which all_reduce to call")
    all_reduce: Callable[[torch.Tensor], object]
    if parser.parse_args().through == "torch":
        dist.init_process_group("mscomm")
        rank, size, all_reduce = dist.get_rank(), dist.get_world_size(), dist.all_reduce
    else:
        mscomm.init()
        rank, size, all_reduce = mscomm.get_rank(), mscomm.get_group_size(), mscomm.all_reduce_
    if HEADS % size:
        raise SystemExit(f"tensor_parallel_inference.py: {size} ranks cannot share {HEADS} heads; start 1, 2, 4 or 8")

    with torch.inference_mode():
        tokens, logits, rate = Decoder(rank, size, all_reduce).generate()
        expected, alone, _ = Decoder(0, 1, lambda x: None).generate()
    if tokens != expected:
        raise SystemExit(f"rank {rank} has generated {tokens}, but one rank alone generates {expected}")
    torch.testing.assert_close(logits, alone, rtol=0, atol=TOLERANCE)
    if rank == 0:
        print("tokens:", *tokens)
        difference = float((logits - alone).abs().max())
        print(f"ranks: {size}; {rate:.0f} tokens/s; the logits of one rank differ by at most {difference:.1g}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
