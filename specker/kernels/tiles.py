"""tiles: the sizes of the tiles in which kernels stream a weight (stream.py), for each architecture and format."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from specker.kernels.quant import Format, Matrix, Quantized, format_of
from specker.kernels.variant import AMD, SMS, arch, sms

# Most rows that the kernels serve; static_asserts repeat the number. Far more rows are limited by flops, where cuBLAS
# with its larger tiles is faster.
MAX_ROWS = 1024
LONG = 8192  # with at least this many columns, a merge's launch is cheap beside the stream
MIN_SPLIT = 512  # fewest columns per split
FEW = 16  # up to this many rows of x take tiles of 16 rows on sm_90

MXFP4 = Format("mxfp4", 32, torch.uint8, None)
COMMON = (  # formats that the compile-only checks compile, for rows of 4096
    Format("int8", 4096, torch.float16, None),
    Format("fp8", 4096, torch.float32, None),
    Format("int4", 32, torch.bfloat16, None),
    Format("int4", 32, torch.bfloat16, torch.bfloat16),
    Format("int4", 128, torch.float16, None),
    Format("int4", 128, torch.bfloat16, torch.bfloat16),
    MXFP4,
)


def like(x: Tensor, weight: Matrix) -> bool:
    """Whether `row_linear` accepts the dtypes and devices of x and weight."""
    if isinstance(weight, Quantized):
        return x.dtype.is_floating_point and x.dtype.itemsize > 1 and x.device == weight.device
    alike = x.dtype == weight.dtype or (x.is_cpu and (x.dtype, weight.dtype) == (torch.float32, torch.bfloat16))
    return alike and x.device == weight.device


def check_product(x: Tensor, weight: Matrix) -> None:
    """Raise ValueError unless x is [T, E] and the weight [O, E], or [G, T, E] and [G, O, E], and they are alike."""
    dims = x.dim(), weight.dim()
    if dims not in ((2, 2), (3, 3)) or x.shape[-1] != weight.shape[-1] or x.shape[:-2] != weight.shape[:-2]:
        raise ValueError(
            "expected x [T, E] and weight [O, E], or x [G, T, E] and weight [G, O, E]: "
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)}"
        )
    if not like(x, weight):
        raise ValueError(f"weight must be like x: x {x.dtype} {x.device}, weight {weight.dtype} {weight.device}")


class Product(NamedTuple):
    """What the tiles of x W^T depend on."""

    dtype: torch.dtype  # of x
    O: int
    E: int
    arch: int
    G: int = 1  # layers side by side
    sms: int = 0  # the device's number of SMs; 0: the architecture's usual number
    split: bool = False  # splits cost no launch
    form: Format | None = None  # the format of a quantised weight
    few: bool = False  # see `few_rows`; neither a tile's columns nor the splits depend on it


def tiles(product: Product) -> tuple[int, int, int, int, int]:
    """The tile table: rows of x, rows of the weight, columns, stages, splits.

    sm_90, half precision, as measured on an H100 (bench/LOG.md). The weight is the left operand (`weight_left`), and a
    tile has 128 of its columns: 256 adjacent bytes a row are read faster than 128 are, by 4%. x has tiles of 16 rows
    for up to 16 rows (`few_rows`) and of 64 beyond: a product of weights in eight and four bits takes a third less time
    than in tiles of 64, of plain ones 3%. Two programs an SM are better than one: 14336 -> 4096 is 64 tiles of 64 rows
    times 4 splits. Where tiles of 128 rows make fewer, up to 16 rows of x take tiles of 64 in their place: O 28672 is
    448 programs, of which up to four share an SM, so that some decode while others wait (not measured). More rows of x
    keep 224 programs, which read x half as often. Tiles of 32 rows cannot be the left operand; eight stages keep 56 KiB
    in flight.

    Elsewhere 64 rows of x for any T, which keeps the order of sums on sm_80. The tuning decides how many bytes of the
    weight are in flight: an H200 (132 SMs, 4.3 TB/s, 1 us latency) needs 32 KiB per SM.
    * About one program per SM: weight tiles of 32, 64 or 128 rows. A program of the next kernel, which starts early,
      fits on the SM: 96 KiB of a product, or 112 of attention (bench/overlap.py).
    * More programs than SMs: 96 KiB, two blocks per SM.
    * Each program reads x from L2 again. At 64 rows that is 64 / n of the weight's bytes (n 32: twice, 128: half); at
      one row it is negligible. For long E a merge is cheap beside the stream, and tiles of 128 with K split share x
      better: 14336 -> 4096 is 32 tiles times 4 splits, 48 KiB in flight per SM. Few outputs also split K: 4096 -> 1024
      is 32 tiles of 32 times 4.
    * Where splits cost no launch ("split"), tiles are as large as splits allow: on sm_100 4096 -> 4096 is 32 tiles of
      128 times 4 splits, 2048 -> 2048 32 tiles of 64 times 4. With 64 rows of x a tile of 128 moves 3 bytes through
      shared memory per byte of the weight, a tile of 64 moves 4, a tile of 32 moves 6: x is written and read with every
      tile.
    * G layers have G times the programs, so they get larger tiles and fewer splits.
    sm_80 has 164 KiB per SM: 72 KiB per block, so that two fit. gfx942 has 64 KiB of LDS and gfx950 160, also for two
    blocks: one and three tiles of 24 KiB each. An MI300X (304 CUs, 5.3 TB/s) needs about 26 KiB in flight per CU.
    float32 uses FMA in small tiles, for correctness only.
    Half precision also uses small tiles if a row is not a multiple of 16 bytes: it is then read 2 bytes at a time,
    through registers.

    Quantised weights: the tile comes in as bytes and is decoded in registers. As the left operand it goes to wgmma from
    there. As the right operand (sm_100's eight bits) it is decoded to shared memory first: in tiles of 128 rows that
    moves 8 bytes through shared memory per weight, in tiles of 32 it is 14. Hence K is always split as in "split".
    Neither shared memory nor instructions bound the left operand by count, and an H100 reaches 60 to 70% of its
    bandwidth in eight bits and 45 to 50% in four: a program waits for one tile's decoding and products before the
    next's. Two programs share an SM, so that one decodes while the other waits, and K is split for that.
    """
    dtype, O, E, arch, G, sms, split, form, few = product
    sms = sms or SMS[arch]
    row = E * dtype.itemsize if form is None else form.size(E)
    aligned = row % 16 == 0

    def fills(n: int) -> bool:
        """Whether tiles of n rows and splits make enough programs."""
        count = G * -(-O // n)
        return aligned and 10 * count * max(1, min(sms // count, E // MIN_SPLIT)) >= 7 * sms

    half = dtype != torch.float32
    wide = G * -(-O // 128)  # programs in tiles of 128 rows
    narrow = half and arch == 90 and form is None and wide < 1.4 * sms  # two programs an SM rather than larger tiles
    if E >= LONG and aligned:
        n = 64 if narrow else 128
    elif (split or form is not None) and (fills(128) or fills(64)):
        n = 128 if fills(128) and not narrow else 64
    else:
        n = next((n for n in (128, 64) if 10 * G * -(-O // n) >= 7 * sms and aligned), 32)
    left = half and weight_left(n, arch, form)
    m, n, block = (16, 32, 32) if not half else (FEW if few and left else 64, n, columns_of(n, aligned, E, arch, form))
    if not half and form is not None:
        block = form.block(block, E)
    count = G * -(-O // n)
    twice = left and (form is not None or split or E >= LONG)
    splits = max(1, min(sms * (2 if twice else 1) // count, E // MIN_SPLIT))
    splits = -(-E // (-(-E // (splits * block)) * block))  # splits of whole tiles may be fewer
    if left and form is not None and not form.four_bits and m == 64 and n == 128:
        n = 64  # 64 rows of x and 128 of eight bits spill with Triton 3.9; splits are those of tiles of 128
    halved = m == FEW and n == 128 and count * splits < 1.9 * sms
    if halved:
        n = 64
    stages = 2 if not half else stages_of(m, n, block, G * -(-O // n) * splits <= sms, arch, form)
    if halved:
        stages = min(stages, 4)  # four programs fit on an SM
    return m, n, block, stages, splits


def few_rows(T: int, arch: int) -> bool:
    """Whether T rows of x take tiles of 16 rows, with the same bits as in tiles of 64. On an H100 wgmma adds a row's
    products in one order whatever the number of rows (the GPU tests compare the bits)."""
    return T <= FEW and arch == 90


def columns_of(n: int, aligned: bool, E: int, arch: int, form: Format | None = None) -> int:
    """Columns of a tile with n rows of a half-precision weight; `aligned`: its rows are multiples of 16 bytes."""
    block = 64 if not aligned or (n > 64 and arch != 90) else 128
    if form is None:
        return block
    if form.four_bits:  # 128 columns spill elsewhere, and mxfp4's on sm_100 where the last tile is not whole
        block = 128 if arch in (90, 100) and (form.kind == "int4" or E % 128 == 0) else 64
    return form.block(block, E)


def wide_rows(dtype: torch.dtype, E: int, arch: int, form: Format | None = None) -> bool:
    """Whether the weight can be read 16 bytes at a time. On AMD a lane may get only 4 or 8 bytes of a tile."""
    return E * dtype.itemsize % 16 == 0 if form is None else form.size(E) % 16 == 0 and arch not in AMD


def weight_left(n: int, arch: int, form: Format | None) -> bool:
    """Whether a product in half precision with n rows of the weight takes them as the left operand, W x^T. wgmma and
    tcgen05 read the right operand from shared memory, the left one also from registers or tensor memory. It must have
    64 rows; the right one, x, may have 16."""
    return n >= 64 and (arch == 90 or (arch == 100 and form is not None and form.four_bits))


def stages_of(m: int, n: int, block: int, few: bool, arch: int, form: Format | None = None) -> int:
    """Stages of m rows of x in half precision and n of the weight, `block` columns each, that fill a program's share of
    shared memory; `few`: at most one program per SM, which leaves room for one of the next kernel. If wgmma and tcgen05
    take the weight as the right operand, shared memory also holds one decoded tile in x's dtype; the two parts of four
    bits use that space in turn."""
    size = 2 * block
    stage = m * size + n * (size if form is None else form.size(block))
    alone = {32: 192, 64: 128}.get(n, 112)
    room = {80: 72, 942: 32, 950: 80}.get(arch, alone if few else 96) * 1024
    if form is not None and arch == 950:  # gfx950 pads these stages and needs a buffer for each
        room = 48 * 1024
    if form is not None and arch in (90, 100) and not weight_left(n, arch, form):
        room -= n * form.size(block) * 2
    stages = min(room // stage, 8)
    return stages + (arch == 80 or arch in AMD)  # synchronous matrix instructions need one buffer fewer


def split_of(x: Tensor, weight: Matrix) -> tuple[int, int]:
    """The number of K's splits on x's device, and the columns of each but the last, which may be shorter."""
    O, E = weight.shape[-2:]
    kind = x.dtype if x.dtype in (torch.float16, torch.bfloat16) else torch.float32
    G, on = math.prod(weight.shape[:-2]), x.device
    _, _, block, _, splits = tiles(Product(kind, O, E, arch(on), G, sms(on), True, format_of(weight)))
    return splits, -(-E // (splits * block)) * block
