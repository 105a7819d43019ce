"""Several processes, started by torchrun: tensor parallelism within a replica, and data-parallel replicas.

Every rank of a replica runs the same loop on the same text. The target's linears are split (split.py), with two
all-reduces per layer. The LM head's results are gathered: (logit, id) pairs for greedy decoding, logits for sampling.
All ranks choose tokens from the same gathered numbers, so they choose the same tokens. Rank 0 drafts, alone or with
others: the first `--draft-ranks` share a draft model by its `--draft-layout`. It broadcasts the draft once per round,
with each text's length and last token; ranks that disagree stop with an error. In rounds of static shape (option
`graphs`) every rank computes the same draft and nothing is broadcast.

NCCL on GPUs. CPUs of one machine exchange through memory that they share (cpu/communicator.py), the compiled layers
within their call; CPUs of several machines use gloo and no compiled layers. The order of addition of NCCL and gloo
depends on the message size, so their sums are not batch-invariant. `--reduce ordered`, and shared memory always, gather
and add in rank order instead, which makes chains bit-equal to plain decoding.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td
from torch import Tensor

from specker.cpu import communicator
from specker.cpu.communicator import Communicator, RankLost
from specker.fields import option
from specker.model.sampling import Draws
from specker.model.split import Part
from specker.options import Options
from specker.runtime.control.policy import Budget
from specker.torchrun import local_rank, rank, world_size

_all_gather = getattr(td, "all_gather_single", td.all_gather_into_tensor)  # the new name is from torch 2.13
TIMEOUT = 60.0  # seconds to wait for a rank of the replica
START = 1800.0  # until the warm-up ends: one rank alone may read a draft or compile kernels meanwhile
REPLICAS = 86400.0  # for another replica, whose prompts may take longer
SAMPLES = 64  # blocks of a file that its digest reads
BLOCK = 4096


@contextmanager
def answered(timeout: float) -> Iterator[None]:
    """Turn a collective's RuntimeError into RankLost. `timeout`: seconds, for the message."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RankLost):
            raise
        line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise RankLost(
            f"another process of this job ended, or did not answer within {timeout:g} s ({line.strip()[:120]})"
        ) from error


@dataclass(eq=False)
class Ranks:
    """The ranks of one replica, or those of them that draft, seen from this process."""

    part: Part
    group: Any  # their process group
    draft_ranks: int  # number of ranks that draft: ranks 0..draft_ranks-1
    drafting: "Ranks | None"  # of a replica: the ranks that draft; None on the other ranks
    ordered: bool  # whether sums are in rank order
    replica: int  # index of this replica, below `replicas`
    replicas: int
    device: torch.device
    timeout: float  # seconds to wait for a rank after the warm-up
    limit: float  # seconds to wait for a rank now
    communicator: Communicator | None = None  # if they are several, on CPUs of one machine

    @property
    def rank(self) -> int:
        return self.part.rank

    @property
    def size(self) -> int:
        return self.part.size

    @property
    def drafts(self) -> bool:
        return self.drafting is not None

    def warmed(self) -> None:
        """Wait only `timeout` seconds for a rank from now on: the warm-up has ended."""
        self.limit = self.timeout
        td.distributed_c10d._set_pg_timeout(timedelta(seconds=self.limit), self.group)
        if self.communicator is not None:
            self.communicator.limit(self.limit)
        if self.drafting is not None:
            self.drafting.timeout = self.timeout
            self.drafting.warmed()

    def wait(self, event: Any = None) -> None:
        """Wait for an event of the device; None: for all that this thread launched. A collective on a GPU waits for a
        rank that hangs, in a replayed graph for ever, so look at the event until a deadline. Raises RankLost."""
        if self.device.type != "cuda":
            return
        if event is None:
            event = torch.cuda.Event()
            event.record()
        end = time.monotonic() + self.limit
        while not event.query():
            if time.monotonic() > end:
                raise RankLost(f"another process of this job did not answer within {self.limit:g} s")
            time.sleep(0)  # other threads may run

    def sum(self, x: Tensor) -> Tensor:
        """Add the ranks' partial sums x [...]: in place, or into a new tensor in rank order if sums are `ordered`."""
        with answered(self.limit):
            if not self.ordered:
                td.all_reduce(x, group=self.group)
                return x
            each = self._gathered(x)
        total = each[0]
        for r in range(1, self.size):
            total = total + each[r]
        return total

    def join(self, x: Tensor) -> Tensor:
        """Concatenate every rank's x [T, n] along the columns: [T, size * n]."""
        with answered(self.limit):
            each = self._gathered(x)
        return each.transpose(0, 1).reshape(len(x), -1)

    def gather(self, x: Tensor) -> Tensor:
        """Gather x [...] from every rank: [size, ...]."""
        with answered(self.limit):
            return self._gathered(x)

    def first(self, x: Tensor) -> Tensor:
        """Broadcast rank 0's x to all ranks, in place."""
        if self.communicator is not None:
            return x.copy_(self._gathered(x)[0])
        with answered(self.limit):
            td.broadcast(x, group=self.group, group_src=0)
        return x

    def least(self, value: int) -> int:
        """The smallest of all ranks' values."""
        x = torch.tensor([value], dtype=torch.int64, device=self.device)
        with answered(self.limit):
            return min(self.numbers(self._gathered(x).flatten()))

    def numbers(self, x: Tensor) -> list[int]:
        """Integers [n] from the device. Raises RankLost if they depend on a rank that does not answer."""
        self.wait()
        found: list[int] = x.tolist()
        return found

    def budget(self, own: Budget, extra: int) -> Budget:
        """Rank 0's budget on all ranks: policies that measure time would decide differently on each rank. `extra`: the
        most numbers in `Budget.extra`."""
        other = own.beside or Budget(0, 0)
        numbers = [own.nodes, own.depth, own.exit, own.part, other.nodes, other.depth, other.part, len(own.extra)]
        message = torch.zeros(len(numbers) + extra, dtype=torch.int64, device="cpu")
        message[: len(numbers) + len(own.extra)] = torch.tensor([*numbers, *own.extra], dtype=torch.int64, device="cpu")
        nodes, depth, exit, part, *beside, count = (received := self.numbers(self.first(message.to(self.device))))[:8]
        other = Budget(beside[0], beside[1], part=beside[2])
        return Budget(nodes, depth, exit, part, tuple(received[8 : 8 + count]), other if other.nodes else None)

    def same(self, what: str, digest: bytes) -> None:
        """Raise ValueError unless all ranks pass the same digest. `what` names it in the error."""
        own = torch.frombuffer(bytearray(digest[:8]), dtype=torch.int64).to(self.device)
        digests = self.numbers(self.gather(own).flatten())
        if len(set(digests)) > 1:
            other = next(r for r, value in enumerate(digests) if value != digests[0])
            raise ValueError(f"rank {other} of the job has another {what} than rank 0: all must load the same files")

    def _gathered(self, x: Tensor) -> Tensor:
        """Gather x [...] from every rank: [size, ...]."""
        x = x.contiguous()
        out = x.new_empty(self.size, *x.shape)
        if self.communicator is not None:
            self.communicator.gather(x, out)
        else:
            _all_gather(out.view(-1), x.view(-1), group=self.group)
        return out

    def draw(self, draws: Draws, logits: Tensor, positions: Tensor, vocab: int) -> Tensor:
        """The token after each row [T] int64, from this rank's columns of the logits [T, n] at `positions` [T]: sampled
        from the gathered logits, or greedily the largest logit, ties to the lowest id."""
        if draws.kind != "greedy":
            return draws.tokens(self.whole(logits, vocab), positions)
        own, first = draws.tokens(logits, positions).unsqueeze(-1), self.rank * -(-vocab // self.size)
        pair = torch.cat((logits.gather(1, own).double(), (own + first).double()), 1)  # exact
        value, ids = self.gather(pair).permute(2, 1, 0)  # [T, ranks] each
        return torch.where(value == value.amax(-1, keepdim=True), ids, vocab - 1).amin(-1).long()

    def whole(self, logits: Tensor, vocab: int) -> Tensor:
        """Gather all ranks' columns of the logits [T, n] -> [T, vocab]."""
        each = -(-vocab // self.size)
        if logits.shape[1] < each:  # the last rank has fewer ids
            logits = torch.nn.functional.pad(logits, (0, each - logits.shape[1]), value=float("-inf"))
        return self.join(logits)[:, :vocab]


def own_device(device: torch.device) -> torch.device:
    """`device`, with the number of a GPU: by default the process's own if the job has several processes, otherwise the
    thread's current one. Another thread may have another current one."""
    if str(device) != "cuda":
        return device
    alone = world_size() == 1
    return torch.device("cuda", torch.cuda.current_device() if alone else local_rank())


def agree(about: str, own: Mapping[str, Any]) -> None:
    """Raise ValueError, in every process of the job, if one of them has other settings. `about`: what they are about.
    `own`: this process's, by the names of their options."""
    digests = {name: hashlib.sha256(repr(value).encode()).hexdigest() for name, value in own.items()}
    store, key = td.distributed_c10d._get_default_store(), f"specker/{about}/{td.get_rank()}"
    with answered(START):
        count = store.add(key, 1)  # an engine that is loaded later has keys of its own
        store.set(f"{key}/{count}", json.dumps(digests))
        every = [json.loads(store.get(f"specker/{about}/{r}/{count}")) for r in range(td.get_world_size())]
        td.barrier()  # the store ends with its process, and others may still read
    for r, other in enumerate(every):
        if differing := [name for name, digest in every[0].items() if other.get(name, digest) != digest]:
            if "strategy" in differing:  # other settings follow from it
                differing = ["strategy"]
            raise ValueError(
                f"rank {r} of the job has another {' and another '.join(map(option, differing))} than rank 0: start "
                "all ranks with the same settings"
            )


def settings(options: Options) -> dict[str, Any]:
    """All options by their names, those of the strategies too."""
    found = {f.name: getattr(options, f.name) for f in fields(options) if f.name != "departures"}
    for source in found.pop("sources"):  # `strategy` names them
        for own in (source.options, source.trim):
            found |= {} if own is None else {f.name: getattr(own, f.name) for f in fields(own)}
    return found


def join(options: Options, device: torch.device, dtype: object = None) -> Ranks | None:
    """Join the job's processes and return this one's `Ranks`; None for a single process. Raises ValueError if --tp,
    --dp, the options about drafts and the number of processes do not match, or the processes have different settings,
    RankLost if another process does not answer."""
    world, dp = world_size(), options.dp
    tp = options.tp or max(world // dp, 1)
    if tp * dp != world:
        raise ValueError(
            f"{option('tp', tp)} times {option('dp', dp)} is {tp * dp}, but this job has {world} "
            f"process{'es' * (world > 1)}: start it with torchrun --nproc-per-node {tp * dp} -m specker.run ..."
        )
    if options.draft_ranks is not None and options.draft_ranks > tp:
        asked = option("draft_ranks", options.draft_ranks)
        raise ValueError(f"{asked} is more than the {tp} ranks of {option('tp')}")
    draft_ranks = options.draft_ranks or (1 if options.layout == "replicated" else tp)
    if draft_ranks == 1 and options.draft_layout not in (None, "replicated"):
        asked = option("draft_layout", options.draft_layout)
        raise ValueError(f"{asked} needs several ranks that draft ({option('tp')}, {option('draft_ranks')})")
    if world == 1:
        return None
    if device.type == "cuda":
        torch.cuda.set_device(device)  # for NCCL
    if not td.is_initialized():
        # Else its watchdog ends the process when a rank is lost, with a traceback, before `Ranks.wait` can say so.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        with answered(START):
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            td.init_process_group(backend, timeout=timedelta(seconds=START))
    agree("options", settings(options) | {"device": device.type, "dtype": dtype})
    replica, rank = divmod(td.get_rank(), tp)
    with answered(START):
        if dp > 1:
            td.distributed_c10d._set_pg_timeout(timedelta(seconds=REPLICAS))
        group, drafters = (_group(dp, tp, count) for count in (tp, draft_ranks))
        memory = _communicator(group, device)
        beside = memory if draft_ranks == tp else _communicator(drafters, device)
    ordered = options.reduce == "ordered" or memory is not None
    part, limits = Part(rank, tp), (TIMEOUT, START)
    ranks = Ranks(part, group, draft_ranks, None, ordered, replica, dp, device, *limits, memory)
    if rank < draft_ranks:
        ranks.drafting = replace(ranks, part=Part(rank, draft_ranks), group=drafters, communicator=beside)
    return ranks


def _group(dp: int, tp: int, count: int) -> Any:
    """The group of the first `count` ranks of this process's replica; None if the process is none of them."""
    own = None
    for replica in range(dp):  # every process makes every group
        members = [replica * tp + rank for rank in range(count)]
        group = td.new_group(members, timeout=timedelta(seconds=START))
        own = group if td.get_rank() in members else own
    return own


def _communicator(group: Any, device: torch.device) -> Communicator | None:
    """Shared memory for the ranks of a group. None outside of it, for a group of one, on GPUs, and unless all of them
    are on one machine, with the compiled library."""
    if group is None or group.size() == 1 or device.type != "cpu":
        return None
    rank, size = group.rank(), group.size()
    path = [communicator.new_file(size) if rank == 0 else None]
    td.broadcast_object_list(path, group=group, group_src=0)
    own = communicator.opened(path[0], rank, size)
    joined = torch.tensor([own is not None], dtype=torch.int64, device="cpu")
    td.all_reduce(joined, td.ReduceOp.MIN, group=group)
    if rank == 0 and path[0] is not None:
        os.unlink(path[0])
    if own is None or not joined:
        return None
    own.limit(START)
    return own


def prints_errors() -> bool:
    """Whether this process prints its error: only the job's first process to fail does."""
    if world_size() == 1:
        return True
    if not td.is_initialized():
        return rank() == 0
    try:
        return td.distributed_c10d._get_default_store().add("specker/errors", 1) == 1
    except RuntimeError:  # the store ended with the process that owned it
        return True


def leave(code: int) -> int:
    """Leave the process group and return `code`. After success, wait for the other processes first."""
    if td.is_initialized():
        if code == 0:
            with answered(REPLICAS):
                td.barrier()
        elif "nccl" in td.get_backend_config():  # a collective that waits for a lost rank must end first
            td.distributed_c10d._abort_process_group()
            return code
        td.destroy_process_group()
    return code


def collect(ranks: Ranks, results: list[Any]) -> list[Any] | None:
    """Gather every replica's results on the job's rank 0, in the original order; None on the other ranks. Replica i
    decoded items i, i + replicas, and so on."""
    every: list[Any] | None = [None] * td.get_world_size() if td.get_rank() == 0 else None
    with answered(REPLICAS):
        td.gather_object(results if ranks.rank == 0 else None, every)
    if every is None:
        return None
    dealt = [part for part in every if part is not None]
    return [dealt[i % len(dealt)][i // len(dealt)] for i in range(sum(map(len, dealt)))]


def fingerprint(folder: Path) -> bytes:
    """A SHA-256 of a checkpoint's config and of the size and some blocks of every weights file. Reading all of 140 GB
    would take too long."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")]):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            step = max(BLOCK, -(-size // SAMPLES))
            for at in range(0, size, step):
                file.seek(at)
                digest.update(file.read(BLOCK))
    return digest.digest()
