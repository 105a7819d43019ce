"""stream: x W^T over one tile of a weight, in the kernels of row_linear, kv_project, expert_linear and vocab_topk.

`stream_rows` multiplies M rows of x with N rows of a plain or quantised weight, which passes through registers or
shared memory once. tiles.py chooses the tiles.
"""

from specker.kernels.narrow import fp8_of
from specker.kernels.variant import tl, triton


@triton.jit
def stream_rows(
    x_ptr,  # [T, E]
    w_ptr,  # at the tile's first row
    scale_ptr,  # [rows, E / GROUP]; None for a plain weight
    shift_ptr,  # like scale_ptr; None: no shift
    i_row,  # the tile's first row in scale_ptr
    o_m,  # [M] rows of x; their elements have indices of 32 bits
    m_m,  # [M] whether each row exists
    o_n,  # [N] rows of the weight, counted from the tile's first
    m_n,  # [N] whether each exists; not read if EVEN_E and EVEN_N
    start,  # a multiple of BLOCK_E
    stop,
    E: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    EVEN_E: tl.constexpr,  # [start, stop) consists of whole tiles
    EVEN_N: tl.constexpr,
    KIND: tl.constexpr,  # the weight's kind: "plain", or one of quant.py's
    GROUP: tl.constexpr,  # columns that share a scale; 0 for a plain weight
    LEFT: tl.constexpr,  # compute W x^T and transpose the result; see `weight_left`
    SM: tl.constexpr,  # NVIDIA's architecture (80, 90, 100), whose own instructions may decode the weight; 0: none
):
    """x W^T of M rows of x and N of the weight over columns start..stop: [M, N] float32. Rows of x that do not exist
    count as zeros and are not read. L2 evicts the weight first, so that x, K/V and sums stay there."""
    tl.assume(start < stop)  # if the loop could be empty, ptxas would wait after each wgmma
    if KIND == "plain":
        b_acc = _stream_plain(x_ptr, w_ptr, o_m, m_m, o_n, m_n, start, stop, E, M, N, BLOCK_E, EVEN_E, EVEN_N, LEFT)
    else:
        b_acc = _stream_quantised(
            x_ptr,
            w_ptr,
            scale_ptr,
            shift_ptr,
            i_row,
            o_m,
            m_m,
            o_n,
            m_n,
            start,
            stop,
            E,
            M,
            N,
            BLOCK_E,
            EVEN_E,
            EVEN_N,
            KIND,
            GROUP,
            LEFT,
            SM,
        )
    return tl.trans(b_acc) if LEFT else b_acc


@triton.jit
def tile_rows(N: tl.constexpr, HALF: tl.constexpr):
    """The rows of the weight in a tile, counted from its first, and the columns of the result that they make: [N] both.
    With HALF, the rows of the weight's gate, which precede as many of its up projection, eight of the one and eight of
    the other in turn: a thread that has a gate's product in wgmma's result has its partner's, too."""
    o_n = tl.arange(0, N)
    o_column = o_n
    if HALF > 0:
        o_column = o_n // 16 * 8 + o_n % 8
        o_n = o_column + (o_n // 8 % 2).to(tl.int64) * HALF
    return o_n, o_column


@triton.jit
def gate_and_up(b):
    """The products with the gate's rows and those with the up projection's in a tile of both: [M, N] -> [M, N / 2]
    both."""
    M: tl.constexpr = b.shape[0]
    N: tl.constexpr = b.shape[1]
    b_gate, b_up = tl.split(tl.permute(tl.reshape(b, (M, N // 16, 2, 8)), (0, 1, 3, 2)))
    return tl.reshape(b_gate, (M, N // 2)), tl.reshape(b_up, (M, N // 2))


@triton.jit
def _stream_plain(
    x_ptr,
    w_ptr,
    o_m,
    m_m,
    o_n,
    m_n,
    start,
    stop,
    E: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    EVEN_E: tl.constexpr,
    EVEN_N: tl.constexpr,
    LEFT: tl.constexpr,
):
    """With LEFT the result is [N, M]."""
    o_x = o_m[:, None] * E
    o_w = o_n[:, None] * E
    b_acc = _zeros(M, N, LEFT)
    for i_e in tl.range(start, stop, BLOCK_E):
        o_e = i_e + tl.arange(0, BLOCK_E)[None, :]
        m_x = m_m[:, None]
        if not EVEN_E:
            m_x = m_x & (o_e < E)
        b_x = tl.load(x_ptr + o_x + o_e, mask=m_x, other=0.0)
        if EVEN_E and EVEN_N:
            b_w = tl.load(w_ptr + o_w + o_e, eviction_policy="evict_first")
        else:
            m_w = m_n[:, None] & (o_e < E)
            b_w = tl.load(w_ptr + o_w + o_e, mask=m_w, other=0.0, eviction_policy="evict_first")
        b_acc = _add_product(b_x, b_w, b_acc, LEFT)
    return b_acc


@triton.jit
def _stream_quantised(
    x_ptr,
    w_ptr,
    scale_ptr,
    shift_ptr,
    i_row,
    o_m,
    m_m,
    o_n,
    m_n,
    start,
    stop,
    E: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    EVEN_E: tl.constexpr,
    EVEN_N: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    LEFT: tl.constexpr,
    SM: tl.constexpr,
):
    """`_stream_plain` for w = q * scale + shift in float32, rounded to x's dtype. If a tile's columns share a scale
    and have no shift, the tile's sum is multiplied instead, and q is exact. Scales are read one tile ahead, because
    Triton does not pipeline loads of less than four bytes.

    A tile of four bits takes two products: the columns in the low four bits of bytes, then the columns in the high four
    bits. As the left operand, a tile of eight bits takes two as well, of half its columns each, and so fewer registers.
    Triton would leave the last wgmma in flight while the next tile is decoded, and ptxas 12.8 and 12.9 then decode into
    registers that it may still read; `_arrived` waits for it. `make static` reports such writes. With PAIRS, weights
    are 2^-24 of their size (`_int4_pairs`), and so are the sums in the loop."""
    SHIFT: tl.constexpr = shift_ptr is not None
    PACK: tl.constexpr = 4 if w_ptr.dtype.element_ty == tl.int16 else 1  # numbers per element of the weight
    HALVES: tl.constexpr = LEFT and PACK == 1 and BLOCK_E >= 32  # a product takes at least 16 columns
    EVEN: tl.constexpr = EVEN_E and EVEN_N
    SETS: tl.constexpr = E // GROUP  # scales per row
    # Quantized.scales_sums; on sm_80 a tile's own sums would spill.
    EXACT: tl.constexpr = not SHIFT and KIND != "mxfp4" and (SETS == 1 or (GROUP % 128 == 0 and SM != 80))
    IN_BF16: tl.constexpr = KIND == "int4" and scale_ptr.dtype.element_ty == tl.bfloat16  # Quantized.for_bfloat16
    INTEGERS: tl.constexpr = IN_BF16 or (EXACT and (KIND == "int4" or KIND == "int8"))
    PAIRS: tl.constexpr = INTEGERS and SM == 90 and x_ptr.dtype.element_ty == tl.bfloat16
    o_x = o_m[:, None] * E
    o_w = o_n[:, None] * (E // PACK)
    b_acc = _zeros(M, N, LEFT)
    b_scale = _scales(scale_ptr, i_row + o_n, m_n, start, SETS, N, BLOCK_E, GROUP)
    b_shift = _scales(shift_ptr, i_row + o_n, m_n, start, SETS, N, BLOCK_E, GROUP)
    for i_e in tl.range(start, stop, BLOCK_E):
        if not HALVES:
            o_q = i_e // PACK + tl.arange(0, BLOCK_E // PACK)[None, :]
            p_w = w_ptr + o_w + o_q
            b_w = _load_weight(p_w, m_n, o_q, E // PACK, EVEN)
        b_next, b_next_shift = b_scale, b_shift
        if SETS > 1:
            b_next = _scales(scale_ptr, i_row + o_n, m_n, i_e + BLOCK_E, SETS, N, BLOCK_E, GROUP)
            b_next_shift = _scales(shift_ptr, i_row + o_n, m_n, i_e + BLOCK_E, SETS, N, BLOCK_E, GROUP)
        b_sum = b_acc
        if EXACT and SETS > 1:
            b_sum = _zeros(M, N, LEFT)
        for i_part in tl.static_range(2 if PACK == 4 or HALVES else 1):
            if PACK == 4:
                o_h = tl.arange(0, BLOCK_E // 2)[None, :]
                o_e = i_e + o_h // 16 * 32 + o_h % 16 + 16 * i_part
            elif HALVES:
                o_e = i_e + i_part * (BLOCK_E // 2) + tl.arange(0, BLOCK_E // 2)[None, :]
                p_w = w_ptr + o_w + o_e
                b_w = _load_weight(p_w, m_n, o_e, E, EVEN)
            else:
                o_e = i_e + tl.arange(0, BLOCK_E)[None, :]
            m_x = m_m[:, None]
            if not EVEN_E:
                m_x = m_x & (o_e < E)
            b_x = tl.load(x_ptr + o_x + o_e, mask=m_x, other=0.0)
            b_s, b_z = _part(b_scale, i_part, HALVES), _part(b_shift, i_part, HALVES)
            b_v = _weights(b_w, b_s, b_z, i_part, EXACT, PAIRS, SHIFT, KIND, SM, b_x.dtype)
            b_sum = _add_product(b_x, b_v, b_sum, LEFT)
        if EXACT and SETS > 1:
            b_acc = tl.fma(b_sum, _beside(b_scale, b_sum, LEFT), b_acc)
        elif LEFT and SM == 90:
            b_acc = _arrived(b_sum)
        else:
            b_acc = b_sum
        b_scale, b_shift = b_next, b_next_shift
    if PAIRS:
        b_acc *= 2.0**24
    if EXACT and SETS == 1:
        b_acc *= _beside(b_scale, b_acc, LEFT)
    return b_acc


@triton.jit
def _beside(
    b_scale,  # [N, 1]
    b,  # [M, N], or with LEFT [N, M]
    LEFT: tl.constexpr,
):
    return tl.broadcast_to(b_scale if LEFT else tl.trans(b_scale), b.shape)


@triton.jit
def _arrived(b_acc):
    """The same sums. Before a use of them Triton waits for the products, which otherwise might still read registers
    when the next tile is decoded."""
    return tl.inline_asm_elementwise("", "=r,0", [b_acc], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def _load_weight(
    p,  # [N, K]
    m_n,
    o_q,  # [1, K] index of each element in its row
    ROW: tl.constexpr,  # elements of a row
    EVEN: tl.constexpr,
):
    if EVEN:
        b = tl.load(p, eviction_policy="evict_first")
    else:
        b = tl.load(p, mask=m_n[:, None] & (o_q < ROW), other=0, eviction_policy="evict_first")
    return b


@triton.jit
def _zeros(M: tl.constexpr, N: tl.constexpr, LEFT: tl.constexpr):
    return tl.zeros([N, M] if LEFT else [M, N], tl.float32)


@triton.jit
def _add_product(b_x, b_w, b_acc, LEFT: tl.constexpr):
    """b_acc [M, N] + x W^T, or with LEFT b_acc [N, M] + W x^T."""
    if LEFT:
        b_acc = tl.dot(b_w, tl.trans(b_x), b_acc, input_precision="ieee")
    else:
        b_acc = tl.dot(b_x, tl.trans(b_w), b_acc, input_precision="ieee")
    return b_acc


@triton.jit
def _scales(
    p,  # [rows, SETS], or None
    o_row,  # [N]
    m_n,
    i_e,
    SETS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The scales, or shifts, of N rows in the tile that starts at column i_e: [N, groups in a tile] float32. Where
    there are none, they are any finite numbers, and shifts are zeros."""
    GROUPS: tl.constexpr = BLOCK_E // GROUP if SETS > 1 and BLOCK_E > GROUP else 1
    if p is None:
        b = tl.zeros([N, GROUPS], tl.float32)
    else:
        o_s = (i_e // GROUP + tl.arange(0, GROUPS))[None, :]
        m = m_n[:, None] & (o_s < SETS)
        p_s = p + o_row.to(tl.int64)[:, None] * SETS + o_s
        if p.dtype.element_ty == tl.uint8:  # e8m0: the exponent of a float32, but 0 is 2^-127, which is subnormal
            b_bits = tl.load(p_s, mask=m, other=0).to(tl.int32) << 23
            b = tl.maximum(b_bits, 1 << 22).to(tl.float32, bitcast=True)
        else:
            b = tl.load(p_s, mask=m, other=0.0).to(tl.float32)
    return b


@triton.jit
def _part(
    b,  # [N, groups in a tile]: scales or shifts
    PART: tl.constexpr,
    HALVES: tl.constexpr,
):
    """Those of half a tile: of its first columns or the others. Those of the tile if it does not come in halves."""
    if HALVES and b.shape[1] > 1:
        b_first, b_second = tl.split(tl.permute(tl.reshape(b, (b.shape[0], 2, b.shape[1] // 2)), (0, 2, 1)))
        b = b_second if PART else b_first
    return b


@triton.jit
def _weights(
    b_q,  # [N, K]; four bits: int16 [N, K / 2], of which PART selects half the numbers
    b_scale,  # [N, groups]
    b_shift,  # [N, groups]; not read without SHIFT
    PART: tl.constexpr,
    EXACT: tl.constexpr,
    PAIRS: tl.constexpr,
    SHIFT: tl.constexpr,
    KIND: tl.constexpr,
    SM: tl.constexpr,
    dtype: tl.constexpr,
):
    """q * scale + shift, rounded once to float32 and then to dtype; with EXACT only q: [N, K]. With PAIRS 2^-24 of it,
    rounded once to bfloat16. fp8 comes as int8.

    Four bits: PART selects the low or the high ones of the bytes. For int4 `_four_bits` gives the number q of 0 to 15
    times 2^-22, so the scale is multiplied by 2^22, which is exact up to 2^105. Without shifts q stands for q - 8, and
    q * scale - 8 * scale, rounded once, is (q - 8) * scale."""
    N: tl.constexpr = b_q.shape[0]
    GROUPS: tl.constexpr = b_scale.shape[1]
    K: tl.constexpr = b_q.shape[1] * (2 if b_q.dtype == tl.int16 else 1)
    if PAIRS and KIND == "int8":
        return _int8_pairs(b_q)
    if PAIRS and KIND == "int4":
        b_scale = tl.full(b_scale.shape, 1.0, tl.float32) if EXACT else b_scale
        b_shift = (b_shift if SHIFT else -8.0 * b_scale) * 2.0**-24
        b_low = _scale_and_shift(b_scale * 2.0**109, b_shift, K // 2)
        b_high = _scale_and_shift(b_scale * 2.0**105, b_shift, K // 2)
        b_0, b_4, b_8, b_12 = _int4_pairs(b_q, b_low, b_high)
        return tl.reshape(tl.join(b_4, b_12) if PART else tl.join(b_0, b_8), (N, K))
    if KIND == "mxfp4" and SM > 0 and dtype == tl.bfloat16:
        b_bits = b_scale.to(tl.int32, bitcast=True)
        b_bits = tl.broadcast_to((b_bits | b_bits >> 16)[:, :, None], (N, GROUPS, K // 2 // GROUPS))
        b_0, b_4, b_8, b_12 = _e2m1_pairs(b_q, tl.reshape(b_bits, (N, K // 2)))
        return tl.reshape(tl.join(b_4, b_12) if PART else tl.join(b_0, b_8), (N, K))
    if KIND == "mxfp4":
        b_bits = b_q.to(tl.int32)
        b_v = tl.join(_e2m1(b_bits, 4 * PART), _e2m1(b_bits, 4 * PART + 8))
    elif KIND == "int4":
        b_bits = b_q.to(tl.int32)
        b_v = tl.join(_four_bits(b_bits, 4 * PART), _four_bits(b_bits, 4 * PART + 8))
        if EXACT:
            b_v = b_v * 2.0**22 - 8.0
        elif not SHIFT:
            b_shift = -8.0 * b_scale
        b_scale *= 2.0**22
    elif KIND == "fp8" and SM >= 90:  # the column of sm_80 has cards without the instruction
        b_v = b_q.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
    elif KIND == "fp8":
        b_v = fp8_of(b_q)
    else:
        b_v = b_q.to(tl.float32)
    if EXACT:
        return tl.reshape(b_v, (N, K)).to(dtype)
    b_v = tl.reshape(b_v, (N, GROUPS, K // GROUPS))
    if SHIFT or KIND == "int4":
        b_v = tl.fma(b_v, b_scale[:, :, None], b_shift[:, :, None])
    else:
        b_v *= b_scale[:, :, None]
    return tl.reshape(b_v, (N, K)).to(dtype)


@triton.jit
def _four_bits(b_bits, AT: tl.constexpr):
    """The number in bits AT..AT + 3, times 2^-22, in float32. As bits of a float32 it is a subnormal number, q *
    2^(AT - 149), so no instruction converts an integer; one multiplication makes it normal, the same for each AT."""
    return (b_bits & (15 << AT)).to(tl.float32, bitcast=True) * 2.0 ** (127 - AT)


@triton.jit
def _e2m1(b_bits, AT: tl.constexpr):
    """The e2m1 in bits AT..AT + 3, in float32. Its bits, moved to their places in a float32, give the number times
    2^-126, also for 0.5, which is subnormal."""
    b_bits = (b_bits << (28 - AT)) >> 6  # the sign stays where it is
    return (b_bits & -0x7E400000).to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def _e2m1_pairs(
    b_q,  # [N, K] int16, four e2m1 each
    b_scale,  # [N, K] int32: the scale in bfloat16, twice
):
    """The numbers in bits 0, 4, 8 and 12 times the scale, in bfloat16: exact, a scale being a power of two. Two tables
    of eight bytes give the upper and the lower byte of each number's size; two numbers are multiplied at a time. ptxas
    would copy a constant to a register before each use, unless it depends on something: here on the scale's signs,
    which are 0."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 q, up, sign, index, upper, lower, even, odd, zero, t;
        cvt.u32.u16 q, $4;
        shl.b32 up, q, 4;
        prmt.b32 sign, q, up, 0x1504;  // the first bit of each byte
        and.b32 index, q, 0x7777;
        lop3.b32 t, $5, 0x80008000, 0x3F3F3F00, 0xEA;  // a & b | c
        prmt.b32 upper, t, 0x40404040, index;
        lop3.b32 upper, upper, sign, 0x80808080, 0xF8;  // a | b & c
        lop3.b32 t, $5, 0x80008000, 0xC0800000, 0xEA;
        prmt.b32 lower, t, 0xC0804000, index;
        prmt.b32 even, lower, upper, 0x6240;
        prmt.b32 odd, lower, upper, 0x7351;
        mov.b32 zero, 0x80008000;
        fma.rn.bf16x2 even, even, $5, zero;  // sm_80 has no mul
        fma.rn.bf16x2 odd, odd, $5, zero;
        mov.b32 {$0, $2}, even;
        mov.b32 {$1, $3}, odd;
        }""",
        "=h,=h,=h,=h,h,r",
        [b_q, b_scale],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _scale_and_shift(
    b_scale,  # [N, groups]
    b_shift,  # [N, groups]
    K: tl.constexpr,
):
    """Both in bfloat16, in one number of 32 bits: [N, K], adjacent ones for each group."""
    b_low = b_scale.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32)
    b = b_shift.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32) << 16 | b_low
    b = tl.broadcast_to(b[:, :, None], (b.shape[0], b.shape[1], K // b.shape[1]))
    return tl.reshape(b, (b.shape[0], K))


@triton.jit
def _int4_pairs(
    b_q,  # [N, K] int16, four numbers each
    b_low,  # [N, K] int32: 2^109 scale and 2^-24 shift; see `_scale_and_shift`
    b_high,  # [N, K] int32: 2^105 scale and 2^-24 shift
):
    """2^-24 (q * scale + shift) for the numbers q in bits 0, 4, 8 and 12, in bfloat16, two at a time. The bits of a
    bfloat16 below 256 are that integer times 2^-133, so they need no conversion; the number in the high four bits of a
    byte is 16 times as large there. The power 2^-24 keeps the scales finite: below 2^19 they may be anything."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 q, odd, scale, shift;
        .reg .b16 s, z;
        cvt.u32.u16 q, $4;
        prmt.b32 q, q, 0, 0x4140;
        and.b32 odd, q, 0x00F000F0;
        and.b32 q, q, 0x000F000F;
        mov.b32 {s, z}, $5;
        mov.b32 scale, {s, s};
        mov.b32 shift, {z, z};
        fma.rn.bf16x2 q, q, scale, shift;
        mov.b32 {s, z}, $6;
        mov.b32 scale, {s, s};
        mov.b32 shift, {z, z};
        fma.rn.bf16x2 odd, odd, scale, shift;
        mov.b32 {$0, $2}, q;
        mov.b32 {$1, $3}, odd;
        }""",
        "=h,=h,=h,=h,h,r,r",
        [b_q, b_low, b_high],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _int8_pairs(b_q):
    """2^-24 times an int8, in bfloat16, two at a time: plus 128 its bits are those of a bfloat16 as in `_int4_pairs`.
    Instructions that convert integers run at a quarter of the others' rate."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 q, times, minus;
        cvt.u32.u16 q, $1;
        prmt.b32 q, q, 0, 0x4140;
        xor.b32 q, q, 0x00800080;
        mov.b32 times, 0x76007600;  // 2^109
        mov.b32 minus, 0xB700B700;  // -128 * 2^-24
        fma.rn.bf16x2 $0, q, times, minus;
        }""",
        "=r,h",
        [b_q],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )
