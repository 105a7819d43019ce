"""Several processes, started by torchrun: a target split over the ranks of a replica, and replicas beside one another.

Every rank of a replica runs the same loop on the same text. The target's linears are split (parts.py): two reductions a
layer, and the LM head's results are gathered: (logit, id) pairs when greedy, logits when drawing. All ranks decide upon
the same gathered numbers, so they decide alike. Rank 0 drafts for all, or with others (EasySpec's groups are shared out
over the first `--draft-ranks`), and says the draft in one small broadcast a round, with the text's length and its last
token, so that ranks that have come apart end with a message. (Rounds of static shape, `--graphs on`, have every rank
draft the same, and no such word.)

NCCL on GPUs, gloo on CPUs. NCCL adds in an order that depends on the size, so a row's bits depend on its neighbours;
`--reduce ordered` gathers and adds in the order of ranks instead, and chains are bit-equal to plain decoding again.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td
from torch import Tensor

from specker.config import Options
from specker.flags import JobError
from specker.runtime.model.parts import Part
from specker.runtime.policy import Budget
from specker.runtime.sampling import Draws

_all_gather = getattr(td, "all_gather_single", td.all_gather_into_tensor)  # its name from torch 2.13 on
TIMEOUT = 60.0  # seconds that a rank may be waited for
SAMPLES = 64  # blocks of a file that its digest looks at
BLOCK = 4096


class RankLost(JobError):
    """A process of the job ended, or did not answer in time; one sentence."""


@contextmanager
def answered(timeout: float) -> Iterator[None]:
    """Collectives that fail because a peer is gone say so in a sentence."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RankLost):
            raise
        line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise RankLost(
            f"another process of this job ended, or did not answer within {timeout:g} s ({line.strip()[:120]})"
        ) from error


@dataclass(frozen=True)
class Ranks:
    """The ranks of one replica, as one of them sees them."""

    part: Part
    group: Any  # of the replica
    drafting: int  # the first ones, which draft
    drafters: Any  # their group; None on the others
    ordered: bool
    replica: int  # this one, of `replicas`
    replicas: int
    device: torch.device
    timeout: float

    @property
    def rank(self) -> int:
        return self.part.rank

    @property
    def size(self) -> int:
        return self.part.size

    @property
    def drafts(self) -> bool:
        return self.rank < self.drafting

    def sum(self, x: Tensor) -> Tensor:
        """The ranks' partial sums [...], added: in x's place, or in the order of ranks."""
        with answered(self.timeout):
            if not self.ordered:
                td.all_reduce(x, group=self.group)
                return x
            each = self._gathered(x, self.group, self.size)
        total = each[0]
        for r in range(1, self.size):
            total = total + each[r]
        return total

    def join(self, x: Tensor) -> Tensor:
        """[T, n] of every rank, side by side: [T, size * n]."""
        with answered(self.timeout):
            each = self._gathered(x, self.group, self.size)
        return each.transpose(0, 1).reshape(len(x), -1)

    def gather(self, x: Tensor) -> Tensor:
        """x of every drafting rank, [drafting, ...]."""
        with answered(self.timeout):
            return self._gathered(x, self.drafters, self.drafting)

    def first(self, x: Tensor) -> Tensor:
        """Rank 0's x, on all ranks, in its place."""
        with answered(self.timeout):
            td.broadcast(x, group=self.group, group_src=0)
        return x

    def least(self, value: int) -> int:
        """The smallest of all ranks' values."""
        x = torch.tensor([value], device=self.device)
        with answered(self.timeout):
            td.all_reduce(x, td.ReduceOp.MIN, group=self.group)
        return int(x)

    def budget(self, own: Budget, layers: int) -> Budget:
        """Rank 0's, of a policy that may want to hear of `layers` depths: it depends on the time."""
        said = [own.nodes, own.depth, own.exit, own.block, len(own.taps), *own.taps]
        message = torch.zeros(5 + layers, dtype=torch.int64)
        message[: len(said)] = torch.tensor(said)
        nodes, depth, exit, block, taps, *depths = self.first(message.to(self.device)).tolist()
        return Budget(nodes, depth, exit, tuple(depths[:taps]), block)

    def same(self, what: str, digest: bytes, drafters: bool = False) -> None:
        """Raise ValueError unless all ranks, or all that draft, have the same; `what` it is a digest of."""
        own = torch.frombuffer(bytearray(digest[:8]), dtype=torch.int64).to(self.device)
        with answered(self.timeout):
            which = (self.drafters, self.drafting) if drafters else (self.group, self.size)
            each = self._gathered(own, *which).flatten().tolist()
        if len(set(each)) > 1:
            other = next(r for r, value in enumerate(each) if value != each[0])
            raise ValueError(f"rank {other} of the job has another {what} than rank 0: all must load the same files")

    @staticmethod
    def _gathered(x: Tensor, group: Any, size: int) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(size, *x.shape)
        _all_gather(out.view(-1), x.view(-1), group=group)
        return out

    def draw(self, draws: Draws, logits: Tensor, positions: Tensor, vocab: int) -> Tensor:
        """The token after each row, each rank having a part of the logits [T, n]: with noise from the gathered logits,
        else the largest, of equals the lowest id."""
        if draws.kind != "greedy":
            return draws.tokens(self.whole(logits, vocab), positions)
        best = logits.max(-1)
        # A rank's columns are ascending ids, ranks are ascending too: of equals the first is the lowest.
        value = self.join(best.values.unsqueeze(-1))
        each = -(-vocab // self.size)
        ids = self.join((first_of_equals(logits, best.values) + self.rank * each).unsqueeze(-1))
        return ids.gather(1, first_of_equals(value, value.amax(-1)).unsqueeze(-1))[:, 0]

    def whole(self, logits: Tensor, vocab: int) -> Tensor:
        """The logits [T, vocab] of all ranks."""
        each = -(-vocab // self.size)
        if logits.shape[1] < each:  # the last rank has fewer ids
            logits = torch.nn.functional.pad(logits, (0, each - logits.shape[1]), value=float("-inf"))
        return self.join(logits)[:, :vocab]


def first_of_equals(x: Tensor, value: Tensor) -> Tensor:
    """The first column of x [T, n] that holds value [T]."""
    columns = torch.arange(x.shape[1], device=x.device)
    return torch.where(x == value.unsqueeze(-1), columns, x.shape[1]).amin(-1).clamp(max=x.shape[1] - 1)


def own_device(device: torch.device) -> torch.device:
    """A process's own GPU, where the job has several and none is named."""
    if str(device) == "cuda" and world_size() > 1:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return device


def world_size() -> int:
    """Processes of this job, as torchrun says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join(options: Options, device: torch.device, divides: bool = False, timeout: float = TIMEOUT) -> Ranks | None:
    """This process's place among the job's; None where there is one process. Joins the processes first. `divides`:
    whether the ranks of --tp divide a draft among them unless --draft-ranks says otherwise. Raises ValueError where the
    numbers of processes do not fit."""
    world, dp = world_size(), options.dp
    tp = options.tp or max(world // dp, 1)
    if tp * dp != world:
        raise ValueError(
            f"--tp {tp} times --dp {dp} is {tp * dp}, but this job has {world} process{'es' * (world > 1)}: start it "
            f"with torchrun --nproc-per-node {tp * dp} -m specker.run ..."
        )
    if options.draft_ranks is not None and options.draft_ranks > tp:
        raise ValueError(f"--draft-ranks {options.draft_ranks} is more than the {tp} ranks of --tp")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # where NCCL looks; events, streams and graphs are the current device's too
    if world == 1:
        return None
    if not td.is_initialized():
        with answered(timeout):
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            td.init_process_group(backend, timeout=timedelta(seconds=timeout))
    from torch.distributed.device_mesh import init_device_mesh

    with answered(timeout):
        mesh = init_device_mesh(device.type, (dp, tp), mesh_dim_names=("dp", "tp"))
        part = Part(mesh.get_local_rank("tp"), tp)
        drafting = options.draft_ranks or (tp if divides else 1)
        drafters = None
        for replica in range(dp):  # every process makes every group
            members = [replica * tp + r for r in range(drafting)]
            made = td.new_group(members, timeout=timedelta(seconds=timeout))
            if td.get_rank() in members:
                drafters = made
    ordered = options.reduce == "ordered"
    replica = mesh.get_local_rank("dp")
    return Ranks(part, mesh.get_group("tp"), drafting, drafters, ordered, replica, dp, device, timeout)


def speaks() -> bool:
    """Whether this process tells an error: of a job's processes the first that has one."""
    if world_size() == 1:
        return True
    if not td.is_initialized():
        return os.environ.get("RANK", "0") == "0"
    try:
        return td.distributed_c10d._get_default_store().add("specker/told", 1) == 1
    except RuntimeError:  # the store went with its owner
        return True


def leave(code: int) -> int:
    """The exit code, once the other processes need this one no more."""
    if td.is_initialized():
        if code == 0:
            with answered(TIMEOUT):
                td.barrier()
        td.destroy_process_group()
    return code


def collect(ranks: Ranks, results: list[Any]) -> list[Any] | None:
    """Every replica's results, in the order of what they were dealt (`ranks.replica` had every `replicas`-th): on the
    job's rank 0; None elsewhere."""
    every: list[Any] | None = [None] * td.get_world_size() if td.get_rank() == 0 else None
    with answered(ranks.timeout):
        td.gather_object(results if ranks.rank == 0 else None, every)
    if every is None:
        return None
    dealt = [part for part in every if part is not None]
    return [dealt[i % len(dealt)][i // len(dealt)] for i in range(sum(map(len, dealt)))]


def fingerprint(folder: Path) -> bytes:
    """Of a checkpoint: its config and, of every weights file, the size and some blocks. All of 140 GB is not read."""
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
