"""A gated delta net in another engine, with drafts in trees: `conv_rows` and `delta_rows` of `specker.kernels`, and
nothing else of specker.

The engine has its own weights and its own pages. A prompt, a decoding step and a verify pass over a tree are the same
two calls; a refused draft is a column that the next pass overwrites. The script decodes a text token by token, and
again with trees in which the true tokens stand among wrong ones, compares the rows and exits with 1 if they differ.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from specker.kernels import ancestor_words, conv_rows, delta_rows

PAGE = 16  # columns
BLOCK = 16  # rows between two states that are kept
KERNEL = 4  # columns of the convolution
EPS = 1e-6


class GatedDeltaNet:
    """A layer of Qwen3.5 with random weights: E inputs, Hk key heads and Hv value heads of D numbers; and the memory of
    `texts` texts of up to `columns` tokens each."""

    def __init__(self, E: int, Hk: int, Hv: int, D: int, texts: int, columns: int, dtype: torch.dtype = torch.float32):
        self.sizes, self.keys = (Hk, Hv, D), Hk * D
        channels, g = 2 * Hk * D + Hv * D, torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=g) * shape[-1] ** -0.5).to(dtype)

        self.widths = [channels, Hv * D, Hv, Hv]  # convolved q, k and v; z; b; a
        self.project, self.out = random(sum(self.widths), E), random(E, Hv * D)
        self.conv, self.norm = random(channels, KERNEL), torch.ones(D, dtype=dtype)
        self.a_log, self.dt_bias = random(Hv), random(Hv)
        # A page has the inputs and the records of PAGE columns. A ring of pages would do: see docs/checkpoints.md.
        pages = texts * -(-columns // PAGE)
        self.table = torch.arange(pages, dtype=torch.int32).view(texts, -1)
        self.inputs = torch.zeros(pages, PAGE, channels, dtype=dtype)
        self.records = [torch.zeros(pages, PAGE, *s, dtype=dtype) for s in ((Hk, D), (Hv, D), (Hv, 4))]
        self.states = torch.zeros(texts, 2, Hv, D, D, dtype=dtype)
        self.anchors = torch.zeros(texts, Hv, dtype=torch.int64)

    def slots(self, text: int, columns: Tensor) -> Tensor:
        """Where columns [n] of a text stand."""
        return self.table[text].long()[columns // PAGE] * PAGE + columns % PAGE

    def forward(self, text: int, x: Tensor, first: int, depth: Tensor, words: Tensor | None) -> Tensor:
        """The rows x [n, E] of a text in columns from `first` on, at positions first + depth [n]. They see all columns
        before `first`, and those of the rows that are set in `words` [n, 1]; None: the rows before them."""
        Hk, Hv, D = self.sizes
        mixed, z, b, a = (x @ self.project.T).split(self.widths, 1)
        n, slots = len(x), self.slots(text, first + torch.arange(len(x)))
        ints = [torch.tensor([k], dtype=torch.int32) for k in (first + n, 0 if words is None else n)]
        seen = self.table[text : text + 1], *ints, torch.tensor([0, n], dtype=torch.int32), words
        mixed = conv_rows(mixed, self.conv, None, self.inputs, slots, *seen)
        q, k, v = mixed.split([self.keys, self.keys, Hv * D], 1)
        heads = q.unflatten(1, (Hk, D)), k.unflatten(1, (Hk, D)), v.unflatten(1, (Hv, D)), a, b
        memory = self.a_log, self.dt_bias, self.states, torch.tensor([text]), self.anchors, *self.records
        gate = z.unflatten(1, (Hv, D)), self.norm, EPS
        out = delta_rows(*heads, *memory, first + depth, slots, *seen, BLOCK, *gate)
        return out.flatten(1) @ self.out.T

    def commit(self, text: int, first: int, path: list[int]) -> None:
        """Keep the rows `path` of the last pass, which began at column `first`, as the text's next columns."""
        to, kept = (self.slots(text, first + torch.tensor(rows)) for rows in (list(range(len(path))), path))
        for x in (self.inputs, *self.records):
            x.view(-1, *x.shape[2:])[to] = x.view(-1, *x.shape[2:])[kept]


def decoded(layer: GatedDeltaNet, text: int, x: Tensor, prompt: int) -> Tensor:
    """The rows of a text x [n, E]: its prompt, then token by token."""
    rows, zero = [layer.forward(text, x[:prompt], 0, torch.arange(prompt), None)], torch.zeros(1, dtype=torch.int64)
    rows += [layer.forward(text, x[n : n + 1], n, zero, None) for n in range(prompt, len(x))]
    return torch.cat(rows)


def verified(layer: GatedDeltaNet, text: int, x: Tensor, prompt: int) -> Tensor:
    """The same rows, in trees: after each token comes the true one and a wrong one, which is refused."""
    rows, n, g = (
        [layer.forward(text, x[:prompt], 0, torch.arange(prompt), None)],
        prompt,
        torch.Generator().manual_seed(1),
    )
    while n < len(x):
        more = min(3, len(x) - n - 1)
        drafts = [
            part for i in range(more) for part in (torch.randn(1, x.shape[1], generator=g).to(x), x[n + 1 + i :][:1])
        ]
        path = [0, *range(2, 2 * more + 1, 2)]
        parents = torch.tensor([path[i] for i in range(more) for _ in range(2)], dtype=torch.int64)
        depth = torch.tensor([0, *(i + 1 for i in range(more) for _ in range(2))])
        out = layer.forward(text, torch.cat((x[n : n + 1], *drafts)), n, depth, ancestor_words(parents))
        layer.commit(text, n, path)
        rows.append(out[path])
        n += len(path)
    return torch.cat(rows)


def main() -> int:
    layer = GatedDeltaNet(64, 2, 4, 16, texts=2, columns=128)
    x = F.normalize(torch.randn(100, 64, generator=torch.Generator().manual_seed(2)), dim=1) * 8
    plain, trees = decoded(layer, 0, x, 21), verified(layer, 1, x, 21)
    error = float((plain - trees).abs().max() / plain.abs().max())
    print(f"{len(x)} tokens, the last {len(x) - 21} in trees: largest difference {error:.1e} of the largest number")
    return int(error > 1e-5)


if __name__ == "__main__":
    raise SystemExit(main())
