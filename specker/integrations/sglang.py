"""sglang: SGLang's tree masks, K/V pool and token maps as arguments of the ops, and back. Imports nothing of SGLang.

In a verify pass of SGLang each of B requests has N rows: the last committed token and N - 1 drafts. seq_lens [B] counts
the tokens before them. SGLang stores which row sees which in one of these forms, flattened into one dimension:

    FULL_MASK             bool, for each request in turn [N, seq_lens[b] + N]: the prefix, then the rows. All rows see
                          the prefix, whatever the mask holds there; SGLang does not always fill it
    QLEN_ONLY             bool [B, N, N]: the rows only
    QLEN_ONLY_BITPACKING  uint8, uint16 or uint32 [B, N], for N up to 8, 16 or 32: bit c of a row is column c
    FlashInfer's mask     uint8: FULL_MASK with eight cells in a byte, the first in the lowest bit. Each request begins
                          with a new byte, whose index is in indptr [B + 1]

Ancestor words [B * N, W] int64, W = ceil(N / 64) <= 4, express the same relation for `tree_attention`, with a window of
the N rows. One layer of a verify pass:

    words = ancestors_from_mask(spec_info.custom_mask, TreeMask.FULL_MASK, seq_lens, N)
    table = table_from_requests(req_to_token, req_pool_indices, page_size)
    k, v = paged(pool.get_key_buffer(layer), page_size), paged(pool.get_value_buffer(layer), page_size)
    out, lse = tree_attention(q, k, v, table, *verify_lengths(seq_lens, N), words, scale)

Only the functions that write FULL_MASK or FlashInfer's mask read the lengths on the host, for the size of the result.
"""

import pickle
from enum import IntEnum
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specker.kernels.ancestors import MAX_WORDS
from specker.runtime.strategies.vocabtrim.scores import distinct


class TreeMask(IntEnum):
    """The forms of a mask, with the values of SGLang's TreeMaskMode: the functions take either."""

    FULL_MASK = 0
    QLEN_ONLY = 1
    QLEN_ONLY_BITPACKING = 2


# --- masks


def ancestors_from_mask(mask: Tensor, mode: int, seq_lens: Tensor, rows: int) -> Tensor:
    """mask, flattened, of B requests of `rows` rows; seq_lens [B] -> ancestor words [B * rows, W] int64.

    The mask may be a longer buffer; only its beginning is read. Booleans may be stored as uint8, 0 or 1. Raises
    ValueError for other dtypes, an unknown mode, more rows than the mode or the words hold, and a mask that is too
    short even without prefixes.
    """
    mode, B = _mode(mode, rows), len(seq_lens)
    packed = mode == TreeMask.QLEN_ONLY_BITPACKING
    dtypes = (_packed_dtype(rows),) if packed else (torch.bool, torch.uint8)
    least = B * rows if packed else B * rows * rows
    if mask.dim() != 1 or len(mask) < least or mask.dtype not in dtypes:
        names = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{mode.name} must be [{least} or more] {names}, got {list(mask.shape)} {mask.dtype}")
    if packed:
        return mask[:least].long()[:, None]
    if mode == TreeMask.QLEN_ONLY:
        return _words(mask[:least].view(B, rows, rows))
    sizes = rows * (seq_lens.long() + rows)
    return _words(mask[_cells(seq_lens, rows) + (sizes.cumsum(0) - sizes)[:, None, None]])


def mask_from_ancestors(words: Tensor, mode: int, seq_lens: Tensor, rows: int) -> Tensor:
    """Ancestor words [B * rows, W] int64, seq_lens [B] -> a new mask, flattened, in SGLang's dtype for the mode.
    Raises ValueError for an unknown mode, other words, and more rows than the mode or the words hold."""
    mode, bits = _mode(mode, rows), _bits(words, len(seq_lens), rows)
    if mode == TreeMask.QLEN_ONLY_BITPACKING:
        return _words(bits)[:, 0].to(_packed_dtype(rows))
    if mode == TreeMask.QLEN_ONLY:
        return bits.flatten()
    sizes = rows * (seq_lens.long() + rows)
    mask = torch.ones(int(sizes.sum()), dtype=torch.bool, device=words.device)
    mask[_cells(seq_lens, rows) + (sizes.cumsum(0) - sizes)[:, None, None]] = bits
    return mask


def ancestors_from_packed(packed: Tensor, indptr: Tensor, seq_lens: Tensor, rows: int) -> Tensor:
    """FlashInfer's packed mask, uint8, and where each request's bytes begin, indptr [B + 1]; seq_lens [B] -> ancestor
    words [B * rows, W] int64. Raises ValueError on other shapes and dtypes and for more rows than the words hold."""
    _check_rows(rows)
    if packed.dim() != 1 or packed.dtype != torch.uint8 or len(indptr) != len(seq_lens) + 1:
        raise ValueError(
            f"expected a packed mask [bytes] uint8 and indptr [{len(seq_lens) + 1}], got {list(packed.shape)} "
            f"{packed.dtype} and {list(indptr.shape)}"
        )
    cells = _cells(seq_lens, rows)
    return _words(packed[cells // 8 + indptr[:-1, None, None]] >> (cells % 8) & 1)


def packed_from_ancestors(words: Tensor, seq_lens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Ancestor words [B * rows, W] int64, seq_lens [B] -> FlashInfer's packed mask, uint8, and indptr [B + 1] int32.
    Raises ValueError for other words and for more rows than the words hold."""
    bits = _bits(words, len(seq_lens), rows)
    sizes = rows * (seq_lens.long() + rows)
    indptr = torch.nn.functional.pad(((sizes + 7) // 8).cumsum(0), (1, 0))
    packed = torch.full((int(indptr[-1]),), 255, dtype=torch.uint8, device=words.device)
    packed[indptr[1:] - 1] >>= (-sizes % 8).to(torch.uint8)  # the bits after the last cell are 0
    # The prefix is ones, so only the tree's zeros are written. Cells of one byte are different bits: sums are unions.
    cells = _cells(seq_lens, rows)
    zeros = torch.where(bits, 0, 1 << cells % 8).to(torch.uint8)
    packed.index_add_(0, (cells // 8 + indptr[:-1, None, None]).flatten(), zeros.flatten(), alpha=-1)
    return packed, indptr.int()


def _mode(mode: int, rows: int) -> TreeMask:
    if mode not in list(TreeMask):
        raise ValueError(
            f"the mode must be one of {', '.join(f'{m.name} ({m.value})' for m in TreeMask)}, got {mode!r}"
        )
    if mode == TreeMask.QLEN_ONLY_BITPACKING and rows > 32:
        raise ValueError(f"QLEN_ONLY_BITPACKING holds at most 32 rows, got {rows}")
    _check_rows(rows)
    return TreeMask(mode)


def _check_rows(rows: int) -> None:
    if not 1 <= rows <= 64 * MAX_WORDS:
        raise ValueError(f"a verify pass has 1 to {64 * MAX_WORDS} rows, got {rows}")


def _packed_dtype(rows: int) -> torch.dtype:
    return torch.uint8 if rows <= 8 else torch.uint16 if rows <= 16 else torch.uint32


def _cells(seq_lens: Tensor, rows: int) -> Tensor:
    """Where the rows' part of each request's FULL_MASK is, counted from the request's first cell: [B, N, N] int64."""
    prefix, row = seq_lens.long()[:, None, None], torch.arange(rows, dtype=torch.int64, device=seq_lens.device)
    return row[:, None] * (prefix + rows) + prefix + row


def _words(bits: Tensor) -> Tensor:
    """[B, N, N], 0 or 1 -> [B * N, W] int64."""
    rows = bits.shape[1]
    wide = torch.nn.functional.pad(bits.long(), (0, -rows % 64)).view(len(bits) * rows, -(-rows // 64), 64)
    shifts = torch.arange(64, dtype=torch.int64, device=bits.device)
    return (wide << shifts).sum(-1)  # bit 63 is the sign; the sum wraps to it


def _bits(words: Tensor, B: int, rows: int) -> Tensor:
    """[B * N, W] int64 -> bool [B, N, N]."""
    _check_rows(rows)
    shape = (B * rows, -(-rows // 64))
    if words.shape != shape or words.dtype != torch.int64:
        raise ValueError(f"expected ancestor words {list(shape)} int64, got {list(words.shape)} {words.dtype}")
    column = torch.arange(rows, dtype=torch.int64, device=words.device)
    return (words[:, column // 64] >> column % 64 & 1).bool().view(B, rows, rows)


# --- K/V


def paged(pool: Tensor, page_size: int = 1) -> Tensor:
    """One layer's keys or values in SGLang's pool, [slots, heads, D] -> [slots / page_size, page_size, heads, D], as
    `tree_attention` takes them: a view of the same memory. Raises ValueError if the pool is no whole number of pages.
    """
    if pool.dim() != 3 or page_size < 1 or len(pool) % page_size:
        raise ValueError(f"expected a pool [slots, heads, D] in pages of {page_size} slots, got {list(pool.shape)}")
    return pool.unflatten(0, (len(pool) // page_size, page_size))


def table_from_requests(
    req_to_token: Tensor, req_pool_indices: Tensor, page_size: int = 1, max_len: int | None = None
) -> Tensor:
    """req_to_token [requests, context], the slot of each token; req_pool_indices [B], the batch's rows of it -> block
    table [B, P] int32, P = ceil(max_len / page_size).

    max_len bounds the lengths, drafts included: a smaller one saves scratch memory. None: the whole context. SGLang
    gives out whole pages, so a page's first slot names it. Entries after a request's end are not read.
    """
    return req_to_token[req_pool_indices, :max_len:page_size].div(page_size, rounding_mode="floor").int()


def table_from_indices(kv_indptr: Tensor, kv_indices: Tensor, max_len: int, page_size: int = 1) -> Tensor:
    """kv_indices, the slot of each token of all requests, and kv_indptr [B + 1], where each request's slots begin ->
    block table [B, P] int32, P = ceil(max_len / page_size). The indices must include the drafts' slots. No request may
    be empty or have more than max_len tokens; entries after its end repeat its last page."""
    place = kv_indptr[:-1, None] + torch.arange(0, max_len, page_size, dtype=torch.int64, device=kv_indptr.device)
    return kv_indices[place.minimum(kv_indptr[1:, None] - 1)].div(page_size, rounding_mode="floor").int()


def verify_lengths(seq_lens: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """seq_lens [B], without the `rows` rows of the verify pass -> kv_len [B], window [B], cu_rows [B + 1], int32."""
    window = torch.full_like(seq_lens, rows, dtype=torch.int32)
    starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32, device=seq_lens.device) * rows
    return (seq_lens + rows).int(), window, starts


# --- token maps


def read_token_map(path: str | Path) -> Tensor:
    """The ids of a token map, `freq_*.pt`, most frequent first: [K] int64, `vocab_topk`'s token_ids. Raises ValueError
    if the file is missing or corrupt or repeats an id."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such token map")
    try:
        values = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # torch's message says how to load the file nevertheless
        raise ValueError(f"{path} was not read: it holds Python objects besides tensors, which can run code") from error
    except Exception as error:  # torch raises many types for a corrupt file
        raise ValueError(f"{path} cannot be read as a list of ids ({str(error).splitlines()[0]})") from error
    try:
        ids = values if isinstance(values, Tensor) else torch.from_numpy(np.asarray(values))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} is not a list of integers") from error
    if not ids.numel():
        raise ValueError(f"{path} ranks no ids")
    return distinct(ids, path)


def write_token_map(path: str | Path, ids: Tensor) -> None:
    """Write distinct ids [K] int64, most frequent first, as a token map for SGLang's --speculative-token-map. Raises
    ValueError unless the file's suffix is .pt."""
    path = Path(path)
    if path.suffix != ".pt":
        raise ValueError(f"a token map must have the suffix .pt, got {path.name}")
    torch.save(ids.tolist(), path)
