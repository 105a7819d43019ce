"""LoRA on context -> decision, with retrieved examples in the prompts or without (DRAFT's offline phase)."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import get_last_checkpoint

from examples.adr.index import Index
from examples.adr.prompts import encode, messages
from examples.adr.records import Record, counts

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IGNORED = -100  # a label that torch's cross entropy leaves out


@dataclass(frozen=True)
class Split:
    """Paths of the records. Whole repositories are held out, unless there is only one."""

    training: list[str]
    held_out: list[str]

    @classmethod
    def of(cls, index: Index, held_out: str, seed: int) -> "Split":
        """`held_out`: a repository, or the least share of the records. Training records that are like a held-out one
        are in neither. Raises ValueError for another name or share, or if nothing is left to train on."""
        sizes = counts(index.records)
        if held_out in sizes:
            kept = {r.path for r in index.records if r.repository == held_out}
        else:
            share = _share(held_out, sorted(sizes))
            groups = [[r.path for r in index.records if r.repository == name] for name in sorted(sizes)]
            if len(groups) == 1:
                groups = [[path] for path in groups[0]]
            random.Random(seed).shuffle(groups)
            kept = set()
            for group in groups[:-1]:
                if len(kept) >= share * len(index.records):
                    break
                kept |= set(group)
        alike = {other.path for r in index.records if r.path in kept for other in index.alike(r)}
        training = [r.path for r in index.records if r.path not in alike]
        if not training:
            raise ValueError(f"--held-out {held_out} leaves no record to train on")
        return cls(training, sorted(kept))


def _share(text: str, names: list[str]) -> float:
    try:
        share = float(text)
    except ValueError:
        raise ValueError(f"--held-out {text}: neither a share nor one of {', '.join(names)}") from None
    if not 0 < share < 1:
        raise ValueError(f"--held-out {text}: a share lies between 0 and 1")
    return share


@dataclass(frozen=True)
class Settings:
    examples: int = 0  # in each prompt; 0: plain fine-tuning
    epochs: int = 2
    rank: int = 16
    rate: float = 2e-4
    max_length: int = 1024  # tokens of a prompt and its decision
    batch: int = 4  # records per step
    held_out: str = "0.2"
    seed: int = 0


def rows(tokenizer: Any, index: Index, split: Split, s: Settings) -> list[dict[str, list[int]]]:
    """Token ids and labels of each training record. Its examples are training records other than itself and what is
    like it. If the row is too long, examples go first, then the end of the decision. Records whose context leaves no
    room for a decision are left out."""
    among, out = set(split.training), []
    for record in index.records:
        if record.path not in among:
            continue
        found = index.search(f"{record.title}\n{record.context}", s.examples, without=record, among=among)
        for count in range(len(found), -1, -1):
            row = _row(tokenizer, record, found[:count])
            if len(row["input_ids"]) <= s.max_length:
                break
        cut = {name: values[: s.max_length] for name, values in row.items()}
        if any(label != IGNORED for label in cut["labels"]):
            out.append(cut)
    return out


def _row(tokenizer: Any, record: Record, examples: list[Record]) -> dict[str, list[int]]:
    said = messages(record.context, examples, record.title)
    prompt = encode(tokenizer, said)
    text = tokenizer.apply_chat_template([*said, {"role": "assistant", "content": record.decision}], tokenize=False)
    whole = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if whole[: len(prompt)] != prompt:  # a template that treats its last turn differently, or a merge across the border
        whole = prompt + list(tokenizer(record.decision, add_special_tokens=False)["input_ids"])
        whole.append(tokenizer.eos_token_id)
    return {"input_ids": whole, "labels": [IGNORED] * len(prompt) + whole[len(prompt) :]}


class Told(TrainerCallback):
    """Calls `tell(steps, of all, loss)` after each step."""

    def __init__(self, tell: Callable[[int, int, float], None]):
        self.tell = tell

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.tell(state.global_step, state.max_steps, logs["loss"])


def finetune(
    index: Index,
    target: str,
    out: Path,
    s: Settings,
    tell: Callable[[int, int, float], None] = lambda step, steps, loss: None,
    save_steps: int = 10,
) -> Split:
    """Train and write a checkpoint folder with the adapters merged into the weights, and split.json. Until then the
    state is in `out`.part: an interrupted run goes on from there, with the same result. Raises ValueError if `out`
    exists, or if `out`.part belongs to other settings."""
    if out.exists():
        raise ValueError(f"{out} exists already")
    part, split = out.with_name(out.name + ".part"), Split.of(index, s.held_out, s.seed)
    job = {"target": target, **asdict(s), "training": split.training}
    if (part / "job.json").exists() and json.loads((part / "job.json").read_text()) != job:
        raise ValueError(f"{part} holds a run with other settings: repeat those, or remove it")
    try:
        tokenizer = AutoTokenizer.from_pretrained(target)
        data = rows(tokenizer, index, split, s)
        if not data:
            raise ValueError(f"no record fits in --max-length {s.max_length}")
        torch.manual_seed(s.seed)
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    except OSError as error:
        raise ValueError(f"{target}: {str(error).splitlines()[0]}") from None
    names = [name for name in LINEARS if any(key.endswith(name) for key, _ in model.named_modules())]
    tuned = get_peft_model(model, LoraConfig(r=s.rank, lora_alpha=2 * s.rank, target_modules=names))
    part.mkdir(parents=True, exist_ok=True)
    (part / "job.json").write_text(json.dumps(job))
    arguments = TrainingArguments(
        output_dir=str(part / "state"),
        num_train_epochs=s.epochs,
        learning_rate=s.rate,
        warmup_steps=5,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=s.batch,
        logging_steps=1,
        save_steps=save_steps,
        save_total_limit=1,
        seed=s.seed,
        data_seed=s.seed,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(tuned, arguments, _collated, data, callbacks=[Told(tell)])
    trainer.remove_callback(PrinterCallback)
    state = part / "state"
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(state)) if state.is_dir() else None)
    merged = part / "merged"
    shutil.rmtree(merged, ignore_errors=True)
    tuned.merge_and_unload().save_pretrained(merged)
    tokenizer.save_pretrained(merged)
    (merged / "split.json").write_text(json.dumps(asdict(split) | {"examples": s.examples}))
    merged.rename(out)
    shutil.rmtree(part)
    return split


def _collated(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    (row,) = batch
    return {name: torch.tensor([values]) for name, values in row.items()}
